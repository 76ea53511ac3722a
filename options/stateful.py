"""
Micro-batches of models that cannot read packed sequences. Runs with other models do not open this file.

Layers that carry a state from token to token, such as Mamba's, would carry it into the next sequence of a
line. In models with such layers each sequence has a line of its own, padded at the end to the longest.
"""
from operator import itemgetter

import numpy as np
import torch

from packing import MicroBatch, Segments, micro_batch


def padded(order, token_budget):
    """Yield MicroBatches in which each sequence of packing.prefix_order's list has a line of its own.

    The longest come first, and all lines of a MicroBatch are as long as its first one. Padding counts in the
    token_budget.
    """
    members = sorted(order, key=itemgetter(1), reverse=True)
    while members:
        _, longest, _ = members[0]
        lines = [micro_batch([(sequence, size, 0)], longest)
                 for sequence, size, _ in members[:max(1, token_budget // longest)]]
        members = members[len(lines):]
        yield MicroBatch(
            input_ids=torch.cat([line.input_ids for line in lines]),
            position_ids=torch.arange(longest).repeat(len(lines), 1),
            segments=Segments([longest], [np.arange(longest)]),
            index=torch.cat([line.index + i * longest for i, line in enumerate(lines)]),
            targets=torch.cat([line.targets for line in lines]),
            sequences=sum([line.sequences for line in lines], []),
            members=sum([line.members for line in lines], []))
