"""The formulas of the training scripts: advantages, policy losses, token weights and KL.

Those of PPO's critic are in options/critic_losses.py.

Each advantage, policy loss and correction is one function. The tables ADVANTAGES, LOSSES and CORRECTIONS hold
these functions under the names that the settings take. All functions are pure: they change none of their
arguments and use no model and no process group.

A per-token tensor has the shape [C]: it holds only sampled tokens, one sequence after another. Prompts and
padding are never in it, so it needs no mask. Entry c belongs to sampled token c and was computed from the
hidden state one position before it. A per-sequence tensor has the shape [N]: it holds G completions for each
of P prompts, and the completions of a prompt are adjacent. Only `logp` carries a gradient.
"""
import math
from collections import defaultdict
from functools import partial
from itertools import product

import torch


# ---------------------------------------------------------------- advantages
# Each function is called with (scores, num_generations, lengths=..., rewards=...) and declares the keywords
# that it uses. It returns the advantages in float32: [N], or if each token has an advantage of its own a dict
# {s: [len]} with a tensor for completion s. The statistics are computed in float64.
#   scores [N]: NaN stands for no score. Such a completion is in no statistic and its advantage is 0.
#   lengths [N]: the number of sampled tokens of each completion.
#   rewards: for each completion a dict {index of a sampled token: the part of the score that this token
#   earned}. They add up to the score as it was before a KL or a penalty changed it.
# A prompt whose scores are all equal gets advantages of exactly 0, except from reinforce++ and
# reinforce++_baseline, and from turns if its completions have several rewards.

def in_groups(values, num_generations):
    """Return values [N] as [P, G]. Raises ValueError if N is no multiple of G."""
    if len(values) % num_generations:
        raise ValueError(f"{len(values)} rollouts are not groups of num_generations={num_generations}: each "
                         "prompt has that many adjacent ones")
    return values.view(-1, num_generations)


def grouped(scores, num_generations):
    """Return three [P, G] tensors: the scores, a mask of the scores that are not NaN, and score - group mean,
    which is 0 at NaN, and exactly 0 in a group of equal scores."""
    groups = in_groups(scores.double(), num_generations)          # [P, G]
    # The mean of equal scores may be rounded. The mean of their distances from the lowest one is exactly 0.
    # NaN becomes infinity here, and so it is never the lowest. If all are NaN, centred is NaN and becomes 0.
    lowest = groups.nan_to_num(math.inf).amin(1, keepdim=True)    # [P, 1]
    above = groups - lowest
    centred = above - above.nanmean(1, keepdim=True)
    return groups, ~groups.isnan(), centred.nan_to_num()


def group_std(scores, num_generations):
    """Return the standard deviation (divisor n - 1) of each prompt's scores that are not NaN, float64 [P].
    It is exactly 0 if these n scores are equal or n < 2."""
    _, scored, centred = grouped(scores, num_generations)
    count = scored.sum(1)                                         # [P]
    variance = centred.square().sum(1) / (count - 1).clamp(min=1)
    return variance.sqrt()


def grpo(scores, num_generations, **_):
    """advantage = (score - mean) / (std + 1e-4), with mean and std (divisor n - 1) of the prompt's scores.
    Shao et al. 2024, https://arxiv.org/abs/2402.03300, section 4.1.2; the 1e-4 comes from TRL.
    Example: scores [1, 0, 0, 0], G = 4 -> std 0.5, advantages about [1.5, -0.5, -0.5, -0.5]."""
    _, _, centred = grouped(scores, num_generations)
    std = group_std(scores, num_generations)[:, None]             # [P, 1]
    adv = centred / (std + 1e-4)
    return adv.flatten().float()


def dr_grpo(scores, num_generations, **_):
    """advantage = score - mean of the prompt's scores. Dividing by their std would favour prompts whose
    answers are nearly all right or nearly all wrong: Liu et al. 2025, https://arxiv.org/abs/2503.20783."""
    _, _, adv = grouped(scores, num_generations)
    return adv.flatten().float()


