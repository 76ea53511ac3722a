"""Environments as TRL's users have them: a pool of instances, tools that are functions, rewards that read the
environments, messages as the tokenizer parses them, limits, and what is lost where one fails."""
import json
import math
import os
import signal
import sys
import textwrap
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest
import torch

import data
import runs
from options.episodes import EpisodeSampler
from rewards import load_scorer
from runtime import model_folder
from options.user_code import UserProcess
from runs import ROOT, begin, finish, forked, jobs, lines, with_defaults
from test_episodes import PARSED, SETTINGS, Says, call, parts_of, prompts_for
from test_survive import count_lines, wait_for
from test_train_episodes import SMALL
from tiny import pretrain

TOKENIZER = pretrain.make_tokenizer()

# As the clients of a server of environments are: an instance holds a session until it is closed.
REMOTE = '''
import urllib.request


class Remote:
    def __init__(self):
        self.session = self._ask("open")

    def _ask(self, what):
        with urllib.request.urlopen("SERVER/" + what, timeout=9) as answer:
            return answer.read().decode()

    def reset(self, **row):
        self.steps = 0

    def step(self, text):
        self.steps += 1
        self._ask(f"use/{self.session}")
        return "on", 0.5, self.steps == 2

    def close(self):
        self._ask(f"close/{self.session}")


class Tooled(Remote):
    step = None

    def look(self) -> str:
        """Looks."""
        return self._ask(f"use/{self.session}")

    def release(self):
        self.close()

    def get_reward(self):
        return float(self.session)


class Held(Tooled):
    """Its close() is a tool, because it takes an argument."""
    def close(self, door: str) -> str:
        """Closes a door.

        Args:
            door: Which one.
        """
        return f"{door} is closed"

    def release(self):
        self._ask(f"close/{self.session}")
'''


@pytest.fixture
def server():
    """A local server of sessions that refuses more than `most` of them at a time."""
    class Sessions(BaseHTTPRequestHandler):
        def do_GET(self):
            what, _, session = self.path[1:].partition("/")
            with made.lock:
                if what == "open":
                    made.opened, session = made.opened + 1, str(made.opened + 1)
                    granted = len(made.open) < made.most
                    made.open |= {session} if granted else set()
                    made.peak, made.refused = max(made.peak, len(made.open)), made.refused + (not granted)
                granted = session in made.open
                made.open -= {session} if what == "close" else set()
            self.send_response(200 if granted else 410)
            self.end_headers()
            self.wfile.write(session.encode())

        def log_message(self, *_):
            pass

    class Server(ThreadingHTTPServer):
        request_queue_size = 64

    made = Server(("127.0.0.1", 0), Sessions)
    made.lock, made.open, made.opened, made.peak, made.refused, made.most = (
        threading.Lock(), set(), 0, 0, 0, 10 ** 6)
    made.url = f"http://127.0.0.1:{made.server_port}"
    threading.Thread(target=made.serve_forever, daemon=True).start()
    yield made
    made.shutdown()


@pytest.fixture
def write(tmp_path):
    """Writes a file of environments or rewards and returns its path."""
    def written(source, name="game.py"):
        (tmp_path / name).write_text(textwrap.dedent(source))
        return str(tmp_path / name)
    return written


def player(environment="", tokenizer=TOKENIZER, **settings):
    return EpisodeSampler(SimpleNamespace(**SETTINGS | {"environment": environment, "max_completion_length": 5000}
                                  | settings), tokenizer, [TOKENIZER.eos_token_id])


def played(plays, texts, rows=None, tokenizer=TOKENIZER):
    """The rollouts of episodes in which the policy says these texts, and the engine that said them."""
    rows, engine = rows or [{}] * len(texts), Says(*texts)
    return plays.play_jobs(engine, jobs(prompts_for(rows, plays.tools, tokenizer), 1, [0] * len(rows),
                      plays.settings.max_completion_length, 1.0)), engine


def scored(plays, rollouts_of, **settings):
    settings = SimpleNamespace(**vars(plays.settings) | {"token_budget": 100} | settings)
    scorer = load_scorer(settings, plays, "cpu", torch.float32)
    rollouts = rollouts_of()
    scorer(rollouts)
    return rollouts


# ---------------------------------------------------------------- instances

@pytest.mark.parametrize("name, calls, most, expected", [
    ("Remote", ["a<|end|>", "b<|end|>"], 0, 16), ("Remote", ["a<|end|>", "b<|end|>"], 4, 4),
    ("Tooled", [call("look") + "<|end|>", "b<|end|>"], 3, 3)])
