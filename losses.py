"""The formulas of the training scripts: advantages, policy losses, token weights, KL and PPO's critic.

Each advantage, policy loss and correction is one function, which ADVANTAGES, LOSSES and CORRECTIONS find by
its name.
All functions are pure: they change no tensor in place and use no model and no process group.

A per-token tensor has the shape [C]: it holds only sampled tokens, one sequence after another. Prompts and
padding are never in it, so it needs no mask. Entry c belongs to sampled token c and was computed from the
hidden state one position before it. A per-sequence tensor has the shape [N]: it holds G completions for each
of P prompts, and the completions of a prompt are adjacent. Only `logp` and `value` carry gradients.
"""
import math
from functools import partial
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence


# ---------------------------------------------------------------- advantages
# Each function is called with (scores, num_generations, lengths=..., rewards=...) and declares the keywords
# that it uses. It returns the advantages in float32: [N], or {s: [len]} if each token has an advantage of its
# own. The statistics are computed in float64.
#   scores [N]: NaN stands for no score. Such a completion is in no statistic and its advantage is 0.
#   lengths [N]: the number of sampled tokens of each completion.
#   rewards: for each completion a dict {sampled token: the part of the score that the token was given}. They
#   add up to the score, also after a KL or a penalty was taken off it.
# A prompt whose scores are all equal gets advantages of exactly 0, except from reinforce++ and
# reinforce++_baseline.

def in_groups(values, num_generations):
    """Return values [N] as [P, G]. Raises ValueError if N is no multiple of G."""
    if len(values) % num_generations:
        raise ValueError(f"{len(values)} rollouts are not groups of num_generations={num_generations}: each "
                         "prompt has that many, side by side, and each is one row of tokens")
    return values.view(-1, num_generations)


def grouped(scores, num_generations):
    """Return three [P, G] tensors: scores, a mask of those that are not NaN, and score - group mean, which
    is 0 at NaN, and exactly 0 in a group of equal scores."""
    groups = in_groups(scores.double(), num_generations)          # [P, G]
    # A mean of equal scores may be rounded. That of their distances from the lowest one is exactly 0.
    above = groups - groups.nan_to_num(math.inf).amin(1, keepdim=True)
    return groups, ~groups.isnan(), (above - above.nanmean(1, keepdim=True)).nan_to_num()


def group_std(scores, num_generations):
    """Return the standard deviation (divisor n - 1) of each prompt's scores that are not NaN, float64 [P].
    It is exactly 0 if these n scores are equal or n < 2."""
    _, scored, centred = grouped(scores, num_generations)
    return (centred.square().sum(1) / (scored.sum(1) - 1).clamp(min=1)).sqrt()


def grpo(scores, num_generations, **_):
    """advantage = (score - mean) / (std + 1e-4), with mean and std (divisor n - 1) of the prompt's scores.
    Shao et al. 2024, https://arxiv.org/abs/2402.03300, section 4.1.2; the 1e-4 comes from TRL.
    Example: scores [1, 0, 0, 0], G = 4 -> std 0.5, advantages about [1.5, -0.5, -0.5, -0.5]."""
    _, _, centred = grouped(scores, num_generations)
    return (centred / (group_std(scores, num_generations)[:, None] + 1e-4)).flatten().float()


def dr_grpo(scores, num_generations, **_):
    """advantage = score - mean of the prompt's scores. Dividing by their std would favour prompts whose
    answers are nearly all right or nearly all wrong: Liu et al. 2025, https://arxiv.org/abs/2503.20783."""
    return grouped(scores, num_generations)[2].flatten().float()


def grpo_batch(scores, num_generations, **_):
    """advantage = (score - mean of the prompt's scores) / (std of all scores in the batch + 1e-4). The std
    has the divisor n - 1. Lite PPO, Liu et al. 2025, https://arxiv.org/abs/2508.08221."""
    groups, scored, centred = grouped(scores, num_generations)
    std = groups[scored].std() if scored.sum() > 1 else 0.0
    return (centred / (std + 1e-4)).flatten().float()


