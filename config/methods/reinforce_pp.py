"""REINFORCE++ (Hu et al. 2025, https://arxiv.org/abs/2501.03262). Each prompt has one completion, and the
only baseline is the mean of the batch: A = r - KL, whitened over all tokens of the batch, with PPO's
clipping. In the paper the KL of a token and of all later tokens is taken off the token's reward; here the KL
of the whole completion is.

TRL:  RLOOTrainer with normalize_advantages=True is close
verl: adv_estimator=reinforce_plus_plus, rollout.n=1, use_kl_in_reward=True, kl_penalty=kl

Measured with seeds 0, 1 and 2: mean@4 rose from 0.264, 0.244 and 0.254 to 0.979, 0.979 and 0.986,
pass@4 from 0.672, 0.672 and 0.664 to 0.992, 1.000 and 1.000. docs/measured/methods.md says how.
"""
advantage = "reinforce++"
num_generations = 1
prompts_per_step = 256
kl_coef = 0.01
kl_estimator = "k1_reward"
num_mini_batches = 4