@pytest.mark.parametrize("workers", [0, 4])
def test_instances_are_reset_again_and_closed_at_the_end(server, write, name, calls, most, expected, workers):
    """As many as there are episodes at a time, for all steps; further ones wait."""
    server.most = expected
    plays = player(f"{write(REMOTE.replace('SERVER', server.url))}:{name}", max_environments=most,
                   call_workers=workers)
    for _ in range(3):
        rollouts, engine = played(plays, [list(calls) for _ in range(16)])
        assert len(rollouts) == 16 and {r.finish_reason for r in rollouts} == {"stop"}
        assert len(engine.asked) == 32
    assert server.opened == server.peak == len(server.open) == expected and not server.refused
    plays.close()
    assert server.open == set()


def test_what_closes_an_instance_is_no_tool(server, write):
    source = write(REMOTE.replace("SERVER", server.url))
    names = lambda plays: [tool["function"]["name"] for tool in plays.tools]
    assert names(player(f"{source}:Tooled")) == ["look"]
    # A close with arguments is the game's own.
    held = player(f"{source}:Held")
    assert names(held) == ["close", "look"]
    held.close()
    assert len(server.open) == 1


def test_an_instance_whose_reset_failed_or_that_hangs_plays_no_more(server, write):
    source = REMOTE.replace("SERVER", server.url) + '''
import asyncio
class Odd(Remote):
    async def reset(self, how, **row):
        self.how, self.steps = how, 0
        if how == "lost":
            raise OSError("no board")
    async def step(self, text):
        await asyncio.sleep(60 * (self.how == "hangs"))
        return super().step(text)
'''
    plays = player(f"{write(source)}:Odd", call_timeout=0.3)
    rollouts, _ = played(plays, [["a<|end|>", "b<|end|>"]] * 3,
                         [{"how": how} for how in ("well", "lost", "hangs")])
    assert [r.finish_reason for r in rollouts] == ["stop", "error", "timeout"]
    # Two were closed, in threads of their own.
    wait_for(lambda: len(server.open) == 1, SimpleNamespace(exitcode=None), 9)
    assert len(plays.opened) == 1 and plays.idle == [*plays.opened.values()]


# ---------------------------------------------------------------- how episodes begin and end

JUDGED = '''
class Judged:
    """Says when it was asked for a reward."""
    def reset(self, opening=None, fails=False, **row):
        if fails:
            raise OSError("no board")
        self.steps = 0
        return opening

    def step(self, text):
        self.steps += 1
        if text == "raise":
            raise KeyError("lost")
        return "on", 0.5, text == "last"

    def get_reward(self):
        return None if self.steps > 3 else 10.0 * self.steps


class Unscored(Judged):
    step = None

    def look(self) -> str:
        """Looks."""

    def get_reward(self):
        return None


class Slow(Judged):
    async def step(self, text):
        import asyncio
        await asyncio.sleep(60 * (text == "slow"))
        return Judged.step(self, text)
'''


@pytest.mark.parametrize("name, texts, reason, rewards", [
    ("Judged", ["last<|end|>"], "stop", [10.5]),
    ("Judged", ["a<|end|>", "b<|end|>", "c<|end|>"], "turns", [0.5, 0.5, 30.5]),
    ("Judged", ["a<|end|>", "cut"], "length", [0.5, 20.5]),
    # What took too long may still be at work, and without a score nobody has to be asked for one.
    ("Slow", ["a<|end|>", "slow<|end|>"], "timeout", [0.5, 0.0]),
    ("Judged", ["a<|end|>", "raise<|end|>"], "error", [math.nan])])
def test_when_get_reward_is_asked(write, name, texts, reason, rewards):
    plays = player(f"{write(JUDGED)}:{name}", call_timeout=0.3)
    # Another one ends well, because a run of nothing but errors stops.
    (r, other), _ = played(plays, [texts, ["last<|end|>"]])
    assert r.finish_reason == reason and other.finish_reason == "stop"
    assert [*r.rewards.values()] == pytest.approx(rewards, nan_ok=True)


def test_an_environment_that_is_still_busy_in_a_thread_is_asked_for_nothing(write):
    source = write('''
        import time
        class Busy:
            def reset(self, **row): self.busy = False
            def step(self, text):
                self.busy = True
                time.sleep(0.6 * (text == "slow"))
                self.busy = False
                return None, 1.0, True
            def get_reward(self): return 100.0 * (1 + self.busy)
        ''')
    plays = player(f"{source}:Busy", call_timeout=0.2, call_workers=2)
    judged = []
    plays.score_ended = lambda rollout, environment: judged.append(rollout)
    (slow, quick), _ = played(plays, [["slow<|end|>"], ["quick<|end|>"]])
    assert [*slow.rewards.values()] == [0.0] and [*quick.rewards.values()] == [101.0]
    assert [id(one) for one in judged] == [id(quick)]


