"""
Rollout: prompts in, sampled tokens and their logprobs out. Both engines have the same methods, and the
attributes name, weight_names and allocated.

    add(request)                    queues a Request; ValueError if its row may be longer than max_length
    step()                          samples for all that are queued; returns the Answers that are finished
    switch(version)                 takes other weights, also in the middle of requests
    load_weights(tensors, version)  later steps use them
    close()

generate() calls these in a loop; episodes.py adds requests while others are still being answered, and
train_async.py changes the weights in between.

Tokens in, tokens out: text is never decoded and encoded again on the way to the trainer. The logprobs, in
nats, are those of the distribution that was sampled from, after temperature, top_p and top_k. Each request
has a seed of its own, so a run repeats no matter what else is in the batch.
"""
import contextlib
import functools
import gc
import importlib.util
import logging
import math
import os
import warnings
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from transformers import AutoConfig, DynamicCache

from runtime.logprobs import head_logits
from runtime.check_model import model_class, reading
from runtime.vllm_workarounds import (compute_logits_in_float32, has_head, leave_memory_unbound,
                                      shared_memory_of_its_own, take_kernels)


@dataclass
class Rollout:
    """A prompt and what the policy generated: all tokens of the row, and which of them it sampled."""
    ids: np.ndarray          # int32 [L]: the prompt, then what was sampled and what was inserted, in order
    spans: np.ndarray        # int32 [S, 2]: start and end in ids of each span that the policy sampled
    logprobs: np.ndarray     # float32: the engine's, of the sampled tokens
    finish_reason: str       # stop: it came to its end; length: it was cut off; for others see episodes.py
    row: dict = None         # the row of the data set that it answers
    completion: object = ""  # what follows the prompt: a string, or messages where the prompt is messages
    score: float = math.nan  # what it is worth; NaN: it was not scored
    parts: dict = field(default_factory=dict)   # the named parts of the score
    problem: str = ""        # why a call of the reward for it failed
    rewards: dict = field(default_factory=dict) # {sampled token: what the score has from it}
    counts: dict = field(default_factory=dict)  # of an episode: tool calls, failures, the environment's time
    extra: dict = field(default_factory=dict)   # what a reward or an environment logged for it, by name
    versions: tuple = ((0, 0),)  # pairs (first sampled token, version of the weights that sampled it and what
                                 # follows); the version of weights is the number of their training steps

    @classmethod
    def single(cls, prompt_ids, completion_ids, logprobs, finish_reason, versions=((0, 0),)):
        """The Rollout of one completion, from lists."""
        ids = np.array([*prompt_ids, *completion_ids], dtype=np.int32)
        return cls(ids, np.array([[len(prompt_ids), len(ids)]], dtype=np.int32),
                   np.array(logprobs, dtype=np.float32), finish_reason, versions=versions)

    prompt_ids = property(lambda self: self.ids[:self.spans[0, 0]])
    sampled_ids = property(lambda self: np.concatenate([self.ids[start:end] for start, end in self.spans]))


class Request(NamedTuple):
    """Asks an engine to continue a row of tokens."""
    name: int                # of the answer, unique among the requests that are not answered yet
    ids: list                # the row
    seed: int
    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0           # 0: all tokens


class Answer(NamedTuple):
    name: int                # that of its Request
    ids: list                # what was sampled
    logprobs: list           # of these tokens
    finish_reason: str       # stop: the last of them is an end token; length: it is cut off
    versions: tuple = ((0, 0),)                 # as in Rollout


def as_json(r):
    """A Rollout as a dict that JSON can hold; of its row, only the prompt and the answer."""
    row = r.row and {key: r.row.get(key) for key in ("prompt", "answer")}
    return vars(r) | {"ids": r.ids.tolist(), "spans": r.spans.tolist(), "logprobs": r.logprobs.tolist(),
                      "row": row, "rewards": [*map(list, r.rewards.items())],
                      "versions": [*map(list, r.versions)]}


