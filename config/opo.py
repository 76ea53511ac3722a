"""OPO (Hao et al. 2025, https://arxiv.org/abs/2505.23585): A = r - the group's mean weighted by length, the
baseline of least variance; strictly on-policy, one update a rollout, no KL, no entropy bonus.

TRL:  -
verl: adv_estimator=opo

Not measured yet.
"""
advantage = "opo"
updates_per_step = 1
