/* Scores of the show/click policy: alpha * shows + beta * clicks, decayed by a factor at each sweep.
 *
 * A score lies where the count policy has its counters: the count column holds 1 + the bits of the float64 score (0: the
 * key was never met; scores are never negative, so the order of the bits is the order of the scores), the timestamp column
 * the number of sweeps there had been when it was written. Decay is applied when a score is read: it is multiplied by
 * decay ** (sweeps since), the power by repeated squaring. So a sweep touches no row to decay it, and a score is a function
 * of the batches alone. Adding does the sums of the batch first, then one addition: three roundings and no order.
 */
#ifndef EC_SCORE_H
#define EC_SCORE_H

#include <float.h>
#include <stdint.h>
#include <string.h>

static inline double ec_score_of(int64_t count) {
    double score = 0.0;
    const int64_t bits = count - 1;
    if (count > 0) memcpy(&score, &bits, sizeof score);
    return score;
}

static inline int64_t ec_score_count(double score) {
    int64_t bits;
    if (!(score <= DBL_MAX)) score = DBL_MAX;
    memcpy(&bits, &score, sizeof bits);
    return bits + 1;
}

static inline double ec_score_decayed(double score, double decay, int64_t sweeps) {
    double power = 1.0;
    for (; sweeps > 0; sweeps >>= 1, decay *= decay)
        if (sweeps & 1) power *= decay;
    return score * power;
}

#endif