def rloo(scores, num_generations, **_):
    """advantage = score - mean of the prompt's other scores. This is dr_grpo's advantage * n / (n - 1).
    Ahmadian et al. 2024, https://arxiv.org/abs/2402.14740. Example: [1, 0, 0, 0] -> [1, -1/3, -1/3, -1/3]."""
    _, scored, centred = grouped(scores, num_generations)
    count = scored.sum(1, keepdim=True)                           # [P, 1]
    return (centred * count / (count - 1).clamp(min=1)).flatten().float()


def whitened(values, scores, lengths):
    """Return (value - mean) / (std + 1e-8), [N], with mean and std (divisor n) over the tokens of completions
    with a score, and 0 for the others."""
    scored = ~scores.isnan()
    tokens = lengths * scored
    return (whiten(values, lambda x: (tokens * x).sum() / tokens.sum().clamp(min=1)) * scored).float()


def reinforce_plus_plus(scores, num_generations, *, lengths, **_):
    """advantage = score, whitened over all tokens. Hu et al. 2025, https://arxiv.org/abs/2501.03262."""
    return whitened(scores.double().nan_to_num(), scores, lengths)


def reinforce_plus_plus_baseline(scores, num_generations, *, lengths, **_):
    """advantage = score - mean of the prompt's scores, whitened over all tokens. Hu et al. 2025."""
    return whitened(grouped(scores, num_generations)[2].flatten(), scores, lengths)


def grpo_process(scores, num_generations, *, lengths, rewards, **_):
    """Return {s: [len]}: a token's advantage is the sum of the normalised rewards at it and after it. Each is
    (reward - mean) / (std + 1e-4) over all rewards of the prompt's completions, so that with one reward for
    each this is grpo. Shao et al. 2024, section 4.1.3. The rewards are those of the steps of an answer, or of
    the turns of an episode."""
    adv = {s: torch.zeros(length, device=scores.device) for s, length in enumerate(lengths.tolist())}
    for first in range(0, len(scores), num_generations):
        given = [(s, token, reward) for s in range(first, first + num_generations) if not scores[s].isnan()
                 for token, reward in rewards[s].items() if not math.isnan(reward)]
        values = torch.tensor([reward for *_, reward in given], dtype=torch.float64)
        for (s, token, _), value in zip(given, grpo(values, max(1, len(values))).tolist()):
            adv[s][:token + 1] += value
    return adv


def none(scores, num_generations, **_):
    """advantage = 0, whatever the scores: for kl_estimator=k1_advantage, which adds to it."""
    return torch.zeros_like(scores, dtype=torch.float32)


ADVANTAGES = {"grpo": grpo, "dr_grpo": dr_grpo, "grpo_batch": grpo_batch, "rloo": rloo,
              "reinforce++": reinforce_plus_plus, "reinforce++_baseline": reinforce_plus_plus_baseline,
              "grpo_process": grpo_process, "none": none}


def shaped(rollouts, scores):
    """Return the rewards of each rollout, {token: reward}, whose sum is its score in `scores`: what a KL or a
    penalty has changed in the score is added to the last reward."""
    result = [dict(r.rewards) for r in rollouts]
    for rewards, score in zip(result, scores.tolist()):
        if rewards:
            rewards[max(rewards)] += score - sum(rewards.values())
    return result


def overlong_penalty(lengths, max_length, buffer):
    """Return the penalty for lengths, [N] -> [N]: it falls linearly from 0 to -1 over the last `buffer`
    tokens before max_length. DAPO, Yu et al. 2025, https://arxiv.org/abs/2503.14476, eq. 13."""
    return ((max_length - buffer - lengths) / buffer).clamp(-1, 0)


# ---------------------------------------------------------------- policy losses
# Each function is called with (logp, old_logp, adv, engine_logp=..., mean=..., epsilon=..., epsilon_high=...)
# and declares the keywords that it uses. It returns three tensors [C]: the loss, with gradient, and for the
# logs two masks: where clipping acted at the lower bound, and where clipping acted at the upper bound.
#   engine_logp [C]: the logprobs of the engine that sampled, whatever old_logp is.
#   mean: a function [C] -> [C] that returns for each token the mean over the token's sequence.
# In the formulas ratio = exp(logp - old_logp). On-policy, where ratio = 1, the gradient of every loss is
# -adv * grad(logp). All clamp logp - old_logp to [-20, 20]: beyond that exp may overflow, and infinity * 0 is
# NaN.

