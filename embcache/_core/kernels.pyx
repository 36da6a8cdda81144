"""Row kernels: gather, scatter, pooling, gradients by key, optimizer updates.

What this room owns: the Python doors of ``ec_kernels.h``. A door checks every shape and every index of its arguments
once (`ShapeError` names the argument, what was seen and what is needed), so the loops below cannot leave their arrays;
then the call runs without the GIL, on the pool when there is enough work.

Invariants. Results are bit-identical at any thread count, on any ISA and for any placement of rows (promise I9): an
update reads only its own row and gradient; the gradient of a key is summed in batch order in blocks of 256
occurrences, and the partial sums are added in order. The fused ``segment_update_*`` equal ``segment_grad_*`` followed
by ``update``.

Types. `weights` (R, D) is float32, float16, or int16 that holds the bits of bfloat16; everything else, results included,
is float32. A narrower weight is widened, exactly, before anything is computed; an update is computed in float32 and
rounded once, to nearest even.

Words. ``slots[u]`` is the row of unique u in `weights`. ``inverse[p]`` is the unique at position p. Uniques
``unique_start`` to ``unique_stop`` are those of the rows in `weights` (one dim group of a batch); the arrays themselves
may span the whole batch. Bags are feature-major: bag f * B + b holds positions ``bag_offsets[bag]`` to
``bag_offsets[bag + 1]``, and its result stands in ``out[b, out_cols[f] : out_cols[f] + D]``. ``occurrence_order`` and
``segment_offsets`` are the planner's CSR of positions by unique.

Ownership: a door looks at each array in place and acquires no buffer (arrays.pyx); its arguments keep them for the call.

Thread safety: a call may run beside others that write other rows; the caller orders calls that touch the same rows.
"""

from libc.math cimport sqrt
from libc.stdint cimport int64_t, uint8_t
from libc.stdlib cimport free, malloc

from embcache._core.arrays cimport BOOLEAN, FLOAT16, FLOAT32, INT16, INT64, UINT8, Array, array_open
from embcache._core.threads cimport ec_task_fn, parallel_for, resolve_threads

from math import isfinite

from embcache.errors import ConfigError, HostMemoryError, ShapeError

__all__ = [
    "UpdateRule",
    "add_rows",
    "gather",
    "per_sample_weight_grad",
    "pooled_forward",
    "scatter",
    "segment_grad_pooled",
    "segment_grad_sequence",
    "segment_update_pooled",
    "segment_update_sequence",
    "sequence_forward",
    "update",
]

# Least work, in floats, that is worth waking the pool for (tens of microseconds).
cdef int64_t PARALLEL_FLOATS = 1 << 18
# More tasks than threads even out tasks of unequal length.
cdef int TASKS_A_THREAD = 8
# Indexes that are checked in less time than letting go of the GIL takes.
cdef int64_t SMALL_CHECK = 256
# Which clone of the kernels runs.
cdef int USE_AVX2 = ec_cpu_has_avx2()


def _set_isa(str isa):
    """Choose the clone of every kernel, for tests: "baseline" or "auto". Returns the clone in use from now on."""
    global USE_AVX2
    USE_AVX2 = isa != "baseline" and ec_cpu_has_avx2()
    return "avx2" if USE_AVX2 else "baseline"


def _set_parallel_floats(int64_t floats):
    """Set the least work that is spread over threads, for tests. Returns the former value."""
    global PARALLEL_FLOATS
    former = PARALLEL_FLOATS
    PARALLEL_FLOATS = floats
    return former


# ------------------------------------------------------------------------------------------------ checks at the door


cdef object _unfit(str name, str need, object value):
    """The error for an argument of the wrong kind: what it is, what it should be."""
    dtype, shape = getattr(value, "dtype", None), getattr(value, "shape", None)
    if shape is None:
        seen = f"a {type(value).__name__}"
    else:
        seen = f"{dtype} of shape {tuple(shape)}"
        flags = getattr(value, "flags", None)
        if flags is not None and not flags.c_contiguous:
            seen += ", not C-contiguous"
        if flags is not None and not flags.writeable:
            seen += ", read-only"
    return ShapeError(f"{name} is {seen}; give a C-contiguous array of {need}")


cdef str _need2(str kind, int64_t rows, int64_t cols):
    return f"{kind} of shape ({'any' if rows < 0 else rows}, {'1 to 8192' if cols < 0 else cols})"


cdef str _need1(str kind, int64_t count):
    return f"{kind} of shape ({'any' if count < 0 else count},)"