def test_episodes_have_no_limit_of_turns_by_default(write):
    plays = player(f"{write(JUDGED)}:Judged", max_turns=0)
    (r,), _ = played(plays, [["a<|end|>"] * 20 + ["last<|end|>"]])
    # The None of get_reward adds nothing to what the steps gave.
    assert r.finish_reason == "stop" and [*r.rewards.values()] == [0.5] * 21


def test_what_cannot_begin_is_lost_and_not_the_run(write):
    """One answer to its prompt, unscored; it counts as an error."""
    plays = player(f"{write(JUDGED)}:Judged")
    rows = [{"fails": True}, {"opening": "x" * 60}, {}]
    rollouts, _ = played(plays, [["a<|end|>"], ["b<|end|>"], ["last<|end|>"]], rows)
    assert [r.finish_reason for r in rollouts] == ["error", "error", "stop"]
    assert [len(r.spans) for r in rollouts] == [1, 1, 1] and all(len(r.logprobs) == 2 for r in rollouts[:2])
    for r, told in zip(rollouts, ("before its first turn: raised OSError: no board", "reset returned so much that the prompt has 66 tokens, more than")):
        assert told in r.counts["problem"]
    rollouts = scored(plays, lambda: rollouts)
    assert [r.score for r in rollouts] == pytest.approx([math.nan, math.nan, 10.5], nan_ok=True)


def test_a_reward_of_none_is_no_score(write):
    source = write(JUDGED + "\ndef length(completions, **_):\n    return [2.0 for c in completions]\n")
    plays = player(f"{source}:Unscored")
    run = lambda: played(plays, [["a<|end|>"]])[0]
    (r,) = scored(plays, run)
    assert math.isnan(r.score) and math.isnan(r.parts["Unscored"])
    # As in TRL another reward counts alone.
    (r,) = scored(plays, run, reward=f"{source}:length")
    assert r.score == 2.0 and r.parts["length"] == 2.0 and [*r.rewards.values()] == [2.0]


def test_reset_may_give_the_prompt_of_a_row_without_one(write, tmp_path):
    (tmp_path / "rows.jsonl").write_text("".join(
        json.dumps({"opening": f"Game {i}?"}) + "\n" for i in range(40)) + '{"number": 3}\n')
    source = write(JUDGED)
    settings = SimpleNamespace(**SETTINGS | {
        "task": "file", "train_file": str(tmp_path / "rows.jsonl"), "eval_file": "", "prompt_column": "", "prompt_format": "",
        "answer_column": "", "environment": f"{source}:Judged", "train_prompts": 0, "eval_prompts": 0, "seed": 0,
        "prompts_per_step": 2, "model": "tiny"})
    train, held_out, _ = data.load_prompts(TOKENIZER, settings)
    assert len(train.rows) + len(held_out) == 41 and len(held_out) > 0
    # By the text of the whole row: rows of one length are on both sides.
    sides = [{len(row["opening"]) for row in rows if row["opening"]} for rows in (
        [row for _, row in train.rows], [prompt.row for prompt in held_out])]
    assert sides[0] & sides[1]
    encoded = train.encoded(range(len(train.rows)))
    named = {repr(row): prompt for (_, row), prompt in zip(train.rows, encoded)}
    first = next(p for p in [*named.values(), *held_out] if p.row["opening"])
    plays = player(f"{source}:Judged")
    rollouts = plays.play_jobs(Says(["last<|end|>"]), jobs([first], 1, [0], 50, 1.0))
    assert parts_of(rollouts[0])[0] == f"<|user|>{first.row['opening']}<|end|><|assistant|>"
    assert rollouts[0].row["prompt"] == [{"role": "user", "content": first.row["opening"]}]
    # Without an environment such a row is refused, as are others that are broken.
    settings.environment = ""
    with pytest.raises(ValueError, match="rows.jsonl:1: no column prompt; the columns are opening"):
        data.load_prompts(TOKENIZER, settings)


def test_a_turn_may_not_exceed_what_is_left_of_the_completion(write):
    (r,), _ = played(player(f"{write(JUDGED)}:Judged", max_completion_length=5),
                     [["abcdefgh<|end|>"]])
    assert len(r.ids) - len(r.prompt_ids) == 5


# ---------------------------------------------------------------- messages

THINKS = {**PARSED, "fields": {"reasoning_content": PARSED["fields"]["thinking"],
                               **{key: PARSED["fields"][key] for key in ("tool_calls", "content")}}}
