"""KL-Cov (Cui et al. 2025, https://arxiv.org/abs/2505.22617, section 4). Nothing is clipped. The tokens with
the largest covariance between logprob and advantage get the penalty |logp - old_logp|.

TRL:  does not have it
verl: policy_loss.loss_mode=kl_cov, kl_cov_ratio=2e-3, ppo_kl_coef=1

Measured with seeds 0, 1 and 2: mean@4 rose from 0.264, 0.244 and 0.254 to 0.977, 0.982 and 0.975,
pass@4 from 0.672, 0.672 and 0.664 to 1.000, 1.000 and 1.000. docs/recipes.md says how.
"""
loss_type = "kl_cov"
cov_share = 2e-3
updates_per_step = 4
