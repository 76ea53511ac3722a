"""Lite PPO (Liu et al. 2025, https://arxiv.org/abs/2508.08221): A = (r - mean of the group) / std of the
batch, every token alike.

TRL:  scale_rewards=batch, loss_type=dapo
verl: -

Not measured yet.
"""
advantage = "grpo_batch"