cdef int _floats2(object value, str name, int64_t rows, int64_t cols, bint write, Array *array) except -1:
    """Look at a float32 matrix; -1 leaves a length open."""
    if not array_open(value, 2, FLOAT32, write, array) or (rows >= 0 and array.rows != rows) or (cols >= 0 and array.columns != cols):
        raise _unfit(name, ("writable " if write else "") + _need2("float32", rows, cols), value)
    return 0


cdef int _floats1(object value, str name, int64_t count, bint write, Array *array) except -1:
    if not array_open(value, 1, FLOAT32, write, array) or (count >= 0 and array.rows != count):
        raise _unfit(name, ("writable " if write else "") + _need1("float32", count), value)
    return 0


cdef int _index1(object value, str name, int64_t count, Array *array) except -1:
    if not array_open(value, 1, INT64, False, array) or (count >= 0 and array.rows != count):
        raise _unfit(name, _need1("int64", count), value)
    return 0


cdef int _flag1(object value, str name, int64_t count, Array *array) except -1:
    if not array_open(value, 1, UINT8 | BOOLEAN, False, array) or (count >= 0 and array.rows != count):
        raise _unfit(name, _need1("uint8 or bool", count), value)
    return 0


cdef class _Weights:
    """The memory of a checked matrix of weights, of any type. The door's caller holds the array itself."""

    cdef int type
    cdef int64_t rows
    cdef int64_t dim
    cdef int64_t row_bytes
    cdef char *at                # NULL where there is no element, and no loop will ask for it

    @staticmethod
    cdef _Weights open(object value, str name, int64_t rows, int64_t cols, bint write):
        """Look at `value`; -1 leaves a length open."""
        cdef _Weights self = _Weights.__new__(_Weights)
        cdef Array array
        if not array_open(value, 2, FLOAT32 | FLOAT16 | INT16, write, &array) or (rows >= 0 and array.rows != rows) or (cols >= 0 and array.columns != cols):
            kind = "float32, float16 or int16 (the bits of bfloat16)"
            raise _unfit(name, _need2(f"writable {kind}" if write else kind, rows, cols), value)
        self.type = EC_FLOAT32 if array.kind == FLOAT32 else EC_FLOAT16 if array.kind == FLOAT16 else EC_BFLOAT16
        self.rows = array.rows
        self.dim = array.columns
        self.row_bytes = self.dim * ec_type_bytes(self.type)
        self.at = <char *>array.at
        return self

    cdef int check_dim(self, str name) except -1:
        if not 1 <= self.dim <= EC_MAX_DIM:
            raise ShapeError(f"{name} has rows of {self.dim} elements; a row has 1 to {EC_MAX_DIM}")
        return 0

    cdef int check_type(self, str name, _Weights weights) except -1:
        """Raise unless these rows can be exchanged with those of `weights`: same type, or float32."""
        if self.type not in (weights.type, EC_FLOAT32):
            raise ShapeError(f"{name} is {self.kind()} but weights is {weights.kind()}; give {name} of the same type, or float32")
        return 0

    cdef str kind(self):
        return {EC_FLOAT32: "float32", EC_FLOAT16: "float16"}.get(self.type, "bfloat16 (int16)")


cdef inline const int64_t *_ids(const Array *array) noexcept:
    return <const int64_t *>array.at


cdef int _check_range(const Array *array, int64_t first, int64_t last, int64_t low, int64_t high, str name, str limit) except -1:
    """Raise unless low <= element i < high for every i in [first, last)."""
    if first >= last:
        return 0
    cdef const int64_t *values = _ids(array) + first
    cdef int64_t bad
    if last - first < SMALL_CHECK:
        bad = ec_find_outside(values, last - first, low, high)
    else:
        with nogil:
            bad = ec_find_outside(values, last - first, low, high)
    if bad >= 0:
        raise ShapeError(f"{name}[{first + bad}] = {values[bad]} is outside [{low}, {high}), the range of {limit}")
    return 0


cdef int _check_offsets(const Array *array, int64_t first, int64_t last, int64_t limit, str name, str what) except -1:
    """Raise unless elements first to last are ascending within [0, limit]."""
    cdef const int64_t *values = _ids(array) + first
    cdef int64_t bad
    if last - first < SMALL_CHECK:
        bad = ec_find_unordered(values, last - first + 1, limit)
    else:
        with nogil:
            bad = ec_find_unordered(values, last - first + 1, limit)
    if bad >= 0:
        raise ShapeError(f"{name}[{first + bad}] = {values[bad]}; offsets must not fall and lie in [0, {limit}], "
                         f"the number of {what}")
    return 0


cdef int64_t _check_uniques(int64_t unique_count, int64_t start, object stop) except -1:
    """Checks a range of uniques and returns its end."""
    cdef int64_t end = unique_count if stop is None else stop
    if not 0 <= start <= end <= unique_count:
        raise ShapeError(f"unique_start, unique_stop = {start}, {end}; give an ascending range within the {unique_count} uniques")
    return end


