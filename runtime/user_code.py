"""
Functions and classes of the user's are loaded here from "file.py:name", or "package.module:name", and called
in limited time.

outcome calls one in this process, where nothing can end a call that does not come back unless it is async.
UserProcess calls them in a process of its own, and ends that process if a call takes too long. What they do
to signals, the current folder or the interpreter stays there.
"""
import asyncio
import atexit
import contextlib
import ctypes
import functools
import importlib.util
import inspect
import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
import types
from multiprocessing.connection import Connection, Pipe

# The folder in which the run was started. Code of the user's may change the current folder.
STARTED_IN = os.getcwd()
# Calls functions as the process ends, unless it is killed: closing.callback(function).
closing = contextlib.ExitStack()
atexit.register(closing.close)


def source_of(spec):
    """Return where a spec loads from: a module, or a file's path in STARTED_IN or else in the project."""
    path = spec if spec.endswith(".py") else spec.rpartition(":")[0]
    if not path.endswith(".py"):
        return path
    here = os.path.join(STARTED_IN, path)
    project = os.path.dirname(os.path.dirname(__file__))
    return os.path.realpath(here if os.path.isfile(here) else os.path.join(project, path))


def specs(text):
    """Return the specs in a setting such as "file.py:name,other.py:name"."""
    return [part.strip() for part in text.split(",") if part.strip()]


@functools.cache
def module_of(path):
    # Returns the module of a file, which runs once for all that is loaded from it.
    folders = [os.path.dirname(path)]
    while os.path.isfile(os.path.join(folders[0], "__init__.py")):
        folders.insert(0, os.path.dirname(folders[0]))
    # Relative imports find its neighbours, but the packages above it do not run: they may import a trainer.
    name = f"user_code_{len(sys.modules)}"
    for folder, below in zip(folders, [*folders[1:], path]):
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__path__ = [folder]
        name += f".{os.path.basename(below)}".removesuffix(".py").removesuffix(".__init__")
    spec = importlib.util.spec_from_file_location(name, path)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    # Like a script it may import modules from its folder, and those that its package names in full, but the
    # project's own come first.
    sys.path += [folder for folder in dict.fromkeys((folders[-1], folders[0])) if folder not in sys.path]
    spec.loader.exec_module(module)
    return module


def load_from(spec, key, kind, others=""):
    """Return the function or class that a spec "file.py:name" or "package.module:name" names.

    The messages need the other arguments: key is the setting, kind is function or Class, and others says what
    else the spec may be. Raises ValueError if the file has nothing of this name, or if it raises.
    """
    given, _, name = spec.rpartition(":")
    if not given or not name.isidentifier():
        raise ValueError(f"{key} must be file.py:{kind} or package.module:{kind}{others}, not {spec!r}")
    path = source_of(spec)
    if given.endswith(".py") and not os.path.isfile(path):
        raise ValueError(f"{key}: no such file: {given}")
    try:
        module = module_of(path) if given.endswith(".py") else importlib.import_module(given)
    except BaseException as error:
        raise ValueError(f"{key}: {given} raised {shown(error)}") from error
    # A builtin such as max may not say what its parameters are.
    if not callable(found := getattr(module, name, None)) or inspect.isbuiltin(found):
        names = ", ".join(other for other, value in vars(module).items() if callable(value) and value != found)
        raise ValueError(f"{key}: {given} has no {kind} {name}; at its top level it has {names or 'none'}")
    return found


def accepted(function, columns, name, by_name={}):
    """Return the columns that the function takes, and those of `by_name` that it names.

    name: how a message calls the function. Raises ValueError if the function needs another column.
    """
    parameters, given = inspect.signature(function).parameters.values(), by_name | columns
    named = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    for p in named:
        if p.default is p.empty and p.name not in given:
            raise ValueError(f"{name} needs a column {p.name}; the columns are {', '.join(columns)}")
    others = columns if any(p.kind == p.VAR_KEYWORD for p in parameters) else {}
    return others | {p.name: given[p.name] for p in named if p.name in given}


def name_of(function):
    return getattr(function, "__name__", type(function).__name__)


def shown(value):
    """Return a value or an error as one line for a message, without characters that act on the console."""
    if isinstance(value, BaseException):
        return repr(f"{type(value).__name__}: {value}")[1:-1]
    return f"{value!r:.100}"


def as_float(value):
    """Return a value that is not a text as a float. Raises ValueError if float32 has no such number."""
    # float raises for an array of several numbers and for 10**400.
    with contextlib.suppress(TypeError, OverflowError, RuntimeError):
        if hasattr(value, "__float__") and abs(float(value)) <= 3.4e38:         # float32's largest
            return float(value)
    raise ValueError(f"{shown(value)} is not a finite number in float32")


