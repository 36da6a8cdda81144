"""What a filter computes with, in plain Python: scores, draws by chance, and the sketch of counts."""

from __future__ import annotations

import math
import struct

import xxhash

from embcache.config import AdmitAndEvictConfig

NEVER = -(2**63)
MASK = 2**64 - 1
GOLDEN = 0x9E3779B97F4A7C15


def mixed(x: int) -> int:
    """The finalizer of SplitMix64."""
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & MASK
    x = (x ^ x >> 27) * 0x94D049BB133111EB & MASK
    return x ^ x >> 31


def drawn(config: AdmitAndEvictConfig, key: int, step: int, draws: int) -> bool:
    """Whether one of `draws` occurrences of a key in a step admits it."""
    if config.admit_probability >= 1.0:
        return True
    below = int(config.admit_probability * 2.0**64)
    state = mixed((mixed(mixed(config.admit_seed + GOLDEN & MASK) ^ key & MASK) + step * GOLDEN) & MASK)
    return any(mixed(state + (i + 1) * GOLDEN & MASK) < below for i in range(draws))


def decayed(score: float, decay: float, sweeps: int) -> float:
    """score * decay ** sweeps, the power by repeated squaring."""
    power = 1.0
    while sweeps:
        power *= decay if sweeps & 1 else 1.0
        decay *= decay
        sweeps >>= 1
    return score * power


def as_count(score: float) -> int:
    """1 + the bits of a score: what the count column holds."""
    return 1 + struct.unpack("<q", struct.pack("<d", min(score, 1.7976931348623157e308)))[0]


def as_score(count: int) -> float:
    return struct.unpack("<d", struct.pack("<q", count - 1))[0] if count > 0 else 0.0


class Sketch:
    """Blocks of vshards, each with two generations of a count-min sketch with conservative update; cells that are 0 are not there."""

    def __init__(self, config: AdmitAndEvictConfig) -> None:
        cell = 1 if config.admit_threshold < 2**8 else 2 if config.admit_threshold < 2**16 else 4
        width, least = config.sketch_bytes // (8 * cell), max(64, 8 * config.admit_threshold)
        bits = max(bits for bits in range(13) if bits == 0 or width >> bits >= least)
        self.bits, self.width, self.top, self.seed = (
            bits,
            width >> bits,
            2 ** (8 * cell) - 1,
            config.admit_seed & MASK,
        )
        self.blocks = [SketchBlock() for _ in range(1 << bits)]

    def places(self, key: int) -> list[tuple[int, int]]:
        first = mixed(key & MASK ^ self.seed)
        second = mixed(first + GOLDEN & MASK)
        if self.bits == 0:
            hashes = [first + row * (second | 1) & MASK for row in range(4)]
        else:
            hashes = [half << 32 for whole in (first, second) for half in (whole >> 32, whole & 2**32 - 1)]
        return [(row, hash * self.width >> 64) for row, hash in enumerate(hashes)]

    def add(self, key: int, count: int) -> int:
        """Returns the estimate."""
        block = self.blocks[xxhash.xxh3_64_intdigest(struct.pack("<q", key)) >> 64 - self.bits]
        places = self.places(key)
        raised = min(self.top, min(block.young.get(place, 0) for place in places) + count)
        for place in places:
            block.young[place] = max(block.young.get(place, 0), raised)
        block.added += count
        return raised + min(block.old.get(place, 0) for place in places)

    def turn(self, cutoff: int, newest: int) -> None:
        for block in self.blocks:
            if block.added + block.old_added and (block.added >= self.width // 2 or block.since < cutoff):
                block.young, block.old = {}, block.young
                block.added, block.old_added, block.since = 0, block.added, newest


class SketchBlock:
    """Its generations, the occurrences in each, and the newest time when the young one began."""

    def __init__(self) -> None:
        self.young: dict[tuple[int, int], int] = {}
        self.old: dict[tuple[int, int], int] = {}
        self.added, self.old_added, self.since = 0, 0, NEVER


def share(part: float, count: int) -> int:
    return math.floor(part * float(count))