def of_sequence(values, mean):
    """Return for each token the mean over its sequence, with the gradient of the token's own value; [C]."""
    return mean(values.detach()) + (values - values.detach())


def out_of_bounds(ratio, adv, epsilon, epsilon_high):
    """Return where adv pushes the ratio further below the lower bound and where further above the upper."""
    return (ratio < 1 - epsilon) & (adv < 0), (ratio > 1 + epsilon_high) & (adv > 0)


def clip_ratios(low, high):
    """Return the two masks of a loss, and where either is true, by the names of the figures for the log."""
    return {"clip_ratio/low_mean": low, "clip_ratio/high_mean": high, "clip_ratio/region_mean": low | high}


def unclipped(loss):
    """Return what a loss without clipping returns: the loss, and no clipped token at either bound."""
    nowhere = torch.zeros_like(loss, dtype=torch.bool)
    return loss, nowhere, nowhere


def clip(logp, old_logp, adv, *, epsilon=0.2, epsilon_high=0.2, **_):
    """loss = -min(ratio * adv, clip(ratio, 1 - epsilon, 1 + epsilon_high) * adv). The gradient is 0 where adv
    pushes the ratio further past a bound. PPO, Schulman et al. 2017, https://arxiv.org/abs/1707.06347, eq. 7;
    two different bounds come from DAPO."""
    ratio = (logp - old_logp).clamp(-20, 20).exp()
    loss = -torch.min(ratio * adv, ratio.clamp(1 - epsilon, 1 + epsilon_high) * adv)
    return loss, *out_of_bounds(ratio, adv, epsilon, epsilon_high)


def gspo(logp, old_logp, adv, *, mean, epsilon=0.2, epsilon_high=0.2, **_):
    """loss = that of clip, with one ratio per sequence: exp(mean of log ratios). Use it with sequence_mean.
    Zheng et al. 2025, https://arxiv.org/abs/2507.18071; their bounds are 3e-4 and 4e-4. This is GSPO-token
    (section 4.3 there): each token has a gradient of its own, so that token weights have an effect."""
    log_ratio = of_sequence((logp - old_logp).clamp(-20, 20), mean)
    return clip(log_ratio, torch.zeros_like(log_ratio), adv, epsilon=epsilon, epsilon_high=epsilon_high)


def gmpo(logp, old_logp, adv, *, mean, epsilon=0.2, epsilon_high=0.2, **_):
    """loss = -adv * geometric mean of the sequence's ratios, clipped as in clip. Use it with sequence_mean.
    Zhao et al. 2025, https://arxiv.org/abs/2507.20673; their bounds e^-0.4 and e^0.4 are epsilon = 0.33 and
    epsilon_high = 0.49."""
    log_ratio = (logp - old_logp).clamp(-20, 20)
    low, high = out_of_bounds(log_ratio.exp(), adv, epsilon, epsilon_high)
    bounded = log_ratio.clamp(math.log1p(-epsilon), math.log1p(epsilon_high))
    return -of_sequence(torch.where(low | high, bounded, log_ratio), mean).exp() * adv, low, high


def cispo(logp, old_logp, adv, *, epsilon_high=0.2, **_):
    """loss = -stop_gradient(min(ratio, 1 + epsilon_high)) * adv * logp: clipped tokens keep a gradient.
    MiniMax-M1, Chen et al. 2025, https://arxiv.org/abs/2506.13585, eq. 4-5."""
    ratio = (logp - old_logp).clamp(-20, 20).exp()
    high = ratio > 1 + epsilon_high
    return -ratio.clamp(max=1 + epsilon_high).detach() * adv * logp, torch.zeros_like(high), high


