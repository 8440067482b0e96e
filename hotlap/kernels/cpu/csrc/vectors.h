/* SIMD vectors of the processor's own width: types, nontemporal stores, exp2, reciprocal, and the
   transpose of a small matrix. */

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

/* LANES floats, and LANES ints, which are also the result of a comparison. Unaligned. */
typedef float vector_t __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t lanes_t __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

/* Store past the caches, for what is not read again soon. `to` is aligned to the vector's size;
   fence_nontemporal() comes before another thread reads it. */
static inline void store_nontemporal(float *to, vector_t x) {
#if defined(__AVX512F__)
    _mm512_stream_ps(to, (__m512)x);
#elif defined(__AVX__)
    _mm256_stream_ps(to, (__m256)x);
#else
    *(vector_t *)to = x;
#endif
}

static inline void fence_nontemporal(void) {
#if defined(__AVX__)
    _mm_sfence();
#endif
}

/* Round to the nearest integer. */
static inline vector_t round_vector(vector_t x) {
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

/* mask ? x : y per lane, where mask is a comparison's result. */
static inline vector_t select_vector(lanes_t mask, vector_t x, vector_t y) {
    return (vector_t)((mask & (lanes_t)x) | (~mask & (lanes_t)y));
}

/* max(x, y) per lane; y where either is NaN. */
static inline vector_t max_vector(vector_t x, vector_t y) {
#if defined(__AVX512F__)
    return (vector_t)_mm512_max_ps((__m512)x, (__m512)y);
#elif defined(__AVX__)
    return (vector_t)_mm256_max_ps((__m256)x, (__m256)y);
#else
    return select_vector(x > y, x, y);
#endif
}

/* 2^x to a relative error of 2e-7, for x <= 126; for x < -126 at most 2^-126. NaN stays NaN. The
   polynomial is the minimax one of its degree on [-0.5, 0.5]. */
static inline vector_t exp2_vector(vector_t x) {
#if !defined(__AVX512F__)
    x = max_vector((vector_t){0} - 126.0f, x);
#endif
    vector_t whole = round_vector(x), rest = x - whole;
    vector_t power = rest * 1.32647272e-3f + 9.67151264e-3f;
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

/* 1 / x, for 1 <= x <= 2^126. On AVX-512 an estimate and one Newton step, several times as fast as
   a division. */
static inline vector_t reciprocal_vector(vector_t x) {
#if defined(__AVX512F__)
    __m512 estimate = _mm512_rcp14_ps((__m512)x);
    __m512 error = _mm512_fnmadd_ps((__m512)x, estimate, _mm512_set1_ps(1));
    return (vector_t)_mm512_fmadd_ps(estimate, error, estimate);
#else
    return 1 / x;
#endif
}

/* to (cols, rows) = factor * from (rows, cols), transposed, with leading dimensions ld_*. cols is a
   multiple of LANES; `to` is written up to the next multiple of LANES of rows, with zeros there. */
static inline void transpose_scaled(const float *from, int64_t ld_from, int rows, int cols,
                                    float factor, float *to, int64_t ld_to) {
    for (int i = 0; i < rows; i += LANES)
        for (int j = 0; j < cols; j += LANES) {
            vector_t x[LANES];
#pragma GCC unroll 16
            for (int r = 0; r < LANES; r++) {
                x[r] = (vector_t){0};
                if (i + r < rows) x[r] = factor * *(const vector_t *)(from + (i + r) * ld_from + j);
            }
        /* Swap the off-diagonal squares of size 1 within those of size 2, then 2 within 4 ... */
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
            for (int r = 0; r < LANES; r++) *(vector_t *)(to + (j + r) * ld_to + i) = x[r];
        }
}

#endif
