"""Agents: whose tokens are trained, how their episodes end, what they are refused, whole runs."""
import asyncio
import copy
import gc
import json
import math
import os
import re
import signal
import socket
import sys
import textwrap
import threading
import time
import urllib.error
import urllib.request
import weakref
import zlib
from queue import SimpleQueue
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from options import agents
import runs
from options.episodes import OpenEpisodes
from options.placement import staleness
from options.saved_rollouts import as_arrays, from_arrays
from rewards import load_scorer
from runtime.metrics import rollout_metrics
from runs import begin, finish, jobs, kept_rollouts, lines, refused, requests, with_defaults, without_times
from test_episodes import (ASSISTANT, END, ENDS, TOKENIZER, USER, Says, engine, games, hf, parts_of,  # noqa: F401
                           player as episode_player, prompts_for)
from test_many_ranks import gradient
from test_placement import figures
from test_survive import count_lines, wait_for

ASK = '''
import asyncio, json, time, urllib.error, urllib.request

def ask(base_url, api_key, messages, **body):
    """The answer of the policy as a message, or the error of the endpoint."""
    request = urllib.request.Request(
        base_url + "/chat/completions", json.dumps({"model": "policy", "messages": messages} | body).encode(),
        {"Authorization": f"Bearer {api_key}"})
    return json.load(urllib.request.urlopen(request))["choices"][0]["message"]

def user(text):
    return {"role": "user", "content": text}
'''


@pytest.fixture
def write(tmp_path):
    """Writes a file with an agent, which has ask and user, and returns its spec."""
    def written(body, name="agent.py"):
        (tmp_path / name).write_text(ASK + textwrap.dedent(body))
        return f"{tmp_path / name}:solve"
    return written


def player(agent, **settings):
    return episode_player("", agent=agent, max_turns=0, **{"max_completion_length": 5000} | settings)


def played(plays, texts, rows=({},), n=1):
    """The scored rollouts of episodes in which the policy says these texts."""
    scorer = load_scorer(plays.settings, plays, "cpu", torch.float32)
    rollouts = plays.play_jobs(Says(*texts), jobs(prompts_for(rows), n, [0] * len(rows),
                          plays.settings.max_completion_length, 1.0))
    scorer(rollouts)
    return rollouts


TALK = """
    def solve(base_url, api_key, row):
        messages = list(row["prompt"])
        for turn in range(3):
            messages.append(ask(base_url, api_key, messages))
            length = len(messages[-1]["content"])
            if length % 3 == 0 or turn == 2:
                return length / 10
            messages.append(user(f"{length}{row['answer']}"))
"""


# ---------------------------------------------------------------- tokens

def test_ids_and_spans_are_those_of_an_environment(engine, games, write):
    """32 agents at once; what an episode is does not depend on who plays it."""
    prompts = prompts_for([{"answer": "."}, {"answer": " more, please"}])
    both = [plays.play_jobs(engine, jobs(prompts, 16, [5, 90], 120, 0.8)) for plays in (
        episode_player(games, "Echo", eos_ids=ENDS), episode_player("", agent=write(TALK), max_turns=0,
                                                                    eos_ids=ENDS))]
    turns = [len(r.spans) for r in both[1]]
    assert {1, 2, 3} <= {*turns}
    for ours, theirs in zip(*both, strict=True):
        assert np.array_equal(ours.ids, theirs.ids) and np.array_equal(ours.spans, theirs.spans)
        assert np.abs(ours.logprobs - theirs.logprobs).max() < 1e-5
        assert ours.completion == theirs.completion and ours.row["prompt"] == theirs.row["prompt"]
        assert theirs.counts["requests"] == len(theirs.spans) and theirs.counts["rows"] == 1
        assert theirs.counts["untrained_tokens"] == 0


def test_a_stop_string_ends_an_agents_turn(games, write):
    prompts, texts = prompts_for([{"answer": "."}]), ["ab###", "cde###", "f###"]
    plays = [episode_player(games, "Echo", stop="b##,###"),
             episode_player("", agent=write(TALK), max_turns=0, stop="b##,###")]
    both = [one.play_jobs(Says(texts), jobs(prompts, 1, [0], 5000, 1.0))[0] for one in plays]
    assert both[0].completion == both[1].completion and both[0].completion[0]["content"] == "a"
    assert both[0].ids.tolist() == both[1].ids.tolist() and both[0].spans.tolist() == both[1].spans.tolist()
    assert len(both[1].spans) == 2 and both[1].finish_reason == "stop"


def test_calls_of_tools_are_those_of_an_environment(write):
    agent = write("""
        import ast
        from environments.calculator import value
        def solve(base_url, api_key, row):
            messages, ids = list(row["prompt"]), []
            while True:
                said = ask(base_url, api_key, messages, tools=row["tools"])
                calls = said.get("tool_calls") or []
                ids += [call["id"] for call in calls]
                # As frameworks do, in other JSON and without what is empty.
                messages.append({"role": "assistant", "content": said["content"] or None, "tool_calls": [
                    call | {"function": call["function"] | {"arguments": json.dumps(
                        json.loads(call["function"]["arguments"]), indent=1)}} for call in calls] or None})
                if not calls:
                    return {"calls": len(ids), "own": len({*ids})}
                for call in calls:
                    expression = json.loads(call["function"]["arguments"])["expression"]
                    result = str(value(ast.parse(expression, mode="eval").body))
                    messages.append({"role": "tool", "tool_call_id": call["id"],
                                     "content": [{"type": "text", "text": result}]})
    """)
    call = '<tool_call>{"name": "calculate", "arguments": {"expression": "%s"}}</tool_call>'
    texts = [f"so {call % '2*3'}{call % '1+1'}<|end|>", f"{call % '6+2'}<|end|>", "Answer: 8<|end|>"]
    theirs = episode_player("environments/calculator.py", "Calculator", max_turns=0,
                            max_completion_length=5000)
    prompts = prompts_for([{"tools": theirs.tools}], theirs.tools)
    (expected,) = theirs.play_jobs(Says(texts), jobs(prompts, 1, [0], 5000, 1.0))
    (r,) = played(player(agent), [texts], [{"tools": theirs.tools}])
    assert np.array_equal(r.ids, expected.ids) and np.array_equal(r.spans, expected.spans)
    assert r.score == 6 and r.parts == {"calls": 3, "own": 3} and r.rewards == {len(r.logprobs) - 1: 6.0}
    assert [one["role"] for one in r.completion] == [one["role"] for one in expected.completion]
    assert r.counts["calls"] == 3 and r.counts["failures"] == 0


def test_a_call_that_cannot_be_made_is_text(write):
    """As is one that was cut off; an agent's framework may not know what to do with it."""
    agent = write("""
        TOOLS = [{"type": "function", "function": {"name": "look", "description": "Looks."}}]
        def solve(base_url, api_key, row):
            said = ask(base_url, api_key, row["prompt"], tools=TOOLS)
            return float(said["content"] == row["text"] and not said["tool_calls"])
    """)
    text = '<tool_call>{"name": "leap", "arguments": {}}</tool_call>'
    (r,) = played(player(agent), [[text + "<|end|>"]], [{"text": text}])
    assert r.score == 1 and r.counts["calls"] == r.counts["failures"] == 1
    (r,) = played(player(agent, max_completion_length=9), [[text]], [{"text": text[:9]}])
    assert r.score == 1 and r.finish_reason == "length"


