"""Show/click, admission by chance, and the sketch, by example; and the whole state of a filter, moved."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import embcache as ec
from embcache._core.filter import FeatureFilter
from embcache._core.swap import SwapManager, _fail_allocation, _set_bracket, _set_isa
from embcache._core.table import Table
from embcache.config import AdmitAndEvictConfig, ShowClick
from embcache.errors import ConfigError, HostMemoryError, PlanError
from embcache.features import LABEL_DTYPES


def make(capacity=8, *, sweep_rows=1 << 21, threads=1, **config):
    table = Table("t", 1, with_filter=True)
    filters = [AdmitAndEvictConfig(**config)]
    return SwapManager([table], [capacity], filters, num_threads=threads, sweep_rows=sweep_rows), table


def run(manager, keys, *, times=None, clicked=None):
    keys = np.asarray(keys, np.int64)
    one = manager.plan(
        keys,
        np.array([0, len(keys)]),
        None if times is None else np.asarray(times, np.int64),
        None if clicked is None else np.asarray(clicked, np.uint8),
    )
    manager.mark_swapped_out(one)
    manager.mark_swapped_in(one)
    manager.finish(one)
    manager.check()
    return dict(zip(one.unique_keys.tolist(), one.admitted.tolist(), strict=True))


def scores(manager):
    state = manager.filter_state(0)
    return dict(zip(state["keys"].tolist(), manager.scores(0, state["counts"], state["last"]).tolist(), strict=True))


# ----------------------------------------------------------------------------------------------------------- show/click


def test_the_score_admits_exactly_at_the_threshold():
    manager, table = make(admit_threshold=2.5, policy="show_click", show_click=ShowClick(alpha=0.5, beta=2.0))
    assert run(manager, [1, 1, 2, 3], clicked=[0, 1, 0, 1]) == {1: 1, 2: 0, 3: 1}
    assert scores(manager) == {1: 3.0, 2: 0.5, 3: 2.5}
    assert run(manager, [2, 4, 2, 2], clicked=[0, 0, 0, 0]) == {2: 0, 4: 0}
    assert run(manager, [2], clicked=[0]) == {2: 1}
    assert scores(manager) == {1: 3.0, 2: 2.5, 3: 2.5, 4: 0.5} and len(table) == 3


def test_sweeps_decay_every_score_and_evict_the_lowest_ties_by_key():
    how = ShowClick(score_decay=0.5, evict_percentage=0.5)
    manager, table = make(2, evict_step_interval=3, policy="show_click", show_click=how)
    run(manager, [5, 5, 5, -9], clicked=[0] * 4)
    run(manager, [3, 4], clicked=[0] * 2)
    run(manager, [], clicked=[])
    assert scores(manager) == {4: 0.5, 5: 1.5}  # of -9, 3 and 4 with 1.0 each the two smaller keys are gone
    assert manager.stats()[0]["evicted"] == 2 and len(table) == 2
    run(manager, [4, 4], clicked=[0, 0])
    assert scores(manager) == {4: 2.5, 5: 1.5}
    run(manager, [], clicked=[])
    run(manager, [6, 5], clicked=[0, 0])  # 5 comes to 2.5, so it ties with 4, which goes; 6 is new
    assert scores(manager) == {5: 1.25, 6: 0.5}


def test_a_key_swept_by_score_in_its_own_batch_reads_the_default_and_starts_anew():
    how = ShowClick(evict_percentage=0.5)
    manager, _ = make(2, evict_step_interval=2, policy="show_click", show_click=how)
    run(manager, [1, 2, 2, 2], clicked=[0] * 4)
    assert run(manager, [1, 3], clicked=[0, 0]) == {1: 0, 3: 1}
    assert run(manager, [1], clicked=[0]) == {1: 1}
    assert scores(manager) == {1: 1.0, 2: 3.0, 3: 1.0}


def test_waiting_keys_are_swept_by_score_too_and_the_floor_holds():
    how = ShowClick(evict_percentage=1.0)
    manager, table = make(
        8, admit_threshold=2, evict_step_interval=2, evict_keep_min=2, policy="show_click", show_click=how
    )
    run(manager, [1, 1, 2, 2, 2, 3, 3, 9], clicked=[0] * 8)
    run(manager, [], clicked=[])
    assert scores(manager) == {2: 3.0, 3: 2.0} and len(table) == 2
    assert manager.stats()[0]["evicted"] == 1 and manager.stats()[0]["forgotten"] == 1


def test_scores_read_late_are_scores_decayed_at_each_sweep():
    how = ShowClick(alpha=0.3, score_decay=0.97)
    manager, _ = make(2, evict_step_interval=1, policy="show_click", show_click=how)
    run(manager, [1], clicked=[0])
    for _ in range(200):
        run(manager, [2], clicked=[0])
    expected = 0.3 * 0.97**201
    assert scores(manager)[1] == pytest.approx(expected, rel=1e-12) and scores(manager)[1] > 0


def test_scores_do_not_overflow():
    manager, _ = make(policy="show_click", show_click=ShowClick(alpha=1e308, beta=1e308))
    run(manager, [1] * 9, clicked=[1] * 9)
    assert scores(manager) == {1: np.finfo(np.float64).max}


def test_cancel_takes_scores_evictions_and_decay_back():
    how = ShowClick(score_decay=0.5, evict_percentage=0.5)
    manager, table = make(2, admit_threshold=1.5, evict_step_interval=2, policy="show_click", show_click=how)
    run(manager, [1, 1, 2, 2, 3, 4], clicked=[0] * 6)
    before, rows = scores(manager), table.find(np.array([1, 2])).tolist()
    one = manager.plan(np.array([2, 3, 3, 8]), np.array([0, 4]), None, np.ones(4, np.uint8))
    assert scores(manager) != before
    assert manager.peek(np.array([1]), 0)[2].tolist() != [3]  # evaluation sees the key until the batch has trained
    manager.cancel(one)
    assert scores(manager) == before and table.find(np.array([1, 2])).tolist() == rows
    manager.check()


def test_clicks_are_needed_and_checked():
    manager, _ = make(policy="show_click")
    keys, offsets = np.array([1, 2]), np.array([0, 2])
    with pytest.raises(ConfigError, match="'t' admits by shows and clicks but the batch has no labels"):
        manager.plan(keys, offsets)
    for bad in (np.zeros(2), np.zeros(1, np.uint8), np.zeros((2, 1), np.uint8), [0, 0]):
        with pytest.raises(ec.ShapeError, match="clicked"):
            manager.plan(keys, offsets, None, bad)
    manager.plan(np.array([], np.int64), np.array([0, 0]))
    assert manager.step == 1


@pytest.mark.parametrize("make_collection", [ec.EmbeddingBagCollection, ec.EmbeddingCollection])
def test_labels_of_examples_click_all_their_keys(make_collection):
    rule = ec.AdmitAndEvictConfig(
        admit_threshold=3.0, not_admitted_default_value=-1.0, policy="show_click", show_click=ec.ShowClick(beta=2.0)
    )
    tables = [
        ec.TableConfig("t", 2, ["b", "a"], initializer=ec.Constant(5.0), admit_and_evict=rule),
        ec.TableConfig("plain", 4, ["c"]),
    ]
    collection = make_collection(tables)
    # feature-major: a of example 0 and 1, b, c
    batch = ec.JaggedFeatures(["a", "c", "b"], [1, 2, 7, 2, 3], [1, 1, 1, 0, 1, 1], labels=[0.0, 1.0])
    out = collection(batch)
    state = collection.manager.planner.filter_state(collection.manager.layout.index_of["t"])
    t = collection.manager.layout.index_of["t"]
    found = collection.manager.planner.scores(t, state["counts"], state["last"])
    # 1: a show. 2: a show in b of example 0, a show and a click in a of example 1. 3: a show and a click
    assert dict(zip(state["keys"].tolist(), found.tolist(), strict=True)) == {1: 1.0, 2: 4.0, 3: 3.0}
    assert (
        out["a"].values().tolist()
        if make_collection is ec.EmbeddingCollection
        else out["a"].tolist() == [[-1, -1], [5, 5]]
    )
    with pytest.raises(ec.ConfigError, match="has no labels"):
        collection(ec.JaggedFeatures(["a", "c", "b"], [1], [1, 0, 0]))


def show_click_collection():
    rule = ec.AdmitAndEvictConfig(admit_threshold=3.0, policy="show_click", show_click=ec.ShowClick(beta=2.0))
    return ec.EmbeddingBagCollection([ec.TableConfig("t", 2, admit_and_evict=rule)])


@pytest.mark.parametrize("dtype", sorted(LABEL_DTYPES, key=str))
def test_labels_of_every_dtype_click(dtype):
    collection = show_click_collection()
    collection(ec.JaggedFeatures(["t"], [1, 2], [1, 1], labels=torch.tensor([0, 1], dtype=dtype)))
    state = collection.manager.planner.filter_state(0)
    found = collection.manager.planner.scores(0, state["counts"], state["last"])
    assert dict(zip(state["keys"].tolist(), found.tolist(), strict=True)) == {1: 1.0, 2: 3.0}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_i11_a_label_that_is_nan_is_refused_before_anything_is_counted(dtype):
    collection, labels = show_click_collection(), torch.tensor([1, float("nan")], dtype=dtype)
    batch = ec.JaggedFeatures(["t"], [1, 2], [1, 1], labels=labels)
    for use in (collection, collection.manager.plan, collection.manager.plan_and_move):
        with pytest.raises(ec.ShapeError, match=r"labels\[1\] is NaN; give a number"):
            use(batch)
    planner = collection.manager.planner
    assert planner.step == 0 and not planner.outstanding and len(planner.filter_state(0)["keys"]) == 0
    ec.EmbeddingBagCollection([ec.TableConfig("t", 2)])(batch)  # a table that needs no labels does not look at them


# ------------------------------------------------------------------------------------------------------------- by chance


def test_admission_by_chance_is_about_its_probability_and_repeats():
    keys = np.arange(20_000)
    first = run(make(20_000, admit_probability=0.3, admit_seed=5)[0], keys)
    assert first == run(make(30_000, admit_probability=0.3, admit_seed=5, threads=3)[0], keys)
    assert first != run(make(20_000, admit_probability=0.3, admit_seed=6)[0], keys)
    assert abs(sum(first.values()) / 20_000 - 0.3) < 0.015


def test_each_occurrence_is_drawn_from_the_threshold_on():
    manager, _ = make(50_000, admit_threshold=3, admit_probability=0.5)
    keys = np.arange(10_000)
    assert not any(run(manager, np.repeat(keys, 2)).values())  # two occurrences: none may admit
    third = run(manager, np.repeat(keys, 2))  # the third and the fourth are drawn: 3 of 4 keys come in
    assert abs(np.mean(list(third.values())) - 0.75) < 0.02
    assert manager.stats()[0]["rejected"] == 10_000 + sum(value == 0 for value in third.values())


def test_chance_without_a_threshold_keeps_no_counters():
    manager, table = make(100, admit_probability=0.01)
    run(manager, np.arange(100))
    state = manager.filter_state(0)
    assert state["has_row"].all() and len(state["keys"]) == len(table) < 20
    assert manager.peek(np.array([10**6]), 0)[2].tolist() == [3]  # it may have to wait: evaluation reads the default


# ------------------------------------------------------------------------------------------------------------- the sketch


def test_a_sketch_admits_no_key_late():
    rng = np.random.default_rng(3)
    trace = rng.zipf(1.2, 30_000) % (1 << 40)
    exact, _ = make(30_000, admit_threshold=4)
    sketch, _ = make(30_000, admit_threshold=4, sketch_bytes=8 * 2 * 30_000)  # one window holds the trace
    for at in range(0, len(trace), 500):
        true, estimated = run(exact, trace[at : at + 500]), run(sketch, trace[at : at + 500])
        assert all(estimated[key] for key, admitted in true.items() if admitted)


def test_the_stated_error_of_a_sketch_holds_for_the_worst_trace():
    """Half as many keys as a row has counters, each once: no key is there to hide behind."""
    width = 40_000
    early = {}
    for threshold in (2, 3):
        manager, _ = make(width, admit_threshold=threshold, sketch_bytes=8 * width)
        early[threshold] = sum(sum(run(manager, np.arange(at, at + 500)).values()) for at in range(0, width // 2, 500))
    assert early[3] <= 0.018 * width / 2  # too high by 2
    assert 0 < early[2] < 0.05 * width / 2  # too high by 1: seen, or the test would say nothing


def test_a_sketch_forgets_what_was_counted_two_windows_ago():
    manager, _ = make(4, admit_threshold=3, sketch_bytes=1024)  # width 128: generations of 64 occurrences
    run(manager, [1, 1])
    for first in range(1000, 1000 + 64, 32):
        run(manager, range(first, first + 32))
    assert run(manager, [1]) == {1: 1}  # the generation before
    manager, _ = make(4, admit_threshold=3, sketch_bytes=1024)
    run(manager, [1, 1])
    for first in range(1000, 1000 + 128, 32):
        run(manager, range(first, first + 32))
    assert run(manager, [1]) == {1: 0}


def test_an_evicted_key_must_qualify_again_with_a_sketch():
    manager, _ = make(4, admit_threshold=2, sketch_bytes=1024, evict_threshold=5, evict_step_interval=2)
    run(manager, [1, 1], times=[0, 0])
    for time in (10, 20, 30, 40):
        run(manager, [2, 2], times=[time, time])
    assert 1 not in manager.filter_state(0)["keys"]
    assert run(manager, [1], times=[41]) == {1: 0}


@pytest.mark.parametrize(("threshold", "cell"), [(255, 1), (256, 2), (70_000, 4)])
def test_counters_of_a_sketch_reach_the_threshold(threshold, cell):
    manager, _ = make(4, admit_threshold=threshold, sketch_bytes=8 * cell * 10 * threshold)
    assert run(manager, [1] * (threshold - 1)) == {1: 0}
    assert run(manager, [1]) == {1: 1}
    assert len(manager.export_filter(0)["sketch_young"]) == 4 * cell * 10 * threshold


def test_cancel_takes_counts_and_a_turn_of_the_sketch_back():
    manager, _ = make(4, admit_threshold=3, sketch_bytes=1024)
    run(manager, range(70))
    before = manager.export_filter(0)
    plan = manager.plan(np.arange(60, 80), np.array([0, 20]))  # the turn, then 20 counts
    manager.cancel(plan)
    after = manager.export_filter(0)
    for name, value in before.items():
        assert np.array_equal(after[name], value), name
    for countdown in range(40):
        _fail_allocation(countdown)
        try:
            manager.cancel(manager.plan(np.arange(60, 80), np.array([0, 20])))
        except HostMemoryError:
            pass
        finally:
            _fail_allocation(-1)
        after = manager.export_filter(0)
        assert all(np.array_equal(after[name], value) for name, value in before.items()), countdown


# -------------------------------------------------------------------------------------------------------- the whole state


@pytest.mark.parametrize("bracket", [0.0, 2.0, 10.0])
@pytest.mark.parametrize("values", [3, 2**40])
def test_the_lowest_of_many_are_evicted_whatever_the_sample_says(bracket, values):
    """Slots, host rows and waiting keys by the ten thousand, most of them ties or none: scores, then keys, decide."""
    rng = np.random.default_rng(values)
    config = AdmitAndEvictConfig(
        admit_threshold=2.0**50,
        evict_step_interval=1000,
        policy="show_click",
        show_click=ShowClick(score_decay=0.5, evict_percentage=0.37),
    )
    table = Table("t", 1, with_filter=True)
    manager = SwapManager([table], [1000], [config], num_threads=1)
    _set_bracket(manager, bracket)
    keys = rng.integers(-(2**63), 2**63 - 1, 30000)
    scores = rng.integers(1, values, len(keys), endpoint=True).astype(float)
    at = table.insert(keys)
    table.write_columns(at, scores.view(np.int64) + 1, np.zeros(len(at), np.int64))
    table.erase(keys[:2000])
    waiting = np.arange(20000)
    waits = rng.integers(1, values, len(waiting), endpoint=True).astype(float)
    state = manager.export_filter(0)
    manager.import_filter(
        0, {**state, "keys": waiting, "counts": waits.view(np.int64) + 1, "last": np.zeros(len(waiting), np.int64)}
    )
    run(manager, keys[5000:5900], clicked=np.zeros(900))  # shown once more, and resident
    scores[5000:5900] += 1
    manager.start_at(999)
    run(manager, [], clicked=[])
    living = np.arange(2000, 30000)
    order = living[np.lexsort((keys[living], scores[living]))]
    gone = order[: int(0.37 * len(living))]
    assert (table.find(keys[gone]) == -1).all() and (table.find(keys[order[len(gone) :]]) >= 0).all()
    left = np.sort(waiting[np.lexsort((waiting, waits))][int(0.37 * len(waiting)) :])
    assert manager.export_filter(0)["keys"].tolist() == left.tolist()
    assert manager.stats()[0]["evicted"] == len(gone) and manager.stats()[0]["forgotten"] == 7400
    manager.check()


def _decayed(score, decay, sweeps):
    """As ec_score.h decays: one product with the power, that by repeated squaring."""
    power = 1.0
    while sweeps:
        if sweeps & 1:
            power *= decay
        sweeps >>= 1
        decay *= decay
    return score * power


@pytest.mark.parametrize("isa", ["baseline", "auto"])
@pytest.mark.parametrize("decay", [1.0, 0.999, 0.3])
@pytest.mark.parametrize("share", [0.01, 0.3])
def test_the_lowest_by_scores_of_all_ages(share, decay, isa):
    """One look by bounds a sweep: few low scores are gathered, many are not, and the oldest have no bound; the user's rows count for nothing."""
    rng = np.random.default_rng(3)
    rows, epoch = 40_000, 5000
    config = AdmitAndEvictConfig(
        admit_threshold=0.0,
        evict_step_interval=1000,
        policy="show_click",
        show_click=ShowClick(score_decay=decay, evict_percentage=share),
    )
    table = Table("t", 1, with_filter=True)
    manager = SwapManager([table], [1000], [config], num_threads=1)
    _set_isa(manager, isa)
    _set_bracket(manager, 10.0)  # more than go are gathered, so who is missed by the bounds is missed in the end
    manager.import_filter(0, {**manager.export_filter(0), "epoch": epoch})
    keys = rng.permutation(rows) - rows // 2
    scores = np.exp(rng.normal(0, 3, rows))
    scores[:50] = 5e-324
    last = epoch - rng.choice([0, 1, 2, 70, 500, 1022, 1023, 1024, 3000], rows)
    counts = scores.view(np.int64) + 1
    users = rng.random(rows) < 0.2
    counts[users] = last[users] = 0
    table.write_columns(table.insert(keys), counts, last)
    manager.start_at(999)
    run(manager, [], clicked=[])
    now = np.array([_decayed(*one) for one in zip(scores, [decay] * rows, (epoch + 1 - last).tolist(), strict=True)])
    scored = np.flatnonzero(~users)
    order = scored[np.lexsort((keys[scored], now[scored]))]
    gone = order[: int(share * len(scored))]
    found = table.find(keys)
    assert np.array_equal(np.flatnonzero(found < 0), np.sort(gone))
    manager.check()


