"""
Functions and classes of the user's: loaded from "file.py:name", and those of an environment called here.
"""
import asyncio
import contextlib
import difflib
import functools
import importlib.util
import inspect
import os
import queue
import sys
import threading
import time
from collections import deque


# Where the run was started. What it loads may go to another folder.
HERE = os.getcwd()


def source_file(path):
    """Where such a file is: here, or else in the project, whose config files name some of its own."""
    here = os.path.join(HERE, path)
    project = os.path.dirname(os.path.dirname(__file__))
    return os.path.realpath(here if os.path.isfile(here) else os.path.join(project, path))


def specs(text):
    """The parts of a setting such as "file.py:name,other.py:name"; an empty one has one, which is empty."""
    return [part.strip() for part in text.split(",")]


@functools.cache
def module_of(path, changed):
    # The module of a file, which is run once for all that is loaded from it. changed: the time of its change.
    spec = importlib.util.spec_from_file_location(f"user_code_{len(sys.modules)}", path)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    # As for a script, it may import modules from its folder; the project's own come first.
    sys.path += {os.path.dirname(os.path.abspath(path))} - {*sys.path}
    spec.loader.exec_module(module)
    return module


def load_from(spec, key, kind, others=""):
    """Returns what a spec "file.py:name" stands for.

    For the messages: key is the setting, kind is function or class, others says what else the spec may be.
    Raises ValueError if there is no such thing, or if the file raises.
    """
    given, _, name = spec.rpartition(":")
    if not given.endswith(".py") or not name.isidentifier():
        raise ValueError(f"{key} must be file.py:{kind}{others}, not {spec!r}")
    path = source_file(given)
    if not os.path.isfile(path):
        raise ValueError(f"{key}: no such file: {given}")
    try:
        module = module_of(path, os.stat(path).st_mtime_ns)
        found = getattr(module, name, None)
        callable(found) and inspect.signature(found)            # which not all that is written in C has
    except BaseException as error:
        raise ValueError(f"{key}: {given} raised {escaped(shown(error))}") from error
    if not callable(found):
        names = [other for other, value in vars(module).items() if callable(value)]
        near = ", ".join(difflib.get_close_matches(name, names) or names)
        raise ValueError(f"{key}: {given} has no {kind} {name}; at its top level it has {near or 'none'}")
    return found


def accepted(function, columns, name=""):
    # Returns those of the columns that the function takes. name: of it, for a message.
    parameters = inspect.signature(function).parameters.values()
    named = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    for p in named:
        if p.default is p.empty and p.name not in columns:
            raise ValueError(f"{name or 'reward ' + name_of(function)} needs a column {p.name}; "
                             f"the columns are {', '.join(columns)}")
    if any(p.kind == p.VAR_KEYWORD for p in parameters):
        return columns
    return {p.name: columns[p.name] for p in named if p.name in columns}


def name_of(function):
    return getattr(function, "__name__", type(function).__name__)


def shown(value):
    # A value or an error that a reward gave, for a message; it may be of any kind.
    try:
        return f"{type(value).__name__}: {value}" if isinstance(value, BaseException) else f"{value!r:.100}"
    except Exception:
        return f"a value of type {type(value).__name__}"


def escaped(text):
    # As one line, in which no control character acts on the console.
    return repr(text)[1:-1]


def logging_into(stores, function):
    """Those of log_extra(name, values) and log_metric(name, value) that a function asks for, as in TRL.

    What it logs goes into the dicts `stores`, as numbers or else as text: of values each one into its own.
    Where stores is a dict, log_extra takes one value.
    """
    def log_extra(name, values):
        for store, value in [(stores, values)] if isinstance(stores, dict) else zip(stores, values):
            try:
                store[str(name)] = value if isinstance(value, str) else float(value)
            except Exception:
                store[str(name)] = shown(value)

    logs = {"log_extra": log_extra,
            "log_metric": lambda name, value: log_extra(
                name, value if isinstance(stores, dict) else [value] * len(stores))}
    return {key: logs[key] for key in logs.keys() & inspect.signature(function).parameters.keys()}


class TimeUp(TimeoutError):
    """Says that a function of the user's ran out of time."""


class Failed(Exception):
    """Says that a function of the user's raised an error, which is the __cause__ of this one."""


