"""
Ways to make an update faster that the scripts do not take, for bench/step.py --faster=head on a GPU.

    head      the head's passes over a chunk of logits, compiled into as few as the compiler finds
    host      what autograd keeps for the backward pass waits in host memory
"""
import contextlib

import torch
from torch.autograd.graph import save_on_cpu

import model
from model import LOGITS, head_logits


@torch.compile(dynamic=True)
def statistics(logits, targets):
    """Return logp [C], entropy [C] and the logarithm of the sum of exponentials [C] of logits [C, V]."""
    lse = logits.logsumexp(-1)
    log_p = logits - lse[:, None]
    entropy = -(log_p.exp() * log_p).sum(-1)
    return log_p.gather(1, targets[:, None])[:, 0], entropy, lse


@torch.compile(dynamic=True)
def gradient(logits, targets, lse, d_logp):
    """Return d(loss)/d(logits) [C, V] in bfloat16 of a loss with the gradient d_logp [C]."""
    p = (logits - lse[:, None]).exp()
    places = torch.arange(logits.shape[1], device=logits.device)
    hit = places == targets[:, None]
    return (d_logp[:, None] * (hit.float() - p)).bfloat16()


class CompiledLogprobs(torch.autograd.Function):
    """model.LogprobsFromHidden for a head without bias, scale, softcap and kept sets, and an entropy without gradient."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, temperature, *scale_softcap_and_kept):
        size = max(1, LOGITS[weight.device.type] // len(weight))
        ctx.chunks = [slice(first, first + size) for first in range(0, len(targets), size)]
        logp, entropy, lse = (hidden.new_empty(len(targets), dtype=torch.float32) for _ in range(3))
        for part in ctx.chunks:
            logits = head_logits(hidden[part], weight, None, temperature=temperature)           # [chunk, V]
            logp[part], entropy[part], lse[part] = statistics(logits, targets[part])
            del logits
        ctx.save_for_backward(hidden, weight, targets, lse)
        ctx.temperature = temperature
        ctx.mark_non_differentiable(entropy)
        return logp, entropy

    @staticmethod
    def backward(ctx, d_logp, _):
        hidden, weight, targets, lse = ctx.saved_tensors
        d_hidden = torch.empty_like(hidden)
        d_weight = torch.zeros_like(weight, dtype=torch.float32)
        for part in ctx.chunks:
            logits = head_logits(hidden[part], weight, None, temperature=ctx.temperature)
            d_logits = gradient(logits, targets[part], lse[part], d_logp[part] / ctx.temperature)
            del logits
            d_hidden[part] = d_logits @ weight
            torch.addmm(d_weight, d_logits.T, hidden[part], out_dtype=torch.float32, out=d_weight)
        return d_hidden, d_weight.to(weight.dtype), None, None, None, None, None, None


def apply(names):
    """Let policies compute in these ways. Returns the context for their forward pass."""
    if "head" in names:
        model.LogprobsFromHidden = CompiledLogprobs
    return save_on_cpu(pin_memory=True) if "host" in names else contextlib.nullcontext()
