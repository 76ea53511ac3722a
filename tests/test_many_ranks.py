"""Several processes, and several launchers: the same gradient, shared engines, and the end of a lost rank."""
import json
import math
import os
import re
import shutil
import signal
import struct
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed.fsdp import fully_shard
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from bench.models import make
from model import load_policy
from packing import pack
from runtime import checkpoint, distributed
from runtime.model_folder import model_class
import runs
from rollout import Rollout
from runs import free_port, lines, on_ranks
from test_packing import episode
from weights import engine_weights

SMALL = {"prompts_per_step": 4, "num_generations": 4, "max_completion_length": 12, "train_prompts": 64,
         "eval_prompts": 4, "eval_samples": 1, "max_steps": 1, "warmup_steps": 0, "learning_rate": 1e-3,
         "grad_clip": 0, "engine": "hf"}


def train(script, folder, out_dir, reward_file, count=1, code=0, **settings):
    """Metrics and output of a run on `count` forked ranks."""
    defaults = SMALL | {"model": folder} | settings
    return runs.train(script, out_dir, [reward_file], defaults, ranks=count, code=code)


def gradient(checkpoint):
    """The gradient of the first update as one vector: Adam's first moment is (1 - beta1) times it."""
    ranks = [load_file(path) for path in sorted(Path(checkpoint, "trainer").glob("optimizer-*"))]
    names = sorted(name for name in ranks[0] if name.endswith(".exp_avg"))
    return torch.cat([rows[name].flatten() for name in names for rows in ranks]) / 0.1


# ---------------------------------------------------------------- the same gradient however it is computed

GRPO_CASES = [("token_mean", 1, 80, 1), ("token_mean", 4, 100, 1), ("token_mean", 2, 100, 2),
              ("sequence_mean", 2, 8192, 1)]


@pytest.fixture(scope="module")
def reference_gradients(folder, reward_file, tmp_path_factory):
    """Of one rank and one micro-batch, for each aggregation."""
    found = {}
    for aggregation in ("token_mean", "sequence_mean"):
        path = tmp_path_factory.mktemp(aggregation)
        train("train_grpo.py", folder, path / "run", reward_file, loss_aggregation=aggregation)
        found[aggregation] = gradient(path / "run" / "checkpoint-1")
    return found


def test_aggregations_differ(reference_gradients):
    a, b = reference_gradients.values()
    assert (a - b).norm() > 1e-3 * a.norm()


@pytest.mark.parametrize("aggregation, count, token_budget, cut", GRPO_CASES)
def test_grpo_has_one_gradient(reference_gradients, folder, reward_file, tmp_path, aggregation, count,
                               token_budget, cut):
    train("train_grpo.py", folder, tmp_path / "run", reward_file, count, loss_aggregation=aggregation,
          token_budget=token_budget, sequence_parallel_size=cut)
    expected, found = reference_gradients[aggregation], gradient(tmp_path / "run" / "checkpoint-1")
    assert (found - expected).norm() < 1e-5 * expected.norm() and expected.norm() > 0


@pytest.mark.parametrize("count, shards", [(2, 1), (4, 2)])
def test_copies_of_the_weights_have_one_gradient(reference_gradients, folder, reward_file, tmp_path, count,
                                                 shards):
    train("train_grpo.py", folder, tmp_path / "run", reward_file, count, token_budget=100, shard_ranks=shards)
    expected, found = reference_gradients["token_mean"], gradient(tmp_path / "run" / "checkpoint-1")
    assert (found - expected).norm() < 1e-5 * expected.norm()


