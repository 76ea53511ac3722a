"""
Loads a model onto the ranks that share it: each rank keeps only its own rows of every parameter.

    load_rows               loads a model whose parameters are DTensors, sharded as FSDP2 does it
    whole_while_running     lets such a network compute before it is under FSDP2
    put_under_fsdp          puts such a network under FSDP2
    spread_masters          moves weights that bfloat16 rounds, so that small steps are not lost
During the load a rank holds its rows and one whole tensor, which is cut as soon as it is part of the model.
transformers reads the files and gives each tensor the name and shape that it has in the model.
"""
import contextlib
import os
import warnings
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.modules.module import register_module_parameter_registration_hook

from runtime import distributed
from runtime.check_model import check_loaded, reading


def load_rows(what, kind, path, config, mesh, dtype, may_lack=()):
    """A model of the class `kind`, with this rank's rows of each parameter in dtype, on the mesh's device.

    mesh: its last dimension shards. If there are two, all ranks along the first have the same rows. Buffers
    are whole, in float32. may_lack: names of parameters that become 0 if the folder has none. Raises
    ValueError, with a message that begins with `what`, if the weights cannot be read, do not fit the config,
    or have NaN or infinite numbers. A collective.
    """
    def cut(module, name, parameter):
        # PyTorch calls this whenever a module gets a parameter. One on the meta device has no numbers yet.
        if not parameter.is_meta and not isinstance(parameter, DTensor):
            return own_rows(parameter, mesh, dtype)

    # By default transformers' threads would read ahead, up to the whole model.
    with (reading(f"{what}: its weights"), register_module_parameter_registration_hook(cut),
          mock.patch.dict(os.environ, HF_DEACTIVATE_ASYNC_LOAD="1"), warnings.catch_warnings()):
        # Some families draw random numbers here and do not use them.
        warnings.filterwarnings("ignore", "DTensor random operators")
        hf, info = kind.from_pretrained(
            path, config=config, dtype=torch.float32, attn_implementation="eager", output_loading_info=True,
            ignore_mismatched_sizes=True, trust_remote_code=False)
    check_loaded(what, info, may_lack)
    for name in info["missing_keys"]:
        nn.init.zeros_(hf.get_parameter(name).to_local())
    for x in hf.buffers():
        x.data = x.to(mesh.device_type)
    names, parameters = zip(*hf.named_parameters())
    extremes = [x.to_local().aminmax() if x.to_local().numel() else [] for x in parameters]
    broken = distributed.largest([not all(map(torch.isfinite, pair)) for pair in extremes])
    if any(broken):
        raise ValueError(f"{what}: {names[broken.index(1)]} has NaN or infinite numbers in its weights")
    return hf


@torch.no_grad()
def own_rows(whole, mesh, dtype):
    # A DTensor with the rows of a whole parameter that FSDP2 gives to this rank.
    start, stop = range_of_rows(len(whole), mesh)
    rows = whole[start:stop].to(mesh.device_type, dtype).contiguous()
    # Without a copy, a slice would keep the whole parameter in memory.
    rows = rows.clone() if rows.untyped_storage().nbytes() > rows.nbytes else rows
    kept = nn.Parameter(DTensor.from_local(
        rows, mesh, [Replicate()] * (mesh.ndim - 1) + [Shard(0)], run_check=False, shape=whole.shape,
        stride=torch.empty(whole.shape, device="meta").stride()), whole.requires_grad)
    # transformers would draw new numbers for a parameter without this attribute.
    kept._is_hf_initialized = getattr(whole, "_is_hf_initialized", False)
    return kept


