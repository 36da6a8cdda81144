"""C contract of the row kernels: the contexts of ``ec_kernels.h`` and the update rule."""

from libc.stdint cimport int64_t, uint8_t

from embcache._core.threads cimport ec_task_fn


cdef extern from "ec_kernels.h" nogil:
    enum:
        EC_SGD
        EC_ADAGRAD
        EC_ROWWISE_ADAGRAD
        EC_ADAM
        EC_MAX_DIM
        EC_HOT_BLOCKS_A_TASK
        EC_FLOAT32
        EC_FLOAT16
        EC_BFLOAT16

    int64_t ec_type_bytes(int type)

    ctypedef struct ec_rule:
        int kind
        int decays                  # weight_decay != 0
        float lr                    # Adam: the step size with both bias corrections
        float weight_decay
        float eps
        float one_minus_beta1
        float one_minus_beta2

    ctypedef struct ec_move:
        char *weights
        const int64_t *slots
        const int64_t *inverse      # NULL: item i uses slots[i]
        char *rows
        int64_t count
        int64_t dim
        int64_t weight_bytes
        int64_t row_bytes
        int type                    # of `weights`
        int row_type                # of `rows`: the same, or EC_FLOAT32
        int64_t task_count

    ctypedef struct ec_bags:
        const void *weights
        int type
        const int64_t *slots
        const int64_t *inverse
        const int64_t *bag_offsets
        const int64_t *out_cols
        const uint8_t *feature_mean
        const float *coefs
        const float *grad
        float *out
        int64_t *sources
        float *factors
        int64_t batch_size
        int64_t bag_count
        int64_t width
        int64_t dim
        int64_t task_count

    ctypedef struct ec_segments:
        const float *grad
        const int64_t *sources
        const float *factors
        const int64_t *order
        const int64_t *offsets
        const int64_t *slots
        const uint8_t *admitted
        float *out                  # NULL: apply `rule` at once
        const float *rows
        char *weights
        int type
        int64_t weight_bytes
        float *state0
        float *state1
        int64_t width0
        int64_t width1
        const ec_rule *rule
        int64_t first_position
        int64_t start
        int64_t stop
        int64_t dim
        int64_t task_count
        int64_t hot_count
        const int64_t *hot_uniques
        const int64_t *hot_blocks
        float *partials

    int ec_cpu_has_avx2()
    int64_t ec_find_outside(const int64_t *values, int64_t count, int64_t low, int64_t high)
    int64_t ec_find_unordered(const int64_t *offsets, int64_t count, int64_t limit)
    int64_t ec_hot_uniques(const ec_segments *seg, int64_t *uniques, int64_t *blocks)

    ec_task_fn ec_gather_pick(int avx2)
    ec_task_fn ec_scatter_pick(int avx2)
    ec_task_fn ec_add_pick(int avx2)
    ec_task_fn ec_pool_pick(int avx2)
    ec_task_fn ec_coef_grad_pick(int avx2)
    ec_task_fn ec_sources_pick(int avx2)
    ec_task_fn ec_hot_pick(int avx2)
    ec_task_fn ec_segment_pick(int avx2)
    ec_task_fn ec_update_pick(int avx2)


cdef class UpdateRule:
    cdef ec_rule rule
    cdef readonly str kind          # "sgd", "adagrad", "rowwise_adagrad" or "adam"
    cdef readonly int state_count   # state arrays that the rule reads and writes
