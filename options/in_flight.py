"""
Groups of completions that outlast a step, for a script that does not wait for the longest ones
(docs/recipes.md):

    sample = InFlightSampler(settings, tokenizer, eos_ids)      # in the place of rollout.load_sampler
    sample.begin(prompts, n, names)     begins a group of n completions for each prompt
    sample.until(count)                 samples until that many groups are complete, and returns them
    sample.abort()                      gives up the other groups, which otherwise go on in the next step

Each rank plays its share of the prompts. The ranks take the steps of their engines together, so that they
agree on which groups were complete first, and on a CPU a run repeats. A call of `sample`, for example by an
evaluation, samples while open groups go on. If requests outlast a weight sync, the script needs the setting
in_flight=True; on a GPU the engine then stays awake and keeps its memory.
"""
from functools import cached_property

import torch.distributed as dist

from configurator import InputError
from options.episodes import EpisodeSampler, OpenEpisodes
from rollout import jobs_for
from runtime import distributed


class InFlightSampler(EpisodeSampler):
    """A Sampler whose groups may be incomplete when a step ends. begin, until and abort are collectives.

    open       {name: data.Prompt} of all ranks' groups that were begun and neither returned nor given up
    complete   the names of the open groups that are complete, in the order of completion
    rollouts   {name: Rollouts} of the complete groups of this rank
    episodes   the OpenEpisodes of this rank
    """

    def __init__(self, settings, tokenizer, eos_ids):
        if settings.vllm_tensor_parallel_size > 1:
            raise InputError("vllm_tensor_parallel_size has to be 1 if groups outlast a step")
        super().__init__(settings, tokenizer, eos_ids)
        self.open = {}
        self.complete = []
        self.rollouts = {}

    @cached_property
    def episodes(self):
        return OpenEpisodes(self, self.engine)

    def begin(self, prompts, n, names, **sampling):
        """Begin a group of n completions for each data.Prompt; all ranks get the same prompts.

        The other arguments are those of rollout.jobs_for.
        """
        self.open |= zip(names, prompts)
        for i in range(dist.get_rank(), len(prompts), dist.get_world_size()):
            jobs = jobs_for(self.settings, [prompts[i]], n, [names[i]], **sampling)
            self.episodes.add(names[i], jobs)

    def until(self, count):
        """Sample until `count` groups are complete, on all ranks together; return the Rollouts of this rank.

        The groups that were complete first are returned. If the same step completed several of them, the one
        that was begun first comes first. The Rollouts of a group are adjacent. Does not return if a
        signal has come. Raises InputError if fewer groups are open.
        """
        if count > len(self.open):
            raise InputError(f"until({count}): only {len(self.open)} groups are open")
        while len(self.complete) < count:
            self.rollouts |= self.episodes.step()
            self.engine.stop_if_signalled()
            new = {*distributed.gathered([*self.rollouts])} - {*self.complete}
            self.complete += [name for name in self.open if name in new]
        returned = []
        for name in self.complete[:count]:
            returned += self.rollouts.pop(name, [])             # another rank has the Rollouts of its groups
            del self.open[name]
        del self.complete[:count]
        self.engine.serve([], list)                             # without requests the engine may sleep
        return returned

    def abort(self):
        """Give up all open groups. Does not return if a signal has come."""
        self.episodes.abort()
        self.engine.stop_if_signalled()                         # a signal may have left requests unanswered
        for collection in (self.open, self.complete, self.rollouts):
            collection.clear()
        self.engine.serve([], list)
