"""
A model from its folder to the ranks that share it: each keeps its own rows of every parameter and no more.

    load_rows               a model of a transformers class, whose parameters are DTensors cut as FSDP2 does
    whole_while_running     such a network computes before it is under FSDP2
    put_under_fsdp          such a network under FSDP2
    spread_masters          its weights, if bfloat16 rounds them, moved so that small steps are not lost
While it loads, a rank holds its rows and one whole tensor, which is cut as soon as it is part of the model.
transformers reads the files, and gives tensors the names and shapes that they have in the model.
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

    mesh: its last dimension shards; along the first, if there are two, all ranks have the same rows. Buffers
    are whole, in float32. What the folder lacks and may lack is zero. Raises ValueError, which begins with
    `what`, if the weights cannot be read, do not fit the config, or have NaN. A collective.
    """
    def cut(module, name, parameter):
        # PyTorch calls this whenever a module gets a parameter. On the meta device it has no numbers yet.
        if not parameter.is_meta and not isinstance(parameter, DTensor):
            return own_rows(parameter, mesh, dtype)

    hook = register_module_parameter_registration_hook(cut)
    try:
        # By default transformers' threads would read ahead, up to the whole model.
        with (reading(f"{what}: its weights"), mock.patch.dict(os.environ, HF_DEACTIVATE_ASYNC_LOAD="1"),
              warnings.catch_warnings()):
            # Some families draw numbers that they then do not use.
            warnings.filterwarnings("ignore", "DTensor random operators")
            hf, info = kind.from_pretrained(
                path, config=config, dtype=torch.float32, attn_implementation="eager",
                output_loading_info=True, ignore_mismatched_sizes=True, trust_remote_code=False)
    finally:
        hook.remove()
    check_loaded(what, info, may_lack)
    for name in info["missing_keys"]:
        nn.init.zeros_(hf.get_parameter(name).to_local())
    for x in hf.buffers():
        x.data = x.to(mesh.device_type)
    names, parameters = zip(*hf.named_parameters())
    extremes = [x.to_local().aminmax() if x.to_local().numel() else [] for x in parameters]
    broken = distributed.largest([not all(map(torch.isfinite, pair)) for pair in extremes])
    if any(broken):
        name = names[broken.index(1)]
        raise ValueError(f"{what}: {name} has NaN or infinite numbers in its weights")
    return hf


@torch.no_grad()
def own_rows(whole, mesh, dtype):
    # The rows of a whole parameter that FSDP2 leaves to this rank.
    count = -(-len(whole) // mesh.size(mesh.ndim - 1))
    start = count * mesh.get_local_rank(mesh.ndim - 1)
    rows = whole[start:start + count].to(mesh.device_type, dtype).contiguous()
    # A slice would keep the whole in memory.
    rows = rows.clone() if rows.untyped_storage().nbytes() > rows.nbytes else rows
    kept = nn.Parameter(DTensor.from_local(
        rows, mesh, [Replicate()] * (mesh.ndim - 1) + [Shard(0)], run_check=False, shape=whole.shape,
        stride=torch.empty(whole.shape, device="meta").stride()), whole.requires_grad)
    # transformers draws new numbers for what lacks this mark.
    kept._is_hf_initialized = getattr(whole, "_is_hf_initialized", False)
    return kept


def spread(weight, first=0):
    """An int16 for each place of a weight: always the same, and spread evenly over rows and columns.

    first: the number of the weight's first row, where it has some rows of a whole.
    """
    def along(start, count, step):
        return ((torch.arange(count, device=weight.device) + start) * step).to(torch.int16)     # it wraps

    columns = weight.numel() // max(len(weight), 1)
    return (along(first, len(weight), 49471)[:, None] + along(0, columns, 37345)).view(weight.shape)


@torch.no_grad()
def spread_masters(parameters):
    """Move float32 weights, in place, off the grid of bfloat16 without changing what they are rounded to.

    parameters: DTensors of this rank's rows. A step of the optimizer that is far smaller than the grid's
    would otherwise change no rounded weight, and neither trainer nor engine would compute anything new.
    With weights all over the interval that is rounded to the same bfloat16, the share of them that comes
    to the next one is the step as a share of the grid's. A weight that is not on the grid, as in a
    checkpoint of a run, is left as it is, and so is every 0. A collective.
    """
    bits = [parameter.to_local().view(torch.int32) for parameter in parameters]
    off_grid = torch.tensor([bool((rows & 0xffff).any()) for rows in bits], dtype=torch.int32)
    dist.all_reduce(off_grid, dist.ReduceOp.MAX)
    for parameter, rows, off in zip(parameters, bits, off_grid.tolist()):
        mesh = parameter.device_mesh
        per_rank = -(-len(parameter) // mesh.size(mesh.ndim - 1))
        if not off:
            # Half a step itself might be rounded up.
            moved = spread(rows, per_rank * mesh.get_local_rank(mesh.ndim - 1)).clamp_(min=1 - 2 ** 15)
            rows.add_(torch.where(rows.view(torch.float32) == 0, 0, moved))


def replace(modules, make):
    """Put make(x) in the place of each parameter x of modules that is a DTensor; returns what undoes it.

    make is called once for a parameter that several modules share.
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
    """In this context a network of DTensors computes, in float32.

    The parameters of a unit are whole while it runs, the others throughout. Each forward is a collective, and
    so is the beginning.
    """
    undo, inside = {}, {module for part in units for module in part.modules()}

    def gather(part, *_):
        undo[part] = replace(part.modules(), whole)

    hooks = [part.register_forward_pre_hook(gather) for part in units]
    hooks += [part.register_forward_hook(lambda part, *_: undo.pop(part)()) for part in units]
    try:
        undo[network] = replace([one for one in network.modules() if one not in inside], whole)
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for back in undo.values():
            back()


def whole(x):
    # All rows of a DTensor in float32. Unlike full_tensor it takes no second copy, because each rank's rows
    # are sent to their place.
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

    fully_shard takes whole parameters, so it gets some without numbers. At the first forward FSDP2 takes what
    the modules then have, which are the rows again; this is how it supports load_state_dict(assign=True).
    """
    undo = replace(network.modules(), lambda x: torch.empty(x.shape, dtype=x.dtype, device="meta"))
    for part in [*units, network]:
        fully_shard(part, mesh=mesh, mp_policy=MixedPrecisionPolicy(dtype, torch.float32))
    undo()
