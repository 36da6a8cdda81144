"""Backends: both compute the same; memory, staging and errors."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from embcache.config import SGD, Adagrad, Adam, OptimizerSpec, RowWiseAdagrad
from embcache.devices import Backend, CpuBackend, GroupLookup, TorchBackend, backend_for, update_rule
from embcache.errors import ConfigError, HostMemoryError, ShapeError
from embcache.hostmemory import StagingBlock, StagingPool, host_free_bytes

CPU, STOCK = backend_for("cpu"), backend_for("cpu", kernels="torch")
BACKENDS = pytest.mark.parametrize("backend", [CPU, STOCK], ids=["compiled", "stock"])
SPECS = [SGD(lr=0.1, weight_decay=0.01), Adagrad(lr=0.1), RowWiseAdagrad(lr=0.1, weight_decay=0.01), Adam(lr=0.1)]


@pytest.fixture(autouse=True)
def one_torch_thread() -> Iterator[None]:
    """Tiny tensors gain nothing from torch's threads, and waiting for them on a busy machine takes long."""
    former = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(former)


class Case:
    """A dim group in the middle of a batch: a table with two features, with foreign positions on both sides."""

    def __init__(
        self, seed: int, dim: int, lengths: list[int], *, weighted: bool, filtered: bool, key_count: int
    ) -> None:
        rng = np.random.default_rng(seed)
        self.dim, self.batch_size, before, after = dim, len(lengths) // 2, 2, 1
        inner = rng.integers(0, key_count, sum(lengths))
        unique, inner = np.unique(inner, return_inverse=True)
        inverse = np.concatenate([np.arange(before), inner + before, np.arange(after) + before + len(unique)]).astype(
            np.int64
        )
        total = before + len(unique) + after
        slots = np.full(total, 10**9)
        slots[before : before + len(unique)] = rng.permutation(len(unique) + 3)[: len(unique)]
        self.fields: dict[str, Any] = {
            "slots": slots,
            "inverse": inverse,
            "occurrence_order": np.argsort(inverse, kind="stable"),
            "segment_offsets": np.concatenate([[0], np.cumsum(np.bincount(inverse, minlength=total))]),
            "admitted": rng.integers(0, 2, total).astype(np.uint8) if filtered else None,
            "unique_start": before,
            "unique_stop": before + len(unique),
            "bag_offsets": before + np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
            "feature_mean": np.array([1, 0], np.uint8),
            "out_cols": np.array([dim + 1, 0]),
        }
        self.weights = torch.from_numpy(rng.standard_normal((len(unique) + 3, dim)).astype(np.float32))
        self.grad_out = torch.from_numpy(rng.standard_normal((self.batch_size, 2 * dim + 1)).astype(np.float32))
        self.sequence_grad_out = torch.from_numpy(rng.standard_normal((sum(lengths), dim)).astype(np.float32))
        self.sample_weights = (
            torch.from_numpy(rng.standard_normal(len(inverse)).astype(np.float32)) if weighted else None
        )

    def lookup(self, backend: Backend) -> GroupLookup:
        return backend.lookup(**self.fields)

    def results(self, backend: Backend) -> dict[str, Tensor]:
        """Every method of a backend on this case."""
        lookup = self.lookup(backend)
        out = torch.full_like(self.grad_out, 9)
        assert backend.pooled_forward(self.weights, lookup, out, self.sample_weights) is out
        found = {
            "pooled": out,
            "sequence": backend.sequence_forward(self.weights, lookup),
            "pooled grad": backend.segment_grad_pooled(self.grad_out, lookup, self.dim, self.sample_weights),
            "sequence grad": backend.segment_grad_sequence(self.sequence_grad_out, lookup),
            "sample weights": backend.per_sample_weight_grad(self.grad_out, self.weights, lookup),
        }
        for spec in SPECS:
            for how in ("pooled", "sequence", "two steps"):
                for number, changed in enumerate(self.updated(backend, spec, lookup, how)):
                    found[f"{spec.kind} {how} {number}"] = changed
        return found

    def updated(self, backend: Backend, spec: OptimizerSpec, lookup: GroupLookup, how: str) -> list[Tensor]:
        rule, weights = update_rule(spec, step=2), self.weights.clone()
        states = [torch.full((len(weights), width), 0.5) for width in spec.state_widths(self.dim)]
        if how == "pooled":
            backend.segment_update_pooled(rule, weights, states, lookup, self.grad_out, self.sample_weights)
        elif how == "sequence":
            backend.segment_update_sequence(rule, weights, states, lookup, self.sequence_grad_out)
        else:
            grad = backend.segment_grad_pooled(self.grad_out, lookup, self.dim, self.sample_weights)
            chosen = slice(lookup.unique_start, lookup.unique_stop)
            admitted = None if lookup.admitted is None else lookup.admitted[chosen]
            backend.update(rule, weights, states, lookup.slots[chosen], grad, admitted)
        return [weights, *states]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    batch_size = draw(st.integers(0, 4))
    length = st.one_of(st.integers(0, 3), st.integers(0, 3), st.sampled_from([256, 700]))
    return Case(
        draw(st.integers(0, 2**32 - 1)),
        draw(st.sampled_from([1, 3, 8, 64, 129])),
        [draw(length) for _ in range(2 * batch_size)],
        weighted=draw(st.booleans()),
        filtered=draw(st.booleans()),
        key_count=draw(st.sampled_from([1, 3, 500])),
    )


