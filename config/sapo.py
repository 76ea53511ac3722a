"""SAPO (Gao et al. 2025, https://arxiv.org/abs/2511.20347): -4 / t * sigmoid(t * (ratio - 1)) * A, a soft
gate in place of clipping, a little narrower (t = 1.05) where A is negative.

TRL:  loss_type=sapo, sapo_temperature_pos=1.0, sapo_temperature_neg=1.05
verl: policy_loss.loss_mode=sapo, tau_pos=1.0, tau_neg=1.05

Not measured yet.
"""
loss_type = "sapo"
loss_aggregation = "sequence_mean"
updates_per_step = 4
