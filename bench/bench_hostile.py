"""find of keys chosen to chain, against as many random keys in a table of the same size: crafted keys may cost, not hurt."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

import embcache as ec
from hostile import PATTERNS, keys_of_one_vshard
from race import MILLION_KEYS, QUERY_SETS, Contender, Race
from samples import keys_of

KEYS = 1_000_000
CALL = 1 << 16  # keys of an insert
HOSTILE = {**PATTERNS, "one vshard": keys_of_one_vshard}


class Filled:
    """A table of `keys`, and every key once, in random orders that are used in turn."""

    def __init__(self, keys: np.ndarray) -> None:
        self.table = ec.EmbTable("hostile", 1, num_threads=1)
        for start in range(0, len(keys), CALL):
            self.table.insert(keys[start : start + CALL])
        rng = np.random.default_rng(1)
        self.queries = [rng.permutation(keys) for _ in range(QUERY_SETS)]
        self.out = np.empty(len(keys), dtype=np.int64)

    def find(self, i: int) -> np.ndarray:
        return self.table.find(self.queries[i], out=self.out)


@pytest.fixture(scope="module")
def random_keys() -> Iterator[Filled]:
    filled = Filled(keys_of(np.arange(KEYS)))
    yield filled
    filled.table.close()


def all_found(ours: np.ndarray, theirs: np.ndarray) -> None:
    """The tables hold different keys; each has all of its own."""
    assert (ours >= 0).all() and (theirs >= 0).all()


@pytest.mark.parametrize("pattern", HOSTILE)
def test_find_of_hostile_keys(race: Race, random_keys: Filled, pattern: str) -> None:
    hostile = Filled(HOSTILE[pattern](KEYS))
    case = f"find, {KEYS / 1e6:g} M hostile keys, {pattern}"
    peer = Contender("embcache, random keys", random_keys.find, all_found)
    race("hostile", case, Contender("embcache", hostile.find), [peer], work=KEYS, unit=MILLION_KEYS)
    hostile.table.close()
