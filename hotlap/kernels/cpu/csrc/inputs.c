/* From the residual stream to attention's operands, as in hotlap/model/inputs.py: the mix with the embedding, its norm, three
   products, norm and rotation of queries and keys, and the values' mix. */

#include "common.h"
#include "norms.h"
#include "weights.h"

typedef struct {
    const float *x, *x0, *skip;           /* (T, C); skip may be NULL */
    const float *stream_mix;              /* (2,), or with a skip (3,) */
    const float *q, *k, *v;               /* weights: (H · D, C), (G · D, C) twice */
    const float *cos, *sin;               /* (T, D / 2) */
    const float *value_mix, *mixed_in;    /* (2,), (T, G · D) or NULL */
    int32_t T, C, H, G, D, chunk_tokens;
    float epsilon;
} inputs_t;

/* All but `mixed`, (T, C), head by head: q (H, T, D), k and v (G, T, D). 1 / RMS of mixed (T,), q (H, T), k (G, T). The
   backward needs neither `mixed` nor v. */
typedef struct { float *mixed, *inverse_rms, *q, *k, *v, *q_inverse_rms, *k_inverse_rms; } operands_t;

/* A thread's workspace: of a chunk the norms and their gradients, and three matrices of features. */
static int64_t floats_a_thread(const inputs_t *in) {
    return whole_lines((int64_t)in->chunk_tokens * (2 * in->C + (in->H + 2 * in->G) * in->D));
}

int64_t inputs_forward_floats(const inputs_t *in, int num_threads) {
    return packed_floats(in->H * in->D, in->C, in->chunk_tokens) +
           2 * packed_floats(in->G * in->D, in->C, in->chunk_tokens) + num_threads * floats_a_thread(in);
}

int64_t inputs_backward_floats(const inputs_t *in, int num_threads) { return num_threads * floats_a_thread(in); }

/* The streams at a token, weighted and added up. */
static inline void mix_row(const inputs_t *in, int64_t token, float *to) {
    int C = in->C;
    const float *x = in->x + token * C, *x0 = in->x0 + token * C, *skip = in->skip ? in->skip + token * C : NULL;
    float of_x = in->stream_mix[0], of_x0 = in->stream_mix[1], of_skip = skip ? in->stream_mix[2] : 0;
#pragma omp simd
    for (int c = 0; c < C; c++) to[c] = of_x * x[c] + of_x0 * x0[c] + (skip ? of_skip * skip[c] : 0);
}

/* What is mixed, into `mixed`; and its norm. */
static void mix_and_norm(const inputs_t *in, int start, int tokens, const operands_t *to, float *normed) {
    for (int i = 0; i < tokens; i++) {
        float *mixed = to->mixed + (int64_t)(start + i) * in->C;
        mix_row(in, start + i, mixed);
        to->inverse_rms[start + i] = norm_row(mixed, NULL, NULL, in->C, in->epsilon, normed + (int64_t)i * in->C);
    }
}

/* The norm once more: what was mixed is not kept, as the backward has to read the streams anyway. */
static void mix_and_norm_again(const inputs_t *in, int start, int tokens, const float *inverse_rms, float *normed) {
    for (int i = 0; i < tokens; i++, normed += in->C) {
        mix_row(in, start + i, normed);
        for (int c = 0; c < in->C; c++) normed[c] *= inverse_rms[start + i];
    }
}

/* Norm and rotation of features (tokens, heads · D), into out (heads, T, D). */
static void norm_and_turn(const inputs_t *in, int start, int tokens, int heads, const float *features, float *out,
                          float *inverse_rms) {
    int D = in->D, half = D / 2;
    for (int i = 0; i < tokens; i++)
        for (int head = 0; head < heads; head++) {
            int64_t at = (int64_t)head * in->T + start + i;
            inverse_rms[at] = norm_row(features + ((int64_t)i * heads + head) * D, in->cos + (start + i) * half,
                                       in->sin + (start + i) * half, D, in->epsilon, out + at * D);
        }
}

