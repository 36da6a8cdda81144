"""R16: a save that goes on while sweeps evict, evicted keys come back, and rows change their slots, writes one moment: the cut.

Tables whose filters evict, in as few slots as training allows. The writer is held up before every chunk and let go by as many
chunks as hypothesis says, batch by batch; what is restored equals what was there at the cut, bit for bit: rows, states,
frequencies, timestamps, filters, and no key more. `test_i10_background` does the same with plans ahead and every way to fail.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import embcache as ec
from embcache import manager as manager_module
from embcache import savejob, savepart
from embcache._core.swap import SwapManager
from promises.gate import LIMIT_S, Gate, gates, held_up
from promises.strategies import ROW_TYPES, World, examples, filters, make_batch, table_lists, worlds
from promises.training import check, make_collection, model_state, train_window

evicting = filters().filter(lambda rule: rule.evicts)
swept_worlds = worlds(steps=(8, 20), tables=table_lists(most=2, filtered=evicting, dtypes=ROW_TYPES))


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Gate]]:
    yield from gates(monkeypatch)


def kept_moment(
    world: World,
    gate: type[Gate],
    folder: str,
    cut: int,
    permits: Sequence[int],
    by_hand: Sequence[int | None],
    delta: bool,
    watched: Callable[[Any], object] | None = None,
) -> dict[str, int]:
    """Train, save in the background from window `cut` on, train on; the generation must be the state at the cut.

    Before each window of those that follow, `permits` chunks are let go, and a key is erased if one is given; `watched` is
    called after it. Returns how many rows were evicted and swapped out while the writer was held up.
    """
    windows = world.windows()
    collection = make_collection(world, world.least_rows())
    gate.permits.release(10**6)
    for number, window in enumerate(windows[:cut]):
        if delta and number == cut // 2:
            collection.save(folder)
        train_window(collection, window, world.joint)
    wanted, before = model_state(collection.manager), collection.manager.stats()
    with held_up(gate):
        saving = collection.save(folder, delta=delta, background=True)
        for window, count, key in zip(windows[cut:], permits, by_hand, strict=False):
            for _ in range(count):
                gate.permits.release()
            if key is not None:
                for table in world.tables:
                    collection.manager.table(table.name).erase([key])
            train_window(collection, window, world.joint)
            if watched is not None:
                watched(collection)
    during = collection.manager.stats()
    generation = saving.result(LIMIT_S)
    assert restored(world, folder, generation) == wanted
    following = collection.save(folder, delta=True)
    assert restored(world, folder, following) == model_state(collection.manager)
    check(collection.manager)
    collection.close()
    return {name: during[name] - before[name] for name in ("evicted", "swap_out_rows")}


def restored(world: World, folder: str, generation: int) -> Any:
    other = make_collection(world, None)
    assert other.restore(folder, generation).skipped == []
    check(other.manager)
    state = model_state(other.manager)
    other.close()
    return state


def test_r16_a_generation_is_the_state_at_the_cut_whatever_is_evicted_meanwhile(
    tmp_path: Path, gate: type[Gate], monkeypatch: pytest.MonkeyPatch
) -> None:
    @examples(20)
    @given(world=swept_worlds, data=st.data())
    def run(world: World, data: st.DataObject) -> None:
        windows = world.windows()
        # With slices of one row what a sweep has killed stays where it is for many steps.
        slow = functools.partial(SwapManager, sweep_rows=data.draw(st.sampled_from([1, 1 << 20])))
        monkeypatch.setattr(manager_module, "SwapManager", slow)
        gate.rows = data.draw(st.integers(1, 4))
        cut = data.draw(st.integers(1, len(windows) - 1))
        left = len(windows) - cut
        permits = data.draw(st.lists(st.sampled_from([0, 1, 1, 2, 3, 7]), min_size=left, max_size=left))
        key = st.none() | st.sampled_from(sorted(world.keys_of(world.tables[0], world.batches)) or [0])
        by_hand = data.draw(st.lists(key, min_size=left, max_size=left))
        with tempfile.TemporaryDirectory(dir=tmp_path) as folder:
            kept_moment(world, gate, folder, cut, permits, by_hand, data.draw(st.booleans()))

    run()


# ------------------------------------------------------------------------------------------- one run, and bugs in it


def steady_world() -> World:
    """A run in which every window evicts, brings keys back, and swaps."""
    rules = [
        ec.AdmitAndEvictConfig(evict_threshold=1, evict_step_interval=1, time_source="step"),
        ec.AdmitAndEvictConfig(admit_threshold=2, evict_threshold=15, evict_step_interval=2),
    ]
    tables = [
        ec.TableConfig(f"table {dtype}", 3, ["f"], dtype=dtype, admit_and_evict=rule)
        for rule, dtype in zip(rules, ("float32", "bfloat16"), strict=True)
    ]
    rng = np.random.default_rng(16)
    batches = [make_batch(rng, ["f"], list(range(30)), 4, now=10 * i, skew=1.2) for i in range(16)]
    return World(tables, ec.Adagrad(lr=0.1), True, 1, 1, batches)


def steady_run(gate: type[Gate], path: Path, delta: bool) -> dict[str, int]:
    """Save in this run; returns how many rows were evicted, were swapped out, and came back meanwhile."""
    gate.rows, world, cut = 2, steady_world(), 6
    before, after = (world.keys_of(world.tables[0], [world.batches[i]]) for i in (cut - 1, cut))
    by_hand = [None if i % 3 == 2 else i for i in range(10)]
    by_hand[0] = min(before - after)  # which nobody has copied out by then
    dead: set[tuple[str, int]] = set()
    living: set[tuple[str, int]] = set()
    back = 0

    def watch(collection: Any) -> None:
        nonlocal living, back
        views = {table.name: collection.manager.table(table.name) for table in world.tables}
        now = {(name, key) for name, view in views.items() for keys, *_ in view.items() for key in keys.tolist()}
        back += len(now & dead)
        dead.difference_update(now)
        dead.update(living - now)
        living = now

    return kept_moment(world, gate, str(path), cut, [1] * 10, by_hand, delta, watch) | {"back": back}


@pytest.mark.parametrize("delta", [False, True])
def test_r16_keys_die_return_and_move_between_the_chunks(tmp_path: Path, gate: type[Gate], delta: bool) -> None:
    seen = steady_run(gate, tmp_path, delta)
    assert min(seen.values()) > 5, seen


def no_copies_of_what_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(savejob.SaveJob, "comes_in", lambda self, manager, plan: None)


def no_copies_of_what_is_erased(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(savejob.SaveJob, "changes", lambda self, manager, t, keys: None)


def no_copies_of_what_a_sweep_kills(monkeypatch: pytest.MonkeyPatch) -> None:
    def keep_plan(self: Any, manager: ec.EmbCacheManager, plan: Any) -> None:
        for part in self.parts:
            rows = part.concerned(plan)
            self._keep(part, rows[np.isin(part.core.columns(rows)[0], plan.unique_keys)])

    monkeypatch.setattr(savejob.SaveJob, "_keep_plan", keep_plan)


def what_was_copied_is_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    real = savepart.unread_rows
    monkeypatch.setattr(savepart.Part, "take", lambda self, rows: np.ascontiguousarray(rows[rows < len(self.members)]))
    monkeypatch.setattr(
        savepart,
        "unread_rows",
        lambda planner, plan, t, members, listing: real(planner, plan, t, members | savepart.IN),
    )


def a_slot_stays_settled_when_another_row_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    real, settled = savepart.unread_rows, set()

    def unread_rows(planner: Any, plan: Any, t: int, members: Any, listing: bool) -> tuple[np.ndarray, int]:
        rows, listed = real(planner, plan, t, members, listing)
        _, slots, held, _, _ = planner.residents(t)
        place = dict(zip(held.tolist(), slots.tolist(), strict=True))
        fresh = [row for row in rows.tolist() if (planner, t, place.get(row, -row - 1)) not in settled]
        settled.update((planner, t, slot) for slot in place.values())
        return np.array(fresh, np.int64), listed

    monkeypatch.setattr(savepart, "unread_rows", unread_rows)


def what_is_written_counts_as_unchanged_too_late(monkeypatch: pytest.MonkeyPatch) -> None:
    real = savejob.SaveJob.run

    def run(self: Any) -> int:
        generation = real(self)
        for part in self.parts:
            part.core.mark_saved()
        return generation

    monkeypatch.setattr(savejob.SaveJob, "run", run)


@pytest.mark.parametrize(
    "bug",
    [
        no_copies_of_what_trains,
        no_copies_of_what_is_erased,
        no_copies_of_what_a_sweep_kills,
        what_was_copied_is_read_again,
        a_slot_stays_settled_when_another_row_takes_it,
        what_is_written_counts_as_unchanged_too_late,
    ],
)
def test_r16_a_planted_bug_is_found(
    tmp_path: Path, gate: type[Gate], monkeypatch: pytest.MonkeyPatch, bug: Callable[[pytest.MonkeyPatch], None]
) -> None:
    """The comparison sees what it is there to see; at the latest in the fifth run, as the writer may be quick and have read a
    row before it is erased."""
    bug(monkeypatch)
    with pytest.raises((AssertionError, ec.ConfigError, ec.CorruptionError, ec.ChangedError)):
        for number in range(10):
            steady_run(gate, tmp_path / str(number), number % 2 == 1)
