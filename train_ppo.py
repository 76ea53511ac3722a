"""
PPO with a critic (Schulman et al. 2017, https://arxiv.org/abs/1707.06347), a whole run in one file.

    torchrun train_ppo.py                                    # one process, on a laptop or a GPU
    torchrun --nproc_per_node=8 train_ppo.py config/gsm8k.py --critic_learning_rate=1e-5
    python train_ppo.py config/rlhf.py --model=... --reward_model=... --train_file=...
    python train_ppo.py --help                               # every setting

It reads like train_grpo.py; read that one first. What differs, as in Ziegler et al. 2019
(https://arxiv.org/abs/1909.08593) and Ouyang et al. 2022 (https://arxiv.org/abs/2203.02155):
1. A critic, a second transformer with a scalar head and an optimizer of its own, learns the value of each
   state: the prompt and the completion so far. One completion per prompt is enough: no group is compared.
2. The score is the reward of the last token. The KL to the initial model (k1), times kl_coef, is taken off
   the reward of each token and is no term of the loss. Its coefficient may adapt.
3. Advantages come from GAE over the sampled tokens and are whitened over the global batch. A completion that
   was cut off ends like any other: no value is assumed for what would have followed.
4. Each step makes one or more passes of several updates over its rollouts, with clipped ratios and values.
5. Every completion is computed. There is no engine_correction, and no variant of the loss.
"""
import gc
import math
import random
import zlib

gc.disable()                    # set_up() enables it again; importing takes a third less time without it
import torch

import data
import losses
import ranks
import rewards
import rollout
import tiny
from checks import check_ppo, check_run
from configurator import configure, input_errors
from episodes import Player
from loading import check_critic, check_trainable, load_critic, load_policy, load_tokenizer, precision
from models import offload, token_logprobs, token_values
from packing import deal, micro_batches
from run import Run
from weights import full_weights
# ------------------------------------------------------------------------------------------------------------
# what everybody sets first
model = "tiny"                  # a folder, a hub id, or tiny: the small model that tiny.py makes
task = "algebra"                # algebra, countdown, guess, arithmetic, gsm8k, or file: train_file, eval_file
train_file = ""                 # JSONL or parquet, for task=file
eval_file = ""                  # the same; empty: an eighth of train_file is held out
reward = ""                     # file.py:function; math_verify; empty: the task's; none: a reward model alone
engine = "auto"                 # vllm, hf (plain PyTorch), or auto: vllm where it is installed
prompts_per_step = 256          # over all ranks
num_generations = 1             # completions per prompt (G)
max_prompt_length = 64          # tokens; longer prompts are left out
max_completion_length = 64      # tokens; longer completions are cut off
learning_rate = 1e-4            # the policy's peak; a model of 1 B parameters wants about 1e-6
critic_learning_rate = 2e-3     # the critic's peak; a model of 1 B parameters wants about 1e-5
max_steps = 50                  # rollouts, each with its updates
token_budget = 8192             # tokens per micro-batch: memory grows with it, results do not depend on it
seed = 0                        # of generated training problems, their order, and sampling
out_dir = ""                    # the run's folder; empty: a new one under out/
resume = ""                     # auto: go on from the newest checkpoint in out_dir, if any; or a checkpoint
from settings import *          # data, reward model, engine, precision, output: settings.py
# algorithm
temperature = 1.0               # of sampling, and of the trainer's logprobs
critic_model = ""               # a folder or hub id to start the critic from; empty: the model
critic_warmup_steps = 5         # steps that train the critic alone, at the beginning
kl_coef = 0.0                   # of the KL to the initial model, taken off each token's reward; 0: none
kl_target = 0.0                 # nats per sequence: kl_coef adapts to keep the KL there; 0: kl_coef is fixed
kl_horizon = 10000              # sequences within which kl_coef changes by at most 20%
gamma = 1.0                     # discount of GAE, from 0 to 1
lam = 1.0                       # lambda of GAE, from 0 (one step) to 1 (Monte Carlo)
num_epochs = 1                  # passes over a step's rollouts
updates_per_epoch = 2           # optimizer steps per pass, each on its share of the rollouts
epsilon = 0.2                   # the ratio is clipped below 1 - epsilon
epsilon_high = 0.2              # and above 1 + epsilon_high
dual_clip = 0.0                 # clips the ratio at this where the advantage is negative, e.g. 3; 0: nowhere
value_clip = 0.5                # values are clipped to this distance from the old ones; 0: no clipping
loss_aggregation = "token_mean" # of both losses: token_mean, sequence_mean, constant_length, sequence_sum
entropy_coef = 0.0              # weight of the entropy bonus in the policy's loss
max_kl = 0.0                    # nats per token to the old policy, above which a step's updates end; 0: never
# optimizer
warmup_steps = 5                # both rates rise linearly; the policy's after critic_warmup_steps
lr_decay = "linear"             # after warm-up, down to 0 at max_steps: linear, cosine; or constant
weight_decay = 0.0              # AdamW's
beta1 = 0.9                     # AdamW's, for the mean of the gradient
beta2 = 0.95                    # AdamW's, for its square
grad_clip = 1.0                 # largest norm of the gradient; 0: no clipping
# evaluation and checkpoints
eval_interval = 10              # steps; the first and the last model are always evaluated
eval_samples = 4                # completions per held-out prompt: k in mean@k, pass@k, maj@k
save_interval = 20              # steps; the last model is always saved
# ------------------------------------------------------------------------------------------------------------
settings = configure(globals())

