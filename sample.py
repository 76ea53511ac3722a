"""
Generate from a checkpoint and score it: mean@k, pass@k, maj@k over held-out problems or the rows of a file.

    python sample.py --model=out/grpo-algebra-20260101-120000/checkpoint-60
    python sample.py --model=Qwen/Qwen3-1.7B --task=gsm8k --samples=8 --max_completion_length=1024
    python sample.py --model=out/.../checkpoint-60 --prompt="Solve 2(x+3)=10"
"""
import gc
import json
import os
import zlib

gc.disable()                    # set_up() enables it again; importing takes a third less time without it
import data
import ranks
import rewards
import rollout
import tiny
from checks import check_files, check_values
from configurator import configure, input_errors
from console import printable
from episodes import Player
from loading import check_model, load_tokenizer, precision
from runlog import conversation
# ------------------------------------------------------------------------------------------------------------
model = "tiny"                  # a folder, a hub id, or tiny: the small model that tiny.py makes
prompt = ""                     # a prompt of your own: its completions are printed and nothing is scored
task = "algebra"                # algebra, countdown, guess, arithmetic, gsm8k, or file: a file of yours
difficulty = 1                  # of generated problems
train_file = ""                 # JSONL or parquet, for task=file: the share of it that a run holds out
eval_file = ""                  # the same, all of it
eval_prompts = 128              # problems; 0: 128 generated, or all that are held out
reward = ""                     # file.py:function; math_verify; empty: the task's own verifier
reward_timeout = 10.0           # seconds for a batch; if it takes longer, for each completion alone. 0: none
environment = ""                # file.py:Class that answers the model, as in training; docs/episodes.md
max_turns = 8                   # of an episode with it
environment_workers = 0         # threads for the environments; 0: none
environment_timeout = 10.0      # seconds for a call of an environment; 0: no limit
chat = True                     # apply the chat template to messages; False: join them, for base models
system_prompt = ""              # put before every message prompt
samples = 4                     # completions per problem: k
temperature = 1.0               # 0: greedy
top_p = 1.0                     # sample from the likeliest tokens that together have this probability
top_k = 0                       # sample from this many likeliest tokens; 0: from all
max_prompt_length = 0           # tokens, with what an environment adds to a prompt; 0: it adds nothing
max_completion_length = 64      # tokens; of an episode, all that follows its prompt
seed = 0                        # of sampling
engine = "auto"                 # vllm, hf (plain PyTorch), or auto: vllm where it is installed
vllm_gpu_memory_utilization = 0.8  # share of the GPU's memory that vLLM may take
dtype = "auto"                  # float32, bfloat16; auto: bfloat16 on CUDA
float32_head = True             # with bfloat16: compute logits in float32
show = 4                        # problems whose first samples are printed
output = ""                     # a JSONL file for all samples; empty: none
# ------------------------------------------------------------------------------------------------------------
settings = configure(globals())
# A temperature of 0 is greedy here.
check_values(settings | {"temperature": temperature or 1.0, "max_prompt_length": max_prompt_length + 1})
check_files(settings)
_, _, device, _ = ranks.set_up()

with input_errors():
    engine_type = rollout.engine_class(engine)
    if output:
        # Before hours of sampling, not after.
        try:
            os.close(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK, 0o666))
        except (OSError, ValueError) as error:
            raise ValueError(f"output={output}: {error}") from error
    named = ([("prompt", {"prompt": [{"role": "user", "content": prompt}]})] if prompt else
             data.named_rows(task, "eval", eval_prompts, 0, difficulty, train_file, eval_file))
    data.check_row(*named[0])
    base = tiny.ensure(model)
    check_model(base)
    tokenizer = load_tokenizer(base)
    eos_ids = rollout.end_tokens(base, tokenizer)
    player = Player(settings, tokenizer, eos_ids)
    prompts = data.encode_rows(tokenizer, named, chat, system_prompt, player.tools)
    longest = max(max_prompt_length, *(len(prompt.ids) for prompt in prompts)) + max_completion_length
    player.try_on(prompts[:1])
    # With the length, now that it is known.
    check_model(base, length=longest)
    compute_dtype, _ = precision(dtype, 0, device)
    unused = {"reward_model": "", "reward_step_timeout": 0.0}
    scorer = rewards.Scorer(settings | unused, device, compute_dtype, player.rewards_as)
    print(f"loading {base} into the engine", flush=True)
    rollout_engine = engine_type(base, compute_dtype, longest, eos_ids, vllm_gpu_memory_utilization,
                                 float32_head=float32_head)
print(f"generating {len(prompts)} x {samples} completions of at most {max_completion_length} tokens",
      flush=True)
whole_text = lambda r: conversation(r.completion) if environment else rewards.content(r.completion)
seeds = [zlib.crc32(f"{seed} eval {i}".encode()) for i in range(len(prompts))]
rollouts = player.play(rollout_engine, prompts, samples, seeds, temperature, top_p, top_k)
rollout_engine.close()

if prompt:
    for i, r in enumerate(rollouts, 1):
        print(f"--- sample {i} of {samples}\n{printable(whole_text(r))}")
    # The process ends here.
    ranks.leave()

scorer(rollouts)
for first in range(0, min(show, len(named)) * samples, samples):
    row = rollouts[first].row
    print(printable(f"--- {data.prompt_text(row['prompt'])}   (truth: {row.get('answer')})"))
    # Samples that are the same are shown once, with their count.
    texts = [whole_text(r) for r in rollouts[first:first + samples]]
    for text in dict.fromkeys(texts):
        r = rollouts[first + texts.index(text)]
        print(f"{printable(text)}\n--- {texts.count(text)} of {samples} samples, score {r.score:g}\n")
if output:
    with open(output, "w") as file:
        for r in rollouts:
            completion = r.completion if environment else rewards.content(r.completion)
            file.write(json.dumps({"prompt": r.row["prompt"], "completion": completion, "score": r.score,
                                   "finish_reason": r.finish_reason, "truth": r.row.get("answer")}) + "\n")
for name, value in rewards.evaluation(rollouts, samples).items():
    print(f"{name:40} {value:.4f}")
ranks.leave()
