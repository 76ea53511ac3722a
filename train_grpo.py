"""
GRPO (Shao et al. 2024, https://arxiv.org/abs/2402.03300), a whole run in one file.

    torchrun train_grpo.py                                   # one process, on a laptop or a GPU
    torchrun --nproc_per_node=8 train_grpo.py config/tasks/gsm8k.py --model=Qwen/Qwen3-1.7B
    python train_grpo.py config/methods/gspo.py --seed=1     # a published variant, and one setting changed
    python train_grpo.py --help                              # every setting

Each step samples a group of G completions for each of its prompts and scores the completions. The advantage
of a completion is its score normalised within the group, (score - mean) / std, and every token of the
completion gets this advantage. PPO's clipped loss then updates the policy, without a critic, and the engine
that samples gets the new weights. Without arguments the script trains the small model in tiny/ on algebra.

The default algorithm differs from the paper's in two points; config/methods/grpo.py is the paper's algorithm:
1. Every token of an update has the same weight (DAPO, https://arxiv.org/abs/2503.14476, 3.3). In the paper
   every completion has the same weight, so a token of a long completion counts for less.
2. The loss has no KL to a reference model, so no reference model is loaded. Recent recipes with verifiable
   rewards have no KL either. With --kl_coef=0.04, the paper's value, the reference is the initial model.
By default a step makes one update, as in the paper's runs. Such a step is on-policy: every ratio is exactly
1, and nothing is clipped. With --num_mini_batches=4 each update takes a quarter of the completions, and from
the second update on the policy differs from the policy that sampled.
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
# algorithm
temperature = 1.0               # engine and trainer divide their logits by it
advantage = "grpo"              # grpo, dr_grpo (no std), grpo_batch, rloo, reinforce++, reinforce++_baseline,
                                # turns (for a reward in each turn), none (0); see losses.ADVANTAGES
kl_coef = 0.0                   # weight of the KL to the reference model; 0 loads no such model
kl_estimator = "k3"             # k2, k3, k3+ (k3 with k2's gradient) or k3_is (k3 times the ratio) adds the
                                # KL to the loss; k1_reward subtracts it from each score, and k1_advantage
                                # from each token's advantage (on-policy distillation); see losses.kl_penalty
reference_model = ""            # a folder or hub id; if empty, the initial model
num_mini_batches = 1            # optimizer updates per step; the completions are split evenly among them
old_logprobs = "trainer"        # trainer or engine: whose logprobs are pi_old in the ratio
loss_type = "clip"              # clip (PPO), gspo, gmpo, cispo, sapo, gpg, dppo; see losses.LOSSES
epsilon = 0.2                   # the lower clip bound of the ratio is 1 - epsilon
epsilon_high = 0.2              # the upper clip bound is 1 + epsilon_high; DAPO takes 0.28
skip_zero_advantage = False     # leave out rollouts whose advantage is 0: faster, with the same gradient as
                                # long as the loss has neither a KL nor an entropy bonus
loss_aggregation = "token_mean" # token_mean (DAPO), sequence_mean (GRPO), constant_length (Dr. GRPO),
                                # sequence_sum (RLOO), prompt_mean (ScaleRL); see losses.AGGREGATIONS
engine_correction = "none"      # weights token losses by pi_old / p(engine), capped, bounded or as a mask:
                                # token_truncate (TIS), sequence_truncate, token_mask, sequence_mask,
                                # geometric_mask, or two, as token_truncate,sequence_mask; see
                                # losses.CORRECTIONS
correction_cap = 2.0            # a truncation lowers a larger ratio to this
correction_low = 0.5            # a mask gives weight 0 to a ratio below this
correction_high = 2.0           # a mask gives weight 0 to a ratio above this
entropy_coef = 0.0              # weight of the entropy bonus
# ------------------------------------------------------------------------------------------------------------
# configure sets the names above to what config files and --key=value say, and returns all settings.
settings = configure(globals(), choices=losses.CHOICES, rules=losses.RULES)

# ---------------------------------------------------------------- set-up: processes, data, models, engine
# torchrun starts a process for each device, and rank is its number. FSDP2 shards the weights over the mesh.
# sequence_group: the ranks with which this one shares the tokens of each micro-batch, or None.
rank, world_size, device, mesh, sequence_group = distributed.set_up(
    timeout, sequence_parallel_size, shard_ranks)
# Run checks the settings and opens the run's folder, which gets a copy of this file. run.resumed is the
# checkpoint that the run resumes, or None. run.state is saved with each checkpoint: "position" counts the
# training rows drawn so far; "clock" is when the run began, which chat templates print as the date.
run = Run(settings, __file__)
B = prompts_per_step // world_size                              # prompts per rank, a whole number
G = num_generations                                             # completions per prompt
longest = max_prompt_length + max_completion_length             # in tokens; the engine takes nothing longer
compute_dtype = distributed.compute_dtype(dtype)                # "auto": bfloat16 on a GPU, float32 elsewhere
with input_errors():                                            # an InputError becomes a one-line message
    # folders.policy and folders.reference are paths of models; eos_ids are the tokens that end a completion.
    folders = open_folders(settings, longest, run.resumed, run.state["clock"])
    tokenizer = folders.tokenizer
    # sample(prompts, G, names) returns G rollouts per prompt. Their random seeds are made of `seed` and the
    # prompt's name. With an environment, tools or an agent a rollout is an episode of several turns.
    sample = rollout.load_sampler(settings, tokenizer, folders.eos_ids)
    # train_set.draw(position, n, seed) returns n prompts and the next position. eval_set is a list of prompts
    # that are held out. data_note describes both for the console. The prompts list the tools, if any.
    train_set, eval_set, data_note = data.load_prompts(tokenizer, settings, sample.tools)
    scorer = rewards.load_scorer(settings, sample, device, compute_dtype)   # scorer(rollouts) scores them
    run.check_data(folders, train_set, eval_set, data_note)     # a resumed run must have the same prompts
    first_prompts, _ = train_set.draw(0, 1, seed)
    # The reward must be able to score made-up completions, or the run ends. The note is for the console.
    run.notes.append(scorer.check_rewards(first_prompts + eval_set[:1]))

    policy = load_policy(folders.policy, mesh, compute_dtype, gradient_checkpointing, torch_compile,
                         sequence_group, run.adapter, reader=folders.reader)    # of LoRA; of images
    reference = None
    if kl_coef > 0:                                             # with LoRA it may share the policy's weights
        reference = load_reference(folders.reference, policy, mesh, compute_dtype)
    rollout_engine = rollout.load_engine(settings, folders.policy, compute_dtype, longest, folders.eos_ids)
optimizer = make_optimizer(policy, learning_rate, settings)
# begin restores the optimizer of a resumed run. log collects the figures of a step, and writes them.
log = run.begin(policy, optimizer, rollout_engine)
# At a signal such as Ctrl-C, `sample` saves the state with which the step began, and ends the run.
sample.engine = rollout_engine                                  # what it samples with

# ---------------------------------------------------------------- the loop
# A step has N rollouts, those of all ranks together. The loop calls them by their index s, from 0 to N - 1.
# A rollout r has these attributes:
#     r.ids        all its tokens: of the prompt, sampled ones, and those that an environment has inserted
#     r.logprobs   the engine's logprob of each sampled token; prompt and inserted tokens have none
#     r.row        the record of the data set that it answers, a dict with prompt, answer and other columns
#     r.rewards    {t: the reward of its t-th sampled token}, often only that of the last one
#     r.score      their sum, or NaN if it was not scored; setting it changes the reward of the last token
#
# Values have three forms:
#     [N]          a tensor with a value for each rollout, as scores and lengths
#     {s: [len]}   a dict with a tensor for each rollout, which has an entry for each of its sampled tokens;
#                  the name of such a dict is plural, as in old_logps
#     [C]          a tensor for a micro-batch of C sampled tokens, those of one rollout after the other; the
#                  name is singular, as in old_logp (packing.py makes the micro-batches)
# In a batch of the rollouts 0 and 1, with two sampled tokens each, C is 4, and
#     batch.flat({0: [a, b], 1: [c, d]})  returns [a, b, c, d]
#     batch.flat([x, y, z])               returns [x, x, y, y]; N is 3, and z is of a rollout in another batch
#     batch.put([a, b, c, d], values)     sets values[0] = [a, b] and values[1] = [c, d]
#     batch.mean([1, 3, 5, 9])            returns [2, 2, 7, 7], the mean of each sequence
#     batch.sequence_lengths()            returns [2, 2, 2, 2]
# In this example each rollout is one sequence. An agent's rollout may consist of several.
#
# FSDP communicates in each forward and backward pass, so all ranks must make equally many. A rank with fewer
# micro-batches than another gets empty ones, in which C is 0. In a sequence_group each rank computes a part
# of a micro-batch's tokens, forward and backward. One rank gets its logprobs and its loss; on the others
# C and the loss are 0.
# log.metrics takes figures that all ranks agree on; log.add sums or averages over micro-batches and ranks.
for step in range(run.first_step, max_steps + 1):               # the last one only evaluates and saves
    # ------------------------------------------------------------ 0 evaluate, save
    if run.due(step, eval_interval):                            # every eval_interval steps, and at the end
        log.evaluate(eval_set, eval_samples, sample, scorer)    # samples, scores and logs
    if run.due(step, save_interval):
        run.save()                                              # nothing if the run has just begun or resumed
    if step == max_steps:
        break

    # ------------------------------------------------------------ 1 rollout
    with log.timed("gen"):
        prompts, run.state["position"] = train_set.draw(run.state["position"], prompts_per_step, seed)
        mine = range(rank * B, (rank + 1) * B)                  # the indices of this rank's prompts
        my_rollouts = sample([prompts[i] for i in mine], G, [f"{step} {i}" for i in mine])      # B * G

    # ------------------------------------------------------------ 2 reward
    with log.timed("reward"):
        scorer(my_rollouts)                                     # sets r.score and r.rewards
    rollouts = distributed.gathered(my_rollouts)                # of all ranks, G adjacent ones per prompt
    N = len(rollouts)
    scores = torch.tensor([r.score for r in rollouts], dtype=torch.float64)             # [N]; NaN: no score
    lengths = torch.tensor([len(r.logprobs) for r in rollouts])                         # [N], sampled tokens
    engine_logps = {s: torch.from_numpy(r.logprobs) for s, r in enumerate(rollouts)}    # {s: [len]}

    # ------------------------------------------------------------ 3 advantage
    if reference:
        with log.timed("ref"):                                  # the ranks share the work, and get all of it
            ref_logps = gathered_logprobs(reference, rollouts, token_budget, temperature)       # {s: [len]}
        kls = {s: engine_logps[s] - ref_logps[s] for s in range(N)}     # k1; only engine_logps exist so far
        log.metrics["kl"] = torch.cat([*kls.values()]).mean().item()
        if kl_estimator == "k1_reward":
            scores = scores - kl_coef * torch.stack([kls[s].sum() for s in range(N)])
    # [N], or {s: [len]} if each token has its own. A rollout without a score has the advantage 0.
    adv = losses.ADVANTAGES[advantage](scores, G, lengths=lengths, rewards=[r.rewards for r in rollouts])
    if reference and kl_estimator == "k1_advantage":
        adv = {s: adv[s] - kl_coef * kls[s] for s in range(N)}          # {s: [len]}

    # ------------------------------------------------------------ 4 split into updates; old logprobs
    shuffled = random.Random(f"{seed} {step}").sample(range(N), N)
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
    with log.timed("update_actor"):                             # set_rates sets this step's learning rate
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
                # [C] each. Only some losses use engine_logp, mean and lengths.
                token_loss, clipped_low, clipped_high = losses.LOSSES[loss_type](
                    logp, old_logp, batch.flat(adv), engine_logp=engine_logp, mean=batch.mean,
                    lengths=batch.sequence_lengths, epsilon=epsilon, epsilon_high=epsilon_high)
                correction = losses.CORRECTIONS[engine_correction](
                    old_logp, engine_logp, mean=batch.mean, lengths=batch.sequence_lengths,
                    cap=correction_cap, low=correction_low, high=correction_high)       # [C]
                token_loss = correction * token_loss
                if reference and not kl_estimator.startswith("k1"):     # k1 is in scores or advantages
                    token_loss = token_loss + kl_coef * losses.kl_penalty(  # without correction, as in TRL
                        logp, batch.flat(ref_logps), kl_estimator, old_logp)
                if entropy_coef > 0:
                    token_loss = token_loss - entropy_coef * entropy
                loss = (batch.flat(weight) * token_loss).sum()
                (loss * world_size).backward()                  # FSDP averages over ranks: undo that
                log.add(sums={"loss": loss / num_mini_batches},         # adds up to the mean over updates
                        means={"entropy": entropy, "sampling/correction_mean": correction}
                        | losses.clip_ratios(clipped_low, clipped_high))
            if u == 0:
                # Policy and engine still have the same weights: the run stops unless their logprobs agree.
                log.metrics |= run.compare_logprobs(rollouts, new_logps)
            norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), grad_clip or math.inf)  # 0: no clip
            if run.may_step("actor", norm):                     # logs the norm; False if it is not finite
                optimizer.step()
            optimizer.zero_grad()

    # ------------------------------------------------------------ 6 weight sync
    with log.timed("sync"):                                     # step + 1 is the version of these weights
        rollout_engine.update_weights(policy, step + 1)         # on a GPU this wakes vLLM's weights

    # ------------------------------------------------------------ 7 log
    run.end_step(rollouts, losses.group_std)                    # writes figures, with group_std, and samples
run.end()                                                       # writes report.html
