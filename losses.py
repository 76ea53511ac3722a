"""The math of the training scripts: advantages, GAE, policy and value losses, KL estimators, aggregation.

Pure functions: tensors in, tensors out; nothing in place, no globals, no model, no process group.

One convention. A per-token tensor holds completion tokens only, flat, one sequence after another: `[C]`.
Prompts and padding are never in it, so no mask can be wrong. Entry c is about the completion token c, read
from the hidden state one token before it. N sequences, G completions for each of P prompts. Gradient flows
through `logp`, `entropy` and `value` alone.
"""
import math

import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence


def group_std(rewards, num_generations):
    """Standard deviation (of n - 1) of the rewards of each prompt's completions; [N], as below -> [P].

    Exactly 0 where all are equal, or fewer than two are not NaN.
    """
    groups = rewards.double().view(-1, num_generations)           # [P, G], float64: equal rewards centre to 0
    count = (~groups.isnan()).sum(1, keepdim=True)                # [P, 1]
    centred = groups - groups.nansum(1, keepdim=True) / count     # [P, G]
    return (centred.square().nansum(1) / (count[:, 0] - 1).clamp(min=1)).sqrt()


def group_advantages(rewards, num_generations, kind, lengths=None, greedy=None, pass_k=1):
    """Advantage of each completion over others, most often those of its prompt; [N] -> [N].

    rewards [N], the G completions of a prompt adjacent; NaN marks a completion without a reward: it takes no
    part in any statistics and its advantage is 0. lengths [N]: tokens of each completion. greedy [P]: reward
    of each prompt's greedy completion, for remax. By the first six kinds a group whose rewards are all equal
    has an advantage of exactly 0: it teaches nothing.
    kind  grpo        (r - mean) / (std + 1e-4)           Shao et al. 2024, 4.1.2; the epsilon is TRL's
          dr_grpo     r - mean                            Liu et al. 2025: dividing by std favours groups
                                                          that are nearly all right or all wrong
          grpo_batch  (r - mean) / (std of the batch's rewards + 1e-4)          Liu et al. 2025b, Lite PPO
          rloo        r - mean of the *other* completions                       Ahmadian et al. 2024
                      is dr_grpo * G / (G - 1)
          opo         r - mean weighted by length: the baseline of least variance  Hao et al. 2025
          pass_at_k   of the reward of the best of pass_k among the G: see below   Chen et al. 2025
          reinforce++           r, whitened over the tokens of the batch           Hu et al. 2025
          reinforce++_baseline  r - mean, whitened likewise                        Hu et al. 2025
          remax       r - reward of the greedy completion                          Li et al. 2023
    Example: rewards [1, 0, 0, 0], G = 4 -> std 0.5; grpo [1.5, -0.5, -0.5, -0.5], dr_grpo [.75, -.25, -.25,
    -.25], rloo [1, -1/3, -1/3, -1/3].
    """
    groups = rewards.double().view(-1, num_generations)           # [P, G], float64: equal rewards centre to 0
    scored = ~groups.isnan()                                      # [P, G]
    count = scored.sum(1, keepdim=True).clamp(min=1)              # [P, 1]
    mean = groups.nansum(1, keepdim=True) / count                 # [P, 1]
    centred = torch.where(scored, groups - mean, 0.0)             # [P, G]
    others = (count - 1).clamp(min=1)                             # [P, 1]
    tokens = None if lengths is None else lengths.view_as(groups) * scored                      # [P, G]
    if kind == "grpo":
        adv = centred / (group_std(rewards, num_generations)[:, None] + 1e-4)
    elif kind == "dr_grpo":
        adv = centred
    elif kind == "grpo_batch":
        adv = centred / ((groups[scored].std() if scored.sum() > 1 else 0.0) + 1e-4)
    elif kind == "rloo":
        adv = centred * count / others
    elif kind == "opo":
        adv = centred - (tokens * centred).sum(1, keepdim=True) / tokens.sum(1, keepdim=True).clamp(min=1)
    elif kind == "pass_at_k":
        adv = pass_at_k_advantages(groups, scored, pass_k)
    elif kind in ("reinforce++", "reinforce++_baseline"):
        kept = groups.nan_to_num() if kind == "reinforce++" else centred
        total = tokens.sum().clamp(min=1)
        centre = (tokens * kept).sum() / total
        adv = (kept - centre) / (((tokens * (kept - centre).square()).sum() / total).sqrt() + 1e-8)
    elif kind == "remax":
        adv = (groups - greedy[:, None]).nan_to_num()             # without a baseline nothing is learned
    else:
        raise ValueError(f"advantage={kind!r}: choose {', '.join(ADVANTAGES)}")
    return torch.where(scored, adv, 0.0).flatten().to(rewards.dtype)


