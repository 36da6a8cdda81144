"""Saving and restoring managers: what is kept, what is refused, what a failed restore leaves."""

from __future__ import annotations

import typing
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import embcache as ec
from embcache import saving
from embcache.values import decode, encode

FILTER = ec.AdmitAndEvictConfig(admit_threshold=2, evict_threshold=50, evict_step_interval=2, time_source="step")


def one_feature(values: list[int]) -> ec.JaggedFeatures:
    return ec.JaggedFeatures(["f"], torch.tensor(values), torch.ones(len(values), dtype=torch.int64))


def trained(*tables: ec.TableConfig, optimizer: ec.OptimizerSpec = ec.Adagrad(lr=0.1)) -> ec.EmbeddingBagCollection:
    ebc = ec.EmbeddingBagCollection(list(tables) or [ec.TableConfig("a", 4, ["f"])], optimizer=optimizer)
    for values in ([1, 2, 3], [2, 3, 4, -1]):
        ebc(one_feature(values)).values().sum().backward()
        ebc.optimizer.step()
    return ebc


def rows(view: ec.TableView) -> dict[int, Any]:
    return {
        key: (weights.tolist(), state.tolist())
        for keys, all_weights, all_state, *_ in view.items()
        for key, weights, state in zip(keys.tolist(), all_weights, all_state, strict=True)
    }


def test_a_collection_comes_back_with_its_optimizer(tmp_path: Path) -> None:
    ebc = trained(optimizer=ec.Adam(lr=0.5))
    ebc.optimizer.param_groups[0]["lr"] = 0.125
    assert ebc.save(tmp_path / "new" / "folder", state={"epoch": 3}) == 1
    other = ec.EmbeddingBagCollection([ec.TableConfig("a", 4, ["f"])], optimizer=ec.Adam(lr=0.5))
    view = other.tables()["a"]
    report = other.restore(tmp_path / "new" / "folder")
    assert (report.generation, report.state, report.matched, report.new, report.missing) == (
        1,
        {"epoch": 3},
        ["a"],
        [],
        [],
    )
    assert report.rows == {"a": 5} and report.changed == {}
    assert report.bytes_read >= 4096 and report.bytes_beyond == 0
    assert rows(view) == rows(ebc.tables()["a"])  # a view made before the restore shows what is there now
    assert other.optimizer.step_count == 2 and other.optimizer.param_groups[0]["lr"] == 0.125
    assert other.optimizer.param_groups[0]["betas"] == (0.9, 0.999)


def test_a_used_manager_starts_over_from_an_older_generation(tmp_path: Path) -> None:
    ebc = trained()
    ebc.save(tmp_path)
    then = rows(ebc.tables()["a"])
    ebc(one_feature([7, 8])).values().sum().backward()
    assert ebc.save(tmp_path) == 2
    later = rows(ebc.tables()["a"])
    ebc.restore(tmp_path, 1)
    assert rows(ebc.tables()["a"]) == then and ebc.optimizer.step_count == 2
    ebc.restore(tmp_path)
    assert rows(ebc.tables()["a"]) == later and ebc.optimizer.step_count == 3
    stats = ebc.manager.stats()
    assert stats["misses"] == 7 and stats["resident"] == 0 and stats["rows"] == 7
    ebc.manager.planner.check()


@pytest.mark.parametrize(
    ("table", "optimizer", "named"),
    [
        (ec.TableConfig("a", 5, ["f"]), ec.Adagrad(), "dim 4, not 5"),
        (ec.TableConfig("a", 4, ["f"], dtype="float16"), ec.Adagrad(), "dtype 'float32', not 'float16'"),
        (ec.TableConfig("a", 4, ["f"]), ec.Adam(), "optimizer 'adagrad', not 'adam'"),
        (ec.TableConfig("z", 4, ["f"]), ec.Adagrad(), "none of the tables"),
    ],
)
def test_changes_of_meaning_are_refused_and_change_nothing(
    table: ec.TableConfig, optimizer: ec.OptimizerSpec, named: str, tmp_path: Path
) -> None:
    trained().save(tmp_path)
    other = trained(table, optimizer=optimizer)
    before = rows(other.tables()[table.name])
    with pytest.raises(ec.ConfigError, match=named):
        other.restore(tmp_path)
    assert rows(other.tables()[table.name]) == before and other.optimizer.step_count == 2


