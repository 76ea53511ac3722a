"""
Packed rows: several sequences side by side in one row of tokens, without padding, and the attention for them.

A sequence is a rollout: a prompt, then the tokens that the policy sampled, in one span or in several with
other tokens between them. A micro-batch is one row of T tokens that holds S sequences. `position_ids` restart
at each sequence and attention stays inside it. Per-token tensors hold sampled tokens only, flat, [C], in the
order of the row: entry c is about sampled token c and is read from the hidden state one place before it.
Prompts and inserted tokens are never in them, so there is no mask that could be wrong.

Layers that carry a state from token to token, such as Mamba's, would carry it into the next sequence of a
row. For models that have them each sequence gets a row of its own: S rows, padded at the end to the longest.
"""
import inspect
import math
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.attention import varlen
from transformers import AttentionInterface

import ranks


@dataclass
class MicroBatch:
    sequences: list              # which of all sequences are in it, in order
    input_ids: torch.Tensor      # [1, T]; or [S, longest], a row for each sequence
    position_ids: torch.Tensor   # the same shape, restarting at 0 in each sequence
    bounds: list                 # S + 1 offsets: sequence s is input_ids[0, bounds[s]:bounds[s + 1]]; or None
    offsets: torch.Tensor        # [S + 1] the same as a tensor
    index: torch.Tensor          # [C] where each sampled token is predicted: one place before it
    targets: torch.Tensor        # [C] the sampled tokens
    owner: torch.Tensor          # [C] which of this micro-batch's sequences each of them belongs to
    rows: torch.Tensor           # [S] `sequences` as a tensor
    lengths: list                # S: sampled tokens of each sequence; they sum to C

    def flat(self, tensors, dtype=torch.float32):
        """Per-token tensors by sequence (a dict or list of [len]) -> those of this micro-batch, flat [C].

        dtype: of the empty tensor that an idle micro-batch gets.
        """
        none = torch.empty(0, dtype=dtype, device=self.index.device)
        return torch.cat([tensors[s] for s in self.sequences] or [none])

    def spread(self, values):
        """One value per sequence, for all sequences [N] -> that value at each sampled token here, [C]."""
        return values[self.rows][self.owner]

    def mean(self, values):
        """Mean of per-token values over their sequence, at each of its tokens; [C] -> [C], with gradient."""
        sums = lambda x: x.new_zeros(len(self.sequences)).index_add(0, self.owner, x)
        return (sums(values) / sums(torch.ones_like(values)).clamp(min=1))[self.owner]

    def split(self, flat):
        """Per-token values of this micro-batch [C] -> {sequence: its [len] values}."""
        return dict(zip(self.sequences, flat.split(self.lengths)))


def deal(rollouts, chosen, num_ranks):
    """Deal rollouts[s] for s in chosen to num_ranks lists of about equally many tokens, longest first.

    Each sequence goes to the rank that has the fewest tokens so far (Graham 1969, LPT). The heaviest rank
    then has at most 4/3 of the best possible share, and is within a few percent of the mean where each rank
    has many.
    Example: sizes 9, 5, 4, 3 for 2 ranks -> 9 + 3 and 5 + 4.
    """
    shares, loads = [[] for _ in range(num_ranks)], [0] * num_ranks
    for s in sorted(chosen, key=lambda s: len(rollouts[s].ids), reverse=True):
        least = loads.index(min(loads))
        shares[least].append(s)
        loads[least] += len(rollouts[s].ids)
    return shares


def pack(rollouts, chosen, token_budget, device, packed=True):
    """Pack rollouts[s] for s in chosen (anything with ids, spans and logprobs) into few MicroBatches.

    Each holds at most token_budget tokens; first fit, longest first. The tokens inside the spans are the
    targets, the EOS among them even where the pad token has the same id; no other token is. packed=False
    gives each sequence a row of its own, whose padding counts in token_budget. Raises ValueError for a
    sequence that is longer than token_budget. With padding, 64 completions of 1 to 64 tokens behind prompts
    of 40 would take 1.4 times as many tokens, and 4.2 times as many if one in eight has 512 tokens and the
    others 32. Packing takes 0.6 ms of a 250 ms update.
    Example: prompts [5, 6] and [5] with completions [7, 8] and [9], budget 8 -> one micro-batch 5 6 7 8 | 5 9
    with index [1, 2, 4] and targets [7, 8, 9]: token 7 is predicted at place 1, 8 at 2, 9 at 4.
    """
    bins, free = [], []
    for s in sorted(chosen, key=lambda s: len(rollouts[s].ids), reverse=True):
        size = len(rollouts[s].ids)
        if size > token_budget:
            raise ValueError(f"a sequence of {size} tokens does not fit token_budget={token_budget}")
        # In rows of their own all take as much room as the first, which is the longest.
        taken = [size if packed else len(rollouts[others[0]].ids) for others in bins]
        fits = next((b for b, room in enumerate(free) if room >= taken[b]), None)
        if fits is None:
            fits = len(bins)
            bins.append([])
            free.append(token_budget)
            taken.append(size)
        bins[fits].append(s)
        free[fits] -= taken[fits]
    return [micro_batch([rollouts[s] for s in group], group, device, packed) for group in bins]


