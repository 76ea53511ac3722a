"""
Functions and classes of the user's are loaded here from "file.py:name", or "package.module:name", and called
in limited time.

    load_from      loads a function or class
    outcome        calls a function in this process, where a call that hangs cannot be ended, unless it is
                   async
    UserProcess    calls functions in a process of its own, and ends the process if a call takes too long;
                   what they do to signals, the current folder or the interpreter stays in that process
"""
import asyncio
import contextlib
import ctypes
import functools
import importlib.util
import inspect
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
import types
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection, Pipe

from configurator import STARTED_IN, InputError, closing, make_lenient

@functools.cache
def module_of(path):
    # Returns the module of a file. The file runs once, whatever is loaded from it.
    folders = [os.path.dirname(path)]
    while os.path.isfile(os.path.join(folders[0], "__init__.py")):
        folders.insert(0, os.path.dirname(folders[0]))
    # The file can import its neighbours relatively, because the packages above it are put into sys.modules.
    # Their own code does not run, because it may import a whole trainer.
    name = f"user_code_{len(sys.modules)}"
    for folder, below in zip(folders, [*folders[1:], path]):
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__path__ = [folder]
        name += f".{os.path.basename(below)}".removesuffix(".py").removesuffix(".__init__")
    module_spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[name] = module
    # Like a script the file may import modules from its folder, and modules that its package names in full,
    # from the folder above the package. The modules of this project come first.
    for folder in (folders[-1], folders[0]):
        if folder not in sys.path:
            sys.path.append(folder)
    module_spec.loader.exec_module(module)
    return module


def source_of(spec):
    """Return where a spec loads from: a module, or a file's path in STARTED_IN or else in the project."""
    path = spec
    if not spec.endswith(".py"):
        path = spec.rpartition(":")[0]
    if not path.endswith(".py"):
        return path
    here = os.path.join(STARTED_IN, path)
    project = os.path.dirname(os.path.dirname(__file__))
    return os.path.realpath(here if os.path.isfile(here) else os.path.join(project, path))


def load_from(spec, key, kind, others=""):
    """Return the function or class that a spec "file.py:name" or "package.module:name" names.

    The messages need the other arguments: key is the setting, kind is function or Class, and others says what
    else the spec may be. Raises InputError if the file has nothing of this name, or if it raises.
    """
    place, _, name = spec.rpartition(":")
    if not place or not name.isidentifier():
        raise InputError(f"{key} must be file.py:{kind} or package.module:{kind}{others}, not {spec!r}")
    path = source_of(spec)
    is_file = place.endswith(".py")
    if is_file and not os.path.isfile(path):
        raise InputError(f"{key}: no such file: {place}")
    try:
        module = module_of(path) if is_file else importlib.import_module(place)
    except BaseException as error:
        problem = InputError(f"{key}: {place} raised {shown(error)}")
        problem.add_note(users_traceback(error))
        raise problem from error
    target = getattr(module, name, None)
    try:
        inspect.signature(target)               # a builtin such as max or dict does not say what it takes
    except (TypeError, ValueError) as error:
        raise InputError(f"{key}: {place} has no {kind} {name} at its top level") from error
    return target


def accepted(function, columns, name, by_name={}):
    """Return the columns that the function takes, and the entries of `by_name` that it names.

    A function with **kwargs takes all columns. name: how a message calls the function. Raises InputError if
    the function needs another column.
    """
    offered = by_name | columns
    arguments = {}
    for p in inspect.signature(function).parameters.values():
        if p.kind == p.VAR_KEYWORD:
            arguments |= columns
        elif p.name in offered:
            arguments[p.name] = offered[p.name]
        elif p.default is p.empty and p.kind != p.VAR_POSITIONAL:
            hint = ": --answer_column=... names the one that holds it" if p.name == "answer" else ""
            raise InputError(f"{name} needs a column {p.name}; the columns are {', '.join(columns)}{hint}")
    return arguments


def name_of(function):
    """Return the name of a function, or of the class of a callable object."""
    return getattr(function, "__name__", type(function).__name__)


def shown(value):
    """Return a value or an error as one line for a message, without characters that act on the console."""
    if isinstance(value, BaseException):
        return repr(f"{type(value).__name__}: {value}")[1:-1]
    return f"{value!r:.100}"


def users_traceback(error):
    """Return the traceback of an error that code of the user's has raised, from the first line of this code
    on."""
    entry = error.__traceback__
    above = "options.", "concurrent.", "importlib."             # this file, and what it calls the code by
    while entry and entry.tb_frame.f_globals["__name__"].startswith(above):
        entry = entry.tb_next
    return "".join(traceback.format_exception(type(error), error, entry))


def as_float(value):
    """Return a value that is not a text as a float. Raises InputError if float32 has no such number."""
    # float raises for an array of several numbers and for 10**400.
    with contextlib.suppress(TypeError, OverflowError, RuntimeError):
        if hasattr(value, "__float__") and abs(float(value)) <= 3.4e38:         # float32's largest
            return float(value)
    raise InputError(f"{shown(value)} is not a finite number in float32")