def sapo(logp, old_logp, adv, **_):
    """loss = -4 / t * sigmoid(t * (ratio - 1)) * adv, with t = 1 where adv > 0, else 1.05. The sigmoid is
    a soft bound on both sides. Gao et al. 2025, https://arxiv.org/abs/2511.20347."""
    ratio = (logp - old_logp).clamp(-20, 20).exp()
    t = torch.where(adv > 0, torch.ones_like(adv), 1.05)
    return unclipped(-4 / t * torch.sigmoid(t * (ratio - 1)) * adv)


def gpg(logp, old_logp, adv, **_):
    """loss = -adv * logp, without a ratio. Chu et al. 2025, https://arxiv.org/abs/2504.02546."""
    return unclipped(-adv * logp)


def dppo(logp, old_logp, adv, *, engine_logp, epsilon=0.2, epsilon_high=0.2, **_):
    """loss = -stop_gradient(min(ratio, 20)) * adv * logp, ratio = exp(logp - engine_logp), but 0 where adv
    pushes the probability further below the engine's than epsilon, or further above than epsilon_high. An
    unlikely token may so change by a large factor. The ratio corrects for the engine and for stale rollouts,
    whatever old_logp is. Binary DPPO-TV, Qi et al. 2026, https://arxiv.org/abs/2602.04879."""
    low, high = out_of_bounds(1 + logp.exp() - engine_logp.exp(), adv, epsilon, epsilon_high)
    ratio = (logp - engine_logp).clamp(-20, 20).exp().clamp(max=20)
    return torch.where(low | high, 0.0, -ratio.detach() * adv * logp), low, high


LOSSES = {"clip": clip, "gspo": gspo, "gmpo": gmpo, "cispo": cispo, "sapo": sapo, "gpg": gpg, "dppo": dppo}


# ---------------------------------------------------------------- weights of sequences and tokens
# The update's loss is the sum of weight * token loss. The weight of each token of a sequence, by aggregation:
#   token_mean       1 / num_tokens: every token counts the same                   DAPO, Yu et al. 2025
#   sequence_mean    1 / (length * num_sequences): every sequence counts the same  GRPO, Shao et al. 2024
#   constant_length  1 / (max_length * num_sequences): no length bias              Dr. GRPO, Liu et al. 2025
#   sequence_sum     1 / num_sequences: the plain policy gradient                  RLOO, Ahmadian et al. 2024
#   prompt_mean      1 / (tokens of the prompt's sequences * num_prompts): every prompt counts the same
#                    ScaleRL, Khatri et al. 2025, https://arxiv.org/abs/2510.13786
AGGREGATIONS = ("token_mean", "sequence_mean", "constant_length", "sequence_sum", "prompt_mean")


def sequence_weights(lengths, aggregation, update, num_generations, max_length):
    """Return the weight of each sequence's tokens, [N]. An unknown aggregation raises KeyError.

    lengths [N]: the number of sampled tokens of each sequence of the step. update: the numbers of those that
    this optimizer step trains on, over all ranks, so that the weights and the gradient do not depend on how
    they are dealt and packed. Only their weights mean something.
    """
    num_tokens, num_sequences = lengths[update].sum(), len(update)
    divisors = {"token_mean": num_tokens, "sequence_mean": lengths * num_sequences,
                "constant_length": max_length * num_sequences, "sequence_sum": num_sequences}
    if aggregation == "prompt_mean":
        trained = torch.zeros_like(lengths)
        trained[update] = lengths[update]
        of_prompt = in_groups(trained, num_generations).sum(1)          # [P]; 0 if it is not in the update
        divisors["prompt_mean"] = of_prompt.repeat_interleave(num_generations) * (of_prompt > 0).sum()
    return torch.ones_like(lengths, dtype=torch.float32) / divisors[aggregation]