def outcome(function, seconds=0):
    """Calls a function of an environment; returns (its value, its error or None, the seconds that it took).

    The error is TimeUp or Failed. seconds: how long an async function may take, 0: for ever. Nothing can stop
    any other; Threads stops waiting for it.
    """
    start, value, problem = time.perf_counter(), None, None
    try:
        value = function()
        if inspect.isawaitable(value):
            value = awaited(value, seconds)
    except KeyboardInterrupt:
        raise
    except TimeUp as error:
        problem = error
    # sys.exit, for example, must not end the run as if it had come to its end.
    except BaseException as error:
        problem = Failed(f"raised {escaped(shown(error))}")
        problem.__cause__ = error
    return value, problem, time.perf_counter() - start


@functools.cache
def event_loop():
    # One for the whole run, because a connection belongs to the loop that opened it.
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    return loop


async def in_order(awaitables):
    """A list of what they give."""
    return [await one for one in awaitables]


def awaited(awaitable, seconds):
    async def guarded():
        try:
            return await awaitable
        # It would end the loop, and the run would wait for it for ever.
        except (SystemExit, KeyboardInterrupt) as error:
            raise RuntimeError(repr(error)) from error

    future = asyncio.run_coroutine_threadsafe(guarded(), event_loop())
    try:
        return future.result(seconds or None)
    except TimeoutError:
        # The function may have raised one itself.
        if not future.cancel():
            raise
        raise TimeUp from None


class Threads:
    """Calls in at most `count` threads at a time, each for at most `timeout` seconds (0: for ever).

    Python cannot end a thread: a call that takes too long goes on, and what it returns is dropped.
    """

    def __init__(self, count, timeout):
        self.count, self.seconds, self.timeout = count, timeout, timeout or threading.TIMEOUT_MAX
        self.waiting, self.running, self.ended = deque(), {}, queue.SimpleQueue()

    def start(self, name, function):
        """Calls a function as soon as a thread is free. name: under which its result is returned."""
        self.waiting.append((name, function))
        self._fill()

    def _fill(self):
        while self.waiting and len(self.running) < self.count:
            name, function = self.waiting.popleft()
            self.running[name] = time.monotonic() + self.timeout
            threading.Thread(target=self._work, args=(name, function), daemon=True).start()

    def _work(self, name, function):
        self.ended.put((name, *outcome(function, self.seconds)))

    def finished(self, wait):
        """Returns (name, value, error, seconds) of the calls that have ended or run out of time.

        wait: block until there is one.
        """
        results = []
        while self.running:
            # First those that have ended, because a step of the engine may take longer than a call has time.
            with contextlib.suppress(queue.Empty):
                while True:
                    left = max(0, min(self.running.values(), default=0) - time.monotonic())
                    name, value, error, seconds = self.ended.get(wait and not results, left)
                    # One that ran out of time earlier is not among those that run.
                    if self.running.pop(name, None):
                        late = seconds > self.timeout
                        results.append((name, *((None, TimeUp()) if late else (value, error)), seconds))
            now = time.monotonic()
            for name in [name for name, end in self.running.items() if end <= now]:
                del self.running[name]
                results.append((name, None, TimeUp(), self.timeout))
            self._fill()
            if results or not wait:
                break
        return results


def at_once(functions, count, timeout, seconds):
    """Calls functions, `count` at a time, each for `timeout` seconds (0: no limit) and all for `seconds`.

    Returns for each its value, TimeUp or Failed.
    """
    threads, end, results = Threads(count, timeout), time.monotonic() + seconds, {}
    for number, function in enumerate(functions):
        threads.start(number, function)
    while len(results) < len(functions) and time.monotonic() < end:
        results |= {number: error or value for number, value, error, _ in threads.finished(wait=True)}
    return [results.get(number, TimeUp()) for number in range(len(functions))]


def closer(instance, name):
    """An environment's method of this name if it can be called without arguments, otherwise None."""
    method = getattr(instance, name, None)
    try:
        inspect.signature(method).bind()
        return method
    except (TypeError, ValueError):
        return None


def close(instances, seconds):
    """Closes environments by close() or else release(), and waits `seconds` for all of them together."""
    closers = [closer(one, "close") or closer(one, "release") for one in instances]
    at_once([*filter(None, closers)], len(closers), 0, seconds)
