"""SAPO (Gao et al. 2025, https://arxiv.org/abs/2511.20347). The loss is -4 / t * sigmoid(t * (ratio - 1)) *
A, a soft gate in place of clipping. It is a little narrower (t = 1.05) where A is negative.

TRL:  loss_type=sapo, sapo_temperature_pos=1.0, sapo_temperature_neg=1.05
verl: policy_loss.loss_mode=sapo, tau_pos=1.0, tau_neg=1.05

Measured with seeds 0, 1 and 2: mean@4 rose from 0.264, 0.244 and 0.254 to 0.977, 0.979 and 0.980,
pass@4 from 0.672, 0.672 and 0.664 to 0.992, 1.000 and 1.000. docs/measured/methods.md says how.
"""
loss_type = "sapo"
loss_aggregation = "sequence_mean"
num_mini_batches = 4
