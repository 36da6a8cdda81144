"""R1, R17 over ranks: one of them is killed while it trains or saves, the others come down, and all go on from the last generation.

What they go on with has the bits of one process that nobody interrupted, at a batch that every rank had got acknowledged or a later one.
"""

from __future__ import annotations

import os
import pickle
import random
from pathlib import Path
from typing import Any

from crew import Crew
from sharded_cases import Case, joined, replace_small, same, state_of, train
from sharded_jobs import live

import embcache as ec
from embcache.checkpoint import verify

SOAK = int(os.environ.get("EMBCACHE_SOAK", "0"))
LIVES = 30 * max(SOAK, 1)
WORLDS = (2, 3)


class Truth:
    """States after each number of steps, from one process without interruption."""

    def __init__(self, case: Case) -> None:
        self._case = case
        self._module = ec.EmbeddingBagCollection(replace_small(case), optimizer=case.make_optimizer())
        self._states = [state_of(self._module.manager)]

    def after(self, steps: int) -> Any:
        while len(self._states) <= steps:
            done = len(self._states) - 1
            train(self._case, self._module, 0, 1, range(done, done + 1))
            self._states.append(state_of(self._module.manager))
        return self._states[steps]


def noted(notes: Path, life: int, what: str) -> dict[int, Any]:
    """What the ranks of a life have left, by rank."""
    return {int(one.name.split("-")[1]): pickle.loads(one.read_bytes()) for one in notes.glob(f"{life}-*-{what}")}


def test_r1_r17_a_rank_is_killed_and_all_go_on_from_the_last_generation(tmp_path: Path) -> None:
    case = Case(50, kind="floor", steps=1, most=4)
    truth, dice = Truth(case), random.Random(SOAK)
    saved, notes = tmp_path / "saved", tmp_path / "notes"
    notes.mkdir()
    acknowledged = furthest = 0
    for life in range(LIVES):
        world = WORLDS[life % len(WORLDS)]
        victim, how = dice.randrange(world), ("call", "collective")[life // 2 % 2]
        with Crew(world) as crew:
            crew.start(live, case, str(saved), str(notes), life, victim, how, dice.randrange(60))
            answers = crew.answers(raising=False)
        where = life, world, victim, how
        for rank, answer in enumerate(answers):
            if rank == victim:
                assert answer == f"rank {rank} is gone", where
            else:
                kind, text = answer
                assert kind == "RankError", (where, text)
                assert "start all" in text and "have not come" not in text, (where, text)  # without the time limit
        restored = noted(notes, life, "restored")
        assert set(restored) == set(range(world)), where
        assert len({(generation, done) for generation, done, _ in restored.values()}) == 1, where
        done = restored[0][1]
        assert acknowledged <= done, where
        same(joined([restored[rank][2] for rank in range(world)]), truth.after(done))
        acknowledged = max([done, *(step for _, step in noted(notes, life, "acknowledged").values())])
        furthest = max(furthest, done)
    assert furthest > 3
    assert [one for one in verify(saved) if one.severity == "damage"] == []
