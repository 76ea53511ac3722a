"""Episodes: exact tokens, how they end, their rewards, tools, threads, environments that are refused."""
import copy
import json
import math
import pickle
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import configurator
import data
from options import episodes
import hf_engine
import rewards
import rollout
from options.conversation import Conversation
from tiny import pretrain
from rewards import load_scorer
from rollout import Answer, Request
from runs import ROOT, jobs, requests, shut_down
from options import saved_rollouts
from options import user_code
from test_rollout import ENGINES, identical

SETTINGS = {"environment": "", "images": "", "chat": True, "system_prompt": "", "max_turns": 3, "max_prompt_length": 64,
            "tools": "", "agent": "", "max_environments": 0, "stop": "", "answer_column": "",
            "max_completion_length": 120, "call_workers": 0, "call_timeout": 10.0, "reward": "",
            "task": "algebra", "reward_timeout": 10.0, "reward_step_timeout": 0, "reward_model": "",
            "reward_workers": 0, "reward_errors": "stop", "reward_weights": ""}
TOKENIZER = pretrain.make_tokenizer()
USER, ASSISTANT, END = TOKENIZER.convert_tokens_to_ids(["<|user|>", "<|assistant|>", "<|end|>"])
# With this many end tokens even a random model comes to an end.
ENDS = [END, *range(0, 256, 8)]

GAMES = '''
import asyncio
import math
import threading
import time


class Echo:
    """Says how long each answer was, and what the row wants."""
    def reset(self, prompt, answer="", **row):
        self.answer, self.turns = answer, 0
        return None

    def step(self, text):
        self.turns += 1
        return f"{len(text)}{self.answer}", 0.25 * self.turns, len(text) % 3 == 0


class Hears:
    def reset(self, log_extra, **row):
        self.log_extra = log_extra

    def step(self, text):
        self.log_extra("heard", text)
        return None, 1.0, True


class Once(Echo):
    def step(self, text):
        return None, 1.0, True


class Script:
    """Answers as the row says."""
    def reset(self, replies, opening=None, **row):
        self.replies = replies
        return opening

    def step(self, text):
        reply = self.replies.pop(0)
        if reply == "raise":
            raise KeyError("lost")
        if reply == "exit":
            raise SystemExit(0)
        if reply == "hang":
            time.sleep(60)
        return tuple(reply)


class Gym(Script):
    def reset(self, *, seed=3, options=None, replies=()):
        self.replies = list(replies)
        return f" Seed {seed}.", {"anything": object()}


class AsyncScript(Script):
    async def reset(self, **row):
        await asyncio.sleep(0.001)
        return super().reset(**row)

    async def step(self, text):
        await asyncio.sleep(60 if self.replies[0] == "hang" else 0.001)
        return super().step(text)


class Busy:
    """Counts the calls that run at the same time. A reset waits until there are as many as the row says."""
    lock, now, most, calls, barrier = threading.Lock(), 0, 0, 0, None

    def _call(self, wait):
        with Busy.lock:
            Busy.now, Busy.calls = Busy.now + 1, Busy.calls + 1
            Busy.most = max(Busy.most, Busy.now)
        wait()
        with Busy.lock:
            Busy.now -= 1

    def reset(self, together, **row):
        with Busy.lock:
            Busy.barrier = Busy.barrier or threading.Barrier(together)
        self._call(lambda: Busy.barrier.wait(9))

    def step(self, text):
        self._call(lambda: time.sleep(0.05))
        return "on", 0.0, False


class Waits:
    """The first episode's answer comes after the second one's."""
    other = threading.Event()

    def reset(self, first, **row):
        self.first = first

    def step(self, text):
        return None, float(Waits.other.wait(9) if self.first else Waits.other.set() or 1), True


class Counter:
    """An environment as TRL wants it."""
    unit = dict                                     # no tool, although it can be called

    def __init__(self):
        self.total, self.log = 0, []

    @property
    def last(self):
        raise RuntimeError("there is none before the reset")

    def reset(self, start=0, **kwargs):
        self.total = start
        return f" Start at {start}." if start else None

    def _note(self, entry):
        self.log.append(entry)

    def add(self, amount: int, times: int = 1) -> str:
        """Adds to the counter.

        Args:
            amount: What to add.
            times: How often.
        """
        if amount < 0:
            raise ValueError(f"{amount} is negative")
        self.total += amount * times
        return f"The total is {self.total}."

    async def wait(self) -> int:
        """Waits."""
        await asyncio.sleep(0.001)
        return self.total

    def get_reward(self):
        return float(self.total)


class Nests:
    def reset(self, **row): ...

    def give(self, what: list) -> str:
        """Takes.

        Args:
            what: Anything.
        """
        levels = 0
        while what:
            what, levels = what[0], levels + 1
        return f"got {levels + 1}"

    def nest(self, levels: int) -> list:
        """Nests.

        Args:
            levels: How deep.
        """
        value = []
        for _ in range(levels - 1):
            value = [value]
        return value


class Hinted:
    def reset(self, **row): ...

    def take(self, whole: int | None = None, part: float = 0.0, flag: bool = False, text: str = "",
             several: list[int] = ()) -> str:
        """Takes.

        Args:
            whole: A number.
            part: A number.
            flag: Yes or no.
            text: A text.
            several: Numbers.
        """
        return repr([whole, text, several] if text else [whole, part, flag])


class Elsewhere:
    def made(self) -> str:
        """Makes."""
        return "from elsewhere"


class Bound:
    def __init__(self):
        self.found, self.loose = Elsewhere().made, lambda: 1

    def reset(self, **row): ...

    @property
    def unset(self):
        raise RuntimeError("there is none before the reset")

    def look(self) -> str:
        """Looks."""
        return "seen"

    @classmethod
    def whose(cls) -> str:
        """Says whose it is."""
        return cls.__name__

    @staticmethod
    def helper() -> str:
        """Helps."""
        return "not for the policy"


class Tools(Counter):
    get_reward = None


class AsyncCounter(Counter):
    async def get_reward(self):
        await asyncio.sleep(0.001)
        return float(self.total)
'''


@pytest.fixture(scope="session")
def games(tmp_path_factory):
    path = tmp_path_factory.mktemp("games") / "games.py"
    path.write_text(GAMES)
    return path


@pytest.fixture(scope="module", params=ENGINES)
def engine(request, folder, mesh):
    made = rollout.engine_class(request.param)(folder, torch.float32, 256, ENDS, 0.4)
    yield made
    shut_down(made)


@pytest.fixture(scope="module")
def hf(folder):
    return hf_engine.HFEngine(folder, torch.float32, 256, ENDS, 0.4)


class Says(rollout.Engine):
    """An engine whose policy says what is written: for each episode, one text per turn.

    A text without an end token or ### is cut off, and so is what is longer than max_tokens. at_once: how many
    are answered in a step.
    """
    at_once = None

    def __init__(self, *texts):
        self.texts = [[TOKENIZER(text).input_ids for text in turns] for turns in texts]
        super().__init__()
        self.asked = []

    def add(self, request):
        self.added.append(request)

    def step(self):
        requests, self.added = self.added[:self.at_once], self.added[len(self.added[:self.at_once]):]
        self.asked += requests
        answers = []
        for request in requests:
            ids = self.texts[request.name].pop(0)[:request.max_tokens]
            reason = "stop" if ids[-1] == END or TOKENIZER.decode(ids).endswith("###") else "length"
            answers.append(Answer(request.name, ids, [-0.5] * len(ids), reason))
        return answers


def player(games, name="", tokenizer=TOKENIZER, eos_ids=(END,), **settings):
    environment = f"{games}:{name}" if name else ""
    return episodes.EpisodeSampler(SimpleNamespace(**SETTINGS | {"environment": environment} | settings), tokenizer,
                           list(eos_ids))


def with_engine(sampler, engine):
    sampler.engine = engine
    return sampler


def prompts_for(rows, tools=None, tokenizer=TOKENIZER, **settings):
    rows = [{"prompt": [{"role": "user", "content": "Go."}]} | row for row in rows]
    return data.encode_rows(tokenizer, list(enumerate(rows)), tools=tools, **settings)


