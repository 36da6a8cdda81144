"""The canonical hash equals the reference implementation, for keys and for strings of every length class."""

from __future__ import annotations

import struct

import numpy as np
import pandas as pd
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from embcache._core.digest import hash_keys
from embcache.errors import ConfigError, EmbCacheError, ShapeError
from embcache.table import hash_strings

INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1

# Pinned once and for ever: checkpoints and ranks depend on them.
GOLDEN = {
    0: 14374147212387527897,
    1: 3439722301264460078,
    -1: 5841669975847748627,
    INT64_MIN: 9407778237848358495,
    INT64_MAX: 11687913294787043142,
}


def reference(key: int) -> int:
    return xxhash.xxh3_64_intdigest(struct.pack("<q", key))


@pytest.mark.parametrize("key", GOLDEN)
def test_golden_hash_of_extreme_keys(key: int) -> None:
    assert int(hash_keys(np.array([key]))[0]) == GOLDEN[key] == reference(key)


@given(st.lists(st.integers(INT64_MIN, INT64_MAX), max_size=50))
def test_hash_of_any_key_equals_the_reference(keys: list[int]) -> None:
    assert hash_keys(np.array(keys, dtype=np.int64)).tolist() == [reference(key) for key in keys]


@pytest.mark.parametrize("salt", [0, 1, 2**31, 2**32 + 5, 2**63, 2**64 - 1])
def test_hash_of_strings_equals_the_reference_at_every_length(salt: int) -> None:
    text = "".join(chr(32 + (7 * i) % 90) for i in range(5000))
    values = [
        text[i : i + length]
        for i, length in enumerate([*range(300), 511, 512, 513, 1023, 1024, 1025, 1088, 2048, 4999])
    ]
    expected = np.array(
        [xxhash.xxh3_64_intdigest(value.encode(), seed=salt) for value in values], dtype=np.uint64
    ).view(np.int64)
    assert np.array_equal(hash_strings(values, salt), expected)
    assert np.array_equal(hash_strings([value.encode() for value in values], salt), expected)


@given(st.lists(st.text()), st.integers(INT64_MIN, 2**64 - 1))
def test_hash_of_any_text_equals_the_reference(values: list[str], salt: int) -> None:
    expected = [xxhash.xxh3_64_intdigest(value.encode(), seed=salt % 2**64) for value in values]
    got = hash_strings(values, salt)
    assert got.dtype == np.int64 and got.shape == (len(values),)
    assert got.view(np.uint64).tolist() == expected


def test_hash_of_strings_takes_what_holds_strings() -> None:
    expected = hash_strings(["a", "bb", ""])
    assert np.array_equal(hash_strings(np.array(["a", "bb", ""])), expected)
    assert np.array_equal(hash_strings(np.array(["a", "bb", ""], dtype=object)), expected)
    assert np.array_equal(hash_strings(pd.Series(["a", "bb", ""])), expected)
    assert np.array_equal(hash_strings(iter(["a", "bb", ""])), expected)
    assert not np.array_equal(hash_strings(["a", "bb", ""], salt=1), expected)
    assert hash_strings([]).shape == (0,)


@pytest.mark.parametrize(
    ("values", "salt", "words"),
    [
        ("abc", 0, ["'abc'", "sequence"]),
        (["a", None], 0, ["values[1]", "None"]),
        (["a", 3.5], 0, ["values[1]", "3.5", "float"]),
        (["a", "\ud800"], 0, ["values[1]", "surrogate"]),
        (np.array([["a"]]), 0, ["2 dimensions"]),
        (["a"], 2**64, [str(2**64)]),
        (["a"], True, ["True"]),
        (["a"], "x", ["'x'"]),
    ],
)
def test_bad_strings_are_named(values: object, salt: object, words: list[str]) -> None:
    with pytest.raises((ShapeError, ConfigError)) as error:
        hash_strings(values, salt)  # type: ignore[arg-type]
    assert isinstance(error.value, EmbCacheError)
    assert all(word in str(error.value) for word in words)
