"""
GRPO, the whole run in one file: rollout, reward, advantage, loss, step, weight sync, evaluation, checkpoint.

    torchrun train_grpo.py                                   # one process, laptop or GPU
    torchrun --nproc_per_node=8 train_grpo.py config/gsm8k.py --model=Qwen/Qwen3-1.7B
    python train_grpo.py config/dapo.py --seed=1             # a recipe, and an override
    python train_grpo.py --help                              # every setting

Without arguments it trains the small model that tiny.py makes, on algebra problems, on a CPU without network.

Where it differs from the paper (Shao et al. 2024, https://arxiv.org/abs/2402.03300):
1. Every token of the global batch weighs alike (DAPO, https://arxiv.org/abs/2503.14476, 3.3). With the
   paper's --loss_aggregation=sequence_mean every completion does, so a token of a long one weighs less.
2. No KL term, so no reference model in memory: with a verifier as the reward, newer recipes drop it.
   --kl_coef=0.04 is the paper's.
3. The reference stays the initial model, and only the outcome is rewarded.
One update a step, as in the paper's own runs: strictly on-policy, the ratio is 1 and nothing is clipped.
--updates_per_step=4 makes four, each on a quarter of the rollout: PPO's minibatches.
"""
import datetime
import math
import os
import random
import signal
import time
import zlib
from collections import defaultdict

import torch
import torch.distributed as dist
from transformers import AutoTokenizer

import data
import losses
import ranks
import rewards
import rollout
import tiny
import weights
from checks import check_grpo, check_run, check_values
from configurator import check, configure, input_errors
from model import check_model, deal, load_policy, micro_batches, offload
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
prompts_per_step = 32           # over all ranks
num_generations = 8             # completions of each prompt (G), at least 2 but for remax and reinforce++
filter_groups = False           # leave out prompts whose completions all score alike, of statistics and loss
max_num_gen_batches = 1         # rollouts a step, at most, until filter_groups has enough prompts; DAPO: 10
skip_after = 0                  # times in a row that a prompt's completions all score alike, after which it
                                # rests for an epoch, then two, …; 0: never
max_prompt_length = 64          # tokens; longer prompts are left out
max_completion_length = 64      # tokens; longer completions are cut off
temperature = 1.0               # of sampling, and of the trainer's logprobs
top_p = 1.0                     # only 1.0: the trainer's logprobs are of the whole distribution
top_k = 0                       # only 0, for the same reason
vllm_gpu_memory_utilization = 0.4  # share of the GPU that vLLM may take while awake
vllm_tensor_parallel_size = 1   # ranks that share an engine; 1: each has its own
# algorithm
overlong_buffer = 0             # over so many tokens before max_completion_length the score falls; 0: none
overlong_penalty = 1.0          # by so much at the end
mask_truncated = False          # leave completions that were cut off out of the loss and its denominator
advantage = "grpo"              # grpo, dr_grpo (no std), grpo_batch, rloo, opo, remax, pass_at_k,
                                # reinforce++, reinforce++_baseline; see losses.group_advantages
pass_k = 4                      # k of pass_at_k, which is for rewards of 0 and 1
loss_type = "clip"              # clip (PPO), gspo, gmpo, cispo, sapo, gpg, clip_cov, kl_cov; see
                                # losses.policy_loss
loss_aggregation = "token_mean" # token_mean (DAPO), sequence_mean (GRPO), constant_length (Dr. GRPO), or
                                # sequence_sum
epsilon = 0.2                   # ratio clipped below 1 - epsilon
epsilon_high = 0.2              # ratio clipped above 1 + epsilon_high; DAPO: 0.28
dual_clip = 0.0                 # clip, gspo, clip_cov: loss at most so many |advantage|, e.g. 3; 0: no bound
cov_share = 2e-4                # of a step's tokens, that clip_cov and kl_cov act on; 2e-3 for kl_cov at 7 B
updates_per_step = 1            # each on a share of the step's completions; above 1 the ratio leaves 1
kl_coef = 0.0                   # weight of the KL to the initial model; 0: no reference model
kl_in = "loss"                  # or reward: taken off each completion's score, summed over its tokens
kl_estimator = "k3"             # in the loss k2, k3 (GRPO), k3+, k3_is; in the reward k1 (right), k2, k3; see
                                # losses.kl_penalty
