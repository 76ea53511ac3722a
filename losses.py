"""The formulas of the training scripts: advantages, policy losses, weights of tokens, KL, and PPO's critic.

There is one function per advantage and one per policy loss; ADVANTAGES and LOSSES find them by their names.
All functions are pure: tensors in, tensors out, nothing changed in place, no model, no process group.

A per-token tensor holds sampled tokens only, flat, one sequence after another: `[C]`. Prompts and padding are
never in it, so no mask can be wrong. Entry c belongs to sampled token c and comes from the hidden state one
position before it. A per-sequence tensor is `[N]`: P prompts with G adjacent completions each. Gradient flows
through `logp` and `value` alone.
"""
import math

import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence


# ---------------------------------------------------------------- advantages
# Each function is called with (scores, num_generations, lengths=..., greedy=..., pass_k=...) and names the
# keywords that it needs. It returns the advantages [N] in the dtype of scores.
#   scores [N]: one per completion; NaN: not scored, so left out of all statistics, with an advantage of 0.
#   lengths [N]: sampled tokens of each completion. greedy [P]: score of each prompt's greedy completion.
# Completions of a prompt whose scores are all equal get exactly 0, except from reinforce++,
# reinforce++_baseline and remax.

def grouped(scores, num_generations):
    """Scores in groups, where they are not NaN, and scores less their group's mean (0 for NaN); [P, G] each.
    In float64 the sum of equal float32 scores is exact, so that they centre to exactly 0."""
    groups = scores.double().view(-1, num_generations)            # [P, G]
    scored = ~groups.isnan()                                      # [P, G]
    return groups, scored, torch.where(scored, groups - groups.nanmean(1, keepdim=True), 0.0)


def flattened(adv, scores):
    """Advantages of groups [P, G] in the shape and dtype of scores [N], 0 where the score is NaN."""
    return torch.where(scores.isnan(), 0.0, adv.flatten()).to(scores.dtype)


def group_std(scores, num_generations):
    """Standard deviation (divisor n - 1) of each prompt's scores that are not NaN; [N] -> [P], float64.
    It is exactly 0 where these are all equal or fewer than two."""
    _, scored, centred = grouped(scores, num_generations)
    return (centred.square().sum(1) / (scored.sum(1) - 1).clamp(min=1)).sqrt()


def grpo(scores, num_generations, **_):
    """(score - mean) / (standard deviation + 1e-4) of the prompt's completions.
    Shao et al. 2024, https://arxiv.org/abs/2402.03300, 4.1.2; the 1e-4 is TRL's.
    Example: scores [1, 0, 0, 0], G = 4 -> deviation 0.5, advantages [1.5, -0.5, -0.5, -0.5]."""
    _, _, centred = grouped(scores, num_generations)
    return flattened(centred / (group_std(scores, num_generations)[:, None] + 1e-4), scores)


def dr_grpo(scores, num_generations, **_):
    """score - mean of the prompt's completions. Dividing by the deviation would favour prompts whose answers
    are nearly all right or nearly all wrong: Liu et al. 2025, https://arxiv.org/abs/2503.20783."""
    return flattened(grouped(scores, num_generations)[2], scores)


def grpo_batch(scores, num_generations, **_):
    """(score - mean of the prompt's completions) / (standard deviation of the whole batch + 1e-4).
    Lite PPO, Liu et al. 2025, https://arxiv.org/abs/2508.08221."""
    groups, scored, centred = grouped(scores, num_generations)
    std = groups[scored].std() if scored.sum() > 1 else 0.0
    return flattened(centred / (std + 1e-4), scores)


def rloo(scores, num_generations, **_):
    """score - mean of the prompt's other completions, which is dr_grpo's advantage * n / (n - 1).
    Ahmadian et al. 2024, https://arxiv.org/abs/2402.14740. Example: [1, 0, 0, 0] -> [1, -1/3, -1/3, -1/3]."""
    _, scored, centred = grouped(scores, num_generations)
    count = scored.sum(1, keepdim=True)                           # [P, 1]
    return flattened(centred * count / (count - 1).clamp(min=1), scores)