def test_tables_may_be_added_dropped_and_changed_in_what_concerns_new_rows_only(tmp_path: Path) -> None:
    ebc = trained(ec.TableConfig("a", 4, ["f"]), ec.TableConfig("old", 3, ["f"]))
    ebc.save(tmp_path)
    other = ec.EmbeddingBagCollection(
        [
            ec.TableConfig("a", 4, ["f"], num_embeddings=10**9, seed=5, admit_and_evict=FILTER),
            ec.TableConfig("b", 2, ["f"]),
        ]
    )
    report = other.restore(tmp_path)
    assert (report.matched, report.new, report.missing) == (["a"], ["b"], ["old"])
    changed = report.changed["a"]
    assert len(changed) == 4 and any("seed: 0 -> 5" in change for change in changed), changed
    assert rows(other.tables()["a"]) == rows(ebc.tables()["a"]) and len(other.tables()["b"]) == 0


def test_a_filter_whose_counters_would_mean_something_else_is_refused(tmp_path: Path) -> None:
    trained(ec.TableConfig("a", 4, ["f"], admit_and_evict=FILTER)).save(tmp_path)
    by_time = ec.AdmitAndEvictConfig(admit_threshold=2, evict_threshold=50, evict_step_interval=2)
    other = ec.EmbeddingBagCollection([ec.TableConfig("a", 4, ["f"], admit_and_evict=by_time)])
    with pytest.raises(ec.ConfigError, match="time_source = 'step', not 'timestamps'"):
        other.restore(tmp_path)
    without = ec.EmbeddingBagCollection([ec.TableConfig("a", 4, ["f"])])
    assert without.restore(tmp_path).rows == {"a": 2}


def test_rows_of_a_checkpoint_without_times_stay_until_they_are_used_again(tmp_path: Path) -> None:
    """As those imported from elsewhere: a sweep knows nothing of them."""
    trained().save(tmp_path)
    rule = ec.AdmitAndEvictConfig(evict_threshold=10, evict_step_interval=1)
    other = ec.EmbeddingBagCollection([ec.TableConfig("a", 4, ["f"], admit_and_evict=rule)])
    other.restore(tmp_path)
    for time in (1000, 1001, 2000):
        key = torch.tensor([3 if time < 2000 else 4])
        batch = ec.JaggedFeatures(["f"], key, torch.ones(1, dtype=torch.int64), timestamps=torch.tensor([time]))
        other(batch).values().sum().backward()
    assert sorted(rows(other.tables()["a"])) == [-1, 1, 2, 4]  # 3 was seen, and then not for long


def test_a_damaged_generation_is_passed_over_or_named(tmp_path: Path) -> None:
    ebc = trained()
    ebc.save(tmp_path, state=1)
    ebc.save(tmp_path, state=2)
    (segment,) = (tmp_path / "rank-0000").glob("segment-0000000000000002-*")
    content = bytearray(segment.read_bytes())
    content[4096 + 300] ^= 4
    segment.write_bytes(content)
    other = trained()
    before = rows(other.tables()["a"])
    with pytest.raises(ec.CorruptionError, match="generation 2"):
        other.restore(tmp_path, 2)
    assert rows(other.tables()["a"]) == before
    report = other.restore(tmp_path)
    assert (report.generation, report.state) == (1, 1)
    assert [number for number, _ in report.skipped] == [2]


def test_empty_tables_and_the_time_before_the_first_step(tmp_path: Path) -> None:
    ebc = ec.EmbeddingBagCollection([ec.TableConfig("a", 4, ["f"], admit_and_evict=FILTER)])
    ebc.save(tmp_path)
    other = trained(ec.TableConfig("a", 4, ["f"], admit_and_evict=FILTER))
    assert other.restore(tmp_path).rows == {"a": 0}
    assert len(other.tables()["a"]) == 0 and other.manager.planner.step == 0 and other.optimizer.step_count == 0


