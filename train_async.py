"""
GRPO with trainers and engines on devices of their own: while the trainers update, the engines sample.

    torchrun --nproc_per_node=2 train_async.py                  # one trainer, one engine
    torchrun --nproc_per_node=8 train_async.py config/gsm8k.py --rollout_ranks=4 --in_flight=true

This is train_grpo.py, with these differences:
1. The last rollout_ranks ranks are engines, which sample, score and send (sample_for_trainers). The others
   are trainers. What crosses between them, and how, is in placement.py.
2. Version v of the weights is the policy after v steps. The completions of step t are sampled with version
   t - max_staleness, the first ones with version 0. With 0 engines and trainers take turns, and the figures
   are those of train_grpo.py; with 1 the engines sample for the next step while the trainers update. A run
   repeats bit for bit on a CPU, also after a resume: a checkpoint holds what was sampled ahead.
3. With in_flight=True the engines begin a step's completions with the same version, but take newer ones as
   soon as they come. Such a run does not repeat, and keeps nothing for a resume. With stale=drop the engines
   never wait, and the trainers drop what is too old.
4. The loss's ratio is still to the trainer's own logprobs at the start of the step. The policy that sampled
   is further from these, and engine_correction weights by that distance (auto).
5. With kl_in=reward the KL is that of the trained policy; k3_is weights by the ratio to the one that sampled.
6. Engine and trainer are compared where both have the same weights: at evaluations, and in steps that are
   sampled with the newest version. vLLM does not sleep, and takes 0.9 of its GPU's memory.
"""
import gc
import math
import os
import random
import time
import zlib

gc.disable()                    # set_up() enables it again; importing takes a third less time without it
import torch

import data
import losses
import ranks
import rewards
import rollout
import tiny
from checks import check_grpo, check_placement
from configurator import configure, input_errors
from episodes import Player, Table
from loading import check_trainable, load_policy, load_tokenizer, precision
from models import offload, token_logprobs
from packing import deal, micro_batches
from placement import Bridge, Sampled, kept_ahead, note, staleness
from run import Run
from weights import full_weights
# ------------------------------------------------------------------------------------------------------------
# what everybody sets first; configure() reads the settings between the two dashed lines
model = "tiny"                  # a folder, a hub id, or tiny: the small model that tiny.py makes
task = "algebra"                # algebra, countdown, guess, arithmetic, gsm8k, or file: train_file, eval_file
train_file = ""                 # JSONL or parquet, for task=file
eval_file = ""                  # the same; empty: an eighth of train_file is held out
reward = ""                     # file.py:function; math_verify; empty: the task's; none: a reward model alone
engine = "auto"                 # vllm, hf (plain PyTorch), or auto: vllm where it is installed
prompts_per_step = 32           # over all ranks
num_generations = 8             # completions per prompt (G)
max_prompt_length = 64          # tokens; longer prompts are left out
max_completion_length = 64      # tokens; longer completions are cut off
learning_rate = 1e-4            # the peak; a model of 1 B parameters wants about 1e-6
max_steps = 60                  # each samples completions and makes updates_per_step updates
token_budget = 8192             # tokens per micro-batch: memory grows with it, results do not depend on it
seed = 0                        # of generated training problems, the order of prompts, and sampling
out_dir = ""                    # the run's folder; empty: a new one under out/
resume = ""                     # auto: go on from the newest checkpoint in out_dir, if any; or a checkpoint
from settings import *          # dtype, reward_model, vllm_* and others: see settings.py
# placement: docs/placement.md
rollout_ranks = 1               # the last ranks, which are engines; the others are trainers
max_staleness = 1               # steps that the trained policy is ahead of the one that sampled
in_flight = False               # new weights enter in the middle of completions; such a run does not repeat
stale = "wait"                  # engines wait before they sample what would be older than max_staleness; or,
                                # with in_flight, drop: they never wait, and trainers drop what is older
sync_timeout = 1800.0           # seconds; the run stops if one role waits longer for the other
vllm_gpu_memory_utilization = 0.9  # share of the GPU's memory that vLLM may take, where nothing else runs
# algorithm
temperature = 1.0               # of sampling, and of the trainer's logprobs
advantage = "grpo"              # grpo, dr_grpo (no std), grpo_batch, rloo, opo, remax, pass_at_k,
                                # reinforce++, reinforce++_baseline: losses.ADVANTAGES
