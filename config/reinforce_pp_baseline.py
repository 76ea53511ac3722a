"""REINFORCE++ with baseline (Hu et al. 2025, https://arxiv.org/abs/2501.03262): A = r - mean of the group,
whitened over all tokens of the batch; the KL in the loss, by k2.

TRL:  scale_rewards=batch is close (by sequence, and not centred again)
verl: adv_estimator=reinforce_plus_plus_baseline, use_kl_loss=True, kl_loss_type=k2

Not measured yet.
"""
advantage = "reinforce++_baseline"
kl_coef = 0.01
kl_estimator = "k2"
updates_per_step = 4
