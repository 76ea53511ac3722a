"""Policy and critic: Hugging Face models under FSDP2 that read packed sequences; logprobs without logits.

Packing. A micro-batch is one row of T tokens holding several sequences (prompt + completion each)
without padding; `position_ids` restart at each sequence and attention stays inside it. Per-token
results are flat over completion tokens only, `[C]`, in the order of the row: entry c is about
completion token c and is read from the hidden state one token before it. T tokens in a
micro-batch, S sequences, C completion tokens, H hidden size, V vocabulary.
"""
import inspect
import os
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.attention import varlen
from transformers import (AttentionInterface, AutoConfig, AutoModelForCausalLM,
                          AutoModelForTokenClassification)
from transformers.utils import logging

import ranks

logging.disable_progress_bar()  # its bars for every load and save would tear the run's own apart
LOGITS = {"cpu": 2 ** 24, "cuda": 2 ** 27}  # that exist at one time, twice: 128 MB and 1 GB in float32


# ---------------------------------------------------------------- packing

@dataclass
class MicroBatch:
    sequences: list              # which of all sequences are in it, in order
    input_ids: torch.Tensor      # [1, T]
    position_ids: torch.Tensor   # [1, T], restarting at 0 in each sequence
    bounds: list                 # S + 1 offsets: sequence s is input_ids[0, bounds[s]:bounds[s + 1]]
    offsets: torch.Tensor        # [S + 1] the same, for kernels
    index: torch.Tensor          # [C] where in the row each completion token is predicted: one before itself
    targets: torch.Tensor        # [C] the completion tokens
    owner: torch.Tensor          # [C] which of this micro-batch's sequences each of them belongs to
    rows: torch.Tensor           # [S] `sequences` as a tensor
    lengths: list                # S: completion tokens of each sequence; they sum to C

    def flat(self, tensors):
        """Per-token tensors by sequence (a dict or list of [len]) -> those of this micro-batch, flat [C]."""
        return torch.cat([tensors[s] for s in self.sequences])

    def spread(self, values):
        """One value a sequence, for all sequences [N] -> that value at each completion token here, [C]."""
        return values[self.rows][self.owner]

    def mean(self, values):
        """Mean of per-token values over their sequence, at each of its tokens; [C] -> [C], with gradient."""
        sums = lambda x: x.new_zeros(len(self.sequences)).index_add(0, self.owner, x)
        return (sums(values) / sums(torch.ones_like(values)).clamp(min=1))[self.owner]

    def split(self, flat):
        """Per-token values of this micro-batch [C] -> {sequence: its [len] values}."""
        return dict(zip(self.sequences, flat.split(self.lengths)))


def deal(rollouts, chosen, num_ranks):
    """Deal rollouts[s] for s in chosen to num_ranks lists of about as many tokens each, longest first.

    Each goes to the rank that has the fewest tokens so far (Graham 1969, LPT): the heaviest rank has at most
    4/3 of what is possible, and within a few percent of the mean where there are many sequences a rank.
    Example: sizes 9, 5, 4, 3 for 2 ranks -> 9 + 3 and 5 + 4.
    """
    shares, loads = [[] for _ in range(num_ranks)], [0] * num_ranks
    for s in sorted(chosen, key=lambda s: size(rollouts[s]), reverse=True):
        least = loads.index(min(loads))
        shares[least].append(s)
        loads[least] += size(rollouts[s])
    return shares


def size(rollout):
    return len(rollout.prompt_ids) + len(rollout.completion_ids)


