"""
What many rows cost: the seconds until a run has made its first step, and the memory of each rank by then.

    python -m bench.rows
    python -m bench.rows --rows=1000 --ranks=2              # what the rest of a start costs
    python -m bench.rows --kind=parquet

It writes a file of rows in verl's form, and runs train_grpo.py on it with the small model and the plain engine.
"""
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from configurator import configure
# ------------------------------------------------------------------------------------------------------------
rows = 1_000_000
size = 1000                     # characters of a row
kind = "jsonl"                  # jsonl or parquet
ranks = 1
# ------------------------------------------------------------------------------------------------------------
configure(globals())


def row(i, rng):
    problem = f"What is {i} + {rng.randrange(1000)}? Explain each step, and write the result after Answer:"
    start = {"data_source": f"source {i % 3}", "prompt": [{"role": "user", "content": problem}],
             "reward_model": {"style": "rule", "ground_truth": str(i)}, "extra_info": {"index": i}}
    rest = size - len(json.dumps(start | {"solution": ""}))
    return start | {"solution": "".join(rng.choices("abcdefghijklmno 0123456789+=\n", k=rest // 2)) * 2}


def write(path):
    rng = random.Random(0)
    if kind == "parquet":
        import pyarrow
        import pyarrow.parquet
        tables = (pyarrow.Table.from_pylist([row(i, rng) for i in range(first, min(first + 10_000, rows))])
                  for first in range(0, rows, 10_000))
        first = next(tables)
        with pyarrow.parquet.ParquetWriter(path, first.schema) as writer:
            for table in (first, *tables):
                writer.write_table(table)
    else:
        with open(path, "w") as file:
            file.writelines(json.dumps(row(i, rng)) + "\n" for i in range(rows))


def memory(pid):
    """Return the memory of a process and its peak, in GB."""
    status = Path(f"/proc/{pid}/status").read_text()
    return [int(re.search(rf"{name}:\s+(\d+) kB", status)[1]) * 1024 / 1e9 for name in ("VmRSS", "VmHWM")]


with tempfile.TemporaryDirectory() as folder:
    path = f"{folder}/rows.{kind}"
    write(path)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}",
               "train_grpo.py", "--task=file", f"--train_file={path}", "--engine=hf", f"--out_dir={folder}/run",
               "--max_prompt_length=160", "--max_completion_length=16", "--prompts_per_step=4",
               "--num_generations=4", "--eval_prompts=4", "--eval_samples=1", "--max_steps=100000"]
    started = time.perf_counter()
    run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    said = []
    for line in run.stdout:
        said.append(line)
        if line.startswith("step   0  reward"):
            break
    seconds = time.perf_counter() - started
    children = Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()
    if len(children) < ranks:
        sys.exit("".join(said[-20:]))
    for pid in children:
        if "train_grpo.py" in Path(f"/proc/{pid}/cmdline").read_text():
            print("a rank has {:.2f} GB, at its peak {:.2f}".format(*memory(pid)))
    print(f"{rows:,} rows, a {kind} file of {os.path.getsize(path) / 1e9:.2f} GB, {ranks} rank(s): "
          f"{seconds:.1f} seconds until the first step was made")
    run.terminate()
    run.communicate()