def test_ppo_has_one_gradient_for_policy_and_critic(folder, reward_file, tmp_path):
    settings = {"prompts_per_step": 16, "num_generations": 1, "critic_warmup_steps": 0,
                "num_mini_batches": 1, "critic_learning_rate": 1e-3, "kl_coef": 0.1}
    found, metrics = [], []
    for count, token_budget, cut in ((1, 8192, 1), (4, 100, 2)):
        out_dir = tmp_path / str(count)
        (first, *_), _ = train("train_ppo.py", folder, out_dir, reward_file, count, token_budget=token_budget,
                               sequence_parallel_size=cut, **settings)
        metrics.append(first)
        found.append([gradient(f"{out_dir}/checkpoint-1{place}") for place in ("", "/critic")])
    for expected, other in zip(*found):
        assert (other - expected).norm() < 1e-5 * expected.norm() and expected.norm() > 0
    for key in ("reward", "loss", "grad_norm", "entropy", "num_tokens", "critic/vf_loss", "critic/grad_norm",
                "critic/values/mean", "critic/vf_explained_var", "critic/advantages/max",
                "critic/advantages/min"):
        assert metrics[1][key] == pytest.approx(metrics[0][key], rel=2e-3, abs=1e-5), key


@pytest.mark.parametrize("script", ["train_grpo.py", "train_ppo.py", "train_dapo.py"])
def test_every_script_cuts_rows(folder, reward_file, tmp_path, script):
    """Which shows where it cannot: the model has four heads of queries, but two of keys."""
    settings = {"num_mini_batches": 1, "critic_warmup_steps": 0} if "ppo" in script else {}
    _, said = train(script, folder, tmp_path / "run", reward_file, 4, code=2, sequence_parallel_size=4,
                    **settings)
    assert "sequence_parallel_size=4 does not divide num_key_value_heads=2" in said


@pytest.mark.parametrize("script, message", [
    ("train_grpo.py", "sequence_parallel_size=3 does not divide the 2 ranks that train"),
    ("train_async.py", "sequence_parallel_size=3 does not divide the 1 ranks that train")])
def test_ranks_that_cannot_share_rows_are_refused(folder, reward_file, tmp_path, script, message):
    _, said = train(script, folder, tmp_path / "run", reward_file, 2, code=2, sequence_parallel_size=3)
    assert message in said and "Traceback" not in said


@pytest.mark.parametrize("script, message", [
    ("train_grpo.py", "shard_ranks=3 does not divide the 2 ranks that train"),
    ("train_async.py", "shard_ranks=3 does not divide the 1 ranks that train")])
def test_ranks_that_copies_do_not_divide_are_refused(folder, reward_file, tmp_path, script, message):
    _, said = train(script, folder, tmp_path / "run", reward_file, 2, code=2, shard_ranks=3)
    assert message in said and "Traceback" not in said


# Each update is of one sequence.
@pytest.mark.parametrize("script, settings", [
    ("train_grpo.py", {"prompts_per_step": 2, "num_generations": 2, "num_mini_batches": 4}),
    ("train_grpo.py", {"prompts_per_step": 2, "num_generations": 2, "num_mini_batches": 4,
                       "loss_type": "sapo", "kl_coef": 0.1, "engine_correction": "sequence_mask"}),
    ("train_ppo.py", {"prompts_per_step": 4, "num_generations": 1, "num_mini_batches": 4,
                      "critic_warmup_steps": 0, "critic_learning_rate": 1e-3})])
def test_a_rank_with_nothing_to_train_takes_part(folder, reward_file, tmp_path, script, settings):
    one, _ = train(script, folder, tmp_path / "one", reward_file, **settings)
    two, _ = train(script, folder, tmp_path / "two", reward_file, 2, **settings)
    for key in ("reward", "loss", "entropy", "grad_norm", "completions/mean_length", "num_tokens",
                "sampling/sampling_logp_difference/mean"):
        assert two[0][key] == pytest.approx(one[0][key], rel=1e-2, abs=1e-6), key


# ---------------------------------------------------------------- weights from a folder to all ranks and back

