"""
The weights of a model folder.

    read_model      reads them, whole
    write_model     writes a folder for from_pretrained and vLLM
"""
import contextlib
from pathlib import Path

import torch
from transformers import GenerationConfig
from transformers.utils import cached_file

from runtime.check_model import check_loaded, reading

# The files of a processor, which turns images into numbers. Training does not need them, but a folder keeps
# them for those who show the model images.
PROCESSOR = "processor_config.json preprocessor_config.json video_preprocessor_config.json".split()
FILE_SIZE = "5GB"               # of a file of weights, unless a single tensor has more


def read_model(what, kind, path, config, has_head=True, may_lack=()):
    """Return the model of the class `kind` in a folder or hub id, whole, in float32 on the CPU.

    has_head: False leaves out the head of a causal language model, which the folder may then lack. may_lack:
    names of parameters that stay as the class makes them if the folder has none. The model gets an attribute
    `processor` for write_model: {name of a file: its content}. Raises ValueError, with a message that begins
    with `what`, if the weights cannot be read or do not fit the config.
    """
    with reading(f"{what}: its weights"):
        hf, info = kind.from_pretrained(
            path, config=config, dtype=torch.float32, attn_implementation="eager", output_loading_info=True,
            ignore_mismatched_sizes=True, trust_remote_code=False)
    if not has_head:
        head = hf.get_output_embeddings()
        for name in [name for name, part in hf.named_modules() if part is head]:
            hf.set_submodule(name, torch.nn.Identity())
            may_lack = [key for key in info["missing_keys"] if key.startswith(f"{name}.")]
    check_loaded(what, info, may_lack)
    hf.processor = {}
    for name in PROCESSOR:
        with contextlib.suppress(OSError):                      # most models have none
            hf.processor[name] = Path(cached_file(path, name)).read_bytes()
    # In eval mode no dropout acts. The engine has none either.
    return hf.eval()


def write_model(hf, tensors, folder):
    """Write a Hugging Face model to a folder. tensors: {name: whole tensor on the CPU} of its parameters."""
    parameters = {name for name, _ in hf.named_parameters(remove_duplicate=False)}
    buffers = {name: x for name, x in hf.state_dict().items() if name not in parameters}
    # A GenerationConfig's own save_pretrained refuses what some published models have: a temperature alone.
    generation = hf.generation_config
    hf.generation_config = GenerationConfig()
    hf.save_pretrained(folder, state_dict=tensors | buffers, max_shard_size=FILE_SIZE)
    hf.generation_config = generation
    generation.to_json_file(f"{folder}/generation_config.json")
    for name, content in hf.processor.items():
        Path(folder, name).write_bytes(content)
