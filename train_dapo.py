"""
DAPO (Yu et al. 2025, https://arxiv.org/abs/2503.14476), a whole run in one file: train_grpo.py with another
choice of what a step trains on. Read that file first; here `# DAPO` marks what differs.

    torchrun train_dapo.py
    torchrun train_dapo.py config/methods/gpg.py

1. Dynamic sampling (3.2): prompts whose completions all have the same score teach nothing. They are left out,
   and further prompts are sampled until enough of them differ, max_num_gen_batches times at most.
2. The score falls linearly over the last overlong_buffer tokens before max_completion_length (3.4), or
   --mask_truncated=true leaves completions that were cut off out of the loss.
3. The upper clip bound is higher (3.1), and each token has the same weight (3.3).
4. num_mini_batches is 4; the paper makes 16 updates per rollout.
A prompt that is left out is in no advantage's statistics, no loss and no denominator. A completion that is
masked still counts in the mean of its prompt. The logged reward and lengths are of all that was sampled. With
max_num_gen_batches=0, overlong_buffer=0 and the other defaults of train_grpo.py the figures are those of
train_grpo.py, bit for bit.
"""
import math
import random

from runtime import distributed         # before torch: it sets environment variables that torch reads
import torch

import data
import losses
import rewards
import rollout
from configurator import configure, input_errors
from model import (deal_to_ranks, gathered_logprobs, load_policy, load_reference, make_optimizer,
                   micro_batches, open_folders, set_rates, token_logprobs)
from runtime.run import Run
# ------------------------------------------------------------------------------------------------------------
# settings that everybody sets first
model = "tiny"                  # a folder, a hub id, or tiny: the small model that comes with the repository
task = "algebra"                # algebra, compose, guess, arithmetic, gsm8k, or file for your own rows;
                                # algebra:3 is harder, and suits a model of 1 B parameters
train_file = ""                 # rows of task=file: files, folders, patterns or hf://..., with commas between
eval_file = ""                  # held-out rows, in the same form; if empty, an eighth of train_file's prompts
reward = ""                     # file.py:function,... or math_verify; if empty, the task's own; "none" if a
                                # reward model or an environment alone scores (config/shared.py)
engine = "auto"                 # vllm, hf (plain PyTorch), auto (vllm if it is installed), or file.py:Engine
prompts_per_step = 32           # of all ranks together
num_generations = 8             # completions per prompt (G)
max_prompt_length = 64          # in tokens; longer prompts are left out
max_completion_length = 64      # in tokens; longer completions are cut off
learning_rate = 1e-4            # the peak; a model of 1 B parameters wants about 1e-6
max_steps = 60                  # each samples completions and makes num_mini_batches updates
token_budget = 8192             # tokens per micro-batch: memory grows with it, results do not depend on it
seed = 0                        # of generated problems, order of prompts, sampling, split into updates
out_dir = ""                    # the run's folder; if empty, that of the resumed checkpoint, or a new one
resume = ""                     # a checkpoint, or auto for the newest one in out_dir if there is one
# config/shared.py and --help explain the other settings that are used below: timeout=3600.0,
# sequence_parallel_size=1, shard_ranks=0, dtype="auto", gradient_checkpointing=False, torch_compile=False,
# warmup_steps=5, lr_decay="linear", grad_clip=1.0, eval_interval=10, eval_samples=4, save_interval=20.
from config.shared import *
# These three settings are DAPO's. They say what a step trains on.
max_num_gen_batches = 10        # rollouts per step, at most, until the scores of enough prompts differ;
                                # 0 samples once and leaves no prompt out
overlong_buffer = 12            # tokens before max_completion_length over which the score falls by 1; 0: none
mask_truncated = False          # leave completions that were cut off out of the loss and its denominator
# algorithm
temperature = 1.0               # engine and trainer divide their logits by it
advantage = "grpo"              # grpo, dr_grpo (no std), grpo_batch, rloo, reinforce++, reinforce++_baseline,
                                # turns (for a reward in each turn), none (0); see losses.ADVANTAGES
kl_coef = 0.0                   # weight of the KL to the reference model; 0 loads no such model
kl_estimator = "k3"             # k2, k3, k3+ or k3_is adds the KL to the loss; k1_reward subtracts it from
                                # each score, and k1_advantage from each token's advantage (on-policy
                                # distillation); k3+ has k3's value and k2's gradient; see losses.kl_penalty
