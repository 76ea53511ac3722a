"""SAPO (Gao et al. 2025, https://arxiv.org/abs/2511.20347): -4 / t * sigmoid(t * (ratio - 1)) * A, a soft
gate in place of clipping, a little narrower (t = 1.05) where A is negative.

TRL:  loss_type=sapo, sapo_temperature_pos=1.0, sapo_temperature_neg=1.05
verl: policy_loss.loss_mode=sapo, tau_pos=1.0, tau_neg=1.05

Measured, seeds 0, 1, 2: mean@4 0.264, 0.244, 0.254 -> 0.977, 0.979, 0.980; pass@4 0.672, 0.672, 0.664 ->
0.992, 1.000, 1.000. README, Recipes, says how.
"""
loss_type = "sapo"
loss_aggregation = "sequence_mean"
updates_per_step = 4
