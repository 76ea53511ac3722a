"""GSPO (Zheng et al. 2025, https://arxiv.org/abs/2507.18071). Each sequence has one ratio, the geometric mean
of its tokens' ratios. It is clipped as in PPO, within bounds that are about 700 times narrower.

TRL:  importance_sampling_level=sequence, loss_type=grpo, epsilon=3e-4, epsilon_high=4e-4
verl: policy_loss.loss_mode=gspo, loss_agg_mode=seq-mean-token-mean, clip_ratio_low=3e-4,
      clip_ratio_high=4e-4 (verl limits the mean log ratio to 10, here each token's is limited to +-20)

Measured with seeds 0, 1 and 2: mean@4 rose from 0.264, 0.244 and 0.254 to 0.979, 0.980 and 0.971,
pass@4 from 0.672, 0.672 and 0.664 to 1.000, 1.000 and 0.992. docs/measured/methods.md says how.
"""
loss_type = "gspo"
loss_aggregation = "sequence_mean"
epsilon = 3e-4
epsilon_high = 4e-4
num_mini_batches = 4
