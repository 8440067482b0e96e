/* Masked attention and the softcapped head in float32, forward and backward, for a CPU.

   Every thread takes its own tokens through all of a kernel's products, so that what it computes stays in its
   core's cache; a library's product over all tokens would share it out anew each time. Matrices are row by row;
   products go to torch's own BLAS, whose address is handed in. `hotlap/attention/blocked.py` and
   `hotlap/model/head.py` say in PyTorch what is computed here.

   Letters: T tokens, H query heads, G key/value heads, D head dim, C width, V vocabulary. */

#include <math.h>
#include <omp.h>
#include <stdint.h>
#include <string.h>

enum { TILE = 128, KEYS_AT_ONCE = 512 };  /* two tiles of scores of so many keys fit a core's cache */

static const float LOG2_E = 1.4426950408889634f;

typedef void sgemm_t(const char *, const char *, const int *, const int *, const int *, const float *,
                     const float *, const int *, const float *, const int *, const float *, float *,
                     const int *);
static sgemm_t *sgemm;

void set_sgemm(sgemm_t *address) { sgemm = address; }

/* out (m, n) = alpha · left (m, k) · right (k, n) + beta · out. 'T': that operand lies transposed. BLAS counts by
   columns, where each of these matrices is its transpose: so the operands change places. */
static void product(char left_is, char right_is, int m, int n, int k, float alpha, const float *left,
                    int left_stride, const float *right, int right_stride, float beta, float *out,
                    int out_stride) {
    sgemm(&right_is, &left_is, &n, &m, &k, &alpha, right, &right_stride, left, &left_stride, &beta, out,
          &out_stride);
}

static inline int least(int a, int b) { return a < b ? a : b; }

/* 2^x within 2e-7 of it, for -126 ≤ x ≤ 126; NaN stays NaN. The polynomial is the best of its degree. */
static inline float power_of_2(float x) {
    float whole = rintf(x), rest = x - whole;
    float power = 1.32647272e-3f;
    power = power * rest + 9.67151264e-3f;
    power = power * rest + 5.55073374e-2f;
    power = power * rest + 2.40222421e-1f;
    power = power * rest + 6.93146978e-1f;
    power = power * rest + 1.0f;
    union { int32_t bits; float value; } scale = {.bits = ((int32_t)whole + 127) << 23};
    return power * scale.value;
}

/* A difference to a maximum, or to a logarithm that is as large: below zero but for rounding. */
static inline float power_of_2_below_0(float x) { return power_of_2(x < -126.0f ? -126.0f : x); }

/* ---- attention ---- */

/* q, out and their gradients are (T, H, D), k and v (T, G, D); heads lie side by side, tokens so far apart. */
typedef struct {
    const float *q, *k, *v;
    const int32_t *first_key; /* (T,): query t sees the keys first_key[t] … t; never decreasing */
    int32_t T, H, G, D, q_stride, k_stride, v_stride;
    float scale;
} attention_t;

typedef struct { int first, past; } range_t;

/* A thread's share of the (key/value head, tile) pairs, counted head by head: equal numbers of keys. */
static range_t share(const attention_t *a, int thread, int num_threads) {
    int tiles = (a->T + TILE - 1) / TILE;
    int64_t keys_of_head = 0, before = 0;
    for (int tile = 0; tile < tiles; tile++)
        keys_of_head += least((tile + 1) * TILE, a->T) - a->first_key[tile * TILE];
    int64_t from = keys_of_head * a->G * thread / num_threads;
    int64_t to = keys_of_head * a->G * (thread + 1) / num_threads;
    range_t found = {a->G * tiles, a->G * tiles};
    for (int pair = 0; pair < a->G * tiles; pair++) {
        if (before >= from && found.first == a->G * tiles) found.first = pair;
        if (before >= to) { found.past = pair; break; }
        int tile = pair % tiles;
        before += least((tile + 1) * TILE, a->T) - a->first_key[tile * TILE];
    }
    return found;
}

/* Rows of scores lie so far apart: a multiple of a cache line, and no power of two, which would share lines. */
static inline int row_stride(int keys) { return (keys + 15) / 16 * 16 + 16; }

