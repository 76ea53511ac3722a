"""
Write the diffs in this folder anew after a change of the lines around them.

    python recipes/rewrite.py               # they applied to HEAD, and the change is in the working tree
    python recipes/rewrite.py HEAD~2        # they applied to this commit

Each recipe is applied to the files of the commit, and git merge-file joins the result with the files of the
working tree. What the recipe changes in these is written below its first lines, which stay as they are. If a
recipe does not apply to the commit, it is applied to the working tree itself, which brings the numbers of its
lines up to date. A recipe that conflicts with the change is named, and its file stays as it is.
"""
import difflib
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def git(folder, *arguments, text=""):
    """Run git in a folder with a text as its input, and return the finished process with its output."""
    return subprocess.run(["git", *map(str, arguments)], cwd=folder, input=text, capture_output=True,
                          encoding="utf-8")


def rewritten(diff, commit=""):
    """Return a diff that applied to a commit as one for the working tree; "" if it did not, or conflicts.

    Without a commit it applied to the working tree, with other numbers of lines.
    """
    pairs = re.findall(r"^diff --git a/(\S+) b/(\S+)$", diff, re.M)     # two names if the file is copied
    lines = []
    with tempfile.TemporaryDirectory() as folder:
        before = Path(folder, "before")
        after = Path(folder, "after")
        for source, _ in pairs:
            text = (ROOT / source).read_text()
            if commit:
                text = git(ROOT, "show", f"{commit}:{source}").stdout
            for tree in (before, after):
                (tree / source).parent.mkdir(parents=True, exist_ok=True)
                (tree / source).write_text(text)
        git(after, "init")                  # so that it is no part of a repository around it
        if git(after, "apply", "--recount", text=diff).returncode:
            return ""
        for source, target in pairs:
            merge = git(ROOT, "merge-file", "-p", source, before / source, after / target)
            old = re.findall(".*\n", (ROOT / source).read_text())
            new = re.findall(".*\n", merge.stdout)
            hunks = [*difflib.unified_diff(old, new, f"a/{source}", f"b/{target}")]
            if merge.returncode or not hunks:
                return ""
            lines.append(f"diff --git a/{source} b/{target}\n")
            if source != target:
                lines.append(f"copy from {source}\ncopy to {target}\n")
            lines += hunks
    return "".join(lines)


def main(commit="HEAD"):
    conflicts = []
    for path in sorted(Path(__file__).parent.glob("*.diff")):
        head, diff = re.split("^(?=diff --git )", path.read_text(), maxsplit=1, flags=re.M)
        diff = rewritten(diff, commit) or rewritten(diff)
        if diff:
            path.write_text(head + diff)
        else:
            conflicts.append(path.name)
    if conflicts:
        sys.exit(f"These conflict with the working tree, and are as they were: {', '.join(conflicts)}")


main(*sys.argv[1:])
