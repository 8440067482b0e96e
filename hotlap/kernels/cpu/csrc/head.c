/* The softcapped head and its loss, as in hotlap/model/head.py. */

#include "common.h"
#include "vectors.h"
#include "weights.h"

static int64_t floats_a_thread(int chunk_tokens, int C, int V) { return (int64_t)chunk_tokens * (V + C + 1); }

int64_t head_floats(int chunk_tokens, int C, int V, int num_threads) {
    return packed_floats(V, C, chunk_tokens) + num_threads * floats_a_thread(chunk_tokens, C, V);
}

/* r = (1 - tanh(z / s)) / 2 for x = -2·log2(e)·z / s. */
static inline vector_t r_of(vector_t x) {
    return inverses(1 + powers_of_2(-larger((vector_t){0} - 126.0f, x)));
}

/* Of some numbers x as above, their exponentials, whose sum is added to *sum; and exponential · (r - r²) in their place.
   Their exponent is above -126 for the softcaps that come here. */
static inline void exponentials(float *x, int count, float rate, vector_t *sum) {
    vector_t given = {0};
    memcpy(&given, x, count * sizeof(float));
    vector_t r = r_of(given), exponential = powers_of_2(rate * r), made = exponential * (r - r * r);
    for (int lane = count; lane < LANES; lane++) exponential[lane] = 0;
    *sum += exponential;
    memcpy(x, &made, count * sizeof(float));
}

/* Turn a row of -2·log2(e)·logits / softcap into the gradient for the logits, up to a factor that is returned.
   With r as above: exp(s·tanh(z/s)) ∝ 2^(-2·s·log2(e)·r), and 1 - tanh² = 4·(r - r²). */
static float head_row(float *row, int V, int target, float softcap, float *loss) {
    float rate = -2 * softcap * LOG2_E, sum = 0;
    float of_target = r_of((vector_t){0} + row[target])[0], slope = of_target - of_target * of_target;
    vector_t sums = {0};
    int whole = V / LANES * LANES;
    for (int v = 0; v < whole; v += LANES) exponentials(row + v, LANES, rate, &sums);
    if (whole < V) exponentials(row + whole, V - whole, rate, &sums);
    for (int lane = 0; lane < LANES; lane++) sum += sums[lane];
    row[target] -= sum * slope;
    *loss = (log2f(sum) - rate * of_target) / LOG2_E;
    return 4 / sum;
}

/* x (T, C), weight (V, C). losses (T,): unscaled. Where grad_x (T, C) is not NULL, it and grad_weight (V, C) become
   the gradients of factor · Σ losses; grad_weights (num_threads - 1, V, C) is for the other threads' shares.
   workspace of head_floats. */
void head(const float *x, const float *weight, const int64_t *targets, int T, int C, int V, float softcap,
          float factor, int chunk_tokens, float *losses, float *grad_x, float *grad_weight, float *grad_weights,
          float *workspace, int num_threads) {
    int64_t weights = (int64_t)V * C;
    const weight_t of_logits = weight_in(&workspace, weight, V, C, -2 * LOG2_E / softcap, chunk_tokens);
#pragma omp parallel num_threads(num_threads)
    {
        pack_weights(&of_logits, 1);
#pragma omp for schedule(static, 1)
        for (int thread = 0; thread < num_threads; thread++) {
            float *logits = workspace + thread * floats_a_thread(chunk_tokens, C, V);
            float *scaled_x = logits + (int64_t)chunk_tokens * V, *row_scales = scaled_x + (int64_t)chunk_tokens * C;
            float *share = thread ? grad_weights + (thread - 1) * weights : grad_weight;
            int first = (int64_t)T * thread / num_threads, past = (int64_t)T * (thread + 1) / num_threads;
            if (grad_x && first == past) memset(share, 0, weights * sizeof(float));
            for (int start = first; start < past; start += chunk_tokens) {
                int tokens = least(chunk_tokens, past - start);
                const float *x_chunk = x + (int64_t)start * C;
                times_weight(&of_logits, tokens, x_chunk, 0, logits);
                for (int i = 0; i < tokens; i++)
                    row_scales[i] = factor * head_row(logits + (int64_t)i * V, V, (int)targets[start + i],
                                                      softcap, losses + start + i);
                if (!grad_x) continue;
                float *grad_chunk = grad_x + (int64_t)start * C;
                product('N', 'N', tokens, C, V, 1, logits, V, weight, C, 0, grad_chunk, C);
                for (int i = 0; i < tokens; i++)
                    for (int c = 0; c < C; c++) {
                        grad_chunk[(int64_t)i * C + c] *= row_scales[i];
                        scaled_x[(int64_t)i * C + c] = x_chunk[(int64_t)i * C + c] * row_scales[i];
                    }
                product('T', 'N', V, C, tokens, 1, logits, V, scaled_x, C, start == first ? 0 : 1, share, C);
            }
        }
        if (grad_x) add_up(grad_weight, grad_weights, num_threads - 1, weights);
    }
}

/* All rows of logits (T, V), as head_row takes and leaves them. losses (T,): unscaled; scales (T,): the factors. */
void head_rows(float *logits, const int64_t *targets, int T, int V, float softcap, float *losses, float *scales,
               int num_threads) {
#pragma omp parallel for schedule(static) num_threads(num_threads)
    for (int i = 0; i < T; i++)
        scales[i] = head_row(logits + (int64_t)i * V, V, (int)targets[i], softcap, losses + i);
}
