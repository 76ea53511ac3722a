"""
Supervised fine-tuning, a whole run in one file: a warm start, from which train_grpo.py goes on.

    torchrun train_sft.py                                    # one process, on a laptop or a GPU
    torchrun train_sft.py --task=file --train_file=worked.jsonl --model=...
    torchrun train_grpo.py --model=out/sft-.../checkpoint-60
    python train_sft.py --help                               # every setting

RL makes answers frequent that a model already samples now and then. Others have to be shown to it first. The
loss is the mean of -logp over the assistant's tokens that a step teaches; all others are only read. The loop
is train_grpo.py's without rollout, reward and advantage: it trains on examples, which have the form of
rollouts (tasks/examples.py). Without arguments the model in tiny/ learns to do algebra in steps.
"""
import math

from runtime import distributed         # before torch: it sets environment variables that torch reads
import torch

import rewards
import rollout
from configurator import configure, input_errors
from model import (deal_to_ranks, gathered_logprobs, load_policy, make_optimizer, micro_batches, open_folders,
                   set_rates)
from runtime.run import Run
from tasks.examples import draw, load_examples
# ------------------------------------------------------------------------------------------------------------
# settings that everybody sets first
model = "tiny"                  # a folder, a hub id, or tiny: the small model that comes with the repository
task = "algebra"                # algebra, compose, gsm8k, or file for your own rows, with their answers
train_file = ""                 # rows of task=file: files, folders, patterns or hf://..., with commas between
eval_file = ""                  # held-out rows, in the same form; if empty, an eighth of train_file's prompts
reward = ""                     # file.py:function,... or math_verify; if empty, the task's own; none: nothing
                                # is sampled
engine = "auto"                 # vllm, hf (plain PyTorch), auto (vllm if it is installed), or file.py:Engine
prompts_per_step = 32           # of all ranks together
max_prompt_length = 64          # in tokens; longer prompts are left out of evaluations
max_completion_length = 64      # in tokens, of what is sampled; longer rows than both together are left out
learning_rate = 1e-4            # the peak; a model of 1 B parameters wants about 1e-5
max_steps = 60                  # each makes an update with prompts_per_step rows
token_budget = 8192             # tokens per micro-batch: memory grows with it, results do not depend on it
seed = 0                        # of generated problems, order of rows, sampling
out_dir = ""                    # the run's folder; if empty, that of the resumed checkpoint, or a new one
resume = ""                     # a checkpoint, or auto for the newest one in out_dir if there is one
# config/shared.py and --help explain the other settings that are used below: timeout=3600.0,
# sequence_parallel_size=1, shard_ranks=0, dtype="auto", gradient_checkpointing=False, torch_compile=False,
# warmup_steps=5, lr_decay="linear", grad_clip=1.0, eval_interval=10, eval_samples=4, save_interval=20.
# This script also reads best_by="", reward_model="" and agent="".
from config.shared import *
# algorithm
temperature = 1.0               # engine and trainer divide their logits by it
# ------------------------------------------------------------------------------------------------------------
# configure sets the names above to what config files and --key=value say, and returns all settings.
settings = configure(globals())
settings.num_generations = 1                                    # nothing is sampled in groups

# ---------------------------------------------------------------- set-up: processes, data, models, engine
# torchrun starts a process for each device, and rank is its number. FSDP2 shards the weights over the mesh.
# sequence_group: the ranks with which this one shares the tokens of each micro-batch, or None.
rank, world_size, device, mesh, sequence_group = distributed.set_up(
    timeout, sequence_parallel_size, shard_ranks)