entropy_coef = 0.0              # weight of the entropy bonus
entropy_decay = "constant"      # of that weight, down to 0 at max_steps: linear, cosine; or constant
old_logprobs = "trainer"        # the ratio's denominator: trainer, or engine (as sampled: the bypass form)
engine_correction = "none"      # for the gap from engine to trainer: token_truncate, token_mask,
                                # sequence_truncate, sequence_mask, geometric_mask; see
                                # losses.correction_weights
correction_low = 0.5            # masks: weight 0 where the ratio is lower
correction_high = 2.0           # masks: weight 0 where it is higher; truncate: no weight is higher
# optimizer
max_steps = 60                  # of rollout, reward, update and sync
learning_rate = 1e-4            # peak; a 1 B model wants about 1e-6
warmup_steps = 5                # linear, from learning_rate / warmup_steps
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
logprob_gap = 0.0               # nats: a larger mean |trainer - engine| stops the run; 0: 1e-3, bf16 0.05
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
check_grpo(settings)
B, G = prompts_per_step // world_size, num_generations          # prompts of a rank, completions of each
N = prompts_per_step * G                                        # sequences of a step, on all ranks
kl_in_loss = kl_coef > 0 and kl_in == "loss"
compute_dtype = getattr(torch, dtype if dtype != "auto" else
                        "bfloat16" if device.type == "cuda" else "float32")
gap_bound = logprob_gap or {torch.float32: 1e-3, torch.bfloat16: 0.05}[compute_dtype]
with input_errors():
    Engine = rollout.engine_class(engine)
    located = None
    if rank == 0:                                               # one clock, and one reader of checkpoints
        now = f"{datetime.datetime.now():%Y%m%d-%H%M%S}"
        located = weights.locate_run(out_dir, resume, f"out/grpo-{task}-{now}")
    out_dir, start_from = ranks.from_master(located)
check(not start_from or not os.path.isdir(f"{start_from}/critic"), f"{start_from} has a critic: a run of PPO")
state = weights.load_state(start_from) if start_from else {
    "step": 0, "position": 0, "history": {}, "num_tokens": 0, "skipped_updates": 0, "settings": settings}
for key in ("model", "task", "difficulty", "train_prompts", "train_file", "reward", "reward_model",
            "max_prompt_length", "chat", "system_prompt", "prompts_per_step", "num_generations",
            "seed"):                                            # the rest may change
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
    tokenizer = AutoTokenizer.from_pretrained(model)
    eos_ids = rollout.end_tokens(model, tokenizer)
    encode = lambda row: data.encode_prompt(tokenizer, row["prompt"], chat, system_prompt)
    fitting = lambda rows: [(row, ids) for row in rows if len(ids := encode(row)) <= max_prompt_length]
    train_set, eval_set = fitting(train_rows), fitting(eval_rows)
check(len(train_set) >= prompts_per_step * max_num_gen_batches and len(eval_set) >= world_size,
      f"max_prompt_length={max_prompt_length}: only {len(train_set)} training and {len(eval_set)} evaluation "
      f"prompts fit it, of {len(train_rows)} and {len(eval_rows)}; a step needs prompts_per_step="
      f"{prompts_per_step}" + f" times max_num_gen_batches={max_num_gen_batches}" * (max_num_gen_batches > 1))

# ---------------------------------------------------------------- policy, reference, optimizer
policy = load_policy(start_from or model, mesh, compute_dtype, gradient_checkpointing,
                     float32_head=float32_head)
reference = (load_policy(model, mesh, compute_dtype, trained=False, float32_head=float32_head)
             if kl_coef > 0 else None)