def loaded_rows(path, shape):
    """By the name of each parameter, this rank's rows and the whole; and what has to be the same on all."""
    mesh = dist.init_device_mesh("cpu", shape, mesh_dim_names=("copies", "shards")[-len(shape):])
    policy = load_policy(path, mesh, torch.float32)
    found = {name: [x.to_local().detach().clone(), x.full_tensor().detach()]
             for name, x in policy.hf.named_parameters()}
    (batch,) = pack([episode([5, 6], [7, 8])], [0], 10)
    with torch.no_grad():
        policy(batch, 1.0)
    policy.reshard()
    for name, x in policy.hf.named_parameters():
        assert torch.equal(x.to_local(), found[name][0])
    same = [(name, x) for name, x in policy.named_buffers()], [*dict(engine_weights(policy, "checkpoint", torch.float32))]
    return found, same, policy.packed


@pytest.mark.parametrize("family, shape", [
    ("qwen3", (2,)), ("qwen3_moe", (3,)), ("qwen2_5_vl", (2, 2)), ("qwen3", (2, 1))])
def test_each_rank_has_its_rows(tmp_path, family, shape):
    """Those of FSDP2, also where the ranks do not divide a dimension. Each of several copies has all."""
    make(family, tmp_path / "model")
    plain = model_class(AutoConfig.from_pretrained(tmp_path / "model")).from_pretrained(tmp_path / "model")
    ranks = on_ranks(math.prod(shape), tmp_path, loaded_rows, str(tmp_path / "model"), shape)
    for rank, (found, (buffers, names), packed) in enumerate(ranks):
        assert names == ranks[0][1][1] and packed and buffers
        for (name, x), (_, first) in zip(buffers, ranks[0][1][0], strict=True):
            assert torch.equal(x, first) and x.dtype == torch.float32, name
        assert found.keys() == dict(plain.named_parameters()).keys()
        for name, x in plain.named_parameters():
            rows, whole = found[name]
            parts = x.chunk(shape[-1])
            place = rank % shape[-1]
            assert torch.equal(whole, x) and torch.equal(rows, parts[place] if place < len(parts) else x[:0])


def test_shard_ranks_makes_copies(tmp_path):
    (tmp_path / "shape.py").write_text(
        "import sys\nfrom runtime import distributed\n"
        "sys.stdout.write(f'{distributed.set_up(shard_ranks=1)[3].shape}\\n')\n")
    output = runs.forked(tmp_path / "log", tmp_path / "shape.py", ranks=2)
    assert output.count("(2, 1)\n") == 2


def said(path):
    try:
        load_policy(path, dist.init_device_mesh("cpu", (dist.get_world_size(),)), torch.float32)
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize("name, change, message", [
    # The last row, so the last rank's.
    ("model.layers.1.mlp.up_proj.weight", lambda x: x.index_fill(0, torch.tensor([-1]), math.inf),
     "differs from what transformers computes by nan"),
    ("model.norm.weight", lambda x: torch.cat([x, x[:1]]), r"has the shape \[65\] in its weights"),
    ("model.norm.weight", None, "no model.norm.weight in its weights")])
def test_all_ranks_refuse_what_one_finds(folder, tmp_path, name, change, message):
    path = shutil.copytree(folder, tmp_path / "model")
    weights = load_file(f"{path}/model.safetensors")
    value = weights.pop(name)
    if change:
        weights[name] = change(value)
    save_file(weights, f"{path}/model.safetensors", {"format": "pt"})
    first, second = on_ranks(2, tmp_path, said, str(path))
    assert first == second and re.search(message, first)


# ---------------------------------------------------------------- rollouts on their way to all ranks

