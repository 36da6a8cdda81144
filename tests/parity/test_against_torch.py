"""Training through a tiny device buffer against plain PyTorch, a float64 reference, and an everything-resident run.

Each run starts from the same initial rows and sees the same batches. Swaps are asserted to have happened, so that none of
this passes because everything stayed resident.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn import functional

import embcache as ec
import embcache.manager
from embcache.devices import backend_for

VOCABULARY = 120
BATCH, STEPS = 6, 12
DIM = 5
POOLINGS = ["sum", "mean", "weighted sum", "weighted mean", "sequence"]


def random_batches(seed: int, weighted: bool, features: int = 2, steps: int = STEPS) -> list[ec.JaggedFeatures]:
    """Batches with duplicates, empty bags and a hot key; features f0, f1, ..."""
    generator = np.random.default_rng(seed)
    batches = []
    for _ in range(steps):
        lengths = generator.integers(0, 4, features * BATCH)
        count = int(lengths.sum())
        values = np.where(generator.random(count) < 0.2, 7, generator.integers(0, VOCABULARY, count))
        weights = torch.from_numpy(generator.uniform(-1.0, 2.0, count).astype(np.float32)) if weighted else None
        names = [f"f{i}" for i in range(features)]
        batches.append(ec.JaggedFeatures(names, torch.from_numpy(values), torch.from_numpy(lengths), weights))
    return batches


def make(
    pooling: str, optimizer: ec.config.OptimizerSpec, hbm_rows: int | None = 40, **options: object
) -> torch.nn.Module:
    table = ec.TableConfig(
        "t",
        DIM,
        ["f0", "f1"],
        pooling="mean" if "mean" in pooling else "sum",
        initializer=ec.Uniform(-1.0, 1.0),
        hbm_rows=hbm_rows,
    )
    kind = ec.EmbeddingCollection if pooling == "sequence" else ec.EmbeddingBagCollection
    return kind([table], optimizer=optimizer, **options)


def target_of(step: int, shape: torch.Size) -> torch.Tensor:
    """Something smooth to pull the outputs to, other for each step and element."""
    return torch.cos(torch.arange(float(np.prod(shape))) * 0.7 + step).reshape(shape)


def outputs_of(collection: torch.nn.Module, batch: ec.JaggedFeatures) -> torch.Tensor:
    out = collection(batch)
    return out.values() if isinstance(out, ec.KeyedTensor) else torch.cat([out["f0"].values(), out["f1"].values()])


def reference_outputs(weight: torch.Tensor, pooling: str, batch: ec.JaggedFeatures, sparse: bool) -> torch.Tensor:
    """The same outputs from a plain weight matrix through PyTorch's own operators."""
    blocks = []
    for name in batch.keys():  # noqa: SIM118
        part = batch[name]
        if pooling == "sequence":
            blocks.append(functional.embedding(part.values(), weight, sparse=sparse))
            continue
        offsets = part.offsets()[:-1]
        if pooling in ("sum", "mean"):
            blocks.append(functional.embedding_bag(part.values(), weight, offsets, mode=pooling, sparse=sparse))
            continue
        scale = part.weights_or_none().to(weight.dtype)
        if pooling == "weighted mean":
            # As FBGEMM: a weighted mean divides by the bag's length, not by the sum of weights.
            scale = scale / part.lengths().repeat_interleave(part.lengths())
        blocks.append(
            functional.embedding_bag(
                part.values(), weight, offsets, mode="sum", per_sample_weights=scale, sparse=sparse
            )
        )
    return torch.cat(blocks, dim=0 if pooling == "sequence" else 1)


def train(collection: torch.nn.Module, batches: list[ec.JaggedFeatures]) -> None:
    for step, batch in enumerate(batches):
        out = outputs_of(collection, batch)
        ((out - target_of(step, out.shape)) ** 2).sum().backward()
        collection.optimizer.step()


def rows_of(collection: torch.nn.Module) -> tuple[np.ndarray, np.ndarray]:
    return collection.tables()["t"].lookup_rows(np.arange(VOCABULARY))


def initial_rows(collection: torch.nn.Module) -> torch.Tensor:
    rows = collection.tables()["t"].lookup(np.arange(VOCABULARY), insert=False)
    assert np.unique(rows).size > rows.size // 2
    return torch.from_numpy(rows)


def assert_swaps_happened(collection: torch.nn.Module) -> None:
    stats = collection.manager.stats()
    assert stats["swap_out_rows"] > 20 and stats["swap_in_rows"] > 60 and stats["hits"] > 0


