"""KL-Cov (Cui et al. 2025, https://arxiv.org/abs/2505.22617, 4): no clipping, and |logp - old_logp| on the
tokens of the largest covariance between logprob and advantage.

TRL:  -
verl: policy_loss.loss_mode=kl_cov, kl_cov_ratio=2e-3, ppo_kl_coef=1

Measured, seeds 0, 1, 2: mean@4 0.264, 0.244, 0.254 -> 0.977, 0.982, 0.975; pass@4 0.672, 0.672, 0.664 ->
1.000, 1.000, 1.000. README, Recipes, says how.
"""
loss_type = "kl_cov"
cov_share = 2e-3
updates_per_step = 4
