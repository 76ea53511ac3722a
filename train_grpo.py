"""
GRPO (Shao et al. 2024, https://arxiv.org/abs/2402.03300), a whole run in one file.

    torchrun train_grpo.py                                   # one process, on a laptop or a GPU
    torchrun --nproc_per_node=8 train_grpo.py config/gsm8k.py --model=Qwen/Qwen3-1.7B
    python train_grpo.py config/gspo.py --seed=1             # a published variant, and one setting changed
    python train_grpo.py --help                              # every setting

Each step samples G completions of each of its prompts and scores them. A completion's advantage is its score
compared with the other scores of the same prompt, (r - mean) / std, and all its tokens get that advantage.
The policy is then updated with PPO's clipped loss, without a critic, and the engine that samples gets the new
weights. Without arguments this trains the small model of tiny.py on algebra problems, on a CPU.

The algorithm differs from the paper in two defaults; config/grpo.py sets both as in the paper:
1. Every token of an update has the same weight (DAPO, https://arxiv.org/abs/2503.14476, 3.3). In the paper
   every completion has the same weight, so a token of a long completion counts for less.
2. There is no KL to a reference model, and so no such model in memory; newer recipes with verifiable rewards
   drop it as well. With --kl_coef=0.04, the paper's, the reference is the initial model throughout.
By default a step makes one update, as in the paper's runs. The policy is then still the one that sampled, so
the ratio is 1 and nothing is clipped. With --updates_per_step=4 each update takes a quarter of the step's
completions, and from the second update on the policy differs from the one that sampled them.
"""
import gc
import math
import random
import zlib

gc.disable()                    # set_up() enables it again; importing takes a third less time without it
import torch

import data
import losses
import ranks
import rewards
import rollout
import tiny
from checks import check_grpo, check_run
from configurator import configure, input_errors
from episodes import Player
from loading import check_trainable, load_policy, load_tokenizer, precision
from models import offload, token_logprobs
from packing import deal, micro_batches
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
engine_correction = "none"      # none, or weights by the ratio of trainer to engine: token_truncate (TIS),
                                # token_mask, sequence_truncate, sequence_mask, geometric_mask
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

# ---------------------------------------------------------------- set-up: processes, data, models, engine
# One process per device, under torchrun or alone; FSDP2 shards over the mesh, which is all of them.
rank, world_size, device, mesh = ranks.set_up(timeout, sequence_parallel_size)
check_run(settings, world_size)
check_grpo(settings)
B, G = prompts_per_step // world_size, num_generations          # prompts per rank, completions per prompt
N = prompts_per_step * G                                        # completions per step, on all ranks
compute_dtype, gap_bound = precision(dtype, logprob_gap, device)
kl_in_loss = kl_coef > 0 and kl_in == "loss"
# These terms of the loss have a gradient even where the advantage is 0. If you add such a term in section 5,
# add its condition here, or rollouts with advantage 0 do not get it.
moves_without_advantage = kl_in_loss or entropy_coef > 0 or loss_type == "kl_cov"
# With one update per step the policy has not changed since it sampled, so its own forward gives the old
# logprobs. For several updates they have to be computed before the first one.
old_needs_forward = updates_per_step > 1 and old_logprobs == "trainer"
run = Run(settings, __file__)                                   # its folder, and where it resumes from
with input_errors():
    base = tiny.ensure(model)
    check_trainable(base, length=max_prompt_length + max_completion_length)
    tokenizer = load_tokenizer(base)
    eos_ids = rollout.end_tokens(base, tokenizer)
    player = Player(settings, tokenizer, eos_ids)               # of single answers, or with an environment
    train_set, eval_set, data_note = data.load_prompts(tokenizer, settings, world_size, player.tools)
    scorer = rewards.Scorer(settings, device, compute_dtype, player.rewards_as)
    run.check_data(train_set, eval_set)
    samples = train_set.draw(0, 1, seed)[0] + eval_set[:1]
    player.try_on(samples)
    scorer.try_on([prompt.row for prompt in samples])

    start = run.resumed or base
    policy = load_policy(start, mesh, compute_dtype, gradient_checkpointing, float32_head=float32_head)
    reference = (load_policy(base, mesh, compute_dtype, trained=False, float32_head=float32_head)
                 if kl_coef > 0 else None)
    rollout_engine = rollout.engine_class(engine)(
        start, compute_dtype, max_prompt_length + max_completion_length, eos_ids,
        vllm_gpu_memory_utilization, vllm_tensor_parallel_size, float32_head)
optimizer = torch.optim.AdamW(policy.parameters(), learning_rate, (beta1, beta2),
                              weight_decay=weight_decay, fused=True)
if offload_optimizer:
    offload(optimizer, device)                                  # to host memory, except while it steps
networks = {"": (policy, optimizer)}                            # "": a checkpoint's own folder
log = run.begin(networks, rollout_engine, data_note, f"{updates_per_step} optimizer step(s)")


def decay(kind, progress):                                      # of the learning rate and the entropy bonus
    return {"constant": 1, "linear": 1 - progress, "cosine": (1 + math.cos(math.pi * progress)) / 2}[kind]


def learning_rate_at(step):
    if step < warmup_steps:
        return learning_rate * (step + 1) / warmup_steps
    return learning_rate * decay(lr_decay, (step - warmup_steps) / max(1, max_steps - warmup_steps))


def sample(prompts, n, names, temperature=temperature):
    """n rollouts per prompt, adjacent. A prompt's name makes its seed, the same on any number of ranks."""
    seeds = [zlib.crc32(f"{seed} {name}".encode()) for name in names]
    return player.play(rollout_engine, prompts, n, seeds, temperature)


