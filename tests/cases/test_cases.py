"""What went wrong for users of neighbouring systems: one test a line of CASES.md, 1 to 24 and 26 to 28.

The test's name has the line's number. Depth is in the promises and properties (see README.md here); these are thin, and
written the way a user would meet the fault.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import embcache as ec
from promises.strategies import HOSTILE_KEYS, one_feature
from promises.training import check, model_state, rows_of, whole_state

ZEROS = ec.Zeros()
Bags = ec.EmbeddingBagCollection


def bags(*tables: ec.TableConfig, lr: float = 1.0, **options: Any) -> Bags:
    return Bags(list(tables), optimizer=ec.SGD(lr=lr), **options)


def table(name: str = "f", dim: int = 2, rows: int | None = 64, **options: Any) -> ec.TableConfig:
    return ec.TableConfig(name, dim, hbm_rows=rows, **{"initializer": ZEROS, **options})


def value(ebc: Bags, key: int, name: str = "f") -> float:
    return float(ebc.tables()[name].lookup([key], insert=False)[0, 0])


def within(seconds: float, work: Callable[[], object]) -> None:
    """Run `work` in a thread that must end."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)
    assert not thread.is_alive(), "it hangs"


# ------------------------------------------------------------------------------------------------ keys, shapes, types


def test_case_01_no_key_is_reserved() -> None:
    ebc = bags(table(rows=len(HOSTILE_KEYS)))
    marks = torch.arange(1.0, len(HOSTILE_KEYS) + 1)
    (-ebc(one_feature(HOSTILE_KEYS))["f"][:, 0] * marks).sum().backward()
    assert [value(ebc, key) for key in HOSTILE_KEYS] == marks.tolist()


def test_case_02_negative_ids() -> None:
    ebc = bags(table(rows=4))
    for start in range(-100, 0, 4):
        (-ebc(one_feature(range(start, start + 4)))["f"]).sum().backward()
    assert sorted(rows_of(ebc.tables()["f"])) == list(range(-100, 0))


def test_case_03_nothing_is_truncated_at_2_to_the_31() -> None:
    keys = [5, 5 + 2**31, 5 + 2**32, 5 + 2**33, 5 - 2**32]
    ebc = bags(table())
    marks = torch.arange(1.0, 6.0)
    (-ebc(one_feature(keys))["f"][:, 0] * marks).sum().backward()
    assert [value(ebc, key) for key in keys] == marks.tolist()
    # rows * dim * 4 bytes beyond 2**31, counted as such: 300,000 slots of 8 KiB.
    with pytest.raises(ec.ConfigError, match=str(300_001 * 8192)):
        ec.EmbCacheManager([ec.TableConfig("f", 2048, hbm_rows=300_000)], optimizer=ec.SGD(), hbm_bytes=2**31)


def test_case_03_counts_of_occurrences_pass_2_to_the_31() -> None:
    rule = ec.AdmitAndEvictConfig(admit_threshold=2**31 + 1, not_admitted_default_value=7.0)
    ebc = bags(table(admit_and_evict=rule))
    filters = ebc.manager.planner
    counters = {"keys": np.array([9]), "counts": np.array([2**31 - 1]), "last": np.array([0])}
    filters.import_filter(0, {**filters.export_filter(0), **counters})
    assert ebc(one_feature([9]))["f"][0, 0] == 7.0
    assert ebc(one_feature([9]))["f"][0, 0] == 0.0