def long_rollouts(rank):
    """What a rank has sampled: rows of about 2,000 tokens of a large vocabulary, four letters per token."""
    rng = np.random.default_rng(rank)
    rollouts = []
    for i in range(8):
        spans = np.array([[[50, 2000 + i]], [[50, 900], [950, 1900 + i]]][i % 2], dtype=np.int32)
        count = int((spans[:, 1] - spans[:, 0]).sum())
        row = {"prompt": "What now?", "answer": str(rank)} if i % 4 == 0 else rollouts[-1].row
        rollouts.append(Rollout(
            rng.integers(0, 151_936, spans[-1, 1], dtype=np.int32), spans,
            np.log(rng.random(count, dtype=np.float32)), "stop" if i % 3 else "length",
            np.array([[0, 0, 50]], np.int32), row,
            [{"role": "assistant", "content": "".join(rng.choice(list("abcd "), 4 * count))}],
            math.nan if i == 5 else rng.random(), {"correct": i / 7}, "raised" * (i == 3),
            {t: rng.random() for t in range(0, count, 1 + i * i)}, {"tools": i}, ((0, 3), (i + 1, 4))))
    # The last is empty.
    return rollouts + [Rollout.single([rank], [], [], "length")]


def gather_long_rollouts(idle=()):
    """What a rank gets, where those in `idle` have sampled nothing, and how many bytes it is sent."""
    received, sent_by = [], dist.distributed_c10d
    all_gather = sent_by.all_gather
    sent_by.all_gather = lambda tensors, tensor, **group: [received.extend(t.nbytes for t in tensors),
                                                           all_gather(tensors, tensor, **group)]
    found = distributed.gathered([] if dist.get_rank() in idle else long_rollouts(dist.get_rank()))
    for r in found:
        # PyTorch warns of arrays that cannot be written to, and reads those that are not aligned slowly.
        assert all(array.flags.writeable and array.flags.aligned for array in (r.ids, r.spans, r.logprobs))
        r.ids += 1                              # which changes no other rollout
    return [replace(r, ids=r.ids - 1) for r in found], sum(received)


def bits(r):
    """All of a rollout in a form that compares by its bits and its types."""
    arrays = [(array.dtype, array.shape, array.tobytes()) for array in (r.ids, r.spans, r.logprobs, r.sequence_starts)]
    return arrays, struct.pack("d", r.score), repr({key: value for key, value in vars(r).items() if key not in
                                                    ("ids", "spans", "logprobs", "sequence_starts", "score")})


@pytest.mark.parametrize("count, idle", [(2, ()), (4, ()), (2, (0,)), (4, (1, 3)), (2, (0, 1))])
def test_gathered_rollouts_are_the_same_bit_for_bit(tmp_path, count, idle):
    sent = [long_rollouts(rank) for rank in range(count) if rank not in idle]
    expected = [bits(r) for rollouts in sent for r in rollouts]
    for found, _ in on_ranks(count, tmp_path, gather_long_rollouts, idle):
        assert [bits(r) for r in found] == expected
        # The completions of one prompt still share its row.
        rows = [r.row for r in found]
        assert [i for i in range(1, len(rows)) if rows[i] is not rows[i - 1]] == [
            9 * rank + i for rank in range(len(sent)) for i in (0, 4, 8) if rank + i]


def test_rollouts_take_at_most_16_bytes_per_token_on_their_way(tmp_path):
    """Arrays take 4 bytes for an id and for a logprob, the text 4, and a reward of every token would take 12:
    here one rollout of nine has those."""
    for found, received in on_ranks(2, tmp_path, gather_long_rollouts):
        assert 12 < received / sum(len(r.ids) for r in found) <= 16


# ---------------------------------------------------------------- an optimizer's files, cut for other ranks