def opo(scores, num_generations, *, lengths, **_):
    """score - mean of the prompt's completions weighted by their lengths, the baseline of least variance.
    Hao et al. 2025, https://arxiv.org/abs/2505.23585."""
    _, scored, centred = grouped(scores, num_generations)
    tokens = lengths.view_as(centred) * scored                    # [P, G]
    baseline = (tokens * centred).sum(1, keepdim=True) / tokens.sum(1, keepdim=True).clamp(min=1)
    return flattened(centred - baseline, scores)


def pass_at_k(scores, num_generations, *, pass_k=4, **_):
    """Advantage when a draw of k of a prompt's n scored completions is rewarded for its best, with 0 or 1.

    Of all draws the share F = C(wrong, k) / C(n, k) fails, so rewards have the deviation s = sqrt(F (1 - F)).
    No draw with a right completion (score above 0) fails: its advantage is F / s. Of the draws with a wrong
    one the share W = C(wrong - 1, k - 1) / C(n - 1, k - 1) fails: its advantage is (F - W) / s. Where all
    draws fail, or none, both are 0. Chen et al. 2025, https://arxiv.org/abs/2508.10751.
    """
    groups, scored, _ = grouped(scores, num_generations)
    count, wrong = (x.sum(1, keepdim=True).double() for x in (scored, groups <= 0))     # [P, 1]
    failing = failing_with = torch.ones_like(wrong)               # F and W, factor by factor
    # F is 0 from i = wrong on. Where fewer than pass_k are scored it may also be 0 / 0, and teaches nothing.
    for i in range(pass_k):
        factor = (wrong - i) / (count - i)
        failing, failing_with = failing * factor, failing_with * (factor if i else 1)
    adv = torch.where(groups > 0, failing, failing - failing_with) / (failing * (1 - failing)).sqrt()
    return flattened(torch.where((failing > 0) & (failing < 1), adv, 0.0), scores)


def whitened_by_length(groups, tokens):
    """(value - mean) / (std + 1e-8) over the batch's tokens, with std's divisor n; [P, G]."""
    total = tokens.sum().clamp(min=1)
    centre = (tokens * groups).sum() / total
    return (groups - centre) / (((tokens * (groups - centre).square()).sum() / total).sqrt() + 1e-8)


def reinforce_plus_plus(scores, num_generations, *, lengths, **_):
    """The score, whitened over the tokens of the batch. Hu et al. 2025, https://arxiv.org/abs/2501.03262."""
    groups, scored, _ = grouped(scores, num_generations)
    return flattened(whitened_by_length(groups.nan_to_num(), lengths.view_as(groups) * scored), scores)


def reinforce_plus_plus_baseline(scores, num_generations, *, lengths, **_):
    """score - mean of the prompt's completions, whitened over the tokens of the batch. Hu et al. 2025."""
    _, scored, centred = grouped(scores, num_generations)
    return flattened(whitened_by_length(centred, lengths.view_as(centred) * scored), scores)


def remax(scores, num_generations, *, greedy, **_):
    """score - score of the prompt's greedy completion, or 0 where that completion was not scored.
    Li et al. 2023, https://arxiv.org/abs/2310.10505."""
    groups, _, _ = grouped(scores, num_generations)
    return flattened((groups - greedy[:, None]).nan_to_num(), scores)


ADVANTAGES = {"grpo": grpo, "dr_grpo": dr_grpo, "grpo_batch": grpo_batch, "rloo": rloo, "opo": opo,
              "pass_at_k": pass_at_k, "reinforce++": reinforce_plus_plus,
              "reinforce++_baseline": reinforce_plus_plus_baseline, "remax": remax}


def overlong_penalty(lengths, max_length, buffer):
    """Penalty of completions that are nearly cut off, [N] -> [N]: linear from 0 to -1 over the last `buffer`
    tokens before max_length. DAPO, Yu et al. 2025, https://arxiv.org/abs/2503.14476, eq. 13."""
    return ((max_length - buffer - lengths) / buffer).clamp(-1, 0)


# ---------------------------------------------------------------- policy losses
# Each function is called with (logp, old_logp, adv, mean=..., epsilon=..., epsilon_high=..., dual_clip=...,
# marked=...) and names the keywords that it needs. It returns the loss of each token, with gradient, and for
# the logs where clipping acted at the lower bound and where at the upper one; all are [C].
#   mean: a function that gives each token the mean of a per-token tensor over its sequence, [C] -> [C].
#   marked: the tokens that covariance_marks has chosen.
# In the formulas ratio = exp(logp - old_logp). Where it is 1 every loss has the gradient -adv * grad(logp),
# except that clip_cov has none at marked tokens.