@given(cases())
@settings(max_examples=40)
def test_both_backends_compute_the_same(case: Case) -> None:
    compiled, stock = case.results(CPU), case.results(STOCK)
    assert compiled.keys() == stock.keys()
    for name, values in compiled.items():
        scale = 1e-6 * max(1.0, float(values.abs().max()) if values.numel() else 1.0)
        torch.testing.assert_close(
            stock[name], values, rtol=1e-5, atol=10 * scale, msg=lambda text, name=name: f"{name}: {text}"
        )


@given(cases())
@settings(max_examples=15)
def test_stock_operators_are_deterministic_and_two_steps_are_one(case: Case) -> None:
    torch.use_deterministic_algorithms(True)
    try:
        first, second = case.results(STOCK), case.results(STOCK)
    finally:
        torch.use_deterministic_algorithms(False)
    for name, values in first.items():
        assert torch.equal(values, second[name]), name
    for spec in SPECS:
        for number in range(1 + len(spec.state_widths(1))):
            assert torch.equal(first[f"{spec.kind} pooled {number}"], first[f"{spec.kind} two steps {number}"])


@BACKENDS
def test_rows_move_and_add_up(backend: Backend) -> None:
    weights, rows = torch.arange(20.0).view(5, 4), torch.randn(3, 4)
    slots = np.array([4, 0, 2])
    for indexes in (slots, torch.from_numpy(slots)):
        assert torch.equal(backend.gather_rows(weights, indexes), weights[slots])
        out = torch.empty(3, 4)
        assert backend.gather_rows(weights, indexes, out) is out
        want = weights.clone()
        want[slots] = rows
        backend.scatter_rows(weights, indexes, rows)
        assert torch.equal(weights, want)
        want[slots] += rows
        backend.add_rows(weights, indexes, rows)
        assert torch.equal(weights, want)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@given(case=cases())
@settings(max_examples=15)
def test_both_backends_compute_the_same_on_narrow_rows(dtype: torch.dtype, case: Case) -> None:
    """Results are float32; an updated weight may fall on the other side of a tie."""
    case.weights = case.weights.to(dtype)
    compiled, stock = case.results(CPU), case.results(STOCK)
    for name, values in compiled.items():
        stored = name.endswith(" 0")
        assert values.dtype is stock[name].dtype is (dtype if stored else torch.float32), name
        tolerance = torch.finfo(dtype).eps if stored else 1e-5
        largest = float(values.float().abs().max()) if values.numel() else 1.0  # sums of hundreds cancel
        torch.testing.assert_close(
            stock[name].float(),
            values.float(),
            rtol=tolerance,
            atol=tolerance * max(1.0, largest),
            msg=lambda text, name=name: f"{name}: {text}",
        )


