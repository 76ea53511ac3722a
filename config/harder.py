"""Algebra with larger numbers, signs and another layer. When the base model shows its work it is right about
half the time here, so GRPO has to improve the work and not only bring it out.

Measured on 2 cores, seed 0: held-out mean@4 0.135 -> 0.625, pass@4 0.42 -> 0.81, in 9 min 53 s on a machine
that had other work to do.
"""
difficulty = 2
max_completion_length = 96
max_steps = 150
learning_rate = 1e-4