def logging_into(stores):
    """Return TRL's log_extra(name, values) and log_metric(name, value), by name.

    They put a value into each of the dicts `stores`, as a number or else as text.
    """
    def log_extra(name, values):
        for store, value in zip(stores, values):
            try:
                store[str(name)] = as_float(value)
            except InputError:
                store[str(name)] = value if isinstance(value, str) else shown(value)

    def log_metric(name, value):
        log_extra(name, [value] * len(stores))

    return {"log_extra": log_extra, "log_metric": log_metric}


class TimeUp(TimeoutError):
    """Says that a function of the user's ran out of time."""

    def __str__(self):
        return "took too long (call_timeout)"


class Failed(Exception):
    """Says that a function of the user's raised an error, its __cause__, or that it ended its process."""


def outcome(function, seconds=0):
    """Call a function of the user's and return (its value, its error or None, the seconds that it took).

    The error is TimeUp or Failed. seconds: how long an async function may take; 0 sets no limit. Nothing can
    stop a function that is not async.
    """
    start = time.perf_counter()
    value = None
    error = None
    try:
        returned = function()
        if inspect.iscoroutine(returned):
            returned = run_async(returned, seconds)
        value = returned
    except KeyboardInterrupt:
        raise
    except TimeUp as late:
        error = late
    # sys.exit, for example, must not end the run as if it had come to its end.
    except BaseException as cause:
        error = Failed(f"raised {shown(cause)}")
        error.__cause__ = cause
        error.add_note(users_traceback(cause))      # another process could not send the traceback otherwise
    return value, error, time.perf_counter() - start


def run_async(coroutine, seconds):
    # Returns what a coroutine returns. Raises TimeUp if it takes longer than `seconds`.
    with LOOP_LOCK:
        loop = event_loop()
    future = asyncio.run_coroutine_threadsafe(coroutine, loop)
    try:
        return future.result(seconds or None)
    except TimeoutError as error:
        # A function that has raised TimeoutError by itself has ended, and cannot be cancelled.
        if future.cancel():
            raise TimeUp from error
        raise


LOOP_LOCK = threading.Lock()            # without it, threads that begin together would make several loops


@functools.cache
def event_loop():
    # The whole run has one loop for the user's async functions, because a connection belongs to the loop that
    # opened it.
    loop = asyncio.new_event_loop()
    loop.set_default_executor(ThreadPerCall())

    def run():
        while True:
            # sys.exit in one function leaves run_forever, but must not end the calls of others.
            with contextlib.suppress(SystemExit):
                loop.run_forever()

    threading.Thread(target=run, name="of user code", daemon=True).start()
    return loop


class ThreadPerCall(ThreadPoolExecutor):
    """What asyncio.to_thread uses in the user's async functions, and episodes.py for its calls in threads.

    asyncio's own pool has four threads more than there are processors. Agents that wait for answers in them
    would keep others from asking. The end of the process waits for the pool's threads, and not for these.
    """

    def submit(self, function, /, *args, **kwargs):
        future = Future()
        future.set_running_or_notify_cancel()       # from now on it cannot be cancelled, so it takes a result

        def run():
            try:
                future.set_result(function(*args, **kwargs))
            except BaseException as error:
                future.set_exception(error)

        threading.Thread(target=run, daemon=True).start()
        return future


class UserProcess:
    """Calls functions in a new Python process with our sys.path, in the folder that the run was started in.

    first: a function and its arguments, with which each such process begins, without a limit of time. The
    process imports functions by their names. process: the subprocess.Popen, or None if there is none. pipe:
    the connection to it.
    """

    def __init__(self, *first):
        self.first = first
        self.process = None
        self.pipe = None
        closing.callback(self.end)

    def call(self, seconds, function, *arguments):
        """Return function(*arguments), computed in the process.

        Raises what the function raises, or Failed if its process ends.

        If that takes longer than `seconds` (0: no limit), the process is ended with all that it has
        started, and TimeUp is raised. The next call starts a new process.
        """
        if not self.process:
            self._start()
            self.call(0, *self.first)
        try:
            self.pipe.send((function, arguments))
            if not self.pipe.poll(seconds or None):
                self.end()
                raise TimeUp
            value, error = self.pipe.recv()
        except (EOFError, ConnectionError) as lost:
            raise Failed(f"ended its process with status {self.end()}") from lost
        if error:
            raise error
        return value

    def _start(self):
        self.pipe, theirs = Pipe()
        # With -m instead, multiprocessing would import the module again in each process that the user's
        # function starts.
        program = (f"import sys; sys.path[:] = {sys.path!r}; from options.user_code import answer_calls; "
                   f"answer_calls({theirs.fileno()})")
        # In a session of its own the process gets no Ctrl-C, so that the run can finish its step.
        self.process = subprocess.Popen([sys.executable, "-c", program], pass_fds=[theirs.fileno()],
                                        stdin=subprocess.DEVNULL, start_new_session=True, cwd=STARTED_IN)
        theirs.close()

    def end(self):
        """End the process, if there is one, and return its exit status."""
        process = self.process
        self.process = None
        if process:
            os.killpg(process.pid, signal.SIGKILL)              # with the processes that it has started
            return process.wait()


def answer_calls(descriptor):
    """Answer the calls of the UserProcess that has started this process, until that has gone."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)              # PR_SET_PDEATHSIG: end with the parent
    make_lenient()
    pipe = Connection(descriptor)
    while True:
        function, arguments = pipe.recv()
        try:
            pipe.send((function(*arguments), None))
        except BaseException as error:
            pipe.send((None, error))
