"""
Rollout: prompts in, sampled tokens and their logprobs out. Both engines have these methods, and the
attributes name, naming (see weights.engine_weights) and allocated (bytes):

    add(request)                    queues a Request; raises ValueError if its row may exceed max_length
    step()                          samples for queued requests; returns the Answers that are finished
    abort(names)                    ends requests whose Answers nobody waits for
    load_weights(tensors, version)  loads these weights for the next steps
    switch(version)                 loads those of a version that `incoming` returns

generate() calls these in a loop. episodes.py adds requests while others are still being answered. With
in_flight, weights may change in between.

The trainer gets the tokens as they were sampled; they are never decoded and encoded again. The logprobs, in
nats, are those of the distribution that was sampled from, after temperature, top_p and top_k. Each request
has its own seed, so on a CPU a run repeats no matter what else is in the batch. On a GPU the batch may change
how logits are rounded, and with that a token.
"""
import gc
import importlib.util
import itertools
import json
import logging
import math
import os
import warnings
import zlib
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoConfig, DynamicCache

from runtime import distributed
from runtime.check_model import model_class
from runtime.logprobs import head_logits
from runtime.user_code import json_text
from runtime.vllm_workarounds import compute_logits_in_float32, drop_kernels, share_the_machine

# Fields of a Rollout that JSON may change: from_arrays restores two of them, and the others are users' data.
LOOSE = "rewards", "versions", "row", "completion"


@dataclass
class Rollout:
    """A prompt and what the policy generated: all tokens of the row, and which of them it sampled."""
    ids: np.ndarray          # int32 [L]: the prompt, then what was sampled and what was inserted, in order
    spans: np.ndarray        # int32 [S, 2]: start and end in ids of each span that the policy sampled
    logprobs: np.ndarray     # float32 [C]: the engine's logprob of each sampled token
    finish_reason: str       # stop: it ended by itself; length: it was cut off; for others see episodes.py
    row: dict = None         # the row of the data set that it answers
    completion: object = ""  # what follows the prompt: a string, or messages where the prompt is messages
    score: float = math.nan  # NaN if it was not scored
    parts: dict = field(default_factory=dict)   # the named parts of the score
    problem: str = ""        # why the reward failed to score it
    answered: object = None  # whether it has a final answer; None if nobody knows, or its row has none
    rewards: dict = field(default_factory=dict) # {index of a sampled token: its part of the score}
    counts: dict = field(default_factory=dict)  # an episode's tool calls, failures and environment time
    extra: dict = field(default_factory=dict)   # what a reward or an environment logged for it, by name
    versions: tuple = ((0, 0),)  # pairs (first sampled token, version of the weights that sampled from there
                                 # on); a version is the number of steps that the weights were trained for

    @classmethod
    def single(cls, prompt_ids, completion_ids, logprobs, finish_reason, versions=((0, 0),)):
        """Return the Rollout of one completion, given as lists."""
        ids = np.array([*prompt_ids, *completion_ids], dtype=np.int32)
        return cls(ids, np.array([[len(prompt_ids), len(ids)]], dtype=np.int32),
                   np.array(logprobs, dtype=np.float32), finish_reason, versions=versions)

    prompt_ids = property(lambda self: self.ids[:self.spans[0, 0]])
    sampled_by = property(lambda self: {version for _, version in self.versions})
    sampled_ids = property(lambda self: np.concatenate([self.ids[start:end] for start, end in self.spans]))


class Request(NamedTuple):
    """What an engine needs to continue a row of tokens."""
    name: int                # unique among the requests that are not answered yet
    ids: list                # the row
    seed: int
    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0           # 0 samples from all tokens


class Answer(NamedTuple):
    """What an engine sampled for a Request."""
    name: int                # the name of the Request
    ids: list                # the sampled tokens
    logprobs: list           # one per sampled token
    finish_reason: str       # stop: the last token is an end token; length: it was cut off; abort: by `abort`
    versions: tuple = ((0, 0),)                 # as in Rollout


