/* Of one row: RMS norm, with and without a rotation, its gradient, and that of a weighted sum. Rows do not overlap, or are the same one, which the
   compiler could not find out by itself: hence `omp simd`. */

#ifndef HOTLAP_NORMS_H
#define HOTLAP_NORMS_H

#include "common.h"

/* to = from / RMS, all D numbers, turned by the D / 2 angles unless they are NULL. Returns 1 / RMS. */
static inline float norm_row(const float *from, const float *cos, const float *sin, int D, float epsilon, float *to) {
    int half = D / 2;
    float sum = 0;
    for (int d = 0; d < D; d++) sum += from[d] * from[d];
    float scale = 1 / sqrtf(sum / D + epsilon);
    if (!cos) {
#pragma omp simd
        for (int d = 0; d < D; d++) to[d] = from[d] * scale;
        return scale;
    }
#pragma omp simd
    for (int d = 0; d < half; d++) {
        float first = from[d] * scale, second = from[d + half] * scale;
        to[d] = first * cos[d] + second * sin[d];
        to[d + half] = second * cos[d] - first * sin[d];
    }
    return scale;
}

/* From grad, that for the row `normed`, which norm_row made, the gradient for what it was made from. A rotation changes
   no dot product, so what is along `normed` goes before turning back. */
static inline void norm_row_backward(const float *grad, const float *normed, float inverse_rms, const float *cos,
                                     const float *sin, int D, float *grad_x) {
    int half = D / 2;
    float along = 0;
    for (int d = 0; d < D; d++) along += grad[d] * normed[d];
    along /= D;
    if (!cos) {
#pragma omp simd
        for (int d = 0; d < D; d++) grad_x[d] = (grad[d] - normed[d] * along) * inverse_rms;
        return;
    }
#pragma omp simd
    for (int d = 0; d < half; d++) {
        float first = (grad[d] - normed[d] * along) * inverse_rms;
        float second = (grad[d + half] - normed[d + half] * along) * inverse_rms;
        grad_x[d] = first * cos[d] - second * sin[d];
        grad_x[d + half] = second * cos[d] + first * sin[d];
    }
}

/* From grad, that for a sum, that for what it has `weight` times of, a row x; returns the weight's own. */
static inline float weigh_row(const float *grad, const float *x, float weight, int C, float *grad_x) {
    float along = 0;
#pragma omp simd reduction(+ : along)
    for (int c = 0; c < C; c++) {
        along += grad[c] * x[c];
        grad_x[c] = weight * grad[c];
    }
    return along;
}

/* The norms of rows x (tokens, C) once more, from what norm_row returned. */
static inline void scale_rows(const float *x, const float *inverse_rms, int tokens, int C, float *normed) {
    for (int i = 0; i < tokens; i++)
        for (int c = 0; c < C; c++) normed[(int64_t)i * C + c] = x[(int64_t)i * C + c] * inverse_rms[i];
}

#endif
