"""Unique keys and inverse through torch and pandas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import torch

from race import Contender

__all__ = ["pandas_factorize", "torch_unique", "unique_peers"]

Pair = tuple[np.ndarray, np.ndarray]


def torch_unique(keys: list[torch.Tensor], threads: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """torch.unique(return_inverse=True) of each tensor, at a number of threads of its own."""
    torch.set_num_threads(threads)
    return [torch.unique(piece, return_inverse=True) for piece in keys]


def pandas_factorize(keys: list[np.ndarray]) -> list[Pair]:
    """pandas.factorize of each array: (inverse, unique)."""
    return [pd.factorize(piece) for piece in keys]


def same_uniques(ours: list[Pair], theirs: list[Any]) -> None:
    """Per table: the same keys, and an inverse that gives the batch back on both sides (torch's uniques are sorted)."""
    for (unique, inverse), (their_unique, their_inverse) in zip(ours, theirs, strict=True):
        assert np.array_equal(np.sort(unique), np.sort(np.asarray(their_unique)))
        assert np.array_equal(unique[inverse], np.asarray(their_unique)[np.asarray(their_inverse)])


def unique_peers(
    pieces: list[list[np.ndarray]], answer: Callable[[Any], list[Pair]], threads: tuple[int, ...] = (1,)
) -> list[Contender]:
    """Contenders for query sets of per-table key arrays.

    `answer` turns ours into (unique, inverse) of each table; torch runs at each of `threads`.
    """
    tensors = [[torch.from_numpy(piece) for piece in query_set] for query_set in pieces]
    calls = f"{len(pieces[0])} x " if len(pieces[0]) > 1 else ""

    def check(ours: Any, theirs: list[Any]) -> None:
        same_uniques(answer(ours), theirs)

    def check_factorize(ours: Any, theirs: list[Pair]) -> None:
        same_uniques(answer(ours), [(unique, inverse) for inverse, unique in theirs])

    torches = [
        Contender(
            f"{calls}torch.unique(return_inverse), {count} thread{'s' if count > 1 else ''}",
            lambda i, count=count: torch_unique(tensors[i], count),
            check,
            threads=count,
        )
        for count in threads
    ]
    return [*torches, Contender(f"{calls}pandas.factorize", lambda i: pandas_factorize(pieces[i]), check_factorize)]
