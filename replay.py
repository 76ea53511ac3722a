"""
Computes a loss on rollouts that a run has kept: its value, its gradient and its statistics, in seconds.

    python replay.py out/grpo-algebra-.../checkpoint-40                          # with the run's own settings
    python replay.py out/grpo-algebra-.../checkpoint-40 config/gspo.py --epsilon=1e-3
    python replay.py out/grpo-algebra-.../checkpoint-20 --new_policy=out/grpo-algebra-.../checkpoint-40

Each checkpoint of train_grpo.py, train_dapo.py and train_async.py, except a run's last, holds the rollouts
that its policy was trained on next. Sections 3 to 5 of those scripts are computed again on them, as one
update; no parameter changes and nothing is written. If you changed the loss in a script of your own, make the
same change here. Settings of the engine and of the optimizer do not exist here; in a config file they are
passed over.

Next to each result stands what the run logged for that step. The two agree if no setting differs, dtype=auto
means the same here, and the step made one update. With filter_groups the run's reward, reward_std and
frac_reward_zero_std are of all prompts it sampled, those here only of the prompts it kept. An entropy bonus
does not decay here.

With the policy that sampled them all ratios are 1, and most losses are the same. --new_policy takes the
policy of another checkpoint on the old rollouts: then clipping, corrections and bounds act.
"""
import gc
import math
import os
import sys
import zlib

gc.disable()                    # set_up() enables it again; importing takes a third less time without it
import torch
from transformers import AutoConfig

import losses
import ranks
import tiny
from checks import check_dapo, check_grpo, check_values
from configurator import check, configure, input_errors, read_layout
from files import read_log
from loading import check_trainable, load_policy, load_tokenizer, precision
from models import token_logprobs
from packing import micro_batches
from rollout import compare_logprobs, load_rollouts
# ------------------------------------------------------------------------------------------------------------
# the defaults are the run's own settings, except for new_policy and reference
new_policy = ""                 # a folder; empty: the checkpoint, whose policy sampled
reference = ""                  # where kl_coef is above 0; empty: the model that the run began with
temperature = 1.0               # of the trainer's logprobs
max_completion_length = 64      # for overlong_buffer and constant_length
filter_groups = False           # from here on as in train_dapo.py and train_grpo.py
overlong_buffer = 0
overlong_penalty = 1.0
mask_truncated = False
advantage = "grpo"
pass_k = 4
kl_coef = 0.0
kl_in = "loss"
kl_estimator = "k3"
old_logprobs = "trainer"
loss_type = "clip"
epsilon = 0.2
epsilon_high = 0.2
dual_clip = 0.0
cov_share = 2e-4
loss_aggregation = "token_mean"
engine_correction = "none"
correction_low = 0.5
correction_high = 2.0
entropy_coef = 0.0
dtype = "auto"                  # float32, bfloat16; auto: bfloat16 on CUDA
float32_head = True             # with bfloat16: compute logits in float32
token_budget = 8192             # tokens per micro-batch
# ------------------------------------------------------------------------------------------------------------
checkpoint, kept, rollouts, greedy = "", {}, [], []
if len(sys.argv) > 1 and not sys.argv[1].startswith("-"):
    checkpoint = sys.argv.pop(1).rstrip("/")
    check(os.path.isfile(f"{checkpoint}/rollouts.jsonl"),
          f"{checkpoint} holds no rollouts.jsonl: not a checkpoint of train_grpo.py or train_dapo.py, or the "
          "last of its run")
    with input_errors():
        kept, rollouts, greedy = load_rollouts(f"{checkpoint}/rollouts.jsonl")
    own = {key: type(globals()[key]) for key, _ in read_layout(__file__) if key in kept}
    needed = {"step": int, "model": str, "seed": int, "prompts_per_step": int, "reward_model": str}
    for key, kind in (own | needed).items():
        check(type(kept.get(key)) is kind, f"{checkpoint}/rollouts.jsonl:1: {key}={kept.get(key)!r:.100}")
    globals().update({key: kept[key] for key in own})