DESK = '''
import asyncio
from types import SimpleNamespace


class Desk:
    def reset(self, **row): ...

    def rows(self) -> list:
        """Gives rows."""
        return [("a", 1), ("b", 2)]

    def table(self) -> dict:
        """Gives a table."""
        return {"a": [1, float("inf")], "odd": {1, 2}.__class__}

    def count(self) -> int:
        """Counts."""
        return 0

    def blocks(self) -> list:
        """Gives text in blocks."""
        return [{"type": "text", "text": "a "}, {"type": "text", "text": "cat"}]

    def of_a_client(self) -> object:
        """Gives what clients of MCP servers do."""
        return SimpleNamespace(content=self.of_an_older_client(), isError=False)

    def of_an_older_client(self) -> list:
        """Gives the blocks as objects."""
        return [SimpleNamespace(type="text", text=text, annotations=None) for text in ("a ", "cat")]

    def of_a_server(self) -> dict:
        """Gives a result as it is sent."""
        return {"content": self.blocks(), "structuredContent": {"animal": "cat"}, "isError": False}

    def picture(self) -> object:
        """Gives a picture as well, which nobody reads."""
        return SimpleNamespace(content=[SimpleNamespace(type="text", text="a cat"), frozenset])


def add(a: int, b: int = 0) -> int:
    """Adds.

    Args:
        a: One number.
        b: Another one.
    """
    if a < 0:
        raise ValueError(f"{a} is negative")
    return a + b


async def later(a: int) -> str:
    """Waits.

    Args:
        a: What to say.
    """
    await asyncio.sleep(0.001)
    return f"said {a}"
'''


def test_a_turn_is_parsed_once_with_the_template(write):
    """Its message is what the tokenizer's parser says: content, thinking, calls."""
    tokenizer = pretrain.make_tokenizer()
    tokenizer.response_template = THINKS
    plays = player(f"{write(DESK)}:Desk", tokenizer)
    texts = ["<think>why</think>I look. CALL count {}; <|end|>", "<think>so</think>It is 0.<|end|>"]
    (r,), _ = played(plays, [texts], tokenizer=tokenizer)
    first, answer, last = r.completion
    assert first["reasoning_content"].strip() == "why" and first["content"].strip() == "I look."
    assert [one["function"] for one in first["tool_calls"]] == [{"name": "count", "arguments": {}}]
    assert (answer["role"], answer["name"], answer["content"]) == ("tool", "count", "0")
    assert last["content"].strip() == "It is 0." and last["reasoning_content"].strip() == "so"
    assert parts_of(r)[1] == texts[0] and parts_of(r)[3] == texts[1]


def test_without_a_response_template_thinking_is_apart_as_well(write):
    plays = player(f"{write(DESK)}:Desk")
    texts = ["<think>why</think>I look." + call("count") + "<|end|>", "It is 0.<|end|>"]
    (r,), _ = played(plays, [texts])
    first, _, last = r.completion
    assert (first["content"], first["reasoning_content"]) == ("I look.", "why")
    assert len(first["tool_calls"]) == 1
    assert last == {"role": "assistant", "content": "It is 0."}


@pytest.mark.parametrize("begins, said, calls", [
    ("", "<think>{}</think>{}", 1), ("", "<think>{}", 0), ("", "<think>a</think>{}<think>{}", 1),
    ("", "{}{}", 2), ("<think>", "{}", 0), ("<think>\\n", "{}</think>{}", 1)])
def test_thoughts_call_nothing_also_one_that_is_cut_off(write, begins, said, calls):
    """Whether the policy begins them or the template does."""
    tokenizer = pretrain.make_tokenizer()
    tokenizer.chat_template = pretrain.CHAT_TEMPLATE.replace("'<|assistant|>'", f"'<|assistant|>{begins}'")
    plays = player(f"{write(DESK)}:Desk", tokenizer, max_turns=2)
    said = said.format(call("count"), call("count"))
    (r,), _ = played(plays, [[f"{said}<|end|>", "b<|end|>"]], tokenizer=tokenizer)
    assert r.counts["calls"] == calls and len(r.spans) == 1 + bool(calls)


BLOCKS = [{"type": "text", "text": "a "}, {"type": "text", "text": "cat"}]
OF_A_CLIENT = [block | {"annotations": None} for block in BLOCKS]


@pytest.mark.parametrize("name, read, kept", [
    ("rows", "[['a', 1], ['b', 2]]", [["a", 1], ["b", 2]]), ("count", "0", "0"),
    ("table", "{'a': [1, inf], 'odd': \"<class 'set'>\"}", {"a": [1, math.inf], "odd": "<class 'set'>"}),
    ("blocks", "a cat", BLOCKS), ("of_a_client", "a cat", OF_A_CLIENT), ("of_an_older_client", "a cat", OF_A_CLIENT),
    ("of_a_server", "a cat", {"content": BLOCKS, "structuredContent": {"animal": "cat"}, "isError": False}),
    ("picture", "[{'type': 'text', 'text': 'a cat'}, \"<class 'frozenset'>\"]",
     [{"type": "text", "text": "a cat"}, "<class 'frozenset'>"])])
