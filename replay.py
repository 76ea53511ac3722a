"""
What a loss makes of rollouts that a run has kept: its value, its gradient and all its statistics, in seconds.

    python replay.py out/grpo-algebra-.../checkpoint-40                          # as the run was set
    python replay.py out/grpo-algebra-.../checkpoint-40 config/gspo.py --epsilon=1e-3
    python replay.py out/grpo-algebra-.../checkpoint-20 --new_policy=out/grpo-algebra-.../checkpoint-40

Every checkpoint of train_grpo.py but a run's last holds the rollouts that its policy went on to sample. Steps
3 to 5 of that script are made with them again, all in one update, on a CPU as well; no parameter changes and
nothing is written. What you have changed inline in a script of your own, change here, too; what a recipe says
of sampling and of the optimizer has no effect. Beside the result stands what the run itself has logged for
that step: the same figures, as long as no setting differs, dtype=auto means the same here, and the run made
one update of it (with filter_groups, reward, reward_std and frac_reward_zero_std are here of the prompts that
were kept; an entropy bonus does not decay).

On the policy that sampled all ratios are 1, and most losses alike. --new_policy takes another checkpoint's
policy with the old rollouts: that is where clipping, corrections and bounds act.
"""
import json
import math
import os
import sys
import zlib

import torch
from transformers import AutoTokenizer

import losses
import ranks
import rollout
import tiny
from checks import check_grpo, check_values
from configurator import check, configure, input_errors
from model import check_model, load_policy, pack
# ------------------------------------------------------------------------------------------------------------
# the run's own are the defaults, but for new_policy
new_policy = ""                 # a folder; empty: the checkpoint, which sampled
reference = ""                  # where kl_coef is above 0; empty: the model that the run began with
temperature = 1.0               # of the trainer's logprobs
max_completion_length = 64      # for overlong_buffer and constant_length
filter_groups = False           # these and the next are those of train_grpo.py
overlong_buffer = 0
overlong_penalty = 1.0
mask_truncated = False
advantage = "grpo"
pass_k = 4
loss_type = "clip"
loss_aggregation = "token_mean"
epsilon = 0.2
epsilon_high = 0.2
dual_clip = 0.0
cov_share = 2e-4
kl_coef = 0.0
kl_in = "loss"
kl_estimator = "k3"
entropy_coef = 0.0
old_logprobs = "trainer"
engine_correction = "none"
correction_low = 0.5
correction_high = 2.0
dtype = "auto"                  # float32, bfloat16; auto: bfloat16 on CUDA
float32_head = True             # with bfloat16: logits in float32 all the same
token_budget = 8192
# ------------------------------------------------------------------------------------------------------------
checkpoint, run, rows = "", {}, []
if len(sys.argv) > 1 and not sys.argv[1].startswith("-"):
    checkpoint = sys.argv.pop(1).rstrip("/")
    check(os.path.isfile(f"{checkpoint}/rollouts.jsonl"),
          f"{checkpoint} holds no rollouts.jsonl: no checkpoint of train_grpo.py, or the last of its run")
    with open(f"{checkpoint}/rollouts.jsonl") as file, input_errors():
        run, *rows = map(json.loads, file)
    run.setdefault("float32_head", False)                       # runs before it was a setting had none
    globals().update({key: value for key, value in run.items() if key in globals()})
settings = configure(globals(), others=run)
check(checkpoint, "name a checkpoint first: python replay.py out/grpo-algebra-.../checkpoint-40")
check("RANK" not in os.environ, "one process is enough: python replay.py, without torchrun")
check_values(settings)
check_grpo(run | {"max_num_gen_batches": 1, "skip_after": 0} | settings)     # of the run's: they act no more

_, _, device, mesh = ranks.set_up()
compute_dtype = getattr(torch, dtype if dtype != "auto" else
                        "bfloat16" if device.type == "cuda" else "float32")
step, G, N = run["step"], run["num_generations"], len(rows)
rollouts = [rollout.Rollout(row["prompt_ids"], row["completion_ids"], row["logprobs"], row["finish_reason"])
            for row in rows]
score = torch.tensor([row["score"] for row in rows], device=device)                     # [N], NaN: not scored
greedy = torch.tensor([row["greedy"] for row in rows if "greedy" in row], device=device)    # [N / G], or none
longest = max(len(r.prompt_ids) + len(r.completion_ids) for r in rollouts)
check(longest <= token_budget, f"token_budget={token_budget}: a sequence has {longest} tokens")
check(advantage != "remax" or len(greedy), "advantage=remax: the run made no greedy completions")
with input_errors():
    check_model(new_policy or checkpoint, "new_policy")
    if kl_coef > 0:
        reference = reference or run["model"]
        reference = tiny.ensure() if reference == "tiny" else reference
        check_model(reference, "reference", tokenizer=False)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)


@torch.no_grad()
def logprobs_by(path):
    """The logprobs of all completions by the model in `path`: {s: [len]}."""
    network, results = load_policy(path, mesh, compute_dtype, trained=False, float32_head=float32_head), {}
    for batch in pack(rollouts, range(N), token_budget, device):
        results |= batch.split(network(batch, temperature)[0])
    return results


