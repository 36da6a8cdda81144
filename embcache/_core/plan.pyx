"""One batch's plan (`SwapInfo`) as Python sees it: its arrays, read-only, and its state.

Owns the two blocks that the arrays lie in, and the plan's journal until the `SwapManager` that made it settles it.
The manager alone makes plans and changes them; nothing here changes one.
"""

import numpy as np

from cython cimport final
from libc.stdint cimport int64_t
from libc.stdlib cimport free
from libc.string cimport memset

from embcache._core.threads cimport parallel_for

cdef object frombuffer = np.frombuffer
cdef object int64 = np.int64

cdef enum:
    SHELVED_BYTES = 1 << 20  # smaller blocks come back from malloc with their pages

STATES = ("planned", "swapped_out", "swapped_in", "finished", "cancelled")  # by EC_PLANNED ...


@final
cdef class Shelf:
    """Room for one large malloc block that a plan has done with, so that the next plan need not ask the system for pages.

    The GIL guards it. What is taken from it belongs to the taker.
    """

    def __cinit__(self):
        self.data = NULL
        self.held = 0

    def __dealloc__(self):
        free(self.data)

    cdef size_t take(self, size_t size, void **data) noexcept:
        """Hand over the block if it is worth while and large enough: its bytes, or 0 and NULL."""
        data[0] = NULL
        if self.data == NULL or size < SHELVED_BYTES or size > self.held:
            return 0
        data[0] = self.data
        self.data = NULL
        return self.held

    cdef void put(self, void *data, size_t size) noexcept:
        """Keep the larger of this block and the one here, and free the other."""
        if self.data == NULL or size > self.held:
            free(self.data)
            self.data = data
            self.held = size
        else:
            free(data)


@final
cdef class Block:
    """Owner of one malloc block, seen by NumPy through the buffer protocol, read-only; shelved or freed with the last view."""

    def __cinit__(self):
        self.data = NULL
        self.size = 0
        self.held = 0
        self.shelf = None

    def __dealloc__(self):
        if self.shelf is None or self.held < SHELVED_BYTES:
            free(self.data)
        else:
            self.shelf.put(self.data, self.held)

    def __getbuffer__(self, Py_buffer *buffer, int flags):
        if flags & 1:  # PyBUF_WRITABLE
            raise BufferError("the arrays of a plan are read-only")
        buffer.buf = self.data
        buffer.obj = self
        buffer.len = self.size
        buffer.readonly = 1
        buffer.itemsize = 1
        buffer.format = NULL
        buffer.ndim = 1
        buffer.shape = &self.size
        buffer.strides = NULL
        buffer.suboffsets = NULL
        buffer.internal = NULL

    def __releasebuffer__(self, Py_buffer *buffer):
        pass


