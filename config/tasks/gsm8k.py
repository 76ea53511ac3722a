"""Grade-school math (GSM8K, Cobbe et al. 2021, https://arxiv.org/abs/2110.14168) with a model of 0.6 B
parameters on one GPU.

It was not measured yet. It is a starting point, with the learning rate and lengths that are usual for it.
"""
model = "Qwen/Qwen3-0.6B"
task = "gsm8k"
train_prompts = 0
eval_prompts = 256
max_prompt_length = 512
max_completion_length = 1024
prompts_per_step = 64
learning_rate = 1e-6
max_steps = 200
token_budget = 16384
gradient_checkpointing = True
