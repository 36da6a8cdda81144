"""Feed: where a pipeline leaves the plans of a batch for the forwards that will ask for them."""

from __future__ import annotations

from collections import deque
from typing import Any

from .errors import PlanError
from .swapinfo import SwapInfo
from .unchanged import Unchanged

__all__ = ["Feed", "changed"]


class Feed:
    """The plans of one collection for the batch that is being trained, by the features object of each.

    A collection that has a feed plans nothing itself. Used by the thread that trains, alone.
    """

    __slots__ = ("_plans",)

    def __init__(self) -> None:
        # Objects are held, so that none gets the number of another.
        self._plans: dict[int, tuple[Any, Unchanged, deque[SwapInfo]]] = {}

    def offer(self, features: Any, unchanged: Unchanged, info: SwapInfo) -> None:
        """A forward of `features` shall use `info`; several of one object are used in the order of the offers.

        `unchanged` says whether what is in `features` is what was planned.
        """
        self._plans.setdefault(id(features), (features, unchanged, deque()))[2].append(info)

    def take(self, features: Any) -> SwapInfo:
        """The next plan of `features`.

        Raises
        ------
        PlanError
            The pipeline has not planned that object, or not as many forwards of it, or not what is in it now.
        """
        entry = self._plans.get(id(features))
        if entry is not None and entry[2]:
            if not entry[1]:
                raise changed(features)
            return entry[2].popleft()
        if entry is not None:
            what = "more forwards of one features object than the pipeline has planned"
            how = "TrainPipeline(features=lambda batch: [batch.features, batch.features]) plans two"
        else:
            what = f"a {type(features).__name__} that the pipeline has not planned"
            how = (
                "pass the object that lies in the batch, or say with TrainPipeline(features=...) which objects of a batch go into forward; "
                "after pipe.close() a collection plans for itself again"
            )
        raise PlanError(f"training forward of {what}; {how}")

    @property
    def left(self) -> int:
        """Plans that no forward has asked for."""
        return sum(len(infos) for _, _, infos in self._plans.values())

    def clear(self) -> None:
        """Forget everything."""
        self._plans.clear()


def changed(features: Any) -> PlanError:
    """What to raise where `features` does not hold any more what was planned."""
    return PlanError(
        f"the tensors of a {type(features).__name__} were changed in place after the pipeline had looked at them; an iterator must give "
        "memory of its own to each batch, and what changes ids belongs there, before the pipeline, not into forward"
    )
