"""Logprobs, entropies and values of packed rows against plain forwards of one sequence at a time."""
import functools
import math
import random
from itertools import accumulate
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

import losses
import model
from runs import split
from model import (LogprobsFromHidden, Policy, head_logits, load_policy, make_optimizer, product,
                   token_logprobs)
from options import critic_losses
from options.critic import load_critic, token_values
from options.fused_norms import fuse_norms
from packing import micro_batch, pack
from test_attention import OnCuda
from test_packing import episode, random_parts, random_rollouts, sampled_places


# ---------------------------------------------------------------- logprobs and entropy

def plain_logps(model, parts, temperature, sets=None):
    """Logprobs and entropies of the sampled tokens of one row, [len] each, by full logits.

    sets: for each of these tokens the list of those that it was drawn from, if these were not all tokens.
    """
    ids, places = torch.tensor(sum(parts, [])), sampled_places(parts)
    if sets:
        logits, logps, entropies = model(ids[None]).logits[0] / temperature, [], []
        for place, kept in zip(places, sets, strict=True):
            table = logits[place - 1, kept].log_softmax(0)
            logps.append(table[kept.index(ids[place].item())])
            entropies.append(-(table.exp() * table).sum())
        return torch.stack(logps), torch.stack(entropies)
    table = (model(ids[None]).logits[0] / temperature).log_softmax(-1)[[place - 1 for place in places]]
    return table.gather(1, ids[places, None])[:, 0], -(table.exp() * table).sum(1)