ADVANTAGES = ("grpo", "dr_grpo", "grpo_batch", "rloo", "opo", "pass_at_k", "reinforce++",
              "reinforce++_baseline", "remax")


def pass_at_k_advantages(groups, scored, k):
    """Advantages when a draw of k of a prompt's G completions is rewarded by its best; [P, G].

    Chen et al. 2025 (https://arxiv.org/abs/2508.10751): of all C(G, k) draws a share of R = 1 - C(wrong,
    k) / C(G, k) succeed, with deviation s = sqrt(R (1 - R)). A right completion (reward above 0) is in
    successful ones only: (1 - R) / s. A wrong one in a share of 1 - C(wrong - 1, k - 1) / C(G - 1, k - 1).
    """
    count = scored.sum(1, keepdim=True).double()                  # [P, 1]
    wrong = ((groups <= 0) & scored).sum(1, keepdim=True).double()
    failing = failing_with = torch.ones_like(wrong)               # shares of draws: all, with a wrong one
    for i in range(k):                                            # C(wrong, k) / C(G, k), factor by factor
        factor = (wrong - i).clamp(min=0) / (count - i).clamp(min=1)
        failing, failing_with = failing * factor, failing_with * (factor if i else 1)
    std = (failing * (1 - failing)).sqrt().clamp(min=1e-12)
    adv = torch.where(groups > 0, failing, failing - failing_with) / std
    return torch.where((failing > 0) & (failing < 1), adv, 0.0)


def overlong_penalty(lengths, max_length, buffer):
    """Soft penalty of completions that are nearly cut off, [N] -> [N] from 0 to -1: linear over the last
    `buffer` tokens before max_length. DAPO, Yu et al. 2025 (https://arxiv.org/abs/2503.14476), eq. 13."""
    return ((max_length - buffer - lengths) / buffer).clamp(-1, 0)


def sequence_weights(lengths, aggregation, num_tokens, num_sequences, max_length):
    """Weight of each sequence's tokens, so that the batch's loss is the plain sum of weight * token loss.

    lengths [n]: completion tokens of the sequences at hand (a micro-batch, a rank, anything). num_tokens and
    num_sequences count the *global* batch of one optimizer step. Because no weight depends on how that batch
    was split, neither does the gradient. Returns [n].
    aggregation  token_mean       every token alike: 1 / num_tokens                  DAPO, Yu et al. 2025
                 sequence_mean    every sequence alike: 1 / (len * num_sequences)    GRPO, Shao et al. 2024
                 constant_length  1 / (max_length * num_sequences): no length bias   Dr. GRPO, Liu et al. 2025
                 sequence_sum     1 / num_sequences: the plain policy gradient      RLOO, Ahmadian et al. 2024
    """
    ones = torch.ones_like(lengths, dtype=torch.float32)
    if aggregation == "token_mean":
        return ones / num_tokens
    if aggregation == "sequence_mean":
        return ones / (lengths * num_sequences)
    if aggregation == "constant_length":
        return ones / (max_length * num_sequences)
    if aggregation == "sequence_sum":
        return ones / num_sequences
    raise ValueError(f"loss_aggregation={aggregation!r}: choose token_mean, sequence_mean, constant_length "
                     "or sequence_sum")


