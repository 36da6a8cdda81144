"""Unique keys of one table: the whole plan of a batch of hits, and its de-duplication alone, against unique functions."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pandas as pd
import pytest
import torch
from dedup_alone import Dedup
from race import MILLION_KEYS, QUERY_SETS, Contender, Race
from samples import Sampler, keys_of

from embcache._core.swap import Plan, SwapManager
from embcache._core.table import Table

KEYS = 1 << 20
POPULATION = 10_000_000


@pytest.fixture(scope="module")
def queries() -> list[np.ndarray]:
    sampler = Sampler(POPULATION)
    return [keys_of(sampler.zipf(KEYS)) for _ in range(QUERY_SETS)]


def finish(manager: SwapManager) -> Callable[[Plan], None]:
    """What puts a plan back: the batch has trained."""

    def after(plan: Plan) -> None:
        manager.mark_swapped_out(plan)
        manager.mark_swapped_in(plan)
        manager.finish(plan)

    return after


def torch_unique(queries: list[np.ndarray], threads: int) -> Callable[[int], tuple[torch.Tensor, torch.Tensor]]:
    """torch.unique(return_inverse=True) at a number of threads of its own."""
    tensors = [torch.from_numpy(keys) for keys in queries]

    def call(i: int) -> tuple[torch.Tensor, torch.Tensor]:
        torch.set_num_threads(threads)
        return torch.unique(tensors[i], return_inverse=True)

    return call


def peers_of(queries: list[np.ndarray], unique_and_inverse: Callable) -> list[Contender]:
    """torch and pandas; `unique_and_inverse` takes these two arrays out of our answer."""

    def same_as_torch(ours: object, theirs: tuple[torch.Tensor, torch.Tensor]) -> None:
        unique, inverse = unique_and_inverse(ours)
        assert np.array_equal(np.sort(unique), theirs[0].numpy())
        assert np.array_equal(unique[inverse], theirs[0].numpy()[theirs[1].numpy()])

    def same_as_pandas(ours: object, theirs: tuple[np.ndarray, np.ndarray]) -> None:
        unique, inverse = unique_and_inverse(ours)
        assert np.array_equal(unique, theirs[1]) and np.array_equal(inverse, theirs[0])  # both by first occurrence

    return [
        Contender("torch.unique(return_inverse), 1 thread", torch_unique(queries, 1), same_as_torch),
        Contender("torch.unique(return_inverse), 2 threads", torch_unique(queries, 2), same_as_torch),
        Contender("pandas.factorize", lambda i: pd.factorize(queries[i]), same_as_pandas),
    ]


@pytest.mark.parametrize("threads", [1, 2])
def test_plan_of_hits(race: Race, queries: list[np.ndarray], threads: int) -> None:
    distinct = len(np.unique(np.concatenate(queries)))
    with SwapManager([Table("dedup", 1)], [distinct], num_threads=threads) as manager:
        offsets = np.array([0, KEYS])
        after = finish(manager)
        for keys in queries:
            after(manager.plan(keys, offsets))
        ours = Contender("embcache", lambda i: manager.plan(queries[i], offsets), after=after)
        peers = peers_of(queries, lambda plan: (plan.unique_keys, plan.inverse))
        case = "plan of 1 M Zipf keys, all hits (unique, inverse, CSR, slots, LRU)"
        race("plan of hits", case, ours, peers, threads=threads, work=KEYS, unit=MILLION_KEYS)


@pytest.mark.parametrize("csr", [False, True], ids=["inverse", "inverse and CSR"])
@pytest.mark.parametrize("threads", [1, 2])
def test_dedup_alone(race: Race, queries: list[np.ndarray], threads: int, csr: bool) -> None:
    dedup = Dedup(threads)
    peers = peers_of(queries, lambda count: dedup.result(count, KEYS))
    ours = Contender("embcache", lambda i: dedup.run(queries[i], csr=csr))
    case = f"dedup alone of 1 M Zipf keys: unique, inverse{', CSR' if csr else ''}"
    race("dedup", case, ours, peers, threads=threads, work=KEYS, unit=MILLION_KEYS)
    dedup.close()
