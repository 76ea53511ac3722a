"""Whole runs with an environment: what they write down, ranks, resume, and environments that break."""
import json
import os
import signal

import pytest
from transformers import AutoTokenizer, GenerationConfig

import runs
from runs import begin, finish, kept_rollouts, lines, refused, with_defaults, without_times
from test_many_ranks import gradient
from test_survive import count_lines, wait_for

SMALL = {"task": "arithmetic", "prompts_per_step": 4, "num_generations": 4, "max_turns": 3,
         "max_completion_length": 48, "train_prompts": 64, "eval_prompts": 4, "eval_samples": 1,
         "max_steps": 2, "save_interval": 1, "warmup_steps": 0, "learning_rate": 1e-3, "engine": "hf"}
SCRIPTS = {"train_grpo.py": {}, "train_dapo.py": {"num_mini_batches": 1},
           "train_ppo.py": {"critic_warmup_steps": 0, "critic_learning_rate": 1e-3, "num_mini_batches": 1}}
# The prompt names the tools, and their results are long.
TOOLS = {"max_prompt_length": 80, "max_completion_length": 170}
ENDED = [f"episodes/ended/{how}" for how in ("done", "length", "turns", "timeout", "error")]
OWN = [*ENDED, "episodes/turns", "episodes/inserted_tokens", "tools/call_frequency",
       "tools/failure_frequency", "timing_s/environment"]


@pytest.fixture
def train(talker, tmp_path):
    """Runs a script with an environment; returns its metrics and what it printed."""
    def run(environment, name="run", script="train_grpo.py", ranks=1, code=0, **settings):
        defaults = SMALL | SCRIPTS[script] | {"model": talker, "environment": environment}
        return runs.train(script, tmp_path / name, [], defaults | settings, ranks=ranks, code=code)
    return run


def broken_game(tmp_path, games, body):
    """An environment like Letters, whose step does this first.

    It numbers its episodes: 0 and 1 are a trial, 2 to 5 the first evaluation, 6 to 21 the first step.
    """
    path = tmp_path / "broken.py"
    path.write_text(f"""{games.read_text()}
import asyncio, math, os, time
count = -1
class Broken(Letters):
    def reset(self, **row):
        global count
        count += 1
        self.number, self.turn = count, 0
        return super().reset(**row)
    async def step(self, text):
        self.turn += 1
{body}
        return super().step(text)
""")
    return f"{path}:Broken"


# ---------------------------------------------------------------- what a run leaves

@pytest.mark.parametrize("script", SCRIPTS)
def test_a_run_with_an_environment(train, talker, games, tmp_path, script):
    metrics, output = train(f"{games}:Letters", script=script, max_steps=3, eval_interval=1,
                            keep_checkpoints=3)
    for line in metrics[:3]:
        assert line.keys() >= set(OWN) and line["grad_norm"] > 0
        # In all turns, before the first sync and after it.
        assert 0 < line["sampling/sampling_logp_difference/max"] < 1e-4
        assert sum(line[name] for name in ENDED) == pytest.approx(1) and line["rewards/unscored"] == 0
        assert 1.2 < line["episodes/turns"] < 3
        assert line["rewards/Letters/mean"] == pytest.approx(line["reward"])
        assert min(line[name] for name in ENDED[:3]) > 0 == line["tools/call_frequency"]
    assert metrics[0]["eval/rewards/Letters/mean"] == metrics[0]["eval/mean@1"] > 0
    if script == "train_dapo.py":
        # DAPO's penalty counts all that stands behind the prompt, what the environment said as well.
        rows = kept_rollouts(tmp_path / "run", 1)
        behind = [len(row["ids"]) - row["spans"][0][0] for row in rows]
        shaped = [row["score"] + min(0, max(-1, (48 - 12 - n) / 12)) for row, n in zip(rows, behind)]
        assert metrics[1]["rewards/shaped/mean"] == pytest.approx(sum(shaped) / len(rows), rel=1e-4)
        assert any(48 - 12 < n != row["length"] for row, n in zip(rows, behind))
    samples = lines(tmp_path / "run", "samples.jsonl")
    assert len(samples) == 12
    for sample in samples:
        roles = [message["role"] for message in sample["completion"]]
        assert roles == (["assistant", "user"] * 3)[:len(roles)] and len(roles) % 2
        assert console_line(sample) in output
    assert " heard. " in output
    if script != "train_ppo.py":
        episodes_are_as_logged(tmp_path / "run", metrics[1], talker)


