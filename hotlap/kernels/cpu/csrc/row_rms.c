/* RMSprop on the rows of a table. The same in PyTorch: hotlap/optim/row_rms.py. */

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