@pytest.mark.parametrize("kind", [ec.EmbeddingBagCollection, ec.EmbeddingCollection])
def test_case_04_an_empty_batch_has_the_usual_shapes_and_dtypes(kind: Any) -> None:
    made = kind([table("a", 3), table("b", 2, pooling="mean")], optimizer=ec.SGD(lr=1.0))
    usual = made(ec.JaggedFeatures(["a", "b"], torch.tensor([1, 2]), torch.tensor([1, 1])))
    for batch in (
        ec.JaggedFeatures(["a", "b"], torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int64)),
        ec.JaggedFeatures(["a", "b"], torch.empty(0, dtype=torch.int64), torch.zeros(6, dtype=torch.int64)),
        ec.JaggedFeatures(["a", "b"], [], []),
    ):
        for training in (True, False):
            out = made.train(training)(batch)
            for name in ("a", "b"):
                found, other = out[name], usual[name]
                if kind is ec.EmbeddingCollection:
                    found, other = found.values(), other.values()
                assert (found.dtype, found.shape[1:]) == (other.dtype, other.shape[1:])
                assert found.requires_grad is training
        loss = (
            sum(
                (v if isinstance(v, torch.Tensor) else v.values()).sum() for v in made.train()(batch).to_dict().values()
            )
            if kind is Bags
            else None
        )
        if loss is not None:
            loss.backward()
    assert made.manager.stats()["rows"] == 2


def test_case_05_duplicates_in_a_batch() -> None:
    ebc = bags(table(rows=1))
    within(60, lambda: (-ebc(one_feature([7] * 100_000))["f"]).sum().backward())
    assert value(ebc, 7) == 100_000


def test_case_06_strided_int32_and_read_only_input() -> None:
    frozen = np.array([3, 4], dtype=np.int64)
    frozen.flags.writeable = False
    inputs: list[Any] = [
        torch.tensor([3, 0, 4, 0])[::2],
        torch.tensor([3, 4], dtype=torch.int32),
        np.array([4, 3])[::-1],
        frozen,
        [3, 4],
    ]
    ebc, store = bags(table()), ec.EmbTable("t", 2)
    for given in inputs:
        (-ebc(ec.JaggedFeatures(["f"], given, np.array([1, 1], dtype=np.int32)))["f"]).sum().backward()
        store.insert(given.numpy() if isinstance(given, torch.Tensor) else given)
    assert [value(ebc, 3), value(ebc, 4)] == [5, 5] and len(store) == 2
    weights = np.arange(8, dtype=np.float32).reshape(2, 4)[:, ::2]
    weights.flags.writeable = False
    store.assign(frozen, weights)
    assert store.lookup(frozen).tolist() == weights.tolist()


def test_case_07_features_of_unequal_length_on_one_table() -> None:
    ebc = bags(table("t", 1, feature_names=["long", "short"], rows=8))
    for step in range(1, 4):
        batch = ec.JaggedFeatures(["long", "short"], torch.tensor([1, 2, 3, 4, 5, 3]), torch.tensor([3, 2, 0, 1]))
        out = ebc(batch)
        (-(out["long"] * torch.tensor([[1.0], [10.0]])).sum() - 100 * out["short"].sum()).backward()
        assert [value(ebc, key, "t") for key in range(1, 6)] == [1 * step, 1 * step, 101 * step, 10 * step, 10 * step]


@pytest.mark.parametrize("dims", [[8, 4], [8, 6], [3, 5, 7], [1, 16, 1], [8, 8, 6]], ids=str)
def test_case_08_mixed_dims_keep_their_moments_apart(dims: list[int]) -> None:
    """Trained together, each table is what it is when trained alone."""
    together = Bags([ec.TableConfig(f"t{t}", dim, hbm_rows=3) for t, dim in enumerate(dims)], optimizer=ec.Adam(lr=0.1))
    alone = [Bags([ec.TableConfig(f"t{t}", dim, hbm_rows=3)], optimizer=ec.Adam(lr=0.1)) for t, dim in enumerate(dims)]
    names = [f"t{t}" for t in range(len(dims))]
    rng = np.random.default_rng(0)
    for _ in range(10):
        keys = torch.from_numpy(rng.integers(0, 6, (len(dims), 3)))
        out = together(ec.JaggedFeatures(names, keys.flatten(), torch.ones(keys.numel(), dtype=torch.int64)))
        sum((out[name] ** 2).sum() + out[name].sum() for name in names).backward()
        for t, single in enumerate(alone):
            part = single(one_feature(keys[t].tolist(), name=f"t{t}"))[f"t{t}"]
            ((part**2).sum() + part.sum()).backward()
    for t, single in enumerate(alone):
        assert rows_of(together.tables()[f"t{t}"]) == rows_of(single.tables()[f"t{t}"])


