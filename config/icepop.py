"""IcePop (Ling Team 2025, https://ringtech.notion.site/icepop): a token's loss times trainer's probability
/ engine's, and 0 where that ratio is outside [0.5, 5].

TRL:  vllm_importance_sampling_mode=token_mask, vllm_importance_sampling_clip_min=0.5, ..._clip_max=5.0
verl: rollout_correction.rollout_is=token, rollout_is_threshold=5.0, rollout_rs=token_k1,
      rollout_rs_threshold=0.5_5.0

Measured, seeds 0, 1, 2: mean@4 0.264, 0.244, 0.254 -> 0.969, 0.971, 0.961; pass@4 0.672, 0.672, 0.664 ->
0.992, 1.000, 1.000. README, Recipes, says how.
"""
engine_correction = "token_mask"
correction_low = 0.5
correction_high = 5.0
