"""
Prompts in, sampled tokens and their logprobs out.

A Rollout is a prompt together with the tokens that the policy generated for it. A Sampler makes Rollouts with
one of two engines: VLLMEngine, or HFEngine, which is plain PyTorch. Both engines have these attributes:

    name        vllm or hf
    naming      which names its weights have: those of a checkpoint, or of the module (weights.engine_weights)
    allocated   the bytes that PyTorch counts for the engine; Run takes them off the trainer's peak

They have these methods:

    add(request)                    queues a Request; raises InputError if it could exceed max_length
    step()                          samples for queued requests; returns the Answers that are finished
    abort(names)                    ends requests whose Answers nobody waits for
    update_weights(policy, version) loads a trained policy's weights for the next steps
    load_weights(tensors, version)  does the same with named tensors
    switch(version)                 does the same with those of a version, which train_async.py provides
    generate(requests)              calls add and step until all Requests are answered

episodes.py calls add and step itself, because it adds requests while others are still being answered. With
in_flight=True, weights may change in the middle of requests.

The trainer gets the tokens as they were sampled; they are never decoded and encoded again. The logprobs, in
nats, belong to the distribution that was sampled from, after temperature, min_p, top_k and top_p, in this
order. Each request has its own seed, so on a CPU a run repeats no matter what else is in the batch. On a GPU
the batch may change how logits are rounded, and with that a token.
"""
import importlib.util
import itertools
import math
import zlib
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

from configurator import InputError
from runtime import distributed
from runtime.model_folder import load_tokenizer
from weights import engine_weights, load_checked

@dataclass
class Rollout:
    """A prompt and what the policy generated: a sequence of tokens, and which of them it sampled.

    An agent's episode may consist of several sequences of tokens, each with a prompt of its own. ids, spans
    and logprobs hold them one after the other, and sequence_starts says where each begins. The prompt in
    `row` and the completion are those of the sequence with the most sampled tokens. All other fields
    describe the whole episode.
    """
    ids: np.ndarray          # int32 [L]: the prompt, then sampled and inserted tokens in their order
    spans: np.ndarray        # int32 [S, 2]: start and end in ids of each span that the policy sampled
    logprobs: np.ndarray     # float32 [C]: the engine's logprob of each sampled token
    finish_reason: str       # stop: it ended by itself; length: it was cut off; for others see episodes.py
    # int32 [R, 3], for each sequence: where it begins in ids, the index of its first sampled token among all
    # sampled tokens, and how many tokens its prompt has. A later sequence may repeat turns of an earlier one.
    # They stand after its prompt like inserted tokens, and not in spans.
    sequence_starts: np.ndarray
    row: dict = None         # the row of the data set that it answers
    completion: object = ""  # the text after the prompt and before a stop string, or messages if the prompt
                             # consists of messages
    parts: dict = field(default_factory=dict)   # the named parts of the score
    problem: str = ""        # why the reward failed to score it
    answer: object = None    # its final answer, as a text that is the same for answers that agree; "" if it
                             # has none; None if nobody scored it
    rewards: dict = field(default_factory=dict) # {index of a sampled token: its part of the score}
    results: list = field(default_factory=list) # what rewards that read its environment gave, before it is
                                                # scored: rewards.Result
    counts: dict = field(default_factory=dict)  # an episode's tool calls, failures and environment time
    extra: dict = field(default_factory=dict)   # {name: value} that a reward or an environment logged
    versions: tuple = ((0, 0),)  # pairs (first sampled token, version of the weights that sampled from there
                                 # on); a version is the number of steps that the weights were trained for
    sequence_names: list = field(default_factory=list)  # with an agent: the models that its sequences named
    begun: int = 0           # how many tokens before the first sampled one belong to the completion

    @classmethod
    def single(cls, prompt_ids, completion_ids, logprobs, finish_reason, versions=((0, 0),), kept=()):
        """Return the Rollout of one completion, given as lists."""
        ids = np.array([*prompt_ids, *completion_ids], np.int32)
        spans = np.array([[len(prompt_ids), len(ids)]], np.int32)
        sequence_starts = np.array([[0, 0, len(prompt_ids)]], np.int32)
        r = cls(ids, spans, np.array(logprobs, np.float32), finish_reason, sequence_starts, versions=versions)
        if kept:
            r.keep(kept)
        return r

    def keep(self, sets):
        """Keep the sets that the sampled tokens were drawn from, as in Answer.kept.

        With a top_k the engine draws each token from a small set, and the trainer has to normalise over the
        same set. The sets become two int32 arrays: kept_ids holds the ids of all sets, one set after the
        other, and kept_sizes [C] the sizes of the sets. A rollout that was sampled without top_k has neither,
        so these are no fields: copy.copy(r) has them, but dataclasses.replace(r) would lose them.
        """
        self.kept_ids = np.concatenate(sets)
        self.kept_sizes = np.array([len(ids) for ids in sets], np.int32)

    @property
    def score(self):
        """The sum of its rewards, or NaN if it was not scored. If it is set, the last token gets the
        difference."""
        return sum(self.rewards.values()) if self.rewards else math.nan

    @score.setter
    def score(self, score):
        last = len(self.logprobs) - 1
        difference = score - self.score
        if math.isnan(self.score):
            self.rewards = {last: score}
        elif not abs(difference) < 1e-9:        # less is rounding; NaN is a difference
            self.rewards = self.rewards | {last: self.rewards.get(last, 0.0) + difference}

    @property
    def prompt_ids(self):
        return self.ids[:self.spans[0, 0]]

    @property
    def places(self):
        """The place in ids of each sampled token."""
        return np.concatenate([np.arange(start, end) for start, end in self.spans])

    @property
    def lengths_of_sequences(self):
        """How many sampled tokens each sequence has, as a list."""
        return np.diff(self.sequence_starts[:, 1], append=len(self.logprobs)).tolist()

    @property
    def longest_tail(self):
        """How many tokens follow the prompt in the sequence where the most do."""
        lengths = np.diff(self.sequence_starts[:, 0], append=len(self.ids))
        return max(lengths - self.sequence_starts[:, 2])

    @property
    def sampled_ids(self):
        return self.ids[self.places]

    @property
    def sampled_by(self):
        """The versions of the weights that sampled its tokens, as a set."""
        return {version for _, version in self.versions}


