"""GMPO (Zhao et al. 2025, https://arxiv.org/abs/2507.20673). The loss is -A times the geometric mean of a
sequence's clipped ratios, where GRPO takes the arithmetic mean. The bounds are e^-0.4 and e^0.4.

TRL:  trl.experimental.gmpo, epsilon=0.4 (there it bounds the logarithm)
verl: policy_loss.loss_mode=geo_mean, clip_ratio_low=0.4, clip_ratio_high=0.4 (they bound the logarithm)

Measured with seeds 0, 1 and 2: mean@4 rose from 0.264, 0.244 and 0.254 to 0.980, 0.980 and 0.982,
pass@4 from 0.672, 0.672 and 0.664 to 0.992, 1.000 and 1.000. docs/measured/methods.md says how.
"""
loss_type = "gmpo"
loss_aggregation = "sequence_mean"
epsilon = 0.33
epsilon_high = 0.49
num_mini_batches = 4