def from_json(entry, vocabulary=2 ** 31):
    """The Rollout of such a dict. Raises ValueError, which names the field, for what no engine samples.

    vocabulary: how many tokens the model has.
    """
    entry = {"extra": {}} | entry                              # older checkpoints have none
    if strange := sorted(Rollout.__dataclass_fields__.keys() ^ entry.keys()):
        raise ValueError(f"{', '.join(strange)}: missing, or unknown")
    r = Rollout(**entry | {
        "ids": numbers(entry, "ids", np.int32, 0, vocabulary - 1),
        "spans": numbers(entry, "spans", np.int32, shape=(-1, 2)),
        "logprobs": numbers(entry, "logprobs", np.float32),
        "score": numbers(entry, "score", shape=()).item(),
        "rewards": {int(t): reward for t, reward in numbers(entry, "rewards", shape=(-1, 2)).tolist()},
        "versions": tuple(map(tuple, numbers(entry, "versions", int, shape=(-1, 2)).tolist()))})
    edges = [1, *r.spans.flatten(), len(r.ids)]
    if edges != sorted(edges) or np.diff(r.spans).sum() != len(r.logprobs):
        raise ValueError("spans: they do not fit ids and logprobs")
    return r


def numbers(entry, name, kind=float, low=-3.4e38, high=3.4e38, shape=-1):
    """A field's numbers as an array. Raises ValueError for what is none, or out of bounds; NaN is fine."""
    with contextlib.suppress(ValueError):
        array = np.array(entry[name]).reshape(shape)
        if array.dtype.kind in "if" and not ((array < low) | (array > high)).any():
            return array.astype(kind)
    raise ValueError(f"{name}: {entry[name]!r:.100} is not made of numbers from {low:g} to {high:g}")


def engine_class(engine):
    """The class for engine vllm, hf, or auto, which is vllm where it is installed and hf elsewhere.

    Raises ValueError for vllm where it is not installed.
    """
    installed = importlib.util.find_spec("vllm") is not None
    if engine == "vllm" and not installed:
        raise ValueError("engine=vllm needs vLLM: install requirements.txt, or take --engine=hf")
    return VLLMEngine if installed and engine != "hf" else HFEngine


