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
4. Each step makes num_epochs * num_mini_batches updates of policy and critic, with clipped ratios and values.
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
from model import (deal_to_ranks, load_policy, load_reference, make_optimizer, micro_batches, open_folders,
                   set_rates, token_logprobs)
from options import critic_losses
from options.critic import load_critic, mean_over_ranks, token_values
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
# config/shared.py and --help explain the other settings that are used below: timeout=3600.0,
# sequence_parallel_size=1, shard_ranks=0, dtype="auto", gradient_checkpointing=False, torch_compile=False,
# warmup_steps=5, lr_decay="linear", grad_clip=1.0, eval_interval=10, eval_samples=4, save_interval=20.
from config.shared import *
# algorithm
temperature = 1.0               # engine and trainer divide their logits by it
critic_model = ""               # a folder or hub id that the critic starts from; if empty, the model
critic_warmup_steps = 5         # steps that train the critic alone, at the beginning
kl_coef = 0.0                   # weight of the KL to the reference model; 0 loads no such model
reference_model = ""            # a folder or hub id; if empty, the initial model
lam = 1.0                       # lambda of GAE, from 0 (one step) to 1 (Monte Carlo)
num_mini_batches = 2            # updates per pass over a step's rollouts, which are split evenly among them
num_epochs = 1                  # passes over a step's rollouts, each in an order of its own
epsilon = 0.2                   # the lower clip bound of the ratio is 1 - epsilon
epsilon_high = 0.2              # the upper clip bound is 1 + epsilon_high; DAPO takes 0.28
value_clip = 0.5                # values are clipped to this distance from the old ones; 0 does not clip them
loss_aggregation = "token_mean" # token_mean (DAPO), sequence_mean (GRPO), constant_length (Dr. GRPO),
                                # sequence_sum (RLOO), prompt_mean (ScaleRL); see losses.AGGREGATIONS
entropy_coef = 0.0              # weight of the entropy bonus
# ------------------------------------------------------------------------------------------------------------
# configure sets the names above to what config files and --key=value say, and returns all settings.
# A rule is a condition that the settings have to meet, and the end of the message if they do not.
settings = configure(globals(), choices=losses.CHOICES, rules=(
    *losses.RULES,
    (lambda critic_warmup_steps, max_steps: critic_warmup_steps < max_steps, " leaves the policy no step")))

# ---------------------------------------------------------------- set-up: processes, data, models, engine
# torchrun starts a process for each device, and rank is its number. FSDP2 shards the weights over the mesh.
# sequence_group: the ranks with which this one shares the tokens of each micro-batch, or None.
rank, world_size, device, mesh, sequence_group = distributed.set_up(
    timeout, sequence_parallel_size, shard_ranks)
# Run checks the settings and opens the run's folder, which gets a copy of this file. run.resumed is the
# checkpoint that the run resumes, or None. run.state is saved with each checkpoint: "position" counts the
# training rows drawn so far; "clock" is when the run began, which chat templates print as the date.
run = Run(settings, __file__, critic=True)                      # scripts without a critic cannot resume it
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
                         sequence_group, run.adapter)           # run.adapter: of LoRA, or 0
    critic_start = f"{run.resumed}/critic" if run.resumed else folders.critic
    critic = load_critic(critic_start, mesh, compute_dtype, gradient_checkpointing, torch_compile,
                         sequence_group)
    reference = None
    if kl_coef > 0:                                             # with LoRA it may share the policy's weights
        reference = load_reference(folders.reference, policy, mesh, compute_dtype)
    rollout_engine = rollout.load_engine(settings, folders.policy, compute_dtype, longest, folders.eos_ids)
optimizer = make_optimizer(policy, learning_rate, settings)
critic_optimizer = make_optimizer(critic, critic_learning_rate, settings)
# begin restores the optimizer of a resumed run. log collects the figures of a step, and writes them.
# The critic and its optimizer are saved as well, in the subfolder critic.
log = run.begin(policy, optimizer, rollout_engine, critic=(critic, critic_optimizer))
# At a signal such as Ctrl-C, `sample` saves the state with which the step began, and ends the run.
sample.engine = rollout_engine                                  # what it samples with


