"""I11: bad input or a full resource raises a typed error before state changes, and names the thing, the number and the
remedy; the process never dies."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import embcache as ec
from promises.strategies import one_feature
from promises.training import check, model_state, whole_state

NAN, INF = float("nan"), float("inf")
Case = tuple[Callable[..., Any], type[Exception], tuple[str, ...]]


def raises(call: Callable[[], Any], error: type[Exception], words: tuple[str, ...]) -> None:
    with pytest.raises(error) as caught:
        call()
    assert type(caught.value) is error, type(caught.value)
    assert isinstance(caught.value, ec.EmbCacheError)
    missing = [word for word in words if word not in str(caught.value)]
    assert not missing, f"{missing} not in {caught.value!s}"


def names(case: Any) -> str | None:
    return " ".join(case) if isinstance(case, tuple) else None


# ------------------------------------------------------------------------------------------------------- configuration

CONFIGURATION: list[Case] = [
    (lambda: ec.TableConfig("", 4), ec.ConfigError, ("name", "''")),
    (lambda: ec.TableConfig("t", 0), ec.ConfigError, ("'t'", "embedding_dim", "0", "1")),
    (lambda: ec.TableConfig("t", -3), ec.ConfigError, ("embedding_dim", "-3")),
    (lambda: ec.TableConfig("t", 2**20), ec.ConfigError, ("embedding_dim", "1048576", "8192")),
    (lambda: ec.TableConfig("t", 4.5), ec.ConfigError, ("embedding_dim", "4.5")),
    (lambda: ec.TableConfig("t", True), ec.ConfigError, ("embedding_dim", "True")),
    (lambda: ec.TableConfig("t", 4, []), ec.ConfigError, ("'t'", "feature_names")),
    (lambda: ec.TableConfig("t", 4, ["a", "a"]), ec.ConfigError, ("'t'", "feature_names", "twice")),
    (lambda: ec.TableConfig("t", 4, "a"), ec.ConfigError, ("feature_names", "list")),
    (lambda: ec.TableConfig("t", 4, pooling="max"), ec.ConfigError, ("pooling", "'max'", "sum", "mean")),
    (lambda: ec.TableConfig("t", 4, dtype="float64"), ec.ConfigError, ("dtype", "float64", "float32", "bfloat16")),
    (lambda: ec.TableConfig("t", 4, hbm_rows=0), ec.ConfigError, ("hbm_rows", "0")),
    (lambda: ec.TableConfig("t", 4, hbm_rows=2**31), ec.ConfigError, ("hbm_rows", str(2**31))),
    (lambda: ec.TableConfig("t", 4, num_embeddings=-1), ec.ConfigError, ("num_embeddings", "-1")),
    (lambda: ec.TableConfig("t", 4, seed=2**63), ec.ConfigError, ("seed", str(2**63))),
    (lambda: ec.TableConfig("t", 4, initializer="zeros"), ec.ConfigError, ("initializer", "zeros", "Uniform")),
    (lambda: ec.TableConfig("t", 4, admit_and_evict={}), ec.ConfigError, ("admit_and_evict", "AdmitAndEvictConfig")),
    (lambda: ec.Uniform(1.0, -1.0), ec.ConfigError, ("low", "1.0", "high", "-1.0")),
    (lambda: ec.Uniform(NAN, 1.0), ec.ConfigError, ("low", "nan")),
    (lambda: ec.Normal(0.0, -1.0), ec.ConfigError, ("std", "-1.0")),
    (lambda: ec.Constant(INF), ec.ConfigError, ("value", "inf")),
    (lambda: ec.SGD(lr=NAN), ec.ConfigError, ("SGD", "lr", "nan")),
    (lambda: ec.SGD(lr=-0.1), ec.ConfigError, ("SGD", "lr", "-0.1", ">= 0")),
    (lambda: ec.Adagrad(lr=INF), ec.ConfigError, ("Adagrad", "lr", "inf")),
    (lambda: ec.Adagrad(weight_decay=-1), ec.ConfigError, ("weight_decay", "-1")),
    (lambda: ec.RowWiseAdagrad(eps=-1e-3), ec.ConfigError, ("eps", "-0.001")),
    (lambda: ec.Adam(betas=(0.9, 1.0)), ec.ConfigError, ("betas", "1.0", "< 1")),
    (lambda: ec.Adam(betas=(0.9,)), ec.ConfigError, ("betas", "two")),
    (lambda: ec.AdmitAndEvictConfig(admit_threshold=-2), ec.ConfigError, ("admit_threshold", "-2")),
    (
        lambda: ec.AdmitAndEvictConfig(evict_threshold=5),
        ec.ConfigError,
        ("evict_threshold", "5", "evict_step_interval"),
    ),
    (
        lambda: ec.AdmitAndEvictConfig(evict_step_interval=5),
        ec.ConfigError,
        ("evict_step_interval", "5", "evict_threshold"),
    ),
    (lambda: ec.AdmitAndEvictConfig(time_source="clock"), ec.ConfigError, ("time_source", "clock")),
    (
        lambda: ec.AdmitAndEvictConfig(not_admitted_default_value=NAN),
        ec.ConfigError,
        ("not_admitted_default_value", "nan"),
    ),
]


@pytest.mark.parametrize(("call", "error", "words"), CONFIGURATION, ids=names)
def test_i11_a_bad_configuration_is_named(
    call: Callable[[], Any], error: type[Exception], words: tuple[str, ...]
) -> None:
    raises(call, error, words)


T = ec.TableConfig
MAKING: list[Case] = [
    (lambda kind: kind([]), ec.ConfigError, ("tables", "non-empty")),
    (lambda kind: kind([T("t", 4), T("t", 8)]), ec.ConfigError, ("'t'", "2 times")),
    (lambda kind: kind(["t"]), ec.ConfigError, ("tables", "TableConfig")),
    (lambda kind: kind(T("t", 4)), ec.ConfigError, ("tables", "list")),
    (lambda kind: kind([T("t", 4)], optimizer=torch.optim.SGD), ec.ConfigError, ("optimizer", "Adagrad")),
    (lambda kind: kind([T("t", 4)], hbm_bytes=0), ec.ConfigError, ("hbm_bytes", "0")),
    (lambda kind: kind([T("t", 4)], hbm_bytes=-5), ec.ConfigError, ("hbm_bytes", "-5")),
    (lambda kind: kind([T("t", 4)], hbm_bytes=1e9), ec.ConfigError, ("hbm_bytes", "1000000000.0")),
    (lambda kind: kind([T("t", 4)], hbm_bytes=63), ec.ConfigError, ("hbm_bytes", "63", "64", "'t'", "raise hbm_bytes")),
    (
        lambda kind: kind([T("t", 4, hbm_rows=100)], hbm_bytes=3000),
        ec.ConfigError,
        ("3000", "3232", "'t'", "lower hbm_rows"),
    ),
    (lambda kind: kind([T("t", 4)], policy="belady"), ec.ConfigError, ("policy", "belady", "lru")),
    (lambda kind: kind([T("t", 4)], num_threads=0), ec.ConfigError, ("num_threads", "0")),
    (lambda kind: kind([T("t", 4)], num_threads=-1), ec.ConfigError, ("num_threads", "-1")),
    (lambda kind: kind([T("t", 4)], device="tpu"), ec.ConfigError, ("device", "tpu")),
    (lambda kind: kind([T("t", 4)], device="cuda:7"), ec.ConfigError, ("cuda",)),
]


@pytest.mark.parametrize("kind", [ec.EmbCacheManager, ec.EmbeddingBagCollection, ec.EmbeddingCollection])
@pytest.mark.parametrize(("call", "error", "words"), MAKING, ids=names)
def test_i11_a_collection_that_cannot_be_made(
    kind: Any, call: Any, error: type[Exception], words: tuple[str, ...]
) -> None:
    if words == ("cuda",) and torch.cuda.device_count() > 7:
        kind([T("t", 4)], device="cuda:7").close()
        return
    raises(lambda: call(kind), error, words)


@pytest.mark.parametrize("accumulate", [0, -1, 1.5, True, "2"])
def test_i11_accumulate_is_a_positive_integer(accumulate: Any) -> None:
    raises(
        lambda: ec.EmbeddingBagCollection([T("t", 4)], accumulate=accumulate),
        ec.ConfigError,
        ("accumulate", repr(accumulate)),
    )


# ------------------------------------------------------------------------------------------------------------- batches


def longs(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


class Impostor:
    """A batch whose tensors changed after it was checked, or that never was: what a kernel must not meet."""

    def __init__(self, values: Any, lengths: Any, weights: Any = None) -> None:
        self._parts = values, lengths, weights

    def keys(self) -> list[str]:
        return ["f", "g"]

    def values(self) -> Any:
        return self._parts[0]

    def lengths(self) -> Any:
        return self._parts[1]

    def weights_or_none(self) -> Any:
        return self._parts[2]


def shrunk() -> ec.JaggedFeatures:
    batch = ec.JaggedFeatures(["f", "g"], longs(1, 2, 3), longs(2, 1))
    batch.values().resize_(1)
    return batch


def lengthened() -> ec.JaggedFeatures:
    lengths = longs(2, 1)
    batch = ec.JaggedFeatures(["f", "g"], longs(1, 2, 3), lengths)
    lengths[0] = 2**40
    return batch


def negative() -> ec.JaggedFeatures:
    lengths = longs(2, 1)
    batch = ec.JaggedFeatures(["f", "g"], longs(1, 2, 3), lengths)
    lengths[0], lengths[1] = -1, 4
    return batch


BATCHES: list[Case] = [
    (lambda: "nonsense", ec.ShapeError, ("str", "JaggedFeatures")),
    (lambda: None, ec.ShapeError, ("NoneType",)),
    (lambda: torch.arange(3), ec.ShapeError, ("Tensor",)),
    (lambda: ec.JaggedFeatures(["f"], longs(1), longs(1)), ec.ShapeError, ("'g'", "'u'", "['f']")),
    (lambda: ec.JaggedFeatures([], longs(), longs()), ec.ShapeError, ("no feature 'g'", "'u'", "[]")),
    (lambda: ec.JaggedFeatures(["f", "g"], longs(1, 2), longs(1, 2)), ec.ShapeError, ("lengths", "3", "2")),
    (lambda: ec.JaggedFeatures(["f", "g"], longs(1, 2), longs(1)), ec.ShapeError, ("1 lengths", "2 features")),
    (lambda: ec.JaggedFeatures(["f", "g"], torch.ones(2), longs(1, 1)), ec.ShapeError, ("values", "float32", "int64")),
    (lambda: ec.JaggedFeatures(["f", "g"], longs(1, 2)[None], longs(1, 1)), ec.ShapeError, ("values", "(1, 2)")),
    (lambda: ec.JaggedFeatures(["f", "g"], longs(1, 2), longs(-1, 3)), ec.ShapeError, ("lengths[0]", "-1")),
    (
        lambda: ec.JaggedFeatures(["f", "g"], longs(1, 2), longs(1, 1), torch.ones(3)),
        ec.ShapeError,
        ("3 weights", "2 values"),
    ),
    (
        lambda: ec.JaggedFeatures(["f", "g"], longs(1, 2), longs(1, 1), timestamps=longs(1)),
        ec.ShapeError,
        ("1 timestamps",),
    ),
    (lambda: Impostor(longs(1, 2), longs(1, 2)), ec.ShapeError, ("lengths", "3", "2")),
    (lambda: Impostor(longs(1, 2), longs(2**62, 2**62)), ec.ShapeError, ("lengths",)),
    (lambda: Impostor(torch.ones(2), longs(1, 1)), ec.ShapeError, ("values", "float32")),
    (shrunk, ec.ShapeError, ("lengths", "1 values")),
    (lengthened, ec.ShapeError, ("lengths", str(2**40))),
    (negative, ec.ShapeError, ("lengths[0]", "-1")),
    (lambda: ec.JaggedFeatures(["f", "g"], longs(1, 2), longs(1, 1)), ec.ConfigError, ("timestamps", "'u'")),
    (
        lambda: ec.JaggedFeatures(
            ["f", "g"], longs(*range(12)), longs(9, 3), timestamps=torch.zeros(12, dtype=torch.int64)
        ),
        ec.HbmCapacityError,
        ("'t'", "9", "8", "hbm_rows"),
    ),
]


@pytest.mark.parametrize("kind", [ec.EmbeddingBagCollection, ec.EmbeddingCollection])
@pytest.mark.parametrize(("make", "error", "words"), BATCHES, ids=names)
def test_i11_a_bad_batch_changes_nothing(kind: Any, make: Any, error: type[Exception], words: tuple[str, ...]) -> None:
    rule = ec.AdmitAndEvictConfig(admit_threshold=2, evict_threshold=5, evict_step_interval=1)
    tables = [T("t", 3, ["f"], hbm_rows=8), T("u", 4, ["g"], hbm_rows=8, admit_and_evict=rule)]
    collection = kind(tables, optimizer=ec.Adagrad(lr=0.1))
    good = ec.JaggedFeatures(["f", "g"], longs(1, 2, 7, 7), longs(2, 2), timestamps=longs(1, 2, 3, 4))
    for _ in range(2):
        out = collection(good)
        parts = [out.values()] if kind is ec.EmbeddingBagCollection else [part.values() for part in out.values()]
        torch.cat([part.reshape(-1) for part in parts]).sum().backward()
    before = whole_state(collection.manager)
    for _ in range(2):
        raises(lambda: collection(make()), error, words)
        assert whole_state(collection.manager) == before
    raises(lambda: collection.manager.plan(make()), error, words)
    assert whole_state(collection.manager) == before
    check(collection.manager)
    collection(good)


def test_i11_a_bad_learning_rate_in_param_groups_changes_nothing() -> None:
    """A scheduler that goes wrong is noticed in backward, before rows change; the pins end."""
    ebc = ec.EmbeddingBagCollection([T("f", 2, hbm_rows=4)], optimizer=ec.Adam(lr=0.1))
    ebc(one_feature([1, 2])).values().sum().backward()
    before, group = model_state(ebc.manager), ebc.optimizer.param_groups[0]
    for name, value in (
        ("lr", NAN),
        ("lr", -1.0),
        ("lr", "fast"),
        ("betas", (0.9, 2.0)),
        ("eps", -1.0),
        ("weight_decay", INF),
    ):
        good, group[name] = group[name], value
        loss = ebc(one_feature([1, 2])).values().sum()
        raises(loss.backward, ec.ConfigError, (name.split("[")[0], "param_groups"))
        group[name] = good
        del loss
        assert model_state(ebc.manager) == before and ebc.optimizer.step_count == 1
        ebc.optimizer.step()
        assert ebc.manager.stats()["pinned"] == 0
    ebc(one_feature([1, 2])).values().sum().backward()
    assert ebc.optimizer.step_count == 2


def test_i11_optimizer_state_of_another_kind_is_refused() -> None:
    ebc = ec.EmbeddingBagCollection([T("f", 2)], optimizer=ec.Adam(lr=0.1))
    other = ec.EmbeddingBagCollection([T("f", 2)], optimizer=ec.SGD(lr=0.5))
    raises(lambda: ebc.optimizer.load_state_dict(other.optimizer.state_dict()), ec.ConfigError, ("sgd", "adam"))
    raises(lambda: ebc.optimizer.load_state_dict({}), ec.ConfigError, ("state",))
    bad = ebc.optimizer.state_dict()
    bad["param_groups"][0]["lr"] = NAN
    raises(lambda: ebc.optimizer.load_state_dict(bad), ec.ConfigError, ("lr", "nan"))
    raises(lambda: ebc.optimizer.add_param_group({"params": []}), ec.ConfigError, ("one parameter group",))
    assert ebc.optimizer.param_groups[0]["lr"] == 0.1


# --------------------------------------------------------------------------------------------------------- table doors

ROWS = np.ones((2, 3), np.float32)
DOORS: list[Case] = [
    (lambda t: t.lookup(np.array([1.0])), ec.ShapeError, ("keys", "float64", "int")),
    (lambda t: t.lookup(np.array([[1]])), ec.ShapeError, ("keys", "(1, 1)")),
    (lambda t: t.lookup(np.array([True])), ec.ShapeError, ("keys", "bool")),
    (lambda t: t.lookup(np.array(["a"])), ec.ShapeError, ("keys",)),
    (lambda t: t.lookup(5), ec.ShapeError, ("keys",)),
    (lambda t: t.lookup([2**63]), ec.ShapeError, (str(2**63),)),
    (lambda t: t.find([[1], [2]]), ec.ShapeError, ("keys", "(2, 1)")),
    (lambda t: t.insert([None]), ec.ShapeError, ("None",)),
    (lambda t: t.erase([1.5]), ec.ShapeError, ("keys",)),
    (lambda t: t.lookup_rows(np.zeros(0, np.float32)), ec.ShapeError, ("keys", "float32")),
    (lambda t: t.assign([1, 2, 3], ROWS), ec.ShapeError, ("weights", "(2, 3)", "3")),
    (lambda t: t.assign([1, 2], np.ones((2, 4), np.float32)), ec.ShapeError, ("weights", "(2, 4)", "(2, 3)")),
    (lambda t: t.assign([1, 2], np.ones((2, 3), np.complex64)), ec.ShapeError, ("weights", "complex64", "float32")),
    (lambda t: t.assign([1, 2], ROWS, np.ones((2, 7), np.float32)), ec.ShapeError, ("state", "(2, 7)")),
    (lambda t: t.lookup([1, 2], np.ones((3, 3), np.float32)), ec.ShapeError, ("out", "(2, 3)")),
    (lambda t: t.lookup([1, 2], np.ones((2, 3))), ec.ShapeError, ("out", "float32")),
    (lambda t: t.lookup([1, 2], np.ones((2, 6), np.float32)[:, ::2]), ec.ShapeError, ("out",)),
    (lambda t: t.lookup([1, 2], frozen_rows()), ec.ShapeError, ("out",)),
    (lambda t: next(t.items(batch_rows=0)), ec.ConfigError, ("batch_rows", "0")),
]


def frozen_rows() -> np.ndarray:
    rows = ROWS.copy()
    rows.flags.writeable = False
    return rows


@pytest.mark.parametrize("door", ["EmbTable", "view"])
@pytest.mark.parametrize(("call", "error", "words"), DOORS, ids=names)
def test_i11_bad_arguments_of_a_table_change_nothing(
    door: str, call: Any, error: type[Exception], words: tuple[str, ...]
) -> None:
    if door == "EmbTable":
        table: Any = ec.EmbTable("t", 3, state_dim=3)
    else:
        manager = ec.EmbCacheManager([T("t", 3)], optimizer=ec.Adagrad())
        table = manager.table("t")
    table.insert([1, 7])
    before = [np.hstack(part[1:3]).tolist() for part in table.items()]
    raises(lambda: call(table), error, ("'t'", *words))
    assert [np.hstack(part[1:3]).tolist() for part in table.items()] == before and len(table) == 2
    table.check()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dim": 0}, ("dim", "0")),
        ({"dim": 10**6}, ("dim", "1000000")),
        ({"state_dim": -1}, ("state_dim", "-1")),
        ({"dtype": "float64"}, ("dtype", "float64")),
        ({"seed": 2**64}, ("seed", str(2**64))),
        ({"seed": "x"}, ("seed",)),
        ({"name": ""}, ("name",)),
        ({"num_threads": 0}, ("num_threads", "0")),
        ({"initializer": "uniform"}, ("initializer", "Uniform")),
        ({"directory": ""}, ("directory",)),
        ({"directory": "/no/such/place"}, ("/no/such/place",)),
    ],
)
def test_i11_a_table_that_cannot_be_made(options: dict[str, Any], words: tuple[str, ...]) -> None:
    raises(lambda: ec.EmbTable(**{"name": "t", "dim": 4, **options}), ec.ConfigError, words)


def test_i11_an_unknown_table_is_named() -> None:
    with ec.EmbCacheManager([T("t", 4), T("u", 4)]) as m:
        raises(lambda: m.table("v"), ec.ConfigError, ("'v'", "['t', 'u']"))


# --------------------------------------------------------------------------------------------------- closed and full


def test_i11_whatever_is_closed_says_so() -> None:
    ebc = ec.EmbeddingBagCollection([T("f", 2)])
    out = ebc(one_feature([1])).values().sum()
    info, m = ebc.manager.plan(one_feature([2])), ebc.manager
    view, iterator = m.table("f"), m.table("f").items()
    ebc.close()
    ebc.close()
    calls: list[Callable[[], Any]] = [
        lambda: ebc(one_feature([1])),
        lambda: ebc.eval()(one_feature([1])),
        lambda: m.plan(one_feature([1])),
        lambda: m.plan_async(one_feature([1])),
        lambda: m.swap_out(info),
        lambda: m.swap_in(info),
        lambda: m.finish(info),
        lambda: m.cancel(info),
        m.flush,
        m.rebalance,
        m.stats,
        lambda: view.lookup([1]),
        lambda: view.lookup([1], insert=False),
        lambda: view.find([1]),
        lambda: view.insert([1]),
        lambda: view.erase([1]),
        lambda: view.lookup_rows([1]),
        lambda: view.assign([1], np.ones((1, 2), np.float32)),
        lambda: len(view),
        view.check,
        lambda: next(iterator),
        out.backward,
    ]
    for call in calls:
        raises(call, ec.ClosedError, ("closed",))
    table = ec.EmbTable("t", 2)
    table.insert([1])
    iterator = table.items()
    table.close()
    table.close()
    for call in (
        lambda: table.lookup([1]),
        lambda: table.find([1]),
        lambda: table.insert([2]),
        lambda: table.erase([1]),
        lambda: table.assign([1], np.ones((1, 2), np.float32)),
        lambda: len(table),
        table.stats,
        table.check,
        lambda: next(iterator),
    ):
        raises(call, ec.ClosedError, ("'t'", "closed"))


def in_child(code: str, timeout: float = 240) -> str:
    """Run `code` in a fresh interpreter; its last line of output. A child that dies of a signal fails the test."""
    prelude = "import resource, numpy as np\nimport embcache as ec\n"
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", prelude + textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout.strip().splitlines()[-1]


def test_i11_host_memory_that_runs_out_is_an_exception_and_the_table_is_whole() -> None:
    told = in_child(
        """
        table = ec.EmbTable("t", 64, num_threads=1)
        table.insert(np.arange(1000))
        now = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (now + 120 * 2**20, resource.RLIM_INFINITY))
        start, failures = 1000, 0
        while failures < 3:
            try:
                table.insert(np.arange(start, start + 20_000))
                start += 20_000
            except ec.HostMemoryError as error:
                assert isinstance(error, MemoryError) and "'t'" in str(error), error
                failures += 1
                assert len(table) == start
                table.check()
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        assert (table.find(np.arange(start)) >= 0).all() and (table.find(np.arange(start, start + 20_000)) == -1).all()
        assert table.erase(np.arange(0, start, 2)) > 0
        table.insert(np.arange(10**9, 10**9 + 5_000))  # freed rows serve again
        table.check()
        print("survived", start > 100_000)
        """
    )
    assert told == "survived True"


def test_i11_a_plan_that_cannot_have_host_memory_changes_nothing() -> None:
    told = in_child(
        """
        import torch
        table = ec.TableConfig("f", 64, hbm_rows=30_000, admit_and_evict=ec.AdmitAndEvictConfig(admit_threshold=2))
        ebc = ec.EmbeddingBagCollection([table], optimizer=ec.SGD(lr=1.0), num_threads=1)

        def batch(start, count=20_000):
            keys = np.arange(start, start + count)
            return ec.JaggedFeatures(["f"], np.concatenate([keys, keys]), np.array([2 * count]))

        def seen():
            stats = ebc.manager.stats()
            return stats["rows"], stats["born"], stats["rejected"], stats["step"], stats["resident"], len(ebc.tables()["f"])

        torch.set_num_threads(1)
        ebc(batch(0)).values().sum().backward()
        now = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (now + 150 * 2**20, resource.RLIM_INFINITY))
        start, failures = 20_000, 0
        while failures < 3:
            before = seen()
            try:
                ebc(batch(start)).values().sum().backward()
                start += 20_000
            except ec.HostMemoryError:
                failures += 1
                assert seen() == before, (seen(), before)
                ebc.manager.table("f").check()
                assert ebc.manager.outstanding == 0
        ebc(batch(0)).values().sum().backward()  # rows that exist need no memory
        ebc.manager.table("f").check()
        print("survived", start > 20_000)
        """
    )
    assert told == "survived True"


def test_i11_hostile_input_does_not_kill_the_process() -> None:
    """Random nonsense into every door, in a child: typed errors only, and a table that still works."""
    told = in_child(
        """
        import random, torch
        random.seed(4)
        nothing = object()
        def junk():
            return random.choice([
                None, nothing, "x", b"y", 5, -1, 2**63, 2**64, 1.5, float("nan"), True, [], [[]], [1], [1.5], ["a"], [None], [2**70],
                np.zeros(0), np.zeros(3), np.zeros((2, 2), np.int64), np.arange(3), np.arange(6)[::2], np.arange(3, dtype=np.uint64) - 1,
                np.array([2**63 - 1, -2**63]), np.zeros((3, 4), np.float32), np.zeros((3, 4)), np.array(5), np.array([object()]),
                np.zeros(3, "M8[s]"), torch.arange(3), torch.ones(3), torch.zeros(2, 2, dtype=torch.int64), torch.tensor(5),
                torch.arange(3, dtype=torch.int32), torch.empty(0), {}, {1: 2}, slice(0, 3), range(3), memoryview(b"abc"),
            ])
        rule = ec.AdmitAndEvictConfig(admit_threshold=2, evict_threshold=5, evict_step_interval=1)
        tables = [ec.TableConfig("a", 4, hbm_rows=4), ec.TableConfig("b", 4, hbm_rows=4, admit_and_evict=rule)]
        ebc = ec.EmbeddingBagCollection(tables, optimizer=ec.Adam())
        table = ec.EmbTable("t", 4, state_dim=4)
        views = [table, *ebc.tables().values()]
        raised, others = 0, {}
        for turn in range(6000):
            view = random.choice(views)
            call = random.choice([
                lambda: view.lookup(junk()), lambda: view.lookup(junk(), junk()), lambda: view.find(junk()), lambda: view.insert(junk()),
                lambda: view.assign(junk(), junk()), lambda: view.assign(junk(), junk(), junk()), lambda: view.erase(junk()),
                lambda: view.lookup_rows(junk()), lambda: junk() in view,
                lambda: ebc(ec.JaggedFeatures(["a", "b"], junk(), junk())),
                lambda: ebc(ec.JaggedFeatures(["a", "b"], junk(), junk(), junk(), junk())),
                lambda: ebc(ec.JaggedFeatures(junk(), junk(), junk())),
                lambda: ebc(junk()), lambda: ebc.manager.plan(junk()), lambda: ebc.manager.finish(junk()),
                lambda: ebc.manager.swap_in(junk()), lambda: ebc.manager.cancel(junk()), lambda: ec.EmbTable(junk(), junk()),
                lambda: ec.EmbTable("x", 4, seed=junk()), lambda: ec.EmbTable("x", 4, num_threads=junk()),
                lambda: ec.TableConfig("x", junk()), lambda: ec.TableConfig(junk(), 4), lambda: ec.TableConfig("x", 4, junk()),
                lambda: ec.TableConfig("x", 4, pooling=junk()), lambda: ec.TableConfig("x", 4, dtype=junk()),
                lambda: ec.TableConfig("x", 4, hbm_rows=junk(), num_embeddings=junk()),
                lambda: ec.EmbCacheManager(junk()), lambda: ec.EmbCacheManager(tables, hbm_bytes=junk()),
                lambda: ec.EmbCacheManager(tables, num_threads=junk()), lambda: ec.EmbCacheManager(tables, device=junk()),
                lambda: ec.hash_strings(junk()), lambda: ec.hash_strings(["a"], junk()),
                lambda: ec.simulate(junk(), junk()), lambda: ec.SGD(lr=junk()), lambda: ec.Adam(betas=junk()),
                lambda: ec.AdmitAndEvictConfig(admit_threshold=junk()), lambda: ec.Uniform(junk(), junk()),
            ])
            try:
                call()
            except ec.EmbCacheError:
                raised += 1
            except Exception as error:
                import traceback
                others.setdefault(f"{type(error).__name__}: {error}"[:150], traceback.format_exc()[-600:])
        ebc.optimizer.step()
        for view in views:
            view.check()
        assert ebc.manager.stats()["pinned"] == 0
        assert not others, "\\n".join(f"{k}\\n{v}" for k, v in others.items())
        print("survived", raised > 1000)
        """
    )
    assert told == "survived True"
