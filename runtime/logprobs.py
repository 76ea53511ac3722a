"""
Logprobs and entropies of tokens from hidden states, without ever holding all logits at once.

C sampled tokens, H hidden size, V vocabulary.
"""
import torch
import torch.nn.functional as F

# The most logits that are held at once. Two copies of them in float32 take 128 MB on a CPU and 1 GB on a GPU.
LOGITS = {"cpu": 2 ** 24, "cuda": 2 ** 27}


def product(a, b):
    """a @ b in float32, not rounded to the factors' dtype. A GPU makes no float32 copies of the factors."""
    if a.is_cuda and a.dtype != torch.float32:
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()


def head_logits(hidden, weight, bias, float32_head=True, scale=1.0, softcap=0.0):
    """Logits of a linear head, float32 [C, V]; hidden [C, H], weight [V, H], bias [V] or None.

    scale: a factor of the logits (Granite, Cohere). softcap: if it is not 0, the scaled logits become
    softcap * tanh(logits / softcap), as in Gemma 2 (https://arxiv.org/abs/2408.00118).
    float32_head=False first rounds the logits to the weight's dtype, as models in bfloat16 do. bfloat16 has
    three digits, so that a logit of 20 is off by up to a sixteenth. MiniMax-M1
    (https://arxiv.org/abs/2506.13585) found that this rounding causes most of the gap between engine and
    trainer; in the default run it causes a quarter to two fifths (docs/speed.md). On a CPU each call makes a
    float32 copy of a bfloat16 weight.
    """
    if not float32_head or weight.dtype == torch.float32:
        logits = F.linear(hidden, weight, bias).float()
    else:
        logits = product(hidden, weight.T)
        logits = logits if bias is None else logits.add_(bias.float())
    logits = logits if scale == 1 else logits.mul_(scale)
    return logits.div_(softcap).tanh_().mul_(softcap) if softcap else logits


class LogprobsFromHidden(torch.autograd.Function):
    """Logprob of each target and entropy of its distribution, with logits for one chunk of tokens at a time.

    forward: hidden [C, H], weight [V, H], bias [V] or None, targets [C] -> float32 logp [C], entropy [C].
    The backward pass computes each chunk's logits again instead of keeping C x V of them. Both passes work in
    place, which at V = 151,936 on two cores takes half the time of plain expressions. With p = softmax(z)
    and z = logits / temperature: d(logp)/dz = onehot(target) - p, d(entropy)/dz = -p * (log p + entropy).
    float32_head, scale, softcap: see head_logits. d(logits)/d(product) = scale * (1 - (logits / softcap)^2).
    """

    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, temperature, float32_head=True, scale=1.0, softcap=0.0):
        ctx.temperature, ctx.head = temperature, (float32_head, scale, softcap)
        logp = hidden.new_empty(len(targets), dtype=torch.float32)
        entropy, lse = torch.empty_like(logp), torch.empty_like(logp)
        for part in chunks(targets, weight):
            logits = head_logits(hidden[part], weight, bias, *ctx.head).div_(temperature)       # [chunk, V]
            p = logits.softmax(-1)
            # log p = z - lse at the likeliest token. This takes a third less time than logits.logsumexp(-1).
            lse[part] = logits.amax(-1) - p.amax(-1).log()
            log_p = logits.sub_(lse[part, None])
            logp[part] = log_p.gather(1, targets[part, None])[:, 0]
            entropy[part] = -torch.linalg.vecdot(p, log_p)
            del logits, p, log_p                                # before the next chunk makes its own
        ctx.save_for_backward(hidden, weight, bias, targets, lse, entropy)
        # With this, an entropy that is only logged costs nothing in the backward pass.
        ctx.set_materialize_grads(False)
        return logp, entropy

    @staticmethod
    def backward(ctx, d_logp, d_entropy):
        hidden, weight, bias, targets, lse, entropy = ctx.saved_tensors
        d_logp = torch.zeros_like(lse) if d_logp is None else d_logp / ctx.temperature
        d_hidden = torch.empty_like(hidden)
        # With adapters the head is frozen.
        d_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        d_bias = None if bias is None else torch.zeros_like(bias, dtype=torch.float32)
        _, scale, softcap = ctx.head
        for part in chunks(targets, weight):
            logits = head_logits(hidden[part], weight, bias, *ctx.head)
            slope = 1 - (logits / softcap).square_() if softcap else None                       # [chunk, V]
            log_p = logits.div_(ctx.temperature).sub_(lse[part, None])
            # All of this is in place, so that only one copy of the chunk exists.
            if d_entropy is None:
                d_logits = log_p.exp_().mul_(-d_logp[part, None])
            else:
                p = log_p.exp()
                d_logits = log_p.add_(entropy[part, None]).mul_(-d_entropy[part, None] / ctx.temperature)
                d_logits.sub_(d_logp[part, None]).mul_(p)
            d_logits.scatter_add_(1, targets[part, None], d_logp[part, None])
            d_logits = d_logits if scale == 1 else d_logits.mul_(scale)
            d_logits = d_logits.mul_(slope) if softcap else d_logits
            if bias is not None:
                d_bias += d_logits.sum(0)
            d_logits = d_logits.to(weight.dtype)
            d_hidden[part] = d_logits @ weight
            if d_weight is not None and weight.dtype == torch.float32:
                d_weight.addmm_(d_logits.T, hidden[part])       # this makes no second V x H
            elif d_weight is not None:
                d_weight += product(d_logits.T, hidden[part])
            del logits, log_p, d_logits, slope
        return (d_hidden, None if d_weight is None else d_weight.to(weight.dtype),
                None if bias is None else d_bias.to(bias.dtype), None, None, None, None, None)


def chunks(targets, weight):
    """Slices of tokens, each with at most LOGITS logits."""
    size = max(1, LOGITS[weight.device.type] // len(weight))
    return [slice(i, i + size) for i in range(0, len(targets), size)]
