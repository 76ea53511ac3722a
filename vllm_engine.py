"""
The engine that samples with vLLM, in this process and on this rank's device. Runs with --engine=hf do not
open this file.
"""
import gc
import logging
import os
import warnings

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from rollout import Engine, Request
from runtime import distributed
from weights import checksum

# If vLLM 0.32 does not know a model, it takes transformers' class and wraps it for compilation. The trainer's
# model is of the same class, and the wrapper asks it for this attribute. To be removed once vLLM mends that.
PreTrainedModel.do_not_compile = True


class VLLMEngine(Engine):
    """vLLM in this process, on this rank's device.

    On a GPU it sleeps while the trainer works, which frees its memory, unless requests are in flight or it is
    `apart`: on a device that no trainer uses.
    """
    name = "vllm"
    naming = "checkpoint"
    PARTS = "weights", "kv_cache"               # of vLLM's memory, which can sleep
    own_arguments = {}                          # arguments of vllm.LLM that a class of its own changes

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
        arguments |= {"language_model_only": config.is_multimodal_model} | self.own_arguments
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
            tensor_parallel_size=tensor_parallel_size,
            hf_overrides={"head_dtype": "float32"},  # for logits; vLLM 0.25 does not know it
            logprobs_mode="processed_logprobs",      # after temperature, min_p, top_k and top_p
            max_logprobs=-1,                         # no limit for requests; by default it is 20
            enable_chunked_prefill=self.cuda)        # CPU: a split prompt breaks seeded requests
        if vllm.__version__.startswith("0.25."):
            from options.vllm_025 import compute_logits_in_float32
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
            prompt = self.prompt_of(request)
            for key in ("ids", "shown"):
                del sampling[key]
            count = 0                           # how many of the likeliest tokens' logprobs are returned
            if request.top_k and request.temperature:
                from options.kept_sets import TIES
                count = min(request.top_k + TIES, vocab_size)
            if self.in_flight:
                # If weights change while rows are being sampled, the prefix cache cannot be emptied. By this
                # salt a request finds in it only states that the current weights computed.
                prompt["cache_salt"] = str(self.version)
            added = engine.add_request(name, prompt, SamplingParams(
                **sampling, logprobs=count, flat_logprobs=True, detokenize=False,
                output_kind=RequestOutputKind.FINAL_ONLY,
                ignore_eos=True, stop_token_ids=self.eos_ids))      # no other token ends an answer
            self.added_as(request, engine.output_processor.request_states[added])
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
                    from options.kept_sets import read_sets
                    kept = read_sets(flat, vocab_size)
                answers.append(self._answer(int(output.request_id), list(sample.token_ids), logprobs,
                                            sample.finish_reason, kept))
        self.show(len(answers), sum(len(answer.ids) for answer in answers))
        return answers

    def prompt_of(self, request):
        """Return what vLLM gets of a Request for its prompt."""
        return {"prompt_token_ids": request.ids}

    def added_as(self, request, state):
        """Look at the state that vLLM has made of a Request."""
        if self.stop:
            self.stop.watch(state.detokenizer)

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


def has_head(model):
    # Gemma 2 in vLLM has no output head but its embedding, and refuses the weights of lm_head.
    return any(name.endswith("lm_head") for name, _ in model.named_modules())


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


def reload_vllm(llm, named_tensors, ranks, has_head):
    """Let a vllm.LLM load weights; return {name: checksum} of the tensors that it has written.

    ranks: how many ranks share the engine. has_head: whether vLLM takes a head at all.

    vLLM joins and cuts what it gets, and may pack it, so the tensors cannot be read back. But before vLLM
    loads a tensor, it calls the weight loader on a parameter that has no values, to count the elements that
    the loader copies, and this function reads these counts. On one rank they have to cover the whole tensor,
    on several ranks a part of it. No count is asked for biases, which vLLM 0.25 does not count, and for
    heads, which it may leave out if they are tied.
    """
    from vllm.model_executor.model_loader.reload import layerwise
    count = layerwise.get_numel_loaded
    copied = []                             # how many elements each loader has copied of the newest tensor
    held = {}

    def watched_count(*arguments):
        elements, result = count(*arguments)
        copied.append(elements)
        return elements, result

    def tensors():
        for name, tensor in named_tensors:
            copied.clear()
            # vLLM would fail on a tensor that comes twice. It is left out here, so that load_checked can name
            # the tensor that is missing instead.
            if name not in held and (has_head or "lm_head." not in name):
                yield name, tensor
            enough = tensor.numel() if ranks == 1 else 1
            if sum(copied) >= enough or name.endswith(("bias", "lm_head.weight")):
                held[name] = checksum(tensor)

    layerwise.get_numel_loaded = watched_count
    try:
        llm.collective_rpc("reload_weights", kwargs={"weights_iterator": tensors()})
    finally:
        layerwise.get_numel_loaded = count
    return held