@BACKENDS
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_narrow_rows_move_as_they_are_or_widened(backend: Backend, dtype: torch.dtype) -> None:
    buffer = backend.allocate(6, 3, dtype)
    assert buffer.dtype is dtype and not buffer.any()
    rows, slots = torch.randn(3, 3).to(dtype), np.array([5, 0, 2])
    backend.scatter_rows(buffer, slots, rows)
    assert torch.equal(buffer[slots], rows) and torch.equal(backend.gather_rows(buffer, slots), rows)
    wide = torch.empty(3, 3)
    assert backend.gather_rows(buffer, slots, wide) is wide and torch.equal(wide, rows.float())
    bits = backend.to_host(rows)
    assert bits.dtype == (np.float16 if dtype is torch.float16 else np.int16)
    assert torch.equal(torch.from_numpy(bits.copy()).view(dtype), rows)
    with backend.staging((3, 3), bits.dtype) as block:
        block.array[...] = bits
        backend.scatter_rows(buffer, np.array([1, 3, 4]), backend.upload(block).view(dtype))
    assert torch.equal(buffer[[1, 3, 4]], rows)
    assert backend.allocate(1 << 20, 4, dtype).untyped_storage().nbytes() < 16 << 20


@BACKENDS
def test_nothing_is_recorded_for_autograd(backend: Backend) -> None:
    case = Case(0, 4, [1, 2, 0, 3], weighted=False, filtered=False, key_count=3)
    lookup = case.lookup(backend)
    case.weights.requires_grad_()
    psw = torch.ones(len(lookup.inverse), requires_grad=True)
    out = torch.zeros_like(case.grad_out)
    backend.pooled_forward(case.weights, lookup, out, psw)
    assert not out.requires_grad
    assert not backend.sequence_forward(case.weights, lookup).requires_grad
    expanded = torch.ones(()).expand(case.grad_out.shape)  # the gradient of a sum has no memory of its own
    assert torch.equal(
        backend.segment_grad_pooled(expanded, lookup, 4, psw),
        backend.segment_grad_pooled(expanded.contiguous(), lookup, 4, psw),
    )


@BACKENDS
def test_an_update_of_admitted_rows_only(backend: Backend) -> None:
    for admitted in (np.array([1, 0, 1], np.uint8), torch.tensor([True, False, True])):
        weights = torch.zeros(4, 2)
        backend.update(update_rule(SGD(lr=1)), weights, [], np.array([3, 1, 0]), torch.ones(3, 2), admitted)
        assert weights.tolist() == [[-1, -1], [0, 0], [0, 0], [-1, -1]]


@BACKENDS
def test_i11_a_look_up_without_its_arrays_is_refused(backend: Backend) -> None:
    lookup = backend.lookup(slots=np.arange(2), inverse=np.arange(2))
    rows = torch.zeros(2, 3)
    assert (lookup.unique_count, lookup.position_count) == (2, 2)
    with pytest.raises(ShapeError, match="no bags"):
        backend.pooled_forward(rows, lookup, rows)
    with pytest.raises(ShapeError, match="no occurrences"):
        backend.segment_grad_sequence(rows, lookup)
    with pytest.raises(ShapeError, match="states has 0 arrays; adagrad needs 1"):
        backend.update(update_rule(Adagrad()), rows, [], np.arange(2), rows)


# --------------------------------------------------------------------------------------------------------- choice


