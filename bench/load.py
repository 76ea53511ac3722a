"""
What loading and saving a model cost each rank: seconds, and bytes of tensors at their peak.

    torchrun --nproc_per_node=2 -m bench.load
    torchrun --nproc_per_node=4 -m bench.load --layers=28           # Qwen3-0.6B

It writes a model of this shape with random weights in bfloat16 to a temporary folder, loads it as a policy,
and saves it. Rank 0 loads the whole model in float32, another rank its rows and a tensor; the peak of a save
is what rank 0 takes over its resting memory. All figures are those of PyTorch's profiler, on a CPU.
"""
import itertools
import os
import tempfile
import time

import torch
import torch.distributed as dist
from transformers import Qwen3Config, Qwen3ForCausalLM

from configurator import configure
from model import load_policy
from runtime import checkpoint, distributed
from tiny import pretrain
# ------------------------------------------------------------------------------------------------------------
layers = 12
hidden_size = 1024
vocabulary = 151_936
# ------------------------------------------------------------------------------------------------------------
configure(globals())
os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = "1"            # the profiler does not see what other threads allocate
rank, world_size, device, mesh, *_ = distributed.set_up()


def measured(function, file=""):
    """What a function returns, how long it took, and the bytes of tensors at their peak over those before.

    file: one that safetensors maps into memory, which the profiler takes for a tensor of its size.
    """
    mapped = os.path.getsize(file) if file else 0
    dist.barrier()
    with torch.profiler.profile(profile_memory=True) as profile:
        started = time.perf_counter()
        result = function()
        seconds = time.perf_counter() - started
    changes = [event.nbytes() for event in profile.profiler.kineto_results.events()
               if event.name() == "[memory]" and abs(event.nbytes()) != mapped]
    return result, seconds, max(itertools.accumulate(changes), default=0)


with tempfile.TemporaryDirectory() as folder:
    folder = distributed.from_master(folder)
    if rank == 0:
        config = Qwen3Config(vocab_size=vocabulary, hidden_size=hidden_size, num_hidden_layers=layers,
                             intermediate_size=3 * hidden_size, num_attention_heads=hidden_size // 64,
                             num_key_value_heads=hidden_size // 128, head_dim=128, tie_word_embeddings=True)
        Qwen3ForCausalLM(config).bfloat16().save_pretrained(f"{folder}/model")
    dist.barrier()
    policy, seconds, peak = measured(
        lambda: load_policy(f"{folder}/model", mesh, torch.float32), f"{folder}/model/model.safetensors")
    sizes = [parameter.numel() * 4 for parameter in policy.parameters()]
    rows = sum(parameter.to_local().numel() * 4 for parameter in policy.parameters())
    seconds, most_rows, peak_of_others = map(max, zip(*distributed.gathered([(seconds, rows, peak if rank else 0)])))
    optimizer, tokenizer = torch.optim.SGD(policy.parameters(), 0.0), pretrain.make_tokenizer()
    _, save_seconds, save_peak = measured(lambda: checkpoint.save_checkpoint(
        f"{folder}/checkpoint-1", {"": (policy, optimizer)}, tokenizer, {"eval_scores": {}}, 2))
    if rank == 0:
        print(f"{sum(sizes) / 4e6:.0f} M parameters, {world_size} ranks\n"
              f"loaded in {seconds:.1f} s; rank 0's peak {peak / 1e6:.1f} MB, that of the others "
              f"{peak_of_others / 1e6:.1f} MB; a rank's rows have {most_rows / 1e6:.1f} MB, the largest tensor "
              f"{max(sizes) / 1e6:.1f} MB\n"
              f"saved in {save_seconds:.1f} s; rank 0's peak {save_peak / 1e6:.1f} MB")
    dist.barrier()
distributed.leave()
