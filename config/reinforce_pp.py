"""REINFORCE++ (Hu et al. 2025, https://arxiv.org/abs/2501.03262): one completion a prompt and no baseline
but the mean of the batch: A = r - KL, whitened over all tokens of the batch, with PPO's clipping. In the
paper a token has the KL of itself and later tokens taken off, here that of the whole completion.

TRL:  RLOOTrainer, normalize_advantages=True is close
verl: adv_estimator=reinforce_plus_plus, rollout.n=1, use_kl_in_reward=True, kl_penalty=kl

Measured, seeds 0, 1, 2: mean@4 0.264, 0.244, 0.254 -> 0.979, 0.979, 0.986; pass@4 0.672, 0.672, 0.664 ->
0.992, 1.000, 1.000. README, Recipes, says how.
"""
advantage = "reinforce++"
num_generations = 1
prompts_per_step = 256
kl_coef = 0.01
kl_in = "reward"
kl_estimator = "k1"
updates_per_step = 4
