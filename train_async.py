"""
GRPO with trainers and engines on devices of their own: while the trainers update, the engines sample.

    torchrun --nproc_per_node=2 train_async.py                              # one trainer, one engine
    torchrun --nproc_per_node=8 train_async.py config/gsm8k.py --rollout_ranks=4 --in_flight=true

This is train_grpo.py, with these differences:
1. The last rollout_ranks ranks are engines: they hold no trained policy, sample, score, and send what they
   have to the trainers, which are the other ranks (placement.py). What an engine does is sample_for_trainers.
2. Version v of the weights is the policy after v steps. The completions of step t are sampled with version
   t - max_staleness. With 0 engines and trainers take turns, and the figures are those of train_grpo.py; with
   1 they are sampled while the step before is trained. Each value gives a run that repeats bit for bit on a
   CPU, also after a resume, because a checkpoint holds what was sampled ahead.
3. With in_flight=True the engines take new weights at once, in the middle of their completions, and begin
   those of step t as soon as they have version t - max_staleness. Such a run does not repeat.
4. The loss's ratio is to the trainer's own logprobs, before the first update of the step. For the distance
   between these and the older policy that sampled there is engine_correction.
5. Engine and trainer are compared, and the run stopped if they differ, where both have the same version: at
   each evaluation, and in steps whose completions are of that version, such as the first.
"""
import math
import os
import random
import time
import zlib

import torch

import data
import losses
import ranks
import rewards
import rollout
import tiny
from checks import check_grpo, check_placement, check_run
from configurator import configure, input_errors
from episodes import Player, Table
from loading import check_trainable, load_policy, load_tokenizer, precision
from models import offload, token_logprobs
from packing import deal, micro_batches
from placement import Bridge, Sampled, loaded, note, staleness
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
stale = "wait"                  # engines wait where what they sample would be older than max_staleness; drop,
                                # with in_flight: they never wait, and trainers drop what is older
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
                                # max_staleness is 0, otherwise token_truncate
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
    auto = "token_truncate" if max_staleness and old_logprobs == "trainer" else "none"
    engine_correction = settings["engine_correction"] = auto
# ---------------------------------------------------------------- set-up of both roles
check_placement(settings, int(os.environ.get("WORLD_SIZE", 1)))
check_run(settings, rollout_ranks)
check_grpo(settings)
bridge = Bridge(settings)                                       # this rank's role, and the way to the other
rank, world_size, device, mesh = ranks.set_up(timeout, bridge.join)     # all of them the role's own
G, N = num_generations, prompts_per_step * num_generations      # completions per prompt, and per step
compute_dtype, gap_bound = precision(dtype, logprob_gap, device)
with input_errors():
    base = tiny.ensure(model)
    check_trainable(base, length=max_prompt_length + max_completion_length)
    tokenizer = load_tokenizer(base)
    eos_ids = rollout.end_tokens(base, tokenizer)
    player = Player(settings, tokenizer, eos_ids)               # of single answers, or with an environment
    train_set, eval_set, data_note = data.load_prompts(tokenizer, settings, bridge.engines, player.tools)


evaluated = {*range(0, max_steps, eval_interval), max_steps}    # steps that begin with an evaluation


# ---------------------------------------------------------------- the engines
def sample_for_trainers(_):
    """What an engine does until the run is over: it samples, scores, sends, and takes the next weights."""
    version, number, position = opening["version"], opening["number"], opening["position"]
    B = prompts_per_step // bridge.engines                      # prompts of a step that are this engine's
    own = range(bridge.engine * B, (bridge.engine + 1) * B)
    own_eval = range(bridge.engine, len(eval_set), bridge.engines)
    table, begun = Table(player, rollout_engine), {}            # {name: when it began, position}

    def begin(name, prompts, n, names, temperature=temperature):
        # n rollouts per prompt, adjacent. A prompt's name makes its seed, the same for any number of engines.
        seeds = [zlib.crc32(f"{seed} {one}".encode()) for one in names]
        jobs = [(prompt, first + j) for prompt, first in zip(prompts, seeds) for j in range(n)]
        table.add(name, jobs, (temperature, 1.0, 0))
        begun[name] = time.perf_counter(), position

    def go_on():
        # A step of the engine. What is complete after it is scored and sent.
        for name, rollouts in table.step().items():
            (began, behind), sampled = begun.pop(name), time.perf_counter()
            timeouts = scorer(rollouts)
            figures = {"timing_s/gen": sampled - began, "timing_s/reward": time.perf_counter() - sampled}
            bridge.send(name, Sampled(rollouts, timeouts, behind, figures))

    while True:
        if version in evaluated:
            begin(f"eval {version}", [eval_set[i] for i in own_eval], eval_samples,
                  [f"eval {i}" for i in own_eval])
            while f"eval {version}" in begun:
                go_on()
        while True:
            # The completions of step `number` may begin; or those of any, where what is stale is dropped.
            while (number <= min(version + max_staleness, max_steps - 1)
                   or stale == "drop" and len(table) < B * G):
                picked, position = train_set.draw(position, prompts_per_step, seed)
                own_prompts, names = [picked[i] for i in own], [f"{number} {i}" for i in own]
                begin(f"step {number}", own_prompts, G, names)
                if advantage == "remax":
                    begin(f"greedy {number}", own_prompts, 1, names, temperature=0)
                number += 1
            if not begun or in_flight and bridge.arrived(version + 1):
                break
            go_on()
        version += 1
        rollout_engine.switch(version)                          # waits for these weights


