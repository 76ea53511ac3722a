"""
A function of the user's that is called in a process of its own, in limited time.

What it does to signals, the current folder or the interpreter stays in that process. A call that does not
come back is ended with its process, whatever language it is written in.
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
        program = (f"import sys; sys.path[:] = {sys.path!r}; from runtime.user_process import serve; "
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


class Console(io.FileIO):
    """A console that drops what it cannot take because it is closed or full."""
    def write(self, data):
        with contextlib.suppress(OSError):
            super().write(data)
        return len(data)


def serve(descriptor):
    """Answers the messages of the UserProcess that has started this process, until it has gone."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)              # PR_SET_PDEATHSIG: end with the parent
    for name, number in (("stdout", 1), ("stderr", 2)):
        if stream := getattr(sys, name):                        # it is None if it was closed
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
