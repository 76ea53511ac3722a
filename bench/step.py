"""
How fast a step is and how much memory it takes: the update, the weight sync, the rollouts.

    python -m bench.step                                                # 1 M parameters, 64 short sequences
    python -m bench.step --hidden_size=512 --num_heads=16 --num_layers=9 --completion_length=256       # 28 M
    torchrun -m bench.step --model=Qwen/Qwen3-0.6B --sequences=128 --completion_length=1024 \
        --token_budget=16384
    python -m bench.step --engine=vllm --cycles=100      # and 100 times: sample, train, sync, as a run does

The update is train_grpo.py's, without its metrics. Figures, also tokens a second, are of one rank, that is of
one device, and medians of `repeats` after one that is left out. --work=folder keeps model and rollouts, for
bench/against_trl.py.
"Bare" is LLM.generate with logprobs, by the same engine, always awake and without a seed per prompt.
On a GPU the times of sync and rollouts include the engine's waking and falling asleep.
"""
import contextlib
import gc
import json as json_module
import math
import os
import random
import resource
import shutil
import statistics
import tempfile
import time
from types import SimpleNamespace

import torch
from transformers import AutoConfig, Qwen3Config, Qwen3ForCausalLM

import attention
import losses
import packing
import rollout
from configurator import check, configure
from model import load_policy, micro_batches
from runtime import distributed
from options.memory import forecast
# ------------------------------------------------------------------------------------------------------------
# model
model = ""                      # a folder or hub id; empty: a Qwen3 of the shape below, with random weights
hidden_size = 128
num_layers = 4
num_heads = 4                   # of queries; half as many of keys and values
head_dim = 32
vocab_size = 258
# work
sequences = 64                  # completions a step
num_generations = 8             # of these, the completions of each prompt
shared = True                   # compute what completions begin with once; False: for each of them
prompt_length = 40              # tokens
completion_length = 64          # tokens, the longest
lengths = "uniform"             # of completions: uniform (from 1), equal, skewed (seven of 8 of a 16th)
token_budget = 8192             # tokens in a micro-batch
sequence_parallel_size = 1      # ranks that each hold a part of every micro-batch
gradient_checkpointing = False  # recompute activations in the backward pass
torch_compile = False           # compile the layers
faster = ""                     # ways of bench/faster.py: head, host; empty: none, as the scripts
kernel = True                   # CUDA: attention by PyTorch's kernel for sequences of several lengths; False:
                                # by the loop that stands in for it elsewhere
dtype = "auto"                  # float32, bfloat16; auto: bfloat16 on CUDA
engine = ""                     # vllm, hf: measure rollouts as well; empty: none
vllm_gpu_memory_utilization = 0.4
cycles = 0                      # with an engine: of rollout, update and sync, to see whether memory grows
repeats = 5
work = ""                       # folder that keeps model and rollouts; empty: a temporary one
json = False                    # one line of JSON instead of the table
# ------------------------------------------------------------------------------------------------------------
configure(globals(), choices={"engine": ("vllm", "hf")})
check(num_heads % 2 == 0, f"num_heads={num_heads}: must be even, for half as many of keys and values")
check(sequence_parallel_size > 0 and int(os.environ.get("WORLD_SIZE", 1)) % sequence_parallel_size == 0,
      f"sequence_parallel_size={sequence_parallel_size} does not divide the ranks")
check(set(filter(None, faster.split(","))) <= {"head", "host"}, f"faster={faster}: choose from head, host")
check(engine or not cycles, f"cycles={cycles} would do nothing: without an engine there are none")
rank, world_size, device, mesh, sequence_group = distributed.set_up(0, sequence_parallel_size)
cuda = device.type == "cuda"
compute_dtype = getattr(torch, dtype if dtype != "auto" else "bfloat16" if cuda else "float32")


def timed(action):
    """Seconds of one call, the GPU's work included."""
    start = time.perf_counter()
    action()
    if cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - start


def seconds(action):
    """Median seconds of `repeats` calls, after one that is left out."""
    return statistics.median([timed(action) for _ in range(repeats + 1)][1:])


def in_use():
    """Bytes in use now: of the whole GPU, without what PyTorch keeps for later; on a CPU of this process."""
    gc.collect()
    if cuda:
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info()
        return total - free
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def most_in_use():
    """Bytes: the most that tensors have taken on the GPU; on a CPU the process's peak (Linux counts KiB)."""
    return (torch.cuda.max_memory_allocated() if cuda else
            resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)


