"""I10 of a whole model: a save from another thread is a cut between two steps, of all collections and of the dense part alike.

Each saver begins when training is at a drawn place: a stage of the loader's or the coordinator's threads, or a point within the step
(between the collections' forwards, in backward, before or after the dense update). What it has written must be, bit for bit, what a
run without a pipeline is after as many batches as the saved state says. So it is beside a loop of the user's own in `training_step`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import embcache as ec
from promises.piped import Delays
from promises.strategies import examples
from promises.training import model_state

STEPS = 12
WITHIN = ("forward", "between", "backward", "dense", "end")
STAGES = ("load", "prepare", "wait_room", "plan", "wait_window", "wait_loaded")
LIMIT_S = 600
COUNTED = ec.AdmitAndEvictConfig(admit_threshold=2, evict_threshold=5, evict_step_interval=3, time_source="step")

Reached = Callable[[str, int], None]


def nobody(place: str, number: int) -> None:
    """Nobody waits for a place."""


class Two(torch.nn.Module):
    """Two collections and a dense part that reads both; says where it is."""

    def __init__(self, rows: int | None) -> None:
        super().__init__()
        torch.manual_seed(3)
        tables = [ec.TableConfig("a", 4, hbm_rows=rows, admit_and_evict=COUNTED), ec.TableConfig("b", 4, hbm_rows=rows)]
        self.first, self.second = (ec.EmbeddingBagCollection([table], optimizer=ec.Adam(lr=0.1)) for table in tables)
        self.top = torch.nn.Linear(8, 1)
        self.reached: Reached = nobody
        self.number = 0

    def forward(self, batch: ec.JaggedFeatures) -> Any:
        self.number += 1
        self.reached("forward", self.number)
        one = self.first(batch).values()
        self.reached("between", self.number)
        out = self.top(torch.cat([one, self.second(batch).values()], 1))
        out.register_hook(lambda gradient: self.reached("backward", self.number))
        return out.square().mean(), out.detach()


def batches() -> Iterator[ec.JaggedFeatures]:
    generator = torch.Generator().manual_seed(4)
    for _ in range(STEPS):
        ones = torch.ones(6, dtype=torch.int64)
        yield ec.JaggedFeatures(["a", "b"], torch.randint(0, 20, (12,), generator=generator), torch.cat([ones, ones]))


def adam(model: Two) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.05)


def all_of(model: Two, dense: dict[str, Any]) -> Any:
    """Everything that a checkpoint is to hold, as ``==`` compares it."""
    managers = (model.first.manager, model.second.manager)
    moments = [{k: v.tolist() for k, v in state.items()} for state in dense["state"].values()]
    steps = [one.optimizer.step_count for one in (model.first, model.second)]
    return [model_state(m) for m in managers], [p.tolist() for p in model.state_dict().values()], moments, steps


class Steps(ec.TrainPipeline):
    def optimizer_step(self) -> None:
        self.model.reached("dense", self.model.number)
        super().optimizer_step()
        self.model.reached("end", self.model.number)


class Loop:
    """A loop of the user's own."""

    def __init__(self, model: Two) -> None:
        self.model, self.dense_optimizer, self.batches_done = model, adam(model), 0

    def step(self, batch: ec.JaggedFeatures) -> None:
        model = self.model
        self.dense_optimizer.zero_grad()
        model(batch)[0].backward()
        model.reached("dense", model.number)
        self.dense_optimizer.step()
        model.first.optimizer.step()
        model.second.optimizer.step()
        self.batches_done += 1
        model.reached("end", model.number)


@pytest.fixture(scope="module")
def serial() -> list[Any]:
    """The whole model after each number of batches."""
    loop, found = Loop(Two(None)), []
    for batch in [*batches(), None]:
        found.append(all_of(loop.model, loop.dense_optimizer.state_dict()))
        if batch is not None:
            loop.step(batch)
    return found


class Saver(threading.Thread):
    """Saves when training comes to a place, which waits there a moment, so that the save is asked for meanwhile."""

    def __init__(self, pipe: Steps | Loop, path: Path, place: tuple[str, int], delta: bool, background: bool) -> None:
        super().__init__(daemon=True)
        self.pipe, self.path, self.place, self.delta, self.background = pipe, path, place, delta, background
        self.here, self.generation = threading.Event(), 0
        self.error: BaseException | None = None

    def reached(self, place: str, number: int) -> None:
        if (place, number) == self.place and not self.here.is_set():
            self.here.set()
            time.sleep(0.005)

    def run(self) -> None:
        self.here.wait(LIMIT_S)
        try:
            self.save()
        except BaseException as error:
            self.error = error

    def save(self) -> None:
        pipe = self.pipe
        saved = ec.save(
            pipe.model,
            self.path,
            delta=self.delta,
            background=self.background,
            state=lambda: {"batches": pipe.batches_done, "dense": pipe.dense_optimizer.state_dict()},
        )
        self.generation = saved if isinstance(saved, int) else saved.result(LIMIT_S)


