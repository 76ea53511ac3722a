"""Both engines against a full forward of a Hugging Face model, before and after a sync; seeds; sampling."""
import importlib.util
import itertools
import json
import math
import os
import pty
import random
import re
import select
import shutil
import termios
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tokenizers import Tokenizer, decoders, models
from transformers import (AutoConfig, AutoModelForCausalLM, AutoTokenizer, Gemma2Config, Gemma2ForCausalLM,
                          GenerationConfig)

import hf_engine
import rollout
import vllm_engine
from model import micro_batches
from options import vllm_025
from options.stop_strings import StopStrings
from runtime import model_folder
from runtime.metrics import compare_logprobs
from runs import announced, on_ranks, requests, shut_down
from test_packing import episode

PROMPTS = [[72, 105], [50, 43, 50, 61], [65], list(range(97, 117))]
ENGINES = ["hf"] + (["vllm"] if importlib.util.find_spec("vllm") else [])


@pytest.fixture(scope="module", params=ENGINES)
def engine(request, folder, mesh):
    # mesh: vLLM joins the process group that the scripts have made before it.
    made = rollout.engine_class(request.param)(folder, torch.float32, 64, [10, 20, 30], 0.4)
    yield made
    shut_down(made)


@pytest.fixture()
def model(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def generate(engine, prompts=PROMPTS, n=3, seeds=None, max_tokens=24, temperature=0.8, **kwargs):
    return engine.generate(requests(prompts, n, seeds or list(range(100, 100 + len(prompts))), max_tokens,
                           temperature, **kwargs))


def test_each_step_tells_the_watchdog_that_the_engine_works(engine, monkeypatch):
    """The plain engine samples a token with each, so that no length of a completion is a standstill."""
    steps, watchdog = [], rollout.distributed.watchdog
    monkeypatch.setattr(watchdog, "moved", lambda where=None: steps.append(where))
    rollouts = generate(engine, max_tokens=24)
    longest = max(len(r.logprobs) for r in rollouts)
    assert longest > 5 and len(steps) >= longest and {*steps} == {None}


def prompts_of(rollouts):
    return [r.prompt_ids.tolist() for r in rollouts]


def completions_of(rollouts):
    return [r.sampled_ids.tolist() for r in rollouts]


def identical(a, b):
    """Whether two lists of rollouts are the same, bit for bit."""
    fields = lambda rollouts: [(r.ids.tolist(), r.spans.tolist(), r.logprobs.tobytes(), r.finish_reason)
                               for r in rollouts]
    return fields(a) == fields(b)


def tables(rollouts, model, temperature=1.0):
    """For each rollout its completion and the logits / temperature where each of its tokens is predicted."""
    for r in rollouts:
        with torch.no_grad():
            logits = model(torch.from_numpy(r.ids).long()[None]).logits[0] / temperature
        yield r.sampled_ids.tolist(), logits[len(r.prompt_ids) - 1:-1]


def largest_gap(rollouts, model, temperature):
    gaps = []
    for r, (completion, logits) in zip(rollouts, tables(rollouts, model, temperature)):
        expected = logits.log_softmax(-1).gather(1, torch.tensor(completion)[:, None])[:, 0]
        gaps.append((expected - torch.from_numpy(r.logprobs)).abs().max().item())
    return max(gaps)


def test_shape_of_the_answer(engine):
    rollouts = generate(engine)
    assert prompts_of(rollouts) == [p for p in PROMPTS for _ in range(3)]
    # A prompt's samples differ.
    assert len(set(map(tuple, completions_of(rollouts[:3])))) == 3
    for r in rollouts:
        assert r.ids.dtype == r.spans.dtype == np.int32 and r.logprobs.dtype == np.float32
        assert r.spans.tolist() == [[len(r.prompt_ids), len(r.ids)]]
        *body, last = r.sampled_ids.tolist()
        assert len(r.logprobs) == len(body) + 1 <= 24
        assert not {10, 20, 30} & set(body)
        # The end token is in it.
        assert r.finish_reason == ("stop" if last in (10, 20, 30) else "length")
        assert r.finish_reason == "stop" or len(r.logprobs) == 24
    assert {r.finish_reason for r in generate(engine, n=16)} == {"stop", "length"}


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_those_of_a_full_forward_before_and_after_a_sync(engine, model, temperature):
    engine.load_weights(announced((name, p.detach().clone())
                                   for name, p in model.named_parameters(remove_duplicate=False)), 1)
    before = generate(engine, temperature=temperature)
    assert largest_gap(before, model, temperature) < 1e-5

    torch.manual_seed(1)
    moved = AutoModelForCausalLM.from_pretrained(model.config._name_or_path, dtype=torch.float32)
    with torch.no_grad():
        for p in moved.parameters():
            p += 0.05 * torch.randn_like(p)
    engine.load_weights(announced((name, p.detach().clone())
                                   for name, p in moved.named_parameters(remove_duplicate=False)), 1)
    after = generate(engine, temperature=temperature)
    assert largest_gap(after, moved, temperature) < 1e-5
    # The old weights are really gone.
    assert largest_gap(after, model, temperature) > 1e-2
    engine.load_weights(announced((name, p.detach().clone())
                                   for name, p in model.named_parameters(remove_duplicate=False)), 1)
    again = generate(engine, temperature=temperature)
    assert completions_of(again) == completions_of(before)


def test_the_plain_engine_computes_the_softcap_of_attention(tmp_path):
    """Gemma 2 has one, which PyTorch's own attention leaves out without a word."""
    torch.manual_seed(0)
    Gemma2ForCausalLM(Gemma2Config(
        vocab_size=258, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, query_pre_attn_scalar=16, attn_logit_softcapping=2.0,
        initializer_range=0.3)).save_pretrained(tmp_path)
    eager = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager")
    plain = hf_engine.HFEngine(str(tmp_path), torch.float32, 64, [1], 0.5)
    assert largest_gap(generate(plain), eager, 0.8) < 1e-5


def test_a_text_is_decoded_as_it_was_written(folder, tmp_path):
    path = shutil.copytree(folder, tmp_path / "model")
    config = json.loads((path / "tokenizer_config.json").read_text()) | {
        "clean_up_tokenization_spaces": True,
        "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output": True}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = model_folder.load_tokenizer(str(path))
    ids = tokenizer("a != b ?").input_ids
    assert rollout.text_of(tokenizer, ids, [7]) == rollout.text_of(tokenizer, [*ids, 7], [7]) == "a != b ?"
    assert tokenizer.batch_decode([ids]) == ["a != b ?"]
    # The setting is the model's own, and stays in checkpoints.
    tokenizer.save_pretrained(tmp_path / "saved")
    saved = json.loads((tmp_path / "saved/tokenizer_config.json").read_text())
    assert saved["clean_up_tokenization_spaces"] is True


def until_stopped(rollouts, strings, tokenizer, eos_ids):
    """For each rollout of an engine without stop strings: how many of its tokens one with them would have
    sampled, why it would have ended, and its text."""
    for r in rollouts:
        ids = r.sampled_ids.tolist()
        for count in range(1, len(ids) + 1):
            text = tokenizer.decode(ids[:count])
            places = [text.index(string) for string in strings if string in text]
            if places:
                yield count, "stop", text[:min(places)]
                break
        else:
            yield len(ids), r.finish_reason, tokenizer.decode(ids[:-1] if ids[-1] in eos_ids else ids)


def watches(engine, stop, folder, monkeypatch):
    """Gives an engine what load_engine gives one that it makes."""
    settings = SimpleNamespace(engine="hf", images="", vllm_gpu_memory_utilization=0.4, stop=stop)
    made = rollout.load_engine(settings, folder, torch.float32, 64, [10, 20, 30])
    monkeypatch.setattr(engine, "stop", made.stop)
    return made


@pytest.mark.parametrize("trial", range(4))
def test_a_stop_string_ends_a_completion(engine, folder, monkeypatch, trial):
    """At the token that completes it, which stays. Characters may have several tokens, of which not all are
    characters, and the prompts have the second string."""
    def sample():
        asked = requests(PROMPTS, 16, range(100, 104), 24, 0.8)
        # A quarter is cut off early, and in the plain engine computed further for a while.
        return engine.generate([request._replace(max_tokens=24 if i % 4 else 4) for i, request in enumerate(asked)])

    plain = sample()
    tokenizer, rng = AutoTokenizer.from_pretrained(folder), random.Random(trial)
    texts = [text for text in map(tokenizer.decode, completions_of(plain)) if len(text) > 6]
    wide = [match[0] for text in texts for match in re.finditer(".?[\x80-\ud7ff].?", text) if not {"\ufffd", ",", "\\"} & {*match[0]}]
    strings = [rng.choice(wide), "i"]
    while len(strings) < 4:
        text = rng.choice(texts)
        start = rng.randrange(len(text) - 4)
        string = text[start:start + rng.randint(1, 4)]
        strings += [string] * (not {"\ufffd", ",", "\\"} & {*string})
    stop = ",".join(strings).replace("\n", "\\n")
    watches(engine, stop, folder, monkeypatch)
    steps = []
    monkeypatch.setattr(rollout.distributed.watchdog, "moved", lambda where=None: steps.append(where))
    rollouts = sample()
    expected = [*until_stopped(plain, strings, tokenizer, [10, 20, 30])]
    for before, r, (count, reason, text) in zip(plain, rollouts, expected, strict=True):
        assert r.sampled_ids.tolist() == before.sampled_ids[:count].tolist() and r.finish_reason == reason
        assert np.abs(r.logprobs - before.logprobs[:count]).max() < 1e-5
        assert engine.stop.before(rollout.text_of(tokenizer, r.sampled_ids.tolist(), [10, 20, 30])) == text
    assert 4 < sum(count < len(before.logprobs) for before, (count, *_) in zip(plain, expected)) < 64
    # Nothing is sampled beyond the step that was under way.
    assert len(steps) <= max(count for count, *_ in expected) + 2
    if engine.name == "vllm":
        assert not engine.llm.llm_engine.has_unfinished_requests()
        assert engine.llm.llm_engine.engine_core.engine_core.scheduler.get_num_unfinished_requests() == 0


def test_a_stop_string_inside_a_token(talker, monkeypatch):
    """The token stays whole in the row, and the text ends inside it."""
    tokenizer = AutoTokenizer.from_pretrained(talker)
    engine = hf_engine.HFEngine(talker, torch.float32, 64, [10, 20, 30], 0.4)
    plain = generate(engine, n=16)
    watches(engine, '"name",l_call', talker, monkeypatch)
    for before, r, (count, reason, text) in zip(plain, generate(engine, n=16), until_stopped(
            plain, ['"name"', "l_call"], tokenizer, [10, 20, 30]), strict=True):
        assert r.sampled_ids.tolist() == before.sampled_ids[:count].tolist() and r.finish_reason == reason
        assert engine.stop.before(rollout.text_of(tokenizer, r.sampled_ids.tolist(), [10, 20, 30])) == text
        assert reason == "length" or text.endswith("<too") or before.finish_reason == "stop"


BYTES = [f"<0x{number:02X}>" for number in range(256)]       # as in the tokenizers of Llama 2 and Mistral v0.1
LLAMA = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])


