"""The thread pool: every task exactly once, lazy, idle without spinning, gone at exit, rebuilt after fork."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import threading

import numpy as np
import pytest

from embcache._core.threads import count_calls, thread_count, worker_count
from embcache.errors import ConfigError


@pytest.mark.parametrize("threads", [1, 2, 4, 64])
@pytest.mark.parametrize("tasks", [0, 1, 2, 3, 1000])
def test_every_task_runs_exactly_once(tasks: int, threads: int) -> None:
    calls = np.zeros(tasks, dtype=np.int64)
    for _ in range(20):
        count_calls(calls, threads)
    assert (calls == 20).all()


def test_a_task_may_start_tasks() -> None:
    calls = np.zeros(1000, dtype=np.int64)
    count_calls(calls, 4, nested=10)
    assert (calls == 1).all()


def test_many_callers_share_the_pool() -> None:
    results = [np.zeros(500, dtype=np.int64) for _ in range(8)]

    def work(calls: np.ndarray) -> None:
        for _ in range(50):
            count_calls(calls, 4)

    callers = [threading.Thread(target=work, args=(calls,)) for calls in results]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert all((calls == 50).all() for calls in results)
    assert worker_count() <= 63


def test_thread_counts_are_checked() -> None:
    assert thread_count(3) == 3 and thread_count(np.int64(64)) == 64
    assert thread_count(None) == min(len(os.sched_getaffinity(0)), 16)
    for bad in (0, -1, 65, 1.5, "2", True):
        with pytest.raises(ConfigError, match="num_threads"):
            thread_count(bad)  # type: ignore[arg-type]


SCRIPT = """
import os, sys, threading
import numpy as np
from embcache._core.threads import count_calls, worker_count
calls = np.zeros(1000, dtype=np.int64)
assert worker_count() == 0
count_calls(calls, 1)
assert worker_count() == 0
count_calls(calls, 3)
assert worker_count() == 2
{body}
"""


def run(body: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", SCRIPT.format(body=body)], capture_output=True, text=True, timeout=60, check=False
    )


def test_the_pool_is_lazy_and_exit_joins_it() -> None:
    done = run("")
    assert (done.returncode, done.stderr) == (0, "")


def test_case_43_exit_while_a_thread_still_calls() -> None:
    done = run(
        "stop = False\n"
        "def spin():\n"
        "    while True: count_calls(np.zeros(5000, dtype=np.int64), 3)\n"
        "for _ in range(3): threading.Thread(target=spin, daemon=True).start()\n"
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_i12_a_child_of_fork_gets_its_own_pool() -> None:
    done = run(
        "busy = threading.Thread(target=lambda: [count_calls(np.zeros(5000, dtype=np.int64), 3) for _ in range(300)])\n"
        "busy.start()\n"
        "for _ in range(20):\n"
        "    pid = os.fork()\n"
        "    if pid == 0:\n"
        "        mine = np.zeros(1000, dtype=np.int64)\n"
        "        ok = worker_count() == 0\n"
        "        count_calls(mine, 3)\n"
        "        os._exit(0 if ok and (mine == 1).all() and worker_count() == 2 else 1)\n"
        "    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0\n"
        "busy.join()\n"
        "count_calls(calls, 3)\n"
        "assert (calls == 3).all()\n"
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_case_64_idle_workers_use_no_cpu() -> None:
    count_calls(np.zeros(1000, dtype=np.int64), 4)
    assert worker_count() >= 3
    before = resource.getrusage(resource.RUSAGE_SELF)
    threading.Event().wait(0.3)
    after = resource.getrusage(resource.RUSAGE_SELF)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 0.1
