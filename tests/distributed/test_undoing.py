"""A batch that one rank has planned and another one has refused, where the way back is barred."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import embcache as ec
from embcache.errors import RankError, RankRefusedError


@pytest.mark.parametrize("error", [ec.HostMemoryError("no memory"), MemoryError("none")])
def test_a_plan_that_cannot_be_undone_ends_the_job_and_pins_nothing(
    monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    """Its rank would be a batch ahead of the others: all must hear of it, as none may go on."""
    ebc = ec.distributed.ShardedEmbeddingBagCollection([ec.TableConfig("item", 4, hbm_rows=2)])

    def batch(*keys: int) -> ec.JaggedFeatures:
        return ec.JaggedFeatures(["item"], torch.tensor(keys), torch.ones(len(keys), dtype=torch.int64))

    def refuse(*given: Any) -> None:
        raise RankRefusedError("rank 1 has refused")

    def fail(*given: Any) -> None:
        raise error

    ebc(batch(1, 2))["item"].sum().backward()
    told: list[BaseException] = []
    monkeypatch.setattr(ebc.ranks, "settle", refuse)
    monkeypatch.setattr(ebc.ranks, "fail", told.append)
    with pytest.raises(RankRefusedError):
        ebc(batch(3, 4))  # which is undone
    assert told == [] and ebc.manager.planner.step == 1
    monkeypatch.setattr(ebc.manager._mover, "back", fail)
    with pytest.raises(RankError, match="could not be undone here") as raised:
        ebc(batch(3, 4))
    assert told == [raised.value] and not isinstance(raised.value, RankRefusedError)
    assert (ebc.manager.outstanding, ebc.manager.stats()["pinned"]) == (0, 0)
    ebc.manager.planner.check()
