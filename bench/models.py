"""
Which families of models can be trained, tried with small random ones: writes docs/measured/models.md.

    python -m bench.models                                   # all families: half an hour on two cores
    python -m bench.models --only=qwen3,gemma3               # these anew, the others as before

Each family's model is made from its config and trained for two steps twice: by train_ppo.py with vLLM and a
critic of the same family, and by train_grpo.py with plain PyTorch. After each step engine and trainer are
compared, as in every run; the page has the mean gap of the last comparison, or says why there was none.
"""
import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor

import torch
import transformers

from configurator import check, configure
from runtime.model_folder import model_class
from tiny import pretrain
# ------------------------------------------------------------------------------------------------------------
only = ""                       # names of families, separated by commas; empty: all
out_dir = "out/models"          # of the models and their runs
page = "docs/measured/models.md"  # empty: only print
jobs = 2                        # runs at once
# ------------------------------------------------------------------------------------------------------------

# A config takes those of these that it knows.
SMALL = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
             num_key_value_heads=1, head_dim=32, max_position_embeddings=256, initializer_range=0.1,
             max_window_layers=1)
WINDOW = dict(sliding_window=8)
MIXED = WINDOW | dict(layer_types=["sliding_attention", "full_attention"])
MOE = dict(num_experts=4, num_local_experts=4, n_routed_experts=4, num_experts_per_tok=2, n_group=1,
           moe_intermediate_size=32, n_shared_experts=1, first_k_dense_replace=1, topk_group=1,
           shared_expert_intermediate_size=32, decoder_sparse_step=1)
MLA = dict(q_lora_rank=32, kv_lora_rank=512, qk_nope_head_dim=32, qk_rope_head_dim=64, v_head_dim=32,
           head_dim=64, num_key_value_heads=2)
MAMBA = dict(mamba_d_state=16, mamba_n_heads=4, mamba_d_head=32, mamba_n_groups=1, mamba_expand=2,
             mamba_chunk_size=16, state_size=16, ssm_state_size=16)
DELTA = dict(linear_num_key_heads=1, linear_num_value_heads=2, linear_key_head_dim=128,
             linear_value_head_dim=128, num_hidden_layers=4,
             layer_types=["linear_attention", "full_attention"] * 2)
MROPE = dict(rope_parameters=dict(rope_type="default", rope_theta=1e4, mrope_section=[4, 6, 6]))
PER_LAYER = dict(global_head_dim=32, hidden_size_per_layer_input=16, vocab_size_per_layer_input=261,
                 num_kv_shared_layers=0)
# Of the part that reads images.
VISION = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, depth=1,
              num_heads=2, out_hidden_size=64, image_size=28, patch_size=14)
