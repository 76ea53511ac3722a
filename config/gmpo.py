"""GMPO (Zhao et al. 2025, https://arxiv.org/abs/2507.20673): the geometric mean of the clipped ratios of a
sequence, in place of GRPO's arithmetic one; bounds e^-0.4 to e^0.4.

TRL:  trl.experimental.gmpo, epsilon=0.4 (there of the logarithm)
verl: policy_loss.loss_mode=geo_mean, clip_ratio_low=0.4, clip_ratio_high=0.4 (of the logarithm, too)

Measured, seeds 0, 1, 2: mean@4 0.264, 0.244, 0.254 -> 0.980, 0.980, 0.982; pass@4 0.672, 0.672, 0.664 ->
0.992, 1.000, 1.000. README, Recipes, says how.
"""
loss_type = "gmpo"
loss_aggregation = "sequence_mean"
epsilon = 0.33
epsilon_high = 0.49
updates_per_step = 4
