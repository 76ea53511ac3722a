"""
Writes the model that a run with adapters has computed with as a plain folder, bit for bit if it was on a CPU.

    python -m options.merge_adapter BASE ADAPTER OUT [DTYPE]

BASE is the model, and ADAPTER a checkpoint or another folder in PEFT's form. DTYPE is the one in which the
run computed. Without it, it is bfloat16 on a machine with a GPU and otherwise float32, like dtype=auto.
"""
import os
import sys

from runtime import distributed         # before torch: it sets environment variables that torch reads
import torch
from transformers import AutoTokenizer

from configurator import CHOICES, check, input_errors
from model import Policy
from options.lora import merge, plain_layers, read_adapter, scale_of
from runtime.model_folder import (check_trainable, has_tokenizer, load_tokenizer, model_class, read_config,
                                  read_model, write_model)


@torch.no_grad()
def merge_adapter(base, adapter, out, dtype):
    """Write the model in `base` with an adapter to the folder `out`, in dtype. Rounds as lora.merge does.
    Raises InputError for a model or an adapter that could not be trained here."""
    path = check_trainable(base)
    config = read_config(path)
    hf = read_model(f"model={base}", model_class(config), path, config, dtype=dtype)
    plain = plain_layers(Policy(hf))
    adapter_config, pairs = read_adapter(adapter, plain)
    for name, pair in pairs.items():
        weight = plain[name].weight
        weight.copy_(merge(weight, pair["lora_A"], pair["lora_B"], scale_of(adapter_config)))
    write_model(hf, dict(hf.named_parameters()), out)
    tokenizer = load_tokenizer(path)
    if has_tokenizer(adapter):                                  # a run may have set another chat template
        tokenizer = AutoTokenizer.from_pretrained(adapter, trust_remote_code=False)
    tokenizer.save_pretrained(out)


if __name__ == "__main__":
    check(len(sys.argv) in (4, 5), "python -m options.merge_adapter BASE ADAPTER OUT [DTYPE]")
    _, base, adapter, out, dtype = (sys.argv + ["auto"])[:5]
    check(dtype in CHOICES["dtype"], f"{dtype}: choose {', '.join(CHOICES['dtype'])}")
    check(not os.path.exists(out), f"{out} exists already: name a new folder")
    with input_errors():
        merge_adapter(base, adapter, out, distributed.compute_dtype(dtype))