def load_moments(folder):
    """What the ranks load from these files for a layer of five rows, whole."""
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    model = fully_shard(torch.nn.Linear(3, 5), mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    checkpoint.load_optimizer(folder, model, optimizer)
    return {f"{name}.{key}": x.full_tensor() if key != "step" else x for name, parameter in
            model.named_parameters() for key, x in optimizer.state[parameter].items()}


@pytest.mark.parametrize("sizes", [[5], [3, 2], [2, 2, 1], [2, 2, 1, 0]])
def test_an_optimizers_files_are_cut_for_other_ranks(tmp_path, sizes):
    """Rows that neither the old ranks nor the new ones divide, split as FSDP2 does it."""
    whole = {f"{name}.{key}": torch.rand(shape) for name, shape in (("weight", (5, 3)), ("bias", (5,)))
             for key in ("exp_avg", "exp_avg_sq")}
    steps = {f"{name}.step": torch.tensor(7.0) for name in ("weight", "bias")}
    os.makedirs(tmp_path / "trainer")
    for rank in range(len(sizes)):
        rows = {name: x.split(sizes)[rank].contiguous() for name, x in whole.items()}
        save_file(rows | steps, f"{tmp_path}/trainer/optimizer-{rank:05}.safetensors")
    for found in on_ranks(3, tmp_path, load_moments, str(tmp_path)):
        assert found.keys() == (whole | steps).keys()
        assert all(torch.equal(found[name], x) for name, x in (whole | steps).items())


# ---------------------------------------------------------------- two launchers, shared engines

def test_two_launchers_on_one_rendezvous(folder, reward_file, tmp_path):
    endpoint = f"localhost:{free_port()}"
    one, _ = train("train_grpo.py", folder, tmp_path / "one", reward_file)
    arguments = [f"--{key}={value}" for key, value in SMALL.items()]
    launchers = [runs.begin(
        tmp_path / "log", "-m", "torch.distributed.run", "--nnodes=2", "--nproc_per_node=1", "--rdzv_id=test",
        "--rdzv_backend=c10d", f"--rdzv_endpoint={endpoint}", "train_grpo.py", f"--model={folder}",
        f"--out_dir={tmp_path}/two", reward_file, *arguments)[0] for _ in range(2)]
    runs.finish(launchers, tmp_path / "log")
    two = lines(tmp_path / "two")
    for key in ("reward", "loss", "grad_norm", "entropy", "num_tokens"):
        assert two[0][key] == pytest.approx(one[0][key], rel=1e-4, abs=1e-6), key


def test_an_engine_over_two_ranks(talker, games, reward_file, tmp_path):
    """It plays the episodes of both, and they are those of one rank."""
    pytest.importorskip("vllm")
    settings = {"engine": "vllm", "environment": f"{games}:Letters", "task": "arithmetic", "max_turns": 3,
                "max_completion_length": 48, "max_steps": 2}
    one, _ = train("train_grpo.py", talker, tmp_path / "one", reward_file, **settings)
    two, _ = train("train_grpo.py", talker, tmp_path / "two", reward_file, 2, vllm_tensor_parallel_size=2,
                   **settings)
    for line in (*one[:2], *two[:2]):
        assert 0 < line["sampling/sampling_logp_difference/max"] < 1e-4 and line["episodes/turns"] > 1.2
        assert line["reward"] == pytest.approx(line["rewards/Letters/mean"] + line["rewards/score/mean"])
    # The memory that vLLM would make has the same name in another run.
    assert not [name for name in os.listdir("/dev/shm") if "cpushm" in name]
    for key in ("reward", "loss", "grad_norm", "num_tokens", "completions/mean_length", "episodes/turns",
                "episodes/inserted_tokens", "episodes/ended/done", "episodes/ended/length"):
        assert two[0][key] == pytest.approx(one[0][key], rel=1e-3, abs=1e-6), key
    said = [[sample["completion"] for sample in lines(tmp_path / name, "samples.jsonl")[:4]]
            for name in ("one", "two")]
    assert said[0] == said[1]


@pytest.mark.parametrize("setting, count, message", [
    ("--vllm_tensor_parallel_size=2", 1, "vllm_tensor_parallel_size=2 does not divide the 1 ranks"),
    ("--prompts_per_step=5", 2, "prompts_per_step=5 is no multiple of 2")])
def test_what_does_not_suit_the_ranks_is_refused(folder, tmp_path, setting, count, message):
    arguments = [f"--model={folder}", "--engine=hf", f"--out_dir={tmp_path}/run", setting]
    assert message in runs.forked(tmp_path / "log", "train_grpo.py", *arguments, ranks=count, code=2)


# ---------------------------------------------------------------- other weights

@pytest.mark.parametrize("engine", ["hf", "vllm"])
def test_a_bfloat16_engine_under_float32_masters(folder, reward_file, tmp_path, engine):
    pytest.importorskip("vllm") if engine == "vllm" else None
    metrics, _ = train("train_grpo.py", folder, tmp_path / "run", reward_file, engine=engine,
                       dtype="bfloat16", max_steps=3)
    assert 1e-6 < metrics[2]["sampling/sampling_logp_difference/mean"] < 0.05
    policy = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "checkpoint-3")
    assert {parameter.dtype for parameter in policy.parameters()} == {torch.float32}


