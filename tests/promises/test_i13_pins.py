"""I13: pins never leak: they end at backward, at release of the graph, or at the next optimizer step; two forwards
before one backward work; backward twice raises."""

from __future__ import annotations

import gc

import numpy as np
import pytest
import torch

import embcache as ec
from promises.strategies import SOAK, make_batch, one_feature
from promises.training import check, model_state


def collection(**options: object) -> ec.EmbeddingBagCollection:
    options.setdefault("optimizer", ec.SGD(lr=1.0))
    rows = options.pop("rows", 12)
    return ec.EmbeddingBagCollection([ec.TableConfig("f", 3, hbm_rows=rows, initializer=ec.Zeros())], **options)


def pinned(ebc: ec.EmbeddingBagCollection) -> tuple[int, int]:
    """Pinned slots and outstanding plans."""
    return ebc.manager.stats()["pinned"], ebc.manager.outstanding


def value(ebc: ec.EmbeddingBagCollection, key: int) -> float:
    return float(ebc.tables()["f"].lookup([key], insert=False)[0, 0])


def test_i13_pins_end_at_backward() -> None:
    ebc = collection()
    out = ebc(one_feature([1, 2]))
    assert pinned(ebc) == (2, 1)
    loss = out.values().sum()
    loss.backward(retain_graph=True)
    assert pinned(ebc) == (0, 0)
    assert value(ebc, 1) == -1


def test_i13_pins_end_with_the_graph() -> None:
    ebc = collection()
    for _ in range(20):  # four batches would fill the buffer
        out = ebc(one_feature([1, 2, 3]))
        loss = out.values().sum()
        assert pinned(ebc)[1] == 1
        del out, loss
        assert pinned(ebc) == (0, 0)
    for start in range(0, 60, 12):
        ebc(one_feature(range(start, start + 12)))  # never even kept
        assert pinned(ebc) == (0, 0)
    assert all(value(ebc, key) == 0 for key in range(60))


def test_i13_pins_end_with_a_graph_in_a_reference_cycle() -> None:
    ebc = collection()
    gc.disable()
    try:
        ring: dict = {}
        ring["ring"], ring["out"] = ring, ebc(one_feature([1, 2]))
        del ring
        assert pinned(ebc) == (2, 1)
        gc.collect()
        assert pinned(ebc) == (0, 0)
    finally:
        gc.enable()


def test_i13_detached_and_frozen_outputs_hold_no_pins() -> None:
    ebc = collection()
    kept = [ebc(one_feature([key])).values().detach() for key in range(30)]
    assert pinned(ebc) == (0, 0) and len(kept) == 30


def test_i13_an_exception_in_the_loss_or_in_backward() -> None:
    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            raise ZeroDivisionError("broken")

    ebc = collection()

    def failing_loss() -> None:
        ebc(one_feature([1, 2]))["f"].sum()
        raise KeyError("loss")

    for _ in range(8):
        with pytest.raises(KeyError):
            failing_loss()
        assert pinned(ebc) == (0, 0)
    for _ in range(8):
        with pytest.raises(ZeroDivisionError):
            Broken.apply(ebc(one_feature([1, 2, 3]))["f"]).sum().backward()
        ebc.optimizer.step()
        assert pinned(ebc) == (0, 0)
    # One forward's gradient arrives, then the pass dies: no update, neither now nor later.
    for _ in range(8):
        x = torch.ones(2, 3, requires_grad=True)
        with pytest.raises(ZeroDivisionError):
            (ebc(one_feature([1, 2]))["f"].sum() + Broken.apply(x).sum()).backward()
        ebc.optimizer.step()
        assert pinned(ebc) == (0, 0)
    assert value(ebc, 1) == 0 and ebc.optimizer.step_count == 0
    ebc(one_feature([1]))["f"].sum().backward()
    assert value(ebc, 1) == -1 and value(ebc, 2) == 0
    check(ebc.manager)


def test_i13_an_exception_before_the_output_exists() -> None:
    """A forward that fails behind its plan (here: a buffer that cannot be read) leaves no plan."""
    ebc = collection()
    backend, good = ebc.manager.backend, ebc.manager.backend.pooled_forward

    def broken(*args: object, **named: object) -> None:
        raise RuntimeError("device lost")

    backend.pooled_forward = broken  # type: ignore[method-assign]
    for start in range(0, 60, 12):
        with pytest.raises(RuntimeError, match="device lost"):
            ebc(one_feature(range(start, start + 12)))
        assert pinned(ebc) == (0, 0)
    backend.pooled_forward = good  # type: ignore[method-assign]
    ebc(one_feature([1]))["f"].sum().backward()
    assert value(ebc, 1) == -1