class Request(NamedTuple):
    """A sequence of tokens that an engine should continue, and how."""
    name: int                # a number, different from those of all other unanswered requests
    ids: list                # the sequence
    seed: int
    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0           # 0 samples from all tokens
    min_p: float = 0.0
    shown: object = None     # an images.Shown if the prompt shows images


class Answer(NamedTuple):
    """The tokens that an engine sampled for a Request."""
    name: int                # the name of the Request
    ids: list                # the sampled tokens
    logprobs: list           # one per sampled token
    finish_reason: str       # stop: it ends with an end token or a stop string; length: it was cut off;
                             # abort: by `abort`
    versions: tuple = ((0, 0),)                 # as in Rollout
    # With a top_k and a temperature it has an int32 array for each sampled token: the ids of the tokens that
    # this one was drawn from, which temperature, min_p, top_k and top_p had left. Otherwise it is empty.
    kept: list = ()


def engine_class(engine):
    """Return the class for engine vllm, hf, auto, which is vllm if it is installed and otherwise hf, or
    mine.py:Engine, a class of the user's."""
    if ":" in engine:
        from options.own_engine import own_engine_class
        return own_engine_class(engine)
    if engine == "vllm" or (engine == "auto" and importlib.util.find_spec("vllm")):
        from vllm_engine import VLLMEngine
        return VLLMEngine
    from hf_engine import HFEngine
    return HFEngine


def load_engine(settings, model, dtype, max_length, eos_ids, apart=False):
    """Return the engine of a script's settings, with a model from a folder or hub id.

    max_length: how many tokens the longest sequence has. eos_ids: the tokens that end an answer. apart:
    whether no trainer uses this engine's device.
    """
    kind = engine_class(settings.engine)
    if settings.images:
        from options.images import seeing
        kind = seeing(kind)
    try:
        engine = kind(
            model, dtype, max_length, eos_ids, settings.vllm_gpu_memory_utilization,
            getattr(settings, "vllm_tensor_parallel_size", 1), apart, getattr(settings, "in_flight", False))
    except Exception as error:
        error.add_note(f"engine={kind.name} cannot run {model}, the other engine may\n")
        raise
    engine.dtype = dtype
    if settings.stop:
        from options.stop_strings import StopStrings
        engine.stop = StopStrings(settings.stop, load_tokenizer(model))
    return engine


def load_sampler(settings, tokenizer, eos_ids):
    """Return the Sampler of a script's settings. The script sets its engine, once this is loaded.

    tokenizer, eos_ids: the policy's. Raises InputError if the settings name something that cannot be used.
    """
    if settings.environment or settings.tools or settings.agent:
        from options.episodes import EpisodeSampler
        return EpisodeSampler(settings, tokenizer, eos_ids)
    return Sampler(settings, tokenizer, eos_ids)


def text_of(tokenizer, sampled, eos_ids):
    """Return the text of sampled ids, without the token that ended them and without padding at the end."""
    while len(sampled) and sampled[-1] in (*eos_ids, tokenizer.pad_token_id):
        sampled = sampled[:-1]
    return tokenizer.decode(sampled)