@pytest.mark.parametrize("decoder, pieces, stops", [
    (LLAMA, ["答", "案", "🎉", "\n", "😀", "é", "▁the", "a", "User", ":", "</", "answer", ">"],
     ["\\n", "答", "😀", "</answer>", "\\nUser:"]),
    (decoders.BPEDecoder("</w>"), ["a", "a</w>", "b", "b</w>", "user", "user</w>", ":", ":</w>"], ["user: ", "a "])])
def test_a_stop_string_is_seen_when_the_whole_text_has_it(decoder, pieces, stops):
    """Also where tokens are bytes, of which no text can begin in the middle of a character, and where a word
    shows its space only with the next one."""
    rng = random.Random(0)
    whole = [piece for piece in pieces if decoder is not LLAMA or piece.isascii() and piece != "\n" or piece == "▁the"]
    vocabulary = {token: i for i, token in enumerate([*BYTES, *whole])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.decoder = decoder
    for _ in range(300):
        stop = rng.choice(stops)
        strings = StopStrings(stop, tokenizer)
        ids = []
        for piece in rng.choices(pieces, k=30):
            ids += [vocabulary[piece]] if piece in vocabulary else [vocabulary[BYTES[byte]] for byte in piece.encode()]
        for count in range(1, len(ids) + 1):
            text = tokenizer.decode(ids[:count])
            stopped = any(string in text for string in strings.strings)
            assert strings.completed_by(ids[:count]) == stopped, (stop, text)
            if stopped:
                break


def test_how_stop_strings_are_written():
    strings = StopStrings(r"\nUser:,</answer>,é,你好|, .*", None).strings
    assert strings == ["\nUser:", "</answer>", "é", "你好|", " .*"]
    for stop in (",", "a,", ",a", "a,,b"):
        with pytest.raises(ValueError, match=f"stop={stop}: a string between its commas is empty"):
            StopStrings(stop, None)


def test_a_generation_repeats_under_its_seeds_whatever_else_is_in_the_batch(engine):
    first = generate(engine)
    generate(engine, seeds=[7, 8, 9, 10])
    assert identical(generate(engine), first)
    alone = generate(engine, prompts=PROMPTS[1:2], seeds=[101])
    assert completions_of(alone) == completions_of(first[3:6])
    other = generate(engine, seeds=[1, 2, 3, 4])
    assert completions_of(other) != completions_of(first)


def test_more_prompts_than_fit_one_batch(engine):
    prompts = [[65 + i % 26] * (1 + i % 7) for i in range(150)]
    many = generate(engine, prompts=prompts, n=4, seeds=list(range(150)), max_tokens=4)
    assert prompts_of(many) == [p for p in prompts for _ in range(4)]
    some = generate(engine, prompts=prompts[140:141], n=4, seeds=[140], max_tokens=4)
    assert completions_of(many[560:564]) == completions_of(some)


def sets_of(r):
    """The tokens that each sampled token of a rollout was drawn from."""
    assert r.kept_ids.dtype == r.kept_sizes.dtype == np.int32 and len(r.kept_sizes) == len(r.logprobs)
    ids = r.kept_ids.tolist()
    return [{ids.pop(0) for _ in range(size)} for size in r.kept_sizes]


@pytest.mark.parametrize("top_p, top_k, min_p", [(0.9, 5, 0.0), (0.95, 10 ** 6, 0.02), (1.0, 40, 0.0), (0.9, 0, 0.3)])
def test_truncated_sampling_reports_the_truncated_distribution(engine, model, top_p, top_k, min_p):
    """And with a top_k the tokens that were left, also if these are more than vLLM reports by default."""
    rollouts = generate(engine, temperature=0.8, top_p=top_p, top_k=top_k, min_p=min_p)
    for r, (completion, logits) in zip(rollouts, tables(rollouts, model, 0.8)):
        expected = [slow_truncation(probs, top_p, top_k, min_p) for probs in logits.softmax(-1).tolist()]
        for token, logprob, kept in zip(completion, r.logprobs, expected):
            assert math.exp(logprob) == pytest.approx(kept[token], abs=1e-4)
        if top_k:
            assert sets_of(r) == [{*kept} for kept in expected]
        else:
            assert not vars(r).keys() & {"kept_ids", "kept_sizes"}
    assert not any(hasattr(r, "kept_ids") for r in generate(engine, temperature=0.0, top_k=top_k))


def test_tokens_that_tie_are_known(engine, model):
    """Each logit occurs three times. vLLM keeps all three at the last place of top_k, the plain engine one or two."""
    head = model.get_input_embeddings().weight.detach()
    load = lambda version: engine.load_weights(announced(
        (name, p.detach().clone()) for name, p in model.named_parameters(remove_duplicate=False)), version)
    before = head.clone()
    head.copy_(head[torch.arange(len(head)) // 3 * 3])
    load(1)
    rollouts = generate(engine, temperature=1.0, top_k=5)
    for r, (completion, logits) in zip(rollouts, tables(rollouts, model)):
        for token, logprob, kept, row in zip(completion, r.logprobs, sets_of(r), logits):
            assert len(kept) == (6 if engine.name == "vllm" else 5)
            assert {i // 3 for i in kept} == {i // 3 for i in row.topk(6).indices.tolist()}
            kept = sorted(kept)
            assert row[kept].log_softmax(0)[kept.index(token)].item() == pytest.approx(logprob, abs=1e-5)
    head.copy_(before)
    load(2)


def test_greedy_takes_the_likeliest_token(engine, model):
    rollouts = generate(engine, n=2, temperature=0.0)
    assert identical(rollouts[::2], rollouts[1::2]) and prompts_of(rollouts[::2]) == PROMPTS
    for completion, logits in tables(rollouts, model):
        assert completion == logits.argmax(-1).tolist()


@pytest.mark.parametrize("name", ENGINES)
def test_an_engines_head_does_not_round_logits(name):
    """Its logits of the same hidden states are those in float64. In bfloat16 they would be off by up to 0.4%."""
    engine = rollout.engine_class(name)(model_folder.SHIPPED["tiny"], torch.bfloat16, 128, [0], 0.4)

    def of_model(model):
        head = model.get_output_embeddings() if name == "hf" else model.lm_head
        size = head.weight.shape[1]
        hidden = torch.randn(50, size, generator=torch.Generator().manual_seed(0)).bfloat16()
        logits = head(hidden[:, None])[:, 0] if name == "hf" else model.compute_logits(hidden)
        return hidden, head.weight, logits

    hidden, weight, logits = of_model(engine.model) if name == "hf" else engine.llm.apply_model(of_model)[0]
    shut_down(engine)
    assert logits.dtype == torch.float32 and weight.dtype == torch.bfloat16
    expected = hidden.double() @ weight.double().T
    torch.testing.assert_close(logits.double(), expected[:, :logits.shape[1]], rtol=1e-5, atol=1e-5)


def test_a_model_of_vllm_without_a_head_gets_a_float32_one(monkeypatch):
    """Its embedding is the head, as in Gemma 2."""
    embeddings = pytest.importorskip("vllm.model_executor.layers.vocab_parallel_embedding")
    embed, hidden = torch.nn.Embedding(7, 16).bfloat16(), torch.randn(3, 16).bfloat16()
    embed.quant_method = embeddings.UnquantizedEmbeddingMethod()
    llm = SimpleNamespace(apply_model=lambda patch: patch(torch.nn.Sequential(embed)))
    monkeypatch.setattr("vllm.__version__", "0.25.1")
    vllm_025.compute_logits_in_float32(llm)
    expected = hidden.double() @ embed.weight.double().T
    logits = embed.quant_method.apply(embed, hidden)
    torch.testing.assert_close(logits.double(), expected, rtol=1e-5, atol=1e-5)


class SleepyLLM:
    """vLLM's memory on a GPU: nobody wakes a part that is awake, or uses one that is asleep."""

    def __init__(self, llm):
        self.llm, self.mapped = llm, {"weights", "kv_cache"}

    def sleep(self, level):
        assert level == 1 and self.mapped == {"weights", "kv_cache"}
        self.mapped = set()
        self.llm.reset_prefix_cache()

    def wake_up(self, tags):
        assert tags and not self.mapped & set(tags)
        self.mapped |= set(tags)

    def collective_rpc(self, method, kwargs):
        assert method == "reload_weights" and self.mapped == {"weights"}
        self.llm.collective_rpc(method, kwargs=kwargs)

    @property
    def llm_engine(self):
        assert self.mapped == {"weights", "kv_cache"}
        return self.llm.llm_engine

    def __getattr__(self, name):
        return getattr(self.llm, name)


@pytest.mark.skipif("vllm" not in ENGINES, reason="needs vLLM")
def test_vllm_sleeps_except_to_sample_and_to_take_weights(folder, model, mesh):
    engine = vllm_engine.VLLMEngine(folder, torch.float32, 64, [10, 20, 30], 0.4)
    engine.llm, engine.cuda, engine.sleeps = SleepyLLM(engine.llm), True, True
    engine._sleep()
    for _ in range(3):
        # An evaluation and a rollout. Afterwards the memory is the trainer's.
        for _ in range(2):
            assert largest_gap(generate(engine), model, 0.8) < 1e-5
            assert not engine.llm.mapped
        with torch.no_grad():
            for p in model.parameters():
                p += 0.05 * torch.randn_like(p)
        engine.load_weights(announced(model.named_parameters(remove_duplicate=False)), 1)
        # Half awake it wakes up first.
        engine._sleep()
        assert not engine.llm.mapped
        engine.load_weights(announced(model.named_parameters(remove_duplicate=False)), 1)
    shut_down(engine)


# ---------------------------------------------------------------- sample_tokens, without a model

def slow_truncation(probs, top_p, top_k, min_p=0.0):
    """{token: probability} of the tokens with min_p of the largest one, of the top_k likeliest of these, then of
    the fewest of them that hold top_p."""
    likely = [(token, p) for token, p in enumerate(probs) if p >= min_p * max(probs)]
    ranked = sorted(likely, key=lambda pair: -pair[1])[:top_k or None]
    total, kept, held = sum(p for _, p in ranked), {}, 0.0
    for token, p in ranked:
        if held >= top_p * total:
            break
        kept[token] = p
        held += p
    return {token: p / sum(kept.values()) for token, p in kept.items()}


@pytest.mark.parametrize("temperature, top_p, top_k, min_p", [
    (1.0, 1.0, 0, 0.0), (0.5, 1.0, 0, 0.0), (1.0, 0.8, 0, 0.0), (1.0, 1.0, 3, 0.0), (1.5, 0.7, 4, 0.0),
    (1.0, 1.0, 0, 0.15), (1.0, 0.85, 4, 0.15)])
def test_sample_tokens_draws_the_distribution_it_reports(temperature, top_p, top_k, min_p):
    """top_p is a share of what min_p and top_k have left: without min_p the last case would keep a token more."""
    logits = torch.tensor([0.3, -1.0, 2.0, 1.1, 0.0, -3.0])
    expected = slow_truncation((logits.double() / temperature).softmax(-1).tolist(), top_p, top_k, min_p)
    # Every twenty-thousandth once.
    uniform = (torch.arange(20000) + 0.5) / 20000
    tokens, logprobs, kept = hf_engine.sample_tokens(logits.expand(20000, 6), uniform, temperature, top_p, top_k, min_p)
    assert set(tokens.tolist()) == set(expected)
    assert kept[7].nonzero()[:, 0].tolist() == sorted(expected) if top_k else kept is None
    for token, p in expected.items():
        drawn = tokens == token
        assert drawn.float().mean().item() == pytest.approx(p, abs=2e-4)
        assert logprobs[drawn].exp().tolist() == pytest.approx([p] * int(drawn.sum()), rel=1e-4)


def test_sample_tokens_never_draws_an_impossible_token():
    logits = torch.tensor([[0.0, 1.0, -math.inf, -math.inf]])
    for u in (0.0, 1 - 2 ** -24):
        token, logprob, _ = hf_engine.sample_tokens(logits, torch.tensor([u]), 1.0)
        assert token.item() in (0, 1) and logprob.isfinite().all()


def test_hf_engine_keeps_the_logits_of_one_step_only(folder, monkeypatch):
    seen, most_alive, original = [], [], hf_engine.sample_tokens

    def spy(logits, *args):
        seen.append(weakref.ref(logits.untyped_storage()))
        most_alive.append(sum(ref() is not None for ref in seen))
        return original(logits, *args)
    engine = hf_engine.HFEngine(folder, torch.float32, 64, [10], 0.4)
    monkeypatch.setattr(hf_engine, "sample_tokens", spy)
    generate(engine, max_tokens=16)
    assert len(seen) == 16 and max(most_alive) <= 2


# ---------------------------------------------------------------- engine against trainer

def test_compare_logprobs(mesh, folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rollouts = [rollout.Rollout.single([65], [66, 67], [-1.0, -2.0], "stop"),
                rollout.Rollout.single([65], [68], [-0.5], "length")]
    # In any order.
    logps = {1: torch.tensor([-0.7]), 0: torch.tensor([-1.0, -1.9])}
    metrics = compare_logprobs(rollouts, logps, 0.2, tokenizer)
    assert metrics == {name: pytest.approx(value, abs=1e-6) for name, value in {
        "sampling/sampling_logp_difference/mean": 0.1, "sampling/sampling_logp_difference/p99": 0.2,
        "sampling/sampling_logp_difference/max": 0.2,
        "sampling/importance_sampling_ratio/min": math.exp(-0.2),
        "sampling/importance_sampling_ratio/mean": (1 + math.exp(0.1) + math.exp(-0.2)) / 3,
        "sampling/importance_sampling_ratio/max": math.exp(0.1),
        "sampling/effective_sample_size": (1 + math.exp(0.1) + math.exp(-0.2)) ** 2 / 3 / (
            1 + math.exp(0.2) + math.exp(-0.4)),
        "sampling/kl": (math.exp(0.1) - 1.1 + math.exp(-0.2) - 0.8) / 3}.items()}
    many = [rollout.Rollout.single([65], [66] * 300, [-1.0] * 300, "stop")]
    logps = {0: torch.tensor([-1.0 - 1e-3 * gap for gap in random.Random(0).sample(range(300), 300)])}
    metrics = compare_logprobs(many, logps, 0.9, tokenizer)
    # 297 of 300 are from 0 to 0.296.
    assert metrics["sampling/sampling_logp_difference/p99"] == pytest.approx(0.296)
    for bad in ([-0.6, -2.4], [-1.0, math.nan]):
        with pytest.raises(RuntimeError, match="differ by .* over logprob_gap=0.2") as error:
            logps = {0: torch.tensor(bad), 1: torch.tensor([-0.5])}
            compare_logprobs(rollouts, logps, 0.2, tokenizer)
        worst = str(error.value).splitlines()[1]
        before, token = tokenizer.decode(66), tokenizer.decode(67)
        assert worst == f"  {before!r} + {token!r}: trainer {bad[1]:.4f}, engine -2.0000"
    # What goes both ways is rounding, and what goes one way is another distribution.
    compare_logprobs(rollouts, {0: torch.tensor([-0.9, -2.1]), 1: torch.tensor([-0.5])}, 0.2, tokenizer)
    with pytest.raises(RuntimeError, match="differ by 0.13 .* or by -0.13 with their sign, over half"):
        compare_logprobs(rollouts, {0: torch.tensor([-1.2, -2.2]), 1: torch.tensor([-0.5])}, 0.2, tokenizer)
    # A gap may be as large as its bound, without a sign and with it.
    compare_logprobs(rollouts, {0: torch.tensor([-1.25, -1.75]), 1: torch.tensor([-0.25])}, 0.25, tokenizer)
    compare_logprobs(rollouts, {0: torch.tensor([-1.5, -2.0])}, 0.5, tokenizer)
    # No bound makes up for an infinite one.
    with pytest.raises(RuntimeError, match="differ by inf"):
        compare_logprobs(rollouts, {0: torch.tensor([-1.0, -math.inf])}, math.inf, tokenizer)
    # The eight worst of many are shown, each on a line.
    with pytest.raises(RuntimeError) as error:
        compare_logprobs(many, {0: -1.0 - torch.arange(300) / 100}, 0.1, tokenizer)
    _, *worst = str(error.value).splitlines()
    assert [line.rpartition("trainer ")[2] for line in worst] == [
        f"{-1 - place / 100:.4f}, engine -1.0000" for place in range(299, 291, -1)]
    assert all(line.startswith("  '") for line in worst)


def test_rollouts_of_another_version_are_refused(mesh, folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    made = lambda logprob, versions: rollout.Rollout.single([65], [66, 67], [logprob] * 2, "stop", versions)
    rollouts = [made(-1.0, ((0, 4),)), made(-9.0, ((0, 3),)), made(-9.0, ((0, 3), (1, 4)))]
    logps = {s: torch.tensor([-1.0, -1.1]) for s in (2, 0, 1)}
    metrics = compare_logprobs(rollouts, {0: logps[0]}, 0.4, tokenizer, version=4)
    assert metrics["sampling/sampling_logp_difference/max"] == pytest.approx(0.1, abs=1e-6)
    message = "step 4 compares rollouts of step 3's policy with its own: leave them out of compare_logprobs"
    for s in (1, 2):
        with pytest.raises(RuntimeError, match=message):
            compare_logprobs(rollouts, {0: logps[0], s: logps[s]}, 40.0, tokenizer, version=4)
    compare_logprobs(rollouts, logps, 40.0, tokenizer)
    assert compare_logprobs(rollouts, {}, 0.2, tokenizer, 4) == {}


def compared_on_a_rank(folder):
    gap = (0.1, -0.15)[dist.get_rank()]
    one = rollout.Rollout.single([65], [66], [-1.0], "stop")
    return compare_logprobs([one], {0: torch.tensor([-1.0 + gap])}, 0.2, AutoTokenizer.from_pretrained(folder))


def test_the_extremes_are_those_of_all_ranks(folder, tmp_path):
    expected = {"sampling_logp_difference/mean": 0.125, "sampling_logp_difference/p99": 0.15,
                "sampling_logp_difference/max": 0.15, "importance_sampling_ratio/max": math.exp(0.1),
                "importance_sampling_ratio/min": math.exp(-0.15)}
    for metrics in on_ranks(2, tmp_path, compared_on_a_rank, folder):
        assert {name: metrics[f"sampling/{name}"] for name in expected} == pytest.approx(expected, abs=1e-5)


def test_a_request_that_would_be_cut_is_refused(engine):
    longest = engine.max_length
    (r,) = engine.generate(requests([[65, 66]], 1, [0], longest - 2, 1.0))
    assert len(r.ids) <= longest
    with pytest.raises(ValueError, match=f"of {longest + 1} tokens: the engine was made for {longest}"):
        engine.generate(requests([[65, 66]], 1, [0], longest - 1, 1.0))


def test_what_samples_in_the_middle_of_a_step_is_refused(engine):
    """As an environment might; the engine samples afterwards as before."""
    expected = completions_of(generate(engine))

    engine.add(rollout.Request(0, PROMPTS[0], 0, 4))
    with pytest.raises(RuntimeError, match="in the middle of a step and samples for nothing else"):
        generate(engine)
    while engine.versions:
        engine.step()
    assert completions_of(generate(engine)) == expected


def test_rollouts_carry_the_version_of_the_weights_that_sampled_them(engine, model):
    for version in (7, 8):
        engine.load_weights(announced((name, p.detach().clone())
                                       for name, p in model.named_parameters(remove_duplicate=False)), version)
        assert {r.versions for r in generate(engine)} == {((0, version),)}


def test_compare_logprobs_of_several_spans_and_of_none(mesh, folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    r = episode([65], [66, 67], [97, 98], [68])
    r.logprobs[:] = [-1.0, -2.0, -3.0]
    metrics = compare_logprobs([r], {0: torch.tensor([-1.0, -2.0, -2.9])}, 0.2, tokenizer)
    assert metrics["sampling/sampling_logp_difference/max"] == pytest.approx(0.1, abs=1e-6)
    # The text before the worst token is what was sampled before it.
    before, token = tokenizer.decode([66, 67]), tokenizer.decode(68)
    with pytest.raises(RuntimeError) as error:
        compare_logprobs([r], {0: torch.tensor([-1.0, -2.0, -9.0])}, 0.2, tokenizer)
    assert f"{before!r} + {token!r}: trainer -9.0000, engine -3.0000" in str(error.value)
    assert compare_logprobs([r], {}, 0.2, tokenizer) == {}


def test_end_tokens(folder, tmp_path):
    path = str(shutil.copytree(folder, tmp_path / "model"))
    tokenizer = AutoTokenizer.from_pretrained(path)
    generation = GenerationConfig(eos_token_id=[7, 8])
    generation.save_pretrained(path)
    assert model_folder.end_tokens(path, tokenizer) == [7, 8]
    os.remove(f"{path}/generation_config.json")
    assert model_folder.end_tokens(path, tokenizer) == [AutoConfig.from_pretrained(path).eos_token_id]
    config = AutoConfig.from_pretrained(path)
    config.eos_token_id = None
    config.save_pretrained(path)
    model_folder.read_config.cache_clear()
    assert model_folder.end_tokens(path, tokenizer) == [tokenizer.eos_token_id]
    tokenizer.eos_token = None
    with pytest.raises(ValueError, match="names no token that ends a completion"):
        model_folder.end_tokens(path, tokenizer)


def end_tokens_of_a_rank(folder):
    """The hub's generation config says 1; the request of rank 1 fails, so it reads the tokenizer."""
    import model                                                # here `model` is a fixture
    model.end_tokens = lambda *_: [1 + torch.distributed.get_rank()]
    settings = SimpleNamespace(model=folder, chat_template="", chat_template_kwargs="", chat=True, images="")
    return model.open_folders(settings, 64).eos_ids


def test_all_ranks_have_the_end_tokens_of_rank_0(folder, tmp_path):
    assert on_ranks(2, tmp_path, end_tokens_of_a_rank, folder) == [[1], [1]]


def test_end_tokens_that_the_template_never_writes(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    first, second = tokenizer.convert_ids_to_tokens([65, 66])
    assert f"ends with {first}, {second} (eos_token_id), but" in model_folder.end_note(tokenizer, [65, 66])
    assert not model_folder.end_note(tokenizer, [65, tokenizer.eos_token_id])
    tokenizer.chat_template = "{{ raise_exception('no turns') }}"
    assert not model_folder.end_note(tokenizer, [65, 66])


@pytest.mark.parametrize("content", ['{"eos_token_id"', ""])
def test_a_damaged_generation_config_is_named(folder, tmp_path, content):
    path = shutil.copytree(folder, tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(path)
    (path / "generation_config.json").write_text(content)
    with pytest.raises(ValueError, match="generation_config.json cannot be read"):
        model_folder.end_tokens(str(path), tokenizer)


# ---------------------------------------------------------------- the progress bar

def shown(monkeypatch, work, made=pty.openpty, rank=0):
    """What work() writes to stderr. tqdm's clock moves by a second whenever it is read."""
    reader, writer = made()
    if made is pty.openpty:
        termios.tcsetwinsize(writer, (24, 100))
    clock = itertools.count()
    with monkeypatch.context() as patch, open(writer, "w") as stderr:
        patch.setattr("sys.stderr", stderr)
        patch.setattr("tqdm.std.time", lambda: next(clock))
        patch.setattr(dist, "get_rank", lambda group=None: rank)
        work()
        stderr.flush()
        text = ""
        while select.select([reader], [], [], 0.05)[0]:
            text += os.read(reader, 10 ** 6).decode()
    return text


def test_a_terminal_shows_how_far_the_work_is_and_a_pipe_nothing(engine, monkeypatch):
    rollouts = []

    def sample():
        rollouts[:] = generate(engine, n=8)

    text = shown(monkeypatch, sample)
    tokens = sum(len(r.logprobs) for r in rollouts)
    lines = re.findall(r"(\d+) of 32 completions: (\d+) tokens \[\d\d:\d\d, +[\d.]+ tokens/s\]", text)
    assert ("32", str(tokens)) == lines[-1] and sum(0 < int(count) < 32 for count, _ in lines) > 5
    assert [*map(int, sum(lines, ())[1::2])] == sorted(int(sampled) for _, sampled in lines)
    # All of it was on one line, which is empty in the end.
    assert "\n" not in text and re.fullmatch(" *", text.split("\r")[-2]) and text.endswith("\r")

    network = torch.nn.Linear(1, 1)
    network.sequence_group, network.packed, network.reader, network.device = None, True, None, "cpu"
    update = lambda: [*micro_batches(network, rollouts, range(32), 64)]
    text = shown(monkeypatch, update)
    assert re.search(r"micro-batches: +\d+%\|.+\| 2/\d+ \[", text) and text.endswith("\r") and "\n" not in text
    for work in (sample, update):
        assert shown(monkeypatch, work, os.pipe) == shown(monkeypatch, work, rank=1) == ""


# ---------------------------------------------------------------- choosing

def test_engine_choice(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert rollout.engine_class("auto") is hf_engine.HFEngine and rollout.engine_class("hf") is hf_engine.HFEngine
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    assert rollout.engine_class("auto") is rollout.engine_class("vllm") is vllm_engine.VLLMEngine


def test_a_score_is_the_sum_of_its_rewards_and_the_last_token_gets_the_difference():
    r = rollout.Rollout.single([65], [66, 67, 68], [-1.0] * 3, "stop")
    assert math.isnan(r.score)
    r.score = 0.5
    assert r.rewards == {2: 0.5} and r.score == 0.5
    r.rewards = {0: 1.0, 1: 0.25}
    before = r.rewards
    r.score = 2.0
    assert r.rewards == {0: 1.0, 1: 0.25, 2: 0.75} and before == {0: 1.0, 1: 0.25}
    r.score += 1e-12                                            # less than rounding leaves them as they are
    assert r.rewards == {0: 1.0, 1: 0.25, 2: 0.75}
    r.score = math.nan                                          # it is not scored after all
    assert math.isnan(r.score) and r.rewards[0] == 1.0
    r.score = 1.0
    assert r.rewards == {2: 1.0}
