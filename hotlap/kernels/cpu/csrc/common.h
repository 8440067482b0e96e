/* What the kernels share: products by torch's own BLAS, and sums over threads.

   Kernels are for float32 on a CPU. A thread takes some tokens at a time through all of a kernel's products, so that what
   it computes stays in its core's cache; a library's product over all tokens would share it out anew each time. Forward,
   whichever thread is free takes the next ones: another process may hold one up, and the results are the same. Backward,
   each has its own, since what it adds up to a weight's gradient depends on them in the last bits.
   Matrices are row by row. The modules named at the top of each file say in PyTorch what is computed there.

   Letters: T tokens, H query heads, G key/value heads, D head dim, C width, F hidden features, V vocabulary. */

#ifndef HOTLAP_COMMON_H
#define HOTLAP_COMMON_H

#include <math.h>
#include <omp.h>
#include <stdint.h>
#include <string.h>

static const float LOG2_E = 1.4426950408889634f;

typedef void sgemm_t(const char *, const char *, const int *, const int *, const int *, const float *,
                     const float *, const int *, const float *, const int *, const float *, float *,
                     const int *);
extern sgemm_t *sgemm; /* handed in by set_blas */

/* out (m, n) = alpha · left (m, k) · right (k, n) + beta · out. 'T': that operand lies transposed. BLAS counts by
   columns, where each of these matrices is its transpose: so the operands change places. */
static inline void product(char left_is, char right_is, int m, int n, int k, float alpha, const float *left,
                    int left_stride, const float *right, int right_stride, float beta, float *out,
                    int out_stride) {
    sgemm(&right_is, &left_is, &n, &m, &k, &alpha, right, &right_stride, left, &left_stride, &beta, out,
          &out_stride);
}

static inline int least(int a, int b) { return a < b ? a : b; }

/* As many floats or a few more, in whole cache lines: what lies there for one thread then begins at one like the others',
   on which the last bits of a BLAS's product may depend. */
static inline int64_t whole_lines(int64_t floats) { return (floats + 15) / 16 * 16; }

/* Within a parallel region, by all of its threads: sum (count) += each of `others` (num_others, count). */
static inline void add_up(float *sum, const float *others, int num_others, int64_t count) {
#pragma omp for schedule(static)
    for (int64_t at = 0; at < count; at++)
        for (int other = 0; other < num_others; other++) sum[at] += others[other * count + at];
}

#endif
