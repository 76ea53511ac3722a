"""ReMax (Li et al. 2023, https://arxiv.org/abs/2310.10505): one completion a prompt, A = r - the reward of
the greedy completion, which is generated beside it; the KL taken off the reward.

TRL:  -
verl: adv_estimator=remax, rollout.n=1, loss_agg_mode=seq-mean-token-sum, use_kl_in_reward=True,
      kl_penalty=kl

Not measured yet.
"""
advantage = "remax"
num_generations = 1
prompts_per_step = 256
loss_aggregation = "sequence_sum"
kl_coef = 0.01
kl_in = "reward"
kl_estimator = "k1"
