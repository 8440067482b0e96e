/* The MLP with ReLU², as in hotlap/model/mlp.py. */

#include "common.h"

/* x and y (T, C), expand (F, C), out (C, F), hidden (T, F): relu(x · expandᵀ), kept for the backward.
   workspace (num_threads, chunk_tokens, F). */
void mlp_forward(const float *x, const float *expand, const float *out, int T, int C, int F, int chunk_tokens,
                 float *y, float *hidden, float *workspace, int num_threads) {
#pragma omp parallel for schedule(static, 1) num_threads(num_threads)
    for (int thread = 0; thread < num_threads; thread++) {
        float *squares = workspace + (int64_t)thread * chunk_tokens * F;
        int first = (int64_t)T * thread / num_threads, past = (int64_t)T * (thread + 1) / num_threads;
        for (int start = first; start < past; start += chunk_tokens) {
            int tokens = least(chunk_tokens, past - start);
            float *own = hidden + (int64_t)start * F;
            product('N', 'T', tokens, F, C, 1, x + (int64_t)start * C, C, expand, C, 0, own, F);
            for (int64_t at = 0; at < (int64_t)tokens * F; at++) {
                own[at] = own[at] < 0 ? 0 : own[at];
                squares[at] = own[at] * own[at];
            }
            product('N', 'T', tokens, C, F, 1, squares, F, out, F, 0, y + (int64_t)start * C, C);
        }
    }
}

/* grad (T, C) is that for y; the others are those for x, expand and out. shares: (2, num_threads - 1, F · C), for
   the other threads' parts of the last two. workspace (num_threads, 2, chunk_tokens, F). */
void mlp_backward(const float *grad, const float *x, const float *expand, const float *out, const float *hidden,
                  int T, int C, int F, int chunk_tokens, float *grad_x, float *grad_expand, float *grad_out,
                  float *shares, float *workspace, int num_threads) {
    int64_t weights = (int64_t)F * C;
    float *out_shares = shares + (num_threads - 1) * weights;
#pragma omp parallel num_threads(num_threads)
    {
#pragma omp for schedule(static, 1)
        for (int thread = 0; thread < num_threads; thread++) {
            float *grad_hidden = workspace + (int64_t)thread * 2 * chunk_tokens * F;
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
                const float *own = hidden + (int64_t)start * F, *grad_y = grad + (int64_t)start * C;
                product('N', 'N', tokens, F, C, 2, grad_y, C, out, F, 0, grad_hidden, F);
                for (int64_t at = 0; at < (int64_t)tokens * F; at++) {
                    grad_hidden[at] *= own[at];
                    squares[at] = own[at] * own[at];
                }
                product('N', 'N', tokens, C, F, 1, grad_hidden, F, expand, C, 0, grad_x + (int64_t)start * C, C);
                product('T', 'N', F, C, tokens, 1, grad_hidden, F, x + (int64_t)start * C, C, keeps, to_expand, C);
                product('T', 'N', C, F, tokens, 1, grad_y, C, squares, F, keeps, to_out, F);
            }
        }
        add_up(grad_expand, shares, num_threads - 1, weights);
        add_up(grad_out, out_shares, num_threads - 1, weights);
    }
}
