"""A game of several turns: the model has to find a number from 1 to 64 in six guesses, and is told higher or
lower. docs/measured/episodes.md has the results.

The model has seen games whose player talks before it plays, or guesses only near the middle of what is left.
In the held-out games the order of the sentences in the prompt is new, and GRPO has not met the numbers.
"""
model = "tiny_episodes"
task = "guess"
environment = "environments/guess_number.py:Guess"
train_prompts = 0
eval_prompts = 24
eval_samples = 16
max_turns = 6
max_prompt_length = 96
max_completion_length = 192
max_steps = 40
learning_rate = 4e-4
