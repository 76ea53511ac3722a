"""Each file in config/methods/ and config/tasks/ runs for a step with the script that it is for, and so does
each script by itself; each base of tiny/pretrain.py is made in a small size. The diffs in recipes/ apply, and are
written anew after a change of a script; test_docs.py and test_changes.py run them."""
import ast
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForSequenceClassification

import runs
from runs import RECIPES as DIFFS
from runs import ROOT, forked
from tiny.pretrain import make_tokenizer

# What makes a run small, whatever a recipe says about its size. Everything else is as the recipe has it.
SMALL = {"model": "tiny", "engine": "hf", "prompts_per_step": 8, "max_prompt_length": 64,
         "max_completion_length": 24, "train_prompts": 128, "eval_prompts": 4, "eval_samples": 1,
         "max_steps": 1}
# A score of 0 or 1 that differs among the completions of any prompt and any difficulty.
REWARD = "def score(prompts, completions, **_):\n    return [len(m[0]['content']) % 2 for m in completions]\n"
SCRIPTS = sorted(Path(ROOT).glob("train_*.py"))
RECIPES = sorted(Path(ROOT).glob("config/*/*.py"))


def parsed(recipe):
    """(the script that a recipe's docstring names, or train_grpo.py; its settings)."""
    tree = ast.parse(recipe.read_text())
    named = re.findall(r"\btrain_\w+\.py", ast.get_docstring(tree))
    return next(iter(named), "train_grpo.py"), {ast.unparse(line.targets[0]): ast.literal_eval(line.value) for line in tree.body[1:]}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A reward, a reward model and rows, for recipes that want them."""
    path = tmp_path_factory.mktemp("files")
    (path / "rewards.py").write_text(REWARD)
    rows = ({"prompt": [{"role": "user", "content": f"{i} + 1?"}], "answer": str(i + 1)} for i in range(256))
    (path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer = make_tokenizer()
    torch.manual_seed(0)
    Qwen3ForSequenceClassification(Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_labels=1,
        num_attention_heads=1, num_key_value_heads=1, head_dim=32, pad_token_id=tokenizer.pad_token_id,
        initializer_range=0.2)).save_pretrained(path / "judge")
    tokenizer.save_pretrained(path / "judge")
    return path


@pytest.mark.parametrize("name", [f"config/{path.parent.name}/{path.name}" for path in RECIPES]
                         + [path.name for path in SCRIPTS])
def test_a_step_of(name, files, tmp_path):
    script, recipe = parsed(Path(ROOT) / name) if name.startswith("config/") else (name, {})
    needed = SMALL | ({"critic_warmup_steps": 0} if script == "train_ppo.py" else {})
    if "environment" in recipe:
        needed |= {"model": "tiny_episodes", "max_prompt_length": 96}
    elif "images" in recipe:
        needed |= {"model": "tiny_squares", "engine": "vllm", "max_prompt_length": 96}
    elif recipe.get("task", "algebra") not in ("algebra", "compose"):
        needed |= {"task": "file", "train_file": files / "rows.jsonl"}
    if recipe.get("reward") == "none":
        needed |= {"reward_model": files / "judge"}
    elif "images" not in recipe:                                # whose answers all have the same length
        needed |= {"reward": f"{files}/rewards.py:score"}
    # What stands further right counts.
    arguments = [name] * bool(recipe) + runs.with_defaults([], needed)
    metrics, _ = runs.train(script, tmp_path / "run", arguments, {},
                            ranks=2 if script == "train_async.py" else 1)
    assert [line["step"] for line in metrics] == [0, 1] and "eval/mean@1" in metrics[1]
    assert metrics[0]["grad_norm"] > 0 and metrics[0].get("critic/grad_norm", 1) > 0
    settings = json.loads((tmp_path / "run" / "config.json").read_text())
    assert {key: settings[key] for key in recipe if key not in needed} == {
        key: value for key, value in recipe.items() if key not in needed}


@pytest.mark.parametrize("base", ["algebra", "episodes", "compose"])
def test_a_base_is_made(base, tmp_path):
    small = {"train_prompts": 64, "harder_prompts": 64, "layers": 1, "intermediate_size": 64, "steps": 2,
             "batch_size": 2}
    forked(tmp_path / "log", "tiny/pretrain.py", f"--base={base}", f"--out={tmp_path}/base",
           *runs.with_defaults([], small))
    config = AutoModelForCausalLM.from_pretrained(tmp_path / "base").config
    assert (config.num_hidden_layers, config.hidden_size) == (1, 160)


def test_dppo_takes_stale_rollouts(reward_file, tmp_path):
    """Its ratio corrects for them, so the recipe turns train_async.py's own correction off."""
    metrics, _ = runs.train("train_async.py", tmp_path / "run", ["config/methods/dppo.py", reward_file],
                            SMALL | {"max_steps": 3, "max_staleness": 1}, ranks=2)
    assert all(line["grad_norm"] > 0 for line in metrics[:3])


GIT = ["git", "-c", "user.name=me", "-c", "user.email=me@localhost"]
GIT_APPLY, PATCH = [*GIT, "apply", "--verbose"], ["patch", "-p1", "--fuzz=0"]
SOURCES = sorted({name for text in DIFFS.values() for name in re.findall(r"^--- a/(\S+)", text, re.M)})


def call(folder, *command, text=None):
    result = subprocess.run(command, cwd=folder, input=text, capture_output=True, text=True)
    return result.returncode, result.stdout + result.stderr


