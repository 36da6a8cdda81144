"""I12: a child of ``fork`` (a DataLoader worker) neither hangs nor harms its parent."""

from __future__ import annotations

import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

import embcache as ec
from promises.strategies import SOAK, make_batch, one_feature
from promises.training import check, model_state, train_window

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")

LIMIT_S = 60


def fork_and_wait(child: Callable[[], object], *, leave: Callable[[int], object] = os._exit) -> int:
    """Run `child` in a forked process; its exit status. A child that hangs is killed and fails the test."""
    pid = os.fork()
    if pid == 0:
        status = 70
        try:
            child()
            status = 0
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            leave(status)
    until = time.monotonic() + LIMIT_S
    while time.monotonic() < until:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.001)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    raise AssertionError(f"the child hung for {LIMIT_S} s")


def small_collection() -> ec.EmbeddingBagCollection:
    ebc = ec.EmbeddingBagCollection([ec.TableConfig("f", 4, hbm_rows=8)], optimizer=ec.Adagrad(lr=0.1), num_threads=2)
    for values in ([1, 2, 3], [4, 5, 6, 7], [8, 9, 1]):
        ebc(one_feature(values)).values().sum().backward()
    return ebc


def test_i12_every_door_refuses_in_a_child() -> None:
    ebc = small_collection()
    m, view, table = ebc.manager, ebc.tables()["f"], ec.EmbTable("t", 4)
    table.insert(np.arange(10))
    info = m.plan(one_feature([1]))
    iterators = [view.items(), table.items()]
    before = table.lookup(np.arange(10)).tolist()
    calls: list[Callable[[], Any]] = [
        lambda: ebc(one_feature([1])),
        lambda: ebc.eval()(one_feature([1])),
        lambda: m.plan(one_feature([1])),
        lambda: m.plan_async(one_feature([1])),
        lambda: m.swap_out(info),
        lambda: m.swap_in(info),
        lambda: m.finish(info),
        lambda: m.cancel(info),
        m.flush,
        m.stats,
        m.rebalance,
        m.close,
        lambda: view.lookup([1]),
        lambda: view.find([1]),
        lambda: view.insert([1]),
        lambda: view.erase([1]),
        lambda: view.lookup_rows([1]),
        lambda: view.assign([1], np.ones((1, 4), np.float32)),
        lambda: len(view),
        view.check,
        lambda: next(iterators[0]),
        lambda: table.lookup([1]),
        lambda: table.find([1]),
        lambda: table.insert([1]),
        lambda: table.erase([1]),
        lambda: table.assign([1], np.ones((1, 4), np.float32)),
        lambda: table.lookup_rows([1]),
        lambda: len(table),
        table.stats,
        table.check,
        table.close,
        lambda: next(iterators[1]),
        ebc.optimizer.step,
    ]

    def child() -> None:
        for number, call in enumerate(calls):
            try:
                call()
            except ec.ForkError as error:
                assert str(os.getppid()) in str(error) and str(os.getpid()) in str(error), error
            else:
                raise AssertionError(f"call {number} was allowed")

    assert fork_and_wait(child) == 0
    assert table.lookup(np.arange(10)).tolist() == before
    table.check()
    m.cancel(info)
    ebc.train()(one_feature([1, 10])).values().sum().backward()
    check(m)


@pytest.mark.parametrize("leave", [os._exit, "exit"], ids=["_exit", "exit"])
def test_i12_a_child_that_ends_in_any_way_is_harmless(leave: Any) -> None:
    """With and without clean-up, dropping every reference first: nothing of the parent's is unmapped or joined."""
    ebc = small_collection()
    table = ec.EmbTable("t", 16, num_threads=4)
    table.insert(np.arange(100_000))
    before, rows = model_state(ebc.manager), table.lookup(np.arange(1000))

    def finish(status: int) -> None:
        if status or leave is os._exit:
            os._exit(status)
        import atexit

        atexit._run_exitfuncs()
        os._exit(status)

    def child() -> None:
        import gc

        nonlocal ebc, table
        with_close = [ebc.manager.close, table.close]
        for close in with_close:
            with pytest.raises(ec.ForkError):
                close()
        del ebc, table, with_close, close
        gc.collect()

    for _ in range(5):
        assert fork_and_wait(child, leave=finish) == 0
    assert model_state(ebc.manager) == before
    np.testing.assert_array_equal(table.lookup(np.arange(1000)), rows)
    table.check()
    ebc(one_feature([1, 2, 50])).values().sum().backward()
    check(ebc.manager)