/* The most keys that a tile's first query sees before the tile. */
static int most_keys_before(const attention_t *a) {
    int most = 0;
    for (int first = 0; first < a->T; first += TILE)
        if (first - a->first_key[first] > most) most = first - a->first_key[first];
    return most;
}

/* Floats of workspace a thread. */
int64_t attention_forward_floats(const attention_t *a) {
    return (int64_t)TILE * row_stride(most_keys_before(a) + TILE);
}

static void forward_tile(const attention_t *a, int first, int kv_head, int head, float *scores, float *out,
                         float *log_sums) {
    int D = a->D, queries = least(TILE, a->T - first), first_key = a->first_key[first];
    int keys = first + queries - first_key, stride = row_stride(keys), out_stride = a->H * D;
    const float *k = a->k + (int64_t)first_key * a->k_stride + kv_head * D;
    const float *v = a->v + (int64_t)first_key * a->v_stride + kv_head * D;
    float inverse_sums[TILE];
    product('N', 'T', queries, keys, D, a->scale * LOG2_E, a->q + (int64_t)first * a->q_stride + head * D,
            a->q_stride, k, a->k_stride, 0, scores, stride);
    for (int i = 0; i < queries; i++) {
        float *row = scores + (int64_t)i * stride;
        int from = a->first_key[first + i] - first_key, past = first + i - first_key + 1;
        float most = row[from], sum = 0;
#pragma omp simd reduction(max : most)
        for (int j = from; j < past; j++) most = row[j] > most ? row[j] : most;
        for (int j = from; j < past; j++) {
            row[j] = power_of_2_below_0(row[j] - most);
            sum += row[j];
        }
        memset(row, 0, from * sizeof(float));
        memset(row + past, 0, (keys - past) * sizeof(float));
        inverse_sums[i] = 1 / sum;
        log_sums[(int64_t)head * a->T + first + i] = most + log2f(sum);
    }
    out += (int64_t)first * out_stride + head * D;
    product('N', 'N', queries, D, keys, 1, scores, stride, v, a->v_stride, 0, out, out_stride);
    for (int i = 0; i < queries; i++)
        for (int d = 0; d < D; d++) out[(int64_t)i * out_stride + d] *= inverse_sums[i];
}

/* out (T, H, D); log_sums (H, T): log2 of each query's sum of exponentials; workspace of num_threads ×
   attention_forward_floats. */
void attention_forward(const attention_t *a, float *out, float *log_sums, float *workspace, int num_threads) {
    int64_t floats_a_thread = attention_forward_floats(a);
    int tiles = (a->T + TILE - 1) / TILE, heads_per_kv = a->H / a->G;
#pragma omp parallel for schedule(static, 1) num_threads(num_threads)
    for (int thread = 0; thread < num_threads; thread++) {
        range_t pairs = share(a, thread, num_threads);
        for (int pair = pairs.first; pair < pairs.past; pair++)
            for (int head = 0; head < heads_per_kv; head++)
                forward_tile(a, pair % tiles * TILE, pair / tiles, pair / tiles * heads_per_kv + head,
                             workspace + thread * floats_a_thread, out, log_sums);
    }
}

typedef struct {
    const float *grad, *out, *log_sums; /* grad and out (T, H, D) without gaps */
    float *grad_q, *grad_k, *grad_v;    /* without gaps; of k and v zero at the start */
} gradients_t;

/* Keys before the first tile of a thread belong to another one. What is added to them waits here. */
typedef struct { float *k, *v; int kv_head, first, past; } spill_t;

/* Floats of workspace a thread. */
int64_t attention_backward_floats(const attention_t *a) {
    return 2 * (int64_t)TILE * row_stride(KEYS_AT_ONCE) + 2 * (int64_t)most_keys_before(a) * a->D;
}