def bounded_log_ratio(logp, old_logp):
    """logp - old_logp within +-20: exp of more may be infinite, and infinity times a gradient of 0 is NaN."""
    return (logp - old_logp).clamp(-20, 20)


def of_sequence(values, mean):
    """At each token the mean over its sequence, with the gradient of the token's own value; [C]."""
    return mean(values.detach()) + (values - values.detach())


def out_of_bounds(ratio, adv, epsilon, epsilon_high):
    """Where the ratio is already beyond the bound towards which adv pushes it: the lower, the upper one."""
    return (ratio < 1 - epsilon) & (adv < 0), (ratio > 1 + epsilon_high) & (adv > 0)


def unclipped(loss):
    """What a loss without clipping returns."""
    nowhere = torch.zeros_like(loss, dtype=torch.bool)
    return loss, nowhere, nowhere


def clipped(ratio, adv, epsilon, epsilon_high, dual_clip):
    """What clip returns, for any ratio."""
    loss = -torch.min(ratio * adv, ratio.clamp(1 - epsilon, 1 + epsilon_high) * adv)
    low, high = out_of_bounds(ratio, adv, epsilon, epsilon_high)
    if dual_clip:
        loss = torch.where(adv < 0, torch.min(loss, -dual_clip * adv), loss)
        high = high | (ratio > dual_clip) & (adv < 0)
    return loss, low, high


def clip(logp, old_logp, adv, *, epsilon=0.2, epsilon_high=0.2, dual_clip=0.0, **_):
    """-min(ratio * adv, clip(ratio, 1 - epsilon, 1 + epsilon_high) * adv): no gradient beyond the bound.
    PPO, Schulman et al. 2017, https://arxiv.org/abs/1707.06347, eq. 7; two different bounds are DAPO's.
    With dual_clip > 0 the loss of a negative adv, which these do not bound, is at most -dual_clip * adv:
    Ye et al. 2020, https://arxiv.org/abs/1912.09729, eq. 5."""
    return clipped(bounded_log_ratio(logp, old_logp).exp(), adv, epsilon, epsilon_high, dual_clip)


def gspo(logp, old_logp, adv, *, mean, epsilon=0.2, epsilon_high=0.2, dual_clip=0.0, **_):
    """clip with one ratio per sequence, exp(mean of its tokens' log ratios); use it with sequence_mean.
    Zheng et al. 2025, https://arxiv.org/abs/2507.18071; their bounds are 3e-4 and 4e-4. This is the form of
    GSPO-token (4.3 there): each token has a gradient of its own, so that weights of tokens count."""
    ratio = of_sequence(bounded_log_ratio(logp, old_logp), mean).exp()
    return clipped(ratio, adv, epsilon, epsilon_high, dual_clip)


def gmpo(logp, old_logp, adv, *, mean, epsilon=0.2, epsilon_high=0.2, **_):
    """-adv * geometric mean of the sequence's ratios, each clipped as in clip; use it with sequence_mean.
    Zhao et al. 2025, https://arxiv.org/abs/2507.20673; their bounds e^-0.4 and e^0.4 are epsilon = 0.33 and
    epsilon_high = 0.49."""
    log_ratio = bounded_log_ratio(logp, old_logp)
    low, high = out_of_bounds(log_ratio.exp(), adv, epsilon, epsilon_high)
    bounded = log_ratio.clamp(math.log1p(-epsilon), math.log1p(epsilon_high))
    return -of_sequence(torch.where(low | high, bounded, log_ratio), mean).exp() * adv, low, high


def cispo(logp, old_logp, adv, *, epsilon_high=0.2, **_):
    """-stop_gradient(min(ratio, 1 + epsilon_high)) * adv * logp: clipped tokens keep their gradient.
    MiniMax-M1, Chen et al. 2025, https://arxiv.org/abs/2506.13585, eq. 4-5."""
    ratio = bounded_log_ratio(logp, old_logp).exp()
    high = ratio > 1 + epsilon_high
    return -ratio.clamp(max=1 + epsilon_high).detach() * adv * logp, torch.zeros_like(high), high


