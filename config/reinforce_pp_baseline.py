"""REINFORCE++ with baseline (Hu et al. 2025, https://arxiv.org/abs/2501.03262): A = r - mean of the group,
whitened over all tokens of the batch; the KL in the loss, by k2.

TRL:  scale_rewards=batch is close (by sequence, and not centred again)
verl: adv_estimator=reinforce_plus_plus_baseline, use_kl_loss=True, kl_loss_type=k2

Measured, seeds 0, 1, 2: mean@4 0.264, 0.244, 0.254 -> 0.980, 0.984, 0.975; pass@4 0.672, 0.672, 0.664 ->
0.992, 1.000, 0.992. README, Recipes, says how.
"""
advantage = "reinforce++_baseline"
kl_coef = 0.01
kl_estimator = "k2"
updates_per_step = 4
