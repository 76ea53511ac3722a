"""Algebra with larger numbers, signs and another layer. When the base model shows its work, it is right about
half of the time. GRPO therefore has to improve the work as well as bring it out.

Measured on 2 cores with seed 0: held-out mean@4 rose from 0.135 to 0.625, pass@4 from 0.42 to 0.81, in 9 min
53 s on a machine that had other work to do.
"""
task = "algebra:2"
max_completion_length = 96
max_steps = 150
learning_rate = 1e-4