def rows_of(r):
    """For each row of a rollout its ids, its spans in them, and its logprobs."""
    ends = [*r.sequence_starts[1:].tolist(), [len(r.ids), len(r.logprobs), 0]]
    for (start, first, _), (end, last, _) in zip(r.sequence_starts.tolist(), ends):
        own = [span for span in r.spans if start <= span[0] < end]
        yield r.ids[start:end], [tuple(span - start) for span in own], r.logprobs[first:last]


def texts_of(r):
    """For each row what was sampled in it."""
    return [[TOKENIZER.decode(ids[start:end]) for start, end in spans] for ids, spans, _ in rows_of(r)]


def test_an_agent_that_branches_trains_all_its_rows(hf, folder, write):
    """Logprobs are those of full forwards of each row. A turn that two rows share is sampled in the first."""
    agent = write("""
        def solve(base_url, api_key, row):
            first = row["prompt"] + [ask(base_url, api_key, row["prompt"])]
            same = ask(base_url, api_key, row["prompt"])
            ask(base_url, api_key, first + [user("left")])
            right = first + [user("right")]
            right.append(ask(base_url, api_key, right))
            right += [user("on")]
            said = ask(base_url, api_key, right)
            return float(same["content"] != first[-1]["content"])
    """)
    plays = episode_player("", agent=agent, max_turns=0, eos_ids=ENDS)
    scorer = load_scorer(plays.settings, plays, "cpu", torch.float32)
    rollouts = plays.play_jobs(hf, jobs(prompts_for([{}]), 8, [5], 120, 0.8))
    scorer(rollouts)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert any(r.score == 1 for r in rollouts)                  # the same request again has another answer
    for r in rollouts:
        assert r.counts["requests"] == 5 and r.counts["rows"] == 3 and r.counts["untrained_tokens"] == 0
        assert r.finish_reason == "stop" and r.versions[0] == (0, 0) and len(r.spans) == 5
        same, left, right = rows_of(r)
        assert [len(spans) for _, spans, _ in (same, left, right)] == [1, 2, 2]
        if r.score == 1:
            assert "left" in TOKENIZER.decode(left[0]) and "right" in TOKENIZER.decode(right[0])
        _, end = left[1][0]                                     # of the turn that both rows have
        assert np.array_equal(right[0][:end], left[0][:end]) and right[1][0][0] > end
        assert len(r.completion) in (3, 5) and r.row["prompt"][0]["content"] == "Go."
        for ids, spans, logprobs in (same, left, right):
            assert spans[-1][1] == len(ids)
            with torch.no_grad():
                logps = (model(torch.from_numpy(ids).long()[None]).logits[0] / 0.8).log_softmax(-1)
            places = np.concatenate([np.arange(*span) for span in spans])
            expected = logps[places - 1, ids[places].astype(int)]
            assert (expected - torch.from_numpy(logprobs)).abs().max() < 1e-4


def test_rows_come_in_the_order_of_their_last_answers(write):
    """And a turn that two share is sampled in the one that ended first, whichever began first."""
    agent = write("""
        def solve(base_url, api_key, row):
            first = row["prompt"] + [ask(base_url, api_key, row["prompt"])]
            left = first + [user("l")]
            left += [ask(base_url, api_key, left), user("again")]
            ask(base_url, api_key, [user("aside")])
            ask(base_url, api_key, first + [user("r")])
            left += [ask(base_url, api_key, left), user("x")]
            ask(base_url, api_key, left[:-3] + [user("other")])
            return 1.0
    """)
    (r,) = played(player(agent), [[f"{text}<|end|>" for text in ("a", "bb", "c", "dd", "eeeee", "f")]])
    assert texts_of(r) == [["c<|end|>"], ["a<|end|>", "dd<|end|>"], ["bb<|end|>", "eeeee<|end|>"], ["f<|end|>"]]
    assert r.counts["rows"] == 4 and r.counts["untrained_tokens"] == 0 and r.lengths_of_sequences == [2, 5, 9, 2]
    assert [m["content"] for m in r.completion] == ["a", "l", "bb", "again", "eeeee"]       # of the longest row
    assert r.rewards == {len(r.logprobs) - 1: 1.0}
    # The tail of a row counts turns that an earlier row has as well.
    prompts = [len(TOKENIZER(f"<|user|>{text}<|end|><|assistant|>").input_ids) for text in ("aside", *["Go."] * 3)]
    assert r.sequence_starts[:, 2].tolist() == prompts
    tails = [len(ids) - prompt for (ids, _, _), prompt in zip(rows_of(r), prompts)]
    assert r.longest_tail == max(tails) == tails[2] == len(TOKENIZER(
        "a<|end|><|user|>l<|end|><|assistant|>bb<|end|><|user|>again<|end|><|assistant|>eeeee<|end|>").input_ids)
    ids = [TOKENIZER.decode(ids) for ids, _, _ in rows_of(r)]
    shared = "<|user|>Go.<|end|><|assistant|>a<|end|><|user|>"
    assert ids[1].endswith(f"{shared}r<|end|><|assistant|>dd<|end|>")
    assert ids[3].endswith(f"{shared}l<|end|><|assistant|>bb<|end|><|user|>other<|end|><|assistant|>f<|end|>")
    r.ids[r.places] = 0                                         # what is left was never sampled, or only before
    assert "eeeee" not in TOKENIZER.decode(r.ids) and TOKENIZER.decode(r.ids).count("a<|end|>") == 2


def test_versions_of_rows_are_those_of_their_tokens(write):
    """Weights that come in the middle of turns; the second row has the shared turn's version no more."""
    agent = write("""
        def solve(base_url, api_key, row):
            first = row["prompt"] + [ask(base_url, api_key, row["prompt"])]
            ask(base_url, api_key, first + [user("l")])
            ask(base_url, api_key, first + [user("r")])
    """)

    class Ages(Says):
        def step(self):
            self.version = self.version + 1
            return [answer._replace(versions=((0, self.version), (1, self.version + 10)))
                    for answer in super().step()]

    (r,) = player(agent).play_jobs(Ages(["a<|end|>", "bb<|end|>", "c<|end|>"]), jobs(prompts_for([{}]), 1, [0], 5000, 1.0))
    assert r.sequence_starts[:, 1].tolist() == [0, 5]
    assert r.versions == ((0, 1), (1, 11), (2, 2), (3, 12), (5, 3), (6, 13))
    assert staleness([r], 20) == {"async/staleness/max": 19, "async/staleness/mean": pytest.approx(
        (19 + 9 + 18 + 8 + 8 + 17 + 7) / 7)}


