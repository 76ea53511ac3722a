"""
The folder of a run: found or made, kept from other runs, never one that belongs to somebody else.
"""
import atexit
import fcntl
import itertools
import os
import shutil
import sys
import time

from runtime.checkpoint import checkpoints, damage
from runtime.safe_files import in_words, opened

LOCKS = []                      # the open .lock of each folder; a lock lasts as long as the process


def claim(out_dir, patience=600):
    """Keep other runs out of a folder while this process lives.

    Waits up to `patience` seconds for a run that is still in it, then raises ValueError: the workers of a
    torchrun that was killed live on until the end of their step.
    """
    try:
        # TensorBoard wants UTF-8.
        out_dir.encode()
        os.makedirs(out_dir, exist_ok=True)
        LOCKS.append(opened(os.path.join(out_dir, ".lock"), "ab"))
    # A name may have a NUL in it, or thousands of parts.
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"out_dir={out_dir!r} cannot be written: {in_words(error)}") from None
    for second in range(patience + 1):
        try:
            return fcntl.flock(LOCKS[-1], fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if second == 0:
                print(f"{out_dir}: another run is writing there; waiting for its end", file=sys.stderr)
            time.sleep(1)
        except OSError as error:
            return print(f"{out_dir} cannot be locked against other runs: {error}", file=sys.stderr)
    raise ValueError(f"out_dir={out_dir}: another run is writing there")


def locate_run(out_dir, resume, default):
    """(the run's folder, the checkpoint to resume or None), from the settings out_dir and resume.

    An empty out_dir means the run that the resumed checkpoint belongs to, or where none is resumed a new
    folder named `default`, with a number behind it if that is taken. The folder is claimed. resume=auto
    passes over damaged checkpoints and prints their names. Raises ValueError for a resume that is not a
    checkpoint, is damaged or is not the newest of its run, and for a folder that cannot be written, that
    holds another run, only damaged checkpoints, or what is no run at all.
    """
    out_dir, resume = (path and os.path.normpath(os.path.expanduser(path)) for path in (out_dir, resume))
    if resume == "auto":
        if not out_dir:
            raise ValueError("resume=auto takes the newest checkpoint in out_dir: name an out_dir")
        refuse_foreign(out_dir)
        claim(out_dir)
        found = checkpoints(out_dir)
        for folder in reversed(found):
            if not (problem := damage(folder)):
                return out_dir, folder
            print(f"{folder} is damaged and passed over: {problem}", file=sys.stderr)
        if found:
            raise ValueError(f"resume=auto: all {len(found)} checkpoints in {out_dir} are damaged")
        return out_dir, None
    own = os.path.dirname(os.path.abspath(resume)) if resume else ""
    if resume and not os.path.isfile(os.path.join(resume, "trainer", "state.json")):
        raise ValueError(f"resume={resume}: not a checkpoint folder")
    goes_on = bool(resume) and os.path.abspath(out_dir or own) == own
    folder = own if goes_on else out_dir or new_folder(default)
    refuse_foreign(folder)
    # Before looking into it: another run may be about to end.
    claim(folder)
    if goes_on:
        newest = (checkpoints(own) or [resume])[-1]
        if os.path.basename(newest) != os.path.basename(os.path.abspath(resume)):
            raise ValueError(f"resume={resume}: {newest} is newer; remove it, or name a new out_dir")
    elif set(os.listdir(folder)) - {".lock"}:
        raise ValueError(f"out_dir={out_dir} holds another run: "
                         "name a new folder, or resume it by --resume=auto")
    if resume and (problem := damage(resume)):
        raise ValueError(f"resume={resume}: damaged: {problem}")
    return folder, resume or None


def new_folder(default):
    # Two runs may begin in the same second: only one of them can make the folder.
    for number in itertools.count(1):
        try:
            os.makedirs(folder := default if number == 1 else f"{default}-{number}")
            atexit.register(remove_unused, folder)
            return folder
        except FileExistsError:
            continue
        except OSError as error:
            raise ValueError(f"out_dir={folder} cannot be made: {error.strerror}") from None


def remove_unused(folder):
    # A run that is refused before it has written anything leaves no folder.
    if os.path.isdir(folder) and set(os.listdir(folder)) <= {".lock"}:
        shutil.rmtree(folder, ignore_errors=True)


def refuse_foreign(folder):
    # A run's folder has a .lock from its first moment on; what else has none belongs to somebody else.
    if os.path.isdir(folder):
        strangers = {name for name in os.listdir(folder) if not name.startswith("checkpoint-")}
        if strangers and ".lock" not in strangers:
            raise ValueError(f"out_dir={folder} holds {min(strangers)} and is not the folder of a run: name "
                             "a new folder")
