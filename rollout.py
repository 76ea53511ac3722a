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
import copy
import gc
import importlib.util
import itertools
import json
import logging
import math
import os
import re
import warnings
import zlib
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm
from transformers import AutoConfig, DynamicCache, PreTrainedModel

from configurator import InputError, reading
from model import head_logits
from runtime import distributed
from runtime.checkpoint import json_text
from runtime.model_folder import load_tokenizer, model_class
from weights import checksum, engine_weights, load_checked, reload_vllm

# These fields of a Rollout are saved although JSON may change them. from_arrays restores the keys of rewards
# and the tuples of versions. The row and the completion hold the user's data, where a change is accepted.
CHANGED_BY_JSON = "rewards", "versions", "row", "completion"
# vLLM's top_k also keeps all tokens that are as likely as the k-th. So vLLM is asked for the logprobs of TIES
# more tokens than top_k, and kept_sets checks that these were enough.
TIES = 4

# If vLLM 0.32 does not know a model, it takes transformers' class and wraps it for compilation. The trainer's
# model is of the same class, and the wrapper asks it for this attribute. To be removed once vLLM mends that.
PreTrainedModel.do_not_compile = True


@dataclass
class Rollout:
    """A prompt and what the policy generated: a sequence of tokens, and which of them it sampled.

    An agent's episode may consist of several sequences of tokens, each with a prompt of its own. ids, spans
    and logprobs hold them one after the other, and row_starts says where each begins. The prompt in `row` and
    the completion are those of the sequence with the most sampled tokens. All other fields describe the whole
    episode.
    """
    ids: np.ndarray          # int32 [L]: the prompt, then sampled and inserted tokens in their order
    spans: np.ndarray        # int32 [S, 2]: start and end in ids of each span that the policy sampled
    logprobs: np.ndarray     # float32 [C]: the engine's logprob of each sampled token
    finish_reason: str       # stop: it ended by itself; length: it was cut off; for others see episodes.py
    # int32 [R, 3], for each sequence: where it begins in ids, the index of its first sampled token among all
    # sampled tokens, and how many tokens its prompt has. A later sequence may repeat turns of an earlier one.
    # They stand after its prompt like inserted tokens, and not in spans.
    row_starts: np.ndarray
    row: dict = None         # the row of the data set that it answers
    completion: object = ""  # the text after the prompt and before a stop string, or messages if the prompt
                             # consists of messages
    parts: dict = field(default_factory=dict)   # the named parts of the score
    problem: str = ""        # why the reward failed to score it
    answered: object = None  # whether it has a final answer; None if its row has no `answer` to compare with,
                             # or if nobody scored it
    rewards: dict = field(default_factory=dict) # {index of a sampled token: its part of the score}
    results: list = field(default_factory=list) # what rewards that read its environment gave, before it is
                                                # scored: rewards.Result
    counts: dict = field(default_factory=dict)  # an episode's tool calls, failures and environment time
    extra: dict = field(default_factory=dict)   # {name: value} that a reward or an environment logged
    versions: tuple = ((0, 0),)  # pairs (first sampled token, version of the weights that sampled from there
                                 # on); a version is the number of steps that the weights were trained for
    row_names: list = field(default_factory=list)   # with an agent: the models that its sequences asked for
    begun: int = 0           # how many tokens before the first sampled one belong to the completion

    @classmethod
    def single(cls, prompt_ids, completion_ids, logprobs, finish_reason, versions=((0, 0),), kept=()):
        """Return the Rollout of one completion, given as lists."""
        ids = np.array([*prompt_ids, *completion_ids], np.int32)
        spans = np.array([[len(prompt_ids), len(ids)]], np.int32)
        row_starts = np.array([[0, 0, len(prompt_ids)]], np.int32)
        r = cls(ids, spans, np.array(logprobs, np.float32), finish_reason, row_starts, versions=versions)
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

    def behind(self, prompt_ids):
        """Return a copy in which the first sequence has another prompt. All tokens that were sampled, and the
        sets that they were drawn from, stay the same."""
        length = len(self.prompt_ids)
        shift = len(prompt_ids) - length
        variant = copy.copy(self)
        variant.ids = np.array([*prompt_ids, *self.ids[length:]], np.int32)
        variant.spans = self.spans + shift
        variant.row_starts = self.row_starts.copy()
        variant.row_starts[0, 2] += shift
        variant.row_starts[1:, 0] += shift
        return variant

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
    def row_lengths(self):
        """How many sampled tokens each sequence has, as a list."""
        return np.diff(self.row_starts[:, 1], append=len(self.logprobs)).tolist()

    @property
    def longest_tail(self):
        """How many tokens follow the prompt in the sequence where the most do."""
        lengths = np.diff(self.row_starts[:, 0], append=len(self.ids))
        return max(lengths - self.row_starts[:, 2])

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


