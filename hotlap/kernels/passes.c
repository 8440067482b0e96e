/* One pass over activations each: norm with rotation (hotlap/model/layers.py, rotary.py), a mix of two (layers.py), and
   an optimizer's pass over a table (hotlap/optim/row_rms.py). */

#include "common.h"

/* RMS norm of each head, then its rotation. x and out (T, H, D), inverse_rms (T, H); cos and sin (T, D / 2), or NULL
   for no rotation. */
void norm_forward(const float *x, const float *cos, const float *sin, int T, int H, int D, float epsilon, float *out,
                  float *inverse_rms, int num_threads) {
    int half = D / 2;
#pragma omp parallel for schedule(static) num_threads(num_threads)
    for (int64_t row = 0; row < (int64_t)T * H; row++) {
        const float *from = x + row * D;
        float *to = out + row * D, sum = 0;
        for (int d = 0; d < D; d++) sum += from[d] * from[d];
        float scale = inverse_rms[row] = 1 / sqrtf(sum / D + epsilon);
        if (!cos) {
            for (int d = 0; d < D; d++) to[d] = from[d] * scale;
            continue;
        }
        const float *c = cos + row / H * half, *s = sin + row / H * half;
        for (int d = 0; d < half; d++) {
            float first = from[d] * scale, second = from[d + half] * scale;
            to[d] = first * c[d] + second * s[d];
            to[d + half] = second * c[d] - first * s[d];
        }
    }
}

/* From grad, that for out, grad_x. A rotation changes no dot product, so what is along `out` goes before turning back. */
void norm_backward(const float *grad, const float *out, const float *inverse_rms, const float *cos, const float *sin,
                   int T, int H, int D, float *grad_x, int num_threads) {
    int half = D / 2;
#pragma omp parallel for schedule(static) num_threads(num_threads)
    for (int64_t row = 0; row < (int64_t)T * H; row++) {
        const float *g = grad + row * D, *normed = out + row * D;
        float *to = grad_x + row * D, scale = inverse_rms[row], along = 0;
        for (int d = 0; d < D; d++) along += g[d] * normed[d];
        along /= D;
        if (!cos) {
            for (int d = 0; d < D; d++) to[d] = (g[d] - normed[d] * along) * scale;
            continue;
        }
        const float *c = cos + row / H * half, *s = sin + row / H * half;
#pragma omp simd /* so many operands that the compiler would not check by itself whether they overlap */
        for (int d = 0; d < half; d++) {
            float first = (g[d] - normed[d] * along) * scale;
            float second = (g[d + half] - normed[d + half] * along) * scale;
            to[d] = first * c[d] - second * s[d];
            to[d + half] = second * c[d] + first * s[d];
        }
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

/* The rows of `table` that have a gradient, against it over the root of its mean square; `squares` keeps that, and
   inverse_correction is what it is multiplied by while it is young. All (rows, width). */
void step_rows(float *table, const float *grad, float *squares, int rows, int width, float lr, float beta2,
               float inverse_correction, float epsilon, int num_threads) {
#pragma omp parallel for schedule(static) num_threads(num_threads)
    for (int row = 0; row < rows; row++) {
        int64_t first = (int64_t)row * width, past = first + width;
        int touched = 0;
        for (int64_t at = first; at < past; at++) touched |= grad[at] != 0;
        if (!touched) continue;
        for (int64_t at = first; at < past; at++) {
            squares[at] += (1 - beta2) * (grad[at] * grad[at] - squares[at]);
            table[at] -= lr * grad[at] / (sqrtf(squares[at] * inverse_correction) + epsilon);
        }
    }
}
