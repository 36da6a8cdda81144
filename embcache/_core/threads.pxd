"""C contract of the process-wide thread pool, and of the process."""

from libc.stdint cimport int64_t

ctypedef void (*ec_task_fn)(void *context, int64_t task) noexcept nogil

# Call run(context, 0 .. tasks - 1), each exactly once, on at most `num_threads` threads, the caller among them; returns
# when all are done. Tasks must not depend on their order. A busy pool, or one thread, means: serially, in the caller.
cdef void parallel_for(ec_task_fn run, void *context, int64_t tasks, int num_threads) noexcept nogil

# None -> the CPUs this process may use, at most 16; an integer from 1 to 64 is itself; ConfigError otherwise.
cdef int resolve_threads(object num_threads) except -1

# A mark that no other process has, a child of fork included, at the cost of a load; and the process's number in it.
cdef int64_t process_mark() noexcept nogil
cdef int64_t process_number(int64_t mark) noexcept nogil
