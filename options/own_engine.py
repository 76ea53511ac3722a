"""
An engine of your own, --engine=mine.py:Engine. Other runs do not open this file.

The class has these two methods; docs/own_engine.md shows one in 30 lines:

    __init__(model, dtype, max_length, eos_ids)     as for the engines here
    generate(requests)                  returns for each rollout.Request (ids, logprobs, finish_reason), and
                                        with a top_k also the sets that the tokens were drawn from: the fields
                                        of a rollout.Answer
    update_weights(named_tensors)       loads the weights of a sync, which is over when it has read them all

It says in `fields` what it heeds besides ids and max_tokens: seed, temperature, top_p, top_k, min_p, stop.
What a run asks for and the class does not name there is refused, because the class would sample something
else without a word. `naming` may be "module" for weights under the names of the Hugging Face module; the
default is "checkpoint". Episodes are played in rounds: what all of them ask for is answered together.
"""
from configurator import InputError
from options.user_code import load_from, shown
from rollout import Engine, Request
from weights import checksum


def own_engine_class(spec):
    """Return the class of an engine that calls the class that a spec such as mine.py:Engine names."""
    class Loaded(OwnEngine):
        name = spec
        user_class = load_from(spec, "engine", "Class")

    Loaded.naming = getattr(Loaded.user_class, "naming", "checkpoint")
    return Loaded


class OwnEngine(Engine):
    """An engine that samples by a class of the user's, `user_class`."""

    def __init__(self, model, dtype, max_length, eos_ids, gpu_memory_utilization, tensor_parallel_size=1,
                 apart=False, in_flight=False):
        super().__init__(in_flight)
        self.heeds("seed")
        if in_flight:
            raise InputError(f"engine={self.name}: in_flight=True needs an engine of the repository's own")
        self.max_length = max_length
        self.instance = self.user_class(model, dtype, max_length, eos_ids)

    def heeds(self, field):
        """Raise InputError unless the class says that it heeds this field of a request."""
        if field not in getattr(self.user_class, "fields", ()):
            raise InputError(f"engine={self.name}: the run needs {field}, and the class does not name it in "
                             "`fields`, so it would sample something else")

    def add(self, request):
        """Queue a Request. Raises InputError if the class does not heed all of it."""
        # A field with its default asks for nothing that the class would have to heed.
        for field, default in Request._field_defaults.items():
            if getattr(request, field) != default:
                self.heeds(field)
        super().add(request)

    def step(self):
        if self.stop:
            self.heeds("stop")
            self.instance.stop = self.stop.strings
        requests = self.added
        self.added = []
        answers = []
        for request, sampled in zip(requests, self.instance.generate(requests), strict=True):
            ids, logprobs, finish_reason, *kept = sampled
            needs_kept = request.top_k > 0 and request.temperature > 0
            whole = 0 < len(ids) == len(logprobs) and finish_reason in ("stop", "length")
            if not whole or needs_kept and [len(ids)] != [*map(len, kept)]:
                raise InputError(f"engine={self.name}: generate returned {shown(sampled)} for a request: not "
                                 "ids, as many logprobs, and stop or length, with a top_k also their sets")
            answers.append(self._answer(request.name, [*ids], [*logprobs], finish_reason, *kept))
        self.show(len(answers), sum(len(answer.ids) for answer in answers))
        return answers

    def _load(self, named_tensors):
        checksums = {}

        def tensors():
            for name, tensor in named_tensors:
                checksums[name] = checksum(tensor)
                yield name, tensor

        self.instance.update_weights(tensors())
        return checksums