# By model_type: what a config has apart from SMALL, in its text part if it has several; only vLLM reads what
# has a plus.
FAMILIES = {
    "Dense": {
        "llama": {}, "mistral": WINDOW, "ministral3": {}, "qwen2": {}, "qwen3": {}, "gemma": {},
        "gemma2": WINDOW, "gemma3_text": MIXED, "gemma3n_text": MIXED | PER_LAYER,
        "gemma4_text": MIXED | PER_LAYER, "phi": dict(num_key_value_heads=2), "phi3": WINDOW, "olmo": {},
        "olmo2": {}, "olmo3": WINDOW, "smollm3": {}, "granite": dict(logits_scaling=4.0), "cohere": {},
        "cohere2": MIXED, "starcoder2": {}, "stablelm": {}, "gpt2": {}, "gpt_neox": {},
        "gptj": dict(rotary_dim=16), "opt": dict(ffn_dim=128, word_embed_proj_dim=64),
        "falcon": dict(head_dim=None), "glm": {}, "glm4": {}, "ernie4_5": {},
        "exaone4": dict(sliding_window_pattern=2), "hunyuan_v1_dense": {}, "seed_oss": {}, "nemotron": {},
        "helium": dict(num_key_value_heads=2), "apertus": {}, "arcee": {}, "minicpm3": MLA, "nanochat": {}},
    "Mixtures of experts": dict.fromkeys((
        "qwen2_moe", "qwen3_moe", "mixtral", "olmoe", "phimoe", "granitemoe", "gpt_oss", "ernie4_5_moe",
        "dots1", "hunyuan_v1_moe"), MOE) | {
        "glm4_moe": MOE | {"+head_dim": 32},
        "minimax_m2": MOE | {"+rotary_dim": 32, "+scoring_func": "sigmoid"},
        "deepseek_v2": MOE | MLA, "deepseek_v3": MOE | MLA | {"+topk_method": "noaux_tc"}},
    "Layers with a state (Mamba, linear attention, convolutions)": {
        "qwen3_next": MOE | DELTA | dict(num_experts_per_tok=4), "qwen3_5_text": DELTA,
        "falcon_h1": MAMBA | dict(mamba_d_ssm=128, lm_head_multiplier=0.25),
        "lfm2": {"layer_types": ["conv", "full_attention"], "+conv_dim": 64, "+block_dim": 64},
        "granitemoehybrid": MOE | MAMBA | dict(layer_types=["mamba", "attention"]),
        "bamba": MAMBA | dict(attn_layer_indices=[1]), "nemotron_h": MAMBA,
        "jamba": MOE | dict(attn_layer_period=2, attn_layer_offset=1), "mamba": MAMBA,
        "mamba2": MAMBA | dict(num_heads=4, n_groups=1), "falcon_mamba": MAMBA, "minimax": MOE,
        "zamba2": MAMBA | dict(layer_types=["mamba", "hybrid"], hybrid_layer_ids=[1]), "olmo_hybrid": {},
        "recurrent_gemma": {}},
    "Models that read images, trained on text": {
        "gemma3": WINDOW, "gemma4": WINDOW | PER_LAYER, "qwen2_5_vl": MROPE, "qwen3_vl": {}, "qwen3_5": DELTA,
        "mistral3": {}, "internvl": {}, "smolvlm": {}, "glm4v": MROPE, "llama4": MOE,
        "minimax_m3_vl": MOE | dict(
            layer_types=["minimax_m3_sparse"] * 2, index_n_heads=1, index_head_dim=32)},
    "No decoders": {"t5": {}, "bert": {}}}
# An empty torchvision.
STAND_IN = '''
import importlib.abc, importlib.machinery, sys, types
class Anything(type):
    __getattr__ = lambda cls, name: cls if name[:2] != "__" else super().__getattribute__(name)
class Nothing(metaclass=Anything):
    pass
class Module(types.ModuleType):
    __getattr__ = lambda self, name: Nothing if name[:2] != "__" else super().__getattribute__(name)
class StandIn(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torchvision":
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
    def create_module(self, spec):
        return Module(spec.name)
    def exec_module(self, module):
        module.__path__, module.__version__ = [], "0"
sys.meta_path.append(StandIn())
'''
REWARD = '''
def even(prompts, completions, **columns):
    return [sum(ord(c) % 2 == 0 for c in messages[0]["content"]) / 12 for messages in completions]
'''
COMMON = """--max_prompt_length=48 --max_completion_length=24 --prompts_per_step=8 --num_generations=4
    --max_steps=2 --eval_prompts=8 --eval_samples=1 --train_prompts=64 --token_budget=512 --save_interval=9
    --learning_rate=1e-3 --warmup_steps=0""".split()
