"""bench.py runs, and its figures hang together."""
import json

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