def test_i13_backward_twice_raises_and_changes_nothing() -> None:
    ebc = collection()
    loss = ebc(one_feature([1, 2])).values().sum()
    loss.backward(retain_graph=True)
    before = model_state(ebc.manager)
    for _ in range(3):
        with pytest.raises(ec.PlanError, match=r"used up.*run forward again"):
            loss.backward(retain_graph=True)
        assert model_state(ebc.manager) == before and pinned(ebc) == (0, 0)
    ebc(one_feature([1])).values().sum().backward()
    assert value(ebc, 1) == -2


def test_i13_backward_after_the_optimizer_step_raises() -> None:
    ebc = collection(rows=2)
    stale = ebc(one_feature([1, 2])).values().sum()
    ebc.optimizer.step()
    assert pinned(ebc) == (0, 0)
    ebc(one_feature([3, 4])).values().sum().backward()  # takes their slots
    with pytest.raises(ec.PlanError, match="used up"):
        stale.backward()
    assert [value(ebc, key) for key in (1, 2, 3, 4)] == [0, 0, -1, -1]


def test_i13_two_forwards_before_one_backward_are_one_update() -> None:
    ebc = collection(optimizer=ec.Adagrad(lr=1.0))
    first, second = ebc(one_feature([1, 2])), ebc(one_feature([2, 3]))
    assert pinned(ebc) == (3, 2)
    (first.values().sum() + 3 * second.values().sum()).backward()
    assert pinned(ebc) == (0, 0) and ebc.optimizer.step_count == 1
    weights, state = ebc.tables()["f"].lookup_rows([1, 2, 3])
    assert state[:, 0].tolist() == [1, 16, 9]
    np.testing.assert_allclose(weights[:, 0], [-1, -1, -1], rtol=1e-6)


def test_i13_two_forwards_and_two_backwards_in_any_order() -> None:
    ebc = collection()
    for order in ((0, 1), (1, 0)):
        losses = [ebc(one_feature([1, 2])).values().sum(), ebc(one_feature([2, 3])).values().sum()]
        for place in order:
            losses[place].backward()
            assert pinned(ebc)[1] == 1 - order.index(place)
    assert [value(ebc, key) for key in (1, 2, 3)] == [-2, -4, -2]


def test_i13_two_forwards_of_which_one_is_dropped() -> None:
    ebc = collection()
    first, second = ebc(one_feature([1, 2])), ebc(one_feature([2, 3]))
    del first
    second.values().sum().backward()
    assert pinned(ebc) == (0, 0)
    kept, other = ebc(one_feature([1, 2])), ebc(one_feature([2, 3]))
    other.values().sum().backward()
    assert pinned(ebc) == (2, 1)
    ebc.optimizer.step()
    assert pinned(ebc) == (0, 0) and kept is not None
    assert [value(ebc, key) for key in (1, 2, 3)] == [0, -2, -2]


def test_i13_only_part_of_the_output_is_used() -> None:
    """A forward whose output gets no gradient at all ends at the step; one with a partial gradient at backward."""
    tables = [
        ec.TableConfig("a", 2, hbm_rows=4, initializer=ec.Zeros()),
        ec.TableConfig("b", 3, hbm_rows=4, initializer=ec.Zeros()),
    ]
    batch = ec.JaggedFeatures(["a", "b"], torch.tensor([1, 2, 3, 4]), torch.tensor([1, 1, 1, 1]))
    for kind in (ec.EmbeddingBagCollection, ec.EmbeddingCollection):
        made = kind(tables, optimizer=ec.SGD(lr=1.0))
        for _ in range(5):
            out = made(batch)
            part = out["b"] if kind is ec.EmbeddingBagCollection else out["b"].values()
            part.sum().backward()
            assert made.manager.stats()["pinned"] == 0
        views = made.tables()
        assert not views["a"].lookup([1, 2]).any() and (views["b"].lookup([3, 4]) == -5).all()