optimizer = torch.optim.AdamW(policy.parameters(), learning_rate, (beta1, beta2), weight_decay=weight_decay,
                              fused=True)
if offload_optimizer:
    offload(optimizer, device)


def decayed(kind, progress):
    return {"constant": 1, "linear": 1 - progress, "cosine": (1 + math.cos(math.pi * progress)) / 2}[kind]


def learning_rate_at(step):
    if step < warmup_steps:
        return learning_rate * (step + 1) / warmup_steps
    return learning_rate * decayed(lr_decay, (step - warmup_steps) / max(1, max_steps - warmup_steps))


# ---------------------------------------------------------------- engine
sampler = Engine(start_from or model, compute_dtype, max_prompt_length + max_completion_length, eos_ids,
                 vllm_gpu_memory_utilization, vllm_tensor_parallel_size, float32_head)

# ---------------------------------------------------------------- resume
if start_from:
    weights.load_optimizer(start_from, policy, optimizer)
    for group in optimizer.param_groups:                        # the settings rule, not the checkpoint
        group |= {"betas": (beta1, beta2), "weight_decay": weight_decay}
log = RunLog(out_dir, __file__, settings, first_step, max_steps)
dist.barrier()
check(os.path.isdir(out_dir), f"out_dir={out_dir} is not on a file system that all ranks see")


def generate(prompts, n, names, temperature=temperature):
    """n completions of each (row, prompt_ids): rollouts, their rows, their texts; names make the seeds."""
    seeds = [zlib.crc32(f"{seed} {name}".encode()) for name in names]
    rollouts = sampler.generate([ids for _, ids in prompts], n, seeds, max_completion_length, temperature)
    texts = [tokenizer.decode(r.completion_ids, skip_special_tokens=True) for r in rollouts]
    return rollouts, [row for row, _ in prompts for _ in range(n)], texts