def sapo(logp, old_logp, adv, **_):
    """-4 / t * sigmoid(t * (ratio - 1)) * adv, a soft bound on both sides; t = 1 where adv > 0, else 1.05.
    Gao et al. 2025, https://arxiv.org/abs/2511.20347."""
    ratio = bounded_log_ratio(logp, old_logp).exp()
    t = torch.where(adv > 0, torch.ones_like(adv), 1.05)
    return unclipped(-4 / t * torch.sigmoid(t * (ratio - 1)) * adv)


def gpg(logp, old_logp, adv, **_):
    """-adv * logp, without any ratio. Chu et al. 2025, https://arxiv.org/abs/2504.02546."""
    return unclipped(-adv * logp)


def clip_cov(logp, old_logp, adv, *, marked, epsilon=0.2, epsilon_high=0.2, dual_clip=0.0, **_):
    """clip, but 0 for the marked tokens, so that entropy does not collapse.
    Cui et al. 2025, https://arxiv.org/abs/2505.22617, section 4."""
    ratio = bounded_log_ratio(logp, old_logp).exp()
    loss, low, high = clipped(ratio, adv, epsilon, epsilon_high, dual_clip)
    return torch.where(marked, 0.0, loss), low, high


def kl_cov(logp, old_logp, adv, *, marked, **_):
    """-ratio * adv, plus |logp - old_logp| for the marked tokens. Cui et al. 2025, section 4."""
    log_ratio = bounded_log_ratio(logp, old_logp)
    return unclipped(-log_ratio.exp() * adv + marked * log_ratio.abs())


LOSSES = {"clip": clip, "gspo": gspo, "gmpo": gmpo, "cispo": cispo, "sapo": sapo, "gpg": gpg,
          "clip_cov": clip_cov, "kl_cov": kl_cov}


def covariance_marks(logps, adv, kind, share, generator):
    """Which tokens of a whole step clip_cov and kl_cov act on; a list of n [len], adv [n] -> n bool [len].

    Entropy is lost where likely tokens are pushed up and unlikely ones down, that is where (logp - mean logp)
    * (adv - mean adv) is large. "kl_cov" marks the `share` of all tokens where it is largest; "clip_cov"
    draws as many from the tokens where it is between 1 and 5. Cui et al. 2025, section 4, with shares of
    2e-4, and 2e-3 for kl_cov at 7 B parameters. There each update's policy gives the logprobs, here the
    policy that sampled.
    """
    lengths = [len(logp) for logp in logps]
    logp = torch.cat([*logps, adv.new_empty(0)])                                        # [C]
    token_adv = adv.repeat_interleave(torch.tensor(lengths, dtype=torch.long, device=adv.device))   # [C]
    covariance = (logp - logp.mean()) * (token_adv - token_adv.mean())
    count = min(max(1, int(share * len(logp))), len(logp))
    if kind == "kl_cov":
        chosen = covariance.topk(count).indices
    else:
        eligible = ((covariance > 1) & (covariance < 5)).nonzero()[:, 0]
        chosen = eligible[torch.randperm(len(eligible), generator=generator)[:count]]
    return torch.zeros_like(logp, dtype=torch.bool).index_fill(0, chosen, True).split(lengths)


# ---------------------------------------------------------------- weights of sequences and tokens

def sequence_weights(lengths, aggregation, *, num_tokens, num_sequences, max_length):
    """Weight of each sequence's tokens, such that the batch's loss is the sum of weight * token loss; [n].

    lengths [n]: sampled tokens of the sequences at hand (a micro-batch, a rank, anything). num_tokens and
    num_sequences count the *global* batch of one optimizer step, so neither the weights nor the gradient
    depend on how it was split. Raises ValueError for an unknown aggregation.
    token_mean       1 / num_tokens: every token counts the same                   DAPO, Yu et al. 2025
    sequence_mean    1 / (length * num_sequences): every sequence counts the same  GRPO, Shao et al. 2024
    constant_length  1 / (max_length * num_sequences): no bias by length           Dr. GRPO, Liu et al. 2025
    sequence_sum     1 / num_sequences: the plain policy gradient                  RLOO, Ahmadian et al. 2024
    """
    if aggregation not in AGGREGATIONS:
        raise ValueError(f"loss_aggregation={aggregation!r}: choose {', '.join(AGGREGATIONS)}")
    divisors = {"token_mean": num_tokens, "sequence_mean": lengths * num_sequences,
                "constant_length": max_length * num_sequences, "sequence_sum": num_sequences}
    return torch.ones_like(lengths, dtype=torch.float32) / divisors[aggregation]