def console_line(sample):
    """The end of the console's line for a line of samples.jsonl."""
    text = " ".join(str(message["content"] or "") for message in sample["completion"])
    return f"     -> {text[-40:]!r:44} reward {sample['reward']:g}, truth {sample['truth']!r}\n"


def episodes_are_as_logged(out_dir, line, model):
    """The figures of step 1 and the messages are those of the tokens that it trained on."""
    rows, tokenizer = kept_rollouts(out_dir, 1), AutoTokenizer.from_pretrained(model)
    ends = GenerationConfig.from_pretrained(model).eos_token_id
    mean = lambda values: pytest.approx(sum(values) / 16)
    assert len(rows) == 16 and line["completions/mean_length"] == mean([row["length"] for row in rows])
    assert line["episodes/turns"] == mean([len(row["spans"]) for row in rows])
    assert line["episodes/inserted_tokens"] == mean(
        [len(row["ids"]) - row["spans"][0][0] - row["length"] for row in rows])
    for name, reason in zip(ENDED, ("stop", "length", "turns", "timeout", "error")):
        assert line[name] == mean([row["finish_reason"] == reason for row in rows])
    for row in rows:
        said, heard = row["completion"][::2], row["completion"][1::2]
        assert tokenizer.decode(row["ids"][:row["spans"][0][0]]).endswith("? Speak.<|end|><|assistant|>")
        for (start, end), message in zip(row["spans"], said, strict=True):
            ended = row["ids"][end - 1] in ends
            text = tokenizer.decode(row["ids"][start:end - 1 if ended else end])
            assert message == {"role": "assistant", "content": text}
        assert row["spans"][-1][1] == len(row["ids"]) and len(heard) == len(said) - 1
        for (_, start), (end, _), message in zip(row["spans"], row["spans"][1:], heard):
            inserted = f"<|user|>{message['content']}<|end|><|assistant|>"
            assert tokenizer.decode(row["ids"][start:end]) == inserted
        paid = [sum(ord(c) % 2 == 0 for c in message["content"]) / 12 for message in said]
        assert row["score"] == pytest.approx(sum(paid), rel=1e-5)


def test_a_run_with_tools(train, games, tmp_path):
    metrics, output = train(f"{games}:Desk", max_turns=2, eval_interval=1, **TOOLS)
    rows = kept_rollouts(tmp_path / "run", 1)
    calls = [[call["function"] for message in row["completion"] for call in message.get("tool_calls", [])]
             for row in rows]
    right = [[call["name"] == "look" and "at" in call["arguments"] for call in some] for some in calls]
    every = sum(right, [])
    assert metrics[1]["tools/call_frequency"] == pytest.approx(len(every) / 16)
    assert metrics[1]["tools/failure_frequency"] == pytest.approx(1 - sum(every) / len(every))
    assert 5 < sum(every) < len(every) - 5
    # What get_reward returns counts for the whole episode, also where it was cut off.
    assert [row["score"] for row in rows] == [sum(some) / 4 for some in right]
    assert {row["finish_reason"] for row in rows} == {"stop", "length", "turns"}
    for line in metrics[:2]:
        assert line.keys() >= set(OWN) and sum(line[name] for name in ENDED) == pytest.approx(1)
        assert line["sampling/sampling_logp_difference/max"] < 1e-4 and line["grad_norm"] > 0
    samples = lines(tmp_path / "run", "samples.jsonl")
    assert all(console_line(sample) in output for sample in samples)
    messages = [message for sample in samples for message in sample["completion"]]
    replies = [message for message in messages if message["role"] == "tool"]
    assert len(replies) > 2 and {message["name"] for message in replies} <= {"look", "open", "unknown"} | {
        message["name"] for message in replies if message["name"].startswith("leap")}


