"""Checkpoints: saves, deltas, restores and verification, against plain writes and against what others keep rows in.

Sizes: BENCH_CHECKPOINT_BYTES (4e9: what a full save writes; the table and a copy of it are in memory), BENCH_RESTORE_ROWS
(4e6, of 64 weights). Files go below BENCH_FOLDER (build/bench/checkpoint), which should be on the disk that is meant, has to
have room for three times the bytes, and is emptied again.
"""

from __future__ import annotations

import gc
import os
import shutil
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from embcache.checkpoint import Reader, generations, verify
from embcache.config import Constant
from embcache.table import EmbTable
from machine import available_bytes
from peers.checkpoints import PEERS, Rows, plain_write, record_per_row, safetensors_or_why
from peers.limits import fresh_memset
from race import BYTES, MILLION_ROWS, MILLISECONDS, Absent, Contender, Race, Unit
from samples import keys_of
from steps import OurStep, Shape, draw

DIM = 64
ROW_BYTES = 8 + 4 * DIM
PIECE = 1 << 16
LMDB_SHARE = 8  # a record for each row is so slow that an eighth of the rows must do
BATCHES = 128  # of steps beside a save; a save is over before they come again
MEGABYTES = Unit("MB/s", 1.0, rate=True)
NANOSECONDS = Unit("ns", 1e-9, rate=False)


def filled(rows: int) -> tuple[EmbTable, Rows]:
    """A table of so many rows, filled as tables grow, and the same rows as tensors."""
    table = EmbTable("bench", DIM, initializer=Constant(0.0), num_threads=1)
    keys = keys_of(np.arange(rows))
    weights = np.empty((rows, DIM), np.float32)
    rng = np.random.default_rng(0)
    for begin in range(0, rows, PIECE):
        piece = weights[begin : begin + PIECE]
        rng.random(out=piece, dtype=np.float32)
        table.assign(keys[begin : begin + PIECE], piece)
    return table, {"keys": torch.from_numpy(keys), "weights": torch.from_numpy(weights)}


def bytes_below(path: Path) -> int:
    """Lengths of all files."""
    return sum(one.stat().st_size for one in path.rglob("*") if one.is_file())


@pytest.fixture
def folder() -> Iterator[Path]:
    """An empty folder, removed at the end."""
    place = Path(os.environ.get("BENCH_FOLDER", Path(__file__).parents[1] / "build" / "bench" / "checkpoint"))
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    yield place
    shutil.rmtree(place)


def remove(path: Path) -> None:
    """What a save has written; what the system has yet to do for it is not charged to the next one."""
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    os.sync()


