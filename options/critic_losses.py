"""
The formulas of PPO's critic: the rewards of tokens, advantages and returns, and the critic's loss.

Tensors have the shapes that losses.py describes, and the functions are pure as well. Only `value` carries a
gradient. train_ppo.py opens this file.
"""
import math

import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence


def token_rewards(scores, rewards, kl, kl_coef, lengths):
    """Return the rewards [C] of the tokens: -kl_coef * kl, plus the rewards of each sequence at their tokens.

    scores [N]; rewards: for each sequence a dict {token: reward}, whose last token also gets what the score
    has beyond their sum; kl [C]; lengths: a list that sums to C. NaN stays NaN.
    Ouyang et al. 2022, https://arxiv.org/abs/2203.02155, eq. 2, with the KL spread over the tokens.
    Example: scores [1, 3], rewards [{1: 1}, {0: 2}], kl [.1, .2, .3], kl_coef 1, lengths [2, 1]
    -> [-.1, .8, 2.7].
    """
    added = torch.zeros_like(kl)
    # What split returns are views: to write to a part writes to `added`.
    for part, score, sequence_rewards in zip(added.split(lengths), scores.tolist(), rewards):
        for token, reward in sequence_rewards.items():
            part[token] = reward
        last = len(part) - 1                    # -1 if there are no tokens, and then nothing is written
        difference = score - sum(sequence_rewards.values())
        part[last:] = sequence_rewards.get(last, 0.0) + difference
    return -kl_coef * kl + added


def with_later_sequences(rewards, lengths_of_sequences):
    """Return rewards [C] in which a sequence's last token also has what its episode's later sequences earn.

    An agent's episode may consist of several sequences of tokens, and gae reads each of them by itself. The
    score of the episode most often belongs to the last sequence, but the earlier ones led to it as well.
    lengths_of_sequences: for each episode a list with the number of sampled tokens of each sequence; together
    they sum to C. With one sequence per episode nothing changes. NaN stays NaN.
    Example: rewards [1, 0, 2, 0, 5], lengths_of_sequences [[2, 1, 1], [1]] -> [1, 2, 2, 0, 5].
    """
    added = torch.zeros_like(rewards)
    sequence_end = 0
    for lengths in lengths_of_sequences:
        episode_end = sequence_end + sum(lengths)
        for length in lengths[:-1]:
            sequence_end += length
            added[sequence_end - 1] = rewards[sequence_end:episode_end].sum()
        sequence_end = episode_end
    return rewards + added


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
    r = pad_sequence(rewards.split(lengths), batch_first=True)            # [n, L]
    v = pad_sequence(values.split(lengths), batch_first=True)
    delta = r + gamma * F.pad(v[:, 1:], (0, 1)) - v
    adv = torch.empty_like(delta)
    later = torch.zeros_like(delta[:, 0])                                 # A_(t+1), [n]
    for t in reversed(range(delta.shape[1])):
        later = delta[:, t] + gamma * lam * later
        adv[:, t] = later
    adv = torch.cat([row[:length] for row, length in zip(adv, lengths)])  # [C]
    return adv, adv + values


def value_loss(value, old_value, ret, value_clip):
    """Return the squared-error loss of each value, with gradient, and where clipping acted on it; [C] each.

    loss = max((v - ret)^2, (old + clip(v - old, -value_clip, value_clip) - ret)^2) / 2. The gradient is 0
    where the second square is larger: there v has moved from old towards ret by more than value_clip.
    With value_clip 0 nothing is clipped. PPO's reference implementation, ppo2 in openai/baselines, does this.
    """
    bound = value_clip or math.inf
    # A value within the bounds stays the same bit for bit, so its rounding is not counted as clipping.
    clipped_value = value.clamp(old_value - bound, old_value + bound)
    loss = (value - ret).square() / 2
    clipped_loss = (clipped_value - ret).square() / 2
    return torch.max(loss, clipped_loss), clipped_loss > loss