@pytest.fixture(scope="module")
def noisy(folder, tmp_path_factory):
    """A deep model with large weights, in which bfloat16 rounds off 0.06 nats on average."""
    path = str(tmp_path_factory.mktemp("noisy"))
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(
        folder, num_hidden_layers=20, layer_types=["full_attention"] * 20,
        initializer_range=0.5)).save_pretrained(path)
    AutoTokenizer.from_pretrained(folder).save_pretrained(path)
    return path


HARMED = """
import runpy
import hf_engine
plain, fill = hf_engine.sample_tokens, hf_engine.HFEngine.load_weights
def colder():
    hf_engine.sample_tokens = lambda logits, uniform, heat, *rest: plain(logits, uniform, 0.7 * heat, *rest)
HARM
runpy.run_path("train_grpo.py", run_name="__main__")
"""
SYNC = "hf_engine.HFEngine.load_weights = lambda self, weights, version: "


@pytest.mark.parametrize("harm, found", [
    ("", None), ("colder()", 0), ("hf_engine.sample_tokens = lambda *given: plain(*given[:3], 0.5)", 0),
    (SYNC + "(fill(self, weights, version), colder())", 1),
    (SYNC + "fill(self, ((name.replace('.4.', '.3.'), x) for name, x in weights), version)", "sync")])
def test_the_bound_of_the_gap_follows_the_noise_of_bfloat16(noisy, reward_file, tmp_path, harm, found):
    """Three times what the model has before training; a layer or a temperature that is off is still found."""
    (tmp_path / "harmed.py").write_text(HARMED.replace("HARM", harm))
    run = lambda code, steps, **more: train(
        tmp_path / "harmed.py", noisy, tmp_path / "run", reward_file, code=code, dtype="bfloat16",
        learning_rate=2e-5, max_steps=steps, save_interval=1, **more)
    metrics, output = run(0 if found is None else 1, 2)
    if found == "sync":                                         # by the sums, whatever the noise
        assert "the sync of version 1 has failed" in output and "'model.layers.3." in output
        return
    gaps = [line["sampling/sampling_logp_difference/mean"] for line in metrics[:2] if len(line) > 9]
    if found is not None:
        assert len(gaps) == found and "engine and trainer logprobs differ by" in output
        assert f"logprob_gap={max(0.05, 3 * gaps[0]) if gaps else 0.15:g}" in output
        return
    assert gaps[0] > 0.05 and len(gaps) == 2
    run(0, 3, resume="auto")
    state = json.loads((tmp_path / "run" / "checkpoint-3" / "trainer" / "state.json").read_text())
    assert state["first_gap"] == gaps[0] != gaps[1]


