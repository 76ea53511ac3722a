"""Packing, masks, and logprobs against plain forwards of one sequence at a time."""
import inspect
import os
import random
import shutil
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from transformers import (AutoConfig, AutoModelForCausalLM, Gemma2Config, GPT2Config, GPT2LMHeadModel,
                          Qwen3Config, Qwen3ForCausalLM)
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

import losses
import model as model_file
from losses import value_loss
from model import (LogprobsFromHidden, Policy, check_model, deal, head_logits, load_critic, load_policy,
                   offload, pack, packed_attention, product)


def rollout(prompt_ids, completion_ids):
    return SimpleNamespace(prompt_ids=prompt_ids, completion_ids=completion_ids)


def random_rollouts(count, vocab, seed=0, longest=20):
    rng = random.Random(seed)
    ids = lambda: [rng.randrange(vocab) for _ in range(rng.choice([1, 1, 2, rng.randint(1, longest)]))]
    return [rollout(ids(), ids()) for _ in range(count)]


# ---------------------------------------------------------------- packing and masks

@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_sequences_are_dealt_by_length(num_ranks):
    """Skewed lengths, each sequence to one rank, and every rank within 5% of the mean."""
    rng = random.Random(num_ranks)
    length = lambda: 2000 if rng.random() < 0.1 else rng.randint(1, 200)
    rollouts = [rollout([5] * 20, [7] * length()) for _ in range(400)]
    chosen = rng.sample(range(400), 320)
    shares = deal(rollouts, chosen, num_ranks)
    assert sorted(sum(shares, [])) == sorted(chosen)
    tokens = [sum(20 + len(rollouts[s].completion_ids) for s in share) for share in shares]
    assert max(abs(count / (sum(tokens) / num_ranks) - 1) for count in tokens) < 0.05
    example = [rollout([1], [2] * (size - 1)) for size in (9, 5, 4, 3)]
    assert deal(example, range(4), 2) == [[0, 3], [1, 2]] and deal(example, [2], 3) == [[2], [], []]


def test_pack_by_hand():
    (batch,) = pack([rollout([5, 6], [7, 8]), rollout([5], [9])], [0, 1], 8, "cpu")
    assert (batch.input_ids.tolist() == [[5, 6, 7, 8, 5, 9]]
            and batch.position_ids.tolist() == [[0, 1, 2, 3, 0, 1]])
    assert (batch.bounds == [0, 4, 6]
            and batch.index.tolist() == [1, 2, 4] and batch.targets.tolist() == [7, 8, 9])
    assert batch.spread(torch.tensor([0.5, 2.0])).tolist() == [0.5, 0.5, 2.0]
    assert batch.flat([torch.tensor([1, 2]), torch.tensor([3])]).tolist() == [1, 2, 3]
    assert batch.mean(torch.tensor([1.0, 2.0, 5.0])).tolist() == [1.5, 1.5, 5.0]
    parts = batch.split(torch.tensor([1, 2, 3]))
    assert {row: part.tolist() for row, part in parts.items()} == {0: [1, 2], 1: [3]}


@pytest.mark.parametrize("budget", [40, 64, 1000])
def test_pack_trains_every_completion_token_once_and_no_prompt_token(budget):
    rollouts = random_rollouts(50, 300)
    rows = list(range(0, 50, 2))
    batches = pack(rollouts, rows, budget, "cpu")
    assert sorted(row for batch in batches for row in batch.sequences) == rows
    for batch in batches:
        assert batch.input_ids.shape[1] <= budget
        trained = iter(zip(batch.index.tolist(), batch.targets.tolist()))
        for row, start, end in zip(batch.sequences, batch.bounds, batch.bounds[1:]):
            prompt, completion = rollouts[row].prompt_ids, rollouts[row].completion_ids
            assert batch.input_ids[0, start:end].tolist() == prompt + completion
            assert batch.position_ids[0, start:end].tolist() == list(range(end - start))
            for t, token in enumerate(completion):
                assert next(trained) == (start + len(prompt) + t - 1, token)
        assert next(trained, None) is None


def test_eos_is_trained_even_where_it_is_the_pad_token():
    eos = 0
    # The second is truncated.
    (batch,) = pack([rollout([eos, 3], [4, eos]), rollout([3], [4, 4])], [0, 1], 16, "cpu")
    assert batch.targets.tolist() == [4, eos, 4, 4]


def test_a_sequence_over_the_budget_is_refused():
    with pytest.raises(ValueError, match="5 tokens does not fit token_budget=4"):
        pack([rollout([1, 2, 3], [4, 5])], [0], 4, "cpu")


