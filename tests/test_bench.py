"""bench.py and bench_gpu.py run, and their figures hang together."""
import json
import re

import pytest

from test_train_grpo import launch


def test_figures(tmp_path):
    output = launch("bench.py", "--sequences=16", "--hidden_size=64", "--num_layers=2", "--repeats=1",
                    "--json=true", "--engine=hf", "--lengths=skewed", f"--work={tmp_path}")
    figures = json.loads(output[output.index("{"):].splitlines()[0])
    rollouts = json.loads((tmp_path / "rollouts.json").read_text())
    tokens = sum(len(r["prompt_ids"]) + len(r["completion_ids"]) for r in rollouts)
    assert figures["tokens a step"] == tokens and len(rollouts) == 16
    assert figures["training tokens/s"] == pytest.approx(tokens / figures["update (s)"])
    assert 0 < figures["share of the peak (MFU)"] < 1 and figures["rollout tokens/s"] > 0
    assert sorted({len(r["completion_ids"]) for r in rollouts}) == [4, 64]


def test_a_base_its_training_and_its_samples_in_one_command(tmp_path):
    (tmp_path / "base.py").write_text("layers = 1\nhidden_size = 64\nheads = 2\nintermediate_size = 64\n"
                                      "steps = 5\nbatch_size = 4\ntrain_prompts = 64\nharder_prompts = 64\n")
    (tmp_path / "run.py").write_text("max_steps = 2\nprompts_per_step = 4\neval_prompts = 16\n"
                                     "train_prompts = 64\n")
    output = launch("bench_gpu.py", "--parts=base,larger", f"--out_dir={tmp_path}/out",
                    f"--base={tmp_path}/base.py", f"--run={tmp_path}/run.py")
    mean = re.search(r"eval/mean@4: (.*)\n", output)[1].split(", ")
    again = re.search(r"eval/mean@4 +(\d\S*)\n", output)[1]
    assert len(mean) == 2 and "logprob gap" in output
    assert float(again) == pytest.approx(float(mean[1]), abs=6e-4)     # the checkpoint, loaded by sample.py


def test_what_fails_is_named_at_the_end(tmp_path):
    output = launch("bench_gpu.py", "--parts=base,larger", f"--out_dir={tmp_path}/out", "--base=--layers=x",
                    "--run=--max_steps=x", code=1)
    assert "--layers must be a whole number" in output and output.endswith("failed: base, larger\n")
