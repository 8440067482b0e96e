/* One pass over parameters each: over the rows of a table (hotlap/optim/row_rms.py), over all that AdamW takes
   (hotlap/optim/adam.py), and over matrices for Muon's momentum and its step (hotlap/optim/matrix_steps.py). */

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

enum { BLOCK = 4096 };            /* entries that a thread takes at once */
enum { ALL_FOR_THREADS = 65536 }; /* fewer are done before other threads have begun */

typedef struct {
    float *weight;
    const float *gradient;
    float *mean, *square;
    float rate, inverse_root_correction, keep, beta1, beta2, epsilon;
    int64_t entries;
} adam_step_t;

void step_adam(const adam_step_t *steps, int count, int num_threads) {
#pragma omp parallel num_threads(num_threads)
    for (int i = 0; i < count; i++) {
        adam_step_t step = steps[i];
#pragma omp for schedule(static) nowait
        for (int64_t start = 0; start < step.entries; start += BLOCK) {
            int64_t past = start + BLOCK < step.entries ? start + BLOCK : step.entries;
#pragma omp simd
            for (int64_t at = start; at < past; at++) {
                float gradient = step.gradient[at];
                float mean = step.mean[at] + (1 - step.beta1) * (gradient - step.mean[at]);
                float square = step.beta2 * step.square[at] + (1 - step.beta2) * gradient * gradient;
                float root = sqrtf(square) * step.inverse_root_correction + step.epsilon;
                step.mean[at] = mean;
                step.square[at] = square;
                step.weight[at] = step.keep * step.weight[at] - step.rate * mean / root;
            }
        }
    }
}

/* For each of `count` matrices: momentum = keep · momentum + take · gradient, and
   update = of_gradient · gradient + of_momentum · momentum. momenta and updates (count, entries). */
void step_momenta(const float *const *gradients, float *momenta, float *updates, int count, int64_t entries, float keep,
                  float take, float of_gradient, float of_momentum, int num_threads) {
#pragma omp parallel for collapse(2) schedule(static) num_threads(num_threads) if (count * entries > ALL_FOR_THREADS)
    for (int i = 0; i < count; i++)
        for (int64_t start = 0; start < entries; start += BLOCK) {
            const float *gradient = gradients[i];
            float *momentum = momenta + i * entries, *update = updates + i * entries;
            int64_t past = start + BLOCK < entries ? start + BLOCK : entries;
#pragma omp simd
            for (int64_t at = start; at < past; at++) {
                momentum[at] = keep * momentum[at] + take * gradient[at];
                update[at] = of_gradient * gradient[at] + of_momentum * momentum[at];
            }
        }
}

/* For each of `count` matrices: weight -= decay · weight + rate · update; with `cautious`, only those entries decay that
   the update moves towards zero. updates (count, entries), rates and decays (count,). */
void step_matrices(float *const *weights, const float *updates, const float *rates, const float *decays, int count,
                   int64_t entries, int cautious, int num_threads) {
    float least_along = cautious ? 0 : -INFINITY;
#pragma omp parallel for collapse(2) schedule(static) num_threads(num_threads) if (count * entries > ALL_FOR_THREADS)
    for (int i = 0; i < count; i++)
        for (int64_t start = 0; start < entries; start += BLOCK) {
            const float *update = updates + i * entries;
            float *weight = weights[i], rate = rates[i], decay = decays[i];
            int64_t past = start + BLOCK < entries ? start + BLOCK : entries;
#pragma omp simd
            for (int64_t at = start; at < past; at++) {
                float decays_by = weight[at] * update[at] > least_along ? decay : 0;
                weight[at] -= decays_by * weight[at] + rate * update[at];
            }
        }
}