def flat_on_cpu(tensors, chosen):
    """Return tensors, {s: [len]}, as one tensor [C] on the CPU: those of s in chosen, one after the other.

    gae loops over the tokens, and on a GPU each pass of its loop would have to wait for three small kernels.
    """
    return torch.cat([tensors[s] for s in chosen] or [torch.empty(0)]).cpu()


def critic_metrics(value, ret, raw_adv, adv, token_rewards):
    """Return figures of a critic that was not yet trained on these rollouts, over all ranks. A collective.

    value, ret (returns), raw_adv, adv (raw_adv whitened): [C] of this rank. token_rewards: for each of its
    rollouts the rewards of the tokens, [len].
    """
    mean = mean_over_ranks
    error = ret - value
    error_variance = mean(error ** 2) - mean(error) ** 2
    variance = mean(ret ** 2) - mean(ret) ** 2
    explained = 1 - error_variance / variance if variance > 1e-8 else 0.0
    bounds = []
    if len(adv):
        bounds = [x.item() for x in adv.nan_to_num(0.0).aminmax()]
    all_bounds = distributed.gathered(bounds)
    return {"critic/vf_explained_var": explained,
            "critic/values/mean": mean(value),
            "critic/returns/mean": mean(ret),
            "critic/rewards/mean": mean([x.sum() for x in token_rewards]),
            "critic/advantages/mean": mean(raw_adv),
            "critic/advantages/max": max(all_bounds, default=0.0),
            "critic/advantages/min": min(all_bounds, default=0.0)}