def range_of_rows(length, mesh):
    # The first of this rank's rows, and the one after the last, of a parameter that has so many.
    count = -(-length // mesh.size(mesh.ndim - 1))
    start = count * mesh.get_local_rank(mesh.ndim - 1)
    return start, start + count


def spread(weight, first=0):
    """An int16 for each place of a weight: always the same, and spread evenly over rows and columns.

    first: if the weight holds some rows of a whole one, the number of its first row there.
    """
    def along(start, count, step):
        return ((torch.arange(count, device=weight.device) + start) * step).to(torch.int16)     # it wraps

    columns = weight.numel() // max(len(weight), 1)
    return (along(first, len(weight), 49471)[:, None] + along(0, columns, 37345)).view(weight.shape)


@torch.no_grad()
def spread_masters(parameters):
    """Move float32 weights, in place, off the grid of bfloat16 without changing what they are rounded to.

    parameters: DTensors. On the grid, an optimizer step that is much smaller than the grid's would change no
    rounded weight, and neither trainer nor engine would compute anything new. Once the weights are spread
    over the intervals that are rounded to the same bfloat16, a step of a third of the grid's takes a third of
    them to the next bfloat16. Zeros stay as they are, and so do parameters that are not on the grid, such as
    those of a run's checkpoint. A collective.
    """
    bits = [parameter.to_local().view(torch.int32) for parameter in parameters]
    off_grid = distributed.largest([bool((rows & 0xffff).any()) for rows in bits])
    for parameter, rows, off in zip(parameters, bits, off_grid):
        if not off:
            first, _ = range_of_rows(len(parameter), parameter.device_mesh)
            # Exactly half a step might be rounded to the next bfloat16.
            moved = spread(rows, first).clamp_(min=1 - 2 ** 15)
            rows.add_(torch.where(rows.view(torch.float32) == 0, 0, moved))


def replace(modules, make):
    """Replace each DTensor parameter x of modules by make(x), and return a function that undoes it.

    make is called only once for a parameter that several modules share.
    """
    places = [(module, name, x) for module in modules for name, x in module._parameters.items()
              if isinstance(x, DTensor)]
    made = {x: nn.Parameter(make(x), x.requires_grad) for x in dict.fromkeys(x for _, _, x in places)}
    for module, name, x in places:
        module._parameters[name] = made[x]

    def undo():
        for module, name, x in places:
            module._parameters[name] = x
    return undo


@contextlib.contextmanager
def whole_while_running(network, units):
    """Let a network of DTensors compute, in float32, inside this context.

    The parameters of a unit are whole while it runs, all others throughout. Entering the context and each
    forward are collectives. A network that fails inside cannot be used afterwards.
    """
    undo, inside = {}, {module for part in units for module in part.modules()}

    def gather(part, *_):
        undo[part] = replace(part.modules(), whole)

    hooks = [part.register_forward_pre_hook(gather) for part in units]
    hooks += [part.register_forward_hook(lambda part, *_: undo.pop(part)()) for part in units]
    undo[network] = replace([one for one in network.modules() if one not in inside], whole)
    yield
    for hook in hooks:
        hook.remove()
    undo[network]()


def whole(x):
    # All rows of a DTensor in float32. Unlike full_tensor this needs no second copy, because each rank's rows
    # are received where they belong.
    rows, group = x.to_local().float(), x.device_mesh.get_group(x.device_mesh.ndim - 1)
    if group.size() == 1:
        return rows
    full = torch.empty(x.shape, device=rows.device)
    for rank, part in enumerate(full.chunk(group.size())):
        if rank == group.rank():
            part.copy_(rows)
        dist.broadcast(part, group=group, group_src=rank)
    return full


def put_under_fsdp(network, units, mesh, dtype):
    """Put a network of DTensors under FSDP2, computing in dtype: each of the units by itself, then the rest.

    fully_shard expects whole parameters, so it gets some on the meta device, which have no numbers. At the
    first forward FSDP2 takes the parameters that the modules have by then, which are the DTensors again. This
    is how it supports load_state_dict(assign=True).
    """
    undo = replace(network.modules(), lambda x: torch.empty(x.shape, dtype=x.dtype, device="meta"))
    for part in [*units, network]:
        fully_shard(part, mesh=mesh, mp_policy=MixedPrecisionPolicy(dtype, torch.float32))
    undo()
