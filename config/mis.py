"""Masked importance sampling (Liu et al. 2025, https://richardli.xyz/rl-collapse): a sequence's loss times
its probability by the trainer / by the engine, and 0 where that is above 2.

TRL:  vllm_importance_sampling_mode=sequence_mask, vllm_importance_sampling_clip_max=2.0
verl: rollout_correction.rollout_is=sequence, rollout_rs=seq_sum_k1, rollout_rs_threshold=0.0001_2.0 (it
      wants a lower bound, too)

Measured, seeds 0, 1, 2: mean@4 0.264, 0.244, 0.254 -> 0.969, 0.971, 0.961; pass@4 0.672, 0.672, 0.664 ->
0.992, 1.000, 1.000. README, Recipes, says how.
"""
engine_correction = "sequence_mask"
correction_low = 0.0
correction_high = 2.0
