/* Matmuls by torch's own BLAS, row-major, and of many chunks of tokens with one weight.

   A BLAS first packs the operands of a matmul in the order of its inner loops; Intel's can pack a
   weight once for all chunks. That takes 5 to 8 % off a matmul with a transposed weight, and
   nothing off one with a weight that is not transposed. */

#ifndef HOTLAP_BLAS_H
#define HOTLAP_BLAS_H

#include "common.h"

/* Set by hotlap_set_blas; all but sgemm are NULL with a BLAS that does not pack. */
typedef struct {
    hotlap_sgemm_t sgemm;
    hotlap_sgemm_pack_get_size_t pack_get_size;
    hotlap_sgemm_pack_t pack;
    hotlap_sgemm_compute_t compute;
} blas_t;

extern blas_t hotlap_blas; /* hidden */

/* Values of CBLAS's enums. */
enum { ROW_MAJOR = 101, NO_TRANSPOSE = 111, TRANSPOSE = 112, PACKED = 151, B_OPERAND = 162 };

/* c (m, n) = alpha * op(a) (m, k) * op(b) (k, n) + beta * c, row-major with leading dimensions ld*;
   op is the transpose for 'T', nothing for 'N'. sgemm_ is column-major, where each of these
   matrices is its own transpose: hence a and b change places. */
static inline void matmul(char trans_a, char trans_b, int m, int n, int k, float alpha,
                          const float *a, int lda, const float *b, int ldb, float beta, float *c,
                          int ldc) {
    hotlap_blas.sgemm(&trans_b, &trans_a, &n, &m, &k, &alpha, b, &ldb, a, &lda, &beta, c, &ldc);
}

/* A weight (n, k) to multiply chunks of activations with. */
typedef struct {
    const float *values;
    int n, k;
    int chunk_tokens; /* rows of the activations that it is packed for */
    float *packed;
} weight_t;

/* Floats of a packed weight, 0 with a BLAS that does not pack; and what they take of a workspace.
 */
static inline int64_t packed_size(int n, int k, int chunk_tokens) {
    if (!hotlap_blas.pack_get_size) return 0;
    size_t bytes = hotlap_blas.pack_get_size(B_OPERAND, chunk_tokens, n, k);
    return round_to_cache_line((bytes + 3) / sizeof(float));
}

static inline int64_t packed_floats(int n, int k, int chunk_tokens) {
    return part_floats(packed_size(n, k, chunk_tokens));
}

/* A weight that will be packed into the next part of a workspace. */
static inline weight_t place_weight(float **workspace, const float *values, int n, int k,
                                    int chunk_tokens) {
    float *packed = part(workspace, packed_size(n, k, chunk_tokens));
    return (weight_t){values, n, k, chunk_tokens, packed};
}

/* Called by all threads of a parallel region, where the BLAS packs for matmuls on one thread. */
static inline void pack_weights(const weight_t *weights, int count) {
    if (!hotlap_blas.pack) return;
#pragma omp for schedule(static, 1)
    for (int i = 0; i < count; i++) {
        const weight_t *w = weights + i;
        hotlap_blas.pack(ROW_MAJOR, B_OPERAND, TRANSPOSE, w->chunk_tokens, w->n, w->k, 1, w->values,
                         w->k, w->packed);
    }
}

/* out (tokens, n) = x (tokens, k) * weight^T + beta * out. */
static inline void matmul_weight(const weight_t *w, int tokens, const float *x, float beta,
                                 float *out) {
    if (hotlap_blas.compute && tokens == w->chunk_tokens)
        hotlap_blas.compute(ROW_MAJOR, NO_TRANSPOSE, PACKED, tokens, w->n, w->k, x, w->k, w->packed,
                            w->n, beta, out, w->n);
    else
        matmul('N', 'T', tokens, w->n, w->k, 1, x, w->k, w->values, w->k, beta, out, w->n);
}

#endif