def since_launch():
    """Seconds since this process was started, by the kernel's clock."""
    with open("/proc/self/stat") as stat, open("/proc/uptime") as uptime:
        started = int(stat.read().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
        return float(uptime.read().split()[0]) - started


# ---------------------------------------------------------------- the work
keep, work = work, distributed.from_master(work or tempfile.mkdtemp())
os.makedirs(work, exist_ok=True)
if not model:
    model = os.path.join(work, "model")
    torch.manual_seed(0)
    if rank == 0:
        Qwen3ForCausalLM(Qwen3Config(
            vocab_size=vocab_size, hidden_size=hidden_size, intermediate_size=3 * hidden_size,
            num_hidden_layers=num_layers, num_attention_heads=num_heads, num_key_value_heads=num_heads // 2,
            head_dim=head_dim, tie_word_embeddings=True,
            max_position_embeddings=32768,
        )).save_pretrained(model)
    distributed.gathered([])
config = AutoConfig.from_pretrained(model)
rng = random.Random(rank)
length = {"uniform": lambda i: rng.randint(1, completion_length), "equal": lambda i: completion_length,
          "skewed": lambda i: completion_length // (16 if i % 8 else 1)}[lengths]
tokens = lambda count: [rng.randrange(config.vocab_size) for _ in range(count)]
prompts = [tokens(prompt_length) for _ in range(sequences)]
rollouts = [rollout.Rollout.single(prompts[i // num_generations], tokens(size), [-1.0] * size, "stop")
            for i, size in enumerate(map(length, range(sequences)))]
adv = torch.randn(sequences, generator=torch.Generator().manual_seed(0)).to(device)
if rank == 0:
    with open(os.path.join(work, "rollouts.json"), "w") as file:
        json_module.dump([{"prompt_ids": r.prompt_ids.tolist(), "completion_ids": r.sampled_ids.tolist(),
                           "logprobs": r.logprobs.tolist()} for r in rollouts], file)

# ---------------------------------------------------------------- training
if not kernel:
    attention.kernel_takes = lambda query, value: False
if not shared:
    order = packing.prefix_order                # as if no two sequences began with the same token
    packing.prefix_order = lambda *arguments: [(s, size, 0) for s, size, _ in order(*arguments)]
policy = load_policy(model, mesh, compute_dtype, gradient_checkpointing, torch_compile, sequence_group)
context = contextlib.nullcontext()
if faster:
    from bench.faster import apply      # it loads PyTorch's compiler: 41 MB that no script pays
    context = apply(faster.split(","))
optimizer = torch.optim.AdamW(policy.parameters(), 1e-6, fused=True)
lens = torch.tensor([len(r.logprobs) for r in rollouts], device=device)
weight = losses.sequence_weights(lens, "token_mean", list(range(len(rollouts))), 1, completion_length)


def update():
    for batch in micro_batches(policy, rollouts, range(len(rollouts)), token_budget):
        with context:
            logp, entropy = policy(batch, 1.0)
        token_loss, _, _ = losses.LOSSES["clip"](logp, logp.detach(), batch.flat(adv), epsilon=0.2, epsilon_high=0.2)
        loss = (batch.flat(weight) * token_loss).sum()
        (loss * world_size).backward()
    norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0).full_tensor().item()
    if math.isfinite(norm):
        optimizer.step()
    optimizer.zero_grad()
    return norm


first_norm = update()
first_update = since_launch()
train_seconds = seconds(update)
peak_memory = most_in_use()             # before the probes below take memory of their own
parts = list(micro_batches(policy, rollouts, range(len(rollouts)), token_budget))
in_rollouts, computed = sum(len(r.ids) for r in rollouts), sum(part.input_ids.numel() for part in parts)
pairs = sum(len(part.input_ids) * (size * key_size - size * (size - 1) / 2) for part in parts
            for size, key_size in zip(part.segments.sizes, part.segments.key_sizes)) / sequence_parallel_size
head = config.vocab_size * config.hidden_size
matrices = sum(p.numel() for name, p in policy.hf.named_parameters() if p.dim() > 1 and "embed" not in name
               and "lm_head" not in name)
# Multiplications and additions, forward and backward: 6 for each weight and token that is computed (for the
# head's, where a completion's token is predicted), and 12 for each element of a head and pair of tokens of
# which one sees the other.
head_size = getattr(config, "head_dim", config.hidden_size // config.num_attention_heads)
heads = config.num_attention_heads * head_size
flops = (6 * matrices * computed + 6 * head * lens.sum().item()
         + 12 * config.num_hidden_layers * heads * pairs)
side = 8192 if cuda else 2048
square = torch.randn(side, side, device=device, dtype=compute_dtype)
peak = 2 * side ** 3 / seconds(lambda: square @ square)
block = torch.empty(2 ** 30 if cuda else 2 ** 27, device=device, dtype=torch.uint8)
bandwidth = 2 * len(block) / seconds(block.clone)               # read and written
del block
figures = {
    "parameters (M)": sum(p.numel() for p in policy.parameters()) / 1e6, "tokens of rollouts": in_rollouts,
    "tokens computed": computed, "update (s)": train_seconds,
    "training tokens/s": in_rollouts / train_seconds,
    "matrix-product peak (TFLOP/s)": peak / 1e12, "share of the peak (MFU)": flops / train_seconds / peak,
    "peak memory (GB)": peak_memory / 1e9, "launch to the first update (s)": first_update,
    "gradient norm of the first update": first_norm}
if cuda:
    asked = SimpleNamespace(
        model=model, dtype=dtype, token_budget=token_budget, sequence_parallel_size=sequence_parallel_size,
        gradient_checkpointing=gradient_checkpointing, lora_rank=0, shard_ranks=0, offload_optimizer=False,
        optimizer="adamw", lora_from="", offload_base=False, engine="vllm", vllm_tensor_parallel_size=1,
        vllm_gpu_memory_utilization=vllm_gpu_memory_utilization)
    figures["forecast (GB)"] = forecast(asked, world_size, torch.cuda.mem_get_info()[1], cuda)[1] / 1e9
# Dense bfloat16, by NVIDIA's data sheets: what papers divide by. The product above reaches less.
sheet = next((peak for name, peak in (("A100", 312e12), ("H100", 989e12), ("H200", 989e12), ("B200", 2250e12))
              if cuda and name in torch.cuda.get_device_name()), None)
if sheet:
    figures["MFU by the data sheet"] = flops / train_seconds / sheet

# ---------------------------------------------------------------- weight sync, rollouts
if engine:
    made, asked = sequences * completion_length, [r.prompt_ids.tolist() for r in rollouts]
    sampler = rollout.engine_class(engine)(model, compute_dtype, prompt_length + completion_length, [],
                                           vllm_gpu_memory_utilization)
    sampler.dtype = compute_dtype
    wanted = [rollout.Request(None, ids, seed, completion_length) for seed, ids in enumerate(asked)]
    sample = lambda: sampler.generate(wanted)
    sync = lambda: sampler.update_weights(policy, 1)
    syncs = []
    for _ in range(repeats + 1):
        if engine == "vllm":
            sampler._sleep()                                    # as a run finds it
        syncs.append(timed(sync))
    # What decoding has to read if all rows are sampled at the same time: the weights once per token of a row,
    # and the keys and values of all that precedes each token.
    size = compute_dtype.itemsize
    cached = 2 * size * config.num_hidden_layers * config.num_key_value_heads * head_size
    before = sum(range(prompt_length, prompt_length + completion_length))
    read = size * (matrices + head) * completion_length + cached * sequences * before
    sampling = seconds(sample)
    figures |= {"sync (s)": statistics.median(syncs[1:]), "rollout tokens/s": made / sampling,
                "memory bandwidth of a copy (GB/s)": bandwidth / 1e9,
                "share of it that decoding reads": read / sampling / bandwidth}
    if engine == "vllm":
        requests = [{"prompt_token_ids": ids} for ids in asked]
        from vllm import SamplingParams
        params = SamplingParams(max_tokens=completion_length, temperature=1.0, logprobs=0, detokenize=False,
                                ignore_eos=True)
        sampler._wake()
        bare = made / seconds(lambda: sampler.llm.generate(requests, params, use_tqdm=False))
        figures["over bare LLM.generate"] = figures["rollout tokens/s"] / bare
        if cuda:
            figures["memory awake (GB)"] = in_use() / 1e9
            naps = [(timed(sampler._sleep), timed(sampler._wake)) for _ in range(repeats)]
            sampler._sleep()
            figures |= {"asleep (GB)": in_use() / 1e9, "sleep (s)": statistics.median(s for s, _ in naps),
                        "wake (s)": statistics.median(w for _, w in naps)}
    footprints = []
    for _ in range(cycles):
        sample()
        update()
        sync()
        footprints.append(in_use() / 1e9)
    if cycles:
        early = min(10, cycles)
        figures |= {f"memory after {early} cycles (GB)": footprints[early - 1],
                    f"after {cycles} (GB)": footprints[-1]}
if rank == 0:
    if not keep:
        shutil.rmtree(work)
    print(json_module.dumps(figures) if json else
          "\n".join(f"{name:32} {value:12.4g}" for name, value in figures.items()))
distributed.leave()