# ---------------------------------------------------------------- set-up: processes, data, models, engine
# One process per device, under torchrun or alone; FSDP2 shards over the mesh, which is all of them.
rank, world_size, device, mesh = ranks.set_up(timeout, sequence_parallel_size)
check_run(settings, world_size)
check_ppo(settings)
B, G = prompts_per_step // world_size, num_generations          # prompts per rank, completions per prompt
N = prompts_per_step * G                                        # completions per step, on all ranks
compute_dtype, gap_bound = precision(dtype, logprob_gap, device)
run = Run(settings, __file__, kl_coef=kl_coef)                  # its folder, and where it goes on from
if not kl_target or kl_coef != run.state["settings"]["kl_coef"]:
    run.state["kl_coef"] = kl_coef                              # a changed setting replaces the adapted value
with input_errors():
    base = tiny.ensure(model)
    check_trainable(base, length=max_prompt_length + max_completion_length)
    check_critic(critic_model or base, base, length=max_prompt_length + max_completion_length)
    tokenizer = load_tokenizer(base)
    eos_ids = rollout.end_tokens(base, tokenizer)
    player = Player(settings, tokenizer, eos_ids)               # of single answers, or with an environment
    train_set, eval_set, data_note = data.load_prompts(tokenizer, settings, world_size, player.tools)
    scorer = rewards.Scorer(settings, device, compute_dtype, player.rewards_as)
    run.check_data(train_set, eval_set)
    samples = train_set.draw(0, 1, seed)[0] + eval_set[:1]
    player.try_on(samples)
    scorer.try_on([prompt.row for prompt in samples])

    start = run.resumed or base
    policy = load_policy(start, mesh, compute_dtype, gradient_checkpointing, float32_head=float32_head)
    critic_start = f"{run.resumed}/critic" if run.resumed else critic_model or base
    critic = load_critic(critic_start, mesh, compute_dtype, gradient_checkpointing)
    reference = (load_policy(base, mesh, compute_dtype, trained=False, float32_head=float32_head)
                 if kl_coef > 0 else None)
    rollout_engine = rollout.engine_class(engine)(
        start, compute_dtype, max_prompt_length + max_completion_length, eos_ids,
        vllm_gpu_memory_utilization, vllm_tensor_parallel_size, float32_head)
adamw = {"betas": (beta1, beta2), "weight_decay": weight_decay, "fused": True}
optimizer = torch.optim.AdamW(policy.parameters(), learning_rate, **adamw)
critic_optimizer = torch.optim.AdamW(critic.parameters(), critic_learning_rate, **adamw)
if offload_optimizer:
    offload(optimizer, device)
    offload(critic_optimizer, device)
networks = {"": (policy, optimizer), "critic": (critic, critic_optimizer)}      # in checkpoints, by subfolder
log = run.begin(networks, rollout_engine, data_note, f"{num_epochs} x {updates_per_epoch} optimizer step(s)")


def learning_rate_at(step, peak, first=0):
    step, steps = step - first, max_steps - first
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    progress = (step - warmup_steps) / max(1, steps - warmup_steps)
    decay = {"constant": 1, "linear": 1 - progress, "cosine": (1 + math.cos(math.pi * progress)) / 2}
    return peak * decay[lr_decay]


def sample(prompts, n, names):
    """n rollouts per prompt, adjacent. A prompt's name makes its seed, the same on any number of ranks."""
    seeds = [zlib.crc32(f"{seed} {name}".encode()) for name in names]
    return player.play(rollout_engine, prompts, n, seeds, temperature)


def evaluate():
    """mean@k, pass@k, maj@k on held-out prompts, sampled as in training, from the same seeds every time."""
    own = range(rank, len(eval_set), world_size)
    rollouts = sample([eval_set[i] for i in own], eval_samples, [f"eval {i}" for i in own])
    # A few of them show that the engine has the policy's weights.
    logps = token_logprobs(policy, rollouts, range(min(32, len(rollouts))), token_budget, temperature)
    rollout.compare_logprobs(rollouts, logps, gap_bound, tokenizer)
    scorer(rollouts)
    return rewards.evaluation(ranks.gathered(rollouts), eval_samples)


