/* From attention's output to the end of a block: the output projection is added to the residual
   stream, and so is the ReLU^2 MLP of the sum's norm. The same in PyTorch: hotlap/model/mlp.py. */

#include "blas.h"
#include "norms.h"
#include "vectors.h"

/* A thread's workspace: of a chunk, its norms and as many matrices of hidden features. */
static int64_t floats_per_thread(const hotlap_mlp_t *mlp, int matrices) {
    int64_t chunk = mlp->chunk_tokens;
    return round_to_cache_line(part_floats(chunk * mlp->C) +
                               matrices * part_floats(chunk * mlp->F));
}

int64_t hotlap_mlp_forward_floats(const hotlap_mlp_t *mlp, int num_threads) {
    int64_t packed = packed_floats(mlp->F, mlp->C, mlp->chunk_tokens) +
                     packed_floats(mlp->C, mlp->F, mlp->chunk_tokens);
    if (mlp->attended) packed += packed_floats(mlp->C, mlp->A, mlp->chunk_tokens);
    return packed + num_threads * floats_per_thread(mlp, 1);
}

int64_t hotlap_mlp_backward_floats(const hotlap_mlp_t *mlp, int num_threads) {
    return num_threads * floats_per_thread(mlp, 2);
}

/* hidden (count,) = relu(features), which only the backward reads; features = relu(features)^2. */
static void relu_and_square(float *features, int64_t count, float *hidden) {
    int64_t i = 0;
    if ((uintptr_t)hidden % sizeof(vector_t) == 0) {
        for (; i + LANES <= count; i += LANES) {
            vector_t x = *(const vector_t *)(features + i);
            vector_t relu = (vector_t)((lanes_t)x & ~(x < 0)); /* NaN stays NaN */
            store_nontemporal(hidden + i, relu);
            *(vector_t *)(features + i) = relu * relu;
        }
        fence_nontemporal();
    }
    for (; i < count; i++) {
        hidden[i] = features[i] < 0 ? 0 : features[i];
        features[i] = hidden[i] * hidden[i];
    }
}

void hotlap_mlp_forward(const hotlap_mlp_t *mlp, float *sum, float *y, float *inverse_rms,
                        float *hidden, float *workspace, int num_threads) {
    int64_t C = mlp->C, F = mlp->F, chunk = mlp->chunk_tokens;
    weight_t weights[3];
    int num_weights = mlp->attended ? 3 : 2;
    weights[0] = place_weight(&workspace, mlp->expand, F, C, chunk);
    weights[1] = place_weight(&workspace, mlp->out, C, F, chunk);
    if (mlp->attended) weights[2] = place_weight(&workspace, mlp->project, C, mlp->A, chunk);
#pragma omp parallel num_threads(num_threads)
    {
        float *room = workspace + omp_get_thread_num() * floats_per_thread(mlp, 1);
        float *normed = part(&room, chunk * C), *features = part(&room, chunk * F);
        pack_weights(weights, num_weights);
#pragma omp for schedule(dynamic, 1)
        for (int start = 0; start < mlp->T; start += chunk) {
            int tokens = min_int(chunk, mlp->T - start);
            int64_t at = start * C;
            const float *x = mlp->x + at;
            if (mlp->attended) {
                memcpy(sum + at, x, sizeof(float) * tokens * C);
                matmul_weight(&weights[2], tokens, mlp->attended + (int64_t)start * mlp->A, 1,
                              sum + at);
                x = sum + at;
            }
            for (int64_t i = 0; i < tokens; i++)
                inverse_rms[start + i] =
                    rms_norm_row(x + i * C, NULL, NULL, C, mlp->epsilon, normed + i * C);
            matmul_weight(&weights[0], tokens, normed, 0, features);
            relu_and_square(features, tokens * F, hidden + start * F);
            memcpy(y + at, x, sizeof(float) * tokens * C);
            matmul_weight(&weights[1], tokens, features, 1, y + at);
        }
    }
}

/* Where a thread sums the weights' gradients: the first in the result, others in a share. */
typedef struct {
    float *expand, *out, *project;
} weight_gradients_t;

