"""
Which families of models can be trained: docs/models.md, from small models with random weights.

    python bench/models.py                                   # all families: about half an hour on two cores
    python bench/models.py --only=qwen3,gemma3

Each family's model is made from its config and trained for two steps: with train_ppo.py and vLLM, whose critic
has the same kind of body, and with train_grpo.py and plain PyTorch. The table says how a row holds its sequences
and the mean logprob gap between engine and trainer in the last step, or why the run was refused.
"""
import json
import os
import re
import subprocess
import sys

import torch

HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, HERE)
from configurator import configure  # noqa: E402
# ------------------------------------------------------------------------------------------------------------
only = ""                       # names of families, separated by commas; empty: all
out = "out/models"              # a folder for the models, the runs and the table
stages = "load,vllm,hf"         # load: no run
# ------------------------------------------------------------------------------------------------------------

# Sizes that every config takes under these names, or does not have.
SMALL = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
             head_dim=32, max_position_embeddings=256, initializer_range=0.1,
             max_window_layers=1)
MOE = dict(num_experts=4, num_local_experts=4, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=32,
           n_shared_experts=1, first_k_dense_replace=1, n_group=1, topk_group=1, shared_expert_intermediate_size=32,
           decoder_sparse_step=1)
MLA = dict(q_lora_rank=32, kv_lora_rank=32, qk_nope_head_dim=32, qk_rope_head_dim=32, v_head_dim=32, num_key_value_heads=2)
ABSENT = object()               # a name that this config does not take
MAMBA = dict(mamba_d_state=16, mamba_n_heads=4, mamba_d_head=32, mamba_n_groups=1, mamba_expand=2, mamba_chunk_size=16,
             state_size=16, ssm_state_size=16)
DELTA = dict(linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=32, linear_value_head_dim=32,
             num_hidden_layers=4, full_attention_interval=2, layer_types=["linear_attention", "full_attention"] * 2)
