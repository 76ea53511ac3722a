"""LUSPO (Liu et al. 2026, https://arxiv.org/abs/2602.05261) multiplies GSPO's loss of a sequence by its
length, so that the tokens of long and of short sequences have the same weight. The bounds are GSPO's.

TRL:  importance_sampling_level=sequence, loss_type=luspo, epsilon=3e-4, epsilon_high=4e-4
verl: none
"""
loss_type = "gspo"
loss_aggregation = "sequence_sum"
epsilon = 3e-4
epsilon_high = 4e-4
num_mini_batches = 4
