"""
Functions and classes of the user's are loaded here from "file.py:name", and called in limited time.

Threads calls them in this process and cannot end a call that does not come back. UserProcess calls one in a
process of its own, and ends that process with the call. What the function does to signals, the current folder
or the interpreter stays there.
"""
import asyncio
import contextlib
import ctypes
import functools
import importlib.util
import inspect
import os
import queue
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections import deque
from multiprocessing.connection import Connection, Pipe

from runtime import STARTED_IN, make_lenient

def source_file(path):
    """Returns the path of a file of this name in STARTED_IN, or else in the project, as its config files need."""
    here = os.path.join(STARTED_IN, path)
    project = os.path.dirname(os.path.dirname(__file__))
    return os.path.realpath(here if os.path.isfile(here) else os.path.join(project, path))


def specs(text):
    """Returns the parts of a setting such as "file.py:name,other.py:name"; those of "" are [""]."""
    return [part.strip() for part in text.split(",")]


@functools.cache
def module_of(path, changed):
    # Returns the module of a file, which runs once for all that is loaded from it, and again once it has
    # changed. changed: the time of its last change.
    spec = importlib.util.spec_from_file_location(f"user_code_{len(sys.modules)}", path)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    # Like a script it may import modules from its folder, but the project's own come first.
    sys.path += {os.path.dirname(os.path.abspath(path))} - {*sys.path}
    spec.loader.exec_module(module)
    return module


def load_from(spec, key, kind, others=""):
    """Returns the function or class that a spec "file.py:name" names.

    The messages need the other arguments: key is the setting, kind is function or Class, and others says what
    else the spec may be. Raises ValueError if the file has nothing of this name, or if it raises.
    """
    given, _, name = spec.rpartition(":")
    if not given.endswith(".py") or "\0" in given or not name.isidentifier():
        raise ValueError(f"{key} must be file.py:{kind}{others}, not {spec!r}")
    path = source_file(given)
    if not os.path.isfile(path):
        raise ValueError(f"{key}: no such file: {given}")
    try:
        module = module_of(path, os.stat(path).st_mtime_ns)
        found = getattr(module, name, None)
        callable(found) and inspect.signature(found)            # some that are written in C have none
    except BaseException as error:
        raise ValueError(f"{key}: {given} raised {escaped(shown(error))}") from error
    if not callable(found):
        names = ", ".join(other for other, value in vars(module).items() if callable(value))
        raise ValueError(f"{key}: {given} has no {kind} {name}; at its top level it has {names or 'none'}")
    return found


def accepted(function, columns, name=""):
    # Returns the columns that the function takes. name: what a message calls the function.
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
    # Returns a value or an error of any kind, even one that cannot be printed, as a text for a message.
    try:
        return f"{type(value).__name__}: {value}" if isinstance(value, BaseException) else f"{value!r:.100}"
    except Exception:
        return f"a value of type {type(value).__name__}"


def escaped(text):
    # Returns the text as one line without control characters, which could act on the console.
    return repr(text)[1:-1]


def logging_into(stores, function):
    """Returns log_extra(name, values) and log_metric(name, value), as in TRL, if the function has these
    parameters.

    They put what the function logs into the dicts `stores`, one value into each, as numbers or else as text.
    If stores is a dict itself, log_extra takes one value.
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
    """Calls a function of the user's and returns (its value, its error or None, the seconds that it took).

    The error is TimeUp or Failed. seconds: how long an async function may take; 0 sets no limit. Nothing can
    stop a function that is not async, but Threads stops waiting for it.
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
    # The whole run has one loop, because a connection belongs to the loop that opened it.
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    return loop


async def listed(awaitable):
    """Returns what the awaitable gives, in a list."""
    try:
        return [await awaitable]
    except (SystemExit, KeyboardInterrupt) as error:            # either would end the loop for all others
        raise RuntimeError(repr(error)) from error


def awaited(awaitable, seconds):
    future = asyncio.run_coroutine_threadsafe(listed(awaitable), event_loop())
    try:
        return future.result(seconds or None)[0]
    except TimeoutError:
        # The function may have raised this error itself.
        if not future.cancel():
            raise
        raise TimeUp from None


