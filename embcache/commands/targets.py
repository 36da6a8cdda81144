"""What a command makes: built beside its place, whole and durable before it gets there, and only then the old one goes.

``TARGET.embcache-PID`` is a folder beside the target in which the new content grows. It is locked while its process lives;
the next command for the same target removes what dead ones left. A target that exists is exchanged for the new content in
one step of the file system (``renameat2``), so at any moment one of the two is there, whole. While the new one is built,
the old one is locked: nobody can save into what is about to go.

Some file systems cannot exchange. There the old one is moved into the folder first, as ``old``, and the new one out of it then; whatever
ends the command in between, the old one gets its name again, here or by the next command. Should somebody have taken that name
meanwhile, it is kept beside it as ``TARGET.old-N``, and a warning says so. It goes only once the new one has its name, durably.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import logging
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import count

from ..checkpoint.lock import holder, note_holder
from ..checkpoint.names import LOCK
from ..errors import ConfigError, LockedError
from .paths import CHECKPOINT, EMPTY, FILE, TABLE, kind_of

__all__ = ["PLACED", "check_apart", "put_back", "replacing"]

LOG = logging.getLogger("embcache")

PLACED: list[str] = []  # targets that have got new content, for the last words of a command that is interrupted

_AT_FDCWD, _NOREPLACE, _EXCHANGE = -100, 1, 2  # of renameat2
_UNSUPPORTED = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)
_LEFT = r"\.embcache-(\d+)"
_NEW = "new"  # a file in the folder which holds the identity of the new content, once that is whole


def check_apart(source: str, target: str) -> None:
    """Raise `ConfigError` where one of the two paths is the other, or lies inside it."""
    one, other = os.path.realpath(source), os.path.realpath(target)
    if os.path.commonpath([one, other]) in (one, other):
        raise ConfigError(f"{target}: is, holds or lies in {source}, which is read; give another path to write to")


@dataclass
class _Progress:
    """How far a command of this process has got with its target."""

    placed: bool = False  # the new content has its name
    # Whether for good; None: nobody has synced it yet. False: a sync has failed, and a later one that succeeds would mean nothing.
    durable: bool | None = None


@contextmanager
def replacing(target: str, kind: str, force: bool) -> Iterator[str]:
    """A path to build new content at; when the block ends well, it takes the place of `target`.

    The folder around that path is the block's own, for whatever else it needs meanwhile.

    Parameters
    ----------
    target : path
        Where the content shall be: nothing, an empty directory, or with `force` something of the same kind.
    kind : str
        `CHECKPOINT`, `TABLE` or `FILE`: what the block makes.
    force : bool
        An existing target may be replaced.

    Raises
    ------
    ConfigError
        The target exists and `force` was not given; or is of another kind, which is never replaced; or the folder around it
        does not exist.
    LockedError
        The old content, or this target, is in use.
    """
    target = os.path.abspath(target)
    _check(target, kind, force)
    put_back(target)
    with ExitStack() as stack:
        _hold_old(target, kind, stack)
        folder = _make_folder(target, stack)
        content = os.path.join(folder, "content")
        progress = _Progress()
        stack.callback(_tidy, folder, target, progress)
        yield content
        _sync(content)
        _check(target, kind, force)  # the world went on meanwhile
        with open(os.path.join(folder, _NEW), "w", encoding="ascii") as file:
            file.write(_identity(content))
            file.flush()
            os.fsync(file.fileno())
        _sync_names(folder, target)  # or a cut could lose the folder, with what is about to be moved into it
        _put(content, target, force)
        progress.placed = True
        try:
            _sync_names(folder, target)
        except OSError:
            progress.durable = False
            raise
        progress.durable = True


def _check(target: str, kind: str, force: bool) -> None:
    above = os.path.dirname(target)
    if not os.path.isdir(above):
        raise ConfigError(f"{target}: the folder {above} does not exist; make it first, or give another path")
    if not os.path.lexists(target):
        return
    if os.path.islink(target):
        raise ConfigError(f"{target}: is a symbolic link; give the path that it leads to")
    found = kind_of(target)
    if found == EMPTY and kind != FILE:
        return
    if found != kind or (kind == FILE and not os.path.isfile(target)):
        what = found if found != FILE or os.path.isfile(target) else "device or the like"
        raise ConfigError(f"{target}: is a {what}, which a {kind} never replaces; give another path")
    if not force:
        raise ConfigError(f"{target}: exists; give another path, or --force to replace it once the new one is whole")


def _make_folder(target: str, stack: ExitStack) -> str:
    """The folder to build in: made, and locked until the end of `stack`."""
    folder = f"{target}.embcache-{os.getpid()}"
    while True:
        try:
            os.mkdir(folder)
        except FileExistsError:
            raise LockedError(f"{folder}: is being built by another command; wait for it", pid=os.getpid()) from None
        with ExitStack() as own:
            try:
                _lock(folder, own)
                if os.path.isdir(folder):
                    stack.push(own.pop_all())
                    break
            except (BlockingIOError, FileNotFoundError):
                pass  # between the two calls somebody took it for what a dead process left
    return folder


def _lock(folder: str, stack: ExitStack) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    stack.callback(os.close, descriptor)
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def put_back(target: str) -> None:
    """Remove what commands that have died were building for this target; one that was being replaced gets its name again."""
    target = os.path.abspath(target)
    above, name = os.path.split(target)
    for other in os.listdir(above):
        if not re.fullmatch(re.escape(name) + _LEFT, other):
            continue
        folder = os.path.join(above, other)
        with ExitStack() as stack, suppress(BlockingIOError, FileNotFoundError, NotADirectoryError):
            _lock(folder, stack)
            _tidy(folder, target)


def _sync_names(folder: str, target: str) -> None:
    """Make durable what has changed places between the folder that was built in and the one around the target."""
    _sync(folder)
    _sync(os.path.dirname(target))


def _tidy(folder: str, target: str, progress: _Progress | None = None) -> None:
    """Remove the folder of a command that has ended or died, but not what it was replacing unless the new one has its place.

    Of this process's own command `progress` says so; else what the folder says of the new one decides.
    """
    content, old = os.path.join(folder, "content"), os.path.join(folder, "old")
    new = ""  # it did not get as far as its target
    with suppress(OSError, ValueError), open(os.path.join(folder, _NEW), encoding="ascii") as file:
        new = file.read()
    moved = False
    if (progress is not None and progress.placed) or (new and new == _identity(target)):
        if progress is not None:
            PLACED.append(target)
        old = old if os.path.lexists(old) else content  # by two steps, or by an exchange
        if os.path.lexists(old):
            # Else a power cut could find the old one removed, and the new one without its name.
            durable = _synced(folder, target) if progress is None or progress.durable is None else progress.durable
            if not durable:
                _keep_old(old, target)
                moved = True
    elif os.path.lexists(old):
        if os.path.lexists(target):
            _keep_old(old, target)
        else:
            os.rename(old, target)
        moved = True
    if not moved or _synced(
        folder, target
    ):  # else a power cut could find the folder removed, with the old one still in it
        shutil.rmtree(folder, ignore_errors=True)


def _synced(folder: str, target: str) -> bool:
    """Whether `_sync_names` has succeeded."""
    try:
        _sync_names(folder, target)
    except OSError:
        return False
    return True


def _keep_old(old: str, target: str) -> None:
    """Give what was to be replaced a name of its own beside the target, and say so."""
    for number in count(1):
        kept = f"{target}.old-{number}"
        if os.path.lexists(kept):
            continue
        os.rename(old, kept)
        LOG.warning("%s: what was there before is kept as %s, whole; remove it where it is not wanted", target, kept)
        return


def _identity(path: str) -> str:
    """What tells a file or a folder from every other one, wherever it is moved; empty where there is none."""
    try:
        found = os.lstat(path)
    except OSError:
        return ""
    return f"{found.st_dev}:{found.st_ino}"


def _hold_old(target: str, kind: str, stack: ExitStack) -> None:
    """Keep others from changing the old content while the new one is built."""
    if not os.path.isdir(target):
        return
    if kind == TABLE:
        _hold(target, stack)
    for name in sorted(os.listdir(target)) if kind == CHECKPOINT else ():
        lock = os.path.join(target, name, LOCK)
        if name.startswith("rank-") and os.path.exists(lock):
            _hold(lock, stack)


def _hold(path: str, stack: ExitStack) -> None:
    """Lock a table's directory, or the lock of a rank's folder, whose text then says that it is we who have it."""
    try:
        descriptor = os.open(path, (os.O_RDONLY if os.path.isdir(path) else os.O_RDWR) | os.O_CLOEXEC)
    except PermissionError:  # we may replace what we may not write to
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    stack.callback(os.close, descriptor)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        pid = None if os.path.isdir(path) else holder(descriptor)
        by = "" if pid is None else f" by process {pid}"
        raise LockedError(
            f"{path}: is in use{by}, so nothing can be replaced: close it there first, or give another path", pid=pid
        ) from None
    if not os.path.isdir(path):
        with suppress(OSError):  # a file that we may not write to; it costs others a wrong number in a message
            note_holder(descriptor)


def _put(content: str, target: str, force: bool) -> None:
    """Give new content its place; where that holds something, the two are exchanged."""
    if not os.path.lexists(target):
        # Without --force nothing that appears at this moment may go either.
        if force or not _renameat2(content, target, _NOREPLACE):
            os.rename(content, target)
    elif not os.path.isdir(target) or not os.listdir(target):
        os.replace(content, target)  # of a file and of an empty directory the system does this in one step
    elif not _renameat2(content, target, _EXCHANGE):
        # A file system without it: see `_tidy`.
        os.rename(target, os.path.join(os.path.dirname(content), "old"))
        os.rename(content, target)


def _renameat2(content: str, target: str, flag: int) -> bool:
    """Rename in one step; False where the system or the file system cannot."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    if rename(_AT_FDCWD, os.fsencode(content), _AT_FDCWD, os.fsencode(target), flag) == 0:
        return True
    number = ctypes.get_errno()
    if number in _UNSUPPORTED:
        return False
    if number == errno.EEXIST:
        raise ConfigError(f"{target}: appeared while the new one was built; nothing was replaced: give another path")
    raise OSError(number, os.strerror(number), target)


def _sync(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
