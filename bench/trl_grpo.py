"""
TRL's GRPOTrainer in the place of train_grpo.py, on a CPU in float32: the row trl of bench/methods.py, which
starts this script with the interpreter that has TRL (bench/against_trl.py says how to make one).

    python -m bench.methods --methods=trl --trl=out/trl/bin/python
    out/trl/bin/python -m bench.trl_grpo config/tasks/smollm2.py --model=out/smollm2    # docs/measured/real_model.md

Model, task, prompts of each step, reward, optimizer, learning rate of each update and both evaluations are
those of train_grpo.py with the same settings. Two things differ. TRL samples with transformers' generate,
and draws random numbers of its own. And its default loss, dapo, divides an update's sum over tokens by the
mean number of tokens of the step's updates, where train_grpo.py divides by the number of the update's own.

The script leaves config.json, metrics.jsonl and the last model in out_dir. timing_s/step counts all that TRL
does for a step: generation, reward, old logprobs, updates and logs. It counts neither start nor evaluations.
"""
import json
import time

import torch

import data
import rewards
import rollout
from configurator import configure
import hf_engine
from model import schedule
from runtime.model_folder import check_model, end_tokens, load_tokenizer
from runtime.metrics import evaluation_metrics
from options.user_code import load_from
# ------------------------------------------------------------------------------------------------------------
# as in train_grpo.py
model = "tiny"
task = "algebra"
train_file = ""
eval_file = ""
reward = ""
engine = "hf"                   # of the evaluations, and the only choice
prompts_per_step = 32
num_generations = 8
max_prompt_length = 64
max_completion_length = 64
learning_rate = 1e-4
max_steps = 60
seed = 0
out_dir = "out/trl_grpo"
from config.shared import *     # only data, evaluations and AdamW's settings are used
temperature = 1.0
skip_zero_advantage = False     # TRL computes all completions either way; the gradient is the same
num_mini_batches = 1
epsilon = 0.2
warmup_steps = 5
lr_decay = "linear"
grad_clip = 1.0
# of TRL
loss_type = "dapo"              # its default; with bnpo the gradients are those of train_grpo.py
micro_batches = 1               # per update: with more, TRL takes less memory
# ------------------------------------------------------------------------------------------------------------
settings = configure(globals())

# Imported here, so that --help and a wrong setting's message need no TRL.
from datasets import Dataset
from transformers import AutoModelForCausalLM, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

base = check_model(model)
tokenizer = load_tokenizer(base, settings=settings)
eos_ids = end_tokens(base, tokenizer)
train_set, eval_set, _ = data.load_prompts(tokenizer, settings)
sample = rollout.load_sampler(settings, tokenizer, eos_ids)
scorer = rewards.load_scorer(settings, sample, "cpu", torch.float32)
evaluator = hf_engine.HFEngine(base, torch.float32, max_prompt_length + max_completion_length, eos_ids, 0.0)
sample.engine = evaluator
policy = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
optimizer = torch.optim.AdamW(policy.parameters(), learning_rate, (0.9, 0.95),
                              weight_decay=0.0, fused=True)
# The updates of a step share a learning rate. With TRL's own schedules it would change after each update.
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda update: schedule(
    1.0, update // num_mini_batches, max_steps, lr_decay, warmup_steps))
rows, position = [], 0                                          # in the order in which a run uses them
for _ in range(max_steps):
    picked, position = train_set.draw(position, prompts_per_step, seed)
    rows += [prompt.row for prompt in picked]
lines, evaluations = [], {}                     # of metrics.jsonl, one per step; {step: what is added to it}


def evaluate():
    """mean@k, pass@k, maj@k as a run finds them, with its held-out prompts and its seeds."""
    evaluator.load_weights(policy.named_parameters(), version=len(lines))
    rollouts = sample(eval_set, eval_samples, [f"eval {i}" for i in range(len(eval_set))])
    scorer(rollouts)
    figures = evaluation_metrics(rollouts, eval_samples)
    print({"step": len(lines), **figures}, flush=True)          # also for a run that is stopped
    return figures


class Log(TrainerCallback):
    """Keeps what TRL logs at the end of a step, with the seconds since the end of the step before."""

    def on_train_begin(self, *_, **__):
        self.began = time.perf_counter()

    def on_log(self, args, state, control, logs, **_):
        if "reward" in logs:                                    # TRL's last log is a summary of the run
            now = time.perf_counter()
            lines.append({"step": len(lines), **logs, "timing_s/step": now - self.began})
            if eval_interval and len(lines) % eval_interval == 0 and len(lines) < max_steps:
                evaluations[len(lines)] = evaluate()
            self.began = time.perf_counter()


config = GRPOConfig(
    out_dir, seed=seed, use_cpu=True, bf16=False, gradient_checkpointing=False,
    max_steps=max_steps * num_mini_batches, steps_per_generation=num_mini_batches * micro_batches,
    per_device_train_batch_size=prompts_per_step * num_generations // num_mini_batches // micro_batches,
    gradient_accumulation_steps=micro_batches,
    num_generations=num_generations, max_completion_length=max_completion_length, shuffle_dataset=False,
    temperature=temperature, loss_type=loss_type, scale_rewards="group", beta=0.0, epsilon=epsilon,
    max_grad_norm=grad_clip, logging_steps=num_mini_batches, disable_tqdm=True, report_to=[], save_strategy="no")
function = load_from(reward, "reward", "function") if reward else scorer.task_reward
trainer = GRPOTrainer(policy, function, config, Dataset.from_list(rows), processing_class=tokenizer,
                      callbacks=[Log()], optimizers=(optimizer, scheduler))
evaluations[0] = evaluate()
trainer.train()
lines.append({"step": max_steps, **evaluate()})
for step, figures in evaluations.items():
    lines[step] |= figures
trainer.save_model(out_dir)
with open(f"{out_dir}/config.json", "w") as file:
    json.dump(vars(settings), file)
with open(f"{out_dir}/metrics.jsonl", "w") as file:
    file.writelines(json.dumps(line) + "\n" for line in lines)