def grpo_batch(scores, num_generations, **_):
    """advantage = (score - mean of the prompt's scores) / (std of all scores in the batch + 1e-4). The std
    has the divisor n - 1. Lite PPO, Liu et al. 2025, https://arxiv.org/abs/2508.08221."""
    _, _, centred = grouped(scores, num_generations)
    std = group_std(scores, len(scores))                          # [1]; the batch is one group
    adv = centred / (std + 1e-4)
    return adv.flatten().float()


def rloo(scores, num_generations, **_):
    """advantage = score - mean of the prompt's other scores. This is dr_grpo's advantage * n / (n - 1).
    Ahmadian et al. 2024, https://arxiv.org/abs/2402.14740. Example: [1, 0, 0, 0] -> [1, -1/3, -1/3, -1/3]."""
    _, scored, centred = grouped(scores, num_generations)
    count = scored.sum(1, keepdim=True)                           # [P, 1]
    adv = centred * count / (count - 1).clamp(min=1)
    return adv.flatten().float()


def whiten(values, mean):
    """Return (values - mean) / (std + 1e-8), in the shape of values; the std has the divisor n.

    mean: a function that averages a tensor, in float64 and without its NaNs; that of train_ppo.py averages
    over all ranks. A NaN stays NaN and is not counted. With sums in float32, equal advantages would be
    whitened to rounding noise instead of 0.
    """
    centre = mean(values)
    std = mean((values.double() - centre).square()) ** 0.5
    return (values - centre) / (std + 1e-8)


def whitened_by_tokens(values, scores, lengths):
    """Return values [N] whitened over the tokens of all completions with a score: each value counts as often
    as its completion has tokens. A completion without a score gets 0."""
    scored = ~scores.isnan()
    token_counts = lengths * scored                               # [N]

    def mean(x):
        return (token_counts * x).sum() / token_counts.sum().clamp(min=1)

    adv = whiten(values, mean) * scored
    return adv.float()


def reinforce_plus_plus(scores, num_generations, *, lengths, **_):
    """advantage = score, whitened over all tokens. Hu et al. 2025, https://arxiv.org/abs/2501.03262."""
    values = scores.double().nan_to_num()
    return whitened_by_tokens(values, scores, lengths)


def reinforce_plus_plus_baseline(scores, num_generations, *, lengths, **_):
    """advantage = score - mean of the prompt's scores, whitened over all tokens. Hu et al. 2025."""
    _, _, centred = grouped(scores, num_generations)
    return whitened_by_tokens(centred.flatten(), scores, lengths)


def turns(scores, num_generations, *, lengths, rewards, **_):
    """Return {s: [len]}: a token's advantage is the return to go of its turn, minus the mean return to go of
    the prompt's other completions in the turn of the same number. If no other one got that far, 0 is
    subtracted.

    A turn ends at a token with a reward. The tokens after the last reward are a turn with reward 0, so that
    ending early is compared with going on. The return to go is the sum of the rewards of this turn and of the
    later ones. If each completion has one reward, at its last token, this is rloo. As there, nothing is
    divided by a std, and the only completion of a prompt that has a score gets 0.

    The number that is subtracted depends on other completions alone. With sequence_sum or constant_length the
    gradient is therefore, in expectation, that of the mean return, as long as the number of a token's turn
    does not depend on what is sampled later. bench/unbiased.py enumerates this for small problems.
    Example: rewards [{0: 1, 2: 2}, {1: 1}], G = 2, lengths [3, 2] -> [[2, 2, 2], [-2, -2]].
    """
    adv = {s: torch.zeros(length, device=scores.device) for s, length in enumerate(lengths.tolist())}
    for first in range(0, len(scores), num_generations):
        scored = [s for s in range(first, first + num_generations) if not scores[s].isnan()]
        if len(scored) < 2:
            continue                                              # nothing to compare with
        reached = defaultdict(dict)                               # {turn: {(s, last token): return to go}}
        for s in scored:
            last = len(adv[s]) - 1
            token_rewards = {last: 0.0} | rewards[s]
            # A KL or a penalty may have changed the score. The last reward takes the difference.
            difference = scores[s].item() - sum(rewards[s].values())
            token_rewards[max(rewards[s], default=last)] += difference
            to_go = 0.0
            for turn, token in reversed([*enumerate(sorted(token_rewards))]):
                to_go += token_rewards[token]
                reached[turn][s, token] = to_go
        # From the last turn to the first, because each one also writes to all tokens before it.
        for turn in sorted(reached, reverse=True):
            turn_adv = torch.tensor([*reached[turn].values()], dtype=torch.float64)
            if len(turn_adv) > 1:
                turn_adv = rloo(turn_adv, len(turn_adv))
            for (s, token), value in zip(reached[turn], turn_adv.tolist()):
                adv[s][:token + 1] = value
    return adv


