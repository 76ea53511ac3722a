"""Truncated importance sampling (Yao et al. 2025, https://fengyao.notion.site/off-policy-rl): a token's
loss times min(trainer's probability / engine's, C), where the engine computes otherwise than the trainer
(its kernels, bfloat16, quantisation).

TRL:  vllm_importance_sampling_mode=token_truncate, vllm_importance_sampling_clip_max=2.0
verl: rollout_correction.rollout_is=token, rollout_is_threshold=2.0

Measured, seeds 0, 1, 2: mean@4 0.264, 0.244, 0.254 -> 0.969, 0.971, 0.961; pass@4 0.672, 0.672, 0.664 ->
0.992, 1.000, 1.000. README, Recipes, says how.
"""
engine_correction = "token_truncate"
correction_high = 2.0