cdef int _threads(object num_threads, int64_t floats) except -1:
    """Threads for so much work: 1 below the threshold, whatever was asked for."""
    if floats < PARALLEL_FLOATS and num_threads is None:
        return 1
    cdef int threads = resolve_threads(num_threads)
    return 1 if floats < PARALLEL_FLOATS else threads


cdef inline int64_t _task_count(int threads, int64_t items) noexcept:
    return 1 if threads <= 1 else max(1, min(items, <int64_t>threads * TASKS_A_THREAD))


cdef void _run(ec_task_fn run, const void *context, int64_t tasks, int threads) noexcept nogil:
    if tasks == 1:
        run(<void *>context, 0)
    else:
        parallel_for(run, <void *>context, tasks, threads)


# -------------------------------------------------------------------------------------------------- moving whole rows


def gather(weights, slots, out, num_threads=None):
    """Copy rows out of a buffer: ``out[i] = weights[slots[i]]``.

    Parameters
    ----------
    weights : (R, D)
    slots : int64 (n,)
        Each in [0, R); repeats are fine.
    out : (n, D)
        Of the type of `weights` (the copy is bit by bit) or float32. Written; must not overlap `weights`.
    num_threads : int, optional
    """
    cdef _Weights source = _Weights.open(weights, "weights", -1, -1, False)
    cdef Array places
    _index1(slots, "slots", -1, &places)
    source.check_dim("weights")
    _check_range(&places, 0, places.rows, 0, source.rows, "slots", "rows of weights")
    cdef _Weights target = _Weights.open(out, "out", places.rows, source.dim, True)
    target.check_type("out", source)
    _gather(source, _ids(&places), NULL, target, places.rows, num_threads)


def sequence_forward(weights, slots, inverse, out, *, int64_t unique_start=0, unique_stop=None, num_threads=None):
    """Rows of a sequence of positions: ``out[i] = weights[slots[inverse[i]]]``.

    Parameters
    ----------
    weights : (R, D)
    slots : int64 (U,)
    inverse : int64 (n,)
        Uniques of the positions wanted, each in [unique_start, unique_stop).
    out : float32 (n, D)
        Written.
    unique_start, unique_stop : int
        Uniques whose slots lie in `weights`; default: all.
    num_threads : int, optional
    """
    cdef _Weights source = _Weights.open(weights, "weights", -1, -1, False)
    cdef Array places, uniques
    _index1(slots, "slots", -1, &places)
    _index1(inverse, "inverse", -1, &uniques)
    cdef int64_t stop = _check_uniques(places.rows, unique_start, unique_stop)
    source.check_dim("weights")
    _check_range(&places, unique_start, stop, 0, source.rows, "slots", "rows of weights")
    _check_range(&uniques, 0, uniques.rows, unique_start, stop, "inverse", "uniques")
    cdef _Weights target = _Weights.open(out, "out", uniques.rows, source.dim, True)
    target.check_type("out", source)
    _gather(source, _ids(&places), _ids(&uniques), target, uniques.rows, num_threads)


cdef void _fill_move(ec_move *move, _Weights weights, _Weights rows) noexcept:
    move.weights = weights.at
    move.type = weights.type
    move.weight_bytes = weights.row_bytes
    move.rows = rows.at
    move.row_type = rows.type
    move.row_bytes = rows.row_bytes
    move.inverse = NULL
    move.count = rows.rows
    move.dim = weights.dim


cdef int _gather(_Weights source, const int64_t *slots, const int64_t *inverse, _Weights target, int64_t count,
                 object num_threads) except -1:
    cdef int threads = _threads(num_threads, count * source.dim)
    cdef ec_move move
    if count == 0:
        return 0
    _fill_move(&move, source, target)
    move.slots = slots
    move.inverse = inverse
    move.task_count = _task_count(threads, count)
    with nogil:
        _run(ec_gather_pick(USE_AVX2), &move, move.task_count, threads)
    return 0


def scatter(weights, slots, rows, num_threads=None):
    """Copy rows into a buffer: ``weights[slots[i]] = rows[i]``.

    Parameters
    ----------
    weights : (R, D)
        Written.
    slots : int64 (n,)
        Distinct, each in [0, R).
    rows : (n, D)
        Of the type of `weights` (the copy is bit by bit), or float32, to be rounded. Must not overlap `weights`.
    num_threads : int, optional
    """
    _change_rows(ec_scatter_pick(USE_AVX2), weights, slots, rows, num_threads)


def add_rows(weights, slots, rows, num_threads=None):
    """Add rows to a buffer: ``weights[slots[i]] += rows[i]``; arguments as in `scatter`, all float32."""
    _change_rows(ec_add_pick(USE_AVX2), weights, slots, rows, num_threads)