# Importance weights [C], without gradient, that multiply the token losses, for the gap between the trainer's
# logprobs and the engine's, with which it sampled. Each function of CORRECTIONS is called with
# (old_logp, engine_logp, mean=..., lengths=..., low=..., high=...) and declares the keywords that it uses.
#   old_logp, engine_logp [C]: of the same tokens. mean: as in the losses. lengths [C]: of each token's
#   sequence.
# The ratio is exp(old_logp - engine_logp). The weight of a token, by correction:
#   none               1
#   token_truncate     min(ratio, high)                        TIS, https://fengyao.notion.site/off-policy-rl
#   token_mask         ratio, but 0 outside [low, high]           IcePop, https://ringtech.notion.site/icepop
#   sequence_truncate  as token_truncate, with the product of the sequence's ratios as the ratio
#   sequence_mask      as token_mask, with that product                 MIS, https://richardli.xyz/rl-collapse
#   geometric_mask     1, but 0 where the geometric mean of the sequence's ratios is outside [low, high], for
#                      instance [0.99, 1.01]; unlike the product it does not drift with the length

def uncorrected(old_logp, engine_logp, **_):
    """Return a weight of 1 for each token."""
    return torch.ones_like(old_logp)


def importance(level, bound, old_logp, engine_logp, *, mean, lengths, low, high):
    """Return the weights whose ratio is that of a level (token, sequence, geometric), with a bound (truncate,
    mask)."""
    log_ratio = old_logp - engine_logp
    if level != "token":
        log_ratio = mean(log_ratio) * (lengths if level == "sequence" else 1)
    ratio = log_ratio.clamp(-20, 20).exp()
    if bound == "truncate":
        return ratio.clamp(max=high)
    inside = ((ratio >= low) & (ratio <= high)).to(ratio.dtype)
    return inside if level == "geometric" else ratio * inside


CORRECTIONS = {"none": uncorrected} | {name: partial(importance, *name.split("_")) for name in (
    "token_truncate", "token_mask", "sequence_truncate", "sequence_mask", "geometric_mask")}


# ---------------------------------------------------------------- KL to a reference

def kl_penalty(logp, ref_logp, estimator, old_logp=None):
    """Estimate KL(policy || reference) at each token that the policy sampled; [C], with gradient.

    With d = ref_logp - logp (Schulman 2020, http://joschu.net/blog/kl-approx.html):
    k1     -d               unbiased, high variance
    k2     d^2 / 2          biased
    k3     exp(d) - 1 - d   unbiased, never negative; GRPO uses it
    k3+    the value of k3 with the gradient of k2; the name comes from verl
    k3_is  k3 * ratio, with ratio = exp(logp - old_logp), for tokens sampled by the policy of old_logp:
           DeepSeek-V3.2, 2025, https://arxiv.org/abs/2512.02556, eq. 7
    Any other estimator raises KeyError. To avoid overflow, exp(d) and ratio * exp(d) are clamped to at most
    e^60 and ratio to at most e^20; a clamped factor has no gradient.
    In the loss the gradient matters. In expectation it is the gradient of KL(policy || reference) for k2, k3+
    and k3_is (for k3_is also off-policy), the gradient of KL(reference || policy) for k3, and 0 for k1.
    In the reward the value matters. The policy gradient turns k1 into the gradient of KL(policy || reference)
    that includes a token's effect on all later tokens. It turns k3 into this gradient minus that of
    KL(reference || policy), and k2 into neither. Tang and Munos 2025, https://arxiv.org/abs/2506.09477.
    """
    d = ref_logp - logp
    k2 = d.square() / 2
    k3 = d.clamp(max=60).exp() - 1 - d
    if estimator == "k3_is":
        # k3 * ratio is multiplied out, because a huge exp(d) times a tiny ratio may be a moderate number.
        return (ref_logp - old_logp).clamp(max=60).exp() - (1 + d) * (logp - old_logp).clamp(max=20).exp()
    return {"k1": -d, "k2": k2, "k3": k3, "k3+": k3.detach() + k2 - k2.detach()}[estimator]


KL_ESTIMATORS = ("k1", "k2", "k3", "k3+", "k3_is")


# ---------------------------------------------------------------- PPO with a critic