class Threads:
    """Calls functions in at most `count` threads at a time, with `timeout` seconds for each; 0 sets no limit.

    Python cannot end a thread, so a call that takes too long goes on, and what it returns is dropped.
    """

    def __init__(self, count, timeout):
        self.count, self.seconds, self.timeout = count, timeout, timeout or threading.TIMEOUT_MAX
        self.waiting, self.running, self.ended = deque(), {}, queue.SimpleQueue()

    def start(self, name, function):
        """Calls a function as soon as a thread is free. name: what `finished` calls its result."""
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
        """Returns (name, value, error, seconds) for each call that has ended or run out of time.

        wait: whether to wait for the first one if there is none yet.
        """
        results = []
        while self.running:
            # Calls that have ended come first: a step of the engine may last longer than a call's time limit.
            with contextlib.suppress(queue.Empty):
                while True:
                    left = max(0, min(self.running.values(), default=0) - time.monotonic())
                    name, value, error, seconds = self.ended.get(wait and not results, left)
                    # A call that ran out of time earlier is not in `running` any more.
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
    """Calls functions in `count` threads and returns the value of each, or a TimeUp or Failed in its place.

    Each call has `timeout` seconds, where 0 sets no limit, and all together have `seconds`.
    """
    threads, end, results = Threads(count, timeout), time.monotonic() + seconds, {}
    for number, function in enumerate(functions):
        threads.start(number, function)
    while len(results) < len(functions) and time.monotonic() < end:
        results |= {number: error or value for number, value, error, _ in threads.finished(wait=True)}
    return [results.get(number, TimeUp()) for number in range(len(functions))]


def closer(instance, name):
    """Returns the environment's method of this name if it needs no arguments, otherwise None."""
    method = getattr(instance, name, None)
    try:
        inspect.signature(method).bind()
        return method
    except (TypeError, ValueError):
        return None


def close(instances, seconds):
    """Closes environments by close(), or else by release(), and waits at most `seconds` in all."""
    closers = [closer(one, "close") or closer(one, "release") for one in instances]
    at_once([*filter(None, closers)], len(closers), 0, seconds)


class UserProcess:
    """Calls the function that make(*arguments) returns, in a new Python process with our sys.path.

    make returns this function and a dict of attributes for this object. The new process imports make by its
    name and runs in `folder`. Raises what make raises.
    """

    def __init__(self, folder, make, *arguments):
        self.folder, self.made_by, self.process = folder, (make, arguments), None
        self._start()

    def within(self, seconds, *arguments):
        """Returns function(*arguments). Raises what it raises, or ChildProcessError if its process ends.

        If the call takes longer than `seconds`, its process is ended and TimeoutError is raised. The next
        call starts a new process. With None there is no limit.
        """
        if not self.process:
            self._start()
        return self._answer(arguments, seconds)

    def _start(self):
        self.pipe, theirs = Pipe()
        # With -m instead, multiprocessing would import the module again in each process of the function's.
        program = (f"import sys; sys.path[:] = {sys.path!r}; from runtime.user_code import serve; "
                   f"serve({theirs.fileno()})")
        # In a session of its own it gets no Ctrl-C, so that the run can finish its step.
        self.process = subprocess.Popen([sys.executable, "-c", program], pass_fds=[theirs.fileno()],
                                        stdin=subprocess.DEVNULL, start_new_session=True, cwd=self.folder)
        theirs.close()
        vars(self).update(self._answer(self.made_by, None))

    def _answer(self, message, seconds):
        try:
            self.pipe.send(message)
            if not self.pipe.poll(seconds):
                self.end()
                raise TimeoutError
            result, error = self.pipe.recv()
        except (EOFError, ConnectionError) as lost:
            raise ChildProcessError(f"ended its process with status {self.end()}") from lost
        if error:
            raise error
        return result

    def end(self):
        """Ends the process and returns its exit status. The next call starts a new process."""
        process, self.process = self.process, None
        os.killpg(process.pid, signal.SIGKILL)                  # and the processes that it has started
        return process.wait()


def serve(descriptor):
    """Answers the messages of the UserProcess that has started this process, until it has gone."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)              # PR_SET_PDEATHSIG: end with the parent
    make_lenient()
    pipe, function = Connection(descriptor), None
    with contextlib.suppress(EOFError):                         # the UserProcess has gone
        while True:
            message, result, problem = pipe.recv(), None, None
            try:
                if function:
                    result = function(*message)
                else:
                    function, result = message[0](*message[1])
            except BaseException as error:
                error.add_note(traceback.format_exc())
                problem = error
            pipe.send((result, problem))
