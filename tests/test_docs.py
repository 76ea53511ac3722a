"""README.md and docs/: what they say of the files is true. The recipes apply and run, and so does README's diff."""
import ast
import glob
import json
import os
import random
import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen3MoeForCausalLM

import config.shared
import runs
from packing import deal
from runs import RECIPES, ROOT

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
PAGES = ["README.md", "recipes/README.md", *sorted(glob.glob("docs/**/*.md", root_dir=ROOT, recursive=True))]
TEXTS = {}
for page in PAGES:
    with open(os.path.join(ROOT, page)) as file:
        TEXTS[page] = file.read()
BLOCKS = [(page, language, block) for page, text in TEXTS.items()
          for language, block in re.findall(r"^```(\w+)\n(.*?)^```$", text, re.M | re.S)]
[README_DIFF] = [block for _, language, block in BLOCKS if language == "diff"]
DIFFS = {"README.md": README_DIFF} | RECIPES
# The first two by tests/test_changes.py.
TESTED_BELOW = "parameter_groups", "routing_replay", "muon", "balance_experts"
PARITY = "def score(prompts, completions, **_):\n    return [sum(map(ord, m[0]['content'])) % 2 for m in completions]\n"
PACKAGES = ["config", "environments", "options", "runtime", "tasks", "tiny"]
TINY = ["--engine=hf", "--max_steps=1", "--eval_prompts=2", "--eval_samples=1", "--prompts_per_step=2",
        "--num_generations=4", "--train_prompts=256", "--max_completion_length=8", "--num_mini_batches=2"]


@pytest.fixture
def copy(tmp_path):
    """The files of the repository, so that a diff can change them."""
    for name in (*glob.glob("*.py", root_dir=ROOT), *PACKAGES):
        copy_of = shutil.copytree if name in PACKAGES else shutil.copy
        copy_of(os.path.join(ROOT, name), tmp_path / name)
    return tmp_path


def run(folder, *command):
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-2000:]
    return result.stdout


def patch(copy, diff):
    (copy / "a.diff").write_text(diff)
    run(copy, "patch", "-p1", "--fuzz=0", "-i", "a.diff")


# It follows the events of the SummaryWriter that is made after init, as the real one does.
WANDB = """
import atexit, glob, json
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
call = {}

def init(sync_tensorboard, **settings):
    assert sync_tensorboard
    call.update(settings, files=glob.glob("run/*tfevents*"))
    atexit.register(finish)

def finish():
    events = EventAccumulator("run").Reload()
    call["steps"] = sorted({event.step for name in events.Tags()["scalars"] for event in events.Scalars(name)})
    with open("wandb.jsonl", "w") as file:
        file.write(json.dumps(call) + chr(10))
"""