INTRODUCTION = """\
# Models: what was measured

[Models](../models.md) says which families can be trained and what to know about them. This page has the figures behind
it, by the `model_type` in a model's `config.json`. It is made by

```sh
python -m bench.models
```

The script gives each of {count} families a small model with random weights and trains it for two steps with either
engine, on a CPU, with transformers {transformers}. A number is the mean gap between the logprobs of engine and trainer
after a weight sync; a run stops at 1e-3, or at 0.05 in bfloat16. On a GPU only Qwen3 and Llama have been run. The lists
below the tables say why a model was refused or a run stopped. Most of these reasons concern vLLM's CPU build.

- *A sequence per line*: each sequence has a line of its own, padded to the longest. With completions of 1 to 64 tokens
  behind prompts of 40 the lines have 1.4 times as many tokens.
- *In bfloat16*: vLLM's CPU build has no float32 kernel for such layers.
- *Needs torchvision*: vLLM imports it for such models. No text passes through it, so the script puts an empty module in
  its place.

## Other versions

With transformers 5.24 (a run in November 2026) the results were the same, except that `gptj` packs its sequences,
`gemma4` asks for no torchvision, and the gap of `hunyuan_v1_moe` with plain PyTorch is 1e-04.

The other pair of `requirements.txt`, vLLM 0.25.1 with PyTorch 2.11, was tried with transformers 5.17 (November 2026).
With plain PyTorch the results were the same, except that the gap of `hunyuan_v1_moe` is 1e-04, and that transformers
5.17 cannot make the small `zamba2`. With vLLM the results of these families differ:

- `cohere2` agrees, with a gap of 2e-07.
- `ministral3` and `nanochat` are stopped, because the logprobs differ by 0.3 and 0.003.
- `granitemoe` is stopped at its first sync: this vLLM takes all weights before it loads the first, so the run cannot
  see that they have arrived.
- vLLM refuses `olmo3`, `hunyuan_v1_dense`, `hunyuan_v1_moe`, `gemma4`, `gemma4_text`, `qwen3_5`, `qwen3_5_text`,
  `qwen3_next`, `granitemoehybrid`, `falcon_h1` and `mamba2`; the CPU build lacks kernels for the last two. It also
  refuses `phi` and `olmo`, but only in the shapes of this script.
"""
ENGINES = {
    "vllm": "train_ppo.py --engine=vllm --critic_warmup_steps=0 --num_epochs=1 --num_mini_batches=1 "
            "--critic_learning_rate=1e-3".split(),
    # With an entropy bonus it computes completions without an advantage as well.
    "hf": ["train_grpo.py", "--engine=hf", "--entropy_coef=1e-6"]}


