/* One pass over parameters each: RMSprop on the rows of a table (in PyTorch:
   hotlap/optim/row_rms.py), AdamW (hotlap/optim/adam.py), and Muon's momentum and step
   (hotlap/optim/matrix_steps.py). */

#include "common.h"

typedef uint32_t __attribute__((may_alias)) bits_t;

void hotlap_step_rows(float *table, const float *grad, float *squares, int rows, int cols, float lr,
                      float beta2, float inverse_correction, float epsilon, int num_threads) {
#pragma omp parallel for schedule(static) num_threads(num_threads)
    for (int row = 0; row < rows; row++) {
        int64_t first = (int64_t)row * cols, past = first + cols;
        /* Most rows have no gradient. A zero has no bits set but its sign, and an OR of the bits is
           cheaper than comparisons. */
        uint32_t bits = 0;
        for (int64_t i = first; i < past; i++) bits |= ((const bits_t *)grad)[i];
        if (!(bits << 1)) continue;
        for (int64_t i = first; i < past; i++) {
            squares[i] += (1 - beta2) * (grad[i] * grad[i] - squares[i]);
            table[i] -= lr * grad[i] / (sqrtf(squares[i] * inverse_correction) + epsilon);
        }
    }
}

enum { BLOCK = 4096 };         /* entries per task of a thread */
enum { MIN_PARALLEL = 65536 }; /* fewer entries take less time than waking the threads */

void hotlap_step_adam(const hotlap_adam_step_t *steps, int count, int num_threads) {
#pragma omp parallel num_threads(num_threads)
    for (int tensor = 0; tensor < count; tensor++) {
        hotlap_adam_step_t step = steps[tensor];
#pragma omp for schedule(static) nowait
        for (int64_t start = 0; start < step.entries; start += BLOCK) {
            int64_t past = start + BLOCK < step.entries ? start + BLOCK : step.entries;
#pragma omp simd
            for (int64_t i = start; i < past; i++) {
                float gradient = step.gradient[i];
                float mean = step.mean[i] + (1 - step.beta1) * (gradient - step.mean[i]);
                float square = step.beta2 * step.square[i] + (1 - step.beta2) * gradient * gradient;
                float root = sqrtf(square) * step.inverse_root_correction + step.eps;
                step.mean[i] = mean;
                step.square[i] = square;
                step.weight[i] = step.keep * step.weight[i] - step.rate * mean / root;
            }
        }
    }
}

void hotlap_step_momenta(const float *const *gradients, float *momenta, float *updates, int count,
                         int64_t entries, float keep, float take, float of_gradient,
                         float of_momentum, int num_threads) {
#pragma omp parallel for collapse(2) schedule(static)                                              \
    num_threads(num_threads) if (count * entries > MIN_PARALLEL)
    for (int matrix = 0; matrix < count; matrix++)
        for (int64_t start = 0; start < entries; start += BLOCK) {
            const float *gradient = gradients[matrix];
            float *momentum = momenta + matrix * entries, *update = updates + matrix * entries;
            int64_t past = start + BLOCK < entries ? start + BLOCK : entries;
#pragma omp simd
            for (int64_t i = start; i < past; i++) {
                momentum[i] = keep * momentum[i] + take * gradient[i];
                update[i] = of_gradient * gradient[i] + of_momentum * momentum[i];
            }
        }
}

void hotlap_step_matrices(float *const *weights, const float *updates, const float *rates,
                          const float *decays, int count, int64_t entries, int cautious,
                          int num_threads) {
    /* An update moves a weight toward zero if they have the same sign. */
    float threshold = cautious ? 0 : -INFINITY;
#pragma omp parallel for collapse(2) schedule(static)                                              \
    num_threads(num_threads) if (count * entries > MIN_PARALLEL)
    for (int matrix = 0; matrix < count; matrix++)
        for (int64_t start = 0; start < entries; start += BLOCK) {
            const float *update = updates + matrix * entries;
            float *weight = weights[matrix], rate = rates[matrix], decay = decays[matrix];
            int64_t past = start + BLOCK < entries ? start + BLOCK : entries;
#pragma omp simd
            for (int64_t i = start; i < past; i++) {
                float decay_i = weight[i] * update[i] > threshold ? decay : 0;
                weight[i] -= decay_i * weight[i] + rate * update[i];
            }
        }
}
