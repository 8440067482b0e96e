/* Masked attention. The same in PyTorch: hotlap/attention/blocked.py.

   Queries are taken in tiles. Scores are kept transposed, (keys, TILE): what belongs to a query
   (its maximum, its sum, the keys that it sees) is then a lane of a vector, and of all operands
   only the queries and the gradients of the output have to be transposed. q, k and v are (heads, T,
   D), so that the keys and values of a window stay in a core's cache from one tile to the next. */

#include "common.h"
#include "small_matmul.h"

enum { TILE = 64, MAX_KEYS = 64 }; /* queries, keys at a time: their scores fit the L1 cache */
enum { DIAGONAL_KEYS = 16 };       /* keys at a time where only some of a tile's queries see them */

/* In the forward a free thread takes a task of up to MAX_TILES tiles of one head, which find each
   other's keys in its cache; each thread gets about TASKS_PER_THREAD of them, so that none waits
   long for the last one. */
enum { MAX_TILES = 8, TASKS_PER_THREAD = 8 };

int hotlap_vector_lanes(void) { return LANES; }

int hotlap_attention_mask_is_valid(const int32_t *first_key, int T) {
    int is_wrong = first_key[0] != 0;
    for (int t = 1; t < T; t++) is_wrong |= (first_key[t] < first_key[t - 1]) | (first_key[t] > t);
    return !is_wrong;
}

static inline int past_tile(const hotlap_attention_t *a, int first) {
    return min_int(first + TILE, a->T);
}

/* The queries, of every head, that belong to a thread in the backward: whole tiles, which see about
   as many keys as those of each other thread. */
static range_t thread_queries(const hotlap_attention_t *a, int thread, int num_threads) {
    int64_t all_keys = 0, before = 0;
    for (int first = 0; first < a->T; first += TILE)
        all_keys += past_tile(a, first) - a->first_key[first];
    int64_t from = all_keys * thread / num_threads, to = all_keys * (thread + 1) / num_threads;
    range_t found = {a->T, a->T};
    for (int first = 0; first < a->T; first += TILE) {
        if (before >= from && found.first == a->T) found.first = first;
        if (before >= to) {
            found.past = first;
            break;
        }
        before += past_tile(a, first) - a->first_key[first];
    }
    return found;
}

/* The largest number of keys before a tile that its first query sees. */
static int max_keys_before_tile(const hotlap_attention_t *a) {
    int most = 0;
    for (int first = 0; first < a->T; first += TILE)
        most = max_int(most, first - a->first_key[first]);
    return most;
}

/* A tile of queries and the keys first_key[i] ... last_key[i] that each of them sees. Lanes past
   the last query see the same keys as the last query. */
typedef struct {
    int first, queries;
    int32_t first_key[TILE], last_key[TILE];
} tile_t;

static tile_t tile_at(const hotlap_attention_t *a, int first) {
    tile_t tile = {.first = first, .queries = past_tile(a, first) - first};
    for (int i = 0; i < TILE; i++) {
        tile.last_key[i] = first + min_int(i, tile.queries - 1);
        tile.first_key[i] = a->first_key[tile.last_key[i]];
    }
    return tile;
}

/* Whether all queries of a tile see all of `keys` keys from `key` on. */
static inline int all_visible(const tile_t *tile, int key, int keys) {
    return tile->first_key[TILE - 1] <= key && key + keys - 1 <= tile->first;
}

/* Number of keys to take at a time from `key` on, before `past`. */
static inline int key_block_size(const tile_t *tile, int key, int past) {
    int is_diagonal = key >= tile->first;
    int end = is_diagonal ? past : min_int(past, tile->first);
    return min_int(is_diagonal ? DIAGONAL_KEYS : MAX_KEYS, end - key);
}

/* The lane of the first query that may see a key, rounded down to a whole vector: causality lets
   matmuls skip the lanes before it. */
static inline int first_lane(const tile_t *tile, int key) {
    return key > tile->first ? (key - tile->first) / LANES * LANES : 0;
}

