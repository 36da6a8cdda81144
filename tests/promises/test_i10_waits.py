"""Who waits for a save waits for something that lives: a thread that has died, or a medium that takes nothing, ends the save."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import embcache as ec
from embcache import savejob, saving
from embcache._core.doors import Latch
from embcache.checkpoint import Writer, helper
from embcache.savepart import Part
from promises.gate import LIMIT_S, Gate, gates
from promises.test_i10_background import restored
from promises.test_i10_checkpoints import train_by_hand
from promises.test_i10_copies import batch_of, trained
from promises.training import model_state

TABLES = [ec.TableConfig("a", 4, ["f"])]


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Gate]]:
    yield from gates(monkeypatch)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name in ((savejob, "LOOK_S"), (saving, "LOOK_S"), (helper, "_LOOK_S")):
        monkeypatch.setattr(module, name, 0.01)


def dying(monkeypatch: pytest.MonkeyPatch) -> None:
    """The threads of saves come to nothing, without a word."""
    monkeypatch.setattr(saving.Saving, "work", lambda self: self._job.unclaimed.acquire())


def test_a_latch_says_whether_it_is_open() -> None:
    latch = Latch()
    assert latch.wait(0.001) is False
    latch.open()
    assert latch.wait(0.001) is latch.wait(10) is True


@pytest.mark.usefixtures("impatient")
def test_i10_a_save_whose_thread_has_died_has_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever waits finds it out: the future, a second save, `close`; and the next delta has what this one was to hold."""
    with trained(TABLES, *range(8)) as manager:
        manager.save(tmp_path)
        train_by_hand(manager, manager.plan(batch_of(1, 2)))
        with monkeypatch.context() as patch:
            dying(patch)
            first = manager.save(tmp_path, delta=True, background=True)
            with pytest.raises(
                ec.StorageError, match=r"generation 2 was given up: the thread that wrote it .* has died; save again"
            ):
                first.result(LIMIT_S)
            assert isinstance(first.exception(LIMIT_S), ec.StorageError) and manager.saving is None
            second = manager.save(tmp_path, delta=True, background=True)
        train_by_hand(manager, manager.plan(batch_of(3)))
        assert manager.save(tmp_path, delta=True) == 2
        assert second.exception(LIMIT_S) is not None
        assert ec.generations(tmp_path)[-1].tables == {"a": 3}
        assert restored(TABLES, ec.Adagrad(lr=0.1), str(tmp_path)) == model_state(manager)
        dying(monkeypatch)
        manager.save(tmp_path, delta=True, background=True)
    assert [one.generation for one in ec.generations(tmp_path)] == [1, 2]


@pytest.mark.usefixtures("impatient")
def test_a_result_that_is_waited_for_a_while_only(tmp_path: Path, gate: type[Gate]) -> None:
    with trained(TABLES, 1) as manager:
        slow = manager.save(tmp_path, background=True)
        with pytest.raises(TimeoutError):
            slow.result(0.05)
        with pytest.raises(TimeoutError):
            slow.exception(0)
        gate.permits.release(10**6)
        assert slow.result(LIMIT_S) == 1


@pytest.mark.usefixtures("impatient")
def test_i10_a_medium_that_takes_nothing_ends_the_save_and_not_training(
    tmp_path: Path, gate: type[Gate], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(savejob, "KEPT_BYTES", 64)
    monkeypatch.setattr(savejob, "STALLED_LOOKS", 5)
    with trained(TABLES, *range(40)) as manager:
        stalled = manager.save(tmp_path, background=True)
        train_by_hand(manager, manager.plan(batch_of(*range(40))))
        train_by_hand(manager, manager.plan(batch_of(*range(40))))  # waits for room
        assert not stalled.done()
        gate.permits.release(10**6)
        with pytest.raises(
            ec.StorageError, match=r"for 0 s nothing was written, while training waited for \d+ bytes of copies"
        ):
            stalled.result(LIMIT_S)
        assert manager.save(tmp_path) == 1
        assert restored(TABLES, ec.Adagrad(lr=0.1), str(tmp_path)) == model_state(manager)


@pytest.mark.parametrize("background", [False, True])
def test_i10_an_end_that_goes_wrong_is_an_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, background: bool
) -> None:
    """A writer that cannot be closed, and changes that cannot be given back: nobody waits for ever, and what comes next is whole."""

    def refuse(*_: Any) -> None:
        raise OSError(5, "no")

    def forget(*_: Any) -> None:
        raise ec.HostMemoryError("none left")

    with trained(TABLES, *range(8)) as manager:
        manager.save(tmp_path)
        train_by_hand(manager, manager.plan(batch_of(1, 2)))
        with monkeypatch.context() as patch:
            close = Writer.close
            patch.setattr(Writer, "close", lambda self: (close(self), refuse()))
            patch.setattr(Writer, "commit", refuse)
            patch.setattr(Part, "give_back", forget)
            with pytest.raises(OSError, match="no"):
                found = manager.save(tmp_path, delta=True, background=background)
                found.result(LIMIT_S)  # type: ignore[union-attr]
        assert manager.saving is None
        assert manager.save(tmp_path, delta=True) == 2
        assert [one.kind for one in ec.generations(tmp_path)] == ["full", "full"]
        assert restored(TABLES, ec.Adagrad(lr=0.1), str(tmp_path)) == model_state(manager)


class _Unanswered:
    """A queue that takes nothing, as where memory is short."""

    def __init__(self, real: Any) -> None:
        self.get = real.get

    def put(self, _item: Any) -> None:
        raise MemoryError


@pytest.mark.usefixtures("impatient")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_helper_whose_thread_has_died_is_not_waited_for() -> None:
    with helper.Helper() as one:
        one.start(threading.get_ident)
        assert one.result() != threading.get_ident()
        one._answers = _Unanswered(one._answers)  # type: ignore[assignment]
        one.start(threading.get_ident)
        with pytest.raises(ec.StorageError, match="has died"):
            one.result()
        assert not one.busy
