/* The softcapped head and its cross-entropy. The same in PyTorch: hotlap/model/head.py.

   With s the softcap and z a logit before it, let r = (1 - tanh(z / s)) / 2. Then the softmax of
   the capped logits s tanh(z / s) is proportional to 2^(-2 s log2(e) r), and d tanh(z / s) = 4 (r -
   r^2) dz / s. With x = -2 log2(e) z / s, r is 1 / (1 + 2^-x). */

#include "blas.h"
#include "vectors.h"

static int64_t floats_per_thread(const hotlap_head_t *h) {
    int64_t chunk = h->chunk_tokens;
    return part_floats(chunk * h->V) + part_floats(chunk * h->C) + part_floats(chunk);
}

int64_t hotlap_head_floats(const hotlap_head_t *h, int num_threads) {
    return packed_floats(h->V, h->C, h->chunk_tokens) + num_threads * floats_per_thread(h);
}

static inline vector_t r_of(vector_t x) {
    return reciprocal_vector(1 + exp2_vector(-max_vector((vector_t){0} - 126.0f, x)));
}

/* Of `count` <= LANES logits z: exponentials e = 2^(rate * r), added to *sum; in place, z becomes
   e (r - r^2). For the softcaps that come here, rate * r > -126. */
static inline void exponentials(float *z, int count, float scale, float rate, vector_t *sum) {
    vector_t loaded = {0};
    memcpy(&loaded, z, count * sizeof(float));
    vector_t r = r_of(scale * loaded), exponential = exp2_vector(rate * r);
    vector_t result = exponential * (r - r * r);
    for (int lane = count; lane < LANES; lane++) exponential[lane] = 0;
    *sum += exponential;
    memcpy(z, &result, count * sizeof(float));
}

/* One row (V,), see hotlap_head_rows. Returns the factor that its gradient still lacks. */
static float head_row(float *row, int V, int target, float softcap, float *loss) {
    float scale = -2 * LOG2_E / softcap, rate = -2 * softcap * LOG2_E, sum = 0;
    float target_r = r_of((vector_t){0} + scale * row[target])[0];
    float slope = target_r - target_r * target_r;
    vector_t sums = {0};
    int whole = V / LANES * LANES;
    for (int v = 0; v < whole; v += LANES) exponentials(row + v, LANES, scale, rate, &sums);
    if (whole < V) exponentials(row + whole, V - whole, scale, rate, &sums);
    for (int lane = 0; lane < LANES; lane++) sum += sums[lane];
    row[target] -= sum * slope;
    *loss = (log2f(sum) - rate * target_r) / LOG2_E;
    return 4 / sum;
}

/* The tokens of one thread; grad_weight (V, C): its share. */
static void head_tokens(const hotlap_head_t *h, const weight_t *weight, range_t range,
                        float *losses, float *grad_x, float *grad_weight, float *workspace) {
    int64_t C = h->C, V = h->V, chunk = h->chunk_tokens;
    float *logits = part(&workspace, chunk * V);   /* (tokens, V), then their gradient */
    float *scaled_x = part(&workspace, chunk * C); /* (tokens, C) */
    float *row_scales = part(&workspace, chunk);   /* (tokens,) */
    if (grad_x && range.first == range.past) memset(grad_weight, 0, V * C * sizeof(float));
    for (int start = range.first; start < range.past; start += chunk) {
        int tokens = min_int(chunk, range.past - start), accumulate = start > range.first;
        const float *x = h->x + start * C;
        matmul_weight(weight, tokens, x, 0, logits);
        for (int i = 0; i < tokens; i++)
            row_scales[i] = h->factor * head_row(logits + i * V, V, (int)h->targets[start + i],
                                                 h->softcap, losses + start + i);
        if (!grad_x) continue;
        float *grad = grad_x + start * C;
        matmul('N', 'N', tokens, C, V, 1, logits, V, h->weight, C, 0, grad, C);
        /* The rows' scales go to the narrow operand. */
        for (int i = 0; i < tokens; i++)
            for (int c = 0; c < C; c++) {
                grad[i * C + c] *= row_scales[i];
                scaled_x[i * C + c] = x[i * C + c] * row_scales[i];
            }
        matmul('T', 'N', V, C, tokens, 1, logits, V, scaled_x, C, accumulate, grad_weight, C);
    }
}

void hotlap_head(const hotlap_head_t *h, float *losses, float *grad_x, float *grad_weight,
                 float *grad_weight_shares, float *workspace, int num_threads) {
    int64_t size = (int64_t)h->V * h->C;
    const weight_t weight = place_weight(&workspace, h->weight, h->V, h->C, h->chunk_tokens);
#pragma omp parallel num_threads(num_threads)
    {
        pack_weights(&weight, 1);
#pragma omp for schedule(static, 1)
        for (int thread = 0; thread < num_threads; thread++) {
            float *share =
                thread && grad_x ? grad_weight_shares + (thread - 1) * size : grad_weight;
            head_tokens(h, &weight, thread_tokens(h->T, thread, num_threads), losses, grad_x, share,
                        workspace + thread * floats_per_thread(h));
        }
        if (grad_x) add_shares(grad_weight, grad_weight_shares, num_threads - 1, size);
    }
}

void hotlap_head_rows(float *logits, const int64_t *targets, int T, int V, float softcap,
                      float *losses, float *scales, int num_threads) {
#pragma omp parallel for schedule(static) num_threads(num_threads)
    for (int t = 0; t < T; t++)
        scales[t] = head_row(logits + (int64_t)t * V, V, (int)targets[t], softcap, losses + t);
}
