"""
Generate from a checkpoint and score it: mean@k, pass@k and maj@k,
over a task's held-out problems or a file's rows.

    python sample.py --model=out/grpo-algebra-20260101-120000/checkpoint-100
    python sample.py --model=Qwen/Qwen3-1.7B --task=gsm8k --samples=8 --max_completion_length=1024
    python sample.py --model=out/.../checkpoint-100 --prompt="Solve 2(x+3)=10"
"""
import json
import zlib

import torch
from transformers import AutoTokenizer

import data
import ranks
import rewards
import rollout
import tiny
from configurator import configure, input_errors
from model import check_model
# ------------------------------------------------------------------------------------------------------------
model = "tiny"                  # a folder, a hub id, or tiny: the small base model that tiny.py makes
prompt = ""                     # a prompt of your own: its completions are printed and nothing is scored
task = "algebra"                # algebra, countdown, gsm8k, or file: rows from eval_file
difficulty = 1                  # of generated problems
eval_file = ""                  # JSONL or parquet, for task=file
eval_prompts = 128              # problems; 0: all of a file or of gsm8k
seed = 0                        # of sampling
reward = ""                     # file.py:function; empty: the task's own verifier
reward_timeout = 10.0           # seconds after which a hanging reward is cut off
chat = True                     # apply the tokenizer's chat template to messages; false: join their contents
system_prompt = ""              # put before every message prompt
samples = 4                     # k
temperature = 1.0               # 0: greedy
top_p = 1.0
top_k = 0                       # 0: all tokens
max_completion_length = 64      # tokens
engine = "auto"                 # vllm, hf (plain PyTorch), or auto: vllm where it is installed
dtype = "auto"                  # float32, bfloat16; auto: bfloat16 on CUDA
float32_head = True             # with bfloat16: logits in float32 all the same
vllm_gpu_memory_utilization = 0.8
show = 4                        # problems whose first sample is printed
output = ""                     # JSONL file for every sample; empty: none
# ------------------------------------------------------------------------------------------------------------
configure(globals())
ranks.set_up()

with input_errors():
    Engine = rollout.engine_class(engine)
    reward_function = rewards.load_reward(reward, task)
    rows = ([{"prompt": [{"role": "user", "content": prompt}]}] if prompt else
            data.load_rows(task, "eval", eval_prompts, 0, difficulty, eval_file))
    if model == "tiny":
        model = tiny.ensure()
    check_model(model)
    tokenizer = AutoTokenizer.from_pretrained(model)
    eos_ids = rollout.end_tokens(model, tokenizer)
    prompts = [data.encode_prompt(tokenizer, row["prompt"], chat, system_prompt) for row in rows]

compute_dtype = getattr(
    torch, dtype if dtype != "auto" else "bfloat16" if torch.cuda.is_available() else "float32")
sampler = Engine(model, compute_dtype, max(map(len, prompts)) + max_completion_length, eos_ids,
                 vllm_gpu_memory_utilization, float32_head=float32_head)
seeds = [zlib.crc32(f"{seed} eval {i}".encode()) for i in range(len(prompts))]
rollouts = sampler.generate(prompts, samples, seeds, max_completion_length, temperature, top_p, top_k)
sampler.close()

texts = [tokenizer.decode(r.completion_ids, skip_special_tokens=True) for r in rollouts]
if prompt:
    print(*texts, sep="\n" + "-" * 40 + "\n")
    ranks.leave()                                               # the process ends here

row_of = [row for row in rows for _ in range(samples)]
scores, _, _ = rewards.score(reward_function, row_of, texts, reward_timeout)
for i in range(0, min(show, len(rows)) * samples, samples):
    print(f"--- {data.prompt_text(rows[i // samples]['prompt'])}\n{texts[i]}\n--- score {scores[i]:g}, "
          f"truth {row_of[i].get('answer')}\n")
if output:
    with open(output, "w") as file:
        for row, text, value, r in zip(row_of, texts, scores, rollouts):
            file.write(json.dumps({"prompt": row["prompt"], "completion": text, "score": value,
                                   "finish_reason": r.finish_reason, "truth": row.get("answer")}) + "\n")
results = list(zip([row.get("source") for row in row_of], scores, map(rewards.extract_answer, texts)))
for name, value in rewards.evaluation(results, samples).items():
    print(f"{name:40} {value:.4f}")
ranks.leave()