/* to (rows, D) = factor * from (rows, D), with a leading dimension of ld_from. */
static void copy_rows(const float *from, int64_t ld_from, int rows, int D, float factor,
                      float *to) {
    for (int i = 0; i < rows; i++)
        for (int d = 0; d < D; d++) to[i * D + d] = factor * from[i * ld_from + d];
}

/* Per lane from j on, whether the query sees the key. */
static inline lanes_t visible(const tile_t *tile, int j, int key) {
    return (*(const lanes_t *)(tile->first_key + j) <= key) &
           (key <= *(const lanes_t *)(tile->last_key + j));
}

/* max (TILE,) = the maximum of itself and the visible ones of scores (keys, TILE). */
static void update_max(const tile_t *tile, int key, int keys, const float *scores, float *max) {
    int has_hidden = !all_visible(tile, key, keys);
    vector_t so_far[TILE / LANES];
    memcpy(so_far, max, sizeof(so_far));
    for (int i = 0; i < keys; i++, scores += TILE)
#pragma GCC unroll 16
        for (int v = 0; v < TILE / LANES; v++) {
            vector_t raised = max_vector(*(const vector_t *)(scores + v * LANES), so_far[v]);
            so_far[v] = has_hidden
                            ? select_vector(visible(tile, v * LANES, key + i), raised, so_far[v])
                            : raised;
        }
    memcpy(max, so_far, sizeof(so_far));
}

/* scores (keys, TILE) = 2^(scores - shift (TILE,)), 0 where hidden. Their sums over keys are added
   to sums (TILE,) unless that is NULL. */
static void exp2_scores(const tile_t *tile, int key, int keys, const float *shift, float *scores,
                        float *sums) {
    int has_hidden = !all_visible(tile, key, keys);
    for (int j = 0; j < TILE; j += LANES) {
        vector_t shift_j = *(const vector_t *)(shift + j), sum = {0};
        for (int i = 0; i < keys; i++) {
            vector_t *at = (vector_t *)(scores + i * TILE + j);
            vector_t power = exp2_vector(*at - shift_j);
            if (has_hidden) power = (vector_t)((lanes_t)power & visible(tile, j, key + i));
            *at = power;
            sum += power;
        }
        if (sums) *(vector_t *)(sums + j) += sum;
    }
}

/* out (keys, TILE) = rows (keys, D) * tile_T (D, TILE), of the lanes from `lane` on. */
static void matmul_keys(const hotlap_attention_t *a, const float *rows, int keys,
                        const float *tile_T, int lane, float *out) {
    small_matmul((small_matmul_t){.m = keys,
                                  .n = TILE - lane,
                                  .k = a->D,
                                  .a = rows,
                                  .a_row = a->D,
                                  .a_column = 1,
                                  .b = tile_T + lane,
                                  .ldb = TILE,
                                  .c = out + lane,
                                  .ldc = TILE,
                                  .alpha = 1});
}

/* out (queries, D) = scores^T * rows (keys, D), of scores (keys, TILE) from `lane` on; added to out
   if `accumulate`. */
static void sum_over_keys(const hotlap_attention_t *a, const float *scores, int lane, int queries,
                          int keys, const float *rows, int accumulate, float *out) {
    small_matmul((small_matmul_t){.m = queries - lane,
                                  .n = a->D,
                                  .k = keys,
                                  .a = scores + lane,
                                  .a_row = 1,
                                  .a_column = TILE,
                                  .b = rows,
                                  .ldb = a->D,
                                  .c = out + lane * a->D,
                                  .ldc = a->D,
                                  .base = accumulate ? out + lane * a->D : NULL,
                                  .alpha = 1,
                                  .beta = 1});
}

