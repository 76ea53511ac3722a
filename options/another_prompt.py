"""
A rollout's tokens behind another prompt, for recipes in which a policy reads more than it was asked with.
"""
import copy

import numpy as np


def behind(rollout, prompt_ids):
    """Return a copy of a rollout in which the first sequence has another prompt. All tokens that were
    sampled, and the sets that they were drawn from, stay the same."""
    length = len(rollout.prompt_ids)
    shift = len(prompt_ids) - length
    variant = copy.copy(rollout)
    variant.ids = np.array([*prompt_ids, *rollout.ids[length:]], np.int32)
    variant.spans = rollout.spans + shift
    variant.sequence_starts = rollout.sequence_starts.copy()
    variant.sequence_starts[0, 2] += shift
    variant.sequence_starts[1:, 0] += shift
    return variant
