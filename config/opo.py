"""OPO (Hao et al. 2025, https://arxiv.org/abs/2505.23585): A = r - the group's mean weighted by length, the
baseline of least variance; strictly on-policy, one update a rollout, no KL, no entropy bonus.

TRL:  -
verl: adv_estimator=opo

Measured, seeds 0, 1, 2: mean@4 0.264, 0.244, 0.254 -> 0.967, 0.971, 0.955; pass@4 0.672, 0.672, 0.664 ->
0.992, 1.000, 1.000. README, Recipes, says how.
"""
advantage = "opo"
updates_per_step = 1
