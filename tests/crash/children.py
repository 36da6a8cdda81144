"""Bodies that run in forked children: with a limit of time and memory, and a pipe to say what they have done."""

from __future__ import annotations

import os
import resource
import select
import shutil
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

Say = Callable[[str], object]


@dataclass(frozen=True)
class Outcome:
    """How a child ended: its exit code (negative: the signal), the lines it said, and whether it took too long."""

    code: int
    said: list[str]
    late: bool


def run_child(
    body: Callable[[Say], object],
    *,
    limit_s: float = 60.0,
    memory_bytes: int | None = None,
    kill_after: tuple[str, float] | None = None,
) -> Outcome:
    """Run `body(say)` in a child; it is killed after `limit_s`, or so many seconds after it said a line that was waited for."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.close(read)
            if memory_bytes is not None:
                with open("/proc/self/statm") as file:
                    held = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
                resource.setrlimit(resource.RLIMIT_AS, (held + memory_bytes, held + memory_bytes))
            body(lambda word: os.write(write, f"{word}\n".encode()))
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    os.close(write)
    text, late, end = b"", False, time.monotonic() + limit_s
    waiting = kill_after
    with open(read, "rb", buffering=0) as pipe:
        while True:
            ready, _, _ = select.select([pipe], [], [], max(end - time.monotonic(), 0))
            piece = pipe.read(65536) if ready else b""
            text += piece or b""
            if waiting is not None and waiting[0].encode() in text:
                end, waiting = time.monotonic() + waiting[1], None
            if not piece:
                late = not ready
                break
    if late:
        os.kill(pid, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return Outcome(code, text.decode().split("\n")[:-1], late)


@contextmanager
def folder_in_memory() -> Iterator[Path]:
    """A folder whose syncs cost nothing, for tests that save thousands of times; on disk where there is no such place."""
    place = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    folder = tempfile.mkdtemp(prefix="embcache-test-", dir=place)
    try:
        yield Path(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
