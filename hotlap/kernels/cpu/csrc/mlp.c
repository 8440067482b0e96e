/* From attention's output to the end of a block, as in hotlap/model/mlp.py: its projection, added to the stream x, and what the
   MLP with ReLU² makes of the sum's norm, added too. */

#include "common.h"
#include "norms.h"
#include "vectors.h"
#include "weights.h"

typedef struct {
    const float *x;                  /* (T, C) */
    const float *attended, *project; /* (T, A), (C, A); NULL in a block without attention */
    const float *expand, *out;       /* (F, C), (C, F) */
    int32_t T, C, A, F, chunk_tokens;
    float epsilon;
} mlp_t;

/* A thread's workspace: a chunk's norms, and as many matrices of its hidden features. */
static int64_t floats_a_thread(const mlp_t *mlp, int matrices) {
    return whole_lines((int64_t)mlp->chunk_tokens * (mlp->C + (int64_t)matrices * mlp->F));
}

enum { MOST_WEIGHTS = 3 };

/* The weights as the forward multiplies by them; returns how many. */
static int place_weights(const mlp_t *mlp, float **room, weight_t *weights) {
    weights[0] = weight_in(room, mlp->expand, mlp->F, mlp->C, 1, mlp->chunk_tokens);
    weights[1] = weight_in(room, mlp->out, mlp->C, mlp->F, 1, mlp->chunk_tokens);
    if (!mlp->attended) return 2;
    weights[2] = weight_in(room, mlp->project, mlp->C, mlp->A, 1, mlp->chunk_tokens);
    return 3;
}

int64_t mlp_forward_floats(const mlp_t *mlp, int num_threads) {
    int64_t packed = packed_floats(mlp->F, mlp->C, mlp->chunk_tokens) + packed_floats(mlp->C, mlp->F, mlp->chunk_tokens);
    if (mlp->attended) packed += packed_floats(mlp->C, mlp->A, mlp->chunk_tokens);
    return packed + num_threads * floats_a_thread(mlp, 1);
}

int64_t mlp_backward_floats(const mlp_t *mlp, int num_threads) { return num_threads * floats_a_thread(mlp, 2); }

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

/* sum (T, C), unless there is no attention: x + attended · projectᵀ, which the MLP then takes for x. y (T, C): the result.
   Kept for the backward: inverse_rms (T,) of what the MLP takes, and hidden (T, F): relu of the expanded norm.
   workspace of mlp_forward_floats. */
void mlp_forward(const mlp_t *mlp, float *sum, float *y, float *inverse_rms, float *hidden, float *workspace,
                 int num_threads) {
    int T = mlp->T, C = mlp->C, F = mlp->F, chunk_tokens = mlp->chunk_tokens;
    weight_t weights[MOST_WEIGHTS];
    int num_weights = place_weights(mlp, &workspace, weights);
#pragma omp parallel num_threads(num_threads)
    {
        float *normed = workspace + omp_get_thread_num() * floats_a_thread(mlp, 1);
        float *features = normed + (int64_t)chunk_tokens * C;
        pack_weights(weights, num_weights);
#pragma omp for schedule(dynamic, 1)
        for (int start = 0; start < T; start += chunk_tokens) {
            int tokens = least(chunk_tokens, T - start);
            int64_t at = (int64_t)start * C;
            const float *x = mlp->x + at;
            if (mlp->attended) {
                memcpy(sum + at, x, sizeof(float) * tokens * C);
                times_weight(&weights[2], tokens, mlp->attended + (int64_t)start * mlp->A, 1, sum + at);
                x = sum + at;
            }
            for (int64_t i = 0; i < tokens; i++)
                inverse_rms[start + i] = norm_row(x + i * C, NULL, NULL, C, mlp->epsilon, normed + i * C);
            times_weight(&weights[0], tokens, normed, 0, features);
            relu_and_square(features, (int64_t)tokens * F, hidden + (int64_t)start * F);
            memcpy(y + at, x, sizeof(float) * tokens * C);
            times_weight(&weights[1], tokens, features, 1, y + at);
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

typedef struct {
    const float *y;                                /* (T, C), that for the result */
    float *x, *attended, *project, *expand, *out;  /* those for what mlp_forward was given */
    float *shares;                                 /* (num_threads - 1, F · C + C · F + C · A): of the other threads, for
                                                      expand, out and project */
} mlp_gradients_t;

/* mlp->x: what the MLP took for it. inverse_rms and hidden: from mlp_forward. workspace of mlp_backward_floats. */
void mlp_backward(const mlp_t *mlp, const mlp_gradients_t *g, const float *inverse_rms, const float *hidden,
                  float *workspace, int num_threads) {
    int T = mlp->T, C = mlp->C, F = mlp->F, A = mlp->attended ? mlp->A : 0, chunk_tokens = mlp->chunk_tokens;
    int64_t size = (int64_t)F * C, project_size = (int64_t)C * A, share = 2 * size + project_size;
#pragma omp parallel num_threads(num_threads)
    {
#pragma omp for schedule(static, 1)
        for (int thread = 0; thread < num_threads; thread++) {
            float *normed = workspace + thread * floats_a_thread(mlp, 2);
            float *grad_hidden = normed + (int64_t)chunk_tokens * C;
            float *squares = grad_hidden + (int64_t)chunk_tokens * F;
            float *own_share = thread ? g->shares + (thread - 1) * share : NULL;
            float *to_expand = thread ? own_share : g->expand, *to_out = thread ? own_share + size : g->out;
            float *to_project = thread ? own_share + 2 * size : g->project;
            int first = (int64_t)T * thread / num_threads, past = (int64_t)T * (thread + 1) / num_threads;
            if (first == past) {
                memset(to_expand, 0, size * sizeof(float));
                memset(to_out, 0, size * sizeof(float));
                if (A) memset(to_project, 0, project_size * sizeof(float));
            }
            for (int start = first; start < past; start += chunk_tokens) {
                int tokens = least(chunk_tokens, past - start), keeps = start > first;
                int64_t at = (int64_t)start * C, of_attended = (int64_t)start * A;
                const float *own = hidden + (int64_t)start * F, *grad_y = g->y + at;
                float *grad_x = g->x + at;
                product('N', 'N', tokens, F, C, 2, grad_y, C, mlp->out, F, 0, grad_hidden, F);
                for (int64_t f = 0; f < (int64_t)tokens * F; f++) {
                    grad_hidden[f] *= own[f];
                    squares[f] = own[f] * own[f];
                }
                scale_rows(mlp->x + at, inverse_rms + start, tokens, C, normed);
                product('N', 'N', tokens, C, F, 1, grad_hidden, F, mlp->expand, C, 0, grad_x, C);
                product('T', 'N', F, C, tokens, 1, grad_hidden, F, normed, C, keeps, to_expand, C);
                product('T', 'N', C, F, tokens, 1, grad_y, C, squares, F, keeps, to_out, F);
                norm_and_sum_backward(grad_y, normed, inverse_rms + start, tokens, C, grad_x);
                if (!A) continue;
                product('N', 'N', tokens, A, C, 1, grad_x, C, mlp->project, A, 0, g->attended + of_attended, A);
                product('T', 'N', C, A, tokens, 1, grad_x, C, mlp->attended + of_attended, A, keeps, to_project, A);
            }
        }
        for (int other = 0; other < num_threads - 1; other++) {
            const float *own_share = g->shares + other * share;
            add_up(g->expand, own_share, 1, size);
            add_up(g->out, own_share + size, 1, size);
            if (A) add_up(g->project, own_share + 2 * size, 1, project_size);
        }
    }
}