def as_arrays(rollouts):
    """Return Rollouts as {name: array}. Raises ValueError for a field, even one of your own, that is neither
    an array of numbers, a number of NumPy nor what JSON holds. In rows and completions a date, say, becomes
    text."""
    arrays, rest = {}, []
    for i, r in enumerate(rollouts):
        fields = {**vars(r)}
        for key, value in vars(r).items():
            if isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind in "biufc":         # numbers
                arrays[f"{i}.{key}"] = fields.pop(key)
            elif key not in LOOSE:
                json_text(f"the field {key} of a rollout", value)
        rest.append(fields)
    return arrays | {"rest": np.frombuffer(json.dumps(rest, default=str).encode(), np.uint8)}


def from_arrays(arrays):
    """Return the Rollouts of which as_arrays made these arrays, or none if there are no arrays."""
    rollouts = []
    for fields in json.loads(arrays["rest"].tobytes()) if arrays else []:
        fields["rewards"] = {int(t): reward for t, reward in fields["rewards"].items()}
        fields["versions"] = tuple(map(tuple, fields["versions"]))
        rollouts.append(Rollout.__new__(Rollout))
        vars(rollouts[-1]).update(fields)
    for name, array in arrays.items():
        number, _, key = name.partition(".")
        if key:
            setattr(rollouts[int(number)], key, array[()])      # a number is an array without dimensions
    return rollouts


def engine_class(engine):
    """Return the class for engine vllm, hf, or auto, which is vllm if it is installed and otherwise hf."""
    installed = importlib.util.find_spec("vllm") is not None
    return VLLMEngine if engine == "vllm" or engine == "auto" and installed else HFEngine


def load_engine(s, model, dtype, max_length, eos_ids, apart=False):
    """Return the engine of a script's settings, with a model from a folder or hub id. Raises ValueError if
    it cannot run. apart: see VLLMEngine."""
    return engine_class(s.engine)(model, dtype, max_length, eos_ids, s.vllm_gpu_memory_utilization,
                                  getattr(s, "vllm_tensor_parallel_size", 1), apart=apart,
                                  in_flight=getattr(s, "in_flight", False))


def text_of(tokenizer, sampled, finish_reason):
    """Return the text of sampled ids, without the token that ended them and without padding at the end."""
    sampled = sampled[:-1] if finish_reason == "stop" else sampled
    while len(sampled) and sampled[-1] == tokenizer.pad_token_id:
        sampled = sampled[:-1]
    return tokenizer.decode(sampled)


