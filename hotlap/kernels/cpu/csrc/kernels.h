/* Every struct and function of the CPU kernels that Python calls.

   library.py hands this file, without its preprocessor lines, to cffi: the bindings have the types
   that are written here. These functions, with the prefix hotlap_, are all that the library
   exports; everything else has hidden visibility.

   Tensors are float32, row-major and contiguous unless said otherwise; shapes stand in parentheses.
   T tokens, H query heads, G key/value heads, D head dim, C width, A features of attention's
   output, F hidden features of the MLP, V vocabulary. grad_x is the gradient of the loss with
   respect to x. A `workspace` is scratch memory of as many floats as the function named ..._floats
   returns. */

#ifndef HOTLAP_KERNELS_H
#define HOTLAP_KERNELS_H

#include <stddef.h>
#include <stdint.h>

#pragma GCC visibility push(default)

/* ---- BLAS ------------------------------------------------------------------------------------ */

/* sgemm_ of any BLAS: column-major, all arguments by address. */
typedef void (*hotlap_sgemm_t)(const char *trans_a, const char *trans_b, const int *m, const int *n,
                               const int *k, const float *alpha, const float *a, const int *lda,
                               const float *b, const int *ldb, const float *beta, float *c,
                               const int *ldc);

/* cblas_sgemm_pack_get_size, cblas_sgemm_pack and cblas_sgemm_compute of Intel's MKL. */
typedef size_t (*hotlap_sgemm_pack_get_size_t)(int operand, int m, int n, int k); /* bytes */
typedef void (*hotlap_sgemm_pack_t)(int layout, int operand, int trans, int m, int n, int k,
                                    float alpha, const float *src, int ld, float *dest);
typedef void (*hotlap_sgemm_compute_t)(int layout, int trans_a, int trans_b, int m, int n, int k,
                                       const float *a, int lda, const float *b, int ldb, float beta,
                                       float *c, int ldc);

/* To be called before any kernel. The last three are all NULL for a BLAS that does not pack. */
void hotlap_set_blas(hotlap_sgemm_t sgemm, hotlap_sgemm_pack_get_size_t pack_get_size,
                     hotlap_sgemm_pack_t pack, hotlap_sgemm_compute_t compute);

/* ---- Attention (attention.c) ----------------------------------------------------------------- */

typedef struct {
    const float *q, *k, *v;   /* (H, T, D), (G, T, D), (G, T, D) */
    const int32_t *first_key; /* (T,): query t sees the keys first_key[t] ... t */
    int32_t T, H, G, D;       /* D a multiple of hotlap_vector_lanes(), H of G */
    float scale;
} hotlap_attention_t;

typedef struct {
    const float *grad_out, *out;     /* (T, H, D) */
    const float *log_sums;           /* (H, T), from the forward */
    float *grad_q, *grad_k, *grad_v; /* (H, T, D), (G, T, D), (G, T, D) */
} hotlap_attention_gradients_t;

/* Floats per vector of the instruction set that the kernels were compiled for. */
int hotlap_vector_lanes(void);

/* Whether 0 <= first_key[t] <= t for all t, and first_key never decreases. */
int hotlap_attention_mask_is_valid(const int32_t *first_key, int T);

int64_t hotlap_attention_forward_floats(const hotlap_attention_t *a, int num_threads);
int64_t hotlap_attention_backward_floats(const hotlap_attention_t *a, int num_threads);

/* out (T, H, D); log_sums (H, T): log2 of each query's sum of exponentials. */
void hotlap_attention_forward(const hotlap_attention_t *a, float *out, float *log_sums,
                              float *workspace, int num_threads);
void hotlap_attention_backward(const hotlap_attention_t *a, const hotlap_attention_gradients_t *g,
                               float *workspace, int num_threads);

/* ---- From the residual stream to q, k and v (qkv.c) --------------------------------------- */

typedef struct {
    const float *x, *x0, *skip;   /* (T, C); skip may be NULL */
    const float *residual_mix;    /* (2,), with a skip (3,): weights of x, x0 and skip */
    const float *q, *k, *v;       /* weights: (H * D, C), (G * D, C), (G * D, C) */
    const float *cos, *sin;       /* (T, D / 2) */
    const float *value_mix;       /* (2,): weights of the values and of value_embedding */
    const float *value_embedding; /* (T, G, D), value embeddings; may be NULL */
    int32_t T, C, H, G, D;
    int32_t chunk_tokens; /* tokens per chunk */
    float epsilon;
} hotlap_qkv_t;

/* The backward reads neither mixed nor v, which may then be NULL. */
typedef struct {
    float *mixed;         /* (T, C) */
    float *inverse_rms;   /* (T,): 1 / RMS of mixed */
    float *q, *k, *v;     /* (H, T, D), (G, T, D), (G, T, D) */
    float *q_inverse_rms; /* (H, T): 1 / RMS of the queries before their norm */
    float *k_inverse_rms; /* (G, T) */
} hotlap_qkv_outputs_t;

