"""The lock of a rank's folder: one writer at a time, also within a process.

``flock`` on the file ``LOCK`` belongs to the open file, so a second writer of the same process is refused as well. It is
given up when its holder dies, however it dies. A forked child closes its copies of the descriptors at once, so that its
life does not prolong the lock.
"""

from __future__ import annotations

import fcntl
import os
import weakref

from ..errors import ConfigError, LockedError
from .files import Files, refusals
from .names import LOCK

__all__ = ["RankLock", "holder", "note_holder", "refuse_remote"]

_REMOTE = ("nfs", "nfs4", "cifs", "smb3", "fuse", "9p", "ceph", "glusterfs", "lustre", "afs")


def refuse_remote(path: str) -> None:
    """Raise `ConfigError` where `path` lies on a network or FUSE file system, whose locks and syncs LMDB cannot trust."""
    kind = file_system(path)
    if kind.split(".")[0] in _REMOTE:
        raise ConfigError(
            f"{path} lies on a file system of type {kind!r}, whose locks and syncs cannot be relied on; give a path on a local "
            "disk, and copy the directory from there once it is saved (checkpoint.Writer(path, force=True) writes to it all the same)"
        )


def file_system(path: str) -> str:
    """Type of the file system that holds `path`, as the kernel names it; empty where that is not known."""
    try:
        device = os.stat(path).st_dev
        wanted = f"{os.major(device)}:{os.minor(device)}"
        with open("/proc/self/mountinfo") as mounts:
            for line in mounts:
                fields = line.split()
                if fields[2] == wanted:
                    return fields[fields.index("-") + 1]
    except (OSError, ValueError, IndexError):
        pass
    return ""


def holder(descriptor: int) -> int | None:
    """The process that a lock's text names; None where it names none."""
    text = os.pread(descriptor, 32, 0).strip()
    return int(text) if text.isdigit() and len(text) <= 20 else None


def note_holder(descriptor: int) -> None:
    """Have a lock that we hold say so."""
    ours = b"%-20d" % os.getpid()
    if os.pread(descriptor, len(ours), 0) != ours:  # else a busy disk's journal would be waited for
        os.pwrite(descriptor, ours, 0)


class RankLock:
    """Held from `take` to `release`, which is to be called however `take` has ended."""

    def __init__(self, folder: str, files: Files) -> None:
        self._folder, self._files = folder, files
        self._descriptor = -1

    def take(self) -> None:
        """Take it, without waiting.

        Raises
        ------
        LockedError
            Another writer, of this process or another, holds the folder; names its process.
        """
        path = os.path.join(self._folder, LOCK)
        _held.add(self)
        with refusals(path, "locking a checkpoint"):
            self._files.point("lock", path)
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                pid = holder(self._descriptor)
                self._close()
                raise LockedError(
                    f"{self._folder}: process {pid or 'unknown'} is writing a checkpoint there; wait for it, or give another path",
                    pid=pid,
                ) from None
            note_holder(self._descriptor)

    def release(self) -> None:
        """Give the folder back, if it was taken; again does nothing."""
        if self._descriptor >= 0:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)
            self._close()

    def _close(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        os.close(descriptor)


_held: weakref.WeakSet[RankLock] = weakref.WeakSet()


def _forget_in_child() -> None:
    for lock in list(_held):
        if lock._descriptor >= 0:
            lock._close()


os.register_at_fork(after_in_child=_forget_in_child)
