/* Masked attention, as in hotlap/attention/blocked.py.

   Scores lie transposed, a row of queries for each key: what belongs to a query (its maximum, its sum, what it sees) is
   then a lane of vectors, and of a product's operands only queries and their gradients have to be turned. A head's keys
   and values lie together, so that those of a window stay in a core's cache from tile to tile. */

#include "common.h"
#include "registers.h"

enum { TILE = 64, KEYS_AT_ONCE = 64 }; /* queries, keys: a square of scores and its operands fit the first cache */
enum { DIAGONAL_KEYS = 16 };           /* at once, of those that only some of a tile's queries may see */

/* Forward, a free thread takes some tiles of a head: as many as find keys of one another in its cache, but each thread has
   to take several times, so that none waits long for the last one. */
enum { MOST_TILES = 8, TURNS = 8 };

/* q (H, T, D), k and v (G, T, D). */
typedef struct {
    const float *q, *k, *v;
    const int32_t *first_key; /* (T,): query t sees the keys first_key[t] … t; never decreasing */
    int32_t T, H, G, D; /* D a multiple of attention_lanes() */
    float scale;
} attention_t;

typedef struct { int first, past; } range_t;

int attention_lanes(void) { return LANES; }

static inline int past_tile(const attention_t *a, int first) { return least(first + TILE, a->T); }

/* A thread's share of the queries of every head: whole tiles, which see about as many keys as those of the others. */
static range_t share(const attention_t *a, int thread, int num_threads) {
    int64_t all_keys = 0, before = 0;
    for (int first = 0; first < a->T; first += TILE) all_keys += past_tile(a, first) - a->first_key[first];
    int64_t from = all_keys * thread / num_threads, to = all_keys * (thread + 1) / num_threads;
    range_t found = {a->T, a->T};
    for (int first = 0; first < a->T; first += TILE) {
        if (before >= from && found.first == a->T) found.first = first;
        if (before >= to) { found.past = first; break; }
        before += past_tile(a, first) - a->first_key[first];
    }
    return found;
}

/* The most keys that a tile's first query sees before the tile. */
static int most_keys_before(const attention_t *a) {
    int most = 0;
    for (int first = 0; first < a->T; first += TILE)
        if (first - a->first_key[first] > most) most = first - a->first_key[first];
    return most;
}

/* What the queries of a tile see: those keys. Lanes past the last query see what it does. */
typedef struct {
    int first, queries;
    int32_t first_key[TILE], last_key[TILE];
} tile_t;

static tile_t tile_at(const attention_t *a, int first) {
    tile_t tile = {.first = first, .queries = past_tile(a, first) - first};
    for (int i = 0; i < TILE; i++) {
        tile.last_key[i] = first + least(i, tile.queries - 1);
        tile.first_key[i] = a->first_key[tile.last_key[i]];
    }
    return tile;
}

static inline int all_see(const tile_t *tile, int key, int keys) {
    return tile->first_key[TILE - 1] <= key && key + keys - 1 <= tile->first;
}

/* How many keys from `key` on to take at once, before `past`. */
static inline int keys_at_once(const tile_t *tile, int key, int past) {
    int is_diagonal = key >= tile->first;
    return least(is_diagonal ? DIAGONAL_KEYS : KEYS_AT_ONCE, (is_diagonal ? past : least(past, tile->first)) - key);
}

/* The first lane of a query that may see such keys, rounded down to a vector: those before it are left out. */
static inline int first_lane(const tile_t *tile, int key) {
    return key > tile->first ? (key - tile->first) / LANES * LANES : 0;
}

/* to (rows, D) = factor · from, with rows so far apart. */
static void pack(const float *from, int64_t stride, int rows, int D, float factor, float *to) {
    for (int i = 0; i < rows; i++)
        for (int d = 0; d < D; d++) to[i * D + d] = factor * from[i * stride + d];
}

/* Which of the queries from lane j on see a key. */
static inline lanes_t who_sees(const tile_t *tile, int j, int key) {
    return (*(const lanes_t *)(tile->first_key + j) <= key) & (key <= *(const lanes_t *)(tile->last_key + j));
}

