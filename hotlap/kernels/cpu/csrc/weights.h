/* Products of many chunks of tokens with one weight. A BLAS first packs a product's operands in the order of its inner
   loops; Intel's can do so with a weight once for all chunks. That takes 5 to 8 % off a product with a weight that lies
   transposed, and nothing off one with a weight that does not. */

#ifndef HOTLAP_WEIGHTS_H
#define HOTLAP_WEIGHTS_H

#include "common.h"

enum { ROW_MAJOR = 101, AS_IT_LIES = 111, TRANSPOSED = 112, PACKED = 151, RIGHT_OPERAND = 162 }; /* of CBLAS */

typedef size_t pack_size_t(int operand, int m, int n, int k); /* in bytes */
typedef void pack_t(int layout, int operand, int is, int m, int n, int k, float alpha, const float *from, int stride,
                    float *to);
typedef void packed_product_t(int layout, int left_is, int right_is, int m, int n, int k, const float *left,
                              int left_stride, const float *right, int right_stride, float beta, float *out,
                              int out_stride);
/* Handed in by set_blas; all of them NULL with another BLAS. */
extern pack_size_t *pack_size;
extern pack_t *pack;
extern packed_product_t *packed_product;

/* A weight (n, k), and what to multiply it by. */
typedef struct {
    const float *lies;
    int n, k;
    float factor;
    int chunk_tokens; /* of the products that it is packed for */
    float *packed;
} weight_t;

/* Floats for a packed weight. */
static inline int64_t packed_floats(int n, int k, int chunk_tokens) {
    return pack_size ? whole_lines((pack_size(RIGHT_OPERAND, chunk_tokens, n, k) + 3) / sizeof(float)) : 0;
}

/* A weight to be packed into *room, which is moved past it. */
static inline weight_t weight_in(float **room, const float *lies, int n, int k, float factor, int chunk_tokens) {
    weight_t weight = {lies, n, k, factor, chunk_tokens, *room};
    *room += packed_floats(n, k, chunk_tokens);
    return weight;
}

/* Within a parallel region, by all of its threads: there BLAS packs for products on one thread. */
static inline void pack_weights(const weight_t *weights, int count) {
    if (!pack) return;
#pragma omp for schedule(static, 1)
    for (int i = 0; i < count; i++) {
        const weight_t *w = weights + i;
        pack(ROW_MAJOR, RIGHT_OPERAND, TRANSPOSED, w->chunk_tokens, w->n, w->k, w->factor, w->lies, w->k, w->packed);
    }
}

/* out (tokens, n) = left (tokens, k) · factor · weightᵀ + beta · out. */
static inline void times_weight(const weight_t *w, int tokens, const float *left, float beta, float *out) {
    if (packed_product && tokens == w->chunk_tokens)
        packed_product(ROW_MAJOR, AS_IT_LIES, PACKED, tokens, w->n, w->k, left, w->k, w->packed, w->n, beta, out, w->n);
    else product('N', 'T', tokens, w->n, w->k, w->factor, left, w->k, w->lies, w->k, beta, out, w->n);
}

#endif