def test_saves_and_restores_at_the_wrong_moment(tmp_path: Path) -> None:
    with pytest.raises(ec.ConfigError, match="holds no checkpoint"):
        trained().restore(tmp_path)
    with pytest.raises(ec.ConfigError, match="keep = 0"):
        trained().save(tmp_path, keep=0)
    with pytest.raises(ec.ConfigError, match="path = 3"):
        trained().save(3)  # type: ignore[arg-type]
    with pytest.raises(ec.ConfigError, match=r"state\['x'\]\[1\]: a object"):
        trained().save(tmp_path, state={"x": [1, object()]})
    assert list(tmp_path.iterdir()) == []
    ebc = trained(ec.TableConfig("a", 4, ["f"], admit_and_evict=FILTER))
    ebc.save(tmp_path)
    early = ebc(one_feature([1]))
    with pytest.raises(ec.PlanError, match="restore between steps"):
        ebc.restore(tmp_path)
    ebc(one_feature([2])).values().sum().backward()
    with pytest.raises(ec.PlanError, match="step 3 has not finished"):
        ebc.save(tmp_path)
    del early
    assert ebc.save(tmp_path) == 2
    ebc.close()
    with pytest.raises(ec.ClosedError):
        ebc.save(tmp_path)


def test_file_backed_tables_are_restored_into_empty_directories(tmp_path: Path) -> None:
    def make(folder: str) -> ec.EmbeddingBagCollection:
        table = ec.TableConfig("a", 4, ["f"], directory=tmp_path / folder, admit_and_evict=FILTER)
        return trained(table) if folder == "first" else ec.EmbeddingBagCollection([table])

    first = make("first")
    first.save(tmp_path / "saved")
    assert "generation 1" in first.manager.host_tables[0].directory.checkpoint()
    with pytest.raises(ec.ConfigError, match="holds 2 rows"):
        first.restore(tmp_path / "saved")
    second = make("second")
    second.restore(tmp_path / "saved")
    assert rows(second.tables()["a"]) == rows(first.tables()["a"])
    kept = rows(first.tables()["a"])
    first.close()
    second.close()
    assert rows(make("second").tables()["a"]) == kept


def test_a_restore_that_fails_empties_a_directory_again(tmp_path: Path) -> None:
    ebc = trained(ec.TableConfig("a", 4, ["f"]), ec.TableConfig("b", 4, ["f"]))
    ebc.save(tmp_path / "saved")
    (segment,) = (tmp_path / "saved" / "rank-0000").glob("segment-*")
    content = bytearray(segment.read_bytes())
    content[8192 + 300] ^= 4  # of the second table
    segment.write_bytes(content)
    tables = [ec.TableConfig("a", 4, ["f"], directory=tmp_path / "a"), ec.TableConfig("b", 4, ["f"])]
    other = ec.EmbeddingBagCollection(tables, optimizer=ec.Adagrad(lr=0.1))
    with pytest.raises(ec.CorruptionError):
        other.restore(tmp_path / "saved")
    assert len(other.tables()["a"]) == 0
    other(one_feature([1])).values().sum().backward()
    other.manager.host_tables[0].check()
    other.close()


@pytest.mark.parametrize("save", [ec.save, ec.EmbCacheManager.save, ec.EmbeddingCollection.save])
def test_the_type_of_what_a_save_returns_follows_from_background(save: Any) -> None:
    returned = [one.__annotations__["return"] for one in typing.get_overloads(save)]
    assert returned == ["int", "Saving", "int | Saving"]


def test_older_generations_go(tmp_path: Path) -> None:
    ebc = trained()
    for _ in range(5):
        ebc.save(tmp_path, keep=2)
    assert [one.generation for one in ec.generations(tmp_path)] == [4, 5]


# ------------------------------------------------------------------------------------------------------------- values


@pytest.mark.parametrize("background", [False, True])
def test_a_parent_that_is_pruned_before_the_save_begins_makes_it_a_full_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, background: bool
) -> None:
    ebc, other = trained(), trained()
    ebc.save(tmp_path)
    ebc(one_feature([1])).values().sum().backward()
    real = saving.parent_at
    prunings = iter([lambda: other.save(tmp_path, keep=1)])

    def parent_at(*given: Any, **more: Any) -> Any:
        found = real(*given, **more)
        next(prunings, lambda: 0)()
        return found

    monkeypatch.setattr(saving, "parent_at", parent_at)
    saved = ebc.save(tmp_path, delta=True, background=background, state="mine")
    assert (saved.result(600) if isinstance(saved, saving.Saving) else saved) == 3
    assert [(one.generation, one.kind) for one in ec.generations(tmp_path)] == [(2, "full"), (3, "full")]
    assert other.restore(tmp_path).state == "mine"
    assert rows(other.tables()["a"]) == rows(ebc.tables()["a"])
    ebc(one_feature([2])).values().sum().backward()
    assert ebc.save(tmp_path, delta=True) == 4 and ec.generations(tmp_path)[-1].kind == "delta"


