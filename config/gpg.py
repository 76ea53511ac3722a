"""GPG (Chu et al. 2025, https://arxiv.org/abs/2504.02546): the plain policy gradient -A * logp with A = r -
mean, no ratio, no KL; groups without a spread do not count in the mean, which is the paper's factor alpha.

TRL:  -
verl: adv_estimator=gpg, policy_loss.loss_mode=gpg (its factor counts rewards that are not 0)

Not measured yet.
"""
loss_type = "gpg"
advantage = "dr_grpo"
filter_groups = True