def single_answers(engine, tokenizer, prompts, n, seeds, max_tokens, temperature, top_p=1.0, top_k=0):
    """Prompts in, rollouts out: n adjacent Rollouts for each data.Prompt, each of them one answer.

    seeds: one per prompt, for seed, seed + 1, ... max_tokens: a longer answer is cut off.
    """
    rollouts = engine.generate([prompt.ids for prompt in prompts], n, seeds, max_tokens, temperature, top_p,
                               top_k)
    for i, r in enumerate(rollouts):
        r.row = prompts[i // n].row
        text = tokenizer.decode(r.ids[r.spans[0, 0]:], skip_special_tokens=True)
        r.completion = text if isinstance(r.row["prompt"], str) else [{"role": "assistant", "content": text}]
    return rollouts


class Engine:
    """What both engines have in common.

    version: that of the weights, as in Rollout. incoming: the function that switch gets the weights of a
    version from; train_async.py sets it. max_length: tokens that a row may have.
    """
    version, incoming, max_length = 0, None, math.inf

    def add(self, request):
        if (longest := len(request.ids) + request.max_tokens) > self.max_length:
            raise ValueError(f"a row of {longest} tokens: the engine was made for {self.max_length}")
        self.added.append(request)
        self.versions[request.name] = {0: self.version}

    def switch(self, version):
        """Go on with the weights of this version, also in the middle of requests; their KV cache stays."""
        so_far = self.so_far()
        for name, versions in self.versions.items():
            versions[so_far.get(name, 0)] = version
        self.load_weights(self.incoming(version), version)

    def so_far(self):
        """Returns {name of a request: how many tokens have been sampled for it}; one it lacks has none."""
        return {}

    def serve(self, jobs, play):
        """Returns play(jobs): a list with an entry for each job, made by adding requests and by steps.

        Where ranks share an engine, the first of them plays the jobs of all of them and the others follow.
        """
        return play(jobs)

    def generate(self, prompts, n, seeds, max_tokens, temperature, top_p=1.0, top_k=0):
        """Returns n adjacent Rollouts per prompt, a list of ids; their seeds are seed, seed + 1, ..."""
        def play(jobs):
            for name, (prompt, seed) in enumerate(jobs):
                self.add(Request(name, prompt, seed, max_tokens, temperature, top_p, top_k))
            answers = {}
            while len(answers) < len(jobs):
                answers |= {answer.name: answer for answer in self.step()}
            return [Rollout.single(prompt, *answers[name][1:]) for name, (prompt, _) in enumerate(jobs)]

        jobs = [(prompt, seed + j) for prompt, seed in zip(prompts, seeds) for j in range(n)]
        return self.serve(jobs, play)


class VLLMEngine(Engine):
    """vLLM in this process, on this rank's device.

    On a GPU it sleeps while the trainer works, and its memory is free; unless it is `apart`, on devices where
    no trainer works.
    """
    name, weight_names = "vllm", "checkpoint"

    def __init__(self, model, dtype, max_length, eos_ids, gpu_memory_utilization, tensor_parallel_size=1,
                 float32_head=True, apart=False):
        self.cuda, self.apart, self.asleep = torch.cuda.is_available(), apart, set()
        self.sleeps = self.cuda and not apart
        self.eos_ids, self.added, self.versions = eos_ids, [], {}
        before = torch.cuda.memory_allocated() if self.cuda else 0
        gc.disable()                                           # its imports take a third less time without it
        try:
            self.llm = self._make(model, dtype, max_length, gpu_memory_utilization, tensor_parallel_size,
                                  float32_head)
            if not self.cuda:
                self._try_kernels(max_length)
        except Exception as error:
            # Of a pydantic error the first line says nothing, and what follows the second is noise.
            reason = [line.strip() for line in str(error).splitlines() if line.strip()][:2]
            raise ValueError(f"engine=vllm cannot run {model}; --engine=hf may. vLLM says: "
                             f"{' '.join(reason).partition(' [type=')[0][:300] or repr(error)}") from error
        finally:
            gc.freeze()
            gc.enable()
        self.has_head = all(self.llm.apply_model(has_head))
        # PyTorch counts this as allocated even while vLLM sleeps and its memory is free.
        self.allocated = torch.cuda.memory_allocated() - before if self.cuda else 0
        from vllm.distributed import get_tp_group
        self.group = get_tp_group()                            # the ranks that share this engine
        self.max_length = max_length
        self._sleep()

    def _make(self, model, dtype, max_length, gpu_memory_utilization, tensor_parallel_size, float32_head):
        # vLLM's own object, made with the arguments that each of this project's guarantees needs.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"     # the engine runs in this process
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        if not self.cuda:
            os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")         # GiB
            os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # leave the trainer's threads alone
            os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # or the first generate compiles for 30 s
            leave_memory_unbound()
        os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")   # it has no logprobs and may fail to load
        warnings.filterwarnings("ignore", category=FutureWarning, module="vllm")
        # vLLM sets its own level after its first warning. PyTorch misses Triton, which a CPU does not need.
        logging.getLogger("vllm").setLevel(os.environ["VLLM_LOGGING_LEVEL"].upper())
        logging.getLogger("torch._library.triton").setLevel("WARNING" if self.cuda else "ERROR")
        import vllm
        from vllm.sampling_params import RequestOutputKind
        self.SamplingParams, self.FINAL_ONLY = vllm.SamplingParams, RequestOutputKind.FINAL_ONLY
        arguments = {"model": model, "dtype": str(dtype).removeprefix("torch."), "skip_tokenizer_init": True}
        config = vllm.EngineArgs(**arguments).create_model_config()
        if config.is_multimodal_model:
            arguments["language_model_only"] = True
        # Without chunks vLLM cannot keep the states of such layers in its prefix cache. The cache holds whole
        # blocks, and the CPU build's blocks of 128 tokens are longer than most turns.
        if not self.cuda:
            stateful = config.is_hybrid or config.is_attention_free
            arguments |= {"enable_prefix_caching": False} if stateful else {"block_size": 32}
        # Apart from the trainer, weights change between two steps; the second must not have begun by then.
        if self.apart:
            arguments["async_scheduling"] = False
        ranks_share = tensor_parallel_size > 1 and not self.cuda
        with shared_memory_of_its_own() if ranks_share else contextlib.nullcontext():
            llm = vllm.LLM(
                **arguments, max_model_len=max_length, use_tqdm_on_load=False, enforce_eager=not self.cuda,
                enable_sleep_mode=self.sleeps, gpu_memory_utilization=gpu_memory_utilization,
                tensor_parallel_size=tensor_parallel_size,
                hf_overrides={"head_dtype": "float32" if float32_head else "model"},
                logprobs_mode="processed_logprobs",      # after temperature, top_p and top_k
                enable_chunked_prefill=self.cuda,        # CPU: a split prompt breaks seeded requests
                distributed_executor_backend="external_launcher" if "RANK" in os.environ else None)
        if float32_head and vllm.__version__.startswith("0.25."):
            llm.apply_model(functools.partial(compute_logits_in_float32, head_logits))
        return llm

    def _try_kernels(self, max_length):
        # A kernel that the CPU build lacks shows here, not in the middle of the run.
        trial = [Request(0, [0] * min(8, max_length - 1), 0, 1)]
        while not self._step(trial):
            trial = []

    def serve(self, jobs, play):
        size, place = self.group.world_size, self.group.rank_in_group
        if size == 1:
            results = play(jobs)
        else:
            everyones, results = [None] * size, None
            dist.all_gather_object(everyones, jobs, group=self.group.cpu_group)
            if place == 0:
                results = play(sum(everyones, []))
                self.group.broadcast_object(None)              # nothing more to follow
            else:
                while (message := self.group.broadcast_object()) is not None:
                    if isinstance(message, int):
                        super().switch(message)
                    else:
                        self._step(message)
            results = self.group.broadcast_object(results)
            before = sum(map(len, everyones[:place]))
            results = results[before:before + len(jobs)]
        self._sleep()
        return results

    def switch(self, version):
        if self.group.world_size > 1:
            self.group.broadcast_object(version)               # the followers switch as well
        super().switch(version)

    def so_far(self):
        states = self.llm.llm_engine.output_processor.request_states.values()
        return {int(state.external_req_id): state.detokenizer.num_output_tokens() for state in states}

    def step(self):
        requests, self.added = self.added, []
        if self.group.world_size > 1:
            self.group.broadcast_object(requests)              # the followers take the same step
        return self._step(requests)

    def _step(self, requests):
        self._wake()
        engine = self.llm.llm_engine
        for name, ids, seed, max_tokens, temperature, top_p, top_k in requests:
            # Apart from the trainer, weights change while rows are in work, so the prefix cache cannot be
            # emptied. The salt makes it find only what these weights have computed.
            salt = {"cache_salt": str(self.version)} if self.apart else {}
            engine.add_request(str(name), {"prompt_token_ids": ids} | salt, self.SamplingParams(
                seed=seed, max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k,
                logprobs=0, flat_logprobs=True, detokenize=False, output_kind=self.FINAL_ONLY,
                ignore_eos=True, stop_token_ids=self.eos_ids))                 # these alone end it
        # The ranks that follow know no versions, and nobody asks them.
        return [Answer(int(output.request_id), list(sample.token_ids), list(sample.logprobs.logprobs),
                       sample.finish_reason, tuple(self.versions.pop(int(output.request_id), {}).items()))
                for output in engine.step() if output.finished for sample in output.outputs]

    def load_weights(self, named_tensors, version):
        self.version = version
        if not self.has_head:                                  # Gemma 2 there uses the embedding
            named_tensors = ((name, x) for name, x in named_tensors if not name.startswith("lm_head."))
        if self.cuda:
            self._wake(["weights"])                            # the KV cache sleeps on until generate
            self.llm.apply_model(lambda model: model.load_weights(named_tensors))
        else:
            # The CPU build repacks linear weights and drops the originals: only a reload can replace them. On
            # a GPU falling asleep empties the prefix cache, here it has to be emptied explicitly.
            (kernels,) = self.llm.apply_model(take_kernels)
            self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": named_tensors})
            for owner, kernel in kernels.items():
                owner.moe_kernel = owner.moe_kernel or kernel
            self.llm.reset_prefix_cache()

    def close(self):
        self._wake()                                           # shut down asleep, it would unmap memory twice
        self.llm.llm_engine.engine_core.shutdown()
        del self.llm

    def _sleep(self):
        if self.sleeps and len(self.asleep) < 2:
            self._wake()                                       # it falls asleep as a whole, or not at all
            self.llm.sleep(level=1)                            # weights to host memory, KV cache dropped
            self.asleep = {"weights", "kv_cache"}

    def _wake(self, parts=("weights", "kv_cache")):
        # Asked to wake a part that is awake, vLLM 0.25 maps its memory again and fails, and 0.32 does not
        # wake the others.
        if asleep := [part for part in parts if part in self.asleep]:
            torch.cuda.empty_cache()                           # vLLM maps memory of its own: make room
            self.llm.wake_up(tags=asleep)
            self.asleep -= set(asleep)


class HFEngine(Engine):
    """Plain PyTorch with a KV cache: it needs no vLLM and is short enough to read.

    A step answers all that is queued, or the first max_seqs of it, from beginning to end.
    """
    name, weight_names, allocated = "hf", "module", 0
    max_seqs = 256           # sequences generated at once

    def __init__(self, model, dtype, max_length, eos_ids, gpu_memory_utilization, tensor_parallel_size=1,
                 float32_head=True, apart=False):
        self.device = (torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available()
                       else "cpu")
        config = AutoConfig.from_pretrained(model)
        if not (kind := model_class(config)):
            raise ValueError(f"engine=hf cannot run {model}: {config.model_type} does not generate text")
        with reading(f"model={model}: its weights"):
            self.model = kind.from_pretrained(model, dtype=dtype).to(self.device).eval()
        head = self.model.get_output_embeddings()
        head.forward = lambda hidden: head_logits(hidden[:, -1], head.weight, head.bias,
                                                  float32_head)[:, None]                        # [B, 1, V]
        # A tied head is in it twice.
        self.parameters = dict(self.model.named_parameters(remove_duplicate=False))
        self.eos_ids, self.added, self.versions = torch.tensor(eos_ids, device=self.device), [], {}
        try:
            # A cache that is not what this engine expects shows here.
            self.generate([[0], [0, 0]], 2, [0, 0], 3, 1.0)
        except Exception as error:
            raise ValueError(f"engine=hf cannot run {model}: {type(error).__name__}: "
                             f"{str(error)[:300]}") from error
        self.max_length = max_length

    @torch.no_grad()
    def step(self):
        requests = [one for one in self.added if one[4:] == self.added[0][4:]][:self.max_seqs]
        names = {one.name for one in requests}
        self.added = [one for one in self.added if one.name not in names]
        if not requests:
            return []
        # Each row is read once for all who continue it.
        prompts = list(dict.fromkeys(tuple(request.ids) for request in requests))
        width, longest = max(map(len, prompts)), max(request.max_tokens for request in requests)
        ids = torch.tensor([[0] * (width - len(p)) + list(p) for p in prompts],                 # [B, L]
                           device=self.device)
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts],           # left-padded
                            device=self.device)
        cache = DynamicCache(config=self.model.config)
        logits = self._forward(ids, mask, cache)                                                # [B, V]
        number = {prompt: b for b, prompt in enumerate(prompts)}
        copies = torch.tensor([number[tuple(request.ids)] for request in requests], device=self.device)  # [R]
        cache.reorder_cache(copies)
        logits, mask = logits[copies], mask[copies]                                             # [R, …]
        # [R, longest]: one uniform number per token, all drawn beforehand from the request's own seed.
        uniform = torch.stack([torch.rand(longest, generator=torch.Generator().manual_seed(request.seed))
                               for request in requests]).to(self.device)
        limits = torch.tensor([request.max_tokens for request in requests], device=self.device)         # [R]
        rows = torch.arange(len(mask), device=self.device)      # those computed; some may have ended
        alive, ended = torch.ones_like(rows, dtype=torch.bool), torch.zeros_like(rows, dtype=torch.bool)
        tokens, logprobs, lengths = torch.zeros_like(uniform, dtype=torch.long), uniform.clone(), 0 * rows
        for t in range(longest):
            tokens[rows, t], logprobs[rows, t] = sample_tokens(logits, uniform[rows, t],
                                                               *requests[0][4:])    # temperature, ...
            lengths += alive
            ended |= alive & torch.isin(tokens[:, t], self.eos_ids)
            alive &= ~ended & (lengths < limits)
            if not alive.any():
                break
            mask = torch.cat([mask, mask.new_ones(len(mask), 1)], dim=1)
            # Once half of them have ended, go on with the others alone.
            if 2 * alive.sum() <= len(rows):
                kept = alive[rows].nonzero()[:, 0]
                rows, mask = rows[kept], mask[kept]
                cache.reorder_cache(kept)
            logits = self._forward(tokens[rows, t][:, None], mask, cache)
        return [Answer(request.name, ids[:length], logps[:length], "stop" if stop else "length",
                       tuple(self.versions.pop(request.name).items()))
                for request, ids, logps, length, stop in zip(requests, *(
                    x.tolist() for x in (tokens, logprobs, lengths, ended)))]

    def _forward(self, ids, mask, cache):
        positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1]:]
        return self.model(input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=cache,
                          use_cache=True, logits_to_keep=1).logits[:, -1]

    @torch.no_grad()
    def load_weights(self, named_tensors, version):
        self.version = version
        for name, tensor in named_tensors:
            self.parameters[name].copy_(tensor)

    def close(self):
        self.model = self.parameters = None


