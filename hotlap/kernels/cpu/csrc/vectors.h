/* Vectors of the processor's own length: types, writing past the caches, powers and inverses, and turning a matrix. */

#ifndef HOTLAP_VECTORS_H
#define HOTLAP_VECTORS_H

#include <math.h>
#include <stdint.h>
#if defined(__AVX__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#if defined(__AVX512F__)
enum { LANES = 16 };
#elif defined(__AVX__)
enum { LANES = 8 };
#else
enum { LANES = 4 };
#endif

/* LANES numbers, or what a comparison of them gives; at any address. */
typedef float vector_t __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t lanes_t __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

/* To an address that is a multiple of a vector's size: what nobody reads for a while need not be fetched into a cache
   first, nor stay in it. end_streams() before another thread reads it. */
static inline void stream(float *to, vector_t x) {
#if defined(__AVX512F__)
    _mm512_stream_ps(to, (__m512)x);
#elif defined(__AVX__)
    _mm256_stream_ps(to, (__m256)x);
#else
    *(vector_t *)to = x;
#endif
}

static inline void end_streams(void) {
#if defined(__AVX__)
    _mm_sfence();
#endif
}

/* The whole numbers nearest to x. */
static inline vector_t nearest(vector_t x) {
#if defined(__AVX512F__)
    return (vector_t)_mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif defined(__AVX__)
    return (vector_t)_mm256_round_ps((__m256)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif defined(__aarch64__)
    return (vector_t)vrndnq_f32((float32x4_t)x);
#else
    for (int lane = 0; lane < LANES; lane++) x[lane] = rintf(x[lane]);
    return x;
#endif
}

/* Where `chosen`, a comparison's result, holds: x, elsewhere y. */
static inline vector_t choose(lanes_t chosen, vector_t x, vector_t y) {
    return (vector_t)((chosen & (lanes_t)x) | (~chosen & (lanes_t)y));
}

/* The larger one; where there is a NaN, y. */
static inline vector_t larger(vector_t x, vector_t y) {
#if defined(__AVX512F__)
    return (vector_t)_mm512_max_ps((__m512)x, (__m512)y);
#elif defined(__AVX__)
    return (vector_t)_mm256_max_ps((__m256)x, (__m256)y);
#else
    return choose(x > y, x, y);
#endif
}

/* 2^x within 2e-7 of it, for x ≤ 126; below -126 no more than 2^-126. NaN stays NaN. The polynomial is the best of its
   degree. */
static inline vector_t powers_of_2(vector_t x) {
#if !defined(__AVX512F__)
    x = larger((vector_t){0} - 126.0f, x);
#endif
    vector_t whole = nearest(x), rest = x - whole, power = rest * 1.32647272e-3f + 9.67151264e-3f;
    power = power * rest + 5.55073374e-2f;
    power = power * rest + 2.40222421e-1f;
    power = power * rest + 6.93146978e-1f;
    power = power * rest + 1.0f;
#if defined(__AVX512F__)
    return (vector_t)_mm512_scalef_ps((__m512)power, (__m512)whole);
#else
    return power * (vector_t)((__builtin_convertvector(whole, lanes_t) + 127) << 23);
#endif
}

/* 1 / x, for 1 ≤ x ≤ 2^126. A division takes several times as long as an estimate and what makes it exact. */
static inline vector_t inverses(vector_t x) {
#if defined(__AVX512F__)
    __m512 estimate = _mm512_rcp14_ps((__m512)x);
    __m512 missing = _mm512_fnmadd_ps((__m512)x, estimate, _mm512_set1_ps(1));
    return (vector_t)_mm512_fmadd_ps(estimate, missing, estimate);
#else
    return 1 / x;
#endif
}

/* to (cols, stride) = factor · from (rows, cols), transposed; cols must be a multiple of LANES. Up to the next such
   multiple of rows, zeros stand in for those that are missing. */
static inline void transpose_in_cache(const float *from, int64_t from_row, int rows, int cols, float factor, float *to,
                                      int stride) {
    for (int i = 0; i < rows; i += LANES)
        for (int j = 0; j < cols; j += LANES) {
            vector_t x[LANES];
#pragma GCC unroll 16
            for (int r = 0; r < LANES; r++) {
                x[r] = (vector_t){0};
                if (i + r < rows) x[r] = factor * *(const vector_t *)(from + (i + r) * from_row + j);
            }
            /* Squares of `half` change places across the diagonal of those twice as large. */
#pragma GCC unroll 4
            for (int half = 1; half < LANES; half *= 2) {
                lanes_t upper, lower;
#pragma GCC unroll 16
                for (int lane = 0; lane < LANES; lane++) {
                    upper[lane] = lane & half ? lane - half + LANES : lane;
                    lower[lane] = lane & half ? lane + LANES : lane + half;
                }
#pragma GCC unroll 16
                for (int r = 0; r < LANES; r++) {
                    if (r & half) continue;
                    vector_t above = x[r], below = x[r + half];
                    x[r] = __builtin_shuffle(above, below, upper);
                    x[r + half] = __builtin_shuffle(above, below, lower);
                }
            }
#pragma GCC unroll 16
            for (int r = 0; r < LANES; r++) *(vector_t *)(to + (int64_t)(j + r) * stride + i) = x[r];
        }
}

#endif