def pack(rollouts, chosen, token_budget, device):
    """Pack rollouts[s] for s in chosen (anything with prompt_ids and completion_ids) into few MicroBatches.

    At most token_budget tokens each; first fit, longest first. Every completion token is a target, the EOS
    among them even where the pad token has the same id; no prompt token is. Raises ValueError for a sequence
    that is longer than token_budget.
    Padded, 64 completions of 1 to 64 tokens behind prompts of 40 would be 1.4 times as many tokens, and 4.2
    times where every eighth has 512 tokens and the others 32. Packing takes 1.2 ms of their update's 250.
    Example: prompts [5, 6] and [5] with completions [7, 8] and [9], budget 8 -> one micro-batch 5 6 7 8 | 5 9
    with index [1, 2, 4] and targets [7, 8, 9]: token 7 is predicted at position 1, 8 at 2, 9 at 4.
    """
    bins, free = [], []
    for s in sorted(chosen, key=lambda s: size(rollouts[s]), reverse=True):
        if size(rollouts[s]) > token_budget:
            raise ValueError(f"a sequence of {size(rollouts[s])} tokens does not fit "
                             f"token_budget={token_budget}")
        fits = next((b for b, room in enumerate(free) if room >= size(rollouts[s])), None)
        if fits is None:
            fits = len(bins)
            bins.append([])
            free.append(token_budget)
        bins[fits].append(s)
        free[fits] -= size(rollouts[s])

    tensor = lambda values, dtype=torch.long: torch.tensor(values, dtype=dtype, device=device)
    batches = []
    for packed in bins:
        ids, positions, bounds, index, targets, owner, lengths = [], [], [0], [], [], [], []
        for s in packed:
            prompt, completion = rollouts[s].prompt_ids, rollouts[s].completion_ids
            first = len(ids) + len(prompt)              # where the completion begins in the micro-batch
            index += range(first - 1, first + len(completion) - 1)
            targets += completion
            owner += [len(lengths)] * len(completion)
            lengths.append(len(completion))
            ids += prompt + completion
            positions += range(len(prompt) + len(completion))
            bounds.append(len(ids))
        batches.append(MicroBatch(packed, tensor([ids]), tensor([positions]), bounds,
                                  tensor(bounds, torch.int32), tensor(index), tensor(targets), tensor(owner),
                                  tensor(packed), lengths))
    return batches


def micro_batches(rollouts, chosen, token_budget, device):
    """[(MicroBatch, live)] of the chosen rollouts: `pack`, for networks that are sharded over the ranks.

    Their forward and backward are collectives, so a rank with fewer MicroBatches than another one, or none,
    gets idle turns (live False), whose results count for nothing. Collective itself.
    """
    batches = pack(rollouts, chosen, token_budget, device)
    turns = max(1, int(ranks.largest([len(batches)])[0]))       # one at least: a gradient of 0 is one, too
    idle = (batches or pack(rollouts, [0], token_budget, device))[0]
    return [(batch, True) for batch in batches] + [(idle, False)] * (turns - len(batches))


# PyTorch 2.11's kernel takes fewer heads of key and value than of query unasked; later ones want to be asked.
GROUPED = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen.varlen_attn).parameters else {}


def kernel_takes(query, value):
    """Whether PyTorch's CUDA kernel for sequences of several lengths computes such attention."""
    head = query.shape[-1]
    return (query.is_cuda and query.dtype in (torch.bfloat16, torch.float16) and head % 8 == 0 and head <= 256
            and value.shape[-1] == head and torch.cuda.get_device_capability(query.device) >= (8, 0))


