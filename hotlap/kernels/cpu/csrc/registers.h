/* Products whose operands lie in a core's cache: sums stay in registers from the first term to the last, and nothing is
   packed or checked. For blocks of some dozens of rows and columns, where a library's product spends its time on both. */

#ifndef HOTLAP_REGISTERS_H
#define HOTLAP_REGISTERS_H

#include "vectors.h"

/* As many vectors of sums as there are registers for, beside those of what is added to them: some rows of a few vectors,
   where a row's factor serves all of its vectors, and a vector's all of its rows. */
#if defined(__AVX512F__)
enum { SUMS = 24, MOST_VECTORS = 4 };
#elif defined(__AVX__)
enum { SUMS = 12, MOST_VECTORS = 2 };
#else
enum { SUMS = 24, MOST_VECTORS = 4 };
#endif
enum { MOST_ROWS = 12 };

/* out (m, n) = alpha · left (m, k) · right (k, n) + beta · base (m, n). Element (i, j) of left is at i · left_row +
   j · left_column; rows of right, and of out and base, lie so far apart. n is a multiple of LANES. */
typedef struct {
    int m, n, k;
    const float *left;
    int64_t left_row, left_column;
    const float *right;
    int64_t right_row;
    float *out;
    int64_t out_row;
    const float *base; /* NULL for none; may be out itself */
    float alpha, beta;
} product_t;

/* The block of `rows` × `vectors` · LANES from (i, j) on. Its size is a constant wherever this is called. */
static inline __attribute__((always_inline)) void block(const product_t *p, int i, int j, int rows, int vectors) {
    vector_t sums[MOST_ROWS][MOST_VECTORS];
    const float *left = p->left + i * p->left_row, *right = p->right + j;
    float *out = p->out + i * p->out_row + j;
    int64_t left_row = p->left_row, left_column = p->left_column, right_row = p->right_row, out_row = p->out_row;
    const float *base = p->base ? p->base + i * out_row + j : NULL;
    float alpha = p->alpha, beta = p->beta;
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 12
        for (int v = 0; v < vectors; v++) sums[r][v] = (vector_t){0};
    for (int k = p->k; k; k--) {
        vector_t factors[MOST_VECTORS];
#pragma GCC unroll 12
        for (int v = 0; v < vectors; v++) factors[v] = *(const vector_t *)(right + v * LANES);
#pragma GCC unroll 12
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 12
            for (int v = 0; v < vectors; v++) sums[r][v] += left[r * left_row] * factors[v];
        left += left_column;
        right += right_row;
    }
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 12
        for (int v = 0; v < vectors; v++) {
            int64_t at = r * out_row + v * LANES;
            sums[r][v] *= alpha;
            if (base) sums[r][v] += beta * *(const vector_t *)(base + at);
            *(vector_t *)(out + at) = sums[r][v];
        }
}

static inline __attribute__((always_inline)) void column_of_blocks(const product_t *p, int j, int vectors) {
    const int rows = SUMS / vectors < MOST_ROWS ? SUMS / vectors : MOST_ROWS;
    int i = 0;
    for (; i + rows <= p->m; i += rows) block(p, i, j, rows, vectors);
    for (; i + 4 <= p->m; i += 4) block(p, i, j, 4, vectors);
    for (; i < p->m; i++) block(p, i, j, 1, vectors);
}

static __attribute__((noinline)) void product_in_cache(product_t p) {
    int j = 0;
    for (; j + MOST_VECTORS * LANES <= p.n; j += MOST_VECTORS * LANES) column_of_blocks(&p, j, MOST_VECTORS);
    int rest = (p.n - j) / LANES;
    if (MOST_VECTORS > 3 && rest == 3) column_of_blocks(&p, j, 3);
    else if (MOST_VECTORS > 2 && rest == 2) column_of_blocks(&p, j, 2);
    else if (rest == 1) column_of_blocks(&p, j, 1);
}

#endif
