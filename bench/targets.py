"""What we mean to reach, case by case: a floor and a stretch for a ratio, or a most for a time; the report says which hold.

A ratio is the peer's time over ours, so for a limit (a loop over known addresses) it is the share of the limit that we
reach. Targets hold at the sizes they name; a run with other sizes reports them as not measured.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from race import Outcome

__all__ = ["TARGETS", "Standing", "Target", "standings"]


@dataclass(frozen=True)
class Target:
    """A promise about some cases.

    Attributes
    ----------
    text : str
        What is promised.
    case, peer : str
        Regular expressions that the names must match from their start; an empty `peer` is a promise about our own time.
    threads : int
    floor, stretch : float
        Ratios to reach; for our own time, the most that one unit of work may take, in seconds.
    mean : bool
        Over several cases: their geometric mean. False: each of them, so the least.
    """

    text: str
    case: str
    peer: str
    floor: float
    stretch: float
    threads: int = 1
    mean: bool = False

    @property
    def is_time(self) -> bool:
        """Whether it is a promise about our own time."""
        return not self.peer


@dataclass(frozen=True)
class Standing:
    """A target and what was measured: the value, and a word for it."""

    target: Target
    value: float | None
    cases: int

    @property
    def verdict(self) -> str:
        """``"stretch"``, ``"floor"``, ``"missed"`` or ``"not measured"``."""
        if self.value is None:
            return "not measured"
        for word, bound in (("stretch", self.target.stretch), ("floor", self.target.floor)):
            if self.value <= bound if self.target.is_time else self.value >= bound:
                return word
        return "missed"


BOOST, ROBIN = r"boost::unordered_flat_map$", r"tsl::robin_map$"
TORCH_1 = r"(26 x )?torch.unique\(return_inverse\), 1 thread$"
LINE, COPY = "limit: one line a key", "limit: copy from known addresses"
SHARDED = "ShardedEmbeddingBagCollection"
TBE = "FBGEMM CPU TBE"
RESIDENT_STEPS = r"step .*, (SGD|RowWiseAdagrad)$"

TARGETS: Sequence[Target] = (
    Target("find, 10 M, uniform hits, against boost", "find, 10 M keys, hits uniform", BOOST, 3.5, 4.0),
    Target("find, 10 M, Zipf hits, against boost", "find, 10 M keys, hits zipf", BOOST, 3.4, 6.0),
    Target("find, 10 M, misses, against boost", "find, 10 M keys, misses", BOOST, 1.4, 2.0),
    Target("find, 10 M, uniform hits, against robin", "find, 10 M keys, hits uniform", ROBIN, 1.6, 2.0),
    Target("find, 10 M, uniform hits, two threads, against boost", "find, 10 M keys, hits uniform", BOOST, 3.0, 3.0, 2),
    Target("find, 100 M, uniform hits, against boost", "find, 100 M keys, hits uniform", BOOST, 2.2, 2.5),
    Target("find, 100 M, misses, against boost", "find, 100 M keys, misses", BOOST, 1.2, 2.0),
    Target("find, 10 M, hits, against pandas' khash", "find, 10 M keys, hits", "pandas Int64HashTable", 6.0, 7.0),
    Target("find, 10 M, uniform hits: share of one line a key", "find, 10 M keys, hits uniform", LINE, 0.5, 0.65),
    Target(
        "find, hostile keys: random keys' time over the slowest pattern's (>= 1/3 is <= 3x)",
        "find, .* hostile keys",
        "embcache, random keys",
        1 / 3,
        1 / 1.5,
    ),
    Target(
        "lookup(out=), 10 M x 64, against index_select(out=)", r"lookup\(out=\), 10 M x 64,", "index_select", 1.0, 1.5
    ),
    Target("lookup(out=), 10 M x 64, against F.embedding", r"lookup\(out=\), 10 M x 64,", "F.embedding", 2.5, 4.0),
    Target("lookup(out=), 128 B rows: share of the copy", r"lookup\(out=\), \S+ M x 32, uniform", COPY, 0.4, 0.55),
    Target("lookup(out=), 256 B rows: share of the copy", r"lookup\(out=\), \S+ M x 64, uniform", COPY, 0.4, 0.7),
    Target("lookup(out=), 512 B rows: share of the copy", r"lookup\(out=\), \S+ M x 128, uniform", COPY, 0.6, 0.8),
    Target("lookup(out=), two threads, against one", r"lookup\(out=\), .* x 64,", "embcache, one thread", 1.5, 1.5, 2),
    Target(
        "insert, 10 M new keys x 64, one call: share of a memset",
        "insert 10 M new keys x 64, one call",
        "memset",
        1 / 2,
        1 / 1.4,
    ),
    Target(
        "insert, 10 M new keys x 64, calls of 4,096: share of a memset",
        "insert 10 M new keys x 64, calls",
        "memset",
        1 / 2,
        1 / 1.4,
    ),
    Target("longest call of 4,096 new keys, 10 M keys", "longest of the .*, 10 M", "", 0.020, 0.008),
    Target("find after growth: share of a pre-sized table", "find after growth", "embcache, filled", 1 / 1.2, 1.0),
    Target("sweep of 100 M timestamps, 1 % dead, in all", "sweep of 100 M timestamps, 1% dead: in all", "", 1.0, 0.5),
    Target("sweep of 100 M timestamps, 10 % dead, in all", "sweep of 100 M timestamps, 10% dead: in all", "", 1.0, 0.5),
    Target("sweep of 100 M timestamps: longest step", "sweep of 100 M timestamps, .*: longest step", "", 0.020, 0.010),
    Target("sweep that looks at every row (floor, scores), 10 M: its step", "sweep of 10 M rows, ", "", 0.020, 0.010),
    Target("dedup + inverse, 1 M Zipf keys, against the best peer", "dedup alone .*inverse$", ".*", 3.0, 4.0),
    Target("dedup + inverse, two threads, against the best peer", "dedup alone .*inverse$", ".*", 4.0, 6.0, 2),
    Target("plan of 26 tables, against torch.unique", "plan of 26 tables .*all hits", TORCH_1, 1.5, 3.0),
    Target(
        "plan of 1,000 tables of 64 ids: share of one table", "plan of 1000 tables", "embcache, one table", 1 / 3, 1.0
    ),
    Target("step, resident: mean over the cells, against FBGEMM", RESIDENT_STEPS, TBE, 1.5, 2.5, mean=True),
    Target("step, resident: the least cell, against FBGEMM", RESIDENT_STEPS, TBE, 1.0, 1.5),
    Target(
        "step of the TorchRec face, resident: mean over the cells, against TorchRec",
        "TorchRec step",
        "FusedEmbeddingBagCollection",
        1.5,
        2.5,
        mean=True,
    ),
    Target("step, resident, two threads: mean, against FBGEMM", RESIDENT_STEPS, TBE, 2.0, 4.0, 2, mean=True),
    Target(
        "step of 2 ranks, Zipf ids, against TorchRec's sharded collection",
        "2 ranks, .*zipf 1.05$",
        SHARDED,
        1.0,
        1.5,
        2,
    ),
    Target(
        "step of 2 ranks, uniform ids, against TorchRec's sharded collection",
        "2 ranks, .*zipf 0.0$",
        SHARDED,
        0.8,
        1.0,
        2,
    ),
    Target(
        "2 ranks, Zipf ids: bytes on the wire without dedup over with",
        "2 ranks, .*: bytes",
        "every occurrence",
        1.5,
        2.0,
        2,
    ),
    Target("step, Adam, against nn.EmbeddingBag + SparseAdam", "step .*, Adam$", "nn.EmbeddingBag", 3.0, 5.0),
    Target("full save of 4 GB: share of plain write + fsync", "full save of 4 GB", "plain write", 0.85, 1.5),
    Target("full save of 4 GB, against a record a row in LMDB", "full save of 4 GB", "py-lmdb", 1.5, 3.0),
    Target("warm restore of 4 M x 64, a row (2 M rows/s are 0.5 us)", "warm restore of 4 M x 64", "", 1 / 2e6, 1 / 3e6),
    Target("warm restore of 4 M x 64, against torch.load", "warm restore of 4 M x 64", "torch.save", 1.2, 3.0),
    Target("warm restore, two threads, against torch.load", "warm restore of 4 M x 64", "torch.save", 1.2, 3.0, 2),
    Target("cut of a background save: one step over it", "cut of a background", "a step", 1.0, 2.0),
    Target("step during a background save: one alone over it", "step during a background", "a step", 1 / 1.25, 0.95),
    Target("delta, 1 % dirty: changed bytes over bytes written", "delta .*, 1.0% dirty: bytes", ".*", 1 / 1.2, 0.95),
    Target(
        "delta, 1 % dirty: time a changed row at 10 and 50 % over it (1: proportional; syncs and catalogue cost the same at any share)",
        "delta of 4 M x 64, 1.0% dirty: time",
        ".*",
        1 / 1.5,
        1 / 1.1,
    ),
    Target(
        "delta, 50 % dirty: time a changed row at 1 and 10 % over it (1: proportional)",
        "delta of 4 M x 64, 50.0% dirty: time",
        ".*",
        1 / 1.5,
        1 / 1.1,
    ),
    Target("verify, a MB (500 MB/s are 2 ms)", "verify of", "", 1 / 500, 1 / 2000),
    Target(
        "pipeline, emulated device: its share of the time where host work is 0.75 of its step",
        "pipeline, emulated device, host work 0.75",
        "limit: the device alone",
        0.95,
        0.98,
    ),
    Target(
        "pipeline, emulated device: against serial where host and device are equal",
        "pipeline, emulated device, host work equal",
        "embcache, serial",
        1.6,
        1.8,
    ),
    Target(
        "pipeline, emulated device, 10% in HBM: all resident over ours (>= 1/1.05)",
        "pipeline, emulated device, 10%",
        "embcache, all resident",
        1 / 1.05,
        1.0,
    ),
    Target(
        "pipeline, emulated device, 1% in HBM: all resident over ours (>= 1/1.15)",
        "pipeline, emulated device, 1%",
        "embcache, all resident",
        1 / 1.15,
        1 / 1.05,
    ),
    Target("look-ahead, window of 8 batches: the notice, an id", "look-ahead, .*: the notice", "", 100e-9, 50e-9),
    Target(
        "look-ahead, window of 8 batches: all it takes beyond lru, an id",
        "look-ahead, .*: all beyond",
        "",
        100e-9,
        60e-9,
    ),
    Target("find of an empty batch", "find of 0 keys", "", 1.5e-6, 1.5e-6),
    Target("plan of 16 keys", "plan of 16 keys", "", 50e-6, 50e-6),
    Target("forward + backward of 4 bags", "forward [+] backward of 4 bags", "", 300e-6, 300e-6),
    Target("import of the torch-free half, beyond numpy", "import embcache.table", "", 0.060, 0.060),
)


def standings(outcomes: Iterable[Outcome], targets: Iterable[Target] = TARGETS) -> list[Standing]:
    """Every target with what the outcomes say about it."""
    outcomes = list(outcomes)
    found = []
    for target in targets:
        values = []
        for outcome in outcomes:
            if outcome.threads != target.threads or not re.match(target.case, outcome.case):
                continue
            if target.is_time:
                values.append(outcome.seconds / outcome.work)
                continue
            values += [p.ratios[1] for p in outcome.peers if not p.reason and re.match(target.peer, p.name)]
        worst = max if target.is_time else min
        value = None if not values else statistics.geometric_mean(values) if target.mean else worst(values)
        found.append(Standing(target, value, len(values)))
    return found
