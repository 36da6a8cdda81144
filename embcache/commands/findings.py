"""`embcache verify`: everything that is wrong with a checkpoint, a table directory, or one file of a checkpoint.

It reads whatever it is given, and whatever that holds, what comes out is a list of findings: no damage may end the
process, so a surprise of our own is a finding as well.
"""

from __future__ import annotations

import argparse
import errno
import os
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np

from .._core.directory import Directory
from ..checkpoint import Finding, verify
from ..checkpoint.catalogue import problems_of
from ..checkpoint.chunk import ALIGNMENT, ChunkBuffer, open_chunk, read_header
from ..checkpoint.sealed import COMMIT, MANIFEST, SEALED_BYTES, SEGMENT, read, unseal
from ..errors import ConfigError, CorruptionError, EmbCacheError, LockedError, StorageError
from .output import FINDINGS, FINE, Output, bytes_text
from .paths import CHECKPOINT, FILE, TABLE, kind_of

__all__ = ["add", "examine"]

_ABOUT = """\
Read every byte and say what is wrong. Of a checkpoint: names, manifests, catalogues, and every chunk of every generation
against its digest. Of a table directory: whether it is clean, and its header, lengths and metadata against their digests
(its rows have none: checkpoints are what is safe against a bad disk). A single file of a checkpoint (a manifest, a segment,
a catalogue) can be given too. Nothing is changed.

"damage" means that something cannot be used; a "note" is about what does not belong there and does no harm."""

_MOST_CHUNK_BYTES = 1 << 30
_PAGE = 4096
_LMDB_MAGIC = (0xBEEFC0DE).to_bytes(4, "little")


def add(commands: Any) -> None:
    """Describe the command."""
    one: argparse.ArgumentParser = commands.add_parser(
        "verify", help="check every byte of a checkpoint, a table directory or a file", description=_ABOUT
    )
    one.add_argument("path", metavar="PATH", help="a checkpoint, a table directory, or a file of a checkpoint")
    one.set_defaults(run=run)


def run(given: argparse.Namespace, output: Output) -> int:
    """Print the findings; exit 1 where one is damage."""
    what = kind_of(given.path)
    with output.progress(0, "verify") as progress:
        findings = examine(given.path, progress.at)
    damaged = sum(one.severity == "damage" for one in findings)
    result = {
        "path": os.path.abspath(given.path),
        "what": what,
        "bytes": progress.done,
        "ok": damaged == 0,
        "findings": [{"severity": one.severity, "generation": one.generation, "what": one.what} for one in findings],
    }
    read_text = f"; {bytes_text(progress.done)} of chunks read" if progress.done else ""
    lines = [f"{one.severity}: {one.what}" for one in findings]
    lines.append(f"{given.path}: {what}: {f'{damaged} damaged' if damaged else 'ok'}{read_text}")
    output.give(result, lines)
    return FINDINGS if damaged else FINE


def examine(path: str, progress: Callable[[int, int], object] | None = None) -> list[Finding]:
    """What is wrong at `path`, whatever is there.

    Raises
    ------
    ConfigError
        Nothing is there, or something that no one would verify: a pipe, the header of a table directory.
    LockedError, StorageError
        A table directory is in use, or lies where it cannot be locked.
    """
    report = progress or (lambda done, total: None)
    try:
        what = kind_of(path)
    except OSError as error:
        return [Finding("damage", None, f"{path}: cannot be read ({error.strerror or error})")]
    if what == FILE:
        _refuse_file(path)
    try:
        if what == CHECKPOINT:
            return verify(path, progress=report)
        if what == TABLE:
            return _table(path)
        if what == FILE:
            return _file(path, report)
        return [Finding("damage", None, f"{path}: is a {what}: neither a checkpoint nor a table directory")]
    except LockedError:
        raise
    except StorageError as error:
        if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
            raise  # a directory is locked while it is looked at: that it cannot be here says nothing about what it holds
        return [Finding("damage", None, str(error))]
    except EmbCacheError as error:
        return [Finding("damage", getattr(error, "generation", None), str(error))]
    except OSError as error:
        return [Finding("damage", None, f"{path}: cannot be read ({error.strerror or error})")]
    except Exception as error:  # hostile bytes that surprised the code that reads them
        return [Finding("damage", None, f"{path}: cannot be understood ({type(error).__name__}: {error})")]


def _table(path: str) -> list[Finding]:
    if not os.path.isfile(os.path.join(path, "header")):
        return [Finding("damage", None, f"{path}: the header of the table directory is missing")]
    directory = Directory(path, "verify")
    directory.metadata()
    directory.filter_state()
    return []


# ------------------------------------------------------------------------------------------------------------ one file


def _refuse_file(path: str) -> None:
    """`ConfigError` for a file that has been given by mistake: nothing is wrong with it."""
    if not os.path.isfile(path):
        raise ConfigError(
            f"{path}: is no regular file; give the path of a checkpoint, a table directory or a file of one"
        )
    with suppress(OSError), open(path, "rb") as file:
        if file.read(8) == b"EMBCTBL\n":
            raise ConfigError(f"{path}: is the header of a table directory; give the directory")


def _file(path: str, report: Callable[[int, int], object]) -> list[Finding]:
    """A manifest, a commit, a segment or a catalogue, told by its first bytes."""
    with open(path, "rb") as file:
        head = file.read(_PAGE)
    if head[:8] == b"EMBCKPT\n":
        kind = int.from_bytes(head[10:12], "little")
        if kind == SEGMENT:
            return _segment(path, head, report)
        read(kind if kind in (MANIFEST, COMMIT) else MANIFEST, path)
        return []
    if head[16:20] == _LMDB_MAGIC or head[24:28] == _LMDB_MAGIC:
        return [Finding("damage", None, f"{path}: {problem}") for problem in problems_of(path)]
    return [Finding("damage", None, f"{path}: not a file of embcache, or its first bytes are damaged")]


def _segment(path: str, head: bytes, report: Callable[[int, int], object]) -> list[Finding]:
    """The head of a segment, then one chunk behind the other, as long as they say where the next one begins."""
    findings: list[Finding] = []
    unseal(SEGMENT, head, path)
    length, at, number = os.path.getsize(path), ALIGNMENT, 0
    buffer = ChunkBuffer()
    with open(path, "rb", buffering=0) as file:
        while at < length:
            file.seek(at)
            try:
                header = read_header(np.frombuffer(bytearray(file.read(_PAGE)), np.uint8))
                if not SEALED_BYTES < header.length <= min(length - at, _MOST_CHUNK_BYTES):
                    raise CorruptionError(f"says it has {header.length} bytes, where {length - at} are left")
            except EmbCacheError as error:
                findings.append(
                    Finding("damage", None, f"{path}: chunk at {at}: {error}; what follows it is not found")
                )
                break
            content: Any = buffer.room(header.length)
            file.seek(at)
            if file.readinto(content) != header.length:
                findings.append(Finding("damage", None, f"{path}: chunk at {at}: the file ends in it"))
                break
            try:
                open_chunk(content)
            except EmbCacheError as error:
                findings.append(Finding("damage", header.generation, f"{path}: chunk at {at}: {error}"))
            at += header.length
            number += 1
            report(at, length)
    return findings
