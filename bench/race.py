"""Ours and its peers, timed in turn: A B C A B C ..., so that a drift of the machine meets all of them alike.

The figure that counts is the ratio peer / ours *within a round*; a case reports the median of these ratios and their
quartiles. Every contender gives its answer once before the clock starts, and a peer whose answer differs from ours
stops the bench. A peer that is not installed appears in the table with the reason.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from machine import LoadMeter, is_quiet, wait_until_quiet

__all__ = [
    "BYTES",
    "MICROSECONDS",
    "MILLION_KEYS",
    "MILLION_ROWS",
    "MILLISECONDS",
    "QUERY_SETS",
    "Absent",
    "Contender",
    "Outcome",
    "PeerOutcome",
    "Race",
    "Unit",
    "outcome_from",
    "quartiles",
]

QUERY_SETS = (
    4  # a round uses query set `round % QUERY_SETS`, so that none is answered out of the last round's cache lines
)


WALL_ONLY = "not timed by CPU time: several threads"


@dataclass(frozen=True)
class Unit:
    """How seconds and an amount of work are shown: as a rate (work per second) or as a time (seconds per work)."""

    text: str
    scale: float
    rate: bool

    def show(self, seconds: float, work: float) -> str:
        """The figure with its unit."""
        value = work / seconds / self.scale if self.rate else seconds / work / self.scale
        return f"{value:.3g} {self.text}" if value < 1000 else f"{value:.0f} {self.text}"


MILLION_KEYS = Unit("M keys/s", 1e6, rate=True)
MILLION_ROWS = Unit("M rows/s", 1e6, rate=True)
MICROSECONDS = Unit("us", 1e-6, rate=False)
MILLISECONDS = Unit("ms", 1e-3, rate=False)
BYTES = Unit("MB", 1.0, rate=False)  # counted, not timed: bytes / 1e6 in place of seconds


@dataclass(frozen=True)
class Contender:
    """One way to do the work of a case.

    Attributes
    ----------
    name : str
    call : callable
        Does the work on query set i and returns the answer. This is what is timed.
    same : callable, optional
        Given our answer and this one, raises `AssertionError` unless they agree. Only a physical limit (a loop that
        answers nothing) may go without.
    before : callable, optional
        Makes the machine ready. Not timed.
    after : callable, optional
        Given the answer, puts things back. Not timed.
    share : float
        The part of the case's work that `call` does; for peers too slow to do all of it.
    threads : int
        Threads it uses, where these are more than the case's.
    seconds_of : callable, optional
        Takes the figure from the answer instead of the clock.
    """

    name: str
    call: Callable[[int], Any]
    same: Callable[[Any, Any], None] | None = None
    before: Callable[[], None] | None = None
    after: Callable[[Any], None] | None = None
    share: float = 1.0
    threads: int = 1
    seconds_of: Callable[[Any], float] | None = None

    def answer(self, query_set: int) -> Any:
        """The answer on one query set; nothing is put back yet."""
        return self.call(query_set)

    def timed(self, query_set: int, repeat: int, clock: Callable[[], float]) -> float:
        """Seconds of the whole case's work, done once."""
        if self.before:
            self.before()
        began = clock()
        for _ in range(repeat):
            answer = self.call(query_set)
        seconds = (clock() - began) / repeat
        seconds = self.seconds_of(answer) if self.seconds_of else seconds
        if self.after:
            self.after(answer)
        return seconds / self.share


@dataclass(frozen=True)
class Absent:
    """A peer that cannot take part, and why."""

    name: str
    reason: str


@dataclass(frozen=True)
class PeerOutcome:
    """A peer's median seconds and the quartiles of its paired ratio to ours; no figures where it was absent."""

    name: str
    seconds: float = 0.0
    ratios: tuple[float, float, float] = (0.0, 0.0, 0.0)
    reason: str = ""


@dataclass(frozen=True)
class Outcome:
    """What one case gave."""

    group: str
    case: str
    threads: int
    work: float
    unit: Unit
    seconds: float
    load: float
    rounds: int
    peers: list[PeerOutcome] = field(default_factory=list)


def outcome_from(fields: dict[str, Any]) -> Outcome:
    """The outcome that `dataclasses.asdict` made these fields of."""
    peers = [PeerOutcome(**{**peer, "ratios": tuple(peer["ratios"])}) for peer in fields["peers"]]
    return Outcome(**{**fields, "unit": Unit(**fields["unit"]), "peers": peers})


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Lower quartile, median, upper quartile."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


