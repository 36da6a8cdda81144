"""Lines of CASES.md about memory, processes and everyday use: 30, 60 to 63 and 65 to 68 (the others: see README.md here)."""

from __future__ import annotations

import copy
import gc
import json
import multiprocessing
import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

import embcache as ec
from embcache.checkpoint import generations
from embcache.cli import main
from promises.strategies import one_feature


@pytest.mark.parametrize("slots", [1, 3, 100, 257, 1000, 4097])
def test_case_30_growth_at_sizes_that_are_no_power_of_two(slots: int) -> None:
    """Buffer, planner and table go through every number of rows up to the limit, and hold exactly what they may."""
    tables = [ec.TableConfig("f", 4, num_embeddings=slots, initializer=ec.Zeros())]
    ebc = ec.EmbeddingBagCollection(tables, optimizer=ec.SGD(lr=1.0))
    step = max(1, slots // 7)
    for start in range(0, 2 * slots, step):
        keys = range(start, min(start + step, 2 * slots))
        (-ebc(one_feature(keys))["f"]).sum().backward()
    stats = ebc.manager.stats()
    assert stats["capacity"] == stats["resident"] == slots and stats["rows"] == 2 * slots
    values = ebc.tables()["f"].lookup(np.arange(2 * slots), insert=False)
    assert (values == 1).all()


def mapped_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * os.sysconf("SC_PAGESIZE")


def test_case_60_reloading_takes_the_memory_of_one_table(tmp_path: Path) -> None:
    with ec.EmbTable("t", 64) as saved:
        saved.insert(np.arange(40_000))
        row_bytes = saved.stats()["row_bytes"]
        saved.save(tmp_path / "checkpoint")
    table = ec.EmbTable("t", 64)
    for _ in range(2):  # the first ones warm the allocator
        table.restore(tmp_path / "checkpoint")
    before = mapped_bytes()
    for _ in range(8):
        table.restore(tmp_path / "checkpoint")
    assert len(table) == 40_000 and mapped_bytes() - before < row_bytes


class KeysOfWorkers(torch.utils.data.Dataset[torch.Tensor]):
    """Batches that are made in forked workers, beside an open store."""

    def __init__(self, table: object) -> None:
        self.table = table  # what a user's dataset holds by accident

    def __len__(self) -> int:
        return 8

    def __getitem__(self, batch: int) -> torch.Tensor:
        return torch.arange(100 * batch, 100 * batch + 100)


def test_case_61_workers_fork_beside_an_open_store() -> None:
    ebc = ec.EmbeddingBagCollection(
        [ec.TableConfig("f", 4, initializer=ec.Zeros())], optimizer=ec.SGD(lr=1.0), num_threads=2
    )
    ebc(one_feature(range(50_000)))  # the pool has threads by now
    loader = torch.utils.data.DataLoader(
        KeysOfWorkers(ebc.tables()["f"]),
        batch_size=None,
        num_workers=2,
        multiprocessing_context="fork",
        timeout=200,
    )
    for keys in loader:
        (-ebc(one_feature(keys.tolist()))["f"]).sum().backward()
    values = ebc.tables()["f"].lookup(np.arange(50_000), insert=False)
    assert (values[:800] == 1).all() and not values[800:].any()


def test_case_62_nothing_lives_in_shared_memory() -> None:
    """A container's tiny /dev/shm: no door may put anything there."""
    before = sorted(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else []
    ebc = ec.EmbeddingBagCollection([ec.TableConfig("f", 64)], optimizer=ec.Adam(lr=0.1))
    ebc(one_feature(range(20_000))).values().sum().backward()
    with open("/proc/self/maps") as maps:
        mapped = [line for line in maps if "/dev/shm" in line and "embcache" in line.lower()]
    assert mapped == []
    assert not os.path.isdir("/dev/shm") or sorted(os.listdir("/dev/shm")) == before


def test_case_63_moving_the_module_moves_no_table() -> None:
    """``.cuda()`` and its like hand every tensor that moves to a function: it never sees a row of a table."""
    ebc = ec.EmbeddingBagCollection([ec.TableConfig("f", 8)], optimizer=ec.Adagrad(lr=0.1))
    ebc(one_feature(range(1000))).values().sum().backward()
    model = torch.nn.Sequential(ebc, torch.nn.Linear(8, 1))
    seen: list[int] = []

    def move(tensor: torch.Tensor) -> torch.Tensor:
        seen.append(tensor.numel())
        return tensor

    model._apply(move)
    assert max(seen) == 8 and sum(seen) < 100
    assert list(ebc.parameters()) == list(ebc.buffers()) == [] and not ebc.state_dict()
    buffer = ebc.manager.buffer.weights[0]
    ebc.to("cpu")
    assert ebc.manager.buffer.weights[0] is buffer


def test_case_65_what_was_looked_up_outlives_the_store(tmp_path: Path) -> None:
    ebc = ec.EmbeddingBagCollection([ec.TableConfig("f", 4, initializer=ec.Constant(0.5))])
    out = ebc(one_feature(range(100)))["f"]
    table = ec.EmbTable("t", 4, initializer=ec.Constant(0.5), directory=tmp_path / "t")
    rows, found = table.lookup(np.arange(100)), table.find(np.arange(100))
    keys, values, *_ = next(iter(table.items()))
    table.close()  # unmaps its files
    del ebc, table
    gc.collect()
    assert (rows == 0.5).all() and (values == 0.5).all() and (out == 0.5).all()
    assert keys.tolist() == list(range(100)) and len(set(found.tolist())) == 100


def test_case_66_what_a_spawned_worker_needs_can_be_sent_to_it() -> None:
    batch = ec.JaggedFeatures(["f"], torch.tensor([1, -5, 2**62]), torch.tensor([2, 0, 1]))
    config = ec.TableConfig(
        "f", 8, initializer=ec.Normal(0.0, 0.1), admit_and_evict=ec.AdmitAndEvictConfig(admit_threshold=2)
    )
    sent = (batch, config, ec.Adam(lr=0.1))
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        # A function that every worker can import; with a time limit, since a worker that cannot read its task hangs the pool.
        came, back, optimizer = pool.apply_async(copy.copy, (sent,)).get(timeout=200)
    assert came.values().tolist() == [1, -5, 2**62] and came.lengths().tolist() == [2, 0, 1]
    assert (back, optimizer) == sent[1:]


@pytest.mark.parametrize("what", ["collection", "manager", "optimizer", "table"])
def test_case_66_what_cannot_be_sent_says_what_to_do(what: str) -> None:
    ebc = ec.EmbeddingBagCollection([ec.TableConfig("f", 8)])
    things = {"collection": ebc, "manager": ebc.manager, "optimizer": ebc.optimizer, "table": ec.EmbTable("t", 8)}
    with pytest.raises(ec.ConfigError, match=r"make a new one|Make a new one|state_dict|items\(\)|directory"):
        pickle.dumps(things[what])


def test_case_67_a_full_tier_is_named_with_its_size_and_its_knob() -> None:
    ebc = ec.EmbeddingBagCollection([ec.TableConfig("clicks", 8, ["f"], hbm_rows=10)])
    with pytest.raises(ec.HbmCapacityError, match=r"clicks.* 11 slots.* 10 .*hbm_rows") as caught:
        ebc(one_feature(range(11)))
    error = caught.value
    assert (error.table, error.need, error.have, error.never_fits) == ("clicks", 11, 10, True)
    with pytest.raises(ec.ConfigError, match=r"hbm_bytes.*\d+ bytes"):
        ec.EmbeddingBagCollection([ec.TableConfig("f", 8)], hbm_bytes=10)


def test_case_68_a_checkpoint_says_what_its_bytes_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A delta is as large as its change; a full generation as its rows' parts, by name, and a little more."""
    path, rows = tmp_path / "checkpoint", 20_000
    with ec.EmbTable("t", 16, state_dim=1) as table:
        table.insert(np.arange(rows))
        table.save(path, state={"dense": b"x" * 5000})
        assert main(["inspect", str(path), "--json"]) == 0
        table.insert(np.arange(rows, rows + 100))
        table.save(path, delta=True)
    said = json.loads(capsys.readouterr().out)
    parts = said["tables"][0]["bytes"]
    assert parts == {"keys": 8 * rows, "weights": 64 * rows, "state": 4 * rows, "frequencies": 0, "timestamps": 0}
    assert said["states"] == {"dense": 5000}
    full, delta = generations(path)
    for one in (full, delta):
        assert one.bytes == sum(file.stat().st_size for file in path.glob(f"rank-*/segment-{one.generation:016d}-*"))
    known = sum(parts.values()) + 5000
    assert known <= full.bytes < known * 1.02 + 2**16
    assert delta.bytes < full.bytes // 50
