"""The bench's own arithmetic: outcomes survive a file, and a target's verdict follows from the right cases."""

from __future__ import annotations

import json
from dataclasses import asdict

from race import MICROSECONDS, MILLION_KEYS, Outcome, PeerOutcome, outcome_from
from targets import Target, standings

PEERS = [PeerOutcome("boost", 4.0, (1.5, 2.0, 2.5)), PeerOutcome("absl", reason="not installed")]
UNIFORM = Outcome("find", "find, 10 M, uniform", 1, 1e6, MILLION_KEYS, 2.0, 0.0, 7, PEERS)
ZIPF = Outcome("find", "find, 10 M, zipf", 1, 1e6, MILLION_KEYS, 2.0, 0.0, 7, [PeerOutcome("boost", 16.0, (7, 8.0, 9))])
CALL = Outcome("overhead", "find of 0 keys", 1, 1, MICROSECONDS, 2e-6, 0.0, 9)


def verdict(target: Target) -> tuple[str, float | None]:
    (standing,) = standings([UNIFORM, ZIPF, CALL], [target])
    return standing.verdict, standing.value


def test_an_outcome_survives_its_file() -> None:
    for outcome in (UNIFORM, ZIPF, CALL):
        assert outcome_from(json.loads(json.dumps(asdict(outcome)))) == outcome


def test_the_least_case_counts_unless_the_mean_is_meant() -> None:
    assert verdict(Target("", "find, 10 M", "boost", 3.0, 9.0)) == ("missed", 2.0)
    assert verdict(Target("", "find, 10 M", "boost", 3.0, 9.0, mean=True)) == ("floor", 4.0)
    assert verdict(Target("", "find, 10 M, zipf", "boost", 3.0, 8.0)) == ("stretch", 8.0)


def test_absent_peers_and_other_thread_counts_are_not_measured() -> None:
    assert verdict(Target("", "find, 10 M", "absl", 1.0, 1.0)) == ("not measured", None)
    assert verdict(Target("", "find, 10 M", "boost", 1.0, 1.0, threads=2)) == ("not measured", None)


def test_a_time_is_good_below_its_bound() -> None:
    assert verdict(Target("", "find of 0 keys", "", 1.5e-6, 1e-6)) == ("missed", 2e-6)
    assert verdict(Target("", "find of 0 keys", "", 2.5e-6, 1e-6)) == ("floor", 2e-6)
