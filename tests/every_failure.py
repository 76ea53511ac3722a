"""Fails every file operation of a save, one after the other, and kills the run there: nothing is lost.

    python tests/every_failure.py                          # all four scripts
    python tests/every_failure.py --only=ppo --every=10    # one of them, and a tenth of its points
    python tests/every_failure.py --only=grpo,ppo --ranks=2 --every=30     # all of rank 1, and a part of rank 0

A run of four steps saves after each of them. In its third save, and in the lines of the log before it, the
n-th operation on the run's folder fails, for n = 1, 2, ... until a save ends without a fault: by a full disk
(ENOSPC, first after half of a write), by EIO, or by EACCES; or the process is killed there (kill), or in the
middle of a write (torn). every_failure.c does it, and so sees what safetensors writes as well. Afterwards

    the message is one line that names the folder, and the exit code is 2,
    each checkpoint in the folder is whole: bit for bit that of a run without a fault,
    what belongs to somebody else, in the folder or next to it, is untouched,
    a resumed run writes the figures, samples and checkpoints of a run without a fault, and leaves nothing.

On one rank a run goes up to that save once, and each point is a process forked from it, which makes the save.
On several each point is a run of its own. A run is resumed once for each state of the folder that a point
leaves. The exit code is 0 only if all is as it should be.
"""
import ctypes
import errno
import hashlib
import json
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

# Before torch: models this small lose by a second thread. Nothing here is to be found on a network.
os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(Path(__file__).parent), str(ROOT)]
WORK = Path(os.environ.get("EVERY_FAILURE") or tempfile.mkdtemp(prefix="every-failure-"))
MODEL, SHIM, RUN, OTHER = WORK / "model", WORK / "shim.so", WORK / "run", WORK / "other"
STEP = 3                        # the checkpoint whose save is disturbed
FAULTS = {"ENOSPC": errno.ENOSPC, "EIO": errno.EIO, "EACCES": errno.EACCES, "kill": -1, "torn": -2}
SMALL = {"model": MODEL, "out_dir": RUN, "reward": f"{WORK}/letters.py:score", "engine": "hf", "timeout": 0,
         "prompts_per_step": 2, "num_generations": 4, "max_completion_length": 12, "train_prompts": 32,
         "eval_prompts": 4, "eval_samples": 1, "max_steps": 4, "warmup_steps": 0, "learning_rate": 1e-3,
         "save_interval": 1, "keep_checkpoints": 2, "eval_interval": 0}
SCRIPTS = {"grpo": {}, "dapo": {"max_num_gen_batches": 2}, "ppo": {"critic_warmup_steps": 1},
           "async": {"max_staleness": 1}}
# Operations whose failure needs no message, and "none", if a save has fewer operations this time: an old checkpoint
# stays until the next save, or a part of it that is no checkpoint any more; a folder is there already; nobody says
# of a new folder of one's own that it may not be read. Of the files that libraries in Rust write nobody learns that
# they could not be closed. Only network file systems write that late.
SILENT = (r"none|rename /checkpoint-1|\w+ /checkpoint\.old\b.*|mkdir /checkpoint\.part.*|list /checkpoint\.part.*"
          r"|close /checkpoint\.part/.*(\.safetensors|tokenizer\.json)")
LETTERS = """
def score(prompts, completions, **_):
    return [sum(ord(c) % 2 == 0 for c in m[0]["content"]) / 12 for m in completions]
"""


# ---------------------------------------------------------------- runs, in forked processes


