"""insert: new keys into an empty table that was told nothing, rows initialized; and how long one call can take."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import pytest

import embcache as ec
from machine import available_bytes
from peers.limits import fresh_memset
from peers.maps import MAPS, CppMap, cpp_map
from peers.tables import KhashTable
from race import MILLION_KEYS, MILLISECONDS, Absent, Contender, Race
from samples import Sampler, keys_of

DIM, NARROW = 64, 16
CALL = 4096
NO_ROWS = "keys only, no rows"


def ready_memory(size: int) -> Callable[[], None]:
    """Touches what free memory the machine will hand out next.

    A virtual machine may give memory that has been free for some seconds back to its host; the first touch of a page
    then waits for the host (3 ms a huge page were measured, against 0.2 ms), which would meet whoever runs longest.
    """
    return lambda: fresh_memset(min(4 * size, available_bytes() // 2))


def new_table(dim: int = DIM) -> ec.EmbTable:
    """An empty table; one thread."""
    return ec.EmbTable("insert", dim, num_threads=1)


def filled(keys: np.ndarray, call: int, dim: int = DIM) -> ec.EmbTable:
    """A table that got `keys` in calls of `call` keys."""
    table = new_table(dim)
    for start in range(0, len(keys), call):
        table.insert(keys[start : start + call])
    return table


def longest_call(table: ec.EmbTable | CppMap, keys: np.ndarray) -> tuple[float, int]:
    """Seconds of the slowest of the calls that insert `keys`, and how many keys there were then; closes the table."""
    longest = 0.0
    for start in range(0, len(keys), CALL):
        piece = keys[start : start + CALL]
        began = time.perf_counter()
        table.insert(piece)
        longest = max(longest, time.perf_counter() - began)
    size = len(table)
    table.close()
    return longest, size


def map_with(name: str, keys: np.ndarray) -> CppMap:
    """A map of a C++ library, filled in one call without a hint."""
    cpp = CppMap(name)
    cpp.insert(keys)
    return cpp


def same_size(keys: np.ndarray) -> Callable[[ec.EmbTable, CppMap | KhashTable], None]:
    """A check that the peer holds exactly our keys."""

    def check(_ours: ec.EmbTable, theirs: CppMap | KhashTable) -> None:
        found = theirs.find(keys, np.empty_like(keys)) if isinstance(theirs, CppMap) else theirs.find(keys)
        assert np.array_equal(found, np.arange(len(keys)))

    return check


@pytest.mark.parametrize("dim", [DIM, NARROW])
@pytest.mark.parametrize("call", [None, CALL], ids=["one call", f"calls of {CALL}"])
def test_insert_from_empty(race: Race, rows: int, call: int | None, dim: int) -> None:
    keys = keys_of(np.arange(rows))
    table = filled(keys, len(keys), dim)
    stats = table.stats()
    table.close()
    held = stats["bytes"]
    ready = ready_memory(held)
    peers: list[Contender | Absent] = [
        Contender(f"memset of {held / 2**20:.0f} MiB of fresh huge pages", lambda _i: fresh_memset(held), before=ready)
    ]
    if call is None and dim == NARROW:
        for name in MAPS:
            cpp = cpp_map(name)
            label = f"{name} ({NO_ROWS})"
            if isinstance(cpp, str):
                peers.append(Absent(label, cpp))
            else:
                peers.append(
                    Contender(label, lambda _i, name=name: map_with(name, keys), same_size(keys), ready, CppMap.close)
                )
        peers.append(
            Contender(
                f"pandas Int64HashTable ({NO_ROWS}, told the size)", lambda _i: KhashTable(keys), same_size(keys), ready
            )
        )
    ours = Contender("embcache", lambda _i: filled(keys, call or len(keys), dim), before=ready, after=ec.EmbTable.close)
    case = f"insert {rows / 1e6:g} M new keys x {dim}, {'one call' if call is None else f'calls of {CALL}'}"
    race("insert", case, ours, peers, work=rows, unit=MILLION_KEYS, rounds=5)


def test_longest_call(race: Race, rows: int) -> None:
    keys = keys_of(np.arange(rows))

    def seconds(answer: tuple[float, int]) -> float:
        return answer[0]

    def same_count(ours: tuple[float, int], theirs: tuple[float, int]) -> None:
        assert ours[1] == theirs[1] == rows

    ready = ready_memory(rows * DIM * 5)
    peers: list[Contender | Absent] = []
    for name in MAPS:
        cpp = cpp_map(name)
        if isinstance(cpp, str):
            peers.append(Absent(f"{name} ({NO_ROWS})", cpp))
        else:
            call = lambda _i, name=name: longest_call(CppMap(name), keys)  # noqa: E731
            peers.append(Contender(f"{name} ({NO_ROWS})", call, same_count, ready, seconds_of=seconds))
    ours = Contender("embcache", lambda _i: longest_call(new_table(), keys), before=ready, seconds_of=seconds)
    race(
        "longest call",
        f"longest of the {CALL}-key calls, {rows / 1e6:g} M keys x {DIM}",
        ours,
        peers,
        work=1,
        unit=MILLISECONDS,
        rounds=5,
    )


def test_find_after_growth(race: Race, rows: int) -> None:
    keys = keys_of(np.arange(rows))
    sampler = Sampler(rows)
    queries = [keys_of(sampler.uniform(1 << 20)) for _ in range(4)]
    grown, sized = filled(keys, CALL), filled(keys, len(keys))

    def same(ours: np.ndarray, theirs: np.ndarray) -> None:
        assert (ours >= 0).all() and (theirs >= 0).all()

    ours = Contender("embcache", lambda i: grown.find(queries[i]))
    peer = Contender("embcache, filled in one call", lambda i: sized.find(queries[i]), same)
    race(
        "growth",
        f"find after growth in calls of {CALL}, {rows / 1e6:g} M keys",
        ours,
        [peer],
        work=1 << 20,
        unit=MILLION_KEYS,
    )
    grown.close()
    sized.close()