# ---------------------------------------------------------------- 3 advantage
stds = losses.group_std(score, G)                                                       # [N / G]
lengths = torch.tensor([len(r.completion_ids) for r in rollouts], device=device)        # [N]
engine_logps = {s: torch.tensor(rollouts[s].logprobs, device=device) for s in range(N)}     # {s: [len]}
ref_logps = logprobs_by(reference) if kl_coef > 0 else {}
counted = [s for s, r in enumerate(rollouts) if not (filter_groups and stds[s // G] == 0)
           and not (mask_truncated and r.finish_reason == "length")]
shaped, kls = score.clone(), torch.zeros(N)
if overlong_buffer:
    shaped += overlong_penalty * losses.overlong_penalty(lengths, max_completion_length, overlong_buffer)
if kl_coef > 0 and kl_in == "reward":
    kls = torch.stack([losses.kl_penalty(engine_logps[s], ref_logps[s], kl_estimator).sum()
                       for s in range(N)])                                              # [N]
    shaped -= kl_coef * kls
if filter_groups:
    shaped[(stds == 0).repeat_interleave(G)] = math.nan
adv = losses.group_advantages(shaped, G, advantage, lengths, greedy, pass_k)            # [N]

# ---------------------------------------------------------------- 4 old logprobs
old_logps = engine_logps if old_logprobs == "engine" else logprobs_by(checkpoint) if new_policy else {}
marked = {}
if loss_type in ("clip_cov", "kl_cov"):
    marks = losses.covariance_marks(
        [engine_logps[s].cpu() for s in counted], adv[counted].cpu(), loss_type, cov_share,
        torch.Generator().manual_seed(zlib.crc32(f"{run['seed']} {step}".encode())))
    marked = {s: mark.to(device) for s, mark in zip(counted, marks)}

# ---------------------------------------------------------------- 5 the update, but for the optimizer's step
policy = load_policy(new_policy or checkpoint, mesh, compute_dtype, float32_head=float32_head)
weight = losses.sequence_weights(lengths, loss_aggregation, lengths[counted].sum().clamp(min=1),
                                 max(1, len(counted)), max_completion_length)           # [N]
everyone = kl_coef > 0 and kl_in == "loss" or entropy_coef > 0 or loss_type == "kl_cov"
moving = [s for s in counted if everyone or adv[s] != 0]
sums, logps = torch.zeros(6, device=device), {}
for batch in pack(rollouts, moving, token_budget, device):
    logp, entropy = policy(batch, temperature)                                          # [C], [C]
    logps |= batch.split(logp.detach())
    old_logp = batch.flat(old_logps) if old_logps else logp.detach()    # the policy is the one that sampled
    token_loss, low, high = losses.policy_loss(
        logp, old_logp, batch.spread(adv), batch.mean, epsilon, epsilon_high, loss_type, dual_clip,
        batch.flat(marked) if marked else None)                                         # [C] each
    correction = losses.correction_weights(
        old_logp, batch.flat(engine_logps), batch.mean, batch.spread(lengths), engine_correction,
        correction_low, correction_high)                                                # [C]
    token_loss = correction * token_loss
    kl = torch.zeros_like(logp)
    if kl_coef > 0 and kl_in == "loss":
        kl = losses.kl_penalty(logp, batch.flat(ref_logps), kl_estimator, old_logp)     # [C]
        token_loss = token_loss + kl_coef * kl
    if entropy_coef:
        token_loss = token_loss - entropy_coef * entropy
    loss = (batch.spread(weight) * token_loss).sum()
    loss.backward()
    sums += torch.stack([x.detach().sum() for x in (loss, entropy, kl, low, high, correction)])

gradients = [p.grad.full_tensor() for p in policy.parameters() if p.grad is not None]
tokens = max(1, lengths[moving].sum().item())
sum_loss, sum_entropy, sum_kl, sum_low, sum_high, sum_correction = sums.tolist()
result = {
    "reward": ranks.mean(score),
    "reward_std": ranks.mean(stds), "frac_reward_zero_std": ranks.mean(stds == 0),
    "rewards/shaped/mean": ranks.mean(shaped), "train/frac_counted": len(counted) / N,
    "loss": sum_loss, "entropy": sum_entropy / tokens,
    "kl": sum_kl / tokens if kl_in == "loss" else (kls.sum() / lengths.sum()).item(),
    "clip_ratio/low_mean": sum_low / tokens, "clip_ratio/high_mean": sum_high / tokens,
    "clip_ratio/region_mean": (sum_low + sum_high) / tokens,
    **rollout.compare_logprobs(rollouts, logps, math.inf, tokenizer),
    "sampling/correction_mean": sum_correction / tokens,
    "grad_norm": math.sqrt(sum(g.double().square().sum().item() for g in gradients))}
logged = {}
if os.path.isfile(path := os.path.join(os.path.dirname(checkpoint), "metrics.jsonl")):
    with open(path) as file:
        logged = next((line for line in map(json.loads, file) if line["step"] == step), {})
print(f"{checkpoint}: {N} completions of {lengths.sum()} tokens, {len(moving)} of {tokens} with a gradient\n"
      f"{'':44}{'the run':>12}{'replay':>12}")
for name, value in result.items():
    print(f"{name:44}{logged.get(name, math.nan):12.5g}{value:12.5g}")
ranks.leave()
