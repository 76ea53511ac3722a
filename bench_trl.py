"""
The work of bench.py under TRL's GRPOTrainer, in an environment of its own (pip install trl==1.16.0):

    python bench.py --work=out/work --json=true && python bench_trl.py --work=out/work --json=true

The completions are handed to TRL by its rollout_func, so that both train on the same tokens. Its update is
all from having scored them until the optimizer has stepped; the first one is left out.
"""
import json as json_module
import os
import resource
import statistics
import time

import torch
from configurator import configure
from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

import tiny
# ------------------------------------------------------------------------------------------------------------
work = "out/work"               # the folder that bench.py was given
micro_batch = 64                # sequences that TRL trains on at a time
repeats = 5
json = False                    # one line of JSON instead of the table
# ------------------------------------------------------------------------------------------------------------
configure(globals())
with open(os.path.join(work, "rollouts.json")) as file:
    rollouts = json_module.load(file)
times, scored_at = [], [0.0]


def finish():
    if torch.cuda.is_available():
        torch.cuda.synchronize()


class Trainer(GRPOTrainer):
    def _generate_and_score_completions(self, inputs):
        result = super()._generate_and_score_completions(inputs)
        finish()
        scored_at[0] = time.perf_counter()
        return result


class Clock(TrainerCallback):
    def on_step_end(self, args, state, control, **_):
        finish()
        times.append(time.perf_counter() - scored_at[0])


def replay(prompts, trainer):
    return {"prompt_ids": [r["prompt_ids"] for r in rollouts],
            "completion_ids": [r["completion_ids"] for r in rollouts],
            "logprobs": [[-1.0] * len(r["completion_ids"]) for r in rollouts]}


Trainer(
    model=os.path.join(work, "model"), rollout_func=replay,
    reward_funcs=lambda completions, **_: torch.randn(len(completions)).tolist(),
    train_dataset=Dataset.from_list([{"prompt": str(i)} for i in range(len(rollouts))]),
    processing_class=tiny.make_tokenizer(), callbacks=[Clock()],
    args=GRPOConfig(
        output_dir=os.path.join(work, "trl"), max_steps=repeats + 1, num_generations=8,
        per_device_train_batch_size=micro_batch, gradient_accumulation_steps=len(rollouts) // micro_batch,
        max_completion_length=max(len(r["completion_ids"]) for r in rollouts), beta=0.0, learning_rate=1e-6,
        loss_type="dapo", gradient_checkpointing=False, bf16=torch.cuda.is_available(), report_to=[],
        save_strategy="no", logging_steps=1000, disable_tqdm=True, use_cpu=not torch.cuda.is_available(),
        model_init_kwargs={"dtype": "float32"}),
).train()
tokens = sum(len(r["prompt_ids"]) + len(r["completion_ids"]) for r in rollouts)
memory = (torch.cuda.max_memory_allocated() if torch.cuda.is_available()
          else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
update = statistics.median(times[1:])
figures = {"update (s)": update, "training tokens/s": tokens / update, "peak memory (GB)": memory / 1e9}
print(json_module.dumps(figures) if json else
      "\n".join(f"{name:32} {value:12.4g}" for name, value in figures.items()))