def none(scores, num_generations, **_):
    """advantage = 0, whatever the scores. With kl_estimator=k1_advantage only the KL is left as advantage."""
    return torch.zeros_like(scores, dtype=torch.float32)


ADVANTAGES = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "grpo_batch": grpo_batch,
    "rloo": rloo,
    "reinforce++": reinforce_plus_plus,
    "reinforce++_baseline": reinforce_plus_plus_baseline,
    "turns": turns,
    "none": none,
}


def overlong_penalty(lengths, max_length, buffer):
    """Return the penalty for lengths, [N] -> [N]: it falls linearly from 0 to -1 over the last `buffer`
    tokens before max_length. DAPO, Yu et al. 2025, https://arxiv.org/abs/2503.14476, eq. 13."""
    return ((max_length - buffer - lengths) / buffer).clamp(-1, 0)


# ---------------------------------------------------------------- policy losses
# Each function is called with (logp, old_logp, adv, engine_logp=..., mean=..., lengths=..., epsilon=...,
# epsilon_high=...) and declares the keywords that it uses. It returns three tensors [C]: the loss, with
# gradient, and two masks for the logs, which say where clipping acted at the lower and at the upper bound.
#   old_logp [C]: the logprobs of the policy that the ratio compares with, computed by trainer or engine.
#   engine_logp [C]: the logprobs of the engine when it sampled, also if old_logp is the trainer's.
#   mean: a function [C] -> [C] that returns for each token the mean over the token's sequence.
#   lengths: a function that returns for each token the length of its sequence, [C].
# In the formulas ratio = exp(logp - old_logp). On-policy, where ratio = 1, the gradient of every loss is
# -adv * grad(logp). Every loss with a ratio clamps its logarithm to [-20, 20]: beyond that exp may overflow,
# and infinity * 0 is NaN.

def of_sequence(values, mean):
    """Return for each token the mean over its sequence, with the gradient of the token's own value; [C]."""
    return mean(values.detach()) + (values - values.detach())


def out_of_bounds(ratio, adv, epsilon, epsilon_high):
    """Return two masks [C]: where the ratio is below the lower bound and adv pushes it further down, and
    where it is above the upper bound and adv pushes it further up."""
    low = (ratio < 1 - epsilon) & (adv < 0)
    high = (ratio > 1 + epsilon_high) & (adv > 0)
    return low, high


def clip_ratios(low, high):
    """Return {metric: mask} for the two masks of a loss, and for where either is true. The log averages each
    mask, which gives the ratio of tokens where clipping acted."""
    return {"clip_ratio/low_mean": low, "clip_ratio/high_mean": high, "clip_ratio/region_mean": low | high}


def unclipped(loss):
    """Return what a loss without clipping returns: the loss, and two masks that are False everywhere."""
    nowhere = torch.zeros_like(loss, dtype=torch.bool)
    return loss, nowhere, nowhere


