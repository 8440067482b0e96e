/* One pass over activations each: norm with rotation (hotlap/model/layers.py, rotary.py) and a mix of two (layers.py). */

#include "common.h"
#include "norms.h"

/* RMS norm of each head, then its rotation. x and out (T, H, D), inverse_rms (T, H); cos and sin (T, D / 2), or NULL
   for no rotation. */
void norm_forward(const float *x, const float *cos, const float *sin, int T, int H, int D, float epsilon, float *out,
                  float *inverse_rms, int num_threads) {
#pragma omp parallel for schedule(static) num_threads(num_threads)
    for (int64_t row = 0; row < (int64_t)T * H; row++) {
        int64_t angles = row / H * (D / 2);
        inverse_rms[row] = norm_row(x + row * D, cos ? cos + angles : NULL, cos ? sin + angles : NULL, D, epsilon,
                                    out + row * D);
    }
}

/* From grad, that for out, grad_x. */
void norm_backward(const float *grad, const float *out, const float *inverse_rms, const float *cos, const float *sin,
                   int T, int H, int D, float *grad_x, int num_threads) {
#pragma omp parallel for schedule(static) num_threads(num_threads)
    for (int64_t row = 0; row < (int64_t)T * H; row++) {
        int64_t angles = row / H * (D / 2);
        norm_row_backward(grad + row * D, out + row * D, inverse_rms[row], cos ? cos + angles : NULL,
                          cos ? sin + angles : NULL, D, grad_x + row * D);
    }
}

/* out = weights[0] · a + weights[1] · b, all of `count` numbers. */
void mix_forward(const float *weights, const float *a, const float *b, int64_t count, float *out, int num_threads) {
    float of_a = weights[0], of_b = weights[1];
#pragma omp parallel for simd schedule(static) num_threads(num_threads)
    for (int64_t at = 0; at < count; at++) out[at] = of_a * a[at] + of_b * b[at];
}

/* From grad, that for out, those for a, b and, as one pair for each row of `row` numbers, for the weights. */
void mix_backward(const float *grad, const float *weights, const float *a, const float *b, int rows, int row,
                  float *grad_a, float *grad_b, float *grad_weights, int num_threads) {
    float of_a = weights[0], of_b = weights[1];
#pragma omp parallel for schedule(static) num_threads(num_threads)
    for (int i = 0; i < rows; i++) {
        int64_t first = (int64_t)i * row;
        float along_a = 0, along_b = 0;
        for (int64_t at = first; at < first + row; at++) {
            along_a += grad[at] * a[at];
            along_b += grad[at] * b[at];
            grad_a[at] = of_a * grad[at];
            grad_b[at] = of_b * grad[at];
        }
        grad_weights[2 * i] = along_a;
        grad_weights[2 * i + 1] = along_b;
    }
}
