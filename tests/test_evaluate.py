"""evaluate_model.py gives again what a run has evaluated, with either engine, and shows equal samples once."""
import importlib.util
import json
import os
import re
import shutil

import pytest

from runs import forked, lines, load_rows, refused
from test_train_grpo import train


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
def test_vllm_run_and_sample(folder, reward_file, tmp_path):
    metrics, output = train(folder, tmp_path / "run", reward_file, "--engine=vllm")
    assert "engine vllm" in output and len(metrics) == 3
    assert max(line["sampling/sampling_logp_difference/max"] for line in metrics[:2]) < 1e-4
    output = forked(tmp_path / "log", "evaluate_model.py", f"--model={tmp_path}/run/checkpoint-2",
                    "--eval_prompts=8", "--samples=2", reward_file, "--max_completion_length=12",
                    "--engine=vllm", f"--output={tmp_path}/samples.jsonl", "--vllm_tensor_parallel_size=2", ranks=2)
    assert "eval/pass@2" in output and "eval/maj@2" in output
    rows = lines(tmp_path, "samples.jsonl")
    assert len(rows) == 8 and all(len(row["samples"]) == 2 for row in rows)
    # The final evaluation drew the same seeds from the same weights, so sampling the checkpoint repeats it.
    score = float(re.search(r"eval/mean@2 +(\S+)", output)[1])
    assert score == pytest.approx(metrics[2]["eval/mean@2"], abs=1e-4)


def test_the_samples_of_a_prompt(folder, tmp_path):
    # The second process has no prompt.
    output = forked(tmp_path / "log", "evaluate_model.py", f"--model={folder}", "--prompt=2+2=", "--engine=hf",
                    "--samples=3", ranks=2)
    assert re.findall("^--- sample .*", output, re.MULTILINE) == [f"--- sample {i} of 3" for i in (1, 2, 3)]


def test_without_chat_with_truncated_sampling_and_stop_strings(folder, tmp_path):
    output = forked(tmp_path / "log", "evaluate_model.py", f"--model={folder}", "--chat=false", "--engine=hf",
                    "--samples=2", "--eval_prompts=4", "--task=arithmetic", "--temperature=0.5", "--top_p=0.9",
                    "--top_k=20", "--stop=e,8", f"--output={tmp_path}/samples.jsonl")
    assert "eval/mean@2" in output
    samples = [sample for row in lines(tmp_path, "samples.jsonl") for sample in row["samples"]]
    assert not any({"e", "8"} & {*sample["completion"]} for sample in samples)
    assert sum(sample["finish_reason"] == "stop" for sample in samples) > 4


@pytest.mark.parametrize("temperature", [0.15, 0])
def test_equal_samples_are_shown_once_with_their_number(tmp_path, temperature):
    arguments = ["evaluate_model.py", "--engine=hf", "--samples=8", "--eval_prompts=7", "--show=3",
                 f"--temperature={temperature}"]
    output = forked(tmp_path / "log", *arguments, f"--output={tmp_path}/samples.jsonl")
    rows, shown, counts = lines(tmp_path, "samples.jsonl"), "", []
    assert len(rows) == 7
    if temperature:                                             # and all is the same with two processes
        assert forked(tmp_path / "log2", *arguments, f"--output={tmp_path}/again.jsonl", ranks=2) == output
        assert (tmp_path / "again.jsonl").read_bytes() == (tmp_path / "samples.jsonl").read_bytes()
    # A row is what it was, with its samples, and so a row for training.
    given = [{key: row[key] for key in row if key not in ("mean@8", "samples")} for row in rows]
    assert given == load_rows("algebra", "eval", 7)
    for prompt in rows[:3]:
        shown += f"--- {prompt['prompt'][0]['content']}   (truth: {prompt['answer']})\n"
        different = []
        assert prompt["mean@8"] == sum(row["score"] for row in prompt["samples"]) / 8
        for row in prompt["samples"]:
            if row["completion"] not in different:
                different.append(row["completion"])
                counts.append(sum(other["completion"] == row["completion"] for other in prompt["samples"]))
                shown += f"{row['completion']}\n--- {counts[-1]} of 8 samples, score {row['score']:g}\n\n"
    assert shown in output and sum(counts) == 24
    assert output.count(" samples, score ") == len(counts) and output.count("(truth: ") == 3
    # At this temperature some samples are equal and some are not, whereas greedy ones are all equal.
    assert counts == [8, 8, 8] if temperature == 0 else 1 < max(counts) and len(counts) > 3


@pytest.mark.parametrize("arguments, message", [
    (["--model=out/none"], "no such folder"),
    (["--task=file"], "eval_file"),
    (["--sample=3"], "did you mean --samples?"),
    (["--engine=sglang"], "engine=sglang"),
    (["--engine=vllm", "--vllm_tensor_parallel_size=2"], "does not divide the 1 ranks that sample")])
def test_bad_input(tmp_path, arguments, message):
    refused(arguments, message, tmp_path, script="evaluate_model.py")


@pytest.mark.parametrize("setting, link", [
    ("eval_file=hard={}", None), ("eval_file={}", os.symlink), ("train_file={}", os.link),
    ("train_file=rows/*", None), ("eval_file=rows", os.symlink)])
def test_an_output_that_is_read_is_refused(folder, tmp_path, setting, link):
    (tmp_path / "rows").mkdir()
    path, output = tmp_path / "rows" / "r.jsonl", tmp_path / "output.jsonl"
    path.write_text('{"prompt": "1+1", "answer": "2"}\n' * 3)
    before = path.read_bytes()
    if link:
        link(path, output)
    else:
        output = path
    setting = setting.format(path).replace("=rows", f"={tmp_path}/rows")
    refused([f"--model={folder}", "--task=file", f"--{setting}", f"--output={output}"],
            f"output={output} would replace {path}, which is read", tmp_path, "evaluate_model.py")
    assert path.read_bytes() == before


def test_a_broken_reward_is_refused_before_anything_is_sampled(folder, tmp_path):
    (tmp_path / "broken.py").write_text("def compute_score(solution_str, colour): return 1.0")
    arguments = [f"--model={folder}", "--engine=hf", f"--reward={tmp_path}/broken.py"]
    refused(arguments, "reward compute_score needs a column colour; the columns are data_source, ", tmp_path,
            script="evaluate_model.py")
    # A prompt of one's own is not scored.
    forked(tmp_path / "log", "evaluate_model.py", *arguments, "--prompt=2+2=", "--samples=1")


def test_a_template_that_leaves_out_the_system_prompt_is_refused(folder, tmp_path):
    (tmp_path / "deaf.jinja").write_text("{% for m in messages if m.role != 'system' %}<|user|>{{ m.content }}{% endfor %}")
    refused([f"--model={folder}", "--engine=hf", "--system_prompt=Add.", f"--chat_template={tmp_path}/deaf.jinja"],
            "the chat template leaves out {'role': 'system'", tmp_path, script="evaluate_model.py")


def test_a_prompt_of_one_s_own_runs_with_the_default_length(folder, tmp_path):
    other = shutil.copytree(folder, tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    del config["suits"]
    (other / "config.json").write_text(json.dumps(config))
    arguments = ["evaluate_model.py", f"--model={other}", "--engine=hf"]
    assert "--- sample 1 of 1" in forked(tmp_path / "log", *arguments, "--prompt=2+2=", "--samples=1")
    assert "max_completion_length=64: defaults" in forked(tmp_path / "log2", *arguments, code=2)
