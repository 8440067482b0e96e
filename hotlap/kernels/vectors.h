/* Vectors of the processor's own length: types, writing past the caches, and turning a matrix. */

#ifndef HOTLAP_VECTORS_H
#define HOTLAP_VECTORS_H

#include <stdint.h>
#if defined(__AVX__)
#include <immintrin.h>
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
