"""
Logprobs and entropies of tokens from hidden states, without ever holding all logits at once.

    head_logits          computes the logits of a model's output head, for both the trainer and the engine
    LogprobsFromHidden   computes the logprobs of targets and the entropies, chunk by chunk, with gradient
    product              multiplies matrices without rounding the result to the dtype of the factors

C is the number of sampled tokens, H the hidden size, V the size of the vocabulary. Products of bfloat16
factors are not rounded to bfloat16, which has three digits: a logit of 20 would be off by up to a sixteenth.
MiniMax-M1 (https://arxiv.org/abs/2506.13585) found that this rounding causes most of the gap between engine
and trainer. In the default run it caused a quarter to two fifths (docs/speed.md).
"""
import torch
import torch.nn.functional as F

# In the place of a logit. Its probability is 0, and 0 * LOW is 0, whereas 0 * -infinity would be NaN.
LOW = -1e9
# The most logits that are held at once. Two copies of them in float32 take 128 MB on a CPU and 2 GB on a GPU.
LOGITS = {"cpu": 2 ** 24, "cuda": 2 ** 28}


def product(a, b):
    """Return a @ b in float32, not rounded to the factors' dtype. A GPU makes no float32 copies of the
    factors."""
    if a.is_cuda and a.dtype != torch.float32:
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()


def add_product(total, a, b):
    # Adds product(a, b) to a float32 tensor in place. To add a second V x H takes as long as the product.
    if a.is_cuda and a.dtype != torch.float32:
        torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    else:
        total.addmm_(a.float(), b.float())


def head_logits(hidden, weight, bias, scale=1.0, softcap=0.0, temperature=1.0):
    """Return a linear head's logits / temperature, float32 [C, V]; hidden [C, H], weight [V, H], bias [V] or
    None.

    scale: a factor of the logits (Granite, Cohere). softcap: if it is not 0, the scaled logits become
    softcap * tanh(logits / softcap), as in Gemma 2 (https://arxiv.org/abs/2408.00118). On a CPU each call
    makes a float32 copy of a bfloat16 weight.
    """
    if weight.dtype == torch.float32:
        logits = F.linear(hidden, weight, bias)
    else:
        logits = product(hidden, weight.T)
        if bias is not None:
            logits += bias.float()
    # A GPU takes as long for each of these as for the product itself, so none is done for nothing.
    if scale != 1:
        logits *= scale
    if softcap:
        logits.div_(softcap).tanh_().mul_(softcap)
    if temperature != 1:
        logits /= temperature
    return logits


def keep_only(logits, kept):
    # Replaces all logits [C, V], in place, except those of the tokens `kept` [C, M], which may have repeats.
    kept = kept.long()
    values = logits.gather(1, kept)
    logits.fill_(LOW).scatter_(1, kept, values)


class LogprobsFromHidden(torch.autograd.Function):
    """Computes the logprob of each target and the entropy of its distribution, one chunk of tokens at a time.

    forward: hidden [C, H], weight [V, H], bias [V] or None, targets [C] -> float32 logp [C], entropy [C].
    kept [C, M], ids of tokens, restricts each distribution to these; None does not.
    The backward pass computes each chunk's logits again instead of keeping C x V of them. Both passes work in
    place, which at V = 151,936 on two cores takes half the time of plain expressions. With p = softmax(z)
    and z = logits / temperature: d(logp)/dz = onehot(target) - p, d(entropy)/dz = -p * (log p + entropy).
    scale, softcap: see head_logits. d(logits)/d(product) = scale * (1 - (logits / softcap)^2).
    """

    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, temperature, scale=1.0, softcap=0.0, kept=None):
        ctx.head = scale, softcap, temperature
        # Slices of tokens, each with at most LOGITS logits.
        size = max(1, LOGITS[weight.device.type] // len(weight))
        ctx.chunks = [slice(first, first + size) for first in range(0, len(targets), size)]
        logp, entropy, lse = (hidden.new_empty(len(targets), dtype=torch.float32) for _ in range(3))
        for part in ctx.chunks:
            logits = head_logits(hidden[part], weight, bias, *ctx.head)                         # [chunk, V]
            if kept is not None:
                keep_only(logits, kept[part])
            p = logits.softmax(-1)
            # log p = z - lse at the likeliest token. This takes a third less time than logits.logsumexp(-1).
            lse[part] = logits.amax(-1) - p.amax(-1).log()
            log_p = logits.sub_(lse[part, None])
            logp[part] = log_p.gather(1, targets[part, None])[:, 0]
            entropy[part] = -p.mul_(log_p).sum(-1)
            del logits, p, log_p                                # before the next chunk makes its own
        ctx.save_for_backward(hidden, weight, bias, targets, lse, entropy, kept)
        # Without materialized gradients, an entropy that is only logged costs nothing in the backward pass.
        ctx.set_materialize_grads(False)
        return logp, entropy

    @staticmethod
    def backward(ctx, d_logp, d_entropy):
        hidden, weight, bias, targets, lse, entropy, kept = ctx.saved_tensors
        scale, softcap, temperature = ctx.head
        divisor = temperature / scale
        if d_logp is None:
            d_logp = torch.zeros_like(lse)
        d_logp = d_logp / divisor
        d_hidden = torch.empty_like(hidden)
        d_weight = d_bias = None
        if ctx.needs_input_grad[1]:                             # with adapters the head is frozen
            d_weight = torch.zeros_like(weight, dtype=torch.float32)
        if bias is not None:
            d_bias = torch.zeros_like(bias, dtype=torch.float32)
        for part in ctx.chunks:
            logits = head_logits(hidden[part], weight, bias, *ctx.head)
            if softcap:
                slope = 1 - (logits * (temperature / softcap)).square_()                        # [chunk, V]
            if kept is not None:
                keep_only(logits, kept[part])
            log_p = logits.sub_(lse[part, None])
            # All of this is in place, so that only one copy of the chunk exists.
            if d_entropy is None:
                d_logits = log_p.exp_().mul_(-d_logp[part, None])
            else:
                p = log_p.exp()
                d_logits = log_p.add_(entropy[part, None]).mul_(-d_entropy[part, None] / divisor)
                d_logits.sub_(d_logp[part, None]).mul_(p)
                del p
            d_logits.scatter_add_(1, targets[part, None], d_logp[part, None])
            if softcap:
                d_logits *= slope
                del slope
            if bias is not None:
                d_bias += d_logits.sum(0)
            d_logits = d_logits.to(weight.dtype)
            d_hidden[part] = d_logits @ weight
            if d_weight is not None:
                add_product(d_weight, d_logits.T, hidden[part])
            del logits, log_p, d_logits
        # PyTorch casts each gradient to the dtype of its input.
        return d_hidden, d_weight, d_bias, None, None, None, None, None
