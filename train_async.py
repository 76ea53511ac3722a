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
   soon as they come. Such a run does not repeat, and keeps nothing for a resume.
4. The loss's ratio is still to the trainer's own logprobs at the start of the step. The policy that sampled
   is further from these, and engine_correction weights by that distance (auto).
5. With kl_in=reward or advantage the KL is that of the trained policy. k3_is weights by the ratio to the one
   that sampled.
6. Engine and trainer are compared where both have the same weights: at evaluations, and in steps that are
   sampled with the newest version. vLLM does not sleep, and takes 0.9 of its GPU's memory.
"""
import math
import os
import random
import time
import zlib

from runtime import distributed         # before torch: it sets environment variables that torch reads
import torch

import data
import losses
import rewards
import rollout
from configurator import configure, input_errors
from episodes import Player, Table
from model import (deal_to_ranks, kl_to_reference, load_policy, load_reference, micro_batches, offload,
                   open_folders, token_logprobs)
from placement import Bridge, kept_ahead, staleness
from runtime.check_settings import check_run
from runtime.run import Run
from weights import compare_logprobs
# ------------------------------------------------------------------------------------------------------------
# what everybody sets first
model = "tiny"                  # a folder, a hub id, or tiny: the small model that comes with the repository
task = "algebra"                # algebra, compose, guess, arithmetic, gsm8k, or file for your own rows
train_file = ""                 # the JSONL or parquet file with the rows of task=file
eval_file = ""                  # a file of held-out rows; if empty, an eighth of train_file is held out
reward = ""                     # file.py:function,... or math_verify or none; if empty, the task's own
engine = "auto"                 # vllm, hf (plain PyTorch), or auto, which is vllm where it is installed
prompts_per_step = 32           # of all ranks together
num_generations = 8             # completions per prompt (G)
max_prompt_length = 64          # in tokens; longer prompts are left out
max_completion_length = 64      # in tokens; longer completions are cut off
learning_rate = 1e-4            # the peak; a model of 1 B parameters wants about 1e-6
max_steps = 60                  # each samples completions and makes updates_per_step updates
token_budget = 8192             # tokens per micro-batch: memory grows with it, results do not depend on it
seed = 0                        # of generated problems, order of prompts, sampling, split into updates
out_dir = ""                    # the run's folder; if empty, that of the resumed checkpoint, or a new one
resume = ""                     # a checkpoint, or auto for the newest one in out_dir if there is one
from config.shared import *     # all other settings used below, such as dtype and eval_interval: see --help
# placement: docs/placement.md
rollout_ranks = 1               # the last ranks, which are engines; the others are trainers
max_staleness = 1               # steps that the trained policy is ahead of the one that sampled
in_flight = False               # new weights enter in the middle of completions; such a run does not repeat
vllm_gpu_memory_utilization = 0.9  # fraction of the GPU's memory that vLLM may take, where it runs alone
# algorithm
temperature = 1.0               # engine and trainer divide their logits by it
advantage = "grpo"              # grpo, dr_grpo (no std), grpo_batch, grpo_process, gdpo, rloo,
                                # reinforce++, reinforce++_baseline, none; see losses.ADVANTAGES
kl_coef = 0.0                   # weight of the KL to the reference model; 0 loads no such model
kl_in = "loss"                  # "loss" adds the KL to the loss, "reward" subtracts it from each score, and
                                # "advantage" from each token's advantage (on-policy distillation)
kl_estimator = "k3"             # with kl_in=loss k2, k3, k3+ or k3_is, otherwise k1; see losses.kl_penalty
reference_model = ""            # a folder or hub id; if empty, the initial model
updates_per_step = 1            # optimizer updates per step; the completions are split evenly among them
old_logprobs = "trainer"        # trainer or engine: whose logprobs are pi_old in the ratio
loss_type = "clip"              # clip (PPO), gspo, gmpo, cispo, sapo, gpg; see losses.LOSSES
epsilon = 0.2                   # the lower clip bound of the ratio is 1 - epsilon
epsilon_high = 0.2              # the upper clip bound is 1 + epsilon_high; DAPO takes 0.28
dual_clip = 0.0                 # where the advantage is negative, clip lets the ratio grow; this is an upper
                                # bound there, for example 3; 0 sets none
skip_zero_advantage = False     # leave out rollouts whose advantage is 0: faster, with the same gradient as
                                # long as the loss has neither a KL nor an entropy bonus
loss_aggregation = "token_mean" # token_mean (DAPO), sequence_mean (GRPO), constant_length (Dr. GRPO),
                                # sequence_sum (RLOO); see losses.sequence_weights
engine_correction = "auto"      # none, or weights by the ratio of trainer to engine: token_truncate (TIS),
                                # token_mask, sequence_truncate, sequence_mask, geometric_mask; auto: none if
                                # max_staleness=0 or old_logprobs=engine, otherwise token_truncate
correction_low = 0.5            # a mask gives weight 0 to a ratio below this
correction_high = 2.0           # a mask gives weight 0 to a ratio above this; truncate lowers it to this
entropy_coef = 0.0              # weight of the entropy bonus
# optimizer
warmup_steps = 5                # the learning rate rises linearly, from learning_rate / warmup_steps
lr_decay = "linear"             # after that: constant, or a linear or cosine fall to 0 at max_steps
grad_clip = 1.0                 # largest norm of the gradient; 0 does not clip it
# ------------------------------------------------------------------------------------------------------------
settings = configure(globals(), choices=losses.CHOICES)     # overrides by config files and --key=value
if engine_correction == "auto":
    settings.engine_correction = engine_correction = (
        "token_truncate" if max_staleness and old_logprobs == "trainer" else "none")
# ---------------------------------------------------------------- set-up of both roles
check_run(settings, trainers=int(os.environ.get("WORLD_SIZE", 1)) - rollout_ranks)
with input_errors():
    bridge = Bridge(settings)                                   # this rank's role, and the way to the other
# Rank and world size are those of the role.
rank, world_size, device, mesh, sequence_group = distributed.set_up(
    timeout, sequence_parallel_size, shard_ranks, bridge.join)
G = num_generations                                             # completions per prompt
longest = max_prompt_length + max_completion_length             # tokens in a row
eval_steps = {*range(0, max_steps, eval_interval or max_steps), max_steps}   # which begin with one
# The run stops if the mean |trainer - engine| of logprobs exceeds gap_bound.
compute_dtype, gap_bound = distributed.precision(dtype, logprob_gap, device)
with input_errors():                                            # a ValueError becomes a one-line message
    folders = open_folders(settings, longest)                   # of the models; no weights are read yet
    tokenizer, eos_ids = folders.tokenizer, folders.eos_ids
    part_weights = rewards.part_weights(reward_weights)         # {name: weight} of the parts of the reward
    player = Player(settings, tokenizer, eos_ids)               # of single answers, or with an environment
    # Training prompts to draw from, a list of held-out prompts, and a sentence about both.
    train_set, eval_set, data_note = data.load_prompts(tokenizer, settings, bridge.engines, player.tools)


# ---------------------------------------------------------------- the engines
def sample_for_trainers(version, position, kept):
    """Do an engine's work until the run is over: sample, score, send, and take the next weights.

    version: that of the weights which the engine has, and the step to begin with, whose prompts are drawn
    from position on. kept: steps that the trainers have rollouts for.
    """
    B = prompts_per_step // bridge.engines                      # prompts per step and engine
    own = range(bridge.engine * B, (bridge.engine + 1) * B)     # the places of this engine's prompts
    own_eval = range(bridge.engine, len(eval_set), bridge.engines)
    table, begun, number = Table(player, rollout_engine), {}, version

    def begin(kind, number, prompts, places, n, name):
        # n adjacent completions per prompt. Their seeds do not depend on the number of engines.
        sampling = max_completion_length, temperature, 1.0, 0
        seeds = {i: zlib.crc32(f"{seed} {name} {i}".encode()) for i in places}
        table.add((kind, number), [(prompts[i], seeds[i] + j, sampling) for i in places for j in range(n)])
        begun[kind, number] = time.perf_counter(), prompts, [i for i in places for _ in range(n)]

    def advance():
        # Takes one step of the engine, then scores and sends what is complete.
        for (kind, number), rollouts in table.step().items():
            ended, (began, prompts, places) = time.perf_counter(), begun.pop((kind, number))
            scorer(rollouts)
            times = {"timing_s/gen": ended - began, "timing_s/reward": time.perf_counter() - ended}
            for r, i in zip(rollouts, places):
                # The trainers have the rows. A prompt differs from its row's if `reset` has added to it.
                r.row = i, {} if r.row is prompts[i].row else {"prompt": r.row["prompt"]}
            bridge.send(kind, number, rollouts, times)

    if lora_rank and version:                                   # the engine was loaded with the base model
        rollout_engine.switch(version)
    while True:
        if version in eval_steps:
            begin("eval", version, eval_set, own_eval, eval_samples, "eval")
            while ("eval", version) in begun:
                advance()
        if version == max_steps:
            bridge.wait_for_the_end()
        while not (in_flight and bridge.newest > version):
            # The schedule says which steps these weights may sample for. keep_ahead relies on it.
            while number <= version + max_staleness and number < max_steps:
                picked, position = train_set.draw(position, prompts_per_step, seed)
                if number not in kept:
                    begin("step", number, picked, own, G, number)
                number += 1
            if not begun:
                break
            advance()
        version += 1
        while in_flight and version not in eval_steps and bridge.newest > version:
            version += 1                                        # an engine that is late takes the newest
        rollout_engine.switch(version)                          # waits for these weights


if not bridge.trains:
    start, version, position, kept = bridge.begin()
    with input_errors():
        scorer = rewards.Scorer(settings, device, compute_dtype, player, tokenizer)
        # With a training prompt and a held-out one, a broken environment or reward shows now.
        scorer.check_with(train_set.draw(0, 1, seed)[0] + eval_set[:1])
        rollout_engine = rollout.engine_class(engine)(
            start, compute_dtype, longest, eos_ids, vllm_gpu_memory_utilization, vllm_tensor_parallel_size,
            float32_head, apart=True)
    rollout_engine.version, rollout_engine.incoming = version, bridge.weights
    bridge.send("ready", 0, [], {})
    rollout_engine.serve([], lambda _: sample_for_trainers(version, position, kept))    # until the run ends

# ---------------------------------------------------------------- the trainers
player.close()                                                  # only the engines play
kl_in_loss = kl_coef > 0 and kl_in == "loss"
run = Run(settings, __file__, ahead={})
with input_errors():
    run.check_data(folders.policy, train_set, eval_set)         # refuses other prompts than the resumed run's
    # With lora_rank the weights are those of the initial model, also in a resumed run. run.adapter has the
    # rank and the checkpoint of the adapters that come on top.
    start = run.resumed if run.resumed and not lora_rank else folders.policy
    ahead = kept_ahead(run, settings)                           # {step: (rollouts, figures)}
    bridge.tell((start, run.first_step, run.state["position"], [*ahead]))
    policy = load_policy(start, mesh, compute_dtype, gradient_checkpointing, float32_head, sequence_group,
                         run.adapter)
    reference = load_reference(folders.reference, policy, mesh, compute_dtype) if kl_coef > 0 else None
optimizer = torch.optim.AdamW(policy.parameters(), learning_rate, (beta1, beta2),
                              weight_decay=weight_decay, fused=True)
if offload_optimizer:
    offload(optimizer, device)                                  # to host memory, except while it steps
networks = {"": (policy, optimizer)}                            # "": a checkpoint's own folder
log = run.begin(networks, bridge, data_note, updates=f"{updates_per_step} optimizer step(s)")
log.say(f"Engines sample with weights that are at most {max_staleness} steps older"
        + (", and in flight: the run does not repeat bit for bit" if in_flight else ""))
bridge.take("ready", 0)                                         # engines that are being made take no weights
if lora_rank and run.resumed:
    bridge.publish(run.first_step, policy.full_weights(compute_dtype, bridge.naming))


def with_rows(rollouts, prompts):
    """Give rollouts of these prompts the rows that sample_for_trainers did not send."""
    for r in rollouts:
        place, added = r.row
        r.row = prompts[place].row | added
    return rollouts


def keep_ahead(step):
    """Put what was sampled for this step and later ones into the checkpoint, so that a resume has it."""
    # Where the run begins nothing is new, and in flight nobody knows how far the engines are.
    if step > run.first_step and not in_flight:
        for later in range(step, min(step + max_staleness, max_steps)):
            ahead[later] = ahead.get(later) or bridge.take("step", later)
    run.state["ahead"] = {str(later): figures for later, (_, figures) in ahead.items()}
    run.arrays = rollout.as_arrays([r for rollouts, _ in ahead.values() for r in rollouts])


def evaluate(step):
    """Return mean@k, pass@k and maj@k on held-out prompts, sampled as in training, with the same seeds."""
    rollouts = with_rows(bridge.take("eval", step)[0], eval_set)
    player.check_errors(rollouts[rank::world_size])
    # Stops the run if the engines do not have the policy's weights.
    (few,), _ = deal_to_ranks(rollouts, [range(min(32 * world_size, len(rollouts)))])
    logps = token_logprobs(policy, rollouts, few, token_budget, temperature)
    compare_logprobs(rollouts, logps, gap_bound, tokenizer)
    return rewards.evaluation(rollouts, eval_samples)


# ---------------------------------------------------------------- the loop
# Shapes and names are those of train_grpo.py: N rollouts in a step, C sampled tokens in a micro-batch.
for step in range(run.first_step, max_steps + 1):               # the last round only evaluates and saves
    log.start(step)

    # ------------------------------------------------------------ 0 evaluate, save, stop
    stopping = run.stopping(bridge.signalled())                 # after Ctrl-C or SIGTERM
    if step == max_steps or (step in eval_steps and not stopping):
        with log.timed("eval"):
            log.evaluation(evaluate(step))
    if step == max_steps or step % (save_interval or max_steps) == 0 or stopping:
        with log.timed("wait_for_rollouts"):
            keep_ahead(step)
        run.save(networks, tokenizer)                           # writes nothing before the first step
    if step == max_steps or stopping:
        break

    # ------------------------------------------------------------ 1 rollout, 2 reward: by the engines
    with log.timed("wait_for_rollouts"):
        rollouts, figures = ahead.pop(step, None) or bridge.take("step", step)          # from all engines
    picked, run.state["position"] = train_set.draw(run.state["position"], prompts_per_step, seed)
    N = len(with_rows(rollouts, picked))                        # on every rank
    player.check_errors(rollouts[rank::world_size])
    log.metrics |= figures
    log.metrics["async/staleness/mean"], log.metrics["async/staleness/max"] = staleness(rollouts, step)

    # ------------------------------------------------------------ 3 advantage
    scores = torch.tensor([r.score for r in rollouts], device=device)                   # [N], NaN: no score
    lengths = torch.tensor([len(r.logprobs) for r in rollouts], device=device)          # [N], sampled tokens
    stds = losses.group_std(scores, G)                                                  # [N / G]
    log.metrics |= {"reward_std": stds.mean().item(),
                    "frac_reward_zero_std": (stds == 0).double().mean().item()}
    if kl_coef > 0 and kl_in != "loss":
        kls = kl_to_reference(reference, rollouts, token_budget, temperature,
                              policy if max_staleness else None)                        # {s: [len]}
        total_kl = torch.stack([kls[s].sum() for s in range(N)])                        # [N]
        log.metrics["kl"] = (total_kl.sum() / lengths.sum()).item()
        if kl_in == "reward":
            scores = scores - kl_coef * total_kl
    log.metrics["rewards/shaped/mean"] = scores.nanmean().nan_to_num().item()
    # One advantage per rollout, [N], or per token, {s: [len]}; 0 without a score. grpo needs scores and G.
    adv = losses.ADVANTAGES[advantage](scores, G, lengths=lengths, rewards=[r.rewards for r in rollouts],
                                       parts=[r.parts for r in rollouts], weights=part_weights)
    if kl_coef > 0 and kl_in == "advantage":
        adv = {s: adv[s] - kl_coef * kls[s] for s in range(N)}

    # ------------------------------------------------------------ 4 split; old and reference logprobs
    # The rollouts, in random order, are split into updates, and those of each update are dealt to the ranks.
    order = random.Random(f"{seed} {step}").sample(range(N), N)
    updates = [order[u::updates_per_step] for u in range(updates_per_step)]
    # A rollout whose advantage is 0 may be left out, but it counts in the denominator of the loss.
    computed = [[s for s in update if not skip_zero_advantage or adv[s].any()] for update in updates]
    shares, saved = deal_to_ranks(rollouts, computed)           # what this rank computes of each update
    log.metrics |= saved                                        # how many tokens shared prefixes save
    all_shares = sum(shares, [])
    engine_logps = {s: torch.from_numpy(rollouts[s].logprobs).to(device) for s in all_shares}   # {s: [len]}
    with log.timed("old_log_prob"):
        # Empty where the trainer's are wanted and there is one update: then section 5 takes its own logp.
        old_logps = (engine_logps if old_logprobs == "engine" else
                     token_logprobs(policy, rollouts, all_shares, token_budget, temperature)
                     if updates_per_step > 1 else {})                                   # {s: [len]}
    with log.timed("ref"):
        ref_logps = (token_logprobs(reference, rollouts, all_shares, token_budget, temperature)
                     if kl_in_loss else {})                                             # {s: [len]}

    # ------------------------------------------------------------ 5 update
    with log.timed("update_actor"):
        for group in optimizer.param_groups:
            group["lr"] = log.metrics["learning_rate"] = losses.schedule(
                learning_rate, step, max_steps, lr_decay, warmup_steps)
        new_logps = {}                                          # {s: [len]}
        for u, (update, share) in enumerate(zip(updates, shares)):
            # Normalised by the whole update, on all ranks, so that the gradient does not depend on the number
            # of ranks, the micro-batch size or the packing.
            weight = losses.sequence_weights(
                lengths, loss_aggregation, num_tokens=lengths[update].sum(), num_sequences=len(update),
                max_length=max_completion_length)                # [N]; token_mean: 1 / num_tokens
            # Forward and backward are collectives, so a rank with fewer micro-batches than another gets empty
            # ones, C = 0. Ranks of a sequence_group compute each other's; only the owner has C > 0 there.
            for batch in micro_batches(policy, rollouts, share, token_budget):
                logp, entropy = policy(batch, temperature)                              # [C], [C]
                new_logps |= batch.split(logp.detach())
                engine_logp = batch.flat(engine_logps)                                  # [C]
                old_logp = batch.flat(old_logps) if old_logps else logp.detach()        # [C]
                token_loss, clipped_low, clipped_high = losses.LOSSES[loss_type](       # [C] each
                    logp, old_logp, batch.spread(adv), mean=batch.mean, epsilon=epsilon,
                    epsilon_high=epsilon_high, dual_clip=dual_clip)
                correction = losses.correction_weights(
                    old_logp, engine_logp, engine_correction, mean=batch.mean, lengths=batch.spread(lengths),
                    low=correction_low, high=correction_high)                           # [C]
                kl = (losses.kl_penalty(logp, batch.flat(ref_logps), kl_estimator,
                                        engine_logp if max_staleness else old_logp)
                      if kl_in_loss else torch.zeros_like(logp))                        # [C]
                token_loss = correction * token_loss + kl_coef * kl     # as in TRL, no correction of the KL
                if entropy_coef > 0:
                    token_loss = token_loss - entropy_coef * entropy
                loss = (batch.spread(weight) * token_loss).sum()
                (loss * world_size).backward()                  # FSDP averages over ranks: undo it
                # Means are over all tokens that the step computes. If section 3 has logged a kl, it is kept.
                log.add(sums={"loss": loss / updates_per_step},
                        means={"entropy": entropy, "kl": kl, "sampling/correction_mean": correction,
                               "clip_ratio/low_mean": clipped_low, "clip_ratio/high_mean": clipped_high,
                               "clip_ratio/region_mean": clipped_low | clipped_high})
            if u == 0:
                # sampling/... compare the policy with the one that sampled. Their difference is limited only
                # where both are the same. In flight nobody knows which weights read the prompts.
                bound = math.inf if in_flight or log.metrics["async/staleness/max"] else gap_bound
                # Section 4 has computed the trainer's logprobs, or else the forward above has.
                trainer_logps = old_logps if old_logps and old_logprobs == "trainer" else new_logps
                log.metrics |= compare_logprobs(rollouts, trainer_logps, bound, tokenizer)
            norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), grad_clip or math.inf).full_tensor()
            if run.may_step("actor", norm.item()):              # logs it; False if it is infinite or NaN
                optimizer.step()
            optimizer.zero_grad()

    # ------------------------------------------------------------ 6 weight sync
    with log.timed("sync"):
        bridge.publish(step + 1, policy.full_weights(compute_dtype, bridge.naming))

    # ------------------------------------------------------------ 7 log
    run.end_step(rollouts, rewards.rollout_metrics(rollouts, bridge.engines),
                 rewards.sample_lines(rollouts, G, tokenizer))

# ---------------------------------------------------------------- teardown
run.end()
