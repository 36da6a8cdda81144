"""Our sharders in TorchRec's DistributedModelParallel: two ranks learn what one process learns of the whole batch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import face_jobs
import numpy as np
import pytest
import torch
from crew import Crew
from torchrec import EmbeddingBagConfig

import embcache as ec
from embcache.torchrec import EmbCacheEmbeddingBagCollection, sharding_plan

PATIENCE_S = 240.0


@pytest.fixture(scope="module")
def pair() -> Iterator[Crew]:
    with Crew(2) as crew:
        yield crew


def run(crew: Crew, job: Any, *arguments: Any) -> list[Any]:
    """As `Crew.run`, with the patience that a first import of TorchRec in two processes takes."""
    crew.start(job, *arguments)
    return crew.answers(patience_s=PATIENCE_S)


def one_process(plain: bool) -> dict[str, np.ndarray]:
    model = face_jobs.Model(plain)
    face_jobs.trained(model, face_jobs.batches(0, 1))
    return face_jobs.learned(model)


def check(found: list[dict[str, np.ndarray]], expected: dict[str, np.ndarray]) -> None:
    """Each key is on one rank, and its row is that of one process; the dense part is on both."""
    for table in "tus":
        keys = np.concatenate([one[f"{table}.keys"] for one in found])
        order = np.argsort(keys)
        assert np.array_equal(keys[order], expected[f"{table}.keys"])
        assert all(len(one[f"{table}.keys"]) > 0 for one in found)
        rows = np.concatenate([one[table] for one in found])[order]
        np.testing.assert_allclose(rows, expected[table], rtol=1e-5, atol=1e-6)
    for one in found:
        np.testing.assert_allclose(one["top"], expected["top"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("how", "plain", "planned_by", "hbm_bytes"),
    [
        ("loop", False, "ours", None),
        ("loop", True, "ours", None),  # beside tables that are not cached
        ("loop", False, "torchrec", None),
        ("ours", False, "ours", 4096),
        ("ours", True, "ours", None),
        ("torchrec", True, "ours", None),
    ],
)
def test_two_ranks_learn_what_one_process_learns(
    pair: Crew, how: str, plain: bool, planned_by: str, hbm_bytes: int | None
) -> None:
    check(run(pair, face_jobs.train, how, plain, planned_by, hbm_bytes), one_process(plain))


def test_a_converted_model_is_spread_over_the_ranks_and_comes_back(pair: Crew, tmp_path: Path) -> None:
    found = run(pair, face_jobs.convert, str(tmp_path))
    keys = np.concatenate([one["keys"] for one in found])
    assert sorted(keys.tolist()) == list(range(face_jobs.ROWS))  # the whole weight, each row once
    table = EmbeddingBagConfig(name="t", num_embeddings=face_jobs.ROWS, embedding_dim=4, feature_names=["f"])
    model = torch.nn.ModuleDict(
        {"bags": EmbCacheEmbeddingBagCollection([table], optimizer=ec.Adagrad(lr=0.5)), "top": torch.nn.Linear(4, 1)}
    )
    assert ec.restore(model, tmp_path).matched == ["bags/t"]
    weights, state = model["bags"].tables()["t"].lookup_rows(keys)
    assert np.array_equal(weights, np.concatenate([one["weights"] for one in found]))
    assert np.array_equal(state, np.concatenate([one["state"] for one in found]))
    assert (state > 0).any()


def test_what_is_not_row_wise_is_refused(pair: Crew) -> None:
    for said in run(pair, face_jobs.refusals):
        assert "'t' is planned table_wise" in said[0]
        assert "lacks tables ['s']" in said[1]
        assert "apply_optimizer_in_backward" in said[2]
        assert "wire_rows" in said[3]
        assert "no cached collection" in said[4]


def test_a_plan_needs_ranks() -> None:
    table = EmbeddingBagConfig(name="t", num_embeddings=5, embedding_dim=4, feature_names=["f"])
    with pytest.raises(ec.ConfigError, match="not initialized"):
        sharding_plan(EmbCacheEmbeddingBagCollection([table]))
