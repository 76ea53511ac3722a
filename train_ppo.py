"""
PPO with a critic, the whole run in one file. It reads like train_grpo.py, but for the update and
what leads to it.

    torchrun train_ppo.py                                    # one process, laptop or GPU
    torchrun --nproc_per_node=8 train_ppo.py config/gsm8k.py --critic_learning_rate=1e-5
    python train_ppo.py --help                               # every setting

What differs from train_grpo.py (Schulman et al. 2017, https://arxiv.org/abs/1707.06347; for language models
Ziegler et al. 2019, https://arxiv.org/abs/1909.08593, and Ouyang et al. 2022):
1. A critic, a second transformer with a scalar head and its own optimizer, learns the value of every state,
   the prompt and the completion so far. One completion a prompt is then enough: no group is compared.
2. The score is the reward of the last token; kl_coef times the KL to the initial model is taken off at every
   token (k1), in the reward and not in the loss, with a coefficient that may adapt.
3. Advantages come from GAE over completion tokens, and are whitened over the global batch. A completion that
   was cut off ends like any other: nothing is bootstrapped behind its last token.
4. One or more epochs of minibatches a rollout, with clipped ratios and clipped values.

RLHF with a reward model: config/rlhf.py --reward_model=folder. The task's verifier, where it has one, may be
added to its score with a weight (--reward_weight), or only logged (weight 0).
"""
import datetime
import math
import os
import random
import signal
import time
import zlib

import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoTokenizer

import data
import losses
import ranks
import rewards
import rollout
import tiny
import weights
from checks import check_run, check_values
from configurator import check, configure, input_errors
from model import check_model, deal, load_critic, load_policy, micro_batches, offload
from reward_model import RewardModel
from runlog import RunLog, peak_memory
# ------------------------------------------------------------------------------------------------------------
# model and task
model = "tiny"                  # a folder, a hub id, or tiny: the small base model that tiny.py makes
task = "algebra"                # algebra, countdown, gsm8k, or file: rows from train_file and eval_file
difficulty = 1                  # of generated tasks (algebra, countdown): 1 suits the tiny model, 3 a 1 B one
train_prompts = 4096            # rows to generate (algebra, countdown), else the first so many; 0: all
train_file = ""                 # JSONL or parquet, for task=file
eval_file = ""                  # JSONL or parquet, for task=file
reward = ""                     # file.py:function; empty: the task's own verifier; none: a reward model alone
reward_timeout = 10.0           # seconds a batch; over it one by one, each over it scores 0. 0: no limit
reward_weight = 1.0             # of that reward beside the reward model's; 0: it is only logged
reward_model = ""               # a folder or hub id: a sequence-classification model with one label
reward_model_weight = 1.0       # of its score
chat = True                     # apply the chat template to messages; false: join them (models without one)
system_prompt = ""              # put before every message prompt, e.g. to ask for \boxed{}
# rollout
engine = "auto"                 # vllm, hf (plain PyTorch), or auto: vllm where it is installed
prompts_per_step = 256          # over all ranks
num_generations = 1             # completions of each prompt (G)
max_prompt_length = 64          # tokens; longer prompts are left out
max_completion_length = 64      # tokens; longer completions are cut off
temperature = 1.0               # of sampling, and of the trainer's logprobs
top_p = 1.0                     # only 1.0: the trainer's logprobs are of the whole distribution
top_k = 0                       # only 0, for the same reason
vllm_gpu_memory_utilization = 0.4  # share of the GPU that vLLM may take while awake
vllm_tensor_parallel_size = 1   # ranks that share an engine; 1: each has its own
# algorithm
critic_model = ""               # a folder or hub id to start the critic from; empty: the model
gamma = 1.0                     # discount of GAE, from 0 to 1
lam = 1.0                       # lambda of GAE, from 0 (one-step) to 1 (Monte Carlo)
epsilon = 0.2                   # ratio clipped below 1 - epsilon
epsilon_high = 0.2              # ratio clipped above 1 + epsilon_high
dual_clip = 0.0                 # ratio clipped above this where the advantage is negative, 3 say; 0: nowhere
value_clip = 0.5                # values clipped to this distance from the old ones; 0: no clipping
loss_aggregation = "token_mean" # of both losses: token_mean, sequence_mean, constant_length
num_epochs = 1                  # passes over a rollout batch
updates_per_epoch = 2           # optimizer steps that a pass is split into
critic_warmup_steps = 5         # rollout batches that train the critic alone first
entropy_coef = 0.0              # weight of the entropy bonus in the loss
kl_coef = 0.0                   # KL to the initial model, taken off the reward; 0: no reference model
kl_target = 0.0                 # nats a sequence: kl_coef adapts to keep to it; 0: kl_coef is fixed
kl_horizon = 10000              # sequences: within so many kl_coef changes by at most 20%
max_kl = 0.0                    # nats a token to the old policy, past which a step's updates end; 0: never
# optimizer
max_steps = 50                  # rollout batches
learning_rate = 1e-4            # peak, of the policy; a 1 B model wants about 1e-6
critic_learning_rate = 2e-3     # peak, of the critic; a 1 B model wants about 1e-5
warmup_steps = 5                # of both rates: linear, the policy's from critic_warmup_steps on
lr_decay = "linear"             # after warm-up, down to 0 at max_steps: linear, cosine; or constant
weight_decay = 0.0              # AdamW's
beta1 = 0.9                     # AdamW's, of the gradient's mean
beta2 = 0.95                    # AdamW's, of its square
grad_clip = 1.0                 # largest norm of the gradient; 0: no clipping
# system
dtype = "auto"                  # float32, bfloat16; auto: bfloat16 on CUDA. Master weights are float32 always
float32_head = True             # with bfloat16: logits in float32 all the same, of trainer and engine; see
                                # model.head_logits
