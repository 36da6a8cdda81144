"""The geometry of a batch: checks and running sums of its lengths, in one pass each.

Owns nothing and raises nothing: a batch that does not fit is answered with False or None, and the caller, who knows
the names of things, says what is wrong with it.

Thread safety: pure functions.
"""

import numpy as np

from libc.stdint cimport int64_t

__all__ = ["batch_offsets", "lengths_fit"]


def lengths_fit(const int64_t[::1] lengths not None, int64_t total):
    """Whether the lengths are all >= 0 and sum to `total`; a sum that wraps round 2**64 does not pass.

    Parameters
    ----------
    lengths : int64 (n,)
    total : int
    """
    cdef int64_t count = lengths.shape[0]
    cdef bint fit
    with nogil:
        fit = ec_lengths_fit(&lengths[0] if count > 0 else NULL, count, total)
    return fit


def batch_offsets(const int64_t[::1] lengths not None, const int64_t[::1] first_bags not None, int64_t total):
    """Where each bag and each table of a table-major batch starts.

    Parameters
    ----------
    lengths : int64 (n,)
        Number of keys of each bag.
    first_bags : int64 (tables + 1,)
        First bag of each table, and n: in [0, n].
    total : int
        Number of keys.

    Returns
    -------
    (int64 (n + 1,), int64 (tables + 1,)), or None
        None where the lengths do not fit (see `lengths_fit`).
    """
    cdef int64_t count = lengths.shape[0], tables = first_bags.shape[0], t
    cdef int64_t[::1] bags, starts
    cdef bint fit
    for t in range(tables):
        if not 0 <= first_bags[t] <= count:
            return None
    bag_offsets, table_offsets = np.empty(count + 1, np.int64), np.empty(tables, np.int64)
    bags, starts = bag_offsets, table_offsets
    with nogil:
        fit = ec_running_offsets(&lengths[0] if count > 0 else NULL, count, total, &bags[0])
        if fit:
            for t in range(tables):
                starts[t] = bags[first_bags[t]]
    return (bag_offsets, table_offsets) if fit else None
