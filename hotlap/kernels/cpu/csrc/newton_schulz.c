/* Newton-Schulz orthogonalization of small matrices: each from its norm to its last matmul on one
   core, whose cache it does not leave. The same in PyTorch: hotlap/optim/newton_schulz.py. */

#include "common.h"
#include "small_matmul.h"

enum { COLUMNS = MAX_VECTORS * LANES }; /* of a symmetric matmul at a time */

static inline int round_to_vector(int columns) { return (columns + LANES - 1) / LANES * LANES; }

/* Leading dimension of a matrix of `columns` columns: whole vectors, and no multiple of 64 floats,
   by which many rows would fall into the same sets of the cache. */
static inline int leading_dimension(int columns) {
    int whole = round_to_vector(columns);
    return whole % 64 ? whole : whole + LANES;
}

/* A thread's workspace: x and y (n, m), and four matrices (m, m), n >= m. */
static int64_t floats_per_thread(int n, int m) {
    int64_t ld = leading_dimension(m);
    return 2 * part_floats(ld * n) + 4 * part_floats(ld * m);
}

int64_t hotlap_newton_schulz_floats(const hotlap_newton_schulz_t *ns, int num_threads) {
    return num_threads *
           floats_per_thread(max_int(ns->rows, ns->cols), min_int(ns->rows, ns->cols));
}

/* x (count,) over its Frobenius norm. It is divided by its largest entry first, or squares of 1e30
   would overflow. */
static void normalize(float *x, int64_t count, float smallest) {
    float largest = 0, sum = 0;
    int has_nan = 0;
    for (int64_t i = 0; i < count; i++) {
        float size = fabsf(x[i]);
        largest = size > largest ? size : largest;
        has_nan |= size != size;
    }
    largest = has_nan ? NAN : largest < smallest ? smallest : largest;
    float scale = 1 / largest;
    for (int64_t i = 0; i < count; i++) {
        float scaled = x[i] * scale;
        sum += scaled * scaled;
    }
    float norm = sqrtf(sum), smallest_norm = smallest * scale;
    scale /= norm < smallest_norm ? smallest_norm : norm;
    for (int64_t i = 0; i < count; i++) x[i] *= scale;
}

/* out (m, m) = alpha * a^T * b + beta * base, where a and b (k, m) make it symmetric to the last
   digit: what is above the diagonal blocks is copied from below. All with leading dimension ld. */
static void symmetric_matmul(int m, int k, int ld, float alpha, const float *a, const float *b,
                             float beta, const float *base, float *out) {
    for (int j = 0; j < m; j += COLUMNS) {
        int columns = min_int(COLUMNS, round_to_vector(m - j)), below = j + columns;
        int64_t diagonal = (int64_t)j * ld + j;
        small_matmul((small_matmul_t){.m = m - j,
                                      .n = columns,
                                      .k = k,
                                      .a = a + j,
                                      .a_row = 1,
                                      .a_column = ld,
                                      .b = b + j,
                                      .ldb = ld,
                                      .c = out + diagonal,
                                      .ldc = ld,
                                      .base = base ? base + diagonal : NULL,
                                      .alpha = alpha,
                                      .beta = beta});
        if (below < m)
            transpose_scaled(out + (int64_t)below * ld + j, ld, m - below, columns, 1,
                             out + diagonal + columns, ld);
    }
}

/* out (rows, m) = alpha * a (rows, m) * b (m, m) + beta * base. All with leading dimension ld. */
static void full_matmul(int rows, int m, int ld, float alpha, const float *a, const float *b,
                        float beta, const float *base, float *out) {
    small_matmul((small_matmul_t){.m = rows,
                                  .n = round_to_vector(m),
                                  .k = m,
                                  .a = a,
                                  .a_row = ld,
                                  .a_column = 1,
                                  .b = b,
                                  .ldb = ld,
                                  .c = out,
                                  .ldc = ld,
                                  .base = base,
                                  .alpha = alpha,
                                  .beta = beta});
}

static inline void swap(float **a, float **b) {
    float *kept = *a;
    *a = *b, *b = kept;
}

