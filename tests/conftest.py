"""Small models with random weights, what rewards them, and the process group that FSDP2 asks for."""
import gc
import json
import os
import shutil
import sys

# While modules are imported, full collections would take a second and find nothing.
gc.disable()
# Before torch: models this small lose by a second thread.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Before transformers: the tests need no hub, and without a network one question to it takes 20 seconds.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest

from configurator import TINY_DEFAULTS

# What takes seconds to import is imported where it is used: the process that only hands out tests needs none.


def pytest_addoption(parser):
    parser.addoption("--kills", type=int, default=1, help="kills of each run in tests/test_survive.py")


def pytest_collection_finish():
    # What was imported will never be garbage. To look through all of it would take a third of a second each time.
    gc.freeze()
    gc.enable()


def pytest_runtest_setup():
    # Every vLLM fills its cache with zeros. For a gigabyte this takes half a second.
    if "vllm.platforms.cpu" in sys.modules:
        sys.modules["vllm.platforms.cpu"].GiB_bytes = 2 ** 26


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """A Qwen3 of 0.1 M parameters with random weights, large enough that its distributions are not flat."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM
    from tiny import pretrain
    path = str(tmp_path_factory.mktemp("model"))
    tokenizer = pretrain.make_tokenizer()
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, max_position_embeddings=256,
        tie_word_embeddings=True, suits=TINY_DEFAULTS,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, initializer_range=0.2))
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def experts(folder, tmp_path_factory):
    """A Qwen3-MoE of two layers, each with four experts, with random weights."""
    import torch
    from transformers import AutoTokenizer, Qwen3MoeConfig, Qwen3MoeForCausalLM
    path = str(tmp_path_factory.mktemp("experts"))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    torch.manual_seed(0)
    Qwen3MoeForCausalLM(Qwen3MoeConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, moe_intermediate_size=32,
        num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, head_dim=32, num_experts=4,
        num_experts_per_tok=2, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
        initializer_range=0.2, suits=TINY_DEFAULTS)).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def mesh():
    import torch.distributed as dist
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


# What tokens of `talker` stand for, each with a number of its own: the first three in seven are right.
CALLS = ('{"name": "look", "arguments": {"at": "%d"}}', '{"name": "look", "arguments": {"at": %d}}',
         '{"arguments": {"at": "%d"}, "name": "look"}', '{"name": "look", "arguments": {"on": "%d"}}',
         '{"name": "open", "arguments": {"box": "%d"}}', '{"name": "leap%d"}', '{"name": %d')


@pytest.fixture(scope="session")
def talker(folder, tmp_path_factory):
    """The model `folder` with a tokenizer in which one token in six ends a turn, and one in six is a call.

    In the other models these tokens are bytes over 127. Its turns have about five tokens.
    """
    path = shutil.copytree(folder, tmp_path_factory.mktemp("talker") / "model")
    file = path / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    names = {number: name for name, number in tokenizer["model"]["vocab"].items()}
    for number in range(140, 188):
        # A vocabulary of bytes has this letter for a space.
        names[number] = f"<tool_call>{CALLS[number % len(CALLS)] % number}</tool_call>".replace(" ", "\u0120")
    tokenizer["model"]["vocab"] = {name: number for number, name in names.items()}
    file.write_text(json.dumps(tokenizer))
    from tiny import pretrain
    end = pretrain.make_tokenizer().eos_token_id
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [end, *range(94, 140)]}))
    return str(path)


GAMES = '''
def paid(text):
    return sum(ord(c) % 2 == 0 for c in text) / 12


class Letters:
    """Pays in each turn for even letters, and is over when the number of letters divides by four."""
    def reset(self, **row):
        return " Speak."

    def step(self, text):
        done = len(text) % 4 == 0
        return None if done else f"{len(text)} heard.", paid(text), done


class Desk:
    """Has two tools. One always fails, and for calls of the other it pays at the end."""
    def reset(self, **row):
        self.looks = 0

    def look(self, at: str) -> str:
        """Looks.

        Args:
            at: What to look at.
        """
        self.looks += 1
        return f"{at}, {self.looks}"

    def open(self, box: str) -> str:
        """Opens a box.

        Args:
            box: Which one.
        """
        raise ValueError("stuck")

    def get_reward(self):
        return self.looks / 4
'''


@pytest.fixture(scope="session")
def games(tmp_path_factory):
    """A file with environments that even `talker` is rewarded by."""
    path = tmp_path_factory.mktemp("games") / "games.py"
    path.write_text(GAMES)
    return path
