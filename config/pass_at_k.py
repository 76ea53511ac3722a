"""Pass@k training (Chen et al. 2025, https://arxiv.org/abs/2508.10751): the reward of a draw of k
completions is that of its best; a completion's advantage is averaged over all draws that it is in.

TRL:  -
verl: adv_estimator=grpo_passk is another method (https://arxiv.org/abs/2503.19595)

Measured, seeds 0, 1, 2: mean@4 0.264, 0.244, 0.254 -> 0.922, 0.924, 0.928; pass@4 0.672, 0.672, 0.664 ->
0.992, 1.000, 1.000. README, Recipes, says how.
"""
advantage = "pass_at_k"
pass_k = 4
