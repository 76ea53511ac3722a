"""Run it with train_dapo.py. GPG (Chu et al. 2025, https://arxiv.org/abs/2504.02546): the plain policy gradient -A * logp with A = r -
mean, no ratio, no KL; groups without a spread do not count in the mean, which is the paper's factor alpha.

TRL:  -
verl: adv_estimator=gpg, policy_loss.loss_mode=gpg (its factor counts rewards that are not 0)

Measured, seeds 0, 1, 2: mean@4 0.264, 0.244, 0.254 -> 0.973, 0.975, 0.961; pass@4 0.672, 0.672, 0.664 ->
1.000, 1.000, 1.000. README, Recipes, says how.
"""
loss_type = "gpg"
advantage = "dr_grpo"
filter_groups = True
max_num_gen_batches = 1
overlong_buffer = 0
updates_per_step = 1
epsilon_high = 0.2
