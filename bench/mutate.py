"""
Which mistakes in a file would its tests not find? Each mutant has one; a good test fails for it.

    python bench/mutate.py losses.py                          # all mutants
    python bench/mutate.py data.py --sample=200 --seed=0      # 200 of them, drawn by a seed
    python bench/mutate.py losses.py --part=2/4               # a quarter of the mutants
    python bench/mutate.py losses.py --only=whiten            # those of functions with this in their name

A mutant of a function has one operator, comparison, constant, condition or index changed. What stands in
messages of errors is left as it is. The tests are collected once. A first run notes which functions each of
them calls and how long it takes. Each mutant then has a forked process, in which the changed code takes the
place of the function's own, and the tests that call the function run, the fastest first, until one fails. A
mutant that takes ten times as long as its tests is ended, and counts as found.

bench/mutants.txt lists mutants that survive for a reason: "equal" if nothing that a caller sees depends on the
change, or what else speaks against a test. The script prints all other survivors.
"""
import ast
import copy
import importlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from pathlib import Path

# Before torch: a forked process could not use threads that are not its own.
os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import pytest

# The tests of files that have others than a file of their own name, such as tests/test_losses.py
TESTS = {"packing.py": ["test_packing.py", "test_model.py"], "data.py": ["test_data.py", "test_reasoning_gym.py"],
         "weights.py": ["test_rollout.py", "test_lora.py", "test_loading.py"],
         "options/critic_losses.py": ["test_losses.py", "test_model.py"],
         "options/spread_masters.py": ["test_lora.py"], "options/attention_kernel.py": ["test_attention.py"],
         **dict.fromkeys(["options/files.py", "options/file_formats.py", "options/foreign_rows.py",
                          "options/row_checks.py"], ["test_data.py"]),
         **dict.fromkeys(["options/user_rewards.py", "options/verl_rewards.py", "options/user_code.py"],
                         ["test_rewards.py"])}
WORK = Path(tempfile.mkdtemp(prefix="mutate-"))
OPERATORS = {ast.Add: [ast.Sub], ast.Sub: [ast.Add], ast.Mult: [ast.Div], ast.Div: [ast.Mult],
             ast.FloorDiv: [ast.Div], ast.Mod: [ast.Mult], ast.Pow: [ast.Mult], ast.BitAnd: [ast.BitOr],
             ast.BitOr: [ast.BitAnd], ast.And: [ast.Or], ast.Or: [ast.And], ast.USub: [ast.UAdd],
             ast.Invert: [ast.UAdd],
             ast.Lt: [ast.LtE, ast.GtE], ast.LtE: [ast.Lt, ast.Gt], ast.Gt: [ast.GtE, ast.LtE],
             ast.GtE: [ast.Gt, ast.Lt], ast.Eq: [ast.NotEq], ast.NotEq: [ast.Eq], ast.Is: [ast.IsNot],
             ast.IsNot: [ast.Is], ast.In: [ast.NotIn], ast.NotIn: [ast.In]}
NAMES = {"min": "max", "max": "min", "amin": "amax", "amax": "amin", "any": "all", "all": "any"}


# ---------------------------------------------------------------- mutants


def changes(node):
    """Yield a function for each change of a node; it changes the node in place."""
    def setting(name, value, place=None):
        def change(node):
            if place is None:
                setattr(node, name, value)
            else:
                getattr(node, name)[place] = value
        return change

    def inverted(test):
        return ast.UnaryOp(ast.Not(), test)

    def moved(index, operator):
        return ast.BinOp(index, operator, ast.Constant(1))

    if isinstance(node, (ast.BinOp, ast.AugAssign, ast.BoolOp, ast.UnaryOp)):
        for other in OPERATORS.get(type(node.op), []):
            yield setting("op", other())
        if isinstance(node.op, ast.Not):
            yield setting("operand", inverted(node.operand))
    if isinstance(node, ast.Compare):
        for place, operator in enumerate(node.ops):
            for other in OPERATORS[type(operator)]:
                yield setting("ops", other(), place)
    if isinstance(node, (ast.If, ast.While, ast.IfExp)) and not isinstance(node.test, (ast.Compare, ast.BoolOp)):
        yield setting("test", inverted(node.test))
    if isinstance(node, ast.Constant):
        for value in other_constants(node.value):
            yield setting("value", value)
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Name):
        yield setting("slice", moved(node.slice, ast.Add()))
    if isinstance(node, ast.Slice):
        yield setting("lower", moved(node.lower, ast.Add()) if node.lower else ast.Constant(1))
        yield setting("upper", moved(node.upper, ast.Sub()) if node.upper else ast.Constant(-1))
    if isinstance(node, ast.Name) and node.id in NAMES:
        yield setting("id", NAMES[node.id])
    if isinstance(node, ast.Attribute) and node.attr in NAMES:
        yield setting("attr", NAMES[node.attr])


