"""A small process that forks when it is told to: children start with their imports done, from a parent of one thread.

pytest's own process would be the wrong one to fork from. It may have threads (torch's, a test's), whose locks a child would
inherit as they were at that moment; and it is large, so that each child would begin by copying page tables and end by giving
them back. A server has imported what one file needs, nothing has run in it, and it makes sure that it is alone before each fork.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import ctypes
import importlib.util
import os
import pickle
import resource
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable
from functools import cache
from typing import Any

__all__ = ["Child", "server_of"]

_MOST_BYTES = 1 << 16
_PR_SET_PDEATHSIG = 1


class Child:
    """A process that a server has forked; its pid is its own until `wait` has returned."""

    def __init__(self, channel: socket.socket, pid: int) -> None:
        self._channel, self._pid = channel, pid

    def kill(self) -> None:
        """End it, if it has not ended by itself."""
        os.kill(self._pid, signal.SIGKILL)

    def wait(self) -> int:
        """Wait for its end; returns its exit code, or the signal below zero."""
        self._channel.send(b"wait")
        return int(self._channel.recv(_MOST_BYTES))


class ForkServer:
    """Forks children that call functions of one Python file, one child after the other.

    Parameters
    ----------
    file : str
        Its top level is run once, in the server.
    """

    def __init__(self, file: str) -> None:
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        one_thread = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno()), file],
                pass_fds=[theirs.fileno()],
                env=os.environ | one_thread | {"PYTHONPATH": os.pathsep.join(sys.path)},
            )
        atexit.register(self.close)

    def fork(self, function: str, arguments: tuple[Any, ...], pipe: int, memory_bytes: int | None) -> Child:
        """Have a child call ``function(say, *arguments)``, where what it says is written to `pipe`.

        It ends with code 0, or 1 where the function has raised; its standard output and error are this process's errors, and
        `memory_bytes` is how much more address space it may have than it starts with.
        """
        request = pickle.dumps((function, arguments, memory_bytes))
        descriptors = array.array("i", [pipe, 2])
        self._channel.sendmsg([request], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptors)])
        answer = self._channel.recv(_MOST_BYTES)
        if not answer.isdigit():
            raise RuntimeError(f"the fork server: {answer.decode() or 'has ended'}")
        return Child(self._channel, int(answer))

    def close(self) -> None:
        """End the server, and with it a child that is left."""
        with contextlib.suppress(OSError):
            self._channel.shutdown(socket.SHUT_RDWR)
        self._channel.close()
        self._process.wait()


@cache
def server_of(file: str) -> ForkServer:
    """The server of a file: started when it is first asked for, ended with this process."""
    return ForkServer(file)


# ------------------------------------------------------------------------------------------------ in the server's process


def _serve(channel: socket.socket, file: str) -> None:
    functions = _load(file)
    while True:
        request, descriptors, _, _ = socket.recv_fds(channel, _MOST_BYTES, 2)
        if not request:
            return
        if (threads := len(os.listdir("/proc/self/task"))) != 1:
            channel.send(f"{file} has started {threads - 1} threads, beside which nothing may be forked".encode())
            continue
        pid = os.fork()
        if pid == 0:
            channel.close()
            _be_child(functions, request, *descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        channel.send(b"%d" % pid)
        if channel.recv(_MOST_BYTES) != b"wait":
            return  # nobody is there any more; the child goes with us
        channel.send(b"%d" % os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


def _load(file: str) -> Any:
    spec = importlib.util.spec_from_file_location("forked", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["forked"] = module
    spec.loader.exec_module(module)
    return module


def _be_child(functions: Any, request: bytes, pipe: int, errors: int) -> None:
    code = 1
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        os.dup2(errors, 1)
        os.dup2(errors, 2)
        function, arguments, memory_bytes = pickle.loads(request)
        body: Callable[..., object] = getattr(functions, function)
        if memory_bytes is not None:
            with open("/proc/self/statm") as file:
                held = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
            resource.setrlimit(resource.RLIMIT_AS, (held + memory_bytes, held + memory_bytes))
        body(lambda word: os.write(pipe, f"{word}\n".encode()), *arguments)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as parent:
        _serve(parent, sys.argv[2])