token_budget = 8192             # tokens in a micro-batch; memory grows with it, results do not depend on it
gradient_checkpointing = False  # recompute activations in the backward pass: half the memory, a third slower
offload_optimizer = False       # Adam's moments in host memory between updates: 8 bytes a parameter less
max_skipped_updates = 5         # in a row, for a gradient that is not finite; after so many the run stops
sync_timeout = 600.0            # seconds after which a weight sync that hangs stops the run; 0: never
logprob_gap = 0.0               # nats: a larger mean |trainer - engine| stops the run; 0: 1e-3, bfloat16 0.05
seed = 0                        # of generated training problems, their order, and sampling
# evaluation and output
eval_interval = 10              # steps; the first and the last model are always evaluated
eval_prompts = 128              # held-out prompts, over all ranks; 0: all of gsm8k or the file
eval_samples = 4                # k in mean@k, pass@k, maj@k
save_interval = 20              # steps; the last model is always saved
keep_checkpoints = 2            # newest ones, and the best of those saved at an evaluation
sample_interval = 20            # steps between tables of sample completions
out_dir = ""                    # empty: a new folder under out/
resume = ""                     # auto: the newest checkpoint in out_dir, if any; or a checkpoint folder
# ------------------------------------------------------------------------------------------------------------
settings = configure(globals())

rank, world_size, device, mesh = ranks.set_up()  # one process a device, under torchrun or alone

# ---------------------------------------------------------------- checks: all before a model is loaded
check_values(settings)
check_run(settings, world_size)
check(dual_clip == 0 or dual_clip > 1 + epsilon_high, f"dual_clip={dual_clip}: not over 1 + epsilon_high")
check(critic_warmup_steps < max_steps, f"critic_warmup_steps={critic_warmup_steps} leaves the policy no step")
check(kl_horizon >= prompts_per_step * num_generations, f"kl_horizon={kl_horizon}: less than a step")
check(kl_coef > 0 or kl_target == 0, f"kl_target={kl_target} needs a kl_coef above 0 to start from")
B, G = prompts_per_step // world_size, num_generations          # prompts of a rank, completions of each
N = prompts_per_step * G                                        # sequences of a step, on all ranks
check(N % updates_per_epoch == 0,
      f"updates_per_epoch={updates_per_epoch} does not divide the {N} completions of a step")
compute_dtype = getattr(torch, dtype if dtype != "auto" else
                        "bfloat16" if device.type == "cuda" else "float32")
gap_bound = logprob_gap or {torch.float32: 1e-3, torch.bfloat16: 0.05}[compute_dtype]
with input_errors():
    losses.sequence_weights(torch.ones(1), loss_aggregation, 1, 1, 1)   # refuses what it does not know
    Engine = rollout.engine_class(engine)
    located = None
    if rank == 0:                                               # one clock, and one reader of checkpoints
        now = f"{datetime.datetime.now():%Y%m%d-%H%M%S}"
        located = weights.locate_run(out_dir, resume, f"out/ppo-{task}-{now}")
    out_dir, start_from = ranks.from_master(located)