pass_k = 4                      # k of advantage=pass_at_k
kl_coef = 0.0                   # weight of the KL to the initial model; 0: no reference model
kl_in = "loss"                  # or reward: taken off each completion's score, summed over its tokens
kl_estimator = "k3"             # in the loss k2, k3, k3+, k3_is; in the reward only k1: losses.kl_penalty
updates_per_step = 1            # optimizer steps per step; each completion is in one of them
old_logprobs = "trainer"        # trainer or engine: whose logprobs are the denominator of the ratio
loss_type = "clip"              # clip (PPO), gspo, gmpo, cispo, sapo, gpg, clip_cov, kl_cov: losses.LOSSES
epsilon = 0.2                   # the ratio is clipped below 1 - epsilon
epsilon_high = 0.2              # the ratio is clipped above 1 + epsilon_high; DAPO: 0.28
dual_clip = 0.0                 # for negative advantages the ratio is clipped here as well, e.g. 3; 0: not
cov_share = 2e-4                # share of the tokens that clip_cov and kl_cov act on
loss_aggregation = "token_mean" # token_mean (DAPO), sequence_mean (GRPO), constant_length, sequence_sum
engine_correction = "auto"      # none, or weights by the ratio of trainer to engine: token_truncate (TIS),
                                # token_mask, sequence_truncate, sequence_mask, geometric_mask; auto: none if
                                # max_staleness=0 or old_logprobs=engine, otherwise token_truncate
correction_low = 0.5            # masks: weight 0 where that ratio is lower
correction_high = 2.0           # masks: weight 0 where it is higher; truncate: no weight is higher
entropy_coef = 0.0              # weight of the entropy bonus
entropy_decay = "constant"      # linear or cosine: that weight falls to 0 at max_steps; or constant
# optimizer
warmup_steps = 5                # the learning rate rises linearly, from learning_rate / warmup_steps
lr_decay = "linear"             # linear or cosine: after warm-up it falls to 0 at max_steps; or constant
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
if engine_correction == "auto":
    engine_correction = "token_truncate" if max_staleness and old_logprobs == "trainer" else "none"
    settings["engine_correction"] = engine_correction
# ---------------------------------------------------------------- set-up of both roles
check_placement(settings, int(os.environ.get("WORLD_SIZE", 1)))
check_grpo(settings)
bridge = Bridge(settings)                                       # this rank's role, and the way to the other
rank, world_size, device, mesh = ranks.set_up(timeout, sequence_parallel_size, bridge.join) # the role's
G, N = num_generations, prompts_per_step * num_generations      # completions per prompt, and per step
eval_steps = {*range(0, max_steps, eval_interval), max_steps}   # those that begin with an evaluation
compute_dtype, gap_bound = precision(dtype, logprob_gap, device)
with input_errors():
    base = tiny.ensure(model)
    check_trainable(base, length=max_prompt_length + max_completion_length)
    tokenizer = load_tokenizer(base)
    eos_ids = rollout.end_tokens(base, tokenizer)
    player = Player(settings, tokenizer, eos_ids)               # of single answers, or with an environment
    train_set, eval_set, data_note = data.load_prompts(tokenizer, settings, bridge.engines, player.tools)


# ---------------------------------------------------------------- the engines
def sample_for_trainers(_):
    """What an engine does until the run is over: it samples, scores, sends, and takes the next weights."""
    version, number, position = opening["version"], opening["step"], opening["position"]
    B = prompts_per_step // bridge.engines                      # prompts of a step that are this engine's
    own = range(bridge.engine * B, (bridge.engine + 1) * B)
    own_eval = range(bridge.engine, len(eval_set), bridge.engines)
    table, work = Table(player, rollout_engine), {}             # {(kind, number): when it began, position}

    def may_begin():
        # The schedule: whether to begin step `number` with these weights. keep_ahead counts on it.
        return (len(table) < B * G if stale == "drop"
                else number <= version + max_staleness and number < max_steps)

    def begin(kind, number, prompts, n, names):
        # n completions per prompt, adjacent. A prompt's name makes its seed, for any number of engines.
        seeds = [zlib.crc32(f"{seed} {name}".encode()) for name in names]
        jobs = [(p, first + j, (temperature, 1.0, 0)) for p, first in zip(prompts, seeds) for j in range(n)]
        if kind == "step" and advantage == "remax":
            jobs += [(p, first, (0, 1.0, 0)) for p, first in zip(prompts, seeds)]
        table.add((kind, number), jobs)
        work[kind, number] = time.perf_counter(), position

    def go_on():                                                # what is complete is scored and sent
        for (kind, number), rollouts in table.step().items():
            (began, after), ended = work.pop((kind, number)), time.perf_counter()
            count = B * G if kind == "step" else len(rollouts)
            rollouts, greedy = rollouts[:count], rollouts[count:]       # what is greedy comes last
            timeouts, _ = scorer(rollouts), scorer(greedy)
            times = {"timing_s/gen": ended - began, "timing_s/reward": time.perf_counter() - ended}
            bridge.send(kind, number, Sampled(rollouts, [r.score for r in greedy], timeouts, after, times))

    while True:
        if version in eval_steps:
            begin("eval", version, [eval_set[i] for i in own_eval], eval_samples,
                  [f"eval {i}" for i in own_eval])
            while ("eval", version) in work:
                go_on()
        if version == max_steps:
            bridge.wait_for_the_end()
        while not (in_flight and bridge.arrived(version + 1)):
            while may_begin():
                picked, position = train_set.draw(position, prompts_per_step, seed)
                begin("step", number, [picked[i] for i in own], G, [f"{number} {i}" for i in own])
                number += 1
            if not work:
                break
            go_on()
        version += 1
        while in_flight and version not in eval_steps and bridge.arrived(version + 1):
            version += 1                                        # an engine that is late takes the newest
        rollout_engine.switch(version)                          # waits for these weights


