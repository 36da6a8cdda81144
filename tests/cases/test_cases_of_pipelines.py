"""Faults of other systems in order and pipelines, as users meet them (lines 32 to 44); what is not here is in tests/unit/test_pipeline*.py.

32, 33, 35: an update or a write-back that a later batch does not see. 34: a slot that is reused while it is read. 36: a queue that
only backward drains. 37: a second epoch. 39, 40: several collections, and plain tables. 41: prefetching that nobody tested. 42:
an error in a worker thread. 43: the end of the interpreter. 44: memory that is freed under a copy. (38 is for several ranks.)
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import embcache as ec
from embcache.devices import Emulated
from promises.piped import Delays


class Counting(torch.nn.Module):
    """Each training step takes 1 from every weight of the rows that it looks up: what a row reads says how often it was trained."""

    def __init__(self, rows: int | None, device: Any = "cpu") -> None:
        super().__init__()
        table = ec.TableConfig("f", 2, hbm_rows=rows, initializer=ec.Zeros())
        self.rows = ec.EmbeddingBagCollection([table], optimizer=ec.SGD(lr=1.0), device=device)

    def forward(self, batch: ec.JaggedFeatures) -> Any:
        read = self.rows(batch).values()
        return read.sum(), read.detach().clone()


def one(keys: list[int]) -> ec.JaggedFeatures:
    return ec.JaggedFeatures(["f"], keys, [1] * len(keys))


def run(model: Counting, batches: list[list[int]], depth: int, seed: int = 0) -> list[list[float]]:
    """Train through a pipeline with delays; what each batch read."""
    source, found = iter([one(keys) for keys in batches]), []
    with ec.TrainPipeline(model, None, depth=depth) as pipe:
        pipe._flow.timeline = Delays(seed, most_s=2e-3, share=0.5)
        for _ in batches:
            found.append(pipe.progress(source)[1][:, 0].tolist())
    return found


def expected(batches: list[list[int]]) -> list[list[float]]:
    trained: dict[int, int] = {}
    found = []
    for keys in batches:
        found.append([-float(trained.get(key, 0)) for key in keys])
        for key in dict.fromkeys(keys):
            trained[key] = trained.get(key, 0) + keys.count(key)
    return found


SHAPES = {
    "hit in the next batch (32)": ([[1, 2], [2, 3], [3, 1], [1, 2]] * 6, 12),
    "out, and wanted by the next (33)": ([[1, 2], [3, 4], [1, 2], [3, 4]] * 6, 4),
    "one slot for all (34)": ([[key % 5] for key in range(30)], 1),
    "rows that only pass through (35)": ([[key, key + 1, key + 2] for key in range(0, 60, 2)] * 2, 6),
    "twice in a batch": ([[7, 7, 8]] * 10, 2),
}


@pytest.mark.parametrize("depth", [1, 2, 4, 16])
@pytest.mark.parametrize("shape", SHAPES)
def test_case_32_to_35_each_batch_reads_what_the_last_update_made(shape: str, depth: int) -> None:
    batches, rows = SHAPES[shape]
    assert run(Counting(rows), batches, depth) == expected(batches)


@pytest.mark.parametrize("shape", SHAPES)
def test_case_44_rows_copied_by_a_device_of_its_own(shape: str) -> None:
    """Rows go through staging blocks that are used again while later batches are on their way."""
    batches, rows = SHAPES[shape]
    backend = Emulated(1e-3, 1e-3, 0.1)
    assert run(Counting(rows, backend), batches, 4) == expected(batches)
    assert backend.h2d.seconds > 0 and not math.isinf(backend.h2d.seconds)


def test_case_36_evaluation_alone_fills_no_queue() -> None:
    model = Counting(8)
    with ec.TrainPipeline(model, None, depth=3) as pipe:
        source = (one([key % 30]) for key in range(10**6))
        pipe.progress(source)
        model.eval()
        probes: Iterator[Any] = (one([key, key + 1]) for key in range(2_000))
        for _ in range(2_000):
            pipe.progress(probes)
        assert pipe._flow.pulled <= 4 and len(pipe._flow.ready) <= 3 and model.rows.manager.outstanding <= 3
        model.train()
        assert pipe.progress(source)[1].tolist() == [[0.0, 0.0]] and pipe.batches_done == 2


def test_case_37_the_second_epoch_trains() -> None:
    model, batches = Counting(4), [[1, 2], [3, 4], [5, 6]]
    with ec.TrainPipeline(model, None) as pipe:
        for epoch in range(4):
            source = iter([one(keys) for keys in batches])
            assert [pipe.progress(source)[1][0, 0].item() for _ in batches] == [-epoch] * 3
            with pytest.raises(StopIteration):
                pipe.progress(source)
    assert (model.rows.tables()["f"].lookup([1, 6], insert=False) == -4).all()


def test_case_42_an_error_of_a_worker_thread_is_the_callers() -> None:
    def broken() -> Iterator[Any]:
        yield one([1])
        raise ValueError("bad line 17")

    with ec.TrainPipeline(Counting(4), None, depth=2) as pipe:
        source = broken()
        pipe.progress(source)
        with pytest.raises(ValueError, match="bad line 17"):
            pipe.progress(source)
