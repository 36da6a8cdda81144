"""The system calls that a checkpoint makes, one method each, and what their failures mean.

Owns no state. Everything that writes goes through one `Files`, so that a test can refuse, shorten or die at any call:
it overrides `point`, which each method passes first. Reading needs no seam: what is read is never trusted anyway.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from ..errors import ConfigError, DiskFullError, StorageError

__all__ = ["Files", "refusal", "refusals"]

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_UNSUPPORTED = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)
_SPARE_BYTES = 1 << 20


def refusal(error: OSError, path: str, doing: str) -> StorageError:
    """The exception for a system call that failed: `DiskFullError` where the file system has no room, else `StorageError`."""
    kind = DiskFullError if error.errno in FULL else StorageError
    remedy = "free some space, or give another path" if kind is DiskFullError else "see what the system's log says"
    return kind(
        error.errno or errno.EIO,
        f"{doing}: {error.strerror or error}; what was published before is intact: {remedy}",
        path,
    )


@contextmanager
def refusals(path: str, doing: str) -> Iterator[None]:
    """Turn an `OSError` of the block into `refusal`."""
    try:
        yield
    except StorageError:
        raise
    except OSError as error:
        raise refusal(error, path, doing) from error


class Files:
    """System calls that change a checkpoint's directory. Thread safety: as the system's."""

    def point(self, name: str, path: str) -> None:
        """Called before each system call, with its name. For tests: may raise `OSError`, or end the process."""

    def make_folder(self, path: str) -> None:
        """Make `path` and what is missing above it; each new entry is durable. `ConfigError` where something else has its name."""
        missing = []
        while not os.path.isdir(path):
            missing.append(path)
            above = os.path.dirname(path)
            if above == path:
                break
            path = above
        for folder in reversed(missing):
            self.point("mkdir", folder)
            try:
                os.mkdir(folder)
            except FileExistsError:
                if not os.path.isdir(folder):
                    raise ConfigError(
                        f"{folder}: exists and is no directory, so no checkpoint can lie there; give another path"
                    ) from None
                continue  # another rank was faster
            try:
                self.sync_folder(os.path.dirname(folder))
            except OSError:
                with suppress(OSError):
                    os.rmdir(folder)  # an entry that a failed sync has lost stays lost: the next one makes it anew
                raise

    def sync_above(self, path: str) -> None:
        """Make the entries durable that lead to `path`, up to the root of its file system: whoever made a folder may not have.

        Folders that we may not read are passed over: they are not ours, and older than what is made in them.
        """
        device = os.stat(path).st_dev
        while (above := os.path.dirname(path)) != path and os.stat(above).st_dev == device:
            if os.access(above, os.R_OK):
                self.sync_folder(above)
            path = above

    def create(self, path: str, flags: int = 0) -> int:
        """A descriptor of a new file."""
        self.point("create", path)
        return os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC | flags, 0o666)

    def bypass_cache(self, descriptor: int, path: str) -> bool:
        """Have later writes go past the page cache; whether the file system does that. They must be of whole, aligned pages."""
        self.point("bypass_cache", path)
        try:
            fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) | os.O_DIRECT)
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise
            return False
        return True

    def allocate(self, descriptor: int, offset: int, length: int, path: str) -> None:
        """Have disk space for these bytes, so that a full disk is known before anything is written."""
        self.point("allocate", path)
        try:
            os.posix_fallocate(descriptor, offset, length)
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise  # without support for it the write itself will say that the disk is full

    def write(self, descriptor: int, pieces: Sequence[Any], offset: int, path: str) -> None:
        """Write all of `pieces`, one behind the other, at `offset`."""
        views = [memoryview(piece).cast("B") for piece in pieces if len(piece)]
        while views:
            done = self.write_some(descriptor, views, offset, path)
            if done <= 0:
                raise OSError(errno.EIO, "nothing was written")
            offset += done
            while views and done >= len(views[0]):
                done -= len(views.pop(0))
            if done:
                views[0] = views[0][done:]

    def write_some(self, descriptor: int, views: Sequence[memoryview], offset: int, path: str) -> int:
        """One call of the system; returns the bytes written, which may be fewer than asked for."""
        self.point("write", path)
        try:
            return os.pwritev(descriptor, views, offset)
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise
            # This medium wants direct writes otherwise: as without. The flag tells nothing of the call that failed, for another
            # thread may have cleared it since; a call that never was direct fails a second time, and says why.
            flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
            fcntl.fcntl(descriptor, fcntl.F_SETFL, flags & ~os.O_DIRECT)
            return os.pwritev(descriptor, views, offset)

    def truncate(self, descriptor: int, length: int, path: str) -> None:
        """Set the length of a file."""
        self.point("truncate", path)
        os.ftruncate(descriptor, length)

    def sync(self, descriptor: int, path: str) -> None:
        """Make a file's bytes durable."""
        self.point("sync", path)
        os.fdatasync(descriptor)

    def sync_folder(self, path: str) -> None:
        """Make a folder's entries durable."""
        self.point("sync_folder", path)
        descriptor = os.open(path or ".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def rename(self, old: str, new: str) -> None:
        """Give a file its final name."""
        self.point("rename", new)
        os.rename(old, new)

    def unlink(self, path: str) -> None:
        """Remove a file; one that is not there is no error."""
        self.point("unlink", path)
        with suppress(FileNotFoundError):
            os.unlink(path)

    def commit(self, transaction: Any, path: str) -> None:
        """Commit an LMDB transaction: the engine writes and syncs by itself."""
        self.point("commit", path)
        transaction.commit()


def free_bytes(path: str) -> int:
    """Bytes that the file system of `path` still has for us."""
    status = os.statvfs(path)
    return status.f_bavail * status.f_frsize


def looks_full(path: str) -> bool:
    """Whether an unexplained I/O error is best explained by a full disk, which LMDB reports as any other."""
    try:
        return free_bytes(path) < _SPARE_BYTES
    except OSError:
        return False