def other_constants(value):
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 1, value - 1]
    if isinstance(value, float):
        return [2 * value if value else 1.0]
    if isinstance(value, str):
        return [value + "_"]
    return []


def functions_of(body, prefix=""):
    """Yield (qualified name, node) of the functions of a module and of its classes."""
    for node in body:
        if isinstance(node, ast.FunctionDef):
            yield prefix + node.name, node
        elif isinstance(node, ast.ClassDef):
            yield from functions_of(node.body, f"{node.name}.")


def is_message(node):
    # with naming("..."): whatever fails there begins its message with this text.
    return isinstance(node, ast.Call) and getattr(node.func, "id", "") == "naming"


def nodes_of(function):
    """Return the nodes of a function that may be changed: not its docstrings, annotations and errors."""
    found = []

    def visit(node):
        if isinstance(node, (ast.Raise, ast.Assert)) or is_message(node):
            return
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            return
        found.append(node)
        for name, value in ast.iter_fields(node):
            if name not in ("decorator_list", "annotation", "returns"):
                for child in value if isinstance(value, list) else [value]:
                    if isinstance(child, ast.AST):
                        visit(child)

    visit(function)
    return found


def mutants_of(source):
    """Return (function, text, place, number) of each mutant of a file: the number of a change of a node."""
    mutants = []
    seen = Counter()
    for name, function in functions_of(ast.parse(source).body):
        for place, node in enumerate(nodes_of(function)):
            before = ast.unparse(node).partition("\n")[0]
            for number, change in enumerate(changes(node)):
                changed = copy.deepcopy(node)
                change(changed)
                text = f"{name}: {before} -> {ast.unparse(ast.fix_missing_locations(changed)).partition(chr(10))[0]}"
                seen[text] += 1
                if seen[text] > 1:
                    text += f" ({seen[text]})"
                mutants.append((name, text, node.lineno if hasattr(node, "lineno") else 0, place, number))
    return mutants


def install(module, source, name, place, number):
    """Let a function of a module run the code of a mutant."""
    tree = ast.parse(source)
    node = nodes_of(dict(functions_of(tree.body))[name])[place]
    [*changes(node)][number](node)
    namespace = {"__name__": module.__name__, "__file__": module.__file__}
    exec(compile(ast.fix_missing_locations(tree), module.__file__, "exec"), namespace)
    theirs = function_in(namespace, name)
    ours = function_in(vars(module), name)
    ours.__code__ = theirs.__code__
    ours.__defaults__ = theirs.__defaults__
    ours.__kwdefaults__ = theirs.__kwdefaults__


def function_in(namespace, name):
    *classes, last = name.split(".")
    for part in classes:
        namespace = vars(namespace[part])
    function = namespace[last]
    while not hasattr(function, "__code__"):
        function = getattr(function, "fget", None) or getattr(function, "__func__", None) or function.__wrapped__
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return function


# ---------------------------------------------------------------- their tests