def policy_loss(logp, old_logp, adv, mean, epsilon, epsilon_high, loss_type, dual_clip=0.0, marked=None):
    """Loss of each token, with gradient, and for the logs whether clipping acted on it low, high; all [C].

    ratio = exp(logp - old_logp). mean: a function that gives each token the mean of a per-token tensor over
    its sequence, [C] -> [C] (MicroBatch.mean). marked [C]: the tokens that covariance_marks has chosen.
    loss_type  clip   -min(ratio * adv, clip(ratio, 1 - epsilon, 1 + epsilon_high) * adv): beyond the bound,
                      in the direction that adv pushes, a token has no gradient
                      PPO, Schulman et al. 2017, eq. 7; the asymmetric bound is DAPO's
                      dual_clip > 0 also bounds the loss of a negative adv, by -dual_clip * adv; the ratio
                      alone does not (Ye et al. 2020, https://arxiv.org/abs/1912.09729, eq. 5)
               gspo   the same with one ratio a sequence, exp(mean(logp - old_logp)), and bounds of 3e-4, 4e-4
                      Zheng et al. 2025, https://arxiv.org/abs/2507.18071; with sequence_mean. In the form
                      of GSPO-token there (4.3) each token has a gradient of its own: weights of tokens count
               gmpo   -exp(mean(log ratio, clipped token by token as in clip)) * adv: the geometric mean of
                      what clip adds up. Zhao et al. 2025, https://arxiv.org/abs/2507.20673; its bounds
                      e^-0.4, e^0.4 are epsilon 0.33, epsilon_high 0.49; with sequence_mean
               cispo  -stop_gradient(min(ratio, 1 + epsilon_high)) * adv * logp: the weight is clipped, the
                      token keeps its gradient
                      MiniMax-M1, Chen et al. 2025, https://arxiv.org/abs/2506.13585, eq. 4-5
               sapo   -4 / t * sigmoid(t * (ratio - 1)) * adv: a soft bound on both sides, t = 1 where
                      adv > 0, else 1.05: Gao et al. 2025, https://arxiv.org/abs/2511.20347
               gpg    -adv * logp: no ratio at all. Chu et al. 2025, https://arxiv.org/abs/2504.02546
               clip_cov  clip, but 0 for the marked tokens: against the collapse of entropy
                      Cui et al. 2025, https://arxiv.org/abs/2505.22617, section 4, as the next one
               kl_cov -ratio * adv, plus |logp - old_logp| for the marked tokens, nothing while ratio is 1
    At ratio 1 all have the gradient -adv * grad(logp), but for what clip_cov has marked.
    """
    log_ratio = (logp - old_logp).clamp(-20, 20)                  # infinity times a gradient of 0 is NaN
    of_sequence = lambda x: mean(x.detach()) + (x - x.detach())   # the sequence's value, the token's gradient
    ratio = (of_sequence(log_ratio) if loss_type == "gspo" else log_ratio).exp()
    low = high = torch.zeros_like(ratio, dtype=torch.bool)
    if loss_type in ("clip", "gspo", "clip_cov"):
        loss = -torch.min(ratio * adv, ratio.clamp(1 - epsilon, 1 + epsilon_high) * adv)
        low, high = (ratio < 1 - epsilon) & (adv < 0), (ratio > 1 + epsilon_high) & (adv > 0)
        if dual_clip:
            loss = torch.where(adv < 0, torch.min(loss, -dual_clip * adv), loss)
            high = high | (ratio > dual_clip) & (adv < 0)
        if loss_type == "clip_cov":
            loss = torch.where(marked, 0.0, loss)
    elif loss_type == "gmpo":
        low, high = (ratio < 1 - epsilon) & (adv < 0), (ratio > 1 + epsilon_high) & (adv > 0)
        bounded = log_ratio.clamp(math.log1p(-epsilon), math.log1p(epsilon_high))
        loss = -of_sequence(torch.where(low | high, bounded, log_ratio)).exp() * adv
    elif loss_type == "cispo":
        loss = -ratio.clamp(max=1 + epsilon_high).detach() * adv * logp
        high = ratio > 1 + epsilon_high
    elif loss_type == "sapo":
        t = torch.where(adv > 0, torch.ones_like(adv), 1.05)
        loss = -4 / t * torch.sigmoid(t * (ratio - 1)) * adv
    elif loss_type == "gpg":
        loss = -adv * logp
    elif loss_type == "kl_cov":
        loss = -ratio * adv + marked * log_ratio.abs()
    else:
        raise ValueError(f"loss_type={loss_type!r}: choose clip, gspo, gmpo, cispo, sapo, gpg, clip_cov or "
                         "kl_cov")
    return loss, low, high


