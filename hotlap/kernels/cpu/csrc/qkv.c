/* From the residual stream to attention's q, k and v: the streams are mixed and normed, three
   matmuls, queries and keys are normed and rotated, values mixed with value embeddings. The same in
   PyTorch: hotlap/model/block.py and attention.py. */

#include "blas.h"
#include "norms.h"

/* A thread's workspace: of a chunk, its norms, their gradients, and the features of q, k and v. */
static int64_t floats_per_thread(const hotlap_qkv_t *in) {
    int64_t chunk = in->chunk_tokens, C = in->C, HD = in->H * in->D, GD = in->G * in->D;
    return round_to_cache_line(2 * part_floats(chunk * C) + part_floats(chunk * HD) +
                               2 * part_floats(chunk * GD));
}

int64_t hotlap_qkv_forward_floats(const hotlap_qkv_t *in, int num_threads) {
    return packed_floats(in->H * in->D, in->C, in->chunk_tokens) +
           2 * packed_floats(in->G * in->D, in->C, in->chunk_tokens) +
           num_threads * floats_per_thread(in);
}

int64_t hotlap_qkv_backward_floats(const hotlap_qkv_t *in, int num_threads) {
    return num_threads * floats_per_thread(in);
}

/* out (C,) = the weighted sum of the streams at one token. */
static inline void mix_row(const hotlap_qkv_t *in, int64_t token, float *out) {
    int C = in->C;
    const float *x = in->x + token * C, *x0 = in->x0 + token * C;
    const float *skip = in->skip ? in->skip + token * C : NULL;
    float weight_x = in->residual_mix[0], weight_x0 = in->residual_mix[1];
    float weight_skip = skip ? in->residual_mix[2] : 0;
#pragma omp simd
    for (int c = 0; c < C; c++)
        out[c] = weight_x * x[c] + weight_x0 * x0[c] + (skip ? weight_skip * skip[c] : 0);
}

/* out->mixed and out->inverse_rms of `tokens` tokens from `start` on, and normed (tokens, C). */
static void mix_and_norm(const hotlap_qkv_t *in, int start, int tokens,
                         const hotlap_qkv_outputs_t *out, float *normed) {
    for (int i = 0; i < tokens; i++) {
        float *mixed = out->mixed + (int64_t)(start + i) * in->C;
        mix_row(in, start + i, mixed);
        out->inverse_rms[start + i] =
            rms_norm_row(mixed, NULL, NULL, in->C, in->epsilon, normed + (int64_t)i * in->C);
    }
}

/* normed (tokens, C) recomputed. The mixed stream is not kept for the backward, which has to read
   the streams anyway. */
static void recompute_norm(const hotlap_qkv_t *in, int start, int tokens, const float *inverse_rms,
                           float *normed) {
    for (int i = 0; i < tokens; i++, normed += in->C) {
        mix_row(in, start + i, normed);
        for (int c = 0; c < in->C; c++) normed[c] *= inverse_rms[start + i];
    }
}

/* Norm and rotation of features (tokens, heads, D) to out (heads, T, D). */
static void norm_and_rotate(const hotlap_qkv_t *in, int start, int tokens, int heads,
                            const float *features, float *out, float *inverse_rms) {
    int D = in->D;
    for (int i = 0; i < tokens; i++) {
        int64_t angles = (int64_t)(start + i) * (D / 2);
        for (int head = 0; head < heads; head++) {
            int64_t row = (int64_t)head * in->T + start + i;
            inverse_rms[row] =
                rms_norm_row(features + ((int64_t)i * heads + head) * D, in->cos + angles,
                             in->sin + angles, D, in->epsilon, out + row * D);
        }
    }
}

/* out (G, T, D): features and value_embedding, both (tokens, G, D), weighted by value_mix. */
static void mix_values(const hotlap_qkv_t *in, int start, int tokens, const float *features,
                       float *out) {
    int D = in->D, G = in->G;
    float weight_v = in->value_mix[0], weight_value_embedding = in->value_mix[1];
    for (int i = 0; i < tokens; i++)
        for (int head = 0; head < G; head++) {
            const float *row = features + ((int64_t)i * G + head) * D;
            float *to = out + ((int64_t)head * in->T + start + i) * D;
            if (in->value_embedding) {
                const float *other = in->value_embedding + ((int64_t)(start + i) * G + head) * D;
#pragma omp simd
                for (int d = 0; d < D; d++)
                    to[d] = weight_v * row[d] + weight_value_embedding * other[d];
            } else {
                for (int d = 0; d < D; d++) to[d] = weight_v * row[d];
            }
        }
}