/* out (keys, D) += scores (keys, TILE) * rows (queries, D), of the queries from `lane` on. */
static void sum_over_queries(const hotlap_attention_t *a, const float *scores, int lane,
                             int queries, int keys, const float *rows, float *out) {
    small_matmul((small_matmul_t){.m = keys,
                                  .n = a->D,
                                  .k = queries - lane,
                                  .a = scores + lane,
                                  .a_row = TILE,
                                  .a_column = 1,
                                  .b = rows + lane * a->D,
                                  .ldb = a->D,
                                  .c = out,
                                  .ldc = a->D,
                                  .base = out,
                                  .alpha = 1,
                                  .beta = 1});
}

/* Index of (head, token, 0) in (heads, T, D). */
static inline int64_t token_index(const hotlap_attention_t *a, int head, int token) {
    return ((int64_t)head * a->T + token) * a->D;
}

/* ---- Forward --------------------------------------------------------------------------------- */

/* Floats of the scores of a tile with all keys that it sees: (keys, TILE). */
static int64_t scores_floats(const hotlap_attention_t *a) {
    return TILE * ((int64_t)max_keys_before_tile(a) + TILE);
}

static int64_t forward_floats_per_thread(const hotlap_attention_t *a) {
    return 2 * part_floats(TILE * (int64_t)a->D) + part_floats(scores_floats(a));
}

int64_t hotlap_attention_forward_floats(const hotlap_attention_t *a, int num_threads) {
    return num_threads * forward_floats_per_thread(a);
}

/* One tile of one head: scores of all its keys, then their exponentials and the weighted values. */
static void forward_tile(const hotlap_attention_t *a, int first, int kv_head, int head,
                         float *workspace, float *out, float *log_sums) {
    tile_t tile = tile_at(a, first);
    int D = a->D, first_key = tile.first_key[0], past = first + tile.queries;
    float *queries_T = part(&workspace, TILE * (int64_t)D);               /* (D, TILE) */
    float *weighted_values = part(&workspace, TILE * (int64_t)D);         /* (TILE, D) */
    float *scores = part(&workspace, TILE * (int64_t)(past - first_key)); /* (keys, TILE) */
    float max[TILE], sums[TILE];
    transpose_scaled(a->q + token_index(a, head, first), D, tile.queries, D, a->scale * LOG2_E,
                     queries_T, TILE);
    for (int j = 0; j < TILE; j++) max[j] = -INFINITY, sums[j] = 0;
    for (int key = first_key, keys; key < past; key += keys) {
        float *key_scores = scores + (int64_t)(key - first_key) * TILE;
        keys = key_block_size(&tile, key, past);
        matmul_keys(a, a->k + token_index(a, kv_head, key), keys, queries_T, first_lane(&tile, key),
                    key_scores);
        update_max(&tile, key, keys, key_scores, max);
    }
    for (int key = first_key, keys; key < past; key += keys) {
        float *key_scores = scores + (int64_t)(key - first_key) * TILE;
        keys = key_block_size(&tile, key, past);
        exp2_scores(&tile, key, keys, max, key_scores, sums);
        sum_over_keys(a, key_scores, first_lane(&tile, key), tile.queries, keys,
                      a->v + token_index(a, kv_head, key), key > first_key, weighted_values);
    }
    for (int i = 0; i < tile.queries; i++) {
        copy_rows(weighted_values + i * D, D, 1, D, 1 / sums[i],
                  out + ((int64_t)(first + i) * a->H + head) * D);
        log_sums[(int64_t)head * a->T + first + i] = max[i] + log2f(sums[i]);
    }
}

void hotlap_attention_forward(const hotlap_attention_t *a, float *out, float *log_sums,
                              float *workspace, int num_threads) {
    int64_t thread_floats = forward_floats_per_thread(a);
    int tiles = (a->T + TILE - 1) / TILE * a->H / (num_threads * TASKS_PER_THREAD);
    int queries = TILE * (tiles < 1 ? 1 : min_int(tiles, MAX_TILES)); /* per task */
    int tasks_per_head = (a->T + queries - 1) / queries;
#pragma omp parallel for schedule(dynamic, 1) num_threads(num_threads)
    for (int task = 0; task < a->H * tasks_per_head; task++) {
        int head = task / tasks_per_head;
        int start = task % tasks_per_head * queries, past = min_int(start + queries, a->T);
        for (int first = start; first < past; first += TILE)
            forward_tile(a, first, head / (a->H / a->G), head,
                         workspace + omp_get_thread_num() * thread_floats, out, log_sums);
    }
}