@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize(
    ("spec", "theirs"),
    [
        (ec.SGD(lr=0.05), lambda weight: torch.optim.SGD([weight], lr=0.05)),
        (ec.Adagrad(lr=0.1), lambda weight: torch.optim.Adagrad([weight], lr=0.1)),
        (ec.Adam(lr=0.02), lambda weight: torch.optim.SparseAdam([weight], lr=0.02)),
    ],
    ids=["sgd", "adagrad", "adam"],
)
def test_as_torch_optimizers_on_sparse_gradients(spec, theirs, pooling):
    batches = random_batches(1, "weighted" in pooling)
    collection = make(pooling, spec)
    weight = initial_rows(collection).clone().requires_grad_()
    optimizer = theirs(weight)
    for step, batch in enumerate(batches):
        ours = outputs_of(collection, batch)
        expected = reference_outputs(weight, pooling, batch, sparse=True)
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-6)
        for out in (ours, expected):
            ((out - target_of(step, out.shape)) ** 2).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        collection.optimizer.step()
    assert_swaps_happened(collection)
    np.testing.assert_allclose(rows_of(collection)[0], weight.detach().numpy(), rtol=2e-6, atol=1e-6)


def float64_step(spec, weight, state, grad, touched, step) -> None:
    """One update in float64, straight from the docstrings' formulas, on the touched rows."""
    for key in touched:
        g = grad[key] + spec.weight_decay * weight[key]
        if spec.kind == "sgd":
            weight[key] -= spec.lr * g
        elif spec.kind == "adagrad":
            state[0][key] += g * g
            weight[key] -= spec.lr * g / (np.sqrt(state[0][key]) + spec.eps)
        elif spec.kind == "rowwise_adagrad":
            state[0][key] += np.mean(g * g)
            weight[key] -= spec.lr * g / (np.sqrt(state[0][key]) + spec.eps)
        else:
            (b1, b2), (m, v) = spec.betas, state
            m[key] += (1 - b1) * (g - m[key])
            v[key] += (1 - b2) * (g * g - v[key])
            weight[key] -= spec.lr * np.sqrt(1 - b2**step) / (1 - b1**step) * m[key] / (np.sqrt(v[key]) + spec.eps)


@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize(
    "spec",
    [
        ec.SGD(lr=0.05, weight_decay=0.1),
        ec.Adagrad(lr=0.1, weight_decay=0.1, eps=1e-3, initial_accumulator_value=0.25),
        ec.RowWiseAdagrad(lr=0.1),
        ec.RowWiseAdagrad(lr=0.1, weight_decay=0.1, eps=1e-3, initial_accumulator_value=0.25),
        ec.Adam(lr=0.02, weight_decay=0.1, betas=(0.8, 0.95)),
    ],
    ids=lambda spec: f"{spec.kind}-{spec.weight_decay}",
)
def test_as_a_float64_reference(spec, pooling):
    batches = random_batches(2, "weighted" in pooling)
    collection = make(pooling, spec)
    weight = initial_rows(collection).numpy().astype(np.float64)
    widths, starts = spec.state_widths(DIM), spec.initial_state()
    state = [np.full((VOCABULARY, width), start) for width, start in zip(widths, starts, strict=True)]
    train(collection, batches)
    for step, batch in enumerate(batches):
        leaf = torch.from_numpy(weight.copy()).requires_grad_()
        out = reference_outputs(leaf, pooling, batch, sparse=False)
        ((out - target_of(step, out.shape).double()) ** 2).sum().backward()
        float64_step(spec, weight, state, leaf.grad.numpy(), np.unique(batch.values().numpy()), step + 1)
    assert_swaps_happened(collection)
    weights, states = rows_of(collection)
    np.testing.assert_allclose(weights, weight, rtol=1e-4, atol=2e-5)
    if state:
        np.testing.assert_allclose(states, np.concatenate(state, axis=1), rtol=1e-4, atol=2e-5)


def everything(collection: torch.nn.Module) -> dict[str, tuple[np.ndarray, ...]]:
    """Every row of every table with state and counters, sorted by key."""
    tables = {}
    for name, view in collection.tables().items():
        columns = [np.concatenate(parts) for parts in zip(*view.items(7), strict=True) if parts[0] is not None]
        order = np.argsort(columns[0])
        tables[name] = tuple(column[order] for column in columns)
    return tables


def filtered_tables(hbm_rows: int | None) -> list[ec.TableConfig]:
    admit = ec.AdmitAndEvictConfig(
        admit_threshold=2, not_admitted_default_value=0.5, evict_threshold=3, evict_step_interval=2, time_source="step"
    )
    return [
        ec.TableConfig("plain", 5, ["f0", "f1"], hbm_rows=hbm_rows),
        ec.TableConfig("filtered", 5, ["f2"], pooling="mean", hbm_rows=hbm_rows, admit_and_evict=admit),
        ec.TableConfig("wide", 8, ["f1"], hbm_rows=hbm_rows),
    ]


