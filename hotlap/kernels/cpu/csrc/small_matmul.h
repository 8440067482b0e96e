/* Matmuls of matrices that are in a core's cache, of some dozens of rows and columns: accumulators
   stay in registers over all of k, and nothing is packed or checked, on which a BLAS would spend
   much of its time at such sizes. */

#ifndef HOTLAP_SMALL_MATMUL_H
#define HOTLAP_SMALL_MATMUL_H

#include "vectors.h"

/* Accumulators: as many vectors as leave registers for the operands, as a block of some rows by at
   most MAX_VECTORS vectors. */
#if defined(__AVX512F__)
enum { ACCUMULATORS = 24, MAX_VECTORS = 4 };
#elif defined(__AVX__)
enum { ACCUMULATORS = 12, MAX_VECTORS = 2 };
#else
enum { ACCUMULATORS = 24, MAX_VECTORS = 4 };
#endif
enum { MAX_ROWS = 12 };

/* c (m, n) = alpha * a (m, k) * b (k, n) + beta * base (m, n). n is a multiple of LANES. */
typedef struct {
    int m, n, k;
    const float *a;
    int64_t a_row, a_column; /* element (i, j) of a is a[i * a_row + j * a_column] */
    const float *b;
    int64_t ldb;
    float *c;
    int64_t ldc;       /* of base too */
    const float *base; /* NULL for none; may be c itself */
    float alpha, beta;
} small_matmul_t;

/* The block of c of (rows, vectors * LANES) at (i, j). Its size is a constant in each call. */
static inline __attribute__((always_inline)) void matmul_block(const small_matmul_t *p, int i,
                                                               int j, int rows, int vectors) {
    vector_t sums[MAX_ROWS][MAX_VECTORS];
    const float *a = p->a + i * p->a_row, *b = p->b + j;
    int64_t a_row = p->a_row, a_column = p->a_column, ldb = p->ldb, ldc = p->ldc;
    float *c = p->c + i * ldc + j;
    const float *base = p->base ? p->base + i * ldc + j : NULL;
    float alpha = p->alpha, beta = p->beta;
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 12
        for (int v = 0; v < vectors; v++) sums[r][v] = (vector_t){0};
    for (int k = p->k; k; k--) {
        vector_t row_of_b[MAX_VECTORS];
#pragma GCC unroll 12
        for (int v = 0; v < vectors; v++) row_of_b[v] = *(const vector_t *)(b + v * LANES);
#pragma GCC unroll 12
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 12
            for (int v = 0; v < vectors; v++) sums[r][v] += a[r * a_row] * row_of_b[v];
        a += a_column;
        b += ldb;
    }
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 12
        for (int v = 0; v < vectors; v++) {
            int64_t at = r * ldc + v * LANES;
            sums[r][v] *= alpha;
            if (base) sums[r][v] += beta * *(const vector_t *)(base + at);
            *(vector_t *)(c + at) = sums[r][v];
        }
}

/* All rows of `vectors` vectors of columns from j on. */
static inline __attribute__((always_inline)) void matmul_columns(const small_matmul_t *p, int j,
                                                                 int vectors) {
    const int rows = ACCUMULATORS / vectors < MAX_ROWS ? ACCUMULATORS / vectors : MAX_ROWS;
    int i = 0;
    for (; i + rows <= p->m; i += rows) matmul_block(p, i, j, rows, vectors);
    for (; i + 4 <= p->m; i += 4) matmul_block(p, i, j, 4, vectors);
    for (; i < p->m; i++) matmul_block(p, i, j, 1, vectors);
}

static __attribute__((noinline)) void small_matmul(small_matmul_t p) {
    int j = 0;
    for (; j + MAX_VECTORS * LANES <= p.n; j += MAX_VECTORS * LANES)
        matmul_columns(&p, j, MAX_VECTORS);
    int rest = (p.n - j) / LANES;
    if (MAX_VECTORS > 3 && rest == 3)
        matmul_columns(&p, j, 3);
    else if (MAX_VECTORS > 2 && rest == 2)
        matmul_columns(&p, j, 2);
    else if (rest == 1)
        matmul_columns(&p, j, 1);
}

#endif