def evaluate():
    """mean@k, pass@k, maj@k on held-out prompts, sampled as in training, from the same seeds every time."""
    own = range(rank, len(eval_set), world_size)
    rollouts = sample([eval_set[i] for i in own], eval_samples, [f"eval {i}" for i in own])
    # Stops the run if the engine does not have the policy's weights; a few rollouts are enough to see that.
    logps = token_logprobs(policy, rollouts, range(min(32, len(rollouts))), token_budget, temperature)
    rollout.compare_logprobs(rollouts, logps, gap_bound, tokenizer)
    scorer(rollouts)
    return rewards.evaluation(ranks.gathered(rollouts), eval_samples)


# ---------------------------------------------------------------- three variants; plain GRPO calls none of it
def greedy_scores(prompts, names):
    """ReMax's baseline: the score of one greedy completion per prompt, those of all ranks, [N / G]."""
    rollouts = sample(prompts, 1, names, temperature=0)
    scorer(rollouts)
    return torch.tensor(ranks.gathered([r.score for r in rollouts]), device=device)


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
# Shapes: N rollouts in a step, on all ranks. A micro-batch is a row of tokens in which a prompt stands once
# for all its completions (packing.py). C of its tokens were sampled, the EOS among them. {s: [len]} has a
# tensor for the sampled tokens of each rollout s. batch.flat makes [C] of such a dict, batch.split makes the
# dict of [C], batch.spread gives each token its rollout's entry of [N], and batch.mean, for losses by
# sequence, each token its rollout's mean of [C].
for step in range(run.first_step, max_steps + 1):
    log.start(step)

    # ------------------------------------------------------------ 0 evaluate, save, stop
    stopping = run.stopping()                                   # after Ctrl-C or SIGTERM
    if step == max_steps or (step % eval_interval == 0 and not stopping):
        with log.timed("eval"):
            log.evaluation(evaluate())
    if step == max_steps or step % save_interval == 0 or stopping:
        run.save(networks, tokenizer)                           # not where the run has just begun
    if step == max_steps or stopping:
        break

    # ------------------------------------------------------------ 1 rollout
    with log.timed("gen"):
        picked, run.state["position"] = train_set.draw(run.state["position"], prompts_per_step, seed)
        own = range(rank * B, (rank + 1) * B)                   # each rank samples for prompts of its own
        prompts, names = [picked[i] for i in own], [f"{step} {i}" for i in own]
        own_rollouts = sample(prompts, G, names)                # B * G

    # ------------------------------------------------------------ 2 reward
    with log.timed("reward"):
        timeouts = scorer(own_rollouts)                         # sets the score of each
        greedy = greedy_scores(prompts, names) if advantage == "remax" else None
    rollouts = ranks.gathered(own_rollouts)                     # N: from here on every rank has all of them
    log.rollouts(rollouts, timeouts)
    run.keep_rollouts(rollouts, greedy)                         # in this step's checkpoint, if it has one

    # ------------------------------------------------------------ 3 advantage
    scores = torch.tensor([r.score for r in rollouts], device=device)                   # [N], NaN: no score
    lengths = torch.tensor([len(r.logprobs) for r in rollouts], device=device)          # [N], sampled tokens
    log.groups(losses.group_std(scores, G))
    if kl_coef > 0 and kl_in == "reward":
        total_kl = kl_to_reference(rollouts)                                            # [N]
        log.metrics["kl"] = (total_kl.sum() / lengths.sum()).item()
        scores = scores - kl_coef * total_kl
    log.metrics["rewards/shaped/mean"] = scores.nanmean().nan_to_num().item()   # what advantages are made of
    # [N], 0 where the score is NaN.
    adv = losses.ADVANTAGES[advantage](scores, G, lengths=lengths, greedy=greedy, pass_k=pass_k)

    # ------------------------------------------------------------ 4 shares; old and reference logprobs
    # The rollouts, in random order, are split into updates. This rank computes its share of each update.
    order = random.Random(f"{seed} {step}").sample(range(N), N)
    updates = [order[u::updates_per_step] for u in range(updates_per_step)]
    # A rollout with advantage 0 has no gradient. It counts in the denominators below, but is not computed.
    computed = set(range(N) if moves_without_advantage else adv.nonzero()[:, 0].tolist())
    shares = [deal(rollouts, [s for s in update if s in computed], world_size)[rank] for update in updates]
    log.shared_tokens(rollouts, computed, shares)               # the share that is computed once for several
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
            # All ranks have the same number of micro-batches, and call policy and backward for each. C = 0 if
            # a rank is out of work, and if the row has another rank's rollouts (sequence_parallel_size).
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
                # Nothing has moved yet, so engine and trainer have the same weights. If the mean of their
                # difference (sampling/sampling_logp_difference/mean) is over gap_bound, this stops the run.
                trainer_logps = old_logps if old_needs_forward else new_logps
                log.metrics |= rollout.compare_logprobs(rollouts, trainer_logps, gap_bound, tokenizer)
            norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), grad_clip or math.inf).full_tensor()
            if run.may_step("actor", norm.item()):              # a gradient with NaN is skipped
                optimizer.step()
            optimizer.zero_grad()

    # ------------------------------------------------------------ 6 weight sync
    with log.timed("sync"):
        rollout_engine.load_weights(full_weights(policy, compute_dtype, rollout_engine.weight_names))

    # ------------------------------------------------------------ 7 log
    run.end_step(rollouts)

# ---------------------------------------------------------------- teardown
run.end()
