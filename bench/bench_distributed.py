"""A training step of two ranks on one machine (gloo), against TorchRec's sharded collection on the same tables, ids and gradients.

TorchRec offers whole tables a rank on a CPU, and sends pooled outputs; ours are sharded by rows, and send rows. Ranks begin together and take
`STEPS` steps, as in training; the slower rank's time counts. Several processes: wall time alone.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest
import torch
from crew import Crew

from race import BYTES, MILLISECONDS, Absent, Contender, Race
from sharded import Job, build, steps, wire

STEPS = 16
JOBS = [Job(), Job(zipf=0.0), Job(tables=26, rows=10_000, dim=16, pooling=1)]


Answer = list[tuple[float, torch.Tensor]]  # of each rank


def near(ours: Answer, theirs: Answer) -> None:
    """The same outputs, but for the order of sums."""
    for (_, one), (_, other) in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def slowest(answer: Answer) -> float:
    """Seconds of a step."""
    return max(seconds for seconds, _ in answer)


@pytest.fixture(scope="module")
def crew() -> Iterator[Crew]:
    with Crew(2) as members:
        yield members


@pytest.mark.parametrize("job", JOBS, ids=lambda job: f"{job.tables}x{job.rows}x{job.dim}-zipf{job.zipf}")
def test_step_of_two_ranks(race: Race, crew: Crew, job: Job) -> None:
    there = importlib.util.find_spec("torchrec") is not None
    crew.run(build, job, there)
    peer = Contender(
        "ShardedEmbeddingBagCollection, table-wise",
        lambda i: crew.run(steps, "stock", i, STEPS),
        near,
        seconds_of=slowest,
    )
    race(
        "step of 2 ranks, RowWiseAdagrad",
        f"2 ranks, {job.tables} tables of {job.rows} x {job.dim}, pooling {job.pooling}, zipf {job.zipf}",
        Contender("embcache", lambda i: crew.run(steps, "ours", i, STEPS), seconds_of=slowest),
        [peer] if there else [Absent(peer.name, "torchrec is not installed")],
        threads=2,
        work=1,
        unit=MILLISECONDS,
        rounds=15,
        check_sets=(0,),
    )


def test_bytes_on_the_wire_of_zipf_ids(race: Race, crew: Crew) -> None:
    """Distinct keys travel once, and so do their rows and gradients."""
    job = Job()
    crew.run(build, job, False)
    sent, without = (sum(column) for column in zip(*crew.run(wire, 0), strict=True))
    assert sent < without
    race(
        "step of 2 ranks, bytes",
        f"2 ranks, {job.tables} tables of {job.rows} x {job.dim}, pooling {job.pooling}, zipf {job.zipf}: bytes on the wire",
        Contender("embcache", lambda _i: sent, seconds_of=lambda count: count / 1e6),
        [Contender("every occurrence", lambda _i: without, seconds_of=lambda count: count / 1e6)],
        threads=2,
        work=1,
        unit=BYTES,
        rounds=3,
        check_sets=(),
    )