AGGREGATIONS = ("token_mean", "sequence_mean", "constant_length", "sequence_sum")


def correction_weights(old_logp, engine_logp, correction, *, mean, lengths, low, high):
    """Importance weight of each token, for the gap between the trainer's logprobs and the engine's; [C].

    The engine sampled with engine_logp [C], the trainer computes old_logp [C] for the same tokens: ratio =
    exp(old_logp - engine_logp). The weights have no gradient and multiply the token's loss. mean is as in the
    losses, lengths [C] is the length of each token's sequence. Raises ValueError for an unknown correction.
    none               1
    token_truncate     min(ratio, high)                        TIS, https://fengyao.notion.site/off-policy-rl
    token_mask         ratio, but 0 outside [low, high]           IcePop, https://ringtech.notion.site/icepop
    sequence_truncate  as token_truncate, by the product of the sequence's ratios
    sequence_mask      as token_mask, by that product                   MIS, https://richardli.xyz/rl-collapse
    geometric_mask     1, but 0 where the geometric mean of the sequence's ratios is outside [low, high], 0.99
                       and 1.01 for instance: it does not drift with the length, as the product does
    """
    if correction not in CORRECTIONS:
        raise ValueError(f"engine_correction={correction!r}: choose {', '.join(CORRECTIONS)}")
    if correction == "none":
        return torch.ones_like(old_logp)
    level, bound = correction.split("_")
    log_ratio = old_logp - engine_logp
    if level != "token":
        log_ratio = mean(log_ratio) * (lengths if level == "sequence" else 1)
    ratio = log_ratio.clamp(-20, 20).exp()
    if bound == "truncate":
        return ratio.clamp(max=high)
    inside = ((ratio >= low) & (ratio <= high)).to(ratio.dtype)
    return inside if level == "geometric" else ratio * inside


CORRECTIONS = ("none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask", "geometric_mask")


# ---------------------------------------------------------------- KL to a reference

def kl_penalty(logp, ref_logp, estimator, old_logp=None):
    """Estimate of KL(policy || reference) at each token that the policy sampled; [C], with gradient.

    With d = ref_logp - logp (Schulman 2020, http://joschu.net/blog/kl-approx.html):
    k1     -d               unbiased, high variance
    k2     d^2 / 2          biased
    k3     exp(d) - 1 - d   unbiased, never negative; what GRPO uses
    k3+    the value of k3 with the gradient of k2; the name is verl's
    k3_is  k3 * ratio, with ratio = exp(logp - old_logp), for tokens that the policy of old_logp sampled:
           DeepSeek-V3.2, 2025, https://arxiv.org/abs/2512.02556, eq. 7
    So that nothing overflows, exp(d) and ratio * exp(d) are at most e^60 and ratio at most e^20, and without
    gradient there. Any other estimator raises ValueError.
    In the loss the gradient counts. In expectation it is that of KL(policy || reference) with k2, k3+ and
    k3_is (with k3_is also after the policy has left old_logp), that of KL(reference || policy) with k3, and 0
    with k1. In the reward the value counts, and what the policy gradient makes of it: with k1 that is the
    gradient of KL(policy || reference), over all later tokens as well; with k3 the gradient of KL(reference
    || policy) is subtracted from it; with k2 it is neither (Tang and Munos 2025,
    https://arxiv.org/abs/2506.09477).
    """
    d = ref_logp - logp
    k2 = d.square() / 2
    k3 = d.clamp(max=60).exp() - 1 - d
    if estimator == "k1":
        return -d
    if estimator == "k2":
        return k2
    if estimator == "k3":
        return k3
    if estimator == "k3+":
        return k3.detach() + k2 - k2.detach()
    if estimator == "k3_is":
        # Multiplied out: where exp(d) is huge and the ratio tiny, their product need be neither.
        return (ref_logp - old_logp).clamp(max=60).exp() - (1 + d) * (logp - old_logp).clamp(max=20).exp()
    raise ValueError(f"kl_estimator={estimator!r}: choose {', '.join(KL_ESTIMATORS)}")


