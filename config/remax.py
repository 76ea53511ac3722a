"""ReMax (Li et al. 2023, https://arxiv.org/abs/2310.10505). Each prompt has one completion, and A = r - the
reward of a greedy completion, which is generated as well. The KL is taken off the reward.

TRL:  does not have it
verl: adv_estimator=remax, rollout.n=1, loss_agg_mode=seq-mean-token-sum, use_kl_in_reward=True,
      kl_penalty=kl

Measured with seeds 0, 1 and 2: mean@4 rose from 0.264, 0.244 and 0.254 to 0.980, 0.975 and 0.967,
pass@4 from 0.672, 0.672 and 0.664 to 0.992, 0.992 and 1.000. docs/recipes.md says how.
"""
advantage = "remax"
num_generations = 1
prompts_per_step = 256
loss_aggregation = "sequence_sum"
kl_coef = 0.01
kl_in = "reward"
kl_estimator = "k1"
