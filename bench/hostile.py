"""Keys that somebody chose to make a hash map slow: strides, equal low or high bits, and keys crafted against our own hash.

The canonical hash is a bijection that anyone can turn round (`keys_with_hashes`), and has no seed; what a table adds to it,
when it chooses buckets, is a seed of its own. Tests compare the probes of these keys with those of random ones, and the
bench the time.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

__all__ = ["PATTERNS", "keys_of_one_vshard", "keys_with_hashes"]

U64 = np.uint64
SECRET = bytes.fromhex("7c01812cf721ad1cded46de9839097db")  # bytes 8 to 23 of XXH3's secret, which ec_hash stirs in


def _rotated(x: np.ndarray, bits: int) -> np.ndarray:
    bits %= 64
    return (x << U64(bits)) | (x >> U64((64 - bits) % 64)) if bits else x


def keys_with_hashes(hashes: np.ndarray) -> np.ndarray:
    """The keys (int64) whose canonical hash is given."""
    prime = 0x9FB21C651E98DF25
    inverse = U64(pow(prime, -1, 2**64))
    x = hashes.astype(U64)
    x = x ^ (x >> U64(28)) ^ (x >> U64(56))
    x = x * inverse
    x = x ^ ((x >> U64(35)) + U64(8))
    x = x * inverse
    for step in range(6):  # x ^ rot49 ^ rot24 is f = 1 + z^49 + z^24 modulo z^64 - 1, and f^64 = 1: apply f^63
        x = x ^ _rotated(x, 49 << step) ^ _rotated(x, 24 << step)
    low, high = (int.from_bytes(SECRET[at : at + 8], "little") for at in (0, 8))
    return _rotated(x ^ U64(low ^ high), 32).view(np.int64)


def _stride(shift: int) -> Callable[[int], np.ndarray]:
    return lambda n: np.arange(n, dtype=np.int64) << shift


def _hash_run(shift: int, base: int = 0) -> Callable[[int], np.ndarray]:
    return lambda n: keys_with_hashes((np.arange(n, dtype=U64) << U64(shift)) + U64(base))


def keys_of_one_vshard(n: int, seed: int = 5) -> np.ndarray:
    """`n` keys that no table can spread over partitions: the top 12 bits of their hashes are the same."""
    below = np.random.default_rng(seed).integers(0, 1 << 52, n, dtype=U64)
    return keys_with_hashes((U64(0x9A5) << U64(52)) | below)


# n distinct keys, n at most 2^24.
PATTERNS: dict[str, Callable[[int], np.ndarray]] = {
    **{f"stride 2^{shift}": _stride(shift) for shift in (0, 1, 6, 12, 20, 32)},
    "stride of the top bits": lambda n: np.arange(n, dtype=np.int64) << (64 - (n - 1).bit_length()),
    "equal low bits": lambda n: (np.arange(n, dtype=np.int64) << 32) | 0x5A5A5A5A,
    "equal high bits": lambda n: np.arange(n, dtype=np.int64) + (0x7A7A << 48),
    "negative and positive": lambda n: np.concatenate([np.arange(1, n // 2), -np.arange(1, n // 2)]),
    "hashes in a row": _hash_run(0),
    "hashes with equal low bits": _hash_run(40, 0x1234567),
    "hashes with equal low 32 bits": _hash_run(32),
    "hashes that share the bits below the vshard": lambda n: keys_with_hashes(
        (np.arange(n, dtype=U64) % U64(4096) << U64(52)) | (U64(0xABCDE) << U64(32)) | np.arange(n, dtype=U64)
    ),
}
