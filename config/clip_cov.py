"""Clip-Cov (Cui et al. 2025, https://arxiv.org/abs/2505.22617, 4): PPO's clipping, and a few tokens of
large covariance between logprob and advantage, chosen by chance, without gradient, so that entropy lasts.
The paper's share is 2e-4; a step has some 5,000 tokens here, which is why this one is larger.

TRL:  -
verl: policy_loss.loss_mode=clip_cov, clip_cov_ratio=2e-4, clip_cov_lb=1, clip_cov_ub=5

Not measured yet.
"""
loss_type = "clip_cov"
cov_share = 2e-3
updates_per_step = 4