class Sampler:
    """Prompts in, rollouts out: single answers of an engine, or episodes that a Player plays.

    settings: a script's. player: an episodes.Player. engine: what this file has.
    """

    def __init__(self, settings, tokenizer, player, engine):
        self.settings, self.tokenizer, self.player, self.engine = settings, tokenizer, player, engine

    def __call__(self, prompts, n, names, temperature=None, length=None):
        """Return n adjacent Rollouts per data.Prompt.

        names: a text of its own for each prompt. The rollouts of a prompt have the seeds h, h + 1, ..., where
        h is a hash of its text, the same on any rank. temperature, length: by default those of the settings.
        """
        self.engine.stop()                                      # does not return if a signal has come
        seeds, sampling = self.requested(names, temperature, length)
        # There is an environment, tools or an agent, or other requests are in flight.
        if self.player.make or self.engine.versions:
            rollouts = self.player.play(self.engine, prompts, n, seeds, *sampling)
        else:
            rollouts = self.engine.generate([prompt.ids for prompt in prompts], n, seeds, *sampling)
            for i, r in enumerate(rollouts):
                r.row = prompts[i // n].row
                text = text_of(self.tokenizer, r.sampled_ids.tolist(), r.finish_reason)
                r.completion = text if isinstance(r.row["prompt"], str) else [
                    {"role": "assistant", "content": text}]
        self.engine.stop()
        return rollouts

    def requested(self, names, temperature, length):
        """Return a seed for each of the names, and max_tokens, temperature, top_p and top_k of a Request."""
        s = self.settings
        seeds = [zlib.crc32(f"{s.seed} {name}".encode()) for name in names]
        return seeds, (
            length or s.max_completion_length, s.temperature if temperature is None else temperature,
            getattr(s, "top_p", 1.0), getattr(s, "top_k", 0))               # those of evaluate_model.py


class Engine:
    """What both engines have in common.

    version: the version of the weights, as in Rollout. incoming: a function that returns the named tensors
    of a version, for switch; train_async.py sets it. max_length: how many tokens a row may have. in_flight:
    whether weights may change in the middle of requests. signalled: whether a signal has come, after which
    sampling returns no rollouts; stop: ends the run if so; see Run. versions: {name of an unanswered request:
    its versions, as in Rollout}. numbers: names for requests. tables: {name: the episodes.OpenEpisodes that asks}.
    """
    version, incoming, max_length, in_flight = 0, None, math.inf, False
    signalled, stop = False, staticmethod(lambda: None)

    def __init__(self):
        self.added, self.versions, self.numbers, self.tables = [], {}, itertools.count(), {}

    def add(self, request):
        if (longest := len(request.ids) + request.max_tokens) > self.max_length:
            raise ValueError(f"a row of {longest} tokens: the engine was made for {self.max_length}")
        self.added.append(request)
        self.versions[request.name] = {0: self.version}

    def abort(self, names):
        """End requests, if the engine can: the next step returns empty Answers for these names."""

    def switch(self, version):
        """Load the weights of this version."""
        self.load_weights(self.incoming(version), version)

    def load_weights(self, named_tensors, version):
        """Load weights. With in_flight, requests that have begun continue with their old KV cache; otherwise
        unanswered requests raise RuntimeError."""
        if self.versions:
            if not self.in_flight:
                raise RuntimeError(f"the weights of version {version} come while {len(self.versions)} "
                                   "requests are unanswered: finish or abort these, or set in_flight=True")
            so_far = self.so_far()
            for name, versions in self.versions.items():
                versions[so_far.get(name, 0)] = version
        self.version = version
        self._load(named_tensors)

    def so_far(self):
        """Return {name of a request: how many tokens were sampled for it}, where there are any."""
        return {}

    def serve(self, jobs, play):
        """Return play(jobs), a list with a result per job. play calls add and step.

        If ranks share an engine, the first of them plays the jobs of all, and the others take the same steps.
        """
        return play(jobs)

    def generate(self, prompts, n, seeds, max_tokens, temperature, top_p=1.0, top_k=0):
        """Return n adjacent Rollouts per prompt, a list of ids, with the seeds seed, seed + 1, ...

        Raises RuntimeError while other requests wait for their answers, as when an environment samples.
        """
        if self.versions:
            raise RuntimeError("the run's engine is in the middle of a step and samples for nothing else: an "
                               "environment that samples needs a model, or a server, of its own")

        def play(jobs):
            for name, (prompt, seed) in enumerate(jobs):
                self.add(Request(name, prompt, seed, max_tokens, temperature, top_p, top_k))
            answers = {}
            while len(answers) < len(jobs):
                answers |= {answer.name: answer for answer in self.step()}
                if self.signalled:
                    return []
            return [Rollout.single(prompt, *answers[name][1:]) for name, (prompt, _) in enumerate(jobs)]

        jobs = [(prompt, seed + j) for prompt, seed in zip(prompts, seeds) for j in range(n)]
        return self.serve(jobs, play)

    def close(self):
        """Do nothing: an engine ends with its process. Engines that are apart are told (placement.py)."""


class VLLMEngine(Engine):
    """vLLM in this process, on this rank's device.

    On a GPU it sleeps while the trainer works, which frees its memory, unless requests are in flight or it is
    `apart`: on a device that no trainer uses.
    """
    name, naming = "vllm", "checkpoint"

    def __init__(self, model, dtype, max_length, eos_ids, gpu_memory_utilization, tensor_parallel_size=1,
                 apart=False, in_flight=False):
        super().__init__()
        self.cuda, self.apart, self.asleep = torch.cuda.is_available(), apart, set()
        self.sleeps, self.in_flight = self.cuda and not apart, in_flight
        self.eos_ids, self.aborted = eos_ids, []
        before = torch.cuda.memory_allocated() if self.cuda else 0
        try:
            self.llm = self._make(model, dtype, max_length, gpu_memory_utilization, tensor_parallel_size)
            from vllm.distributed import get_tp_group
            self.group = get_tp_group()                        # the ranks that share this engine
            if not self.cuda:
                # If the CPU build lacks a kernel, this fails now and not in the middle of the run.
                self.generate([[0] * min(8, max_length - 1)], 1, [0], 1, 1.0)
        except Exception as error:
            raise ValueError(f"engine=vllm cannot run {model}; --engine=hf may. vLLM says: "
                             f"{str(error) or repr(error):.300}") from error
        # vLLM's Gemma 2 has no output head but its embedding, and refuses the weights of lm_head.
        self.has_head = all(self.llm.apply_model(lambda model: any(
            name.endswith("lm_head") for name, _ in model.named_modules())))
        # PyTorch counts this as allocated even while vLLM sleeps and its memory is free.
        self.allocated = torch.cuda.memory_allocated() - before if self.cuda else 0
        self.max_length = max_length
        self._sleep()

    def _make(self, model, dtype, max_length, gpu_memory_utilization, tensor_parallel_size):
        # Returns a vllm.LLM.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"     # the engine runs in this process
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        if not self.cuda:
            os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")         # GiB
            os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # leave the trainer's threads alone
            os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # or the first generate compiles for 30 s
            share_the_machine()
        os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")   # has no logprobs and may fail to load
        warnings.filterwarnings("ignore", category=FutureWarning, module="vllm")
        # vLLM sets its own level after its first warning. PyTorch warns of a missing Triton even on a CPU.
        logging.getLogger("vllm").setLevel(os.environ["VLLM_LOGGING_LEVEL"].upper())
        logging.getLogger("torch._library.triton").setLevel("WARNING" if self.cuda else "ERROR")
        import vllm
        gc.freeze()                                            # vLLM collects garbage three times; see set_up
        arguments = {"model": model, "dtype": str(dtype).removeprefix("torch."), "skip_tokenizer_init": True}
        config = vllm.EngineArgs(**arguments).create_model_config()
        if not self.cuda:
            # The prefix cache cannot hold the states of recurrent layers unless prompts are read in chunks.
            # It holds whole blocks, and the CPU build's default of 128 tokens is longer than most turns.
            stateful = config.is_hybrid or config.is_attention_free
            arguments |= {"enable_prefix_caching": False} if stateful else {"block_size": 32}
        llm = vllm.LLM(
            **arguments, max_model_len=max_length, use_tqdm_on_load=False, enforce_eager=not self.cuda,
            enable_sleep_mode=self.sleeps, gpu_memory_utilization=gpu_memory_utilization,
            tensor_parallel_size=tensor_parallel_size, language_model_only=config.is_multimodal_model,
            # Otherwise the next step begins before a switch.
            async_scheduling=False if self.apart or self.in_flight else None,
            hf_overrides={"head_dtype": "float32"},
            logprobs_mode="processed_logprobs",      # after temperature, top_p and top_k
            enable_chunked_prefill=self.cuda,        # CPU: a split prompt breaks seeded requests
            distributed_executor_backend="external_launcher" if "RANK" in os.environ else None)
        compute_logits_in_float32(llm, head_logits)
        return llm

    def serve(self, jobs, play):
        place, everyones, results = self.group.rank_in_group, [jobs] * self.group.world_size, None
        if len(everyones) > 1:
            dist.all_gather_object(everyones, jobs, group=self.group.cpu_group)
        if place == 0:
            results = play(sum(everyones, []))
            self.group.broadcast_object(None)                  # ends the loop of the others
        else:
            while (message := self.group.broadcast_object()) is not None:
                version, *requests = message
                if version != self.version:
                    self.switch(version)
                self._step(*requests)
        results = self.group.broadcast_object(results)
        before = sum(map(len, everyones[:place]))
        if not self.versions:                                   # no requests are left open
            self._sleep()
        return results[before:before + len(jobs)]

    def so_far(self):
        states = self.llm.llm_engine.output_processor.request_states.values()
        return {int(state.external_req_id): state.detokenizer.num_output_tokens() for state in states}

    def abort(self, names):
        self.added = [request for request in self.added if request.name not in names]
        self.aborted += names

    def step(self):
        requests, aborted = self.added, self.aborted
        self.added, self.aborted = [], []
        # The ranks that follow take the same step.
        self.group.broadcast_object((self.version, requests, aborted))
        return self._step(requests, aborted)

    def _step(self, requests, aborted):
        from vllm.sampling_params import RequestOutputKind, SamplingParams
        distributed.watchdog.moved()
        self._wake()
        engine = self.llm.llm_engine
        engine.abort_request([*map(str, aborted)])
        for name in aborted:
            self.versions.pop(name, None)
        for name, ids, seed, max_tokens, temperature, top_p, top_k in requests:
            # If weights change while rows are being sampled, the prefix cache cannot be emptied. With this
            # salt only what the current weights computed is found in it.
            salt = {"cache_salt": str(self.version)} if self.in_flight else {}
            engine.add_request(str(name), {"prompt_token_ids": ids} | salt, SamplingParams(
                seed=seed, max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k,
                logprobs=0, flat_logprobs=True, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY,
                ignore_eos=True, stop_token_ids=self.eos_ids))      # no other token ends an answer
        # Ranks that only follow keep no versions, because nobody reads their answers.
        return [Answer(name, [], [], "abort") for name in aborted] + [
                Answer(int(output.request_id), list(sample.token_ids), list(sample.logprobs.logprobs),
                       sample.finish_reason, tuple(self.versions.pop(int(output.request_id), {}).items()))
                for output in engine.step() if output.finished for sample in output.outputs]

    def _load(self, named_tensors):
        if not self.has_head:
            named_tensors = ((name, x) for name, x in named_tensors if not name.startswith("lm_head."))
        self._wake(["weights"])                                # the KV cache sleeps until the next step
        if not self.cuda:
            self.llm.apply_model(drop_kernels)
        # A reload processes weights as they were when the model was loaded: the CPU build packs linear ones and
        # drops the originals, and some GPUs have experts in another layout.
        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": named_tensors})
        # If the engine has slept, its cache is empty.
        if not (self.asleep or self.llm.reset_prefix_cache() or self.in_flight):
            raise RuntimeError("vLLM keeps what the old weights computed, because a request is in flight")

    def _sleep(self):
        if self.sleeps and len(self.asleep) < 2:
            self._wake()                                       # vLLM can only put all of its parts to sleep
            self.llm.sleep(level=1)                            # weights to host memory, KV cache dropped
            self.asleep = {"weights", "kv_cache"}

    def _wake(self, parts=("weights", "kv_cache")):
        # If one of the parts is awake already, vLLM 0.25 maps its memory again and fails, and 0.32 does not
        # wake the other part.
        if asleep := [part for part in parts if part in self.asleep]:
            torch.cuda.empty_cache()                           # makes room for the memory that vLLM maps
            self.llm.wake_up(tags=asleep)
            self.asleep -= set(asleep)


class HFEngine(Engine):
    """Plain PyTorch with a KV cache: it needs no vLLM and is short enough to read.

    A step answers all queued requests completely, or the first max_seqs of them if there are more.
    """
    name, naming, allocated = "hf", "module", 0
    max_seqs = 256           # how many requests a step answers at most

    def __init__(self, model, dtype, max_length, eos_ids, *for_vllm, apart=False, in_flight=False):
        super().__init__()
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.eos_ids, self.in_flight = torch.tensor(eos_ids, device=self.device), in_flight
        try:
            config = AutoConfig.from_pretrained(model)
            # PyTorch's own attention leaves out Gemma 2's softcap.
            capped = getattr(config.get_text_config(), "attn_logit_softcapping", None)
            self.model = model_class(config).from_pretrained(
                model, dtype=dtype, attn_implementation="eager" if capped else None).to(self.device).eval()
            head = self.model.get_output_embeddings()
            head.forward = lambda hidden: head_logits(hidden[:, -1], head.weight, head.bias)[:, None]
            # A model with another kind of cache than this engine expects fails here.
            self.generate([[0], [0, 0]], 2, [0, 0], 3, 1.0)
        except Exception as error:
            raise ValueError(f"engine=hf cannot run {model}: {error!r:.300}") from error
        self.max_length = max_length

    @torch.no_grad()
    def step(self):
        sampling = self.added[0][4:]                            # temperature, top_p, top_k
        requests = [one for one in self.added if one[4:] == sampling][:self.max_seqs]
        self.added = [one for one in self.added if one not in requests]
        limits = torch.tensor([request.max_tokens for request in requests], device=self.device)     # [R]
        ids = pad_sequence([torch.tensor(request.ids) for request in requests], batch_first=True,
                           padding_value=-1, padding_side="left").to(self.device)               # [R, L]
        ids, copies = ids.unique(dim=0, return_inverse=True)    # [B, L]: each row once; [R]: which one it is
        mask, ids, longest = (ids >= 0).long(), ids.clamp(min=0), limits.max().item()
        # [R, longest]: one uniform number per token, drawn in advance from the seed of each request.
        uniform = torch.stack([torch.rand(longest, generator=torch.Generator().manual_seed(request.seed))
                               for request in requests]).to(self.device)
        tokens, logprobs = torch.zeros_like(uniform, dtype=torch.long), torch.zeros_like(uniform)
        rows = torch.arange(len(requests), device=self.device)  # those still computed; some may have ended
        alive, lengths = torch.ones_like(rows, dtype=torch.bool), torch.zeros_like(rows)        # [R]
        cache = DynamicCache(config=self.model.config)
        for t in range(longest):
            if self.signalled:
                return []
            distributed.watchdog.moved()
            positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1]:]
            logits = self.model(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=True,
                                past_key_values=cache, logits_to_keep=1).logits[:, -1]          # [B, V]
            if t == 0:              # requests that continue the same row have shared one forward of it
                cache.reorder_cache(copies)
                logits, mask = logits[copies], mask[copies]                                     # [R, …]
            tokens[rows, t], logprobs[rows, t] = sample_tokens(logits, uniform[rows, t], *sampling)
            lengths += alive
            alive &= ~torch.isin(tokens[:, t], self.eos_ids) & (lengths < limits)
            if not alive.any():
                break
            # Once half of the rows have ended, only the others are computed.
            if 2 * alive.sum() <= len(rows):
                kept = alive[rows].nonzero()[:, 0]
                rows, mask = rows[kept], mask[kept]
                cache.reorder_cache(kept)
            ids, mask = tokens[rows, t][:, None], F.pad(mask, (0, 1), value=1)
        return [Answer(request.name, ids[:length], logps[:length],
                       "stop" if ids[length - 1] in self.eos_ids else "length",
                       tuple(self.versions.pop(request.name).items())) for request, ids, logps, length
                in zip(requests, tokens.tolist(), logprobs.tolist(), lengths.tolist())]

    @torch.no_grad()
    def _load(self, named_tensors):
        for name, tensor in named_tensors:
            self.model.get_parameter(name).copy_(tensor)