reference_model = ""            # a folder or hub id; if empty, the initial model
num_mini_batches = 4            # DAPO: updates per step; the completions are split evenly among them
old_logprobs = "trainer"        # trainer or engine: whose logprobs are pi_old in the ratio
loss_type = "clip"              # clip (PPO), gspo, gmpo, cispo, sapo, gpg, dppo; see losses.LOSSES
epsilon = 0.2                   # the lower clip bound of the ratio is 1 - epsilon
epsilon_high = 0.28             # DAPO: the upper clip bound is 1 + epsilon_high
skip_zero_advantage = False     # leave out rollouts whose advantage is 0: faster, with the same gradient as
                                # long as the loss has neither a KL nor an entropy bonus
loss_aggregation = "token_mean" # token_mean (DAPO), sequence_mean (GRPO), constant_length (Dr. GRPO),
                                # sequence_sum (RLOO), prompt_mean; see losses.AGGREGATIONS
engine_correction = "none"      # multiplies token losses by p(trainer) / p(engine), capped or bounded:
                                # token_truncate (TIS), sequence_truncate, token_mask, sequence_mask,
                                # geometric_mask, or two, as token_truncate,sequence_mask; see
                                # losses.CORRECTIONS
correction_cap = 2.0            # a truncation lowers a larger ratio to this
correction_low = 0.5            # a mask gives weight 0 to a ratio below this
correction_high = 2.0           # a mask gives weight 0 to a ratio above this
entropy_coef = 0.0              # weight of the entropy bonus
# ------------------------------------------------------------------------------------------------------------
settings = configure(globals(), choices=losses.CHOICES)     # overrides by config files and --key=value

# ---------------------------------------------------------------- set-up: processes, data, models, engine
# torchrun starts a process for each device; rank is the number of this process. FSDP2 shards the weights over
# the mesh. The ranks of a sequence_group share each micro-batch: each computes a part of its tokens.
rank, world_size, device, mesh, sequence_group = distributed.set_up(
    timeout, sequence_parallel_size, shard_ranks)
# Run checks the settings and opens the run's folder, which gets a copy of this file. run.resumed is the
# checkpoint that the run resumes, or None. run.state is saved with each checkpoint: "position" counts the
# training rows drawn so far; "clock" is when the run began, which chat templates print as the date.
run = Run(settings, __file__)
B = prompts_per_step // world_size                              # prompts per rank
G = num_generations                                             # completions per prompt
longest = max_prompt_length + max_completion_length             # in tokens; the engine takes nothing longer
compute_dtype = distributed.compute_dtype(dtype)                # "auto": bfloat16 on a GPU, float32 elsewhere
with input_errors():                                            # an InputError becomes a one-line message
    # folders.policy and folders.reference are paths of models; eos_ids are the tokens that end a completion.
    folders = open_folders(settings, longest, run.resumed, run.state["clock"])
    tokenizer = folders.tokenizer
    # sample(prompts, G, names) returns G rollouts per prompt, whose seeds come from `seed` and the names.
    # With an environment, tools or an agent a rollout is an episode of several turns.
    sample = rollout.load_sampler(settings, tokenizer, folders.eos_ids)
    # train_set.draw(position, n, seed) returns n prompts and the next position. eval_set is a list of prompts
    # that are held out. data_note describes both for the console.
    train_set, eval_set, data_note = data.load_prompts(tokenizer, settings, sample.tools)
    scorer = rewards.load_scorer(settings, sample, device, compute_dtype)   # scorer(rollouts) scores them
    # The run ends here if it is resumed with other prompts, or if the reward fails for made-up completions.
    run.check_data(folders, train_set, eval_set, data_note)
    first_prompts, _ = train_set.draw(0, 1, seed)
    run.notes.append(scorer.check_rewards(first_prompts + eval_set[:1]))        # a text for the console

    policy = load_policy(folders.policy, mesh, compute_dtype, gradient_checkpointing, torch_compile,
                         sequence_group, run.adapter)           # run.adapter: LoRA's settings, or 0
    reference = None
    if kl_coef > 0:                                             # it may be the policy without its adapters
        reference = load_reference(folders.reference, policy, mesh, compute_dtype)
    rollout_engine = rollout.load_engine(settings, folders.policy, compute_dtype, longest, folders.eos_ids)