static weight_gradients_t thread_gradients(const hotlap_mlp_gradients_t *g, int thread,
                                           int64_t size, int64_t project_size) {
    if (!thread) return (weight_gradients_t){g->expand, g->out, g->project};
    float *share = g->shares + (thread - 1) * (2 * size + project_size);
    return (weight_gradients_t){share, share + size, share + 2 * size};
}

/* In place: grad_x (tokens, C) comes as the gradient with respect to norm(x), and becomes the one
   with respect to x, which goes to y both directly and through the norm. */
static void norm_and_sum_backward(const float *grad_y, const float *normed,
                                  const float *inverse_rms, int tokens, int C, float *grad_x) {
    for (int64_t i = 0; i < tokens; i++) {
        float *row = grad_x + i * C;
        rms_norm_row_backward(row, normed + i * C, inverse_rms[i], NULL, NULL, C, row);
        for (int c = 0; c < C; c++) row[c] += grad_y[i * C + c];
    }
}

/* The tokens of one thread; `to`: its share of the weights' gradients. A is 0 without attention. */
static void backward_tokens(const hotlap_mlp_t *mlp, const hotlap_mlp_gradients_t *g,
                            const float *inverse_rms, const float *hidden, range_t range,
                            weight_gradients_t to, float *workspace) {
    int64_t C = mlp->C, F = mlp->F, A = mlp->attended ? mlp->A : 0, chunk = mlp->chunk_tokens;
    float *normed = part(&workspace, chunk * C);
    float *grad_hidden = part(&workspace, chunk * F), *squares = part(&workspace, chunk * F);
    if (range.first == range.past) {
        memset(to.expand, 0, F * C * sizeof(float));
        memset(to.out, 0, C * F * sizeof(float));
        if (A) memset(to.project, 0, C * A * sizeof(float));
    }
    for (int start = range.first; start < range.past; start += chunk) {
        int tokens = min_int(chunk, range.past - start), accumulate = start > range.first;
        const float *relu = hidden + start * F, *grad_y = g->y + start * C;
        float *grad_x = g->x + start * C;
        /* d relu(h)^2 / dh = 2 relu(h) */
        matmul('N', 'N', tokens, F, C, 2, grad_y, C, mlp->out, F, 0, grad_hidden, F);
        for (int64_t i = 0; i < tokens * F; i++) {
            grad_hidden[i] *= relu[i];
            squares[i] = relu[i] * relu[i];
        }
        scale_rows(mlp->x + start * C, inverse_rms + start, tokens, C, normed);
        matmul('N', 'N', tokens, C, F, 1, grad_hidden, F, mlp->expand, C, 0, grad_x, C);
        matmul('T', 'N', F, C, tokens, 1, grad_hidden, F, normed, C, accumulate, to.expand, C);
        matmul('T', 'N', C, F, tokens, 1, grad_y, C, squares, F, accumulate, to.out, F);
        norm_and_sum_backward(grad_y, normed, inverse_rms + start, tokens, C, grad_x);
        if (!A) continue;
        matmul('N', 'N', tokens, A, C, 1, grad_x, C, mlp->project, A, 0, g->attended + start * A,
               A);
        matmul('T', 'N', C, A, tokens, 1, grad_x, C, mlp->attended + start * A, A, accumulate,
               to.project, A);
    }
}

void hotlap_mlp_backward(const hotlap_mlp_t *mlp, const hotlap_mlp_gradients_t *g,
                         const float *inverse_rms, const float *hidden, float *workspace,
                         int num_threads) {
    int64_t size = (int64_t)mlp->F * mlp->C;
    int64_t project_size = mlp->attended ? (int64_t)mlp->C * mlp->A : 0;
#pragma omp parallel num_threads(num_threads)
    {
#pragma omp for schedule(static, 1)
        for (int thread = 0; thread < num_threads; thread++)
            backward_tokens(mlp, g, inverse_rms, hidden, thread_tokens(mlp->T, thread, num_threads),
                            thread_gradients(g, thread, size, project_size),
                            workspace + thread * floats_per_thread(mlp, 2));
        for (int thread = 1; thread < num_threads; thread++) {
            weight_gradients_t share = thread_gradients(g, thread, size, project_size);
            add_shares(g->expand, share.expand, 1, size);
            add_shares(g->out, share.out, 1, size);
            if (project_size) add_shares(g->project, share.project, 1, project_size);
        }
    }
}
