"""OPO (Hao et al. 2025, https://arxiv.org/abs/2505.23585). A = r - the group's mean weighted by length, which
is the baseline of least variance. It is strictly on-policy: one update per rollout, no KL, no entropy bonus.

TRL:  does not have it
verl: adv_estimator=opo

Measured with seeds 0, 1 and 2: mean@4 rose from 0.264, 0.244 and 0.254 to 0.967, 0.971 and 0.955,
pass@4 from 0.672, 0.672 and 0.664 to 0.992, 1.000 and 1.000. docs/recipes.md says how.
"""
advantage = "opo"
updates_per_step = 1
