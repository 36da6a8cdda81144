"""What a command says: text for people or one JSON object, progress on a terminal, and exit codes."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Any, TextIO

from ..errors import (
    ConfigError,
    CorruptionError,
    EmbCacheError,
    FormatVersionError,
    ShapeError,
    UncleanDirectoryError,
)

__all__ = ["ENVIRONMENT", "FINDINGS", "FINE", "USAGE", "Output", "Progress", "bytes_text", "code_of"]

FINE, FINDINGS, USAGE, ENVIRONMENT = 0, 1, 2, 3

_DAMAGE = (CorruptionError, FormatVersionError, UncleanDirectoryError)
_MISUSE = (ConfigError, ShapeError)


def code_of(error: Exception) -> int | None:
    """The exit code of an error; None where it is a mistake of ours."""
    if isinstance(error, _DAMAGE):
        return FINDINGS
    if isinstance(error, _MISUSE):
        return USAGE
    if isinstance(error, (EmbCacheError, OSError, MemoryError, ImportError)):
        return ENVIRONMENT
    return None


def bytes_text(count: int) -> str:
    """A number of bytes for people: ``1.5 GiB``."""
    value, unit = float(count), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB", "PiB"):
        if abs(value) < 1024 or unit == "PiB":
            break
        value /= 1024
    return f"{count} B" if unit == "B" else f"{value:.1f} {unit}"


class Output:
    """Where a command's words go: results to standard output, all else to standard error.

    Whoever reads them may go when they have seen enough: a closed pipe ends the words, not the command, and its exit code stays.
    """

    def __init__(self, as_json: bool, out: TextIO | None = None, err: TextIO | None = None) -> None:
        self.as_json = as_json
        self._out = out or sys.stdout
        self._err = err or sys.stderr

    def give(self, result: dict[str, Any], lines: Iterable[str]) -> None:
        """The result of a command: the object as JSON, or the lines."""
        if self.as_json:
            lines = [json.dumps(result, indent=1, allow_nan=False, default=_plain)]
        for line in lines:
            _write(self._out, line.encode("utf-8", "replace").decode() + "\n")

    def error(self, message: str) -> None:
        """Something that went wrong, for people."""
        _write(self._err, f"embcache: {message.encode('utf-8', 'backslashreplace').decode()}\n")

    def note(self, message: str) -> None:
        """Something worth knowing that is no result."""
        self.error(message)

    def failure(self, error: Exception, code: int) -> None:
        """A command that could not do its work."""
        message = str(error) or type(error).__name__
        if isinstance(error, OSError) and error.strerror:
            message = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
        if self.as_json:
            self.give({"error": {"type": type(error).__name__, "message": message, "exit_code": code}}, [])
        self.error(message)

    def flush(self) -> None:
        """So that a reader who has gone is noticed here and not at the interpreter's end."""
        try:
            self._out.flush()
        except BrokenPipeError:
            _forget(self._out)

    def progress(self, total: int, doing: str, unit: str = "B") -> Progress:
        """A bar with rate and time left; nothing where standard error is no terminal."""
        return Progress(total, doing, unit, self._err)


def _write(stream: TextIO, text: str) -> None:
    try:
        stream.write(text)
    except BrokenPipeError:
        _forget(stream)


def _forget(stream: TextIO) -> None:
    """Nobody reads this stream any more: what is written from now on, and what it still holds, goes nowhere."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


class Progress:
    """How far a command has got, in bytes or rows."""

    def __init__(self, total: int, doing: str, unit: str, stream: TextIO) -> None:
        self._bar: Any = None
        if stream.isatty():
            from tqdm import tqdm  # half of what starting the command would take

            self._bar = tqdm(
                total=total,
                desc=doing,
                unit=unit,
                unit_scale=True,
                unit_divisor=1024 if unit == "B" else 1000,
                file=stream,
                **_size(stream),
            )
        self.done = 0

    def add(self, count: int) -> None:
        """So much more is done."""
        self.done += count
        if self._bar is not None:
            self._bar.update(count)

    def at(self, done: int, total: int) -> None:
        """So much is done by now, of so much."""
        if self._bar is not None:
            self._bar.total = total
        self.add(done - self.done)

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()


def _size(stream: TextIO) -> dict[str, int]:
    """What a bar has to be told about the terminal: one that says it has no width (containers, CI) would show nothing."""
    try:
        return {} if os.get_terminal_size(stream.fileno()).columns else {"ncols": 80, "nrows": 24}
    except OSError:
        return {}


def columns_text(head: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    """Lines of a table: numbers to the right, words to the left."""
    cells = [list(head), *([f"{cell:,}" if type(cell) is int else str(cell) for cell in row] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(head))]
    right = [all(isinstance(row[i], (int, float)) for row in rows) and bool(rows) for i in range(len(head))]
    return [
        "  ".join(
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(line, widths, right, strict=True)
        ).rstrip()
        for line in cells
    ]


def _plain(value: Any) -> Any:
    """NumPy's scalars as Python's."""
    return value.item() if hasattr(value, "item") else str(value)