def test_results_keep_their_type_for_rewards(write, name, read, kept):
    """The policy reads text, as before; what rewards and samples get is what JSON can hold."""
    plays = player(f"{write(DESK)}:Desk")
    (r,), _ = played(plays, [[call(name) + "<|end|>", "b<|end|>"]])
    assert parts_of(r)[2] == f"<|user|><tool_response>{read}</tool_response><|end|><|assistant|>"
    assert r.completion[1]["content"] == kept and json.loads(json.dumps(r.completion)) == r.completion


@pytest.mark.parametrize("value", [
    [{"type": "article", "title": "cat"}], {(0, 0): "x"}, [[1], {"type": ["image"]}], []])
def test_other_lists_and_objects_are_read_as_they_are_written(write, value):
    source = write(f'''
        class Gives:
            def reset(self, **row): ...
            def give(self) -> list:
                """Gives."""
                return {value!r}
        ''')
    (r,), _ = played(player(f"{source}:Gives"), [[call("give") + "<|end|>", "b<|end|>"]])
    assert parts_of(r)[2] == f"<|user|><tool_response>{value}</tool_response><|end|><|assistant|>"
    assert r.counts["failures"] == 0 and json.dumps(r.completion)


def test_a_call_in_a_turn_that_is_cut_off_stays_what_was_said(write):
    (r,), _ = played(player(f"{write(DESK)}:Desk"), [["I look." + call("count") + "..."]])
    assert r.completion == [{"role": "assistant", "content": "I look." + call("count") + "..."}]


# ---------------------------------------------------------------- functions as tools

def test_functions_are_tools_without_a_class(write):
    source = write(DESK)
    plays = player(tools=f"{source}:add,{source}:later")
    plays.trial(prompts_for([{}], plays.tools))
    turns = [call("add", '{"a": 2, "b": 3}') + call("later", '{"a": 4}') + "<|end|>",
             call("add", '{"a": -1}') + call("sub") + "<|end|>", "5<|end|>"]
    (r,), _ = played(plays, [turns])
    assert [m["content"] for m in r.completion if m["role"] == "tool"] == [
        "5", "said 4", {"error": "-1 is negative"}, {"error": "there is no tool sub; there are add, later"}]
    assert r.finish_reason == "stop" and plays.reward_part == "" and r.rewards == {}
    # With a class they stand before its methods.
    both = player(f"{source}:Desk", tools=f"{source}:add")
    names = [tool["function"]["name"] for tool in both.tools]
    assert names == ["add", "blocks", "count", "of_a_client", "of_a_server", "of_an_older_client", "picture", "rows", "table"]
    (r,), _ = played(both, [[call("add", '{"a": 2}') + call("count") + "<|end|>", "5<|end|>"]])
    assert [m["content"] for m in r.completion if m["role"] == "tool"] == ["2", "0"]


@pytest.mark.parametrize("settings, told", [
    ({"tools": "tools.py"}, "tools must be file.py:function or package.module:function, not 'tools.py'"),
    ({"tools": "none.py:add"}, "tools: no such file: none.py"),
    ({"tools": "GAME:bare"}, "tools=.*: a tool needs type hints and a docstring"),
    ({"tools": "GAME:add,GAME:add"}, "tools=.*: two tools have the same name: add, add"),
    ({"tools": "GAME:add", "environment": "GAME:Judged"}, "tools=.*: environment=.* has a method step, which"),
    ({"tools": "GAME:add", "chat": False}, "tools=.* needs chat=True and a tokenizer with"),
    ({"environment": "GAME:Inner"}, "game.py has no Class Inner at its top level")])
def test_tools_and_classes_that_cannot_be_used_are_refused(write, settings, told):
    source = write(DESK + JUDGED + "\ndef bare(a):\n    return a\n\ndef main():\n    class Inner:\n        pass\n")
    settings = {key: value.replace("GAME", source) if isinstance(value, str) else value
                for key, value in settings.items()}
    with pytest.raises(ValueError, match=told):
        player(**settings)


# ---------------------------------------------------------------- rewards