typedef struct {
    /* Gradients with respect to the outputs. */
    const float *mixed;     /* (T, C) */
    const float *q, *k, *v; /* (H, T, D), (G, T, D), (G, T, D) */
    /* Gradients with respect to the inputs. */
    float *x, *x0, *skip;   /* (T, C); skip NULL without one */
    float *residual_mix;    /* (T, 2), with a skip (T, 3): per token, to be summed over tokens */
    float *weights;         /* (num_threads, (H + 2 * G) * D, C): of q, k and v per thread; the sum
                               over threads is left in the first. Of v: for value_mix[0] = 1 */
    float *value_embedding; /* (T, G, D), or NULL */
    float *value_mix;       /* (T,): of value_mix[1], per token */
} hotlap_qkv_gradients_t;

int64_t hotlap_qkv_forward_floats(const hotlap_qkv_t *in, int num_threads);
int64_t hotlap_qkv_backward_floats(const hotlap_qkv_t *in, int num_threads);
void hotlap_qkv_forward(const hotlap_qkv_t *in, const hotlap_qkv_outputs_t *out, float *workspace,
                        int num_threads);
void hotlap_qkv_backward(const hotlap_qkv_t *in, const hotlap_qkv_outputs_t *out,
                         const hotlap_qkv_gradients_t *g, float *workspace, int num_threads);

/* ---- From attention's output to the end of a block (mlp.c) ----------------------------------- */

typedef struct {
    const float *x;                  /* (T, C) */
    const float *attended, *project; /* (T, A), (C, A); NULL in a block without attention */
    const float *expand, *out;       /* (F, C), (C, F) */
    int32_t T, C, A, F;
    int32_t chunk_tokens; /* tokens per chunk */
    float epsilon;
} hotlap_mlp_t;

typedef struct {
    const float *y;      /* (T, C): gradient with respect to the result */
    float *x;            /* (T, C) */
    float *attended;     /* (T, A), or NULL */
    float *project;      /* (C, A), or NULL */
    float *expand, *out; /* (F, C), (C, F) */
    float *shares;       /* (num_threads - 1, F * C + C * F + C * A): of expand, out and project,
                            of all threads but the first */
} hotlap_mlp_gradients_t;

int64_t hotlap_mlp_forward_floats(const hotlap_mlp_t *mlp, int num_threads);
int64_t hotlap_mlp_backward_floats(const hotlap_mlp_t *mlp, int num_threads);

/* sum (T, C) = x + attended project^T; NULL without attention, where it would be x.
   y (T, C) = sum + relu(norm(sum) expand^T)^2 out^T.
   For the backward: inverse_rms (T,) = 1 / RMS of sum, hidden (T, F) = relu(norm(sum) expand^T). */
void hotlap_mlp_forward(const hotlap_mlp_t *mlp, float *sum, float *y, float *inverse_rms,
                        float *hidden, float *workspace, int num_threads);

/* mlp->x is the forward's sum, in a block with attention. */
void hotlap_mlp_backward(const hotlap_mlp_t *mlp, const hotlap_mlp_gradients_t *g,
                         const float *inverse_rms, const float *hidden, float *workspace,
                         int num_threads);

/* ---- The softcapped head and its loss (head.c) ----------------------------------------------- */

typedef struct {
    const float *x, *weight; /* (T, C), (V, C) */
    const int64_t *targets;  /* (T,), each from 0 to V - 1 */
    int32_t T, C, V;
    int32_t chunk_tokens; /* tokens per chunk */
    float softcap, factor;
} hotlap_head_t;

int64_t hotlap_head_floats(const hotlap_head_t *h, int num_threads);

/* losses (T,): cross-entropy per token, without the factor. grad_x (T, C) and grad_weight (V, C):
   gradients of factor * sum(losses), or both NULL if not needed. grad_weight_shares
   (num_threads - 1, V, C): grad_weight of all threads but the first. */
void hotlap_head(const hotlap_head_t *h, float *losses, float *grad_x, float *grad_weight,
                 float *grad_weight_shares, float *workspace, int num_threads);

/* logits (T, V) before the softcap. In place: each row becomes the gradient of its loss with
   respect to them, up to a factor: scales (T,). losses (T,). */
void hotlap_head_rows(float *logits, const int64_t *targets, int T, int V, float softcap,
                      float *losses, float *scales, int num_threads);

/* ---- RowRms, in place (row_rms.c) ------------------------------------------------------------ */

/* RMSprop on the rows of `table` that have a gradient; the other rows, and their `squares`, stay as
   they are. All (rows, cols). inverse_correction: 1 / (1 - beta2^step). */
void hotlap_step_rows(float *table, const float *grad, float *squares, int rows, int cols, float lr,
                      float beta2, float inverse_correction, float epsilon, int num_threads);

/* ---- Newton-Schulz orthogonalization (newton_schulz.c) --------------------------------------- */

typedef struct {
    const float *matrices;     /* (count, rows, cols) */
    const float *coefficients; /* (steps, 3) */
    int32_t count, rows, cols, steps;
    int32_t first_segment, segment; /* steps per segment: of the first, of the others */
    float smallest_norm;
} hotlap_newton_schulz_t;

int64_t hotlap_newton_schulz_floats(const hotlap_newton_schulz_t *ns, int num_threads);

/* out (count, rows, cols). */
void hotlap_newton_schulz(const hotlap_newton_schulz_t *ns, float *out, float *workspace,
                          int num_threads);

#pragma GCC visibility pop

#endif