def test_i12_a_child_makes_and_trains_its_own_collection() -> None:
    """The pool of threads that the parent had is rebuilt."""
    keys = np.arange(50_000)
    with ec.EmbTable("t", 8, num_threads=4) as table:
        expected = table.lookup(keys).tobytes()

        def child() -> None:
            with ec.EmbTable("t", 8, num_threads=4) as own:
                assert own.lookup(keys).tobytes() == expected
            torch.set_num_threads(1)
            ebc = ec.EmbeddingBagCollection([ec.TableConfig("f", 4)], optimizer=ec.SGD(lr=1.0), num_threads=4)
            with torch.no_grad():
                ebc(one_feature(keys.tolist()))
            info = ebc.manager.plan(one_feature(keys.tolist()))
            ebc.manager.swap_out(info)
            ebc.manager.swap_in(info)
            ebc.manager.finish(info)
            check(ebc.manager)

        for _ in range(3):
            assert fork_and_wait(child) == 0
        assert table.lookup(keys).tobytes() == expected


class Batches(torch.utils.data.IterableDataset):
    """Batches of a seed, made in DataLoader workers."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[ec.JaggedFeatures]:
        worker = torch.utils.data.get_worker_info()
        for number in range(self.count):
            if worker is None or number % worker.num_workers == worker.id:
                yield make_batch(np.random.default_rng(number), ["f"], range(-20, 60), 8, lengths=(0, 1, 2))


def test_i12_dataloader_workers_beside_training() -> None:
    """Two epochs with forked workers while the collection's threads are up, equal to training without workers."""
    results = []
    for workers in (0, 2):
        ebc = ec.EmbeddingBagCollection(
            [ec.TableConfig("f", 4, hbm_rows=24)], optimizer=ec.Adagrad(lr=0.1), num_threads=2
        )
        ec.EmbTable("wake", 4, num_threads=2).insert(np.arange(50_000))
        for _ in range(2):
            loader = torch.utils.data.DataLoader(
                Batches(30), batch_size=None, num_workers=workers, multiprocessing_context="fork" if workers else None
            )
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                for batch in loader:
                    train_window(ebc, [batch])
        check(ebc.manager)
        results.append(model_state(ebc.manager))
    assert results[0] == results[1]


def test_i12_forks_while_threads_are_busy() -> None:
    """The pool, a trainer and a planning thread are at work while the main thread forks."""
    table = ec.EmbTable("t", 8, num_threads=3)
    keys = np.arange(60_000)
    table.insert(keys)
    ebc = ec.EmbeddingBagCollection([ec.TableConfig("f", 4, hbm_rows=12_000)], optimizer=ec.SGD(lr=1.0), num_threads=2)
    stop, failures = threading.Event(), []

    def look_up() -> None:
        expected = table.lookup(keys).tobytes()
        while not stop.is_set():
            if table.lookup(keys, insert=False).tobytes() != expected:
                failures.append("lookup")

    def plan() -> None:
        rng = np.random.default_rng(0)
        m = ebc.manager
        try:
            while not stop.is_set():
                info = m.plan_async(one_feature(rng.integers(0, 40_000, 10_000).tolist())).result()
                m.swap_out(info)
                m.swap_in(info)
                m.finish(info)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=look_up), threading.Thread(target=plan)]
    for thread in threads:
        thread.start()

    def child() -> None:
        with pytest.raises(ec.ForkError):
            table.find([1])
        with pytest.raises(ec.ForkError):
            ebc.manager.stats()
        with ec.EmbTable("own", 4, num_threads=2) as own:
            own.insert(keys[:20_000])
            own.check()

    try:
        for _ in range(100 * SOAK):
            assert fork_and_wait(child) == 0
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert failures == []
    table.check()
    check(ebc.manager)
    assert ebc.manager.stats()["step"] > 0