# ---------------------------------------------------------------- the loop
# train_grpo.py explains rollouts, per-token values in the forms {s: [len]} and [C], and micro-batches.
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

    # ------------------------------------------------------------ 3 split into updates; old logprobs, values
    # This comes before the advantages, unlike in train_grpo.py, because GAE needs the values.
    generator = random.Random(f"{seed} {step}")
    updates = []                                                                        # lists of s
    for _ in range(num_epochs):
        shuffled = generator.sample(range(N), N)
        updates += [shuffled[u::num_mini_batches] for u in range(num_mini_batches)]
    # shares: this rank's part of each update. Only the rank to which the first epoch deals a rollout computes
    # its old logprobs, values and advantages, so this rank keeps the rollout in the later epochs.
    shares = deal_to_ranks(rollouts, updates[:num_mini_batches])
    my_share = sum(shares, [])
    my_indices = set(my_share)
    shares += [[s for s in update if s in my_indices] for update in updates[num_mini_batches:]]
    with log.timed("old_log_prob"):
        old_logps = token_logprobs(policy, rollouts, my_share, token_budget, temperature)       # {s: [len]}
    # Policy and engine still have the same weights: the run stops unless their logprobs agree.
    log.metrics |= run.compare_logprobs(rollouts, old_logps)
    with log.timed("values"):
        old_values = token_values(critic, rollouts, my_share, token_budget)             # {s: [len]}
    ref_logps = old_logps                                       # {s: [len]}; without a reference the KL is 0
    if reference:
        with log.timed("ref"):
            ref_logps = token_logprobs(reference, rollouts, my_share, token_budget, temperature)

    # ------------------------------------------------------------ 4 rewards to advantages
    # Here [C] has the sampled tokens of all of this rank's rollouts.
    old_logp = flat_on_cpu(old_logps, my_share)                                         # [C]
    ref_logp = flat_on_cpu(ref_logps, my_share)                                         # [C]
    value = flat_on_cpu(old_values, my_share)                                           # [C]
    lens = lengths[my_share].tolist()
    kl = losses.kl_penalty(old_logp, ref_logp, "k1")                                    # [C]
    # A single answer's score is the reward of its last token. If turns or steps of a solution are scored, the
    # last token of each has a reward.
    token_reward = critic_losses.token_rewards(
        scores[my_share], [rollouts[s].rewards for s in my_share], kl, kl_coef, lens)   # [C]
    # GAE runs over each sequence by itself. An agent's episode may have several sequences; the last token of
    # each is then also rewarded with what the later ones earn.
    sequence_lens = [rollouts[s].lengths_of_sequences for s in my_share]
    sequence_reward = critic_losses.with_later_sequences(token_reward, sequence_lens)   # [C]
    raw_adv, ret = critic_losses.gae(                                                   # [C], [C]
        sequence_reward, value, sum(sequence_lens, []), gamma=1.0, lam=lam)
    adv = losses.whiten(raw_adv, mean_over_ranks)                                      # [C]
    # A rollout without a score is NaN in adv and ret, and becomes 0 here. Its weight below is 0, but it still
    # counts in the divisors of the other weights.
    advs = dict(zip(my_share, adv.nan_to_num(0.0).split(lens)))                         # {s: [len]}
    rets = dict(zip(my_share, ret.nan_to_num(0.0).split(lens)))                         # {s: [len]}
    log.metrics |= critic_metrics(value, ret, raw_adv, adv, token_reward.split(lens))
    if reference:
        log.metrics["kl"] = mean_over_ranks(kl)

    # ------------------------------------------------------------ 5 update
    policy_step = step - critic_warmup_steps                    # below 0 only the critic is trained
    log.metrics |= set_rates(optimizer, "learning_rate", policy_step, max_steps - critic_warmup_steps,
                             lr_decay, warmup_steps)
    log.metrics |= set_rates(critic_optimizer, "critic/lr", step, max_steps, lr_decay, warmup_steps)
    for update, share in zip(updates, shares):
        # [N]. With token_mean it is 1 / the number of the update's tokens, on all ranks together.
        weight = scores.isfinite() * losses.sequence_weights(
            lengths, loss_aggregation, update, G, max_completion_length)                # [N]
        with log.timed("update_critic"):
            for batch in micro_batches(critic, rollouts, share, token_budget):
                new_value = critic(batch)                                               # [C]
                value_losses, value_clipped = critic_losses.value_loss(
                    new_value, batch.flat(old_values), batch.flat(rets), value_clip)        # [C] each
                vf_loss = (batch.flat(weight) * value_losses).sum()
                (vf_loss * world_size).backward()               # FSDP averages over ranks: undo that
                log.add(sums={"critic/vf_loss": vf_loss / len(updates)},
                        means={"critic/vf_clipfrac": value_clipped})
            norm = torch.nn.utils.clip_grad_norm_(critic.parameters(), grad_clip or math.inf)
            if run.may_step("critic", norm):                    # False if the norm is infinite or NaN
                critic_optimizer.step()
            critic_optimizer.zero_grad()
        with log.timed("update_actor"):
            if policy_step < 0:                                 # the critic is still warming up alone
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
                # ppo_kl estimates KL(pi_old || policy).
                log.add(sums={"loss": loss / len(updates)},         # adds up to the mean over updates
                        means={"actor/ppo_kl": losses.kl_penalty(batch.flat(old_logps), logp.detach(), "k3"),
                               "entropy": entropy} | losses.clip_ratios(clipped_low, clipped_high))
            norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), grad_clip or math.inf)  # 0: no clip
            if run.may_step("actor", norm):
                optimizer.step()
            optimizer.zero_grad()

    # ------------------------------------------------------------ 6 weight sync
    with log.timed("sync"):                                     # step + 1 is the version of these weights
        rollout_engine.update_weights(policy, step + 1)         # on a GPU this wakes vLLM's weights

    # ------------------------------------------------------------ 7 log
    run.end_step(rollouts, losses.group_std)                    # writes figures, with group_std, and samples
run.end()                                                       # writes report.html