# ---------------------------------------------------------------- logprobs and entropy

def plain_logps(model, rollouts, temperature):
    """Logprob and entropy of each completion token, one sequence at a time, by full logits."""
    for r in rollouts:
        logits = model(torch.tensor([r.prompt_ids + r.completion_ids])).logits[0] / temperature
        table = logits.log_softmax(-1)
        for t, token in enumerate(r.completion_ids):
            row = table[len(r.prompt_ids) + t - 1]
            yield row[token], -(row.exp() * row).sum()


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("budget", [40, 90, 4000])
def test_packed_logprobs_and_gradients_are_those_of_plain_forwards(folder, mesh, temperature, budget):
    rollouts = random_rollouts(30, 256)
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    logps, entropies = zip(*plain_logps(plain, rollouts, temperature))
    weight = torch.randn(len(logps))
    (torch.stack(logps) * weight).sum().backward()

    policy = load_policy(folder, mesh, torch.float32)
    order = [t for r in rollouts for t in r.completion_ids]
    offsets = torch.tensor([len(r.completion_ids) for r in rollouts]).cumsum(0).tolist()
    weights = weight.tensor_split(offsets[:-1])
    fast = {}
    for batch in pack(rollouts, range(30), budget, "cpu"):
        logp, entropy = policy(batch, temperature)
        (logp * batch.flat(weights)).sum().backward()
        entropy_of = batch.split(entropy)
        fast |= {row: (values, entropy_of[row]) for row, values in batch.split(logp.detach()).items()}
    assert sum(len(fast[row][0]) for row in fast) == len(order)
    torch.testing.assert_close(torch.cat([fast[row][0] for row in range(30)]), torch.stack(logps).detach(),
                               atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(torch.cat([fast[row][1] for row in range(30)]),
                               torch.stack(entropies).detach(), atol=1e-5, rtol=1e-5)
    for (name, ours), theirs in zip(policy.hf.named_parameters(), plain.parameters()):
        gap = (ours.grad.full_tensor() - theirs.grad).norm() / theirs.grad.norm()
        assert gap < 1e-5, (name, gap)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("chunk", [1, 3, 1024])
@pytest.mark.parametrize("through", ["logp", "entropy", "both"])
def test_logprobs_from_hidden(monkeypatch, bias, chunk, through):
    monkeypatch.setattr(model_file, "LOGITS", {"cpu": chunk * 37})
    C, H, V, temperature = 10, 8, 37, 0.7
    inputs = [torch.randn(C, H), torch.randn(V, H)] + ([torch.randn(V)] if bias else [])
    targets, d_logp, d_entropy = torch.randint(V, (C,)), torch.randn(C), torch.randn(C)
    objective = lambda logp, entropy: sum([(logp * d_logp).sum()] * (through != "entropy")
                                          + [(entropy * d_entropy).sum()] * (through != "logp"))
    slow = [x.double().requires_grad_() for x in inputs]
    logits = slow[0] @ slow[1].T / temperature + (slow[2] / temperature if bias else 0)
    expected = torch.stack([logits[c].log_softmax(0)[targets[c]] for c in range(C)])
    expected_entropy = torch.stack([-(row.softmax(0) * row.log_softmax(0)).sum() for row in logits])
    objective(expected, expected_entropy).backward()
    fast = [x.clone().requires_grad_() for x in inputs]
    logp, entropy = LogprobsFromHidden.apply(*fast, *([] if bias else [None]), targets, temperature)
    objective(logp, entropy).backward()
    torch.testing.assert_close(logp.double(), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(entropy.double(), expected_entropy, atol=1e-5, rtol=1e-5)
    for ours, theirs in zip(fast, slow):
        torch.testing.assert_close(ours.grad.double(), theirs.grad, atol=5e-5, rtol=1e-4)


@pytest.mark.parametrize("bias", [False, True])
def test_a_float32_head_does_not_round_logits(bias):
    """Of bfloat16 factors: exact products against a float64 sum, or that sum in three digits."""
    torch.manual_seed(0)
    C, H, V = 10, 64, 300
    inputs = [torch.randn(C, H).bfloat16(), torch.randn(V, H).bfloat16(), torch.randn(V).bfloat16()]
    hidden, weight, shift = (x.double() for x in inputs)
    exact = hidden @ weight.T + bias * shift
    kept = head_logits(*inputs[:2], inputs[2] if bias else None)
    rounded = head_logits(*inputs[:2], inputs[2] if bias else None, float32_head=False)
    assert kept.dtype == rounded.dtype == torch.float32
    torch.testing.assert_close(kept.double(), exact, atol=1e-4, rtol=1e-5)
    assert torch.equal(rounded, rounded.bfloat16().float()) and (rounded - exact).abs().max() > 0.02

    targets = exact.argsort(1)[:, -2]                                   # rounding moves their odds
    onehot = F.one_hot(targets, V)
    for float32_head, logits in ((True, kept), (False, rounded)):
        fast = [x.clone().requires_grad_() for x in inputs[:2 + bias]]
        logp, _ = LogprobsFromHidden.apply(*fast, *([] if bias else [None]), targets, 1.0, float32_head)
        torch.testing.assert_close(logp.detach(), logits.log_softmax(1)[onehot.bool()], atol=1e-5, rtol=1e-5)
        logp.sum().backward()
        d_logits = onehot - logits.double().softmax(1)
        for x, gradient in zip(fast, (d_logits @ weight, d_logits.T @ hidden, d_logits.sum(0))):
            assert (x.grad - gradient).norm() < 4e-3 * gradient.norm()  # bfloat16's own


@pytest.mark.parametrize("seed", range(6))
def test_loss_and_gradients_are_those_of_the_padded_computation(tmp_path, mesh, seed):
    """Random shapes, vocabularies, lengths, budgets: the clipped loss by padding, mask and full logits."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    vocab, heads, longest = rng.choice([2, 17, 300, 5000]), rng.choice([2, 4]), rng.choice([1, 9, 40])
    hf = Qwen3ForCausalLM(Qwen3Config(
        vocab_size=vocab, hidden_size=16 * rng.randint(1, 4), intermediate_size=48, head_dim=8,
        num_hidden_layers=rng.randint(1, 3), num_attention_heads=heads, num_key_value_heads=heads // 2,
        tie_word_embeddings=rng.random() < 0.5, initializer_range=0.1))
    hf.save_pretrained(tmp_path)
    count, temperature = rng.randint(1, 20), rng.choice([0.5, 1.0, 2.0])
    rollouts = random_rollouts(count, vocab, seed, longest)
    adv = torch.randn(count)
    width = max(len(r.prompt_ids) + len(r.completion_ids) for r in rollouts)
    row = lambda values: values + [0] * (width - len(values))
    ids = torch.tensor([row(r.prompt_ids + r.completion_ids) for r in rollouts])
    real = torch.tensor([row([1] * len(r.prompt_ids + r.completion_ids)) for r in rollouts])
    trained = torch.tensor([row([0] * len(r.prompt_ids) + [1] * len(r.completion_ids)) for r in rollouts])
    trained = trained[:, 1:]
    table = (hf.double()(input_ids=ids, attention_mask=real).logits[:, :-1] / temperature).log_softmax(-1)
    logp = table.gather(2, ids[:, 1:, None])[:, :, 0]
    old = logp.detach() + 0.3 * torch.randn(logp.shape).double()
    ratio = (logp - old).exp()
    loss = -torch.minimum(ratio * adv[:, None], ratio.clamp(0.8, 1.2) * adv[:, None]) * trained
    (loss.sum() / trained.sum()).backward()

    policy = load_policy(str(tmp_path), mesh, torch.float32)
    lengths = torch.tensor([len(r.completion_ids) for r in rollouts])
    weight = losses.sequence_weights(lengths, "token_mean", lengths.sum(), count, longest)
    old_logps = [old[s][trained[s].bool()].float() for s in range(count)]
    total = 0.0
    for batch in pack(rollouts, range(count), rng.randint(width, 4 * width), "cpu"):
        new, _ = policy(batch, temperature)
        token_loss, _, _ = losses.policy_loss(
            new, batch.flat(old_logps), batch.spread(adv), batch.mean, 0.2, 0.2, "clip")
        part = (batch.spread(weight) * token_loss).sum()
        part.backward()
        total += part.item()
    assert total == pytest.approx((loss.sum() / trained.sum()).item(), rel=1e-5, abs=1e-6)
    ours = torch.cat([p.grad.full_tensor().flatten() for p in policy.hf.parameters()])
    theirs = torch.cat([p.grad.flatten() for p in hf.parameters()])
    assert (ours - theirs).norm() < 1e-5 * theirs.norm()


def test_gradient_checkpointing_changes_nothing(folder, mesh):
    rollouts = random_rollouts(6, 256)
    gradients = []
    for checkpointing in (False, True):
        policy = load_policy(folder, mesh, torch.float32, gradient_checkpointing=checkpointing)
        assert policy.hf.is_gradient_checkpointing == checkpointing
        (batch,) = pack(rollouts, range(6), 500, "cpu")
        policy(batch, 1.0)[0].sum().backward()
        gradients.append(torch.cat([p.grad.full_tensor().flatten() for p in policy.parameters()]))
    torch.testing.assert_close(*gradients)


def test_bfloat16_computes_from_float32_masters(folder, mesh):
    rollouts = random_rollouts(6, 256)
    logps = []
    for dtype in (torch.float32, torch.bfloat16):
        policy = load_policy(folder, mesh, dtype)
        (batch,) = pack(rollouts, range(6), 500, "cpu")
        logp, _ = policy(batch, 1.0)
        logp.sum().backward()
        assert logp.dtype == torch.float32
        assert all(p.dtype == p.grad.dtype == torch.float32 for p in policy.parameters())
        logps.append(logp.detach())
    assert 1e-4 < (logps[0] - logps[1]).abs().mean() < 0.2


def test_a_reference_computes_the_same_from_bfloat16_weights(folder, mesh):
    (batch,) = pack(random_rollouts(6, 256), range(6), 500, "cpu")
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
        (batch,) = pack(rollouts, range(8), 400, "cpu")
        logp, entropy = policy(batch, 1.0)
        assert logp.shape == entropy.shape == batch.targets.shape
        old = batch.split(logp.detach())
        loss, _, _ = losses.policy_loss(
            logp, batch.flat(old), batch.spread(adv), batch.mean, 0.2, 0.2, "clip")
        (batch.spread(adv) * loss).sum().backward()
        assert all(p.grad is not None for p in policy.parameters())
        with pytest.raises(DataDependentOutputException):
            loss.sum().item()                                       # what such a read would have raised


def test_no_attention_mask_is_made_for_packed_rows():
    """For one transformers would search position_ids for sequences: a wait for the device at each forward."""
    assert "sdpa" in ALL_MASK_ATTENTION_FUNCTIONS and "packed" not in ALL_MASK_ATTENTION_FUNCTIONS


def test_moments_are_in_host_memory_but_for_the_step():
    moments = lambda: {optimizer.state[weight][name].device.type for name in ("exp_avg", "exp_avg_sq")
                       if weight in optimizer.state}
    with FakeTensorMode():
        weight = torch.nn.Parameter(torch.empty(3, 4, device="cuda:0"))
        optimizer, seen = torch.optim.AdamW([weight], fused=True), []
        offload(optimizer, torch.device("cuda:0"))
        optimizer.register_step_pre_hook(lambda *_: seen.append(moments()))
        for _ in range(2):
            weight.grad = torch.empty_like(weight)
            optimizer.step()
            assert moments() == {"cpu"}
        optimizer.load_state_dict(optimizer.state_dict())
        assert moments() == {"cpu"}
    assert seen == [set(), {"cuda"}]


class OnCuda(torch.Tensor):
    is_cuda = True


def test_products_on_cuda_are_asked_for_in_float32(monkeypatch):
    """PyTorch's, which takes matrices alone and keeps its sums, replaced by what that means."""
    def mm(a, b, out_dtype):
        assert a.dim() == b.dim() == 2 and a.dtype == b.dtype == torch.bfloat16
        return (a.as_subclass(torch.Tensor).double() @ b.as_subclass(torch.Tensor).double()).to(out_dtype)
    monkeypatch.setattr(torch, "mm", mm)
    a, b = torch.randn(3, 64).bfloat16(), torch.randn(64, 5).bfloat16()
    torch.testing.assert_close(product(a.as_subclass(OnCuda), b.as_subclass(OnCuda)).double(),
                               a.double() @ b.double(), atol=1e-5, rtol=1e-5)


def test_attention_on_cuda_asks_for_causal_sequences(monkeypatch):
    """PyTorch's CUDA kernel replaced by a loop over what its arguments mean: the CPU path's values."""
    real = inspect.signature(model_file.varlen.varlen_attn)

    def loop(*args, **kwargs):
        q, k, v, starts, key_starts, longest, key_longest = args
        bound = real.bind(*args, **kwargs).arguments                  # what PyTorch's own would take
        assert bound["window_size"] == (-1, 0) and bound.get("enable_gqa", True)
        assert ("enable_gqa" in bound) == ("enable_gqa" in real.parameters)
        assert starts.dtype == torch.int32 and starts.tolist() == key_starts.tolist()
        assert longest == key_longest == max(starts.diff())
        rows = []
        for start, end in zip(starts, starts[1:]):
            for t in range(start, end):
                group = q.shape[1] // k.shape[1]
                for head in range(q.shape[1]):
                    scores = k[start:t + 1, head // group] @ q[t, head] * kwargs["scale"]
                    rows.append(scores.softmax(0) @ v[start:t + 1, head // group])
        return torch.stack(rows).view(q.shape)

    q, k, v = torch.randn(1, 4, 9, 8), torch.randn(1, 2, 9, 8), torch.randn(1, 2, 9, 8)
    bounds = [0, 1, 5, 9]
    expected, _ = packed_attention(None, q, k, v, None, 0.3, bounds=bounds)
    monkeypatch.setattr(model_file.varlen, "varlen_attn", loop)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    on_cuda, _ = packed_attention(None, *(x.bfloat16().as_subclass(OnCuda) for x in (q, k, v)), None, 0.3,
                                  bounds=bounds, offsets=torch.tensor(bounds, dtype=torch.int32))
    torch.testing.assert_close(on_cuda.as_subclass(torch.Tensor).float(), expected, atol=0.05, rtol=0.05)


# ---------------------------------------------------------------- the critic

def test_a_value_is_of_the_state_before_its_token(folder, mesh):
    critic = load_critic(folder, mesh, torch.float32)
    torch.nn.init.normal_(critic.hf.score.weight.to_local())
    values = lambda completion: critic(pack([rollout([5, 6], completion)], [0], 50, "cpu")[0]).detach()
    first, changed = values([7, 8, 9, 10]), values([7, 8, 99, 10])
    torch.testing.assert_close(first[:3], changed[:3])           # the token at 2 is not seen by its own value
    assert (first[3] - changed[3]).abs() > 1e-4                      # but by the one behind it


def test_a_new_critic_starts_at_zero_and_learns_known_returns(folder, mesh):
    critic = load_critic(folder, mesh, torch.float32)
    optimizer = torch.optim.AdamW(critic.parameters(), 3e-3)     # before a forward, which gathers parameters
    rollouts = random_rollouts(24, 256)
    (batch,) = pack(rollouts, range(24), 1000, "cpu")
    assert not critic(batch).any()
    returns = [torch.linspace(-1, 1, 24)[i].expand(len(r.completion_ids)) for i, r in enumerate(rollouts)]
    for _ in range(60):
        loss, _ = value_loss(critic(batch), torch.zeros(len(batch.targets)), batch.flat(returns), 0.0)
        loss.mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert loss.mean() < 0.05 * (torch.cat(returns).square().mean() / 2)


# ---------------------------------------------------------------- what cannot be trained is refused

def test_a_sequence_beyond_the_sliding_window_is_refused():
    q = torch.randn(1, 2, 8, 4)
    packed_attention(None, q, q, q, None, 0.5, bounds=[0, 4, 8], sliding_window=4)
    with pytest.raises(ValueError, match="5 tokens exceeds the model's sliding window of 4"):
        packed_attention(None, q, q, q, None, 0.5, bounds=[0, 5, 8], sliding_window=4)


@pytest.mark.parametrize("what", [{"softcap": 50.0}, {"s_aux": torch.zeros(2)}])
def test_attention_with_softcapped_scores_or_sinks_is_refused(what):
    q = torch.randn(1, 2, 8, 4)
    with pytest.raises(ValueError, match="softcapped scores or sinks"):
        packed_attention(None, q, q, q, None, 0.5, bounds=[0, 8], **what)


def test_softcapped_heads_are_refused(tmp_path, mesh):
    Gemma2Config().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="final_logit_softcapping"):
        load_policy(str(tmp_path), mesh, torch.float32)


def test_dropout_is_refused(tmp_path, mesh):
    GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=1, n_head=1, vocab_size=20)).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="dropout"):
        load_policy(str(tmp_path), mesh, torch.float32)


@pytest.mark.parametrize("missing, message", [
    ("config.json", "no config.json"), ("model.safetensors", "no weights"), ("tokenizer", "no tokenizer")])
def test_an_incomplete_model_folder_is_named(folder, tmp_path, missing, message):
    path = shutil.copytree(folder, tmp_path / "model")
    for name in os.listdir(path):
        if name.startswith(missing):
            os.remove(path / name)
    with pytest.raises(ValueError, match=message):
        check_model(str(path))


def test_a_missing_model_folder_is_named(tmp_path):
    with pytest.raises(ValueError, match="no such folder"):
        check_model(str(tmp_path / "nothing"))


def test_a_name_that_the_hub_does_not_know_is_named(monkeypatch):
    def refuse(path):
        raise OSError(f"{path} is not a valid model identifier\nand much more")
    monkeypatch.setattr("model.AutoConfig.from_pretrained", refuse)
    with pytest.raises(ValueError, match="critic_model=nonsuch: no such .* not a valid model identifier$"):
        check_model("nonsuch", "critic_model")