def sample_tokens(logits, uniform, temperature, top_p=1.0, top_k=0):
    """One token per row, by inverting its cumulative distribution; logits [R, V], uniform [R] in [0, 1).

    Returns tokens [R] and their logprobs [R] under the distribution that was sampled from:
    softmax(logits / temperature), restricted to the top_k likeliest tokens (0: all), then to the fewest that
    hold top_p of the probability. Temperature 0 takes the likeliest token.
    """
    if temperature == 0:
        return logits.argmax(-1), logits.log_softmax(-1).amax(-1)
    probs, order = (logits / temperature).softmax(-1), None                                     # [R, V]
    # Only a truncated distribution needs the sort.
    if top_k > 0 or top_p < 1:
        probs, order = probs.sort(-1, descending=True)
        if top_k > 0:
            probs[:, top_k:] = 0
        # Drop a token if the likelier ones already hold top_p of the probability.
        probs[probs.cumsum(-1) - probs >= top_p * probs.sum(-1, keepdim=True)] = 0
    cumulative = probs.cumsum(-1)
    total = cumulative[:, -1:]
    slot = torch.searchsorted(cumulative, uniform[:, None] * total, right=True)                 # [R, 1]
    # Rounding at the upper end must not choose a token of probability 0: take the last one above 0 instead.
    last = probs.shape[-1] - 1 - (probs > 0).flip(-1).int().argmax(-1, keepdim=True)
    slot = torch.minimum(slot, last)
    token = slot if order is None else order.gather(1, slot)
    return token[:, 0], (probs.gather(1, slot) / total).log()[:, 0]
