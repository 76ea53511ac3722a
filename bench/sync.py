"""
A weight sync of a model of 0.5 B parameters: colocated, and over the bridge to an engine of its own.

    python -m bench.sync

The model has the shape of Qwen2.5-0.5B and random weights. Memory is what the process holds during a sync, at
most, above what it holds before; the seconds are medians over the syncs after the first.
"""
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from types import SimpleNamespace

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from configurator import check, configure
from model import load_policy
from options.placement import Bridge
from rollout import engine_class
from runtime import distributed
from tiny import pretrain
# ------------------------------------------------------------------------------------------------------------
layers = 24
hidden_size = 896
vocab_size = 151936
syncs = 4
engine = "vllm"
# ------------------------------------------------------------------------------------------------------------
configure(globals())
check(engine in ("vllm", "hf"), f"engine={engine}: choose vllm, hf")


def make_model(folder):
    tokenizer = pretrain.make_tokenizer()
    torch.manual_seed(0)
    Qwen2ForCausalLM(Qwen2Config(
        vocab_size=vocab_size, hidden_size=hidden_size, intermediate_size=hidden_size * 38 // 7,
        num_hidden_layers=layers, num_attention_heads=hidden_size // 64, num_key_value_heads=2,
        max_position_embeddings=512, tie_word_embeddings=True, eos_token_id=0)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


class Memory(threading.Thread):
    """Notes the most memory that this process holds from now on."""

    def __init__(self):
        super().__init__(daemon=True)
        self.most, self.done = 0, threading.Event()
        self.before = self.now()
        self.start()

    def now(self):
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def run(self):
        while not self.done.wait(0.01):
            self.most = max(self.most, self.now() - self.before)

    def most_more(self):
        """Ends it; returns GB."""
        self.done.set()
        return max(self.most, 0) / 1e9


def measured(what, action):
    """Runs action(version) for each sync and prints what it took."""
    seconds, memory = [], []
    for version in range(1, syncs + 1):
        watch, began = Memory(), time.perf_counter()
        action(version)
        seconds.append(time.perf_counter() - began)
        memory.append(watch.most_more())
    print(f"{what:36} {statistics.median(seconds[1:]):6.2f} s {max(memory[1:]):6.2f} GB", flush=True)


def make_engine(folder, apart):
    one = engine_class(engine)(folder, torch.float32, 64, [0], 0.4, apart=apart)
    one.dtype = torch.float32
    return one


def colocated(folder):
    *_, mesh, _ = distributed.set_up()
    policy, one = load_policy(folder, mesh, torch.float32), make_engine(folder, apart=False)
    measured("colocated", lambda _: one.update_weights(policy, 1))


def apart(folder):
    bridge = Bridge(SimpleNamespace(engine=engine, dtype="float32", rollout_ranks=1, vllm_tensor_parallel_size=1,
                                    timeout=1200.0, max_staleness=1))
    *_, mesh, _ = distributed.set_up(role=bridge.join)
    if bridge.trains:
        policy = load_policy(folder, mesh, torch.float32)
        bridge.tell("begin")
        bridge.take("ready", 0)

        def publish(version):
            bridge.update_weights(policy, version)

        measured("apart, trainer: gather and send", publish)
        bridge.take("loaded", 0)
        bridge.close()
    else:
        bridge.begin()
        one = make_engine(folder, apart=True)
        one.incoming = bridge.weights
        bridge.send("ready", 0, [])
        measured("apart, engine: wait, receive and load", one.switch)
        bridge.send("loaded", 0, [])
        threading.Event().wait()                                # the trainer ends this process


def main():
    with tempfile.TemporaryDirectory() as folder:
        make_model(folder)
        for ways in ("colocated", "apart"):
            subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone",
                            f"--nproc_per_node={1 + (ways == 'apart')}", "-m", "bench.sync", *sys.argv[1:]],
                           env=os.environ | {"FOLDER": folder, "OMP_NUM_THREADS": "1"}, check=True)


if __name__ == "__main__":
    if "FOLDER" not in os.environ:
        main()
    elif os.environ["WORLD_SIZE"] == "1":
        colocated(os.environ["FOLDER"])
        distributed.leave()
    else:
        apart(os.environ["FOLDER"])
        distributed.leave()