/* v = value_mix · (features, mixed_in), into out (G, T, D). */
static void mix_values(const inputs_t *in, int start, int tokens, const float *features, float *out) {
    int D = in->D, G = in->G;
    float of_v = in->value_mix[0], of_mixed_in = in->value_mix[1];
    for (int i = 0; i < tokens; i++)
        for (int head = 0; head < G; head++) {
            const float *row = features + ((int64_t)i * G + head) * D;
            float *to = out + ((int64_t)head * in->T + start + i) * D;
            if (in->mixed_in) {
                const float *other = in->mixed_in + ((int64_t)(start + i) * G + head) * D;
#pragma omp simd
                for (int d = 0; d < D; d++) to[d] = of_v * row[d] + of_mixed_in * other[d];
            } else {
                for (int d = 0; d < D; d++) to[d] = of_v * row[d];
            }
        }
}

/* workspace of inputs_forward_floats. */
void inputs_forward(const inputs_t *in, const operands_t *to, float *workspace, int num_threads) {
    int C = in->C, chunk_tokens = in->chunk_tokens;
    const weight_t weights[] = {weight_in(&workspace, in->q, in->H * in->D, C, 1, chunk_tokens),
                                weight_in(&workspace, in->k, in->G * in->D, C, 1, chunk_tokens),
                                weight_in(&workspace, in->v, in->G * in->D, C, 1, chunk_tokens)};
#pragma omp parallel num_threads(num_threads)
    {
        float *normed = workspace + omp_get_thread_num() * floats_a_thread(in);
        float *features = normed + (int64_t)chunk_tokens * C;
        pack_weights(weights, 3);
#pragma omp for schedule(dynamic, 1)
        for (int start = 0; start < in->T; start += chunk_tokens) {
            int tokens = least(chunk_tokens, in->T - start);
            mix_and_norm(in, start, tokens, to, normed);
            times_weight(&weights[0], tokens, normed, 0, features);
            norm_and_turn(in, start, tokens, in->H, features, to->q, to->q_inverse_rms);
            times_weight(&weights[1], tokens, normed, 0, features);
            norm_and_turn(in, start, tokens, in->G, features, to->k, to->k_inverse_rms);
            times_weight(&weights[2], tokens, normed, 0, features);
            mix_values(in, start, tokens, features, to->v);
        }
    }
}

/* Those for the operands, as these lie, and from them those for what inputs_forward was given. */
typedef struct {
    const float *mixed, *q, *k, *v;
    const float *later_x0;  /* (T, C): what was made of x0 after this; NULL for nothing */
    float *x, *x0, *skip;   /* (T, C) */
    float *stream_mix;      /* (T, 2), or with a skip (T, 3): each token's share */
    float *weights;         /* (num_threads, (H + 2·G) · D, C): of q, k, v; each thread's share, the first gets the sum.
                               That of v is what it would be for a value_mix[0] of 1. */
    float *mixed_in;        /* (T, G · D), or NULL */
    float *value_mix;       /* (T,): each token's share of that for value_mix[1] */
} input_gradients_t;

static void norm_and_turn_backward(const inputs_t *in, int start, int tokens, int heads, const float *grad,
                                   const float *out, const float *inverse_rms, float *features) {
    int D = in->D, half = D / 2;
    for (int i = 0; i < tokens; i++)
        for (int head = 0; head < heads; head++) {
            int64_t at = (int64_t)head * in->T + start + i;
            norm_row_backward(grad + at * D, out + at * D, inverse_rms[at], in->cos + (start + i) * half,
                              in->sin + (start + i) * half, D, features + ((int64_t)i * heads + head) * D);
        }
}

/* The gradient for v as it lies with the features of a token side by side, and those for what it was mixed with. */
static void mix_values_backward(const inputs_t *in, const input_gradients_t *g, int start, int tokens, float *features) {
    int D = in->D, G = in->G;
    float of_mixed_in = in->value_mix[1];
    for (int i = 0; i < tokens; i++) {
        float along = 0;
        for (int head = 0; head < G; head++) {
            const float *from = g->v + ((int64_t)head * in->T + start + i) * D;
            memcpy(features + ((int64_t)i * G + head) * D, from, sizeof(float) * D);
            if (!in->mixed_in) continue;
            int64_t at = ((int64_t)(start + i) * G + head) * D;
#pragma omp simd reduction(+ : along)
            for (int d = 0; d < D; d++) {
                along += from[d] * in->mixed_in[at + d];
                g->mixed_in[at + d] = of_mixed_in * from[d];
            }
        }
        g->value_mix[start + i] = along;
    }
}

