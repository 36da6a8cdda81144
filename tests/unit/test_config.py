"""Configuration objects check themselves: every number that cannot be used raises `ConfigError` when the object is made."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import embcache as ec

LARGEST = float(np.finfo(np.float32).max)


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda value: ec.SGD(lr=value), "lr"),
        (lambda value: ec.SGD(weight_decay=value), "weight_decay"),
        (lambda value: ec.Adagrad(eps=value), "eps"),
        (lambda value: ec.RowWiseAdagrad(initial_accumulator_value=value), "initial_accumulator_value"),
        (lambda value: ec.Adam(eps=value), "eps"),
        (lambda value: ec.AdmitAndEvictConfig(not_admitted_default_value=value), "not_admitted_default_value"),
    ],
)
def test_i11_numbers_beyond_float32_are_refused(make, name):
    for value in (1e39, 1e300, 10**39, np.float64(1e39), torch.tensor(1e39, dtype=torch.float64)):
        with pytest.raises(ec.ConfigError, match=f"{name} = .*infinite in float32; give a finite number.*3.4e38"):
            make(value)
    for value in (10**400, 10**5000, math.inf, math.nan, True, "1", None, torch.ones(2), torch.ones(1, device="meta")):
        with pytest.raises(ec.ConfigError, match=f"{name} = .*; give a finite number"):
            make(value)
    # What rounds to the largest float32 is one; what rounds to infinity is not.
    assert getattr(make(LARGEST), name) == LARGEST
    barely = math.nextafter(LARGEST * (1 + 2.0**-25), 0.0)
    assert np.isfinite(np.float32(barely)) and getattr(make(barely), name) == barely
    for small in (0, 0.0, 5e-324, 1e-45, 1e-300):
        assert getattr(make(small), name) == small


def test_the_end_of_float32_is_where_rounding_gives_infinity():
    from embcache.config import FLOAT32_END

    with np.errstate(over="ignore"):
        assert np.isinf(np.float32(FLOAT32_END))
    assert np.isfinite(np.float32(math.nextafter(FLOAT32_END, 0.0)))


@pytest.mark.parametrize(
    "make",
    [
        lambda value: ec.Constant(value),
        lambda value: ec.Uniform(0, value),
        lambda value: ec.Normal(0, value),
        lambda value: ec.TruncatedNormal(value, 1),
        lambda value: ec.LinearRamp(value, 1),
    ],
)
def test_i11_initializers_refuse_integers_beyond_float64(make):
    for value in (10**400, 10**5000):
        with pytest.raises(ec.ConfigError, match="give a finite number"):
            make(value)
    with pytest.raises(ec.ConfigError, match="float32"):
        ec.EmbeddingBagCollection([ec.TableConfig("t", 2, initializer=make(1e39))], optimizer=ec.SGD())


def test_i11_integers_too_long_to_print_are_refused():
    for build in (
        lambda value: ec.TableConfig("t", value),
        lambda value: ec.TableConfig("t", 2, seed=value),
        lambda value: ec.AdmitAndEvictConfig(admit_threshold=value),
    ):
        with pytest.raises(ec.ConfigError, match="int too long to print.*give an integer"):
            build(10**5000)


def test_i11_the_default_of_keys_that_are_not_admitted_must_fit_the_type() -> None:
    rule = ec.AdmitAndEvictConfig(admit_threshold=2, not_admitted_default_value=70000.0)
    for dtype in ("float32", "bfloat16"):
        assert ec.TableConfig("t", 4, dtype=dtype, admit_and_evict=rule).dtype == dtype
    with pytest.raises(ec.ConfigError, match=r"'t': not_admitted_default_value = 70000.0 is infinite in float16"):
        ec.TableConfig("t", 4, dtype="float16", admit_and_evict=rule)
