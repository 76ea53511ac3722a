"""New weights in the middle of completions: which token is by which; and many groups at one table."""
import functools
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import data
from runs import load_rows, shut_down
import rollout
from episodes import Player, Table
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
                                       apart=True)
    engine.incoming = lambda version: [(name, p.detach().clone()) for name, p in
                                       model_of(version).named_parameters(remove_duplicate=False)]
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
    so_far = vllm.so_far()
    assert early.keys() == {2} and early[2].versions == ((0, 0),)
    # It takes vLLM a step to read the prompt, which gives the first token.
    assert so_far.keys() == {0, 1} and set(so_far.values()) <= {7, 8}
    vllm.switch(1)
    vllm.add(Request(3, PROMPT, 3, 40))
    assert not finished(vllm, steps=5)
    vllm.switch(2)
    late = finished(vllm)
    assert not vllm.so_far() and not vllm.versions
    for name in (0, 1):
        assert late[name].versions == ((0, 0), (so_far[name], 1), (so_far[name] + 5, 2))
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
    table = Table(Player(SimpleNamespace(**SETTINGS), TOKENIZER, vllm.eos_ids), vllm)
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
    player = Player(SimpleNamespace(**settings), TOKENIZER, [*range(0, 256, 8), TOKENIZER.eos_token_id])
    engine.eos_ids = torch.tensor(player.eos_ids)
    table = Table(player, engine)
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