/* Raise `most` (TILE,) to the largest of the scores (keys, TILE) that a query sees. */
static void raise_to_scores(const tile_t *tile, int key, int keys, const float *scores, float *most) {
    int hides = !all_see(tile, key, keys);
    vector_t so_far[TILE / LANES];
    memcpy(so_far, most, sizeof(so_far));
    for (int i = 0; i < keys; i++, scores += TILE)
#pragma GCC unroll 16
        for (int v = 0; v < TILE / LANES; v++) {
            vector_t raised = larger(*(const vector_t *)(scores + v * LANES), so_far[v]);
            so_far[v] = hides ? choose(who_sees(tile, v * LANES, key + i), raised, so_far[v]) : raised;
        }
    memcpy(most, so_far, sizeof(so_far));
}

/* Turn scores (keys, TILE) into 2^(score - less), and into 0 where a query does not see the key. What a query's add up
   to is added to its sum, unless there are none. */
static void exponentials(const tile_t *tile, int key, int keys, const float *less, float *scores, float *sums) {
    int hides = !all_see(tile, key, keys);
    for (int j = 0; j < TILE; j += LANES) {
        vector_t shift = *(const vector_t *)(less + j), sum = {0};
        for (int i = 0; i < keys; i++) {
            vector_t *at = (vector_t *)(scores + i * TILE + j), power = powers_of_2(*at - shift);
            if (hides) power = (vector_t)((lanes_t)power & who_sees(tile, j, key + i));
            *at = power;
            sum += power;
        }
        if (sums) *(vector_t *)(sums + j) += sum;
    }
}

/* out (keys, TILE): rows (keys, D) times the columns of `tile_T` (D, TILE), from lane `from` on. */
static void with_keys(const attention_t *a, const float *rows, int keys, const float *tile_T, int from, float *out) {
    product_in_cache((product_t){.m = keys, .n = TILE - from, .k = a->D, .left = rows, .left_row = a->D,
                                 .left_column = 1, .right = tile_T + from, .right_row = TILE, .out = out + from,
                                 .out_row = TILE, .alpha = 1});
}

/* out (queries, D) += scores (keys, TILE), transposed, times rows (keys, D). */
static void over_keys(const attention_t *a, const float *scores, int from, int queries, int keys, const float *rows,
                      int adds, float *out) {
    product_in_cache((product_t){.m = queries - from, .n = a->D, .k = keys, .left = scores + from, .left_row = 1,
                                 .left_column = TILE, .right = rows, .right_row = a->D, .out = out + from * a->D,
                                 .out_row = a->D, .base = adds ? out + from * a->D : NULL, .alpha = 1, .beta = 1});
}

/* out (keys, D) += scores (keys, TILE) times rows (queries, D). */
static void over_queries(const attention_t *a, const float *scores, int from, int queries, int keys, const float *rows,
                         float *out) {
    product_in_cache((product_t){.m = keys, .n = a->D, .k = queries - from, .left = scores + from, .left_row = TILE,
                                 .left_column = 1, .right = rows + from * a->D, .right_row = a->D, .out = out,
                                 .out_row = a->D, .base = out, .alpha = 1, .beta = 1});
}

/* Where a head's tokens from `token` on lie in (heads, T, D). */
static inline int64_t at_token(const attention_t *a, int head, int token) {
    return ((int64_t)head * a->T + token) * a->D;
}

/* Floats of workspace a thread. */
int64_t attention_forward_floats(const attention_t *a) {
    return TILE * ((int64_t)most_keys_before(a) + TILE + 2 * a->D);
}

/* out (T, H, D). */
static void forward_tile(const attention_t *a, int first, int kv_head, int head, float *workspace, float *out,
                         float *log_sums) {
    tile_t tile = tile_at(a, first);
    int D = a->D, first_key = tile.first_key[0], past = first + tile.queries;
    float *queries_T = workspace, *sums_of_values = queries_T + TILE * D, *scores = sums_of_values + TILE * D;
    float most[TILE], sums[TILE];
    transpose_in_cache(a->q + at_token(a, head, first), D, tile.queries, D, a->scale * LOG2_E, queries_T, TILE);
    for (int j = 0; j < TILE; j++) most[j] = -INFINITY, sums[j] = 0;
    for (int key = first_key, keys; key < past; key += keys) {
        float *of_keys = scores + (int64_t)(key - first_key) * TILE;
        keys = keys_at_once(&tile, key, past);
        with_keys(a, a->k + at_token(a, kv_head, key), keys, queries_T, first_lane(&tile, key), of_keys);
        raise_to_scores(&tile, key, keys, of_keys, most);
    }
    for (int key = first_key, keys; key < past; key += keys) {
        float *of_keys = scores + (int64_t)(key - first_key) * TILE;
        keys = keys_at_once(&tile, key, past);
        exponentials(&tile, key, keys, most, of_keys, sums);
        over_keys(a, of_keys, first_lane(&tile, key), tile.queries, keys, a->v + at_token(a, kv_head, key),
                  key > first_key, sums_of_values);
    }
    for (int i = 0; i < tile.queries; i++) {
        pack(sums_of_values + i * D, D, 1, D, 1 / sums[i], out + ((int64_t)(first + i) * a->H + head) * D);
        log_sums[(int64_t)head * a->T + first + i] = most[i] + log2f(sums[i]);
    }
}