def test_case_09_the_mean_of_an_empty_bag_is_zero() -> None:
    ebc = bags(table(pooling="mean", initializer=ec.Constant(1.0)))
    out = ebc(ec.JaggedFeatures(["f"], torch.tensor([1, 2]), torch.tensor([0, 2, 0])))["f"]
    assert out.tolist() == [[0, 0], [1, 1], [0, 0]]
    out.sum().backward()
    assert torch.isfinite(torch.from_numpy(ebc.tables()["f"].lookup([1, 2]))).all()


def test_case_10_sum_and_mean_in_one_collection() -> None:
    ebc = bags(table("s", initializer=ec.Constant(1.0)), table("m", pooling="mean", initializer=ec.Constant(1.0)))
    out = ebc(ec.JaggedFeatures(["s", "m"], torch.tensor([1, 2, 3, 4] * 2), torch.tensor([4, 4])))
    assert out["s"].tolist() == [[4, 4]] and out["m"].tolist() == [[1, 1]]
    out.values().sum().backward()
    assert value(ebc, 1, "s") == 0 and value(ebc, 1, "m") == 0.75


def test_case_11_rowwise_adagrad_averages_squares() -> None:
    ebc = Bags([table(dim=4)], optimizer=ec.RowWiseAdagrad(lr=1.0))
    slopes = torch.tensor([1.0, -1.0, 3.0, -3.0])  # their mean is 0, the mean of their squares 5
    (ebc(one_feature([1]))["f"] * slopes).sum().backward()
    weights, state = ebc.tables()["f"].lookup_rows([1])
    assert state.tolist() == [[5.0]]
    np.testing.assert_allclose(weights[0], -slopes.numpy() / 5**0.5, rtol=1e-6)


def test_case_12_neighbouring_keys_beyond_2_to_the_24_are_different() -> None:
    """Compared as integers: as float32 these keys are all equal."""
    keys = [2**24 + i for i in range(8)] + [2**60 + i for i in range(8)]
    store = ec.EmbTable("t", 1)
    store.assign(keys, np.arange(16, dtype=np.float32)[:, None])
    assert store.lookup(keys)[:, 0].tolist() == list(range(16)) and len(store) == 16


@pytest.mark.parametrize("lengths", [[1, 1], [4, 0], [2, 2], [-1, 4], [3]], ids=str)
def test_case_13_wrong_lengths_are_refused_at_once(lengths: list[int]) -> None:
    with pytest.raises(ec.ShapeError, match="length"):
        ec.JaggedFeatures(["a", "b"], torch.tensor([1, 2, 3]), torch.tensor(lengths))


def test_case_14_the_range_of_initial_values_does_not_depend_on_the_size() -> None:
    for options in ({}, {"num_embeddings": 1}, {"num_embeddings": 10**9, "hbm_rows": 2000}):
        with ec.EmbCacheManager([ec.TableConfig("f", 8, **options)]) as m:
            rows = m.table("f").lookup(np.arange(2000))
        assert 0.049 < np.abs(rows).max() <= 0.05 and abs(rows.mean()) < 0.002


# --------------------------------------------------------------------------- capacity, victims, eviction, admission


def test_case_15_1024_keys_fit_into_1024_slots() -> None:
    ebc = bags(table(rows=1024))
    keys = np.random.default_rng(0).integers(-(2**63), 2**63 - 1, 1024).tolist()
    for _ in range(3):
        (-ebc(one_feature(keys))["f"]).sum().backward()
    stats = ebc.manager.stats()
    assert (stats["resident"], stats["free"], stats["misses"], stats["hits"]) == (1024, 0, 1024, 2048)
    assert {value(ebc, key) for key in keys} == {3.0}