check(not start_from or os.path.isdir(f"{start_from}/critic"),
      f"{start_from} has no critic: not a run of PPO")
state = weights.load_state(start_from) if start_from else {
    "step": 0, "num_tokens": 0, "skipped_updates": {"actor": 0, "critic": 0}, "kl_coef": kl_coef,
    "settings": settings}
if not kl_target or kl_coef != state["settings"]["kl_coef"]:    # a changed setting replaces the adapted one
    state["kl_coef"] = kl_coef
for key in ("model", "critic_model", "task", "difficulty", "train_prompts", "train_file", "reward",
            "reward_model", "max_prompt_length", "chat", "system_prompt", "prompts_per_step",
            "num_generations", "seed"):                                            # the rest may change
    check(settings[key] == state["settings"][key],
          f"{key}={settings[key]}, but {start_from} comes from a run with {key}={state['settings'][key]}")
first_step = state["step"]
check(first_step <= max_steps, f"max_steps={max_steps}, but {start_from} has made {first_step} steps already")

# ---------------------------------------------------------------- task and tokenizer
with input_errors():
    reward_function = None if reward == "none" else rewards.load_reward(reward, task)
    train_rows = data.load_rows(task, "train", train_prompts, seed, difficulty, train_file)
    eval_rows = data.load_rows(task, "eval", eval_prompts, 0, difficulty, eval_file)  # the same for all seeds
    if reward_function:
        rewards.try_reward(reward_function, train_rows, reward_timeout)
    if reward_model:
        scorer = RewardModel(reward_model, device, compute_dtype, token_budget)
        scorer.score(2 * train_rows[:1], ["Answer: 0", "0"])    # a model that cannot score shows at once
    if model == "tiny":
        model = tiny.FOLDER
        if rank == 0:
            tiny.ensure()
        dist.barrier()
    check_model(model)
    check_model(critic_model or model, "critic_model", tokenizer=False)
    sizes = [AutoConfig.from_pretrained(path).vocab_size for path in (critic_model or model, model)]
    check(sizes[0] == sizes[1],
          f"critic_model={critic_model} has a vocabulary of {sizes[0]} tokens, the model one of {sizes[1]}: "
          "the critic has to read the policy's tokens")
    tokenizer = AutoTokenizer.from_pretrained(model)
    eos_ids = rollout.end_tokens(model, tokenizer)
    encode = lambda row: data.encode_prompt(tokenizer, row["prompt"], chat, system_prompt)
    fitting = lambda rows: [(row, ids) for row in rows if len(ids := encode(row)) <= max_prompt_length]
    train_set, eval_set = fitting(train_rows), fitting(eval_rows)
check(len(train_set) >= prompts_per_step and len(eval_set) >= world_size,
      f"max_prompt_length={max_prompt_length}: only {len(train_set)} training and {len(eval_set)} evaluation "
      f"prompts fit it; a step needs {prompts_per_step}")

# ---------------------------------------------------------------- policy, critic, reference, optimizers
policy = load_policy(start_from or model, mesh, compute_dtype, gradient_checkpointing,
                     float32_head=float32_head)
critic_start = os.path.join(start_from, "critic") if start_from else critic_model or model
critic = load_critic(critic_start, mesh, compute_dtype, gradient_checkpointing)
reference = (load_policy(model, mesh, compute_dtype, trained=False, float32_head=float32_head)
             if kl_coef > 0 else None)
optimizer = torch.optim.AdamW(policy.parameters(), learning_rate, (beta1, beta2), weight_decay=weight_decay,
                              fused=True)
critic_optimizer = torch.optim.AdamW(critic.parameters(), critic_learning_rate, (beta1, beta2),
                                     weight_decay=weight_decay, fused=True)
if offload_optimizer:
    offload(optimizer, device)
    offload(critic_optimizer, device)


def learning_rate_at(step, peak, first=0):
    step, steps = step - first, max_steps - first
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    progress = (step - warmup_steps) / max(1, steps - warmup_steps)
    decay = {"constant": 1, "linear": 1 - progress, "cosine": (1 + math.cos(math.pi * progress)) / 2}
    return peak * decay[lr_decay]


# ---------------------------------------------------------------- engine
sampler = Engine(start_from or model, compute_dtype, max_prompt_length + max_completion_length, eos_ids,
                 vllm_gpu_memory_utilization, vllm_tensor_parallel_size, float32_head)