cdef int _change_rows(ec_task_fn run, object weights, object slots, object rows, object num_threads) except -1:
    cdef _Weights target = _Weights.open(weights, "weights", -1, -1, True)
    cdef Array places
    _index1(slots, "slots", -1, &places)
    target.check_dim("weights")
    _check_range(&places, 0, places.rows, 0, target.rows, "slots", "rows of weights")
    cdef _Weights source = _Weights.open(rows, "rows", places.rows, target.dim, False)
    source.check_type("rows", target)
    if run == ec_add_pick(USE_AVX2) and target.type != EC_FLOAT32:
        raise _unfit("weights", "writable " + _need2("float32", -1, -1), weights)
    cdef int threads = _threads(num_threads, source.rows * source.dim)
    cdef ec_move move
    if places.rows == 0:
        return 0
    _fill_move(&move, target, source)
    move.slots = _ids(&places)
    move.task_count = _task_count(threads, move.count)
    with nogil:
        _run(run, &move, move.task_count, threads)
    return 0


# --------------------------------------------------------------------------------------------------------------- bags


cdef class _Bags:
    """Checked bags of one call; the door's caller holds the arrays that `bags` points into."""

    cdef ec_bags bags
    cdef bint any_mean

    @staticmethod
    cdef _Bags check(object bag_offsets, object feature_mean, object out_cols, object per_sample_weights,
                     int64_t position_count, int64_t batch_size, int64_t width, int64_t dim):
        cdef _Bags self = _Bags.__new__(_Bags)
        cdef Array offsets, columns, means, coefs
        cdef int64_t feature
        _index1(out_cols, "out_cols", -1, &columns)
        cdef int64_t feature_count = columns.rows
        _flag1(feature_mean, "feature_mean", feature_count, &means)
        _index1(bag_offsets, "bag_offsets", feature_count * batch_size + 1, &offsets)
        _check_offsets(&offsets, 0, feature_count * batch_size, position_count, "bag_offsets", "positions")
        _check_range(&columns, 0, feature_count, 0, width - dim + 1, "out_cols", "columns where a row fits")
        if per_sample_weights is not None:
            _floats1(per_sample_weights, "per_sample_weights", position_count, False, &coefs)
            self.bags.coefs = <const float *>coefs.at
        self.bags.bag_offsets = _ids(&offsets)
        self.bags.out_cols = _ids(&columns)
        self.bags.feature_mean = <const uint8_t *>means.at
        for feature in range(feature_count):
            self.any_mean = self.any_mean or self.bags.feature_mean[feature] != 0
        self.bags.batch_size = batch_size
        self.bags.bag_count = feature_count * batch_size
        self.bags.width = width
        self.bags.dim = dim
        self.bags.task_count = 1
        return self

    cdef int64_t first_position(self) noexcept:
        return self.bags.bag_offsets[0]

    cdef int64_t last_position(self) noexcept:
        return self.bags.bag_offsets[self.bags.bag_count]

    cdef int use_rows(self, _Weights weights, const Array *slots, const Array *inverse, int64_t start,
                      object unique_stop) except -1:
        """Attach the rows that the positions stand for, all indexes checked."""
        cdef int64_t stop = _check_uniques(slots.rows, start, unique_stop)
        _check_range(slots, start, stop, 0, weights.rows, "slots", "rows of weights")
        _check_range(inverse, self.first_position(), self.last_position(), start, stop, "inverse", "uniques")
        self.bags.weights = weights.at
        self.bags.type = weights.type
        self.bags.slots = _ids(slots)
        self.bags.inverse = _ids(inverse)
        return 0

    cdef int run(self, ec_task_fn kernel, int64_t floats, object num_threads) except -1:
        cdef int threads = _threads(num_threads, floats)
        self.bags.task_count = _task_count(threads, self.bags.bag_count)
        if self.bags.bag_count > 0:
            with nogil:
                _run(kernel, &self.bags, self.bags.task_count, threads)
        return 0