def micro_batch(group, sequences, device, packed):
    # the MicroBatch of these rollouts, whose numbers among all are `sequences`
    sizes = [len(r.ids) for r in group]
    widths = sizes if packed else [max(sizes)] * len(sizes)                 # what each takes, with padding
    lengths = [len(r.logprobs) for r in group]
    bounds = np.cumsum([0, *widths])
    # A token is predicted one place before itself.
    index = [np.arange(start + first - 1, end + first - 1) for r, first in zip(group, bounds)
             for start, end in r.spans]
    tensor = lambda parts: torch.from_numpy(np.concatenate(parts).astype(np.int64)).to(device)
    input_ids = tensor([np.pad(r.ids, (0, width - len(r.ids))) for r, width in zip(group, widths)])
    position_ids, index = tensor([np.arange(width) for width in widths]), tensor(index)
    rows = 1 if packed else len(group)
    return MicroBatch(
        sequences, input_ids.view(rows, -1), position_ids.view(rows, -1), bounds.tolist() if packed else None,
        torch.tensor(bounds, dtype=torch.int32, device=device), index, input_ids[index + 1],
        tensor([np.full(length, s) for s, length in enumerate(lengths)]),
        torch.tensor(sequences, device=device), lengths)


def idle(device):
    # A MicroBatch that predicts nothing, C = 0: whatever is made of it has the value 0 and a gradient of 0.
    zero = torch.zeros(1, 1, dtype=torch.long, device=device)
    none = torch.empty(0, dtype=torch.long, device=device)
    offsets = torch.tensor([0, 1], dtype=torch.int32, device=device)
    return MicroBatch([], zero, zero, [0, 1], offsets, none, none, none, none, [])


def micro_batches(network, rollouts, chosen, token_budget):
    """The MicroBatches of the chosen rollouts for a Policy or Critic, the same number on every rank.

    The network is sharded, so its forward and backward are collectives. A rank that has fewer MicroBatches
    than another therefore also gets idle ones that predict nothing: each of their per-token tensors is empty.
    A collective itself.
    """
    device = next(network.parameters()).device
    batches = pack(rollouts, chosen, token_budget, device, network.packed)
    # At least one, so that every rank has a gradient, even if it is 0.
    turns = max(1, int(ranks.largest([len(batches)])[0]))
    return batches + [idle(device)] * (turns - len(batches))


# ---------------------------------------------------------------- attention

# PyTorch 2.11's kernel takes fewer heads of key and value than of query by default; later ones need
# enable_gqa.
GROUPED = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen.varlen_attn).parameters else {}


def kernel_takes(query, value):
    """Whether PyTorch's CUDA kernel for sequences of several lengths computes such attention."""
    head = query.shape[-1]
    return (query.is_cuda and query.dtype in (torch.bfloat16, torch.float16) and head % 8 == 0 and head <= 256
            and value.shape[-1] == head and torch.cuda.get_device_capability(query.device) >= (8, 0))


def packed_attention(module, query, key, value, attention_mask, scaling, bounds=None, offsets=None,
                     sliding_window=None, softcap=None, s_aux=None, **_):
    """Causal attention inside each sequence of a packed row; query [1, heads, T, d] -> [1, T, heads, d].

    Without bounds each of several rows is one sequence. The work grows with sum(len^2), not with T^2, and no
    T x T mask exists. It is done by PyTorch's kernel for sequences of several lengths where kernel_takes says
    so, otherwise by a loop over the sequences. sliding_window: how many tokens a token sees, counting itself.
    softcap and s_aux ([heads], sinks): see explicit_attention.
    """
    sizes = [end - start for start, end in zip(bounds, bounds[1:])] if bounds else [query.shape[2]]
    window = min(sliding_window or math.inf, max(sizes))
    explicit = softcap is not None or s_aux is not None
    if bounds and kernel_takes(query, value) and not explicit:
        rows = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))                  # [T, heads, d]
        # window_size: how many tokens before and after are seen; -1 is all.
        before = window - 1 if window < max(sizes) else -1
        output = varlen.varlen_attn(*rows, offsets, offsets, max(sizes), max(sizes), scale=scaling,
                                    window_size=(before, 0), **GROUPED)
        return output.unsqueeze(0), None
    outputs = []
    # split, not slices: the gradient of a slice is as large as the row, so S of them cost S * T, which is a
    # tenth of the update of 64 short sequences.
    for q, k, v in zip(*(x.split(sizes, dim=2) for x in (query, key, value))):
        place, mask = torch.arange(q.shape[2], device=q.device), None
        if explicit or q.shape[2] > window:
            distance = place[:, None] - place
            mask = (distance >= 0) & (distance < window)                                    # [len, len]
        outputs.append(
            explicit_attention(q, k, v, mask, scaling, softcap, s_aux) if explicit else
            F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, scale=scaling,
                                           enable_gqa=True))
    return torch.cat(outputs, dim=2).transpose(1, 2), None


def explicit_attention(query, key, value, mask, scaling, softcap=None, sinks=None):
    """Attention by its formula, in memory that grows with len^2, for scores that no fused kernel computes.

    softcap: scores become softcap * tanh(score / softcap) (Gemma 2, https://arxiv.org/abs/2408.00118).
    sinks [heads]: a score in each token's softmax that belongs to no value (gpt-oss).
    """
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
    scores = (query @ key.transpose(2, 3) * scaling).float()                        # [S, heads, len, len]
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
    scores = scores.masked_fill(~mask, -math.inf)
    if sinks is not None:
        column = sinks.float().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, column], dim=3)
    return scores.softmax(3)[..., :len(mask)].to(value.dtype) @ value


# No mask function is registered with it, so transformers makes no mask.
AttentionInterface.register("packed", packed_attention)