def sampling_of(settings, prefix=""):
    """Return a dict of temperature, top_p, top_k and min_p in the settings.

    prefix: "eval_" for the settings with this prefix, which evaluations use. If one of these is -1, it is the
    same as in training.
    """
    values = {}
    for key in ("temperature", "top_p", "top_k", "min_p"):
        values[key] = getattr(settings, prefix + key)
        if values[key] == -1:
            values[key] = getattr(settings, key)
    return values


def jobs_for(settings, prompts, n, names, prefix="", **sampling):
    """Return n adjacent jobs per data.Prompt. A job is a pair of a row and a Request that has no name yet.

    names: a different text for each prompt. The Requests of a prompt have the seeds h, h + 1, ..., where h is
    a hash of this text and of the setting seed, the same on any rank. prefix: as in sampling_of. sampling:
    fields of the Requests that differ from the settings.
    """
    sampling = {"max_tokens": settings.max_completion_length, **sampling_of(settings, prefix), **sampling}
    jobs = []
    for prompt, name in zip(prompts, names):
        seed = zlib.crc32(f"{settings.seed} {name}".encode())
        jobs += [(prompt.row, Request(None, prompt.ids, seed + i, shown=prompt.shown, **sampling))
                 for i in range(n)]
    return jobs


class Sampler:
    """Prompts in, rollouts out: single answers of an engine.

    Where the settings name an environment, tools or an agent, load_sampler returns an EpisodeSampler of
    options/episodes.py instead, and also sets these:

    tools         the JSON schemas of the tools that prompts have to name, or None
    make          what makes an instance of the environment; here it is None, which says that an answer is one
                  turn, and nothing replies to it
    reward_part   the part of the score that an environment gives, or "" for none
    """
    tools = None
    make = None
    reward_part = ""

    def __init__(self, settings, tokenizer, eos_ids):
        self.settings = settings
        self.tokenizer = tokenizer
        self.eos_ids = eos_ids
        self.engine = None                      # the script sets it
        self.stop = None
        if settings.stop:
            from options.stop_strings import StopStrings
            self.stop = StopStrings(settings.stop, tokenizer)

    def __call__(self, prompts, n, names, prefix="", **sampling):
        """Return n adjacent Rollouts per data.Prompt. If a signal has come, it ends the run instead.

        The arguments are those of jobs_for. Raises InputError if the same weights have already sampled for a
        prompt under the same name, unless the temperature is 0, or if an episode is to begin in an answer.
        """
        engine = self.engine
        engine.stop_if_signalled()                              # the end of the run, if a signal has come
        jobs = jobs_for(self.settings, prompts, n, names, prefix, **sampling)
        for name, (_, request) in zip(names, jobs[::n]):
            earlier = engine.sampled.setdefault((name, request.temperature), request)
            if earlier is not request and earlier.ids == request.ids and request.temperature:
                raise InputError(f"since the last weight sync {name!r} has named this prompt before: its "
                                 "seeds would give the same completions again, so take another name")
        rollouts = self.play(engine, jobs, prompts)
        engine.stop_if_signalled()
        return rollouts

    def play(self, engine, jobs, prompts):
        """Return a Rollout for each job. Each of the prompts has equally many of them, which are adjacent."""
        rollouts = engine.generate([request for _, request in jobs])
        return self.with_texts(rollouts, prompts)

    def with_texts(self, rollouts, prompts):
        """Give the Rollouts of single answers their rows and completions, and return them."""
        for i, r in enumerate(rollouts):
            prompt = prompts[i * len(prompts) // len(rollouts)]
            r.row = prompt.row
            r.begun = prompt.begun
            r.completion = self.text_of(r.ids[len(prompt.ids) - r.begun:].tolist())
            if not isinstance(r.row["prompt"], str):
                r.completion = [{"role": "assistant", "content": r.completion}]
        return rollouts

    def text_of(self, sampled):
        """Return the text of an answer, which ends before a stop string, from its ids."""
        text = text_of(self.tokenizer, sampled, self.eos_ids)
        return self.stop.before(text) if self.stop else text

    def trial(self, prompts):
        """Return two made-up Rollouts, so that a reward that is broken shows before any training.

        prompts: one or two data.Prompts. A reward must also be able to score an empty answer.
        """
        prompts = (prompts * 2)[:2]                             # a single prompt is answered twice
        rollouts = [self.made_up(prompt, text) for prompt, text in zip(prompts, ("Answer: 0", ""))]
        return self.with_texts(rollouts, prompts)

    def made_up(self, prompt, text):
        """Return a Rollout in which the answer to a data.Prompt is this text."""
        ids = self.tokenizer(text, add_special_tokens=False).input_ids + self.eos_ids[:1]
        return Rollout.single(prompt.ids, ids, [0.0] * len(ids), "stop")


class Engine:
    """The part that both engines have in common. By itself it stands where no engine is needed."""
    name = "none"
    allocated = 0           # the bytes that PyTorch counts for the engine
    version = 0             # the version of the weights, as in Rollout
    dtype = None            # the dtype that the model computes in; load_engine sets it
    max_length = math.inf   # how many tokens a sequence may have
    stop = None             # a StopStrings, which load_engine sets if there are strings that end an answer
    incoming = None         # a function that returns the named tensors of a version; train_async.py sets it
    signalled = False       # whether a signal has come: then sampling returns nothing; runtime/run.py sets it
    bar = tqdm(disable=True)    # what a terminal shows: see progress
    total = 0               # how many requests were added since the bar began
    ended = 0               # how many requests have ended since then

    def __init__(self, in_flight=False):
        self.in_flight = in_flight          # whether weights may change in the middle of requests
        self.added = []                     # the Requests that step has not begun yet
        self.versions = {}                  # {name of an unanswered request: its versions, as a dict}
        self.numbers = itertools.count()    # numbers that become the names of the requests of episodes
        self.sampled = {}                   # {(name, temperature): first Request to these weights}
        self.asked_by = {}                  # {name of an episode's request: its OpenEpisodes}

    def add(self, request):
        """Queue a Request. Raises InputError if it may need more than max_length tokens."""
        longest = len(request.ids) + request.max_tokens
        if longest > self.max_length:
            raise InputError(f"a prompt and its completion of {longest} tokens: the engine was made for "
                             f"{self.max_length}, which is max_prompt_length + max_completion_length")
        self.added.append(request)
        self.total += 1
        self.versions[request.name] = {0: self.version}

    def progress(self):
        """Return a progress bar for a `with` statement. A terminal shows it as long as the block runs, with
        what `show` has last told it."""
        self.total = 0
        self.ended = 0
        self.bar = distributed.progress(unit=" tokens")
        return self.bar

    def show(self, ended, tokens):
        """Tell the bar how many more requests have ended, and how many more tokens were sampled."""
        self.ended += ended
        self.bar.set_description_str(f"{self.ended} of {self.total} completions", refresh=False)
        self.bar.update(tokens)

    def abort(self, names):
        """End requests, if the engine can: the next step returns empty Answers for these names."""

    def switch(self, version):
        """Load the weights of this version."""
        self.load_weights(self.incoming(version), version)

    def update_weights(self, policy, version):
        """Load the weights of a model.Policy, as load_weights does. A collective."""
        self.load_weights(engine_weights(policy, self.naming, self.dtype), version)

    def load_weights(self, named_tensors, version):
        """Load weights. With in_flight, requests that have begun continue with their old KV cache; otherwise
        unanswered requests raise RuntimeError."""
        if self.versions:
            if not self.in_flight:
                raise RuntimeError(f"the weights of version {version} come while {len(self.versions)} "
                                   "requests are unanswered: finish or abort these, or set in_flight=True")
            counts = self.sampled_counts()
            for name, request_versions in self.versions.items():
                # From its next token on, this version samples for the request.
                request_versions[counts.get(name, 0)] = version
        self.version = version
        self.sampled = {}
        load_checked(self._load, named_tensors, version)

    def sampled_counts(self):
        """Return {name: the number of tokens sampled so far} of the unanswered requests that have begun."""
        return {}

    def serve(self, jobs, play):
        """Return play(jobs), a list with a result for each of this rank's jobs. play calls add and step.

        If ranks share an engine, this is a collective: the first of them plays the jobs of all, the others
        take the same steps of the engine, and each gets the results of its own jobs.
        """
        return play(jobs)

    def generate(self, requests):
        """Return a Rollout for each Request. Their names do not matter.

        Raises RuntimeError while other requests wait for their answers, as when an environment samples.
        """
        if self.versions:
            raise RuntimeError("the run's engine is in the middle of a step and samples for nothing else: an "
                               "environment that samples needs a model, or a server, of its own")

        def play(requests):
            rollouts = {}
            with self.progress():
                for i, request in enumerate(requests):
                    self.add(request._replace(name=i))
                while len(rollouts) < len(requests):
                    for name, *sampled in self.step():  # ids, logprobs, finish_reason, versions, kept
                        rollouts[name] = Rollout.single(requests[name].ids, *sampled)
                    if self.signalled:
                        return []
            return [rollouts[i] for i in range(len(requests))]

        return self.serve(requests, play)

    def stop_if_signalled(self):
        """Do nothing. On a run's engine Run.begin replaces this method by Run.stop_if_signalled, which saves
        and ends the run if a signal has come."""

    def close(self):
        """Do nothing, because this engine ends with its process. placement.py ends engines that are apart."""

    def _answer(self, name, ids, logprobs, finish_reason, kept=()):
        # Closes a request. Where ranks share an engine, only the first one calls add and has versions of it.
        # The others make this Answer as well, but nobody reads it.
        versions = tuple(self.versions.pop(name, {}).items())
        return Answer(name, ids, logprobs, finish_reason, versions, kept)
