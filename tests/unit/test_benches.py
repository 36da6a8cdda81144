"""Every bench runs: each file's cases once, tiny, answers compared with peers'. What they say of speed is not looked at."""

from __future__ import annotations

import importlib
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from race import Outcome, Race
from standings import lines

BENCH = Path(__file__).parents[2] / "bench"
ROWS = 2000
needs_a_compiler = pytest.mark.skipif(
    shutil.which("g++") is None, reason="g++ is not there, which peers are compiled with"
)


class Stopwatch:
    """What `Race` needs of pytest-benchmark's fixture; one round."""

    group = ""

    def __init__(self) -> None:
        self.extra_info: dict[str, Any] = {}

    def pedantic(self, target: Callable[..., Any], setup: Any, teardown: Any, rounds: int) -> None:
        assert rounds > 0
        positional, named = setup()
        target(*positional, **named)
        teardown(*positional, **named)


@pytest.fixture
def race(monkeypatch: pytest.MonkeyPatch) -> Iterator[Race]:
    monkeypatch.setattr("gc.collect", lambda: 0)  # before each case: most of a tiny case's time
    outcomes: list[Outcome] = []
    yield Race(Stopwatch(), outcomes, [0.0], cpu_clock=False)
    assert outcomes and all(np.isfinite(one.seconds) and one.rounds == 1 for one in outcomes)
    assert len(lines(outcomes)) > len(outcomes)


@pytest.fixture(autouse=True)
def _threads_of_torch() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def bench(monkeypatch: pytest.MonkeyPatch, name: str, **sizes: Any) -> Any:
    """The module, with these constants; maps of C++ libraries sit out, as where they are not installed."""
    module = importlib.import_module(name)
    for constant, value in {"MAPS": (), "cpp_map": lambda name, **options: "left out"}.items():
        if hasattr(module, constant):
            monkeypatch.setattr(module, constant, value)
    for constant, value in sizes.items():
        monkeypatch.setattr(module, constant, value)
    return module


