"""CISPO (MiniMax-M1, 2025, https://arxiv.org/abs/2506.13585, 3.1): -stop_gradient(min(ratio, 1 +
epsilon_high)) * A * logp: a ratio beyond the bound is cut down, and the token keeps its gradient. The paper
tunes the bound; this is one that TRL's documentation names.

TRL:  loss_type=cispo, epsilon_high=5.0
verl: policy_loss.loss_mode=cispo, clip_ratio_high

Not measured yet.
"""
loss_type = "cispo"
epsilon_high = 5.0
updates_per_step = 4
