"""Rows cut over ranks: the logprobs, values and gradients of plain forwards, in parts of a row."""
import pytest
import torch
import torch.distributed as dist
from transformers import AutoConfig, Qwen3Config, Qwen3ForCausalLM

import bench.models
from model import load_policy, micro_batches
from packing import deal
from runtime.model_folder import model_class
from runs import on_ranks
from test_model import keep, plain_logps, random_sets
from test_packing import episode, random_parts

PARTS = random_parts(14, 250, longest=9, parts=(2, 4, 5))       # with shared prefixes and several spans
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4}
WEIGHTS = [torch.linspace(-1, 1.5, sum(map(len, row[1::2]))).roll(i) for i, row in enumerate(PARTS)]


def trained(folder, size, checkpointing, names, sets):
    """Of a rank: its logprobs and entropies, and of all ranks the named gradients, of a loss by sequences."""
    group, _ = dist.new_subgroups(size)
    mesh, rollouts = dist.init_device_mesh("cpu", (dist.get_world_size(),)), [episode(*row) for row in PARTS]
    keep(rollouts, sets)
    policy = load_policy(folder, mesh, torch.float32, checkpointing, sequence_group=group)
    shares, found, sizes = deal(rollouts, range(14), mesh.size()), {}, []
    if size == 4:                                               # all on the last rank, the others are idle
        shares = [[], [], [], sum(shares, [])]
    share = shares[mesh.get_rank()]
    for batch in micro_batches(policy, rollouts, share, 60):
        logp, entropy = policy(batch, 0.8)
        batch.put(torch.stack([logp, entropy], 1).detach(), found)
        loss = batch.mean(logp) ** 2 + batch.flat(torch.linspace(-1, 1, 14)) * logp.exp() + 0.3 * entropy
        ((loss * batch.flat(WEIGHTS)).sum() * mesh.size()).backward()
        sizes.append((batch.input_ids.shape[1], batch.cut.leader, len(logp)))
    gradients = {name: p.grad.full_tensor() for name, p in policy.hf.named_parameters() if p.grad is not None}
    return found, sizes, [gradients[name] for name in names]


@pytest.mark.parametrize("name, count, size, checkpointing", [
    ("qwen3", 2, 2, False), ("qwen3", 4, 4, True), ("qwen3", 4, 2, False), ("gpt_oss", 2, 2, False),
    ("gemma2", 2, 2, False)])
def test_logprobs_and_gradients_are_those_of_plain_forwards(monkeypatch, tmp_path, name, count, size,
                                                            checkpointing):
    """Grouped heads; with windows, sinks and softcaps; by rows that are as short on every rank. Two ranks
    normalise over the tokens that each token was drawn from."""
    path = str(tmp_path)
    if name == "qwen3":
        torch.manual_seed(0)
        Qwen3ForCausalLM(Qwen3Config(
            vocab_size=256, hidden_size=32, intermediate_size=48, num_hidden_layers=2, head_dim=16,
            initializer_range=0.2, **HEADS)).save_pretrained(path)
    else:
        monkeypatch.setattr(bench.models, "SMALL", bench.models.SMALL | HEADS)
        bench.models.make(name, path)
    plain = model_class(AutoConfig.from_pretrained(path)).from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager").eval()
    sets = random_sets(PARTS, 250) if count == 2 else [()] * 14
    expected = [plain_logps(plain, row, 0.8, kept) for row, kept in zip(PARTS, sets)]
    for s, ((logp, entropy), weight) in enumerate(zip(expected, WEIGHTS)):
        loss = logp.mean() ** 2 + torch.linspace(-1, 1, 14)[s] * logp.exp() + 0.3 * entropy
        (loss * weight).sum().backward(retain_graph=True)
    names = [name for name, p in plain.named_parameters() if p.grad is not None]
    results, seen = on_ranks(count, tmp_path, trained, path, size, checkpointing, names, sets), {}
    for rank, (found, sizes, gradients) in enumerate(results):
        assert not seen.keys() & found.keys()
        seen |= found
        # Each rank of a group leads every size-th micro-batch, and predicts nothing in the others.
        assert [leader for _, leader, _ in sizes] == [*range(size)] * (len(sizes) // size)
        assert all(width <= -(-60 // size) for width, _, _ in sizes)
        assert all(C == 0 for _, leader, C in sizes if leader != rank % size)
        for key, ours in zip(names, gradients):
            theirs = plain.get_parameter(key).grad
            assert (ours - theirs).norm() < 2e-5 * theirs.norm(), key
    for s, both in enumerate(expected):
        torch.testing.assert_close(seen[s], torch.stack(both, 1).detach(), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name, size, message", [
    ("qwen3_moe", 4, "sequence_parallel_size=4 does not divide num_attention_heads=2"),
    ("falcon_h1", 2, "sequence_parallel_size=2 cannot be used")])
def test_a_model_that_cannot_be_cut_is_refused(monkeypatch, tmp_path, name, size, message):
    if size == 2:
        monkeypatch.setattr(bench.models, "SMALL", bench.models.SMALL | HEADS)
    bench.models.make(name, str(tmp_path))
    for found in on_ranks(size, tmp_path, refusal, str(tmp_path), size):
        assert message in found


def refusal(folder, size):
    group, _ = dist.new_subgroups(size)
    try:
        load_policy(folder, dist.init_device_mesh("cpu", (size,)), torch.float32, sequence_group=group)
    except ValueError as error:
        return str(error)
