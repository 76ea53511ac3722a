"""Each file in config/methods/ and config/tasks/ runs for a step with the script that it is for, and so does
each script by itself; each base of tiny/pretrain.py is made in a small size."""
import ast
import json
import re
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForSequenceClassification

import runs
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
    elif recipe.get("task", "algebra") not in ("algebra", "compose"):
        needed |= {"task": "file", "train_file": files / "rows.jsonl"}
    if recipe.get("reward") == "none":
        needed |= {"reward_model": files / "judge"}
    else:
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