def test_case_16_a_batch_larger_than_capacity_is_refused_whole() -> None:
    ebc = bags(table(rows=4))
    ebc(one_feature([1, 2])).values().sum().backward()
    before = whole_state(ebc.manager)
    with pytest.raises(ec.HbmCapacityError) as caught:
        ebc(one_feature([1, 2, 3, 4, 5]))
    assert (caught.value.table, caught.value.need, caught.value.have, caught.value.never_fits) == ("f", 5, 4, True)
    assert whole_state(ebc.manager) == before


@pytest.mark.parametrize("rows", [100, 101, 5000])
def test_case_17_a_buffer_as_large_as_the_table_misses_once(rows: int) -> None:
    ebc = bags(table(rows=rows))
    rng = np.random.default_rng(1)
    for _ in range(50):
        ebc(one_feature(rng.integers(0, 100, 40).tolist())).values().sum().backward()
    stats = ebc.manager.stats()
    assert stats["misses"] == stats["rows"] == stats["resident"] and stats["swap_out_rows"] == 0


def test_case_18_a_reused_slot_starts_to_count_anew() -> None:
    rule = ec.AdmitAndEvictConfig(admit_threshold=1, evict_threshold=1000, evict_step_interval=1, time_source="step")
    ebc = bags(table(rows=1, admit_and_evict=rule))
    for _ in range(5):
        ebc(one_feature([1])).values().sum().backward()
    assert ebc.tables()["f"].erase([1]) == 1
    ebc(one_feature([2])).values().sum().backward()
    assert {key: row[2:] for key, row in rows_of(ebc.tables()["f"]).items()} == {2: (1, 6)}
    ebc(one_feature([1])).values().sum().backward()
    assert {key: row[2:] for key, row in rows_of(ebc.tables()["f"]).items()} == {1: (1, 7), 2: (1, 6)}


def test_case_19_victims_have_no_holes_and_no_strangers() -> None:
    m = ec.EmbCacheManager([table(rows=8), table("g", 3, rows=5)], optimizer=ec.SGD())
    resident: dict[str, set[int]] = {"f": set(), "g": set()}
    rng = np.random.default_rng(2)
    for _ in range(200):
        sizes = rng.integers(0, 6, 2)
        keys = torch.from_numpy(rng.integers(-8, 8, int(sizes.sum())))  # key 0 among them
        info = m.plan(ec.JaggedFeatures(["f", "g"], keys, torch.from_numpy(sizes)))
        for t, name in enumerate(info.tables):
            a, b = info.swap_out_offsets[t : t + 2]
            c, d = info.swap_in_offsets[t : t + 2]
            out, into = info.swap_out_keys[a:b].tolist(), info.swap_in_keys[c:d].tolist()
            assert len(set(out)) == len(out) and set(out) <= resident[name] and not set(out) & set(into)
            resident[name] = (resident[name] - set(out)) | set(into)
            assert set(m.planner.residents(t)[0].tolist()) == resident[name]
        m.swap_out(info)
        m.swap_in(info)
        m.finish(info)


def test_case_20_look_ups_end_after_any_churn() -> None:
    store = ec.EmbTable("t", 1)

    def churn() -> None:
        for start in range(0, 400_000, 1000):  # a window of 2,000 live keys wanders over the key space
            store.insert(np.arange(start, start + 2000))
            assert store.erase(np.arange(start - 1000, start)) == (1000 if start else 0)
            assert (store.find(np.arange(-1000, 0) - start) == -1).all()

    store.insert(np.arange(2000))
    before = store.stats()["bytes"]
    within(120, churn)
    assert len(store) == 2000 and store.stats()["bytes"] <= 4 * before
    store.check()


