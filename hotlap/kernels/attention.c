/* Masked attention, as in hotlap/attention/blocked.py. */

#include "common.h"

enum { MOST_TILE = 128, KEYS_AT_ONCE = 512 }; /* two tiles of scores of so many keys fit a core's cache */

/* A difference to a maximum, or to a logarithm that is as large: below zero but for rounding. */
static inline float power_of_2_below_0(float x) { return power_of_2(x < -126.0f ? -126.0f : x); }

/* q, out and their gradients are (T, H, D), k and v (T, G, D); heads lie side by side, tokens so far apart. */
typedef struct {
    const float *q, *k, *v;
    const int32_t *first_key; /* (T,): query t sees the keys first_key[t] … t; never decreasing */
    int32_t T, H, G, D, q_stride, k_stride, v_stride;
    int32_t tile; /* queries of a tile, at most MOST_TILE */
    float scale;
} attention_t;

typedef struct { int first, past; } range_t;

static inline int past_tile(const attention_t *a, int first) { return least(first + a->tile, a->T); }

/* A thread's share of the queries: whole tiles, which see about as many keys as those of the other threads. A tile's
   heads lie side by side, so one thread takes them all, one after the other, while they are in its core's cache. */
static range_t share(const attention_t *a, int thread, int num_threads) {
    int64_t all_keys = 0, before = 0;
    for (int first = 0; first < a->T; first += a->tile) all_keys += past_tile(a, first) - a->first_key[first];
    int64_t from = all_keys * thread / num_threads, to = all_keys * (thread + 1) / num_threads;
    range_t found = {a->T, a->T};
    for (int first = 0; first < a->T; first += a->tile) {
        if (before >= from && found.first == a->T) found.first = first;
        if (before >= to) { found.past = first; break; }
        before += past_tile(a, first) - a->first_key[first];
    }
    return found;
}

/* Rows of scores lie so far apart: a multiple of a cache line, and no power of two, which would share lines. */
static inline int row_stride(int keys) { return (keys + 15) / 16 * 16 + 16; }

/* The most keys that a tile's first query sees before the tile. */
static int most_keys_before(const attention_t *a) {
    int most = 0;
    for (int first = 0; first < a->T; first += a->tile)
        if (first - a->first_key[first] > most) most = first - a->first_key[first];
    return most;
}

/* Floats of workspace a thread. */
int64_t attention_forward_floats(const attention_t *a) {
    return (int64_t)a->tile * row_stride(most_keys_before(a) + a->tile);
}

static void forward_tile(const attention_t *a, int first, int kv_head, int head, float *scores, float *out,
                         float *log_sums) {
    int D = a->D, queries = least(a->tile, a->T - first), first_key = a->first_key[first];
    int keys = first + queries - first_key, stride = row_stride(keys), out_stride = a->H * D;
    const float *k = a->k + (int64_t)first_key * a->k_stride + kv_head * D;
    const float *v = a->v + (int64_t)first_key * a->v_stride + kv_head * D;
    float inverse_sums[MOST_TILE];
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
#pragma omp parallel for schedule(static, 1) num_threads(num_threads)
    for (int thread = 0; thread < num_threads; thread++) {
        range_t queries = share(a, thread, num_threads);
        for (int first = queries.first; first < queries.past; first += a->tile)
            for (int head = 0; head < a->H; head++)
                forward_tile(a, first, head / (a->H / a->G), head, workspace + thread * floats_a_thread, out,
                             log_sums);
    }
}

typedef struct {
    const float *grad, *out, *log_sums; /* grad and out (T, H, D) without gaps */
    float *grad_q, *grad_k, *grad_v;    /* without gaps */
} gradients_t;

/* Keys before the first query of a thread belong to another one. What is added to them waits here, as (keys, G, D). */
typedef struct { float *k, *v; int first, past; } spill_t;

/* Floats of workspace a thread. */
int64_t attention_backward_floats(const attention_t *a) {
    return 2 * (int64_t)a->tile * row_stride(KEYS_AT_ONCE) + 2 * (int64_t)most_keys_before(a) * a->G * a->D;
}

/* The scores of `keys` keys from `first_key` on, and what they add to the gradients. */
static void backward_keys(const attention_t *a, const gradients_t *g, int first, int kv_head, int head,
                          int first_key, int keys, const float *deltas, float *workspace, float *grad_k,
                          float *grad_v, int grad_stride, int is_first) {
    int D = a->D, H = a->H, queries = least(a->tile, a->T - first), stride = row_stride(KEYS_AT_ONCE);
    float *scores = workspace, *grad_scores = workspace + a->tile * stride;
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
    int D = a->D, queries = least(a->tile, a->T - first), past = first + queries, stride = a->G * D;
    float deltas[MOST_TILE];
    for (int i = 0; i < queries; i++) {
        int64_t at = ((int64_t)(first + i) * a->H + head) * D;
        deltas[i] = 0;
        for (int d = 0; d < D; d++) deltas[i] += g->grad[at + d] * g->out[at + d];
    }
    for (int key = a->first_key[first], keys; key < past; key += keys) {
        int is_spilled = key < spill->past;
        keys = least(KEYS_AT_ONCE, (is_spilled ? spill->past : past) - key);
        int64_t at = (int64_t)(is_spilled ? key - spill->first : key) * stride + kv_head * D;
        backward_keys(a, g, first, kv_head, head, key, keys, deltas, workspace,
                      (is_spilled ? spill->k : g->grad_k) + at, (is_spilled ? spill->v : g->grad_v) + at, stride,
                      key == a->first_key[first]);
    }
}

/* workspace of num_threads × attention_backward_floats. */
void attention_backward(const attention_t *a, const gradients_t *g, float *workspace, int num_threads) {
    int64_t floats_a_thread = attention_backward_floats(a);
    int stride = a->G * a->D;
    spill_t spills[num_threads];
#pragma omp parallel for schedule(static, 1) num_threads(num_threads)
    for (int thread = 0; thread < num_threads; thread++) {
        range_t queries = share(a, thread, num_threads);
        float *own = workspace + thread * floats_a_thread, *rest = own + 2 * a->tile * row_stride(KEYS_AT_ONCE);
        int first_key = queries.first < queries.past ? a->first_key[queries.first] : queries.first;
        int64_t floats = (int64_t)(queries.first - first_key) * stride;
        spills[thread] = (spill_t){rest, rest + floats, first_key, queries.first};
        memset(rest, 0, 2 * floats * sizeof(float));
        for (int first = queries.first; first < queries.past; first += a->tile) {
            /* A key's first gradient is that of the tile that it is in, which finds it in the cache. */
            int64_t at = (int64_t)first * stride, own_floats = (int64_t)(past_tile(a, first) - first) * stride;
            memset(g->grad_k + at, 0, own_floats * sizeof(float));
            memset(g->grad_v + at, 0, own_floats * sizeof(float));
            for (int head = 0; head < a->H; head++)
                backward_tile(a, g, first, head / (a->H / a->G), head, spills + thread, own);
        }
    }
    for (int thread = 0; thread < num_threads; thread++) {
        const spill_t *spill = spills + thread;
        int64_t to = (int64_t)spill->first * stride;
        for (int64_t at = 0; at < (int64_t)(spill->past - spill->first) * stride; at++) {
            g->grad_k[to + at] += spill->k[at];
            g->grad_v[to + at] += spill->v[at];
        }
    }
}
