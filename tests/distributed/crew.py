"""A crew: processes that stay, joined by ``torch.distributed`` (gloo), and do what a test tells each of them.

Importing torch takes seconds, so a test module starts its crews once, from a fork server that has torch imported. A job is a function of
a module and its arguments; it is called as ``job(rank, world, *arguments)`` in each process. What it returns, or has raised, comes back.

Answers carry the number of their order: what an order of before has left nobody takes for his own. A crew one of whose members has
raised, is gone, or has not answered is of no more use to others, whose jobs need all of it: the next order starts it anew.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import forkserver
from typing import Any

__all__ = ["Crew", "CrewError", "Crews", "free_port"]

PATIENCE_S = 400.0  # of a machine that is busy with other things
GROUP_S = 240.0


class CrewError(AssertionError):
    """A member of a crew has raised; its traceback is in the message."""


def free_port() -> int:
    """A TCP port that nobody listens at now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _live(rank: int, size: int, store: str, pipe: Any) -> None:
    """The life of a member."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, size), rank=rank, world_size=size, timeout=timedelta(seconds=GROUP_S)
    )
    while True:
        order = pipe.recv()
        if order is None:
            break
        number, job, arguments = order
        try:
            pipe.send((number, True, job(rank, size, *arguments)))
        except BaseException as error:
            pipe.send((number, False, f"rank {rank}: {type(error).__name__}: {error}\n{traceback.format_exc()}"))
    os._exit(0)  # without a farewell, which would wait for members that a test has ended


def _serve() -> None:
    """Start the server, where none runs, with the path of this process: it imports what members need."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)
    try:
        forkserver.ensure_running()
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


class Crew:
    """So many processes."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._number = 0
        self._begin()

    def _begin(self) -> None:
        """Start the processes."""
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "torch.distributed", "numpy", "embcache.distributed", "preloaded"])
        _serve()
        self._folder = tempfile.TemporaryDirectory()
        store = os.path.join(self._folder.name, "store")
        self.pipes, self.processes = [], []
        self._whole = True
        for rank in range(self.size):
            here, there = context.Pipe()
            process = context.Process(target=_live, args=(rank, self.size, store, there), daemon=True)
            process.start()
            there.close()
            self.pipes.append(here)
            self.processes.append(process)

    def start(self, job: Callable[..., Any], *arguments: Any) -> None:
        """Have all begin a job."""
        if not self._whole:
            self.close()
            self._begin()
        self._number += 1
        for pipe in self.pipes:
            pipe.send((self._number, job, arguments))

    def answers(self, *, raising: bool = True, patience_s: float = PATIENCE_S) -> list[Any]:
        """What they have returned; of one that is gone, or has raised where that is not `raising`: the text of it."""
        results: list[Any] = []
        failures: list[str] = []
        ends = time.monotonic() + patience_s
        for rank, pipe in enumerate(self.pipes):
            fine, value = self._answer(rank, pipe, ends)
            results.append(value)
            if not fine:
                failures.append(value)
        self._whole = not failures
        if failures and raising:
            raise CrewError("\n".join(failures))
        return results

    def _answer(self, rank: int, pipe: Any, ends: float) -> tuple[bool, Any]:
        """What a member says to the order that was given last; and whether it has done it."""
        try:
            while pipe.poll(max(ends - time.monotonic(), 0)):
                number, fine, value = pipe.recv()
                if number == self._number:
                    return fine, value
        except (EOFError, ConnectionResetError):
            return False, f"rank {rank} is gone"
        return False, f"rank {rank} has not answered in time"

    def run(self, job: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Have all do a job, and return what each has returned."""
        self.start(job, *arguments)
        return self.answers()

    def kill(self, rank: int) -> None:
        """Kill a member."""
        self.processes[rank].kill()

    def close(self) -> None:
        """End them."""
        for pipe in self.pipes:
            with contextlib.suppress(OSError):
                pipe.send(None)
        for process in self.processes:
            process.join(10 if self._whole else 0)
            if process.is_alive():
                process.kill()
                process.join()
        self._folder.cleanup()

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class Crews(dict[int, Crew]):
    """Crews by size, each begun when it is first asked for."""

    def __missing__(self, size: int) -> Crew:
        self[size] = crew = Crew(size)
        return crew

    def __enter__(self) -> Crews:
        return self

    def __exit__(self, *exc: object) -> None:
        for crew in self.values():
            crew.close()