@final
cdef class Plan:
    """What one training batch needs (``SwapInfo``): slots of its keys, rows to swap in, rows to swap out.

    Made by `SwapManager.plan` only. All arrays are read-only and stay valid for ever.

    Attributes
    ----------
    step : int
        Number of the training step, from 1.
    state : str
        ``"planned"``, ``"swapped_out"``, ``"swapped_in"``, ``"finished"`` or ``"cancelled"``.
    num_keys, num_uniques : int
        n, U.
    table_offsets : int64[T + 1]
        Keys of table t are the positions ``table_offsets[t]`` to ``table_offsets[t + 1]``.
    unique_keys : int64[U]
        Distinct keys, table by table, in order of first occurrence.
    unique_offsets : int64[T + 1]
    inverse : int64[n]
        Index into the uniques of each position.
    occurrence_order : int64[n]
        Positions grouped by unique, in batch order within a group. Where hardly a key was missing, the first one who asks for
        it, or for `segment_offsets`, makes it.
    segment_offsets : int64[U + 1]
        Group u is ``occurrence_order[segment_offsets[u]:segment_offsets[u + 1]]``.
    slots : int64[U]
        Slot in the whole buffer; a key that is not admitted has its table's constant slot, base + capacity.
    admitted : uint8[U]
    swap_in_keys, swap_in_slots, swap_in_rows : int64[M]
        Rows to copy host -> HBM, in order of the uniques; table t's are ``swap_in_offsets[t]:swap_in_offsets[t + 1]``.
    swap_in_offsets : int64[T + 1]
    swap_out_keys, swap_out_slots, swap_out_rows : int64[K]
        Rows to copy HBM -> host first: each frees a slot that a swap-in of this plan fills.
    swap_out_offsets : int64[T + 1]
    hits, misses : int
        Unique keys that were resident, and admitted ones that were not. Keys not admitted are neither.
    table_hits, table_misses : int64[T]
    """

    def __cinit__(self):
        memset(&self.plan, 0, sizeof(ec_plan))
        memset(&self.out, 0, sizeof(ec_arrays))
        self.tables = 0
        self.owner = 0
        self.threads = 1
        self.grouped = 0
        self.arrays = {}

    def __init__(self):
        raise TypeError("plans are made by SwapManager.plan")

    def __dealloc__(self):
        cdef int64_t t
        if self.plan.parts != NULL:
            for t in range(self.tables):
                ec_part_free(&self.plan.parts[t])
            free(self.plan.parts)

    cdef void group(self) noexcept:
        """Make the occurrence lists that do not exist yet; the GIL is held, so one thread does it."""
        cdef ec_grouping grouping
        if self.grouped:
            return
        grouping.out = &self.out
        grouping.parts = self.plan.parts
        parallel_for(ec_phase_group, &grouping, self.tables, self.threads)
        self.grouped = 1

    def group_now(self):
        """Make `occurrence_order` and `segment_offsets` without the GIL, by the thread that alone has the plan: no other waits for it."""
        cdef ec_grouping grouping
        if self.grouped:
            return
        grouping.out = &self.out
        grouping.parts = self.plan.parts
        with nogil:
            parallel_for(ec_phase_group, &grouping, self.tables, self.threads)
        self.grouped = 1

    cdef object view(self, str name, object block, void *at, int64_t items, object dtype):
        array = self.arrays.get(name)
        if array is None:
            if items == 0:
                array = np.empty(0, dtype)
                array.flags.writeable = False
            else:  # read-only as the block is
                array = frombuffer(block, dtype, items, <char *>at - <char *>(<Block>block).data)
            self.arrays[name] = array
        return array

    @property
    def state(self):
        return STATES[self.plan.state]

    @property
    def inverse(self):
        return self.view("inverse", self.front, self.out.inverse, self.num_keys, int64)

    @property
    def occurrence_order(self):
        self.group()
        return self.view("occurrence_order", self.front, self.out.order, self.num_keys, int64)

    @property
    def table_offsets(self):
        return self.view("table_offsets", self.front, self.out.table_offsets, self.tables + 1, int64)

    @property
    def unique_offsets(self):
        return self.view("unique_offsets", self.front, self.out.unique_offsets, self.tables + 1, int64)

    @property
    def segment_offsets(self):
        self.group()
        return self.view("segment_offsets", self.front, self.out.segment_offsets, self.num_uniques + 1, int64)

    @property
    def unique_keys(self):
        return self.view("unique_keys", self.front, self.out.unique_keys, self.num_uniques, int64)

    @property
    def slots(self):
        return self.view("slots", self.front, self.out.slots, self.num_uniques, int64)

    @property
    def admitted(self):
        return self.view("admitted", self.front, self.out.admitted, self.num_uniques, np.uint8)

    @property
    def swap_in_offsets(self):
        return self.view("swap_in_offsets", self.front, self.out.in_offsets, self.tables + 1, int64)

    @property
    def swap_in_keys(self):
        return self.view("swap_in_keys", self.back, self.out.in_keys, self.out.in_offsets[self.tables], int64)

    @property
    def swap_in_slots(self):
        return self.view("swap_in_slots", self.back, self.out.in_slots, self.out.in_offsets[self.tables], int64)

    @property
    def swap_in_rows(self):
        return self.view("swap_in_rows", self.back, self.out.in_rows, self.out.in_offsets[self.tables], int64)

    @property
    def swap_out_offsets(self):
        return self.view("swap_out_offsets", self.front, self.out.out_offsets, self.tables + 1, int64)

    @property
    def swap_out_keys(self):
        return self.view("swap_out_keys", self.back, self.out.out_keys, self.out.out_offsets[self.tables], int64)

    @property
    def swap_out_slots(self):
        return self.view("swap_out_slots", self.back, self.out.out_slots, self.out.out_offsets[self.tables], int64)

    @property
    def swap_out_rows(self):
        return self.view("swap_out_rows", self.back, self.out.out_rows, self.out.out_offsets[self.tables], int64)

    @property
    def table_hits(self):
        return self.view("table_hits", self.front, self.out.hits, self.tables, int64)

    @property
    def table_misses(self):
        return self.view("table_misses", self.front, self.out.misses, self.tables, int64)

    def __repr__(self):
        return f"Plan(step={self.step}, state={self.state!r}, keys={self.num_keys}, uniques={self.num_uniques}, hits={self.hits}, misses={self.misses})"
