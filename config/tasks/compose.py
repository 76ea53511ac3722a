"""A chain of operations on four digits, a task on which ability grows and methods differ
(docs/measured/methods.md).

The model has read every operation, carried out in a random order. It knows the steps, and GRPO has to find
the plan: all operations of the prompt, in its order. Chains of two to four operations are trained, chains of
five are only evaluated, and the evaluation reports each length by itself.

    python train_grpo.py config/tasks/compose.py                  # 90 seconds on one core
    python -m bench.methods                                       # a table of methods on this task
"""
model = "tiny_compose"
task = "compose"
engine = "hf"
eval_prompts = 240
max_completion_length = 56
learning_rate = 5e-4
max_steps = 80
num_mini_batches = 4
eval_interval = 0
save_interval = 0
