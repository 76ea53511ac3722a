"""
DAPO (Yu et al. 2025, https://arxiv.org/abs/2503.14476), a whole run in one file: train_grpo.py with another
choice of what a step trains on. Read that file first; here `# DAPO` marks what differs.

    torchrun train_dapo.py
    torchrun train_dapo.py config/gpg.py

1. Dynamic sampling (3.2): prompts whose completions all have the same score teach nothing. They are left out,
   and further prompts are sampled until enough of them differ, max_num_gen_batches times at most.
2. The score falls linearly over the last overlong_buffer tokens before max_completion_length (3.4), or
   --mask_truncated=true leaves completions that were cut off out of the loss.
3. The upper clip bound is higher (3.1), and each token has the same weight (3.3).
4. updates_per_step is 4; the paper makes 16 updates per rollout.
A prompt that is left out is in no advantage's statistics, no loss and no denominator. A completion that is
masked still counts in the mean of its prompt. The logged reward and lengths are of all that was sampled. With
filter_groups=False, max_num_gen_batches=1, overlong_buffer=0 and the other defaults of train_grpo.py the
figures are those of train_grpo.py, bit for bit.
"""
import math
import random
import zlib

from runtime import distributed         # before torch: it sets environment variables that torch reads
import torch

import data
import losses
import rewards
import rollout
from configurator import configure, input_errors
from episodes import Player
from model import (deal_to_ranks, kl_to_reference, load_policy, load_reference, micro_batches, offload,
                   open_folders, token_logprobs)
from runtime.run import Run
from weights import compare_logprobs, full_weights
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
# what a step trains on; these five settings are DAPO's
filter_groups = True            # leave out prompts whose completions all have the same score
max_num_gen_batches = 10        # rollouts per step, at most, until filter_groups has enough prompts
overlong_buffer = 12            # tokens before max_completion_length over which the score falls; 0 is none
overlong_penalty = 1.0          # by how much the score has fallen at the end of the buffer
mask_truncated = False          # leave completions that were cut off out of the loss and its denominator
# algorithm
temperature = 1.0               # engine and trainer divide their logits by it
advantage = "grpo"              # grpo, dr_grpo (no std), grpo_batch, grpo_process, gdpo, rloo,
                                # reinforce++, reinforce++_baseline, none; see losses.ADVANTAGES
kl_coef = 0.0                   # weight of the KL to the reference model; 0 loads no such model
kl_in = "loss"                  # "loss" adds the KL to the loss, "reward" subtracts it from each score, and
                                # "advantage" from each token's advantage (on-policy distillation)
kl_estimator = "k3"             # with kl_in=loss k2, k3, k3+ or k3_is, otherwise k1; see losses.kl_penalty
reference_model = ""            # a folder or hub id; if empty, the initial model
updates_per_step = 4            # DAPO: updates per step; the completions are split evenly among them
old_logprobs = "trainer"        # trainer or engine: whose logprobs are pi_old in the ratio
loss_type = "clip"              # clip (PPO), gspo, gmpo, cispo, sapo, gpg; see losses.LOSSES
epsilon = 0.2                   # the lower clip bound of the ratio is 1 - epsilon
epsilon_high = 0.28             # DAPO: the upper clip bound is 1 + epsilon_high
dual_clip = 0.0                 # where the advantage is negative, clip lets the ratio grow; this is an upper
                                # bound there, for example 3; 0 sets none
skip_zero_advantage = False     # leave out rollouts whose advantage is 0: faster, with the same gradient as
                                # long as the loss has neither a KL nor an entropy bonus
loss_aggregation = "token_mean" # token_mean (DAPO), sequence_mean (GRPO), constant_length (Dr. GRPO),
                                # sequence_sum (RLOO); see losses.sequence_weights
engine_correction = "none"      # the trainer's probabilities differ a little from the engine's; this weights
                                # tokens by their ratio or leaves tokens out: token_truncate (TIS),
                                # token_mask, sequence_truncate, sequence_mask, geometric_mask; or none; see
                                # losses.correction_weights
