"""The table that a session ends with: cases, peers, ratios and their geometric means."""

from __future__ import annotations

import statistics
from collections.abc import Iterable

from machine import QUIET_SHARE, facts
from race import Outcome

__all__ = ["HEADINGS", "NOTE", "cells", "lines", "means"]

HEADINGS = ("case", "threads", "ours", "peer", "peer's", "ratio", "spread")
NOTE = (
    "ratio = peer's time / our time within a round, median over the rounds; spread = its quartiles; "
    f"* = other processes used more than {QUIET_SHARE:.0%} of a CPU meanwhile"
)


def cells(outcomes: Iterable[Outcome]) -> list[tuple[str, ...]]:
    """Rows under `HEADINGS`, a row a peer."""
    rows = []
    for outcome in outcomes:
        mark = "*" if outcome.load > QUIET_SHARE else ""
        head = (outcome.case, str(outcome.threads), outcome.unit.show(outcome.seconds, outcome.work) + mark)
        if not outcome.peers:
            rows.append((*head, "", "", "", ""))
        for peer in outcome.peers:
            if peer.reason:
                rows.append((*head, peer.name, "absent", "", peer.reason))
            else:
                low, middle, high = peer.ratios
                rows.append(
                    (
                        *head,
                        peer.name,
                        outcome.unit.show(peer.seconds, outcome.work),
                        f"{middle:.2f}x{mark}",
                        f"{low:.2f}-{high:.2f}",
                    )
                )
            head = ("", "", "")
    return rows


def means(outcomes: Iterable[Outcome]) -> list[str]:
    """Geometric means over the cases of a group, for each peer that ran in more than one."""
    ratios_of: dict[tuple[str, int, str], list[float]] = {}
    for outcome in outcomes:
        for peer in outcome.peers:
            if not peer.reason:
                ratios_of.setdefault((outcome.group, outcome.threads, peer.name), []).append(peer.ratios[1])
    return [
        f"{group}, {threads} thread{'s' if threads > 1 else ''}, against {name}: geometric mean {statistics.geometric_mean(ratios):.2f}x, "
        f"least {min(ratios):.2f}x ({len(ratios)} cases)"
        for (group, threads, name), ratios in ratios_of.items()
        if len(ratios) > 1
    ]


def lines(outcomes: list[Outcome]) -> list[str]:
    """The table for a terminal."""
    table = [HEADINGS, *cells(outcomes)]
    widths = [max(len(row[column]) for row in table) for column in range(len(HEADINGS) - 1)]
    body = [
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[-1]]).rstrip()
        for row in table
    ]
    return [*facts(), "", body[0], "-" * len(body[0]), *body[1:], "", *means(outcomes), "", NOTE]
