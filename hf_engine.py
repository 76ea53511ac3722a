"""
The engine that samples with plain PyTorch and transformers: it needs no vLLM and is short enough to read.
Runs with --engine=vllm do not open this file.
"""
import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoConfig, DynamicCache

from configurator import reading
from model import head_logits
from rollout import Engine, Request
from runtime import distributed
from runtime.model_folder import model_class
from weights import checksum


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
        requests = self._taken()
        sampling = requests[0][4:8]                             # temperature, top_p, top_k and min_p
        # [R]: how many tokens each request gets; fewer than max_tokens if it ends by itself
        lengths = torch.tensor([request.max_tokens for request in requests], device=self.device)
        longest = lengths.max().item()
        uniform = self._drawn(requests, longest)                # [R, longest]
        tokens = torch.zeros_like(uniform, dtype=torch.long)
        logprobs = torch.zeros_like(uniform)
        kept = [[] for _ in requests]                           # of each: what its tokens were drawn from
        stopped = torch.zeros_like(lengths, dtype=torch.bool)   # [R]: True for those that ended by themselves
        count = len(requests)                                   # how many have not ended
        active = torch.arange(count, device=self.device)        # the requests that are still computed
        cache = DynamicCache(config=self.model.config)
        ids, mask, sequence_of = self._left_padded(requests)
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
                cache.reorder_cache(sequence_of)
                logits = logits[sequence_of]                                                    # [R, V]
                mask = mask[sequence_of]
            tokens[active, t], logprobs[active, t], mask_kept = sample_tokens(
                logits, uniform[active, t], *sampling)
            if mask_kept is not None:
                for i, token_kept in zip(active.tolist(), mask_kept.cpu().numpy()):
                    kept[i].append(np.flatnonzero(token_kept).astype(np.int32))
            stops = torch.isin(tokens[:, t], self.eos_ids)
            if self.stop:
                newest = tokens[active, max(0, t + 1 - self.stop.reach):t + 1].tolist()
                completed = [self.stop.completed_by(sampled) for sampled in newest]
                stops[active] |= torch.tensor(completed, device=self.device)
            stops &= lengths > t                                # no request ends twice
            stopped |= stops
            lengths[stops] = t + 1
            alive = lengths > t + 1
            remaining = alive.sum().item()
            self.show(count - remaining, count)
            count = remaining
            if not count:
                break
            # Once half of the requests have ended, only the others are computed.
            if 2 * count <= len(active):
                places = alive[active].nonzero()[:, 0]
                active = active[places]
                mask = mask[places]
                cache.reorder_cache(places)
            ids = tokens[active, t][:, None]
            mask = F.pad(mask, (0, 1), value=1)
        return self._answers(requests, tokens.tolist(), logprobs.tolist(), lengths.tolist(), stopped, kept)

    def _answers(self, requests, tokens, logprobs, lengths, stopped, kept):
        # Returns the Answers to the requests. For request i tokens and logprobs hold lengths[i], then zeros.
        answers = []
        for i, length in enumerate(lengths):
            finish_reason = "stop" if stopped[i] else "length"
            answers.append(self._answer(requests[i].name, tokens[i][:length], logprobs[i][:length],
                                        finish_reason, kept[i][:length]))
        return answers

    def _taken(self):
        # Takes queued requests: those that sample like the first.
        sampling = self.added[0][4:8]
        requests = [request for request in self.added if request[4:8] == sampling][:self.max_seqs]
        self.added = [request for request in self.added if request not in requests]
        return requests

    def _drawn(self, requests, count):
        # Returns `count` uniform numbers per request, by its seed, so that no other request changes them.
        numbers = []
        for request in requests:
            generator = torch.Generator().manual_seed(request.seed)
            numbers.append(torch.rand(count, generator=generator))
        return torch.stack(numbers).to(self.device)

    def _left_padded(self, requests):
        # Returns the different sequences of the requests as ids [B, L], their mask, and the sequence of each
        # request, [R]: requests with the same ids share the first forward.
        ids = pad_sequence([torch.tensor(request.ids) for request in requests], batch_first=True,
                           padding_value=-1, padding_side="left").to(self.device)               # [R, L]
        ids, sequence_of = ids.unique(dim=0, return_inverse=True)
        return ids.clamp(min=0), (ids >= 0).long(), sequence_of

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
        from options.kept_sets import truncated
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
