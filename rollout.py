"""
Rollout: prompts in, sampled tokens and their logprobs out. Both engines have the same methods, and the
attributes name, weight_names and allocated.

    add(request)                    queues a Request
    step()                          goes on with all that are queued; returns the Answers that are finished
    switch(version)                 goes on with other weights, also in the middle of requests
    load_weights(named_tensors)     later steps use them
    close()

generate() calls these in a loop; episodes.py adds requests while others are still being answered, and
train_async.py changes the weights in between.

Tokens in, tokens out: text is never decoded and encoded again on the way to the trainer. The logprobs, in
nats, are those of the distribution that was sampled from, after temperature, top_p and top_k. Each request
has a seed of its own, so a run repeats no matter what else is in the batch.
"""
import contextlib
import gc
import glob
import importlib.util
import json
import math
import os
import warnings
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from transformers import AutoConfig, DynamicCache, GenerationConfig

from files import in_words, opened
from loading import model_class
from models import head_logits


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
    rewards: np.ndarray = None                  # float32 [S]: the share of each span in the score
    counts: dict = field(default_factory=dict)  # of an episode: tool calls, failures, the environment's time
    versions: tuple = ((0, 0),)                 # from which of the sampled tokens on, by which weights

    @classmethod
    def single(cls, prompt_ids, completion_ids, logprobs, finish_reason):
        """The Rollout of one completion, from lists."""
        ids = np.array([*prompt_ids, *completion_ids], dtype=np.int32)
        return cls(ids, np.array([[len(prompt_ids), len(ids)]], dtype=np.int32),
                   np.array(logprobs, dtype=np.float32), finish_reason)

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


def as_json(rollout):
    """A Rollout as a dict that JSON can hold; of its row, the prompt and the answer."""
    r = rollout
    return {"ids": r.ids.tolist(), "spans": r.spans.tolist(), "logprobs": r.logprobs.tolist(),
            "finish_reason": r.finish_reason, "score": r.score, "completion": r.completion, "parts": r.parts,
            "rewards": None if r.rewards is None else r.rewards.tolist(), "counts": r.counts,
            "versions": r.versions, "row": r.row and {key: r.row.get(key) for key in ("prompt", "answer")}}


def from_json(entry):
    """The Rollout of such a dict, of which all up to the score has to be there. Raises ValueError."""
    try:
        ids, spans = np.array(entry["ids"]), np.array(entry["spans"])
        logprobs = np.array(entry["logprobs"], np.float32)
        starts, ends = spans.T
        if not (ids.ndim == logprobs.ndim == 1 and spans.ndim == 2
                and ids.dtype.kind == spans.dtype.kind == "i" and 0 <= ids.min() and ids.max() < 2 ** 31
                and np.isfinite(logprobs).all()
                and 0 < starts[0] and (starts < ends).all() and (ends[:-1] <= starts[1:]).all()
                and ends[-1] <= len(ids) and (ends - starts).sum() == len(logprobs)):
            raise ValueError("its ids, spans and logprobs do not fit")
        rest = {key: entry[key] for key in ("row", "completion", "parts", "counts") if key in entry}
        if entry.get("rewards") is not None:
            rest["rewards"] = np.array(entry["rewards"], np.float32)
        if "versions" in entry:
            rest["versions"] = tuple((int(start), int(version)) for start, version in entry["versions"])
        return Rollout(ids.astype(np.int32), spans.astype(np.int32), logprobs, entry["finish_reason"],
                       score=float(entry["score"]), **rest)
    except (ValueError, TypeError, KeyError, IndexError, OverflowError, AttributeError) as error:
        raise ValueError(f"{error!r:.200}") from error