def as_arrays(rollouts):
    """Return Rollouts as {name: array}, for a checkpoint.

    Fields that you have added to a rollout are kept as well. Raises InputError for a field that is neither an
    array of numbers, nor a number of NumPy, nor a value that JSON holds. In rows and completions a date, say,
    becomes text.
    """
    arrays = {}
    records = []                            # for each rollout its fields that are no arrays, by name
    for i, r in enumerate(rollouts):
        record = {}
        for key, value in vars(r).items():
            if isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind in "biufc":         # numbers
                arrays[f"{i}.{key}"] = value
                continue
            if key not in CHANGED_BY_JSON:
                json_text(f"the field {key} of a rollout", value)       # raises if JSON would change it
            record[key] = value
        records.append(record)
    text = json.dumps(records, default=str)
    return arrays | {"records": np.frombuffer(text.encode(), np.uint8)}


def from_arrays(arrays):
    """Return the Rollouts of which as_arrays made these arrays. Without arrays there are none.

    Raises InputError if an older version of this code made them, which wrote no "records". Its row_starts had
    another form, or were missing.
    """
    if not arrays:
        return []
    if "records" not in arrays:                 # it was called "rest" then
        raise InputError("the checkpoint holds rollouts of an older version of this code: resume with that "
                         "version, or with another max_staleness, so that they are sampled again")
    rollouts = []
    for record in json.loads(arrays["records"].tobytes()):
        r = Rollout.__new__(Rollout)        # its __init__ would refuse fields that you have added
        vars(r).update(record)
        r.rewards = {int(token): reward for token, reward in r.rewards.items()}
        r.versions = tuple(map(tuple, r.versions))
        rollouts.append(r)
    for name, array in arrays.items():
        if name != "records":
            i, key = name.split(".")
            setattr(rollouts[int(i)], key, array[()])       # [()]: a number is an array without dimensions
    return rollouts


def engine_class(engine):
    """Return the class for engine vllm, hf, or auto, which is vllm if it is installed and otherwise hf."""
    if engine == "vllm" or (engine == "auto" and importlib.util.find_spec("vllm")):
        return VLLMEngine
    return HFEngine


def load_engine(settings, model, dtype, max_length, eos_ids, apart=False):
    """Return the engine of a script's settings, with a model from a folder or hub id.

    max_length: how many tokens the longest sequence has. eos_ids: the tokens that end an answer. apart:
    whether no trainer uses this engine's device.
    """
    kind = engine_class(settings.engine)
    try:
        engine = kind(
            model, dtype, max_length, eos_ids, settings.vllm_gpu_memory_utilization,
            getattr(settings, "vllm_tensor_parallel_size", 1), apart, getattr(settings, "in_flight", False))
    except Exception as error:
        error.add_note(f"engine={kind.name} cannot run {model}, the other engine may\n")
        raise
    engine.dtype = dtype
    if settings.stop:
        engine.stop = stop_strings(settings.stop)
        # No string has more bytes than the setting, and a token with text has at least one. The 8 are for
        # tokens without text.
        engine.stop_reach = len(settings.stop.encode()) + 8
        engine.tokenizer = load_tokenizer(model)
    return engine