def json_text(name, value):
    """Return a value as JSON. Raises ValueError if it would be another one when it is read back."""
    text = json.dumps(value, default=str, skipkeys=True)
    read = json.loads(text)
    # Not the values themselves: NaN is not equal to NaN, and a defaultdict is equal to a dict.
    if repr(read) != repr(value):
        raise ValueError(f"{name} is {value!r:.200}, and a resumed run would read {read!r:.200}: checkpoints "
                         "keep numbers of Python, text, lists, and dicts whose keys are text")
    return text


def logging_into(stores):
    """Return TRL's log_extra(name, values) and log_metric(name, value), by name.

    They put what the function logs into the dicts `stores`, one value into each, as numbers or else as text.
    """
    def log_extra(name, values):
        for store, value in zip(stores, values):
            try:
                store[str(name)] = as_float(value)
            except ValueError:
                store[str(name)] = value if isinstance(value, str) else shown(value)

    return {"log_extra": log_extra, "log_metric": lambda name, value: log_extra(name, [value] * len(stores))}


class TimeUp(TimeoutError):
    """Says that a function of the user's ran out of time."""
    __str__ = lambda _: "took too long (call_timeout)"


class Failed(Exception):
    """Says that a function of the user's raised an error, its __cause__, or that it ended its process."""


def outcome(function, seconds=0):
    """Call a function of the user's and return (its value, its error or None, the seconds that it took).

    The error is TimeUp or Failed. seconds: how long an async function may take; 0 sets no limit. Nothing can
    stop a function that is not async.
    """
    start, value, problem = time.perf_counter(), None, None
    try:
        value = function()
        if inspect.iscoroutine(value):
            with LOOP_LOCK:                                     # without it threads may make several loops
                loop = event_loop()
            future = asyncio.run_coroutine_threadsafe(value, loop)
            value = future.result(seconds or None)
    except KeyboardInterrupt:
        raise
    # sys.exit, for example, must not end the run as if it had come to its end.
    except BaseException as error:
        # An async function that ran out of time can be cancelled; one that raised TimeoutError has ended.
        late = isinstance(error, TimeoutError) and inspect.iscoroutine(value) and future.cancel()
        value, problem = None, TimeUp() if late else Failed(f"raised {shown(error)}")
        problem.__cause__ = error
        problem.add_note(traceback.format_exc())                # which another process cannot send otherwise
    return value, problem, time.perf_counter() - start


LOOP_LOCK = threading.Lock()


@functools.cache
def event_loop():
    # The whole run has one loop for the user's async functions, because a connection belongs to the loop that
    # opened it.
    loop = asyncio.new_event_loop()

    def run():
        while True:
            # sys.exit in one function leaves run_forever, but must not end the calls of others.
            with contextlib.suppress(SystemExit):
                loop.run_forever()

    threading.Thread(target=run, name="of user code", daemon=True).start()
    return loop


def make_lenient():
    """Let print go on if stdout or stderr is closed or full, and escape what its encoding does not have.

    What such a console would have shown goes to the null device.
    """
    def lenient(number, call, *text):
        try:
            return call(*text)
        except (OSError, ValueError):
            os.dup2(null.fileno(), number)

    null = open(os.devnull, "w")
    for number, name in ((1, "stdout"), (2, "stderr")):
        stream = getattr(sys, name) or null                     # None if it was closed when the process began
        setattr(sys, name, stream)
        if type(stream) is io.TextIOWrapper:                    # a notebook has streams of its own
            stream.reconfigure(errors="backslashreplace", line_buffering=True)
            for call in ("write", "flush"):
                setattr(stream, call, functools.partial(lenient, number, getattr(stream, call)))


class UserProcess:
    """Calls functions in a new Python process with our sys.path, which runs in `folder`.

    first: a function and its arguments with which each such process begins, without a limit of time. The
    process imports functions by their names.
    """

    def __init__(self, folder, *first):
        self.folder, self.first, self.process = folder, first, None
        closing.callback(self.end)

    def call(self, seconds, function, *arguments):
        """Return function(*arguments), computed there. Raises what it raises, or Failed if its process ends.

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
        # With -m instead, multiprocessing would import the module again in each process of the function's.
        program = (f"import sys; sys.path[:] = {sys.path!r}; from runtime.user_code import serve; "
                   f"serve({theirs.fileno()})")
        # In a session of its own it gets no Ctrl-C, so that the run can finish its step.
        self.process = subprocess.Popen([sys.executable, "-c", program], pass_fds=[theirs.fileno()],
                                        stdin=subprocess.DEVNULL, start_new_session=True, cwd=self.folder)
        theirs.close()

    def end(self):
        """End the process, if there is one, and return its exit status."""
        if process := self.process:
            self.process = None
            os.killpg(process.pid, signal.SIGKILL)              # and the processes that it has started
            return process.wait()


def serve(descriptor):
    """Answer the messages of the UserProcess that has started this process, until it has gone."""
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
