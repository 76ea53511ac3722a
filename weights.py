"""Weights on their way from a folder to the ranks, and back to a folder.

    read_model          reads a model from a folder or hub id, whole
    spread_masters      moves weights that bfloat16 rounds, so that small steps are not lost
    put_under_fsdp      shards a network over the ranks, with the weights of rank 0
    write_model         writes a folder for from_pretrained and vLLM
"""
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import GenerationConfig

from runtime.check_model import check_loaded, reading

FILE_SIZE = "5GB"               # of a file of weights, unless a single tensor has more


def read_model(what, kind, path, config, has_head=True, may_lack=()):
    """Return the model of the class `kind` in a folder or hub id, whole, in float32 on the CPU.

    has_head: False leaves out the head of a causal language model, which the folder may then lack. may_lack:
    names of parameters that stay as the class makes them if the folder has none. Raises ValueError, with a
    message that begins with `what`, if the weights cannot be read, do not fit the config, or have NaN or
    infinite numbers.
    """
    with reading(f"{what}: its weights"):
        hf, info = kind.from_pretrained(
            path, config=config, dtype=torch.float32, attn_implementation="eager", output_loading_info=True,
            ignore_mismatched_sizes=True, trust_remote_code=False)
    if not has_head:
        head = hf.get_output_embeddings()
        for name in [name for name, part in hf.named_modules() if part is head]:
            hf.set_submodule(name, nn.Identity())
            may_lack = [key for key in info["missing_keys"] if key.startswith(f"{name}.")]
    check_loaded(what, info, may_lack)
    for name, x in hf.named_parameters():
        if not all(map(torch.isfinite, x.aminmax())):
            raise ValueError(f"{what}: {name} has NaN or infinite numbers in its weights")
    # In eval mode no dropout acts. The engine has none either.
    return hf.eval()


def spread(weight):
    """Return an int16 for each place of a weight, always the same, spread evenly over rows and columns."""
    def along(count, step):
        return (torch.arange(count, device=weight.device) * step).to(torch.int16)               # it wraps

    columns = weight.numel() // max(len(weight), 1)
    return (along(len(weight), 49471)[:, None] + along(columns, 37345)).view(weight.shape)


@torch.no_grad()
def spread_masters(parameters):
    """Move float32 weights, in place, off the grid of bfloat16 without changing what they are rounded to.

    On the grid, an optimizer step that is much smaller than the grid's would change no rounded weight, and
    neither trainer nor engine would compute anything new. Once the weights are spread over the intervals that
    are rounded to the same bfloat16, a step of a third of the grid's takes a third of them to the next
    bfloat16. Zeros stay as they are, and so do parameters that are not on the grid, such as those of a run's
    checkpoint.
    """
    for parameter in parameters:
        bits = parameter.view(torch.int32)
        if not (bits & 0xffff).any():
            # Exactly half a step might be rounded to the next bfloat16.
            bits.add_(torch.where(parameter == 0, 0, spread(parameter).clamp_(min=1 - 2 ** 15)))


def put_under_fsdp(network, units, mesh, dtype):
    """Put a network under FSDP2, computing in dtype: each of the units by itself, then the rest.

    On rank 0 the network is whole. On all other ranks its parameters are on the meta device, and each rank
    gets its rows of rank 0's, one tensor after the other. dtype: None computes in that of the parameters.
    mesh: its last dimension shards. If there are two, all ranks along the first have the same rows. A
    collective.
    """
    whole = network.state_dict() if dist.get_rank() == 0 else {}
    for part in [*units, network]:
        fully_shard(part, mesh=mesh, mp_policy=MixedPrecisionPolicy(dtype, torch.float32))
    if dist.get_rank() > 0:
        # This empties the buffers as well, and a state dict lacks some, such as the frequencies of positions.
        buffers = [*network.named_buffers(remove_duplicate=False)]
        network.to_empty(device=mesh.device_type)
        for (_, empty), (_, buffer) in zip(network.named_buffers(remove_duplicate=False), buffers):
            empty.copy_(buffer)
    set_model_state_dict(network, whole, options=StateDictOptions(
        full_state_dict=True, broadcast_from_rank0=True))


def write_model(hf, tensors, folder):
    """Write a Hugging Face model to a folder. tensors: {name: whole tensor on the CPU} of its parameters."""
    parameters = {name for name, _ in hf.named_parameters(remove_duplicate=False)}
    buffers = {name: x for name, x in hf.state_dict().items() if name not in parameters}
    # A GenerationConfig's own save_pretrained refuses what some published models have: a temperature alone.
    generation, hf.generation_config = hf.generation_config, GenerationConfig()
    hf.save_pretrained(folder, state_dict=tensors | buffers, max_shard_size=FILE_SIZE)
    hf.generation_config = generation
    generation.to_json_file(f"{folder}/generation_config.json")