def test_backend_for_a_device() -> None:
    assert isinstance(backend_for("cpu"), CpuBackend)
    assert isinstance(backend_for(torch.device("cpu")), CpuBackend)
    assert isinstance(backend_for("cpu", kernels="torch"), TorchBackend)
    assert backend_for("cpu", num_threads=3).num_threads == 3
    for device in ("tpu", "cuda:x", "cpu:-1", "", "meta"):
        with pytest.raises(ConfigError, match="device = "):
            backend_for(device)
    with pytest.raises(ConfigError, match="kernels = 'fast'"):
        backend_for("cpu", kernels="fast")


def test_a_missing_accelerator_is_a_config_error_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"cuda.*use \"cpu\""):
        backend_for("cuda:0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ConfigError, match="index below 1"):
        backend_for("cuda:7")
    monkeypatch.setitem(__import__("sys").modules, "torch_npu", None)
    with pytest.raises(ConfigError, match=r"torch_npu cannot be imported"):
        backend_for("npu")


# --------------------------------------------------------------------------------------------------------- memory


@BACKENDS
def test_allocated_rows_are_zero_and_writable(backend: Backend) -> None:
    for rows, dim in ((0, 4), (3, 1), (70_001, 9)):
        memory = backend.allocate(rows, dim)
        assert memory.shape == (rows, dim)
        assert memory.dtype == torch.float32
        assert not memory.any()
        memory.fill_(1)
    for rows, dim in ((-1, 4), (1, 0), (1, 8193)):
        with pytest.raises(ShapeError, match=f"{rows} rows of {dim} elements"):
            backend.allocate(rows, dim)


def test_a_large_buffer_outlives_its_makers_and_gives_its_memory_back() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    view = CPU.allocate(1 << 20, 16)[5:7]
    gc.collect()
    view.fill_(3)
    assert float(view.sum()) == 96
    assert view.data_ptr() % (2 << 20) == 5 * 64  # the buffer starts on a huge page
    before = resident()
    buffer = CPU.allocate(1 << 20, 32)
    buffer.fill_(1)
    assert resident() - before > 100 << 20
    del buffer
    gc.collect()
    assert resident() - before < 50 << 20


def test_i11_memory_that_does_not_exist_is_a_host_memory_error() -> None:
    with pytest.raises(HostMemoryError, match="hbm_rows"):
        CPU.allocate(2**48, 8192)


def test_i12_a_forked_child_sees_no_rows_and_does_no_harm() -> None:
    buffer = CPU.allocate(1 << 20, 4)
    buffer.fill_(7)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        view = memoryview(buffer.numpy()).cast("B")
        seen = bytes(view[:4]) == bytes(4)
        os.write(writer, b"y" if seen else b"n")
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reader, 1) == b"y"
    os.close(reader)
    os.close(writer)
    assert bool((buffer == 7).all())


def test_free_memory_is_bounded_by_the_cgroup(tmp_path: Path) -> None:
    def write(place: str, text: str) -> None:
        path = tmp_path / place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    write("proc/meminfo", "MemTotal: 900 kB\nMemAvailable:     500 kB\n")
    assert host_free_bytes(tmp_path) == 500 * 1024
    write("proc/self/cgroup", "0::/a/b\n")
    write("sys/fs/cgroup/a/b/memory.max", "max\n")
    write("sys/fs/cgroup/a/b/memory.current", "7\n")
    assert host_free_bytes(tmp_path) == 500 * 1024
    write("sys/fs/cgroup/a/memory.max", "100000\n")
    write("sys/fs/cgroup/a/memory.current", "90000\n")
    assert host_free_bytes(tmp_path) == 10_000
    write("sys/fs/cgroup/a/memory.stat", "anon 1\ninactive_file 2000\n")
    assert host_free_bytes(tmp_path) == 12_000
    write("proc/self/cgroup", "5:cpu:/x\n3:memory:/m\n")
    write("sys/fs/cgroup/memory/m/memory.limit_in_bytes", "3000\n")
    write("sys/fs/cgroup/memory/m/memory.usage_in_bytes", "5000\n")
    assert host_free_bytes(tmp_path) == 0
    assert host_free_bytes(tmp_path / "nowhere") > 0
    assert 0 < CPU.free_memory() < 1 << 50