void hotlap_qkv_forward(const hotlap_qkv_t *in, const hotlap_qkv_outputs_t *out, float *workspace,
                        int num_threads) {
    int64_t C = in->C, HD = in->H * in->D, GD = in->G * in->D, chunk = in->chunk_tokens;
    int64_t max_features = HD > GD ? HD : GD;
    const weight_t weights[] = {place_weight(&workspace, in->q, HD, C, chunk),
                                place_weight(&workspace, in->k, GD, C, chunk),
                                place_weight(&workspace, in->v, GD, C, chunk)};
#pragma omp parallel num_threads(num_threads)
    {
        float *room = workspace + omp_get_thread_num() * floats_per_thread(in);
        float *normed = part(&room, chunk * C);
        float *features = part(&room, chunk * max_features);
        pack_weights(weights, 3);
#pragma omp for schedule(dynamic, 1)
        for (int start = 0; start < in->T; start += chunk) {
            int tokens = min_int(chunk, in->T - start);
            mix_and_norm(in, start, tokens, out, normed);
            matmul_weight(&weights[0], tokens, normed, 0, features);
            norm_and_rotate(in, start, tokens, in->H, features, out->q, out->q_inverse_rms);
            matmul_weight(&weights[1], tokens, normed, 0, features);
            norm_and_rotate(in, start, tokens, in->G, features, out->k, out->k_inverse_rms);
            matmul_weight(&weights[2], tokens, normed, 0, features);
            mix_values(in, start, tokens, features, out->v);
        }
    }
}

/* grad_features (tokens, heads, D) from grad_out and out (heads, T, D). */
static void norm_and_rotate_backward(const hotlap_qkv_t *in, int start, int tokens, int heads,
                                     const float *grad_out, const float *out,
                                     const float *inverse_rms, float *grad_features) {
    int D = in->D;
    for (int i = 0; i < tokens; i++) {
        int64_t angles = (int64_t)(start + i) * (D / 2);
        for (int head = 0; head < heads; head++) {
            int64_t row = (int64_t)head * in->T + start + i;
            rms_norm_row_backward(grad_out + row * D, out + row * D, inverse_rms[row],
                                  in->cos + angles, in->sin + angles, D,
                                  grad_features + ((int64_t)i * heads + head) * D);
        }
    }
}

/* grad_values (tokens, G, D): g->v (G, T, D) transposed, without the factor value_mix[0]; and the
   gradients with respect to value_embedding and, per token, value_mix[1]. */
static void mix_values_backward(const hotlap_qkv_t *in, const hotlap_qkv_gradients_t *g, int start,
                                int tokens, float *grad_values) {
    int D = in->D, G = in->G;
    float weight_value_embedding = in->value_mix[1];
    for (int i = 0; i < tokens; i++) {
        float grad_weight = 0;
        for (int head = 0; head < G; head++) {
            const float *from = g->v + ((int64_t)head * in->T + start + i) * D;
            memcpy(grad_values + ((int64_t)i * G + head) * D, from, sizeof(float) * D);
            if (!in->value_embedding) continue;
            int64_t at = ((int64_t)(start + i) * G + head) * D;
#pragma omp simd reduction(+ : grad_weight)
            for (int d = 0; d < D; d++) {
                grad_weight += from[d] * in->value_embedding[at + d];
                g->value_embedding[at + d] = weight_value_embedding * from[d];
            }
        }
        g->value_mix[start + i] = grad_weight;
    }
}

/* Gradients with respect to the streams and their weights, from grad_normed (tokens, C), which is
   overwritten, and g->mixed. */