def test_case_20_a_full_buffer_takes_new_keys_for_ever() -> None:
    ebc = bags(table(rows=4))

    def churn() -> None:
        for start in range(0, 8000, 4):
            ebc(one_feature(range(start, start + 4)))

    within(120, churn)
    assert ebc.manager.stats()["swap_out_rows"] == 7996
    check(ebc.manager)


def test_case_21_len_after_deleting() -> None:
    ebc, store = bags(table(rows=3)), ec.EmbTable("f", 2)
    for keys in ([1, 2, 3], [4, 5]):
        ebc(one_feature(keys)).values().sum().backward()
        store.insert(keys)
    for view in (ebc.tables()["f"], store):
        assert view.erase([]) == view.erase([77, 78]) == 0 and len(view) == 5
        assert view.erase([1, 1, 4, 77]) == 2 and len(view) == 3
        assert view.erase([1, 4]) == 0 and len(view) == 3
    before = whole_state(ebc.manager)
    ebc.tables()["f"].erase([1, 4, 100])
    assert whole_state(ebc.manager) == before


def test_case_22_admission_counts_occurrences_once() -> None:
    rule = ec.AdmitAndEvictConfig(admit_threshold=4)
    ebc = bags(table("t", feature_names=["a", "b"], admit_and_evict=rule))
    m = ebc.manager

    def counts() -> dict[int, int]:
        state = m.planner.filter_state(0)
        return dict(zip(state["keys"].tolist(), state["counts"].tolist(), strict=True))

    batch = ec.JaggedFeatures(["a", "b"], torch.tensor([1, 1, 2, 1]), torch.tensor([3, 1]))
    m.cancel(m.plan(batch))  # a prefetch that is taken back does not count
    assert counts() == {}
    ahead = m.plan(batch)
    assert counts() == {1: 3, 2: 1} and not ahead.admitted.any()
    m.swap_out(ahead)
    m.swap_in(ahead)
    m.finish(ahead)
    with torch.no_grad():
        ebc(batch)
    assert counts() == {1: 3, 2: 1}
    ebc(batch)
    assert counts() == {1: 6, 2: 2} and list(rows_of(ebc.tables()["t"])) == [1]


@pytest.mark.parametrize("threshold", [-1, 0, 1, 2, 3])
def test_case_23_a_count_exactly_at_the_threshold_admits(threshold: int) -> None:
    ebc = bags(table(admit_and_evict=ec.AdmitAndEvictConfig(admit_threshold=threshold, not_admitted_default_value=9.0)))
    for seen in range(1, 5):
        read = ebc(one_feature([5]))["f"][0, 0].item()
        assert (read == 9.0) is (seen < threshold)
    at_once = bags(
        table(admit_and_evict=ec.AdmitAndEvictConfig(admit_threshold=threshold, not_admitted_default_value=9.0))
    )
    many = max(1, threshold)
    read = at_once(ec.JaggedFeatures(["f"], torch.tensor([5] * many), torch.tensor([many])))["f"][0, 0].item()
    assert read == 0.0


def test_case_23_a_timestamp_exactly_at_the_cut_off_stays() -> None:
    rule = ec.AdmitAndEvictConfig(evict_threshold=10, evict_step_interval=1)
    ebc = bags(table(admit_and_evict=rule))
    for key, now in ((1, 99), (2, 100), (3, 110)):
        ebc(one_feature([key], timestamps=torch.tensor([now])))
    assert sorted(rows_of(ebc.tables()["f"])) == [2, 3]


def test_case_24_an_evicted_row_is_unreachable_before_its_memory_serves_again() -> None:
    rule = ec.AdmitAndEvictConfig(evict_threshold=1, evict_step_interval=1, time_source="step")
    ebc = bags(table(rows=2, admit_and_evict=rule))
    view = ebc.tables()["f"]
    for step in range(200):
        (-ebc(one_feature([step]))["f"]).sum().backward()
        live = [key for key in (step - 1, step) if key >= 0]
        assert sorted(rows_of(view)) == live and [value(ebc, key) for key in live] == [1.0] * len(live)
        assert value(ebc, step - 2) == value(ebc, step + 1) == 0
    check(ebc.manager)
    stats = ebc.manager.host_tables[0].stats()
    assert stats["rows"] == 2 and stats["rows"] + stats["free_rows"] + stats["limbo_rows"] <= 4