def token_rewards(rewards, kl, kl_coef, lengths):
    """Return the rewards [C] of the tokens: -kl_coef * kl, plus what each sequence was given at its tokens.

    rewards: for each sequence a dict {token: reward}; kl [C]; lengths: a list that sums to C. NaN stays NaN.
    Ouyang et al. 2022, https://arxiv.org/abs/2203.02155, eq. 2, with the KL spread over the tokens.
    Example: rewards [{1: 1}, {0: 2}], kl [.1, .2, .3], kl_coef 1, lengths [2, 1] -> [-.1, .8, 1.7].
    """
    given = [(first + token, reward) for first, own in zip(accumulate([0, *lengths]), rewards)
             for token, reward in own.items()]
    place, value = torch.tensor(given, dtype=torch.float64, device=kl.device).view(-1, 2).unbind(1)
    return (-kl_coef * kl).index_add(0, place.long(), value.to(kl.dtype))


def gae(rewards, values, lengths, gamma, lam):
    """Return advantages [C] and returns [C] by generalised advantage estimation over each sequence's tokens.

    rewards [C]; values [C] of the states *before* the tokens; lengths: a list that sums to C. The return is
    advantage + value, the critic's target. Schulman et al. 2016, https://arxiv.org/abs/1506.02438, eq. 16:
    delta_t = r_t + gamma * v_(t+1) - v_t;  A_t = delta_t + gamma * lam * A_(t+1). After the last token the
    value is 0, even if the completion was cut off, because its score was given as if it had ended there.
    Example: one sequence, rewards [0, 0, 1], values 0, gamma 1, lam 0.5 -> advantages [0.25, 0.5, 1].
    """
    # A rank may have no sequences, and pad_sequence rejects an empty list.
    if len(rewards) == 0:
        return rewards, values
    r, v = (pad_sequence(x.split(lengths), batch_first=True) for x in (rewards, values))    # [n, L]
    delta = r + gamma * F.pad(v[:, 1:], (0, 1)) - v
    adv, later = torch.empty_like(delta), torch.zeros_like(delta[:, 0])
    for t in reversed(range(delta.shape[1])):
        adv[:, t] = later = delta[:, t] + gamma * lam * later
    flat = torch.cat([row[:length] for row, length in zip(adv, lengths)])
    return flat, flat + values


def whiten(values, mean):
    """Return (values - mean) / (std + 1e-8), [C], with mean and std (divisor n) over all ranks. NaNs stay and
    are not counted. mean: a function that averages a tensor over all ranks, in float64 and without its NaNs.
    With float32 sums, equal advantages would be whitened to rounding noise instead of 0."""
    centre = mean(values)
    std = mean((values.double() - centre).square()) ** 0.5
    return (values - centre) / (std + 1e-8)


def value_loss(value, old_value, ret, value_clip):
    """Return the squared-error loss of each value, with gradient, and where clipping acted on it; [C] each.

    loss = max((v - ret)^2, (old + clip(v - old, -value_clip, value_clip) - ret)^2) / 2. The gradient is 0
    where the second square is larger: there v has moved from old towards ret by more than value_clip.
    With value_clip 0 nothing is clipped. PPO's reference implementation, ppo2 in openai/baselines, does this.
    """
    loss, most = (value - ret).square() / 2, value_clip or math.inf
    # A value within the bounds stays the same bit for bit, so its rounding is not counted as clipping.
    near = value.clamp(old_value - most, old_value + most)
    clipped_loss = (near - ret).square() / 2
    return torch.max(loss, clipped_loss), clipped_loss > loss


# ---------------------------------------------------------------- schedules

def schedule(peak, step, steps, kind, warmup=0):
    """Return a coefficient at `step` of `steps`. It rises in `warmup` steps to its peak, from peak / warmup
    on, and then stays there ("constant") or falls to 0 at `steps` ("linear", "cosine"). Below 0 it is 0."""
    if step < warmup:
        return peak * (step + 1) / warmup if step >= 0 else 0.0
    progress = (step - warmup) / max(1, steps - warmup)
    decays = {"constant": 1, "linear": 1 - progress, "cosine": (1 + math.cos(math.pi * progress)) / 2}
    return peak * decays[kind]


# What the settings of these names may be. configure() refuses anything else before a model is loaded.
CHOICES = {"advantage": ADVANTAGES, "loss_type": LOSSES, "loss_aggregation": AGGREGATIONS,
           "engine_correction": CORRECTIONS,
           "kl_estimator": (*KL_ESTIMATORS[1:], "k1_reward", "k1_advantage")}
