"""R14, R15: what many generations leave behind: files of bounded size, and nothing in the process."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from children import folder_in_memory

from embcache.checkpoint import Reader, generations, verify
from embcache.table import EmbTable

SOAK = int(os.environ.get("EMBCACHE_SOAK", "1"))
ROWS, DIM = 20_000, 16


@pytest.fixture
def place() -> Iterator[Path]:
    with folder_in_memory() as folder:
        yield folder


def bytes_in(path: Path) -> int:
    """Disk space of all files below."""
    return sum(one.stat().st_blocks * 512 for one in path.rglob("*") if one.is_file())


@pytest.mark.parametrize(("share", "delta"), [(0.5, False), (0.5, True), (0.05, True)])
def test_r15_disk_space_is_bounded(place: Path, share: float, delta: bool) -> None:
    """Two generations are kept while rows are rewritten, beside a reader that was opened once and never closed."""
    rng = np.random.default_rng(0)
    keys = np.arange(ROWS)
    table = EmbTable("t", DIM)
    table.insert(keys)
    table.save(place, keep=2)
    stuck = Reader(place)
    live = ROWS * table.description.row_bytes
    most, catalogues, chain = 0, [], 0
    for _ in range(200 * SOAK):
        some = rng.choice(keys, int(share * ROWS), replace=False)
        table.assign(some, rng.standard_normal((len(some), DIM)).astype(np.float32))
        table.save(place, delta=delta, keep=2)
        most = max(most, bytes_in(place))
        catalogues.append((place / "rank-0000" / "catalogue.mdb").stat().st_size)
        chain = max(chain, len(generations(place)))
    # A full one and deltas that come to as much, and the next full one; that is 2.5 times what lives and one generation.
    assert most <= 3.5 * live
    assert max(catalogues) <= 1 << 20 and max(catalogues[100:]) <= max(catalogues[:100])
    assert chain >= (2 if not delta else int(1 / share))
    stuck.close()
    assert verify(place) == []


def test_r14_saves_and_restores_leave_nothing_in_the_process(place: Path) -> None:
    table = EmbTable("t", 4)
    table.insert(np.arange(500))

    def cycle(step: int) -> None:
        table.assign(np.arange(5), np.full((5, 4), step, np.float32))
        table.save(place, delta=step % 3 != 0, keep=1)
        with EmbTable("t", 4) as other:
            other.restore(place)
        with Reader(place) as reader:
            assert next(reader.rows("t")) is not None

    def held() -> tuple[int, int, int]:
        with open("/proc/self/maps") as maps:
            return len(os.listdir("/proc/self/fd")), sum(1 for _ in maps), threading.active_count()

    for step in range(20):
        cycle(step)
    before = held()
    for step in range(20, 20 + 400 * SOAK):
        cycle(step)
    after = held()
    assert after[0] == before[0] and after[2] == before[2]
    assert after[1] <= before[1] + 8  # the allocator's own