/* The scores of `keys` keys from `first_key` on, and what they add to the gradients. */
static void backward_keys(const attention_t *a, const gradients_t *g, int first, int kv_head, int head,
                          int first_key, int keys, const float *deltas, float *workspace, float *grad_k,
                          float *grad_v, int grad_stride, int is_first) {
    int D = a->D, H = a->H, queries = least(TILE, a->T - first), stride = row_stride(KEYS_AT_ONCE);
    float *scores = workspace, *grad_scores = workspace + TILE * stride;
    const float *q = a->q + (int64_t)first * a->q_stride + head * D;
    const float *k = a->k + (int64_t)first_key * a->k_stride + kv_head * D;
    const float *v = a->v + (int64_t)first_key * a->v_stride + kv_head * D;
    const float *grad = g->grad + ((int64_t)first * H + head) * D;
    product('N', 'T', queries, keys, D, a->scale * LOG2_E, q, a->q_stride, k, a->k_stride, 0, scores, stride);
    product('N', 'T', queries, keys, D, 1, grad, H * D, v, a->v_stride, 0, grad_scores, stride);
    for (int i = 0; i < queries; i++) {
        float *row = scores + i * stride, *grad_row = grad_scores + i * stride;
        float log_sum = g->log_sums[(int64_t)head * a->T + first + i], delta = deltas[i];
        int from = a->first_key[first + i] - first_key, past = least(first + i - first_key + 1, keys);
        from = from < 0 ? 0 : least(from, keys);
        past = past < from ? from : past;
        for (int j = from; j < past; j++) {
            row[j] = power_of_2_below_0(row[j] - log_sum);
            grad_row[j] = row[j] * (grad_row[j] - delta);
        }
        memset(row, 0, from * sizeof(float));
        memset(grad_row, 0, from * sizeof(float));
        memset(row + past, 0, (keys - past) * sizeof(float));
        memset(grad_row + past, 0, (keys - past) * sizeof(float));
    }
    product('T', 'N', keys, D, queries, 1, scores, stride, grad, H * D, 1, grad_v, grad_stride);
    product('T', 'N', keys, D, queries, a->scale, grad_scores, stride, q, a->q_stride, 1, grad_k, grad_stride);
    product('N', 'N', queries, D, keys, a->scale, grad_scores, stride, k, a->k_stride, is_first ? 0 : 1,
            g->grad_q + ((int64_t)first * H + head) * D, H * D);
}

static void backward_tile(const attention_t *a, const gradients_t *g, int first, int kv_head, int head,
                          const spill_t *spill, float *workspace) {
    int D = a->D, queries = least(TILE, a->T - first), past = first + queries, stride = a->G * D;
    float deltas[TILE];
    for (int i = 0; i < queries; i++) {
        int64_t at = ((int64_t)(first + i) * a->H + head) * D;
        deltas[i] = 0;
        for (int d = 0; d < D; d++) deltas[i] += g->grad[at + d] * g->out[at + d];
    }
    for (int key = a->first_key[first], keys; key < past; key += keys) {
        int is_spilled = kv_head == spill->kv_head && key < spill->past;
        keys = least(KEYS_AT_ONCE, (is_spilled ? least(spill->past, past) : past) - key);
        int64_t at = is_spilled ? (int64_t)(key - spill->first) * D : (int64_t)key * stride + kv_head * D;
        backward_keys(a, g, first, kv_head, head, key, keys, deltas, workspace,
                      (is_spilled ? spill->k : g->grad_k) + at, (is_spilled ? spill->v : g->grad_v) + at,
                      is_spilled ? D : stride, key == a->first_key[first]);
    }
}

/* workspace of num_threads × attention_backward_floats. */
void attention_backward(const attention_t *a, const gradients_t *g, float *workspace, int num_threads) {
    int64_t floats_a_thread = attention_backward_floats(a);
    int tiles = (a->T + TILE - 1) / TILE, heads_per_kv = a->H / a->G, stride = a->G * a->D;
    spill_t spills[num_threads];
#pragma omp parallel for schedule(static, 1) num_threads(num_threads)
    for (int thread = 0; thread < num_threads; thread++) {
        range_t pairs = share(a, thread, num_threads);
        float *own = workspace + thread * floats_a_thread, *rest = own + 2 * TILE * row_stride(KEYS_AT_ONCE);
        spill_t *spill = spills + thread;
        *spill = (spill_t){.kv_head = -1};
        if (pairs.first < pairs.past) {
            int past = pairs.first % tiles * TILE, first = a->first_key[past];
            int64_t floats = (int64_t)(past - first) * a->D;
            *spill = (spill_t){rest, rest + floats, pairs.first / tiles, first, past};
            memset(rest, 0, 2 * floats * sizeof(float));
        }
        for (int pair = pairs.first; pair < pairs.past; pair++)
            for (int head = 0; head < heads_per_kv; head++)
                backward_tile(a, g, pair % tiles * TILE, pair / tiles, pair / tiles * heads_per_kv + head,
                              spill, own);
    }
    for (int thread = 0; thread < num_threads; thread++) {
        const spill_t *spill = spills + thread;
        for (int key = spill->first; spill->kv_head >= 0 && key < spill->past; key++)
            for (int d = 0; d < a->D; d++) {
                int64_t to = (int64_t)key * stride + spill->kv_head * a->D + d;
                int64_t from = (int64_t)(key - spill->first) * a->D + d;
                g->grad_k[to] += spill->k[from];
                g->grad_v[to] += spill->v[from];
            }
    }
}

