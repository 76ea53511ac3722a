"""bench.py and bench_gpu.py run, and their figures hang together."""
import json
import re

import shutil

import pytest

import tiny
from test_train_grpo import launch


def test_figures(tmp_path):
    output = launch("bench.py", "--sequences=16", "--hidden_size=64", "--num_layers=2", "--repeats=1",
                    "--json=true", "--engine=hf", "--lengths=skewed", "--cycles=2", f"--work={tmp_path}")
    figures = json.loads(output[output.index("{"):].splitlines()[0])
    rollouts = json.loads((tmp_path / "rollouts.json").read_text())
    tokens = sum(len(r["prompt_ids"]) + len(r["completion_ids"]) for r in rollouts)
    assert figures["tokens a step"] == tokens and len(rollouts) == 16
    assert figures["training tokens/s"] == pytest.approx(tokens / figures["update (s)"])
    assert 0 < figures["share of the peak (MFU)"] < 1 and figures["rollout tokens/s"] > 0
    assert 0.1 < figures["memory after 2 cycles (GB)"] <= 1.01 * figures["after 2 (GB)"]
    assert sorted({len(r["completion_ids"]) for r in rollouts}) == [4, 64]


def test_a_run_and_its_checkpoint_sampled_anew(tmp_path):
    (tmp_path / "base.py").write_text("layers = 1\nhidden_size = 64\nheads = 2\nintermediate_size = 64\n"
                                      "steps = 3\nbatch_size = 4\ntrain_prompts = 64\nharder_prompts = 64\n")
    (tmp_path / "run.py").write_text("max_steps = 3\neval_prompts = 64\nlearning_rate = 1e-3\n")
    common = f"--out_dir={tmp_path}", f"--base={tmp_path}/base.py", f"--larger={tmp_path}/run.py"
    launch("bench_gpu.py", "--parts=base", *common)
    assert (tmp_path / "base" / "model.safetensors").exists()
    shutil.rmtree(tmp_path / "base")
    tiny.ensure(str(tmp_path / "base"))                                 # one that answers some problems
    output = launch("bench_gpu.py", "--parts=larger", *common)
    before, after = map(float, re.search(r"eval/mean@4: (.*)\n", output)[1].split(", "))
    again = float(re.search(r"eval/mean@4 +(\d\S*)\n", output)[1])
    assert again == pytest.approx(after, abs=6e-4) and abs(again - before) > 0.01 and again > 0.1
    assert "logprob gap" in output


def test_what_fails_is_named_at_the_end(tmp_path):
    output = launch("bench_gpu.py", "--parts=base,larger", f"--out_dir={tmp_path}/out", "--base=--layers=x",
                    "--larger=--max_steps=x", code=1)
    assert "--layers must be a whole number" in output and output.endswith("failed: base, larger\n")


@pytest.mark.parametrize("script, argument, message", [
    ("bench.py", "--num_heads=3", "num_heads=3: must be even"),
    ("bench.py", "--cycles=3", "cycles=3 would do nothing"),
    ("bench_gpu.py", "--parts=sped", "parts=sped: choose from tests, default")])
def test_what_is_refused(script, argument, message):
    assert message in launch(script, argument, code=2)