def sample_tokens(logits, uniform, temperature, top_p=1.0, top_k=0):
    """Sample one token per row, by inverting its distribution; logits [R, V], uniform [R] in [0, 1).

    Returns tokens [R] and their logprobs [R] under the distribution that was sampled from:
    softmax(logits / temperature), restricted to the top_k likeliest tokens (0 keeps all), then to the fewest
    that hold top_p of the probability. Temperature 0 takes the likeliest token.
    """
    if temperature == 0:
        return logits.argmax(-1), logits.log_softmax(-1).amax(-1)
    probs = (logits / temperature).softmax(-1)                                                  # [R, V]
    if top_k > 0 or top_p < 1:
        probs = truncated(probs, top_p, top_k)
    cumulative = probs.cumsum(-1)
    total = cumulative[:, -1:]
    # Rounding must not choose a token of probability 0 at the upper end, so the last one above 0 is the cap.
    last = probs.shape[-1] - 1 - (probs > 0).flip(-1).int().argmax(-1, keepdim=True)            # [R, 1]
    token = torch.searchsorted(cumulative, uniform[:, None] * total, right=True).minimum(last)
    return token[:, 0], (probs.gather(1, token) / total).log()[:, 0]


def truncated(probs, top_p, top_k):
    # Returns the probabilities with 0 for all tokens but those that sample_tokens draws from.
    ranked, order = probs.sort(-1, descending=True)
    # A token is dropped if the likelier ones already hold top_p of the probability.
    ranked[:, top_k or len(ranked[0]):] = 0
    ranked[ranked.cumsum(-1) - ranked >= top_p * ranked.sum(-1, keepdim=True)] = 0
    return torch.zeros_like(probs).scatter(-1, order, ranked)
