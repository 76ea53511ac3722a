"""
A function of the user's in a process of its own, called in limited time.

What it does to signals, the current folder or the interpreter stays in that process, and a call that does not
come back is ended with it, whatever language it is written in.
"""
import contextlib
import ctypes
import io
import os
import signal
import subprocess
import sys
import traceback
from multiprocessing.connection import Connection, Pipe


class UserProcess:
    """Calls a function that make(*arguments) gives there, in a new Python that has our sys.path.

    folder: where that Python runs. make is found there by its name. It returns the function and a dict of
    attributes for this object. Raises what make raises.
    """

    def __init__(self, folder, make, *arguments):
        self.folder, self.made_by, self.process = folder, (make, arguments), None
        self._start()

    def within(self, seconds, *arguments):
        """Returns function(*arguments). Raises what it raises, or ChildProcessError if its process ends.

        After so many seconds (None: no limit) this ends the process and raises TimeoutError. The next call
        begins another.
        """
        if not self.process:
            self._start()
        return self._answer(arguments, seconds)

    def _start(self):
        self.pipe, theirs = Pipe()
        # Not by -m, because multiprocessing would import that module again in the function's own processes.
        program = (f"import sys; sys.path[:] = {sys.path!r}; from runtime.user_process import serve; "
                   f"serve({theirs.fileno()})")
        # Ctrl-C does not reach a session of its own: this process may want to finish its step.
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
        """Ends the process; the next call begins another."""
        process, self.process = self.process, None
        os.killpg(process.pid, signal.SIGKILL)                  # and the processes that it has started
        return process.wait()


class Console(io.FileIO):
    """Drops what a closed or full console cannot take."""
    def write(self, data):
        with contextlib.suppress(OSError):
            super().write(data)
        return len(data)


def serve(descriptor):
    """Answers the messages of a UserProcess, which has started this process, until it has gone."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)              # PR_SET_PDEATHSIG: end with the parent
    for name, number in (("stdout", 1), ("stderr", 2)):
        if stream := getattr(sys, name):                        # None: it is closed
            raw = Console(number, "w", closefd=False)
            setattr(sys, name, io.TextIOWrapper(raw, stream.encoding, "backslashreplace", write_through=True))
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