CONFIGS = [
    {"admit_threshold": 3},
    {"admit_threshold": 3, "evict_threshold": 4, "evict_step_interval": 3, "evict_keep_min": 2},
    {"admit_threshold": 3, "sketch_bytes": 2048, "evict_threshold": 9, "evict_step_interval": 2},
    {
        "admit_threshold": 2.5,
        "evict_step_interval": 4,
        "policy": "show_click",
        "show_click": ShowClick(beta=2.0, score_decay=0.8, evict_percentage=0.3),
    },
    {"admit_threshold": 2, "admit_probability": 0.6, "admit_seed": 9},
]


@pytest.mark.parametrize("config", CONFIGS)
def test_training_goes_on_with_an_exported_state(config):
    rng = np.random.default_rng(1)
    batches = [(rng.integers(0, 40, 12), step + rng.integers(-3, 3, 12), rng.integers(0, 2, 12)) for step in range(60)]
    straight, table = make(12, sweep_rows=3, **config)
    for keys, times, clicked in batches:
        run(straight, keys, times=times, clicked=clicked)
    manager, table = make(12, sweep_rows=3, **config)
    for at, (keys, times, clicked) in enumerate(batches):
        if at % 7 == 0:
            manager.drop(0, manager.residents(0)[0])
            state, step = manager.export_filter(0), manager.step
            manager.close()
            manager = SwapManager([table], [12 + at % 5], [AdmitAndEvictConfig(**config)], sweep_rows=2)
            manager.import_filter(0, state)
            manager.start_at(step)
            if not state["sweeping"]:
                again = manager.export_filter(0)
                assert all(np.array_equal(again[name], value) for name, value in state.items())
        run(manager, keys, times=times, clicked=clicked)
    expected = straight.filter_state(0)
    for name, value in manager.filter_state(0).items():
        assert np.array_equal(value, expected[name]), name


