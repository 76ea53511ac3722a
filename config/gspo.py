"""GSPO (Zheng et al. 2025, https://arxiv.org/abs/2507.18071): one ratio a sequence, the geometric mean of
its tokens', clipped as in PPO within bounds that are some 700 times narrower.

TRL:  importance_sampling_level=sequence, loss_type=grpo, epsilon=3e-4, epsilon_high=4e-4
verl: policy_loss.loss_mode=gspo, loss_agg_mode=seq-mean-token-mean, clip_ratio_low=3e-4,
      clip_ratio_high=4e-4

Measured, seeds 0, 1, 2: mean@4 0.264, 0.244, 0.254 -> 0.979, 0.980, 0.971; pass@4 0.672, 0.672, 0.664 ->
1.000, 1.000, 0.992. README, Recipes, says how.
"""
loss_type = "gspo"
loss_aggregation = "sequence_mean"
epsilon = 3e-4
epsilon_high = 4e-4
updates_per_step = 4