def test_another_history_begins_another_row(write):
    """An agent that compacts what was said, one with other tools, and one that says what nobody sampled."""
    agent = write("""
        TOOLS = [{"type": "function", "function": {"name": "look", "description": "Looks."}}]
        def solve(base_url, api_key, row):
            said = ask(base_url, api_key, row["prompt"])
            ask(base_url, api_key, [user("In short: " + said["content"])])
            ask(base_url, api_key, row["prompt"] + [said, user("Go on.")], tools=TOOLS)
            ask(base_url, api_key, row["prompt"] + [{"role": "assistant", "content": "made up"}, user("?")])
    """)
    (r,) = played(player(agent), [["the longest of all<|end|>", "b<|end|>", "c<|end|>", "d<|end|>"]])
    assert texts_of(r) == [["the longest of all<|end|>"], ["b<|end|>"], ["c<|end|>"], ["d<|end|>"]]
    assert [m["content"] for m in r.completion] == ["the longest of all"] and r.counts["rows"] == 4
    assert r.counts["untrained_tokens"] == 0 and math.isnan(r.score) and r.parts == {}
    as_saved = from_arrays(as_arrays([r]))[0]
    assert np.array_equal(as_saved.sequence_starts, r.sequence_starts) and texts_of(as_saved) == texts_of(r)


def test_a_refused_continuation_did_not_happen(write):
    """What follows the answer after it is still the first that does: no new row, and no other seed."""
    agent = write("""
        def solve(base_url, api_key, row):
            messages = row["prompt"] + [ask(base_url, api_key, row["prompt"])]
            for text in row["refused"]:
                try:
                    ask(base_url, api_key, messages + [user(text)])
                except urllib.error.HTTPError as error:
                    assert "maximum context length" in json.load(error)["error"]["message"]
            ask(base_url, api_key, messages + [user("short")])
    """)
    says = Says(["a<|end|>", "b<|end|>"], ["a<|end|>", "b<|end|>"])
    rows = prompts_for([{"refused": []}, {"refused": ["x" * 300] * 2}])
    both = player(agent, max_completion_length=60).play_jobs(says, jobs(rows, 1, [7, 7], 60, 1.0))
    for r in both:
        assert r.counts["rows"] == 1 and r.counts["untrained_tokens"] == 0, r.counts
        assert r.finish_reason == "stop"
        assert parts_of(r)[1::2] == ["a<|end|>", "b<|end|>"]
    assert np.array_equal(both[0].ids, both[1].ids)
    assert len({request.seed for request in says.asked}) == 2 and len(says.asked) == 4


def test_a_message_is_read_once_per_request(write, monkeypatch):
    """However many rows there are, and none shares with the row that it continues what grows."""
    agent = write("""
        def solve(base_url, api_key, row):
            messages = list(row["prompt"])
            for turn in range(20):
                messages += [ask(base_url, api_key, messages), user(str(turn))]
    """)
    read, for_template = [], agents.for_template
    monkeypatch.setattr(agents, "for_template", lambda messages: read.extend(messages) or for_template(messages))
    plays = player(agent)
    (r,) = played(plays, [[f"{turn}<|end|>" for turn in range(20)]])
    assert r.counts["rows"] == 1 and len(r.spans) == 20 and len(r.completion) == 39
    assert len(read) == sum(range(1, 40, 2)) + 20               # those of each request, and each answer


def test_an_opponent_is_the_policy_and_is_not_trained(write):
    agent = write("""
        def solve(base_url, api_key, row):
            numbers = {}
            for name in ("policy", "opponent"):
                rules = [user(f"You are the {name}. Name a number.")]
                numbers[name] = ask(base_url, api_key, rules, model=name)["content"]
            return float(int(numbers["policy"]) > int(numbers["opponent"]))
    """)
    won, lost = played(player(agent), [["17<|end|>", "9<|end|>"], ["1<|end|>", "12345<|end|>"]], n=2)
    assert (won.score, lost.score) == (1, 0)
    for r, said, other in ((won, "17", 2), (lost, "1", 6)):
        assert parts_of(r)[1:] == [said + "<|end|>"] and "the policy" in TOKENIZER.decode(r.ids)
        assert r.counts["requests"] == 2 and r.counts["rows"] == 1 and r.counts["untrained_tokens"] == other


def test_a_row_has_the_name_that_its_requests_ask_for(write):
    """The rows stand in the order of their last answers, so their places do not say who is who."""
    agent = write("""
        def solve(base_url, api_key, row):
            # Both players see the same words.
            said = {name: [user("Bid."), ask(base_url, api_key, [user("Bid.")], model=name)] for name in "AB"}
            ask(base_url, api_key, [*said["A"], user("Again.")], model="A")
            if row["order"] == "AB":
                ask(base_url, api_key, [*said["B"], user("Again.")], model="B")
    """)
    texts = ["1<|end|>", "1<|end|>", "2<|end|>", "3<|end|>"]
    for order, expected in (("AB", [("A", 2), ("B", 2)]), ("BA", [("B", 1), ("A", 2)])):
        (r,) = played(player(agent), [texts], [{"order": order}])
        assert [*zip(r.sequence_names, (len(spans) for _, spans, _ in rows_of(r)))] == expected
    (again,) = from_arrays(as_arrays([r]))
    assert again.sequence_names == ["B", "A"]


def test_text_that_looks_like_control_tokens_is_text(write):
    agent = write("""
        def solve(base_url, api_key, row):
            messages = [{"role": "system", "content": "Be kind."}, user("a<|end|><|assistant|>b")]
            messages.append(ask(base_url, api_key, messages))
            ask(base_url, api_key, messages + [user("c<|end|><|assistant|>")])
            ask(base_url, api_key, [user("?"), {"role": "assistant", "content": "<|end|>", "tool_calls": [
                {"id": "<|end|>", "function": {"name": "<|end|>", "arguments": '{"a": "<|user|>"}'}}]}, {
                "role": "tool", "tool_call_id": "<|end|>", "content": "<|end|>"}])
            # Some control tokens have quotes, as here <|"|>.
            quoted = {"role": "assistant", "content": '<|"|>', "tool_calls": [
                {"id": "a", "function": {"name": '<|"|>', "arguments": {"<|end|>": ['<|user|>', '<|"|>']}}}]}
            messages = [user('<|"|>'), quoted, user("?")]
            messages.append(ask(base_url, api_key, messages))
            ask(base_url, api_key, messages + [quoted, user('<|"|>')])
            return 1
    """)
    tokenizer = copy.deepcopy(TOKENIZER)
    tokenizer.add_tokens(['<|"|>'])
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "(call.function | tojson)", "(call.function.name ~ (call.function.arguments | tojson))")
    plays = player(agent, max_prompt_length=200, tokenizer=tokenizer)
    says = Says([f"{text}<|end|>" for text in ("x", "yy", "z", "t", "u")])
    (r,) = plays.play_jobs(says, jobs(prompts_for([{}], tokenizer=tokenizer), 1, [0], 5000, 1.0))
    (first, _, _), (second, _, _), (third, _, _) = rows_of(r)
    kinds = [token for token in third.tolist() if token in (USER, ASSISTANT, END, len(TOKENIZER))]
    asked, said = [USER, END], [ASSISTANT, END]
    assert kinds == asked + said + asked + said + said + asked + said
    assert TOKENIZER.decode(third).count('<|"|>') == 6          # and twice in JSON, which escapes the quote
    kinds = [token for token in first.tolist() if token in (USER, ASSISTANT, END)]
    assert kinds == [END, USER, END, ASSISTANT, END, USER, END, ASSISTANT, END]
    assert "c<|end|><|assistant|>" in TOKENIZER.decode(first)
    kinds = [token for token in second.tolist() if token in (USER, ASSISTANT, END)]
    assert kinds == [USER, END, ASSISTANT, END] * 2 and TOKENIZER.decode(second).count("<|end|>") > 4


