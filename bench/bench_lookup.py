"""lookup(out=): keys -> rows, against gathers that are *told* where the rows lie and against find + memcpy."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

import embcache as ec
from peers.limits import HugeMemory, rows_copy
from peers.maps import CppMap, cpp_map
from race import MILLION_ROWS, QUERY_SETS, Absent, Contender, Race
from samples import Sampler, keys_of

QUERIES = 1 << 18
PIECE = 1 << 16
MOST_FLOATS = 640_000_000  # of a table, which exists three times here
BOOST = "boost::unordered_flat_map"


def aligned(rows: int, dim: int) -> np.ndarray:
    """An output that starts at a cache line, written once."""
    memory = np.ones(rows * dim + 16, dtype=np.float32)
    start = -memory.ctypes.data % 64 // 4
    return memory[start : start + rows * dim].reshape(rows, dim)


class World:
    """Rows of one width: in our table, in a torch tensor (ordinary pages) and in huge pages, with the same values."""

    def __init__(self, rows: int, dim: int, threads: int) -> None:
        self.rows, self.dim, self.threads = rows, dim, threads
        keys = keys_of(np.arange(rows))
        self.table = ec.EmbTable("lookup", dim, num_threads=threads)
        self.single = ec.EmbTable("lookup", dim, num_threads=1) if threads > 1 else None  # what more threads gain
        self.huge = HugeMemory(rows, dim)
        self.plain = np.empty((rows, dim), dtype=np.float32)
        for start in range(0, rows, PIECE):
            self.plain[start : start + PIECE] = self.table.lookup(keys[start : start + PIECE])
            if self.single is not None:
                self.single.insert(keys[start : start + PIECE])
        self.huge.array[:] = self.plain
        self.tensor = torch.from_numpy(self.plain)
        sampler = Sampler(rows)
        self.ordinals = {kind: [sampler.draw(kind, QUERIES) for _ in range(QUERY_SETS)] for kind in ("uniform", "zipf")}
        self.queries = {kind: [keys_of(drawn) for drawn in sets] for kind, sets in self.ordinals.items()}
        self.map = cpp_map(BOOST)
        if isinstance(self.map, CppMap):
            self.map.insert(keys)
        self.out, self.theirs = aligned(QUERIES, dim), aligned(QUERIES, dim)

    def close(self) -> None:
        self.table.close()
        self.huge.close()
        if self.single is not None:
            self.single.close()


@pytest.fixture(scope="module", params=[(32, 1), (64, 1), (64, 2), (128, 1)], ids=lambda p: f"dim{p[0]}-threads{p[1]}")
def world(request: pytest.FixtureRequest, rows: int) -> Iterator[World]:
    dim, threads = request.param
    world = World(min(rows, MOST_FLOATS // dim), dim, threads)
    yield world
    world.close()


def same(ours: np.ndarray, theirs: np.ndarray | torch.Tensor) -> None:
    """The same rows, to the bit."""
    assert np.array_equal(ours, np.asarray(theirs))


@pytest.mark.parametrize("kind", ["uniform", "zipf"])
def test_lookup(race: Race, world: World, kind: str) -> None:
    threads, out, theirs = world.threads, world.out, world.theirs
    torch.set_num_threads(threads)
    queries, ordinals = world.queries[kind], world.ordinals[kind]
    indices = [torch.from_numpy(drawn) for drawn in ordinals]
    result = torch.from_numpy(theirs)
    peers: list[Contender | Absent] = [
        Contender(
            "index_select(out=), known indices",
            lambda i: torch.index_select(world.tensor, 0, indices[i], out=result),
            same,
        ),
        Contender(
            "F.embedding, known indices", lambda i: torch.nn.functional.embedding(indices[i], world.tensor), same
        ),
    ]
    if isinstance(world.map, str):
        peers.append(Absent(f"{BOOST} + memcpy", world.map))
    else:
        cpp = world.map
        peers.append(
            Contender(f"{BOOST} + memcpy", lambda i: cpp.lookup(queries[i], world.plain, theirs, threads), same)
        )
    peers.append(
        Contender(
            "limit: copy from known addresses",
            lambda i: rows_copy(world.huge.array, ordinals[i], theirs, threads),
            same,
        )
    )
    single = world.single
    if single is not None:
        peers.append(Contender("embcache, one thread", lambda i: single.lookup(queries[i], theirs, insert=False), same))
    ours = Contender("embcache", lambda i: world.table.lookup(queries[i], out, insert=False))
    case = f"lookup(out=), {world.rows / 1e6:g} M x {world.dim}, {kind}"
    race("lookup", case, ours, [*peers], threads=threads, work=QUERIES, unit=MILLION_ROWS)


class NarrowWorld:
    """Rows of a 2-byte type: in our table and in a torch tensor of that type, with the same values."""

    def __init__(self, rows: int, dim: int, dtype: str) -> None:
        self.rows, self.dim = rows, dim
        keys = keys_of(np.arange(rows))
        self.table = ec.EmbTable("lookup", dim, dtype=dtype, num_threads=1)
        self.tensor = torch.empty((rows, dim), dtype=getattr(torch, dtype))
        for start in range(0, rows, PIECE):
            piece = self.table.lookup(keys[start : start + PIECE])
            self.tensor[start : start + PIECE] = torch.from_numpy(piece)
        sampler = Sampler(rows)
        self.indices = [torch.from_numpy(sampler.draw("uniform", QUERIES)) for _ in range(QUERY_SETS)]
        self.queries = [keys_of(drawn.numpy()) for drawn in self.indices]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_narrow_lookup(race: Race, rows: int, dtype: str) -> None:
    """What NumPy reads: float16 as it is stored, bfloat16 widened to float32. Torch is told where the rows lie."""
    dim = 64
    world = NarrowWorld(min(rows, MOST_FLOATS // dim), dim, dtype)
    out = np.ones((QUERIES, dim), dtype=np.float16) if dtype == "float16" else aligned(QUERIES, dim)
    theirs = torch.ones((QUERIES, dim), dtype=world.tensor.dtype)
    widened = torch.ones((QUERIES, dim), dtype=torch.float32)

    def same_numbers(ours: np.ndarray, other: torch.Tensor) -> None:
        assert np.array_equal(ours.astype(np.float32), other.float().numpy())

    def selected(i: int) -> torch.Tensor:
        return torch.index_select(world.tensor, 0, world.indices[i], out=theirs)

    peers: list[Contender | Absent] = [
        Contender(f"index_select(out=) of {dtype}, known indices", selected, same_numbers)
    ]
    if dtype == "bfloat16":
        peers.append(
            Contender("index_select(out=), then copy to float32", lambda i: widened.copy_(selected(i)), same_numbers)
        )
    ours = Contender("embcache", lambda i: world.table.lookup(world.queries[i], out, insert=False))
    case = f"lookup(out=) of {dtype} rows, {world.rows / 1e6:g} M x {dim}, uniform"
    race("lookup", case, ours, peers, work=QUERIES, unit=MILLION_ROWS)
    world.table.close()
