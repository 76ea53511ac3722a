"""Algebra with larger numbers, signs and another layer. The base model works out about half of such problems right,
where it works at all, so there is more to learn than to show the work.

Measured: @@HARDER@@
"""
difficulty = 2
max_completion_length = 96
max_steps = 150
learning_rate = 1e-4
