"""GRPO as in its paper (Shao et al. 2024, https://arxiv.org/abs/2402.03300, 4.1): A = (r - mean) / std of
the group, every sequence weighs alike, and a KL to the initial model (k3) is part of the loss. One update a
rollout.

TRL:  loss_type=grpo, beta=0.04
verl: adv_estimator=grpo, loss_agg_mode=seq-mean-token-mean, use_kl_loss=True, kl_loss_coef=0.04,
      kl_loss_type=low_var_kl

Not measured yet.
"""
loss_aggregation = "sequence_mean"
kl_coef = 0.04
kl_estimator = "k3"
