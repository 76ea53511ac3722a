"""Masked importance sampling (Liu et al. 2025, https://richardli.xyz/rl-collapse): a sequence's loss times
its probability by the trainer / by the engine, and 0 where that is above 2 (or below a bound, here as good
as none).

TRL:  vllm_importance_sampling_mode=sequence_mask, vllm_importance_sampling_clip_max=2.0
verl: rollout_correction.rollout_is=sequence, rollout_rs with rollout_rs_threshold=2.0

Not measured yet.
"""
engine_correction = "sequence_mask"
correction_low = 1e-4
correction_high = 2.0
