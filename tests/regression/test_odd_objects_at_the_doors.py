"""`EmbTable("t", seed=np.arange(2))`, `TableConfig("t", 4, 5)`, `SGD(lr=torch.ones(3))` raised NumPy's or torch's own errors.

The doors asked ``hasattr(value, "__index__")`` or iterated before they knew that they could: an array has the method and
refuses to be called, a number has no iterator. `errors.whole_number` and two more ``try`` made them `ConfigError` and `ShapeError`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import embcache as ec
from embcache.errors import whole_number

ODD: list[Any] = [
    None,
    1.5,
    "x",
    np.arange(2),
    np.zeros(0),
    np.array(["a"]),
    torch.arange(3),
    torch.empty(0),
    True,
    np.True_,
    {},
    object(),
]


@pytest.mark.parametrize(
    "odd", ODD, ids=lambda odd: f"{type(odd).__name__}-{np.shape(odd)}" if not isinstance(odd, dict) else "dict"
)
def test_odd_objects_raise_our_errors(odd: Any) -> None:
    doors: list[Callable[[], Any]] = [
        lambda: ec.EmbTable("t", odd),
        lambda: ec.EmbTable("t", 4, seed=odd),
        lambda: ec.EmbTable("t", 4, state_dim=odd),
        lambda: ec.TableConfig("t", odd),
        lambda: ec.TableConfig("t", 4, seed=odd),
        lambda: ec.TableConfig("t", 4, pooling=odd),
        lambda: ec.TableConfig("t", 4, dtype=odd),
        lambda: ec.TableConfig("t", 4, [odd, ""]),
        lambda: ec.SGD(lr=odd if not isinstance(odd, float) else -odd),
        lambda: ec.Uniform(odd, 0.0),
        lambda: ec.EmbCacheManager(odd),
        lambda: ec.EmbCacheManager([odd]),
        lambda: ec.JaggedFeatures([odd], [1], [1]) if not isinstance(odd, str) else ec.JaggedFeatures(odd, [1], [1]),
        lambda: ec.JaggedFeatures(odd, [1], [1, 1, 1, 1]),
        lambda: ec.hash_strings(odd if np.ndim(odd) == 0 and odd != {} else 5),
        lambda: ec.hash_strings(["a"], salt=odd),
        lambda: ec.simulate(np.arange(3), odd),
    ]
    for number, door in enumerate(doors):
        with pytest.raises((ec.ConfigError, ec.ShapeError)):
            door()
            pytest.fail(f"door {number} took {odd!r}")


@pytest.mark.parametrize("odd", [5, 1.5, np.array(5.0), True, object()], ids=str)
def test_what_cannot_be_iterated_is_no_list_of_features(odd: Any) -> None:
    with pytest.raises(ec.ConfigError, match="feature_names"):
        ec.TableConfig("t", 4, odd)


def test_whole_number() -> None:
    assert [whole_number(v) for v in (5, np.int32(5), np.array(5), torch.tensor(5))] == [5, 5, 5, 5]
    assert [whole_number(v) for v in ODD] == [None] * len(ODD)
