"""
Adam's moments in host memory, except while the optimizer steps. Runs with offload_optimizer open this file.

The GPU then has 8 bytes more per parameter for activations and the engine. The moments cross the bus twice
per update.
"""
import functools


def keep_on_host(optimizer):
    """Move an optimizer's moments to its parameters' device before each step, and to host memory after it."""
    device = optimizer.param_groups[0]["params"][0].device
    to_host = functools.partial(move_moments, "cpu")
    optimizer.register_step_pre_hook(functools.partial(move_moments, device))
    optimizer.register_step_post_hook(to_host)
    optimizer.register_load_state_dict_post_hook(to_host)       # for a resumed run


def move_moments(target, optimizer, *_):
    # PyTorch calls its hooks with the optimizer and other arguments.
    for state in optimizer.state.values():
        for name in state.keys() - {"step"}:
            state[name] = state[name].to(target)
