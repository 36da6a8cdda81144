"""A training step through the TorchRec face, everything resident, against TorchRec's own FusedEmbeddingBagCollection.

Both get the same KeyedJaggedTensors of dense ids and give the same KeyedTensor: what is timed is what a user of TorchRec calls. Where
TorchRec is not installed there is no face either: then the step of the collection behind it is timed, and the peer is absent.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from bench_step import CELLS, LOOKUPS, SMALL, stream
from race import Absent, Contender, Race
from steps import BATCH, EPS, FILL_KEYS, LR, Batch, OurStep, Shape, names, same

NAME = "FusedEmbeddingBagCollection"


def why_absent() -> str:
    """Why TorchRec cannot take part; empty where it can."""
    try:
        import torchrec  # noqa: F401
    except (ImportError, OSError) as error:
        return f"{error}; pip install --no-deps torchrec==1.8.0 fbgemm-gpu-cpu==1.8.0"
    return ""


class Faces:
    """TorchRec's collection and ours with the same rows."""

    def __init__(self, shape: Shape, optimizer: str) -> None:
        import torchrec.optim
        from torchrec import EmbeddingBagConfig
        from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection

        from embcache.torchrec import replace_embeddings

        kind, options = {
            "SGD": (torch.optim.SGD, {"lr": LR}),
            "RowWiseAdagrad": (torchrec.optim.RowWiseAdagrad, {"lr": LR, "eps": EPS}),
        }[optimizer]
        self.shape, self.optimizer = shape, optimizer
        tables = [
            EmbeddingBagConfig(name=name, num_embeddings=shape.rows, embedding_dim=shape.dim, feature_names=[name])
            for name in names(shape)
        ]
        self.stock = FusedEmbeddingBagCollection(tables, kind, options)
        self.ours = replace_embeddings(self.stock, num_threads=1).model
        manager, piece = self.ours.manager, FILL_KEYS // shape.tables
        for start in range(0, shape.rows, piece):
            ids = np.tile(np.arange(start, min(start + piece, shape.rows)), shape.tables)
            info = manager.plan_and_move(self.features(torch.from_numpy(ids), torch.ones(len(ids), dtype=torch.int64)))
            manager.finish(info)

    def features(self, ids: torch.Tensor, lengths: torch.Tensor):
        """A KeyedJaggedTensor, without anything that TorchRec caches in one."""
        from torchrec import KeyedJaggedTensor

        return KeyedJaggedTensor(names(self.shape), ids, lengths=lengths)

    def step(self, collection: torch.nn.Module, batch: Batch) -> torch.Tensor:
        """Forward, and backward with the update in it."""
        out = collection(self.features(batch.ids, batch.features.lengths())).values()
        out.backward(batch.gradient)
        return out.detach()

    def close(self) -> None:
        """Free our tables."""
        self.ours.close()


@pytest.fixture(
    scope="module",
    params=[(shape, optimizer) for shape in SMALL for optimizer in ("SGD", "RowWiseAdagrad")],
    ids=lambda case: f"{case[0].tables}x{case[0].rows}-{case[1]}",
)
def sides(request: pytest.FixtureRequest) -> Iterator[tuple[Shape, str, Faces | OurStep]]:
    made = OurStep(*request.param) if why_absent() else Faces(*request.param)
    yield *request.param, made
    made.close()


@pytest.mark.parametrize(("pooling", "kind"), CELLS)
def test_step_through_the_face(race: Race, sides: tuple[Shape, str, Faces | OurStep], pooling: int, kind: str) -> None:
    shape, optimizer, side = sides
    batches = stream(shape, kind, pooling)
    torch.set_num_threads(1)
    ours = side.ours if isinstance(side, Faces) else side.collection
    misses = ours.manager.stats()["misses"]
    if isinstance(side, Faces):
        contender = Contender("embcache", lambda i: side.step(ours, batches[i]))
        peer: Contender | Absent = Contender(NAME, lambda i: side.step(side.stock, batches[i]), same)
    else:
        contender = Contender("embcache", lambda i: side.step(batches[i]))
        peer = Absent(NAME, why_absent())
    race(
        f"step of the TorchRec face, {optimizer}",
        f"TorchRec step {shape}, pooling {pooling}, {kind}, {optimizer}",
        contender,
        [peer],
        threads=1,
        work=shape.tables * BATCH * pooling,
        unit=LOOKUPS,
        rounds=5,
        check_sets=(0, 0, 1),
    )
    assert ours.manager.stats()["misses"] == misses