@pytest.fixture
def batch_of_8(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of training steps."""
    bench(monkeypatch, "steps", BATCH=8, FILL_KEYS=1000)


@needs_a_compiler
def test_find(monkeypatch: pytest.MonkeyPatch, race: Race) -> None:
    module = bench(monkeypatch, "bench_find", QUERIES=256)
    world = module.World(ROWS)
    for kind in module.KINDS:
        module.test_find(race, world, kind, 1)
    module.test_find(race, world, "zipf", 2)
    world.close()


def test_hostile_keys(monkeypatch: pytest.MonkeyPatch, race: Race) -> None:
    module = bench(monkeypatch, "bench_hostile", KEYS=ROWS)
    filled = module.Filled(module.keys_of(np.arange(ROWS)))
    for pattern in [*list(module.PATTERNS)[::4], "one vshard"]:
        module.test_find_of_hostile_keys(race, filled, pattern)
    filled.table.close()


@needs_a_compiler
def test_lookup(monkeypatch: pytest.MonkeyPatch, race: Race) -> None:
    module = bench(monkeypatch, "bench_lookup", QUERIES=256)
    for threads in (1, 2):
        world = module.World(ROWS, 32, threads)
        module.test_lookup(race, world, "zipf")
        world.close()
    for dtype in ("float16", "bfloat16"):
        module.test_narrow_lookup(race, ROWS, dtype)


@needs_a_compiler
def test_insert(monkeypatch: pytest.MonkeyPatch, race: Race) -> None:
    module = bench(monkeypatch, "bench_insert", CALL=256)
    module.test_insert_from_empty(race, ROWS, None, module.NARROW)
    module.test_insert_from_empty(race, ROWS, module.CALL, module.DIM)
    module.test_longest_call(race, ROWS)
    module.test_find_after_growth(race, ROWS)


def test_overhead(monkeypatch: pytest.MonkeyPatch, race: Race, tmp_path: Path) -> None:
    module = bench(monkeypatch, "bench_overhead", CALLS=2)
    module.test_find_of_little(race, 0)
    module.test_find_of_little(race, 1)
    module.test_plan_of_little(race)
    module.test_step_of_little(race)
    monkeypatch.setattr(sys, "executable", shutil.which("true") or "")  # an interpreter that says nothing is a failure
    with pytest.raises(ValueError, match="could not convert"):
        module.import_seconds("numpy", "embcache.table", tmp_path)


@needs_a_compiler
def test_plan(monkeypatch: pytest.MonkeyPatch, race: Race) -> None:
    sizes = {"TABLES": 3, "BATCH": 16, "POPULATION": 400, "SMALL_TABLES": 10, "SMALL_IDS": 8}
    module = bench(monkeypatch, "bench_plan", **sizes)
    drawn = ("zipf", module.draw_batches(3, 400, module.bag_sizes, "zipf"))
    touched = module.Touched(drawn[1])
    module.test_plan_of_hits(race, drawn, touched, 1)
    touched.close()
    module.test_plan_with_swaps(race, drawn)
    module.test_many_small_tables(race)


@needs_a_compiler
def test_dedup(monkeypatch: pytest.MonkeyPatch, race: Race) -> None:
    module = bench(monkeypatch, "bench_dedup", KEYS=1 << 16, POPULATION=1000)
    drawn = module.draw_batches(1, module.POPULATION, lambda _rng: np.array([module.KEYS]), "zipf")
    module.test_plan_of_hits(race, drawn, 2)
    for csr in (False, True):
        module.test_dedup_alone(race, drawn, 1, csr)


def test_sweep(monkeypatch: pytest.MonkeyPatch, race: Race) -> None:
    module = bench(monkeypatch, "bench_sweep", BATCH=64, SLOTS=256)
    field = module.Field(ROWS, module.BY_TIME)
    module.test_sweep_by_time(race, field, 0.1)
    module.test_longest_step_by_time(race, field, 0.1)
    for kind in ("a floor that binds", "show/click, 10%"):
        module.test_sweep_that_looks_at_every_row(race, ROWS, kind)


@pytest.mark.usefixtures("batch_of_8")
def test_step(monkeypatch: pytest.MonkeyPatch, race: Race) -> None:
    module = bench(monkeypatch, "bench_step", BATCH=8)
    monkeypatch.setattr(module, "STREAMS", {})
    for optimizer, share in (("RowWiseAdagrad", 0.1), ("SGD", 1.0), ("Adam", 1.0)):
        field = module.Field(module.Shape(2, 400, 8), optimizer, 1, share)
        if share < 1:
            module.test_step_with_swaps(race, field, "uniform")
        else:
            module.test_step(race, field, 4, "zipf")
        field.ours.close()


@pytest.mark.usefixtures("batch_of_8")
def test_step_through_the_face(monkeypatch: pytest.MonkeyPatch, race: Race) -> None:
    module = bench(monkeypatch, "bench_torchrec", BATCH=8)
    monkeypatch.setattr(importlib.import_module("bench_step"), "STREAMS", {})
    shape = module.Shape(2, 400, 8)
    side = module.OurStep(shape, "SGD") if module.why_absent() else module.Faces(shape, "SGD")
    module.test_step_through_the_face(race, (shape, "SGD", side), 4, "zipf")
    side.close()


@pytest.mark.usefixtures("batch_of_8")
def test_pipeline(monkeypatch: pytest.MonkeyPatch, race: Race) -> None:
    steps = importlib.import_module("steps")
    shape = steps.Shape(2, 400, 4)
    module = bench(monkeypatch, "bench_pipeline", SHAPE=shape, BROAD=shape, STEPS=4, SEARCH=1)
    monkeypatch.setattr(module.Trained.__init__, "__defaults__", (shape,))
    drawn = module.drawn(shape)
    module.test_the_device_is_busy_while_the_host_does_three_quarters_of_its_work(race, drawn)
    module.test_twice_as_fast_where_host_and_device_are_equal(race, drawn)
    module.test_a_step_with_few_rows_in_hbm(race, drawn, 0.1, 10)


def test_lookahead(monkeypatch: pytest.MonkeyPatch, race: Race) -> None:
    module = bench(monkeypatch, "bench_lookahead", STEPS=4, POPULATION=400)
    for what in (module.noticing, module.beyond_lru):
        module.test_look_ahead(race, ("zipf", 2, 16, 3), what)


@needs_a_compiler
@pytest.mark.usefixtures("batch_of_8")
def test_checkpoint(monkeypatch: pytest.MonkeyPatch, race: Race, tmp_path: Path) -> None:
    monkeypatch.setenv("BENCH_CHECKPOINT_BYTES", "1e5")
    monkeypatch.setenv("BENCH_RESTORE_ROWS", "800")
    module = bench(monkeypatch, "bench_checkpoint", Shape=lambda tables, rows, dim: small(tables, 800, dim))
    small = importlib.import_module("steps").Shape
    module.test_full_save(race, tmp_path / "full")
    saved = module.Saved(tmp_path / "saved")
    module.test_restore(race, saved, 1)
    module.test_verify(race, saved)
    module.test_delta(race, saved, 0.1)
    module.test_delta_is_proportional(race, saved, 0.1)
    module.test_bytes_of_a_delta(race, saved, 0.1)
    module.test_readers_of_a_share(race, saved, 2)
    saved.table.close()
    module.test_training_beside_a_background_save(race, tmp_path / "beside", "delta", "step")


class Alone:
    """A crew of one rank, this process."""

    def run(self, job: Callable[..., Any], *arguments: Any) -> list[Any]:
        return [job(0, 1, *arguments)]


def test_distributed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, race: Race) -> None:
    """The job of each rank; TorchRec's half, whose plan is for two ranks, is left out."""
    sharded = importlib.import_module("sharded")
    job = sharded.Job(tables=2, rows=100, dim=4, batch=8, pooling=2)
    module = bench(monkeypatch, "bench_distributed", Job=lambda: job)
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        module.test_step_of_two_ranks(race, Alone(), job)
        assert sharded.wire(0, 1, 0) == (0, 0)  # nobody to send to
    finally:
        sharded.LIVE["ours"].close()
        sharded.LIVE.clear()
        dist.destroy_process_group()


def test_hit_ratios_and_errors_of_sketches(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = np.random.default_rng(1).zipf(1.3, 4000) % 300
    ratios, sketch = bench(monkeypatch, "bench_hit_ratio"), bench(monkeypatch, "sketch_error", BATCH=256)
    for module in (ratios, sketch):
        monkeypatch.setattr(module, "traces", lambda paths: iter([("drawn", keys)]))
    head, _, row = ratios.rows((), (0.1,), (1,))
    assert len(head) == len(row) and row[0] == "drawn"
    head, _, row = sketch.rows((), (4096,))
    assert len(head) == len(row) and row[1] == "4,000"


TESTED_HERE = "find hostile lookup insert overhead plan dedup sweep step torchrec pipeline lookahead checkpoint distributed hit_ratio".split()


def test_no_bench_is_left_out() -> None:
    assert sorted(path.stem for path in BENCH.glob("bench_*.py")) == sorted(f"bench_{name}" for name in TESTED_HERE)


@pytest.mark.parametrize("name", sorted(path.stem for path in BENCH.glob("*.py") if path.stem != "conftest"))
def test_every_file_can_be_imported(name: str) -> None:
    importlib.import_module(name)