def pooled_forward(weights, slots, inverse, bag_offsets, feature_mean, out_cols, out, *, per_sample_weights=None,
                   int64_t unique_start=0, unique_stop=None, num_threads=None):
    """Sum or mean of the rows of each bag.

    A bag's rows, times their per-sample weights, are added in order; a mean divides by the number of rows, whatever
    their weights; an empty bag is 0.

    Parameters
    ----------
    weights : (R, D)
    slots : int64 (U,)
    inverse : int64 (n,)
    bag_offsets : int64 (F * B + 1,)
    feature_mean : uint8 or bool (F,)
        Nonzero: mean instead of sum.
    out_cols : int64 (F,)
        First column of each feature in `out`; features must not overlap.
    out : float32 (B, W)
        Written in the columns of the features, nowhere else.
    per_sample_weights : float32 (n,), optional
    unique_start, unique_stop : int
    num_threads : int, optional
    """
    cdef _Weights source = _Weights.open(weights, "weights", -1, -1, False)
    cdef Array places, uniques, target
    _index1(slots, "slots", -1, &places)
    _index1(inverse, "inverse", -1, &uniques)
    _floats2(out, "out", -1, -1, True, &target)
    source.check_dim("weights")
    cdef int64_t dim = source.dim
    cdef _Bags call = _Bags.check(bag_offsets, feature_mean, out_cols, per_sample_weights, uniques.rows, target.rows,
                                  target.columns, dim)
    call.use_rows(source, &places, &uniques, unique_start, unique_stop)
    call.bags.out = <float *>target.at
    call.run(ec_pool_pick(USE_AVX2), (call.last_position() - call.first_position() + call.bags.bag_count) * dim,
             num_threads)


def per_sample_weight_grad(grad_out, weights, slots, inverse, bag_offsets, feature_mean, out_cols, out, *,
                           int64_t unique_start=0, unique_stop=None, num_threads=None):
    """Gradient of the per-sample weights of `pooled_forward`: a dot product of row and bag gradient a position.

    Parameters are those of `pooled_forward`, with `grad_out` float32 (B, W) and

    Parameters
    ----------
    out : float32 (bag_offsets[-1] - bag_offsets[0],)
        Written; element i belongs to position bag_offsets[0] + i.
    """
    cdef Array grad, places, uniques, target
    _floats2(grad_out, "grad_out", -1, -1, False, &grad)
    cdef _Weights source = _Weights.open(weights, "weights", -1, -1, False)
    _index1(slots, "slots", -1, &places)
    _index1(inverse, "inverse", -1, &uniques)
    source.check_dim("weights")
    cdef int64_t dim = source.dim
    cdef _Bags call = _Bags.check(bag_offsets, feature_mean, out_cols, None, uniques.rows, grad.rows, grad.columns, dim)
    cdef int64_t count = call.last_position() - call.first_position()
    call.use_rows(source, &places, &uniques, unique_start, unique_stop)
    _floats1(out, "out", count, True, &target)
    if count == 0:
        return
    call.bags.grad = <const float *>grad.at
    call.bags.out = <float *>target.at
    call.run(ec_coef_grad_pick(USE_AVX2), 2 * count * dim, num_threads)


# ---------------------------------------------------------------------------------------------------------- optimizers


cdef double _power(double base, int64_t exponent) noexcept nogil:
    """base ** exponent by squaring: the same bits everywhere, which libm's pow does not promise."""
    cdef double result = 1.0
    while exponent > 0:
        if exponent & 1:
            result *= base
        base *= base
        exponent >>= 1
    return result


cdef class UpdateRule:
    """One optimizer step's formula with its numbers, as the kernels use them (float32).

    Formulas, with g the gradient plus ``weight_decay * w``: ``"sgd"``: w -= lr g. ``"adagrad"``: s += g g;
    w -= lr (g / (sqrt(s) + eps)). ``"rowwise_adagrad"``: s += mean(g g), one s a row. ``"adam"``: m += (1 - b1)(g - m);
    v += (1 - b2)(g g - v); w -= lr' (m / (sqrt(v) + eps)) with lr' = lr sqrt(1 - b2^t) / (1 - b1^t), t = `step`.

    Parameters
    ----------
    kind : {"sgd", "adagrad", "rowwise_adagrad", "adam"}
    lr : float
    weight_decay, eps, beta1, beta2 : float
    step : int
        The number of this update, from 1.

    Attributes
    ----------
    kind : str
    state_count : int
        State arrays that the rule needs.
    lr : float
        Adam: lr' above.
    weight_decay, eps, one_minus_beta1, one_minus_beta2 : float

    Raises
    ------
    ConfigError
        For an unknown kind, or a number that is not finite or out of range.
    """

    def __init__(self, str kind, *, double lr, double weight_decay=0.0, double eps=0.0, double beta1=0.0,
                 double beta2=0.0, int64_t step=1):
        kinds = {"sgd": (EC_SGD, 0), "adagrad": (EC_ADAGRAD, 1), "rowwise_adagrad": (EC_ROWWISE_ADAGRAD, 1),
                 "adam": (EC_ADAM, 2)}
        if kind not in kinds:
            raise ConfigError(f"optimizer kind = {kind!r}; give one of {', '.join(sorted(kinds))}")
        for name, value in (("lr", lr), ("weight_decay", weight_decay), ("eps", eps)):
            if not (isfinite(value) and value >= 0.0):
                raise ConfigError(f"{kind}: {name} = {value!r}; give a finite number >= 0")
        for name, value in (("beta1", beta1), ("beta2", beta2)):
            if not 0.0 <= value < 1.0:
                raise ConfigError(f"{kind}: {name} = {value!r}; give a number >= 0 and < 1")
        if step < 1:
            raise ConfigError(f"{kind}: step = {step}; steps count from 1")
        self.kind = kind
        self.rule.kind, self.state_count = kinds[kind]
        if kind == "adam":
            lr = lr * sqrt(1.0 - _power(beta2, step)) / (1.0 - _power(beta1, step))
        self.rule.lr = <float>lr
        self.rule.weight_decay = <float>weight_decay
        self.rule.decays = self.rule.weight_decay != 0.0
        self.rule.eps = <float>eps
        self.rule.one_minus_beta1 = <float>(1.0 - beta1)
        self.rule.one_minus_beta2 = <float>(1.0 - beta2)

    @property
    def lr(self):
        return self.rule.lr

    @property
    def weight_decay(self):
        return self.rule.weight_decay

    @property
    def eps(self):
        return self.rule.eps

    @property
    def one_minus_beta1(self):
        return self.rule.one_minus_beta1

    @property
    def one_minus_beta2(self):
        return self.rule.one_minus_beta2


