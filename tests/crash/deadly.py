"""Has the process end by SIGKILL at a call that changes files: the n-th, whoever in Python makes it.

For children of the fork server, which nobody has to put in order again. What LMDB calls by itself is not among these; cuts in
between are made from recordings (`powercut`).
"""

from __future__ import annotations

import os
import signal
from typing import Any

from embcache.checkpoint import Files
from embcache.commands import targets

__all__ = ["die_at"]

_CALLS = (
    "mkdir",
    "rename",
    "replace",
    "unlink",
    "rmdir",
    "fsync",
    "fdatasync",
    "ftruncate",
    "posix_fallocate",
    "pwritev",
)


def die_at(calls: int) -> None:
    """End the process before the call that comes after `calls` more."""
    left = calls

    def count() -> None:
        nonlocal left
        left -= 1
        if left < 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def counting(place: Any, name: str) -> None:
        real = getattr(place, name)

        def call(*given: Any, **options: Any) -> Any:
            count()
            return real(*given, **options)

        setattr(place, name, call)

    for name in _CALLS:
        counting(os, name)
    counting(targets, "_renameat2")

    def point(self: Files, name: str, path: str) -> None:
        if name in ("create", "commit"):  # the others are calls of `os`, counted there
            count()

    Files.point = point  # type: ignore[method-assign]