def clip(logp, old_logp, adv, *, epsilon, epsilon_high, **_):
    """loss = -min(ratio * adv, clip(ratio, 1 - epsilon, 1 + epsilon_high) * adv). The gradient is 0 where adv
    pushes the ratio further past a bound. PPO, Schulman et al. 2017, https://arxiv.org/abs/1707.06347, eq. 7;
    two different bounds come from DAPO."""
    ratio = (logp - old_logp).clamp(-20, 20).exp()
    loss = -torch.min(ratio * adv, ratio.clamp(1 - epsilon, 1 + epsilon_high) * adv)
    low, high = out_of_bounds(ratio, adv, epsilon, epsilon_high)
    return loss, low, high


def gspo(logp, old_logp, adv, *, mean, epsilon, epsilon_high, **_):
    """loss = clip's loss with one ratio per sequence: exp(mean of log ratios). Use it with sequence_mean.
    Zheng et al. 2025, https://arxiv.org/abs/2507.18071; their bounds are 3e-4 and 4e-4. This is GSPO-token
    (section 4.3 there): a token's loss has only the gradient of this token's logprob, so that an advantage or
    a weight of a single token acts on this token alone."""
    log_ratio = of_sequence((logp - old_logp).clamp(-20, 20), mean)
    # clip takes the exponential of logp - old_logp. With 0 for old_logp this is exp(log_ratio).
    return clip(log_ratio, 0, adv, epsilon=epsilon, epsilon_high=epsilon_high)


def gmpo(logp, old_logp, adv, *, mean, epsilon, epsilon_high, **_):
    """loss = -adv * geometric mean of the sequence's ratios, clipped as in clip. Use it with sequence_mean.
    Zhao et al. 2025, https://arxiv.org/abs/2507.20673; their bounds e^-0.4 and e^0.4 are epsilon = 0.33 and
    epsilon_high = 0.49."""
    log_ratio = (logp - old_logp).clamp(-20, 20)
    low, high = out_of_bounds(log_ratio.exp(), adv, epsilon, epsilon_high)
    bounded = log_ratio.clamp(math.log1p(-epsilon), math.log1p(epsilon_high))
    clipped = torch.where(low | high, bounded, log_ratio)
    loss = -of_sequence(clipped, mean).exp() * adv
    return loss, low, high


def cispo(logp, old_logp, adv, *, epsilon_high, **_):
    """loss = -stop_gradient(min(ratio, 1 + epsilon_high)) * adv * logp: clipped tokens keep a gradient.
    MiniMax-M1, Chen et al. 2025, https://arxiv.org/abs/2506.13585, eq. 4-5."""
    ratio = (logp - old_logp).clamp(-20, 20).exp()
    loss = -ratio.clamp(max=1 + epsilon_high).detach() * adv * logp
    high = ratio > 1 + epsilon_high
    low = torch.zeros_like(high)                                  # there is no lower bound
    return loss, low, high


def sapo(logp, old_logp, adv, **_):
    """loss = -4 / t * sigmoid(t * (ratio - 1)) * adv, with t = 1 where adv > 0, else 1.05. The sigmoid is
    a soft bound on both sides. Gao et al. 2025, https://arxiv.org/abs/2511.20347."""
    ratio = (logp - old_logp).clamp(-20, 20).exp()
    t = torch.where(adv > 0, torch.ones_like(adv), 1.05)
    loss = -4 / t * torch.sigmoid(t * (ratio - 1)) * adv
    return unclipped(loss)


def gpg(logp, old_logp, adv, **_):
    """loss = -adv * logp, without a ratio. Chu et al. 2025, https://arxiv.org/abs/2504.02546."""
    return unclipped(-adv * logp)


