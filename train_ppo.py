"""
PPO with a critic (Schulman et al. 2017, https://arxiv.org/abs/1707.06347), a whole run in one file.

    torchrun train_ppo.py                                    # one process, on a laptop or a GPU
    torchrun --nproc_per_node=8 train_ppo.py config/tasks/gsm8k.py --critic_learning_rate=1e-5
    python train_ppo.py config/methods/rlhf.py --model=... --reward_model=... --train_file=...
    python train_ppo.py --help                               # every setting

It reads like train_grpo.py; read that one first. What differs, as in Ziegler et al. 2019
(https://arxiv.org/abs/1909.08593) and Ouyang et al. 2022 (https://arxiv.org/abs/2203.02155):
1. A critic, a second transformer with a scalar head and an optimizer of its own, learns the value of each
   state: the prompt and the completion so far. One completion per prompt is enough, as none are compared.
2. The score is the reward of the last token. The KL to the initial model (k1), times kl_coef, is subtracted
   from the reward of each token, and the loss has no KL term.
3. Advantages come from GAE over the sampled tokens and are whitened over the global batch. A completion that
   was cut off ends like any other: no value is assumed for what would have followed.
4. Each step makes one or more passes of several updates over its rollouts, with clipped ratios and values.
5. There is no engine_correction, and no variant of the loss.
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
from episodes import Player
from model import (deal_to_ranks, load_critic, load_policy, load_reference, make_optimizer,
                   micro_batches, open_folders, set_rates, token_logprobs, token_values)
from runtime.run import Run
from weights import compare_logprobs, engine_weights
# ------------------------------------------------------------------------------------------------------------
# what everybody sets first
model = "tiny"                  # a folder, a hub id, or tiny: the small model that comes with the repository
task = "algebra"                # algebra, compose, guess, arithmetic, gsm8k, or file for your own rows;
                                # algebra:3 is harder, and suits a model of 1 B parameters
train_file = ""                 # the JSONL, JSON or parquet file with the rows of task=file
eval_file = ""                  # a file of held-out rows; if empty, an eighth of train_file is held out
reward = ""                     # file.py:function,... or math_verify or none; if empty, the task's own
engine = "auto"                 # vllm, hf (plain PyTorch), or auto, which is vllm where it is installed
prompts_per_step = 256          # of all ranks together
num_generations = 1             # completions per prompt (G)
max_prompt_length = 64          # in tokens; longer prompts are left out
max_completion_length = 64      # in tokens; longer completions are cut off
learning_rate = 1e-4            # the peak; a model of 1 B parameters wants about 1e-6
critic_learning_rate = 2e-3     # the critic's peak; a model of 1 B parameters wants about 1e-5
max_steps = 50                  # rollouts, each with its updates
token_budget = 8192             # tokens per micro-batch: memory grows with it, results do not depend on it
seed = 0                        # of generated problems, order of prompts, sampling, split into updates
out_dir = ""                    # the run's folder; if empty, that of the resumed checkpoint, or a new one
resume = ""                     # a checkpoint, or auto for the newest one in out_dir if there is one
from config.shared import *     # all other settings used below, such as dtype and eval_interval: see --help
# algorithm
temperature = 1.0               # engine and trainer divide their logits by it
critic_model = ""               # a folder or hub id that the critic starts from; if empty, the model
critic_warmup_steps = 5         # steps that train the critic alone, at the beginning
kl_coef = 0.0                   # weight of the KL to the reference model; 0 loads no such model
reference_model = ""            # a folder or hub id; if empty, the initial model
lam = 1.0                       # lambda of GAE, from 0 (one step) to 1 (Monte Carlo)
updates_per_step = 2            # optimizer updates per step, of policy and critic
num_epochs = 1                  # passes over a step's rollouts; each makes an equal part of the updates
epsilon = 0.2                   # the lower clip bound of the ratio is 1 - epsilon
epsilon_high = 0.2              # the upper clip bound is 1 + epsilon_high; DAPO takes 0.28
value_clip = 0.5                # values are clipped to this distance from the old ones; 0 does not clip them
loss_aggregation = "token_mean" # token_mean (DAPO), sequence_mean (GRPO), constant_length (Dr. GRPO),
                                # sequence_sum (RLOO), prompt_mean; see losses.AGGREGATIONS
entropy_coef = 0.0              # weight of the entropy bonus
# ------------------------------------------------------------------------------------------------------------
settings = configure(globals(), choices=losses.CHOICES)     # overrides by config files and --key=value

# ---------------------------------------------------------------- set-up: processes, data, models, engine
# One process per device; FSDP2 shards over the mesh. With sequence_parallel_size above 1, the ranks of a
# sequence_group compute each micro-batch together.
rank, world_size, device, mesh, sequence_group = distributed.set_up(
    timeout, sequence_parallel_size, shard_ranks)
# Run checks the settings. run.resumed is the checkpoint to resume, or None. run.state is saved with each
# checkpoint; its "position" counts the training rows that were drawn, over all epochs.
run = Run(settings, __file__, critic=True)
B, G = prompts_per_step // world_size, num_generations          # prompts per rank, completions per prompt
longest = max_prompt_length + max_completion_length             # in tokens; the engine takes nothing longer
compute_dtype = distributed.compute_dtype(dtype)
with input_errors():                                            # a ValueError becomes a one-line message
    # The models' folders, without weights. clock: when the run began, for chat templates that print a date.
    folders = open_folders(settings, longest, run.state["clock"])
    tokenizer = folders.tokenizer
    player = Player(settings, tokenizer, folders.eos_ids)       # for episodes with an environment or tools
    # train_set draws prompts, eval_set is a list of held-out prompts, and data_note describes both.
    train_set, eval_set, data_note = data.load_prompts(tokenizer, settings, player.tools)
    scorer = rewards.Scorer(settings, device, compute_dtype, player, tokenizer)
    run.check_data(folders, train_set, eval_set)                # refuses other prompts than the resumed run's
    scorer.check_with(train_set.draw(0, 1, seed)[0] + eval_set[:1])     # a broken reward shows now
    # With lora_rank a resumed run loads the initial model, and load_policy adds the trained adapters to it.
    start = run.resumed if run.resumed and not lora_rank else folders.policy
    policy = load_policy(start, mesh, compute_dtype, gradient_checkpointing, torch_compile,
                         sequence_group, run.adapter)
    critic_start = f"{run.resumed}/critic" if run.resumed else folders.critic
    critic = load_critic(critic_start, mesh, compute_dtype, gradient_checkpointing, torch_compile,
                         sequence_group)
    reference = load_reference(folders.reference, policy, mesh, compute_dtype) if kl_coef > 0 else None
    rollout_engine = rollout.load_engine(settings, start, compute_dtype, longest, folders.eos_ids)
optimizer = make_optimizer(policy, learning_rate, offload_optimizer)
critic_optimizer = make_optimizer(critic, critic_learning_rate, offload_optimizer)
networks = {"": (policy, optimizer), "critic": (critic, critic_optimizer)}      # in checkpoints, by subfolder
# Opens the log, prints what the run is, and loads the optimizer of a resumed run.
log = run.begin(networks, rollout_engine, data_note, updates=f"{updates_per_step} optimizer step(s)")
if run.resumed and lora_rank:                   # the engine was loaded with the initial model
    rollout_engine.load_weights(engine_weights(policy, rollout_engine.naming, compute_dtype), run.first_step)
sample = rollout.Sampler(settings, tokenizer, player, rollout_engine)    # a call ends the run at a signal


def critic_metrics(value, ret, raw_adv, adv, token_rewards):
    """Return figures of a critic that has not seen the batch yet; all [C] of this rank, adv whitened.
    token_rewards: for each rollout the rewards of its tokens, [len]."""
    mean = distributed.mean
    error_variance, variance = (mean(x ** 2) - mean(x) ** 2 for x in (ret - value, ret))
    extremes = distributed.gathered([x.item() for x in adv.nan_to_num(0.0).aminmax()] if len(adv) else [])
    return {"critic/vf_explained_var": 1 - error_variance / variance if variance > 1e-8 else 0.0,
            "critic/values/mean": mean(value), "critic/returns/mean": mean(ret),
            "critic/rewards/mean": mean([x.sum() for x in token_rewards]),
            "critic/advantages/mean": mean(raw_adv),
            "critic/advantages/max": max(extremes, default=0.0),
            "critic/advantages/min": min(extremes, default=0.0)}


# ---------------------------------------------------------------- the loop
# Shapes as in train_grpo.py: N rollouts in a step, on all ranks; C sampled tokens, of a micro-batch or of all
# that this rank computes; {s: [len]} has a tensor for the sampled tokens of each rollout s.
for step in range(run.first_step, max_steps + 1):
    # ------------------------------------------------------------ 0 evaluate, save
    if run.due(eval_interval):
        log.evaluate(eval_set, eval_samples, sample, scorer)    # samples, scores and logs
    if run.due(save_interval):
        run.save()                                              # not if the run has just begun
    if step == max_steps:
        break

    # ------------------------------------------------------------ 1 rollout
    with log.timed("gen"):
        picked, run.state["position"] = train_set.draw(run.state["position"], prompts_per_step, seed)
        own = range(rank * B, (rank + 1) * B)                   # this rank's; each has a text for its seeds
        own_rollouts = sample([picked[i] for i in own], G, [f"{step} {i}" for i in own])        # B * G

    # ------------------------------------------------------------ 2 reward
    with log.timed("reward"):
        scorer(own_rollouts)                                    # sets the score of each
    rollouts = distributed.gathered(own_rollouts)               # in the order of prompts, on every rank
    N = len(rollouts)
    scores = torch.tensor([r.score for r in rollouts], dtype=torch.float64)  # [N]; NaN: not scored
    lengths = torch.tensor([len(r.logprobs) for r in rollouts])                         # [N], sampled tokens

    # ------------------------------------------------------------ 3 shares; old logprobs, values, reference
    order = random.Random(f"{seed} {step}").sample(range(N), N)
    updates = [order[u::updates_per_step // num_epochs] for u in range(updates_per_step // num_epochs)]
    shares = deal_to_ranks(rollouts, updates)
    all_shares = sum(shares, [])
    with log.timed("old_log_prob"):
        old_logps = token_logprobs(policy, rollouts, all_shares, token_budget, temperature)     # {s: [len]}
    log.metrics |= compare_logprobs(rollouts, old_logps, run.gap_bound, tokenizer, step)
    with log.timed("values"):
        old_values = token_values(critic, rollouts, all_shares, token_budget)           # {s: [len]}
    with log.timed("ref"):
        ref_logps = (token_logprobs(reference, rollouts, all_shares, token_budget, temperature)
                     if reference else old_logps)                                       # {s: [len]}

    # ------------------------------------------------------------ 4 rewards to advantages
    # On the CPU, because a GPU would wait for three launches per token of gae.
    flat = lambda tensors: torch.cat([tensors[s] for s in all_shares] or [torch.empty(0)]).cpu()
    old_logp, ref_logp, value = map(flat, (old_logps, ref_logps, old_values))       # [C] each
    lens = lengths[all_shares].tolist()
    kl = losses.kl_penalty(old_logp, ref_logp, "k1")                                # [C]
    # The score of a single answer is the reward of its last token; turns and steps have their own.
    token_reward = losses.token_rewards([rollouts[s].rewards for s in all_shares], kl, kl_coef, lens)
    raw_adv, ret = losses.gae(token_reward, value, lens, gamma=1.0, lam=lam)        # [C], [C]
    adv = losses.whiten(raw_adv, distributed.mean)                                  # [C]
    # A rollout without a score is NaN in adv and ret. Its weight below is 0, but every count includes it.
    advs, rets = (dict(zip(all_shares, x.nan_to_num(0.0).split(lens))) for x in (adv, ret))
    log.metrics |= critic_metrics(value, ret, raw_adv, adv, token_reward.split(lens))
    if reference:
        log.metrics["kl"] = distributed.mean(kl)

    # ------------------------------------------------------------ 5 update
    policy_step = step - critic_warmup_steps                    # below 0 only the critic is trained
    log.metrics |= set_rates(optimizer, "learning_rate", policy_step, max_steps - critic_warmup_steps,
                             lr_decay, warmup_steps)
    log.metrics |= set_rates(critic_optimizer, "critic/lr", step, max_steps, lr_decay, warmup_steps)
    for update, share in num_epochs * list(zip(updates, shares)):
        # The whole update counts, on all ranks: the gradient depends on neither ranks nor micro-batches.
        weight = scores.isfinite() * losses.sequence_weights(
            lengths, loss_aggregation, update, G, max_completion_length)                # [N]
        with log.timed("update_critic"):
            for batch in micro_batches(critic, rollouts, share, token_budget):
                new_value = critic(batch)                                               # [C]
                value_losses, value_clipped = losses.value_loss(
                    new_value, batch.flat(old_values), batch.flat(rets), value_clip)        # [C] each
                vf_loss = (batch.flat(weight) * value_losses).sum()
                (vf_loss * world_size).backward()               # FSDP averages over ranks: undo that
                log.add(sums={"critic/vf_loss": vf_loss / updates_per_step},
                        means={"critic/vf_clipfrac": value_clipped})
            norm = torch.nn.utils.clip_grad_norm_(critic.parameters(), grad_clip or math.inf).full_tensor()
            if run.may_step("critic", norm.item()):             # False if the norm is infinite or NaN
                critic_optimizer.step()
            critic_optimizer.zero_grad()
        with log.timed("update_actor"):
            if policy_step < 0:
                continue
            for batch in micro_batches(policy, rollouts, share, token_budget):
                logp, entropy = policy(batch, temperature)                              # [C], [C]
                token_loss, clipped_low, clipped_high = losses.LOSSES["clip"](
                    logp, batch.flat(old_logps), batch.flat(advs), epsilon=epsilon,
                    epsilon_high=epsilon_high)                                          # [C] each
                if entropy_coef > 0:
                    token_loss = token_loss - entropy_coef * entropy
                loss = (batch.flat(weight) * token_loss).sum()
                (loss * world_size).backward()
                log.add(sums={"loss": loss / updates_per_step},         # the mean over the updates
                        means={"actor/ppo_kl": losses.kl_penalty(batch.flat(old_logps), logp.detach(), "k3"),
                               "entropy": entropy} | losses.clip_ratios(clipped_low, clipped_high))
            norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), grad_clip or math.inf).full_tensor()
            if run.may_step("actor", norm.item()):
                optimizer.step()
            optimizer.zero_grad()

    # ------------------------------------------------------------ 6 weight sync
    with log.timed("sync"):                                     # step + 1: the version of these weights
        rollout_engine.load_weights(engine_weights(policy, rollout_engine.naming, compute_dtype), step + 1)

    # ------------------------------------------------------------ 7 log
    run.end_step(rollouts, losses.group_std)
run.end()