if not bridge.trains:
    opening = bridge.opening()
    with input_errors():
        scorer = rewards.Scorer(settings, device, compute_dtype, player.rewards_as)
        samples = train_set.draw(0, 1, seed)[0] + eval_set[:1]
        player.try_on(samples)
        scorer.try_on([prompt.row for prompt in samples])
        rollout_engine = rollout.engine_class(engine)(
            opening["start"], compute_dtype, max_prompt_length + max_completion_length, eos_ids,
            vllm_gpu_memory_utilization, vllm_tensor_parallel_size, float32_head, apart=True)
    rollout_engine.version, rollout_engine.incoming = opening["version"], bridge.weights
    rollout_engine.serve([], sample_for_trainers)               # does not return

# ---------------------------------------------------------------- the trainers
kl_in_loss = kl_coef > 0 and kl_in == "loss"
# These terms of the loss have a gradient even where the advantage is 0. If you add such a term in section 5,
# add its condition here, or rollouts with advantage 0 do not get it.
moves_without_advantage = kl_in_loss or entropy_coef > 0 or loss_type == "kl_cov"
# With one update per step the policy's own forward gives the old logprobs, because it has not changed since
# the step began. For several updates they have to be computed before the first one.
old_needs_forward = updates_per_step > 1 and old_logprobs == "trainer"
run = Run(settings, __file__, engines=bridge.engines, ahead=[])
with input_errors():
    run.check_data(train_set, eval_set)
    start = run.resumed or base
    # {name: Sampled} for the next steps, by the run before; with another max_staleness it has another age.
    same = run.state["settings"].get("max_staleness") == max_staleness
    ahead = loaded(run.state["ahead"], run.resumed) if same else {}
    bridge.tell({"start": start, "version": run.first_step,
                 "number": run.first_step + sum(name.startswith("step") for name in ahead),
                 "position": [run.state["position"], *(one.position for one in ahead.values())][-1]})
    policy = load_policy(start, mesh, compute_dtype, gradient_checkpointing, float32_head=float32_head)
    reference = (load_policy(base, mesh, compute_dtype, trained=False, float32_head=float32_head)
                 if kl_coef > 0 else None)
optimizer = torch.optim.AdamW(policy.parameters(), learning_rate, (beta1, beta2),
                              weight_decay=weight_decay, fused=True)
if offload_optimizer:
    offload(optimizer, device)                                  # to host memory, except while it steps
networks = {"": (policy, optimizer)}                            # "": a checkpoint's own folder
log = run.begin(networks, bridge, data_note, f"{updates_per_step} optimizer step(s)")
log.say(note(settings, bridge.engines, run.state["engines"]))
run.state["engines"], dropped = bridge.engines, 0


def decay(kind, progress):                                      # of the learning rate and the entropy bonus
    return {"constant": 1, "linear": 1 - progress, "cosine": (1 + math.cos(math.pi * progress)) / 2}[kind]


def learning_rate_at(step):
    if step < warmup_steps:
        return learning_rate * (step + 1) / warmup_steps
    return learning_rate * decay(lr_decay, (step - warmup_steps) / max(1, max_steps - warmup_steps))


def take(name):
    """What the engines have sampled under this name."""
    return ahead.pop(name) if name in ahead else bridge.take(name)


def keep_ahead(step):
    """Put what was sampled for this step and later ones into the run's state, so that a resume has it."""
    if step > run.first_step and not in_flight:
        for number in range(step, min(step + max_staleness, max_steps)):
            for name in [f"step {number}"] + [f"greedy {number}"] * (advantage == "remax"):
                ahead[name] = take(name)
    run.state["ahead"] = [[name, sampled.as_json()] for name, sampled in ahead.items()]


def evaluate(step):
    """mean@k, pass@k, maj@k on held-out prompts, sampled as in training, from the same seeds every time."""
    rollouts = take(f"eval {step}").rollouts
    # Stops the run if the engines do not have the policy's weights; a few rollouts are enough.
    share = deal(rollouts, range(min(32 * world_size, len(rollouts))), world_size)[rank]
    rollout.compare_logprobs(rollouts, token_logprobs(policy, rollouts, share, token_budget, temperature),
                             gap_bound, tokenizer)
    return rewards.evaluation(rollouts, eval_samples)


