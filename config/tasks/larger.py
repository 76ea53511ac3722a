r"""GRPO with a base model of 27 M parameters, which takes a GPU to make, on problems that it knows. It was
not measured yet.

    python -m tiny.pretrain --difficulty=3 --train_prompts=50000 --harder_prompts=50000 --layers=8 \
        --hidden_size=512 --intermediate_size=1536 --steps=4000 --batch_size=256 --out=out/larger
    torchrun train_grpo.py config/tasks/larger.py
"""
model = "out/larger"
task = "algebra:3"
max_prompt_length = 96
max_completion_length = 256
prompts_per_step = 64
max_steps = 100
learning_rate = 3e-5
token_budget = 32768
eval_prompts = 256
eval_samples = 8