def test_states_that_do_not_fit_are_refused():
    config = AdmitAndEvictConfig(admit_threshold=2, sketch_bytes=1024)
    state = FeatureFilter(config, 0).state()
    for name, value, what in (
        ("keys", np.array([1, 1]), "2 keys, 0 counts"),
        ("keys", [1], "keys"),
        ("late", np.array([3, 3]), "twice"),
        ("sketch_old", np.zeros(3, np.uint8), "3 bytes"),
        ("newest", 1.5, "newest"),
        ("epoch", None, "epoch"),
    ):
        with pytest.raises(ConfigError, match=what):
            FeatureFilter(config, 0).load({**state, name: value})
    one = np.array([1], np.int64)
    with pytest.raises(ConfigError, match="count of 0"):
        FeatureFilter(config, 0).load({**state, "keys": one, "counts": one - 1, "last": one})
    manager, _ = make(admit_threshold=2)
    run(manager, [5])
    with pytest.raises(ConfigError, match="counted keys already"):
        manager.import_filter(0, manager.export_filter(0))
    run(manager, [5])
    with pytest.raises(ConfigError, match="1 residents"):
        manager.import_filter(0, state)
    manager.plan(one, np.array([0, 1]))
    for call in (lambda: manager.export_filter(0), lambda: manager.import_filter(0, state)):
        with pytest.raises(PlanError):
            call()