@pytest.mark.parametrize("engine", ["hf", "vllm"])
def test_mixtures_of_experts_train_with_either_engine(experts, reward_file, tmp_path, engine):
    if engine == "vllm":
        pytest.importorskip("vllm")
    metrics, _ = train("train_grpo.py", experts, tmp_path / "run", reward_file, 2 - (engine == "vllm"),
                       engine=engine, max_steps=3)
    assert max(line["sampling/sampling_logp_difference/max"] for line in metrics[:3]) < 1e-4
    before, after = (AutoModelForCausalLM.from_pretrained(path).state_dict()
                     for path in (experts, tmp_path / "run" / "checkpoint-3"))
    assert before.keys() == after.keys()
    assert all(not torch.equal(before[name], after[name]) for name in before if "experts" in name)


# ---------------------------------------------------------------- a rank that dies, a sync that hangs

DEATHS = """
import os, signal
calls = 0
def dies(prompts, completions, **_):
    global calls
    calls += 1
    if calls == 4 and os.environ["RANK"] == "1":
        os.kill(os.getppid(), signal.SIGKILL)                   # the trainer, which has started this process
    return [0.5 * (i % 2) for i in range(len(completions))]
def raises(prompts, completions, **_):
    global calls
    calls += 1
    if calls >= 4 and os.environ["RANK"] == "1":
        raise KeyError("colour")
    return [0.5 * (i % 2) for i in range(len(completions))]
"""


TOLD = """
import os, runpy
os.environ["TORCHELASTIC_ERROR_FILE"] = os.path.join(os.path.dirname(__file__), "error " + os.environ["RANK"])
runpy.run_path("train_grpo.py", run_name="__main__")
"""


def test_an_error_on_one_rank_ends_the_run_with_its_cause(folder, tmp_path):
    """torchrun shows the error that a rank has told it of first. See also test_placement.py, where it does."""
    (tmp_path / "deaths.py").write_text(DEATHS)
    (tmp_path / "told.py").write_text(TOLD)
    train(tmp_path / "told.py", folder, tmp_path / "run", f"--reward={tmp_path}/deaths.py:raises", 2, code=1,
          max_steps=1000)
    errors = [json.loads((tmp_path / f"error {rank}").read_text())["message"] for rank in range(2)]
    times = [int(error["extraInfo"]["timestamp"]) for error in errors]
    assert "KeyError: 'colour'" in errors[1]["message"] and times[1] < times[0]
    assert "KeyError" not in errors[0]["message"]


def test_a_rank_that_dies_ends_the_other(folder, tmp_path):
    """Also without a launcher that would stop it."""
    (tmp_path / "deaths.py").write_text(DEATHS)
    arguments = runs.with_defaults([f"--out_dir={tmp_path}/run", f"--reward={tmp_path}/deaths.py:dies"],
                                   SMALL | {"model": folder, "max_steps": 1000})
    processes = runs.begin(tmp_path / "log", "train_grpo.py", *arguments, ranks=2)
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [1, -signal.SIGKILL], (tmp_path / "log").read_text()


LATE = """
import os, time, hf_engine
load_weights, calls = hf_engine.HFEngine.load_weights, 0
def late(engine, named_tensors, version):
    if os.environ["RANK"] == "1":
        time.sleep(600)
    load_weights(engine, named_tensors, version)
def sync(prompts, completions, **_):
    hf_engine.HFEngine.load_weights = late
    return [0.5 * (i % 2) for i in range(len(completions))]
def reward(prompts, completions, **_):
    global calls
    calls += 1
    if calls == 3 and os.environ["RANK"] == "1":
        time.sleep(600)
    return [0.5 * (i % 2) for i in range(len(completions))]
"""


@pytest.mark.parametrize("late, places, line", [
    ("sync", ["rank 0 has stood still for timeout=3 seconds, in step 0, sync:",
              "rank 1 has stood still for timeout=3 seconds, in step 0, sync:"], "full_tensor"),
    ("reward", ["rank 0 has stood still for timeout=3 seconds, in step 0, after reward:",
                "rank 1 has stood still for timeout=3 seconds, in step 0, reward:"], "all_gather_object")])
