"""How many squares of a picture are red, blue or green: images in prompts (docs/images.md). The tiny model
that comes with the repository sees the picture in 16 tokens, and mostly guesses at first.

    torchrun train_grpo.py config/tasks/squares.py
"""
model = "tiny_squares"
task = "squares"
images = "trained"
max_prompt_length = 64
max_completion_length = 4
learning_rate = 2e-4
lr_decay = "constant"
max_steps = 100
eval_interval = 25