def packed_attention(module, query, key, value, attention_mask, scaling, bounds=None, offsets=None,
                     sliding_window=None, softcap=None, s_aux=None, **_):
    """Causal attention inside each sequence of a packed row; query [1, heads, T, d] -> [1, T, heads, d].

    Work grows with sum(len^2), not with T^2, and no T x T mask exists: by PyTorch's kernel for sequences of
    several lengths, where kernel_takes says so, else by a loop of its fused kernel over them. Raises
    ValueError for what neither computes: a sequence beyond the model's sliding window, softcapped scores,
    attention sinks.
    """
    sizes = [end - start for start, end in zip(bounds, bounds[1:])]
    if sliding_window is not None and max(sizes) > sliding_window:
        raise ValueError(f"sequence of {max(sizes)} tokens exceeds the model's sliding window of "
                         f"{sliding_window}; lower max_prompt_length or max_completion_length")
    if softcap is not None or s_aux is not None:
        raise ValueError("the model's attention has softcapped scores or sinks; packed attention has neither")
    if kernel_takes(query, value):
        rows = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))                  # [T, heads, d]
        output = varlen.varlen_attn(*rows, offsets, offsets, max(sizes), max(sizes), scale=scaling,
                                    window_size=(-1, 0), **GROUPED)     # (-1, 0): all before, none behind
        return output.unsqueeze(0), None
    # split, not slices: the gradient of a slice is as large as the row, so S of them cost S * T: a tenth of
    # the update of 64 short sequences.
    outputs = [F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=True)
               for q, k, v in zip(*(x.split(sizes, dim=2) for x in (query, key, value)))]
    return torch.cat(outputs, dim=2).transpose(1, 2), None


AttentionInterface.register("packed", packed_attention)     # and no mask function: none is made


# ---------------------------------------------------------------- logprobs without logits

def product(a, b):
    """a @ b in float32, not rounded to the dtype of the factors; on a GPU without float32 copies of them."""
    if a.is_cuda and a.dtype != torch.float32:
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()


def head_logits(hidden, weight, bias, float32_head=True):
    """Logits of a linear head, float32 [C, V]; hidden [C, H], weight [V, H], bias [V] or None.

    float32_head False: rounded to the weight's dtype first, as models in bfloat16 have them: three digits, a
    sixteenth at a logit of 20. MiniMax-M1 (https://arxiv.org/abs/2506.13585) found in it most of the gap
    between engine and trainer; of the default run's it is a quarter to two fifths (README). On a CPU each
    call makes a float32 copy of a bfloat16 weight.
    """
    if not float32_head or weight.dtype == torch.float32:
        return F.linear(hidden, weight, bias).float()
    logits = product(hidden, weight.T)
    return logits if bias is None else logits.add_(bias.float())


class LogprobsFromHidden(torch.autograd.Function):
    """Logprob of each target and entropy of its distribution, logits living one chunk of tokens at a time.

    forward: hidden [C, H], weight [V, H], bias [V] or None, targets [C] -> float32 logp [C], entropy [C].
    The backward pass computes each chunk's logits again instead of keeping C x V of them, and both work in
    place: at V = 151,936 on two cores in half the time of plain expressions. With p = softmax(z)
    and z = logits / temperature: d(logp)/dz = onehot(target) - p, d(entropy)/dz = -p * (log p + entropy).
    """

    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, temperature, float32_head=True):
        logp = hidden.new_empty(len(targets), dtype=torch.float32)
        entropy, lse = torch.empty_like(logp), torch.empty_like(logp)
        for part in chunks(targets, weight):
            logits = head_logits(hidden[part], weight, bias, float32_head).div_(temperature)    # [chunk, V]
            p = logits.softmax(-1)
            # log p = z - lse, at the likeliest token: a third less time than logits.logsumexp(-1).
            lse[part] = logits.amax(-1) - p.amax(-1).log()
            log_p = logits.sub_(lse[part, None])
            logp[part] = log_p.gather(1, targets[part, None])[:, 0]
            entropy[part] = -torch.linalg.vecdot(p, log_p)
            del logits, p, log_p                                # before the next chunk's are made
        ctx.save_for_backward(hidden, weight, bias, targets, lse, entropy)
        ctx.temperature, ctx.float32_head = temperature, float32_head
        ctx.set_materialize_grads(False)  # an entropy that is only logged then costs nothing below
        return logp, entropy

    @staticmethod
    def backward(ctx, d_logp, d_entropy):
        hidden, weight, bias, targets, lse, entropy = ctx.saved_tensors
        d_logp = torch.zeros_like(lse) if d_logp is None else d_logp / ctx.temperature
        d_hidden = torch.empty_like(hidden)
        d_weight = torch.zeros_like(weight, dtype=torch.float32)
        d_bias = None if bias is None else torch.zeros_like(bias, dtype=torch.float32)
        for part in chunks(targets, weight):
            log_p = head_logits(hidden[part], weight, bias, ctx.float32_head).div_(ctx.temperature)
            log_p -= lse[part, None]
            if d_entropy is None:                               # in place: the chunk exists once
                d_logits = log_p.exp_().mul_(-d_logp[part, None])
            else:
                p = log_p.exp()
                d_logits = log_p.add_(entropy[part, None]).mul_(-d_entropy[part, None] / ctx.temperature)
                d_logits.sub_(d_logp[part, None]).mul_(p)
            d_logits.scatter_add_(1, targets[part, None], d_logp[part, None])
            if bias is not None:
                d_bias += d_logits.sum(0)
            d_logits = d_logits.to(weight.dtype)
            d_hidden[part] = d_logits @ weight
            if weight.dtype == torch.float32:
                d_weight.addmm_(d_logits.T, hidden[part])       # no second V x H
            else:
                d_weight += product(d_logits.T, hidden[part])
            del log_p, d_logits
        return (d_hidden, d_weight.to(weight.dtype), None if bias is None else d_bias.to(bias.dtype),
                None, None, None)