def plain_model(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")


def random_sets(rows, vocabulary, largest=7):
    """For each row of parts a list of up to seven tokens for each of its sampled tokens, which is among them."""
    rng, sets = random.Random(0), []
    for parts in rows:
        sets.append([])
        for token in sum(parts[1::2], []):
            kept = {token, *rng.sample(range(vocabulary), rng.randrange(largest))}
            sets[-1].append(rng.sample([*kept], len(kept)))
    return sets


def keep(rollouts, sets):
    for r, kept in zip(rollouts, sets, strict=True):
        if kept:
            r.keep([np.array(ids, dtype=np.int32) for ids in kept])


def assert_same_gradients(policy, plain):
    for (name, ours), theirs in zip(policy.hf.named_parameters(), plain.parameters()):
        gap = (ours.grad.full_tensor() - theirs.grad).norm() / theirs.grad.norm()
        assert gap < 1e-5, (name, gap)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("budget", [40, 90, 4000])
def test_packed_logprobs_and_gradients_are_those_of_plain_forwards(folder, mesh, temperature, budget):
    lists = random_parts(30, 256)
    rollouts, plain = [episode(*parts) for parts in lists], plain_model(folder)
    logps, entropies = zip(*(plain_logps(plain, parts, temperature) for parts in lists))
    weights = [torch.randn(len(logp)) for logp in logps]
    sum((logp * weight).sum() for logp, weight in zip(logps, weights)).backward()

    policy, found, found_entropies = load_policy(folder, mesh, torch.float32), {}, {}
    for batch in pack(rollouts, range(30), budget):
        logp, entropy = policy(batch, temperature)
        (logp * batch.flat(weights)).sum().backward()
        batch.put(logp.detach(), found)
        batch.put(entropy.detach(), found_entropies)
    for s in range(30):
        torch.testing.assert_close(found[s], logps[s].detach(), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(found_entropies[s], entropies[s].detach(), atol=1e-5, rtol=1e-5)
    assert_same_gradients(policy, plain)


@pytest.mark.parametrize("parts", [(4,), (6, 7)])
@pytest.mark.parametrize("loss_type, aggregation", [("clip", "token_mean"), ("gspo", "sequence_mean")])
def test_rows_with_several_spans_are_trained_on_what_was_sampled(folder, mesh, loss_type, aggregation, parts):
    """With inserted tokens between two or three spans: logprobs, loss and gradient of plain forwards."""
    lists, temperature = random_parts(12, 256, longest=9, parts=parts), 0.8
    rollouts, plain, adv = [episode(*row) for row in lists], plain_model(folder), torch.randn(12)
    logps = [plain_logps(plain, row, temperature)[0] for row in lists]
    old_logps = [(logp + 0.3 * torch.randn(len(logp))).detach() for logp in logps]
    expected, num_tokens = 0.0, sum(map(len, logps))
    for logp, old_logp, a in zip(logps, old_logps, adv):
        log_ratio = logp - old_logp
        ratio = log_ratio.exp() if loss_type == "clip" else log_ratio.mean().exp().expand(len(logp))
        token_loss = -torch.minimum(ratio * a, ratio.clamp(0.8, 1.2) * a)
        expected += (token_loss / num_tokens if loss_type == "clip" else token_loss / len(logp) / 12).sum()
    expected.backward()

    policy = load_policy(folder, mesh, torch.float32)
    without_gradient = token_logprobs(policy, rollouts, range(12), 50, temperature)
    lengths = torch.tensor([len(r.logprobs) for r in rollouts])
    weight = losses.sequence_weights(lengths, aggregation, [*range(12)], 1, 50)
    total, batches = 0.0, pack(rollouts, range(12), 50)
    assert len(batches) > 1 and any(len(batch.sequences) > 1 for batch in batches)
    for batch in batches:
        logp, _ = policy(batch, temperature)
        for s, part in split(batch, logp.detach()).items():
            torch.testing.assert_close(part, logps[s].detach(), atol=1e-5, rtol=1e-5)
            assert torch.equal(part, without_gradient[s])
        token_loss, _, _ = losses.LOSSES[loss_type](logp, batch.flat(old_logps), batch.flat(adv),
                                                    mean=batch.mean, lengths=batch.sequence_lengths,
                                                    epsilon=0.2, epsilon_high=0.2)
        loss = (batch.flat(weight) * token_loss).sum()
        loss.backward()
        total += loss.item()
    assert total == pytest.approx(expected.item(), rel=1e-5, abs=1e-6)
    assert_same_gradients(policy, plain)


@pytest.mark.parametrize("loss_type", losses.LOSSES)
def test_groups_have_the_gradient_of_separate_rows(folder, mesh, loss_type):
    """Every loss and aggregation, with a correction: prompts in groups, each computed once, in small rows."""
    lists = random_parts(9, 256, longest=9, parts=(2, 4), shared=0)
    lists = [[lists[i // 3][0], *row[1:]] for i, row in enumerate(lists)]
    lists += [lists[0], lists[4][:1] + [lists[4][1][:1] + [9, 9]]]
    rollouts, plain, N = [episode(*row) for row in lists], plain_model(folder), len(lists)
    adv = torch.randn(N)
    logps = [plain_logps(plain, row, 1.0)[0] for row in lists]
    lengths = torch.tensor([len(logp) for logp in logps])
    old_logps = [(logp + 0.2 * torch.randn(len(logp))).detach() for logp in logps]
    engine_logps = [old + 0.2 * torch.randn(len(old)) for old in old_logps]
    policy = load_policy(folder, mesh, torch.float32)

    def token_losses(logp, flat, mean):
        loss, _, _ = losses.LOSSES[loss_type](logp, flat(old_logps), flat(adv), mean=mean,
                                              lengths=lambda: flat(lengths), engine_logp=flat(engine_logps),
                                              epsilon=0.2, epsilon_high=0.2)
        return loss * losses.CORRECTIONS["sequence_truncate"](flat(old_logps), flat(engine_logps),
                                                              mean=mean, lengths=lambda: flat(lengths), cap=2.0,
                                                              low=0.5, high=2.0)

    for aggregation in losses.AGGREGATIONS:
        weight = losses.sequence_weights(lengths, aggregation, [*range(N)], 1, 20)
        expected = sum(
            (weight[s] * token_losses(logps[s], lambda x: x[s].expand(len(logps[s])),
                                      lambda x: x.mean().expand_as(x))).sum() for s in range(N))
        expected = torch.autograd.grad(expected, list(plain.parameters()), retain_graph=True)
        batches = pack(rollouts, range(N), 28)
        policy.zero_grad()
        assert len(batches) > 1 and any(batch.segments.places is not None for batch in batches)
        for batch in batches:
            logp, _ = policy(batch, 1.0)
            (batch.flat(weight) * token_losses(logp, batch.flat, batch.mean)).sum().backward()
        for parameter, theirs in zip(policy.hf.parameters(), expected):
            assert (parameter.grad.full_tensor() - theirs).norm() < 1e-5 * theirs.norm()


def test_the_gradient_of_two_episodes_is_that_of_a_forward_for_each_sampled_token(folder, mesh):
    """Both in one packed row. Each forward reads what stands before a token, observations included, alone."""
    lists, adv = [[[5, 6, 7], [80, 81, 82], [30, 31], [90], [32], [91, 92]],
                  [[9, 8], [83], [33, 34, 35], [93, 94]]], torch.tensor([0.7, -1.3])
    rollouts, plain, num_tokens = [episode(*row) for row in lists], plain_model(folder), 9
    old_logps, expected = [], 0.0
    for row, a in zip(lists, adv):
        ids = torch.tensor(sum(row, []))
        logps = [plain(ids[None, :place]).logits[0, -1].log_softmax(0)[ids[place]]
                 for place in sampled_places(row)]
        old_logps.append(torch.stack(logps).detach() - torch.linspace(-0.4, 0.4, len(logps)))
        for logp, old_logp in zip(logps, old_logps[-1]):
            ratio = (logp - old_logp).exp()
            expected = expected - torch.minimum(ratio * a, ratio.clamp(0.8, 1.2) * a) / num_tokens
    expected.backward()

    policy = load_policy(folder, mesh, torch.float32)
    (batch,) = pack(rollouts, [0, 1], 100)
    logp, _ = policy(batch, 1.0)
    token_loss, low, high = losses.LOSSES["clip"](logp, batch.flat(old_logps), batch.flat(adv),
                                                  epsilon=0.2, epsilon_high=0.2)
    loss = (token_loss / num_tokens).sum()
    loss.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5) and 0 < (low | high).sum() < num_tokens
    assert_same_gradients(policy, plain)


@pytest.mark.parametrize("loss_type", losses.LOSSES)
def test_an_idle_micro_batch_adds_nothing(folder, mesh, loss_type):
    """Put together as the scripts do, with every correction: a loss of 0, and a gradient of 0, not none."""
    policy, batch = load_policy(folder, mesh, torch.float32), micro_batch([], 1)
    adv = torch.randn(3)
    for correction in losses.CORRECTIONS:
        logp, entropy = policy(batch, 1.0)
        old_logp, engine_logp = batch.flat({}), logp.detach()
        token_loss, low, high = losses.LOSSES[loss_type](
            logp, old_logp, batch.flat(adv), mean=batch.mean, lengths=batch.sequence_lengths,
            engine_logp=engine_logp, epsilon=0.2, epsilon_high=0.2)
        weights = losses.CORRECTIONS[correction](old_logp, engine_logp, mean=batch.mean,
                                                 lengths=batch.sequence_lengths, cap=2.0, low=0.5, high=2.0)
        kl = losses.kl_penalty(logp, batch.flat({}), "k3", old_logp)
        loss = (batch.flat(adv) * (weights * token_loss + 0.1 * kl - 0.1 * entropy)).sum()
        loss.backward()
        assert loss.item() == 0 and len(low | high) == 0 and split(batch, logp.detach()) == {}
        assert all(p.grad is not None and not p.grad.full_tensor().any() for p in policy.parameters())
        policy.zero_grad()


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("chunk", [1, 3, 1024])
@pytest.mark.parametrize("through", ["logp", "entropy", "both"])
@pytest.mark.parametrize("scale, softcap", [(1.0, 0.0), (0.25, 0.0), (3.0, 2.0)])
@pytest.mark.parametrize("restricted", [False, True])
def test_logprobs_from_hidden(monkeypatch, bias, chunk, through, scale, softcap, restricted):
    monkeypatch.setattr(model, "LOGITS", {"cpu": chunk * 37})
    C, H, V, temperature = 10, 8, 37, 0.7
    inputs = [torch.randn(C, H), torch.randn(V, H)] + ([torch.randn(V)] if bias else [])
    targets, d_logp, d_entropy = torch.randint(V, (C,)), torch.randn(C), torch.randn(C)
    objective = lambda logp, entropy: sum([(logp * d_logp).sum()] * (through != "entropy")
                                          + [(entropy * d_entropy).sum()] * (through != "logp"))
    slow = [x.double().requires_grad_() for x in inputs]
    logits = scale * (slow[0] @ slow[1].T + (slow[2] if bias else 0))
    logits = (softcap * torch.tanh(logits / softcap) if softcap else logits) / temperature
    kept, each = None, [[*range(V)]] * C
    if restricted:
        # With repeats, in any order, and of one token only.
        kept = torch.cat([targets[:, None], torch.randint(V, (C, 5), dtype=torch.int32), targets[:, None]], 1).int()
        kept[3] = targets[3]
        each = [[*{*row}] for row in kept.tolist()]
    rows = [logits[c, each[c]] for c in range(C)]
    expected = torch.stack([rows[c].log_softmax(0)[each[c].index(targets[c])] for c in range(C)])
    expected_entropy = torch.stack([-(row.softmax(0) * row.log_softmax(0)).sum() for row in rows])
    objective(expected, expected_entropy).backward()
    fast = [x.clone().requires_grad_() for x in inputs]
    logp, entropy = LogprobsFromHidden.apply(*fast, *([] if bias else [None]), targets, temperature, scale,
                                             softcap, kept)
    objective(logp, entropy).backward()
    torch.testing.assert_close(logp.double(), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(entropy.double(), expected_entropy, atol=1e-5, rtol=1e-5)
    for ours, theirs in zip(fast, slow):
        torch.testing.assert_close(ours.grad.double(), theirs.grad, atol=5e-5, rtol=1e-4)


@pytest.mark.parametrize("bias", [False, True])
def test_the_head_does_not_round_logits(bias):
    """Of bfloat16 factors: exact products against a float64 sum."""
    torch.manual_seed(0)
    C, H, V = 10, 64, 300
    inputs = [torch.randn(C, H).bfloat16(), torch.randn(V, H).bfloat16(), torch.randn(V).bfloat16()]
    hidden, weight, shift = (x.double() for x in inputs)
    exact = hidden @ weight.T + bias * shift
    kept = head_logits(*inputs[:2], inputs[2] if bias else None)
    assert kept.dtype == torch.float32
    torch.testing.assert_close(kept.double(), exact, atol=1e-4, rtol=1e-5)
    assert (exact.bfloat16() - exact).abs().max() > 0.02

    # Rounding moves the odds of these.
    targets = exact.argsort(1)[:, -2]
    onehot = F.one_hot(targets, V)
    fast = [x.clone().requires_grad_() for x in inputs[:2 + bias]]
    logp, _ = LogprobsFromHidden.apply(*fast, *([] if bias else [None]), targets, 1.0)
    torch.testing.assert_close(logp.detach(), kept.log_softmax(1)[onehot.bool()], atol=1e-5, rtol=1e-5)
    logp.sum().backward()
    d_logits = onehot - kept.double().softmax(1)
    for x, gradient in zip(fast, (d_logits @ weight, d_logits.T @ hidden, d_logits.sum(0))):
        # The bound is bfloat16's own.
        assert (x.grad - gradient).norm() < 4e-3 * gradient.norm()


def test_gradients_of_a_bfloat16_head_are_summed_in_float32(monkeypatch):
    """Six hundred chunks of one token, each of which adds 2/3: in bfloat16 the sum stops before 300."""
    monkeypatch.setattr(model, "LOGITS", {"cpu": 3})
    hidden, *head = (x.bfloat16() for x in (torch.ones(600, 4), torch.zeros(3, 4), torch.zeros(3)))
    head = [x.requires_grad_() for x in head]
    logp, _ = LogprobsFromHidden.apply(hidden, *head, torch.zeros(600, dtype=torch.long), 1.0)
    logp.sum().backward()
    assert head[0].grad[0].tolist() == pytest.approx([400] * 4, rel=0.01)
    assert head[1].grad.tolist() == pytest.approx([400, -200, -200], rel=0.01)


@pytest.mark.parametrize("seed", range(6))
def test_loss_and_gradients_are_those_of_the_padded_computation(tmp_path, mesh, seed):
    """The clipped loss by padding, mask and full logits, for random shapes, lengths, spans and budgets."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    vocab, heads, longest = rng.choice([2, 17, 300, 5000]), rng.choice([2, 4]), rng.choice([1, 9, 40])
    hf = Qwen3ForCausalLM(Qwen3Config(
        vocab_size=vocab, hidden_size=16 * rng.randint(1, 4), intermediate_size=48, head_dim=8,
        num_hidden_layers=rng.randint(1, 3), num_attention_heads=heads, num_key_value_heads=heads // 2,
        tie_word_embeddings=rng.random() < 0.5, initializer_range=0.1))
    hf.save_pretrained(tmp_path)
    count, temperature = rng.randint(1, 20), rng.choice([0.5, 1.0, 2.0])
    lists = random_parts(count, vocab, seed, longest, rng.choice([(2,), (2, 3, 4, 5, 6)]))
    rollouts, adv = [episode(*parts) for parts in lists], torch.randn(count)
    width = max(len(r.ids) for r in rollouts)
    row = lambda values: values + [0] * (width - len(values))
    ids = torch.tensor([row(sum(parts, [])) for parts in lists])
    real = torch.tensor([row([1] * len(sum(parts, []))) for parts in lists])
    trained = torch.tensor([[place in sampled_places(parts) for place in range(1, width)] for parts in lists])
    table = (hf.double()(input_ids=ids, attention_mask=real).logits[:, :-1] / temperature).log_softmax(-1)
    logp = table.gather(2, ids[:, 1:, None])[:, :, 0]
    old = logp.detach() + 0.3 * torch.randn(logp.shape).double()
    ratio = (logp - old).exp()
    loss = -torch.minimum(ratio * adv[:, None], ratio.clamp(0.8, 1.2) * adv[:, None]) * trained
    (loss.sum() / trained.sum()).backward()

    policy = load_policy(str(tmp_path), mesh, torch.float32)
    lengths = torch.tensor([len(r.logprobs) for r in rollouts])
    weight = losses.sequence_weights(lengths, "token_mean", [*range(count)], 1, longest)
    old_logps = [old[s][trained[s]].float() for s in range(count)]
    total = 0.0
    for batch in pack(rollouts, range(count), rng.randint(width, 4 * width)):
        new, _ = policy(batch, temperature)
        token_loss, _, _ = losses.LOSSES["clip"](new, batch.flat(old_logps), batch.flat(adv),
                                                 epsilon=0.2, epsilon_high=0.2)
        part = (batch.flat(weight) * token_loss).sum()
        part.backward()
        total += part.item()
    assert total == pytest.approx((loss.sum() / trained.sum()).item(), rel=1e-5, abs=1e-6)
    ours = torch.cat([p.grad.full_tensor().flatten() for p in policy.hf.parameters()])
    theirs = torch.cat([p.grad.flatten() for p in hf.parameters()])
    assert (ours - theirs).norm() < 1e-5 * theirs.norm()


def test_gradient_checkpointing_keeps_less_and_changes_nothing(folder, mesh):
    rollouts = random_rollouts(6, 256)
    gradients, kept = [], []
    for checkpointing in (False, True):
        policy, saved = load_policy(folder, mesh, torch.float32, gradient_checkpointing=checkpointing), []
        (batch,) = pack(rollouts, range(6), 500)
        with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x.numel()) or x, lambda x: x):
            logp, _ = policy(batch, 1.0)
        kept.append(sum(saved))
        logp.sum().backward()
        gradients.append(torch.cat([p.grad.full_tensor().flatten() for p in policy.parameters()]))
    assert kept[1] < 0.5 * kept[0]
    assert torch.equal(*gradients)


@pytest.mark.parametrize("way", ["compiled", "fused_norms"])
def test_faster_layers_compute_the_same(folder, mesh, monkeypatch, way):
    """Compiled without writing kernels, which would take half a minute: graphs, guards and gradients are real."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    rollouts, found = random_rollouts(12, 256), []
    for faster in (False, True):
        if faster and way == "fused_norms":                     # as on a GPU
            check = model.check_same
            monkeypatch.setattr(model, "check_same", lambda what, network, P: (
                check(what, network, P), fuse_norms(network))[0])
        policy = load_policy(folder, mesh, torch.float32, torch_compile=faster and way == "compiled")
        logps = {}
        for batch in pack(rollouts, range(12), 150):            # rows of several lengths
            logp, _ = policy(batch, 1.0)
            logp.sum().backward()
            batch.put(logp.detach(), logps)
        found.append([torch.cat([logps[s] for s in range(12)])] + [p.grad.full_tensor() for p in policy.parameters()])
    norms = [part for part in policy.modules() if isinstance(getattr(part, "forward", None), functools.partial)]
    assert len(norms) == (9 if way == "fused_norms" else 0)     # four in each of two layers, and the last one
    for plain, faster in zip(*found):
        torch.testing.assert_close(faster, plain, rtol=1e-4, atol=1e-5)
    assert way == "fused_norms" or torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 4


def test_norms_with_another_formula_stay_as_they_are():
    """Gemma's factor is 1 + weight."""
    from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
    from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm
    network = torch.nn.Sequential(Gemma3RMSNorm(8), Olmo2RMSNorm(8))
    network[0].variance_epsilon = network[0].eps
    fuse_norms(network)
    assert "forward" not in vars(network[0]) and "forward" in vars(network[1])


def test_bfloat16_computes_from_float32_masters(folder, mesh):
    rollouts = random_rollouts(6, 256)
    logps = []
    for dtype in (torch.float32, torch.bfloat16):
        policy = load_policy(folder, mesh, dtype)
        (batch,) = pack(rollouts, range(6), 500)
        logp, _ = policy(batch, 1.0)
        logp.sum().backward()
        assert logp.dtype == torch.float32
        assert all(p.dtype == p.grad.dtype == torch.float32 for p in policy.parameters())
        logps.append(logp.detach())
    assert 1e-4 < (logps[0] - logps[1]).abs().mean() < 0.2


def test_a_reference_computes_the_same_from_bfloat16_weights(folder, mesh):
    (batch,) = pack(random_rollouts(6, 256), range(6), 500)
    trained, reference = (load_policy(folder, mesh, torch.bfloat16, trained=kind) for kind in (True, False))
    assert all(p.dtype == torch.bfloat16 and not p.requires_grad for p in reference.parameters())
    assert torch.equal(trained(batch, 1.0)[0], reference(batch, 1.0)[0])


# ---------------------------------------------------------------- what a GPU would be asked

def test_a_micro_batch_never_waits_for_the_device(folder):
    """From the packed row to the gradient nothing reads a value back: fake tensors have none."""
    with FakeTensorMode():
        config = AutoConfig.from_pretrained(folder, attn_implementation="packed", dtype=torch.bfloat16)
        policy = Policy(AutoModelForCausalLM.from_config(config))
        rollouts, adv = random_rollouts(8, 256), torch.randn(8)
        (batch,) = pack(rollouts, range(8), 400)
        logp, entropy = policy(batch, 1.0)
        assert logp.shape == entropy.shape == batch.targets.shape
        old = split(batch, logp.detach())
        loss, _, _ = losses.LOSSES["clip"](logp, batch.flat(old), batch.flat(adv), epsilon=0.2, epsilon_high=0.2)
        (batch.flat(adv) * loss).sum().backward()
        assert all(p.grad is not None for p in policy.parameters())
        # Such a read would have raised this.
        with pytest.raises(DataDependentOutputException):
            loss.sum().item()


def test_the_optimizer_is_adamw_with_the_settings():
    """Against its formula in loops; a weight without a gradient stays."""
    decay, beta1, beta2, rate = 0.3, 0.7, 0.8, 0.05
    network = torch.nn.ParameterList([torch.tensor([0.5, -2.0]), torch.tensor([1.0])])
    optimizer = make_optimizer(network, rate, SimpleNamespace(
        weight_decay=decay, adam_beta1=beta1, adam_beta2=beta2, offload_optimizer=False, optimizer="adamw"))
    weights, means, squares = [0.5, -2.0], [0.0, 0.0], [0.0, 0.0]
    for step, gradients in enumerate([[0.1, -0.2], [-0.4, 0.0], [0.3, 0.6]], 1):
        network[0].grad = torch.tensor(gradients)
        optimizer.step()
        for i, gradient in enumerate(gradients):
            means[i] = beta1 * means[i] + (1 - beta1) * gradient
            squares[i] = beta2 * squares[i] + (1 - beta2) * gradient ** 2
            unbiased = means[i] / (1 - beta1 ** step), squares[i] / (1 - beta2 ** step)
            weights[i] -= rate * (decay * weights[i] + unbiased[0] / (unbiased[1] ** 0.5 + 1e-8))
        assert network[0].tolist() == pytest.approx(weights, rel=1e-5) and network[1].item() == 1


def test_moments_are_in_host_memory_except_during_the_step():
    moments = lambda: {optimizer.state[weight][name].device.type for name in ("exp_avg", "exp_avg_sq")
                       if weight in optimizer.state}
    with FakeTensorMode():
        weight = torch.nn.Parameter(torch.empty(3, 4, device="cuda:0"))
        network, seen = torch.nn.ParameterList([weight]), []
        optimizer = make_optimizer(network, 1e-3, SimpleNamespace(
            weight_decay=0.0, adam_beta1=0.9, adam_beta2=0.95, offload_optimizer=True, optimizer="adamw"))
        optimizer.register_step_pre_hook(lambda *_: seen.append(moments()))
        for _ in range(2):
            weight.grad = torch.empty_like(weight)
            optimizer.step()
            assert moments() == {"cpu"}
        optimizer.load_state_dict(optimizer.state_dict())
        assert moments() == {"cpu"}
    assert seen == [set(), {"cuda"}]


def test_products_on_cuda_are_asked_for_in_float32(monkeypatch):
    """PyTorch's, which takes matrices alone and keeps its sums, replaced by what that means."""
    def mm(a, b, out_dtype):
        assert a.dim() == b.dim() == 2 and a.dtype == b.dtype == torch.bfloat16
        return (a.as_subclass(torch.Tensor).double() @ b.as_subclass(torch.Tensor).double()).to(out_dtype)
    monkeypatch.setattr(torch, "mm", mm)
    a, b = torch.randn(3, 64).bfloat16(), torch.randn(64, 5).bfloat16()
    torch.testing.assert_close(product(a.as_subclass(OnCuda), b.as_subclass(OnCuda)).double(),
                               a.double() @ b.double(), atol=1e-5, rtol=1e-5)


# ---------------------------------------------------------------- the critic

def test_a_value_is_of_the_state_before_its_token(folder, mesh):
    critic = load_critic(folder, mesh, torch.float32)
    torch.nn.init.normal_(critic.hf.score.weight.to_local())
    values = lambda *parts: critic(pack([episode([5, 6], *parts)], [0], 50)[0]).detach()
    first, changed = values([7, 8, 9, 10]), values([7, 8, 99, 10])
    # The token at 2 is not seen by its own value, but by the one behind it.
    torch.testing.assert_close(first[:3], changed[:3])
    assert (first[3] - changed[3]).abs() > 1e-4
    # An inserted token has no value. That of the first token after it sees it.
    two_spans, other = values([7, 8], [3, 4], [9, 10]), values([7, 8], [3, 44], [9, 10])
    assert len(two_spans) == 4
    torch.testing.assert_close(two_spans[:2], other[:2])
    assert ((two_spans[2:] - other[2:]).abs() > 1e-4).all()
    rollouts = random_rollouts(5, 256, parts=(2, 4))
    for s, part in token_values(critic, rollouts, range(5), 200).items():
        alone = critic(pack(rollouts, [s], 200)[0]).detach()
        torch.testing.assert_close(part, alone, atol=1e-4, rtol=1e-4)


def test_the_value_of_a_turn_is_read_behind_the_observation_before_it(folder, mesh):
    """A critic's values by a plain forward of each prefix, and the advantages that PPO makes of them."""
    critic = load_critic(folder, mesh, torch.float32)
    torch.nn.init.normal_(critic.hf.score.weight.to_local())
    torch.nn.init.constant_(critic.hf.score.bias.to_local(), 0.5)
    weight, bias = (p.full_tensor().detach() for p in (critic.hf.score.weight[0], critic.hf.score.bias))
    plain = AutoModel.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    lists = random_parts(6, 256, longest=6, parts=(2, 4, 6))
    rollouts, rng = [episode(*row) for row in lists], random.Random(0)
    values = token_values(critic, rollouts, range(6), 60)
    kl = [torch.randn(len(values[s])) for s in range(6)]
    paid = [[rng.gauss(0, 1) for _ in row[1::2]] for row in lists]
    given = [dict(zip((end - 1 for end in accumulate(map(len, row[1::2]))), own))
             for row, own in zip(lists, paid)]
    flat = lambda tensors: torch.cat([tensors[s] for s in range(6)])
    lengths = [len(values[s]) for s in range(6)]
    scores = torch.tensor([sum(own) for own in paid])
    rewards = critic_losses.token_rewards(scores, given, flat(kl), 0.1, lengths)
    adv, ret = (x.split(lengths) for x in critic_losses.gae(rewards, flat(values), lengths, 0.9, 0.8))
    for s, row in enumerate(lists):
        ids, places = torch.tensor(sum(row, [])), sampled_places(row)
        with torch.no_grad():
            slow = [(plain(ids[None, :place]).last_hidden_state[0, -1] @ weight + bias).item()
                    for place in places]
        assert values[s].tolist() == pytest.approx(slow, abs=1e-4)
        # From the last token back.
        given, expected, following = dict(zip(places, kl[s].tolist())), [], (0.0, 0.0)
        ends = [sum(map(len, row[:i + 1])) - 1 for i in range(1, len(row), 2)]
        for place, value in reversed(list(zip(places, slow))):
            reward = -0.1 * given[place] + (paid[s][ends.index(place)] if place in ends else 0.0)
            following = value, reward + 0.9 * following[0] - value + 0.9 * 0.8 * following[1]
            expected.insert(0, following[1])
        assert adv[s].tolist() == pytest.approx(expected, abs=1e-3)
        assert ret[s].tolist() == pytest.approx([a + v for a, v in zip(expected, slow)], abs=1e-3)


def test_values_of_a_bfloat16_critic_are_not_rounded(folder, mesh):
    critic = load_critic(folder, mesh, torch.bfloat16)
    torch.nn.init.normal_(critic.hf.score.weight.to_local())
    values = critic(pack(random_rollouts(6, 256), range(6), 500)[0]).detach()
    assert values.dtype == torch.float32 and (values != values.bfloat16()).float().mean() > 0.9


def test_an_idle_micro_batch_adds_nothing_to_the_critic(folder, mesh):
    critic, batch = load_critic(folder, mesh, torch.float32), micro_batch([], 1)
    loss, clipped = critic_losses.value_loss(critic(batch), batch.flat({}), batch.flat({}), 0.5)
    loss.sum().backward()
    assert loss.sum().item() == len(clipped) == 0
    assert all(p.grad is not None and not p.grad.full_tensor().any() for p in critic.parameters())


def test_a_new_critic_starts_at_zero_and_learns_known_returns(folder, mesh):
    critic = load_critic(folder, mesh, torch.float32)
    # Before a forward, which gathers parameters.
    optimizer = torch.optim.AdamW(critic.parameters(), 3e-3)
    rollouts = random_rollouts(24, 256, shared=0)
    (batch,) = pack(rollouts, range(24), 1000)
    assert not critic(batch).any()
    returns = [torch.linspace(-1, 1, 24)[i].expand(len(r.logprobs)) for i, r in enumerate(rollouts)]
    for _ in range(60):
        loss, _ = critic_losses.value_loss(critic(batch), torch.zeros(len(batch.targets)), batch.flat(returns), 0.0)
        loss.mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert loss.mean() < 0.05 * (torch.cat(returns).square().mean() / 2)


@pytest.mark.parametrize("kind, expected", [
    ("constant", [0.5, 1, 1, 1, 1, 1]), ("linear", [0.5, 1, 1, 0.75, 0.5, 0.25]),
    ("cosine", [0.5, 1, 1, (1 + math.sqrt(0.5)) / 2, 0.5, (1 - math.sqrt(0.5)) / 2])])
def test_schedule(kind, expected):
    values = [model.schedule(2.0, step, 6, kind, 2) for step in range(7)]
    assert values == pytest.approx([2 * x for x in expected + [float(kind == "constant")]], abs=1e-12)
    assert model.schedule(1.0, 0, 4, kind) == 1 and model.schedule(1.0, 0, 2, kind, 5) == 0.2
    assert model.schedule(1.0, -1, 4, kind) == model.schedule(1.0, -5, 4, kind, 2) == 0
    assert model.schedule(1.0, 2, 4, kind) == pytest.approx(1.0 if kind == "constant" else 0.5)
    # The rise may take all steps, and a single step may be the only one.
    assert model.schedule(1.0, 2, 2, kind, 2) == 1
    assert model.schedule(1.0, 1, 1, kind) == float(kind == "constant")
