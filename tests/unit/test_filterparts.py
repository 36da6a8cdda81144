"""Filters that several ranks have written: blocks of sketches go with their vshards, and a rank gets its own back bit for bit."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import embcache as ec
from embcache import cli
from embcache._core.digest import hash_keys
from embcache.checkpoint import Reader, Writer, publish, vshards_of
from embcache.filterfile import CLOCKS, SKETCHES, meaning, sketch_name
from embcache.filterparts import filter_state, writers_of_share
from embcache.saving import describe

RULE = ec.AdmitAndEvictConfig(admit_threshold=3, sketch_bytes=1 << 12)


def manager(rule: ec.AdmitAndEvictConfig = RULE, rank: int = 0, world: int = 1) -> ec.EmbCacheManager:
    return ec.EmbCacheManager([ec.TableConfig("t", 4, ["t"], admit_and_evict=rule)], vshards=vshards_of(rank, world))


def train(one: ec.EmbCacheManager, keys: np.ndarray) -> list[int]:
    """A batch; returns the keys that have a row afterwards."""
    info = one.plan(ec.JaggedFeatures(["t"], torch.from_numpy(keys), torch.tensor([len(keys)])))
    one.swap_out(info)
    one.swap_in(info)
    one.finish(info)
    return sorted(key for key in keys.tolist() if key in one.table("t"))


def keys_of(rank: int, world: int, count: int) -> np.ndarray:
    keys = np.arange(1, 20_000)
    low, high = vshards_of(rank, world)
    vshards = (hash_keys(keys) >> np.uint64(52)).astype(np.int64)
    return keys[(vshards >= low) & (vshards < high)][:count]


def write(path: Path, states: list[dict[str, Any]], rule: ec.AdmitAndEvictConfig = RULE) -> None:
    """A generation of as many ranks, each with its filter."""
    with manager(rule) as one:
        description = describe(one, 0, "")
    writers = [Writer(path, rank, len(states)) for rank in range(len(states))]
    for writer, state in zip(writers, states, strict=True):
        writer.begin(1, metadata={"steps": {"": 2}})
        writer.table(description, metadata={"filter": meaning(rule), "table": "t", "module": ""})
        for which in (*SKETCHES, CLOCKS):
            if which in state:
                writer.write_state(sketch_name("t", which), state[which].view(np.uint8).data)
        numbers = {name: value for name, value in state.items() if isinstance(value, int)}
        writer.write_filter(description, state["keys"], state["counts"], state["last"], state["late"], numbers)
        writer.write_state("of all", b"rank %d" % writer.rank)
        writer.commit()
    publish(str(path), 1, len(states))
    for writer in writers:
        writer.close()


@pytest.fixture
def states() -> list[dict[str, Any]]:
    """Two ranks' filters: each has counted the odd ones of its keys twice, the others once."""
    found = []
    for rank in range(2):
        with manager(rank=rank, world=2) as one:
            keys = keys_of(rank, 2, 40 + 20 * rank)
            train(one, keys)
            train(one, keys[1::2])
            found.append(one.planner.export_filter(0))
    return found


def whole_of(states: list[dict[str, Any]], which: str) -> np.ndarray:
    """The blocks of all ranks side by side."""
    return np.concatenate([one[which] for one in states])


def test_sketches_of_two_ranks_become_one_that_has_the_blocks_of_both(
    tmp_path: Path, states: list[dict[str, Any]]
) -> None:
    write(tmp_path / "c", states)
    with manager() as one:
        one.restore(tmp_path / "c")
        for rank in range(2):
            keys = keys_of(rank, 2, 40 + 20 * rank)
            assert train(one, keys) == keys[1::2].tolist()
    with Reader(tmp_path / "c") as reader:
        whole = filter_state(reader, "t")
        assert whole is not None
        for which in (*SKETCHES, CLOCKS):
            assert np.array_equal(whole[which], whole_of(states, which))
        assert whole["sketch_blocks"] == 8 and whole["sketch_clocks"].reshape(-1, 3)[:, :2].sum() == 150
        assert reader.state("of all") == b"rank 0" and reader.state("of all", 1) == b"rank 1"
        assert reader.state_writers("of all") == [0, 1] and reader.state_writers("nobody's") == []
        with pytest.raises(ec.ConfigError, match=r"writer 2 wrote no state 'of all'; \[0, 1\] did"):
            reader.state("of all", 2)


def test_as_many_ranks_get_their_own_back(
    tmp_path: Path, states: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "c", states)
    assert cli.main(["compact", str(tmp_path / "c"), str(tmp_path / "compact")]) == 0
    for name in ("c", "compact"):
        for rank in range(2):
            with Reader(tmp_path / name, rank=rank, world=2) as reader:
                own = filter_state(reader, "t")
                assert own is not None and own["sketch_first"] == states[rank]["sketch_first"] == 4 * rank
                assert all(np.array_equal(own[which], states[rank][which]) for which in (*SKETCHES, CLOCKS))
                assert reader.state("of all", rank) == b"rank %d" % rank
    assert cli.main(["diff", str(tmp_path / "c"), str(tmp_path / "compact")]) == 0
    write(tmp_path / "other", [states[0], states[0]])
    capsys.readouterr()
    assert cli.main(["diff", str(tmp_path / "c"), str(tmp_path / "other"), "--json"]) == 1
    assert '"filter/t/sketch_young": "changed"' in capsys.readouterr().out


