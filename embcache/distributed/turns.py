"""Who owns a key, and batches that all ranks take together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import numpy as np

from .._core.route import owners_of
from ..errors import ConfigError, ShapeError, shown, whole_number
from .ranks import Ranks

__all__ = ["owners", "together"]

T = TypeVar("T")

GOES_ON, ENDED = 0, 1


def owners(keys: Any, world: int) -> np.ndarray:
    """The rank that owns each key.

    Parameters
    ----------
    keys : int64 array or tensor (n,)
    world : int
        Number of ranks.

    Returns
    -------
    int64 (n,)

    Examples
    --------
    >>> import embcache as ec
    >>> ec.distributed.owners([0, 1, 2, 3], 2).tolist()
    [1, 0, 0, 0]
    """
    ranks = whole_number(world)
    if ranks is None or not 1 <= ranks <= 4096:
        raise ConfigError(f"world = {shown(world)}; give a number of ranks from 1 to 4096")
    array = np.asarray(keys)
    if array.dtype.kind not in "iu" or array.ndim != 1:
        raise ShapeError(f"keys: {array.dtype} of shape {array.shape}; give a one-dimensional array of integers")
    return owners_of(np.ascontiguousarray(array, dtype=np.int64), ranks)


def together(batches: Iterable[T], process_group: Any = None) -> Iterator[T]:
    """Yield this rank's batches while every rank has one: all stop together, after as many batches as the rank with the fewest has.

    A rank that has a batch left then has pulled it, and it is lost. Collective: every rank goes through its own, step by step.

    Parameters
    ----------
    batches : iterable
    process_group : ProcessGroup, optional
        Default: all ranks.

    Raises
    ------
    RankError
        Another rank's iterator has raised, or the rank is gone.
    """
    ranks = Ranks.of(process_group)
    iterator = iter(batches)
    while True:
        state, batch = GOES_ON, None
        try:
            batch = next(iterator)
        except StopIteration:
            state = ENDED
        except BaseException as error:
            ranks.fail(error)
            raise
        if [ENDED] in ranks.turn("load", state):
            return
        yield batch  # type: ignore[misc]
