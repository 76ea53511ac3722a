"""CISPO (MiniMax-M1, 2025, https://arxiv.org/abs/2506.13585, 3.1): -stop_gradient(min(ratio, 1 +
epsilon_high)) * A * logp: a ratio beyond the bound is cut down, and the token keeps its gradient. The paper
names no bound; 5 is that of TRL's ScaleRL (https://arxiv.org/abs/2510.13786).

TRL:  loss_type=cispo, epsilon_high=5.0 (there the bound itself)
verl: policy_loss.loss_mode=cispo, clip_ratio_high=4.0, clip_ratio_low=1.0 (it has a lower bound, too)

Measured, seeds 0, 1, 2: mean@4 0.264, 0.244, 0.254 -> 0.979, 0.980, 0.979; pass@4 0.672, 0.672, 0.664 ->
0.992, 1.000, 1.000. README, Recipes, says how.
"""
loss_type = "cispo"
epsilon_high = 4.0
updates_per_step = 4