static void mix_and_norm_backward(const hotlap_qkv_t *in, const hotlap_qkv_gradients_t *g,
                                  const hotlap_qkv_outputs_t *out, int start, int tokens,
                                  float *grad_normed, const float *normed) {
    int C = in->C, num_streams = in->skip ? 3 : 2;
    for (int i = 0; i < tokens; i++) {
        int64_t at = (int64_t)(start + i) * C;
        float *grad = grad_normed + (int64_t)i * C;
        float *grad_mix = g->residual_mix + (int64_t)(start + i) * num_streams;
        rms_norm_row_backward(grad, normed + (int64_t)i * C, out->inverse_rms[start + i], NULL,
                              NULL, C, grad);
        for (int c = 0; c < C; c++) grad[c] += g->mixed[at + c];
        grad_mix[0] = scale_row_backward(grad, in->x + at, in->residual_mix[0], C, g->x + at);
        grad_mix[1] = scale_row_backward(grad, in->x0 + at, in->residual_mix[1], C, g->x0 + at);
        if (in->skip)
            grad_mix[2] =
                scale_row_backward(grad, in->skip + at, in->residual_mix[2], C, g->skip + at);
    }
}

/* The tokens of one thread. `weights` ((H + 2 G) D, C): its share of the weights' gradients. */
static void backward_tokens(const hotlap_qkv_t *in, const hotlap_qkv_outputs_t *out,
                            const hotlap_qkv_gradients_t *g, range_t range, float *weights,
                            float *workspace) {
    int64_t C = in->C, HD = in->H * in->D, GD = in->G * in->D, chunk = in->chunk_tokens;
    float *normed = part(&workspace, chunk * C), *grad_normed = part(&workspace, chunk * C);
    float *grad_q = part(&workspace, chunk * HD); /* (tokens, H, D), before norm and rotation */
    float *grad_k = part(&workspace, chunk * GD), *grad_v = part(&workspace, chunk * GD);
    float *weight_q = weights, *weight_k = weight_q + HD * C, *weight_v = weight_k + GD * C;
    if (range.first == range.past) memset(weights, 0, (HD + 2 * GD) * C * sizeof(float));
    for (int start = range.first; start < range.past; start += chunk) {
        int tokens = min_int(chunk, range.past - start), accumulate = start > range.first;
        norm_and_rotate_backward(in, start, tokens, in->H, g->q, out->q, out->q_inverse_rms,
                                 grad_q);
        norm_and_rotate_backward(in, start, tokens, in->G, g->k, out->k, out->k_inverse_rms,
                                 grad_k);
        mix_values_backward(in, g, start, tokens, grad_v);
        recompute_norm(in, start, tokens, out->inverse_rms, normed);
        matmul('N', 'N', tokens, C, HD, 1, grad_q, HD, in->q, C, 0, grad_normed, C);
        matmul('N', 'N', tokens, C, GD, 1, grad_k, GD, in->k, C, 1, grad_normed, C);
        matmul('N', 'N', tokens, C, GD, in->value_mix[0], grad_v, GD, in->v, C, 1, grad_normed, C);
        matmul('T', 'N', HD, C, tokens, 1, grad_q, HD, normed, C, accumulate, weight_q, C);
        matmul('T', 'N', GD, C, tokens, 1, grad_k, GD, normed, C, accumulate, weight_k, C);
        matmul('T', 'N', GD, C, tokens, 1, grad_v, GD, normed, C, accumulate, weight_v, C);
        mix_and_norm_backward(in, g, out, start, tokens, grad_normed, normed);
    }
}

void hotlap_qkv_backward(const hotlap_qkv_t *in, const hotlap_qkv_outputs_t *out,
                         const hotlap_qkv_gradients_t *g, float *workspace, int num_threads) {
    int64_t share = (int64_t)(in->H + 2 * in->G) * in->D * in->C;
#pragma omp parallel num_threads(num_threads)
    {
#pragma omp for schedule(static, 1)
        for (int thread = 0; thread < num_threads; thread++)
            backward_tokens(in, out, g, thread_tokens(in->T, thread, num_threads),
                            g->weights + thread * share,
                            workspace + thread * floats_per_thread(in));
        add_shares(g->weights, g->weights + share, num_threads - 1, share);
    }
}