REWARDS = '''
import helper
from game_state import seen


class Game:
    def reset(self, goal=1, **row):
        self.goal, self.reward = goal, 0.0

    def move(self, steps: int) -> str:
        """Moves.

        Args:
            steps: How far.
        """
        self.reward += steps
        return "moved"


def reached(environments, completions, goal, **kwargs):
    seen.append([env.reward for env in environments])
    return [float(env.reward == one) for env, one in zip(environments, goal)]


def far(environments, prompts, log_metric, log_extra, **kwargs):
    log_metric("distance", sum(env.reward for env in environments) / len(environments))
    log_extra("note", [f"at {env.reward:g}" for env in environments])
    return [None if env.reward == 0 else env.reward for env in environments]


async def later(environments, **kwargs):
    return [env.reward / 10 for env in environments]


def brief(completions, log_extra=None, **kwargs):
    log_extra("length", [len(c) for c in completions])
    return [helper.LENGTH / len(c) for c in completions]


'''


@pytest.fixture
def moves(write):
    write("seen = []", "game_state.py")
    write("LENGTH = 1.0", "helper.py")
    return write(REWARDS)


def test_rewards_read_the_environments_of_their_episodes(moves):
    """Each before its instance is reset for the next one, also where fewer are open than there are episodes."""
    plays = player(f"{moves}:Game", max_environments=2)
    texts = [[call("move", f'{{"steps": {i}}}') + "<|end|>", "b<|end|>"] for i in range(5)]
    rollouts = scored(plays, lambda: played(plays, texts, [{"goal": 1 + i % 2} for i in range(5)])[0],
                      reward=f"{moves}:reached,{moves}:far,{moves}:later,{moves}:brief",
                      reward_weights="far:0.5,brief:3")
    assert [r.parts for r in rollouts] == [
        {"reached": float(i in (2,) and i == 1 + i % 2 or i == 1 and 1 + i % 2 == 1), "later": i / 10,
         "brief": 1 / 3} | ({"far": float(i)} if i else {}) for i in range(5)]
    for i, r in enumerate(rollouts):
        assert r.score == pytest.approx(r.parts["reached"] + 0.5 * i + i / 10 + 1)
        assert r.extra == {"distance": i, "note": f"at {i}", "length": 3.0}
    assert sys.modules["game_state"].seen == [[float(i)] for i in range(5)]
    assert len(plays.opened) == 2


def test_what_is_logged_is_in_metrics_and_samples(moves):
    from losses import group_std
    from runtime.metrics import rollout_metrics, sample_lines
    plays = player(f"{moves}:Game")
    texts = [[call("move", f'{{"steps": {i}}}') + "<|end|>", "b<|end|>"] for i in range(4)]
    rollouts = scored(plays, lambda: played(plays, texts)[0], reward=f"{moves}:far,{moves}:brief")
    metrics = rollout_metrics(rollouts, 1, group_std, 1)
    assert metrics["logged/distance/mean"] == 1.5 and metrics["logged/length/mean"] == 3.0
    assert not any("note" in name for name in metrics)
    assert sample_lines(rollouts, 2, TOKENIZER, 0)[1]["extra"] == {"distance": 2.0, "note": "at 2", "length": 3.0}


def test_an_environment_logs_by_what_its_reset_asks_for(write):
    source = write('''
        class Logs:
            def reset(self, log_metric, log_extra, **row):
                self.log_metric, self.log_extra, self.row = log_metric, log_extra, row
                self.log_metric("turns", 0)
            def step(self, text):
                self.log_metric("turns", 1)
                self.log_extra("heard", text)
                self.log_extra("odd", [1])
                return None, 1.0, True
        ''')
    (r,), _ = played(player(f"{source}:Logs"), [["hi<|end|>"]])
    assert r.extra == {"turns": 1.0, "heard": "hi", "odd": "[1]"}


def test_a_file_is_run_once_for_all_that_it_holds(write):
    source = write('''
        import os
        print("run", file=open(os.path.join(os.path.dirname(__file__), "log"), "a"))
        class Game:
            def reset(self, **row): ...
            def step(self, text): return None, 1.0, True
        def kinds(completions, **_):
            return [float(os.getpid())] * len(completions)
        ''')
    plays = player(f"{source}:Game")
    (r,) = scored(plays, lambda: played(plays, [["a<|end|>"]])[0], reward=f"{source}:kinds", call_timeout=5.0)
    assert r.parts["kinds"] == os.getpid()
    with open(os.path.join(os.path.dirname(source), "log")) as file:
        assert file.read() == "run\n"


VERL = """
def compute_score(solution_str, ground_truth):
    bonus = 0.1 if "<tool_call>" in solution_str and "<think>" in solution_str else 0.0
    return {"score": float(solution_str.endswith(ground_truth)) + bonus, "length": len(solution_str)}
def batch(solution_strs, ground_truths):
    return [compute_score(*pair) for pair in zip(solution_strs, ground_truths)]
def last(completions, **_):
    return [float(len(completion[-1]["content"])) for completion in completions]
def move(steps: int) -> int:
    '''Moves.

    Args:
        steps: How far.
    '''
    return steps
"""