/* ---- passes over tokens ---- */

/* RMS norm of each head, then its rotation. x and out (T, H, D), inverse_rms (T, H); cos and sin (T, D / 2), or NULL
   for no rotation. */
void norm_forward(const float *x, const float *cos, const float *sin, int T, int H, int D, float epsilon, float *out,
                  float *inverse_rms, int num_threads) {
    int half = D / 2;
#pragma omp parallel for schedule(static) num_threads(num_threads)
    for (int64_t row = 0; row < (int64_t)T * H; row++) {
        const float *from = x + row * D;
        float *to = out + row * D, sum = 0;
        for (int d = 0; d < D; d++) sum += from[d] * from[d];
        float scale = inverse_rms[row] = 1 / sqrtf(sum / D + epsilon);
        if (!cos) {
            for (int d = 0; d < D; d++) to[d] = from[d] * scale;
            continue;
        }
        const float *c = cos + row / H * half, *s = sin + row / H * half;
        for (int d = 0; d < half; d++) {
            float first = from[d] * scale, second = from[d + half] * scale;
            to[d] = first * c[d] + second * s[d];
            to[d + half] = second * c[d] - first * s[d];
        }
    }
}

/* From grad, that for out, grad_x. A rotation changes no dot product, so what is along `out` goes before turning back. */
void norm_backward(const float *grad, const float *out, const float *inverse_rms, const float *cos, const float *sin,
                   int T, int H, int D, float *grad_x, int num_threads) {
    int half = D / 2;
#pragma omp parallel for schedule(static) num_threads(num_threads)
    for (int64_t row = 0; row < (int64_t)T * H; row++) {
        const float *g = grad + row * D, *normed = out + row * D;
        float *to = grad_x + row * D, scale = inverse_rms[row], along = 0;
        for (int d = 0; d < D; d++) along += g[d] * normed[d];
        along /= D;
        if (!cos) {
            for (int d = 0; d < D; d++) to[d] = (g[d] - normed[d] * along) * scale;
            continue;
        }
        const float *c = cos + row / H * half, *s = sin + row / H * half;
        for (int d = 0; d < half; d++) {
            float first = (g[d] - normed[d] * along) * scale;
            float second = (g[d + half] - normed[d + half] * along) * scale;
            to[d] = first * c[d] - second * s[d];
            to[d + half] = second * c[d] + first * s[d];
        }
    }
}

/* out = weights[0] · a + weights[1] · b, all of `count` numbers. */
void mix_forward(const float *weights, const float *a, const float *b, int64_t count, float *out, int num_threads) {
    float of_a = weights[0], of_b = weights[1];
#pragma omp parallel for simd schedule(static) num_threads(num_threads)
    for (int64_t at = 0; at < count; at++) out[at] = of_a * a[at] + of_b * b[at];
}

/* From grad, that for out, those for a, b and, as one pair for each row of `row` numbers, for the weights. */
void mix_backward(const float *grad, const float *weights, const float *a, const float *b, int rows, int row,
                  float *grad_a, float *grad_b, float *grad_weights, int num_threads) {
    float of_a = weights[0], of_b = weights[1];
#pragma omp parallel for schedule(static) num_threads(num_threads)
    for (int i = 0; i < rows; i++) {
        int64_t first = (int64_t)i * row;
        float along_a = 0, along_b = 0;
        for (int64_t at = first; at < first + row; at++) {
            along_a += grad[at] * a[at];
            along_b += grad[at] * b[at];
            grad_a[at] = of_a * grad[at];
            grad_b[at] = of_b * grad[at];
        }
        grad_weights[2 * i] = along_a;
        grad_weights[2 * i + 1] = along_b;
    }
}