@pytest.mark.parametrize("pooled", [True, False])
@pytest.mark.parametrize(
    "spec", [ec.SGD(lr=0.1), ec.RowWiseAdagrad(lr=0.1, weight_decay=0.01), ec.Adam(lr=0.05)], ids=lambda spec: spec.kind
)
def test_i9_bit_identical_to_everything_resident(spec, pooled):
    batches = random_batches(3, weighted=pooled, features=3, steps=30)
    kind = ec.EmbeddingBagCollection if pooled else ec.EmbeddingCollection

    def run(hbm_rows: int | None, threads: int) -> tuple[dict, list[torch.Tensor], dict]:
        collection = kind(filtered_tables(hbm_rows), optimizer=spec, num_threads=threads)
        seen = []
        for step, batch in enumerate(batches):
            out = collection(batch)
            parts = [out.values()] if pooled else [out[name].values() for name in sorted(out)]
            seen += [part.detach().clone() for part in parts]
            sum(((part - target_of(step, part.shape)) ** 2).sum() for part in parts).backward()
        return everything(collection), seen, collection.manager.stats()

    rows, outputs, stats = run(None, 1)
    assert stats["swap_out_rows"] == 0 and stats["evicted"] > 0 and stats["rejected"] > 0
    for hbm_rows, threads in ((36, 2), (50, 1), (77, 3)):
        other_rows, other_outputs, other_stats = run(hbm_rows, threads)
        assert other_stats["swap_out_rows"] > 0
        assert all(torch.equal(a, b) for a, b in zip(outputs, other_outputs, strict=True))
        for name, columns in rows.items():
            for column, other in zip(columns, other_rows[name], strict=True):
                assert column.tobytes() == other.tobytes(), name


def test_gradients_of_per_sample_weights_are_torchs():
    batch = random_batches(4, weighted=True)[0]
    for pooling in ("weighted sum", "weighted mean"):
        collection = make(pooling, ec.SGD(lr=0.1))
        weight = initial_rows(collection)
        gradients = []
        for ours in (True, False):
            weights = batch.weights().clone().requires_grad_()
            same = ec.JaggedFeatures(batch.keys(), batch.values(), batch.lengths(), weights)
            out = outputs_of(collection, same) if ours else reference_outputs(weight, pooling, same, sparse=False)
            ((out - target_of(0, out.shape)) ** 2).sum().backward()
            gradients.append(weights.grad)
        torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-6)


@pytest.fixture
def on_torch_operators(monkeypatch):
    """Managers made from here on use stock torch operators, staging memory and uploads, as on an accelerator."""
    monkeypatch.setattr(
        embcache.manager,
        "backend_for",
        lambda device, num_threads=None: backend_for(device, kernels="torch", num_threads=num_threads),
    )


@pytest.mark.parametrize("pooling", ["weighted mean", "sequence"])
@pytest.mark.parametrize(
    "spec", [ec.SGD(lr=0.1), ec.RowWiseAdagrad(lr=0.1), ec.Adam(lr=0.05)], ids=lambda spec: spec.kind
)
def test_stock_torch_operators_train_alike(spec, pooling, request):
    batches = random_batches(5, "weighted" in pooling)
    runs = []
    for fixture in (None, "on_torch_operators"):
        if fixture:
            request.getfixturevalue(fixture)
        # Two batches an update, so that the sums over several forwards take part; and a budget, as a device has one.
        collection = make(pooling, spec, hbm_rows=70, accumulate=2)
        assert collection.manager.backend.direct == (fixture is None)
        train(collection, batches)
        assert collection.manager.stats()["swap_out_rows"] > 0
        with torch.no_grad():
            runs.append((*rows_of(collection), outputs_of(collection, batches[0]).numpy()))
    for ours, theirs in zip(*runs, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def test_i9_holds_on_stock_torch_operators(on_torch_operators):
    batches = random_batches(6, weighted=True, features=3, steps=15)
    seen = []
    for hbm_rows in (40, 55, 400):
        collection = ec.EmbeddingBagCollection(filtered_tables(hbm_rows), optimizer=ec.Adagrad(lr=0.1))
        for step, batch in enumerate(batches):
            out = collection(batch).values()
            ((out - target_of(step, out.shape)) ** 2).sum().backward()
        assert (collection.manager.stats()["swap_out_rows"] > 0) == (hbm_rows < 400)
        seen.append({name: [c.tobytes() for c in columns] for name, columns in everything(collection).items()})
    assert seen[0] == seen[1] == seen[2]
