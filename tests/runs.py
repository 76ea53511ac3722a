"""How the tests run scripts: by a launcher, as a user does, or in processes forked from one with all imports.

A forked run computes the same in half a second. A new process takes five seconds for its imports alone.
"""
import atexit
import compileall
import contextlib
import faulthandler
import functools
import gc
import importlib.util
import json
import multiprocessing
import os
import pickle
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from multiprocessing.forkserver import ensure_running
from pathlib import Path
from py_compile import PycInvalidationMode
from unittest import mock

import torch.distributed as dist

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
# The text of each recipe, which is the lines at its head and a diff.
RECIPES = {path.stem: path.read_text() for path in sorted(Path(ROOT, "recipes").glob("*.diff"))}
DAPO = "train_dapo.py"          # a copy of train_grpo.py, which recipes/dapo.diff makes
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone")

# Modules of the repository are not among what it has imported: a script imports these itself, as under a
# launcher.
forkserver = multiprocessing.get_context("forkserver")
forkserver.set_forkserver_preload(["preloaded"])


@functools.cache
def start_forkserver():
    """Start the process that others are forked from, and compile the repository's files for all of them."""
    with contextlib.chdir(os.path.join(ROOT, "tests")):         # where it finds preloaded.py
        ensure_running()
    # Where Python is told to write no bytecode, each process would compile them again. With a checksum in it
    # the code of a file that has changed is never taken.
    for name in ("", "config", "environments", "options", "runtime", "tasks", "tiny"):
        compileall.compile_dir(os.path.join(ROOT, name), maxlevels=0, quiet=2,
                               invalidation_mode=PycInvalidationMode.CHECKED_HASH)


def start_forked(target, tuples, daemon=None):
    """Start a forked process for each tuple of arguments; returns them."""
    start_forkserver()
    processes = [forkserver.Process(target=target, args=arguments, daemon=daemon) for arguments in tuples]
    for process in processes:
        process.start()
    return processes


@functools.cache
def script_path(script):
    """The path of a script from the root. train_dapo.py is made in a folder for temporary files."""
    if script != DAPO:
        return script
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder)
    shutil.copy(os.path.join(ROOT, "train_grpo.py"), folder)
    subprocess.run(["patch", "-p1", "--fuzz=0"], input=RECIPES["dapo"], cwd=folder, text=True, check=True,
                   capture_output=True)
    return os.path.join(folder, script)


def load_rows(*arguments, **more):
    """The rows of tasks.generate_problems.generated_rows, without their names."""
    from tasks.generate_problems import generated_rows
    return [row for _, row in generated_rows(*arguments, **more)]


def launch(*arguments, launcher=(sys.executable,), code=0, cwd=ROOT, env={}):
    """Run a command to its end and return what it printed. code: the exit code that it should have.

    env: what is added to the environment.
    """
    result = subprocess.run([*launcher, *map(str, arguments)], cwd=cwd, env=os.environ | env,
                            capture_output=True, text=True, timeout=300)
    assert result.returncode == code, result.stdout[-3000:] + result.stderr[-3000:]
    return result.stdout + result.stderr


def keep_rollouts():
    """Make the script that this process runs write each step's rollouts, for kept_rollouts to read.

    They are those that it deals out, so of train_dapo.py those that it trains on. Of these the scores of all
    that it has sampled are written as well.
    """
    import model
    deal = model.deal_to_ranks

    def kept(rollouts, *rest):
        frame = sys._getframe(1)
        script = frame.f_globals
        # Functions deal out others.
        if frame.f_code.co_name == "<module>" and dist.get_rank() == 0:
            folder = f"{script['run'].out_dir}.rollouts"
            os.makedirs(folder, exist_ok=True)
            with open(f"{folder}/{script['step']}.jsonl", "w") as file:
                for r in rollouts:
                    as_lists = {key: value.tolist() for key, value in vars(r).items() if hasattr(value, "tolist")}
                    as_lists |= {"rewards": [*r.rewards.items()], "score": r.score}
                    file.write(json.dumps(vars(r) | as_lists, default=str) + "\n")
            if isinstance(script.get("sampled"), list):
                with open(f"{folder}/scores-{script['step']}.json", "w") as file:
                    json.dump([r.score for r in script["sampled"]], file)
        return deal(rollouts, *rest)
    model.deal_to_ranks = kept


