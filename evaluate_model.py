"""
Sample from a checkpoint and score it: mean@k, pass@k and maj@k on held-out problems or the rows of a file.

    python evaluate_model.py --model=out/grpo-algebra-20260101-120000/checkpoint-60
    python evaluate_model.py --model=Qwen/Qwen3-1.7B --task=gsm8k --samples=8 --max_completion_length=1024
    python evaluate_model.py --model=out/.../checkpoint-60 --prompt="Solve 2(x+3)=10"
    torchrun --nproc_per_node=8 evaluate_model.py --model=...       # an engine per process, the same figures
"""
import math
import os
from types import SimpleNamespace

from runtime import distributed         # first, because runtime sets what PyTorch reads when it is loaded
import data
import rewards
import rollout
from configurator import check, check_tiny_defaults, check_values, configure, input_errors, printable
from runtime.model_folder import check_model, end_tokens, load_tokenizer, read_config
from runtime.metrics import append, evaluated, evaluation_metrics, failures
# ------------------------------------------------------------------------------------------------------------
model = "tiny"                  # a folder, a hub id, or tiny: the small model that comes with the repository
prompt = ""                     # a prompt of your own, whose completions are printed and not scored
task = "algebra"                # algebra, compose, guess, arithmetic, gsm8k, or file for your own rows;
                                # algebra:3 is harder, and suits a model of 1 B parameters
train_file = ""                 # that of a run, whose held-out rows are used: files, folders, patterns or hf://...
eval_file = ""                  # rows that are all used, in the same form, or NAME=FILE,...: figures by name
eval_prompts = 128              # held-out problems; 0 generates 128, or takes all of them
reward = ""                     # file.py:function,... or math_verify; if empty, the reward of the task
from config.sampling import *  # prompts, sampling, reward, episodes
samples = 4                     # completions per problem: the k of mean@k, pass@k, maj@k
temperature = 1.0               # 0 is greedy
max_prompt_length = 0           # in tokens, with what an environment adds to a prompt; 0 if it adds nothing
max_completion_length = 64      # in tokens; in an episode it counts all that follows the prompt
seed = 0                        # of sampling
engine = "auto"                 # vllm, hf (plain PyTorch), auto (vllm if it is installed), or file.py:Engine
vllm_gpu_memory_utilization = 0.8  # fraction of the GPU's memory that vLLM may take
vllm_tensor_parallel_size = 1   # ranks that share an engine; with 1, each rank has its own
dtype = "auto"                  # float32, bfloat16, or auto, which is bfloat16 on CUDA
show = 4                        # problems whose first samples are printed
output = ""                     # a JSONL file that gets a line per prompt: its row, mean@k and samples
# ------------------------------------------------------------------------------------------------------------
settings = configure(globals())
rank, world_size, device, *_ = distributed.set_up()
check_values(SimpleNamespace(**vars(settings), samplers=world_size))

with input_errors(OSError):
    if output and rank == 0:
        from options.files import files_of
        open(output, "a").close()                               # it fails now, not after hours of sampling
        for setting in (train_file, eval_file, chat_template):
            for path, _ in files_of(setting):
                check(not os.path.isfile(path) or not os.path.samefile(path, output),
                      f"output={output} would replace {path}, which is read: name another file")
with input_errors():
    base = check_model(model)
    if prompt:
        rows = [("prompt", {"prompt": [{"role": "user", "content": prompt}]})]
    else:
        rows = data.named_rows(settings, "eval")
        check_tiny_defaults(settings, getattr(read_config(base), "suits", {}))
    tokenizer = load_tokenizer(base, settings=settings)
    if images:
        from options.images import load_reader
        load_reader(settings, base, tokenizer)
    eos_ids = distributed.from_master(end_tokens(base, tokenizer))        # a hub may fail a rank
    sample = rollout.load_sampler(settings, tokenizer, eos_ids)
    held_out = data.Prompts(tokenizer, rows, settings, sample.tools)
    held_out.check()                                            # as in training
    prompts = held_out.encoded(range(len(rows)))
    longest = max(max_prompt_length, *(len(row.ids) for row in prompts)) + max_completion_length
    compute_dtype = distributed.compute_dtype(dtype)
    settings.reward_model = ""                                  # a setting of a training run
    scorer = rewards.load_scorer(settings, sample, device, compute_dtype)
    if scorer.user_rewards:
        scorer.user_rewards.budget = math.inf                   # they score all completions at once
    # A broken environment or reward shows now. Completions of --prompt are not scored.
    if prompt:
        sample.trial(prompts)
        scorer = None
    else:
        scorer.check_rewards(prompts[:1])
    # The length is known only now.
    check_model(base, length=longest)
    if rank == 0:
        print(f"{base} generates {len(prompts)} x {samples} completions of at most {max_completion_length} "
              "tokens", flush=True)
    rollout_engine = rollout.load_engine(settings, base, compute_dtype, longest, eos_ids)
sample.engine = rollout_engine
rollouts = evaluated(prompts, samples, sample, scorer)
if rank > 0:
    distributed.leave()                                         # ends the process


def texts_of(rollouts):
    # Returns all that follows each prompt, with what the chat template writes between turns of an episode.
    answers = [r.ids[len(r.prompt_ids):] for r in rollouts]
    if sample.make:                                             # turns go on behind a stop string
        return [rollout.text_of(tokenizer, ids, eos_ids) for ids in answers]
    return [sample.text_of(ids) for ids in answers]


if prompt:
    for i, text in enumerate(texts_of(rollouts), 1):
        print(f"--- sample {i} of {samples}\n{printable(text)}")
    distributed.leave()

groups = [rollouts[first:first + samples] for first in range(0, len(rollouts), samples)]        # by prompt
for group in groups[:show]:
    row = group[0].row
    print(printable(f"--- {rewards.content(row['prompt'])}   (truth: {row.get('answer')})"))
    # Samples that are the same are shown once, with their count.
    texts = texts_of(group)
    for text in dict.fromkeys(texts):
        score = group[texts.index(text)].score
        print(f"{printable(text)}\n--- {texts.count(text)} of {samples} samples, score {score:g}\n")
if output:
    results = []
    for group in groups:
        lines = []
        for r in group:
            completion = r.completion if sample.make else rewards.content(r.completion)
            lines.append({"completion": completion, "score": r.score, "finish_reason": r.finish_reason})
        # The mean is None if no sample was scored.
        mean = evaluation_metrics(group, samples).get(f"eval/mean@{samples}")
        results.append(group[0].row | {f"mean@{samples}": mean, "samples": lines})
    open(output, "w").close()                                   # earlier results have stayed until now
    append(output, results)                                     # a score of NaN becomes null
problems = failures(rollouts)
if problems:
    print(f"{len(problems)} of {len(rollouts)} completions were not scored; the first: {problems[0]}")
for name, value in evaluation_metrics(rollouts, samples).items():
    print(f"{name:40} {value:.4f}")
distributed.leave()
