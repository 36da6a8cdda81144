"""I2, I5, I10 and I13 while a pipeline plans ahead, with delays in every stage. (I9: test_i09_pipeline.py.)"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import embcache as ec
from promises.piped import drain, open_pipe, steps_of
from promises.strategies import SOAK, World, examples, one_feature, worlds
from promises.training import check, make_collection, model_state, train_window

ROWS = st.floats(0, 1)


def slots(world: World, share: float) -> dict[str, int]:
    """From the least that holds one window to three of them."""
    return {name: least + int(2 * share * least) for name, least in world.least_rows().items()}


def watched(collection: Any, seen: Counter[str]) -> None:
    """Look at every plan the moment it is made: what it takes, and what unfinished batches use."""
    manager = collection.manager
    plan_ahead, went = manager.plan_ahead, {}

    def plan(*arguments: Any) -> Any:
        info = plan_ahead(*arguments)
        with manager.door.planning:
            others = [other for other in manager.planner.outstanding if other.step != info.step]
            for t in range(len(manager.layout.tables)):
                taken = set(info.swap_out_slots[slice(*info.swap_out_offsets[t : t + 2])].tolist())
                taken |= set(info.swap_in_slots[slice(*info.swap_in_offsets[t : t + 2])].tolist())
                for other in others:
                    part = slice(*other.unique_offsets[t : t + 2])
                    used = other.slots[part][other.admitted[part].astype(bool)]
                    assert not taken & set(used.tolist()), f"step {info.step} takes a slot that step {other.step} uses"
                    seen["beside others"] += 1
                for key in info.swap_in_keys[slice(*info.swap_in_offsets[t : t + 2])].tolist():
                    seen["back at once"] += went.get((t, key), -9) >= info.step - 3
                for key in info.swap_out_keys[slice(*info.swap_out_offsets[t : t + 2])].tolist():
                    went[t, key] = info.step
        seen["victims"] += len(info.swap_out_slots)
        return info

    manager.plan_ahead = plan


def test_i2_i5_i13_slots_in_use_are_no_victims_and_what_comes_back_is_new() -> None:
    """Each plan is looked at as it is made; rows that return within three batches are what the last update made of them."""
    seen: Counter[str] = Counter()

    @examples(40)
    @given(
        world=worlds(steps=(10, 30)),
        share=ROWS,
        depth=st.integers(2, 16),
        seed=st.integers(0, 2**32),
        stop=st.booleans(),
    )
    def run(world: World, share: float, depth: int, seed: int, stop: bool) -> None:
        collection, plain = make_collection(world, slots(world, share)), make_collection(world, None)
        watched(collection, seen)
        pipe, source = open_pipe(collection, depth, seed), steps_of(world)
        steps = world.accumulate * (len(world.batches) // world.joint // world.accumulate // (2 if stop else 1))
        for _ in range(steps):
            pipe.progress(source)
        if not stop:
            with pytest.raises(StopIteration):
                pipe.progress(source)
        pipe.close()
        for window in world.windows()[: steps // world.accumulate]:
            train_window(plain, window, world.joint)
        assert model_state(collection.manager) == model_state(plain.manager)
        stats = collection.manager.stats()
        assert (stats["pinned"], collection.manager.outstanding) == (0, 0)
        check(collection.manager)
        seen["stopped"] += stop
        collection.close()
        plain.close()

    run()
    assert all(seen[name] > 0 for name in ("victims", "beside others", "back at once", "stopped")), seen


def test_i10_a_save_at_any_moment_is_a_cut_between_steps(tmp_path: Path) -> None:
    """In the background, with batches planned ahead: a restored run goes on from ``batches_done`` to the bits of the whole one."""
    seen: Counter[str] = Counter()
    folders = iter(range(10**6))

    @examples(16)
    @given(
        world=worlds(steps=(10, 24)).filter(lambda w: w.accumulate == 1),
        share=ROWS,
        depth=st.integers(2, 8),
        seed=st.integers(0, 2**32),
        delta=st.booleans(),
        where=st.floats(0, 1),
    )
    def run(world: World, share: float, depth: int, seed: int, delta: bool, where: float) -> None:
        path, steps = tmp_path / str(next(folders)), list(steps_of(world))
        cut = 1 + int(where * (len(steps) - 2))
        collection = make_collection(world, slots(world, share))
        with open_pipe(collection, depth, seed) as pipe:
            source = iter(steps)
            for done in range(1, cut + 1):
                pipe.progress(source)
                if delta and done == cut // 2:
                    collection.save(path)
            seen["ahead"] += collection.manager.outstanding
            saving = collection.save(path, delta=delta, background=True, state={"batches": pipe.batches_done})
            drain(pipe, source)
            saving.result()
        expected = model_state(collection.manager)
        seen["swapped"] += collection.manager.stats()["swap_out_rows"]
        collection.close()
        again = make_collection(world, world.least_rows())
        report = again.restore(path)
        assert report.state == {"batches": cut}
        with open_pipe(again, depth, seed + 1) as pipe:
            drain(pipe, iter(steps[cut:]))
        assert model_state(again.manager) == expected
        seen["swapped"] += again.manager.stats()["swap_out_rows"]
        again.close()

    run()
    assert seen["ahead"] > 5 and seen["swapped"] > 5, seen


def test_i13_a_thousand_steps_that_fail_and_are_evaluated() -> None:
    """Steps that raise before, between and after forward and backward, evaluations, and epochs that end early."""
    ebc = ec.EmbeddingBagCollection([ec.TableConfig("f", 3, hbm_rows=24)], optimizer=ec.Adagrad(lr=0.1))
    rng, where = np.random.default_rng(5), [""]

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rows = ebc

        def forward(self, features: ec.JaggedFeatures) -> Any:
            if where[0] == "before":
                raise KeyError("before")
            out = self.rows(features).values()
            if where[0] == "between":
                raise KeyError("between")
            return out.sum(), out

    def step(features: ec.JaggedFeatures) -> Any:
        loss, out = model(features)
        if where[0] != "dropped":
            loss.backward()
        if where[0] == "after":
            raise KeyError("after")
        return loss, out

    model, failed, kept = Model(), Counter(), []
    with ec.TrainPipeline(model, None, depth=5, step=step) as pipe:
        source = iter(())
        for number in range(1000 * SOAK):
            where[0] = str(rng.choice(["", "", "", "before", "between", "after", "dropped", "eval", "end"]))
            if number == 0 or where[0] == "end":
                source = (one_feature(rng.integers(0, 90, 6).tolist()) for _ in range(200))
            try:
                if where[0] == "eval":
                    model.eval()
                    pipe.progress(iter([one_feature([1, 200])]))
                    model.train()
                else:
                    kept.append(pipe.progress(source)[0])  # the graph of a step that was dropped
            except KeyError as error:
                failed[str(error)] += 1
                kept.append(error)
            except StopIteration:
                failed["end"] += 1
                where[0] = "end"
            del kept[:-3]
            if number % 50 == 0:
                assert ebc.manager.stats()["pinned"] <= 24 and ebc.manager.outstanding <= 5
    assert len(failed) >= 3
    assert (ebc.manager.stats()["pinned"], ebc.manager.outstanding) == (0, 0)
    assert ebc.manager.stats()["swap_out_rows"] > 0
    check(ebc.manager)