@pytest.mark.parametrize("timeout", [0.0, 5.0])
def test_verls_form_gets_all_that_follows_the_prompt_as_one_text(write, timeout):
    """With the calls, thoughts and results of all turns, and without special tokens, as verl decodes a response."""
    source, text = write(VERL, "my_verl.py"), "<think>It is near.</think>Go." + call("move", '{"steps": 2}')
    plays = player(tools=f"{source}:move")
    whole = f"{text}<tool_response>2</tool_response>#### 2"
    for name in ("compute_score", "batch"):
        (r,) = scored(plays, lambda: played(plays, [[text + "<|end|>", "#### 2<|end|>"]], [{"answer": "2"}])[0],
                      reward=f"{source}:{name},{source}:last", reward_weights="last:0", call_timeout=timeout)
        assert r.parts == {"score": 1.1, "length": len(whole), "last": len("#### 2")} and r.score == 1.1


def test_a_reward_of_another_file_reads_environments_in_the_runs_process(moves, write, monkeypatch):
    """The process that told what it takes is ended."""
    other = write("import os\ndef where(environments, **_):\n    return [env.reward + os.getpid() for env in environments]",
                  "other.py")
    plays, ended, end = player(f"{moves}:Game"), [], UserProcess.end
    monkeypatch.setattr(UserProcess, "end", lambda self: ended.append(self) or end(self))
    (r,) = scored(plays, lambda: played(plays, [[call("move", '{"steps": 2}') + "<|end|>", "b<|end|>"]])[0],
                  reward=f"{other}:where", call_timeout=5.0)
    assert r.score == 2.0 + os.getpid() and len(ended) == 1 and ended[0].process is None


def test_a_reward_that_takes_environments_needs_one(moves):
    plays = player()
    settings = SimpleNamespace(**vars(plays.settings) | {"token_budget": 100, "reward": f"{moves}:far"})
    with pytest.raises(ValueError, match="reward far needs a column environments; the columns are"):
        load_scorer(settings, plays, "cpu", torch.float32).check_rewards(prompts_for([{}]))


def test_the_console_shows_what_reset_has_added_to_the_first_prompt(write):
    path = write("class Game:\n    def reset(self, **row): return ' Your hand:\\n7 of hearts'\n"
                 "    def step(self, text): return '', 1.0, True\n")
    plays = player(f"{path}:Game")
    settings = SimpleNamespace(**vars(plays.settings) | {"token_budget": 100})
    prompts = prompts_for([{}])
    note = load_scorer(settings, plays, "cpu", torch.float32).check_rewards(prompts)
    first, *rest = note.split("\n    ")
    assert first == "In an episode the model reads it as" and "Your hand:\n7 of hearts" in "\n".join(rest)
    path = write("class Silent:\n    def reset(self, **row): return None\n"
                 "    def step(self, text): return '', 1.0, True\n", "silent.py")
    assert load_scorer(settings, player(f"{path}:Silent"), "cpu", torch.float32).check_rewards(prompts) == ""


def test_a_template_hears_of_no_tools_where_a_class_has_none(write):
    """Llama 3.1's asks in this way, and speaks of tools in the system prompt where the list is there but empty."""
    path = write('''
        class Judge:
            def reset(self, **row):
                pass

            def get_reward(self):
                return 1.0
    ''')
    tokenizer = pretrain.make_tokenizer()
    tokenizer.chat_template = "{% if tools is not none %}<|tool|>{% endif %}" + tokenizer.chat_template
    plays = player(f"{path}:Judge", tokenizer)
    (r,), _ = played(plays, [["a<|end|>"]], tokenizer=tokenizer)
    assert plays.tools is None and r.prompt_ids.tolist() == prompts_for([{}])[0].ids and r.finish_reason == "stop"


# ---------------------------------------------------------------- templates that stand elsewhere