KL_ESTIMATORS = ("k1", "k2", "k3", "k3+", "k3_is")


# ---------------------------------------------------------------- PPO with a critic

def token_rewards(scores, kl, kl_coef, lengths):
    """Rewards of the sampled tokens: -kl_coef * kl at each, plus the score at the last of each sequence; [C].

    scores [N], kl [C], lengths: list, sums to C. NaN scores stay NaN. A completion without tokens gets none.
    Ouyang et al. 2022, https://arxiv.org/abs/2203.02155, eq. 2, with the KL spread over the tokens.
    Example: scores [1, 2], kl [.1, .2, .3], kl_coef 1, lengths [2, 1] -> [-.1, .8, 1.7].
    """
    rewards = -kl_coef * kl
    lens = torch.tensor(lengths, dtype=torch.long, device=kl.device)
    rewards[lens.cumsum(0)[lens > 0] - 1] += scores[lens > 0]
    return rewards


def gae(rewards, values, lengths, gamma, lam):
    """Generalised advantage estimation over each sequence's tokens: advantages [C] and returns [C].

    rewards [C], values [C]: of the state *before* each token; lengths: list, sums to C. The return, that is
    advantage + value, is the critic's target. Schulman et al. 2016, https://arxiv.org/abs/1506.02438, eq. 16:
    delta_t = r_t + gamma * v_(t+1) - v_t;  A_t = delta_t + gamma * lam * A_(t+1). After the last token the
    value is 0, also where the completion was cut off: its score was given as if it had ended there.
    Example: one sequence, rewards [0, 0, 1], values 0, gamma 1, lam 0.5 -> advantages [0.25, 0.5, 1].
    """
    # A rank may have no sequences, and pad_sequence takes no empty list.
    if len(rewards) == 0:
        return rewards, values
    r, v = (pad_sequence(x.split(lengths), batch_first=True) for x in (rewards, values))    # [n, L]
    delta = r + gamma * F.pad(v[:, 1:], (0, 1)) - v
    adv, later = torch.empty_like(delta), torch.zeros_like(delta[:, 0])
    for t in reversed(range(delta.shape[1])):
        adv[:, t] = later = delta[:, t] + gamma * lam * later
    real = pad_sequence(torch.ones_like(values, dtype=torch.bool).split(lengths), batch_first=True)
    return adv[real], adv[real] + values


def whiten(values, mean):
    """(values - mean) / (std + 1e-8) over all ranks, std with divisor n; [C]. NaNs stay and are not counted.
    mean: a function that averages a tensor over all ranks in float64, without its NaNs. Sums of squares in
    float32 would whiten equal advantages to rounding noise."""
    centre = mean(values)
    std = mean((values.double() - centre).square()) ** 0.5
    return (values - centre) / (std + 1e-8)


def value_loss(value, old_value, ret, value_clip):
    """Squared error of each value, with gradient, and where clipping acted on it; [C] each.

    max((v - ret)^2, (old + clip(v - old, -value_clip, value_clip) - ret)^2) / 2: a value that has moved
    towards the return by more than value_clip from its *old* value has no gradient. With value_clip 0 nothing
    is clipped. This is PPO's reference implementation: openai/baselines, ppo2.
    """
    loss = (value - ret).square() / 2
    if value_clip == 0:
        return loss, torch.zeros_like(loss, dtype=torch.bool)
    near = old_value + (value - old_value).clamp(-value_clip, value_clip)
    clipped_loss = (near - ret).square() / 2
    return torch.max(loss, clipped_loss), clipped_loss > loss


def adapted_kl_coef(kl_coef, kl, kl_target, kl_horizon, num_sequences):
    """The next KL coefficient: higher where the measured KL is above its target, lower where it is below, by
    at most 20% of num_sequences / kl_horizon. Ziegler et al. 2019, https://arxiv.org/abs/1909.08593, 2.2."""
    error = max(-0.2, min(0.2, kl / kl_target - 1))
    return kl_coef * (1 + error * num_sequences / kl_horizon)
