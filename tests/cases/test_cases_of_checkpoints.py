"""Lines of CASES.md about checkpoints: 31 and 45 to 58 (50 is in unit/test_cli_memory.py; see README.md here)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import embcache as ec
from embcache import cli
from embcache.checkpoint import Reader, Writer, writer
from promises.strategies import one_feature
from promises.training import model_state, rows_of

Bags = ec.EmbeddingBagCollection
KEYS = [0, -1, 2**63 - 1, -(2**63), 12345]


def bags(*tables: ec.TableConfig, optimizer: ec.OptimizerSpec = ec.Adam(lr=0.1), **options: Any) -> Bags:
    return Bags(list(tables) or [ec.TableConfig("f", 4)], optimizer=optimizer, **options)


def train(ebc: Any, keys: list[int], times: int = 1, **more: Any) -> None:
    for _ in range(times):
        out = ebc(one_feature(keys, **more)).values()
        (out * out).sum().backward()
        ebc.optimizer.step()


def generations(path: Path) -> list[tuple[int, str]]:
    return [(one.generation, one.kind) for one in ec.generations(path)]


# ------------------------------------------------------------------------------------------------------------- filters


def test_case_31_keys_that_wait_and_counters_come_back(tmp_path: Path) -> None:
    rule = ec.AdmitAndEvictConfig(admit_threshold=3, evict_threshold=100, evict_step_interval=1)

    def make() -> Bags:
        return bags(ec.TableConfig("f", 4, admit_and_evict=rule))

    straight = make()
    train(straight, [1, 1, 1, 2, 2], timestamps=torch.tensor([5, 6, 7, 5, 8]))
    straight.save(tmp_path)
    resumed = make()
    resumed.restore(tmp_path)
    for ebc in (straight, resumed):
        train(ebc, [2, 9], timestamps=torch.tensor([20, 20]))
    assert set(rows_of(resumed.tables()["f"])) == {1, 2}  # 2 was seen twice before, and once since
    for ebc in (straight, resumed):
        train(ebc, [3], timestamps=torch.tensor([110]))
    assert set(rows_of(resumed.tables()["f"])) == {2}  # 1 was last seen at 7
    assert model_state(resumed.manager) == model_state(straight.manager)


# ------------------------------------------------------------------------------------------------- one moment, all of it


def test_case_45_weights_and_moments_are_of_one_moment(tmp_path: Path) -> None:
    """Training goes on during the save, in slots for half of the rows; new rows after the restore begin with a state of zeros."""
    ebc = bags(ec.TableConfig("f", 4, hbm_rows=50))
    for start in (0, 25, 50):
        train(ebc, list(range(start, start + 50)), 2)
    wanted = model_state(ebc.manager)
    saving = ebc.save(tmp_path, background=True)
    train(ebc, list(range(30, 80)), 5)
    saving.result(60)
    assert model_state(ebc.manager) != wanted
    other = bags(ec.TableConfig("f", 4, hbm_rows=50))
    train(other, list(range(200, 250)))  # memory that has been used
    other.restore(tmp_path)
    assert model_state(other.manager) == wanted
    other.manager.table("f").insert([10**6])
    assert not other.manager.table("f").lookup_rows([10**6])[1].any()


def test_case_46_deltas_give_what_the_run_has_and_replaying_them_changes_nothing(tmp_path: Path) -> None:
    ebc = bags()
    train(ebc, list(range(2000)))
    ebc.save(tmp_path)
    for step in range(3):
        train(ebc, [step, 5000 + step])
        ebc.tables()["f"].erase([100 + step, 5000 + step - 1])
        ebc.save(tmp_path, delta=True)
    assert [kind for _, kind in generations(tmp_path)] == ["full", "delta", "delta", "delta"]
    other = bags()
    for _ in range(2):
        assert other.restore(tmp_path).generation == 4
        assert model_state(other.manager) == model_state(ebc.manager)
    assert len(other.tables()["f"]) == 2000 - 3 + 1 and not (other.tables()["f"].find([100, 5001]) >= 0).any()


def test_case_47_every_row_gets_its_own_values(tmp_path: Path) -> None:
    ebc = bags(ec.TableConfig("f", 4), ec.TableConfig("g", 4, ["f"], dtype="bfloat16"))
    ebc.tables()["f"].insert(np.arange(3000))
    train(ebc, KEYS)
    ebc.save(tmp_path)
    other = bags(ec.TableConfig("f", 4), ec.TableConfig("g", 4, ["f"], dtype="bfloat16"))
    other.restore(tmp_path)
    rows = rows_of(other.tables()["f"])
    assert (
        rows == rows_of(ebc.tables()["f"]) and len({weights for weights, *_ in rows.values()}) == 3000 + len(KEYS) - 1
    )
    assert rows_of(other.tables()["g"]) == rows_of(ebc.tables()["g"])


@pytest.mark.parametrize("writers", [1, 2, 3, 4])
def test_case_48_any_number_of_writers_for_any_number_of_readers(writers: int, tmp_path: Path) -> None:
    ebc = bags()
    train(ebc, [*range(500), *KEYS])
    ebc.save(tmp_path / "a")
    assert cli.main(["reshard", str(tmp_path / "a"), str(tmp_path / "b"), "--writers", str(writers)]) == 0
    for readers in (1, 2, 3, 4):
        found: list[int] = []
        for rank in range(readers):
            with Reader(tmp_path / "b", rank=rank, world=readers) as reader:
                found += [key for rows in reader.rows("f") for key in rows.keys.tolist()]
        assert sorted(found) == sorted({*range(500), *KEYS})
    other = bags()
    other.restore(tmp_path / "b")
    assert model_state(other.manager) == model_state(ebc.manager)
    train(other, [1])
    other.save(tmp_path / "b", delta=True)  # of several writers there is no delta by one: it is a full one
    assert generations(tmp_path / "b") == [(1, "full"), (2, "delta" if writers == 1 else "full")]
    last = bags()
    last.restore(tmp_path / "b")
    assert model_state(last.manager) == model_state(other.manager)


def test_case_49_what_is_half_written_is_not_taken_and_the_old_one_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ebc = bags()
    train(ebc, KEYS)
    ebc.save(tmp_path)
    old = model_state(ebc.manager)
    train(ebc, KEYS)
    with monkeypatch.context() as patch:
        patch.setattr(Writer, "publish", lambda self: (_ for _ in ()).throw(ec.StorageError("the power is gone")))
        with pytest.raises(ec.StorageError):
            ebc.save(tmp_path, keep=1)
    assert generations(tmp_path) == [(1, "full")]
    other = bags()
    assert other.restore(tmp_path).skipped == [] and model_state(other.manager) == old
    assert ebc.save(tmp_path, keep=1) == 3 and generations(tmp_path) == [(3, "full")]  # a number above every trace


def test_case_51_steps_and_learning_rates_go_on(tmp_path: Path) -> None:
    def run(ebc: Bags, steps: range, schedule: torch.optim.lr_scheduler.LRScheduler) -> None:
        for _ in steps:
            train(ebc, KEYS)
            schedule.step()

    def schedule_of(ebc: Bags) -> torch.optim.lr_scheduler.LRScheduler:
        return torch.optim.lr_scheduler.ExponentialLR(ebc.optimizer, 0.5)

    straight, first = bags(), bags()
    run(straight, range(6), schedule_of(straight))
    schedule = schedule_of(first)
    run(first, range(3), schedule)
    first.save(tmp_path, state=schedule.state_dict())
    second = bags()
    schedule = schedule_of(second)
    schedule.load_state_dict(second.restore(tmp_path).state)
    assert second.optimizer.step_count == 3 and second.optimizer.param_groups[0]["lr"] == 0.1 / 8
    run(second, range(3), schedule)
    assert model_state(second.manager) == model_state(straight.manager)


# ------------------------------------------------------------------------------------------------- what may be different


def test_case_52_a_table_that_grew_was_added_or_dropped_is_reported_and_another_dim_refused(tmp_path: Path) -> None:
    ebc = bags(ec.TableConfig("f", 4, num_embeddings=10), ec.TableConfig("old", 2, ["f"]))
    train(ebc, KEYS)
    ebc.save(tmp_path)
    other = bags(ec.TableConfig("f", 4, num_embeddings=1000), ec.TableConfig("new", 8, ["f"]))
    report = other.restore(tmp_path)
    assert (report.matched, report.new, report.missing, report.changed) == (["f"], ["new"], ["old"], {})
    assert rows_of(other.tables()["f"]) == rows_of(ebc.tables()["f"])
    train(other, list(range(500)))
    with pytest.raises(ec.ConfigError, match=r"'f': the checkpoint has dim 4, not 5.*another name.*convert"):
        bags(ec.TableConfig("f", 5)).restore(tmp_path)


def test_case_53_an_empty_table_and_the_time_before_the_first_step(tmp_path: Path) -> None:
    bags().save(tmp_path, state={"batches": 0})
    other = bags()
    report = other.restore(tmp_path)
    assert (report.rows, report.state) == ({"f": 0}, {"batches": 0})
    assert other.save(tmp_path, delta=True) == 2 and other.optimizer.step_count == 0
    train(other, KEYS)


def test_case_54_old_increments_go(tmp_path: Path) -> None:
    ebc = bags()
    train(ebc, list(range(300)))
    for step in range(60):
        train(ebc, [step])
        ebc.save(tmp_path, delta=True, keep=1)
    kinds = [kind for _, kind in generations(tmp_path)]
    assert (
        kinds[0] == "full" and set(kinds[1:]) <= {"delta"} and len(kinds) < 40
    )  # a new base came, and the old one went
    named = {one.generation for one in ec.generations(tmp_path)}
    segments = {int(file.name[8:24]) for file in (tmp_path / "rank-0000").glob("segment-*")}
    assert segments == named


def test_case_55_two_modules_with_tables_of_one_name(tmp_path: Path) -> None:
    def make() -> nn.ModuleDict:
        return nn.ModuleDict({"left": bags(), "right": bags(optimizer=ec.SGD(lr=0.5))})

    model = make()
    train(model["left"], [1, 2])
    train(model["right"], [2, 3])
    ec.save(model, tmp_path)
    other = make()
    assert ec.restore(other, tmp_path).matched == ["left/f", "right/f"]
    for side in ("left", "right"):
        assert model_state(other[side].manager) == model_state(model[side].manager)
    assert set(rows_of(other["left"].tables()["f"])) == {1, 2}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_case_56_narrow_rows_stay_narrow(dtype: str, tmp_path: Path) -> None:
    ebc = bags(ec.TableConfig("f", 256, dtype=dtype), optimizer=ec.SGD(lr=0.1))
    train(ebc, list(range(100)))
    ebc.save(tmp_path)
    (saved,) = ec.generations(tmp_path)
    assert saved.bytes < 100 * 256 * 4
    other = bags(ec.TableConfig("f", 256, dtype=dtype), optimizer=ec.SGD(lr=0.1))
    other.restore(tmp_path)
    assert rows_of(other.tables()["f"]) == rows_of(ebc.tables()["f"])
    with pytest.raises(ec.ConfigError, match=f"dtype '{dtype}', not 'float32'"):
        bags(ec.TableConfig("f", 256), optimizer=ec.SGD(lr=0.1)).restore(tmp_path)


# ------------------------------------------------------------------------------------------------------ disks, directories


def test_case_57_a_full_disk_is_named_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ebc = bags()
    train(ebc, KEYS)
    ebc.save(tmp_path)
    monkeypatch.setattr(writer, "free_bytes", lambda path: 100)
    with pytest.raises(ec.DiskFullError, match=r"does not fit into 100 free ones; free some space"):
        ebc.save(tmp_path)
    assert generations(tmp_path) == [(1, "full")] and bags().restore(tmp_path).rows == {"f": len(KEYS)}


def test_case_58_saving_twice_adds_a_generation_and_no_row(tmp_path: Path) -> None:
    ebc = bags()
    train(ebc, KEYS)
    assert (ebc.save(tmp_path), ebc.save(tmp_path), ebc.save(tmp_path, delta=True)) == (1, 2, 3)
    assert generations(tmp_path) == [(1, "full"), (2, "full"), (3, "delta")]
    other = bags()
    assert other.restore(tmp_path).rows == {"f": len(KEYS)}
    assert model_state(other.manager) == model_state(ebc.manager)
    stranger = bags()  # knows nothing of what is there: adds as well, and overwrites nothing
    train(stranger, [77])
    assert stranger.save(tmp_path, delta=True) == 4
    assert other.restore(tmp_path, 3).rows == {"f": len(KEYS)} and other.restore(tmp_path).rows == {"f": 1}