def stop_strings(stop):
    """Return the strings that the setting `stop` names, as a list.

    Commas stand between them, and a backslash with an n for a line end. Raises InputError if one is empty.
    """
    if not stop:
        return []
    strings = stop.replace("\\n", "\n").split(",")
    if "" in strings:
        raise InputError(f"stop={stop}: a string between its commas is empty")
    return strings


def text_of(tokenizer, sampled, eos_ids, stop=()):
    """Return the text of sampled ids, without the token that ended them and without padding at the end.

    stop: strings; the text ends before the first of them.
    """
    while len(sampled) and sampled[-1] in (*eos_ids, tokenizer.pad_token_id):
        sampled = sampled[:-1]
    text = tokenizer.decode(sampled)
    if stop:
        text = re.split("|".join(map(re.escape, stop)), text)[0]
    return text


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
        jobs += [(prompt.row, Request(None, prompt.ids, seed + i, **sampling)) for i in range(n)]
    return jobs


class Sampler:
    """Prompts in, rollouts out: single answers of an engine, or episodes that a Player plays.

    player: an episodes.Player. engine: a VLLMEngine or HFEngine.
    """

    def __init__(self, player, engine):
        self.player = player
        self.engine = engine

    def __call__(self, prompts, n, names, prefix="", **sampling):
        """Return n adjacent Rollouts per data.Prompt. If a signal has come, it ends the run instead.

        The arguments are those of jobs_for. Raises InputError if the same weights have already sampled for a
        prompt under the same name, unless the temperature is 0, or if an episode is to begin in an answer.
        """
        player = self.player
        self.engine.stop_if_signalled()                         # the end of the run, if a signal has come
        jobs = jobs_for(player.settings, prompts, n, names, prefix, **sampling)
        for name, (_, request) in zip(names, jobs[::n]):
            earlier = self.engine.sampled.setdefault((name, request.temperature), request)
            if earlier is not request and earlier.ids == request.ids and request.temperature:
                raise InputError(f"since the last weight sync {name!r} has named this prompt before: its "
                                 "seeds would give the same completions again, so take another name")
        if player.make and any(prompt.begun for prompt in prompts):
            raise InputError(f"{player.key} plays, and no prompt may have the beginning of an answer")
        # The Player is needed for an environment, tools or an agent, and if other requests are in flight.
        if player.make or self.engine.versions:
            rollouts = player.play(self.engine, jobs)
        else:
            rollouts = self.engine.generate([request for _, request in jobs])
        if not player.make:
            for i, r in enumerate(rollouts):
                prompt = prompts[i // n]
                r.row = prompt.row
                r.begun = prompt.begun
                answer = r.ids[len(prompt.ids) - r.begun:].tolist()
                r.completion = text_of(player.tokenizer, answer, player.eos_ids, player.stop)
                if not isinstance(r.row["prompt"], str):
                    r.completion = [{"role": "assistant", "content": r.completion}]
        self.engine.stop_if_signalled()
        return rollouts


class Engine:
    """The part that both engines have in common. By itself it stands where no engine is needed."""
    name = "none"
    allocated = 0           # the bytes that PyTorch counts for the engine
    version = 0             # the version of the weights, as in Rollout
    dtype = None            # the dtype that the model computes in; load_engine sets it
    max_length = math.inf   # how many tokens a sequence may have
    # load_engine sets these three if there are strings that end an answer.
    stop = ()               # the strings
    stop_reach = 0          # has_stopped decodes this many of the newest tokens: any string fits in them
    tokenizer = None        # decodes them
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
        self.sampled = {}                   # {(name, temperature): a Request to the current weights}
        self.completing = {}                # {token: whether it may complete a stop string}
        self.asked_by = {}                  # {name of such a request: the OpenEpisodes that added it}

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

    def has_stopped(self, sampled):
        """Return whether the last of these sampled ids completes a stop string."""
        token = sampled[-1]
        if token not in self.completing:
            # It is read twice, because some tokenizers drop a space where a text begins. Others put one after
            # a word when the next token comes. What stands for an incomplete character may become any one.
            text = " " + self.tokenizer.decode([token, token])
            self.completing[token] = any(string[-1] in text or "\ufffd" in text for string in self.stop)
        if not self.completing[token]:                          # most tokens, which saves most of the time
            return False
        newest = sampled[-self.stop_reach:]
        # If tokens are bytes, some tokenizers read nothing of a text that begins inside a character, up to
        # the next token that is no byte. A character has at most four bytes, so one of the texts is readable.
        for start in range(4):
            text = self.tokenizer.decode(newest[start:])
            if any(string in text for string in self.stop):
                return True
        return False

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


class VLLMEngine(Engine):
    """vLLM in this process, on this rank's device.

    On a GPU it sleeps while the trainer works, which frees its memory, unless requests are in flight or it is
    `apart`: on a device that no trainer uses.
    """
    name = "vllm"
    naming = "checkpoint"
    PARTS = "weights", "kv_cache"               # of vLLM's memory, which can sleep

    def __init__(self, model, dtype, max_length, eos_ids, gpu_memory_utilization, tensor_parallel_size=1,
                 apart=False, in_flight=False):
        super().__init__(in_flight)
        self.eos_ids = eos_ids
        self.apart = apart
        self.cuda = torch.cuda.is_available()
        self.sleeps = self.cuda and not apart
        self.asleep = set()                     # the PARTS that sleep now
        self.aborted = []                       # names of requests that the next step aborts
        before = torch.cuda.memory_allocated()                  # 0 on a CPU
        self.llm = self._make(model, dtype, max_length, gpu_memory_utilization, tensor_parallel_size)
        from vllm.distributed import get_tp_group
        self.group = get_tp_group()                             # the ranks that share this engine
        if not self.cuda:
            # If the CPU build lacks a kernel, this fails now and not in the middle of the run.
            self.generate([Request(None, [0] * min(8, max_length - 1), seed=0, max_tokens=1)])
        self.has_head = all(self.llm.apply_model(has_head))     # has_head says why; a value per rank
        # PyTorch counts this as allocated even while vLLM sleeps and its memory is free.
        self.allocated = torch.cuda.memory_allocated() - before
        self.max_length = max_length
        self._sleep()

    def _make(self, model, dtype, max_length, gpu_memory_utilization, tensor_parallel_size):
        # Returns a vllm.LLM. vLLM reads these variables when it is imported.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"          # the engine runs in this process
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")   # has no logprobs and may fail to load
        if not self.cuda:
            os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")            # GiB
            os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")    # spares the trainer's threads
            os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")   # or the first generate compiles for 30 s
            share_the_machine()
            logging.getLogger("torch._library.triton").setLevel("ERROR")    # it warns of a missing Triton
        warnings.filterwarnings("ignore", category=FutureWarning, module="vllm")
        # vLLM sets its own level only after its first warning.
        logging.getLogger("vllm").setLevel(os.environ["VLLM_LOGGING_LEVEL"].upper())
        import vllm
        gc.freeze()                             # vLLM collects garbage three times, and skips what is frozen
        arguments = {"model": model, "dtype": str(dtype).removeprefix("torch."), "skip_tokenizer_init": True}
        config = vllm.EngineArgs(**arguments).create_model_config()
        if not self.cuda and (config.is_hybrid or config.is_attention_free):
            # The prefix cache cannot hold the states of recurrent layers unless prompts are read in chunks.
            arguments["enable_prefix_caching"] = False
        elif not self.cuda:
            # The prefix cache holds whole blocks, and the default of 128 tokens is longer than most turns.
            arguments["block_size"] = 32
        if self.apart or self.in_flight:
            arguments["async_scheduling"] = False               # or a step begins before its weights come
        if "RANK" in os.environ:                # torchrun has started all processes, so vLLM starts none
            arguments["distributed_executor_backend"] = "external_launcher"
        llm = vllm.LLM(
            **arguments, max_model_len=max_length, use_tqdm_on_load=False, enforce_eager=not self.cuda,
            enable_sleep_mode=self.sleeps, gpu_memory_utilization=gpu_memory_utilization,
            tensor_parallel_size=tensor_parallel_size, language_model_only=config.is_multimodal_model,
            hf_overrides={"head_dtype": "float32"},  # for logits; vLLM 0.25 needs compute_logits_in_float32
            logprobs_mode="processed_logprobs",      # after temperature, min_p, top_k and top_p
            max_logprobs=-1,                         # no limit for requests; by default it is 20
            enable_chunked_prefill=self.cuda)        # CPU: a split prompt breaks seeded requests
        compute_logits_in_float32(llm)
        return llm

    def serve(self, jobs, play):
        # At each of its steps the first rank broadcasts (version, requests, aborted), and after the last step
        # "all played". The other ranks take the same steps.
        place = self.group.rank_in_group
        jobs_of_ranks = [jobs] * self.group.world_size
        if self.group.world_size > 1:
            dist.all_gather_object(jobs_of_ranks, jobs, group=self.group.cpu_group)
        results = None
        if place == 0:
            results = play(sum(jobs_of_ranks, []))
            self.group.broadcast_object("all played")
        else:
            while True:
                message = self.group.broadcast_object()
                if message == "all played":
                    break
                version, requests, aborted = message
                if version != self.version:
                    self.switch(version)
                self._step(requests, aborted)
        results = self.group.broadcast_object(results)
        if not self.versions:                                   # no requests are left open
            self._sleep()
        first = sum(map(len, jobs_of_ranks[:place]))
        return results[first:first + len(jobs)]

    def sampled_counts(self):
        states = self.llm.llm_engine.output_processor.request_states.values()
        return {int(state.external_req_id): state.detokenizer.num_output_tokens() for state in states}

    def abort(self, names):
        self.aborted += names

    def step(self):
        requests = self.added
        aborted = self.aborted
        self.added = []
        self.aborted = []
        self.group.broadcast_object((self.version, requests, aborted))      # for the other ranks, in serve
        return self._step(requests, aborted)

    def _step(self, requests, aborted):
        # Adds and aborts requests, and samples a token for each request that is open. Returns Answers.
        from vllm.sampling_params import RequestOutputKind, SamplingParams
        distributed.watchdog.moved()
        self._wake()
        engine = self.llm.llm_engine
        vocab_size = engine.model_config.get_vocab_size()
        for request in requests:
            sampling = request._asdict()        # vLLM has the same names
            name = str(sampling.pop("name"))
            prompt = {"prompt_token_ids": sampling.pop("ids")}
            count = 0                           # how many of the likeliest tokens' logprobs are returned
            if request.top_k and request.temperature:
                count = min(request.top_k + TIES, vocab_size)
            if self.in_flight:
                # If weights change while rows are being sampled, the prefix cache cannot be emptied. By this
                # salt a request finds in it only states that the current weights computed.
                prompt["cache_salt"] = str(self.version)
            added = engine.add_request(name, prompt, SamplingParams(
                **sampling, logprobs=count, flat_logprobs=True, detokenize=False,
                output_kind=RequestOutputKind.FINAL_ONLY,
                ignore_eos=True, stop_token_ids=self.eos_ids))      # no other token ends an answer
            if self.stop:
                watch(engine.output_processor.request_states[added].detokenizer, self.has_stopped)
        engine.abort_request([str(name) for name in aborted])
        answers = [self._answer(name, [], [], "abort") for name in aborted]
        for output in engine.step():
            if output.finished:
                (sample,) = output.outputs
                flat = sample.logprobs
                # flat has one logprob or more for each sampled token, of which the first is the token's own.
                logprobs = [flat.logprobs[first] for first in flat.start_indices]
                kept = ()
                if len(flat.logprobs) > len(logprobs):          # there are others, because count was not 0
                    kept = kept_sets(flat, vocab_size)
                answers.append(self._answer(int(output.request_id), list(sample.token_ids), logprobs,
                                            sample.finish_reason, kept))
        self.show(len(answers), sum(len(answer.ids) for answer in answers))
        return answers

    def _load(self, named_tensors):
        # Loads weights. Returns {name: checksum} of the tensors that have arrived, for weights.load_checked.
        self._wake(["weights"])                                 # the KV cache sleeps until the next step
        if not self.cuda:
            self.llm.apply_model(drop_kernels)
        # A reload processes the weights again as when the model was loaded: the CPU build packs weights of
        # linear layers and drops the originals, and some GPUs have experts in another layout.
        checksums = reload_vllm(self.llm, named_tensors, self.group.world_size, self.has_head)
        if not self.asleep:                                     # a cache that sleeps is empty
            emptied = self.llm.reset_prefix_cache()
            if not (emptied or self.in_flight):
                raise RuntimeError("vLLM keeps what the old weights computed, because a request is in flight")
        return checksums

    def _sleep(self):
        if self.sleeps and self.asleep != {*self.PARTS}:
            self._wake()                                        # vLLM can only put all of its parts to sleep
            self.llm.sleep(level=1)                             # weights to host memory, KV cache dropped
            self.asleep = {*self.PARTS}

    def _wake(self, parts=PARTS):
        # If one of the parts is awake already, vLLM 0.25 maps its memory again and fails, and 0.32 does not
        # wake the other part.
        asleep = [part for part in parts if part in self.asleep]
        if asleep:
            torch.cuda.empty_cache()                            # makes room for the memory that vLLM maps
            self.llm.wake_up(tags=asleep)
            self.asleep -= {*asleep}


def kept_sets(flat, vocab_size):
    """Return the set that each sampled token was drawn from, as in Answer.kept, from vLLM's FlatLogprobs.

    After the logprob of a sampled token FlatLogprobs holds those of the K likeliest tokens. Tokens outside of
    the set have -inf. If all K logprobs are finite, the set may be larger, and it raises RuntimeError.
    """
    shape = len(flat), -1
    ids = np.array(flat.token_ids, dtype=np.int32).reshape(shape)[:, 1:]                        # [C, K]
    kept = np.isfinite(flat.logprobs).reshape(shape)[:, 1:]
    K = ids.shape[1]
    if K < vocab_size and kept[:, -1].any():
        raise RuntimeError(f"vLLM drew a token from {K} tokens or more: too many tie at the last place of "
                           "top_k, so choose another top_k")
    return np.split(ids[kept], kept.sum(1).cumsum()[:-1])


def watch(detokenizer, has_stopped):
    # Lets vLLM end a request at a stop string, as it does with a tokenizer of its own: vLLM calls `update`
    # after each token, and ends the request if it returns a string, or anything else that is true.
    def update(new_token_ids, stop_terminated):
        detokenizer.token_ids += new_token_ids
        return has_stopped(detokenizer.token_ids)

    detokenizer.update = update


def has_head(model):
    # Gemma 2 in vLLM has no output head but its embedding, and refuses the weights of lm_head.
    return any(name.endswith("lm_head") for name, _ in model.named_modules())


# ---------------------------------------------------------------- what only some versions of vLLM need

def compute_logits_in_float32(llm):
    """Let a vllm.LLM of version 0.25 compute its logits in float32.

    To be removed together with 0.25: later versions have the setting head_dtype.
    """
    import vllm
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    def apply(head, hidden, bias=None):
        return head_logits(hidden, head.weight, bias)

    def patch(model):
        # The embedding may be the head as well. It calls `apply` only to compute logits.
        for layer in model.modules():
            method = getattr(layer, "quant_method", None)
            if isinstance(method, UnquantizedEmbeddingMethod):
                method.apply = apply

    if vllm.__version__.startswith("0.25."):
        llm.apply_model(patch)


def share_the_machine():
    """Let vLLM 0.32's CPU build share this process with a trainer, and the machine with other runs."""
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
    # It would bind all memory of this process, the trainer's as well, to one NUMA node.
    # VLLM_CPU_OMP_THREADS_BIND=nobind prevents it only for threads. To be removed once it does so for memory.
    torch.ops._C.init_cpu_memory_env = lambda nodes: None
    # Ranks that share an engine exchange tensors by gloo. The memory that they would share has the same name
    # in every run, so two runs would write into each other's, and None says that they share no name. To be
    # removed once the name is unique.
    CpuCommunicator._all_group_ranks_share_shm_group_name = lambda communicator: None


def drop_kernels(model):
    """Let vLLM 0.32's CPU build pack the experts of a mixture of experts again when it reloads weights.

    It packs them only if there is no kernel yet, so new experts would not be used. To be removed once it
    packs them whenever they are loaded.
    """
    for layer in model.modules():
        method = getattr(layer, "quant_method", None)
        if hasattr(method, "moe_kernel"):
            method.moe_kernel = None


# ---------------------------------------------------------------- the plain engine

class HFEngine(Engine):
    """Plain PyTorch with a KV cache: it needs no vLLM and is short enough to read.

    A step answers queued requests completely: those that sample like the first, and at most max_seqs of them.
    The arguments are those of VLLMEngine; gpu_memory_utilization, tensor_parallel_size and apart have no
    effect.
    """
    name = "hf"
    naming = "module"
    max_seqs = 256           # how many requests a step answers at most

    def __init__(self, model, dtype, max_length, eos_ids, gpu_memory_utilization, tensor_parallel_size=1,
                 apart=False, in_flight=False):
        super().__init__(in_flight)
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.eos_ids = torch.tensor(eos_ids, device=self.device)
        config = AutoConfig.from_pretrained(model)
        attention = None                                        # transformers chooses
        if getattr(config.get_text_config(), "attn_logit_softcapping", None):
            attention = "eager"                                 # PyTorch's own leaves out Gemma 2's softcap
        with reading(f"model={model}: its weights"):
            network = model_class(config).from_pretrained(model, dtype=dtype, attn_implementation=attention)
        self.model = network.to(self.device).eval()
        head = self.model.get_output_embeddings()
        # It computes logits in float32, as the trainer does, and only of the last position.
        head.forward = lambda hidden: head_logits(hidden[:, -1], head.weight, head.bias)[:, None]
        # A model with another kind of cache than this engine expects fails here.
        self.generate([Request(None, ids, seed=0, max_tokens=3) for ids in ([0], [0], [0, 0])])
        self.max_length = max_length

    @torch.no_grad()
    def step(self):
        sampling = self.added[0][-4:]                           # temperature, top_p, top_k and min_p
        requests = [request for request in self.added if request[-4:] == sampling][:self.max_seqs]
        self.added = [request for request in self.added if request not in requests]
        # [R]: how many tokens each request gets; fewer than max_tokens if it ends by itself
        lengths = torch.tensor([request.max_tokens for request in requests], device=self.device)
        longest = lengths.max().item()
        # [R, longest]: a uniform number for each token, drawn in advance from the seed of its request.
        uniform = torch.stack([torch.rand(longest, generator=torch.Generator().manual_seed(request.seed))
                               for request in requests]).to(self.device)
        ids = pad_sequence([torch.tensor(request.ids) for request in requests], batch_first=True,
                           padding_value=-1, padding_side="left").to(self.device)               # [R, L]
        # Requests with the same ids share the first forward: ids becomes [B, L], where no two rows are equal,
        # and row_of [R] is the row of each request.
        ids, row_of = ids.unique(dim=0, return_inverse=True)
        mask = (ids >= 0).long()
        ids = ids.clamp(min=0)
        tokens = torch.zeros_like(uniform, dtype=torch.long)
        logprobs = torch.zeros_like(uniform)
        kept = [[] for _ in requests]                           # of each: what its tokens were drawn from
        stopped = torch.zeros_like(lengths, dtype=torch.bool)   # [R]: True for those that ended by themselves
        count = len(requests)                                   # how many have not ended
        rows = torch.arange(count, device=self.device)          # the requests that are still computed
        cache = DynamicCache(config=self.model.config)
        for t in range(longest):
            if self.signalled:
                return []
            distributed.watchdog.moved()
            # The place of each token in its sequence, where the padding does not count. ids holds only the
            # tokens of this forward, and the mask all tokens.
            positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1]:]
            logits = self.model(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=True,
                                past_key_values=cache, logits_to_keep=1).logits[:, -1]          # [B, V]
            if t == 0:
                cache.reorder_cache(row_of)
                logits = logits[row_of]                                                         # [R, V]
                mask = mask[row_of]
            tokens[rows, t], logprobs[rows, t], mask_kept = sample_tokens(
                logits, uniform[rows, t], *sampling)
            if mask_kept is not None:
                for i, row_kept in zip(rows.tolist(), mask_kept.cpu().numpy()):
                    kept[i].append(np.flatnonzero(row_kept).astype(np.int32))
            stops = torch.isin(tokens[:, t], self.eos_ids)
            if self.stop:
                newest = tokens[rows, max(0, t + 1 - self.stop_reach):t + 1].tolist()
                has_stopped = [self.has_stopped(sampled) for sampled in newest]
                stops[rows] |= torch.tensor(has_stopped, device=self.device)
            stops &= lengths > t                                # no request ends twice
            stopped |= stops
            lengths[stops] = t + 1
            alive = lengths > t + 1
            remaining = alive.sum().item()
            self.show(count - remaining, count)
            count = remaining
            if not count:
                break
            # Once half of the rows have ended, only the others are computed.
            if 2 * count <= len(rows):
                places = alive[rows].nonzero()[:, 0]
                rows = rows[places]
                mask = mask[places]
                cache.reorder_cache(places)
            ids = tokens[rows, t][:, None]
            mask = F.pad(mask, (0, 1), value=1)
        answers = []
        for request, length, stops, sampled, logps, sets in zip(
                requests, lengths.tolist(), stopped.tolist(), tokens.tolist(), logprobs.tolist(), kept):
            finish_reason = "stop" if stops else "length"
            answers.append(self._answer(request.name, sampled[:length], logps[:length], finish_reason,
                                        sets[:length]))
        return answers

    @torch.no_grad()
    def _load(self, named_tensors):
        checksums = {}
        for name, tensor in named_tensors:
            parameter = self.model.get_parameter(name).copy_(tensor)
            checksums[name] = checksum(parameter.to(tensor.dtype))          # some are kept in float32
        return checksums