def kl_to_reference(rollouts):
    """For kl_in=reward: KL to the initial model, summed over the tokens of each rollout, [N]."""
    sums = torch.zeros(N, device=device)
    share = deal(rollouts, range(N), world_size)[rank]
    for s, ref_logp in token_logprobs(reference, rollouts, share, token_budget, temperature).items():
        # The engine's logprobs, because the trainer's are not computed yet.
        engine_logp = torch.from_numpy(rollouts[s].logprobs).to(device)
        sums[s] = losses.kl_penalty(engine_logp, ref_logp, kl_estimator).sum()
    return torch.tensor(ranks.total(sums), device=device)


def marked_tokens(rollouts, adv, step):
    """The tokens that clip_cov and kl_cov act on: a bool [len] for each rollout, the same on every rank."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {step}".encode()))
    marks = losses.covariance_marks([torch.from_numpy(r.logprobs) for r in rollouts], adv.cpu(), loss_type,
                                    cov_share, generator)
    return [mark.to(device) for mark in marks]


# ---------------------------------------------------------------- the loop
# Shapes: N rollouts in a step, on all ranks. C sampled tokens in a micro-batch, the EOS among them; prompts
# are not counted, and there is no padding. {s: [len]} has a tensor for the sampled tokens of each rollout s.
# batch.flat makes [C] of such a dict, batch.split makes the dict of [C], batch.spread gives each token its
# rollout's entry of [N], and batch.mean, for losses by sequence, each token its rollout's mean of [C].
for step in range(run.first_step, max_steps + 1):
    log.start(step)

    # ------------------------------------------------------------ 0 evaluate, save, stop
    stopping = run.stopping()                                   # after Ctrl-C or SIGTERM
    if step == max_steps or (step in evaluated and not stopping):
        with log.timed("eval"):
            log.evaluation(evaluate(step))
    if step == max_steps or step % save_interval == 0 or stopping:
        keep_ahead(step)
        run.save(networks, tokenizer)                           # not where the run has just begun
    if step == max_steps or stopping:
        break

    # ------------------------------------------------------------ 1 rollout, 2 reward: by the engines
    log.metrics["async/dropped"] = 0
    with log.timed("wait_for_rollouts"):
        sampled = take(f"step {step + dropped}")
        while stale == "drop" and staleness(sampled.rollouts, step)["async/staleness/max"] > max_staleness:
            dropped, log.metrics["async/dropped"] = dropped + 1, log.metrics["async/dropped"] + N
            sampled = take(f"step {step + dropped}")
        greedy = (torch.tensor([r.score for r in take(f"greedy {step + dropped}").rollouts], device=device)
                  if advantage == "remax" else None)
    rollouts, run.state["position"] = sampled.rollouts, sampled.position                # N, on every rank
    player.check_errors(rollouts)
    log.rollouts(rollouts, sampled.timeouts if rank == 0 else 0, bridge.engines)
    log.metrics |= sampled.figures | staleness(rollouts, step)
    run.keep_rollouts(rollouts, greedy)                         # in this step's checkpoint, if it has one

    # ------------------------------------------------------------ 3 advantage
    scores = torch.tensor([r.score for r in rollouts], device=device)                   # [N], NaN: no score
    lengths = torch.tensor([len(r.logprobs) for r in rollouts], device=device)          # [N], sampled tokens
    log.groups(losses.group_std(scores, G))
    if kl_coef > 0 and kl_in == "reward":
        total_kl = kl_to_reference(rollouts)                                            # [N]
        log.metrics["kl"] = (total_kl.sum() / lengths.sum()).item()
        scores = scores - kl_coef * total_kl
    # The mean of what advantages are made of.
    log.metrics["rewards/shaped/mean"] = scores.nanmean().nan_to_num().item()
    # [N], 0 where the score is NaN.
    adv = losses.ADVANTAGES[advantage](scores, G, lengths=lengths, greedy=greedy, pass_k=pass_k)

    # ------------------------------------------------------------ 4 shares; old and reference logprobs
    # The rollouts, in random order, are split into updates. This rank computes its share of each update.
    order = random.Random(f"{seed} {step}").sample(range(N), N)
    updates = [order[u::updates_per_step] for u in range(updates_per_step)]
    # A rollout with advantage 0 has no gradient. It counts in the denominators below, but nothing is computed
    # for it, which makes the default run 1.7 times as fast.
    computed = set(range(N) if moves_without_advantage else adv.nonzero()[:, 0].tolist())
    shares = [deal(rollouts, [s for s in update if s in computed], world_size)[rank] for update in updates]
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
                kl = (losses.kl_penalty(logp, batch.flat(ref_logps), kl_estimator, old_logp) if kl_in_loss
                      else torch.zeros_like(logp))                                      # [C]
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
                # sampling/... compare the policy of this step with the one that sampled. Where both are the
                # same, a mean difference over gap_bound stops the run.
                same = all(version == step for r in rollouts for _, version in r.versions)
                trainer_logps = old_logps if old_needs_forward else new_logps
                log.metrics |= rollout.compare_logprobs(rollouts, trainer_logps,
                                                        gap_bound if same else math.inf, tokenizer)
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