def places() -> st.SearchStrategy[tuple[str, int]]:
    return st.tuples(st.sampled_from(WITHIN + STAGES), st.integers(1, STEPS - 1))


def test_i10_a_save_in_another_thread_is_a_cut_between_steps(tmp_path: Path, serial: list[Any]) -> None:
    folders = iter(range(10**6))

    @examples(12)
    @given(
        moments=st.lists(st.tuples(places(), st.booleans(), st.booleans()), min_size=1, max_size=4),
        rows=st.sampled_from([14, 24, None]),
        depth=st.integers(1, 6),
        seed=st.integers(0, 2**32),
    )
    @example([((place, 5), False, True) for place in WITHIN], 24, 4, 1)
    @example([(("between", 3), True, True), (("dense", 3), True, True), (("backward", 8), True, False)], 14, 3, 2)
    def run(moments: list[tuple[tuple[str, int], bool, bool]], rows: int | None, depth: int, seed: int) -> None:
        path, model = tmp_path / str(next(folders)), Two(rows)
        with Steps(model, adam(model), depth=depth) as pipe:
            savers = [Saver(pipe, path, *moment) for moment in moments]

            def reached(place: str, number: int) -> None:
                for saver in savers:
                    saver.reached(place, number)

            class Watched(Delays):
                def start(self, stage: str, number: int) -> float:
                    reached(stage, number)
                    return super().start(stage, number)

            model.reached, pipe._flow.timeline = reached, Watched(seed)
            for saver in savers:
                saver.start()
            source = batches()
            for _ in range(STEPS):
                pipe.progress(source)
            for saver in savers:
                saver.here.set()  # a stage that was never reached in that batch
                saver.join(LIMIT_S)
                if saver.error is not None:
                    raise saver.error
        assert all_of(model, pipe.dense_optimizer.state_dict()) == serial[STEPS]
        model.first.close()
        model.second.close()
        check(path, savers, serial)

    run()


def check(path: Path, savers: list[Saver], serial: list[Any]) -> None:
    """What each of them has saved is the model after as many batches as it says."""
    for saver in savers:
        again = Two(None)
        report = ec.restore(again, path, saver.generation)
        assert all_of(again, report.state["dense"]) == serial[report.state["batches"]]
        again.first.close()
        again.second.close()


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("place", WITHIN)
def test_i10_a_save_beside_a_loop_with_training_step_is_a_cut(
    tmp_path: Path, serial: list[Any], place: str, background: bool
) -> None:
    loop = Loop(Two(24))
    step = ec.training_step(loop.model)
    saver = Saver(loop, tmp_path, (place, 5), False, background)
    loop.model.reached = saver.reached
    saver.start()
    for batch in batches():
        with step:
            loop.step(batch)
    saver.join(LIMIT_S)
    assert saver.here.is_set() and saver.error is None
    assert all_of(loop.model, loop.dense_optimizer.state_dict()) == serial[STEPS]
    check(tmp_path, [saver], serial)


def test_training_step_refuses_saves_inside_it_and_models_without_tables(tmp_path: Path) -> None:
    model = Two(24)
    with ec.training_step(model):
        with pytest.raises(ec.PlanError, match=r"after the training_step\(\) of a loop of your own"):
            ec.save(model, tmp_path)
        with ec.training_step(model.first), pytest.raises(ec.PlanError, match="inside a training step"):
            model.first.save(tmp_path)
    assert ec.save(model, tmp_path) == 1
    with pytest.raises(ec.ConfigError, match="holds no embedding collection"):
        ec.training_step(torch.nn.Linear(1, 1))


@pytest.mark.parametrize("place", WITHIN)
def test_i10_a_save_inside_a_step_is_refused(tmp_path: Path, place: str) -> None:
    """By a hook, or a signal's handler: half of the model has trained."""
    model = Two(24)

    def reached(here: str, number: int) -> None:
        if (here, number) == (place, 2):
            ec.save(model, tmp_path)

    with Steps(model, adam(model), depth=2) as pipe:
        model.reached, source = reached, batches()
        pipe.progress(source)
        with pytest.raises(ec.PlanError, match=r"inside a training step.*between two calls of progress"):
            pipe.progress(source)
        model.reached = nobody
        pipe.progress(source)
        assert ec.save(model, tmp_path) == 1


def test_a_save_gets_its_turn_while_steps_follow_at_once(tmp_path: Path) -> None:
    """Who trains leaves and comes back at once: whoever waits must come first."""
    model = Two(None)
    one = next(batches())
    with ec.TrainPipeline(model, adam(model), depth=4) as pipe:
        source = iter(lambda: one, None)
        pipe.progress(source)
        saved = threading.Event()

        def save() -> None:
            ec.save(model, tmp_path)
            saved.set()

        saver = threading.Thread(target=save)
        saver.start()
        deadline = time.monotonic() + LIMIT_S
        while not saved.is_set() and time.monotonic() < deadline:
            pipe.progress(source)
        saver.join(LIMIT_S)
    assert saved.is_set()