# ---------------------------------------------------------------- resume
if start_from:
    weights.load_optimizer(start_from, policy, optimizer)
    weights.load_optimizer(critic_start, critic, critic_optimizer)
    for group in optimizer.param_groups + critic_optimizer.param_groups:    # the settings rule
        group |= {"betas": (beta1, beta2), "weight_decay": weight_decay}
log = RunLog(out_dir, __file__, settings, first_step, max_steps)
dist.barrier()
check(os.path.isdir(out_dir), f"out_dir={out_dir} is not on a file system that all ranks see")


def generate(prompts, n, names):
    """n completions of each (row, prompt_ids): rollouts, their rows, their texts; names make the seeds."""
    seeds = [zlib.crc32(f"{seed} {name}".encode()) for name in names]
    rollouts = sampler.generate([ids for _, ids in prompts], n, seeds, max_completion_length, temperature)
    texts = [tokenizer.decode(r.completion_ids, skip_special_tokens=True) for r in rollouts]
    return rollouts, [row for row, _ in prompts for _ in range(n)], texts


@torch.no_grad()
def per_token(network, rollouts, chosen):
    """A policy's logprobs, or the critic's values, of the chosen rollouts' completion tokens: {s: [len]}."""
    results = {}
    for batch, live in micro_batches(rollouts, chosen, token_budget, device):
        values = network(batch) if network is critic else network(batch, temperature)[0]
        if live:
            results |= batch.split(values)
    network.reshard()                                           # without a backward the root stays gathered
    return results


def step_optimizer(name, network, network_optimizer, lr):
    """Clip the gradient and make the step. Returns the norm before clipping; a step is skipped where it is
    not finite, and the run stops after max_skipped_updates of those in a row."""
    norm = torch.nn.utils.clip_grad_norm_(network.parameters(), grad_clip or math.inf).full_tensor().item()
    for group in network_optimizer.param_groups:
        group["lr"] = lr
    if math.isfinite(norm):
        network_optimizer.step()
    network_optimizer.zero_grad()
    state["skipped_updates"][name] = 0 if math.isfinite(norm) else state["skipped_updates"][name] + 1
    if state["skipped_updates"][name] >= max_skipped_updates:
        raise RuntimeError(f"step {step}: {max_skipped_updates} updates of the {name} in a row were skipped, "
                           "for a gradient that is not finite (max_skipped_updates)")
    return norm


def score_completions(row_of, texts):
    """(scores, {part: values}, timeouts) of the reward, the reward model, or their weighted sum."""
    if not reward_model:
        return rewards.score(reward_function, row_of, texts, reward_timeout)
    scores, parts, timeouts = [math.nan] * len(texts), {}, 0
    if reward_function:
        scores, parts, timeouts = rewards.score(reward_function, row_of, texts, reward_timeout)
    judged = scorer.score(row_of, texts)
    totals = [reward_model_weight * b + (0 if math.isnan(a) else reward_weight * a)     # what is not scored
              for a, b in zip(scores, judged)]                                          # adds nothing
    return totals, parts | {"reward_model": judged}, timeouts


def part_means(prefix, parts):
    """{prefix/name/mean: over all ranks} of a reward's named parts; some may be missing on a rank."""
    names = dict.fromkeys(ranks.gathered(list(parts)))
    return {f"{prefix}/{name}/mean": ranks.mean(parts.get(name, [math.nan])) for name in names}


def evaluate():
    """mean@k, pass@k, maj@k on held-out prompts, sampled as in training, from the same seeds every time."""
    places = range(rank, len(eval_set), world_size)
    rollouts, row_of, texts = generate([eval_set[i] for i in places], eval_samples,
                                       [f"eval {i}" for i in places])
    some = rollouts[:32]                                        # shows that the engine has the weights
    rollout.compare_logprobs(some, per_token(policy, some, range(len(some))), gap_bound, tokenizer)
    scores, parts, _ = score_completions(row_of, texts)
    sources, answers = [row.get("source") for row in row_of], map(rewards.extract_answer, texts)
    results = rewards.evaluation(ranks.gathered(list(zip(sources, scores, answers))), eval_samples)
    return results | part_means("eval/rewards", parts)


# ---------------------------------------------------------------- the loop
signals = []                                                    # SIGTERM, Ctrl-C: finish the step, save, exit
for name in (signal.SIGTERM, signal.SIGINT):
    signal.signal(name, lambda number, frame: signals.append(number))
