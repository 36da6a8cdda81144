"""I7: every int64 key works; duplicates, empty bags and empty batches included."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import embcache as ec
from promises.strategies import HOSTILE_KEYS, examples, int64, one_feature, pools
from promises.training import check, evaluate, model_state, rows_of

BLOCK = 2**16
PATTERNS = {
    "sequential": np.arange(BLOCK),
    **{
        f"stride 2**{bits}": (np.arange(BLOCK, dtype=np.uint64) << np.uint64(bits)).view(np.int64)
        for bits in (8, 16, 32, 47)
    },
    "high bits": (np.arange(256, dtype=np.uint64) << np.uint64(56)).view(np.int64),
    "negative": -np.arange(BLOCK) - 1,
    "down from the top": 2**63 - 1 - np.arange(BLOCK),
    "up from the bottom": -(2**63) + np.arange(BLOCK),
    "equal low half": (np.arange(BLOCK) << 32) | 0x12345678,
    "equal high half": (0x12345678 << 32) | np.arange(BLOCK),
    "around 2**31": 2**31 + np.arange(-BLOCK // 2, BLOCK // 2),
    "around 2**53": 2**53 + np.arange(-BLOCK // 2, BLOCK // 2),
}


@pytest.mark.parametrize("pattern", PATTERNS)
def test_i7_patterns_through_a_table(pattern: str) -> None:
    keys = np.unique(PATTERNS[pattern])
    table = ec.EmbTable("t", 1)
    mark = np.arange(len(keys), dtype=np.float32)[:, None]
    table.assign(keys, mark)
    assert len(table) == len(keys)
    np.testing.assert_array_equal(table.lookup(keys[::-1], insert=False), mark[::-1])
    assert table.erase(keys[::2]) == len(keys[::2])
    assert (table.find(keys) >= 0).tolist() == [i % 2 == 1 for i in range(len(keys))]
    table.check()


@pytest.mark.parametrize("pattern", PATTERNS)
def test_i7_patterns_through_training(pattern: str) -> None:
    keys = np.unique(PATTERNS[pattern])[:512]
    ebc = ec.EmbeddingBagCollection(
        [ec.TableConfig("f", 1, hbm_rows=100, initializer=ec.Zeros())], optimizer=ec.SGD(lr=1.0)
    )
    marks = torch.arange(1, len(keys) + 1, dtype=torch.float32)
    for start in range(0, len(keys), 100):
        out = ebc(one_feature(keys[start : start + 100].tolist())).values()
        (-out[:, 0] * marks[start : start + 100]).sum().backward()
    found = {key: np.frombuffer(row[0], np.float32)[0] for key, row in rows_of(ebc.tables()["f"]).items()}
    assert found == dict(zip(keys.tolist(), marks.tolist(), strict=True))
    check(ebc.manager)


@examples(60)
@given(
    pool=st.lists(st.sampled_from(HOSTILE_KEYS) | int64, min_size=1, max_size=30, unique=True), spare=st.integers(0, 3)
)
def test_i7_any_keys_train_separately(pool: list[int], spare: int) -> None:
    """Each key gets its own gradient, through both collections and a buffer that holds one batch."""
    for kind in (ec.EmbeddingBagCollection, ec.EmbeddingCollection):
        table = ec.TableConfig("f", 2, hbm_rows=4 + spare, initializer=ec.Zeros())
        collection = kind([table], optimizer=ec.SGD(lr=1.0))
        for turn in (1, 2):
            for start in range(0, len(pool), 4):
                some = pool[start : start + 4]
                out = collection(one_feature(some))["f"]
                out = out if isinstance(out, torch.Tensor) else out.values()
                marks = torch.arange(start + 1, start + 1 + len(some), dtype=torch.float32)
                np.testing.assert_array_equal(out.detach()[:, 0].numpy(), marks.numpy() * (turn - 1))
                (-out * marks[:, None]).sum().backward()
        view = collection.tables()["f"]
        assert len(view) == len(pool) and all(key in view for key in pool)
        np.testing.assert_array_equal(view.lookup(pool)[:, 1], 2.0 * np.arange(1, len(pool) + 1))
        check(collection.manager)


@examples(30)
@given(pool=pools(high=20), repeats=st.lists(st.integers(1, 700), min_size=1, max_size=6))
def test_i7_duplicates_sum_their_gradients(pool: list[int], repeats: list[int]) -> None:
    table = ec.TableConfig("f", 1, hbm_rows=len(pool), initializer=ec.Zeros())
    ebc = ec.EmbeddingBagCollection([table], optimizer=ec.SGD(lr=1.0))
    values = [pool[i % len(pool)] for i, count in enumerate(repeats) for _ in range(count)]
    rng = np.random.default_rng(len(values))
    rng.shuffle(values)
    batch = ec.JaggedFeatures(["f"], np.array(values), np.array([len(values), 0, 0]))
    (-ebc(batch).values()).sum().backward()
    expected = {key: values.count(key) for key in set(values)}
    found = {key: np.frombuffer(row[0], np.float32)[0] for key, row in rows_of(ebc.tables()["f"]).items()}
    assert found == expected


@pytest.mark.parametrize("pooled", [True, False], ids=["pooled", "sequence"])
@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize("lengths", [[], [0], [0, 0, 0], [0, 2, 0]], ids=str)
def test_i7_empty_batches_bags_and_tables(lengths: list[int], weighted: bool, pooled: bool) -> None:
    """Nothing at all, or nothing for one of the tables: the usual shapes and dtypes, zeros, and a harmless backward."""
    kind = ec.EmbeddingBagCollection if pooled else ec.EmbeddingCollection
    rule = ec.AdmitAndEvictConfig(admit_threshold=2, evict_threshold=5, evict_step_interval=1)
    tables = [
        ec.TableConfig("full", 3, hbm_rows=4, pooling="mean"),
        ec.TableConfig("empty", 2, ["empty", "none"], hbm_rows=1, pooling="mean", admit_and_evict=rule),
    ]
    collection = kind(tables, optimizer=ec.Adagrad(lr=0.1))
    count = sum(lengths)
    all_lengths = torch.tensor(lengths + [0] * (2 * len(lengths)), dtype=torch.int64)
    weights = torch.ones(count) if weighted else None
    stamps = torch.zeros(count, dtype=torch.int64)
    batch = ec.JaggedFeatures(["full", "empty", "none"], torch.arange(count), all_lengths, weights, stamps)
    for training in (True, False, True):
        collection.train(training)
        out = collection(batch)
        if pooled:
            assert out.values().shape == (len(lengths), 7) and out.values().dtype is torch.float32
            assert out["empty"].eq(0).all() and out["none"].eq(0).all()
            assert out["full"][torch.tensor(lengths, dtype=torch.int64) == 0].eq(0).all()
            assert torch.isfinite(out.values()).all()
            loss = out.values().sum()
        else:
            assert out["full"].values().shape == (count, 3) and out["full"].lengths().tolist() == lengths
            assert out["empty"].values().shape == (0, 2) and out["none"].values().dtype is torch.float32
            loss = sum(part.values().sum() for part in out.values())
        if training:
            loss.backward()
            collection.optimizer.step()
    stats = collection.manager.stats()["tables"]
    assert stats["empty"]["rows"] == stats["empty"]["rejected"] == 0 and stats["full"]["rows"] == count
    assert collection.manager.stats()["pinned"] == 0
    check(collection.manager)


def test_i7_a_table_no_key_ever_reached_reads_and_iterates() -> None:
    ebc = ec.EmbeddingBagCollection([ec.TableConfig("f", 2)], optimizer=ec.SGD())
    view = ebc.tables()["f"]
    assert len(view) == 0 and rows_of(view) == {} and view.lookup([], insert=True).shape == (0, 2)
    assert view.erase([1, 2]) == 0 and view.find([5]).tolist() == [-1]
    assert model_state(ebc.manager) == {"f": {"rows": {}, "length": 0}}
    assert np.frombuffer(evaluate(ebc, one_feature([]))[0]).size == 0