settings = configure(globals(), others=kept)
check(checkpoint, "name a checkpoint first: python replay.py out/grpo-algebra-.../checkpoint-40")
check("RANK" not in os.environ, "one process is enough: python replay.py, without torchrun")
check_values(settings)
# These settings of the run have no effect any more.
inert = {"max_num_gen_batches": 1, "skip_after": 0, "updates_per_step": 1}
check_grpo(kept | inert | settings)
check_dapo(kept | inert | settings)

_, _, device, mesh = ranks.set_up()
compute_dtype, _ = precision(dtype, 0, device)
step, G, N = kept["step"], kept["num_generations"], len(rollouts)
scores = torch.tensor([r.score for r in rollouts], device=device)                       # [N], NaN: no score
greedy = torch.tensor(greedy, device=device)                                            # [N / G], or none
longest = max(len(r.ids) for r in rollouts)
check(longest <= token_budget, f"token_budget={token_budget}: a sequence has {longest} tokens")
check(advantage != "remax" or len(greedy), "advantage=remax: the run made no greedy completions")
with input_errors():
    check_trainable(new_policy or checkpoint, "new_policy")
    if kl_coef > 0:
        reference = reference or kept["model"]
        reference = tiny.ensure(reference)
        check_trainable(reference, "reference", tokenizer=False)
    tokenizer = load_tokenizer(checkpoint)
size = AutoConfig.from_pretrained(new_policy or checkpoint).get_text_config().vocab_size
for line, r in enumerate(rollouts, 2):
    check(r.ids.max() < size,
          f"{checkpoint}/rollouts.jsonl:{line}: token {r.ids.max()}, but the model has {size}")


def logprobs_by(path):
    """The logprobs of all sampled tokens by the model in `path`: {s: [len]}."""
    network = load_policy(path, mesh, compute_dtype, trained=False, float32_head=float32_head)
    return token_logprobs(network, rollouts, range(N), token_budget, temperature)


# ---------------------------------------------------------------- 3 advantage
stds = losses.group_std(scores, G)                                                      # [N / G]
lengths = torch.tensor([len(r.logprobs) for r in rollouts], device=device)              # [N]
engine_logps = {s: torch.from_numpy(rollouts[s].logprobs).to(device) for s in range(N)}     # {s: [len]}
ref_logps = logprobs_by(reference) if kl_coef > 0 else {}
left_out = (stds == 0).repeat_interleave(G) & filter_groups                             # [N]
shaped, total_kl = scores, torch.zeros(N, device=device)
if overlong_buffer:
    behind = torch.tensor([len(r.ids) - len(r.prompt_ids) for r in rollouts], device=device)        # [N]
    shaped = shaped + overlong_penalty * losses.overlong_penalty(behind, max_completion_length,
                                                                 overlong_buffer)
if kl_coef > 0 and kl_in == "reward":
    total_kl = torch.stack([losses.kl_penalty(engine_logps[s], ref_logps[s], kl_estimator).sum()
                            for s in range(N)])                                         # [N]
    shaped = shaped - kl_coef * total_kl
shaped = shaped.masked_fill(left_out, math.nan)
adv = losses.ADVANTAGES[advantage](shaped, G, lengths=lengths, greedy=greedy, pass_k=pass_k)    # [N]
counted = [s for s, r in enumerate(rollouts)
           if not left_out[s] and not (mask_truncated and r.finish_reason == "length")]

# ---------------------------------------------------------------- 4 old logprobs
old_logps = engine_logps if old_logprobs == "engine" else logprobs_by(checkpoint) if new_policy else {}
marked = None
if loss_type in ("clip_cov", "kl_cov"):
    marks = losses.covariance_marks(
        [engine_logps[s].cpu() for s in counted], adv[counted].cpu(), loss_type, cov_share,
        torch.Generator().manual_seed(zlib.crc32(f"{kept['seed']} {step}".encode())))
    marked = {s: mark.to(device) for s, mark in zip(counted, marks)}