if not bridge.trains:
    opening = bridge.begin()
    with input_errors():
        scorer = rewards.Scorer(settings, device, compute_dtype, player.rewards_as)
        samples = train_set.draw(0, 1, seed)[0] + eval_set[:1]
        player.try_on(samples)
        scorer.try_on([prompt.row for prompt in samples])
        rollout_engine = rollout.engine_class(engine)(
            opening["model"], compute_dtype, max_prompt_length + max_completion_length, eos_ids,
            vllm_gpu_memory_utilization, vllm_tensor_parallel_size, float32_head, apart=True)
    rollout_engine.version, rollout_engine.incoming = opening["version"], bridge.weights
    bridge.send("ready", 0, Sampled([], [], 0, 0, {}))
    rollout_engine.serve([], sample_for_trainers)               # until the run ends

# ---------------------------------------------------------------- the trainers
kl_in_loss = kl_coef > 0 and kl_in == "loss"
# These terms of the loss have a gradient even where the advantage is 0. If you add one, add it here as well.
moves_without_advantage = kl_in_loss or entropy_coef > 0 or loss_type == "kl_cov"
# With one update per step its own forward gives the old logprobs, because nothing has changed before it.
old_needs_forward = updates_per_step > 1 and old_logprobs == "trainer"
run = Run(settings, __file__, engines=bridge.engines, ahead=[])
with input_errors():
    run.check_data(train_set, eval_set)
    start = run.resumed or base
    ahead = kept_ahead(run.state, settings, start)              # {step: Sampled}, by the run before
    bridge.tell({"model": start, "version": run.first_step, "step": run.first_step + len(ahead), "position":
                 max([run.state["position"], *(one.position for one in ahead.values())])})
    policy = load_policy(start, mesh, compute_dtype, gradient_checkpointing, float32_head=float32_head)
    reference = (load_policy(base, mesh, compute_dtype, trained=False, float32_head=float32_head)
                 if kl_coef > 0 else None)
optimizer = torch.optim.AdamW(policy.parameters(), learning_rate, (beta1, beta2),
                              weight_decay=weight_decay, fused=True)
if offload_optimizer:
    offload(optimizer, device)                                  # to host memory, except while it steps
networks = {"": (policy, optimizer)}                            # "": a checkpoint's own folder
log = run.begin(networks, bridge, data_note, f"{updates_per_step} optimizer step(s)")
log.say(note(settings, bridge.engines, run.state, ahead))
run.state |= {"engines": bridge.engines, "ahead": []}
bridge.take("ready", 0)                                         # engines that are being made take no weights


def decay(kind, progress):                                      # of the learning rate and the entropy bonus
    return {"constant": 1, "linear": 1 - progress, "cosine": (1 + math.cos(math.pi * progress)) / 2}[kind]


def learning_rate_at(step):
    if step < warmup_steps:
        return learning_rate * (step + 1) / warmup_steps
    return learning_rate * decay(lr_decay, (step - warmup_steps) / max(1, max_steps - warmup_steps))


def take(step):
    """The rollouts of this step, by all engines."""
    return ahead.pop(step, None) or bridge.take("step", step, max_staleness if stale == "drop" else None)


def keep_ahead(step):
    """Put what was sampled for this step and later ones into the run's state, so that a resume has it."""
    # Nothing is new where the run begins, and in flight nobody knows how far the engines are.
    count = max_staleness if step > run.first_step and not in_flight else 0
    ahead.update({one: take(one) for one in range(step, min(step + count, max_steps))})
    run.state["ahead"] = [[one, sampled.as_json()] for one, sampled in ahead.items()] if rank == 0 else []


