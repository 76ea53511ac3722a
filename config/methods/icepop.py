"""IcePop (Ling Team 2025, https://ringtech.notion.site/icepop). The loss of a token is multiplied by the
ratio of the trainer's probability to the engine's, or by 0 where that ratio is outside [0.5, 5].

TRL:  vllm_importance_sampling_mode=token_mask, vllm_importance_sampling_clip_min=0.5, ..._clip_max=5.0
verl: rollout_correction.rollout_is=token, rollout_is_threshold=5.0, rollout_rs=token_k1,
      rollout_rs_threshold=0.2_2.0 (it bounds the inverse ratio: 1/5 and 1/0.5)

Measured with seeds 0, 1 and 2: mean@4 rose from 0.264, 0.244 and 0.254 to 0.969, 0.971 and 0.961,
pass@4 from 0.672, 0.672 and 0.664 to 0.992, 1.000 and 1.000. docs/measured/methods.md says how.
"""
engine_correction = "token_mask"
correction_low = 0.5
correction_high = 5.0