MROPE = dict(rope_parameters={"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]})
VISION = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, depth=1, num_heads=2,
              out_hidden_size=64, image_size=28, patch_size=14)

# name: what differs from SMALL; "text" holds what goes into the text part of a model that reads images.
FAMILIES = {
    # dense
    "llama": {}, "mistral": {"sliding_window": 8}, "qwen2": {}, "qwen3": {}, "gemma": {}, "gemma2": {"sliding_window": 8},
    "gemma3_text": {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
    "gemma4_text": {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"], "global_head_dim": 32,
                    "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 261, "num_kv_shared_layers": 0},
    "phi": {"num_key_value_heads": 2}, "phi3": {"sliding_window": 8}, "olmo": {}, "olmo2": {}, "olmo3": {"sliding_window": 8},
    "smollm3": {}, "granite": {"logits_scaling": 4.0}, "cohere": {}, "cohere2": {"sliding_window": 8}, "starcoder2": {},
    "stablelm": {}, "gpt2": {}, "gpt_neox": {}, "gptj": {"rotary_dim": 16}, "opt": {"ffn_dim": 128, "word_embed_proj_dim": 64},
    "bloom": {}, "falcon": {"head_dim": ABSENT}, "glm": {}, "glm4": {}, "ernie4_5": {}, "exaone4": {"sliding_window_pattern": 2}, "hunyuan_v1_dense": {}, "seed_oss": {},
    "nemotron": {}, "helium": {"num_key_value_heads": 2}, "apertus": {}, "arcee": {}, "ministral3": {}, "minicpm3": MLA, "nanochat": {},
    # mixtures of experts
    "qwen2_moe": MOE, "qwen3_moe": MOE, "mixtral": MOE, "olmoe": MOE, "phimoe": MOE, "granitemoe": MOE, "gpt_oss": MOE,
    "deepseek_v2": MOE | MLA, "deepseek_v3": MOE | MLA, "glm4_moe": MOE, "ernie4_5_moe": MOE, "dots1": MOE,
    "minimax_m2": MOE, "hunyuan_v1_moe": MOE,
    # with a state
    "qwen3_next": MOE | DELTA, "qwen3_5_text": DELTA, "falcon_h1": MAMBA | {"mamba_d_ssm": 128}, "lfm2": {"layer_types": ["conv", "full_attention"]},
    "granitemoehybrid": MOE | MAMBA | {"layer_types": ["mamba", "attention"]}, "bamba": MAMBA | {"attn_layer_indices": [1]},
    "nemotron_h": MAMBA, "jamba": MOE, "mamba": MAMBA, "mamba2": MAMBA | {"num_heads": 4, "n_groups": 1}, "zamba2": MAMBA | {"layer_types": ["mamba", "hybrid"], "hybrid_layer_ids": [1]}, "minimax": MOE,
    "recurrent_gemma": {}, "falcon_mamba": MAMBA, "olmo_hybrid": {},
    # with images
    "gemma3": {"text": {"sliding_window": 8}}, "gemma3n_text": {"layer_types": ["sliding_attention", "full_attention"], "num_kv_shared_layers": 0, "sliding_window": 8}, "gemma4": {"text": {"sliding_window": 8}},
    "qwen2_5_vl": {"text": MROPE}, "qwen3_vl": {"text": {}}, "qwen3_5": {"text": DELTA}, "mistral3": {"text": {}},
    "llama4": {"text": MOE}, "internvl": {"text": {}}, "smolvlm": {"text": {}}, "glm4v": {"text": MROPE},
    # not decoders
    "t5": {}, "bert": {},
}


def make(name, folder):
    """A folder with a model of this family, with random weights, and the tokenizer of tiny.py."""
    from transformers import CONFIG_MAPPING
    import tiny
    from loading import model_class
    tokenizer = tiny.make_tokenizer()
    common = SMALL | dict(vocab_size=len(tokenizer), bos_token_id=None, eos_token_id=tokenizer.eos_token_id,
                          pad_token_id=tokenizer.pad_token_id)
    changes = dict(FAMILIES[name])
    text = common | changes.pop("text", changes)
    kind = CONFIG_MAPPING[name]
    config = kind()
    if hasattr(config, "text_config"):
        parts = {key: type(getattr(config, key)) for key in ("text_config", "vision_config", "audio_config")
                 if getattr(config, key, None) is not None}
        sizes = {"text_config": text}
        config = kind(**{key: part(**known(part(), sizes.get(key, VISION))) for key, part in parts.items()}, **changes)
        config.eos_token_id = tokenizer.eos_token_id
    else:
        config = kind(**known(config, text))
    torch.manual_seed(0)
    model = (model_class(config) or __import__("transformers").AutoModel.from_config(config).__class__)(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def known(config, values):
    return {key: value for key, value in values.items() if value is not ABSENT and has(config, key)}


def has(config, key):
    try:
        return hasattr(config, key)
    except Exception:
        return True


if __name__ == "__main__":
    settings = configure(globals())
    import traceback
    import warnings
    warnings.filterwarnings("ignore")
    import torch.distributed as dist
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh = dist.init_device_mesh("cpu", (1,))
    from loading import check_trainable, load_policy, load_critic
    for name in only.split(",") if only else FAMILIES:
        folder = f"{HERE}/{out}/{name}"
        try:
            make(name, folder)
        except Exception as e:
            print(f"{name:20} MAKE {type(e).__name__} {str(e)[:200]}")
            if only: traceback.print_exc()
            continue
        line = f"{name:20}"
        try:
            check_trainable(folder)
            p = load_policy(folder, mesh, torch.float32)
            line += f" packed={p.packed}"
            c = load_critic(folder, mesh, torch.float32)
            line += f" critic packed={c.packed}"
        except ValueError as e:
            line += f" REFUSED {str(e).replace(folder, name)[:300]}"
            if only and e.__cause__: traceback.print_exception(e.__cause__)
        except Exception as e:
            line += f" TRACE {type(e).__name__} {str(e)[:200]}"
            if only: traceback.print_exc()
        print(line, flush=True)
