"""What a path is: a checkpoint, a table directory, a file of either, or neither. Nothing is opened for writing here."""

from __future__ import annotations

import glob
import os
import re
import stat

from ..errors import ConfigError

__all__ = ["CHECKPOINT", "EMPTY", "FILE", "OTHER", "TABLE", "expect", "kind_of"]

CHECKPOINT, TABLE, EMPTY, OTHER, FILE = "checkpoint", "table directory", "empty directory", "directory", "file"

_OF_CHECKPOINT = re.compile(r"MANIFEST-\d{16}(\.tmp)?|rank-\d{4}")
_GENERATION = re.compile(r"(.+)@\d+")
_OF_TABLE = {"header", "data", "metadata"}


def kind_of(path: str) -> str:
    """What is at `path`, by the names in it.

    Raises
    ------
    ConfigError
        Nothing is there.
    OSError
        It cannot be looked at.
    """
    if not path or "\0" in path:
        raise ConfigError(f"path = {path!r}; give the path of a checkpoint or a table directory")
    try:
        found = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        left = glob.glob(glob.escape(os.path.abspath(path)) + ".embcache-*/old")
        remedy = (
            f"a command died while it replaced it, and left it as {left[0]}: give that its name again"
            if left
            else "give the path of a checkpoint or a table directory"
        )
        named = _GENERATION.fullmatch(path)
        if named is not None and os.path.isdir(named[1]):
            remedy = f"this command takes no generation: give {named[1]}, all of which it is about"
        raise ConfigError(f"{path}: does not exist; {remedy}") from None
    if not stat.S_ISDIR(found.st_mode):
        return FILE
    names = os.listdir(path)
    if any(_OF_CHECKPOINT.fullmatch(name) for name in names):
        return CHECKPOINT
    if _OF_TABLE & set(names):
        return TABLE
    return OTHER if names else EMPTY


def expect(path: str, *kinds: str) -> str:
    """`path`, if it is one of `kinds`; `ConfigError` else."""
    found = kind_of(path)
    if found not in kinds:
        article = "an" if found == EMPTY else "a"
        raise ConfigError(f"{path}: is {article} {found}, not a {' or a '.join(kinds)}; give the path of one")
    return path
