"""Collections with float16 and bfloat16 rows against float32 collections whose rows are rounded after each update, and torch.

Rows are widened exactly, everything is computed in float32, and an update is rounded once. So a float32 collection whose
touched rows are rounded by torch after each step must give the same bits, for every optimizer and pooling.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

import embcache as ec
import embcache.manager
from embcache.devices import backend_for
from parity.test_against_torch import (
    POOLINGS,
    VOCABULARY,
    outputs_of,
    random_batches,
    reference_outputs,
    target_of,
)

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
SPECS = [
    ec.SGD(lr=0.05, weight_decay=0.1),
    ec.Adagrad(lr=0.1, initial_accumulator_value=0.25),
    ec.RowWiseAdagrad(lr=0.1, weight_decay=0.01),
    ec.Adam(lr=0.02),
]
EVERY_SPEC = pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.kind)


def make(
    dtype: str, pooling: str, spec: ec.config.OptimizerSpec, dim: int, hbm_rows: int | None, **options: object
) -> torch.nn.Module:
    table = ec.TableConfig(
        "t", dim, ["f0", "f1"], pooling="mean" if "mean" in pooling else "sum", initializer=ec.Uniform(-1.0, 1.0), dtype=dtype,
        hbm_rows=hbm_rows,
    )  # fmt: skip
    kind = ec.EmbeddingCollection if pooling == "sequence" else ec.EmbeddingBagCollection
    return kind([table], optimizer=spec, **options)


def round_rows(collection: torch.nn.Module, dtype: str) -> None:
    """What a narrow table does at its one store: here by torch, on all rows of a float32 table."""
    view, keys = collection.tables()["t"], np.arange(VOCABULARY)
    weights, state = view.lookup_rows(keys)
    view.assign(keys, torch.from_numpy(weights).to(DTYPES[dtype]).float().numpy(), state)


def float32_of(collection: torch.nn.Module) -> tuple[np.ndarray, np.ndarray]:
    weights, state = collection.tables()["t"].lookup_rows(np.arange(VOCABULARY))
    return weights.astype(np.float32), state


@pytest.mark.parametrize("pooling", POOLINGS)
@EVERY_SPEC
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_optimizer_and_pooling_is_float32_rounded_once_an_update(dtype, spec, pooling):
    dim = {"sum": 5, "mean": 16, "weighted sum": 3, "weighted mean": 24, "sequence": 8}[pooling]
    batches = random_batches(1, "weighted" in pooling)
    narrow, wide = make(dtype, pooling, spec, dim, 40), make("float32", pooling, spec, dim, 40)
    wide.tables()["t"].insert(np.arange(VOCABULARY))
    round_rows(wide, dtype)
    for step, batch in enumerate(batches):
        seen = []
        for collection in (narrow, wide):
            out = outputs_of(collection, batch)
            assert out.dtype is torch.float32
            ((out - target_of(step, out.shape)) ** 2).sum().backward()
            collection.optimizer.step()
            seen.append(out.detach().numpy().tobytes())
        assert seen[0] == seen[1]
        round_rows(wide, dtype)
    stats = narrow.manager.stats()
    assert stats["swap_out_rows"] > 20 and stats["swap_in_rows"] > 60
    for ours, theirs in zip(float32_of(narrow), float32_of(wide), strict=True):
        assert ours.tobytes() == theirs.tobytes()
    narrow.eval(), wide.eval()
    assert outputs_of(narrow, batches[0]).numpy().tobytes() == outputs_of(wide, batches[0]).numpy().tobytes()


@pytest.mark.parametrize("pooling", ["sum", "sequence"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_as_sgd_of_torch_on_a_rounded_weight(dtype, pooling):
    """Plain PyTorch: widen the 2-byte weight, differentiate, step, store it rounded."""
    batches = random_batches(2, False)
    collection = make(dtype, pooling, ec.SGD(lr=0.05), 5, 40)
    stored = torch.from_numpy(float32_of(collection)[0]).to(DTYPES[dtype])
    ulp = 2.0**-10 if dtype == "float16" else 2.0**-7
    for step, batch in enumerate(batches):
        leaf = stored.float().requires_grad_()
        ours, theirs = outputs_of(collection, batch), reference_outputs(leaf, pooling, batch, sparse=False)
        torch.testing.assert_close(ours, theirs, rtol=4 * ulp, atol=4 * ulp)
        for out in (ours, theirs):
            ((out - target_of(step, out.shape)) ** 2).sum().backward()
        collection.optimizer.step()
        stored = (leaf.detach() - 0.05 * leaf.grad).to(DTYPES[dtype])
    difference = np.abs(float32_of(collection)[0] - stored.float().numpy())
    assert (difference <= 8 * ulp).all() and (
        difference == 0
    ).mean() > 0.9  # a last bit may fall on the other side of a tie


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_of_per_sample_weights_are_torchs(dtype):
    batch = random_batches(4, weighted=True)[0]
    for pooling in ("weighted sum", "weighted mean"):
        collection = make(dtype, pooling, ec.SGD(lr=0.1), 5, None)
        rows, gradients = torch.from_numpy(float32_of(collection)[0]), []
        for training in (False, True, None):  # a training backward changes the rows
            weights = batch.weights().clone().requires_grad_()
            same = ec.JaggedFeatures(batch.keys(), batch.values(), batch.lengths(), weights)
            if training is None:
                out = reference_outputs(rows, pooling, same, sparse=False)
            else:
                out = outputs_of(collection.train(training), same)
            (out * target_of(0, out.shape)).sum().backward(inputs=[weights])
            gradients.append(weights.grad)
        torch.testing.assert_close(gradients[0], gradients[2], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(gradients[1], gradients[2], rtol=1e-5, atol=1e-6)


@pytest.fixture
def on_torch_operators(monkeypatch) -> Callable[[], None]:
    """Call it: managers made from then on use stock torch operators, staging memory and uploads, as on an accelerator."""
    return lambda: monkeypatch.setattr(
        embcache.manager,
        "backend_for",
        lambda device, num_threads=None: backend_for(device, kernels="torch", num_threads=num_threads),
    )


@pytest.mark.parametrize("pooling", ["weighted mean", "sequence"])
@EVERY_SPEC
@pytest.mark.parametrize("dtype", DTYPES)
def test_stock_torch_operators_train_alike(dtype, spec, pooling, on_torch_operators):
    batches = random_batches(5, "weighted" in pooling)
    runs = []
    for direct in (True, False):
        if not direct:
            on_torch_operators()
        collection = make(dtype, pooling, spec, 5, 70, accumulate=2)
        assert collection.manager.backend.direct == direct
        for step, batch in enumerate(batches):
            out = outputs_of(collection, batch)
            assert out.dtype is torch.float32
            ((out - target_of(step, out.shape)) ** 2).sum().backward()
        with torch.no_grad():
            runs.append((*float32_of(collection), outputs_of(collection, batches[0]).numpy()))
    ulp = 2.0**-10 if dtype == "float16" else 2.0**-7
    for ours, theirs in zip(*runs, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=8 * ulp, atol=8 * ulp)
    assert (runs[0][0] == runs[1][0]).mean() > 0.9


MIXED = ["float32", "float16", "bfloat16"]


def mixed_tables(hbm_rows: int | None) -> list[ec.TableConfig]:
    """All types at equal and at different dims, two behind filters with a default that no narrow type holds exactly."""
    rule = ec.AdmitAndEvictConfig(
        admit_threshold=2, not_admitted_default_value=0.1, evict_threshold=3, evict_step_interval=2, time_source="step"
    )
    tables = [ec.TableConfig(f"plain {t}", 5, [f"f{i}"], dtype=t, hbm_rows=hbm_rows) for i, t in enumerate(MIXED)]
    tables += [
        ec.TableConfig(f"filtered {t}", 8, ["f2"], dtype=t, hbm_rows=hbm_rows, admit_and_evict=rule) for t in MIXED[1:]
    ]
    return [*tables, ec.TableConfig("wide", 64, ["f1"], dtype="float16", pooling="mean", hbm_rows=hbm_rows)]


@pytest.mark.parametrize("stock", [False, True], ids=["compiled", "stock"])
@pytest.mark.parametrize("pooled", [True, False], ids=["pooled", "sequence"])
@pytest.mark.parametrize("spec", [ec.RowWiseAdagrad(lr=0.1), ec.Adam(lr=0.05)], ids=lambda spec: spec.kind)
def test_i9_mixed_tables_train_the_same_bits_at_any_size(spec, pooled, stock, on_torch_operators):
    if stock:
        on_torch_operators()
    batches = random_batches(3, weighted=pooled, features=3, steps=16)
    kind = ec.EmbeddingBagCollection if pooled else ec.EmbeddingCollection
    seen = []
    for hbm_rows, threads in ((400, 1), (36, 2), (60, 1)):
        collection = kind(mixed_tables(hbm_rows), optimizer=spec, num_threads=threads)
        outputs = []
        for step, batch in enumerate(batches):
            out = collection(batch)
            parts = [out.values()] if pooled else [out[name].values() for name in sorted(out)]
            outputs += [part.detach().numpy().tobytes() for part in parts]
            sum(((part - target_of(step, part.shape)) ** 2).sum() for part in parts).backward()
        with torch.no_grad():  # evaluation of residents, host rows, absent keys and defaults
            out = collection.eval()(batches[0])
            outputs += [
                (out.values() if pooled else torch.cat([p.values().flatten() for p in out.values()])).numpy().tobytes()
            ]
        stats = collection.manager.stats()
        assert (stats["swap_out_rows"] > 0) == (hbm_rows < 400) and stats["evicted"] > 0 and stats["rejected"] > 0
        rows = {}
        for name, view in collection.tables().items():
            keys, weights, state = (np.concatenate(parts) for parts in list(zip(*view.items(7), strict=True))[:3])
            order = np.argsort(keys)
            rows[name] = (keys[order].tobytes(), weights[order].tobytes(), state[order].tobytes())
        seen.append((outputs, rows))
    assert seen[0] == seen[1] == seen[2]


def test_a_key_that_is_not_admitted_reads_the_rounded_default_in_training_and_evaluation():
    for dtype, expected in (("float32", 0.1), ("float16", 0.0999755859375), ("bfloat16", 0.10009765625)):
        rule = ec.AdmitAndEvictConfig(admit_threshold=9, not_admitted_default_value=0.1)
        ebc = ec.EmbeddingBagCollection([ec.TableConfig("t", 3, dtype=dtype, admit_and_evict=rule)], optimizer=ec.SGD())
        batch = ec.JaggedFeatures(["t"], torch.tensor([5]), torch.tensor([1]))
        trained = ebc(batch).values().detach()
        evaluated = ebc.eval()(batch).values()
        view = ebc.tables()["t"].lookup([5], insert=False).astype(np.float32)
        for got in (trained, evaluated, torch.from_numpy(view)):
            assert torch.equal(got, torch.full((1, 3), expected)), dtype
