"""New weights in the middle of completions: which token is by which; and many groups at one table."""
import functools
import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import data
import runs
from runs import load_rows, on_ranks, shut_down
import rollout
from options.episodes import EpisodeSampler, OpenEpisodes
from options.in_flight import InFlightSampler
from rollout import Request, Rollout
from test_episodes import SETTINGS, TOKENIZER
from test_placement import gap

# A whole block of vLLM's prefix cache and a bit.
PROMPT = [97 + i % 26 for i in range(40)]


@pytest.fixture(scope="module")
def model_of(folder):
    """Models by version; with each they are further from `folder`, which is version 0."""
    @functools.cache
    def make(version):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        torch.manual_seed(version)
        with torch.no_grad():
            for parameter in model.parameters() if version else ():
                parameter += 0.05 * torch.randn_like(parameter)
        return model
    return make


def made(name, folder, model_of, length=128):
    pytest.importorskip("vllm") if name == "vllm" else None
    engine = rollout.engine_class(name)(folder, torch.float32, length, [TOKENIZER.eos_token_id], 0.4,
                                       apart=True, in_flight=True)
    engine.incoming = lambda version: [*runs.announced(
        (name, p.detach().clone()) for name, p in model_of(version).named_parameters(remove_duplicate=False))]
    return engine


@pytest.fixture(scope="module")
def kept_vllm(folder, model_of, mesh):
    engine = made("vllm", folder, model_of)
    yield engine
    shut_down(engine)


@pytest.fixture()
def vllm(kept_vllm):
    """With the weights of version 0, and nothing to do."""
    kept_vllm.switch(0)
    yield kept_vllm
    while kept_vllm.versions:
        kept_vllm.step()


def finished(engine, steps=None):
    """{name: Answer} of what ends within that many steps, or of all that is begun."""
    answers = {}
    while engine.versions and steps != 0:
        answers |= {answer.name: answer for answer in engine.step()}
        steps = steps and steps - 1
    return answers


def as_rollout(answer, prompt=PROMPT):
    r = Rollout.single(prompt, *answer[1:4])
    r.versions = answer.versions
    return r


def test_vllm_changes_weights_between_two_tokens(vllm, model_of):
    for name, length in enumerate((40, 40, 6)):
        vllm.add(Request(name, PROMPT, name, length))
    early = finished(vllm, steps=8)
    counts = vllm.sampled_counts()
    assert early.keys() == {2} and early[2].versions == ((0, 0),)
    # It takes vLLM a step to read the prompt, which gives the first token.
    assert counts.keys() == {0, 1} and set(counts.values()) <= {7, 8}
    vllm.switch(1)
    vllm.add(Request(3, PROMPT, 3, 40))
    assert not finished(vllm, steps=5)
    vllm.switch(2)
    late = finished(vllm)
    assert not vllm.sampled_counts() and not vllm.versions
    for name in (0, 1):
        assert late[name].versions == ((0, 0), (counts[name], 1), (counts[name] + 5, 2))
    # What was begun with version 1 reads nothing that version 0 has left in the prefix cache.
    assert late[3].versions[0] == (0, 1) and late[3].versions[1][1] == 2 and len(late[3].versions) == 2
    for answer in (early | late).values():
        r = as_rollout(answer)
        assert gap(r, model_of) < 1e-4
        for version in {0, 1, 2} - ({0} if answer.name == 2 else set()):
            assert gap(r, lambda _: model_of(version)) > 1e-2


def test_vllm_counts_what_has_not_begun_to_the_new_weights(vllm, model_of):
    vllm.add(Request(0, PROMPT, 0, 4))
    vllm.switch(1)
    vllm.switch(2)
    assert vllm.version == 2
    (answer,) = finished(vllm).values()
    assert answer.versions == ((0, 2),) and gap(as_rollout(answer), model_of) < 1e-4


def test_hf_changes_weights_between_two_batches(folder, model_of, mesh):
    engine = made("hf", folder, model_of)
    engine.max_seqs = 2
    for name in range(3):
        engine.add(Request(name, PROMPT, name, 8))
    early = finished(engine, steps=1)
    engine.switch(1)
    late = finished(engine)
    assert early.keys() == {0, 1} and late.keys() == {2} and late[2].versions == ((0, 1),)
    for answer in (early | late).values():
        assert gap(as_rollout(answer), model_of) < 1e-4
        assert gap(as_rollout(answer), lambda _: model_of(1 - answer.versions[0][1])) > 1e-2


def prompts(count, rows="algebra"):
    return data.encode_rows(TOKENIZER, list(enumerate(load_rows(rows, "train", count))))


