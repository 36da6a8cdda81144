"""Functions that run in children: with a limit of time and memory, and a pipe to say what they have done."""

from __future__ import annotations

import os
import random
import select
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forkserver import server_of

Say = Callable[[str], object]


@dataclass(frozen=True)
class Outcome:
    """How a child ended: its exit code (negative: the signal), the lines it said, and whether it took too long."""

    code: int
    said: list[str]
    late: bool


def run_child(
    body: Callable[..., object],
    *arguments: Any,
    limit_s: float = 60.0,
    memory_bytes: int | None = None,
    kill_after: tuple[str, float] | None = None,
) -> Outcome:
    """Run `body(say, *arguments)` in a child; it is killed after `limit_s`, or so many seconds after it said a line that was
    waited for.

    `body` is a function at the top level of its file, which is run in the child's parent (`forkserver`) too; the arguments are
    pickled. What the child changes of its own process nobody else sees.
    """
    read, write = os.pipe()
    with open(read, "rb", buffering=0) as pipe:
        try:
            server = server_of(body.__code__.co_filename)
            child = server.fork(body.__qualname__, arguments, write, memory_bytes)
        finally:
            os.close(write)
        text, late, end = b"", True, time.monotonic() + limit_s
        waiting = kill_after
        try:
            while True:
                ready, _, _ = select.select([pipe], [], [], max(end - time.monotonic(), 0))
                if not ready:
                    break
                piece = pipe.read(65536)
                text += piece
                if waiting is not None and waiting[0].encode() in text:
                    end, waiting = time.monotonic() + waiting[1], None
                if not piece:
                    late = False
                    break
        finally:
            if late:
                child.kill()
            code = child.wait()
    return Outcome(code, text.decode().split("\n")[:-1], late)


class Moments:
    """When to kill lives that say a line whenever something is done: at any moment of about the first of these.

    The longest that a life may last follows from what the last ones have said, so that it fits the machine as it is now.
    """

    def __init__(self, seed: int) -> None:
        self._rng, self._longest_s = random.Random(seed), 0.05

    def draw(self) -> float:
        """Seconds until the next kill."""
        return self._rng.uniform(0.0, self._longest_s)

    def learn(self, done: int) -> None:
        """So many things were done in the last life."""
        self._longest_s *= 1.2 if done == 0 else 0.8 if done > 1 else 1.0


@contextmanager
def folder_in_memory() -> Iterator[Path]:
    """A folder whose syncs cost nothing, for tests that save thousands of times; on disk where there is no such place."""
    place = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    folder = tempfile.mkdtemp(prefix="embcache-test-", dir=place)
    try:
        yield Path(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
