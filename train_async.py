"""
GRPO with trainers and engines on devices of their own: while the trainers update, the engines sample.

    torchrun --nproc_per_node=2 train_async.py                  # one trainer, one engine
    torchrun --nproc_per_node=8 train_async.py config/tasks/gsm8k.py --rollout_ranks=4 --in_flight=true

This is train_grpo.py, with these differences:
1. The last rollout_ranks ranks are engines, which sample, score and send (placement.sample_for_trainers).
   The others are trainers. What crosses between them, and how, is in placement.py.
2. Version v of the weights is the policy after v steps. The completions of step t are sampled with version
   t - max_staleness, the first ones with version 0. With 1 the engines sample for the next step while the
   trainers update; with 0 they take turns, and with engine_correction=none the figures are those of
   train_grpo.py. A run repeats bit for bit on a CPU, also after a resume: a checkpoint holds what was sampled
   ahead.
3. With in_flight=True the engines begin a step's completions with the same version, but take newer ones as
   soon as they come. Such a run does not repeat, and keeps nothing for a resume.
4. The loss's ratio is still to the trainer's own logprobs at the start of the step. The policy that sampled
   is further from these, and engine_correction weights by that distance.
5. With kl_estimator=k1_reward or k1_advantage the KL is that of the trained policy. k3_is weights by the
   ratio to the one that sampled.
6. Engine and trainer are compared where both have the same weights: at evaluations, and in steps that are
   sampled with the newest version. vLLM does not sleep, and takes 0.9 of its GPU's memory.
"""
import math
import os
import random

from runtime import distributed         # before torch: it sets environment variables that torch reads
import torch

import data
import losses
import rewards
import rollout
from configurator import configure, input_errors
from options.episodes import EpisodeSampler, OpenEpisodes
from model import (deal_to_ranks, gathered_logprobs, load_policy, load_reference, make_optimizer,
                   micro_batches, open_folders, set_rates, token_logprobs)
from options.placement import Bridge, kept_ahead, sample_for_trainers, staleness
from runtime.run import Run, check_run
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
# Besides these, lora_rank=0 says which weights an engine begins with.
from config.shared import *
# placement: docs/placement.md
rollout_ranks = 1               # the last ranks, which are engines; the others are trainers
max_staleness = 1               # steps that the trained policy is ahead of the one that sampled
in_flight = False               # new weights enter in the middle of completions; such a run does not repeat
vllm_gpu_memory_utilization = 0.9  # fraction of the GPU's memory that vLLM may take, where it runs alone
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
engine_correction = "token_truncate"  # or none, or another one of train_grpo.py; see losses.CORRECTIONS
correction_cap = 2.0            # a truncation lowers a larger ratio to this
correction_low = 0.5            # a mask gives weight 0 to a ratio below this
correction_high = 2.0           # a mask gives weight 0 to a ratio above this
entropy_coef = 0.0              # weight of the entropy bonus
# ------------------------------------------------------------------------------------------------------------
# configure sets the names above to what config files and --key=value say, and returns all settings.
settings = configure(globals(), choices=losses.CHOICES, rules=losses.RULES)

# ---------------------------------------------------------------- set-up of both roles
check_run(settings, trainers=int(os.environ.get("WORLD_SIZE", 1)) - rollout_ranks)
# torchrun starts a process for each device. bridge knows the role of this one, and joins it to the others.
# rank, world_size and mesh are those of the role. FSDP2 shards the weights over the mesh of devices. With
# sequence_parallel_size above 1, a sequence_group shares each micro-batch.
bridge = Bridge(settings)
rank, world_size, device, mesh, sequence_group = distributed.set_up(
    timeout, sequence_parallel_size, shard_ranks, bridge.join)