def test_ppo_pays_each_turn_at_its_last_token(train, games, reward_file, tmp_path):
    """With values of 0 the returns are discounted rewards; what a reward adds belongs to the last turn. Where
    nothing learns, GRPO samples the same episodes."""
    still = {"learning_rate": 0, "max_completion_length": 64, "reward": reward_file.partition("=")[2]}
    train(f"{games}:Letters", "grpo", **still)
    discount, rows = 0.9 * 0.8, kept_rollouts(tmp_path / "grpo", 1)
    returns, rewards = [], []
    for row in rows:
        paid = [sum(ord(c) % 2 == 0 for c in message["content"]) / 12 for message in row["completion"][::2]]
        reward = []
        for (start, end), turn in zip(row["spans"], paid, strict=True):
            reward += [0.0] * (end - start - 1) + [turn]
        # reward_file's, of the first message.
        reward[-1] += paid[0]
        rewards.append(sum(reward))
        returns += [sum(discount ** k * r for k, r in enumerate(reward[t:])) for t in range(len(reward))]
    assert max(len(row["spans"]) for row in rows) == 3
    metrics, _ = train(f"{games}:Letters", "ppo", script="train_ppo.py", critic_learning_rate=0,
                       lam=0.72, kl_coef=0.1, **still)
    mean = sum(returns) / len(returns)
    std = (sum((x - mean) ** 2 for x in returns) / len(returns)) ** 0.5
    assert metrics[1]["critic/rewards/mean"] == pytest.approx(sum(rewards) / 16, rel=1e-4)
    assert metrics[1]["critic/returns/mean"] == pytest.approx(mean, rel=1e-4)
    assert metrics[1]["critic/advantages/max"] == pytest.approx((max(returns) - mean) / std, rel=1e-4)
    assert metrics[1]["critic/advantages/min"] == pytest.approx((min(returns) - mean) / std, rel=1e-4)


# ---------------------------------------------------------------- ranks, threads, kills

@pytest.mark.parametrize("script", ["train_grpo.py", "train_ppo.py"])
def test_two_ranks_have_the_gradient_of_one(train, games, tmp_path, script):
    found, metrics = [], []
    for ranks, token_budget in ((1, 8192), (2, 130)):
        (line, *_), _ = train(f"{games}:Letters", str(ranks), script, ranks, max_steps=1, grad_clip=0,
                              max_prompt_length=60, token_budget=token_budget)
        metrics.append(line)
        found.append([gradient(tmp_path / str(ranks) / "checkpoint-1" / place)
                      for place in ["."] + ["critic"] * ("ppo" in script)])
    for expected, other in zip(*found):
        assert (other - expected).norm() < 1e-5 * expected.norm() and expected.norm() > 0
    for key in ("reward", "loss", "grad_norm", "entropy", "num_tokens", "completions/mean_length", *OWN[:-1]):
        assert metrics[1][key] == pytest.approx(metrics[0][key], rel=1e-4, abs=1e-6), key
    assert lines(tmp_path / "1", "samples.jsonl") == lines(tmp_path / "2", "samples.jsonl")


def test_a_killed_run_goes_on_as_if_nothing_had_happened(train, talker, games, tmp_path):
    whole, _ = train(f"{games}:Letters", "whole", max_steps=6)
    arguments = with_defaults([f"--out_dir={tmp_path}/run", "--max_steps=6", "--resume=auto"],
                              SMALL | {"model": talker, "environment": f"{games}:Letters"})
    (process,) = begin(tmp_path / "log", "train_grpo.py", *arguments)
    wait_for(lambda: count_lines(tmp_path / "run") > 2, process)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert process.exitcode == -signal.SIGKILL and 2 < count_lines(tmp_path / "run") < 7
    output = finish(begin(tmp_path / "log", "train_grpo.py", *arguments), tmp_path / "log")
    assert f"resumes {tmp_path}/run/checkpoint-" in output
    assert without_times(lines(tmp_path / "run")) == without_times(whole)
    assert lines(tmp_path / "run", "samples.jsonl") == lines(tmp_path / "whole", "samples.jsonl")


