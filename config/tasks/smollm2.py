"""A model that people know learns a task that people know: SmolLM2-135M-Instruct adds two numbers.

    torchrun train_grpo.py config/tasks/smollm2.py
    torchrun train_grpo.py config/tasks/smollm2.py --model=out/smollm2    # from the package: bench/smollm2.py

A completion is right if the verifier of reasoning-gym gives it the full score. docs/measured/real_model.md
has the results, and a warm start after which the model learns differences as well.
"""
model = "HuggingFaceTB/SmolLM2-135M-Instruct"
task = "reasoning_gym:chain_sum,max_terms=2,max_digits=2"
reward = "tasks.reasoning_gym:full_marks"
train_prompts = 2048
eval_samples = 2
prompts_per_step = 12
max_prompt_length = 96
max_completion_length = 24
temperature = 0.7
learning_rate = 2e-5
skip_zero_advantage = True
max_steps = 120
eval_interval = 20
save_interval = 0
