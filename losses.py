"""The math of the training scripts: advantages, policy losses, KL estimators, aggregation.

Pure functions: tensors in, tensors out; nothing in place, no globals, no model, no process group.

One convention. A per-token tensor (`logp`, `old_logp`, `ref_logp`, `rollout_logp`, `entropy`, `adv`) holds
completion tokens only, flat, one sequence after another: `[C]`. Prompts and padding are never in it, so no
mask can be wrong. Entry c is about the completion token c, read from the hidden state one token before it.
`logp` carries gradient, all others are constants. B prompts, G completions a prompt, N = B * G sequences.
"""
import torch


def group_advantages(rewards, num_generations, kind):
    """Advantage of each completion over the others that answer the same prompt, and the spread of each group.

    rewards [N], the G completions of a prompt adjacent; NaN marks a completion without a reward: it takes no
    part in its group's statistics and its advantage is 0. Returns advantages [N] and unbiased standard
    deviations [B]. A group whose rewards are all equal has exactly 0 of both: it teaches nothing.
    kind  grpo     (r - mean) / (std + 1e-4)            Shao et al. 2024, 4.1.2; the epsilon is TRL's
          dr_grpo  r - mean                             Liu et al. 2025: dividing by std favours groups that
                                                        are nearly all right or all wrong
          rloo     r - mean of the *other* completions  Ahmadian et al. 2024; is dr_grpo * G / (G - 1)
    Example: rewards [1, 0, 0, 0], G = 4 -> std 0.5; grpo [1.5, -0.5, -0.5, -0.5], dr_grpo [.75, -.25, -.25,
    -.25], rloo [1, -1/3, -1/3, -1/3].
    """
    groups = rewards.double().view(-1, num_generations)           # [B, G], float64: equal rewards centre to 0
    scored = ~groups.isnan()                                      # [B, G]
    count = scored.sum(1, keepdim=True).clamp(min=1)              # [B, 1]
    mean = groups.nansum(1, keepdim=True) / count                 # [B, 1]
    centred = torch.where(scored, groups - mean, 0.0)             # [B, G]
    others = (count - 1).clamp(min=1)                             # [B, 1]
    std = (centred.square().sum(1, keepdim=True) / others).sqrt() # [B, 1]
    if kind == "grpo":
        adv = centred / (std + 1e-4)
    elif kind == "dr_grpo":
        adv = centred
    elif kind == "rloo":
        adv = centred * count / others
    else:
        raise ValueError(f"advantage={kind!r}: choose grpo, dr_grpo or rloo")
    return adv.flatten().to(rewards.dtype), std.flatten()         # [N], [B]


def sequence_weights(lengths, aggregation, num_tokens, num_sequences, max_length):
    """Weight of each sequence's tokens, so that the batch's loss is the plain sum of weight * token loss.

    lengths [n]: completion tokens of the sequences at hand (a micro-batch, a rank, anything). num_tokens and
    num_sequences count the *global* batch of one optimizer step. Because no weight depends on how that batch
    was split, neither does the gradient. Returns [n].
    aggregation  token_mean       every token alike: 1 / num_tokens                  DAPO, Yu et al. 2025
                 sequence_mean    every sequence alike: 1 / (len * num_sequences)    GRPO, Shao et al. 2024
                 constant_length  1 / (max_length * num_sequences): no length bias   Dr. GRPO, Liu et al. 2025
    """
    if aggregation == "token_mean":
        return torch.full_like(lengths, 1.0, dtype=torch.float32) / num_tokens
    if aggregation == "sequence_mean":
        return 1.0 / (lengths.float() * num_sequences)
    if aggregation == "constant_length":
        return torch.full_like(lengths, 1.0, dtype=torch.float32) / (max_length * num_sequences)
    raise ValueError(f"loss_aggregation={aggregation!r}: choose token_mean, sequence_mean or constant_length")


def policy_loss(logp, old_logp, adv, epsilon, epsilon_high, loss_type):
    """Loss of each token, with gradient, and for the logs whether clipping acted on it low, high; all [C].

    ratio = exp(logp - old_logp).
    loss_type  clip   -min(ratio * adv, clip(ratio, 1 - epsilon, 1 + epsilon_high) * adv): beyond the bound,
                      in the direction that adv pushes, a token has no gradient
                      PPO, Schulman et al. 2017, eq. 7; the asymmetric bound is DAPO's
               cispo  -stop_gradient(min(ratio, 1 + epsilon_high)) * adv * logp: the weight is clipped, the
                      token keeps its gradient
                      MiniMax-M1, Chen et al. 2025, eq. 4-5
    At ratio 1 both have the gradient -adv * grad(logp).
    """
    ratio = (logp - old_logp).exp()
    low = high = torch.zeros_like(ratio, dtype=torch.bool)
    if loss_type == "clip":
        loss = -torch.min(ratio * adv, ratio.clamp(1 - epsilon, 1 + epsilon_high) * adv)
        low, high = (ratio < 1 - epsilon) & (adv < 0), (ratio > 1 + epsilon_high) & (adv > 0)
    elif loss_type == "cispo":
        loss = -ratio.clamp(max=1 + epsilon_high).detach() * adv * logp
        high = ratio > 1 + epsilon_high
    else:
        raise ValueError(f"loss_type={loss_type!r}: choose clip or cispo")
    return loss, low, high


def kl_penalty(logp, ref_logp, estimator):
    """Per-token estimate of KL(policy || reference) from tokens that the policy sampled; [C], with gradient.

    With d = ref_logp - logp (Schulman 2020, http://joschu.net/blog/kl-approx.html):
    estimator  k1  -d            unbiased, high variance; its gradient as a loss is 0 in expectation: use it
                                 for logs and in rewards, not in the loss
               k2  d^2 / 2       biased value; as a loss its gradient is that of KL in expectation
               k3  exp(d) - 1 - d  unbiased, never negative, what GRPO uses; as a loss its gradient is, in
                                 expectation, that of KL(reference || policy)
    """
    d = ref_logp - logp
    if estimator == "k1":
        return -d
    if estimator == "k2":
        return d.square() / 2
    if estimator == "k3":
        return d.exp() - 1 - d
    raise ValueError(f"kl_estimator={estimator!r}: choose k1, k2 or k3")