# ---------------------------------------------------------------- 5 the update, without the optimizer's step
policy = load_policy(new_policy or checkpoint, mesh, compute_dtype, float32_head=float32_head)
weight = losses.sequence_weights(
    lengths, loss_aggregation, num_tokens=lengths[counted].sum().clamp(min=1),
    num_sequences=max(1, len(counted)), max_length=max_completion_length)               # [N]
kl_in_loss = kl_coef > 0 and kl_in == "loss"
moves_without_advantage = kl_in_loss or entropy_coef > 0 or loss_type == "kl_cov"
computed = [s for s in counted if moves_without_advantage or adv[s] != 0]
sums, new_logps = dict.fromkeys(("loss", "entropy", "kl", "low", "high", "correction"), 0.0), {}
for batch in micro_batches(policy, rollouts, computed, token_budget):
    logp, entropy = policy(batch, temperature)                                          # [C], [C]
    new_logps |= batch.split(logp.detach())
    # Without old logprobs the policy is the one that sampled.
    old_logp = batch.flat(old_logps) if old_logps else logp.detach()                    # [C]
    token_loss, low, high = losses.LOSSES[loss_type](
        logp, old_logp, batch.spread(adv), mean=batch.mean, epsilon=epsilon, epsilon_high=epsilon_high,
        dual_clip=dual_clip, marked=None if marked is None else batch.flat(marked, torch.bool))     # [C] each
    correction = losses.correction_weights(
        old_logp, batch.flat(engine_logps), engine_correction, mean=batch.mean, lengths=batch.spread(lengths),
        low=correction_low, high=correction_high)                                       # [C]
    kl = (losses.kl_penalty(logp, batch.flat(ref_logps), kl_estimator, old_logp) if kl_in_loss
          else torch.zeros_like(logp))                                                  # [C]
    token_loss = correction * token_loss + kl_coef * kl
    if entropy_coef > 0:
        token_loss = token_loss - entropy_coef * entropy
    loss = (batch.spread(weight) * token_loss).sum()
    loss.backward()
    for name, values in zip(sums, (loss, entropy, kl, low, high, correction)):
        sums[name] += values.detach().sum().item()

gradients = [p.grad.full_tensor() for p in policy.parameters() if p.grad is not None]
num_tokens = max(1, lengths[computed].sum().item())
per_token = {name: value / num_tokens for name, value in sums.items()}
result = {
    "reward": ranks.mean(scores),
    "reward_std": ranks.mean(stds), "frac_reward_zero_std": ranks.mean(stds == 0),
    "rewards/shaped/mean": ranks.mean(shaped), "train/frac_counted": len(counted) / N,
    "loss": sums["loss"], "entropy": per_token["entropy"],
    "kl": per_token["kl"] if kl_in == "loss" else (total_kl.sum() / lengths.sum()).item(),
    "clip_ratio/low_mean": per_token["low"], "clip_ratio/high_mean": per_token["high"],
    "clip_ratio/region_mean": per_token["low"] + per_token["high"],
    **compare_logprobs(rollouts, new_logps, math.inf, tokenizer),
    "sampling/correction_mean": per_token["correction"],
    "grad_norm": math.sqrt(sum(g.double().square().sum().item() for g in gradients))}
logged = {}
if os.path.isfile(path := os.path.join(os.path.dirname(checkpoint), "metrics.jsonl")):
    logged = next((line for _, line in read_log(path) if line["step"] == step), {})
print(f"{checkpoint}: {N} completions with {lengths.sum()} sampled tokens; {len(computed)} of them, with "
      f"{lengths[computed].sum()} tokens, give a gradient\n{'':44}{'the run':>12}{'replay':>12}")
for name, value in result.items():
    print(f"{name:44}{logged.get(name, math.nan):12.5g}{value:12.5g}")
ranks.leave()
