"""
How much it helps that every episode goes on as soon as it can, and that slow environments run in threads.

    python -m bench.episodes

The model is tiny/pretrain.py's with random weights, and the lengths of turns are drawn: most have a few
tokens, one in eight has many. For the first table the same episodes are also played with an engine that hands
out its answers when the slowest of a turn is finished. In the second table every step of the environment
takes `delay` seconds.
"""
import random
import statistics
import tempfile
import time
from types import SimpleNamespace

import torch

import rollout
from config import shared
from configurator import configure
from data import encode_rows
from options.episodes import EpisodeSampler
from runtime import distributed
from runtime.model_folder import load_tokenizer
from tiny import pretrain
# ------------------------------------------------------------------------------------------------------------
episodes = 256                  # of one to six turns
short = 16                      # tokens, the longest of most turns
long = 256                      # tokens, the longest of one turn in eight
delay = 0.2                     # seconds
delayed_episodes = 64           # of three turns
delayed_short = 128             # tokens, as `short` for these
workers = 16
engine = "vllm"
pairs = 5                       # of measurements; the tables show medians
# ------------------------------------------------------------------------------------------------------------
configure(globals(), choices={"engine": ("vllm", "hf")})
ENVIRONMENT = f'''
import time
class Game:
    delay = 0
    def reset(self, turns, **row):
        self.left = turns
    def step(self, text):
        time.sleep(self.delay)
        self.left -= 1
        return "Go on, please.", 0.0, self.left == 0
class Slow(Game):
    delay = {delay}
'''


class Paced:
    """An engine whose turns have drawn lengths; in lockstep it answers a turn's requests all at once."""
    signalled = False

    def __init__(self, engine, lockstep=False):
        self.engine, self.lockstep, self.asked = engine, lockstep, 0
        self.numbers, self.asked_by, self.progress = engine.numbers, engine.asked_by, engine.progress

    def serve(self, jobs, play):
        return self.engine.serve(jobs, play)

    def add(self, request):
        rng = random.Random(request.seed)
        low, high = (long // 4, long) if rng.random() < 1 / 8 else (short // 4, short)
        self.engine.add(request._replace(max_tokens=min(rng.randint(low, high), request.max_tokens)))
        self.asked += 1

    def abort(self, names):
        self.engine.abort(names)

    def step(self):
        answers = self.engine.step()
        while self.lockstep and len(answers) < self.asked:
            answers += self.engine.step()
        self.asked -= len(answers)
        return [answer._replace(finish_reason="stop") for answer in answers]


def seconds(sampler, name, rows, threads=0):
    """The time that these episodes take, and their tokens."""
    settings = {key: value for key, value in vars(shared).items() if not key.startswith("_")}
    settings |= {"environment": f"{folder}/game.py:{name}", "call_workers": threads,
                 "max_completion_length": 900, "max_prompt_length": 32}
    player = EpisodeSampler(SimpleNamespace(**settings), tokenizer, eos_ids)
    prompts = encode_rows(tokenizer, list(enumerate(rows)))
    started = time.perf_counter()
    jobs = [(prompt.row, rollout.Request(None, prompt.ids, 1000 * i, 900)) for i, prompt in enumerate(prompts)]
    rollouts = player.play_jobs(sampler, jobs)
    return time.perf_counter() - started, sum(len(r.logprobs) for r in rollouts)


distributed.set_up()
with tempfile.TemporaryDirectory() as folder:
    tokenizer = pretrain.make_tokenizer()
    for part in (pretrain.make_model(tokenizer).bfloat16(), tokenizer):
        part.save_pretrained(f"{folder}/model")
    tokenizer = load_tokenizer(f"{folder}/model")
    with open(f"{folder}/game.py", "w") as file:
        file.write(ENVIRONMENT)
    kind = rollout.engine_class(engine)
    row = lambda turns: {"prompt": [{"role": "user", "content": "Begin."}], "turns": turns}

    eos_ids = [tokenizer.eos_token_id]
    sampler = kind(f"{folder}/model", torch.float32, 1000, eos_ids, 0.4)
    rows = [row(1 + i % 6) for i in range(episodes)]
    times = {"one waits for all": [], "each goes on": []}
    for _ in range(pairs + 1):
        times["one waits for all"].append(seconds(Paced(sampler, lockstep=True), "Game", rows)[0])
        taken, tokens = seconds(Paced(sampler), "Game", rows)
        times["each goes on"].append(taken)
    print(f"{episodes} episodes of 1 to 6 turns, {tokens:,} sampled tokens, engine {engine}")
    # The first of each is a warm-up.
    ratio = statistics.median(a / b for a, b in list(zip(*times.values()))[1:])
    for name, each in times.items():
        print(f"    {name:20} {statistics.median(each[1:]):6.2f} s")
    print(f"    ratio                {ratio:6.2f}")

    short = delayed_short
    rows = [row(3)] * delayed_episodes
    cases = {"no delay": ("Game", 0), f"delay, {workers} workers": ("Slow", workers),
             "delay, no workers": ("Slow", 0)}
    times = {name: [] for name in cases}
    for _ in range(pairs + 1):
        for name, (which, threads) in list(cases.items())[:2]:
            taken, tokens = seconds(Paced(sampler), which, rows, threads)
            times[name].append(taken)
    times["delay, no workers"] = [seconds(Paced(sampler), "Slow", rows)[0]] * 2
    print(f"{delayed_episodes} episodes of 3 turns, {tokens:,} sampled tokens, delay {delay} s per step")
    for name, each in times.items():
        print(f"    {name:20} {statistics.median(each[1:]):6.2f} s")
    ratio = statistics.median(b / a for a, b in list(zip(*list(times.values())[:2]))[1:])
    print(f"    ratio                {ratio:6.2f}")
distributed.leave()
