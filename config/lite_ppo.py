"""Lite PPO (Liu et al. 2025, https://arxiv.org/abs/2508.08221): A = (r - mean of the group) / std of the
batch, every token alike.

TRL:  scale_rewards=batch, loss_type=dapo
verl: -

Measured, seeds 0, 1, 2: mean@4 0.264, 0.244, 0.254 -> 0.973, 0.973, 0.959; pass@4 0.672, 0.672, 0.664 ->
1.000, 1.000, 1.000. README, Recipes, says how.
"""
advantage = "grpo_batch"