/* ---- tables ---- */

/* The rows of `table` that have a gradient, against it over the root of its mean square; `squares` keeps that, and
   inverse_correction is what it is multiplied by while it is young. All (rows, width). */
void step_rows(float *table, const float *grad, float *squares, int rows, int width, float lr, float beta2,
               float inverse_correction, float epsilon, int num_threads) {
#pragma omp parallel for schedule(static) num_threads(num_threads)
    for (int row = 0; row < rows; row++) {
        int64_t first = (int64_t)row * width, past = first + width;
        int touched = 0;
        for (int64_t at = first; at < past; at++) touched |= grad[at] != 0;
        if (!touched) continue;
        for (int64_t at = first; at < past; at++) {
            squares[at] += (1 - beta2) * (grad[at] * grad[at] - squares[at]);
            table[at] -= lr * grad[at] / (sqrtf(squares[at] * inverse_correction) + epsilon);
        }
    }
}

/* ---- sums over threads ---- */

/* Within a parallel region, by all of its threads: sum (count) += each of `others` (num_others, count). */
static void add_up(float *sum, const float *others, int num_others, int64_t count) {
#pragma omp for schedule(static)
    for (int64_t at = 0; at < count; at++)
        for (int other = 0; other < num_others; other++) sum[at] += others[other * count + at];
}

/* ---- MLP with ReLU² ---- */

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

/* ---- head ---- */

int64_t head_floats(int chunk_tokens, int C, int V) { return (int64_t)chunk_tokens * (V + C + 1); }

/* r = (1 - tanh(z / s)) / 2 for x = -2·log2(e)·z / s. */
static inline float r_of(float x) {
    x = x < -126.0f ? -126.0f : x;
    x = x > 126.0f ? 126.0f : x;
    return 1 / (1 + power_of_2(-x));
}

/* Turn a row of -2·log2(e)·logits / softcap into the gradient for the logits, up to a factor that is returned.
   With r as above: exp(s·tanh(z/s)) ∝ 2^(-2·s·log2(e)·r), whose exponent is above -126 for the softcaps that come
   here, and 1 - tanh² = 4·(r - r²). */
static float head_row(float *row, int V, int target, float softcap, float *loss) {
    float rate = -2 * softcap * LOG2_E, sum = 0;
    float of_target = r_of(row[target]), slope = of_target - of_target * of_target;
    for (int v = 0; v < V; v++) {
        float r = r_of(row[v]), exponential = power_of_2(rate * r);
        sum += exponential;
        row[v] = exponential * (r - r * r);
    }
    row[target] -= sum * slope;
    *loss = (log2f(sum) - rate * of_target) / LOG2_E;
    return 4 / sum;
}

/* x (T, C), weight (V, C). losses (T,): unscaled. Where grad_x (T, C) is not NULL, it and grad_weight (V, C) become
   the gradients of factor · Σ losses; grad_weights (num_threads - 1, V, C) is for the other threads' shares.
   workspace of num_threads × head_floats. */
void head(const float *x, const float *weight, const int64_t *targets, int T, int C, int V, float softcap,
          float factor, int chunk_tokens, float *losses, float *grad_x, float *grad_weight, float *grad_weights,
          float *workspace, int num_threads) {
    int64_t weights = (int64_t)V * C;
#pragma omp parallel num_threads(num_threads)
    {
#pragma omp for schedule(static, 1)
        for (int thread = 0; thread < num_threads; thread++) {
            float *logits = workspace + thread * head_floats(chunk_tokens, C, V);
            float *scaled_x = logits + (int64_t)chunk_tokens * V, *row_scales = scaled_x + (int64_t)chunk_tokens * C;
            float *share = thread ? grad_weights + (thread - 1) * weights : grad_weight;
            int first = (int64_t)T * thread / num_threads, past = (int64_t)T * (thread + 1) / num_threads;
            if (grad_x && first == past) memset(share, 0, weights * sizeof(float));
            for (int start = first; start < past; start += chunk_tokens) {
                int tokens = least(chunk_tokens, past - start);
                const float *x_chunk = x + (int64_t)start * C;
                product('N', 'T', tokens, V, C, -2 * LOG2_E / softcap, x_chunk, C, weight, C, 0, logits, V);
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
