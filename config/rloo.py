"""RLOO (Ahmadian et al. 2024, https://arxiv.org/abs/2402.14740): A = r - mean of the other completions of
the prompt, the KL to the initial model taken off the reward, and a sequence's gradient the sum of its
tokens'.

TRL:  RLOOTrainer, beta=0.03
verl: adv_estimator=rloo, loss_agg_mode=seq-mean-token-sum, use_kl_in_reward=True, kl_penalty=kl,
      kl_ctrl.kl_coef=0.03

Measured, seeds 0, 1, 2: mean@4 0.264, 0.244, 0.254 -> 0.973, 0.975, 0.965; pass@4 0.672, 0.672, 0.664 ->
1.000, 1.000, 1.000. README, Recipes, says how.
"""
advantage = "rloo"
loss_aggregation = "sequence_sum"
kl_coef = 0.03
kl_in = "reward"
kl_estimator = "k1"