if bridge.trains:
    # Run opens the run's folder. The trainers tell the engines how the run begins.
    run = Run(settings, __file__, ahead=[])
    with input_errors():
        bridge.sampled |= kept_ahead(run, settings)
    resumed, clock = run.resumed, run.state["clock"]
    kept = [*bridge.sampled]
    if not run.due(run.first_step, eval_interval):              # a checkpoint may have the figures
        kept.append(("eval", run.first_step))
    bridge.tell((resumed, clock, run.first_step, run.state["position"], kept))
else:
    resumed, clock, version, position, kept = bridge.begin()
G = num_generations                                             # completions per prompt
longest = max_prompt_length + max_completion_length             # in tokens; the engine takes nothing longer
compute_dtype = distributed.compute_dtype(dtype)                # "auto": bfloat16 on a GPU, float32 elsewhere
with input_errors():                                            # an InputError becomes a one-line message
    # folders.policy and folders.reference are paths of models; eos_ids are the tokens that end a completion.
    folders = open_folders(settings, longest, resumed, clock)
    tokenizer = folders.tokenizer
    # A single answer is an episode of one turn. If the settings name an environment, tools or an agent, an
    # episode has several turns.
    sampler = EpisodeSampler(settings, tokenizer, folders.eos_ids)
    # train_set.draw(position, n, seed) returns n prompts and the next position. eval_set is a list of prompts
    # that are held out. data_note describes both for the console. The prompts list the tools, if any.
    train_set, eval_set, data_note = data.load_prompts(tokenizer, settings, sampler.tools)

# ---------------------------------------------------------------- the engines
if not bridge.trains:
    with input_errors():
        scorer = rewards.load_scorer(settings, sampler, device, compute_dtype)  # scorer(rollouts) scores them
        # The reward must score made-up completions of a training and a held-out prompt, or the run ends.
        first_prompts, _ = train_set.draw(0, 1, seed)
        episode_note = scorer.check_rewards(first_prompts + eval_set[:1])
        if rank == 0 and episode_note:
            print(episode_note)
        rollout_engine = rollout.load_engine(settings, folders.policy, compute_dtype, longest,
                                             folders.eos_ids, apart=True)
    # With lora_rank the engine still has the base model, which is no version, and takes the adapters first.
    rollout_engine.version = -1 if lora_rank else version
    rollout_engine.incoming = bridge.weights
    bridge.send("ready", 0, [])
    table = OpenEpisodes(sampler, rollout_engine)

    def serve(_):
        """Sample and score for the trainers until the run ends."""
        sample_for_trainers(bridge, settings, table, scorer, train_set, eval_set, version, position, kept)

    rollout_engine.serve([], serve)                             # does not return

# ---------------------------------------------------------------- the trainers
sampler.close()                                                 # only the engines play
with input_errors():
    run.check_data(folders, train_set, eval_set, data_note)
    policy = load_policy(folders.policy, mesh, compute_dtype, gradient_checkpointing, torch_compile,
                         sequence_group, run.adapter, reader=folders.reader)    # of LoRA; of images
    reference = None
    if kl_coef > 0:                                             # with LoRA it may share the policy's weights
        reference = load_reference(folders.reference, policy, mesh, compute_dtype)
optimizer = make_optimizer(policy, learning_rate, settings)
bridge.take("ready", 0)                                         # waits until all engines are made
# begin restores the optimizer of a resumed run. log collects the figures of a step, and writes them.
log = run.begin(policy, optimizer, bridge)
log.say(f"Engines sample with weights that are at most {max_staleness} steps older")


def save():
    """Save a checkpoint, with what was sampled for the next steps, so that a resumed run has it."""
    next_step = run.state["step"]
    later = range(next_step, min(next_step + max_staleness, max_steps))
    if in_flight:                                               # nobody knows how far the engines are
        later = []
    with log.timed("wait_for_rollouts"):
        run.state["ahead"], run.arrays = bridge.ahead(later)
    run.save()                                                  # nothing if the run has just begun or resumed


