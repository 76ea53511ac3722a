"""RLHF of a chat model of about 1 B parameters with a reward model: PPO as in Ouyang et al. 2022
(https://arxiv.org/abs/2203.02155), 3.5 and C. The reward of a token is -0.02 (log π - log π_ref), and that of
the last token has the score of the reward model as well. In TRL this is PPOTrainer, in verl
algorithm.adv_estimator=gae with a reward model.

    torchrun train_ppo.py config/methods/rlhf.py --model=MODEL --reward_model=REWARD_MODEL \
        --train_file=prompts.jsonl --eval_file=held_out.jsonl

As in the paper, the critic may start from the reward model (--critic_model), if both read the same tokens.
It was not measured.
"""
task = "file"
train_prompts = 0
reward = "none"
prompts_per_step = 256
max_prompt_length = 512
max_completion_length = 512
kl_coef = 0.02
value_clip = 0.2
lam = 0.95
num_epochs = 1
num_mini_batches = 4
critic_warmup_steps = 10
learning_rate = 1e-6
critic_learning_rate = 1e-5
max_steps = 500
token_budget = 16384