def played(games, name, rows, texts, **settings):
    """The rollouts of episodes in which the policy says these texts."""
    plays = player(games, name, **{"max_completion_length": 5000} | settings)
    return plays.play_jobs(Says(*texts), jobs(prompts_for(rows, plays.tools), 1, [0] * len(rows),
                      plays.settings.max_completion_length, 1.0))


def parts_of(r):
    """The texts of a row: the prompt, then by turns what was sampled and what was inserted."""
    cuts = [0, *r.spans.flatten().tolist(), len(r.ids)]
    return [TOKENIZER.decode(r.ids[a:b]) for a, b in zip(cuts, cuts[1:]) if a < b]


def scored(rollouts, plays_as, **settings):
    settings = SimpleNamespace(**SETTINGS | {"token_budget": 100, "tools": "more.py:tool"} | settings)
    plays = SimpleNamespace(reward_part=plays_as, tokenizer=TOKENIZER)
    load_scorer(settings, plays, "cpu", torch.float32)(rollouts)
    return rollouts


# ---------------------------------------------------------------- one turn

def single(engine, tokenizer, prompts, n, seeds, max_tokens, temperature, top_p=1.0, top_k=0, min_p=0.0):
    """What a Sampler makes of these seeds, which otherwise are hashes."""
    settings = SimpleNamespace(max_completion_length=max_tokens, temperature=temperature, top_p=top_p,
                               top_k=top_k, min_p=min_p, seed=0)
    wanted = requests([prompt.ids for prompt in prompts], n, seeds, max_tokens, temperature, top_p, top_k, min_p)
    generate = lambda hashed: engine.generate([
        request._replace(seed=one.seed) for request, one in zip(hashed, wanted, strict=True)])
    engine_with = SimpleNamespace(generate=generate, sampled={}, stop_if_signalled=engine.stop_if_signalled, versions=engine.versions)
    plays = player("", tokenizer=tokenizer, eos_ids=ENDS, **vars(settings))
    sample = with_engine(plays, engine_with)
    return sample(prompts, n, seeds)


@pytest.mark.parametrize("name", ["", "Echo"])
def test_a_name_is_used_for_a_prompt_once(engine, games, name, monkeypatch):
    """A second time it would give the same completions, except after a weight sync."""
    plays = player(games, name, seed=0, max_completion_length=12, temperature=0.9, top_p=1.0, top_k=0, min_p=0.0)
    sample = with_engine(plays, engine)
    engine.sampled = {}
    first, second = prompts_for([{}, {"prompt": [{"role": "user", "content": "Stay."}]}])
    before = sample([first], 2, ["3 0"])
    for greedy in range(2):
        sample([first], 2, ["3 0"], temperature=0)
    with pytest.raises(configurator.InputError, match="'3 0' has named this prompt before"):
        sample([second, first], 2, ["3 1", "3 0"])
    other = sample([second, first], 2, ["3 0", "3 2"])
    assert [r.ids.tolist() for r in other[2:]] != [r.ids.tolist() for r in before]
    with pytest.raises(configurator.InputError, match="'x' has named this prompt before"):
        sample([first, first], 2, ["x", "x"])
    monkeypatch.setattr(rollout, "load_checked", print)          # a sync of the same weights
    engine.load_weights([], engine.version)
    assert identical(sample([first], 2, ["3 0"]), before)