# --------------------------------------------------------------------------------------------------------- copies


@BACKENDS
def test_values_travel_both_ways(backend: Backend) -> None:
    for array in (
        np.arange(6, dtype=np.int64),
        np.zeros((0, 3), np.float32),
        np.linspace(0, 1, 6, dtype=np.float32).reshape(3, 2),
        np.array([True, False]),
    ):
        frozen = array.copy()
        frozen.flags.writeable = False
        for values in (array, frozen, torch.from_numpy(array)):
            there = backend.to_device(values)
            assert there.device == backend.device
            back = backend.to_host(there)
            np.testing.assert_array_equal(back, array)
            assert back.dtype == array.dtype


@BACKENDS
def test_staged_values_arrive_and_the_memory_may_be_filled_again(backend: Backend) -> None:
    arrived = []
    for value in range(10):
        with backend.staging((5, 3)) as block:
            block.array[...] = value
            arrived.append(backend.upload(block))
    assert [float(values.sum()) for values in arrived] == [15.0 * value for value in range(10)]


def test_a_direct_backend_shows_its_memory() -> None:
    weights = CPU.allocate(4, 2)
    CPU.as_numpy(weights)[1] = 5
    assert weights.tolist() == [[0, 0], [5, 5], [0, 0], [0, 0]]
    assert CPU.direct
    assert not STOCK.direct
    with pytest.raises(ConfigError, match="no NumPy view"):
        STOCK.as_numpy(weights)


@BACKENDS
def test_streams_and_events_are_no_ops_on_cpu(backend: Backend) -> None:
    with backend.stream(backend.side_stream()):
        event = backend.event()
    backend.wait(event)
    backend.synchronize()
    event.synchronize()
    assert event.query()


class ManualEvent:
    """An event that a test lets happen."""

    def __init__(self) -> None:
        self.done = threading.Event()

    def query(self) -> bool:
        return self.done.is_set()

    def synchronize(self) -> None:
        assert self.done.wait(10)


def test_staging_memory_is_not_reused_before_its_copy_is_done() -> None:
    pool = StagingPool(pin=False)
    block, event = pool.take(100), ManualEvent()
    pool.give(block, event)
    other = pool.take(100)
    assert other.data_ptr() != block.data_ptr()
    event.done.set()
    assert pool.take(100).data_ptr() == block.data_ptr()
    assert pool.take(10**6).numel() == 1 << 20


def test_staging_waits_for_the_oldest_copy_instead_of_growing() -> None:
    pool = StagingPool(pin=False)
    blocks = [(pool.take(1), ManualEvent()) for _ in range(pool.BLOCKS_A_SIZE)]
    for block, event in blocks:
        pool.give(block, event)
    got: list[Tensor] = []
    waiter = threading.Thread(target=lambda: got.append(pool.take(1)))
    waiter.start()
    blocks[0][1].done.set()
    waiter.join(10)
    assert [block.data_ptr() for block in got] == [blocks[0][0].data_ptr()]
    blocks[1][1].done.set()
    fifth, last = pool.take(1), ManualEvent()
    assert fifth.data_ptr() == blocks[1][0].data_ptr()
    last.done.set()  # a fifth block waits for its copy, then is dropped
    for block in (got[0], fifth, torch.empty_like(fifth)):
        pool.give(block, last)


def test_a_failed_fill_gives_its_staging_memory_back() -> None:
    def fill(make: Callable[[], Any]) -> StagingBlock:
        with make() as block:
            block.array[...] = 1
            raise KeyError

    backend = TorchBackend(torch.device("cpu"))
    with pytest.raises(KeyError):
        fill(lambda: backend.staging((3,)))
    assert sum(len(idle) for idle in backend._staging._idle.values()) == 1