run = Run(settings, __file__)
longest = max_prompt_length + max_completion_length             # in tokens; the engine takes nothing longer
compute_dtype = distributed.compute_dtype(dtype)                # "auto": bfloat16 on a GPU, float32 elsewhere
with input_errors():                                            # an InputError becomes a one-line message
    folders = open_folders(settings, longest, run.resumed, run.state["clock"])
    tokenizer = folders.tokenizer
    # sample(prompts, n, names) returns n rollouts per held-out prompt. With an environment, tools or an agent
    # in the settings, a rollout is an episode of several turns.
    sample = rollout.load_sampler(settings, tokenizer, folders.eos_ids)
    # train_rows and held_out have a list of examples for each row, which is empty if the row is too long or
    # has nothing to learn; eval_set is a list of held-out prompts.
    train_set, _, train_rows = load_examples(sample, "train")
    _, eval_set, held_out = load_examples(sample, "eval")
    turn = next(filter(None, train_rows))[-1]
    note = ""
    if task == "file":
        from options.files import unread_columns
        note = unread_columns(train_set)
    scored = reward != "none"                                   # whether held-out prompts are sampled
    # The task's own reward compares with answers.
    if eval_set[0].row.get("answer") is None and not (reward or reward_model or agent or sample.reward_part):
        scored = False
        note += "The rows have no answers to score by, so the evaluation is their held-out loss alone."
    # The run ends here if it is resumed with other prompts. The text is for the console.
    run.check_data(folders, train_set, eval_set, (
        f"The run learns {sum(map(bool, train_rows)):,} of {len(train_rows):,} rows, those of at most "
        f"{longest} tokens. In the first one, {tokenizer.decode(turn.ids)[-500:]!r}, it learns "
        f"{tokenizer.decode(turn.sampled_ids)[:500]!r}.\n{note}"))
    rollout_engine = rollout.Engine()                           # this one samples nothing
    if scored:
        scorer = rewards.load_scorer(settings, sample, device, compute_dtype)   # scorer(rollouts) scores them
        scorer.check_rewards(eval_set[:2])                      # if it cannot score, the run stops here
        rollout_engine = rollout.load_engine(
            settings, folders.policy, compute_dtype, longest, folders.eos_ids)
    policy = load_policy(folders.policy, mesh, compute_dtype, gradient_checkpointing, torch_compile,
                         sequence_group, run.adapter, reader=folders.reader)    # of LoRA; of images
optimizer = make_optimizer(policy, learning_rate, settings)
# begin restores the optimizer of a resumed run. log collects the figures of a step, and writes them.
log = run.begin(policy, optimizer, rollout_engine)
sample.engine = rollout_engine                                  # what it samples with

# ---------------------------------------------------------------- the loop
# Values of tokens have the two forms that train_grpo.py explains, here with an entry for each learned token:
# {s: [len]} has a tensor for the example of index s, and [C] belongs to a micro-batch. C may be 0.
for step in range(run.first_step, max_steps + 1):               # the last one only evaluates and saves
    # ------------------------------------------------------------ 0 evaluate, save
    if run.due(step, eval_interval):                            # every eval_interval steps, and at the end
        logps = gathered_logprobs(policy, sum(held_out, []), token_budget, temperature)         # {s: [len]}
        log.metrics["eval/token_loss"] = -torch.cat([*logps.values()]).mean().item()
        log.say(f"step {step:3d}  eval/token_loss {log.metrics['eval/token_loss']:.4f}")
        if not scored or best_by == "eval/token_loss":          # the best checkpoint has the lowest loss
            run.state["eval_scores"][str(step)] = -log.metrics["eval/token_loss"]
        if scored:
            rollout_engine.update_weights(policy, step)
            log.evaluate(eval_set, eval_samples, sample, scorer)        # samples, scores and logs
    if run.due(step, save_interval):
        run.save()                                              # nothing if the run has just begun or resumed
    if step == max_steps:
        break

    # ------------------------------------------------------------ 1 rows
    run.stop_if_signalled()                                     # saves and ends the run after a Ctrl-C
    # A checkpoint of an earlier version of this file has the position 0.
    position = run.state["position"] or step * prompts_per_step
    examples, run.state["position"] = draw(train_rows, position, prompts_per_step, seed)

    # ------------------------------------------------------------ 2 update
    with log.timed("update_actor"):
        log.metrics |= set_rates(optimizer, "learning_rate", step, max_steps, lr_decay, warmup_steps)
        num_learned = sum(len(r.logprobs) for r in examples)    # `examples` are those of all ranks
        [share] = deal_to_ranks(examples, [range(len(examples))])               # what this rank computes
        for batch in micro_batches(policy, examples, share, token_budget):
            logp, _ = policy(batch, temperature)                                                # [C]
            loss = -logp.sum() / num_learned
            (loss * world_size).backward()                      # FSDP averages over ranks: undo that
            log.add(means={"token_loss": -logp})
        norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), grad_clip or math.inf)
        if run.may_step("actor", norm):                         # logs the norm; False if it is not finite
            optimizer.step()
        optimizer.zero_grad()

    # ------------------------------------------------------------ 3 log
    run.end_step(examples)                                      # writes the step's figures
run.end()                                                       # writes report.html