optimizer = make_optimizer(policy, learning_rate, settings)
# begin restores the optimizer of a resumed run. log collects the figures of a step, and writes them.
log = run.begin(policy, optimizer, rollout_engine)
# If a signal such as Ctrl-C comes, `sample` saves the state with which the step began, and ends the run.
sample.engine = rollout_engine

# ---------------------------------------------------------------- the loop
# train_grpo.py explains rollouts, per-token values in the forms {s: [len]} and [C], and micro-batches.
for step in range(run.first_step, max_steps + 1):               # the last one only evaluates and saves
    # ------------------------------------------------------------ 0 evaluate, save
    if run.due(step, eval_interval):
        log.evaluate(eval_set, eval_samples, sample, scorer)    # samples, scores and logs
    if run.due(step, save_interval):
        run.save()                                              # nothing if the run has just begun or resumed
    if step == max_steps:
        break

    # ------------------------------------------------------------ 1 rollout, 2 reward
    # DAPO: further prompts are sampled until the completions of enough prompts differ in score.
    sampled = []                                                # by all ranks; the log describes all of it
    for gen_batch in range(max(1, max_num_gen_batches)):
        with log.timed("gen"):
            prompts, run.state["position"] = train_set.draw(run.state["position"], prompts_per_step, seed)
            mine = range(rank * B, (rank + 1) * B)              # the indices of this rank's prompts
            first = gen_batch * prompts_per_step
            names = [f"{step} {first + i}" for i in mine]
            my_rollouts = sample([prompts[i] for i in mine], G, names)                  # B * G
        with log.timed("reward"):
            scorer(my_rollouts)                                 # sets r.score and r.rewards
        sampled += distributed.gathered(my_rollouts)            # of all ranks, G adjacent ones per prompt
        stds = losses.group_std(torch.tensor([r.score for r in sampled], dtype=torch.float64), G)
        different = stds.nonzero()[:, 0].tolist()               # indices of prompts
        if len(different) >= prompts_per_step:
            break
    # The step has the first prompts that differ, and others where there are not enough of them.
    same = (stds == 0).nonzero()[:, 0].tolist()
    kept = sorted((different + same)[:prompts_per_step])
    rollouts = []
    for p in kept:
        rollouts += sampled[p * G:(p + 1) * G]
    N = len(rollouts)
    scores = torch.tensor([r.score for r in rollouts], dtype=torch.float64)             # [N]; NaN: no score
    lengths = torch.tensor([len(r.logprobs) for r in rollouts])                         # [N], sampled tokens
    engine_logps = {s: torch.from_numpy(r.logprobs) for s, r in enumerate(rollouts)}    # {s: [len]}

    # ------------------------------------------------------------ 3 advantage
    left_out = (stds[kept] == 0).repeat_interleave(G) & (max_num_gen_batches > 0)       # [N]  DAPO
    if overlong_buffer:                                                                 # DAPO
        tokens = torch.tensor([r.longest_tail for r in rollouts])                       # all after the prompt
        scores = scores + losses.overlong_penalty(tokens, max_completion_length, overlong_buffer)
    if reference:
        with log.timed("ref"):                                  # the ranks share the work, and get all of it
            ref_logps = gathered_logprobs(reference, rollouts, token_budget, temperature)       # {s: [len]}
        kls = {s: engine_logps[s] - ref_logps[s] for s in range(N)}     # k1; only engine_logps exist so far
        log.metrics["kl"] = torch.cat([*kls.values()]).mean().item()
        if kl_estimator == "k1_reward":
            scores = scores - kl_coef * torch.stack([kls[s].sum() for s in range(N)])
    log.metrics["rewards/shaped/mean"] = scores.nanmean().nan_to_num().item()           # DAPO
    scores = scores.masked_fill(left_out, math.nan)                                     # DAPO
    # [N], or {s: [len]} if each token has its own. A rollout without a score has the advantage 0.
    adv = losses.ADVANTAGES[advantage](scores, G, lengths=lengths, rewards=[r.rewards for r in rollouts])
    if reference and kl_estimator == "k1_advantage":
        adv = {s: adv[s] - kl_coef * kls[s] for s in range(N)}          # {s: [len]}
    cut_off = torch.tensor([r.finish_reason == "length" for r in rollouts])             # DAPO
    counted = (~left_out & ~(cut_off & mask_truncated)).nonzero()[:, 0].tolist()        # DAPO: in the loss
    log.metrics |= {"train/num_gen_batches": gen_batch + 1, "train/frac_counted": len(counted) / N}

    # ------------------------------------------------------------ 4 split into updates; old logprobs
    shuffled = random.Random(f"{seed} {step}").sample(counted, len(counted))            # DAPO: only these
    updates = [shuffled[u::num_mini_batches] for u in range(num_mini_batches)]          # lists of s
    skipped = {s for s in range(N) if skip_zero_advantage and not adv[s].any()}         # no forward for these
    shares = deal_to_ranks(rollouts, updates, skipped)          # this rank's part of each update
    # The ratio compares the policy with pi_old, the policy before the first update.
    if old_logprobs == "engine":
        old_logps = engine_logps
    elif num_mini_batches > 1:
        with log.timed("old_log_prob"):                         # of this rank's part of all updates
            old_logps = token_logprobs(policy, rollouts, sum(shares, []), token_budget, temperature)
    else:
        old_logps = None                                        # pi_old is the policy: old_logp is logp

    # ------------------------------------------------------------ 5 update
    with log.timed("update_actor"):
        log.metrics |= set_rates(optimizer, "learning_rate", step, max_steps, lr_decay, warmup_steps)
        for u, (update, share) in enumerate(zip(updates, shares)):
            # [N]. With token_mean it is 1 / the number of the update's tokens, on all ranks together.
            weight = losses.sequence_weights(lengths, loss_aggregation, update, G, max_completion_length)
            new_logps = {}                                      # {s: [len]}, to compare with the engine's
            for batch in micro_batches(policy, rollouts, share, token_budget):
                logp, entropy = policy(batch, temperature)                              # [C], [C]
                batch.put(logp.detach(), new_logps)
                engine_logp = batch.flat(engine_logps)                                  # [C]
                old_logp = logp.detach() if old_logps is None else batch.flat(old_logps)        # [C]
                # [C] each. Only some losses use engine_logp and mean, a method like sequence_lengths below.
                token_loss, clipped_low, clipped_high = losses.LOSSES[loss_type](
                    logp, old_logp, batch.flat(adv), engine_logp=engine_logp, mean=batch.mean,
                    epsilon=epsilon, epsilon_high=epsilon_high)
                correction = losses.CORRECTIONS[engine_correction](
                    old_logp, engine_logp, mean=batch.mean, lengths=batch.sequence_lengths,
                    cap=correction_cap, low=correction_low, high=correction_high)       # [C]
                token_loss = correction * token_loss
                if reference and not kl_estimator.startswith("k1"):     # k1 is in scores or advantages
                    token_loss = token_loss + kl_coef * losses.kl_penalty(      # not corrected, as in TRL
                        logp, batch.flat(ref_logps), kl_estimator, old_logp)
                if entropy_coef > 0:
                    token_loss = token_loss - entropy_coef * entropy
                loss = (batch.flat(weight) * token_loss).sum()
                (loss * world_size).backward()                  # FSDP averages over ranks: undo that
                log.add(sums={"loss": loss / num_mini_batches},         # adds up to the mean of the updates
                        means={"entropy": entropy, "sampling/correction_mean": correction}
                        | losses.clip_ratios(clipped_low, clipped_high))
            if u == 0:
                # Policy and engine still have the same weights: the run stops unless their logprobs agree.
                log.metrics |= run.compare_logprobs(rollouts, new_logps)
            norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), grad_clip or math.inf)  # 0: no clip
            if run.may_step("actor", norm) and update:          # DAPO: not if nothing is counted
                optimizer.step()
            optimizer.zero_grad()

    # ------------------------------------------------------------ 6 weight sync
    with log.timed("sync"):                                     # step + 1 is the version of these weights
        rollout_engine.update_weights(policy, step + 1)         # on a GPU this wakes vLLM, which has slept

    # ------------------------------------------------------------ 7 log
    run.end_step(sampled, losses.group_std)                     # writes figures, with group_std, and samples
run.end()                                                       # writes report.html
