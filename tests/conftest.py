"""A small model with random weights, and the process group that FSDP2 asks for."""
import os

# Before torch: models this small lose by a second thread.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
import torch.distributed as dist
from transformers import Qwen3Config, Qwen3ForCausalLM

import tiny


def pytest_addoption(parser):
    parser.addoption("--kills", type=int, default=1, help="kills of each run in tests/test_survive.py")


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """A Qwen3 of 0.1 M parameters with random weights, large enough that its distributions are not flat."""
    path = str(tmp_path_factory.mktemp("model"))
    tokenizer = tiny.make_tokenizer()
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, max_position_embeddings=256,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, initializer_range=0.2))
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def mesh():
    # A module's tests may have closed an engine, which ends the group.
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return dist.init_device_mesh("cpu", (1,))


@pytest.fixture(scope="session")
def reward_file(tmp_path_factory):
    """A reward that even a random model earns: more even than odd letters."""
    path = tmp_path_factory.mktemp("reward") / "rewards.py"
    path.write_text(
        'def score(prompts, completions, **_):\n'
        '    return [{"score": sum(ord(c) % 2 == 0 for c in m[0]["content"]) / 12} for m in completions]\n')
    return f"--reward={path}:score"