def sample_tokens(logits, uniform, temperature, top_p=1.0, top_k=0, min_p=0.0):
    """Sample one token per row, by inverting its distribution; logits [R, V], uniform [R] in [0, 1).

    Returns tokens [R] and their logprobs [R] under the distribution that was sampled from:
    softmax(logits / temperature), restricted to the tokens with at least min_p of the largest probability,
    then to the top_k likeliest (0 keeps all), then to the fewest that hold top_p of what is left. With a
    top_k it also returns a mask of these tokens, bool [R, V], otherwise None. Temperature 0 takes the
    likeliest token, and its logprob is that at temperature 1.
    """
    if temperature == 0:
        return logits.argmax(-1), logits.log_softmax(-1).amax(-1), None
    probs = (logits / temperature).softmax(-1)                                                  # [R, V]
    if top_k > 0 or top_p < 1 or min_p > 0:
        probs = truncated(probs, top_p, top_k, min_p)
    cumulative = probs.cumsum(-1)
    total = cumulative[:, -1:]
    # Rounding must not choose a token of probability 0 at the upper end. The first that reaches the total has
    # more.
    last = (cumulative >= total).int().argmax(-1, keepdim=True)                                 # [R, 1]
    token = torch.searchsorted(cumulative, uniform[:, None] * total, right=True).minimum(last)
    mask_kept = None
    if top_k > 0:
        mask_kept = probs > 0
    return token[:, 0], (probs.gather(1, token) / total).log()[:, 0], mask_kept


def truncated(probs, top_p, top_k, min_p):
    # Returns the probabilities with 0 for all tokens but those that sample_tokens draws from.
    ranked, order = probs.sort(-1, descending=True)
    ranked[ranked < min_p * ranked[:, :1]] = 0
    if top_k:
        ranked[:, top_k:] = 0
    # A token is dropped if the likelier ones already hold top_p of the probability that is left.
    ranked[ranked.cumsum(-1) - ranked >= top_p * ranked.sum(-1, keepdim=True)] = 0
    return torch.zeros_like(probs).scatter(-1, order, ranked)