def test_a_sketch_that_does_not_fit_in_memory():
    with pytest.raises(HostMemoryError, match="sketch_bytes"):
        FeatureFilter(AdmitAndEvictConfig(admit_threshold=2, sketch_bytes=2**46), 0)


# --------------------------------------------------------------------------------------------------------- configuration


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"policy": "clicks"}, "count"),
        ({"show_click": ShowClick()}, "show_click"),
        ({"policy": "show_click", "show_click": 3}, "ShowClick or None"),
        ({"policy": "show_click", "evict_threshold": 3, "evict_step_interval": 1}, "evict_threshold = 3"),
        ({"policy": "show_click", "time_source": "step"}, "time_source"),
        ({"policy": "show_click", "evict_step_interval": 3}, "nothing to sweep"),
        ({"policy": "show_click", "show_click": ShowClick(score_decay=0.5)}, "without a sweep"),
        ({"policy": "show_click", "evict_keep_min": 3}, "evict_keep_min = 3"),
        ({"policy": "show_click", "sketch_bytes": 4096}, "sketch_bytes = 4096"),
        ({"evict_keep_min": 3}, "evict_keep_min = 3"),
        ({"evict_keep_min": -1}, "evict_keep_min = -1"),
        ({"admit_threshold": 2.5}, "admit_threshold = 2.5"),
        ({"admit_probability": 0.0}, "admit_probability"),
        ({"admit_probability": 1.5}, "admit_probability"),
        ({"admit_seed": "x"}, "admit_seed"),
        ({"admit_threshold": 2, "sketch_bytes": 1000}, "1024 or more"),
        ({"sketch_bytes": 4096}, "from 2"),
        ({"admit_threshold": 2**32, "sketch_bytes": 4096}, "from 2"),
    ],
)
def test_what_does_not_go_together_is_refused(options, what):
    with pytest.raises(ConfigError, match=what):
        AdmitAndEvictConfig(**options)


@pytest.mark.parametrize(
    "options",
    [
        {"alpha": -1},
        {"beta": np.nan},
        {"score_decay": 1.5},
        {"score_decay": -0.1},
        {"evict_percentage": 2},
        {"alpha": 0, "beta": 0},
    ],
)
def test_bad_scores_are_refused(options):
    with pytest.raises(ConfigError, match="ShowClick: " + next(iter(options))):
        ShowClick(**options)


def test_show_click_has_defaults():
    rule = AdmitAndEvictConfig(policy="show_click")
    assert (
        rule.show_click == ShowClick(1.0, 0.0, 1.0, 0.0) and not rule.admits and not rule.evicts and rule.needs_labels
    )
