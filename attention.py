"""
Attention for packed lines (packing.py): a sequence sees itself and nothing else in the line.

Hugging Face models call packed_attention, under the name "packed", in place of their own attention. It calls
PyTorch's CUDA kernel for sequences of several lengths if kernel_takes says so, and otherwise loops over the
sequences.
"""
import math

import numpy as np
import torch
import torch.nn.functional as F
from transformers import AttentionInterface

from configurator import InputError
from packing import Segments


def kernel_takes(query, value):
    """Return whether PyTorch's kernel for sequences of several lengths accepts CUDA tensors like these."""
    size = query.shape[-1]
    size_fits = size % 8 == 0 and size <= 256 and value.shape[-1] == size
    dtype_fits = query.dtype in (torch.bfloat16, torch.float16)
    device_fits = torch.cuda.get_device_capability(query.device) >= (8, 0)
    return len(query) == 1 and size_fits and dtype_fits and device_fits


def packed_attention(module, query, key, value, attention_mask, scaling, segments=None, cut=None,
                     sliding_window=None, softcap=None, s_aux=None, position_ids=None, **others):
    """Compute causal attention inside each sequence of a packed line.

    query is [1, heads, T, d], key and value may have fewer heads, and the result is [1, T, heads, d]. If
    there are several lines, all have the same segments; without segments each line is one sequence.
    sliding_window: how many tokens a token sees, itself included. softcap, s_aux ([heads], sinks): see
    options/explicit_attention.py. There is no T x T mask: the work grows with the pairs of tokens in which
    one sees the other. If the line is cut over P ranks, query is [1, heads, T / P, d] and the result
    [1, T / P, heads, d]. Raises InputError for any tensor that it does not know.
    """
    others["attention_mask"] = attention_mask
    for name, argument in others.items():
        if isinstance(argument, torch.Tensor):          # the model's own; transformers makes no mask (below)
            raise InputError(f"its attention depends on {name}, which is not supported")
    if segments is None:
        length = query.shape[2]
        segments = Segments([length], [np.arange(length)])
    if cut is not None:
        query = cut.exchange(query)                                                 # [1, heads / P, T, d]
        key = cut.exchange(key)
        value = cut.exchange(value)
        if s_aux is not None:
            s_aux = cut.part_of(s_aux)
    if segments.places is not None:
        if "places" not in segments.made:
            segments.made["places"] = torch.from_numpy(segments.places).to(query.device)
        key = pick_tokens(key, segments.made["places"])                                     # [1, heads, K, d]
        value = pick_tokens(value, segments.made["places"])
    window = sliding_window or math.inf
    fused = softcap is None and s_aux is None           # whether PyTorch has kernels for these scores
    if query.is_cuda and fused and kernel_takes(query, value):
        from options.attention_kernel import attend_by_kernel
        output = attend_by_kernel(query, key, value, scaling, segments, window)
    else:
        output = attend_in_turn(query, key, value, scaling, segments, window, fused, softcap, s_aux)
    if cut is not None:
        output = cut.exchange(output)
    return output, None


def pick_tokens(x, places):
    # [1, heads, T, d] -> [1, heads, K, d]. With all heads of a token at once a CPU takes a third of the time.
    tokens = x.transpose(1, 2).flatten(2)[0]                                                # [T, heads * d]
    picked = Pick.apply(tokens, places).unflatten(1, (x.shape[1], -1))                      # [K, heads, d]
    return picked.transpose(0, 1)[None]


def attend_in_turn(query, key, value, scaling, segments, window, fused, softcap, sinks):
    # Computes the segments one after the other.
    # The gradient of a slice would be as large as the line, so S slices would cost S * T, which is a tenth of
    # the time of an update of 64 short sequences. split has one gradient for all.
    queries = query.split(segments.sizes, 2)
    keys = key.split(segments.key_sizes, 2)
    values = value.split(segments.key_sizes, 2)
    outputs = []
    for q, k, v, size, key_size in zip(queries, keys, values, segments.sizes, segments.key_sizes):
        before = key_size - size                            # the keys before the segment's own tokens
        alone = before == 0 and key_size <= window          # then it needs no mask
        mask = None                                         # [len, keys], added to the scores
        if not (alone and fused):
            # All layers share the masks: making them anew for each layer took a tenth of an update, and each
            # layer kept its own for the backward pass.
            shape = size, key_size, window, q.dtype
            if shape not in segments.made:
                # The logarithm of 1 where a token sees a key, and of 0 elsewhere.
                seen = q.new_ones(size, key_size).tril(before)
                segments.made[shape] = seen.triu(before + 1 - min(window, key_size)).log()
            mask = segments.made[shape]
        if fused:
            output = F.scaled_dot_product_attention(
                q, k, v, mask, is_causal=alone, scale=scaling, enable_gqa=True)
        else:
            from options.explicit_attention import explicit_attention
            output = explicit_attention(q, k, v, mask, scaling, softcap, sinks)
        outputs.append(output)
    return torch.cat(outputs, dim=2).transpose(1, 2)


class Pick(torch.autograd.Function):
    """Takes the rows of x at these places, [T, H] -> [K, H].

    Hundreds of sequences may share a token, so the gradient of its row is summed in float32.
    """

    @staticmethod
    def forward(ctx, x, places):
        ctx.save_for_backward(places)
        ctx.length = len(x)
        return x.index_select(0, places)

    @staticmethod
    def backward(ctx, gradient):
        (places,) = ctx.saved_tensors
        wide = torch.promote_types(gradient.dtype, torch.float32)
        total = gradient.new_zeros(ctx.length, gradient.shape[1], dtype=wide)
        total.index_add_(0, places, gradient.to(wide))
        return total.to(gradient.dtype), None


# No mask function is registered by this name, so transformers makes no mask.
AttentionInterface.register("packed", packed_attention)