def test_case_26_eviction_between_two_forwards_of_one_step() -> None:
    """The second forward's sweep evicts a key that the first one reads: its gradient goes to no other row."""
    rule = ec.AdmitAndEvictConfig(evict_threshold=5, evict_step_interval=2)
    for rows in (3, 100):
        ebc = bags(table(rows=rows, admit_and_evict=rule))
        first = ebc(one_feature([1, 2], timestamps=torch.tensor([0, 50])))
        second = ebc(one_feature([2, 3], timestamps=torch.tensor([50, 50])))  # step 2: key 1 is too old
        assert ebc.manager.stats()["evicted"] == 1
        (-100 * first.values().sum() - second.values().sum()).backward()
        assert {key: np.frombuffer(row[0], np.float32)[0] for key, row in rows_of(ebc.tables()["f"]).items()} == {
            2: 101,
            3: 1,
        }
        again = ebc(one_feature([1], timestamps=torch.tensor([50])))
        assert again["f"].tolist() == [[0, 0]] and ebc.manager.outstanding == 1
        check(ebc.manager)


def test_case_27_evaluation_inserts_nothing() -> None:
    ebc = bags(table(rows=4))
    ebc(one_feature([1, 2])).values().sum().backward()
    before = whole_state(ebc.manager)
    ebc.eval()(one_feature(range(50)))
    with torch.no_grad():
        ebc.train()(one_feature(range(50)))
    with torch.inference_mode():
        ebc(one_feature(range(50)))
    assert whole_state(ebc.manager) == before


@pytest.mark.parametrize("spec", [ec.SGD(), ec.Adagrad(), ec.RowWiseAdagrad(), ec.Adam()], ids=lambda spec: spec.kind)
def test_case_28_a_byte_budget_buys_rows_with_their_state(spec: ec.OptimizerSpec) -> None:
    budget = 1_000_000
    tables = [ec.TableConfig("a", 4), ec.TableConfig("b", 16, ["b", "c"]), ec.TableConfig("d", 64)]
    with ec.EmbCacheManager(tables, optimizer=spec, hbm_bytes=budget) as m:
        stats = m.stats()
        tensors = [*m.buffer.weights, *(tensor for states in m.buffer.states for tensor in states)]
        held = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        assert 0.99 * budget < held == stats["hbm_bytes"] <= budget
        for config in tables:
            row = 4 * (config.embedding_dim + sum(spec.state_widths(config.embedding_dim)))
            entry = stats["tables"][config.name]
            assert entry["hbm_bytes"] == (entry["capacity"] + 1) * row  # one more: the constant slot
        # In proportion to dim x features, so slots to features over size.
        slots = [stats["tables"][name]["capacity"] for name in "abd"]
        if spec.kind == "adam":
            assert abs(slots[1] / slots[0] - 2) < 0.05 and abs(slots[2] / slots[0] - 1) < 0.05


def test_cases_leave_a_model_that_trains_on() -> None:
    """The refusals above (13, 16), one after the other, and training goes on as if nothing had been."""
    plain, troubled = bags(table(rows=4)), bags(table(rows=4))
    for step in range(10):
        with pytest.raises(ec.HbmCapacityError):
            troubled(one_feature(range(9)))
        with pytest.raises(ec.ShapeError):
            troubled(ec.JaggedFeatures(["g"], torch.tensor([1]), torch.tensor([1])))
        for ebc in (plain, troubled):
            ebc(one_feature([step, step + 1])).values().sum().backward()
    assert model_state(plain.manager) == model_state(troubled.manager)