def test_threads_play_the_same_episodes_in_another_order(train, games, tmp_path):
    """The first turn ends at once or later, so that turns of other episodes join in between."""
    said = "the run does not repeat bit for bit"
    game = broken_game(tmp_path, games, "        time.sleep(0.01 * (len(text) % 3))")
    alone, output = train(game, "alone", max_steps=1)
    assert said not in output
    many, output = train(game, "many", max_steps=1, call_workers=3)
    assert said in output[:output.index("step   0  ")]
    for key in ("reward", "loss", "grad_norm", "num_tokens", *OWN[:-1]):
        assert many[0][key] == pytest.approx(alone[0][key], rel=1e-4, abs=1e-6), key
    assert many[0]["timing_s/environment"] > 0.1 and many[0]["grad_norm"] > 0


def test_another_environment_is_another_run_and_a_changed_one_is_said(train, talker, games, tmp_path):
    game = broken_game(tmp_path, games, "        pass")
    train(game, max_steps=1)
    arguments = with_defaults([f"--out_dir={tmp_path}/run", "--resume=auto", "--max_steps=2"],
                              SMALL | {"model": talker})
    for other in ("", f"{games}:Letters"):
        refused([*arguments, f"--environment={other}"],
                f"environment={other}, but {tmp_path}/run/checkpoint-1 comes from a run with "
                f"environment={game}", tmp_path)
    with open(tmp_path / "broken.py", "a") as file:
        file.write("# mended\n")
    _, output = train(game, resume="auto")
    assert f"resumes {tmp_path}/run/checkpoint-1" in output
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["environment"] == game and config["checksums"].keys() >= {"train_prompts", "eval_prompts"}


# ---------------------------------------------------------------- environments that break

@pytest.mark.parametrize("script", SCRIPTS)
def test_episodes_that_break_have_no_score_and_the_others_train(train, games, tmp_path, script):
    """In the second step three calls raise, and one takes for ever: its episode keeps what it was paid."""
    game = broken_game(tmp_path, games, """
        if self.number in (22, 25, 33):
            raise KeyError("deaf")
        if self.number == 36:
            await asyncio.sleep(60)""")
    metrics, output = train(game, script=script, call_timeout=1)
    assert metrics[0]["rewards/unscored"] == 0 and metrics[1]["rewards/unscored"] == 3
    assert metrics[1]["episodes/ended/error"] == 3 / 16 and metrics[1]["episodes/ended/timeout"] == 1 / 16
    assert sum(metrics[1][name] for name in ENDED) == pytest.approx(1)
    assert 1 < metrics[1]["timing_s/environment"] < 10 and metrics[1]["grad_norm"] > 0
    samples = lines(tmp_path / "run", "samples.jsonl")
    assert samples[4]["finish_reason"] == "error" and samples[4]["reward"] is None
    assert samples[4]["prompt"][-1]["content"].endswith("? Speak.")
    assert ("step 1: 4 of 16 completions failed or took too long; the first: "
            f"environment={game}, in turn 1: raised KeyError: "
            f"'deaf'; the row is {{'prompt': {samples[4]['prompt']!r}, ") in output
    if script != "train_ppo.py":
        rows = kept_rollouts(tmp_path / "run", 1)
        assert [i for i, row in enumerate(rows) if row["finish_reason"] == "error"] == [0, 3, 11]
        assert [i for i, row in enumerate(rows) if row["score"] != row["score"]] == [0, 3, 11]
        assert rows[14]["finish_reason"] == "timeout" and rows[14]["score"] == 0
        scores = [row["score"] for row in rows if row["score"] == row["score"]]
        assert metrics[1]["reward"] == pytest.approx(sum(scores) / 13, rel=1e-5)


