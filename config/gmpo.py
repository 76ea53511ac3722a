"""GMPO (Zhao et al. 2025, https://arxiv.org/abs/2507.20673): the geometric mean of the clipped ratios of a
sequence, in place of GRPO's arithmetic one; bounds e^-0.4 to e^0.4.

TRL:  trl.experimental.gmpo, epsilon=0.4 (there of the logarithm)
verl: policy_loss.loss_mode=geo_mean, clip_ratio_low=0.4, clip_ratio_high=0.4 (of the logarithm, too)

Not measured yet.
"""
loss_type = "gmpo"
loss_aggregation = "sequence_mean"
epsilon = 0.33
epsilon_high = 0.49
updates_per_step = 4