def test_results_of_parallel_calls_belong_to_their_calls(write):
    """In any order, and whatever ids the agent gives them; a template that writes ids and names shows it."""
    agent = write("""
        def solve(base_url, api_key, row):
            said = ask(base_url, api_key, row["prompt"], tools=row["tools"])
            calls = [call | {"id": row["ids"][i]} for i, call in enumerate(said["tool_calls"])]
            results = [{"role": "tool", "tool_call_id": row["ids"][i], "content": f"result {i}"} for i in row["order"]]
            last = ask(base_url, api_key, [*row["prompt"], {"role": "assistant", "tool_calls": calls}, *results],
                       tools=row["tools"])
            return float(last["content"] == "done")
    """)
    tools = [{"type": "function", "function": {"name": name, "description": "?", "parameters": {
        "type": "object", "properties": {}}}} for name in ("look", "leap", "wait")]
    text = "".join(f'<tool_call>{{"name": "{name}", "arguments": {{}}}}</tool_call>' for name in ("leap", "look", "leap"))
    tokenizer = copy.deepcopy(TOKENIZER)
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "message.content", "(message.name ~ '/' ~ message.tool_call_id ~ ': ' if message.role == 'tool' else '') + message.content")
    for ids, order in ((["x", "y", "z"], [0, 1, 2]), (["call00007", "call00000", "call00001"], [2, 0, 1])):
        rows = [{"tools": tools, "ids": ids, "order": order}]
        plays = player(agent, tokenizer=tokenizer)
        (r,) = plays.play_jobs(Says([text + "<|end|>", "done<|end|>"]), jobs(prompts_for(rows, tokenizer=tokenizer), 1, [0], 5000, 1.0))
        assert r.counts["rows"] == 1 and len(r.spans) == 2
        written = parts_of(r)[2]
        places = [written.index(f"{('leap', 'look', 'leap')[i]}/call0000{i}: result {i}") for i in order]
        assert places == sorted(places)
        assert [m["tool_call_id"] for m in r.completion if m["role"] == "tool"] == [f"call0000{i}" for i in order]


IMPATIENT = """
    import socket, threading, zlib
    leave = threading.Event()
    def solve(base_url, api_key, row):
        host, port = base_url.split("/")[2].split(":")
        body = json.dumps({"messages": row["prompt"]}).encode()
        with socket.create_connection((host, int(port))) as client:
            client.sendall(b"POST /v1/chat/completions HTTP/1.1\\r\\nHost: x\\r\\nAuthorization: Bearer %b\\r\\n"
                           b"Content-Length: %d\\r\\n\\r\\n%b" % (api_key.encode(), len(body), body))
            leave.wait(20)
        return zlib.crc32(ask(base_url, api_key, row["prompt"])["content"].encode())
"""


@pytest.mark.parametrize("workers", [0, 8])
def test_an_answer_that_nobody_heard_is_in_no_row(engine, write, monkeypatch, workers):
    """Its request ends when the client leaves, and the retry has another seed and is all that is trained."""
    plays, step, aborted = player(write(IMPATIENT), eos_ids=ENDS, call_workers=workers), engine.step, []
    scorer = load_scorer(plays.settings, plays, "cpu", torch.float32)
    leave = plays.make.__globals__["leave"]

    def late_step():
        """Samples nothing until all have asked, and then have left, as the endpoint's thread has noticed."""
        asking = [session.episode.asking for session in agents.SESSIONS.values()]
        if not leave.is_set() and None in asking:
            time.sleep(0.01)
            return []
        if not leave.is_set():
            leave.set()
            assert until(lambda: all(question.future.cancelled() for question in asking))
        return step()

    monkeypatch.setattr(engine, "step", late_step)
    monkeypatch.setattr(engine, "abort", lambda names, abort=engine.abort: aborted.extend(names) or abort(names))
    before = next(engine.numbers) + 1
    rollouts = plays.play_jobs(engine, jobs(prompts_for([{}]), 8, [5], 60, 1.0))
    scorer(rollouts)
    for r in rollouts:
        assert len(r.spans) == r.counts["requests"] == r.counts["rows"] == 1 and r.counts["untrained_tokens"] == 0
        assert zlib.crc32(r.completion[0]["content"].encode()) == r.parts["solve"] and r.finish_reason != "error"
    assert not engine.added and not engine.versions
    if engine.name == "vllm":
        assert {name - before for name in aborted} == {*range(8)} and not engine.llm.llm_engine.has_unfinished_requests()
    monkeypatch.undo()
    first = engine.generate(requests([prompts_for([{}])[0].ids], 8, [5], 60, 1.0))
    others = [r for r, alone in zip(rollouts, first) if not np.array_equal(r.ids, alone.ids)]
    assert len(others) >= 6                                     # two short answers may be the same by chance


# ---------------------------------------------------------------- how episodes end

BROKEN = """
    def solve(base_url, api_key, row):
        if row["how"] == "never":
            return 1.0
        ask(base_url, api_key, row["prompt"])
        if row["how"] == "raise":
            raise KeyError("lost")
        if row["how"] == "exit":
            raise SystemExit(0)
        if row["how"] == "hang":
            time.sleep(60)
        return row["returned"]
"""


@pytest.mark.parametrize("workers", [0, 4])
def test_an_agent_that_fails_costs_its_episode(write, workers):
    hows = ["raise", "exit", "hang", "never", "fine"]
    rollouts = played(player(write(BROKEN), call_timeout=1.0, call_workers=workers), [["x<|end|>"]] * 5,
                      [{"how": how, "returned": 0.5} for how in hows])
    assert [r.finish_reason for r in rollouts] == ["error"] * 4 + ["stop"]
    assert all(math.isnan(r.score) for r in rollouts[:4]) and rollouts[4].score == 0.5
    for r, told in zip(rollouts, (
            ":solve, in turn 1: raised KeyError: ", "raised SystemExit", "call_timeout=1 seconds",
            ":solve, before its first turn: never asked the policy")):
        assert told in r.counts["problem"]
        assert len(r.spans) == 1 and len(r.logprobs) == 2
    figures = rollout_metrics(rollouts, 5, lambda scores, n: torch.zeros(1), 1)
    assert figures["rewards/unscored"] == 4 and figures["episodes/ended/error"] == 0.8
    assert figures["episodes/requests"] == 0.8 and figures["rewards/solve/mean"] == 0.5