def make(family, folder):
    """Write a model of this family, with random weights and tiny/pretrain.py's tokenizer, to a folder."""
    tokenizer = pretrain.make_tokenizer()
    changes = next(group[family] for group in FAMILIES.values() if family in group)
    text = SMALL | dict(vocab_size=len(tokenizer), bos_token_id=None, eos_token_id=tokenizer.eos_token_id,
                        pad_token_id=tokenizer.pad_token_id) | changes
    kind = transformers.CONFIG_MAPPING[family]
    default = kind()
    if "text_config" not in kind.sub_configs:
        config = kind(**known(default, text))
    else:
        parts = {key: getattr(default, key) or kind.sub_configs[key]()
                 for key in ("text_config", "vision_config")}
        config = kind(**{key: type(part)(**known(part, text if key == "text_config" else VISION))
                         for key, part in parts.items()})
        config.eos_token_id = tokenizer.eos_token_id
    torch.manual_seed(0)
    (model_class(config) or transformers.MODEL_MAPPING[type(config)])(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def known(config, values):
    # dir, because some configs answer for every layer alone, and raise.
    names = {*dir(config), *config.attribute_map}
    return {key.removeprefix("+"): value for key, value in values.items()
            if (key in names or key[0] == "+") and value is not None}


def outcome(family, engine, dtype="auto", path=""):
    """Train for two steps: (the gap of the last comparison or None, notes, why it was refused or '')."""
    folder, run = os.path.join(out_dir, family), os.path.join(out_dir, f"{family}-{engine}")
    shutil.rmtree(run, ignore_errors=True)
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    result = subprocess.run(
        [sys.executable, *ENGINES[engine], *COMMON, f"--model={folder}", f"--out_dir={run}",
         f"--dtype={dtype}", f"--reward={out_dir}/reward.py:even"], env=env, capture_output=True, text=True)
    said = result.stdout + result.stderr
    if "requires BF16" in said and dtype == "auto":
        return outcome(family, engine, "bfloat16", path)
    if "No module named 'torchvision'" in said and not path:
        return outcome(family, engine, dtype, out_dir)
    notes = [note for note, applies in {
        "in bfloat16": dtype == "bfloat16", "a sequence per line": "a line of its own" in said,
        "needs torchvision": path}.items() if applies]
    if result.returncode == 0:
        with open(os.path.join(run, "metrics.jsonl")) as file:
            lines = [json.loads(line) for line in file]
        return lines[1]["sampling/sampling_logp_difference/mean"], notes, ""
    if problem := re.search(r"RuntimeError: (engine and trainer logprobs differ by \S+ on average"
                            r"|the sync of version 1 has failed: [^,]+, the engine got \d+)", said):
        return None, notes, f"stopped: {problem[1]}"
    *_, error, last = [line.removeprefix("[rank0]: ") for line in said.splitlines() if line.strip()]
    if "does not run here" in last or "the other engine may" in last:       # a note below a traceback
        said = f"{last}: {error}"
    else:
        said = re.sub(r"^train_\w+\.py: ", "" if result.returncode == 2 else "FAILS: ", last)
    return None, notes, said.replace(folder, family)[:400]


def row(family):
    """The row of the table, and the sentences for what was refused."""
    cells, sentences = [], {}
    try:
        make(family, os.path.join(out_dir, family))
    except Exception as error:
        return f"| `{family}` | not made | not made |", {f"{type(error).__name__}: {error}": ["made"]}
    for engine in ENGINES:
        gap, notes, refused = outcome(family, engine)
        if refused:
            sentences.setdefault(refused, []).append({"vllm": "vLLM", "hf": "plain PyTorch"}[engine])
        cells.append(("stopped" if refused.startswith("stopped") else "refused") if refused else
                     ", ".join([f"{gap:.0e}", *notes]))
    print(family, *cells, *sentences, sep=" | ", flush=True)
    return f"| `{family}` | {' | '.join(cells)} |", sentences


def page_text(rows):
    parts = [INTRODUCTION.format(count=len(rows), transformers=transformers.__version__)]
    for group, families in FAMILIES.items():
        parts.append(f"\n## {group}\n\n| model_type | vLLM, with a critic | plain PyTorch |\n"
                     "| --- | --- | --- |\n")
        parts += [rows[family][0] + "\n" for family in families]
        items = [f"- `{family}`, {' and '.join(engines)}: {sentence}" for family in families
                 for sentence, engines in rows[family][1].items()]
        parts += ["\n"] * bool(items) + [
            textwrap.fill(item, 120, subsequent_indent="  ", break_on_hyphens=False) + "\n" for item in items]
    return "".join(parts)


if __name__ == "__main__":
    configure(globals())
    out_dir = os.path.abspath(out_dir)
    every = [family for group in FAMILIES.values() for family in group]
    for family in only.split(",") if only else ():
        check(family in every, f"only={family}: choose from {', '.join(every)}")
    os.makedirs(out_dir, exist_ok=True)
    for name, text in {"reward.py": REWARD, "sitecustomize.py": STAND_IN}.items():
        with open(os.path.join(out_dir, name), "w") as file:
            file.write(text)
    names, kept, rows = only.split(",") if only else every, os.path.join(out_dir, "rows.json"), {}
    if only and os.path.exists(kept):
        with open(kept) as file:
            rows = json.load(file)
    with ThreadPoolExecutor(jobs) as pool:
        rows |= zip(names, pool.map(row, names))
    with open(kept, "w") as file:
        json.dump(rows, file)
    if page and rows.keys() >= set(every):
        with open(page, "w") as file:
            file.write(page_text(rows))
