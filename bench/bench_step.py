"""A whole training step: plan, swaps, pooled forward, backward, update; against FBGEMM and nn.EmbeddingBag.

The peers get dense ids, the only thing they can take; we get random 64-bit keys and find their slots.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from peers import tbe
from peers.torch_bags import TorchBags
from race import Absent, Contender, Race, Unit
from steps import BATCH, EPS, LR, Batch, OurStep, Shape, draw, same

LOOKUPS = Unit("M look-ups/s", 1e6, rate=True)
SMALL = (Shape(1, 1_000_000, 64), Shape(26, 100_000, 32))  # three contenders with two moments each must fit in memory
LARGE = (Shape(1, 10_000_000, 64), Shape(26, 1_000_000, 32))
CELLS = [(pooling, kind) for pooling in (1, 20) for kind in ("uniform", "zipf")]
STREAMS: dict[tuple[Shape, str, int], list[Batch]] = {}


def stream(shape: Shape, kind: str, pooling: int) -> list[Batch]:
    """Batches of a cell, drawn once."""
    cell = (shape, kind, pooling)
    if cell not in STREAMS:
        STREAMS[cell] = draw(shape, kind, pooling)
    return STREAMS[cell]


class Field:
    """Ours and the peers with the same initial rows."""

    def __init__(self, shape: Shape, optimizer: str, threads: int, hbm_share: float) -> None:
        self.shape, self.optimizer, self.threads, self.hbm_share = shape, optimizer, threads, hbm_share
        self.ours = OurStep(shape, optimizer, hbm_share=hbm_share, threads=threads)
        weights = self.ours.weights(shape)
        self.bags = TorchBags(weights, optimizer, LR, EPS)
        self.why_no_tbe = tbe.why_absent(optimizer)
        self.tbe = None if self.why_no_tbe else tbe.TableBatched(weights, optimizer, LR, EPS)

    def run(self, race: Race, kind: str, pooling: int) -> None:
        batches = stream(self.shape, kind, pooling)
        torch.set_num_threads(self.threads)
        peers: list[Contender | Absent] = []
        if self.tbe is None:
            peers.append(Absent(tbe.NAME, self.why_no_tbe))
        else:
            table_batched = self.tbe
            peers.append(
                Contender(
                    tbe.NAME,
                    lambda i: table_batched.step(batches[i].ids, batches[i].offsets, batches[i].gradient),
                    same,
                )
            )
        peers.append(
            Contender(
                "nn.EmbeddingBag(sparse)",
                lambda i: self.bags.step(batches[i].ids, batches[i].offsets, batches[i].gradient),
                same,
            )
        )
        ours = Contender("embcache", lambda i: self.ours.step(batches[i]))
        hbm = "" if self.hbm_share == 1 else f", HBM {self.hbm_share:.0%}"
        case = f"step {self.shape}, pooling {pooling}, {kind}, {self.optimizer}{hbm}"
        race(
            f"step{hbm}, {self.optimizer}",
            case,
            ours,
            peers,
            threads=self.threads,
            work=self.shape.tables * BATCH * pooling,
            unit=LOOKUPS,
            rounds=5,
            check_sets=(0, 0, 1),
        )


def fields(*cases: tuple[Shape, str, int, float]):
    """A module-scoped fixture of `Field`s."""
    ids = [f"{shape.tables}x{shape.rows}-{optimizer}-threads{threads}" for shape, optimizer, threads, _ in cases]

    @pytest.fixture(scope="module", params=cases, ids=ids)
    def field(request: pytest.FixtureRequest) -> Iterator[Field]:
        made = Field(*request.param)
        yield made
        made.ours.close()

    return field


resident = fields(
    *[(shape, optimizer, 1, 1.0) for shape in LARGE for optimizer in ("SGD", "RowWiseAdagrad")],
    *[(shape, optimizer, 2, 1.0) for shape in LARGE for optimizer in ("SGD", "RowWiseAdagrad")],
    *[(shape, "Adam", 1, 1.0) for shape in SMALL],
)
swapping = fields(*[(shape, "RowWiseAdagrad", 1, 0.1) for shape in SMALL])


@pytest.mark.parametrize(("pooling", "kind"), CELLS)
def test_step(race: Race, resident: Field, pooling: int, kind: str) -> None:
    resident.run(race, kind, pooling)


@pytest.mark.parametrize("kind", ["uniform", "zipf"])
def test_step_with_swaps(race: Race, swapping: Field, kind: str) -> None:
    before = swapping.ours.collection.manager.stats()["swap_out_rows"]
    swapping.run(race, kind, pooling=1)  # a batch of bags of 20 does not fit a tenth of the small tables
    assert swapping.ours.collection.manager.stats()["swap_out_rows"] > before