def test_where_all_episodes_of_one_rank_break_the_run_goes_on(train, games, tmp_path):
    game = broken_game(tmp_path, games, """
        if self.number >= 4 and os.environ["RANK"] == "1":
            raise KeyError("deaf")""")
    metrics, output = train(game, ranks=2, max_steps=1)
    assert metrics[0]["rewards/unscored"] == 8 == 16 * metrics[0]["episodes/ended/error"]
    assert "step 0: 8 of 16 completions failed or took too long; the first: " in output
    assert metrics[0]["grad_norm"] > 0


@pytest.mark.parametrize("body, message", [
    (r"raise ValueError('deaf\nand mute')",
     r"RuntimeError: nothing was scored; environment=GAME, in turn 2: raised ValueError: deaf\nand mute"),
    ("return '', math.nan, False",
     "configurator.InputError: environment=GAME, in turn 2: nan is not a finite number in float32")])
def test_an_environment_that_is_broken_in_the_middle_stops_the_run(train, games, tmp_path, body, message):
    game = broken_game(tmp_path, games, f"""
        if self.number >= 22:
            if self.turn == 1:
                return "Go on.", 0.0, False
            {body}""")
    metrics, output = train(game, code=1)
    last = output.strip().splitlines()[-1]
    message = message.replace("GAME", game)
    assert last.removeprefix("[rank0]: ").startswith(f"{message}; the row is {{'prompt': [{{'role': 'user', ")
    assert [line["step"] for line in metrics] == [0]


@pytest.mark.parametrize("settings, message", [
    (["--max_turns=-1"], "max_turns=-1: must not be negative"),
    (["--call_workers=-1"], "call_workers=-1: must not be negative"),
    (["--call_timeout=-1"], "call_timeout=-1.0: must not be negative"),
    (["--environment=GAMES:Letter"], "games.py has no Class Letter at its top level"),
    (["--environment=GAMES:paid"], "paid() raised TypeError"),
    (["--environment=GAMES:Letters", "--chat=false"], "needs chat=True and a tokenizer with a chat template")])
def test_bad_input(talker, games, tmp_path, settings, message):
    arguments = [setting.replace("GAMES", str(games)) for setting in settings]
    refused(with_defaults(arguments, {"model": talker, "task": "arithmetic"}), message, tmp_path)


# ---------------------------------------------------------------- evaluate_model.py

def test_sample_plays_the_episodes_of_the_last_evaluation(train, games, tmp_path):
    metrics, _ = train(f"{games}:Letters", max_steps=1)
    arguments = ["evaluate_model.py", f"--model={tmp_path}/run/checkpoint-1", f"--environment={games}:Letters",
                 "--engine=hf", "--max_turns=3", "--max_completion_length=48", "--max_prompt_length=60"]
    output = runs.forked(tmp_path / "log", *arguments, "--task=arithmetic", "--eval_prompts=4", "--samples=1",
                         f"--output={tmp_path}/samples.jsonl")
    assert f"eval/mean@1 {metrics[1]['eval/mean@1']:.4f}" in " ".join(output.split())
    rows = lines(tmp_path, "samples.jsonl")
    assert sum(row["mean@1"] for row in rows) / 4 == pytest.approx(metrics[1]["eval/mean@1"], rel=1e-5)
    talk = next(row["samples"][0]["completion"] for row in rows if len(row["samples"][0]["completion"]) > 1)
    assert [message["role"] for message in talk[:3]] == ["assistant", "user", "assistant"]
    assert f"<|user|>{talk[1]['content']}<|end|><|assistant|>" in output
    output = runs.forked(tmp_path / "log", *arguments, "--prompt=Well?", "--samples=6")
    assert output.count("--- sample") == 6 and " heard.<|end|><|assistant|>" in output