def covariance_marks(logps, adv, loss_type, share, generator):
    """Which tokens of a whole step clip_cov and kl_cov act on; a list of n [len], adv [n] -> n bool [len].

    Entropy is lost where likely tokens are pushed up and unlikely ones down: where (logp - mean logp) *
    (adv - mean adv) is large. kl_cov takes the `share` of all tokens where it is largest, clip_cov as many by
    chance from those where it is between 1 and 5. Cui et al. 2025, section 4: there with the logprobs of each
    update's policy in place of the one that sampled, and shares of 2e-4, for kl_cov 2e-3 at 7 B parameters.
    """
    lengths = [len(logp) for logp in logps]
    logp = torch.cat([*logps, adv.new_empty(0)])                                        # [C]
    adv = adv.repeat_interleave(torch.tensor(lengths, dtype=torch.long, device=adv.device))         # [C]
    covariance = (logp - logp.mean()) * (adv - adv.mean())
    count = min(max(1, int(share * len(logp))), len(logp))
    if loss_type == "kl_cov":
        chosen = covariance.topk(count).indices
    else:
        eligible = ((covariance > 1) & (covariance < 5)).nonzero()[:, 0]
        chosen = eligible[torch.randperm(len(eligible), generator=generator)[:count]]
    return torch.zeros_like(logp, dtype=torch.bool).index_fill(0, chosen, True).split(lengths)


def correction_weights(old_logp, rollout_logp, mean, length, correction, low, high):
    """Importance weight of each token for what the engine sampled from and the trainer did not; [C].

    ratio = exp(old_logp - rollout_logp) of a token; of a sequence, the product over its tokens (its mean log
    ratio, as in policy_loss, times length, [C]). The weights have no gradient and multiply the token's loss.
    correction  none               1
                token_truncate     min(ratio, high)                 TIS, Yao et al. 2025
                token_mask         ratio, but 0 outside [low, high]   IcePop, Ling Team 2025
                sequence_truncate, sequence_mask: the same by the sequence's ratio   MIS, Liu et al. 2025
                geometric_mask     1, but 0 where exp(mean log ratio) of the sequence is outside [low, high],
                                   0.99 and 1.01 say: a sequence's ratio drifts with its length, this does not
    """
    if correction not in CORRECTIONS:
        raise ValueError(f"engine_correction={correction!r}: choose {', '.join(CORRECTIONS)}")
    if correction == "none":
        return torch.ones_like(old_logp)
    log_ratio = old_logp - rollout_logp
    if correction == "geometric_mask":
        log_ratio = mean(log_ratio)
    elif correction.startswith("sequence"):
        log_ratio = mean(log_ratio) * length
    ratio = log_ratio.clamp(-20, 20).exp()
    if correction.endswith("truncate"):
        return ratio.clamp(max=high)
    inside = ((ratio >= low) & (ratio <= high)).to(ratio.dtype)
    return inside if correction == "geometric_mask" else ratio * inside


CORRECTIONS = ("none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask", "geometric_mask")


def kl_penalty(logp, ref_logp, estimator, old_logp=None):
    """Estimate of KL(policy || reference) at each token that the policy sampled; [C], with gradient.

    With d = ref_logp - logp (Schulman 2020, http://joschu.net/blog/kl-approx.html):
    estimator  k1     -d               unbiased, high variance
               k2     d^2 / 2          biased
               k3     exp(d) - 1 - d   unbiased, never negative; what GRPO uses
               k3+    the value of k3 with the gradient of k2            verl's name for it
               k3_is  k3 * exp(logp - old_logp), for tokens that old_logp sampled     DeepSeek-V3.2, 2025
    In the loss the gradient counts. In expectation it is that of KL(policy || reference) with k2, k3+ and
    k3_is (k3_is also where the policy has left old_logp); with k3 that of KL(reference || policy); with k1 0.
    In the reward the value counts, and what the policy gradient makes of it: with k1 that is the gradient of
    KL(policy || reference), over all later tokens, too; with k3 the gradient of KL(reference || policy) is
    taken off it; k2 is neither (Tang and Munos 2025, https://arxiv.org/abs/2506.09477).
    """
    d = ref_logp - logp
    k3 = d.clamp(max=60).exp() - 1 - d                            # exp must not overflow, twice with k3_is
    if estimator == "k1":
        return -d
    if estimator == "k2":
        return d.square() / 2
    if estimator == "k3":
        return k3
    if estimator == "k3+":
        k2 = d.square() / 2
        return k3.detach() + k2 - k2.detach()
    if estimator == "k3_is":
        return k3 * (logp - old_logp).clamp(-20, 20).exp()
    raise ValueError(f"kl_estimator={estimator!r}: choose k1, k2, k3, k3+ or k3_is")


