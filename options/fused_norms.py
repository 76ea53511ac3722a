"""
RMS norms by PyTorch's own kernel. Only runs on a GPU open this file.
"""
import copy
import functools

import torch
import torch.nn.functional as F
from torch import nn


def fuse_norms(network):
    """Let PyTorch's kernel compute the RMS norms whose formula is the same.

    transformers computes a norm in steps, and each keeps a float32 copy for the backward pass. On an H100 an
    update of Qwen3-0.6B's shape took 22% less time with the kernel, and 35 GB instead of 44.
    """
    for part in network.modules():
        if type(part).__name__.endswith("RMSNorm") and hasattr(part, "variance_epsilon"):
            trial = copy.deepcopy(part).to_empty(device="cpu").float()
            nn.init.uniform_(trial.weight)
            x = torch.rand_like(trial.weight)
            if torch.allclose(trial(x), rms_norm(trial, x)):    # False for Gemma, whose factor is 1 + weight
                part.forward = functools.partial(rms_norm, part)


def rms_norm(part, hidden):
    return F.rms_norm(hidden, part.weight.shape, part.weight, part.variance_epsilon)
