"""Episodes with a tool: the model gets this arithmetic wrong in its head and can leave it to a calculator.
docs/measured/episodes.md has the results.

The model has seen the tool used in one problem out of five.
"""
model = "tiny_episodes"
task = "arithmetic"
environment = "environments/calculator.py:Calculator"
max_prompt_length = 96
max_completion_length = 192
max_steps = 20
learning_rate = 4e-4
