"""Dr. GRPO (Liu et al. 2025, https://arxiv.org/abs/2503.20783): A = r - mean, and every token weighs 1 /
the longest length allowed: neither a group's spread nor a completion's length changes what a token counts.

TRL:  scale_rewards=none, loss_type=dr_grpo
verl: adv_estimator=grpo, norm_adv_by_std_in_grpo=False, loss_agg_mode=seq-mean-token-sum-norm

Measured, seeds 0, 1, 2: mean@4 0.264, 0.244, 0.254 -> 0.971, 0.973, 0.965; pass@4 0.672, 0.672, 0.664 ->
1.000, 1.000, 1.000. README, Recipes, says how.
"""
advantage = "dr_grpo"
loss_aggregation = "constant_length"