/* ---- Backward -------------------------------------------------------------------------------- */

/* Gradients of the keys first ... past - 1, which a thread's queries see but another thread's range
   holds: k and v (G, past - first, D), added to grad_k and grad_v after all threads are done. */
typedef struct {
    float *k, *v;
    int first, past;
} spill_t;

/* What the backward of one tile of queries computes with. */
typedef struct {
    float *queries_T, *grad_out_T; /* (D, TILE) */
    float *grad_out, *grad_q;      /* (TILE, D) */
    float *scores, *grad_scores;   /* (MAX_KEYS, TILE) */
    float deltas[TILE];            /* dot product of grad_out and out, per query */
    float log_sums[TILE];
} backward_t;

static int64_t backward_floats_per_thread(const hotlap_attention_t *a) {
    int64_t spilled = (int64_t)max_keys_before_tile(a) * a->G * a->D;
    return 4 * part_floats(TILE * (int64_t)a->D) + 2 * part_floats(TILE * MAX_KEYS) +
           2 * part_floats(spilled);
}

int64_t hotlap_attention_backward_floats(const hotlap_attention_t *a, int num_threads) {
    return num_threads * backward_floats_per_thread(a);
}

static backward_t place_backward(const hotlap_attention_t *a, float **workspace) {
    int64_t matrix = TILE * (int64_t)a->D;
    backward_t b = {.queries_T = part(workspace, matrix)};
    b.grad_out_T = part(workspace, matrix);
    b.grad_out = part(workspace, matrix);
    b.grad_q = part(workspace, matrix);
    b.scores = part(workspace, TILE * MAX_KEYS);
    b.grad_scores = part(workspace, TILE * MAX_KEYS);
    return b;
}

/* Gather what belongs to the queries of a tile. */
static void load_tile(const hotlap_attention_t *a, const hotlap_attention_gradients_t *g,
                      const tile_t *tile, int head, backward_t *b) {
    int D = a->D, stride = a->H * D;
    int64_t at = (int64_t)tile->first * stride + head * D;
    transpose_scaled(a->q + token_index(a, head, tile->first), D, tile->queries, D,
                     a->scale * LOG2_E, b->queries_T, TILE);
    copy_rows(g->grad_out + at, stride, tile->queries, D, 1, b->grad_out);
    transpose_scaled(b->grad_out, D, tile->queries, D, 1, b->grad_out_T, TILE);
    memset(b->deltas, 0, sizeof(b->deltas));
    memset(b->log_sums, 0, sizeof(b->log_sums));
    for (int i = 0; i < tile->queries; i++) {
        b->log_sums[i] = g->log_sums[(int64_t)head * a->T + tile->first + i];
        for (int d = 0; d < D; d++)
            b->deltas[i] += b->grad_out[i * D + d] * g->out[at + (int64_t)i * stride + d];
    }
}

/* What `keys` keys from `key` on contribute: to the tile's grad_q, and to grad_k and grad_v (keys,
   D) of the keys. */
static void backward_keys(const hotlap_attention_t *a, const tile_t *tile, const backward_t *b,
                          int kv_head, int head, int key, int keys, float *grad_k, float *grad_v) {
    const float *k = a->k + token_index(a, kv_head, key), *v = a->v + token_index(a, kv_head, key);
    int lane = first_lane(tile, key), queries = tile->queries;
    matmul_keys(a, k, keys, b->queries_T, lane, b->scores);
    exp2_scores(tile, key, keys, b->log_sums, b->scores, NULL);
    sum_over_queries(a, b->scores, lane, queries, keys, b->grad_out, grad_v);
    matmul_keys(a, v, keys, b->grad_out_T, lane, b->grad_scores);
    for (int i = 0; i < keys; i++)
        for (int j = 0; j < TILE; j++) {
            int at = i * TILE + j;
            b->grad_scores[at] = a->scale * b->scores[at] * (b->grad_scores[at] - b->deltas[j]);
        }
    sum_over_queries(a, b->grad_scores, lane, queries, keys,
                     a->q + token_index(a, head, tile->first), grad_k);
    sum_over_keys(a, b->grad_scores, lane, queries, keys, k, key > tile->first_key[0], b->grad_q);
}

