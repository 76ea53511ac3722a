"""Algebra with larger numbers, signs and another layer. When the base model shows its work it is right about half the
time here, so GRPO has to improve the work and not only bring it out.

Measured: @@HARDER@@
"""
difficulty = 2
max_completion_length = 96
max_steps = 150
learning_rate = 1e-4