@pytest.mark.parametrize("returned, score, parts", [
    (None, math.nan, {}), (True, 1.0, {"solve": 1.0}), ({"a": 1, "b": 0.5}, 1.5, {"a": 1.0, "b": 0.5}),
    ({"score": 2, "seen": 3}, 2.0, {"score": 2.0, "seen": 3.0})])
def test_the_score_is_what_the_agent_returns(write, returned, score, parts):
    (r,) = played(player(write(BROKEN)), [["x<|end|>"]], [{"how": "", "returned": returned}])
    assert r.parts == parts and (r.score == score or math.isnan(score) and math.isnan(r.score))


def test_what_is_no_score_stops_the_run(write):
    with pytest.raises(ValueError, match="reward solve returned 'good'"):
        played(player(write(BROKEN)), [["x<|end|>"]], [{"how": "", "returned": "good"}])


def test_a_reward_is_added(write, tmp_path):
    (tmp_path / "rewards.py").write_text("def brief(completions, **_):\n    return [-len(completions[0])]\n")
    plays = player(write(BROKEN), reward=f"{tmp_path}/rewards.py:brief", call_timeout=60.0)
    (r,) = played(plays, [["x<|end|>"]], [{"how": "", "returned": 3}])
    assert r.parts == {"solve": 3.0, "brief": -1.0} and r.score == 2


def test_a_full_row(write):
    """The answer that fills a row is cut off, and the next one is refused, which an agent may catch."""
    agent = write("""
        def solve(base_url, api_key, row):
            messages = row["prompt"] + [ask(base_url, api_key, row["prompt"])]
            try:
                ask(base_url, api_key, messages + [user("Go on.")])
            except urllib.error.HTTPError as error:
                text = json.load(error)["error"]["message"]
                return float("maximum context length is 64 + 3 tokens" in text)
    """)
    (r,) = played(player(agent, max_completion_length=3), [["abcdefgh"]])
    assert r.finish_reason == "length" and r.score == 1 and len(r.logprobs) == 3


CUTS = """
    def ask_or_fail(*asks, **body):
        try:
            return ask(*asks, **body)
        except urllib.error.HTTPError as error:
            assert "maximum context length" in json.load(error)["error"]["message"]
            return {"role": "assistant", "content": ""}

    def solve(base_url, api_key, row):
        asks, heard = (base_url, api_key), []
        for name, messages in row["asks"]:
            heard.append(ask_or_fail(*asks, [heard[m] if isinstance(m, int) else user(m) for m in messages], model=name))
"""
LONG = "x" * 300


@pytest.mark.parametrize("asks, texts, finish_reason", [
    ([("policy", ["a"])], ["b<|end|>"], "stop"),
    ([("policy", ["a"]), ("policy", ["c"])], ["b" * 80, "d<|end|>"], "length"),
    # The row that is cut off is the shorter one, because what was said in it takes room.
    ([("policy", ["a"]), ("policy", ["a", 0, "x" * 20]), ("policy", ["c"])],
     ["b<|end|>", "d" * 80, "e" * 50 + "<|end|>"], "length"),
    ([("policy", ["c"]), ("policy", ["a"]), ("policy", ["a", 1, "x" * 20])],
     ["e" * 50 + "<|end|>", "b<|end|>", "d" * 80], "length"),
    ([("policy", ["a"]), ("policy", ["a", 0, LONG]), ("policy", ["c"])], ["b<|end|>", "longer<|end|>"], "length"),
    ([("policy", ["a"]), ("policy", ["a", 0, LONG]), ("policy", ["a", 0, "c"])], ["b<|end|>", "c<|end|>"], "stop"),
    ([("policy", ["a"]), ("policy", ["a", 0, "c"]), ("policy", ["a", 0, LONG])], ["b<|end|>", "c<|end|>"], "stop"),
    ([("policy", ["a"]), ("policy", [LONG]), ("policy", ["c"])], ["b<|end|>", "c<|end|>"], "stop"),
    ([("policy", ["a"]), ("opponent", ["a"]), ("opponent", ["a", 1, LONG])], ["b<|end|>", "c<|end|>"], "stop"),
    ([("policy", ["a"]), ("opponent", [LONG])], ["b<|end|>"], "stop"),
    ([("policy", ["a"]), ("opponent", ["a"])], ["b<|end|>", "c" * 80], "stop")])
def test_an_episode_is_cut_off_if_any_of_its_rows_is(write, asks, texts, finish_reason):
    """A refused continuation counts if nothing else continued the row."""
    (r,) = played(player(write(CUTS), max_completion_length=60, max_prompt_length=100), [texts], [{"asks": asks}])
    assert not r.counts.get("problem") and r.finish_reason == finish_reason, r.counts
    # rollout.text_of takes the last token of an episode that has stopped for an end token.
    assert finish_reason != "stop" or all(ids[-1] == END for ids, _, _ in rows_of(r))


# ---------------------------------------------------------------- the endpoint

def test_what_is_read_and_what_is_refused(write, capsys):
    agent = write("""
        def refused(*arguments, **body):
            try:
                ask(*arguments, **body)
            except urllib.error.HTTPError as error:
                return [error.code, json.load(error)["error"]["message"]]

        def solve(base_url, api_key, row):
            asks, hi = (base_url, api_key), [user("hi")]
            told = [refused(*asks, hi, n=2), refused(*asks, hi, response_format={"type": "json_object"}),
                    refused(*asks, hi, tool_choice="required"), refused(*asks, []), refused(*asks, "hi"),
                    refused(*asks, [{"role": "god", "content": "x"}]), refused(*asks, [{}]),
                    refused(*asks, [user([{"type": "image_url", "image_url": {"url": "data:"}}])]),
                    refused(*asks, hi, tools=[{"type": "function"}]),
                    refused(*asks, [user("x" * 300)]), refused(base_url, "other", hi),
                    refused(*asks, [user("[" * 10 ** 5)], extra=json.loads("[" * 500 + "]" * 500))]
            ask(*asks, [{"role": "assistant", "tool_calls": [{"function": {"name": "x", "arguments": text}}]}
                        for text in ("[" * 5000, "{")] + hi)
            try:
                ask(*asks, [user("x" * 5 * 10 ** 6)])
            except (urllib.error.HTTPError, OSError) as error:
                told.append([getattr(error, "code", 413), ""])
            own = {"Authorization": f"Bearer {api_key}"}
            request = urllib.request.Request(base_url + "/chat/completions", json.dumps({
                "model": "gpt-4o", "messages": hi, "stream": True, "temperature": 0, "max_tokens": 1,
            }).encode(), own)
            chunk, done = urllib.request.urlopen(request).read().decode().strip().split("\\n\\n")
            said = json.loads(chunk.removeprefix("data: "))
            ask(*asks, hi, temperature=0.5, max_tokens=5)
            open(row["file"], "w").write(json.dumps([told, said, done]))
    """)
    file = agent.rpartition("/")[0] + "/told.json"
    texts = ["<|end|>", "abc<|end|>", "d<|end|>"]
    (r,) = played(player(agent, max_prompt_length=200), [texts], [{"file": file}])
    assert not r.counts.get("problem"), r.counts
    told, said, done = json.load(open(file))
    codes = [code for code, _ in told]
    assert codes == [400] * 10 + [401, 400, 413], told
    assert told[0][1] == "ValueError: n cannot be 2" and "maximum context length" in told[9][1]
    assert done == "data: [DONE]"
    assert said["object"] == "chat.completion.chunk" and said["choices"][0] == {
        "index": 0, "finish_reason": "stop",
        "delta": {"role": "assistant", "content": "abc", "tool_calls": []}}
    assert said["usage"]["completion_tokens"] == 4
    output = capsys.readouterr().out
    assert output.count("replace these fields") == 2
    assert "extra" in output and "max_tokens temperature" in output


