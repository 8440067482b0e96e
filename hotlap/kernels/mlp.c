/* x + MLP(norm(x)) with ReLU², as in hotlap/model/mlp.py. */

#include "common.h"
#include "norms.h"
#include "vectors.h"
#include "weights.h"

/* A thread's workspace: a chunk's norms, and as many matrices of its hidden features. */
static int64_t floats_a_thread(int chunk_tokens, int C, int F, int matrices) {
    return (int64_t)chunk_tokens * (C + (int64_t)matrices * F);
}

int64_t mlp_forward_floats(int chunk_tokens, int C, int F, int num_threads) {
    return packed_floats(F, C, chunk_tokens) + packed_floats(C, F, chunk_tokens) +
           num_threads * floats_a_thread(chunk_tokens, C, F, 1);
}

int64_t mlp_backward_floats(int chunk_tokens, int C, int F, int num_threads) {
    return num_threads * floats_a_thread(chunk_tokens, C, F, 2);
}

/* Of features (count), their ReLU to `hidden`, which only the backward reads, and its square in their own place. */
static void relu_and_square(float *features, int64_t count, float *hidden) {
    int64_t at = 0;
    if ((uintptr_t)hidden % sizeof(vector_t) == 0) {
        for (; at + LANES <= count; at += LANES) {
            vector_t x = *(const vector_t *)(features + at), relu = (vector_t)((lanes_t)x & ~(x < 0));
            stream(hidden + at, relu);
            *(vector_t *)(features + at) = relu * relu;
        }
        end_streams();
    }
    for (; at < count; at++) {
        hidden[at] = features[at] < 0 ? 0 : features[at];
        features[at] = hidden[at] * hidden[at];
    }
}

/* x and y (T, C), expand (F, C), out (C, F). Kept for the backward: inverse_rms (T,) of x, and hidden (T, F):
   relu(norm(x) · expandᵀ). workspace of mlp_forward_floats. */
void mlp_forward(const float *x, const float *expand, const float *out, int T, int C, int F, int chunk_tokens,
                 float epsilon, float *y, float *inverse_rms, float *hidden, float *workspace, int num_threads) {
    const weight_t weights[] = {weight_in(&workspace, expand, F, C, 1, chunk_tokens),
                                weight_in(&workspace, out, C, F, 1, chunk_tokens)};
#pragma omp parallel num_threads(num_threads)
    {
        pack_weights(weights, 2);
#pragma omp for schedule(static, 1)
        for (int thread = 0; thread < num_threads; thread++) {
            float *normed = workspace + thread * floats_a_thread(chunk_tokens, C, F, 1);
            float *features = normed + (int64_t)chunk_tokens * C;
            int first = (int64_t)T * thread / num_threads, past = (int64_t)T * (thread + 1) / num_threads;
            for (int start = first; start < past; start += chunk_tokens) {
                int tokens = least(chunk_tokens, past - start);
                int64_t at = (int64_t)start * C;
                for (int64_t i = 0; i < tokens; i++)
                    inverse_rms[start + i] = norm_row(x + at + i * C, NULL, NULL, C, epsilon, normed + i * C);
                times_weight(&weights[0], tokens, normed, 0, features);
                relu_and_square(features, (int64_t)tokens * F, hidden + (int64_t)start * F);
                memcpy(y + at, x + at, sizeof(float) * tokens * C);
                times_weight(&weights[1], tokens, features, 1, y + at);
            }
        }
    }
}

/* grad_x, from its share that came through the MLP, that for norm(x), and from that for y. */
static void norm_and_sum_backward(const float *grad_y, const float *normed, const float *inverse_rms, int tokens, int C,
                                  float *grad_x) {
    for (int64_t i = 0; i < tokens; i++) {
        float *to = grad_x + i * C;
        norm_row_backward(to, normed + i * C, inverse_rms[i], NULL, NULL, C, to);
        for (int c = 0; c < C; c++) to[c] += grad_y[i * C + c];
    }
}

/* grad (T, C) is that for y; the others are those for x, expand and out. shares: (2, num_threads - 1, F · C), for
   the other threads' parts of the last two. workspace of mlp_backward_floats. */
void mlp_backward(const float *grad, const float *x, const float *expand, const float *out, const float *inverse_rms,
                  const float *hidden, int T, int C, int F, int chunk_tokens, float *grad_x, float *grad_expand,
                  float *grad_out, float *shares, float *workspace, int num_threads) {
    int64_t weights = (int64_t)F * C;
    float *out_shares = shares + (num_threads - 1) * weights;
#pragma omp parallel num_threads(num_threads)
    {
#pragma omp for schedule(static, 1)
        for (int thread = 0; thread < num_threads; thread++) {
            float *normed = workspace + thread * floats_a_thread(chunk_tokens, C, F, 2);
            float *grad_hidden = normed + (int64_t)chunk_tokens * C;
            float *squares = grad_hidden + (int64_t)chunk_tokens * F;
            float *to_expand = thread ? shares + (thread - 1) * weights : grad_expand;
            float *to_out = thread ? out_shares + (thread - 1) * weights : grad_out;
            int first = (int64_t)T * thread / num_threads, past = (int64_t)T * (thread + 1) / num_threads;
            if (first == past) {
                memset(to_expand, 0, weights * sizeof(float));
                memset(to_out, 0, weights * sizeof(float));
            }
            for (int start = first; start < past; start += chunk_tokens) {
                int tokens = least(chunk_tokens, past - start), keeps = start > first;
                int64_t at = (int64_t)start * C;
                const float *own = hidden + (int64_t)start * F, *grad_y = grad + at;
                product('N', 'N', tokens, F, C, 2, grad_y, C, out, F, 0, grad_hidden, F);
                for (int64_t f = 0; f < (int64_t)tokens * F; f++) {
                    grad_hidden[f] *= own[f];
                    squares[f] = own[f] * own[f];
                }
                scale_rows(x + at, inverse_rms + start, tokens, C, normed);
                product('N', 'N', tokens, C, F, 1, grad_hidden, F, expand, C, 0, grad_x + at, C);
                product('T', 'N', F, C, tokens, 1, grad_hidden, F, normed, C, keeps, to_expand, C);
                product('T', 'N', C, F, tokens, 1, grad_y, C, squares, F, keeps, to_out, F);
                norm_and_sum_backward(grad_y, normed, inverse_rms + start, tokens, C, grad_x + at);
            }
        }
        add_up(grad_expand, shares, num_threads - 1, weights);
        add_up(grad_out, out_shares, num_threads - 1, weights);
    }
}