correction_low = 0.5            # a mask gives weight 0 to a ratio below this
correction_high = 2.0           # a mask gives weight 0 to a ratio above this; truncate lowers it to this
entropy_coef = 0.0              # weight of the entropy bonus
# optimizer
warmup_steps = 5                # the learning rate rises linearly, from learning_rate / warmup_steps
lr_decay = "linear"             # after that: constant, or a linear or cosine fall to 0 at max_steps
grad_clip = 1.0                 # largest norm of the gradient; 0 does not clip it
# ------------------------------------------------------------------------------------------------------------
settings = configure(globals(), choices=losses.CHOICES)     # overrides by config files and --key=value

# ---------------------------------------------------------------- set-up: processes, data, models, engine
# One process per device. FSDP2 shards over the mesh. sequence_group: with sequence_parallel_size above 1, the
# ranks that compute each micro-batch together.
rank, world_size, device, mesh, sequence_group = distributed.set_up(
    timeout, sequence_parallel_size, shard_ranks)
# Run checks the settings. run.resumed is a checkpoint or None. run.state is saved with each checkpoint; its
# "position" is the place in the endless sequence of prompts.
run = Run(settings, __file__)
B, G = prompts_per_step // world_size, num_generations          # prompts per rank, completions per prompt
longest = max_prompt_length + max_completion_length             # in tokens; the engine takes nothing longer
# The run stops if the mean |trainer - engine| of logprobs exceeds gap_bound.
compute_dtype, gap_bound = distributed.precision(dtype, logprob_gap, device)
kl_in_loss = kl_coef > 0 and kl_in == "loss"
with input_errors():                                            # a ValueError becomes a one-line message
    folders = open_folders(settings, longest)                   # of the models; no weights are read yet
    tokenizer, eos_ids = folders.tokenizer, folders.eos_ids
    engine_class = rollout.engine_class(engine)
    player = Player(settings, tokenizer, eos_ids)               # for episodes with an environment or tools
    # Training prompts to draw from, a list of held-out prompts, and a sentence about both.
    train_set, eval_set, data_note = data.load_prompts(tokenizer, settings, world_size, player.tools)
    scorer = rewards.Scorer(settings, device, compute_dtype, player, tokenizer)
    run.check_data(folders.policy, train_set, eval_set)         # refuses other prompts than the resumed run's
    # With a training prompt and a held-out one, a broken environment or reward shows now.
    scorer.check_with(train_set.draw(0, 1, seed)[0] + eval_set[:1])

    # With lora_rank the weights are those of the initial model, also in a resumed run. run.adapter has rank,
    # alpha and checkpoint of the adapters that come on top.
    start = run.resumed if run.resumed and not lora_rank else folders.policy
    policy = load_policy(start, mesh, compute_dtype, gradient_checkpointing, float32_head, sequence_group,
                         run.adapter)
    reference = load_reference(folders.reference, policy, mesh, compute_dtype) if kl_coef > 0 else None
    rollout_engine = engine_class(start, compute_dtype, longest, eos_ids, vllm_gpu_memory_utilization,
                                  vllm_tensor_parallel_size, float32_head)
optimizer = torch.optim.AdamW(policy.parameters(), learning_rate, (beta1, beta2),
                              weight_decay=weight_decay, fused=True)
if offload_optimizer:
    offload(optimizer, device)                                  # to host memory, except while it steps
networks = {"": (policy, optimizer)}        # what is saved, by the checkpoint's subfolder; "" is its root
# Opens the log, prints what the run is, and loads the optimizer of a resumed run.
log = run.begin(networks, rollout_engine, data_note, updates=f"{updates_per_step} optimizer step(s)")
if lora_rank and run.resumed:                                   # the engine was loaded with the base model
    rollout_engine.load_weights(full_weights(policy, compute_dtype, rollout_engine.naming), run.first_step)


def sample(prompts, n, names, temperature=temperature, length=max_completion_length):
    """Return n rollouts per prompt, next to each other. names: a text of its own for each prompt.
    Its rollouts have the seeds h, h + 1, ..., where h is a hash of the text, the same on any rank."""
    seeds = [zlib.crc32(f"{seed} {name}".encode()) for name in names]
    if player.make:                                             # there is an environment, or tools
        return player.play(rollout_engine, prompts, n, seeds, length, temperature)
    return rollout.single_answers(rollout_engine, tokenizer, prompts, n, seeds, length, temperature)