@pytest.mark.parametrize("agent, message", [
    ("ask(base_url, api_key, [user('hi')], n=2)", "raised HTTPError: HTTP Error 400: Bad Request; its last refused "
     "request: ValueError: n cannot be 2"),
    ("""try:
                ask(base_url, api_key, [user('x' * 300)])
            except urllib.error.HTTPError:
                return 0.0""", "never asked the policy, or did not wait for an answer; its last refused request: "
     "ValueError: the maximum context length is"),
    ("raise KeyError('x')", "raised KeyError: 'x'; the row is")])
def test_the_console_says_why_a_request_was_refused(write, agent, message):
    (r,) = played(player(write(f"""
        def solve(base_url, api_key, row):
            {agent}
    """), max_prompt_length=100), [["abc<|end|>"]])
    assert message in r.counts["problem"]


def test_another_episodes_key_and_sockets_that_never_close(write):
    """A key opens its own episode, also from elsewhere, and no other; what listens is on 127.0.0.1."""
    agent = write("""
        import socket
        keys = []
        def solve(base_url, api_key, row):
            keys.append(api_key)
            host, port = base_url.split("/")[2].split(":")
            for text in (b"", b"POST /v1/chat/completions HTTP/1.1\\r\\nHost: x\\r\\nContent-Length: 99\\r\\n\\r\\n{"):
                held = socket.create_connection((host, int(port)))
                held.sendall(text)
                keys.append(held)
            assert b" 401 " in held.recv(100)                       # what has no key is not read
            said = ask(base_url, api_key, row["prompt"])["content"]
            old = [key for key in keys if isinstance(key, str) and key != api_key]
            try:
                ask(base_url, old[0], row["prompt"])
            except urllib.error.HTTPError as error:
                return float(error.code == 401)
            return len(said)
    """)
    plays = player(agent, max_environments=1)
    first, second = played(plays, [["abc<|end|>"], ["d<|end|>"]], n=2)
    assert parts_of(first)[1:] == ["abc<|end|>"] and parts_of(second)[1:] == ["d<|end|>"]
    assert second.score == 1.0 and agents.SESSIONS == {}
    assert agents.start().startswith("http://127.0.0.1:")
    port = int(agents.start().split(":")[2].split("/")[0])
    with pytest.raises(OSError):                                # it listens on one address
        socket.create_connection(("127.0.0.2", port), timeout=2)


def until(condition):
    """Whether it comes true within ten seconds."""
    end = time.monotonic() + 10
    while not (true := condition()) and time.monotonic() < end:
        time.sleep(0.01)
    return true


def test_a_request_of_an_episode_that_has_ended_is_refused(write):
    """One that waits when the agent returns, and one of which half has come; neither keeps the episode."""
    agent = write("""
        import threading
        go, told = threading.Event(), []
        def solve(base_url, api_key, row):
            def first():
                told.append(ask(base_url, api_key, row["prompt"])["content"])
            threading.Thread(target=first, daemon=True).start()
            go.wait(20)
            return 1.0
    """)
    plays = player(agent)
    its, found = plays.make.__globals__, {}
    address = "127.0.0.1", int(agents.start().split(":")[2].split("/")[0])

    def second(key):
        try:
            its["ask"](agents.start(), key, [its["user"]("b")])
        except urllib.error.HTTPError as error:
            found["code"], found["told"] = error.code, json.load(error)["error"]["message"]

    class Late(Says):
        def step(self):
            (key, episode), = agents.SESSIONS.items()
            found["episode"] = weakref.ref(episode)
            found["half"] = socket.create_connection(address)
            found["half"].sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n"
                                  b"Authorization: Bearer %b\r\n\r\n{" % key.encode())
            its["go"].set()
            assert until(lambda: episode.mail.qsize() == 1)     # what the agent returned
            found["second"] = threading.Thread(target=second, args=(key,), daemon=True)
            found["second"].start()
            assert until(lambda: episode.mail.qsize() == 2)
            return super().step()

    (r,) = plays.play_jobs(Late(["abc<|end|>"]), jobs(prompts_for([{}]), 1, [0], 5000, 1.0))
    found["second"].join(10)
    assert found["code"] == 401 and "has ended" in found["told"]
    assert until(lambda: its["told"]) == ["abc"] and r.counts["requests"] == 1 and r.finish_reason == "stop"
    found["half"].sendall(b"}")
    found["half"].settimeout(10)
    assert b" 401 " in found["half"].recv(100)
    assert until(lambda: gc.collect() >= 0 and found["episode"]() is None)


def test_an_agent_hears_that_its_episode_was_aborted(write):
    agent = write("""
        codes = []
        def solve(base_url, api_key, row):
            try:
                ask(base_url, api_key, row["prompt"])
            except urllib.error.HTTPError as error:
                codes.append(error.code)
    """)
    plays, engine = player(agent), Says(["abc<|end|>"])
    engine.at_once = 0                                          # it has not answered yet
    table = OpenEpisodes(plays, engine)
    table.add("all", jobs(prompts_for([{}]), 1, [0], 5000, 1.0))
    table.step()
    table.abort()
    assert until(lambda: plays.make.__globals__["codes"]) == [401]


def test_a_request_that_comes_while_its_episode_ends_is_refused(monkeypatch):
    """The key was found, but _begin has already looked for what is open."""
    async def read():
        return b"{}"

    episode = SimpleNamespace(mail=SimpleQueue())
    monkeypatch.setattr(agents, "SESSIONS", type("Ending", (dict,), {"get": lambda self, key: episode})())
    request = SimpleNamespace(headers={"Authorization": "Bearer x"}, method="POST", read=read)
    assert asyncio.run(asyncio.wait_for(agents.handle(request), 10)).status == 401


# ---------------------------------------------------------------- docs/agents.md, docs/measured/agents.md

