"""DPPO with binary total variation (Qi et al. 2026, https://arxiv.org/abs/2602.04879). The bounds of clipping
are differences of probabilities to the engine's, not ratios. Their threshold is 0.15. The loss reads no old
logprobs, so none are computed.

TRL:       none in 1.16
verl:      policy_loss.loss_mode=dppo_tv, clip_ratio_low=0.15, clip_ratio_high=0.15, clip_ratio_c=20,
           rollout_correction.bypass_mode=True
prime-rl:  its default loss, with dppo_mask_low=0.2, dppo_mask_high=0.2 and a penalty of the log ratio
"""
loss_type = "dppo"
epsilon = 0.15
epsilon_high = 0.15
old_logprobs = "engine"
engine_correction = "none"      # train_async.py has another default; here the ratio itself corrects
num_mini_batches = 4
