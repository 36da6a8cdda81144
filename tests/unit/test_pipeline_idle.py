"""TrainPipeline: thousands of steps, and none."""

from __future__ import annotations

import gc
import os
import threading
import time
from pathlib import Path

import pytest
from pipelines import SOAK, Model, batches, sgd, threads_end, train

import embcache as ec

_threads_end = pytest.fixture(autouse=True)(threads_end)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.timeout(1800)
def test_memory_and_threads_stay_flat() -> None:
    """10,000 steps (SOAK times as many), evaluations between them."""
    model = Model(rows=32)
    one = list(batches(50, keys=50))
    with ec.TrainPipeline(model, sgd(model), depth=6) as pipe:
        source = (batch for _ in range(10**7) for batch in one)
        sizes, threads = [], set()
        for step in range(10_000 * SOAK):
            pipe.progress(source)
            if step % 500 == 499:
                model.eval()
                pipe.progress(iter(one[:1]))
                model.train()
            if step % 1000 == 999:
                gc.collect()
                sizes.append(resident_bytes())
                threads.add(threading.active_count())
    assert len(threads) == 1
    assert sizes[-1] - sizes[1] < 4 << 20, sizes


def test_idle_threads_take_no_cpu() -> None:
    model = Model()
    with ec.TrainPipeline(model, sgd(model)) as pipe:
        train(pipe, batches(100), 3)
        time.sleep(0.2)  # until everything is ahead that may be
        began, cpu = time.monotonic(), time.process_time()
        time.sleep(1.0)
        assert time.process_time() - cpu < 0.01 * (time.monotonic() - began)