STAND_IN = ASK + '''
from types import SimpleNamespace

class BadRequestError(Exception):
    """What the client raises for a status of 400."""

class OpenAI:
    """What the page uses of OpenAI's client, which is not installed everywhere."""
    def __init__(self, base_url, api_key, max_retries):
        self.chat = self.completions = self
        self.asks = base_url, api_key

    def with_options(self, base_url, api_key):
        return type(self)(base_url, api_key, 0)

    def create(self, model, messages):
        messages = [one if isinstance(one, dict) else vars(one) for one in messages]
        try:
            said = ask(*self.asks, messages, model=model)
        except urllib.error.HTTPError as error:
            raise BadRequestError from error
        return SimpleNamespace(choices=[SimpleNamespace(message=SimpleNamespace(**said))])

class AsyncOpenAI(OpenAI):
    async def create(self, model, messages):
        return await asyncio.to_thread(super().create, model, messages)
'''


@pytest.fixture
def page_agent(monkeypatch, write):
    """Writes the agent of the pages with these words to a file, and returns its spec; a stand-in is its client."""
    client = type(sys)("openai")
    exec(STAND_IN, vars(client))
    monkeypatch.setitem(sys.modules, "openai", client)

    def written(words):
        blocks = []
        for page in ("docs/agents.md", "docs/measured/agents.md"):
            with open(os.path.join(runs.ROOT, page)) as file:
                blocks += re.findall(r"^```python\n(.*?)^```$", file.read(), re.M | re.S)
        (block,) = [block for block in blocks if words in block]
        return write("import openai\n" + block)
    return written


@pytest.mark.parametrize("words, texts, answer, parts", [
    ("Check your work", ["7", "8", " 8"], "8", {"solve": 1}),
    ("CALC", ["CALC(57 - 17)", "The final answer is 40."], "40", {"score": 1, "called": 1}),
    ("CALC", ["CALC(57 - 71)", "It is CALC(2*3)."], "-14", {"score": 0, "called": 1}),
    ("CALC", ["CALC(57 - x)"], "40", {"score": 0, "called": 0}),
    ("CALC", ["CALC(57 - 71)" + "x" * 45], "-14", {"score": 0, "called": 1}),
    ("bids", ["3", "5"], "", {"solve": 1}), ("bids", ["3", "2"], "", {"solve": 0})])
def test_an_agent_of_the_page_plays(page_agent, words, texts, answer, parts):
    """Also one whose row is full when it wants to say what it has computed."""
    plays = player(page_agent(words), max_completion_length=64, max_prompt_length=400)
    (r,) = played(plays, [[text + "<|end|>" for text in texts]], [{"answer": answer}])
    assert r.parts == parts and len(r.spans) == (1 if words == "bids" else len(texts)), r.counts


@pytest.mark.parametrize("name, texts, score, rows", [
    ("compacts", ["2x=6+2\nx=4\nAnswer: 4", "x=4\nAnswer: 5", "Answer: 4"], 1, [[0], [1], [2]]),
    ("compacts", ["Answer: 5"], 0, [[0]]),
    ("asks_a_helper", ["x=5\nAnswer: 5", "Answer: 4", "Answer: 4"], 1, [[1], [0, 2]]),
    ("drops_its_thoughts", ["x=5\nAnswer: 5", "Answer: 4", "x=5\nAnswer: 5"], 0, [[0], [1, 2]]),
    ("drops_its_thoughts", ["Answer: 5", "Answer: 5", "Answer: 4"], 1, [[0, 1, 2]])])
def test_an_agent_of_the_page_has_several_rows(page_agent, name, texts, score, rows):
    """One that compacts its context, one that asks a helper, and one that drops its thoughts."""
    agent = page_agent("# my_agent_several.py").replace(":solve", f":{name}")
    (r,) = played(player(agent, max_prompt_length=400), [[text + "<|end|>" for text in texts]],
                  [{"prompt": [{"role": "user", "content": "Solve 2x-2=6"}], "answer": "4"}])
    assert texts_of(r) == [[texts[i] + "<|end|>" for i in row] for row in rows]
    assert r.score == score and r.counts["untrained_tokens"] == 0 and r.counts["rows"] == len(rows)


# ---------------------------------------------------------------- whole runs

SMALL = {"task": "arithmetic", "prompts_per_step": 4, "num_generations": 4, "max_completion_length": 48,
         "train_prompts": 64, "eval_prompts": 4, "eval_samples": 1, "max_steps": 2, "save_interval": 1,
         "warmup_steps": 0, "learning_rate": 1e-3, "engine": "hf"}
BRANCHES = """
    def solve(base_url, api_key, row):
        first = row["prompt"] + [ask(base_url, api_key, row["prompt"])]
        ways = ("left", "right", "on")[:1 + len(first[-1]["content"]) % 3]
        texts = [ask(base_url, api_key, first + [user(way)])["content"] for way in ways]
        texts.append(ask(base_url, api_key, [user("alone")])["content"])
        return sum(ord(c) % 2 == 0 for text in texts for c in text) / 12
"""


def train(talker, tmp_path, name="run", script="train_grpo.py", ranks=1, **settings):
    return runs.train(script, tmp_path / name, [], SMALL | {"model": talker} | settings, ranks=ranks)


def test_what_a_run_refuses(tmp_path, write, reward_file):
    agent = f"--agent={write(BRANCHES)}"
    refused([agent, "--tools=x.py:f", "--engine=hf"], "agent's own", tmp_path)
    refused([f"--agent={write('def solve(base_url): ...')}", "--engine=hf"],
            ":solve, before its first turn: raised TypeError", tmp_path)


def test_no_other_run_opens_the_endpoint(tmp_path):
    """Nor does a EpisodeSampler without an agent."""
    (tmp_path / "plays.py").write_text(
        "import sys\nfrom test_episodes import player\nplayer('')\nassert 'options.agents' not in sys.modules\n")
    runs.forked(tmp_path / "log", tmp_path / "plays.py")


@pytest.mark.parametrize("ranks, aggregation, budget, top_k", [
    (1, "token_mean", 8192, 12), (2, "token_mean", 130, 0), (1, "sequence_mean", 130, 0), (2, "sequence_mean", 8192, 12)])