def kept_rollouts(out_dir, step):
    """The rollouts of a step of a run of train() as dicts, with the number of tokens that were sampled."""
    rows = lines(f"{out_dir}.rollouts", f"{step}.jsonl")
    return [row | {"length": sum(end - start for start, end in row["spans"])} for row in rows]


def run_in_child(script, arguments, log, env, forbidden, errors, keep=False, root=ROOT):
    for number, path in ((1, log), (2, errors or log)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    faulthandler.enable(2)                                      # the log then says where a process has crashed
    signal.signal(signal.SIGHUP, signal.SIG_DFL)                # the tests may run under nohup, which ignores it
    os.environ.update(env)
    os.chdir(root)
    sys.path.insert(0, str(root))
    if keep:
        keep_rollouts()
    if "models" in forbidden:
        from transformers import PreTrainedModel
        PreTrainedModel.from_pretrained = None
    if "vllm" in forbidden:
        find_spec = importlib.util.find_spec
        importlib.util.find_spec = lambda name, *rest: None if name == "vllm" else find_spec(name, *rest)
    sys.argv = [script, *map(str, arguments)]
    try:
        if script == "-m":
            del sys.argv[0]
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(script, run_name="__main__")
    except Exception:
        # Python itself calls this hook. multiprocessing does not.
        sys.excepthook(*sys.exc_info())
        raise
    finally:
        # A process of one's own does this at its end, a forked one does not.
        atexit._run_exitfuncs()


def announced(named_tensors):
    """What weights.engine_weights yields: these tensors, and then what proves that they have arrived."""
    from weights import SUMS, checksum
    sums = {}
    for name, tensor in named_tensors:
        sums[name] = checksum(tensor)
        yield name, tensor
    yield SUMS, sums


def shut_down(engine):
    """Let another vLLM take the memory of this one, and let the tests have a process group, which vLLM ends.

    In a run this is done by the end of the process.
    """
    if engine.name == "vllm":
        engine._wake()                                          # asleep it would unmap its memory twice
        # Otherwise this and the next engine would look for garbage in all that has been imported.
        with mock.patch.object(gc, "unfreeze"):
            engine.llm.llm_engine.engine_core.shutdown()
        del engine.llm
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def free_port():
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        return listener.getsockname()[1]


def environment(rank, ranks, port):
    """What torchrun tells a rank, or nothing where a process is alone."""
    return {} if ranks == 1 else {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks),
                                  "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}


def call_in_group(function, arguments, env, path):
    os.environ.update(env)
    dist.init_process_group("gloo")
    result = function(*arguments)
    with open(path, "wb") as file:
        pickle.dump(result, file)


def on_ranks(count, folder, function, *arguments):
    """What function(*arguments) returns on each rank of a group of forked processes."""
    port = free_port()
    paths = [os.path.join(folder, f"rank{rank}.pickle") for rank in range(count)]
    processes = start_forked(call_in_group, [
        (function, arguments, environment(rank, count, port), path) for rank, path in enumerate(paths)])
    for process in processes:
        process.join(120)
        assert process.exitcode == 0
    results = []
    for path in paths:
        with open(path, "rb") as file:
            results.append(pickle.load(file))
    return results


def begin(log, script, *arguments, ranks=1, forbidden=(), errors=None, keep=False, root=ROOT):
    """Start a script in forked processes, one per rank, which write to the file `log`; returns the processes.

    script: a file, or "-m" where the first argument is a module.
    forbidden: what must not be there, "models" to load or "vllm". errors: a file of its own for stderr.
    keep: see keep_rollouts. root: the folder with the project's files.
    """
    port = free_port()
    return start_forked(run_in_child, [
        (script_path(script), arguments, log, environment(rank, ranks, port), forbidden, errors, keep, root)
        for rank in range(ranks)])


def begin_torchrun(log, ranks, script, *arguments):
    """Start a script by a torchrun on this machine, whose own process is forked; returns that one in a list.

    Its workers are new processes of Python, as ever.
    """
    return begin(log, "-m", *TORCHRUN[2:], f"--nproc_per_node={ranks}", script, *arguments)


def finish(processes, log, code=0, seconds=240):
    """Wait for such processes, whose exit code should be `code`, and return what they printed."""
    deadline = time.monotonic() + seconds
    for process in processes:
        process.join(max(0, deadline - time.monotonic()))
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    with open(log) as file:
        output = file.read()
    assert codes == [code] * len(codes), f"exit codes {codes}\n{output[-6000:]}"
    return output


def forked(log, script, *arguments, ranks=1, code=0, forbidden=(), keep=False, root=ROOT):
    """Run a script to its end in forked processes and return what it printed, which the file `log` keeps.

    keep, root: as for begin.
    """
    if os.path.exists(log):
        os.remove(log)
    return finish(begin(log, script, *arguments, ranks=ranks, forbidden=forbidden, keep=keep,
                        root=root), log, code)


def refused(arguments, message, tmp_path, script="train_grpo.py", ranks=1, loads=False):
    """Assert that a script refuses its arguments by one clear line at the end, before it loads a model.

    loads: whether it may load one, because the line is about what is found then.
    """
    forbidden = [] if loads else ["models"]
    output = forked(tmp_path / "log", script, *arguments, ranks=ranks, code=2, forbidden=forbidden)
    assert message in output.splitlines()[-1] and f'File "{ROOT}/' not in output, output


def with_defaults(arguments, defaults):
    """Arguments with those settings before them that they do not name."""
    named = {argument.partition("=")[0] for argument in arguments}
    return [f"--{key}={value}" for key, value in defaults.items() if f"--{key}" not in named] + [*arguments]


def train(script, out_dir, arguments, defaults, launcher=None, ranks=1, code=0):
    """Run a training script and return its metrics and what it printed.

    defaults: settings for what the arguments do not name. launcher: a command to run it by, without forks.
    """
    command = [script, f"--out_dir={out_dir}", *with_defaults(arguments, defaults)]
    output = (launch(*command, launcher=launcher, code=code) if launcher else
              forked(f"{out_dir}.log", *command, ranks=ranks, code=code, keep=True))
    return lines(out_dir), output


def lines(out_dir, name="metrics.jsonl"):
    """The lines of a run's log, or none if it ended before the first."""
    path = os.path.join(out_dir, name)
    if not os.path.exists(path):
        return []
    with open(path) as file:
        return [json.loads(line) for line in file]


def change_state(folder, change):
    """Puts change(state) in place of a checkpoint's state, as if the run had written it."""
    state = Path(folder, "trainer", "state.json")
    state.write_text(json.dumps(change(json.loads(state.read_text()))))


def split(batch, values):
    """The values of a micro-batch's tokens, [C], as {s: [len]}."""
    target = {}
    batch.put(values, target)
    return target


def without_times(metrics):
    return [{k: v for k, v in line.items() if not k.startswith(("timing_s/", "perf/"))} for line in metrics]


def requests(prompts, n, seeds, *sampling, **fields):
    """n adjacent Requests per prompt, a list of ids, with the seeds seed, seed + 1, ..."""
    from rollout import Request
    return [Request(None, ids, seed + i, *sampling, **fields) for ids, seed in zip(prompts, seeds) for i in range(n)]


def jobs(prompts, n, seeds, *sampling):
    """n adjacent jobs per data.Prompt, with such Requests."""
    asked = requests([prompt.ids for prompt in prompts], n, seeds, *sampling)
    return [(prompts[i // n].row, request) for i, request in enumerate(asked)]