micro = math.ceil(N / updates_per_epoch / world_size / (
    token_budget // (max_prompt_length + max_completion_length)))
log.say(f"{out_dir}: {model}, {sum(p.numel() for p in policy.parameters()) / 1e6:.2f} M parameters in "
        f"{compute_dtype}, on {world_size} x {device.type}, engine {sampler.name}\n"
        f"a step: {prompts_per_step} prompts x {G} completions = {N} sequences -> "
        f"{num_epochs} x {updates_per_epoch} optimizer step(s) of about {micro} micro-batch(es) of "
        f"{token_budget} tokens\n"
        f"the run: {max_steps} steps, {max_steps * N} completions of {len(train_set)} "
        f"prompts; every {eval_interval} steps {len(eval_set)} held-out prompts x {eval_samples}; "
        f"{len(train_rows) - len(train_set)} and {len(eval_rows) - len(eval_set)} prompts "
        f"over max_prompt_length={max_prompt_length} tokens are left out")
if start_from:
    log.say(f"goes on from {start_from}" + ("" if state["world_size"] == world_size else (
        f", which {state['world_size']} ranks wrote: sums round otherwise on {world_size}, so the steps are "
        "not bit for bit those of an unbroken run")))
state |= {"settings": settings, "world_size": world_size}
for step in range(first_step, max_steps + 1):
    step_started = time.perf_counter()
    log.timing.clear()
    metrics = {"step": step}

    # ------------------------------------------------------------ 0 evaluate, save, stop if last
    stopping = step > first_step and any(ranks.gathered([bool(signals) or ranks.orphaned()]))
    if (step % eval_interval == 0 or step == max_steps) and not stopping:
        with log.timed("eval"):
            metrics |= evaluate()
        log.say(f"step {step:4d} | " + " | ".join(f"{name} {metrics[name]:.3f}" for name in metrics
                                                  if name.count("/") == 1))
    if step > first_step and (step % save_interval == 0 or step == max_steps or stopping):
        log.flush()
        with log.timed("save"):
            networks = {"": (policy, optimizer), "critic": (critic, critic_optimizer)}
            problem = weights.save_checkpoint(
                os.path.join(out_dir, f"checkpoint-{step}"), networks, tokenizer, state, keep_checkpoints,
                log.eval_scores())
        if problem:
            log.say(f"step {step}: no checkpoint, the older ones stand: {problem}")
            check(step < max_steps and not stopping, "the last model could not be saved")
    if stopping:
        log.say(f"stopped by a signal after {step} steps; --out_dir={out_dir} --resume=auto goes on")
        break
    if step == max_steps:
        log.metrics(metrics | log.timing)
        break

    # ------------------------------------------------------------ 1 rollout
    with log.timed("gen"):
        picked, _ = data.next_rows(len(train_set), step * prompts_per_step, prompts_per_step, seed, {})
        places = range(rank * B, (rank + 1) * B)                # disjoint prompts on every rank
        own_rollouts, row_of, texts = generate([train_set[picked[i]] for i in places], G,
                                               [f"{step} {i}" for i in places])

    # ------------------------------------------------------------ 2 reward
    with log.timed("reward"):
        own_scores, parts, timeouts = score_completions(row_of, texts)

    # ------------------------------------------------------------ 3 old logprobs, values, reference: once
    rollouts = ranks.gathered(own_rollouts)                     # N, from here on those of all ranks
    score = torch.tensor(ranks.gathered(own_scores), device=device)                     # [N], NaN: not scored
    lengths = torch.tensor([len(r.completion_ids) for r in rollouts], device=device)    # [N]
    order = random.Random(f"{seed} {step}").sample(range(N), N)
    updates = [order[u::updates_per_epoch] for u in range(updates_per_epoch)]   # each one's sequences
    shares = [deal(rollouts, update, world_size)[rank] for update in updates]   # and this rank's of them
    dealt = sum(shares, [])
    with log.timed("old_log_prob"):
        old_logps = per_token(policy, rollouts, dealt)          # {s: [len]}, as the next two
    metrics |= rollout.compare_logprobs(rollouts, old_logps, gap_bound, tokenizer)
    with log.timed("values"):
        old_values = per_token(critic, rollouts, dealt)
    with log.timed("ref"):
        ref_logps = per_token(reference, rollouts, dealt) if reference else old_logps

    # ------------------------------------------------------------ 4 rewards to advantages
    with log.timed("adv"):
        flat = lambda tensors: torch.cat([tensors[s] for s in dealt] or [torch.empty(0, device=device)])
        old, ref, value, lens = flat(old_logps), flat(ref_logps), flat(old_values), lengths[dealt].tolist()
        kl = losses.kl_penalty(old, ref, "k1")                                          # [C]
        token_reward = losses.token_rewards(score[dealt], kl, state["kl_coef"], lens)   # [C]
        raw_adv, ret = losses.gae(token_reward, value, lens, gamma, lam)                # [C], [C]
        adv = losses.whiten(raw_adv, ranks.mean)                                        # [C]
        # Unscored sequences are NaN in adv and ret; their weight below is 0, but every count includes them.
        advs, rets = (dict(zip(dealt, x.nan_to_num(0.0).split(lens))) for x in (adv, ret))

    # ------------------------------------------------------------ 5 update
    train_policy = step >= critic_warmup_steps
    sums, grad_norms, critic_norms, stopped = torch.zeros(8, device=device), [], [], False
    lr = learning_rate_at(step, learning_rate, critic_warmup_steps) if train_policy else 0.0
    critic_lr = learning_rate_at(step, critic_learning_rate)
    for update, share in num_epochs * list(zip(updates, shares)):
        # Count over the global batch, before it is split: the gradient is then the same for any number of
        # ranks, any micro-batch size and any packing.
        update_tokens = lengths[update].sum()
        weight = score.isfinite() * losses.sequence_weights(
            lengths, loss_aggregation, update_tokens, len(update), max_completion_length)               # [N]
        turns = micro_batches(rollouts, share, token_budget, device)

        with log.timed("update_critic"):
            for batch, live in turns:
                values = critic(batch)                                                  # [C]
                if not live:
                    (0 * values.sum()).backward()
                    continue
                value_losses, value_clipped = losses.value_loss(
                    values, batch.flat(old_values), batch.flat(rets), value_clip)       # [C] each
                vf_loss = (batch.spread(weight) * value_losses).sum()
                (vf_loss * world_size).backward()               # FSDP averages over ranks: undo it
                sums[:2] += torch.stack([vf_loss.detach(), value_clipped.sum()])
            critic_norms.append(step_optimizer("critic", critic, critic_optimizer, critic_lr))

        with log.timed("update_actor"):
            if not train_policy or stopped:
                continue
            update_kl = torch.zeros(1, device=device)
            for batch, live in turns:
                logp, entropy = policy(batch, temperature)                              # [C], [C]
                if not live:
                    (0 * logp.sum()).backward()
                    continue
                token_loss, low, high = losses.policy_loss(
                    logp, batch.flat(old_logps), batch.flat(advs), batch.mean, epsilon, epsilon_high, "clip",
                    dual_clip)                                                          # [C] each
                if entropy_coef:
                    token_loss = token_loss - entropy_coef * entropy
                loss = (batch.spread(weight) * token_loss).sum()
                (loss * world_size).backward()
                kl_sum = losses.kl_penalty(batch.flat(old_logps), logp.detach(), "k3").sum()
                update_kl += kl_sum
                sums[2:] += torch.stack([loss.detach(), kl_sum, torch.full_like(kl_sum, len(logp)),
                                         *(x.sum().detach() for x in (entropy, low, high))])
            if max_kl and ranks.total(update_kl)[0] / update_tokens > max_kl:
                optimizer.zero_grad()                           # too far: this update is not made either
                stopped = True
                continue
            grad_norms.append(step_optimizer("actor", policy, optimizer, lr))

    # ------------------------------------------------------------ 6 weight sync
    with log.timed("sync"), weights.deadline(sync_timeout, f"the weight sync of step {step}"):
        sampler.load_weights(weights.full_weights(policy, compute_dtype, sampler.weight_names))

    # ------------------------------------------------------------ 7 log
    tokens = sum(len(r.prompt_ids) + len(r.completion_ids) for r in rollouts)
    sum_vf, sum_vf_clipped, sum_loss, sum_ppo_kl, seen, sum_entropy, sum_low, sum_high = ranks.total(sums)
    seen, tried = max(seen, 1.0), max(len(grad_norms) + stopped, 1)     # tokens and updates of the policy
    trained_tokens, sum_kl = lengths.sum().item(), ranks.total([kl.sum()])[0]
    error = ret - value                                         # of the critic before it saw this batch
    error_variance, return_variance = (ranks.mean(x ** 2) - ranks.mean(x) ** 2 for x in (error, ret))
    finite_norms, finite_critic_norms = ([norm for norm in norms if math.isfinite(norm)]
                                         for norms in (grad_norms, critic_norms))
    metrics |= {
        "reward": ranks.mean(score),
        **part_means("rewards", parts), "rewards/timeouts": ranks.total([timeouts])[0],
        "rewards/unscored": score.isnan().sum().item(),
        "completions/mean_length": ranks.mean(lengths), "completions/min_length": lengths.min().item(),
        "completions/max_length": lengths.max().item(),
        "completions/clipped_ratio": ranks.mean([r.finish_reason == "length" for r in rollouts]),
        "critic/vf_loss": sum_vf / len(critic_norms), "critic/lr": critic_lr,
        "critic/grad_norm": sum(finite_critic_norms) / max(len(finite_critic_norms), 1),
        "critic/vf_clipfrac": sum_vf_clipped / trained_tokens / num_epochs,
        "critic/vf_explained_var": 1 - error_variance / return_variance if return_variance > 1e-8 else 0.0,
        "critic/values/mean": ranks.mean(value), "critic/returns/mean": ranks.mean(ret),
        "critic/advantages/mean": ranks.mean(raw_adv),
        "critic/advantages/max": max(ranks.gathered([x.max().item() for x in advs.values()])),
        "critic/advantages/min": min(ranks.gathered([x.min().item() for x in advs.values()])),
        "critic/rewards/mean": ranks.mean([x.sum() for x in token_reward.split(lens)]),
        "loss": sum_loss / tried, "entropy": sum_entropy / seen,       # 0 while the critic learns alone
        "kl": sum_kl / trained_tokens, "kl_coef": state["kl_coef"], "actor/ppo_kl": sum_ppo_kl / seen,
        "clip_ratio/low_mean": sum_low / seen, "clip_ratio/high_mean": sum_high / seen,
        "clip_ratio/region_mean": (sum_low + sum_high) / seen, "actor/updates": len(finite_norms),
        "actor/skipped_updates": len(grad_norms) - len(finite_norms),
        "critic/skipped_updates": len(critic_norms) - len(finite_critic_norms),
        "grad_norm": sum(finite_norms) / max(len(finite_norms), 1), "learning_rate": lr,
        "num_tokens": state["num_tokens"] + tokens}
    if kl_target and train_policy:
        state["kl_coef"] = losses.adapted_kl_coef(state["kl_coef"], sum_kl / N, kl_target,
                                                  kl_horizon, N)
    state |= {"step": step + 1, "num_tokens": metrics["num_tokens"]}
    log.timing["timing_s/step"] = time.perf_counter() - step_started
    metrics |= log.timing | {
        "perf/throughput": tokens / log.timing["timing_s/step"],
        "perf/max_memory_allocated_gb": (peak_memory() - sampler.allocated) / 1e9}
    log.metrics(metrics)
    samples = [{"step": step, "prompt": row_of[i]["prompt"], "completion": texts[i], "reward": own_scores[i],
                "finish_reason": own_rollouts[i].finish_reason, "truth": row_of[i].get("answer")}
               for i in range(0, B * G, G)][:8]
    log.samples(samples)
    if step % sample_interval == 0:
        log.say("\n".join(f"    {data.prompt_text(s['prompt'])[-60:]!r:36} -> {s['completion'][-60:]!r:52} "
                          f"reward {s['reward']:g}, truth {s['truth']}" for s in samples[:4]))
    log.say(f"step {step:4d} | reward {metrics['reward']:.3f} | "
            f"length {metrics['completions/mean_length']:5.1f} | entropy {metrics['entropy']:.3f} | "
            f"explained var {metrics['critic/vf_explained_var']:.2f} | "
            f"logprob gap {metrics['sampling/sampling_logp_difference/max']:.1e} | "
            f"{log.timing['timing_s/step']:.1f} s: gen {log.timing['timing_s/gen']:.1f}, "
            f"critic {log.timing['timing_s/update_critic']:.1f}, "
            f"policy {log.timing['timing_s/update_actor']:.1f}, sync {log.timing['timing_s/sync']:.1f}")
    log.advance(reward=f"{metrics['reward']:.3f}")

# ---------------------------------------------------------------- teardown
log.close()
sampler.close()
ranks.leave()
