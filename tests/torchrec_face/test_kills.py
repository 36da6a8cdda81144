"""R1, R17 through TorchRec's face: a rank of a DistributedModelParallel is killed, the other ends with what says so, and both go on."""

from __future__ import annotations

import os
import pickle
import random
from pathlib import Path
from typing import Any

import face_lives
import numpy as np
from crew import Crew

from embcache.checkpoint import verify

SOAK = int(os.environ.get("EMBCACHE_SOAK", "0"))
LIVES = 12 * SOAK or 1
MOST = {"collective": 120, "file": 250, "backward": 10, "dense": 10}  # calls of a life
PATIENCE_S = 240.0


def test_r1_r17_a_rank_is_killed_in_a_model_of_torchrecs_and_both_go_on(tmp_path: Path) -> None:
    dice, ended, begun = random.Random(SOAK), 0, 0
    folder, notes = tmp_path / "saved-0", tmp_path / "notes"
    notes.mkdir()
    with Crew(2) as pair:

        def lived(folder: Path, *more: Any) -> list[Any]:
            pair.start(face_lives.live, str(folder), str(notes), *more)
            return pair.answers(raising=False, patience_s=PATIENCE_S)

        straight = lived(tmp_path / "straight", False)
        for life in range(LIVES + 1):
            victim, place, piped = life % 2, list(MOST)[life // 2 % 4], life // 8 % 2 == 1
            left = dice.randrange(MOST[place]) if life < LIVES else 10**6
            answers, where = lived(folder, piped, life, victim, place, left), (life, victim, place, piped, left)
            if answers[victim] != f"rank {victim} is gone":  # it has come to its end before that call
                for (_, _, expected), (done, said, found) in zip(straight, answers, strict=True):
                    assert said == "", (where, answers)
                    assert done >= begun and expected.keys() == found.keys(), where
                    assert all(np.array_equal(value, found[name]) for name, value in expected.items()), where
                assert [one for one in verify(folder) if one.severity == "damage"] == []
                folder, ended, begun = tmp_path / f"saved-{life + 1}", ended + 1, 0
                continue
            done, said, heard = answers[1 - victim]
            died = pickle.loads((notes / f"{life}-{victim}-died").read_bytes())
            assert heard - died < 30, where  # at once, but for a busy machine; the time limit is 240
            kind = said.partition(":")[0]
            assert kind in ("RankError", "RuntimeError"), (where, said)  # the latter of a collective of torch's own
            assert ("start all" in said) if kind == "RankError" else ("by peer" in said), (where, said)
            assert done >= begun, where
            begun = done
    assert 0 < ended <= 1 + LIVES // 2