def test_values_come_back_as_they_were() -> None:
    value = {
        "numbers": [1, -2.5, True, None, float("inf"), 2**80],
        "text": "ä\ud800",
        3: (4, (5,), []),
        "raw": b"\0\xff",
        "arrays": [np.arange(6, dtype=np.int16).reshape(2, 3), np.float32(0.25), np.zeros((0, 2), np.uint8)],
        "tensors": [torch.arange(4, dtype=torch.bfloat16), torch.tensor(True), torch.empty(0, 3)],
    }
    back = decode(*encode(value, "state"), "state")
    assert list(back) == list(value)
    for name in ("numbers", "text", 3, "raw"):
        assert back[name] == value[name]
        assert type(back[name]) is type(value[name])
    for one, other in zip(back["arrays"], value["arrays"], strict=True):
        assert one.dtype == other.dtype and one.shape == other.shape and np.array_equal(one, other)
    for one, other in zip(back["tensors"], value["tensors"], strict=True):
        assert one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)


def test_views_and_foreign_byte_orders_come_back_plain() -> None:
    matrix = torch.arange(6.0).reshape(2, 3)
    value = [
        matrix,
        matrix,
        matrix.T,
        matrix[:, ::2],
        torch.zeros(1).expand(3),
        np.arange(4, dtype=">i4"),
        np.eye(3)[::-1],
    ]
    back = decode(*encode(value, "state"), "state")
    for one, other in zip(back, value, strict=True):
        assert np.array_equal(np.asarray(one), np.asarray(other))
    back[0][0, 0] = 9  # each has its own memory
    assert back[1][0, 0] == matrix[0, 0] == 0


def test_a_whole_optimizer_comes_back() -> None:
    layer = torch.nn.Linear(2, 3)
    optimizer = torch.optim.AdamW(layer.parameters())
    layer(torch.ones(2)).sum().backward()
    optimizer.step()
    back = decode(*encode({"o": optimizer.state_dict(), "m": OrderedDict(layer.state_dict())}, "state"), "state")
    fresh = torch.optim.AdamW(torch.nn.Linear(2, 3).parameters())
    fresh.load_state_dict(back["o"])
    assert repr(fresh.state_dict()) == repr(optimizer.state_dict())
    assert list(back["m"]) == ["weight", "bias"]


def test_views_that_are_conjugate_or_negative_come_back_with_their_values() -> None:
    conjugate = torch.tensor([1 + 2j, 3j]).conj()
    back = decode(*encode([conjugate, conjugate.imag], "state"), "state")
    assert torch.equal(back[0], conjugate) and back[1].tolist() == [-2.0, -3.0]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(
    "value",
    [
        object(),
        {(1, 2): 3},
        np.array(["x"]),
        np.array([object()]),
        torch.ones(2).to_sparse(),
        {"a": {1, 2}},
        np.datetime64("now"),
        np.ma.MaskedArray([1, 2], mask=[True, False]),
        [10**5000],
        torch.empty(2, device="meta"),
        torch.nn.parameter.UninitializedParameter(),
        torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]),
    ],
)
def test_what_cannot_be_saved_is_named(value: Any) -> None:
    with pytest.raises(ec.ConfigError, match="mine"):
        encode(value, "mine")


def test_what_contains_itself_is_refused() -> None:
    ring: list[Any] = []
    ring.append(ring)
    with pytest.raises(ec.ConfigError, match="in itself"):
        encode(ring, "state")


@pytest.mark.parametrize("text", [b"[1]", b"{", b'{"q":1}', b'{"x":"0"}', b'{"d":1}', b"\xff", b'{"d":[],"l":[]}'])
def test_other_bytes_are_corruption(text: bytes) -> None:
    with pytest.raises(ec.CorruptionError, match="state: is not what"):
        decode(text, b"", "state")


def test_hostile_offsets_are_corruption() -> None:
    text, tensors = encode(torch.ones(2), "state")
    for bad in (
        tensors.replace(b"[0,8]", b"[0,9]"),
        tensors.replace(b"[2]", b"[9]"),
        tensors[:-1],
        tensors.replace(b"F32", b"QQQ"),
    ):
        with pytest.raises(ec.CorruptionError):
            decode(text, bad, "state")
