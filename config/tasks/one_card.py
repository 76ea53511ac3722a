"""One card of 24 GB trains adapters on GSM8K, with a base of 4 or 8 B parameters that waits in host memory.

    torchrun train_grpo.py config/tasks/one_card.py
    torchrun train_grpo.py config/tasks/one_card.py --model=Qwen/Qwen3-8B

It was not run on a GPU yet: docs/lora.md says what the forecast says of each.
"""
model = "Qwen/Qwen3-4B"
task = "gsm8k"
train_prompts = 0
eval_prompts = 256
max_prompt_length = 512
max_completion_length = 1024
prompts_per_step = 32
learning_rate = 1e-5
max_steps = 200
token_budget = 16384
gradient_checkpointing = True
lora_rank = 16
offload_base = True
vllm_gpu_memory_utilization = 0.85
