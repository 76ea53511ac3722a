"""ReMax (Li et al. 2023, https://arxiv.org/abs/2310.10505): one completion a prompt, A = r - the reward of
the greedy completion, which is generated beside it; the KL taken off the reward.

TRL:  -
verl: adv_estimator=remax, rollout.n=1, loss_agg_mode=seq-mean-token-sum, use_kl_in_reward=True,
      kl_penalty=kl

Measured, seeds 0, 1, 2: mean@4 0.264, 0.244, 0.254 -> 0.980, 0.975, 0.967; pass@4 0.672, 0.672, 0.664 ->
0.992, 0.992, 1.000. README, Recipes, says how.
"""
advantage = "remax"
num_generations = 1
prompts_per_step = 256
loss_aggregation = "sequence_sum"
kl_coef = 0.01
kl_in = "reward"
kl_estimator = "k1"
