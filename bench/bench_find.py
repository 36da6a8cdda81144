"""find: keys -> row indexes, against hash maps of C++ and Python and against one prefetched cache line a key."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

import embcache as ec
from machine import available_bytes
from peers.limits import HugeMemory, lines_read
from peers.maps import MAPS, CppMap, cpp_map
from peers.tables import DictTable, IndexTable, KhashTable, SortedTable
from race import MILLION_KEYS, QUERY_SETS, Absent, Contender, Race
from samples import Sampler, keys_of

QUERIES = 1 << 20
CALL = 1 << 16  # keys of an insert
SLOW_SHARE = 1 / 16  # the part of the queries that dict and binary search get
KINDS = ("uniform", "zipf", "missing")
MOST_OBJECTS = 2_000_000  # keys from which the peers made of Python objects, and sorting, are left out
MOST_PEERS = 20_000_000  # keys from which only boost takes part
BYTES_A_KEY = 190  # ours twice, boost twice, the lines, and arrays of the bench
LINE_KEYS = 3.5  # keys a cache line of the limit's memory stands for: five places, 70 % full


class World:
    """One set of keys in our table and in every peer; queries in sets that are used in turn."""

    def __init__(self, rows: int) -> None:
        self.rows, self.keys = rows, keys_of(np.arange(rows))
        sampler = Sampler(rows)
        self.ordinals = {kind: [sampler.draw(kind, QUERIES) for _ in range(QUERY_SETS)] for kind in KINDS}
        self.queries = {kind: [keys_of(drawn) for drawn in sets] for kind, sets in self.ordinals.items()}
        self.ours = {threads: ec.EmbTable("find", 1, num_threads=threads) for threads in (1, 2)}
        for table in self.ours.values():  # in calls, as tables grow: one call would leave one large partition
            for start in range(0, rows, CALL):
                table.insert(self.keys[start : start + CALL])
        # Our row indexes are in order of insertion a partition at a time; the peers number the keys as they come.
        self.row_of_ordinal = self.ours[1].find(self.keys)
        names = [name for name in MAPS if rows <= MOST_PEERS or name.startswith("boost")]
        self.maps = {name: cpp_map(name) for name in names}
        self.maps |= {f"{name} (huge pages)": cpp_map(name, huge_pages=True) for name in names}
        for cpp in self.maps.values():
            if isinstance(cpp, CppMap):
                cpp.insert(self.keys)
        self.tables = [KhashTable(self.keys), IndexTable(self.keys)] if rows <= MOST_PEERS else []
        self.slow = [SortedTable(self.keys), DictTable(self.keys)] if rows <= MOST_OBJECTS else []
        self.lines = HugeMemory(int(rows / LINE_KEYS) + 1, 16)
        self.out, self.our_out = np.empty(QUERIES, dtype=np.int64), np.empty(QUERIES, dtype=np.int64)

    def close(self) -> None:
        for table in self.ours.values():
            table.close()
        self.maps.clear()
        self.lines.close()

    def same(self, ours: np.ndarray, theirs: np.ndarray | list[int]) -> None:
        """Both name the same keys, each by its own numbers."""
        theirs = np.asarray(theirs)
        ours = ours[: len(theirs)]
        assert np.array_equal(ours >= 0, theirs >= 0)
        assert np.array_equal(self.row_of_ordinal[theirs[theirs >= 0]], ours[ours >= 0])


@pytest.fixture(scope="module", params=[1, 10], ids=["", "ten times"])
def world(request: pytest.FixtureRequest, rows: int) -> Iterator[World]:
    """The table, and one of ten times its keys where memory suffices."""
    size = rows * request.param
    if request.param > 1 and size * BYTES_A_KEY > available_bytes():
        pytest.skip(
            f"{size / 1e6:g} M keys in ours and two peers need {size * BYTES_A_KEY / 2**30:.0f} GiB of free memory"
        )
    world = World(size)
    yield world
    world.close()


def _limit(world: World, kind: str, threads: int) -> Contender:
    """One cache line a key. A missing key has a home line as well, anywhere."""
    places = [(drawn % world.rows / LINE_KEYS).astype(np.int64) for drawn in world.ordinals[kind]]
    spread = np.random.default_rng(3).permutation(len(world.lines.array))
    at = [spread[place] for place in places]
    return Contender("limit: one line a key", lambda i: lines_read(world.lines.array, at[i], world.out, threads))


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_find(race: Race, world: World, kind: str, threads: int) -> None:
    queries = world.queries[kind]
    ours = Contender("embcache", lambda i: world.ours[threads].find(queries[i], out=world.our_out))
    peers: list[Contender | Absent] = []
    for name, cpp in world.maps.items():
        if isinstance(cpp, str):
            peers.append(Absent(name, cpp))
        elif threads == 1 or cpp.name.startswith("boost"):
            peers.append(Contender(name, lambda i, cpp=cpp: cpp.find(queries[i], world.out, threads), world.same))
    if threads == 1:
        peers += [
            Contender(table.name, lambda i, table=table: table.find(queries[i]), world.same) for table in world.tables
        ]
    if threads == 1 and world.slow:
        few = [keys[: int(QUERIES * SLOW_SHARE)] for keys in queries]
        searched, get = world.slow
        objects = [keys.tolist() for keys in few]
        peers.append(Contender(searched.name, lambda i: searched.find(few[i]), world.same, share=SLOW_SHARE))
        peers.append(Contender(get.name, lambda i: get.find(objects[i]), world.same, share=SLOW_SHARE))
    peers.append(_limit(world, kind, threads))
    case = f"find, {world.rows / 1e6:g} M keys, {'misses' if kind == 'missing' else f'hits {kind}'}"
    race("find", case, ours, peers, threads=threads, work=QUERIES, unit=MILLION_KEYS)