/* out (T, H, D); log_sums (H, T): log2 of each query's sum of exponentials; workspace of num_threads ×
   attention_forward_floats. */
void attention_forward(const attention_t *a, float *out, float *log_sums, float *workspace, int num_threads) {
    int64_t floats_a_thread = attention_forward_floats(a);
    int tiles_a_turn = (a->T + TILE - 1) / TILE * a->H / (num_threads * TURNS);
    int queries = TILE * (tiles_a_turn < 1 ? 1 : least(tiles_a_turn, MOST_TILES));
    int turns_a_head = (a->T + queries - 1) / queries;
#pragma omp parallel for schedule(dynamic, 1) num_threads(num_threads)
    for (int turn = 0; turn < a->H * turns_a_head; turn++) {
        int head = turn / turns_a_head, start = turn % turns_a_head * queries, past = least(start + queries, a->T);
        for (int first = start; first < past; first += TILE)
            forward_tile(a, first, head / (a->H / a->G), head, workspace + omp_get_thread_num() * floats_a_thread, out,
                         log_sums);
    }
}

typedef struct {
    const float *grad, *out, *log_sums; /* grad and out (T, H, D) */
    float *grad_q, *grad_k, *grad_v;    /* as q, k and v */
} gradients_t;

/* Keys before the first query of a thread belong to another one. What is added to them waits here, as (G, keys, D). */
typedef struct { float *k, *v; int first, past; } spill_t;

/* What a tile of queries computes with. */
typedef struct {
    float *queries_T, *grads_T;            /* (D, TILE) */
    float *grads, *grad_q;                 /* (TILE, D) */
    float *scores, *grad_scores;           /* (KEYS_AT_ONCE, TILE) */
    float deltas[TILE], log_sums[TILE];
} backward_t;

static int64_t backward_tile_floats(const attention_t *a) {
    return TILE * (4 * (int64_t)a->D + 2 * KEYS_AT_ONCE);
}

/* Floats of workspace a thread. */
int64_t attention_backward_floats(const attention_t *a) {
    return backward_tile_floats(a) + 2 * (int64_t)most_keys_before(a) * a->G * a->D;
}

static backward_t backward_of(const attention_t *a, const gradients_t *g, const tile_t *tile, int head,
                              float *workspace) {
    int D = a->D, stride = a->H * D, matrix = TILE * D;
    int64_t at = (int64_t)tile->first * stride + head * D;
    backward_t b = {.queries_T = workspace, .grads_T = workspace + matrix, .grads = workspace + 2 * matrix,
                    .grad_q = workspace + 3 * matrix, .scores = workspace + 4 * matrix};
    b.grad_scores = b.scores + KEYS_AT_ONCE * TILE;
    transpose_in_cache(a->q + at_token(a, head, tile->first), D, tile->queries, D, a->scale * LOG2_E, b.queries_T,
                       TILE);
    pack(g->grad + at, stride, tile->queries, D, 1, b.grads);
    transpose_in_cache(b.grads, D, tile->queries, D, 1, b.grads_T, TILE);
    for (int i = 0; i < tile->queries; i++) {
        b.log_sums[i] = g->log_sums[(int64_t)head * a->T + tile->first + i];
        for (int d = 0; d < D; d++) b.deltas[i] += b.grads[i * D + d] * g->out[at + (int64_t)i * stride + d];
    }
    return b;
}