def test_resharding_again_and_again_makes_no_counter_larger(
    tmp_path: Path, states: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "2", states)
    before = "2"
    for step, world in enumerate((3, 2, 4, 1)):
        assert (
            cli.main(["reshard", str(tmp_path / before), str(tmp_path / f"{step}-{world}"), "--writers", str(world)])
            == 0
        )
        before = f"{step}-{world}"
    with Reader(tmp_path / before) as reader:
        whole = filter_state(reader, "t")
        assert whole is not None
        assert all(np.array_equal(whole[which], whole_of(states, which)) for which in (*SKETCHES, CLOCKS))


def test_wide_counters_are_compared_as_numbers(tmp_path: Path) -> None:
    rule = dataclasses.replace(RULE, admit_threshold=300)
    states = []
    for count in (0x0100, 0x00FF):
        with manager(rule) as one:
            state = one.planner.export_filter(0)
            state["sketch_young"][:] = np.full(len(state["sketch_young"]) // 2, count, "<u2").view(np.uint8)
            states.append(state)
    write(tmp_path / "c", states, rule)
    with Reader(tmp_path / "c") as reader:
        whole = filter_state(reader, "t")
    assert whole is not None and set(whole["sketch_young"].view("<u2").tolist()) == {0x0100}


def test_a_sketch_of_another_size_is_named(tmp_path: Path, states: list[dict[str, Any]]) -> None:
    states[1]["sketch_old"] = states[1]["sketch_old"][:-1]
    write(tmp_path / "c", states)
    with (
        Reader(tmp_path / "c") as reader,
        pytest.raises(ec.CorruptionError, match="writer 1 has a sketch of 1023 bytes in 4 blocks, by 12 clocks"),
    ):
        filter_state(reader, "t")


def test_sketches_of_an_earlier_version_stay_as_they_are(tmp_path: Path) -> None:
    """One block on each rank, of all its keys, whose clocks are numbers: read, trained with, saved and read again."""
    states = []
    for rank in range(2):
        with manager(rank=rank, world=2) as one:
            empty = one.planner.export_filter(0)
            for name in ("sketch_blocks", "sketch_first", "sketch_clocks"):
                del empty[name]
            cells = np.zeros(RULE.sketch_bytes // 2, np.uint8)
            clock = {"sketch_added": 0, "sketch_old_added": 0, "sketch_since": -(2**63)}
            one.planner.import_filter(0, empty | {"sketch_young": cells, "sketch_old": cells} | clock)
            keys = keys_of(rank, 2, 40)
            train(one, keys)
            train(one, keys[1::2])
            state = one.planner.export_filter(0)
        assert state.pop("sketch_blocks") == 1 and state.pop("sketch_first") == 0
        added, old_added, since = state.pop("sketch_clocks").tolist()
        assert (added, old_added) == (60, 0)
        states.append(state | {"sketch_added": added, "sketch_old_added": old_added, "sketch_since": since})
    write(tmp_path / "c", states)
    for rank in range(2):
        with Reader(tmp_path / "c", rank=rank, world=2) as reader:
            own = filter_state(reader, "t")
        assert own is not None and own["sketch_blocks"] == 1 and own["sketch_clocks"][0] == 60
        assert all(np.array_equal(own[which], states[rank][which]) for which in SKETCHES)
    with manager() as one:
        one.restore(tmp_path / "c")
        whole = one.planner.export_filter(0)
        assert whole["sketch_blocks"] == 1
        assert all(np.array_equal(whole[which], np.maximum(*(one[which] for one in states))) for which in SKETCHES)
        for rank in range(2):
            keys = keys_of(rank, 2, 40)
            assert train(one, keys) == keys[1::2].tolist()
        one.save(tmp_path / "later")
        kept = one.planner.export_filter(0)
    with Reader(tmp_path / "later") as reader:
        again = filter_state(reader, "t")
    assert again is not None and all(np.array_equal(again[which], kept[which]) for which in (*SKETCHES, CLOCKS))


def test_who_may_have_counted_a_ranks_keys() -> None:
    assert [writers_of_share([0, 1], 2, rank, 2) for rank in range(2)] == [[0], [1]]
    assert [writers_of_share([0, 1, 2], 3, rank, 2) for rank in range(2)] == [[0, 1], [1, 2]]
    assert writers_of_share([1], 2, 0, 2) == [1]  # one rank has the table: by tables, not by vshards
