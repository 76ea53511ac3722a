"""
How much memory of a GPU a run takes, by the size of its model: the table in README.md.

    python -m bench.hardware
    python -m bench.hardware --token_budget=8192 --kl_coef=0.001        # any settings of train_grpo.py

The models are the dense ones of Qwen3, with the numbers of their published configs. Only configs are made, so
this takes seconds and needs no network. The settings are those of config/tasks/gsm8k.py.

A figure is what options/memory.py forecasts for each GPU, in GB: the peak of an update, or what sampling takes
if that is more. vLLM takes the share of the GPU that vllm_gpu_memory_utilization allows, whatever it needs.
Here it gets room for its copy of the weights and for the keys and values of 32 completions of full length;
with less room it samples fewer of them at a time. The forecast counts tensors. CUDA, NCCL and vLLM's graphs
take one to three GB more.
"""
import copy
import sys
import tempfile

from transformers import Qwen3Config

from configurator import configure, read_block
from options import memory

# hidden_size, intermediate_size, layers, heads of queries, and whether the output head is the embedding
SIZES = {"0.6 B": (1024, 3072, 28, 16, True), "1.7 B": (2048, 6144, 28, 16, True),
         "4 B": (2560, 9728, 36, 32, True), "8 B": (4096, 12288, 36, 32, False)}
ADAPTER_RANK = 16               # lora_rank in the columns of LoRA
# (lora_rank, GPUs, offload_base) of each column
COLUMNS = [(0, 1, False), (0, 8, False), (ADAPTER_RANK, 1, False), (ADAPTER_RANK, 8, False), (ADAPTER_RANK, 1, True)]
COMPLETIONS = 32                # for which an engine has room at a time


def gigabytes(settings, gpus):
    """Return the memory that each of `gpus` GPUs needs at its peak, in GB."""
    s = copy.copy(settings)
    s.vllm_gpu_memory_utilization = 0.0                         # so that sampling is forecast without a cache
    sampling, update = memory.forecast(s, gpus, float("1e18"), cuda=True)
    length = s.max_prompt_length + s.max_completion_length
    cache = COMPLETIONS * length * 2 * memory.sizes(s.model).cached         # 2 bytes for each number
    return max(sampling + cache, update) / 1e9


if __name__ == "__main__":
    script = {"__file__": "train_grpo.py", "__doc__": __doc__}
    exec(read_block("train_grpo.py"), script)
    settings = configure(script, ["config/tasks/gsm8k.py", *sys.argv[1:]])
    settings.engine = "vllm"
    settings.reference_model = ""
    titles = []
    for lora_rank, gpus, offload_base in COLUMNS:
        kind = f"LoRA, rank {lora_rank}" if lora_rank else "all weights"
        kind += ", base in host memory" * offload_base
        titles.append(f"{kind}, {gpus} GPU{'s' * (gpus > 1)}")
    print("| model |", " | ".join(titles), "|")
    print("| --- |", " | ".join(["---:"] * len(titles)), "|")
    for name, (hidden, intermediate, layers, heads, tied) in SIZES.items():
        with tempfile.TemporaryDirectory() as folder:
            Qwen3Config(vocab_size=151936, hidden_size=hidden, intermediate_size=intermediate, head_dim=128,
                        num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=8,
                        tie_word_embeddings=tied, architectures=["Qwen3ForCausalLM"]).save_pretrained(folder)
            settings.model = folder
            cells = []
            for settings.lora_rank, gpus, settings.offload_base in COLUMNS:
                cells.append(f"{gigabytes(settings, gpus):.0f}")
            print(f"| {name} |", " | ".join(cells), "|")