@pytest.mark.parametrize("busy", [False, True])
@pytest.mark.parametrize("content", ["string", "messages"])
def test_a_prompt_may_have_the_beginning_of_an_answer(engine, games, content, busy, monkeypatch):
    """Its tokens belong to the completion and not to what is trained, wherever in a word the answer goes on."""
    sampling = {"seed": 0, "max_completion_length": 12, "temperature": 0.9, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
    sample = with_engine(player(games, eos_ids=ENDS, **sampling), engine)
    if busy:                                                    # other requests are open, so the player plays
        monkeypatch.setattr(engine, "versions", {-1: {0: 0}})
    (prompt,) = prompts_for([{}])
    if content == "string":
        prompt = prompt._replace(row={"prompt": "Go."})
    begun = TOKENIZER("Answe", add_special_tokens=False).input_ids
    prompt = prompt._replace(ids=prompt.ids + begun, begun=len(begun))
    engine.sampled = {}
    rollouts = sample([prompt], 3, ["a"])
    engine.sampled = {}
    others = sample([prompt._replace(begun=0)], 3, ["a"])
    assert identical(rollouts, others)
    for r, other in zip(rollouts, others):
        assert r.row is prompt.row and r.begun == len(begun) and other.begun == 0
        assert rewards.content(r.completion) == "Answe" + rewards.content(other.completion)
        assert type(r.completion) is type(other.completion)
    with pytest.raises(configurator.InputError, match="Echo plays, and no prompt may have the beginning"):
        with_engine(player(games, "Echo", **sampling), engine)([prompt], 1, ["c"])


@pytest.mark.parametrize("name", ["", "Echo"])
def test_evaluations_sample_by_settings_of_their_own(engine, games, name):
    """-1 takes the training's, and a temperature in the call comes before all."""
    plays = player(games, name, seed=0, max_completion_length=12, temperature=0.9, top_p=1.0, top_k=0, min_p=0.0,
                   eval_temperature=0.0, eval_top_p=-1.0, eval_top_k=-1, eval_min_p=-1.0)
    settings = plays.settings
    sample = with_engine(plays, engine)
    prompts = prompts_for([{}, {}])

    def ids(**sampling):
        engine.sampled = {}                                     # as after a weight sync
        return [r.ids.tolist() for r in sample(prompts, 3, ["eval 0", "eval 1"], **sampling)]

    trained = ids()
    greedy = ids(temperature=0)
    assert ids(prefix="eval_") == greedy != trained and greedy == [greedy[0]] * 6
    settings.eval_temperature = -1.0
    assert ids(prefix="eval_") == trained
    settings.eval_top_k = 3
    settings.eval_top_p = 0.9
    limited = ids(prefix="eval_")
    settings.top_k = 3
    settings.top_p = 0.9
    assert limited == ids() != trained and ids(prefix="eval_", temperature=0) == greedy


def one_turn(way, engine, prompts, n, seeds, *sampling):
    """Single answers: as they are sampled in most scripts, or as train_async.py plays them among episodes."""
    if way == "single":
        return single(engine, TOKENIZER, prompts, n, seeds, *sampling)
    return player("", eos_ids=ENDS).play_jobs(engine, jobs(prompts, n, seeds, *sampling))


@pytest.mark.parametrize("way", ["single", "played"])
@pytest.mark.parametrize("prompt", ["2+3=", [{"role": "user", "content": "2+3="}]])
def test_a_rollout_gets_its_row_and_its_text(engine, prompt, way):
    """One turn is what the engine generates, bit for bit. The text has no end token at its end, and is a
    message where the prompt is a list of messages."""
    rows = [{"prompt": prompt, "answer": str(i)} for i in range(2)]
    prompts = data.encode_rows(TOKENIZER, list(enumerate(rows)))
    rollouts = one_turn(way, engine, prompts, 3, [5, 9], 8, 0.9)
    assert [r.row for r in rollouts] == [row for row in rows for _ in range(3)]
    assert all(r.row is rows[i // 3] for i, r in enumerate(rollouts))
    bare = engine.generate(requests([prompt.ids for prompt in prompts], 3, [5, 9], 8, 0.9))
    assert identical(rollouts, bare)
    for r in rollouts:
        text = TOKENIZER.decode(r.sampled_ids[:-1] if r.finish_reason == "stop" else r.sampled_ids)
        assert r.completion == (text if prompt == "2+3=" else [{"role": "assistant", "content": text}])
        assert math.isnan(r.score) and r.parts == r.counts == {} and r.rewards == {}


def test_a_single_answer_is_the_same_either_way(engine):
    """In all that a rollout holds, bit for bit."""
    rows = [{"prompt": "2+3="}, {"prompt": [{"role": "user", "content": "2+3="}], "answer": "5"}]
    prompts = data.encode_rows(TOKENIZER, list(enumerate(rows)))
    for sampling in ((0.9,), (0.0,), (1.0, 0.8, 3, 0.1)):
        ways = [one_turn(way, engine, prompts, 4, [5, 900], 12, *sampling) for way in ("single", "played")]
        for alone, played in zip(*ways, strict=True):
            assert alone.row is played.row and not alone.problem and not played.problem
            kept_alone, kept_played = ({name: array.tobytes() for name, array in saved_rollouts.as_arrays([r]).items()}
                                       for r in (alone, played))
            assert kept_alone == kept_played and identical([alone], [played])
            assert ("0.kept_ids" in kept_alone) == (len(sampling) > 1)
            for name in ("ids", "spans", "logprobs"):
                assert getattr(alone, name).dtype == getattr(played, name).dtype
    # Every request has a seed of its own.
    assert len({r.ids.tobytes() for r in ways[0][:4]}) > 1
    assert [one_turn(way, engine, [], 4, [], 12, 1.0) for way in ("single", "played")] == [[], []]


@pytest.mark.parametrize("way", ["single", "played"])
def test_top_p_top_k_and_min_p_reach_the_engine(hf, way):
    prompts = prompts_for([{}])
    rollouts = one_turn(way, hf, prompts, 8, [5], 120, 1.0, 0.9, 2, 0.2)
    assert identical(rollouts, hf.generate(requests([prompts[0].ids], 8, [5], 120, 1.0, top_p=0.9, top_k=2, min_p=0.2)))
    assert not identical(rollouts, hf.generate(requests([prompts[0].ids], 8, [5], 120, 1.0, top_p=0.9, top_k=2)))
    assert not identical(rollouts, hf.generate(requests([prompts[0].ids], 8, [5], 120, 1.0)))


def test_an_episode_that_ends_at_once_is_what_the_engine_generates(engine, games):
    prompts = prompts_for([{}, {}])
    rollouts = player(games, "Once", eos_ids=ENDS).play_jobs(engine, jobs(prompts, 4, [5, 9], 120, 0.9))
    bare = engine.generate(requests([prompt.ids for prompt in prompts], 4, [5, 9], 120, 0.9))
    assert identical(rollouts, bare) and [[*r.rewards.values()] for r in rollouts] == [[1.0]] * 8


# ---------------------------------------------------------------- several turns

@pytest.mark.parametrize("name, texts", [
    ("Echo", ["a", "bb", "ccc"]),
    ("Counter", ['<tool_call>{"name": "add", "arguments": {"amount": 2}}</tool_call>', "It is 2."])])
def test_a_stop_string_ends_a_turn(games, name, texts):
    """Nobody reads it. The end token that the template puts behind a turn is inserted, and not trained."""
    rows = [{"answer": "."}]
    (plain,) = played(games, name, rows, [[text + "<|end|>" for text in texts]])
    (r,) = played(games, name, rows, [[text + "-###" for text in texts]], stop="###,-##")
    assert r.completion == plain.completion and r.finish_reason == "stop"
    assert [*r.rewards.values()] == [*plain.rewards.values()]
    ours, theirs = parts_of(r), parts_of(plain)
    assert ours[0] == theirs[0] and len(ours) == len(theirs) == 2 * len(texts)
    assert ours[1::2] == [text + "-###" for text in texts]
    assert ours[2::2] == ["<|end|>" + inserted for inserted in theirs[2::2]]


def test_logprobs_of_each_turn_are_those_of_a_full_forward(engine, games, folder):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    prompts = prompts_for([{"answer": "."}, {"answer": " more, please"}])
    rollouts = player(games, "Echo", eos_ids=ENDS).play_jobs(engine, jobs(prompts, 8, [5, 9], 120, 0.8))
    assert sum(len(r.spans) == 3 for r in rollouts) > 3
    for r in rollouts:
        with torch.no_grad():
            logps = (model(torch.from_numpy(r.ids).long()[None]).logits[0] / 0.8).log_softmax(-1)
        places = np.concatenate([np.arange(*span) for span in r.spans])
        expected = logps[places - 1, r.ids[places].astype(int)]
        assert (expected - torch.from_numpy(r.logprobs)).abs().max() < 1e-4
        # What was inserted is what the template writes for the environment's answer.
        for (start, end), (after, _) in zip(r.spans, r.spans[1:]):
            text = TOKENIZER.decode(r.ids[start:end - 1])       # without its end token
            assert TOKENIZER.decode(r.ids[end:after]) == (
                f"<|user|>{len(text)}{r.row['answer']}<|end|><|assistant|>")
        assert len(r.ids) == r.spans[-1, 1] and r.ids[:len(r.prompt_ids)].tolist() == r.prompt_ids.tolist()


def test_the_same_seeds_give_the_same_episodes_whatever_else_is_played(engine, games):
    """vLLM finds the beginning of each turn in its prefix cache, the second time the prompt as well."""
    plays = player(games, "Echo", eos_ids=ENDS)
    play = lambda prompts, seeds: plays.play_jobs(engine, jobs(prompts, 4, seeds, 120, 0.9))
    prompts = prompts_for([{"answer": "."}, {"answer": "!"}, {"answer": "?"}])
    first = play(prompts, [5, 9, 200])
    assert len({len(r.spans) for r in first}) > 1
    for other in (play(prompts, [5, 9, 200]), play(prompts[1:2], [9])):
        part = first if len(other) == 12 else first[4:8]
        assert [r.ids.tolist() for r in other] == [r.ids.tolist() for r in part]
        assert all(np.allclose(a.logprobs, b.logprobs, atol=1e-5) for a, b in zip(other, part))
    assert [r.ids.tolist() for r in play(prompts[1:2], [10])] != [r.ids.tolist() for r in first[4:8]]
    # The turns of an episode have seeds of their own.
    assert len({r.sampled_ids[:3].tobytes() for r in first}) == 12
    seeds = Says(*[["b<|end|>"] * 3] * 4)
    plays.play_jobs(seeds, jobs(prompts[:1], 4, [7], 120, 1.0))
    assert [r.seed for r in seeds.asked[:4]] == [7, 8, 9, 10] and len({r.seed for r in seeds.asked}) == 12


def test_an_environment_without_tools_scores_one_answer(tmp_path):
    (tmp_path / "game.py").write_text("class Game:\n    def reset(self, **row):\n        pass\n"
                                      "    def get_reward(self):\n        return 3.0")
    plays = player(tmp_path / "game.py", "Game")
    plays.trial(prompts_for([{}]))
    (r,) = plays.play_jobs(Says(["a<|end|>"]), jobs(prompts_for([{}]), 1, [0], 9, 1.0))
    assert (r.finish_reason, [*r.rewards.values()], parts_of(r)[1]) == ("stop", [3.0], "a<|end|>")


def test_a_row_is_the_conversation_with_what_was_sampled_as_it_was_sampled(games):
    """Every token is as it was sampled, also where the text would be encoded in another way."""
    tokenizer = pretrain.make_tokenizer()
    tokenizer.add_tokens(["on"])
    # TOKENIZER writes "on" as two tokens, which this one would join.
    plays, engine = player(games, "Script", tokenizer), Says(["on<|end|>", "y<|end|>"])
    row = {"replies": [["no", 0.5, False], ["ignored", 0.25, True]]}
    (r,) = plays.play_jobs(engine, jobs(prompts_for([row], tokenizer=tokenizer), 1, [0],
                      plays.settings.max_completion_length, 1.0))
    prompt = TOKENIZER("<|user|>Go.<|end|><|assistant|>").input_ids
    assert tokenizer("on").input_ids == [261]
    assert r.ids.tolist() == prompt + TOKENIZER("on<|end|><|user|>no<|end|><|assistant|>y<|end|>").input_ids
    assert r.spans.tolist() == [[6, 9], [14, 16]] and r.logprobs.tolist() == [-0.5] * 5
    assert [*r.rewards.values()] == [0.5, 0.25]
    assert r.ids.dtype == r.spans.dtype == np.int32 and r.logprobs.dtype == np.float32
    assert r.completion == [{"role": "assistant", "content": "on"}, {"role": "user", "content": "no"},
                            {"role": "assistant", "content": "y"}]
    # Each turn continues the row.
    assert [request.ids for request in engine.asked] == [prompt, r.ids[:14].tolist()]
    assert [request.max_tokens for request in engine.asked] == [120, 120 - 8]


def test_a_conversation_needs_no_environment(games):
    """Its row is the one of an episode that says the same, which a wrapper of the engine may play itself."""
    row = {"replies": [["no", 0.5, False], ["", 0.25, True]]}
    plays, engine = player(games, "Script", max_turn_length=7), Says(["on<|end|>", "y<|end|>"])
    (prompt,) = prompts_for([row])
    (r,) = plays.play_jobs(engine, jobs([prompt], 1, [9], 21, 1.0))
    talk = Conversation(Request(0, prompt.ids, 9, 21), plays.template)
    for turn, (text, expected) in enumerate(zip(("on<|end|>", "y<|end|>"), engine.asked), 1):
        request = talk.request(turn)
        assert request == expected
        ids = TOKENIZER(text).input_ids
        said, calls = plays.template.read(request.ids, ids, text.removesuffix("<|end|>"))
        assert said == {"role": "assistant", "content": text.removesuffix("<|end|>")} and calls == []
        talk.add_turn(Answer(0, ids, [-0.5] * len(ids), "stop", ((0, 4), (1, 5))), said)
        assert talk.add_reply([{"role": "user", "content": "no"}])
    # Five tokens have no room where five are left, because a token of an answer has to fit as well.
    talk.ids, talk.messages, talk.max_length = talk.ids[:-5], talk.messages[:-1], len(talk.ids)
    assert not talk.add_reply([{"role": "user", "content": "no"}]) and len(talk.ids) == talk.max_length - 5
    assert talk.ids == r.ids.tolist() and talk.logprobs == r.logprobs.tolist() and talk.messages == r.completion
    assert [*map(list, talk.spans)] == r.spans.tolist() and talk.versions == {0: 4, 1: 5, 3: 4, 4: 5}


def test_what_reset_returns_is_added_to_the_last_message(games):
    said, replies = [["a<|end|>"]], [[None, 1, True]]
    row = {"prompt": [{"role": "user", "content": "A"}, {"role": "assistant", "content": "B"},
                      {"role": "user", "content": "C"}]}
    kept = {"replies": replies} | row
    for opening, text in ((None, "C"), ("", "C"), (" D", "C D")):
        for system in ("", "Play."):
            plays = player(games, "Script", system_prompt=system)
            prompts = prompts_for([kept | {"opening": opening}], system_prompt=system)
            engine = Says(*said)
            (r,) = plays.play_jobs(engine, jobs(prompts, 1, [0], plays.settings.max_completion_length, 1.0))
            assert parts_of(r)[0] == "<|system|>Play.<|end|>" * bool(system) + (
                f"<|user|>A<|end|><|assistant|>B<|end|><|user|>{text}<|end|><|assistant|>")
            # max_completion_length counts what follows it.
            assert len(r.prompt_ids) == len(prompts[0].ids) + 2 * bool(opening)
            assert engine.asked[0].max_tokens == 120
            # Rewards and samples get the prompt that was answered.
            asked = [*row["prompt"][:-1], row["prompt"][-1] | {"content": text}]
            assert r.row == kept | {"opening": opening, "prompt": asked}


# ---------------------------------------------------------------- how an episode ends

ON, LAST, FAR = ["on", 0.5, False], ["", 2.0, True], ["x" * 100, 0.5, False]


@pytest.mark.parametrize("replies, texts, reason, turns, rewards", [
    ([LAST], ["a<|end|>"], "stop", 1, [2.0]),
    ([ON, LAST], ["a<|end|>", "b<|end|>"], "stop", 2, [0.5, 2.0]),
    ([[None, 1, True]], ["a<|end|>"], "stop", 1, [1.0]),
    # The last turn that there may be.
    ([ON, ON, LAST], ["a<|end|>"] * 3, "stop", 3, [0.5, 0.5, 2.0]),
    ([ON, ON, ON], ["a<|end|>"] * 3, "turns", 3, [0.5, 0.5, 0.5]),
    # The policy was cut off; what it said counts.
    ([ON, ON], ["a<|end|>", "b" * 200], "length", 2, [0.5, 0.5]),
    ([LAST], ["cut"], "length", 1, [2.0]),
    ([ON, FAR], ["a<|end|>", "b<|end|>"], "length", 2, [0.5, 0.5]),
    ([ON, "raise"], ["a<|end|>", "b<|end|>"], "error", 2, [math.nan]),
    (["exit", ON], ["a<|end|>"], "error", 1, [math.nan])])
def test_how_an_episode_ends(games, replies, texts, reason, turns, rewards):
    other = ([LAST], ["z<|end|>"])
    r, neighbour = played(games, "Script", [{"replies": replies}, {"replies": other[0]}], [texts, other[1]],
                       max_completion_length=60)
    assert (r.finish_reason, len(r.spans)) == (reason, turns) and neighbour.finish_reason == "stop"
    assert [*r.rewards.values()] == pytest.approx(rewards, nan_ok=True)
    # The row ends with the last turn, whose answer nobody reads.
    assert r.spans[-1, 1] == len(r.ids) and len(r.ids) - len(r.prompt_ids) <= 60
    assert len(r.completion) == 2 * turns - 1 and r.completion[-1]["role"] == "assistant"
    if reason == "error":
        assert re.search(rf"Script, in turn {turns}: raised \w+: .*; the row is {{", r.counts["problem"])


@pytest.mark.parametrize("replies, texts, reason, rewards", [
    ([["on", 0.5, False, False, {}], ["", 2.0, True, False, {}]], ["a<|end|>", "b<|end|>"], "stop", [0.5, 2.0]),
    ([["on", 0.5, False, False, {}], ["", 2.0, False, True, {}]], ["a<|end|>", "b<|end|>"], "turns", [0.5, 2.0]),
    # Gymnasium's observation of an episode that is over need be no text.
    ([[None, 2.0, True, True, {}]], ["a<|end|>"], "stop", [2.0]),
    # The older gym has no truncated, and some games have no info.
    ([["on", 0.5, False, {"won": False}], [None, 2, True, None]], ["a<|end|>", "b<|end|>"], "stop", [0.5, 2.0]),
    ([["on", 0.5, False, False], ["on", 2, False, True]], ["a<|end|>", "b<|end|>"], "turns", [0.5, 2.0])])
def test_an_environment_may_return_what_gymnasiums_do(games, replies, texts, reason, rewards):
    (r,) = played(games, "Gym", [{"replies": replies}], [texts])
    assert (r.finish_reason, [*r.rewards.values()]) == (reason, rewards)
    assert parts_of(r)[0] == "<|user|>Go. Seed 3.<|end|><|assistant|>"


@pytest.mark.parametrize("length, ended, turns", [(11, "stop", 2), (10, "length", 2), (9, "length", 1)])
def test_max_completion_length_counts_turns_and_what_is_inserted(games, length, ended, turns):
    """An answer of the environment is never cut: it is left out unless a token fits after it."""
    (r,) = played(games, "Script", [{"replies": [["four", 0, False], LAST]}], [["a<|end|>", "b<|end|>"]],
                  max_completion_length=length)
    assert (r.finish_reason, len(r.spans)) == (ended, turns)
    last = "b<|end|>" if length == 11 else "b"
    assert parts_of(r)[1:] == ["a<|end|>", "<|user|>four<|end|><|assistant|>", last][:2 * turns - 1]
    assert len(r.ids) - len(r.prompt_ids) == {11: 11, 10: 10, 9: 2}[length]
    assert len(r.logprobs) == {11: 4, 10: 3, 9: 2}[length]


@pytest.mark.parametrize("name, workers", [("Script", 2), ("AsyncScript", 0), ("AsyncScript", 2)])
def test_a_call_that_hangs_ends_its_episode_alone(games, name, workers):
    rows = [{"replies": [ON, ON, LAST]}, {"replies": [ON, "hang"]}, {"replies": [ON, LAST]}]
    rollouts = played(games, name, rows, [["a<|end|>"] * 3] * 3, call_timeout=1.0,
                      call_workers=workers)
    assert [r.finish_reason for r in rollouts] == ["stop", "timeout", "stop"]
    # What it had earned before counts.
    assert [[*r.rewards.values()] for r in rollouts] == [[0.5, 0.5, 2.0], [0.5, 0.0], [0.5, 2.0]]
    assert ("Script, in turn 2: took too long (call_timeout); the row is {"
            in rollouts[1].counts["problem"])
    assert rollouts[1].counts["seconds"] >= 1.0


def test_a_timeout_of_its_own_is_an_error_and_ctrl_c_is_none():
    async def fails():
        raise TimeoutError("no answer from the server")

    def stops():
        raise KeyboardInterrupt
    _, error, _ = user_code.outcome(fails, 5.0)
    assert isinstance(error, user_code.Failed) and str(error.__cause__) == "no answer from the server"
    with pytest.raises(KeyboardInterrupt):
        user_code.outcome(stops, 5.0)


def test_an_async_function_that_exits_ends_no_other_call():
    async def leaves():
        raise SystemExit(3)

    async def stays():
        return 7
    _, error, _ = user_code.outcome(leaves, 5.0)
    assert str(error) == "raised SystemExit: 3"
    assert user_code.outcome(stays, 5.0)[:2] == (7, None)


# ---------------------------------------------------------------- scores

def test_scores_of_episodes(games, tmp_path):
    rows = [{"replies": [ON, LAST]}, {"replies": ["raise"]}, {"replies": [LAST]}]
    texts = [["a<|end|>", "b<|end|>"], ["c<|end|>"], ["ddd<|end|>"]]
    path = tmp_path / "rewards.py"
    path.write_text("def letters(prompts, completions, replies, **columns):\n"
                    "    said = lambda c: [m['content'] for m in c if m['role'] == 'assistant']\n"
                    "    return [len(''.join(said(c))) for c in completions]\n")
    again = lambda: played(games, "Script", rows, texts)
    for reward in ("", "none"):
        first, second, third = scored(again(), "Script", reward=reward)
        assert (first.score, third.score) == (2.5, 2.0) and math.isnan(second.score)
        assert first.parts == {"Script": 2.5} and [*first.rewards.values()] == [0.5, 2.0]
        assert [*map(math.isnan, second.rewards.values())] == [True]
    # A reward function adds to the last turn.
    first, second, third = scored(again(), "Script", reward=f"{path}:letters")
    assert (first.score, third.score) == (4.5, 5.0) and math.isnan(second.score)
    assert first.parts == {"letters": 2.0, "Script": 2.5} and third.parts == {"letters": 3.0, "Script": 2.0}
    assert [*first.rewards.values()] == [0.5, 4.0]
    assert [*map(math.isnan, second.rewards.values())] == [True]
    # An environment that gives none leaves the score to the reward.
    rollouts = played(games, "Tools", [{}], [["ab<|end|>"]])
    assert rollouts[0].rewards == {} and player(games, "Tools").reward_part == ""
    with pytest.raises(ValueError, match="reward=none needs a reward_model, or an environment that gives"):
        scored(rollouts, "", reward="none")


# ---------------------------------------------------------------- tools

def call(name, arguments="{}"):
    return f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'


def test_tools_are_called_and_answer(games):
    """The class is as in TRL: reset takes columns, public methods are tools, get_reward is called last."""
    text = call("add", '{"amount": 3, "times": 2}')
    turns = [f"I add.{text}<|end|>", call("wait") + call("add", '{"amount": 1}') + "<|end|>", "Done.<|end|>"]
    for workers in (0, 2):
        for name in ("Counter", "AsyncCounter"):
            (r,) = played(games, name, [{"start": 5}], [turns], call_workers=workers)
            assert parts_of(r) == [
                "<|system|>Tools: add(amount, times) wait()<|end|>"
                "<|user|>Go. Start at 5.<|end|><|assistant|>",
                turns[0], "<|user|><tool_response>The total is 11.</tool_response><|end|><|assistant|>",
                turns[1], "<|user|><tool_response>11</tool_response><|end|>"
                "<|user|><tool_response>The total is 12.</tool_response><|end|><|assistant|>", turns[2]]
            assert r.finish_reason == "stop" and [*r.rewards.values()] == [0.0, 0.0, 12.0]
            assert (r.counts["calls"], r.counts["failures"]) == (3, 0)
            first, answer, second, *results, last = r.completion
            function = {"name": "add", "arguments": {"amount": 3, "times": 2}}
            assert first == {"role": "assistant", "content": "I add.", "tool_calls": [
                {"id": "call00000", "type": "function", "function": function}]}
            assert answer == {"role": "tool", "name": "add", "tool_call_id": "call00000",
                              "content": "The total is 11."}
            assert [each["content"] for each in results] == ["11", "The total is 12."]
            assert last == {"role": "assistant", "content": "Done."}
            assert scored([r], name)[0].parts == {name: 12.0}


@pytest.mark.parametrize("said, answer", [
    (call("add", '{"amount": -1}'), "{'error': '-1 is negative'}"),
    (call("add", '{"amount": "x"}'), "'<' not supported between instances of 'str' and 'int'"),
    (call("sub"), "there is no tool sub; there are add, wait"),
    (call("reset"), "there is no tool reset"), (call("_note"), "there is no tool _note"),
    (call("last"), "there is no tool last"), (call("get_reward"), "there is no tool get_reward"),
    (call("add"), "add() missing 1 required positional argument: 'amount'"),
    (call("wait", '{"seconds": 1}'), "wait() got an unexpected keyword argument 'seconds'"),
    (call("add", '[1]'), "the arguments are no object"), (call("add", "7"), "the arguments are no object"),
    (call("add", '{"amount": ' + "[" * 500 + "]" * 500 + "}"), "no call of a tool: RecursionError"),
    (call("add", r'"{\"amount\""'), "no call of a tool: JSONDecodeError"),
    ("<tool_call>{'name': 'add'}</tool_call>", "no call of a tool: JSONDecodeError"),
    ("<tool_call></tool_call>", "no call of a tool: JSONDecodeError"),
    ("<tool_call>[1, 2]</tool_call>", "no call of a tool: TypeError"),
    ('<tool_call>{"arguments": {}}</tool_call>', "no call of a tool: KeyError('name')"),
    ('<tool_call>{"name": ["add"]}</tool_call>', "there is no tool ['add']"),
    ('<tool_call>' + "[" * 3000, "no call of a tool: RecursionError"),
    # It wrote the end token before the end of the call.
    ('<tool_call>{"name": "add", "argum', "no call of a tool: JSONDecodeError"),
    # Half a surrogate pair.
    (r'<tool_call>{"name": "\ud800"}</tool_call>', r"there is no tool \ud800")])
def test_the_policy_reads_what_is_wrong_with_a_call(games, said, answer):
    (r,) = played(games, "Counter", [{}], [[said + "<|end|>", "Oh.<|end|>"]])
    assert r.finish_reason == "stop" and (r.counts["calls"], r.counts["failures"]) == (1, 1)
    assert parts_of(r)[2].startswith("<|user|><tool_response>{'error': ") and answer in parts_of(r)[2]
    assert [*r.rewards.values()] == [0.0, 0.0]


def test_neither_arguments_nor_results_that_are_nested_deeply_end_a_run(games):
    """Rewards get copies of the messages, also in another process."""
    deep, flat = "[" * 500 + "]" * 500, "[" * 49 + "]" * 49
    for arguments in (deep, "[" * 400 + "]" * 400, flat):
        (r,) = played(games, "Nests", [{}], [[call("give", f'{{"what": {arguments}}}') + call("nest", '{"levels": 500}')
                                              + call("nest", '{"levels": 5000}') + "<|end|>", "b<|end|>"]])
        assert pickle.loads(pickle.dumps(copy.deepcopy(r.completion))) == r.completion
        given, nested, failed = [message["content"] for message in r.completion[1:4]]
        assert given == "got 49" if arguments is flat else "no call of a tool: RecursionError" in given["error"]
        assert nested == deep and "RecursionError" not in str(nested) and "recursion" in failed["error"]
        assert r.counts["failures"] == 1 + (arguments is not flat) and r.finish_reason == "stop"


def test_a_tool_that_changes_its_arguments_changes_nothing_else(tmp_path):
    (tmp_path / "tools.py").write_text('''
class Changes:
    def reset(self, **row): ...

    def smallest(self, numbers: list, options: dict) -> int:
        """Finds.

        Args:
            numbers: All.
            options: More.
        """
        numbers.sort()
        options.clear()
        return numbers.pop(0)
''')
    arguments = {"numbers": [3, 1, 2], "options": {"a": [1]}}
    text = f'<tool_call>{json.dumps({"name": "smallest", "arguments": arguments})}</tool_call><|end|>'
    (r,) = played(tmp_path / "tools.py", "Changes", [{}], [[text, "1<|end|>"]])
    assert r.completion[0]["tool_calls"][0]["function"]["arguments"] == arguments
    assert r.completion[1]["content"] == "1"


def test_tools_are_the_bound_methods_as_in_trl(games):
    plays = player(games, "Bound")
    assert [tool["function"]["name"] for tool in plays.tools] == ["made", "look", "whose"]
    (r,) = played(games, "Bound", [{}], [[call("look") + call("made") + call("whose") + "<|end|>", "b<|end|>"]])
    assert [message["content"] for message in r.completion[1:4]] == ["seen", "from elsewhere", "Bound"]


def test_a_good_call_beside_a_bad_one_is_made(games):
    said = call("add", '{"amount": 4}') + call("sub", '{"from": 1}') + '<tool_call>{"name": "wait"}<|end|>'
    (r,) = played(games, "Counter", [{}], [[said, "Oh.<|end|>"]])
    assert re.fullmatch(r"<\|user\|><tool_response>The total is 4.</tool_response><\|end\|>"
                        r"<\|user\|><tool_response>{'error': .*}</tool_response><\|end\|>"
                        r"<\|user\|><tool_response>4</tool_response><\|end\|><\|assistant\|>", parts_of(r)[2])
    assert [*r.rewards.values()] == [0.0, 4.0] and (r.counts["calls"], r.counts["failures"]) == (3, 1)
    assert [one["function"]["arguments"] for one in r.completion[0]["tool_calls"]] == [{"amount": 4}, {"from": 1}, {}]


@pytest.mark.parametrize("texts, settings, reason, reward", [
    # A call in a turn that was cut off is not made.
    ([call("add", '{"amount": 4}') + "..."], {}, "length", 0.0),
    ([call("add", '{"amount": 4}') + "<|end|>"] * 2, {"max_turns": 2}, "turns", 8.0),
    # The result does not fit, but the call was made.
    ([call("add", '{"amount": 4}') + "<|end|>"], {"max_completion_length": 70}, "length", 4.0),
    ([call("wait") + "<|end|>", "b" * 200], {"max_completion_length": 160}, "length", 0.0)])
def test_an_episode_with_tools_is_rewarded_however_it_ends(games, texts, settings, reason, reward):
    (r,) = played(games, "Counter", [{}], [texts], **settings)
    assert r.finish_reason == reason and len(r.spans) == len(texts)
    assert [*r.rewards.values()] == [0.0] * (len(texts) - 1) + [reward]


def test_arguments_may_be_called_parameters(games):
    """As Llama's models call them. The tool must not be called without them, which may be possible."""
    text = '<tool_call>{"name": "add", "parameters": {"amount": 4}}</tool_call><|end|>'
    (r,) = played(games, "Counter", [{}], [[text, "b<|end|>"]])
    assert r.completion[0]["tool_calls"][0]["function"]["arguments"] == {"amount": 4}
    assert sum(r.rewards.values()) == 4 and r.counts["failures"] == 0


# Such a description of what the model writes comes with a tokenizer.
PARSED = {"defaults": {"role": "assistant"}, "start_anchor": "<|assistant|>", "fields": {
    "thinking": {"open": "<think>", "close": "</think>", "content": "text"},
    "tool_calls": {"open_pattern": r"CALL (?P<name>\w+) ", "close_pattern": r";\s*", "repeats": True,
                   "content": "json", "transform": {"type": "function", "function": {
                       "name": "{name}", "arguments": "{content}"}}},
    "content": {"close_pattern": r"<\|end\|>", "content": "text"}}}


@pytest.mark.parametrize("given, got", [
    ({"whole": "7", "part": "2.5", "flag": "true"}, [7, 2.5, True]),
    ({"whole": "-7", "part": "2", "flag": "False"}, [-7, 2, False]),
    # Otherwise they are as the policy wrote them.
    ({"whole": "7.5", "part": "x", "flag": "maybe"}, ["7.5", "x", "maybe"]),
    ({"whole": 7.5, "part": 2, "flag": 0}, [7.5, 2, 0]),
    ({"whole": None, "text": "7", "several": ["7"]}, [None, "7", ["7"]])])
def test_strings_are_numbers_where_the_type_hint_is_one(games, given, got):
    """With a response template, whose calls may have no other values than strings."""
    tokenizer = pretrain.make_tokenizer()
    tokenizer.response_template = PARSED
    plays = player(games, "Hinted", tokenizer, max_completion_length=5000)
    (r,) = plays.play_jobs(Says([f"CALL take {json.dumps(given)};<|end|>", "b<|end|>"]), jobs(prompts_for([{}], plays.tools), 1,
                      [0], 5000, 1.0))
    assert r.completion[1]["content"] == repr(got)
    assert [*r.completion[0]["tool_calls"][0]["function"]["arguments"].values()] == got


def test_calls_in_the_form_that_the_tokenizer_describes(games):
    tokenizer = pretrain.make_tokenizer()
    tokenizer.response_template = PARSED
    texts = ['I add. CALL add {"amount": 3}; CALL wait {};<|end|>', 'CALL add {"amount; <|end|>',
             call("add", '{"amount": 100}') + "<|end|>"]
    plays = player(games, "Counter", tokenizer, max_completion_length=1000)
    (r,) = plays.play_jobs(Says(texts), jobs(prompts_for([{}], plays.tools), 1, [0],
                      plays.settings.max_completion_length, 1.0))
    parts = parts_of(r)
    assert parts[2] == ("<|user|><tool_response>The total is 3.</tool_response><|end|>"
                        "<|user|><tool_response>3</tool_response><|end|><|assistant|>")
    assert "'error': " in parts[4] and "no call of a tool: " in parts[4] and "JSON" in parts[4]
    # Another form is no call.
    assert r.finish_reason == "stop" and [*r.rewards.values()] == [0.0, 0.0, 3.0]
    assert (r.counts["calls"], r.counts["failures"]) == (3, 1)


def test_what_a_stop_string_has_cut_off_is_not_read_by_a_response_template(games):
    tokenizer = pretrain.make_tokenizer()
    tokenizer.response_template = PARSED
    plays = player(games, "Counter", tokenizer, max_completion_length=1000, stop="###")
    (r,) = plays.play_jobs(Says(['CALL add {"amount": 3};###', "Three.###"]), jobs(prompts_for([{}], plays.tools), 1, [0],
                      plays.settings.max_completion_length, 1.0))
    assert r.counts["calls"] == 1 and r.counts["failures"] == 0
    assert r.completion[0]["content"] == "" and r.completion[-1]["content"] == "Three."


def test_a_call_in_a_thought_that_the_prompt_has_begun_is_none(games):
    tokenizer = pretrain.make_tokenizer()
    tokenizer.response_template = PARSED
    tokenizer.chat_template = pretrain.CHAT_TEMPLATE.replace("'<|assistant|>'", "'<|assistant|><think>'")
    plays = player(games, "Counter", tokenizer)
    texts = ['CALL add {"amount": 3}; is how.</think>CALL add {"amount": 4};<|end|>', "</think>Done.<|end|>"]
    prompts = prompts_for([{}], plays.tools, tokenizer)
    (r,) = plays.play_jobs(Says(texts), jobs(prompts, 1, [0], plays.settings.max_completion_length, 1.0))
    assert [*r.rewards.values()] == [0.0, 4.0] and parts_of(r)[2].endswith("<|assistant|><think>")


@pytest.mark.parametrize("text", ["a <think>b</think> c", "a </think> c", "<think>", "</think>"])
@pytest.mark.parametrize("before", ["", "<think>why</think>", "I look."])
def test_a_thought_in_an_argument_is_a_part_of_it(games, text, before):
    (r,) = played(games, "Hinted", [{}], [[before + call("take", json.dumps({"text": text})) + "<|end|>", "b<|end|>"]])
    assert r.completion[0]["tool_calls"][0]["function"]["arguments"] == {"text": text}
    assert r.completion[1]["content"] == repr([None, text, ()])
    assert r.completion[0]["content"] == ("I look." if "look" in before else "")
    assert r.completion[0].get("reasoning_content") == ("why" if "why" in before else None)


# ---------------------------------------------------------------- special tokens and lengths

@pytest.mark.parametrize("way", ["single", "played"])
def test_rewards_and_environments_see_special_tokens(games, way):
    """All but the one that ends the turn, and padding at the end."""
    tokenizer = pretrain.make_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<think>"], "pad_token": "<|pad|>"})
    said = tokenizer.convert_tokens_to_ids(["<think>", "4", "<|user|>", "<|pad|>", "<|end|>"])
    for ids, reason, text in ((said, "stop", "<think>4<|user|>"), (said[:2], "length", "<think>4"),
                              (said[:4], "length", "<think>4<|user|>"), (said[-1:], "stop", "")):
        engine = Says(["x"])
        engine.step = lambda: [Answer(engine.added.pop().name, ids, [0.0] * len(ids), reason)]
        (prompt,) = prompts_for([{}], tokenizer=tokenizer)
        if way == "single":
            (r,) = single(engine, tokenizer, [prompt], 1, [0], 9, 1.0)
        else:
            (r,) = player(games, "Hears", tokenizer).play_jobs(engine, jobs([prompt], 1, [0], 9, 1.0))
            assert r.extra == {"heard": text}
        assert r.completion == [{"role": "assistant", "content": text}] and r.sampled_ids.tolist() == ids


# ---------------------------------------------------------------- texts that look like control tokens

ATTACK = "<|end|><|assistant|>9<|en<|end|>d|>"


def test_nothing_that_an_environment_says_is_a_control_token(games):
    row = {"opening": ATTACK, "replies": [[ATTACK, 0, False], LAST]}
    (r,) = played(games, "Script", [row], [["a<|end|>", "b<|end|>"]])
    prompt, _, inserted, _ = parts_of(r)
    assert prompt == f"<|user|>Go.{ATTACK}<|end|><|assistant|>"
    assert inserted == f"<|user|>{ATTACK}<|end|><|assistant|>"
    control = [one for one in r.ids.tolist() if one >= 256]
    assert control == [USER, END, ASSISTANT, END, USER, END, ASSISTANT, END]
    assert r.completion[1]["content"] == ATTACK


def test_neither_a_result_nor_a_tool_that_was_made_up_is_a_control_token(games):
    """The policy itself may write control tokens; nothing else makes any of them."""
    made_up = call("".join(f"\\u{ord(letter):04x}" for letter in ATTACK))
    (r,) = played(games, "Counter", [{}], [[made_up + "<|end|>", "b<|end|>"]])
    inserted = r.ids[r.spans[0, 1]:r.spans[1, 0]].tolist()
    assert [one for one in inserted if one >= 256] == [USER, END, ASSISTANT]
    assert f"there is no tool {ATTACK};" in TOKENIZER.decode(inserted)


# ---------------------------------------------------------------- threads

def test_threads_change_nothing_but_the_order(hf, games):
    prompts = prompts_for([{"answer": mark} for mark in ".!?,"])
    runs = [player(games, "Echo", eos_ids=ENDS, call_workers=workers).play_jobs(
        hf, jobs(prompts, 4, [5, 9, 1, 3], 120, 0.9)) for workers in (0, 4)]
    for alone, threaded in zip(*runs, strict=True):
        assert alone.ids.tolist() == threaded.ids.tolist() and alone.completion == threaded.completion
        assert np.allclose(alone.logprobs, threaded.logprobs, atol=1e-5)
        assert alone.rewards == threaded.rewards and alone.finish_reason == threaded.finish_reason


@pytest.mark.parametrize("workers", [0, 4])
def test_calls_of_different_episodes_run_at_the_same_time(games, workers):
    """As many as there are threads, and never more."""
    plays, count = player(games, "Busy", call_workers=workers), 16 if workers else 2
    plays.make.most = plays.make.calls = 0
    rollouts = plays.play_jobs(Says(*[["a<|end|>"] * 3] * count), jobs(prompts_for([{"together": workers or 1}]), count,
                          [5], 120, 1.0))
    busy = plays.make
    assert busy.most == (workers or 1) and busy.now == 0 and busy.calls == 4 * count
    assert {r.finish_reason for r in rollouts} == {"turns"}


def test_the_engine_goes_on_while_an_environment_works(games):
    engine = Says(["a<|end|>"], ["b<|end|>"])
    engine.at_once = 1
    rollouts = player(games, "Waits", call_workers=2).play_jobs(
        engine, jobs(prompts_for([{"first": True}, {"first": False}]), 1, [0, 0], 120, 1.0))
    assert [[*r.rewards.values()] for r in rollouts] == [[1.0], [1.0]]


def test_a_thread_that_hangs_leaves_the_others_theirs():
    table = episodes.OpenEpisodes(player("", call_workers=2, call_timeout=1.0), Says())
    threads, release = ThreadPoolExecutor(4), threading.Event()
    calls = [threads.submit(table._call, function) for function in (
        lambda: release.wait(60), lambda: 1, lambda: 2 / 0, lambda: 3)]
    results = [(value, type(error)) for value, error, _ in (call.result(9) for call in calls)]
    assert results == [(None, user_code.TimeUp), (1, type(None)), (None, user_code.Failed), (3, type(None))]
    # What the call that hung returns later is dropped.
    release.set()
    assert threads.submit(table._call, lambda: 5).result(9)[0] == 5 and calls[0].result()[0] is None


def test_a_call_has_its_own_time_however_late_the_engine_looks():
    """As after a long step of an engine: one call has long ended, one took too long, and one still runs."""
    table = episodes.OpenEpisodes(player("", call_workers=3, call_timeout=0.3), Says())
    threads, release = ThreadPoolExecutor(3), threading.Event()
    calls = [threads.submit(table._call, function) for function in (
        lambda: 1, lambda: time.sleep(0.5), lambda: release.wait(60))]
    time.sleep(1)
    late = (None, user_code.TimeUp)
    assert [(value, type(error)) for value, error, _ in (call.result(9) for call in calls)] == [
        (1, type(None)), late, late]
    release.set()


# ---------------------------------------------------------------- environments that are refused

START = "class Game:\n    def reset(self, **row):\n        {}\n    def step(self, text):\n        {}\n"
TOOL = "class Game:\n    def reset(self, **row):\n        pass\n    def tool(self{}) -> str:\n        {}\n"
STEP = START.format("pass", "return 'on', 0.0, False")
MANY = [{"role": "user", "content": "Go."}, {"role": "assistant", "content": "I"}]


@pytest.mark.parametrize("source, told", [
    ("", [r"environment: \S+ has no Class Game at its top level"]),
    ("class Gome:\n    pass", ["has no Class Game at its top level"]),
    ("Game = 3", ["has no Class Game"]), ("1 / 0", ["game.py raised ZeroDivisionError"]),
    ("class Game:\n    def __init__(self, size):\n        pass",
     [r"environment=\S+:Game: Game\(\) raised TypeError: .*missing 1 required positional argument: 'size'"]),
    ("class Game:\n    def __init__(self):\n        raise OSError('no board')",
     [r"environment=\S+:Game: Game\(\) raised OSError: no board"]),
    ("class Game:\n    def start(self):\n        pass", ["has no method reset; it has start$"]),
    ("class Game:\n    pass", ["has no method reset; it has none"]),
    (TOOL.format(", word", '"""Works.\n\n        Args:\n            word: A word.\n        """'),
     ["environment=.*:Game: a tool needs type hints and a docstring", "word"]),
    (TOOL.format("", "return ''"), ["environment=.*:Game: a tool needs .* docstring"]),
    (TOOL.format(", word: str", '"""Works."""'), ["a tool needs type hints and a docstring", "word"])])
def test_a_class_that_is_no_environment_is_refused(tmp_path, source, told):
    (tmp_path / "game.py").write_text(source)
    with pytest.raises(ValueError) as error:
        player(tmp_path / "game.py", "Game")
    for part in told:
        assert re.search(part, str(error.value)), str(error.value)


def test_an_environment_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ValueError, match=f"environment: no such file: {tmp_path}/none.py"):
        player(tmp_path / "none.py", "Game")
    with pytest.raises(ValueError, match="environment must be file.py:Class or package.module:Class, not 'game'"):
        player("", environment="game")


def test_a_file_is_looked_for_here_and_then_in_the_project(tmp_path, monkeypatch):
    """As config files name some of the project's own, and a run may start in any folder."""
    name = "environments/guess_number.py"
    monkeypatch.setattr(user_code, "STARTED_IN", str(tmp_path))
    assert user_code.source_of(name) == f"{ROOT}/{name}"
    assert player("", environment=f"{name}:Guess").methods["step"]
    assert user_code.source_of(f"{ROOT}/{name}") == f"{ROOT}/{name}"
    with pytest.raises(ValueError, match="^environment: no such file: environments/none.py$"):
        player("", environment="environments/none.py:Guess")
    (tmp_path / "environments").mkdir()
    (tmp_path / name).write_text("class Gess:\n    pass")
    assert user_code.source_of(name) == f"{tmp_path}/{name}"
    with pytest.raises(ValueError, match=f"^environment: {name} has no Class Guess at its top level"):
        player("", environment=f"{name}:Guess")


@pytest.mark.parametrize("source, told", [
    (START.format("raise KeyError('lost')", ""), "before its first turn: raised KeyError: 'lost'; the row is {'prompt'"),
    (START.format("import sys; sys.exit(0)", ""), "before its first turn: raised SystemExit: 0; the row is {"),
    (START.format("return 3", ""), "reset returned 3, neither a string nor None; the row is {"),
    (START.format("return 'x' * 60", ""), "reset returned so much that the prompt has 66 tokens, more than "
                                          "max_prompt_length=64; the row is {"),
    (START.replace("def", "async def").format("import asyncio; await asyncio.sleep(60)", ""),
     "before its first turn: took too long (call_timeout); the row is {"),
    (STEP.replace("**row", "number"), "reset needs a column number; the columns are prompt, secret"),
    (STEP.replace(", text", ""), "in turn 1: raised TypeError: Game.step() takes 1 positional argument"),
    (START.format("", "raise KeyError('lost')"), "in turn 1: raised KeyError: 'lost'; the row is {"),
    (START.replace("def", "async def").format("", "import asyncio; await asyncio.sleep(60)"),
     "in turn 1: took too long (call_timeout); the row is {"),
    (START.format("", "pass"), "in turn 1: step returned None, not (observation, reward, done)"),
    (START.format("", "return 'on', 0.0, False, 1, {}"), "in turn 1: step returned ('on', 0.0, False, 1, {}), not"),
    (START.format("", "return 'on', 0.0, False, []"), "in turn 1: step returned ('on', 0.0, False, []), not"),
    (START.format("", "return 'on', 0.0"), "in turn 1: step returned ('on', 0.0), not"),
    (START.format("", "return ['on', 0.0, True]"), "in turn 1: step returned ['on', 0.0, True], not"),
    (START.format("", "return 5, 0.0, False"), "in turn 1: step returned (5, 0.0, False), not"),
    (START.format("", "return None, 0.0, False"), "in turn 1: step returned (None, 0.0, False), not"),
    (START.format("", "return 'on', 0.0, 1"), "in turn 1: step returned ('on', 0.0, 1), not"),
    (START.format("", "return 'on', float('nan'), False"), "in turn 1: nan is not a finite number"),
    (START.format("", "return 'on', 1e39, False"), "in turn 1: 1e+39 is not a finite number"),
    (START.format("", "return 'on', None, False"), "in turn 1: None is not a finite number"),
    (START.format("", "return 'on', 10 ** 400, True"), "is not a finite number"),
    (TOOL.format("", '"""Works."""') + "    def get_reward(self):\n        return 'one'",
     "in turn 1: 'one' is not a finite number"),
    (TOOL.format("", '"""Works."""') + "    def get_reward(self):\n        raise KeyError('lost')",
     "in turn 1: raised KeyError: 'lost'; the row is {")])
def test_an_environment_that_fails_is_refused_by_a_trial(tmp_path, source, told):
    """With its name, the row and the turn."""
    (tmp_path / "game.py").write_text(source.replace("        \n", "        pass\n"))
    plays = player(tmp_path / "game.py", "Game", call_timeout=0.3 if "timeout" in told else 10.0)
    prompts = prompts_for([{"secret": 7}])
    with pytest.raises(ValueError) as error:
        plays.trial(prompts)
    assert str(error.value).startswith("environment=") and ":Game, " in str(error.value) and told in str(error.value), str(error.value)
    assert "column" in told or str(error.value).endswith(
        "; the row is {'prompt': [{'role': 'user', 'content': 'Go.'}], 'secret': 7}")
    # During the run what it must not return ends the run, and what it raises ends the episode.
    try:
        (r,) = plays.play_jobs(Says(["a<|end|>"]), jobs(prompts, 1, [0], plays.settings.max_completion_length, 1.0))
        assert told in r.counts["problem"] and ("raised" in told or "took" in told or "so much" in told)
    except ValueError as later:
        assert told in str(later) and not ("raised" in told or "took" in told)


@pytest.mark.parametrize("name, row", [("Script", {"replies": [[None, 1, True]]}), ("Counter", {})])
def test_a_trial_plays_after_every_prompt(games, name, row):
    """Also where the first episode ends after its first turn; and what it plays has no effect."""
    plays = player(games, name)
    plays.trial(prompts_for([row, row], plays.tools))
    broken = {"opening": 3, "start": "x"} if name == "Script" else {"start": "x"}
    with pytest.raises(ValueError, match="(Script, .* turn: reset returned 3|Counter, .*: raised ValueError)"):
        plays.trial(prompts_for([row, row | broken], plays.tools))


CONTENTS = "{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.mark.parametrize("row, chat, template, told", [
    ({"prompt": "Go."}, True, pretrain.CHAT_TEMPLATE, "needs prompts that are lists of .* unlike 'Go.'"),
    ({"prompt": MANY}, True, pretrain.CHAT_TEMPLATE, r"needs .* not the assistant's, unlike \[{.*'I'}\]"),
    ({}, False, pretrain.CHAT_TEMPLATE, "needs chat=True and a tokenizer with a chat template"),
    ({}, True, None, "needs chat=True and a tokenizer with a chat template"),
    ({}, True, CONTENTS, "the chat template ends a turn with none of the tokens")])
def test_prompts_and_tokenizers_without_a_chat_are_refused(games, row, chat, template, told):
    tokenizer = pretrain.make_tokenizer()
    tokenizer.chat_template = template
    with pytest.raises(ValueError, match=told) as error:
        plays = player(games, "Script", tokenizer, chat=chat)
        plays.trial(prompts_for([{"replies": [LAST]} | row]))
    assert template == CONTENTS or str(error.value).startswith(f"environment={games}:Script ")