def test_a_table_returns_a_group_when_its_last_rollout_has_ended(vllm, model_of):
    """A group that came later may be complete earlier, and versions count over each rollout's tokens."""
    table = OpenEpisodes(EpisodeSampler(SimpleNamespace(**SETTINGS), TOKENIZER, vllm.eos_ids), vllm)
    jobs = [(prompt.row, Request(None, prompt.ids, 10 * n, 24)) for n, prompt in enumerate(prompts(3))]
    table.add("long", jobs)
    assert table.step() == {} and len(table.playing) == 3
    table.add("short", [(row, first._replace(max_tokens=3)) for row, first in jobs[:2]])
    assert table.step() == {} and len(table.playing) == 5
    found = {}
    while not found:
        found = table.step()
    assert found.keys() == {"short"} and len(table.playing) == 3
    vllm.switch(1)
    while table.playing:
        assert "long" not in found
        found |= table.step()
    assert [len(r.logprobs) for r in found["long"]] == [24] * 3 and len(found["short"]) == 2
    for key, expected in (("long", {0, 1}), ("short", {0})):
        for r, (row, first) in zip(found[key], jobs, strict=len(found[key]) == 3):
            assert r.prompt_ids.tolist() == first.ids and r.row is row
            assert {version for _, version in r.versions} == expected
            assert gap(r, model_of) < 1e-4
    # The same as alone, from the first tokens on.
    vllm.switch(0)
    table.add("again", jobs)
    while "again" not in found:
        found |= table.step()
    for r, again in zip(found["long"], found["again"]):
        middle = r.versions[1][0]
        assert 0 < middle < 24 and r.sampled_ids[:middle].tolist() == again.sampled_ids[:middle].tolist()
        assert np.abs(r.logprobs - again.logprobs)[:middle].max() < 1e-4


def test_versions_of_an_episode_count_the_tokens_of_all_its_turns(folder, games, model_of, mesh):
    """The turns are of one version each, and between them there is what the environment inserts."""
    engine = made("hf", folder, model_of, length=200)
    settings = SETTINGS | {"environment": f"{games}:Letters", "max_prompt_length": 80, "max_turns": 4}
    player = EpisodeSampler(SimpleNamespace(**settings), TOKENIZER, [*range(0, 256, 8), TOKENIZER.eos_token_id])
    engine.eos_ids = torch.tensor(player.eos_ids)
    table = OpenEpisodes(player, engine)
    table.add("all", [(prompt.row, Request(None, prompt.ids, 10 * n, settings["max_completion_length"]))
                      for n, prompt in enumerate(prompts(8))])
    found, version = {}, 0
    while not found:
        found, version = table.step(), version + 1
        engine.switch(version)
    assert max(len(r.spans) for r in found["all"]) > 2
    for r in found["all"]:
        lengths = [end - start for start, end in r.spans.tolist()]
        assert r.versions == tuple((sum(lengths[:turn]), turn) for turn in range(len(lengths)))
        ids, logps = torch.from_numpy(r.ids).long(), []
        for turn, (start, end) in enumerate(r.spans.tolist()):
            with torch.no_grad():
                logits = model_of(turn)(ids[None, :end]).logits[0, start - 1:-1].log_softmax(-1)
            logps.append(logits.gather(1, ids[start:end, None])[:, 0].numpy())
        assert np.abs(np.concatenate(logps) - r.logprobs).max() < 1e-4


# ---------------------------------------------------------------- two tables, signals, and weights

def jobs(count, length=12, seed=0):
    return [(prompt.row, Request(None, prompt.ids, seed + 10 * n, length))
            for n, prompt in enumerate(prompts(count))]


@pytest.mark.parametrize("name", ["hf", "vllm"])
def test_two_tables_on_one_engine_get_their_own_answers(name, request, folder, model_of, mesh):
    """Also if one of them takes the step that answers the other."""
    engine = request.getfixturevalue("vllm") if name == "vllm" else made("hf", folder, model_of)
    engine.max_seqs = 2                                         # of the plain engine
    plain = EpisodeSampler(SimpleNamespace(**SETTINGS), TOKENIZER, [TOKENIZER.eos_token_id])
    alone = [OpenEpisodes(plain, engine).play(jobs(4, length, seed)) for length, seed in ((12, 0), (6, 7))]
    tables = [OpenEpisodes(plain, engine) for _ in range(2)]
    tables[0].add("all", jobs(4, 12, 0))
    tables[1].add("all", jobs(4, 6, 7))
    found = [{}, {}]
    while not all(found):
        for i, table in enumerate(tables):
            found[i] |= table.step()
    for expected, rollouts in zip(alone, found):
        for r, again in zip(expected, rollouts["all"], strict=True):
            assert r.ids.tolist() == again.ids.tolist() and r.row == again.row
    assert not engine.versions and not engine.asked_by