# ----------------------------------------------------------------------------------------------- gradients and updates


cdef class _Segments:
    """Checked uniques of one call, and the scratch memory of it; the door's caller holds the arrays that `seg` points into."""

    cdef ec_segments seg
    cdef Array order
    cdef int64_t unique_count    # of the whole batch
    cdef tuple states            # held: they may come from a sequence that makes them as it is asked
    cdef void *sources
    cdef void *factors
    cdef void *hot
    cdef void *partials

    def __dealloc__(self):
        free(self.sources)
        free(self.factors)
        free(self.hot)
        free(self.partials)

    @staticmethod
    cdef _Segments check(object occurrence_order, object segment_offsets, object admitted, int64_t start,
                         object unique_stop, int64_t dim):
        cdef _Segments self = _Segments.__new__(_Segments)
        cdef Array offsets
        _index1(occurrence_order, "occurrence_order", -1, &self.order)
        _index1(segment_offsets, "segment_offsets", -1, &offsets)
        if offsets.rows < 1:
            raise ShapeError("segment_offsets is empty; give one offset more than there are uniques")
        self.unique_count = offsets.rows - 1
        cdef int64_t stop = _check_uniques(self.unique_count, start, unique_stop)
        _check_offsets(&offsets, start, stop, self.order.rows, "segment_offsets", "positions")
        self.allow(admitted, self.unique_count)
        self.seg.order = _ids(&self.order)
        self.seg.offsets = _ids(&offsets)
        self.seg.start = start
        self.seg.stop = stop
        self.seg.dim = dim
        return self

    cdef int allow(self, object admitted, int64_t unique_count) except -1:
        cdef Array mask
        if admitted is not None:
            _flag1(admitted, "admitted", unique_count, &mask)
            # An empty mask has no address, and NULL would mean "all"; then there is no unique to ask about.
            self.seg.admitted = <const uint8_t *>mask.at
        return 0

    cdef int check_positions(self, int64_t first, int64_t last) except -1:
        """All positions of the range of uniques lie in [first, last)."""
        self.seg.first_position = first
        return _check_range(&self.order, self.seg.offsets[self.seg.start], self.seg.offsets[self.seg.stop], first, last,
                            "occurrence_order", "positions of these bags")

    cdef int target(self, object out) except -1:
        cdef Array rows
        _floats2(out, "out", self.seg.stop - self.seg.start, self.seg.dim, True, &rows)
        self.seg.out = <float *>rows.at
        return 0

    cdef int apply(self, UpdateRule rule, _Weights weights, object states, object slots, int64_t unique_count) except -1:
        """Attach what an update changes."""
        cdef Array places, state
        cdef int64_t rows, wide
        if rule is None:
            raise ShapeError("rule is None; give an UpdateRule")
        self.states = tuple(states)
        _index1(slots, "slots", unique_count, &places)
        rows = weights.rows
        _check_range(&places, self.seg.start, self.seg.stop, 0, rows, "slots", "rows of weights")
        if len(self.states) != rule.state_count:
            raise ShapeError(f"states has {len(self.states)} arrays; {rule.kind} needs {rule.state_count}")
        self.seg.weights = weights.at
        self.seg.type = weights.type
        self.seg.weight_bytes = weights.row_bytes
        self.seg.state0 = self.seg.state1 = <float *>weights.at
        wide = 1 if rule.rule.kind == EC_ROWWISE_ADAGRAD else self.seg.dim
        if rule.state_count > 0:
            _floats2(self.states[0], "states[0]", rows, wide, True, &state)
            self.seg.state0 = <float *>state.at
            self.seg.width0 = wide
        if rule.state_count > 1:
            _floats2(self.states[1], "states[1]", rows, wide, True, &state)
            self.seg.state1 = <float *>state.at
            self.seg.width1 = wide
        self.seg.slots = _ids(&places)
        self.seg.rule = &rule.rule
        return 0

    cdef int pooled(self, object grad_out, object bag_offsets, object feature_mean, object out_cols,
                    object per_sample_weights, object num_threads) except -1:
        """Attach the gradients of bags."""
        cdef Array grad
        _floats2(grad_out, "grad_out", -1, -1, False, &grad)
        cdef _Bags call = _Bags.check(bag_offsets, feature_mean, out_cols, per_sample_weights, self.order.rows, grad.rows,
                                      grad.columns, self.seg.dim)
        cdef int64_t count = call.last_position() - call.first_position()
        self.check_positions(call.first_position(), call.last_position())
        if count == 0:
            return 0
        self.sources = malloc(count * sizeof(int64_t))
        if call.any_mean or per_sample_weights is not None:
            self.factors = malloc(count * sizeof(float))
        if self.sources == NULL or (self.factors == NULL and (call.any_mean or per_sample_weights is not None)):
            raise HostMemoryError(f"no memory for the gradient places of {count} positions; free some, or use smaller batches")
        call.bags.sources = <int64_t *>self.sources
        call.bags.factors = <float *>self.factors
        call.run(ec_sources_pick(USE_AVX2), count + call.bags.bag_count, num_threads)
        self.seg.grad = <const float *>grad.at
        self.seg.sources = <int64_t *>self.sources
        self.seg.factors = <float *>self.factors
        return 0

    cdef int sequence(self, object grad_out, int64_t first_position) except -1:
        """Attach the gradients of a sequence."""
        cdef Array grad
        _floats2(grad_out, "grad_out", -1, self.seg.dim, False, &grad)
        self.check_positions(first_position, first_position + grad.rows)
        self.seg.grad = <const float *>grad.at
        return 0

    cdef int run(self, object num_threads) except -1:
        cdef int64_t unique_count = self.seg.stop - self.seg.start
        if unique_count == 0:
            return 0
        cdef int64_t occurrences = self.seg.offsets[self.seg.stop] - self.seg.offsets[self.seg.start]
        cdef int threads = _threads(num_threads, (occurrences + unique_count) * self.seg.dim)
        if threads > 1:
            self.sum_hot(threads)
        self.seg.task_count = _task_count(threads, unique_count)
        with nogil:
            _run(ec_segment_pick(USE_AVX2), &self.seg, self.seg.task_count, threads)
        return 0

    cdef int sum_hot(self, int threads) except -1:
        """Add up the blocks of very frequent keys in parallel, so that one key is not one thread's work."""
        cdef int64_t count, blocks
        cdef int64_t *uniques
        with nogil:
            count = ec_hot_uniques(&self.seg, NULL, NULL)
        if count == 0:
            return 0
        self.hot = malloc((2 * count + 1) * sizeof(int64_t))
        if self.hot == NULL:
            raise HostMemoryError(f"no memory to list {count} frequent keys; free some, or use smaller batches")
        uniques = <int64_t *>self.hot
        ec_hot_uniques(&self.seg, uniques, uniques + count)
        blocks = uniques[2 * count]
        self.partials = malloc(blocks * self.seg.dim * sizeof(float))
        if self.partials == NULL:
            raise HostMemoryError(f"no memory for {blocks} partial sums of {self.seg.dim} elements; free some, or use smaller batches")
        self.seg.hot_uniques = uniques
        self.seg.hot_blocks = uniques + count
        self.seg.partials = <float *>self.partials
        self.seg.hot_count = count
        with nogil:
            _run(ec_hot_pick(USE_AVX2), &self.seg, (blocks + EC_HOT_BLOCKS_A_TASK - 1) // EC_HOT_BLOCKS_A_TASK, threads)
        return 0


cdef int64_t _columns(object array, str name) except -1:
    """Row length of a float32 matrix whose other checks come later."""
    cdef Array view
    _floats2(array, name, -1, -1, False, &view)
    if not 1 <= view.columns <= EC_MAX_DIM:
        raise ShapeError(f"{name} has rows of {view.columns} elements; a row has 1 to {EC_MAX_DIM}")
    return view.columns


cdef _Weights _updated(object weights):
    """The weights that an update writes."""
    cdef _Weights opened = _Weights.open(weights, "weights", -1, -1, True)
    opened.check_dim("weights")
    return opened


def segment_grad_pooled(grad_out, occurrence_order, segment_offsets, bag_offsets, feature_mean, out_cols, out, *,
                        per_sample_weights=None, admitted=None, int64_t unique_start=0, unique_stop=None,
                        num_threads=None):
    """Gradient of each unique of `pooled_forward`, from the gradient of the bags.

    Parameters
    ----------
    grad_out : float32 (B, W)
    occurrence_order : int64 (n,)
    segment_offsets : int64 (U + 1,)
    bag_offsets, feature_mean, out_cols, per_sample_weights
        As in the forward.
    out : float32 (unique_stop - unique_start, D)
        Written.
    admitted : uint8 or bool (U,), optional
        A unique with 0 gets the gradient 0.
    unique_start, unique_stop : int
        Their positions must be those of the bags.
    num_threads : int, optional
    """
    cdef _Segments call = _Segments.check(occurrence_order, segment_offsets, admitted, unique_start, unique_stop,
                                          _columns(out, "out"))
    call.target(out)
    call.pooled(grad_out, bag_offsets, feature_mean, out_cols, per_sample_weights, num_threads)
    call.run(num_threads)


def segment_grad_sequence(grad_out, occurrence_order, segment_offsets, out, *, int64_t first_position=0, admitted=None,
                          int64_t unique_start=0, unique_stop=None, num_threads=None):
    """Gradient of each unique of `sequence_forward`.

    Parameters are those of `segment_grad_pooled`, with

    Parameters
    ----------
    grad_out : float32 (m, D)
        Row i is the gradient of position first_position + i.
    """
    cdef _Segments call = _Segments.check(occurrence_order, segment_offsets, admitted, unique_start, unique_stop,
                                          _columns(out, "out"))
    call.target(out)
    call.sequence(grad_out, first_position)
    call.run(num_threads)


def update(UpdateRule rule, weights, states, slots, grad, *, admitted=None, num_threads=None):
    """Apply an optimizer to the rows at `slots`, in place.

    Parameters
    ----------
    rule : UpdateRule
    weights : (R, D)
    states : sequence of float32 (R, D), or (R, 1) for ``"rowwise_adagrad"``
    slots : int64 (k,)
        Distinct where admitted: two updates of one row would race.
    grad : float32 (k, D)
    admitted : uint8 or bool (k,), optional
        Rows with 0 are left alone.
    num_threads : int, optional
    """
    cdef _Segments call = _Segments.__new__(_Segments)
    cdef int threads
    cdef Array gradients
    cdef _Weights rows = _updated(weights)
    call.seg.dim = rows.dim
    _floats2(grad, "grad", -1, call.seg.dim, False, &gradients)
    call.seg.stop = gradients.rows
    call.apply(rule, rows, states, slots, call.seg.stop)
    call.allow(admitted, call.seg.stop)
    if call.seg.stop == 0:
        return
    call.seg.rows = <const float *>gradients.at
    threads = _threads(num_threads, 2 * call.seg.stop * call.seg.dim)
    call.seg.task_count = _task_count(threads, call.seg.stop)
    with nogil:
        _run(ec_update_pick(USE_AVX2), &call.seg, call.seg.task_count, threads)


def segment_update_pooled(UpdateRule rule, weights, states, slots, grad_out, occurrence_order, segment_offsets,
                          bag_offsets, feature_mean, out_cols, *, per_sample_weights=None, admitted=None,
                          int64_t unique_start=0, unique_stop=None, num_threads=None):
    """`segment_grad_pooled` and `update` in one pass over the rows, bit for bit the same.

    Parameters are those of the two, with

    Parameters
    ----------
    slots : int64 (U,)
    """
    cdef _Weights rows = _updated(weights)
    cdef _Segments call = _Segments.check(occurrence_order, segment_offsets, admitted, unique_start, unique_stop,
                                          rows.dim)
    call.apply(rule, rows, states, slots, call.unique_count)
    call.pooled(grad_out, bag_offsets, feature_mean, out_cols, per_sample_weights, num_threads)
    call.run(num_threads)


def segment_update_sequence(UpdateRule rule, weights, states, slots, grad_out, occurrence_order, segment_offsets, *,
                            int64_t first_position=0, admitted=None, int64_t unique_start=0, unique_stop=None,
                            num_threads=None):
    """`segment_grad_sequence` and `update` in one pass over the rows, bit for bit the same."""
    cdef _Weights rows = _updated(weights)
    cdef _Segments call = _Segments.check(occurrence_order, segment_offsets, admitted, unique_start, unique_stop,
                                          rows.dim)
    call.apply(rule, rows, states, slots, call.unique_count)
    call.sequence(grad_out, first_position)
    call.run(num_threads)
