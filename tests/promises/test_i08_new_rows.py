"""I8: a new row's value depends on (table name, seed, key) alone."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import embcache as ec
from promises.strategies import HOSTILE_KEYS, ROW_TYPES, examples, initializers, int64, one_feature

some_keys = st.lists(st.sampled_from(HOSTILE_KEYS) | int64, min_size=1, max_size=60, unique=True)
RANDOM = [ec.Uniform(-1.0, 1.0), ec.Normal(0.0, 1.0), ec.TruncatedNormal(0.0, 1.0)]


def fresh(
    keys: list[int],
    initializer: object,
    *,
    name: str = "t",
    seed: int = 0,
    dim: int = 5,
    threads: int = 1,
    dtype: str = "float32",
) -> np.ndarray:
    with ec.EmbTable(name, dim, initializer=initializer, seed=seed, num_threads=threads, dtype=dtype) as table:
        return table.lookup(keys)


@examples(60)
@given(
    keys=some_keys,
    initializer=initializers,
    seed=int64,
    dtype=st.sampled_from(ROW_TYPES),
    shuffle=st.randoms(use_true_random=False),
)
def test_i8_any_order_any_batching_and_reading_ahead(keys, initializer, seed, dtype, shuffle) -> None:
    expected = dict(zip(keys, fresh(keys, initializer, seed=seed, dtype=dtype).tolist(), strict=True))
    order = list(keys)
    shuffle.shuffle(order)
    table = ec.EmbTable("t", 5, initializer=initializer, seed=seed, num_threads=3, dtype=dtype)
    np.testing.assert_array_equal(table.lookup(keys, insert=False), list(expected.values()))
    assert len(table) == 0
    for key in order:  # one at a time, in another order, beside others
        table.insert([key, key ^ 1])
    np.testing.assert_array_equal(table.lookup(order), [expected[key] for key in order])
    weights, _ = table.lookup_rows(order)
    np.testing.assert_array_equal(weights, [expected[key] for key in order])


def test_i8_any_number_of_threads() -> None:
    keys = np.random.default_rng(0).integers(-(2**63), 2**63 - 1, 40_000)
    for initializer in RANDOM:
        for dtype in ROW_TYPES:
            one = fresh(keys.tolist(), initializer, threads=1, dtype=dtype)
            for threads in (2, 5):
                assert one.tobytes() == fresh(keys.tolist(), initializer, threads=threads, dtype=dtype).tobytes()


@examples(30)
@given(keys=some_keys, initializer=initializers)
def test_i8_the_same_after_erase_and_return(keys: list[int], initializer: object) -> None:
    expected = fresh(keys, initializer)
    table = ec.EmbTable("t", 5, state_dim=2, initializer=initializer)
    changed, state = np.full((len(keys), 5), 9, np.float32), np.full((len(keys), 2), 7, np.float32)
    for _ in range(2):
        table.assign(keys, changed, state)
        assert table.erase(keys) == len(keys)
        np.testing.assert_array_equal(table.lookup(keys, insert=False), expected)
        weights, states = table.lookup_rows(keys)
        assert weights.tobytes() == expected.tobytes() and not states.any()
        table.insert(keys[::-1])
        weights, states = table.lookup_rows(keys)
        assert weights.tobytes() == expected.tobytes() and not states.any()


@pytest.mark.parametrize("initializer", RANDOM, ids=lambda i: i.kind)
def test_i8_the_same_after_eviction_and_return(initializer: object) -> None:
    """Trained, evicted by time, and back: as new, with new state and a new count."""
    rule = ec.AdmitAndEvictConfig(evict_threshold=2, evict_step_interval=1, time_source="step")
    table = ec.TableConfig("t", 5, ["f"], hbm_rows=4, initializer=initializer, admit_and_evict=rule)
    ebc = ec.EmbeddingBagCollection([table], optimizer=ec.Adagrad(lr=1.0))
    view, key = ebc.tables()["t"], -(2**63)
    expected = fresh([key], initializer)
    for _ in range(3):
        out = ebc(one_feature([key])).values()
        np.testing.assert_array_equal(out.detach().numpy(), expected)
        out.sum().backward()
        assert (view.lookup([key], insert=False) != expected).all() and view.lookup_rows([key])[1].any()
        for other in (1, 2, 3):
            ebc(one_feature([other])).values().sum().backward()
        assert key not in view
        np.testing.assert_array_equal(view.lookup([key], insert=False), expected)
        assert not view.lookup_rows([key])[1].any()
    assert ebc.manager.stats()["evicted"] >= 3


@pytest.mark.parametrize("initializer", RANDOM, ids=lambda i: i.kind)
def test_i8_name_seed_and_key_each_matter(initializer: object) -> None:
    keys = [0, 1, -1, 2**32, -(2**63)]
    base = fresh(keys, initializer)
    assert len(np.unique(base)) == base.size
    for other in (
        fresh(keys, initializer, name="u"),
        fresh(keys, initializer, name="tt"),
        fresh(keys, initializer, seed=1),
        fresh(keys, initializer, seed=-1),
        fresh(keys, initializer, seed=2**40),
    ):
        assert not np.isin(other, base).any()


def test_i8_nothing_else_of_a_collection_matters() -> None:
    """Other tables, features, poolings, optimizers, sizes: the same rows."""
    keys = list(HOSTILE_KEYS)
    expected = fresh(keys, ec.Normal(0.0, 1.0), name="item", seed=3).tolist()
    item = ec.TableConfig("item", 5, ["f"], initializer=ec.Normal(0.0, 1.0), seed=3)
    other = ec.TableConfig("other", 5, ["g"], hbm_rows=3, pooling="mean")
    for tables, spec in (([item], ec.SGD()), ([other, item], ec.Adam()), ([item, other], ec.RowWiseAdagrad())):
        ebc = ec.EmbeddingBagCollection(tables, optimizer=spec)
        lengths = torch.cat([torch.ones(len(keys), dtype=torch.int64), torch.zeros(len(keys), dtype=torch.int64)])
        out = ebc(ec.JaggedFeatures(["f", "g"], torch.tensor(keys), lengths))["f"]
        assert out.detach().numpy().tolist() == expected


def test_i8_the_same_in_another_process() -> None:
    code = (
        "import embcache as ec, hashlib\n"
        "t = ec.EmbTable('t', 5, initializer=ec.Normal(0.0, 1.0), seed=9)\n"
        "print(hashlib.sha256(t.lookup([5, -7, 2**62, -2**63]).tobytes()).hexdigest())"
    )
    runs = {
        subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
        for _ in range(2)
    }
    table = ec.EmbTable("t", 5, initializer=ec.Normal(0.0, 1.0), seed=9)
    import hashlib

    assert runs == {hashlib.sha256(table.lookup([5, -7, 2**62, -(2**63)]).tobytes()).hexdigest() + "\n"}