/* What `keys` keys from `key` on add to the gradients; grad_k and grad_v are theirs. */
static void backward_keys(const attention_t *a, const tile_t *tile, const backward_t *b, int kv_head, int head,
                          int key, int keys, float *grad_k, float *grad_v) {
    const float *k = a->k + at_token(a, kv_head, key), *v = a->v + at_token(a, kv_head, key);
    int from = first_lane(tile, key), queries = tile->queries;
    with_keys(a, k, keys, b->queries_T, from, b->scores);
    exponentials(tile, key, keys, b->log_sums, b->scores, NULL);
    over_queries(a, b->scores, from, queries, keys, b->grads, grad_v);
    with_keys(a, v, keys, b->grads_T, from, b->grad_scores);
    for (int i = 0; i < keys; i++)
        for (int j = 0; j < TILE; j++) {
            int at = i * TILE + j;
            b->grad_scores[at] = a->scale * b->scores[at] * (b->grad_scores[at] - b->deltas[j]);
        }
    over_queries(a, b->grad_scores, from, queries, keys, a->q + at_token(a, head, tile->first), grad_k);
    over_keys(a, b->grad_scores, from, queries, keys, k, key > tile->first_key[0], b->grad_q);
}

static void backward_tile(const attention_t *a, const gradients_t *g, int first, int kv_head, int head,
                          const spill_t *spill, float *workspace) {
    tile_t tile = tile_at(a, first);
    int D = a->D, past = first + tile.queries;
    backward_t b = backward_of(a, g, &tile, head, workspace);
    for (int key = tile.first_key[0], keys; key < past; key += keys) {
        int is_spilled = key < spill->past;
        keys = keys_at_once(&tile, key, is_spilled ? spill->past : past);
        int64_t in_spill = ((int64_t)kv_head * (spill->past - spill->first) + key - spill->first) * D;
        int64_t at = is_spilled ? in_spill : at_token(a, kv_head, key);
        backward_keys(a, &tile, &b, kv_head, head, key, keys, (is_spilled ? spill->k : g->grad_k) + at,
                      (is_spilled ? spill->v : g->grad_v) + at);
    }
    memcpy(g->grad_q + at_token(a, head, first), b.grad_q, sizeof(float) * tile.queries * D);
}

/* workspace of num_threads × attention_backward_floats. */
void attention_backward(const attention_t *a, const gradients_t *g, float *workspace, int num_threads) {
    int64_t floats_a_thread = attention_backward_floats(a);
    spill_t spills[num_threads];
#pragma omp parallel for schedule(static, 1) num_threads(num_threads)
    for (int thread = 0; thread < num_threads; thread++) {
        range_t queries = share(a, thread, num_threads);
        float *own = workspace + thread * floats_a_thread, *rest = own + backward_tile_floats(a);
        int first_key = queries.first < queries.past ? a->first_key[queries.first] : queries.first;
        int64_t floats = (int64_t)(queries.first - first_key) * a->G * a->D;
        spills[thread] = (spill_t){rest, rest + floats, first_key, queries.first};
        memset(rest, 0, 2 * floats * sizeof(float));
        for (int head = 0; head < a->H; head++) {
            int kv_head = head / (a->H / a->G), is_first = head % (a->H / a->G) == 0;
            for (int first = queries.first; first < queries.past; first += TILE) {
                if (is_first) {
                    /* A key's first gradient is that of the tile that it is in, which finds it in the cache. */
                    size_t bytes = sizeof(float) * (past_tile(a, first) - first) * a->D;
                    memset(g->grad_k + at_token(a, kv_head, first), 0, bytes);
                    memset(g->grad_v + at_token(a, kv_head, first), 0, bytes);
                }
                backward_tile(a, g, first, kv_head, head, spills + thread, own);
            }
        }
    }
    for (int thread = 0; thread < num_threads; thread++) {
        const spill_t *spill = spills + thread;
        int64_t floats = (int64_t)(spill->past - spill->first) * a->D;
        for (int kv_head = 0; kv_head < a->G; kv_head++) {
            int64_t to = at_token(a, kv_head, spill->first), from = kv_head * floats;
            for (int64_t i = 0; i < floats; i++) {
                g->grad_k[to + i] += spill->k[from + i];
                g->grad_v[to + i] += spill->v[from + i];
            }
        }
    }
}
