/* RMS norm of one row, with and without a rotation, and its backward; backward of a weighted sum.
   Rows do not overlap, or are the same one, which a compiler cannot know: hence `omp simd`. */

#ifndef HOTLAP_NORMS_H
#define HOTLAP_NORMS_H

#include "common.h"

/* out (D,) = x / RMS(x), rotated by D / 2 angles unless cos is NULL. Returns 1 / RMS. */
static inline float rms_norm_row(const float *x, const float *cos, const float *sin, int D,
                                 float epsilon, float *out) {
    int half = D / 2;
    float sum = 0;
    for (int d = 0; d < D; d++) sum += x[d] * x[d];
    float scale = 1 / sqrtf(sum / D + epsilon);
    if (!cos) {
#pragma omp simd
        for (int d = 0; d < D; d++) out[d] = x[d] * scale;
        return scale;
    }
#pragma omp simd
    for (int d = 0; d < half; d++) {
        float first = x[d] * scale, second = x[d + half] * scale;
        out[d] = first * cos[d] + second * sin[d];
        out[d + half] = second * cos[d] - first * sin[d];
    }
    return scale;
}

/* grad_x (D,) from grad_out (D,) and out (D,), which rms_norm_row computed. A rotation preserves
   dot products, so the component along `out` is subtracted before the gradient is rotated back.
   grad_x may be grad_out itself. */
static inline void rms_norm_row_backward(const float *grad_out, const float *out, float inverse_rms,
                                         const float *cos, const float *sin, int D, float *grad_x) {
    int half = D / 2;
    float dot = 0;
    for (int d = 0; d < D; d++) dot += grad_out[d] * out[d];
    dot /= D;
    if (!cos) {
#pragma omp simd
        for (int d = 0; d < D; d++) grad_x[d] = (grad_out[d] - out[d] * dot) * inverse_rms;
        return;
    }
#pragma omp simd
    for (int d = 0; d < half; d++) {
        float first = (grad_out[d] - out[d] * dot) * inverse_rms;
        float second = (grad_out[d + half] - out[d + half] * dot) * inverse_rms;
        grad_x[d] = first * cos[d] - second * sin[d];
        grad_x[d + half] = second * cos[d] + first * sin[d];
    }
}

/* Backward of sum += weight * x for one row: grad_x (C,) = weight * grad_sum. Returns the gradient
   with respect to the weight. */
static inline float scale_row_backward(const float *grad_sum, const float *x, float weight, int C,
                                       float *grad_x) {
    float grad_weight = 0;
#pragma omp simd reduction(+ : grad_weight)
    for (int c = 0; c < C; c++) {
        grad_weight += grad_sum[c] * x[c];
        grad_x[c] = weight * grad_sum[c];
    }
    return grad_weight;
}

/* normed (tokens, C) = x (tokens, C) * inverse_rms (tokens,): the norm recomputed for a backward.
 */
static inline void scale_rows(const float *x, const float *inverse_rms, int tokens, int C,
                              float *normed) {
    for (int64_t i = 0; i < tokens; i++)
        for (int c = 0; c < C; c++) normed[i * C + c] = x[i * C + c] * inverse_rms[i];
}

#endif