def test_the_gradient_of_branching_episodes_is_a_slow_one(talker, tmp_path, write, ranks, aggregation, budget, top_k):
    """Over all rows, by plain forwards in float64. An advantage, and with sequence_mean a weight, is an episode's.
    With a top_k the probabilities are normalised over the tokens that each one was drawn from."""
    metrics, _ = train(talker, tmp_path, agent=write(BRANCHES), max_steps=1, grad_clip=0, temperature=0.9,
                       ranks=ranks, loss_aggregation=aggregation, token_budget=budget, eval_prompts=2,
                       max_prompt_length=60, top_k=top_k, top_p=0.95 if top_k else 1.0)
    assert 2.2 < metrics[0]["episodes/rows"] < 4 and metrics[0]["episodes/untrained_tokens"] == 0
    episodes = kept_rollouts(tmp_path / "run", 0)
    assert len({len(one["sequence_starts"]) for one in episodes}) > 1
    assert metrics[0]["completions/trained_tokens"] == sum(one["length"] for one in episodes)
    model = AutoModelForCausalLM.from_pretrained(talker, dtype=torch.float64)
    scores = np.array([one["score"] for one in episodes]).reshape(-1, SMALL["num_generations"])
    std = scores.std(1, keepdims=True, ddof=1)
    advantages = ((scores - scores.mean(1, keepdims=True)) / (std + 1e-4)).flatten()
    tokens = sum(one["length"] for one in episodes)
    loss = 0
    for one, advantage in zip(episodes, advantages):
        weight = 1 / tokens if aggregation == "token_mean" else 1 / one["length"] / len(episodes)
        starts = [start for start, _, _ in one["sequence_starts"]]
        sizes, kept = iter(one.get("kept_sizes", [])), iter(one.get("kept_ids", []))
        for start, end in zip(starts, [*starts[1:], len(one["ids"])]):
            logits = model(torch.tensor(one["ids"][start:end])[None]).logits[0] / 0.9
            for first, last in one["spans"]:
                for place in range(max(first, start), min(last, end)):
                    left = [next(kept) for _ in range(next(sizes))] if top_k else [*range(logits.shape[1])]
                    logps = logits[place - 1 - start, left].log_softmax(-1)
                    loss = loss - weight * advantage * logps[left.index(one["ids"][place])]
    loss.backward()
    found = gradient(tmp_path / "run" / "checkpoint-1")
    slow = torch.cat([p.grad.flatten() for _, p in sorted(model.named_parameters())])
    assert len(found) == len(slow) and (found - slow).norm() < 1e-5 * slow.norm() > 0


@pytest.fixture(scope="module")
def whole(talker, tmp_path_factory):
    """The folder of a run of three steps that nothing interrupts, with its file branches.py, and what it printed."""
    folder = tmp_path_factory.mktemp("agent")
    (folder / "branches.py").write_text(ASK + textwrap.dedent(BRANCHES))
    _, output = train(talker, folder, agent=f"{folder}/branches.py:solve", **THREE)
    return folder, output


THREE = {"max_steps": 3, "eval_prompts": 2, "eval_interval": 2, "top_p": 0.9, "top_k": 30}


def test_a_killed_run_goes_on_as_if_nothing_had_happened(talker, tmp_path, write, whole):
    """Also if the agent's file is another now."""
    folder, output = whole
    metrics = lines(folder / "run")
    assert metrics[0]["grad_norm"] > 0 and metrics[1]["sampling/sampling_logp_difference/max"] < 1e-4
    assert metrics[0]["rewards/solve/mean"] == pytest.approx(metrics[0]["reward"])
    assert metrics[0]["episodes/turns"] == metrics[0]["episodes/requests"] == metrics[0]["episodes/rows"] + 1
    assert "does not repeat" not in output
    settings = SMALL | THREE | {"model": talker, "agent": write(BRANCHES)}
    command = ["train_grpo.py", *with_defaults([f"--out_dir={tmp_path}/run", "--resume=auto"], settings)]
    (process,) = begin(tmp_path / "log", *command)
    wait_for(lambda: count_lines(tmp_path / "run") > 1, process)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    write(BRANCHES + "\n        # changed\n")
    output = finish(begin(tmp_path / "log", *command), tmp_path / "log")
    assert f"resumes {tmp_path}/run/checkpoint-" in output
    assert without_times(lines(tmp_path / "run")) == without_times(metrics)
    samples = lines(tmp_path / "run", "samples.jsonl")
    assert samples == lines(folder / "run", "samples.jsonl")
    # The messages are those of one row, the tokens those of all.
    roles = {" ".join(message["role"] for message in sample["completion"]) for sample in samples}
    assert "assistant user assistant" in roles <= {"assistant", "assistant user assistant"}
    assert min(len(sample["tokens"]) for sample in samples) >= 3


def test_engines_apart_play_the_same_episodes(talker, tmp_path, whole):
    """One trainer and one engine that take turns have the figures of train_grpo.py, bit for bit."""
    folder, _ = whole
    apart, output = train(talker, tmp_path, "apart", "train_async.py", 2, max_staleness=0,
                          engine_correction="none", agent=f"{folder}/branches.py:solve", **THREE)
    assert figures(apart) == figures(lines(folder / "run")) and apart[0]["episodes/rows"] > 2
    assert lines(tmp_path / "apart", "samples.jsonl") == lines(folder / "run", "samples.jsonl")
    assert "does not repeat" not in output


def test_ppo_pays_all_rows_with_the_score_of_the_episode(talker, tmp_path, whole):
    """By loops over each row, with values of 0: a row's last token is paid with what later rows earn."""
    folder, _ = whole
    metrics, _ = train(talker, tmp_path, "ppo", "train_ppo.py", critic_learning_rate=0, critic_warmup_steps=0,
                       lam=0.72, agent=f"{folder}/branches.py:solve", **THREE | {"max_steps": 1})
    returns, scores = [], []
    for one in kept_rollouts(folder / "run", 0):
        firsts = [first for _, first, _ in one["sequence_starts"]]
        for first, end in zip(firsts, [*firsts[1:], one["length"]]):
            returns += [one["score"] * 0.72 ** (end - 1 - token) for token in range(first, end)]
        scores.append(one["score"])
    mean = sum(returns) / len(returns)
    std = (sum((x - mean) ** 2 for x in returns) / len(returns)) ** 0.5
    assert metrics[0]["critic/rewards/mean"] == pytest.approx(sum(scores) / len(scores), rel=1e-4)
    assert metrics[0]["critic/returns/mean"] == pytest.approx(mean, rel=1e-4)
    assert metrics[0]["critic/advantages/max"] == pytest.approx((max(returns) - mean) / std, rel=1e-4)
    assert metrics[0]["critic/advantages/min"] == pytest.approx((min(returns) - mean) / std, rel=1e-4)


def test_dapo_shortens_by_the_longest_row(talker, tmp_path, write):
    metrics, _ = train(talker, tmp_path, "run", "train_dapo.py", agent=write(BRANCHES), max_steps=1, eval_prompts=2,
                       max_num_gen_batches=0, overlong_buffer=40)
    shaped = []
    for one in kept_rollouts(tmp_path / "run", 0):
        places = [place for start, end in one["spans"] for place in range(start, end)]
        ends = [start for start, _, _ in one["sequence_starts"][1:]] + [len(one["ids"])]
        prompt = one["ids"][:places[0]]                         # that of all rows but the last
        starts_after = [len(prompt)] * (len(ends) - 1) + [places[one["sequence_starts"][-1][1]] - ends[-2]]
        longest = 0
        for (start, first, length), end, after in zip(one["sequence_starts"], ends, starts_after):
            assert length == after and (after < places[first] - start or first in (0, one["sequence_starts"][-1][1]))
            longest = max(longest, end - start - after)
        shaped.append(one["score"] + min(0, max(-1, (48 - 40 - longest) / 40)))
    assert metrics[0]["rewards/shaped/mean"] == pytest.approx(sum(shaped) / len(shaped), rel=1e-4)