def test_templates_may_stand_beside_a_model(tmp_path):
    # A byte order mark is none of the template.
    (tmp_path / "mine.jinja").write_text("\ufeff{{ 'no think' if enable_thinking is false else 'think' }}")
    settings = SimpleNamespace(chat_template=str(tmp_path / "mine.jinja"), chat_template_kwargs="")
    folder = model_folder.SHIPPED["tiny"]
    ask = lambda tokenizer: tokenizer.apply_chat_template([{"role": "user", "content": "?"}], tokenize=False)
    tokenizer = model_folder.load_tokenizer(folder, settings=settings)
    tokenizer.response_template = PARSED                        # a line in a script of one's own
    assert ask(tokenizer) == "think"
    settings.chat_template_kwargs = '{"enable_thinking": false}'
    assert ask(model_folder.load_tokenizer(folder, settings=settings)) == "no think"
    # A checkpoint takes them with it.
    tokenizer.save_pretrained(tmp_path / "saved")
    saved = model_folder.AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert ask(saved) == "think" and saved.response_template == PARSED
    for key, value, told in (
            ("chat_template", "none.jinja", "chat_template=none.jinja cannot be read: .*No such file"),
            ("chat_template_kwargs", "[1]", r"chat_template_kwargs=\[1\] is no JSON object"),
            ("chat_template_kwargs", '{"enable_thinkng": false}', "the chat template reads no enable_thinkng"),
            ("chat_template_kwargs", "{", "chat_template_kwargs={ cannot be read: JSONDecodeError")):
        with pytest.raises(ValueError, match=told):
            model_folder.load_tokenizer(folder, settings=SimpleNamespace(**vars(settings) | {key: value}))


# ---------------------------------------------------------------- whole runs

def remote(server, talker, write, **settings):
    environment = f"{write(REMOTE.replace('SERVER', server.url))}:Remote"
    return SMALL | {"model": talker, "environment": environment, "max_turns": 0} | settings


def test_a_run_closes_its_instances(server, talker, tmp_path, write):
    """16 episodes a step and 4 in an evaluation, of which 5 are open at a time."""
    server.most = 5
    settings = remote(server, talker, write, max_environments=5, max_steps=3)
    metrics, output = runs.train("train_grpo.py", tmp_path / "run", [], settings)
    assert (server.opened, server.peak, server.refused, server.open) == (5, 5, 0, set())
    assert "  ended by a limit " in output and metrics[1]["episodes/limited"] == pytest.approx(16 * (
        1 - metrics[1]["episodes/ended/done"]))


@pytest.mark.parametrize("how", ["error", "signal"])
def test_instances_are_closed_where_a_run_fails_or_is_stopped(server, talker, tmp_path, write, how):
    reward = write(f"import os\ndef bad(completions, **_):\n    if os.path.exists('{tmp_path}/stop'): "
                   "raise KeyError('lost')\n    return [1.0] * len(completions)", "bad.py")
    settings = remote(server, talker, write, max_steps=500, save_interval=0, out_dir=tmp_path / "run",
                      **({"reward": f"{reward}:bad"} if how == "error" else {}))
    processes = begin(tmp_path / "log", "train_grpo.py", *with_defaults([], settings))
    wait_for(lambda: count_lines(tmp_path / "run") > 1, *processes)
    assert server.open
    if how == "error":
        (tmp_path / "stop").touch()
    else:
        os.kill(processes[0].pid, signal.SIGTERM)
    finish(processes, tmp_path / "log", code=1 if how == "error" else 0)
    assert server.open == set()


def test_an_environment_that_goes_to_another_folder_moves_nothing(talker, tmp_path, write):
    """Not the model, not the rows, not the reward's process, not the checkpoints."""
    write('''
        import os
        class Wanders:
            def __init__(self): os.chdir("/")
            def reset(self, **row): os.chdir("/tmp")
            def step(self, text): return "on", 1.0, "e" in text
        ''')
    # Its process ends once, and is started again.
    write("import os\nlog = os.path.join(os.path.dirname(__file__), 'crashed')\n"
          "def crash(completions, **_):\n    if len(completions) > 2 and not os.path.exists(log):\n"
          "        open(log, 'w').close()\n        os._exit(3)\n    return [1.0] * len(completions)\n"
          "def also(completions):\n    return [0.5] * len(completions)\n", "crash.py")
    (tmp_path / "rows.jsonl").write_text("".join(
        json.dumps({"prompt": [{"role": "user", "content": f"{i}? Speak."}], "answer": "1"}) + "\n"
        for i in range(64)))
    os.symlink(talker, tmp_path / "model")
    settings = SMALL | {"model": "model", "task": "file", "train_file": "rows.jsonl", "train_prompts": 0,
                        "eval_prompts": 4, "environment": "game.py:Wanders", "reward": "crash.py:crash, crash.py:also",
                        "reward_errors": "unscored", "max_prompt_length": 64, "out_dir": "here"}
    forked(tmp_path / "log", f"{ROOT}/train_grpo.py", *with_defaults([], settings), root=tmp_path)
    assert {"metrics.jsonl", "checkpoint-2", "config.json"} <= {*os.listdir(tmp_path / "here")}
    assert len(lines(tmp_path / "here")) == 3 and (tmp_path / "crashed").exists()