/* From those for the norm and for `mixed` itself, those for what was mixed. */
static void mix_and_norm_backward(const inputs_t *in, const input_gradients_t *g, const operands_t *made, int start,
                                  int tokens, float *grad_normed, const float *normed) {
    int C = in->C, num_streams = in->skip ? 3 : 2;
    for (int i = 0; i < tokens; i++) {
        int64_t at = (int64_t)(start + i) * C;
        float *grad = grad_normed + (int64_t)i * C, *along = g->stream_mix + (int64_t)(start + i) * num_streams;
        norm_row_backward(grad, normed + (int64_t)i * C, made->inverse_rms[start + i], NULL, NULL, C, grad);
        for (int c = 0; c < C; c++) grad[c] += g->mixed[at + c];
        along[0] = weigh_row(grad, in->x + at, in->stream_mix[0], C, g->x + at);
        along[1] = weigh_row(grad, in->x0 + at, in->stream_mix[1], C, g->x0 + at);
        if (g->later_x0)
            for (int c = 0; c < C; c++) g->x0[at + c] += g->later_x0[at + c];
        if (in->skip) along[2] = weigh_row(grad, in->skip + at, in->stream_mix[2], C, g->skip + at);
    }
}

/* `made`: what inputs_forward did. workspace of inputs_backward_floats. */
void inputs_backward(const inputs_t *in, const operands_t *made, const input_gradients_t *g, float *workspace,
                     int num_threads) {
    int C = in->C, HD = in->H * in->D, GD = in->G * in->D;
    int64_t weights = (int64_t)(HD + 2 * GD) * C;
#pragma omp parallel num_threads(num_threads)
    {
#pragma omp for schedule(static, 1)
        for (int thread = 0; thread < num_threads; thread++) {
            int64_t chunk = in->chunk_tokens;
            float *normed = workspace + thread * floats_a_thread(in), *grad_normed = normed + chunk * C;
            float *of_q = grad_normed + chunk * C, *of_k = of_q + chunk * HD, *of_v = of_k + chunk * GD;
            float *to_q = g->weights + thread * weights, *to_k = to_q + HD * C, *to_v = to_k + GD * C;
            int first = (int64_t)in->T * thread / num_threads, past = (int64_t)in->T * (thread + 1) / num_threads;
            if (first == past) memset(to_q, 0, weights * sizeof(float));
            for (int start = first; start < past; start += in->chunk_tokens) {
                int tokens = least(in->chunk_tokens, past - start), keeps = start > first;
                norm_and_turn_backward(in, start, tokens, in->H, g->q, made->q, made->q_inverse_rms, of_q);
                norm_and_turn_backward(in, start, tokens, in->G, g->k, made->k, made->k_inverse_rms, of_k);
                mix_values_backward(in, g, start, tokens, of_v);
                mix_and_norm_again(in, start, tokens, made->inverse_rms, normed);
                product('N', 'N', tokens, C, HD, 1, of_q, HD, in->q, C, 0, grad_normed, C);
                product('N', 'N', tokens, C, GD, 1, of_k, GD, in->k, C, 1, grad_normed, C);
                product('N', 'N', tokens, C, GD, in->value_mix[0], of_v, GD, in->v, C, 1, grad_normed, C);
                product('T', 'N', HD, C, tokens, 1, of_q, HD, normed, C, keeps, to_q, C);
                product('T', 'N', GD, C, tokens, 1, of_k, GD, normed, C, keeps, to_k, C);
                product('T', 'N', GD, C, tokens, 1, of_v, GD, normed, C, keeps, to_v, C);
                mix_and_norm_backward(in, g, made, start, tokens, grad_normed, normed);
            }
        }
        add_up(g->weights, g->weights + weights, num_threads - 1, weights);
    }
}