@pytest.mark.parametrize("calls", [False, True])
def test_a_signal_ends_a_loop_over_steps(folder, model_of, mesh, games, calls):
    """Whatever the loop waits for, and whether it waits for the engine or for an environment."""
    engine = made("hf", folder, model_of, length=200)
    settings = SETTINGS | {"environment": f"{games}:Letters" if calls else "", "max_prompt_length": 80,
                           "call_workers": 2 * calls}
    table = OpenEpisodes(EpisodeSampler(SimpleNamespace(**settings), TOKENIZER, [TOKENIZER.eos_token_id]), engine)
    table.add("a", jobs(2))
    table.add("b", jobs(1))
    engine.signalled = True
    while not (complete := table.step()):
        pass
    assert complete == {"a": [], "b": []} and not table.groups
    assert table.play(jobs(2)) == []


@pytest.mark.parametrize("name", ["hf", "vllm"])
def test_weights_do_not_come_while_requests_are_unanswered(name, request, folder, model_of, mesh):
    """Unless the engine is meant to be in flight. Of vLLM they would be answered from the old keys."""
    engine = request.getfixturevalue("vllm") if name == "vllm" else made("hf", folder, model_of)
    engine.add(Request(0, PROMPT, 0, 20))
    if name == "vllm":
        engine.step()
    engine.in_flight = False
    try:
        with pytest.raises(RuntimeError, match="version 1 come while 1 requests are unanswered: finish or abort"):
            engine.switch(1)
        assert engine.version == 0
        (answer,) = finished(engine).values()
        assert answer.versions == ((0, 0),) and gap(as_rollout(answer), model_of) < 1e-4
        engine.switch(1)
        engine.add(Request(1, PROMPT, 0, 20))
        (answer,) = finished(engine).values()
        assert answer.versions == ((0, 1),) and gap(as_rollout(answer), model_of) < 1e-4
    finally:
        engine.in_flight = True


def test_vllm_says_so_if_its_cache_stays(vllm, monkeypatch):
    """reset_prefix_cache returns False where a request that this repository has not added is in flight."""
    monkeypatch.setattr(vllm.llm, "reset_prefix_cache", lambda: False)
    vllm.switch(1)
    monkeypatch.setattr(vllm, "in_flight", False)
    with pytest.raises(RuntimeError, match="keeps what the old weights computed"):
        vllm.switch(2)


# ---------------------------------------------------------------- groups that outlast a step

SAMPLING = SETTINGS | {"max_completion_length": 24, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0,
                       "seed": 0, "vllm_tensor_parallel_size": 1}


def samplers(engine):
    """One that may leave groups open, and one that may not."""
    settings = SimpleNamespace(**SAMPLING)
    both = [kind(settings, TOKENIZER, [TOKENIZER.eos_token_id]) for kind in (InFlightSampler, EpisodeSampler)]
    for sampler in both:
        sampler.engine = engine
    return both


def test_groups_go_on_in_the_next_step(vllm, model_of):
    """With the new weights, while held-out prompts are answered by these alone."""
    sample, plain = samplers(vllm)
    long, short, new = prompts(2), prompts(4)[2:], prompts(5)[4:]
    sample.begin(long, 2, ["a", "b"], max_tokens=40)
    sample.begin(short, 2, ["c", "d"], max_tokens=5)
    first = sample.until(1)
    assert [r.row for r in first] == [short[0].row] * 2 and [*sample.open] == ["a", "b", "d"]
    assert {r.versions for r in first} == {((0, 0),)}
    # Both were complete after the same step of the engine. This one waited for its turn.
    vllm.load_weights(vllm.incoming(1), 1)
    held_out = sample(short, 1, ["x", "y"], max_tokens=6)
    assert [r.versions for r in held_out] == [((0, 1),)] * 2
    sample.begin(new, 2, ["e"], max_tokens=60)
    later = sample.until(3)
    assert [r.row for r in later] == [p.row for p in (short[1], short[1], long[0], long[0], long[1], long[1])]
    assert [len(r.logprobs) for r in later[:2]] == [5] * 2 and [*sample.open] == ["e"]
    # Which of the others end by themselves depends on what this version of vLLM samples.
    assert all((len(r.logprobs) == 40) == (r.finish_reason == "length") for r in later[2:])
    assert max(len(r.logprobs) for r in later) == 40
    assert all(isinstance(r.completion, str) for r in later) == isinstance(long[0].row["prompt"], str)
    for r in first + held_out + later:
        assert gap(r, model_of) < 1e-4
    for r in later[2:]:
        assert [version for _, version in r.versions] == [0, 1] and r.versions[1][0] > 3
    assert len(later) == 6
    # Up to the new weights the tokens are those of a sampler that waits.
    sample.abort()
    vllm.switch(0)
    for r, expected in zip(later[2:], plain(long, 2, ["a", "b"], max_tokens=40), strict=True):
        end = r.versions[1][0]
        assert r.sampled_ids[:end].tolist() == expected.sampled_ids[:end].tolist()