def chunks(targets, weight):
    """Slices of so many tokens that their logits are at most LOGITS."""
    size = max(1, LOGITS[weight.device.type] // len(weight))
    return [slice(i, i + size) for i in range(0, len(targets), size)]


def hidden_states(hf, batch):
    """Last hidden state of a MicroBatch where each completion token is predicted, [C, H]."""
    hidden = hf.base_model(input_ids=batch.input_ids, position_ids=batch.position_ids, bounds=batch.bounds,
                           offsets=batch.offsets, use_cache=False).last_hidden_state[0]     # [T, H]
    return hidden.index_select(0, batch.index)


class Policy(nn.Module):
    """A causal language model whose forward returns logprobs and entropies of completion tokens.

    The head is applied here, in the FSDP root's forward: the one place where its weight is whole.
    """

    def __init__(self, hf, float32_head=True):
        super().__init__()
        self.hf, self.float32_head = hf, float32_head

    def forward(self, batch, temperature):
        """MicroBatch -> logp [C] and entropy [C] of softmax(logits / temperature), in nats, with gradient."""
        head = self.hf.get_output_embeddings()
        return LogprobsFromHidden.apply(hidden_states(self.hf, batch), head.weight, head.bias, batch.targets,
                                        temperature, self.float32_head)


class Critic(nn.Module):
    """A transformer with a scalar head whose forward returns the value of the state before each token."""

    def __init__(self, hf):
        super().__init__()
        self.hf = hf

    def forward(self, batch):
        """MicroBatch -> values [C]: entry c is read one token before c, so it does not see c.

        The head computes in float32 also where the layers do not: bfloat16 has three digits for a value.
        """
        head = self.hf.score
        return hidden_states(self.hf, batch).float() @ head.weight[0].float() + head.bias.float()


# ---------------------------------------------------------------- loading and sharding

def check_model(path, key="model", tokenizer=True):
    """Raise ValueError if `path` is a folder without config, weights or tokenizer, or not to be found.

    key: the setting that names it, for the message. tokenizer: whether it needs one.
    """
    if not os.path.isdir(path):
        if path.startswith((".", "/", "~", "out/")):
            raise ValueError(f"{key}={path}: no such folder")
        try:
            AutoConfig.from_pretrained(path)                    # a hub id
            return
        except OSError as error:
            raise ValueError(f"{key}={path}: no such folder, and the hub does not give it: "
                             f"{str(error).splitlines()[0]}") from None
    files = os.listdir(path)
    for what, found in {
            "config.json": "config.json" in files,
            "weights (*.safetensors or *.bin)": any(f.endswith((".safetensors", ".bin")) for f in files),
            "tokenizer": not tokenizer or any(f.startswith(("tokenizer", "vocab", "spiece"))
                                              for f in files)}.items():
        if not found:
            raise ValueError(f"{key}={path}: no {what} in this folder")


def load_policy(path, mesh, dtype, gradient_checkpointing=False, trained=True, float32_head=True):
    """A Policy from a folder or hub id: float32 master weights, FSDP2-sharded over mesh, computing in dtype.

    trained: False for a reference, which needs no gradient and no more digits than it computes with: weights
    in dtype, so in bfloat16 half the memory and the same logprobs. float32_head: see head_logits; give the
    engine the same. Every rank must call it. Raises ValueError for models whose logits are more than
    hidden @ head (softcapped or scaled heads): they would be wrong.
    """
    config = AutoConfig.from_pretrained(path)
    for key in ("final_logit_softcapping", "logit_scale", "logits_scaling"):
        if getattr(config, key, None) not in (None, 1.0):
            raise ValueError(f"model={path}: {key}={getattr(config, key)} changes the logits after the head; "
                             "only plain linear heads are supported")
    hf, loading = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32 if trained else dtype, attn_implementation="packed",
        output_loading_info=True)
    if loading["missing_keys"]:
        raise ValueError(f"model={path}: no {', '.join(sorted(loading['missing_keys']))} in its weights")
    if hf.generation_config:
        hf.generation_config.do_sample = True   # it may name a temperature, and could not be saved without
    return shard(Policy(hf, float32_head).requires_grad_(trained), mesh, dtype, gradient_checkpointing)