def dppo(logp, old_logp, adv, *, engine_logp, epsilon, epsilon_high, **_):
    """loss = -stop_gradient(min(ratio, 20)) * adv * logp, with ratio = exp(logp - engine_logp). The loss is 0
    where the probability is more than epsilon below the engine's and adv pushes it further down, and where it
    is more than epsilon_high above and adv pushes it further up. An unlikely token may therefore change by a
    large factor. The ratio corrects for the engine and for stale rollouts, because it does not use old_logp.
    Binary DPPO-TV, Qi et al. 2026, https://arxiv.org/abs/2602.04879."""
    # out_of_bounds expects a ratio, of which 1 stands for no change. Here it gets 1 + the difference.
    low, high = out_of_bounds(1 + logp.exp() - engine_logp.exp(), adv, epsilon, epsilon_high)
    ratio = (logp - engine_logp).clamp(-20, 20).exp().clamp(max=20)
    loss = torch.where(low | high, 0.0, -ratio.detach() * adv * logp)
    return loss, low, high


LOSSES = {
    "clip": clip,
    "gspo": gspo,
    "gmpo": gmpo,
    "cispo": cispo,
    "sapo": sapo,
    "gpg": gpg,
    "dppo": dppo,
}


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

    lengths [N]: the number of sampled tokens of each sequence. update: the indices of the sequences that this
    optimizer step trains on, over all ranks, so that the weights and the gradient do not depend on how these
    are dealt to ranks and packed into lines. The weights of all other sequences have no meaning.
    """
    num_sequences = len(update)
    divisors = {
        "token_mean": lengths[update].sum(),
        "sequence_mean": lengths * num_sequences,
        "constant_length": max_length * num_sequences,
        "sequence_sum": num_sequences,
    }
    if aggregation == "prompt_mean":
        trained = torch.zeros_like(lengths)
        trained[update] = lengths[update]
        prompt_tokens = in_groups(trained, num_generations).sum(1)      # [P]; 0 if it is not in the update
        num_prompts = (prompt_tokens > 0).sum()
        divisors["prompt_mean"] = prompt_tokens.repeat_interleave(num_generations) * num_prompts
    return torch.ones_like(lengths, dtype=torch.float32) / divisors[aggregation]


# The engine that sampled and the trainer compute slightly different logprobs. Importance weights [C], without
# gradient, multiply the token losses to correct for that. Each function of CORRECTIONS is called with
# (old_logp, engine_logp, mean=..., lengths=..., cap=..., low=..., high=...).
#   old_logp, engine_logp [C]: the trainer's and the engine's logprobs of the same tokens.
#   mean, lengths: as in the losses.
# The ratio is exp(old_logp - engine_logp). The weight of a token, by correction:
#   none               1
#   token_truncate     min(ratio, cap)                         TIS, https://fengyao.notion.site/off-policy-rl
#   token_mask         ratio, but 0 outside [low, high]           IcePop, https://ringtech.notion.site/icepop
#   sequence_truncate  as token_truncate, with the product of the sequence's ratios as the ratio
#   sequence_mask      as token_mask, with the same product             MIS, https://richardli.xyz/rl-collapse
#   geometric_mask     1, but 0 where the geometric mean of the sequence's ratios is outside [low, high], for
#                      instance [0.99, 1.01]; the product drifts with the length, and this mean does not
#   token_truncate,sequence_mask, and likewise any truncation with any mask: the truncation's weight, but 0
#                      where the mask's is 0. The mask does not multiply by its own ratio as well, because
#                      that would correct twice. Two masks cannot be joined: both would read low and high.

def importance(names, old_logp, engine_logp, *, mean, lengths, cap, low, high):
    """Return the weights of the corrections with these names: of none, of one, or of a truncation and a mask.

    A name says which ratio is bounded (that of a token, or the product or the geometric mean of those of a
    sequence), and how.
    """
    weight = torch.ones_like(old_logp)
    for name in names:
        level, bound = name.split("_")
        log_ratio = old_logp - engine_logp
        if level != "token":
            log_ratio = mean(log_ratio)                           # the log of the geometric mean
        if level == "sequence":
            log_ratio = log_ratio * lengths()                     # the sum, which is the log of the product
        ratio = log_ratio.clamp(-20, 20).exp()
        if bound == "truncate":
            weight = ratio.clamp(max=cap)
            continue
        # After a truncation a mask only sets weights to 0. Without one it weights by its ratio as well, but
        # geometric_mask never does.
        if len(names) == 1 and level != "geometric":
            weight = ratio
        weight = weight * ((ratio >= low) & (ratio <= high))
    return weight


TRUNCATIONS = ("token_truncate", "sequence_truncate")
MASKS = ("token_mask", "sequence_mask", "geometric_mask")
CORRECTIONS = {"none": partial(importance, ())}
# The product of one tuple consists of a tuple (name,) for each of its names.
for names in (*product(TRUNCATIONS), *product(MASKS), *product(TRUNCATIONS, MASKS)):
    CORRECTIONS[",".join(names)] = partial(importance, names)


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
    Any other estimator raises KeyError. Against overflow exp(d) and ratio * exp(d) are kept at or below
    e^60, and ratio at or below e^20; where such a bound acts, the bounded factor has no gradient.

    In the loss the gradient of the estimate matters. In the reward its value matters, because the policy
    gradient comes from it. In expectation the two are the gradients of these, where F is
    KL(policy || reference) and R is KL(reference || policy):

              in the loss             in the reward
    k1        0                       F, with a token's effect on all later tokens
    k2        F                       neither of the two
    k3        R                       F - R
    k3+       F
    k3_is     F, also off-policy

    Tang and Munos 2025, https://arxiv.org/abs/2506.09477.
    """
    d = ref_logp - logp
    k2 = d.square() / 2
    k3 = d.clamp(max=60).exp() - 1 - d
    if estimator == "k3_is":
        # This is (exp(d) - 1 - d) * ratio. The product of exp(d) and ratio is exp(ref_logp - old_logp), which
        # may be a moderate number where exp(d) is huge and ratio tiny.
        ratio = (logp - old_logp).clamp(max=20).exp()
        return (ref_logp - old_logp).clamp(max=60).exp() - (1 + d) * ratio
    estimates = {"k1": -d, "k2": k2, "k3": k3, "k3+": k3.detach() + k2 - k2.detach()}
    return estimates[estimator]


