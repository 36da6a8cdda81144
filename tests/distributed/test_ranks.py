"""Ranks in the life of a job: evaluation, pipelines, checkpoints, batches that fail on one rank, and what must be alike."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from crew import Crew, Crews
from sharded_cases import Case, batch_of, joined, one_process, same
from sharded_jobs import (
    bad_batch,
    begin_again,
    collectives,
    evaluate,
    fall,
    freeze,
    go_on,
    pipeline,
    restore_refused,
    save_again_at_once,
    save_part_way,
    take_together,
    unlike,
    wire_outputs,
)

SOAK = int(os.environ.get("EMBCACHE_SOAK", "0"))


@pytest.fixture(scope="module")
def crews() -> Iterator[Crews]:
    with Crews() as crews:
        yield crews


def test_i6_evaluation_over_ranks_reads_what_one_process_reads_and_changes_nothing(crews: Crews) -> None:
    case = Case(31, kind="time", weighted=True, steps=5)
    alone = crews[1].run(evaluate, case)[0]
    answers = crews[3].run(evaluate, case)
    for mine, before, after, unchanged in answers:
        same(after, before)
        assert unchanged
        assert len(mine) == len(alone[0])
    for index, number in enumerate(range(50, 54)):
        rows = [part["rows"] for part in batch_of(case, number, 3)]
        for (low, high), (mine, *_) in zip(rows, answers, strict=True):
            assert torch.equal(mine[index], alone[0][index][low:high])


@pytest.mark.parametrize("world", [2, 3, 4] if SOAK else [3])
def test_i9_a_pipeline_over_ranks_gives_the_bits_of_one_step_after_the_other(crews: Crews, world: int) -> None:
    case = Case(32, kind="time", weighted=False)
    flat = crews[world].run(pipeline, case, 1, 12, False, False)
    deep = crews[world].run(pipeline, case, 6, 12, True, False)
    for one, other in zip(flat, deep, strict=True):
        assert one[0] == other[0] == 12  # though one rank has two batches more
        assert one[1] == other[1]
        same(one[2][0], other[2][0])
        same(one[2][1], other[2][1])


def test_a_collection_is_frozen_between_epochs_and_within_one_that_is_refused(crews: Crews) -> None:
    """By then each rank has planned another number of batches ahead: what they count and insert would depend on that."""
    flat = crews[2].run(freeze, Case(34, kind="time"), 1)
    deep = crews[2].run(freeze, Case(34, kind="time"), 6)
    for said, _ in flat + deep:
        assert "eval() or train() of ['values'] within an epoch" in said[0] and said[1:] == ["ended", "12"]
    for one, other in zip(flat, deep, strict=True):
        for mine, its in zip(one[1], other[1], strict=True):
            same(mine, its)


@pytest.mark.parametrize("world", [2, 3])
def test_no_deadlock_with_random_delays_and_a_dense_part_in_ddp(crews: Crews, world: int) -> None:
    steps = 1000 if SOAK else 60
    answers = crews[world].run(pipeline, Case(33, kind="floor", most=4), 6, steps, True, True)
    assert [answer[0] for answer in answers] == [steps] * world
    for answer in answers[1:]:
        for one, other in zip(answers[0][3], answer[3], strict=True):
            assert torch.equal(one, other)  # the dense part is alike


@pytest.mark.parametrize(
    ("writers", "kind", "delta", "background"),
    [
        (2, "time", False, False),
        (2, "time", True, True),
        (2, "clicks", True, False),
        (3, "floor", True, True),
        (1, "clicks", False, True),
        (2, "sketches", True, True),
        *(
            [(4, kind, delta, delta) for kind in ("time", "step", "floor", "clicks") for delta in (False, True)]
            * (SOAK > 0)
        ),
    ],
)
def test_i10_a_generation_of_some_ranks_restores_into_others(
    crews: Crews, tmp_path: Path, writers: int, kind: str, delta: bool, background: bool
) -> None:
    case = Case(34, kind=kind, optimizer="Adam")
    path = str(tmp_path / "saved")
    saved = crews[writers].run(save_part_way, case, path, 7, delta, background)
    _, state, evicted = one_process(case)
    assert evicted > 0
    same(joined([one[2] for one in saved]), state)
    assert len({one[0] for one in saved}) == 1
    for world in (1, 2, 3, 4) if SOAK else (1, 2, 3):
        answers = crews[world].run(go_on, case, path)
        assert {answer[0] for answer in answers} == {saved[0][0]}
        same(joined([answer[1] for answer in answers]), joined([one[1] for one in saved]))
        same(joined([answer[2] for answer in answers]), state)
        assert {answer[3] for answer in answers} == {case.steps}


def test_i10_a_delta_that_begins_while_another_is_written_names_it_as_its_parent(crews: Crews, tmp_path: Path) -> None:
    case = Case(34, kind="time", optimizer="Adam")
    path = str(tmp_path / "saved")
    saved = crews[2].run(save_again_at_once, case, path)
    answers = crews[2].run(go_on, case, path)
    same(joined([answer[1] for answer in answers]), joined(saved))


def test_nobody_waits_for_other_ranks_inside_the_door(crews: Crews, tmp_path: Path) -> None:
    """But where a sweep selects in the middle of a plan, and then trainers get in. Else a third thread of one rank closes a circle."""
    case = Case(40, kind="floor", accumulate=1)
    for seen in crews[2].run(collectives, case, str(tmp_path / "saved")):
        whats = {what for what, *_ in seen}
        assert {"a non-finite gradient", "what a sweep evicts", "a save", "a restore", "planning a batch"} <= whats
        for what, planning, training in seen:
            assert not training, what
            assert not planning or what in ("what a sweep evicts", "a selection of rows to evict"), what


def test_i10_a_restore_that_one_rank_refuses_happens_on_none(crews: Crews, tmp_path: Path) -> None:
    case = Case(41, kind="time")
    answers = crews[3].run(restore_refused, case, str(tmp_path / "saved"))
    for rank, (heard, *_) in enumerate(answers):
        own = rank == 2
        assert [name for name, _ in heard] == (["PlanError", "HostMemoryError"] if own else ["RankRefusedError"] * 2)
        assert own or ("rank 2" in heard[0][1] and "PlanError" in heard[0][1] and "HostMemoryError" in heard[1][1])
    _, state, _ = one_process(case)
    same(joined([answer[2] for answer in answers]), joined([answer[1] for answer in answers]))
    same(joined([answer[3] for answer in answers]), state)


def test_a_process_group_that_is_destroyed_is_forgotten(tmp_path: Path) -> None:
    case = Case(42, kind="time", steps=4)
    with Crew(2) as crew:
        answers = crew.run(begin_again, case, str(tmp_path / "store"))
    assert [answer[:2] for answer in answers] == [(True, 1), (True, 1)]
    _, state, _ = one_process(case)
    same(joined([answer[2] for answer in answers]), state)


def test_several_collections_of_one_rank_without_torch_distributed_in_a_pipeline() -> None:
    done, losses, *_ = pipeline(0, 1, Case(43, kind="time"), 3, 4, False, False)
    assert done == len(losses) == 4


def test_a_bad_batch_on_one_rank_is_passed_over_by_all(crews: Crews) -> None:
    answers = crews[2].run(bad_batch, Case(35, kind="time"))
    assert [heard[0][:2] for heard, *_ in answers] == [(2, "RankRefusedError"), (2, "ShapeError")]
    assert "rank 1" in answers[0][0][0][2]
    assert "no feature" in answers[0][0][0][2]
    assert {step for *_, step in answers} == {4}


@pytest.mark.parametrize(
    ("what", "named"),
    [
        ("seed", "seed of table 'one'"),
        ("optimizer", "the optimizer"),
        ("filter", "admit_and_evict"),
        ("wire", "wire_rows"),
    ],
)
def test_ranks_that_are_made_differently_hear_of_it(crews: Crews, what: str, named: str) -> None:
    for said in crews[2].run(unlike, Case(36), what):
        assert said.startswith("ConfigError: ranks differ in ")
        assert named in said


def test_batches_end_together(crews: Crews) -> None:
    assert crews[3].run(take_together) == [[0, 1, 2]] * 3


@pytest.mark.parametrize(("kind", "bits"), [("float16", 11), ("bfloat16", 8)])
def test_16_bits_on_the_wire_cost_what_is_said(crews: Crews, kind: str, bits: int) -> None:
    case = Case(37, kind="none", optimizer="SGD")
    exact = crews[2].run(wire_outputs, case, "float32", "float32")
    rows = crews[2].run(wire_outputs, case, kind, "float32")
    both = crews[2].run(wire_outputs, case, "float32", kind)
    for one, other in zip(exact, rows, strict=True):
        widest = 12  # values in a bag, at most, each within 0.05
        difference = (one[0][0] - other[0][0]).abs()
        assert not difference.numel() or difference.max() <= widest * 0.05 * 2.0**-bits + 1e-7
        assert other[2] < one[2]
    assert any((one[0][0] != other[0][0]).any() for one, other in zip(exact, rows, strict=True))
    fine, narrow = joined([one[1] for one in exact]), joined([one[1] for one in both])
    for name in fine:
        change = np.abs(fine[name]["weights"] - narrow[name]["weights"])
        assert change.max() <= 0.1 * 40 * 2.0**-bits  # lr times a sum of gradients, rounded once


@pytest.mark.parametrize("piped", [False, True])
@pytest.mark.parametrize("how", ["killed", "raises"])
def test_a_rank_that_falls_brings_the_others_down_with_a_clear_error(how: str, piped: bool) -> None:
    with Crew(3) as crew:
        crew.start(fall, Case(38, kind="time"), how, piped)
        answers = crew.answers(raising=False)
    for kind, text, seconds in answers[:2]:
        assert kind == "RankError", (kind, text)
        assert "start all ranks again from the last generation" in text
        assert seconds < 30  # a second, but for a busy machine; the time limit is 60
        if how == "raises":
            assert "rank 2 has failed with ArithmeticError: the loss is odd" in text


def test_a_job_that_fell_goes_on_from_its_last_whole_generation(crews: Crews, tmp_path: Path) -> None:
    case, path = Case(39, kind="time"), str(tmp_path / "saved")
    saved = crews[2].run(save_part_way, case, path, 5, False, False)
    # A later save of which one rank alone has become durable is no generation.
    torn = next(iter(sorted((tmp_path / "saved").glob("rank-0001"))))
    (torn / f"COMMIT-{saved[0][0] + 1:016d}").write_bytes(b"half")
    answers = crews[2].run(go_on, case, path)
    assert answers[0][0] == saved[0][0]
    same(joined([answer[2] for answer in answers]), joined([one[2] for one in saved]))