def load_critic(path, mesh, dtype, gradient_checkpointing=False):
    """A Critic from a folder or hub id, as load_policy does; a head that the folder lacks starts at zero."""
    config = AutoConfig.from_pretrained(path, num_labels=1)
    config.classifier_dropout = 0.0
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()                       # a missing head is expected, and needs no report
    hf, loading = AutoModelForTokenClassification.from_pretrained(
        path, config=config, dtype=torch.float32, attn_implementation="packed", output_loading_info=True)
    logging.set_verbosity(verbosity)
    for name in loading["missing_keys"]:
        if not name.startswith("score."):
            raise ValueError(f"critic_model={path}: no {name} in its weights")
        nn.init.zeros_(hf.get_parameter(name))
    return shard(Critic(hf), mesh, dtype, gradient_checkpointing)


def shard(module, mesh, dtype, gradient_checkpointing):
    """Put a Policy or Critic on its device and under FSDP2: each layer by itself, the rest as the root."""
    hf = module.hf.to(mesh.device_type)
    if gradient_checkpointing:
        hf.gradient_checkpointing_enable({"use_reentrant": False})
    hf.train()  # gradient checkpointing needs it; dropout would make trainer and engine differ:
    if dropout := [name for name, part in hf.named_modules() if isinstance(part, nn.Dropout) and part.p > 0]:
        raise ValueError(f"model={hf.name_or_path}: {dropout[0]} has dropout; the engine samples without it. "
                         "Set it to 0 in the config")
    precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for layer in hf.base_model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=precision)
    fully_shard(module, mesh=mesh, mp_policy=precision)
    return module


def offload(optimizer, device):
    """Keep an optimizer's moments in host memory except while it steps.

    Adam's are 8 bytes a parameter, over the ranks, that the GPU then has for activations and the engine; they
    cross the bus twice an update.
    """
    def move(target):
        for state in optimizer.state.values():
            state |= {name: value.to(target) for name, value in state.items() if name != "step"}
    optimizer.register_step_pre_hook(lambda *_: move(device))
    optimizer.register_step_post_hook(lambda *_: move("cpu"))
    optimizer.register_load_state_dict_post_hook(lambda *_: move("cpu"))    # a resumed run's
