"""On-policy distillation (Agarwal et al. 2023, https://arxiv.org/abs/2306.13649; Lu et al. 2025,
https://thinkingmachines.ai/blog/on-policy-distillation): the student samples, and the advantage of each of
its tokens is the teacher's logprob minus its own, so that it minimises KL(student || teacher). No score is
used.

    torchrun train_grpo.py config/methods/distill.py --reference_model=TEACHER

Measured with seeds 0 and 1, a teacher of mean@4 0.977: mean@4 rose from 0.264 and 0.244 to 0.980 and 0.980,
and to 0.95 with 5,632 and 5,120 samples, where GRPO needs 8,192 and 6,656. docs/measured/methods.md says how.

TRL:  GKDTrainer with lmbda=1 and beta=1 is close (it takes the whole distribution of the teacher)
verl: does not have it
"""
advantage = "none"
kl_coef = 1.0
kl_estimator = "k1_advantage"
num_generations = 1
prompts_per_step = 256