# ---------------------------------------------------------------- PPO with a critic

def token_rewards(scores, kl, kl_coef, lengths):
    """Rewards of the completion tokens: -kl_coef * kl at each, and the score at the last. [C]

    scores [N], kl [C], lengths: list, sums to C. NaN scores stay NaN; a completion without tokens has none.
    Ouyang et al. 2022 (https://arxiv.org/abs/2203.02155), eq. 2, with the KL spread over its tokens.
    Example: scores [1, 2], kl [.1, .2, .3], kl_coef 1, lengths [2, 1] -> [-.1, .8, 1.7].
    """
    rewards = -kl_coef * kl
    lens = torch.tensor(lengths, dtype=torch.long, device=kl.device)
    rewards[lens.cumsum(0)[lens > 0] - 1] += scores[lens > 0]
    return rewards


def gae(rewards, values, lengths, gamma, lam):
    """Generalised advantage estimation (Schulman et al. 2016, eq. 16) over each sequence's completion tokens.

    rewards [C], values [C]: of the state *before* each completion token; lengths: list, sums to C. Returns
    advantages [C] and returns [C] (advantage + value, the critic's target).
    delta_t = r_t + gamma * v_(t+1) - v_t;  A_t = delta_t + gamma * lam * A_(t+1). Behind the last token the
    value is 0, also where the completion was cut off: its score was given as if it had ended there.
    Example: one sequence, rewards [0, 0, 1], values 0, gamma 1, lam 0.5 -> advantages [0.25, 0.5, 1].
    """
    if len(rewards) == 0:                                         # a rank without sequences
        return rewards, values
    r, v = (pad_sequence(x.split(lengths), batch_first=True) for x in (rewards, values))  # [n, L]
    delta = r + gamma * F.pad(v[:, 1:], (0, 1)) - v
    adv, later = torch.empty_like(delta), torch.zeros_like(delta[:, 0])
    for t in reversed(range(delta.shape[1])):
        adv[:, t] = later = delta[:, t] + gamma * lam * later
    real = pad_sequence(torch.ones_like(values, dtype=torch.bool).split(lengths), batch_first=True)
    return adv[real], adv[real] + values


def whiten(values, mean):
    """(values - mean) / (std + 1e-8), both taken over all ranks; [C]. NaNs stay, and count for nothing.

    mean: a function that averages a tensor over all ranks in float64, without its NaNs. Sums of squares in
    float32 would whiten equal advantages to rounding noise.
    """
    centre = mean(values)
    std = mean((values.double() - centre).square()) ** 0.5
    return (values - centre) / (std + 1e-8)


def value_loss(value, old_value, ret, value_clip):
    """Squared error of each value, with gradient, and for the logs whether clipping acted on it; both [C].

    max((v - ret)^2, (old + clip(v - old, -value_clip, value_clip) - ret)^2) / 2: a value that has moved
    further than value_clip from its *old* value, towards the return, has no gradient. 0: no clipping.
    As in PPO's reference implementation (openai/baselines, ppo2).
    """
    loss = (value - ret).square() / 2
    if value_clip == 0:
        return loss, torch.zeros_like(loss, dtype=torch.bool)
    near = old_value + (value - old_value).clamp(-value_clip, value_clip)
    clipped_loss = (near - ret).square() / 2
    return torch.max(loss, clipped_loss), clipped_loss > loss


def adapted_kl_coef(kl_coef, kl, kl_target, kl_horizon, num_sequences):
    """The next KL coefficient: up when the measured KL is over its target, down when under, by at most 20% of
    num_sequences / kl_horizon a step. Ziegler et al. 2019 (https://arxiv.org/abs/1909.08593), 2.2."""
    error = max(-0.2, min(0.2, kl / kl_target - 1))
    return kl_coef * (1 + error * num_sequences / kl_horizon)