static void backward_tile(const hotlap_attention_t *a, const hotlap_attention_gradients_t *g,
                          int first, int kv_head, int head, const spill_t *spill, backward_t *b) {
    tile_t tile = tile_at(a, first);
    int D = a->D, past = first + tile.queries;
    load_tile(a, g, &tile, head, b);
    for (int key = tile.first_key[0], keys; key < past; key += keys) {
        int is_spilled = key < spill->past;
        keys = key_block_size(&tile, key, is_spilled ? spill->past : past);
        int64_t in_spill =
            ((int64_t)kv_head * (spill->past - spill->first) + key - spill->first) * D;
        int64_t at = is_spilled ? in_spill : token_index(a, kv_head, key);
        backward_keys(a, &tile, b, kv_head, head, key, keys,
                      (is_spilled ? spill->k : g->grad_k) + at,
                      (is_spilled ? spill->v : g->grad_v) + at);
    }
    memcpy(g->grad_q + token_index(a, head, first), b->grad_q, sizeof(float) * tile.queries * D);
}

/* All tiles of a thread. */
static spill_t backward_queries(const hotlap_attention_t *a, const hotlap_attention_gradients_t *g,
                                range_t queries, float *workspace) {
    backward_t b = place_backward(a, &workspace);
    int first_key = queries.first < queries.past ? a->first_key[queries.first] : queries.first;
    int64_t spilled = (int64_t)(queries.first - first_key) * a->G * a->D;
    spill_t spill = {.first = first_key, .past = queries.first};
    spill.k = part(&workspace, spilled);
    spill.v = part(&workspace, spilled);
    memset(spill.k, 0, spilled * sizeof(float));
    memset(spill.v, 0, spilled * sizeof(float));
    for (int head = 0; head < a->H; head++) {
        int kv_head = head / (a->H / a->G), is_first = head % (a->H / a->G) == 0;
        for (int first = queries.first; first < queries.past; first += TILE) {
            if (is_first) {
                /* Cleared just before the tile of the same tokens adds to it, and so in the cache.
                 */
                size_t bytes = sizeof(float) * (past_tile(a, first) - first) * a->D;
                memset(g->grad_k + token_index(a, kv_head, first), 0, bytes);
                memset(g->grad_v + token_index(a, kv_head, first), 0, bytes);
            }
            backward_tile(a, g, first, kv_head, head, &spill, &b);
        }
    }
    return spill;
}

void hotlap_attention_backward(const hotlap_attention_t *a, const hotlap_attention_gradients_t *g,
                               float *workspace, int num_threads) {
    int64_t thread_floats = backward_floats_per_thread(a);
    spill_t spills[num_threads];
#pragma omp parallel for schedule(static, 1) num_threads(num_threads)
    for (int thread = 0; thread < num_threads; thread++)
        spills[thread] = backward_queries(a, g, thread_queries(a, thread, num_threads),
                                          workspace + thread * thread_floats);
    for (int thread = 0; thread < num_threads; thread++) {
        const spill_t *spill = spills + thread;
        int64_t floats = (int64_t)(spill->past - spill->first) * a->D;
        for (int kv_head = 0; kv_head < a->G; kv_head++) {
            int64_t to = token_index(a, kv_head, spill->first), from = kv_head * floats;
            for (int64_t i = 0; i < floats; i++) {
                g->grad_k[to + i] += spill->k[from + i];
                g->grad_v[to + i] += spill->v[from + i];
            }
        }
    }
}
