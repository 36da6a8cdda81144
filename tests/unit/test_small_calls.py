"""Small calls run in their callers: waking the pool costs more than they do. Large ones are spread over it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

import embcache as ec
from embcache._core.threads import job_count

SMALL, LARGE = 256, 200_000
PARTITIONED = 1_000_000  # keys of a table of several partitions, which is what the threads of an insert share


def jobs_of(call: Callable[[int], object], n: int) -> int:
    call(n)  # the first call may be larger than it looks: tables are born, buffers grow
    before = job_count()
    call(n)
    return job_count() - before


def features(n: int) -> ec.JaggedFeatures:
    return ec.JaggedFeatures(["a", "b"], torch.arange(2 * n) % n, torch.ones(2 * n, dtype=torch.int64))


@pytest.fixture
def table():
    with ec.EmbTable("t", 8, state_dim=8, num_threads=2) as made:
        yield made


@pytest.fixture
def collection():
    made = ec.EmbeddingBagCollection(
        [ec.TableConfig("a", 8), ec.TableConfig("b", 8)], optimizer=ec.Adam(lr=0.1), num_threads=2
    )
    yield made
    made.close()


@pytest.mark.parametrize("door", ["find", "insert", "lookup", "assign", "erase"])
def test_doors_of_the_table(table, door):
    def call(n: int) -> None:
        keys = np.arange(n)
        if door == "assign":
            table.assign(keys, np.ones((n, 8), np.float32))
        elif door == "erase":
            table.insert(keys)
            table.erase(keys)
        else:
            getattr(table, door)(keys)

    assert jobs_of(call, SMALL) == 0
    assert jobs_of(call, PARTITIONED if door == "insert" else LARGE) > 0


@pytest.mark.parametrize("training", [True, False])
def test_steps_of_a_module(collection, training):
    collection.train(training)

    def call(n: int) -> None:
        out = collection(features(n)).values()
        if training:
            out.sum().backward()
            collection.optimizer.step()

    assert jobs_of(call, SMALL) == 0
    assert jobs_of(call, LARGE) > 0
