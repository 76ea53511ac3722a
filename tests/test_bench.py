"""bench/step.py and bench/gpu.py run, and their figures hang together."""
import json
import re
import shutil

import pytest

from runs import forked, refused
from runtime.model_folder import SHIPPED


def test_figures(tmp_path):
    output = forked(tmp_path / "log", "-m", "bench.step", "--sequences=16", "--hidden_size=64", "--num_layers=2",
                    "--repeats=1", "--json=true", "--engine=hf", "--lengths=skewed", "--cycles=2",
                    f"--work={tmp_path}")
    figures = json.loads(output[output.index("{"):].splitlines()[0])
    rollouts = json.loads((tmp_path / "rollouts.json").read_text())
    tokens = sum(len(r["prompt_ids"]) + len(r["completion_ids"]) for r in rollouts)
    assert figures["tokens of rollouts"] == tokens and len(rollouts) == 16
    assert figures["training tokens/s"] == pytest.approx(tokens / figures["update (s)"])
    assert 0 < figures["share of the peak (MFU)"] < 1 and figures["rollout tokens/s"] > 0
    assert 0.1 < figures["memory after 2 cycles (GB)"] <= 1.01 * figures["after 2 (GB)"]
    assert sorted({len(r["completion_ids"]) for r in rollouts}) == [4, 64]


def test_a_run_and_its_checkpoint_sampled_anew(tmp_path):
    shutil.copytree(SHIPPED["tiny"], tmp_path / "base")
    (tmp_path / "run.py").write_text("max_steps = 3\nprompts_per_step = 8\neval_prompts = 32\n"
                                     "learning_rate = 1e-3\nengine = 'hf'\ntrain_prompts = 64\n")
    output = forked(tmp_path / "log", "-m", "bench.gpu", "--parts=larger", f"--out_dir={tmp_path}",
                    f"--larger={tmp_path}/run.py")
    before, after = map(float, re.search(r"eval/mean@4: (.*)\n", output)[1].split(", "))
    again = float(re.search(r"eval/mean@4 +(\d\S*)\n", output)[1])
    assert again == pytest.approx(after, abs=6e-4) and abs(again - before) > 0.01 and again > 0.1
    assert "logprob gap" in output


def test_only_rank_0_loads_a_whole_model(tmp_path):
    """The other one holds its rows and some tensors. A save takes a whole model and two tensors at most."""
    output = forked(tmp_path / "log", "-m", "bench.load", "--layers=32", "--hidden_size=256", "--vocabulary=8000",
                    ranks=2)
    whole, other, rows, largest, peak = map(float, re.search(
        r"0's peak (\S+) MB, that of the others (\S+) MB; a rank's rows have (\S+) MB, the largest tensor "
        r"(\S+) MB\n.*; rank 0's peak (\S+) MB", output).groups())
    assert rows < other < 0.7 * whole and 2 * rows < whole <= 1.2 * (3 * rows + largest)
    assert peak <= 1.2 * (2 * rows + 2 * largest)


def test_episodes_at_their_own_pace(tmp_path):
    output = forked(tmp_path / "log", "-m", "bench.episodes", "--episodes=12", "--pairs=1", "--delay=0.01",
                    "--engine=hf", "--delayed_episodes=4", "--short=4", "--long=16", "--delayed_short=8",
                    "--workers=2")
    assert re.search(r"12 episodes of 1 to 6 turns, \d+ sampled tokens", output)
    assert re.search(r"4 episodes of 3 turns, \d+ sampled tokens", output) and output.count("ratio") == 2


def test_what_fails_is_named_at_the_end(tmp_path):
    output = forked(tmp_path / "log", "-m", "bench.gpu", "--parts=base", f"--out_dir={tmp_path}/out",
                    "--base=--layers=x", code=1)
    assert "--layers must be a whole number" in output and output.endswith("failed: base\n")


@pytest.mark.parametrize("script, argument, message", [
    ("bench/step.py", "--num_heads=3", "num_heads=3: must be even"),
    ("bench/step.py", "--cycles=3", "cycles=3 would do nothing"),
    ("bench/step.py", "--engine=trl", "engine=trl: choose vllm, hf"),
    ("bench/episodes.py", "--engine=trl", "engine=trl: choose vllm, hf"),
    ("bench/gpu.py", "--parts=sped", "parts=sped: choose from tests, default"),
    ("bench/against_trl.py", "--pears=3", "did you mean --pairs?"),
    ("bench/trl_grpo.py", "--max_step=3", "did you mean --max_steps?"),
    ("bench/peers.py", "--veral=x", "did you mean --verl?"),
    ("bench/apart.py", "--workloads=x", "workloads=x: choose from default, skewed, environment")])
def test_what_is_refused(tmp_path, script, argument, message):
    refused([argument], message, tmp_path, script)