# What configure() refuses before a model is loaded: other values of these settings, and settings that do not
# fit each other. A rule reads the settings that are its parameters. Where it is false, the script stops with
# the first of them, its value and the message.
CHOICES = {
    "advantage": ADVANTAGES,
    "loss_type": LOSSES,
    "loss_aggregation": AGGREGATIONS,
    "engine_correction": CORRECTIONS,
    "kl_estimator": ("k2", "k3", "k3+", "k3_is", "k1_reward", "k1_advantage"),
}
RULES = (
    # the loss
    (lambda engine_correction, old_logprobs: old_logprobs == "trainer" or engine_correction == "none",
     ": with old_logprobs=engine the ratio corrects already"),
    (lambda correction_high, engine_correction: correction_high == 2 or "mask" in engine_correction
     or "truncate" not in engine_correction, " bounds a mask; correction_cap bounds a truncation"),
    (lambda correction_low, correction_high: correction_low < correction_high,
     " is not below correction_high={correction_high}"),
    (lambda reference_model, kl_coef: not reference_model or kl_coef > 0, " needs a kl_coef above 0"),
    (lambda skip_zero_advantage, entropy_coef, kl_coef, kl_estimator:
     not skip_zero_advantage or entropy_coef == 0 and (kl_coef == 0 or kl_estimator.startswith("k1")),
     ", but entropy_coef or a KL in the loss moves the policy there too"),
    # the advantage
    (lambda num_generations, advantage: num_generations > 1 or advantage in ("reinforce++", "none"),
     ": advantage={advantage} compares a prompt's completions"),
    (lambda advantage, kl_estimator, kl_coef:
     advantage != "none" or kl_coef > 0 and kl_estimator == "k1_advantage",
     " teaches nothing without kl_estimator=k1_advantage and a kl_coef above 0"))
