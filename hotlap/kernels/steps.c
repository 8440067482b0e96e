/* One pass over a parameter each: the rows of a table (hotlap/optim/row_rms.py), and Muon's update of a matrix
   (hotlap/optim/muon.py). */

#include "common.h"

typedef uint32_t __attribute__((may_alias)) bits_t;

/* The rows of `table` that have a gradient, against it over the root of its mean square; `squares` keeps that, and
   inverse_correction is what it is multiplied by while it is young. All (rows, width). */
void step_rows(float *table, const float *grad, float *squares, int rows, int width, float lr, float beta2,
               float inverse_correction, float epsilon, int num_threads) {
#pragma omp parallel for schedule(static) num_threads(num_threads)
    for (int row = 0; row < rows; row++) {
        int64_t first = (int64_t)row * width, past = first + width;
        /* Most rows end here. A zero has no bits but its sign, which takes fewer operations to see than to compare. */
        uint32_t bits = 0;
        for (int64_t at = first; at < past; at++) bits |= ((const bits_t *)grad)[at];
        if (!(bits << 1)) continue;
        for (int64_t at = first; at < past; at++) {
            squares[at] += (1 - beta2) * (grad[at] * grad[at] - squares[at]);
            table[at] -= lr * grad[at] / (sqrtf(squares[at] * inverse_correction) + epsilon);
        }
    }
}

enum { ENTRIES_FOR_THREADS = 65536 }; /* fewer are done before other threads have begun */

/* weight -= decay · weight + rate · update; with `cautious`, only those decay that the update moves towards zero. */
void step_matrix(float *weight, const float *update, int64_t count, float rate, float decay, int cautious,
                 int num_threads) {
    float least = cautious ? 0 : -INFINITY;
#pragma omp parallel for simd schedule(static) num_threads(num_threads) if (parallel : count > ENTRIES_FOR_THREADS)
    for (int64_t at = 0; at < count; at++) {
        float decays = weight[at] * update[at] > least ? decay : 0;
        weight[at] -= decays * weight[at] + rate * update[at];
    }
}