def test_a_rank_that_stands_still_stops_the_run(folder, tmp_path, late, places, line):
    """The other one waits for it inside a collective, from which no signal would call it back."""
    (tmp_path / "late.py").write_text(LATE)
    started = time.monotonic()
    _, output = train("train_grpo.py", folder, tmp_path / "run", f"--reward={tmp_path}/late.py:{late}",
                      2, code=1, timeout=3, call_timeout=0)
    # Which of the two is first is chance, and the other may then say that it has lost its peer.
    assert any(place in output for place in places)
    # It shows where its threads stood.
    assert (line in output or "late.py" in output) and time.monotonic() - started < 90


def test_a_chat_template_that_never_ends_stops_the_run(folder, tmp_path):
    path = shutil.copytree(folder, tmp_path / "model")
    (path / "chat_template.jinja").write_text(2 * "{% for i in range(99999) %}" + 2 * "{% endfor %}")
    _, output = train("train_grpo.py", path, tmp_path / "run", "--reward=none", code=1, timeout=2,
                      call_timeout=0.1)
    assert "rank 0 has stood still for timeout=2 seconds, in the start: " in output


@pytest.mark.parametrize("loading", [False, True])
def test_workers_do_not_outlive_a_torchrun_that_dies_in_the_launch(folder, tmp_path, loading):
    """They may be importing, joining their group, or loading what the run needs, here a slow reward file."""
    (tmp_path / "waits.py").write_text(
        "import time\nopen(f'{__file__}.begun', 'w').close()\ntime.sleep(600)\n")
    (process,) = runs.begin_torchrun(tmp_path / "log", 2, "train_grpo.py", f"--model={folder}",
                                     f"--out_dir={tmp_path}/run", f"--reward={tmp_path}/waits.py:score")
    workers, deadline = [], time.monotonic() + 60
    while len(workers) < 2 and time.monotonic() < deadline:
        time.sleep(0.1)
        pgrep = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True)
        workers = pgrep.stdout.split()
    time.sleep(0.5)
    while loading and not (tmp_path / "waits.py.begun").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    process.kill()
    process.join()
    while any(os.path.exists(f"/proc/{pid}") for pid in workers) and time.monotonic() < deadline:
        time.sleep(0.1)
    left = [pid for pid in workers if os.path.exists(f"/proc/{pid}")]
    for pid in left:
        os.kill(int(pid), signal.SIGKILL)
    assert len(workers) == 2 and not left


# Of four prompts one has completions that all score the same.
SPREAD = """
def some(prompts, completions, **_):
    return [0.3 if len(p[-1]["content"]) % 4 == 1 else i % 4 for i, p in enumerate(prompts)]
def none(prompts, completions, **_):
    return [0.3] * len(completions)
"""


def test_what_has_no_advantage_is_left_out_without_a_trace(folder, tmp_path):
    (tmp_path / "spread.py").write_text(SPREAD)
    found, skipped = [], []
    for name, skip, count in (("all", False, 1), ("needed", True, 1), ("ranks", True, 2)):
        metrics, _ = train("train_grpo.py", folder, tmp_path / name, f"--reward={tmp_path}/spread.py:some",
                           count, skip_zero_advantage=skip, prompts_per_step=8)
        found.append(gradient(tmp_path / name / "checkpoint-1"))
        skipped.append(metrics[0]["frac_reward_zero_std"])
    assert 0 < skipped[0] < 1 and found[0].norm() > 0
    for other in found[1:]:
        assert (other - found[0]).norm() < 1e-5 * found[0].norm()
    metrics, _ = train("train_grpo.py", folder, tmp_path / "none", f"--reward={tmp_path}/spread.py:none",
                       skip_zero_advantage=True)
    assert metrics[0]["grad_norm"] == 0 and metrics[0]["frac_reward_zero_std"] == 1
    assert "entropy" not in metrics[0]                          # a mean over nothing
    assert not gradient(tmp_path / "none" / "checkpoint-1").any()
