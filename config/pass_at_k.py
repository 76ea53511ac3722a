"""Pass@k training (Chen et al. 2025, https://arxiv.org/abs/2508.10751): the reward of a draw of k
completions is that of its best; a completion's advantage is averaged over all draws that it is in.

TRL:  -
verl: adv_estimator=grpo_passk is another method (https://arxiv.org/abs/2503.19595)

Not measured yet.
"""
advantage = "pass_at_k"
pass_k = 4