def critic_metrics(value, ret, raw_adv, adv):
    """What the log says of a critic before it has seen the batch; all [C] of this rank, adv whitened."""
    error_variance, variance = (ranks.mean(x ** 2) - ranks.mean(x) ** 2 for x in (ret - value, ret))
    extremes = [adv.nan_to_num(0.0).max(), -adv.nan_to_num(0.0).min()] if len(adv) else [-math.inf, -math.inf]
    highest, lowest = ranks.largest(extremes)
    return {"critic/vf_explained_var": 1 - error_variance / variance if variance > 1e-8 else 0.0,
            "critic/values/mean": ranks.mean(value), "critic/returns/mean": ranks.mean(ret),
            "critic/advantages/mean": ranks.mean(raw_adv),
            "critic/advantages/max": highest, "critic/advantages/min": -lowest}


# ---------------------------------------------------------------- the loop
# Shapes as in train_grpo.py: N rollouts in a step, on all ranks; C sampled tokens, of a micro-batch or of all
# that this rank computes; {s: [len]} has a tensor for the sampled tokens of each rollout s.
for step in range(run.first_step, max_steps + 1):
    log.start(step)

    # ------------------------------------------------------------ 0 evaluate, save, stop
    stopping = run.stopping()                                   # after Ctrl-C or SIGTERM
    if step == max_steps or (step % eval_interval == 0 and not stopping):
        with log.timed("eval"):
            log.evaluation(evaluate())
    if step == max_steps or step % save_interval == 0 or stopping:
        run.save(networks, tokenizer)                           # not where the run has just begun
    if step == max_steps or stopping:
        break

    # ------------------------------------------------------------ 1 rollout
    with log.timed("gen"):
        picked, run.state["position"] = train_set.draw(run.state["position"], prompts_per_step, seed)
        own = range(rank * B, (rank + 1) * B)                   # each rank samples for prompts of its own
        own_rollouts = sample([picked[i] for i in own], G, [f"{step} {i}" for i in own])

    # ------------------------------------------------------------ 2 reward
    with log.timed("reward"):
        timeouts = scorer(own_rollouts)                         # sets the score of each
    rollouts = ranks.gathered(own_rollouts)                     # N: from here on every rank has all of them
    scores = torch.tensor([r.score for r in rollouts], device=device)                   # [N], NaN: no score
    lengths = torch.tensor([len(r.logprobs) for r in rollouts], device=device)          # [N], sampled tokens
    log.rollouts(rollouts, timeouts)

    # ------------------------------------------------------------ 3 shares; old logprobs, values, reference
    # The rollouts, in random order, are split into updates. This rank computes its share of each update.
    order = random.Random(f"{seed} {step}").sample(range(N), N)
    updates = [order[u::updates_per_epoch] for u in range(updates_per_epoch)]
    shares = [deal(rollouts, update, world_size)[rank] for update in updates]
    log.shared_tokens(rollouts, range(N), shares)               # the share that is computed once for several
    all_shares = sum(shares, [])
    with log.timed("old_log_prob"):
        old_logps = token_logprobs(policy, rollouts, all_shares, token_budget, temperature)     # {s: [len]}
    log.metrics |= rollout.compare_logprobs(rollouts, old_logps, gap_bound, tokenizer)
    with log.timed("values"):
        old_values = token_values(critic, rollouts, all_shares, token_budget)           # {s: [len]}
    with log.timed("ref"):
        ref_logps = (token_logprobs(reference, rollouts, all_shares, token_budget, temperature)
                     if reference else old_logps)                                       # {s: [len]}

    # ------------------------------------------------------------ 4 rewards to advantages
    with log.timed("adv"):
        flat = lambda tensors: torch.cat([tensors[s] for s in all_shares] or [torch.empty(0, device=device)])
        old_logp, ref_logp, value = map(flat, (old_logps, ref_logps, old_values))       # [C] each
        lens = lengths[all_shares].tolist()
        kl = losses.kl_penalty(old_logp, ref_logp, "k1")                                # [C]
        # A turn's reward is given at its last token. A single answer is one turn, its score the reward.
        turns = [end - start for s in all_shares for start, end in rollouts[s].spans.tolist()]
        turn_reward = flat({s: torch.from_numpy(rollouts[s].rewards).to(device) for s in all_shares})
        token_reward = losses.token_rewards(turn_reward, kl, run.state["kl_coef"], turns)           # [C]
        raw_adv, ret = losses.gae(token_reward, value, lens, gamma, lam)                # [C], [C]
        adv = losses.whiten(raw_adv, ranks.mean)                                        # [C]
        # A rollout without a score is NaN in adv and ret. Its weight below is 0, but every count includes it.
        advs, rets = (dict(zip(all_shares, x.nan_to_num(0.0).split(lens))) for x in (adv, ret))
        total_kl = ranks.total([kl.sum()])[0]
        log.metrics |= {"kl": total_kl / lengths.sum().item(), "kl_coef": run.state["kl_coef"],
                        "critic/rewards/mean": ranks.mean([x.sum() for x in token_reward.split(lens)])}
        log.metrics |= critic_metrics(value, ret, raw_adv, adv)

    # ------------------------------------------------------------ 5 update
    train_policy = step >= critic_warmup_steps
    lr = learning_rate_at(step, learning_rate, critic_warmup_steps) if train_policy else 0.0
    optimizer.param_groups[0]["lr"] = log.metrics["learning_rate"] = lr
    critic_lr = learning_rate_at(step, critic_learning_rate)
    critic_optimizer.param_groups[0]["lr"] = log.metrics["critic/lr"] = critic_lr
    # 0 while the critic learns alone.
    log.nothing("grad_norm", "actor/skipped_updates", "entropy", "actor/ppo_kl", "clip_ratio/low_mean",
                "clip_ratio/high_mean", "clip_ratio/region_mean")
    loss_sum, tried, made, too_far = torch.zeros((), device=device), 0, 0, False
    for update, share in num_epochs * list(zip(updates, shares)):
        # The denominators count the whole update, on all ranks, so that the gradient is the same for any
        # number of ranks, any micro-batch size and any packing.
        update_tokens = lengths[update].sum()
        weight = scores.isfinite() * losses.sequence_weights(
            lengths, loss_aggregation, num_tokens=update_tokens, num_sequences=len(update),
            max_length=max_completion_length)                                           # [N]
        with log.timed("update_critic"):
            for batch in micro_batches(critic, rollouts, share, token_budget):
                new_value = critic(batch)                                               # [C]
                value_losses, value_clipped = losses.value_loss(
                    new_value, batch.flat(old_values), batch.flat(rets), value_clip)        # [C] each
                vf_loss = (batch.spread(weight) * value_losses).sum()
                (vf_loss * world_size).backward()               # FSDP averages over ranks: undo it
                log.sum("critic/vf_loss", vf_loss / (num_epochs * updates_per_epoch))
                log.mean("critic/vf_clipfrac", value_clipped)
            norm = torch.nn.utils.clip_grad_norm_(critic.parameters(), grad_clip or math.inf).full_tensor()
            if run.may_step("critic", norm.item()):             # not where it is infinite or NaN
                critic_optimizer.step()
            critic_optimizer.zero_grad()
        with log.timed("update_actor"):
            if not train_policy or too_far:
                continue
            update_kl = torch.zeros((), device=device)
            for batch in micro_batches(policy, rollouts, share, token_budget):
                logp, entropy = policy(batch, temperature)                              # [C], [C]
                token_loss, low, high = losses.LOSSES["clip"](
                    logp, batch.flat(old_logps), batch.flat(advs), epsilon=epsilon, epsilon_high=epsilon_high,
                    dual_clip=dual_clip)                                                # [C] each
                if entropy_coef > 0:
                    token_loss = token_loss - entropy_coef * entropy
                loss = (batch.spread(weight) * token_loss).sum()
                (loss * world_size).backward()
                loss_sum += loss.detach()
                token_kl = losses.kl_penalty(batch.flat(old_logps), logp.detach(), "k3")    # [C]
                update_kl += token_kl.sum()
                log.mean("actor/ppo_kl", token_kl)
                log.mean("entropy", entropy)
                log.mean("clip_ratio/low_mean", low)
                log.mean("clip_ratio/high_mean", high)
                log.mean("clip_ratio/region_mean", low | high)
            tried += 1
            # Then this update is not made either.
            too_far = max_kl > 0 and ranks.total([update_kl])[0] / update_tokens > max_kl
            norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), grad_clip or math.inf).full_tensor()
            if not too_far and run.may_step("actor", norm.item()):
                optimizer.step()
                made += 1
            optimizer.zero_grad()
    log.sum("loss", loss_sum / max(tried, 1))
    log.metrics["actor/updates"] = made
    if kl_target and train_policy:
        run.state["kl_coef"] = losses.adapted_kl_coef(run.state["kl_coef"], total_kl / N, kl_target,
                                                      kl_horizon, N)

    # ------------------------------------------------------------ 6 weight sync
    with log.timed("sync"):
        rollout_engine.load_weights(full_weights(policy, compute_dtype, rollout_engine.weight_names))

    # ------------------------------------------------------------ 7 log
    run.end_step(rollouts)

# ---------------------------------------------------------------- teardown
run.end()