@pytest.fixture
def repository(tmp_path):
    """A repository of git's with the recipes and the files that they change."""
    shutil.copytree(Path(ROOT, "recipes"), tmp_path / "repository/recipes")
    for name in SOURCES:
        (tmp_path / "repository" / name).parent.mkdir(exist_ok=True)
        shutil.copy(Path(ROOT, name), tmp_path / "repository" / name)
    for command in (["init"], ["add", "."], ["commit", "-m", "The repository"]):
        assert call(tmp_path / "repository", *GIT, *command)[0] == 0
    return tmp_path / "repository"


def texts(folder):
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*")
            if path.is_file() and ".git" not in path.parts}


def applied(repository, name, tool):
    """The files that a recipe changes or makes, {name: text}; it must apply at the lines that it names."""
    folder = repository.parent / "applied"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(repository, folder)
    text = (folder / f"recipes/{name}.diff").read_text()
    code, output = call(folder, *tool, text=text)
    assert code == 0 and not re.search("offset|fuzz", output), output
    changed = dict(texts(folder).items() - texts(repository).items())
    assert sorted(changed) == sorted(re.findall(r"^\+\+\+ b/(\S+)", text, re.M))
    return changed


@pytest.mark.parametrize("name", DIFFS)
def test_a_recipe_applies_by_git_and_by_patch(repository, name):
    assert applied(repository, name, GIT_APPLY) == applied(repository, name, PATCH)


@pytest.mark.parametrize("name", DIFFS)
def test_a_recipe_says_what_it_is_and_stands_in_the_table(name):
    head, diff = re.split("^(?=diff --git )", DIFFS[name], maxsplit=1, flags=re.M)
    title, when, *_ = head.split("\n\n")
    assert title.endswith(".") and when.startswith("Take ") and "easured" in head
    assert re.search(rf"\n    git apply recipes/{name}.diff\n    torchrun (--\S+ )?train_\w+\.py", head)
    added = len(re.findall(r"^\+(?!\+\+ )", diff, re.M))
    files = ", ".join(f"`{path}`" for path in re.findall(r"^\+\+\+ b/(\S+)", diff, re.M))
    rows = re.findall(r"^\| \[(\w+)\]\((\w+).diff\) \| .+ \| (\d+) \| (.+) \| .+ \|$",
                      Path(ROOT, "recipes/README.md").read_text(), re.M)
    assert (name, name, str(added), files) in rows and len(rows) == len(DIFFS)


def rewrite(repository, *arguments):
    return call(repository, sys.executable, "recipes/rewrite.py", *arguments)


def test_recipes_are_written_anew_after_a_change_of_the_lines_around_them(repository):
    def edited(text):
        """The text of train_grpo.py or of a copy with another line near some recipes, and one more above all."""
        return text.replace("# the peak;", "# the highest;").replace("import math\n", "import math\nimport os\n")
    before = {name: applied(repository, name, GIT_APPLY) for name in DIFFS}
    script = repository / "train_grpo.py"
    script.write_text(edited(script.read_text()))
    assert call(repository, *GIT_APPLY, "recipes/resting_prompts.diff")[0] != 0
    assert rewrite(repository) == (0, "")
    for name, files in before.items():
        for path, text in files.items():
            if path == script.name or f"copy from {script.name}\ncopy to {path}\n" in DIFFS[name]:
                files[path] = edited(text)
        assert applied(repository, name, PATCH) == files
        head, _, _ = DIFFS[name].partition("diff --git ")
        assert (repository / f"recipes/{name}.diff").read_text().startswith(f"{head}diff --git ")
    # Once more it changes nothing, and the commit in which they applied may be an older one.
    anew = {path: path.read_text() for path in repository.glob("recipes/*.diff")}
    assert rewrite(repository) == (0, "") and anew == {path: path.read_text() for path in anew}
    for command in (["checkout", "recipes"], ["commit", "-am", "A change"]):
        assert call(repository, *GIT, *command)[0] == 0
    assert rewrite(repository, "HEAD~1") == (0, "") and anew == {path: path.read_text() for path in anew}


def test_a_recipe_that_conflicts_is_named_and_can_be_edited(repository):
    line, script = "\noptimizer = make_optimizer(policy, learning_rate, settings)\n", repository / "train_grpo.py"
    other, recipe = line.replace("settings)", "settings)      # mine"), repository / "recipes/muon.diff"
    script.write_text(script.read_text().replace(line, other))
    code, output = rewrite(repository)
    assert code == 1 and "muon.diff" in output and "spo.diff" not in output and "levels.diff" not in output
    assert recipe.read_text() == DIFFS["muon"]
    recipe.write_text(DIFFS["muon"].replace(line.replace("\n", "\n-", 1), f"\n-{other[1:-1]}\n").replace(
        "\n+optimizer = Muon", "\n+\n+# Two more lines.\n+optimizer = Muon"))
    assert "muon.diff" not in rewrite(repository)[1]
    assert "\n# Two more lines.\n" in applied(repository, "muon", PATCH)["train_muon.py"]
    # One that the working tree has already is no recipe any more, and is left as it is.
    assert call(repository, *PATCH, "-i", "recipes/spo.diff")[0] == 0
    code, output = rewrite(repository)
    assert "spo.diff" in output and (repository / "recipes/spo.diff").read_text() == DIFFS["spo"]


def test_two_recipes_at_once(repository):
    """As recipes/README.md says: the second one copies what the first has made."""
    assert call(repository, *PATCH, "-i", "recipes/muon.diff")[0] == 0
    assert call(repository, "patch", "train_muon.py", "recipes/levels.diff")[0] == 0
    both = (repository / "train_levels.py").read_text()
    assert "MuonAndAdamW(policy)" in both and "rise_above" in both
