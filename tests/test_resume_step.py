"""The script is the trial: resumed from a checkpoint, it samples that step again, also for another loss."""
import pytest

import runs
from runs import kept_rollouts, lines, without_times

# Nothing that depends on max_steps. The second update of a step leaves the policy that sampled.
SMALL = {"prompts_per_step": 4, "num_generations": 4, "max_completion_length": 12, "train_prompts": 64,
         "eval_prompts": 4, "eval_samples": 1, "max_steps": 4, "save_interval": 1, "eval_interval": 2,
         "keep_checkpoints": 9, "warmup_steps": 0, "lr_decay": "constant", "learning_rate": 1e-3,
         "num_mini_batches": 2, "engine": "hf"}
STEP = 2
# Of a script: its own settings, another loss, and the number of ranks.
SCRIPTS = {
    "train_grpo.py": ({}, {"loss_type": "gspo", "epsilon": 1e-6}, 1),
    "train_dapo.py": ({"max_num_gen_batches": 3}, {"loss_type": "cispo"}, 1),
    "train_ppo.py": ({"critic_warmup_steps": 1, "critic_learning_rate": 1e-3, "num_mini_batches": 2},
                     {"epsilon": 1e-6}, 1),
    "train_async.py": ({"max_staleness": 1}, {"loss_type": "sapo"}, 2)}


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_step_is_sampled_again_from_its_checkpoint(folder, reward_file, tmp_path, script):
    own, other, ranks = SCRIPTS[script]
    settings = SMALL | own | {"model": folder, "reward": reward_file.partition("=")[2]}
    if script == "train_ppo.py":
        del settings["num_mini_batches"]

    def run(name, **more):
        metrics, _ = runs.train(script, tmp_path / name, [], settings | more, ranks=ranks)
        evaluated[name] = [line["step"] for line in metrics if "timing_s/eval" in line]
        (figures,) = (line for line in without_times(metrics) if line["step"] == STEP)
        samples = [line for line in lines(tmp_path / name, "samples.jsonl") if line["step"] == STEP]
        return figures, samples, kept_rollouts(tmp_path / name, STEP), [line["step"] for line in metrics]

    # In a folder of its own, although the run has newer checkpoints.
    evaluated = {}
    resume = {"resume": f"{tmp_path}/run/checkpoint-{STEP}", "max_steps": STEP + 1}
    figures, samples, rollouts, _ = run("run")
    assert run("again", **resume) == (figures, samples, rollouts, [STEP, STEP + 1])
    assert figures["grad_norm"] > 0 and "eval/mean@1" in figures and len(samples) == 4 and len(rollouts) == 16
    changed = run("changed", **resume, **other)
    assert changed[1:3] == (samples, rollouts) and changed[0]["reward"] == figures["reward"]
    assert changed[0]["loss"] != figures["loss"]
    # The checkpoint holds the figures of its step. With other settings they are made again.
    assert evaluated == {"run": [0, 2, 4], "again": [3], "changed": [2, 3]}
