"""README.md and docs/: their diffs apply and run, and what they say of the files is true."""
import glob
import json
import os
import re
import shutil
import subprocess

import pytest

import runs

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
PAGES = ["README.md", *(f"docs/{name}" for name in sorted(os.listdir(os.path.join(ROOT, "docs"))))]
TEXTS = {}
for page in PAGES:
    with open(os.path.join(ROOT, page)) as file:
        TEXTS[page] = file.read()
BLOCKS = [(page, language, block) for page, text in TEXTS.items()
          for language, block in re.findall(r"^```(\w+)\n(.*?)^```$", text, re.M | re.S)]
DIFFS = [(page, block) for page, language, block in BLOCKS if language == "diff"]
PACKAGES = ["config", "runtime", "tasks", "tiny"]
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


def commands_for(page, diff):
    """What the page runs with a diff: the lines of the next block of sh, as arguments.

    README names only a setting, in the line before.
    """
    before, _, after = TEXTS[page].partition(diff)
    if page == "README.md":
        return [["train_grpo.py", re.findall(r"`(--\S+)`", before)[-1]]]
    block = re.search(r"^```sh\n(.*?)^```$", after, re.M | re.S)[1]
    lines = block.replace("\\\n", " ").splitlines()
    return [line.split()[1:] for line in lines if line.startswith("torchrun")]


@pytest.mark.parametrize("number", range(len(DIFFS)))
def test_a_diff_applies_and_runs(copy, number):
    """By the last command below it, and the tests of the files that it changes pass."""
    page, diff = DIFFS[number]
    (copy / "tests").mkdir()
    for changed in re.findall(r"^\+\+\+ b/(\w+)\.py", diff, re.M):
        if not changed.startswith("train_"):
            shutil.copy(os.path.join(ROOT, "tests", f"test_{changed}.py"), copy / "tests")
    if "+def countdown" in diff:                                # whose tests need nothing of tests/
        shutil.copy(os.path.join(ROOT, "tests/test_countdown.py"), copy / "tests")
        os.remove(copy / "tests/test_rewards.py")
    shutil.copy(os.path.join(ROOT, "pytest.ini"), copy)
    (copy / "a.diff").write_text(diff)
    run(copy, "patch", "-p1", "--fuzz=0", "-i", "a.diff")
    script, *arguments = commands_for(page, diff)[-1]
    small = [one for one in TINY if "ppo" not in script or "num_mini_batches" not in one]
    # Without a real model, and what it needs.
    arguments = [one for one in arguments if not re.search("prompts_per_step|MODEL|gsm8k", one)]
    arguments = runs.with_defaults(arguments,
                                   dict(one[2:].split("=") for one in small) | {"max_steps": 2})
    warm = ["--critic_warmup_steps=0"] * ("ppo" in script)
    runs.forked(copy / "log", script, *arguments, *warm, "--out_dir=run", root=copy)
    assert [line["step"] for line in runs.lines(copy / "run")] == [0, 1, 2]
    if "+def pass_at_k" in diff:
        output = runs.forked(copy / "log", script, "--advantage=pass_at_k", "--kl_coef=0.1",
                             "--kl_estimator=k1_reward", code=2, root=copy)
        assert "advantage=pass_at_k counts scores above 0, which kl_estimator=k1_reward shifts" in output
    if any((copy / "tests").iterdir()):
        # What waits for a diff is tested with it.
        output = runs.forked(copy / "tested", "-m", "pytest", "-rs", "tests", root=copy)
        assert "+def countdown" not in diff or " skipped" not in output
        for word in ("kl_cov", "remax", "maxrl"):
            assert f'"{word}": {word}' not in diff or f"adds {word}" not in output


def test_there_are_diffs_for_an_advantage_a_loss_a_task_and_a_loop():
    assert {re.search(r"^\+\+\+ b/(\S+)", diff, re.M)[1] for _, diff in DIFFS} == {
        "losses.py", "tasks/generate_problems.py", "train_grpo.py"}
    assert len(DIFFS) >= 4 and DIFFS[0][0] == "README.md"


def test_a_reward_of_your_own(copy):
    """Each reward file of the pages scores a completion, for a string prompt and for messages."""
    rewards = [block for _, language, block in BLOCKS
               if language == "python" and re.match("# my_(?!judge|agent|calculator)", block)]
    assert rewards
    for number, text in enumerate(rewards):
        path = copy / re.match(r"# (\w+\.py)", text)[1]
        path.write_text(text)
        name = re.search(r"^def (\w+)", text, re.M)[1]
        runs.forked(copy / "log", "train_grpo.py", *TINY, f"--reward={path}:{name}", f"--out_dir={number}",
                    root=copy)


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    prose = re.sub(r"^```.*?^```$", "", TEXTS[page], flags=re.M | re.S)
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", prose):
        if not target.startswith("http"):
            assert os.path.exists(os.path.join(ROOT, os.path.dirname(page), target)), target


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
    assert len(rows) > 20
    for cell, count in rows:
        length = lines_of(cell)
        assert count == "?" or int(count.replace(",", "")) == pytest.approx(length, rel=0.25), cell
    assert len(TEXTS["README.md"].splitlines()) <= 200


def test_every_file_and_setting_that_a_command_names_exists():
    for page, language, block in BLOCKS:
        if language != "sh":
            continue
        for command in re.sub(r"\\\n", " ", block).splitlines():
            for name in re.findall(r"(?<![\w/.-])((?:\w+/)*\w+\.py)\b", command):
                if not name.startswith("my_") and "NAME" not in name:
                    assert os.path.exists(os.path.join(ROOT, name)), (page, name)
            for name in re.findall(r"-m ((?:bench|tiny)\.\w+)", command):
                assert os.path.exists(os.path.join(ROOT, name.replace(".", "/") + ".py")), (page, name)