def evaluate(step):
    """mean@k, pass@k, maj@k on held-out prompts, sampled as in training, from the same seeds every time."""
    rollouts = bridge.take("eval", step).rollouts
    player.check_errors(rollouts[rank::world_size])
    # Stops the run if the engines do not have the policy's weights.
    few = deal(rollouts, range(min(32 * world_size, len(rollouts))), world_size)[rank]
    rollout.compare_logprobs(rollouts, token_logprobs(policy, rollouts, few, token_budget, temperature),
                             gap_bound, tokenizer)
    return rewards.evaluation(rollouts, eval_samples)


def kl_to_reference(rollouts):
    """For kl_in=reward: KL of the policy to the initial model, summed over the tokens of a rollout, [N]."""
    sums = torch.zeros(N, device=device)
    share = deal(rollouts, range(N), world_size)[rank]
    logps = token_logprobs(policy, rollouts, share, token_budget, temperature) if max_staleness else {}
    for s, ref_logp in token_logprobs(reference, rollouts, share, token_budget, temperature).items():
        logp = logps[s] if logps else torch.from_numpy(rollouts[s].logprobs).to(device)
        sums[s] = losses.kl_penalty(logp, ref_logp, kl_estimator).sum()
    return torch.tensor(ranks.total(sums), device=device)