def test_full_save(race: Race, folder: Path) -> None:
    total = int(float(os.environ.get("BENCH_CHECKPOINT_BYTES", "4e9")))
    rows = total // ROW_BYTES
    table, tensors = filled(rows)
    number = 0

    def fresh(kind: str) -> Path:
        nonlocal number
        number += 1
        return folder / f"{kind}-{number}"

    def save(_i: int) -> Path:
        path = fresh("embcache")
        table.save(path)
        return path

    def enough(expected: Path, found: Path) -> None:
        assert (
            bytes_below(expected)
            >= rows * ROW_BYTES
            <= (found.stat().st_size if found.is_file() else bytes_below(found))
        )

    def peer(name: str) -> Contender:
        def call(_i: int) -> Path:
            path = fresh(name)
            PEERS[name][0](path, tensors)
            return path

        return Contender(name, call, same=enough, after=remove)

    def per_row(_i: int) -> Path:
        path = fresh("lmdb")
        record_per_row(path, tensors, rows // LMDB_SHARE)
        return path

    first = save(0)
    written = bytes_below(first)
    remove(first)
    why = safetensors_or_why()
    peers: list[Contender | Absent] = [
        Contender("plain write + fsync", lambda _i: plain_write(fresh("plain"), tensors, written), after=remove),
        *(Absent(name, why) if why and name == "safetensors" else peer(name) for name in PEERS),
        Contender("py-lmdb, a record a row", per_row, after=remove, share=1 / LMDB_SHARE),
    ]
    race(
        "checkpoint",
        f"full save of {total / 1e9:g} GB",
        Contender("embcache", save, after=remove),
        peers,
        work=rows * ROW_BYTES / 1e6,
        unit=MEGABYTES,
        rounds=3,
    )
    table.close()


class Saved:
    """A table that was saved, and the same rows as peers keep them."""

    def __init__(self, folder: Path) -> None:
        self.rows = int(float(os.environ.get("BENCH_RESTORE_ROWS", "4e6")))
        self.folder, self.path = folder, folder / "full"
        self.table, self.tensors = filled(self.rows)
        self.table.save(self.path)
        self.bytes = self.rows * ROW_BYTES


@pytest.fixture
def saved(folder: Path) -> Iterator[Saved]:
    """See `Saved`."""
    one = Saved(folder)
    yield one
    one.table.close()
    del one
    gc.collect()


@pytest.mark.parametrize("threads", [1, 2])
def test_restore(race: Race, saved: Saved, threads: int) -> None:
    """Warm: the files are in the page cache. Ours reads, checks every digest, and builds the table; peers read into new tensors,
    in one thread."""

    def restore(_i: int) -> EmbTable:
        table = EmbTable("bench", DIM, initializer=Constant(0.0), num_threads=threads)
        table.restore(saved.path)
        return table

    def same(ours: EmbTable, theirs: Rows) -> None:
        some = slice(None, None, max(saved.rows // 100_000, 1))
        assert np.array_equal(ours.lookup(theirs["keys"][some].numpy()), theirs["weights"][some].numpy())

    def ready() -> None:
        """See `bench_insert.ready_memory`: memory that the host backs."""
        fresh_memset(min(3 * saved.bytes, available_bytes() // 2))

    def peer(name: str) -> Contender:
        path = saved.folder / name
        PEERS[name][0](path, saved.tensors)
        return Contender(name, lambda _i: PEERS[name][1](path, saved.tensors), same=same, before=ready)

    why = safetensors_or_why()
    peers = [Absent(name, why) if why and name == "safetensors" else peer(name) for name in PEERS]
    race(
        "checkpoint",
        f"warm restore of {saved.rows / 1e6:g} M x {DIM}",
        Contender("embcache", restore, before=ready, after=lambda table: table.close()),
        peers,
        threads=threads,
        work=saved.rows,
        unit=MILLION_ROWS,
        rounds=5,
    )


def test_verify(race: Race, saved: Saved) -> None:
    buffer = bytearray(4 << 20)

    def read(_i: int) -> int:
        total = 0
        for one in saved.path.rglob("segment-*"):
            with open(one, "rb", buffering=0) as file:
                while got := file.readinto(buffer):
                    total += got
        return total

    def check(_i: int) -> list[Any]:
        findings = verify(saved.path)
        assert findings == []
        return findings

    race(
        "checkpoint",
        f"verify of {saved.rows / 1e6:g} M x {DIM}, warm",
        Contender("embcache", check),
        [Contender("limit: read into one buffer", read)],
        work=saved.bytes / 1e6,
        unit=MEGABYTES,
        rounds=5,
    )


def written_by_us() -> int:
    """Bytes that this process has given to `write` and its like, LMDB's included."""
    lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(lines["wchar"])


class Delta:
    """Random rows change and are saved as a delta, each on a full generation of its own: deltas on deltas would give way to a full one."""

    def __init__(self, saved: Saved, share: float) -> None:
        self.saved, self.dirty = saved, int(share * saved.rows)
        self.bytes = self.dirty * ROW_BYTES
        self.case = f"delta of {saved.rows / 1e6:g} M x {DIM}, {share:.1%} dirty"
        self._rng = np.random.default_rng(1)

    def save(self) -> tuple[float, int]:
        """Seconds of one save, and the bytes that went to `write`."""
        self.saved.table.save(self.saved.path, keep=1)
        some = np.sort(self._rng.choice(self.saved.rows, self.dirty, replace=False))
        keys, weights = (self.saved.tensors[name].numpy() for name in ("keys", "weights"))
        self.saved.table.assign(keys[some], weights[some])
        os.sync()
        before, began = written_by_us(), time.perf_counter()
        self.saved.table.save(self.saved.path, delta=True, keep=1)
        found = time.perf_counter() - began, written_by_us() - before
        assert [one.kind for one in generations(self.saved.path)] == ["full", "delta"]
        return found


SHARES = pytest.mark.parametrize("share", [0.001, 0.01, 0.1, 0.5])


@SHARES
def test_delta(race: Race, saved: Saved, share: float) -> None:
    """The time is that of `save`, its pruning included."""
    delta = Delta(saved, share)

    def plain(_i: int) -> float:
        os.sync()
        began = time.perf_counter()
        path = plain_write(saved.folder / "plain", saved.tensors, delta.bytes)
        seconds = time.perf_counter() - began
        path.unlink()
        return seconds

    race(
        "checkpoint, deltas",
        delta.case,
        Contender("embcache", lambda _i: delta.save()[0], seconds_of=lambda seconds: seconds),
        [Contender("plain write + fsync", plain, seconds_of=lambda seconds: seconds)],
        work=delta.dirty,
        unit=MILLION_ROWS,
        rounds=5,
    )


@pytest.mark.parametrize("ours", [0.01, 0.5])
def test_delta_is_proportional(race: Race, saved: Saved, ours: float) -> None:
    """What a changed row costs at one share of changed rows, against what it costs at others: the same, were it proportional."""
    mine = Delta(saved, ours)

    def other(share: float) -> Contender:
        delta = Delta(saved, share)
        return Contender(
            f"{share:.0%} dirty",
            lambda _i: delta.save()[0] * mine.dirty / delta.dirty,
            seconds_of=lambda seconds: seconds,
        )

    race(
        "checkpoint, deltas in proportion",
        f"{mine.case}: time a changed row",
        Contender("embcache", lambda _i: mine.save()[0], seconds_of=lambda seconds: seconds),
        [other(share) for share in (0.01, 0.1, 0.5) if share != ours],
        work=mine.dirty,
        unit=NANOSECONDS,
        rounds=3,
    )


@SHARES
def test_bytes_of_a_delta(race: Race, saved: Saved, share: float) -> None:
    delta = Delta(saved, share)
    ours = Contender("embcache", lambda _i: delta.save()[1], seconds_of=lambda count: count / 1e6)
    alone = Contender("the changed rows alone", lambda _i: delta.bytes, seconds_of=lambda count: count / 1e6)
    race("checkpoint, bytes", f"{delta.case}: bytes written", ours, [alone], work=1, unit=BYTES, rounds=3)


@pytest.mark.parametrize("readers", [2, 4, 8])
def test_readers_of_a_share(race: Race, saved: Saved, readers: int) -> None:
    """What N readers of one writer's generation read in all, and what they would without chunks that they share."""

    def read(_i: int) -> tuple[int, int]:
        total = beyond = 0
        for rank in range(readers):
            with Reader(saved.path, rank=rank, world=readers, check="catalogue") as reader:
                for _ in reader.rows("bench"):
                    pass
                total, beyond = total + reader.stats["bytes"], beyond + reader.stats["bytes_beyond"]
        return total, total - beyond

    found = read(0)
    ours = Contender("embcache", lambda _i: found[0], seconds_of=lambda count: count / 1e6)
    own = Contender("their own rows alone", lambda _i: found[1], seconds_of=lambda count: count / 1e6)
    case = f"{readers} readers of {saved.rows / 1e6:g} M x {DIM} by one writer: bytes read"
    race("checkpoint, bytes", case, ours, [own], work=1, unit=BYTES, rounds=1)


class Steps:
    """Bags of 20 of a table of 1 M rows, all of them resident, and saves of it."""

    def __init__(self, path: Path) -> None:
        self.shape, self.path = Shape(1, 1_000_000, DIM), path
        self._step = OurStep(self.shape, "RowWiseAdagrad")
        # Not few in turn: a step beside a save pays for rows that no step of that save has used yet.
        self._batches = draw(self.shape, "zipf", 20, count=BATCHES)
        self._number = 0
        self._step.collection.save(path)

    def time(self) -> float:
        """Seconds of one step."""
        self._number += 1
        began = time.perf_counter()
        self._step.step(self._batches[self._number % len(self._batches)])
        return time.perf_counter() - began

    def save(self, kind: str) -> tuple[float, float]:
        """Save all rows, or those of the last 200 steps, in the background: seconds of the call, and of the median step beside it."""
        for _ in range(200 if kind == "delta" else 0):
            self.time()
        began = time.perf_counter()
        saving = self._step.collection.save(self.path, delta=kind == "delta", background=True, keep=1)
        call = time.perf_counter() - began
        times = [self.time()]
        while not saving.done():
            times.append(self.time())
        saving.result()
        return call, statistics.median(times)

    def alone(self, _i: int) -> float:
        """The median step without a save."""
        return statistics.median(self.time() for _ in range(60))


@pytest.mark.parametrize("kind", ["full", "delta"])
@pytest.mark.parametrize("which", ["cut", "step"])
def test_training_beside_a_background_save(race: Race, folder: Path, kind: str, which: str) -> None:
    """How long `save` keeps the one who calls it, and the median step until it is done, against a step without a save."""
    steps = Steps(folder / "saved")
    case = f"cut of a background {kind} save of" if which == "cut" else f"step during a background {kind} save of"
    race(
        "checkpoint, steps",
        f"{case} {steps.shape}, bags of 20",
        Contender("embcache", lambda _i: steps.save(kind)[which == "step"], seconds_of=lambda seconds: seconds),
        [Contender("a step without a save", steps.alone, seconds_of=lambda seconds: seconds)],
        work=1,
        unit=MILLISECONDS,
        rounds=5,
    )
