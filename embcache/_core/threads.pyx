"""The process-wide thread pool of the core: one, lazy, small; and the number of the process.

Owns the worker threads. Results never depend on how many there are. Callers keep small work away from the pool: waking
a worker costs tens of microseconds. The pool is joined at interpreter exit and forgotten in a forked child.
"""

import atexit
import os

from embcache.errors import ConfigError, whole_number

from libc.stdint cimport int64_t, uint64_t

cdef extern from "ec_threads.h":
    void ec_parallel_for(ec_task_fn run, void *context, int64_t tasks, int num_threads) noexcept nogil
    void ec_pool_stop() noexcept nogil
    int ec_pool_size() noexcept nogil
    uint64_t ec_pool_jobs() noexcept nogil
    int ec_pool_install() noexcept nogil

cdef extern from "ec_process.h":
    void ec_process_install() noexcept nogil
    int64_t ec_process_mark() noexcept nogil
    int64_t ec_process_number(int64_t mark) noexcept nogil

cdef enum:
    MOST_THREADS = 64
    DEFAULT_MOST_THREADS = 16


cdef void parallel_for(ec_task_fn run, void *context, int64_t tasks, int num_threads) noexcept nogil:
    ec_parallel_for(run, context, tasks, num_threads)


cdef int resolve_threads(object num_threads) except -1:
    if num_threads is None:
        return min(len(os.sched_getaffinity(0)), DEFAULT_MOST_THREADS)
    count = whole_number(num_threads)
    if count is None or not 1 <= count <= MOST_THREADS:
        raise ConfigError(f"num_threads = {num_threads!r}; give an integer from 1 to {MOST_THREADS}, or None for the CPUs available")
    return count


cdef int64_t process_mark() noexcept nogil:
    return ec_process_mark()


cdef int64_t process_number(int64_t mark) noexcept nogil:
    return ec_process_number(mark)


def this_process():
    """A mark of this process without a system call, as every door asks; `process_number_of` says its number."""
    return ec_process_mark()


def process_number_of(int64_t mark):
    """The process's number, as `os.getpid` says it there, in what `this_process` returned."""
    return ec_process_number(mark)


def thread_count(num_threads=None):
    """Number of threads that `num_threads` stands for.

    Parameters
    ----------
    num_threads : int, optional
        1 to 64; None: the CPUs that this process may use, at most 16.

    Returns
    -------
    int

    Raises
    ------
    ConfigError
        If `num_threads` is neither None nor an integer in range.
    """
    return resolve_threads(num_threads)


def worker_count():
    """Number of worker threads alive in this process; 0 until the first large call."""
    return ec_pool_size()


def job_count():
    """Number of calls so far that were spread over the pool; small ones are not, they run in their callers."""
    return ec_pool_jobs()


cdef struct Tally:
    int64_t *calls
    int64_t tasks
    int num_threads


cdef void _tally_task(void *context, int64_t task) noexcept nogil:
    (<Tally *>context).calls[task] += 1


cdef void _nested_task(void *context, int64_t task) noexcept nogil:
    cdef Tally *outer = <Tally *>context
    cdef Tally inner
    inner.calls = outer.calls + task * outer.tasks
    parallel_for(_tally_task, &inner, outer.tasks, outer.num_threads)


def count_calls(int64_t[::1] calls, num_threads, int64_t nested=1):
    """Add one to each element of `calls`, a task each: how the tests see that every task runs exactly once.

    Parameters
    ----------
    calls : int64 array
    num_threads : int or None
    nested : int
        When above 1, so many tasks each start a job of their own for their part of `calls`, whose length they divide.
    """
    cdef int threads = resolve_threads(num_threads)
    cdef Tally tally
    if calls.shape[0] == 0:
        return
    tally.calls = &calls[0]
    tally.tasks = calls.shape[0] // nested
    tally.num_threads = threads
    with nogil:
        if nested > 1:
            parallel_for(_nested_task, &tally, nested, threads)
        else:
            parallel_for(_tally_task, &tally, tally.tasks, threads)


def _stop():
    with nogil:
        ec_pool_stop()


ec_process_install()
if ec_pool_install() != 0:
    raise MemoryError("embcache: no memory for the fork handler of the thread pool")
atexit.register(_stop)