def test_i13_an_accumulation_window_holds_its_pins_until_its_update() -> None:
    ebc = collection(accumulate=3)
    for number in range(1, 10):
        ebc(one_feature([number])).values().sum().backward()
        assert pinned(ebc)[1] == number % 3
        assert value(ebc, number) == (-1 if number % 3 == 0 else 0)
    ebc(one_feature([1])).values().sum().backward()
    ebc.optimizer.step()
    assert pinned(ebc)[1] == 1, "the window is open: its gradient still has rows to go to"
    ebc.finish_accumulation()
    assert pinned(ebc) == (0, 0) and value(ebc, 1) == -2
    ebc.finish_accumulation()
    assert ebc.optimizer.step_count == 4


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")
def test_i13_no_second_derivative() -> None:
    ebc = collection()
    loss = ebc(one_feature([1, 2])).values().square().sum()
    with pytest.raises(ec.PlanError, match="create_graph"):
        loss.backward(create_graph=True)
    del loss
    assert pinned(ebc) == (0, 0)


def test_i13_autograd_grad_counts_as_backward() -> None:
    ebc = collection()
    weights = torch.ones(2, requires_grad=True)
    loss = ebc(one_feature([1, 2], weights=weights)).values().sum()
    (gradient,) = torch.autograd.grad(loss, weights)
    assert gradient.tolist() == [0, 0] and pinned(ebc) == (0, 0)


def test_i13_outputs_kept_while_the_collection_goes() -> None:
    ebc = collection()
    out = ebc(one_feature([1, 2])).values()
    del ebc
    gc.collect()
    assert out.sum().item() == 0
    del out
    gc.collect()


@pytest.mark.parametrize("accumulate", [1, 2])
def test_i13_a_thousand_steps_of_anything_end_without_pins(accumulate: int) -> None:
    """Forwards dropped, kept, trained alone and together, failed and abandoned, in random order."""
    ebc = ec.EmbeddingBagCollection(
        [ec.TableConfig("f", 3, hbm_rows=64), ec.TableConfig("g", 2, hbm_rows=64, pooling="mean")],
        optimizer=ec.Adagrad(lr=0.1),
        accumulate=accumulate,
    )
    rng = np.random.default_rng(accumulate)
    kept: list[torch.Tensor] = []
    happened: dict[str, int] = {}
    for _ in range(1000 * SOAK):
        action = str(
            rng.choice(
                ["train", "train", "drop", "keep", "late", "together", "step", "fail", "twice", "eval", "too big"]
            )
        )
        batch = make_batch(rng, ["f", "g"], range(300), 3, lengths=(0, 1, 2), skew=1.0)
        happened[action] = happened.get(action, 0) + 1
        try:
            if action == "train":
                ebc(batch).values().sum().backward()
            elif action == "drop":
                ebc(batch)
            elif action == "keep":
                kept.append(ebc(batch).values().sum())
            elif action == "late" and kept:
                kept.pop(int(rng.integers(len(kept)))).backward()
            elif action == "together":
                (ebc(batch).values().sum() + ebc(batch).values().sum()).backward()
            elif action == "step":
                ebc.optimizer.step()
            elif action == "fail":
                out = ebc(batch).values()
                (out.sum() + torch.ones(1, requires_grad=True).expand(2).view(3).sum()).backward()
            elif action == "twice":
                loss = ebc(batch).values().sum()
                loss.backward(retain_graph=True)
                loss.backward()
            elif action == "eval":
                with torch.no_grad():
                    ebc(batch)
            elif action == "too big":
                ebc(ec.JaggedFeatures(["f", "g"], torch.arange(70), torch.tensor([70, 0])))
        except ec.HbmCapacityError as error:
            happened["full"] = happened.get("full", 0) + (not error.never_fits)
            ebc.optimizer.step()
        except (ec.PlanError, RuntimeError) as error:
            happened[type(error).__name__] = happened.get(type(error).__name__, 0) + 1
        if len(kept) > 4:
            kept.pop(0)
    kept.clear()
    ebc.finish_accumulation()
    ebc.optimizer.step()
    stats = ebc.manager.stats()
    assert (stats["pinned"], ebc.manager.outstanding) == (0, 0)
    assert stats["swap_out_rows"] > 0 and happened["PlanError"] > 0 and happened["RuntimeError"] > 0, happened
    check(ebc.manager)