# ---------------------------------------------------------------- the loop
# train_grpo.py explains rollouts, per-token values in the forms {s: [len]} and [C], and micro-batches.
for step in range(run.first_step, max_steps + 1):               # the last one only evaluates and saves
    # ------------------------------------------------------------ 0 stop, evaluate, save
    run.stop_if_signalled(save)                                 # a signal that has come on any rank
    if run.due(step, eval_interval):                            # every eval_interval steps, and at the end
        with log.timed("eval"):
            held_out = bridge.take("eval", step, eval_set)      # sampled with the same seeds every time
            # Trainers and engines have the same weights, so their logprobs of 32 rollouts per rank have to
            # agree. Without a top_k, the trainer cannot know which tokens top_p and min_p had left, and
            # nothing is compared. Of greedy completions engines give the logprobs at temperature 1.
            sampling = rollout.sampling_of(settings, "eval_")
            if sampling["top_k"] or sampling["top_p"] == 1 and sampling["min_p"] == 0:
                few = range(rank, min(32 * world_size, len(held_out)), world_size)
                logps = token_logprobs(policy, held_out, few, token_budget, sampling["temperature"] or 1.0)
                run.compare_logprobs(held_out, logps)
            log.evaluation(held_out, eval_samples)
    if run.due(step, save_interval):
        save()
    if step == max_steps:
        break

    # ------------------------------------------------------------ 1 rollout, 2 reward: by the engines
    with log.timed("wait_for_rollouts"):
        prompts, run.state["position"] = train_set.draw(run.state["position"], prompts_per_step, seed)
        rollouts = bridge.take("step", step, prompts)           # of all engines, G adjacent ones per prompt
    log.metrics |= staleness(rollouts, step)
    N = len(rollouts)
    scores = torch.tensor([r.score for r in rollouts], dtype=torch.float64)             # [N]; NaN: no score
    lengths = torch.tensor([len(r.logprobs) for r in rollouts])                         # [N], sampled tokens
    engine_logps = {s: torch.from_numpy(r.logprobs) for s, r in enumerate(rollouts)}    # {s: [len]}

    # ------------------------------------------------------------ 3 advantage
    if reference:
        with log.timed("ref"):
            ref_logps = gathered_logprobs(reference, rollouts, token_budget, temperature)       # {s: [len]}
            # The KL is that of the trained policy, which need not be the one that sampled.
            logps = engine_logps                                                                # {s: [len]}
            if max_staleness:
                logps = gathered_logprobs(policy, rollouts, token_budget, temperature)
        kls = {s: logps[s] - ref_logps[s] for s in range(N)}            # k1, by the trained policy
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
    # The ratio compares the policy with pi_old, the policy before the first update. For the age of the
    # rollouts engine_correction weighs tokens.
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
                        logp, batch.flat(ref_logps), kl_estimator, engine_logp if max_staleness else old_logp)
                if entropy_coef > 0:
                    token_loss = token_loss - entropy_coef * entropy
                loss = (batch.flat(weight) * token_loss).sum()
                (loss * world_size).backward()                  # FSDP averages over ranks: undo that
                log.add(sums={"loss": loss / num_mini_batches},         # adds up to the mean over updates
                        means={"entropy": entropy, "sampling/correction_mean": correction}
                        | losses.clip_ratios(clipped_low, clipped_high))
            if u == 0:
                # A gap stops the run only if the policy itself has sampled. With in_flight nobody knows which
                # weights read the prompts.
                same_weights = not in_flight and log.metrics["async/staleness/max"] == 0
                log.metrics |= run.compare_logprobs(rollouts, new_logps, same_weights)
            norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), grad_clip or math.inf)  # 0: no clip
            if run.may_step("actor", norm):                     # logs the norm; False if it is not finite
                optimizer.step()
            optimizer.zero_grad()

    # ------------------------------------------------------------ 6 weight sync
    with log.timed("sync"):                                     # step + 1 is the version of these weights
        bridge.update_weights(policy, step + 1)

    # ------------------------------------------------------------ 7 log
    run.end_step(rollouts, losses.group_std)                    # writes figures, with group_std, and samples
run.end()                                                       # writes report.html