def marked_tokens(rollouts, adv, step):
    """The tokens that clip_cov and kl_cov act on: a bool [len] for each rollout, the same on every rank."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {step}".encode()))
    marks = losses.covariance_marks([torch.from_numpy(r.logprobs) for r in rollouts], adv.cpu(), loss_type,
                                    cov_share, generator)
    return [mark.to(device) for mark in marks]


# ---------------------------------------------------------------- the loop
# Shapes and names are those of train_grpo.py: N rollouts in a step, C sampled tokens in a micro-batch.
for step in range(run.first_step, max_steps + 1):
    log.start(step)

    # ------------------------------------------------------------ 0 evaluate, save, stop
    stopping = run.stopping(bridge.signalled())                 # after Ctrl-C or SIGTERM
    if step == max_steps or (step in eval_steps and not stopping):
        with log.timed("eval"):
            log.evaluation(evaluate(step))
    if step == max_steps or step % save_interval == 0 or stopping:
        with log.timed("wait_for_rollouts"):
            keep_ahead(step)
        run.save(networks, tokenizer)                           # not where the run has just begun
    if step == max_steps or stopping:
        break

    # ------------------------------------------------------------ 1 rollout, 2 reward: by the engines
    with log.timed("wait_for_rollouts"):
        sampled = take(step)
    rollouts, run.state["position"] = sampled.rollouts, sampled.position                # N, on every rank
    greedy = torch.tensor(sampled.greedy, device=device) if advantage == "remax" else None
    player.check_errors(rollouts[rank::world_size])
    log.rollouts(rollouts, sampled.timeouts if rank == 0 else 0, bridge.engines)
    log.metrics |= sampled.figures
    log.metrics["async/staleness/mean"], log.metrics["async/staleness/max"] = staleness(rollouts, step)
    run.keep_rollouts(rollouts, greedy)                         # in this step's checkpoint, if it has one

    # ------------------------------------------------------------ 3 advantage
    scores = torch.tensor([r.score for r in rollouts], device=device)                   # [N], NaN: no score
    lengths = torch.tensor([len(r.logprobs) for r in rollouts], device=device)          # [N], sampled tokens
    log.groups(losses.group_std(scores, G))
    if kl_coef > 0 and kl_in == "reward":
        total_kl = kl_to_reference(rollouts)                                            # [N]
        log.metrics["kl"] = (total_kl.sum() / lengths.sum()).item()
        scores = scores - kl_coef * total_kl
    log.metrics["rewards/shaped/mean"] = scores.nanmean().nan_to_num().item()   # what advantages are made of
    # [N], 0 where the score is NaN.
    adv = losses.ADVANTAGES[advantage](scores, G, lengths=lengths, greedy=greedy, pass_k=pass_k)

    # ------------------------------------------------------------ 4 shares; old and reference logprobs
    # The rollouts, in random order, are split into updates. This rank computes its share of each update.
    order = random.Random(f"{seed} {step}").sample(range(N), N)
    updates = [order[u::updates_per_step] for u in range(updates_per_step)]
    # A rollout with advantage 0 has no gradient. It counts in the denominators below, but is not computed.
    computed = set(range(N) if moves_without_advantage else adv.nonzero()[:, 0].tolist())
    shares = [deal(rollouts, [s for s in update if s in computed], world_size)[rank] for update in updates]
    log.shared_tokens(rollouts, computed, shares)               # the share that is computed once for several
    all_shares = sum(shares, [])
    engine_logps = {s: torch.from_numpy(rollouts[s].logprobs).to(device) for s in all_shares}   # {s: [len]}
    with log.timed("old_log_prob"):
        old_logps = (token_logprobs(policy, rollouts, all_shares, token_budget, temperature)
                     if old_needs_forward else {})                                      # {s: [len]}
    with log.timed("ref"):
        ref_logps = (token_logprobs(reference, rollouts, all_shares, token_budget, temperature)
                     if kl_in_loss else {})                                             # {s: [len]}
    marked = marked_tokens(rollouts, adv, step) if loss_type in ("clip_cov", "kl_cov") else None

    # ------------------------------------------------------------ 5 update
    with log.timed("update_actor"):
        for group in optimizer.param_groups:
            group["lr"] = log.metrics["learning_rate"] = learning_rate_at(step)
        entropy_weight = entropy_coef * decay(entropy_decay, step / max_steps)
        new_logps = {}                                          # {s: [len]}
        for u, (update, share) in enumerate(zip(updates, shares)):
            # The denominators count the whole update, on all ranks, so that the gradient is the same for any
            # number of ranks, any micro-batch size and any packing.
            weight = losses.sequence_weights(
                lengths, loss_aggregation, num_tokens=lengths[update].sum(), num_sequences=len(update),
                max_length=max_completion_length)                # [N]; token_mean: 1 / num_tokens
            # All ranks have the same number of micro-batches; one that runs out of work gets some with C = 0.
            for batch in micro_batches(policy, rollouts, share, token_budget):
                logp, entropy = policy(batch, temperature)                              # [C], [C]
                new_logps |= batch.split(logp.detach())
                engine_logp = batch.flat(engine_logps)                                  # [C]
                old_logp = (engine_logp if old_logprobs == "engine"
                            else batch.flat(old_logps) if old_needs_forward
                            else logp.detach())                                         # [C]
                token_loss, low, high = losses.LOSSES[loss_type](                       # [C] each
                    logp, old_logp, batch.spread(adv), mean=batch.mean, epsilon=epsilon,
                    epsilon_high=epsilon_high, dual_clip=dual_clip,
                    marked=None if marked is None else batch.flat(marked, torch.bool))
                correction = losses.correction_weights(
                    old_logp, engine_logp, engine_correction, mean=batch.mean, lengths=batch.spread(lengths),
                    low=correction_low, high=correction_high)                           # [C]
                kl = (losses.kl_penalty(logp, batch.flat(ref_logps), kl_estimator,
                                        engine_logp if max_staleness else old_logp)
                      if kl_in_loss else torch.zeros_like(logp))                        # [C]
                token_loss = correction * token_loss + kl_coef * kl     # not corrected: the KL, as in TRL
                if entropy_coef > 0:
                    token_loss = token_loss - entropy_weight * entropy
                loss = (batch.spread(weight) * token_loss).sum()
                (loss * world_size).backward()                  # FSDP averages over ranks: undo it
                log.sum("loss", loss / updates_per_step)
                # These means leave out the rollouts that are not computed.
                log.mean("entropy", entropy)
                log.mean("kl", kl)                              # kl_in=reward: section 3's figure stands
                log.mean("clip_ratio/low_mean", low)
                log.mean("clip_ratio/high_mean", high)
                log.mean("clip_ratio/region_mean", low | high)
                log.mean("sampling/correction_mean", correction)
            if u == 0:
                # sampling/... compare the policy with the one that sampled. Only where both are the same has
                # their difference a limit; in flight nobody knows by which weights a prompt was read.
                bound = math.inf if in_flight or log.metrics["async/staleness/max"] else gap_bound
                trainer_logps = old_logps if old_needs_forward else new_logps
                log.metrics |= rollout.compare_logprobs(rollouts, trainer_logps, bound, tokenizer)
            norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), grad_clip or math.inf).full_tensor()
            if run.may_step("actor", norm.item()):              # a gradient with NaN is skipped
                optimizer.step()
            optimizer.zero_grad()

    # ------------------------------------------------------------ 6 weight sync
    with log.timed("sync"):
        bridge.publish(step + 1, full_weights(policy, compute_dtype, bridge.weight_names))

    # ------------------------------------------------------------ 7 log
    log.metrics["perf/trainers_busy"] = bridge.busy()
    run.end_step(rollouts)

# ---------------------------------------------------------------- teardown
run.end()