/* x (n, m), n >= m, after all steps; returns x or y, whichever holds it. In a segment of several
   steps x is multiplied once, by the product of the polynomials of the segment. */
static float *iterate(const hotlap_newton_schulz_t *ns, float *x, float *y, float *workspace, int n,
                      int m) {
    int ld = leading_dimension(m);
    int64_t size = (int64_t)m * ld;
    float *gram = part(&workspace, size), *polynomial = part(&workspace, size);
    float *product = part(&workspace, size), *next = part(&workspace, size);
    for (int done = 0, length; done < ns->steps; done += length) {
        length = min_int(done ? ns->segment : ns->first_segment, ns->steps - done);
        symmetric_matmul(m, n, ld, 1, x, x, 0, NULL, gram);
        for (int i = 0; i < length; i++) {
            const float *c = ns->coefficients + 3 * (done + i);
            /* Only the first Gram matrix is symmetric to the last digit. To copy one half of the
               later ones would make the error five times as large. */
            if (i)
                full_matmul(m, m, ld, c[2], gram, gram, c[1], gram, polynomial);
            else
                symmetric_matmul(m, m, ld, c[2], gram, gram, c[1], gram, polynomial);
            /* The linear term of a segment of one step is added to x instead, below: in a sum with
               the diagonal it would lose digits. */
            for (int d = 0; d < m && length > 1; d++) polynomial[(int64_t)d * ld + d] += c[0];
            if (i) {
                full_matmul(m, m, ld, 1, product, polynomial, 0, NULL, next);
                swap(&product, &next);
            }
            if (i < length - 1) {
                full_matmul(m, m, ld, 1, gram, polynomial, 0, NULL, next);
                full_matmul(m, m, ld, 1, next, polynomial, 0, NULL, gram);
            }
            if (!i) swap(&product, &polynomial);
        }
        full_matmul(n, m, ld, 1, x, product, ns->coefficients[3 * done], length == 1 ? x : NULL, y);
        swap(&x, &y);
    }
    return x;
}

/* to (cols, rows) = from (rows, cols), transposed, with leading dimensions ld_*. */
static void transpose(const float *from, int ld_from, int rows, int cols, float *to, int ld_to) {
    if (rows % LANES == 0 && cols % LANES == 0) {
        transpose_scaled(from, ld_from, rows, cols, 1, to, ld_to);
        return;
    }
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < cols; j++) to[(int64_t)j * ld_to + i] = from[(int64_t)i * ld_from + j];
}

static void copy_rows(const float *from, int ld_from, int rows, int cols, float *to, int ld_to) {
    for (int i = 0; i < rows; i++)
        memcpy(to + (int64_t)i * ld_to, from + (int64_t)i * ld_from, sizeof(float) * cols);
}

void hotlap_newton_schulz(const hotlap_newton_schulz_t *ns, float *out, float *workspace,
                          int num_threads) {
    int rows = ns->rows, cols = ns->cols, is_wide = rows < cols;
    int n = max_int(rows, cols), m = min_int(rows, cols), ld = leading_dimension(m);
    int64_t size = (int64_t)m * n, x_floats = (int64_t)n * ld;
#pragma omp parallel for schedule(static, 1) num_threads(num_threads)
    for (int thread = 0; thread < num_threads; thread++) {
        float *room = workspace + thread * floats_per_thread(n, m);
        float *x = part(&room, x_floats), *y = part(&room, x_floats);
        for (int i = thread; i < ns->count; i += num_threads) {
            const float *matrix = ns->matrices + i * size;
            memset(x, 0, sizeof(float) * x_floats); /* the columns up to ld */
            if (is_wide)
                transpose(matrix, cols, rows, cols, x, ld);
            else
                copy_rows(matrix, cols, rows, cols, x, ld);
            normalize(x, x_floats, ns->smallest_norm);
            const float *last = iterate(ns, x, y, room, n, m);
            if (is_wide)
                transpose(last, ld, n, m, out + i * size, cols);
            else
                copy_rows(last, ld, rows, cols, out + i * size, cols);
        }
    }
}
