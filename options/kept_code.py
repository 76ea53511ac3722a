"""
What a run keeps of code that is not in the commit, so that a changed losses.py is found again.

A run opens this file if the project's files differ from the commit, or if a setting names a .py file.
"""
import contextlib
import os
import subprocess
from pathlib import Path

from configurator import specs
from options.user_code import source_of

ROOT = Path(__file__).resolve().parents[1]
LIMIT = 1_000_000               # how many bytes changes.diff may have, and how many user_code/
# It can be applied, whatever the user has set for git.
DIFF = ("diff --no-ext-diff --no-textconv --no-color --src-prefix=a/ --dst-prefix=b/ --submodule=short -U3 "
        "HEAD -- .").split()


def git(*command):
    """Return the bytes that git prints for a command in the project's folder, whoever owns it; none without
    git."""
    with contextlib.suppress(FileNotFoundError):                # git is not installed
        command = "git", "-C", ROOT, "-c", "safe.directory=*", *command
        return subprocess.run(command, capture_output=True).stdout
    return b""


def keep_code(settings, out_dir):
    """Write changes.diff, the difference to the commit, and copy new code to user_code/ in the run's folder.

    The copies have up to LIMIT bytes: of the files that the settings name, and then of the *.py files in the
    project that git does not know yet. Below user_code/ a copy has the full path of its file.
    """
    Path(out_dir, "changes.diff").write_bytes(git(*DIFF)[:LIMIT])
    # Any setting may name files, as in file.py:name,other.py:name. What names no file is left out below.
    paths = [source_of(spec) for spec in specs(",".join(map(str, settings.values())))]
    # -z: without it git would write bäume.py in quotes and in numbers.
    new = git("ls-files", "-z", "--others", "--exclude-standard", "--exclude=user_code", "*.py")
    paths += [ROOT / name for name in os.fsdecode(new).split("\0")]
    room = LIMIT
    for path in filter(os.path.isfile, paths):
        code = Path(path).read_bytes()
        if len(code) <= room:
            room -= len(code)
            target = Path(f"{out_dir}/user_code/{path}")
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(code)