def save_rollouts(path, settings, rollouts, greedy=None):
    """Write rollouts, and the settings they were made with, to a JSONL file in a checkpoint, for replay.py.

    greedy: the scores of ReMax's greedy completions, one per prompt. Returns None, or what went wrong.
    """
    group = len(rollouts) // len(greedy) if greedy is not None else 0
    # Not in the checkpoint: what a kill leaves there would count as damage.
    part = os.path.join(os.path.dirname(os.path.dirname(path)), "rollouts.jsonl.part")
    try:
        with opened(part, "w") as file:
            file.write(json.dumps(settings) + "\n")
            for s, r in enumerate(rollouts):
                line = as_json(r)
                if group and s % group == 0:
                    line["greedy"] = float(greedy[s // group])
                file.write(json.dumps(line) + "\n")
        os.replace(part, path)
    except OSError as error:
        return f"{path} could not be written: {in_words(error)}"


def load_rollouts(path):
    """What save_rollouts wrote: (settings, rollouts, greedy). Raises ValueError with the line at fault."""
    settings, rollouts, greedy = {}, [], []
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            try:
                entry = json.loads(line)
                if number == 1:
                    settings = dict(entry)
                    continue
                rollouts.append(from_json(entry))
                greedy += [float(entry["greedy"])] if "greedy" in entry else []
            except (ValueError, TypeError, RecursionError) as error:
                raise ValueError(f"{path}:{number}: not a line of kept rollouts: {error!r:.200}") from error
    group = settings.get("num_generations")
    if type(group) is not int or not rollouts or group < 1 or len(rollouts) % group:
        raise ValueError(f"{path}: {len(rollouts)} rollouts are no groups of num_generations={group}")
    return settings, rollouts, greedy


def engine_class(engine):
    """The class for engine vllm, hf, or auto, which is vllm where it is installed and hf elsewhere.

    Raises ValueError for another name, or for vllm where it is not installed.
    """
    if engine not in ("auto", "vllm", "hf"):
        raise ValueError(f"engine={engine}: choose auto, vllm or hf")
    installed = importlib.util.find_spec("vllm") is not None
    if engine == "vllm" and not installed:
        raise ValueError("engine=vllm, but vLLM is not installed: "
                         "install requirements.txt, or take --engine=hf")
    return VLLMEngine if installed and engine != "hf" else HFEngine


def end_tokens(model, tokenizer):
    """Ids of the tokens that end a completion, from the generation config, the model config or the tokenizer.

    The first of the three that names any is taken. Raises ValueError if none does, if what it names is no
    token of the model, or if the generation config is damaged.
    """
    ids, config = None, AutoConfig.from_pretrained(model)
    if not os.path.isdir(model) or os.path.lexists(f"{model}/generation_config.json"):
        try:
            ids = GenerationConfig.from_pretrained(model).eos_token_id
        except Exception as error:
            # A model of the hub may have none.
            if os.path.isdir(model):
                raise ValueError(f"{model}/generation_config.json cannot be read: {error!r:.300}") from error
    for other in (getattr(config, "eos_token_id", None), tokenizer.eos_token_id):
        ids = other if ids is None else ids
    if ids is None:
        raise ValueError(f"model={model}: neither its generation config nor its tokenizer "
                         "names an end-of-sequence token")
    ids, size = ids if isinstance(ids, list) else [ids], config.get_text_config().vocab_size
    if not ids or any(type(one) is not int or not 0 <= one < size for one in ids):
        raise ValueError(f"model={model}: eos_token_id={ids} in its generation config, config or tokenizer; "
                         f"a completion ends with a token, from 0 to {size - 1}")
    return ids


def compare_logprobs(rollouts, logps, bound, tokenizer):
    """Metrics of the trainer's logprobs, {s: [len]}, against the engine's for the same tokens of rollouts[s].

    Both sides have the same weights. A mean gap over `bound` nats, or a NaN, therefore means a broken weight
    sync, a wrong temperature, or a model that one side computes wrongly: training on would be off-policy, and
    nobody would know. Raises RuntimeError with the worst tokens; with an infinite bound, for weights that are
    known to differ, only if the gap is not finite. A collective: every rank calls it, with or without any
    logprobs.
    sampling_logp_difference   |trainer - engine|; its p99 is that of the rank where it is largest
    importance_sampling_ratio  w = exp(trainer - engine); nothing is truncated here
    effective_sample_size      (sum w)^2 / (n sum w^2), as a share of the tokens
    kl                         KL(engine || trainer), by k3
    """
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else "cpu"
    ours = torch.cat([*logps.values(), torch.empty(0, device=device)])                          # [C]
    theirs = torch.cat([torch.empty(0), *(torch.from_numpy(rollouts[s].logprobs) for s in logps)]).to(device)
    gap, ratio = (ours - theirs).abs(), (ours - theirs).exp()
    k3 = ratio - 1 - (ours - theirs)
    sums = torch.stack([torch.tensor(float(len(gap)), device=device),
                        *(x.sum() for x in (gap, ratio, ratio.square(), k3))])
    peaks = torch.full((4,), -math.inf, device=device)
    if len(gap):
        p99 = gap.kthvalue(math.ceil(0.99 * len(gap))).values
        peaks = torch.stack([p99, gap.max(), ratio.max(), -ratio.min()])
    dist.all_reduce(sums)
    dist.all_reduce(peaks, dist.ReduceOp.MAX)
    gap_mean, ratio_mean, square_mean, kl = (sums[1:] / sums[0]).tolist()
    gap_p99, gap_max, ratio_max, ratio_min = (peaks * torch.tensor([1, 1, 1, -1], device=device)).tolist()
    # Where no token was trained on, nothing can have gone wrong.
    if sums[0] == 0:
        gap_mean, gap_p99, gap_max, kl = 0.0, 0.0, 0.0, 0.0
        ratio_mean, ratio_max, ratio_min, square_mean = 1.0, 1.0, 1.0, 1.0
    if not (gap_mean <= bound and math.isfinite(gap_mean)):
        tokens = [(rollouts[s], t) for s in logps for t in range(len(logps[s]))]
        worst = [(*tokens[c], ours[c]) for c in gap.argsort(descending=True)[:8].tolist()]
        raise RuntimeError(
            f"engine and trainer logprobs differ by {gap_mean:.2g} on average, over logprob_gap={bound:g}. "
            "The worst tokens here:\n" + "\n".join(
                f"  {tokenizer.decode(r.sampled_ids[:t])!r} + {tokenizer.decode(r.sampled_ids[t])!r}: "
                f"trainer {logp:.4f}, engine {r.logprobs[t]:.4f}" for r, t, logp in worst))
    return {f"sampling/{name}": value for name, value in {
        "sampling_logp_difference/mean": gap_mean, "sampling_logp_difference/p99": gap_p99,
        "sampling_logp_difference/max": gap_max, "importance_sampling_ratio/min": ratio_min,
        "importance_sampling_ratio/mean": ratio_mean, "importance_sampling_ratio/max": ratio_max,
        "effective_sample_size": ratio_mean ** 2 / square_mean, "kl": kl}.items()}


def give_float32_head(model):
    """Let a model of vLLM 0.25 compute logits in float32; that version is the last that needs this."""
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
    # The embedding may be the head as well; apply is only for logits.
    for layer in model.modules():
        if isinstance(method := getattr(layer, "quant_method", None), UnquantizedEmbeddingMethod):
            method.apply = lambda head, hidden, bias=None: head_logits(hidden, head.weight, bias)


def has_head(model):
    """Whether a model of vLLM has an output head of its own."""
    return any(name.rpartition(".")[2] == "lm_head" for name, _ in model.named_modules())


def take_kernels(model):
    """Take the kernels away from the mixtures of experts in a model of vLLM; returns {owner: kernel}.

    The CPU build of vLLM 0.32 packs experts only where there is no kernel yet, and so computes wrongly with
    new ones. To be removed once it packs them whenever they are loaded.
    """
    owners = [layer.quant_method for layer in model.modules()
              if getattr(getattr(layer, "quant_method", None), "moe_kernel", None) is not None]
    kernels = {owner: owner.moe_kernel for owner in owners}
    for owner in owners:
        owner.moe_kernel = None
    return kernels


class Engine:
    """What both engines have in common.

    version: the number of the weights, which is that of the last switch. incoming: the function that switch
    gets the weights of a version from; train_async.py sets it.
    """
    version, incoming = 0, None

    def add(self, request):
        self.added.append(request)
        self.versions[request.name] = {0: self.version}

    def answer(self, name, *sampled):
        # The ranks that follow know no versions, and nobody asks them.
        return Answer(name, *sampled, tuple(self.versions.pop(name, {}).items()))

    def switch(self, version):
        """Go on with the weights of this version, also in the middle of requests; their KV cache stays."""
        so_far = self.so_far()
        for name, versions in self.versions.items():
            versions[so_far.get(name, 0)] = version
        self.version = version
        self.load_weights(self.incoming(version))

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
            return [Rollout.single(prompt, *answers[name][1:4]) for name, (prompt, _) in enumerate(jobs)]

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
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"     # the engine runs in this process
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        self.cuda, self.asleep = torch.cuda.is_available(), set()
        self.sleeps, self.apart = self.cuda and not apart, apart
        if not self.cuda:
            os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")         # GiB
            os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # leave the trainer's threads alone
            os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # or the first generate compiles for 30 s
        os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")   # it has no logprobs and may fail to load
        warnings.filterwarnings("ignore", category=FutureWarning, module="vllm")
        import vllm
        from vllm.sampling_params import RequestOutputKind
        self.SamplingParams, self.FINAL_ONLY = vllm.SamplingParams, RequestOutputKind.FINAL_ONLY
        self.eos_ids, self.added, self.versions = eos_ids, [], {}
        before = torch.cuda.memory_allocated() if self.cuda else 0
        shared = tensor_parallel_size > 1 and not self.cuda
        if shared:
            self._name_shared_memory()
        arguments = {"model": model, "dtype": str(dtype).removeprefix("torch."), "skip_tokenizer_init": True}
        gc.disable()                                           # making it imports much, as in the scripts
        try:
            config = vllm.EngineArgs(**arguments).create_model_config()
            if config.is_multimodal_model:
                arguments["language_model_only"] = True
            # Without chunks vLLM cannot keep the states of such layers in its prefix cache. The cache holds
            # whole blocks, and the CPU build's blocks of 128 tokens are longer than most turns.
            if not self.cuda:
                stateful = config.is_hybrid or config.is_attention_free
                arguments |= {"enable_prefix_caching": False} if stateful else {"block_size": 32}
            # Apart from the trainer, weights change between two steps, and the second must not have begun by
            # then.
            if apart:
                arguments["async_scheduling"] = False
            self.llm = vllm.LLM(
                **arguments, max_model_len=max_length, use_tqdm_on_load=False, enforce_eager=not self.cuda,
                enable_sleep_mode=self.sleeps, gpu_memory_utilization=gpu_memory_utilization,
                tensor_parallel_size=tensor_parallel_size,
                hf_overrides={"head_dtype": "float32" if float32_head else "model"},
                logprobs_mode="processed_logprobs",      # after temperature, top_p and top_k
                enable_chunked_prefill=self.cuda,        # CPU: a split prompt breaks seeded requests
                distributed_executor_backend="external_launcher" if "RANK" in os.environ else None)
            # A kernel that the CPU build lacks shows here, not in the middle of the run.
            if not self.cuda:
                trial = [Request(0, [0] * min(8, max_length - 1), 0, 1)]
                while not self._step(trial):
                    trial = []
        except Exception as error:
            # Of a pydantic error the first line says nothing, and what follows the second is noise.
            reason = [line.strip() for line in str(error).splitlines() if line.strip()][:2]
            raise ValueError(f"engine=vllm cannot run {model}; --engine=hf may. vLLM says: "
                             f"{' '.join(reason).partition(' [type=')[0][:300] or repr(error)}") from error
        finally:
            gc.freeze()
            gc.enable()
        if shared:
            self._unlink_shared_memory()
        self.has_head = all(self.llm.apply_model(has_head))
        # PyTorch counts this as allocated even while vLLM sleeps and its memory is free.
        self.allocated = torch.cuda.memory_allocated() - before if self.cuda else 0
        if float32_head and vllm.__version__.startswith("0.25."):   # head_dtype came with 0.26
            self.llm.apply_model(give_float32_head)
        from vllm.distributed import get_tp_group
        self.group = get_tp_group()                            # the ranks that share this engine
        self._sleep()

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
        return [self.answer(int(output.request_id), list(sample.token_ids), list(sample.logprobs.logprobs),
                            sample.finish_reason)
                for output in engine.step() if output.finished for sample in output.outputs]

    def load_weights(self, named_tensors):
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

    def _name_shared_memory(self):
        # vLLM 0.32's CPU build gives the memory that the ranks of an engine share the same name in every run,
        # so two runs would write into each other's. With the port of torchrun's store and the role of this
        # rank the name is the engine's own. To be removed once vLLM makes it unique.
        from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed
        self.prefix = f"{os.environ['MASTER_PORT']}-{os.environ.get('ROLE_NAME', '')}"
        make_name = _CPUSHMDistributed.make_group_name
        _CPUSHMDistributed.make_group_name = staticmethod(
            lambda communicator: f"{self.prefix}-" + make_name(communicator).replace("/", ""))
        self._unlink_shared_memory()

    def _unlink_shared_memory(self):
        # The processes that have it mapped keep it; a kill -9 leaves nothing behind.
        dist.barrier()
        for path in glob.glob(f"/dev/shm/{self.prefix}-*-cpushm*"):
            with contextlib.suppress(FileNotFoundError):       # another rank may be first
                os.unlink(path)
        dist.barrier()

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
        return [self.answer(request.name, ids[:length], logps[:length], "stop" if stop else "length")
                for request, ids, logps, length, stop in zip(requests, *(
                    x.tolist() for x in (tokens, logprobs, lengths, ended)))]

    def _forward(self, ids, mask, cache):
        positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1]:]
        return self.model(input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=cache,
                          use_cache=True, logits_to_keep=1).logits[:, -1]

    @torch.no_grad()
    def load_weights(self, named_tensors):
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