class Mutants:
    """A plugin of pytest: instead of the tests it runs the mutants, each in a forked process."""

    def __init__(self, file, sample, seed, part, only):
        self.file = file
        self.source = (ROOT / file).read_text()
        mutants = [mutant for mutant in mutants_of(self.source) if only in mutant[0]]
        if sample:
            mutants = sorted(random.Random(seed).sample(mutants, min(sample, len(mutants))))
        share, shares = map(int, part.split("/"))
        self.mutants = mutants[share - 1::shares]
        self.failed = False
        self.survivors = []

    def pytest_runtest_logreport(self, report):
        self.failed |= report.failed

    def pytest_runtestloop(self, session):
        self.reporter = session.config.pluginmanager.get_plugin("terminalreporter")
        self.module = importlib.import_module(self.file.removesuffix(".py"))
        code, results = self.in_child(600, self.baseline, session)
        assert code == 0, "the tests fail without any change"
        tests = defaultdict(list)                               # {function: [(seconds, place of the test)]}
        for place, (seconds, functions) in enumerate(results):
            for name in functions:
                tests[name].append((seconds, place))
        started = time.monotonic()
        for name, text, line, place, number in self.mutants:
            chosen = sorted(tests[name])
            seconds = 5 + 10 * sum(seconds for seconds, _ in chosen)
            code, _ = self.in_child(seconds, self.try_mutant, session, chosen, name, place, number)
            if code == 0:
                self.survivors.append((text, line))
        self.seconds = time.monotonic() - started
        return True

    def in_child(self, seconds, function, *arguments):
        """Call a function in a forked process; return its exit code and what it returned."""
        reading, writing = os.pipe()
        pid = os.fork()
        if not pid:
            code = 1
            try:
                self.reporter._tw._file = open(os.devnull, "w")     # of the letters for each test
                result = function(*arguments)
                with open(writing, "w") as file:
                    json.dump(result, file)
                code = int(self.failed)
            finally:
                os._exit(code)
        os.close(writing)
        timer = threading.Timer(seconds, os.kill, (pid, signal.SIGKILL))
        timer.start()
        with open(reading) as file:
            text = file.read()
        _, status = os.waitpid(pid, 0)
        timer.cancel()
        shutil.rmtree(WORK / "tests", ignore_errors=True)
        code = os.waitstatus_to_exitcode(status)
        return code, json.loads(text) if code == 0 else None

    def run_test(self, item, following):
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)

    def baseline(self, session):
        """Return for each test how many seconds it takes, and which functions of the file it calls."""
        results = []
        path = str(ROOT / self.file)
        for place, item in enumerate(session.items):
            called = set()

            def note(frame, event, argument):
                if event == "call" and frame.f_code.co_filename == path:
                    called.add(frame.f_code.co_qualname.partition(".<locals>")[0])

            sys.setprofile(note)
            threading.setprofile(note)
            started = time.monotonic()
            self.run_test(item, session.items[place + 1] if place + 1 < len(session.items) else None)
            sys.setprofile(None)
            results.append((time.monotonic() - started, sorted(called)))
        return results

    def try_mutant(self, session, chosen, name, place, number):
        install(self.module, self.source, name, place, number)
        items = [session.items[test] for _, test in chosen]
        for item, following in zip(items, [*items[1:], None]):
            self.run_test(item, following)
            if self.failed:
                os._exit(1)


def main(file, sample="0", seed="0", part="1/1", only=""):
    os.chdir(ROOT)
    mutants = Mutants(file, int(sample), int(seed), part, only)
    tests = [f"tests/{name}" for name in TESTS.get(file, [f"test_{Path(file).name}"])]
    code = pytest.main([*tests, "-p", "no:cacheprovider", f"--basetemp={WORK}/tests"], plugins=[mutants])
    shutil.rmtree(WORK, ignore_errors=True)
    if code:
        return code
    reasons = {}
    for line in (ROOT / "bench" / "mutants.txt").read_text().splitlines():
        if line.startswith(f"{file} "):
            text, _, reason = line.removeprefix(f"{file} ").partition(" | ")
            reasons[text] = reason
    listed = [text for text, _ in mutants.survivors if text in reasons]
    equal = [text for text in listed if reasons[text].startswith("equal")]
    for text, line in mutants.survivors:
        if text not in reasons:
            print(f"{file}:{line} {text}")
    count = len(mutants.mutants)
    found = count - len(mutants.survivors)
    print(f"{file}: {found} of {count} mutants are found; of the others {len(equal)} are equal, "
          f"{len(listed) - len(equal)} are listed, {len(mutants.survivors) - len(listed)} are not; "
          f"{found / (count - len(equal)):.1%} of those that are not equal. {mutants.seconds:.0f} s")
    return int(len(mutants.survivors) > len(listed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], **dict(argument.removeprefix("--").split("=", 1) for argument in sys.argv[2:])))
