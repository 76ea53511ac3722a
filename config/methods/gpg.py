"""GPG (Chu et al. 2025, https://arxiv.org/abs/2504.02546). Run it with train_dapo.py, which
`git apply recipes/dapo.diff` makes. The loss is the plain policy gradient -A * logp with A = r - mean,
without a ratio and without a KL term. Prompts whose completions all have the same score do not count in the
denominator, which is the paper's factor alpha.

TRL:  does not have it
verl: adv_estimator=gpg, policy_loss.loss_mode=gpg (its factor counts the rewards that are not 0)

Measured with seeds 0, 1 and 2: mean@4 rose from 0.264, 0.244 and 0.254 to 0.973, 0.975 and 0.961,
pass@4 from 0.672, 0.672 and 0.664 to 1.000, 1.000 and 1.000. docs/measured/methods.md says how.
"""
loss_type = "gpg"
advantage = "dr_grpo"
max_num_gen_batches = 1
overlong_buffer = 0
num_mini_batches = 1
epsilon_high = 0.2