def start(name, arguments, rank=0, ranks=1, log=WORK / "log", before=None):
    """Fork a process that runs a script; `before` is called in it first. Returns its id."""
    from runs import environment, script_path
    script = f"train_{name}.py"
    path = script_path(script)
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        os.environ.update(environment(rank, ranks, arguments.pop("port", 0)))
        if before:
            before(rank)
        sys.argv = [script, *(f"--{key}={value}" for key, value in arguments.items())]
        runpy.run_path(path, run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(code)


def wait(pid, seconds=300):
    """Wait for a process, and return its exit code, or the negative number of the signal that ended it."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.001)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return "hangs"


def run(name, ranks, before=None, **changed):
    """Run a script to its end; returns the exit codes of its ranks, and what they printed."""
    from runs import free_port
    (WORK / "log").unlink(missing_ok=True)
    ranks += name == "async"                                    # the last one is the engine
    arguments = SMALL | SCRIPTS[name] | changed
    if ranks > 1:
        arguments["port"] = free_port()
    pids = [start(name, dict(arguments), rank, ranks, before=before) for rank in range(ranks)]
    return [wait(pid) for pid in pids], (WORK / "log").read_text()


# ---------------------------------------------------------------- the state of a folder


def content_of(path):
    """What a file says, without times."""
    content = path.read_bytes()
    if path.name == "metrics.jsonl":
        return b"".join(map(without_times, content.splitlines(True)))
    if path.name == "state.json":
        try:
            state = json.loads(content)
        except ValueError:
            return re.sub(rb'"clock".*', b"", content)
        return json.dumps({key: x for key, x in state.items() if key not in ("settings", "clock")}).encode()
    return content


def without_times(line):
    try:
        figures = json.loads(line)
    except ValueError:
        return b"cut off"
    return json.dumps({key: x for key, x in figures.items() if not key.startswith(("timing_s", "perf"))}).encode()


def files_of(folder):
    """{name: checksum of its content, or "folder"} of all in a folder but what a run writes at its start."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = re.sub(r"\.tmp\w{6}$", ".tmp", str(path.relative_to(folder)))    # of safetensors
        if not re.match(r"\.lock|events\.out|config\.json|changes\.diff|train_\w+\.py|report\.html", name):
            found[name] = "folder" if path.is_dir() else hashlib.sha256(content_of(path)).hexdigest()[:16]
    return found


def restore(saved):
    """Put a copy of a run's folder in its place, where another process holds the lock."""
    for path in RUN.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name != ".lock":
            path.unlink()
    shutil.copytree(saved, RUN, dirs_exist_ok=True, ignore=shutil.ignore_patterns(".lock"))


def add_others():
    """Put files that are not the run's into its folder, and another run next to it."""
    for path in (RUN / "notes.txt", RUN / "checkpoint-1.mine" / "model.safetensors", RUN / "checkpoint-x" / "a",
                 OTHER / "checkpoint-3" / "a", OTHER / "checkpoint.part" / "a", OTHER / "metrics.jsonl"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"this is {path}\n")


# ---------------------------------------------------------------- one point: a save in which something fails


def arm(number, fault, log):
    ctypes.CDLL(None).arm(str(RUN).encode(), number, FAULTS.get(fault, 0), os.open(
        log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC))


def end_after_save(step):
    """Let a process end when it has saved this step."""
    from runtime.run import Run
    save = Run.save

    def save_and_end(run):
        save(run)
        if run.state["step"] == step:
            ctypes.CDLL(None).disarm()
            os._exit(0)
    Run.save = save_and_end


def at_end_of_step(act):
    """Return a function for `start`: before the end of the step whose save is disturbed, act(run, rank) is
    called."""
    def before(rank):
        from runtime.run import Run
        end_step = Run.end_step

        def disturbed(run, *arguments):
            if run.state["step"] == STEP - 1:
                act(run, rank)
            end_step(run, *arguments)
        Run.end_step = disturbed
    return before


def fork_points(every, points_file):
    """Return what to do before the save on one rank: fork a process for each point, and end."""
    def act(run, rank):
        import torch.distributed as dist
        from torch.distributed.tensor import DTensor
        from torch.utils.tensorboard import SummaryWriter
        if hasattr(run.engine, "ahead"):
            run.engine.ahead(range(STEP, run.settings.max_steps))       # the children cannot receive it
        before = WORK / "before"
        shutil.copytree(RUN, before, ignore=shutil.ignore_patterns(".lock"))
        for number, fault, log in points_of(every):
            restore(before)
            pid = os.fork()
            if not pid:
                # A forked process has no threads, and one rank has nobody to talk to.
                dist.barrier = lambda: None
                DTensor.full_tensor = lambda tensor: tensor.to_local()
                run.log.board = SummaryWriter(RUN)
                end_after_save(STEP)
                os.dup2(os.open(WORK / "said", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
                arm(number, fault, log)
                return
            code = wait(pid)
            with open(points_file, "a") as file:
                point = result_of(0, number, fault, log, [code], (WORK / "said").read_text())
                file.write(json.dumps(point) + "\n")
        shutil.rmtree(before)
        os._exit(0)
    return act


def operations_of(rank):
    """The operations of a save without a fault, each with the file behind it."""
    return (WORK / f"operations-{rank}").read_text().splitlines()


def points_of(every, rank=0):
    """Yield each point as number, fault and the file for the names of the operations. The first, 0, has no
    fault, and says how many there are."""
    yield 0, "", WORK / f"operations-{rank}"
    operations = operations_of(rank)
    for fault in FAULTS:
        for number in range(1, len(operations) + 1, every):
            if fault != "torn" or operations[number - 1].startswith("write"):
                yield number, fault, WORK / "again"


def result_of(rank, number, fault, log, codes, text):
    """Keep the state of the folder, and return what is known of a point."""
    # Who makes a folder first, and how often TensorBoard's thread writes, may differ from save to save.
    operations = log.read_text().splitlines()
    operation = operations[number - 1] if 0 < number <= len(operations) else "none"
    state = files_of(RUN)
    digest = hashlib.sha256(json.dumps(state).encode()).hexdigest()[:16]
    kept = WORK / "states" / digest
    if not kept.exists():
        shutil.copytree(RUN, kept, ignore=shutil.ignore_patterns(".lock"))
    return {"rank": rank, "number": number, "fault": fault, "operation": operation, "codes": codes, "text": text,
            "state": digest}


def run_points(name, ranks, every, points_file):
    """The points of several ranks: each is a run that is resumed before the save."""
    before = WORK / "before"
    run(name, ranks, before=lambda rank: end_after_save(STEP - 1))
    add_others()
    shutil.copytree(RUN, before, ignore=shutil.ignore_patterns(".lock"))
    for failing in range(ranks):
        for number, fault, log in points_of(1 if failing else every, failing):
            def act(run, rank, failing=failing, number=number, fault=fault, log=log):
                end_after_save(STEP)
                if rank == failing:
                    arm(number, fault, log)
            restore(before)
            codes, text = run(name, ranks, at_end_of_step(act), resume="auto")
            with open(points_file, "a") as file:
                file.write(json.dumps(result_of(failing, number, fault, log, codes, text)) + "\n")
    shutil.rmtree(before)


# ---------------------------------------------------------------- what has to hold afterwards


def unsynced(operations, whole):
    """The files and folders of the checkpoint that were not synced before it got its name, and "" for the run's
    folder, if that was not synced afterwards."""
    rename = operations.index("rename /checkpoint.part")
    files = [file.removeprefix(f"checkpoint-{STEP}") for file in whole if file.split("/")[0] == f"checkpoint-{STEP}"]
    missing = [file for file in files if f"fsync /checkpoint.part{file}" not in operations[:rename]]
    if "fsync " not in operations[rename:]:
        missing.append("")
    return missing


def message_problem(point):
    """What is wrong with how a point ended, or ""."""
    lines = point["text"].splitlines()
    if point["fault"] in ("kill", "torn", ""):
        return ""
    if set(point["codes"]) == {0}:
        return "" if re.fullmatch(SILENT, point["operation"]) else "no message"
    # A rank that has written its part may have ended before; one that waits for the others loses them.
    if not set(point["codes"]) <= {0, 1, 2} or 2 not in point["codes"]:
        return f"exit codes {point['codes']}: {point['text'][-300:]}"
    last = next((line for line in lines if line.startswith("train_")), "")
    if str(RUN) not in last:
        return f"the message does not name the folder: {last}"
    if len(point["codes"]) == 1 and (len(lines) > 1 or "Traceback" in point["text"]):
        return f"more than a line, in {lines[0]} ... {lines[-1]}"
    return ""


def state_problem(name, ranks, digest, whole):
    """What is wrong with a state of the folder, or with a run that resumes it, or ""."""
    saved = WORK / "states" / digest
    state = files_of(saved)
    folders = {match[0] for match in (re.match(r"checkpoint-\d+(?=/)", file) for file in state) if match}
    for folder in folders:
        ours = {file: state[file] for file in state if file.startswith(f"{folder}/")}
        if ours != {file: whole[file] for file in whole if file.startswith(f"{folder}/")}:
            return f"{folder} is not whole"
    if not folders:
        return "no checkpoint"
    restore(saved)
    codes, text = run(name, ranks, resume="auto")
    if set(codes) != {0}:
        return f"cannot be resumed: {text[-500:]}"
    newest = max(folders, key=lambda folder: int(folder[11:]))
    if f"resumes {RUN}/{newest}\n" not in text:
        return f"is not resumed from {newest}"
    state = files_of(RUN)
    kept = {file: x for file, x in whole.items() if not re.match(r"checkpoint-[12](/|$)", file)}
    differing = sorted(file for file in state.keys() | kept.keys() if state.get(file) != kept.get(file))
    if differing:
        return f"is resumed, but differs in {differing[:5]}"
    return ""


def try_script(name, ranks, every):
    """Try all points of a script; returns the problems."""
    for path in (RUN, OTHER, WORK / "states"):
        shutil.rmtree(path, ignore_errors=True)
    points_file = WORK / "points"
    points_file.unlink(missing_ok=True)
    started = time.monotonic()
    codes, text = run(name, ranks, keep_checkpoints=9)
    assert set(codes) == {0}, text
    add_others()
    whole = files_of(RUN)
    others = files_of(OTHER)
    shutil.rmtree(RUN)
    if ranks == 1:
        RUN.mkdir()
        (RUN / ".lock").touch()
        add_others()
        codes, text = run(name, 1, at_end_of_step(fork_points(every, points_file)), resume="auto")
        assert codes[0] == 0, text
    else:
        run_points(name, ranks, every, points_file)
    points = [json.loads(line) for line in points_file.read_text().splitlines()]
    problems = [(points[0], f"{file or 'the folder'} is not synced") for file in unsynced(operations_of(0), whole)]
    for point in points:
        problem = message_problem(point)
        if problem:
            problems.append((point, problem))
    by_state = {}
    for point in points:
        by_state.setdefault(point["state"], []).append(point)
    middle = time.monotonic()
    for digest, same in by_state.items():
        problem = state_problem(name, ranks, digest, whole)
        if problem:
            problems += [(point, problem) for point in same]
        if files_of(OTHER) != others:
            problems += [(point, "the other run was touched") for point in same]
            add_others()
    end = time.monotonic()
    faults = Counter(point["fault"] for point in points if point["operation"] != "none")
    operations = [len(operations_of(rank)) for rank in range(ranks)]
    print(f"train_{name}.py on {ranks} rank(s): {sum(operations)} operations, {faults.total()} points "
          f"({', '.join(f'{count} {fault}' for fault, count in faults.items())}) in {middle - started:.0f} s, "
          f"{len(by_state)} states of the folder, resumed in {end - middle:.0f} s; {len(problems)} problems")
    for point, problem in problems:
        print(f"    rank {point['rank']}, {point['number']} {point['fault']} {point['operation']}: {problem}")
    return problems


def main(only="grpo,dapo,ppo,async", ranks="1", every="1"):
    if "EVERY_FAILURE" not in os.environ:
        try:
            subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-o", SHIM, __file__.replace(".py", ".c"), "-ldl"],
                           check=True)
            return subprocess.run([sys.executable, *sys.argv], env=os.environ | {
                "LD_PRELOAD": str(SHIM), "EVERY_FAILURE": str(WORK)}).returncode
        finally:
            shutil.rmtree(WORK)
    os.chdir(ROOT)
    # What takes seconds to import is imported once. The scripts import the repository's own modules.
    import torch
    import torch.distributed.fsdp                                       # noqa: F401
    import torch.distributed.checkpoint.state_dict                      # noqa: F401
    import torch.nn.attention.varlen                                    # noqa: F401
    import torch.utils.tensorboard                                      # noqa: F401
    from transformers import Qwen3Config, Qwen3ForCausalLM
    from transformers.utils.logging import disable_progress_bar
    from configurator import TINY_DEFAULTS
    from tiny import pretrain
    disable_progress_bar()
    tokenizer = pretrain.make_tokenizer()
    torch.manual_seed(0)
    Qwen3ForCausalLM(Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, head_dim=16, max_position_embeddings=256,
        tie_word_embeddings=True, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
        initializer_range=0.2, suits=TINY_DEFAULTS)).save_pretrained(MODEL)
    tokenizer.save_pretrained(MODEL)
    (WORK / "letters.py").write_text(LETTERS)
    problems = []
    for name in only.split(","):
        problems += try_script(name, int(ranks), int(every))
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main(**dict(argument.removeprefix("--").split("=", 1) for argument in sys.argv[1:])))
