"""Our sharders in TorchRec's DistributedModelParallel: two ranks learn what one process learns of the whole batch."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
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


def together(parts: list[tuple[tuple[int, ...], np.ndarray]]) -> np.ndarray:
    """A table of TorchRec's, of its parts on all ranks."""
    found = np.full((face_jobs.ROWS, 8), np.nan, np.float32)
    for (row, column), part in parts:
        found[row : row + len(part), column : column + part.shape[1]] = part
    return found


def test_tables_that_torchrec_shards_are_saved_and_restored_with_ours(pair: Crew, tmp_path: Path) -> None:
    """With their optimizer's state and learning rate; also where they are spread in another way, and in one process that spreads nothing."""
    path = str(tmp_path)
    straight = run(pair, face_jobs.save_mixed, path)
    same = run(pair, face_jobs.resume_mixed, path, "table_wise")
    for (expected, parts, saved), (found, resumed, restored) in zip(straight, same, strict=True):
        assert expected.keys() == found.keys()
        assert all(np.array_equal(value, found[name]) for name, value in expected.items())
        for before, after in ((saved, restored), (parts, resumed)):
            assert [offsets for offsets, _ in before] == [offsets for offsets, _ in after]
            assert all(np.array_equal(a, b) for (_, a), (_, b) in zip(before, after, strict=True))
    final = together([one for _, parts, _ in straight for one in parts])
    weight = together([one for _, _, parts in straight for one in parts])
    assert not np.isnan(weight).any() and not np.array_equal(weight, final) and not (weight == 1.0).all()
    other = run(pair, face_jobs.resume_mixed, path, "column_wise")
    assert sum(len(parts) for _, _, parts in other) == 2
    assert np.array_equal(together([one for _, _, parts in other for one in parts]), weight)
    np.testing.assert_allclose(together([one for _, parts, _ in other for one in parts]), final, rtol=1e-6, atol=1e-7)
    model = face_jobs.Model(True)
    ec.restore(model, path)
    assert np.array_equal(model.plain.embedding_bags["p"].weight.detach().numpy(), weight)


def test_a_model_of_one_process_is_restored_into_ranks(pair: Crew, tmp_path: Path) -> None:
    model = face_jobs.Model(True)
    face_jobs.trained(model, face_jobs.batches(0, 1)[:3])
    ec.save(model, tmp_path)
    found = run(pair, face_jobs.resume_mixed, str(tmp_path), "column_wise")
    weight = model.plain.embedding_bags["p"].weight.detach().numpy()
    assert np.array_equal(together([one for _, _, parts in found for one in parts]), weight)


def test_a_table_of_torchrecs_that_is_another_one_is_refused(pair: Crew, tmp_path: Path) -> None:
    run(pair, face_jobs.save_mixed, str(tmp_path))
    said = run(pair, face_jobs.refuse_mixed, str(tmp_path))
    assert any("(61, 8) here, in the checkpoint (60, 8)" in first for first, _ in said)
    assert any("optimizer state plain" in second and "(60,) here" in second for _, second in said)


def test_a_dense_part_that_torch_spreads_is_saved_and_restored(pair: Crew, tmp_path: Path) -> None:
    for weight, bias, said in run(pair, face_jobs.dense_tensors, str(tmp_path / "there")):
        assert np.array_equal(weight, np.arange(12.0).reshape(3, 4)) and np.array_equal(bias, np.arange(3.0))
        assert "redistribute it" in said
    alone = torch.nn.ModuleDict(
        {"bags": ec.EmbeddingBagCollection([ec.TableConfig("t", 4, ["f"])]), "top": torch.nn.Linear(4, 3)}
    )
    ec.restore(alone, tmp_path / "there")
    assert torch.equal(alone["top"].weight, torch.arange(12.0).reshape(3, 4))


def test_what_is_not_row_wise_is_refused(pair: Crew) -> None:
    for said in run(pair, face_jobs.refusals):
        assert "'t' is planned table_wise" in said[0]
        assert "lacks tables ['s']" in said[1]
        assert "apply_optimizer_in_backward" in said[2]
        assert "wire_rows" in said[3]
        assert "no cached collection" in said[4]


def test_the_example_goes_on_from_what_it_has_saved(pair: Crew, tmp_path: Path) -> None:
    """In two processes to the same score as a run in one piece; and in one process, with what two have saved."""
    import torchrec_dlrm

    arguments = ["--clicks", "3000", "--batch-size", "64", "--rows", "900", "--every", "4"]
    straight = run(pair, face_jobs.run_example, [*arguments, "--steps", "12"])
    assert straight[0] == straight[1] > 0.4
    saved = [*arguments, "--save", str(tmp_path / "run")]
    assert run(pair, face_jobs.run_example, [*saved, "--steps", "8"]) != straight
    assert [one.generation for one in ec.generations(tmp_path / "run")] == [1, 2]
    alone = torchrec_dlrm.main(
        [*arguments, "--save", str(shutil.copytree(tmp_path / "run", tmp_path / "copy")), "--steps", "12"]
    )
    assert run(pair, face_jobs.run_example, [*saved, "--steps", "12"]) == straight
    assert abs(alone - straight[0]) < 0.01
    assert not torch.distributed.is_initialized()


@pytest.mark.skipif(
    "EMBCACHE_SOAK" not in os.environ, reason="EMBCACHE_SOAK is not set: three times two processes that import TorchRec"
)
def test_the_example_is_killed_and_goes_on(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "examples/torchrec_dlrm.py",
    ]
    command += ["--clicks", "20000", "--steps", "30", "--rows", "2000", "--every", "8"]
    environment = os.environ | {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}

    def ran(*more: str) -> Any:
        return subprocess.run(
            [*command, *more], cwd=root, env=environment, capture_output=True, text=True, timeout=600, check=False
        )

    straight = ran()
    assert straight.returncode == 0 and "AUC" in straight.stdout, straight.stderr
    killed = ran("--save", str(tmp_path / "run"), "--kill-at", "20")
    assert killed.returncode != 0 and "SIGKILL" in killed.stderr
    resumed = ran("--save", str(tmp_path / "run"))
    assert resumed.returncode == 0 and resumed.stdout == straight.stdout, resumed.stderr


def test_a_plan_needs_ranks() -> None:
    table = EmbeddingBagConfig(name="t", num_embeddings=5, embedding_dim=4, feature_names=["f"])
    with pytest.raises(ec.ConfigError, match="not initialized"):
        sharding_plan(EmbCacheEmbeddingBagCollection([table]))
