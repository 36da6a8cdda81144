"""A crew: processes that stay, joined by ``torch.distributed`` (gloo), and do what a test tells each of them.

Importing torch takes seconds, so a test module starts its crews once, from a fork server that has torch imported. A job is a function of
a module and its arguments; it is called as ``job(rank, world, *arguments)`` in each process. What it returns, or has raised, comes back.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import socket
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

__all__ = ["Crew", "CrewError", "free_port"]

PATIENCE_S = 120.0


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
        "gloo", store=dist.FileStore(store, size), rank=rank, world_size=size, timeout=timedelta(seconds=60)
    )
    while True:
        order = pipe.recv()
        if order is None:
            break
        job, arguments = order
        try:
            pipe.send((True, job(rank, size, *arguments)))
        except BaseException as error:
            pipe.send((False, f"rank {rank}: {type(error).__name__}: {error}\n{traceback.format_exc()}"))
    os._exit(0)  # without a farewell, which would wait for members that a test has ended


class Crew:
    """So many processes."""

    def __init__(self, size: int) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "torch.distributed", "numpy", "embcache.distributed"])
        self._folder = tempfile.TemporaryDirectory()
        store = os.path.join(self._folder.name, "store")
        self.size = size
        self.pipes, self.processes = [], []
        for rank in range(size):
            here, there = context.Pipe()
            process = context.Process(target=_live, args=(rank, size, store, there), daemon=True)
            process.start()
            there.close()
            self.pipes.append(here)
            self.processes.append(process)

    def start(self, job: Callable[..., Any], *arguments: Any) -> None:
        """Have all begin a job."""
        for pipe in self.pipes:
            pipe.send((job, arguments))

    def answers(self, *, raising: bool = True, patience_s: float = PATIENCE_S) -> list[Any]:
        """What they have returned; of one that is gone, or has raised where that is not `raising`: the text of it."""
        results: list[Any] = []
        failures: list[str] = []
        for rank, pipe in enumerate(self.pipes):
            try:
                if not pipe.poll(patience_s):
                    raise CrewError(f"rank {rank} has not answered for {patience_s} s")
                fine, value = pipe.recv()
            except (EOFError, ConnectionResetError):
                fine, value = False, f"rank {rank} is gone"
            results.append(value)
            if not fine:
                failures.append(value)
        if failures and raising:
            raise CrewError("\n".join(failures))
        return results

    def run(self, job: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Have all do a job, and return what each has returned."""
        self.start(job, *arguments)
        return self.answers()

    def close(self) -> None:
        """End them."""
        for pipe in self.pipes:
            with contextlib.suppress(OSError):
                pipe.send(None)
        for process in self.processes:
            process.join(10)
            if process.is_alive():
                process.kill()
        self._folder.cleanup()

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