def evaluate(prompts, name="eval", samples=eval_samples, temperature=temperature,
             length=max_completion_length):
    """Sample completions of these prompts, with the same seeds every time, and return {name/mean@k: ...} with
    pass@k and maj@k. The keywords are for further evaluations (docs/data_and_rewards.md)."""
    own = range(rank, len(prompts), world_size)
    rollouts = sample([prompts[i] for i in own], samples, [f"{name} {i}" for i in own], temperature, length)
    if temperature > 0:
        # This stops the run if engine and policy differ; a few rollouts show it. step: that of the loop.
        logps = token_logprobs(policy, rollouts, range(min(32, len(rollouts))), token_budget, temperature)
        compare_logprobs(rollouts, logps, gap_bound, tokenizer, step)
    scorer(rollouts)
    return rewards.evaluation(distributed.gathered(rollouts), samples, name)


# ---------------------------------------------------------------- the loop
# N rollouts per step, on all ranks; s is an index into them. A rollout r has r.ids (prompt and completion),
# r.logprobs (the engine's, of the sampled tokens), r.row (of the data set) and r.score. r.parts has the named
# parts of the score, and r.rewards how it is divided over the sampled tokens.
# log.metrics takes figures that all ranks agree on, log.add those to be summed or averaged over the ranks.
# A micro-batch is one packed row of tokens, in which completions share the tokens of their prompt
# (packing.py). C of its tokens were sampled. For two rollouts, 0 and 1, with two sampled tokens each:
#     batch.flat({0: [a, b], 1: [c, d]})   -> [a, b, c, d]              {s: [len]} to [C]
#     batch.split([a, b, c, d])            -> {0: [a, b], 1: [c, d]}    [C] to {s: [len]}
#     batch.spread([x, y])                 -> [x, x, y, y]              [N] to [C]; takes {s: [len]} as well
#     batch.mean([1, 3, 5, 9])             -> [2, 2, 7, 7]              [C] to [C]: the mean over its rollout
for step in range(run.first_step, max_steps + 1):               # the last round only evaluates and saves
    log.start(step)

    # ------------------------------------------------------------ 0 evaluate, save, stop
    stopping = run.stopping()                                   # after Ctrl-C or SIGTERM
    if step == max_steps or (step % (eval_interval or max_steps) == 0 and not stopping):
        with log.timed("eval"):
            log.evaluation(evaluate(eval_set))
    if step == max_steps or step % (save_interval or max_steps) == 0 or stopping:
        run.save(networks, tokenizer)                           # writes nothing before the first step
    if step == max_steps or stopping:
        break

    # ------------------------------------------------------------ 1 rollout, 2 reward
    # DAPO: rollouts of further prompts, until the completions of enough prompts differ in score.
    sampled = []                                                # by all ranks; the log describes all of it
    for gen_batch in range(max_num_gen_batches):
        with log.timed("gen"):
            picked, run.state["position"] = train_set.draw(run.state["position"], prompts_per_step, seed)
            own = range(rank * B, (rank + 1) * B)               # each rank samples for prompts of its own
            first = gen_batch * prompts_per_step
            own_rollouts = sample([picked[i] for i in own], G, [f"{step} {first + i}" for i in own])
        with log.timed("reward"):
            scorer(own_rollouts)                                # sets the score of each
        sampled += distributed.gathered(own_rollouts)           # from here on every rank has all of them
        stds = losses.group_std(torch.tensor([r.score for r in sampled]), G)            # [prompts so far]
        different = stds.nonzero()[:, 0].tolist()
        if len(different) >= prompts_per_step:
            break
    # The step has the first prompts that differ, and others where there are not enough of them.
    kept = sorted((different + (stds == 0).nonzero()[:, 0].tolist())[:prompts_per_step])
    rollouts = [sampled[p * G + g] for p in kept for g in range(G)]
    N = len(rollouts)

    # ------------------------------------------------------------ 3 advantage
    scores = torch.tensor([r.score for r in rollouts], device=device)                   # [N], NaN: no score
    lengths = torch.tensor([len(r.logprobs) for r in rollouts], device=device)          # [N], sampled tokens
    left_out = (stds[kept] == 0).repeat_interleave(G).to(device) & filter_groups        # [N]           DAPO
    if overlong_buffer:                                                                 # DAPO
        behind = torch.tensor([len(r.ids) - len(r.prompt_ids) for r in rollouts], device=device)
        scores = scores + overlong_penalty * losses.overlong_penalty(behind, max_completion_length,
                                                                     overlong_buffer)
    log.metrics |= {"reward_std": stds.mean().item(),
                    "frac_reward_zero_std": (stds == 0).double().mean().item()}
    if kl_coef > 0 and kl_in != "loss":
        # For each token the engine's logprob minus the reference model's, {s: [len]}.
        kls = kl_to_reference(reference, rollouts, token_budget, temperature)
        total_kl = torch.stack([kls[s].sum() for s in range(N)])                        # [N]
        log.metrics["kl"] = (total_kl.sum() / lengths.sum()).item()
        if kl_in == "reward":
            scores = scores - kl_coef * total_kl
    scores = scores.masked_fill(left_out, math.nan)                                     # DAPO
    log.metrics["rewards/shaped/mean"] = scores.nanmean().nan_to_num().item()
    # One advantage per rollout, [N], or per token, {s: [len]}; 0 without a score. grpo needs scores and G.
    adv = losses.ADVANTAGES[advantage](scores, G, lengths=lengths, rewards=[r.rewards for r in rollouts],
                                       parts=[r.parts for r in rollouts], weights=scorer.weights)
    if kl_coef > 0 and kl_in == "advantage":
        adv = {s: adv[s] - kl_coef * kls[s] for s in range(N)}
    cut_off = torch.tensor([r.finish_reason == "length" for r in rollouts], device=device)          # DAPO
    counted = (~left_out & ~(cut_off & mask_truncated)).nonzero()[:, 0].tolist()        # DAPO: in the loss
    log.metrics |= {"train/num_gen_batches": gen_batch + 1, "train/frac_counted": len(counted) / N}

    # ------------------------------------------------------------ 4 split; old and reference logprobs
    # The rollouts, in random order, are split into updates, and those of each update are dealt to the ranks.
    order = random.Random(f"{seed} {step}").sample(counted, len(counted))       # DAPO: only these
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
            # num_tokens and num_sequences count the whole update, on all ranks, so the gradient depends on
            # neither the number of ranks nor the micro-batches.
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
                kl = (losses.kl_penalty(logp, batch.flat(ref_logps), kl_estimator, old_logp) if kl_in_loss
                      else torch.zeros_like(logp))                                      # [C]
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
                # Before the first update engine and trainer have the same weights: this stops the run if they
                # differ. Section 4 has computed the trainer's logprobs, or else the forward above has.
                # may_be_stale matters only if you change the loop to train on rollouts of earlier steps.
                trainer_logps = old_logps if old_logps and old_logprobs == "trainer" else new_logps
                log.metrics |= compare_logprobs(
                    rollouts, trainer_logps, gap_bound, tokenizer, step,
                    may_be_stale=old_logprobs == "engine" or engine_correction != "none")
            norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), grad_clip or math.inf).full_tensor()
            if run.may_step("actor", norm.item()) and update:   # DAPO: nor where nothing is counted
                optimizer.step()
            optimizer.zero_grad()

    # ------------------------------------------------------------ 6 weight sync
    with log.timed("sync"):                                     # one whole tensor at a time
        rollout_engine.load_weights(full_weights(policy, compute_dtype, rollout_engine.naming), step + 1)

    # ------------------------------------------------------------ 7 log
    run.end_step(sampled, rewards.rollout_metrics(sampled, world_size),
                 rewards.sample_lines(sampled, G, tokenizer))

# ---------------------------------------------------------------- teardown
run.end()