def test_what_is_aborted_leaves_nothing_behind(vllm):
    sample, plain = samplers(vllm)
    expected = plain(prompts(3), 2, [*"abc"], max_tokens=12)
    sample.begin(prompts(3), 2, [*"xyz"], max_tokens=40)
    with pytest.raises(ValueError, match=r"until\(4\): only 3 groups are open"):
        sample.until(4)
    sample.episodes.step()
    sample.abort()
    assert not (sample.open or vllm.versions or vllm.asked_by or vllm.sampled_counts() or vllm.added)
    vllm.in_flight = False
    vllm.switch(0)                                              # no request is in flight
    vllm.in_flight = True
    sample.begin(prompts(3), 2, [*"abc"], max_tokens=12)
    again = sample.until(3)
    assert [r.ids.tolist() for r in again] == [r.ids.tolist() for r in expected]


def test_a_signal_while_groups_are_given_up_ends_the_run(folder, model_of, mesh):
    """Or the next weights would find their requests unanswered."""
    engine = made("hf", folder, model_of)
    engine.max_seqs = 1
    sample, _ = samplers(engine)
    sample.begin(prompts(2), 1, ["a", "b"])
    sample.until(1)
    engine.signalled, engine.stop_if_signalled = True, sys.exit
    with pytest.raises(SystemExit):
        sample.abort()


def test_an_environment_at_work_plays_no_other_episode_after_an_abort(folder, model_of, mesh, tmp_path):
    file = tmp_path / "slow.py"
    file.write_text("""
import threading
DONE, BEGUN, closed = threading.Event(), threading.Event(), []

class Slow:
    def reset(self, **row):
        pass

    def step(self, text):
        BEGUN.set()
        DONE.wait(10)
        return None, 1.0, True

    def close(self):
        closed.append(self)
""")
    settings = SimpleNamespace(**SETTINGS | {"environment": f"{file}:Slow", "call_workers": 2})
    player = EpisodeSampler(settings, TOKENIZER, [TOKENIZER.eos_token_id])
    module = sys.modules[type(player.idle[0]).__module__]
    engine = made("hf", folder, model_of, length=200)
    engine.max_seqs = 1
    table = OpenEpisodes(player, engine)
    table.add("all", jobs(2))
    while not module.BEGUN.wait(0.2):
        table.step()
    # One environment is at work, the other waits for the engine, or is at work as well.
    begun = time.monotonic()
    table.abort()
    assert time.monotonic() - begun < 5 and not (table.playing or table.groups or engine.versions)
    assert len(module.closed) + len(player.idle) == 2 and module.closed
    assert not {*module.closed} & {*player.idle} and len(player.opened) == len(player.idle)
    module.DONE.set()
    assert len(table.play(jobs(2))) == 2


def groups_of_ranks(folder):
    """Two steps on a rank of several, whose engine answers two requests at a time."""
    engine = made("hf", folder, lambda _: None)
    engine.max_seqs = 2
    sample, _ = samplers(engine)
    sample.begin(prompts(6), 2, [*"abcdef"])
    steps = [sample.until(3)]
    sample.begin(prompts(8)[6:], 2, [*"gh"])
    steps += [sample.until(4), sample(prompts(1), 1, ["held out"]), sample.until(1)]
    return [[(r.row["prompt"], r.ids.tolist()) for r in step] for step in steps], [*sample.open]


def test_ranks_agree_on_the_first_groups(folder, mesh, tmp_path):
    alone = groups_of_ranks(folder)
    first, second = on_ranks(2, tmp_path, groups_of_ranks, folder)
    assert alone[1] == first[1] == second[1] == []
    for step, expected in enumerate(alone[0]):
        parts = first[0][step], second[0][step]
        if step == 2:                                           # each rank has sampled for itself
            assert parts == (expected, expected)
            continue
        assert all(parts) or step == 3
        assert sorted(map(str, sum(parts, []))) == sorted(map(str, expected))


def test_no_other_run_opens_the_sampler(tmp_path):
    (tmp_path / "opens.py").write_text(
        "import sys\nimport rollout\nfrom options import episodes, placement\nfrom runtime import run\nassert 'options.in_flight' not in sys.modules\n")
    runs.forked(tmp_path / "log", tmp_path / "opens.py")
