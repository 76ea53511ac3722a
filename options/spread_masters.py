"""
Master weights in bfloat16 runs, moved off the grid of bfloat16. Only these runs and those with adapters,
which are merged with the same offsets, open this file.
"""
import torch


def even_offsets(weight):
    """Return an int16 for each place of a weight, always the same, spread evenly over rows and columns."""
    def along(count, step):
        return (torch.arange(count, device=weight.device) * step).to(torch.int16)   # drops the higher bits

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
            bits.add_(torch.where(parameter == 0, 0, even_offsets(parameter).clamp_(min=1 - 2 ** 15)))
