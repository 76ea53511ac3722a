"""Pass@k training (Chen et al. 2025, https://arxiv.org/abs/2508.10751): the reward of a draw of k
completions is that of its best; a completion's advantage is averaged over all draws that it is in.

TRL:  -
verl: adv_estimator=grpo_passk (another one: only a group's best has an advantage, best - second best)

Not measured yet.
"""
advantage = "pass_at_k"
pass_k = 4
