"""
Files on a disk that may be full, in a folder that others may have written to, and logs that may be damaged.
"""
import contextlib
import errno
import json
import os
import shutil
import stat
import sys


def opened(path, mode, buffering=-1):
    """open() for a file of a run. Raises OSError if the path leads to a link, a pipe or a device."""
    def opener(path, flags):
        # O_NONBLOCK, because opening a pipe would wait for its other end.
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise OSError(errno.EINVAL, "it is not a regular file", path)
        return descriptor
    return open(path, mode, buffering, opener=opener)


def remove(path):
    """Remove a file, a link or a whole folder, if it is there."""
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    elif os.path.lexists(path):
        os.unlink(path)


def sync(path):
    """Wait until a file, or the names in a folder, are on disk and not only in its cache."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def in_words(error):
    """What a person would say of an error in writing."""
    if getattr(error, "errno", 0) == errno.ENOSPC or "No space left" in repr(error):
        return "the disk is full"
    if not isinstance(error, OSError) or not error.strerror:
        return repr(error)[-300:]
    what = "it is a link" if error.errno == errno.ELOOP else error.strerror
    return f"{error.filename}: {what}" if error.filename else what


def rewind(path, step):
    """Drop the lines of a .jsonl log for `step` or later; returns the objects of the lines that stay.

    A line that no run has written is dropped as well, with a message that names it. There is no message about
    a last line that a kill has cut off.
    """
    if not os.path.lexists(path):
        return []
    kept = []
    with opened(path, "rb") as file:
        for number, line in enumerate(file, 1):
            entry = None
            with contextlib.suppress(ValueError, RecursionError):
                entry = json.loads(line.decode())
            if not (isinstance(entry, dict) and type(entry.get("step")) is int and line.endswith(b"\n")):
                if line.endswith(b"\n"):
                    print(f"{path}:{number} is dropped: it is not a line of a run's log", file=sys.stderr)
            elif entry["step"] < step:
                kept.append((line, entry))
    with opened(path + ".part", "wb") as file:
        file.writelines(line for line, _ in kept)
    os.replace(path + ".part", path)
    return [entry for _, entry in kept]