def test_a_gymnasium_environment_plays(copy):
    """The block of docs/episodes.md, with a model that knows nothing of lakes."""
    (block,) = [block for page, _, block in BLOCKS if "import gymnasium" in block]
    (copy / "lake.py").write_text(block)
    rows = [{"prompt": [{"role": "user", "content": f"Lake {i}: 0 to 3?"}], "seed": i} for i in range(32)]
    (copy / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    tiny = [one for one in TINY if not one.startswith("--max_completion")] + ["--max_completion_length=96"]
    runs.forked(copy / "log", "train_grpo.py", *tiny, "--environment=lake.py:FrozenLake", "--task=file",
                "--train_file=rows.jsonl", "--out_dir=run", root=copy)
    with open(copy / "run" / "samples.jsonl") as file:
        talk = json.loads(file.readline())["completion"]
    with open(copy / "run" / "metrics.jsonl") as file:
        metrics = json.loads(file.readline())
    assert talk[1]["role"] == "user" and talk[1]["content"].startswith("You are at ")
    assert metrics["episodes/turns"] > 1 and metrics["episodes/ended/error"] == 0


def commands_for(name):
    """What is run with a diff: the commands at the head of a recipe, as arguments.

    README names only a setting, in the line before.
    """
    if name == "README.md":
        before, _, _ = TEXTS[name].partition(README_DIFF)
        return [["train_grpo.py", re.findall(r"`(--\S+)`", before)[-1]]]
    text = RECIPES[name].replace("\\\n", " ").replace("torchrun --nproc_per_node=2", "torchrun")
    return [shlex.split(line) for line in re.findall(r"^    torchrun (.*)$", text, re.M)]


def shortened(script, *arguments):
    """A command that is short, without a real model and what it needs."""
    small = [one for one in TINY if "ppo" not in script or "num_mini_batches" not in one]
    arguments = [one for one in arguments if not re.search("prompts_per_step|MODEL|gsm8k", one)]
    arguments += ["--overlong_buffer=4"] * ("dapo" in script)
    return [script, *runs.with_defaults(arguments, dict(one[2:].split("=") for one in small) | {"max_steps": 2})]


@pytest.mark.parametrize("name", [name for name in DIFFS if name not in TESTED_BELOW])
def test_a_diff_applies_and_runs(copy, name):
    """By each of its commands, and the tests of the files that it changes pass."""
    diff = DIFFS[name]
    (copy / "tests").mkdir()
    for changed in re.findall(r"^\+\+\+ b/(\w+)\.py", diff, re.M):
        tests = os.path.join(ROOT, "tests", f"test_{changed}.py")
        if not changed.startswith("train_") and changed != "model" and os.path.exists(tests):
            shutil.copy(tests, copy / "tests")
    if name == "countdown":                                     # whose tests need nothing of tests/
        shutil.copy(os.path.join(ROOT, "tests/test_countdown.py"), copy / "tests")
        os.remove(copy / "tests/test_rewards.py")
    shutil.copy(os.path.join(ROOT, "pytest.ini"), copy)
    patch(copy, diff)
    for file in ("my_rewards.py", "my_steps.py"):
        (reward,) = [text for where, _, text in BLOCKS if "rewards" in where and text.startswith(f"# {file}")]
        (copy / file).write_text(reward)
    *earlier, last = commands_for(name)
    for count, command in enumerate(earlier):
        runs.forked(copy / "log", *shortened(*command), "--max_steps=1", f"--out_dir={count}", root=copy)
    script, *arguments = shortened(*last)
    # In a warm-up of the critic the policy only computes logprobs, and is then saved and sent to the engine.
    stay = name == "stay_gathered"
    warm = [f"--critic_warmup_steps={stay:d}", "--save_interval=1"] * ("ppo" in script)
    if name == "wandb":
        (copy / "wandb.py").write_text(WANDB)
    runs.forked(copy / "log", script, *arguments, *warm, "--out_dir=run", ranks=1 + stay, root=copy)
    assert [line["step"] for line in runs.lines(copy / "run")] == [0, 1, 2]
    if name == "wandb":
        (call,) = runs.lines(copy, "wandb.jsonl")
        assert call["files"] == [] and call["steps"] == [0, 1, 2] and call["id"] == "run"
        assert call["config"]["max_steps"] == 2
    if name == "opo_passk_remax_gdpo":
        output = runs.forked(copy / "log", script, "--advantage=pass_at_k", "--kl_coef=0.1",
                             "--kl_estimator=k1_reward", code=2, root=copy)
        assert "advantage=pass_at_k counts scores above 0, which kl_estimator=k1_reward shifts" in output
    if any((copy / "tests").iterdir()):
        # What waits for a diff is tested with it.
        output = runs.forked(copy / "tested", "-m", "pytest", "-rs", "--assert=plain", "tests", root=copy)
        assert name != "countdown" or " skipped" not in output
        for word in ("kl_cov", "remax", "maxrl"):
            assert f'"{word}": {word}' not in diff or f"adds {word}" not in output


def test_muon_under_two_ranks(copy):
    """An update is that of Muon's formula, and a resumed run repeats the unbroken one bit for bit."""
    patch(copy, RECIPES["muon"])
    (copy / "parity.py").write_text(PARITY)
    rate, tiny = 1e-3, [*TINY, "--max_steps=3", "--save_interval=1", "--keep_checkpoints=9", "--num_mini_batches=1",
                        "--learning_rate=1e-3", "--warmup_steps=0", "--weight_decay=0.5", "--reward=parity.py:score"]
    runs.forked(copy / "log", "train_muon.py", *tiny, "--out_dir=run", ranks=2, root=copy)
    shutil.copytree(copy / "run", copy / "again", ignore=shutil.ignore_patterns("checkpoint-[23]"))
    runs.forked(copy / "log", "train_muon.py", *tiny, "--out_dir=again", "--resume=auto", ranks=2, root=copy)
    unbroken, resumed = (runs.without_times(runs.lines(copy / name)) for name in ("run", "again"))
    assert unbroken == resumed and unbroken[2]["grad_norm"] > 0
    for file in ("model", "trainer/optimizer-00000", "trainer/optimizer-00001"):
        tensors, others = (load_file(copy / name / f"checkpoint-3/{file}.safetensors") for name in ("run", "again"))
        assert tensors.keys() == others.keys() and all(torch.equal(tensors[key], others[key]) for key in tensors)
    before = {name: x.float() for name, x in load_file(copy / "tiny/algebra/model.safetensors").items()}
    after = load_file(copy / "run/checkpoint-1/model.safetensors")
    halves = [load_file(copy / f"run/checkpoint-1/trainer/optimizer-0000{rank}.safetensors") for rank in (0, 1)]
    matrices = [name for name in before if ".layers." in name and before[name].ndim == 2]
    assert len(matrices) == 21
    for name in matrices:
        momentum = torch.cat([half[f"hf.{name}.momentum_buffer"] for half in halves])
        # The first direction is that of the gradient, with Nesterov's momentum as well. Muon keeps its singular
        # vectors, and changes each singular value by its polynomial. In bfloat16 it sees only the larger ones.
        moved = (before[name] * (1 - rate * 0.5) - after[name]).double() / (rate * 0.2 * max(momentum.shape) ** 0.5)
        left, values, right = torch.linalg.svd(momentum.double(), full_matrices=False)
        for i, value in enumerate(values.tolist()):
            x = value / values.norm().item()
            if x < 0.1:
                break
            for _ in range(5):
                x = 3.4445 * x - 4.775 * x ** 3 + 2.0315 * x ** 5
            assert (left[:, i] @ moved @ right[i]).item() == pytest.approx(x, rel=0.03), (name, i)
        assert i > 0
    assert all(key.endswith((".momentum_buffer", ".exp_avg", ".exp_avg_sq", ".step")) for key in halves[0])


def test_the_experts_are_balanced(copy, experts):
    """Two ranks, and a reward that tells nothing apart, so the whole gradient is that of the load-balancing loss."""
    patch(copy, RECIPES["balance_experts"])
    (copy / "same.py").write_text("def score(prompts, completions, **_):\n    return [1.0 for _ in prompts]\n")
    runs.forked(copy / "log", "train_balance_experts.py", *TINY, f"--model={experts}", "--num_mini_batches=1",
                "--prompts_per_step=4", "--reward=same.py:score", "--router_aux_loss_coef=0.5", "--grad_clip=0",
                "--out_dir=run", ranks=2, keep=True, root=copy)
    rollouts = [SimpleNamespace(**row) for row in runs.kept_rollouts(copy / "run", 0)]
    for r in rollouts:
        r.ids, r.places = np.array(r.ids), np.concatenate([np.arange(*span) for span in r.spans])
        r.sequence_starts = np.array(r.sequence_starts)
    total = sum(r.length for r in rollouts)
    network = Qwen3MoeForCausalLM.from_pretrained(experts, dtype=torch.float64, attn_implementation="eager",
                                                experts_implementation="eager")
    loss = 0
    shuffled = random.Random("0 0").sample(range(len(rollouts)), len(rollouts))
    for share in deal(rollouts, shuffled, 2):
        # The probabilities of each token of the row, those of a shared beginning once.
        seen = {}
        for s in share:
            ids = rollouts[s].ids[:-1]
            routed = network.model(torch.tensor(ids)[None], output_router_logits=True).router_logits
            for i in range(len(ids)):
                seen[tuple(ids[:i + 1])] = [logits[i].softmax(0) for logits in routed]
        probabilities = [p for layers in seen.values() for p in layers]
        balance = 0
        for expert in range(4):
            chosen = sum(expert in p.topk(2).indices.tolist() for p in probabilities) / len(probabilities)
            balance = balance + 4 * chosen * sum(p[expert] for p in probabilities) / len(probabilities)
        loss = loss + balance * sum(rollouts[s].length for s in share) / total
    (0.5 * loss).backward()
    norm = sum(p.grad.square().sum() for p in network.parameters() if p.grad is not None) ** 0.5
    metrics = runs.lines(copy / "run")[0]
    assert metrics["aux_loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert metrics["loss"] == pytest.approx(0.5 * loss.item(), rel=1e-5)
    assert metrics["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)


STAND_INS = {
    "scontrol": 'echo "$@" >> calls\n[ $1 != show ] || echo localhost\n',
    # The job's two nodes are two launchers on this machine. As Slurm's own srun, it passes a signal on to them.
    "srun": "trap 'kill -TERM $first $second' TERM\n\"$@\" & first=$!\n\"$@\" & second=$!\nwait\nwait\n"}


def test_the_script_for_slurm(copy):
    """With stand-ins for srun and scontrol: two nodes train together, and the job ends as its time is over."""
    (script,) = [block for _, _, block in BLOCKS if "#SBATCH" in block]
    tiny = [*TINY, "--max_steps=500", "--save_interval=0"]
    for text, ours in (("nproc_per_node=8", "nproc_per_node=1"), ("29500", str(runs.free_port())),
                       ("config/tasks/gsm8k.py", " ".join(tiny)), ("/shared/run", "run"),
                       ("--prompts_per_step=128 --save_interval=5 ", "")):
        assert script.count(text) == 1, text
        script = script.replace(text, ours)
    for name, text in {**STAND_INS, "batch": script}.items():
        (copy / name).write_text(f"#!/bin/bash\n{text}")
        (copy / name).chmod(0o755)
    (copy / ".venv/bin").mkdir(parents=True)
    (copy / ".venv/bin/activate").write_text("")
    path = f"{copy}:{os.path.dirname(sys.executable)}:{os.environ['PATH']}"
    with open(copy / "log", "w") as log:
        job = subprocess.Popen(["./batch"], cwd=copy, stdout=log, stderr=log, env=os.environ | {
            "PATH": path, "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]"})
    deadline = time.monotonic() + 120
    while len(runs.lines(copy / "run")) < 2 and job.poll() is None and time.monotonic() < deadline:
        time.sleep(0.1)
    job.terminate()                                             # what --signal=B:TERM@900 does
    job.wait(60)
    output = (copy / "log").read_text()
    steps = [line["step"] for line in runs.lines(copy / "run")]
    assert steps == [*range(len(steps))] and 2 <= len(steps) < 500, output
    assert os.path.exists(copy / f"run/checkpoint-{len(steps)}"), output
    assert (copy / "calls").read_text() == "show hostnames n[1-2]\nrequeue 7\n"
    assert "on 2 x cpu" in output


def test_the_loop_of_readme_is_that_of_train_grpo(copy):
    """After the set-up of train_grpo.py it makes the same updates."""
    script = (copy / "train_grpo.py").read_text()
    setup, _, _ = script.partition("for step in range(run.first_step")
    [loop] = [block for page, _, block in BLOCKS if page == "README.md" and block.startswith("for step in ")]
    begin = "position, epsilon_high = 0, epsilon\nrandom.sample = lambda s, N: random.Random(f'{seed} {step}').sample(s, N)\n"
    end = "torch.save(policy.state_dict()['hf.model.norm.weight'].full_tensor(), out_dir + '.norm')\n"
    (copy / "train_readme.py").write_text(setup + begin + loop + end)
    (copy / "train_grpo.py").write_text(script.replace("run.end()", end))
    weights = []
    for name in ("readme", "grpo"):
        runs.forked(copy / "log", f"train_{name}.py", *TINY, "--max_steps=2", "--lr_decay=constant", "--warmup_steps=0",
                    f"--out_dir={copy / name}", root=copy)
        weights.append(torch.load(copy / f"{name}.norm"))
    assert torch.equal(*weights) and len({*weights[0].tolist()}) > 1


def test_there_are_diffs_for_an_advantage_a_loss_a_task_a_loop_and_an_engine():
    assert {re.search(r"^--- a/(\S+)", diff, re.M)[1] for diff in DIFFS.values()} == {
        "hf_engine.py", "losses.py", "model.py", "rewards.py", "train_grpo.py"}


def test_a_reward_of_your_own(copy):
    """Each reward file of the pages scores a completion, for a string prompt and for messages."""
    rewards = [block for _, language, block in BLOCKS
               if language == "python" and re.match("# my_(?!judge|agent|calculator|game)", block)]
    assert rewards
    for number, text in enumerate(rewards):
        path = copy / re.match(r"# (\w+\.py)", text)[1]
        path.write_text(text)
        name = re.search(r"^def (\w+)", text, re.M)[1]
        runs.forked(copy / "log", "train_grpo.py", *TINY, f"--reward={path}:{name}", f"--out_dir={number}",
                    root=copy)


def without_blocks(page):
    return re.sub(r"^```.*?^```$", "", TEXTS[page], flags=re.M | re.S)


def leads_somewhere(path, heading):
    assert os.path.exists(os.path.join(ROOT, path)), path
    if heading and path in TEXTS:
        headings = re.findall(r"^#+ (.*)$", without_blocks(path), re.M)
        assert heading in [re.sub(r"[^\w -]", "", one.lower()).replace(" ", "-") for one in headings], heading


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    for target, heading in re.findall(r"\]\(([^)#\s]*)(?:#([^)]*))?\)", without_blocks(page)):
        if not target.startswith("http"):
            path = os.path.normpath(os.path.join(os.path.dirname(page), target)) if target else page
            leads_somewhere(path, heading)


def test_the_guide_stays_short():
    """What was measured belongs into docs/measured/."""
    pages = [page.read_text() for page in Path(ROOT, "docs").glob("*.md")]
    assert sum(len(page.split()) for page in pages) <= 20_000
    assert sum(len(page.splitlines()) for page in pages) <= 1_700
    assert max(len(page.splitlines()) for page in pages) <= 250


def test_what_recipes_name_is_there():
    names = [name for text in RECIPES.values()
             for name in re.findall(r"\b((?:docs|tests|bench)/(?:measured/)?\w+\.\w+)(?:#([\w-]+))?", text)]
    assert len(names) > 10
    for path, heading in names:
        leads_somewhere(path, heading)


def lines_of(cell):
    """The lines of the files in a cell of the table; a name without a folder is in that of the one before."""
    count, folder = 0, ROOT
    for name in re.findall(r"`([^`]+)`", cell):
        folder = os.path.join(ROOT, os.path.dirname(name)) if "/" in name else folder
        paths = (glob.glob(f"{folder}/**/*.py", recursive=True) if name.endswith("/") else
                 [f"{folder}/{os.path.basename(name)}"])
        for path in paths:
            with open(path) as file:
                count += len(file.readlines())
    return count


def test_the_links_into_the_loop_and_the_line_counts_are_about_right():
    """About, because whoever inserts a few lines into a file need not count again."""
    with open(os.path.join(ROOT, "train_grpo.py")) as file:
        lines = file.read().splitlines()
    linked = re.findall(r"\[([^\]]+)\]\(train_grpo\.py#L(\d+)\)", TEXTS["README.md"])
    assert len(linked) == 8
    for heading, number in linked:
        place = next(i for i, line in enumerate(lines, 1) if line.endswith(f"- {heading}"))
        assert abs(place - int(number)) <= 20, heading
    rows = re.findall(r"^\| ([^|]+) \| [^|]+ \| ([\d,]+|\?) \|$", TEXTS["README.md"], re.M)
    for cell, count in rows:
        length = lines_of(cell)
        assert count == "?" or int(count.replace(",", "")) == pytest.approx(length, rel=0.25), cell
    named = " ".join(cell for cell, _ in rows)
    for name in glob.glob("*.py", root_dir=ROOT):
        assert f"`{name}`" in named, name
    assert len(TEXTS["README.md"].splitlines()) <= 200


def test_the_table_of_hardware(tmp_path):
    """README has what its command prints."""
    output = runs.forked(tmp_path / "log", "-m", "bench.hardware")
    rows = [line for line in output.splitlines() if re.match(r"\| \d", line)]
    assert len(rows) == 4 and all(row in TEXTS["README.md"] for row in rows), output


def test_every_file_and_setting_that_a_command_names_exists():
    of_pages = {re.match(r"# (\w+\.py)|", block)[1] for _, _, block in BLOCKS}
    of_pages |= {*re.findall(r"^copy to (\S+)$", "".join(RECIPES.values()), re.M)}
    for page, language, block in BLOCKS:
        if language != "sh":
            continue
        for command in re.sub(r"\\\n", " ", block).splitlines():
            for name in re.findall(r"(?<![\w/.-])((?:\w+/)*\w+\.py)\b", command):
                if not name.startswith("my_") and "NAME" not in name and name not in of_pages:
                    assert os.path.exists(os.path.join(ROOT, name)), (page, name)
            for name in re.findall(r"-m ((?:bench|tiny)\.\w+)", command):
                assert os.path.exists(os.path.join(ROOT, name.replace(".", "/") + ".py")), (page, name)


def test_files_in_runtime_import_nothing_of_the_root_but_configurator():
    """As CONTRIBUTING.md has it, also inside functions; nor a task."""
    outside = {path.stem for path in Path(ROOT).glob("*.py")} - {"configurator"} | {"tasks"}
    files = [*Path(ROOT, "runtime").glob("*.py")]
    assert len(files) > 5 and "rewards" in outside
    for file in files:
        names = []
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom):
                names.append(node.module)
            elif isinstance(node, ast.Import):
                names += [alias.name for alias in node.names]
        assert not {name.partition(".")[0] for name in names} & outside, file


def test_the_table_of_options_names_every_file_and_settings_that_exist():
    table = TEXTS["README.md"].partition("| setting | files in `options/` |\n")[2].partition("\n\n")[0]
    named = re.findall(r"`(\w+\.py)`", table)
    files = {path for path in os.listdir(os.path.join(ROOT, "options")) if path.endswith(".py")} - {"__init__.py"}
    assert {*named} - {"train_async.py"} == files
    with open(os.path.join(ROOT, "train_grpo.py")) as file:
        settings = {*re.findall(r"^(\w+) = ", file.read(), re.M)} | {*vars(config.shared)}
    asked = re.findall(r"`--(\w+)", table)
    assert len(asked) > 12 and {*asked} <= settings