class Race:
    """Runs one case under pytest-benchmark's stopwatch and notes the outcome. The fixture `race` gives one per test."""

    def __init__(self, benchmark: Any, outcomes: list[Outcome], patience: list[float], *, cpu_clock: bool) -> None:
        self._benchmark, self._outcomes, self._patience, self._cpu_clock = benchmark, outcomes, patience, cpu_clock

    def __call__(
        self,
        group: str,
        case: str,
        ours: Contender,
        peers: Sequence[Contender | Absent],
        *,
        threads: int = 1,
        work: float,
        unit: Unit,
        rounds: int = 7,
        repeat: int = 1,
        check_sets: Sequence[int] = (0,),
    ) -> Outcome:
        """Compare answers on `check_sets` in this order, then time everyone for `rounds` rounds, `repeat` calls each."""
        clock = time.process_time if self._cpu_clock and threads == 1 else time.perf_counter
        if clock is time.process_time:  # it would charge a peer for every thread
            peers = [
                Absent(p.name, WALL_ONLY) if isinstance(p, Contender) and p.threads > threads else p for p in peers
            ]
        present = [peer for peer in peers if isinstance(peer, Contender)]
        self._compare(ours, present, check_sets)

        times: dict[str, list[float]] = {peer.name: [] for peer in present}
        loads: list[tuple[float, float]] = []
        figures: list[float] = []
        meter, turn = LoadMeter(), 0

        def peers_first() -> tuple[tuple[int], dict[str, Any]]:
            nonlocal turn
            query_set = turn % QUERY_SETS
            meter.start()
            at = turn % len(present) if present else 0
            for peer in present[at:] + present[:at]:
                times[peer.name].append(peer.timed(query_set, repeat, clock))
            turn += 1
            if ours.before:
                ours.before()
            return (query_set,), {}

        def our_turn(query_set: int) -> Any:
            began = clock()
            for _ in range(repeat):
                answer = ours.call(query_set)
            seconds = (clock() - began) / repeat
            figures.append(ours.seconds_of(answer) if ours.seconds_of else seconds)
            return answer

        answers: list[Any] = []

        def keep(query_set: int) -> None:
            loads.append(meter.stop())
            if ours.after and answers:
                ours.after(answers.pop())

        def target(query_set: int) -> None:
            answers[:] = [our_turn(query_set)]

        self._patience[0] -= wait_until_quiet(min(3.0, max(0.0, self._patience[0])))
        gc.collect()
        gc.disable()
        try:
            self._benchmark.group = group
            self._benchmark.pedantic(target, setup=peers_first, teardown=keep, rounds=rounds)
        finally:
            gc.enable()
        outcome = self._judge(group, case, threads, work, unit, figures, times, loads, peers)
        self._outcomes.append(outcome)
        self._benchmark.extra_info.update(
            case=case,
            threads=threads,
            work=work,
            unit=unit.text,
            calls_a_round=repeat,
            load=round(outcome.load, 3),
            peers={
                peer.name: {"median_s": peer.seconds, "ratio": peer.ratios, "absent": peer.reason}
                for peer in outcome.peers
            },
        )
        return outcome

    @staticmethod
    def _compare(ours: Contender, peers: list[Contender], check_sets: Sequence[int]) -> None:
        """Everyone answers before the clock starts, which also warms everyone up."""
        for query_set in check_sets:
            expected = ours.answer(query_set)
            for peer in peers:
                answer = peer.answer(query_set)
                if peer.same is not None:
                    peer.same(expected, answer)
                if peer.after:
                    peer.after(answer)
            if ours.after:
                ours.after(expected)

    @staticmethod
    def _judge(
        group: str,
        case: str,
        threads: int,
        work: float,
        unit: Unit,
        figures: list[float],
        times: dict[str, list[float]],
        loads: list[tuple[float, float]],
        peers: Sequence[Contender | Absent],
    ) -> Outcome:
        """Medians over the quiet rounds; over all where fewer than half were quiet (the load then says so)."""
        figures = figures[: len(loads)] or figures
        rounds = range(len(figures))
        quiet = [i for i in rounds if i >= len(loads) or is_quiet(*loads[i])]
        kept = quiet if len(quiet) * 2 >= len(rounds) else list(rounds)
        heard = [loads[i] for i in kept if i < len(loads)]
        load = sum(others for others, _ in heard) / max(sum(wall for _, wall in heard), 1e-9)
        results = []
        for peer in peers:
            if isinstance(peer, Absent):
                results.append(PeerOutcome(peer.name, reason=peer.reason))
                continue
            seconds = times[peer.name]
            ratios = [seconds[i] / figures[i] for i in kept]
            results.append(PeerOutcome(peer.name, statistics.median(seconds[i] for i in kept), quartiles(ratios)))
        return Outcome(
            group, case, threads, work, unit, statistics.median(figures[i] for i in kept), load, len(kept), results
        )
