"""An engine of the user's, the one that docs/own_engine.md shows: it samples what the repository's own samples from."""
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import rollout
import runs
from runs import ROOT, requests
from test_episodes import SETTINGS

TEXT = (Path(ROOT) / "docs/own_engine.md").read_text()
[SHOWN] = [block for block in re.findall(r"```python\n(.*?)```", TEXT, re.S) if "class Engine:" in block]

SMALL = {"eval_prompts": 4, "eval_samples": 2, "prompts_per_step": 4, "num_generations": 4, "eval_temperature": 0,
         "max_completion_length": 16, "learning_rate": 1e-3}


@pytest.fixture
def mine(tmp_path):
    (tmp_path / "mine.py").write_text(SHOWN)
    return f"{tmp_path}/mine.py:Engine"


def load(spec, folder, stop=""):
    settings = SimpleNamespace(**SETTINGS | {"engine": spec, "stop": stop, "vllm_gpu_memory_utilization": 0.4})
    return rollout.load_engine(settings, folder, torch.float32, 64, [10])


def test_it_trains_with_the_engine_that_the_docs_show(mine, tmp_path):
    """Its logprobs agree with the trainer's at every step, also after weight syncs, so the weights have arrived."""
    lines, log = runs.train("train_grpo.py", tmp_path / "run", [f"--engine={mine}", "--max_steps=3"], SMALL)
    gaps = [line["sampling/sampling_logp_difference/mean"] for line in lines if line["step"] < 3]
    assert len(gaps) == 3 and max(gaps) < 1e-4, log


def test_an_environment_plays_in_rounds(mine, tmp_path):
    few = {"prompts_per_step": 2, "num_generations": 2, "eval_prompts": 1, "eval_samples": 1,
           "max_completion_length": 40}
    arguments = ["config/tasks/guess.py", f"--engine={mine}", "--max_steps=1", *runs.with_defaults([], few)]
    (first, _), _ = runs.train("train_grpo.py", tmp_path / "run", arguments, SMALL)
    assert first["episodes/turns"] >= 1 and first["sampling/sampling_logp_difference/mean"] < 1e-4


@pytest.mark.parametrize("field, value", [("top_k", 5), ("top_p", 0.9), ("min_p", 0.1)])
def test_what_the_class_does_not_heed_is_refused(mine, folder, field, value):
    engine = load(mine, folder)
    [request] = requests([[1, 2]], 1, [0], 4, 1.0)
    with pytest.raises(ValueError, match=f"the run needs {field}, and the class does not name it"):
        engine.generate([request._replace(**{field: value})])


def test_a_seed_a_stop_string_and_a_wrong_answer_are_refused(mine, folder, tmp_path):
    [request] = requests([[1, 2]], 1, [0], 4, 1.0)
    with pytest.raises(ValueError, match="the run needs stop"):
        load(mine, folder, stop="x").generate([request])
    (tmp_path / "bad.py").write_text(SHOWN.replace('"seed", ', "") + "\n\nclass Short(Engine):\n"
                                     '    fields = ["seed"]\n\n    def answer(self, request):\n'
                                     '        return [1, 2], [0.0], "stop"\n')
    with pytest.raises(ValueError, match="the run needs seed"):
        load(f"{tmp_path}/bad.py:Engine", folder)
    with pytest.raises(ValueError, match="generate returned .*as many logprobs"):
        load(f"{tmp_path}/bad.py:Short", folder).generate([request])