@torch.no_grad()
def per_token(network, rollouts, chosen):
    """The network's logprobs of the chosen rollouts' completion tokens: {s: [len]}."""
    results = {}
    for batch, live in micro_batches(rollouts, chosen, token_budget, device):
        logp, _ = network(batch, temperature)
        if live:
            results |= batch.split(logp)
    network.reshard()                                           # without a backward the root stays gathered
    return results


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
micro = math.ceil(N / updates_per_step / world_size / (
    token_budget // (max_prompt_length + max_completion_length)))
log.say(f"{out_dir}: {model}, {sum(p.numel() for p in policy.parameters()) / 1e6:.2f} M parameters in "
        f"{compute_dtype}, on {world_size} x {device.type}, engine {sampler.name}\n"
        f"a step: {prompts_per_step} prompts x {G} completions = {N} sequences -> "
        f"{updates_per_step} optimizer step(s) of about {micro} micro-batch(es) of {token_budget} tokens\n"
        f"the run: {max_steps} steps, {'at least ' * filter_groups}{max_steps * N} completions of "
        f"{len(train_set)} prompts; every {eval_interval} steps {len(eval_set)} held-out prompts x "
        f"{eval_samples}; "
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
            problem = weights.save_checkpoint(
                os.path.join(out_dir, f"checkpoint-{step}"), {"": (policy, optimizer)}, tokenizer, state,
                keep_checkpoints, log.eval_scores())
        if problem:
            log.say(f"step {step}: no checkpoint, the older ones stand: {problem}")
            check(step < max_steps and not stopping, "the last model could not be saved")
    if stopping:
        log.say(f"stopped by a signal after {step} steps; --out_dir={out_dir} --resume=auto goes on")
        break
    if step == max_steps:
        log.metrics(metrics | log.timing)
        break

    # ------------------------------------------------------------ 1 rollout, 2 reward
    # Once; with filter_groups until the completions of enough prompts differ in score (DAPO, 3.2).
    picked, sampled, scores, greedy_scores = [], [], [], []     # of all ranks
    parts, timeouts = defaultdict(list), 0                      # of this rank
    for gen_batch in range(max_num_gen_batches):
        with log.timed("gen"):
            rows, state["position"] = data.next_rows(len(train_set), state["position"], prompts_per_step,
                                                     seed, state["history"])
            places = range(rank * B, (rank + 1) * B)            # other ones on every rank
            prompts = [train_set[rows[i]] for i in places]
            names = [f"{step} {gen_batch * prompts_per_step + i}" for i in places]  # on any number of ranks
            own_rollouts, row_of, texts = generate(prompts, G, names)
            if advantage == "remax":                            # its baseline: the score of a greedy one
                _, greedy_rows, greedy_texts = generate(prompts, 1, names, temperature=0)
        with log.timed("reward"):
            own_scores, own_parts, own_timeouts = score_completions(row_of, texts)
            own_greedy = score_completions(greedy_rows, greedy_texts)[0] if advantage == "remax" else []
        timeouts += own_timeouts
        for name, values in own_parts.items():
            parts[name] += values
        picked += rows
        sampled += ranks.gathered(own_rollouts)                 # in the order of the ranks: that of the rows
        scores += ranks.gathered(own_scores)
        greedy_scores += ranks.gathered(own_greedy)
        stds = losses.group_std(torch.tensor(scores), G).tolist()                       # [prompts so far]
        differ = [p for p in range(len(picked)) if stds[p] > 0]
        if len(differ) >= prompts_per_step:
            break
    means = torch.tensor(scores).view(-1, G).nanmean(1)         # pass rates, where rewards are 0 and 1
    data.record_visits(state["history"], picked, means.tolist(), stds, skip_after)
    # The step's prompts: all; or of several batches those that differ first. Their N sequences, s = 0 to
    # N - 1, are those of all ranks from here on. The counted ones are in the loss and in its denominator.
    alike = [p for p in range(len(picked)) if stds[p] == 0]
    kept = sorted((differ + alike)[:prompts_per_step])
    rollouts = [sampled[p * G + g] for p in kept for g in range(G)]                     # [N]
    score = torch.tensor(scores, device=device).view(-1, G)[kept].flatten()             # [N], NaN: not scored
    greedy = torch.tensor([greedy_scores[p] for p in kept] if greedy_scores else [], device=device)  # [N / G]
    counted = [s for s, r in enumerate(rollouts) if not (filter_groups and stds[kept[s // G]] == 0)
               and not (mask_truncated and r.finish_reason == "length")]
    if os.path.isdir(checkpoint := os.path.join(out_dir, f"checkpoint-{step}")):        # for replay.py
        log.rollouts(checkpoint, settings | {"step": step}, rollouts, score.tolist(), greedy.tolist())

    # ------------------------------------------------------------ 3 advantage
    lengths = torch.tensor([len(r.completion_ids) for r in rollouts], device=device)    # [N]
    shaped = score.clone()                                                              # [N]
    if overlong_buffer:
        shaped += overlong_penalty * losses.overlong_penalty(lengths, max_completion_length, overlong_buffer)
    kls = torch.zeros(N, device=device)                         # of whole completions, where in the reward
    if kl_coef > 0 and kl_in == "reward":
        with log.timed("ref"):
            share = deal(rollouts, range(N), world_size)[rank]
            for s, ref_logp in per_token(reference, rollouts, share).items():
                logp = ref_logp.new_tensor(rollouts[s].logprobs)            # the engine's: it sampled
                kls[s] = losses.kl_penalty(logp, ref_logp, kl_estimator).sum()
            kls = torch.tensor(ranks.total(kls), device=device)
        shaped -= kl_coef * kls
    if filter_groups:                                           # what is left out is in no statistics either
        shaped[torch.tensor([stds[p] == 0 for p in kept], device=device).repeat_interleave(G)] = math.nan
    adv = losses.group_advantages(shaped, G, advantage, lengths, greedy, pass_k)        # [N]

    # ------------------------------------------------------------ 4 updates; old and reference logprobs
    order = random.Random(f"{seed} {step}").sample(counted, len(counted))       # each update has some of all
    updates = [order[u::updates_per_step] for u in range(updates_per_step)]     # prompts
    # Without an advantage a sequence has no gradient: it is counted, and where no other term gives it one,
    # not computed: four in five at the end of the default run, which takes 1.7 times as long with them.
    moving = set(counted)
    if not (kl_in_loss or entropy_coef > 0 or loss_type == "kl_cov"):
        moving &= set(adv.nonzero()[:, 0].tolist())
    shares = [deal(rollouts, [s for s in update if s in moving], world_size)[rank] for update in updates]
    dealt = sum(shares, [])                                     # what this rank trains on
    engine_logps = {s: torch.tensor(rollouts[s].logprobs, device=device) for s in dealt}   # {s: [len]}
    # The trainer's logprobs of the policy that sampled: where several updates share the rollout by a forward
    # of their own, else by the first update's, which nothing has moved yet.
    trainer_logps = {}                                          # {s: [len]}
    if updates_per_step > 1 and old_logprobs == "trainer":
        with log.timed("old_log_prob"):
            trainer_logps = per_token(policy, rollouts, dealt)
    if kl_in_loss:
        with log.timed("ref"):
            ref_logps = per_token(reference, rollouts, dealt)
    marked = {}                                                 # {s: [len]}, on every rank alike
    if loss_type in ("clip_cov", "kl_cov"):
        marks = losses.covariance_marks(
            [torch.tensor(rollouts[s].logprobs) for s in counted], adv[counted].cpu(), loss_type, cov_share,
            torch.Generator().manual_seed(zlib.crc32(f"{seed} {step}".encode())))
        marked = {s: mark.to(device) for s, mark in zip(counted, marks)}

    # ------------------------------------------------------------ 5 update
    with log.timed("update_actor"):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate_at(step)
        entropy_bonus = entropy_coef * decayed(entropy_decay, step / max_steps)
        sums, grad_norms = torch.zeros(6, device=device), []
        for u, (update, share) in enumerate(zip(updates, shares)):
            # Count over the global batch, before it is split: the gradient is then the same for any number
            # of ranks, any micro-batch size and any packing.
            weight = losses.sequence_weights(lengths, loss_aggregation, lengths[update].sum().clamp(min=1),
                                             max(1, len(update)), max_completion_length)                # [N]
            for batch, live in micro_batches(rollouts, share, token_budget, device):
                logp, entropy = policy(batch, temperature)                              # [C], [C]
                if not live:                                    # other ranks have more: FSDP waits for all
                    (0 * logp.sum()).backward()
                    continue
                if u == 0 and batch.sequences[0] not in trainer_logps:    # nothing moved since
                    trainer_logps |= batch.split(logp.detach())  # sampling: this forward is the old policy's
                old_logp = batch.flat(engine_logps if old_logprobs == "engine" else trainer_logps)
                token_loss, low, high = losses.policy_loss(
                    logp, old_logp, batch.spread(adv), batch.mean,
                    epsilon, epsilon_high, loss_type, dual_clip,
                    batch.flat(marked) if marked else None)                             # [C] each
                correction = losses.correction_weights(
                    old_logp, batch.flat(engine_logps), batch.mean, batch.spread(lengths),
                    engine_correction, correction_low, correction_high)                 # [C]
                token_loss = correction * token_loss            # but not the next two
                kl = torch.zeros_like(logp)
                if kl_in_loss:
                    kl = losses.kl_penalty(logp, batch.flat(ref_logps), kl_estimator, old_logp)     # [C]
                    token_loss = token_loss + kl_coef * kl
                if entropy_bonus:                               # its backward is not free
                    token_loss = token_loss - entropy_bonus * entropy
                loss = (batch.spread(weight) * token_loss).sum()
                (loss * world_size).backward()                  # FSDP averages over ranks: undo it
                sums += torch.stack([x.detach().sum() for x in (loss, entropy, kl, low, high, correction)])
            if u == 0:                                          # the policy is still the one that sampled
                metrics |= rollout.compare_logprobs(rollouts, trainer_logps, gap_bound, tokenizer)
            norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), grad_clip or math.inf)
            grad_norms.append(norm.full_tensor().item())
            finite = math.isfinite(grad_norms[-1])
            if finite and update:                               # if none is counted, momentum would move it
                optimizer.step()
            optimizer.zero_grad()
            state["skipped_updates"] = 0 if finite else state["skipped_updates"] + 1        # in a row
            if state["skipped_updates"] >= max_skipped_updates:
                raise RuntimeError(f"step {step}: {max_skipped_updates} updates in a row were skipped, for a "
                                   "gradient that is not finite (max_skipped_updates)")

    # ------------------------------------------------------------ 6 weight sync
    with log.timed("sync"), weights.deadline(sync_timeout, f"the weight sync of step {step}"):
        sampler.load_weights(weights.full_weights(policy, compute_dtype, sampler.weight_names))

    # ------------------------------------------------------------ 7 log
    tokens = sum(len(r.prompt_ids) + len(r.completion_ids) for r in sampled)
    trained_tokens = max(1, lengths[sorted(moving)].sum().item())
    sampled_lengths = [len(r.completion_ids) for r in sampled]
    finite_norms = [norm for norm in grad_norms if math.isfinite(norm)]
    sum_loss, sum_entropy, sum_kl, sum_low, sum_high, sum_correction = ranks.total(sums)
    state |= {"step": step + 1, "num_tokens": state["num_tokens"] + tokens}
    log.timing["timing_s/step"] = time.perf_counter() - step_started
    metrics |= {
        "reward": ranks.mean(scores),                           # of all that was sampled, as the next ones
        "reward_std": ranks.mean(stds), "frac_reward_zero_std": 1 - len(differ) / len(picked),
        "rewards/shaped/mean": ranks.mean(shaped),              # penalty and KL taken off
        **part_means("rewards", parts), "rewards/timeouts": ranks.total([timeouts])[0],
        "rewards/unscored": sum(map(math.isnan, scores)),
        "completions/mean_length": ranks.mean(sampled_lengths),
        "completions/min_length": min(sampled_lengths), "completions/max_length": max(sampled_lengths),
        "completions/clipped_ratio": ranks.mean([r.finish_reason == "length" for r in sampled]),
        "train/num_gen_batches": gen_batch + 1,
        "train/resting_prompts": sum(visits["rest"] > 0 for visits in state["history"].values()),
        "train/frac_counted": len(counted) / N,                 # in the loss and its denominator
        "loss": sum_loss / updates_per_step,
        "entropy": sum_entropy / trained_tokens,
        "kl": sum_kl / trained_tokens if kl_in == "loss" else (kls.sum() / lengths.sum()).item(),
        "clip_ratio/low_mean": sum_low / trained_tokens, "clip_ratio/high_mean": sum_high / trained_tokens,
        "clip_ratio/region_mean": (sum_low + sum_high) / trained_tokens,
        "sampling/correction_mean": sum_correction / trained_tokens,
        "grad_norm": sum(finite_norms) / max(len(finite_norms), 1),
        "actor/skipped_updates": len(grad_norms) - len(finite_norms), "learning_rate": learning_rate_at(step),
        "num_tokens": state["num_tokens"], "perf/throughput": tokens / log.timing["timing_s/step"],
        "perf/max_memory_allocated_gb": (peak_memory() - sampler.allocated) / 1e9} | log.timing
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
            f"grad norm {metrics['grad_norm']:.2f} | "
            f"logprob gap {metrics['sampling/sampling_logp_difference/max']:.1e} | "
            f"{log.timing['timing_s/step']:.1f} s: gen {log.timing['timing_s/gen']:.1f}, "
            f"update {log.timing['timing_s/update_actor']:.1f}, sync {log.timing['timing_s/sync']:.1f}")
    log.advance(reward=f"{metrics['reward']:.3f}")

# ---------------------------------------------------------------- teardown
log.close()
sampler.close()
ranks.leave()
