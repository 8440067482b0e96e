/* Orthogonalisation of small matrices, as in hotlap/optim/newton_schulz.py: each from its norm to its last product on
   one core, whose cache it does not leave. */

#include "common.h"
#include "registers.h"

enum { COLUMNS = MOST_VECTORS * LANES }; /* of a symmetric product at once */

static inline int whole_vectors(int columns) { return (columns + LANES - 1) / LANES * LANES; }

/* Rows of `columns` numbers lie so far apart: whole vectors, and no multiple of several cache lines, which many rows
   would share. */
static inline int row_stride(int columns) {
    int whole = whole_vectors(columns);
    return whole % 64 ? whole : whole + LANES;
}

/* Floats of workspace a thread, for matrices whose long side is n and short side m. */
int64_t newton_schulz_floats(int n, int m) { return (int64_t)row_stride(m) * (2 * n + 4 * m); }

/* x over its Frobenius norm. The largest entry goes first, or squares of 1e30 would overflow. */
static void to_unit_norm(float *x, int64_t count, float smallest) {
    float largest = 0, sum = 0;
    int has_nan = 0;
    for (int64_t at = 0; at < count; at++) {
        float size = fabsf(x[at]);
        largest = size > largest ? size : largest;
        has_nan |= size != size;
    }
    largest = has_nan ? NAN : largest < smallest ? smallest : largest;
    float scale = 1 / largest;
    for (int64_t at = 0; at < count; at++) {
        float scaled = x[at] * scale;
        sum += scaled * scaled;
    }
    float norm = sqrtf(sum), least_norm = smallest * scale;
    scale /= norm < least_norm ? least_norm : norm;
    for (int64_t at = 0; at < count; at++) x[at] *= scale;
}

/* out (m, m) = alpha · leftᵀ · right + beta · base, where left and right (k, m) make it symmetric to the last digit: what
   lies above the squares on the diagonal is copied from below. Rows of all matrices lie `row` apart. */
static void symmetric_product(int m, int k, int row, float alpha, const float *left, const float *right, float beta,
                              const float *base, float *out) {
    for (int j = 0; j < m; j += COLUMNS) {
        int columns = least(COLUMNS, whole_vectors(m - j)), below = j + columns;
        int64_t diagonal = (int64_t)j * row + j;
        product_in_cache((product_t){.m = m - j, .n = columns, .k = k, .left = left + j, .left_row = 1,
                                     .left_column = row, .right = right + j, .right_row = row, .out = out + diagonal,
                                     .out_row = row, .base = base ? base + diagonal : NULL, .alpha = alpha,
                                     .beta = beta});
        if (below < m)
            transpose_in_cache(out + (int64_t)below * row + j, row, m - below, columns, 1, out + diagonal + columns, row);
    }
}

/* out (rows, m) = alpha · left (rows, m) · right (m, m) + beta · base. Rows of all lie `row` apart. */
static void whole_product(int rows, int m, int row, float alpha, const float *left, const float *right, float beta,
                          const float *base, float *out) {
    product_in_cache((product_t){.m = rows, .n = whole_vectors(m), .k = m, .left = left, .left_row = row,
                                 .left_column = 1, .right = right, .right_row = row, .out = out, .out_row = row,
                                 .base = base, .alpha = alpha, .beta = beta});
}

/* x (n, m), n ≥ m, after the steps of `coefficients` (steps, 3), in x or y: the address is returned. In a segment of
   steps x is multiplied once, by the product of the segment's polynomials. */
static float *iterate(float *x, float *y, float *workspace, int n, int m, const float *coefficients, int steps,
                      int first_segment, int segment) {
    int row = row_stride(m);
    int64_t size = (int64_t)m * row;
    float *gram = workspace, *polynomial = gram + size, *all = polynomial + size, *next = all + size, *swapped;
    for (int done = 0, length; done < steps; done += length) {
        length = least(done ? segment : first_segment, steps - done);
        symmetric_product(m, n, row, 1, x, x, 0, NULL, gram);
        for (int i = 0; i < length; i++) {
            const float *of_step = coefficients + 3 * (done + i);
            /* Only the first Gram matrix is symmetric to the last digit. To copy one half of the later ones would make
               the error five times as large. */
            if (i) whole_product(m, m, row, of_step[2], gram, gram, of_step[1], gram, polynomial);
            else symmetric_product(m, m, row, of_step[2], gram, gram, of_step[1], gram, polynomial);
            /* A single step's first term stays beside it: it would lose digits in a sum with the diagonal. */
            for (int d = 0; d < m && length > 1; d++) polynomial[(int64_t)d * row + d] += of_step[0];
            if (i) {
                whole_product(m, m, row, 1, all, polynomial, 0, NULL, next);
                swapped = all, all = next, next = swapped;
            }
            if (i < length - 1) {
                whole_product(m, m, row, 1, gram, polynomial, 0, NULL, next);
                whole_product(m, m, row, 1, next, polynomial, 0, NULL, gram);
            }
            if (!i) swapped = all, all = polynomial, polynomial = swapped;
        }
        whole_product(n, m, row, 1, x, all, coefficients[3 * done], length == 1 ? x : NULL, y);
        swapped = x, x = y, y = swapped;
    }
    return x;
}

/* to (cols, rows) = from (rows, cols), transposed; the rows of both lie apart. */
static void transpose(const float *from, int from_row, int rows, int cols, float *to, int to_row) {
    if (rows % LANES == 0 && cols % LANES == 0) {
        transpose_in_cache(from, from_row, rows, cols, 1, to, to_row);
        return;
    }
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < cols; j++) to[(int64_t)j * to_row + i] = from[(int64_t)i * from_row + j];
}

static void copy_rows(const float *from, int from_row, int rows, int cols, float *to, int to_row) {
    for (int i = 0; i < rows; i++) memcpy(to + (int64_t)i * to_row, from + (int64_t)i * from_row, sizeof(float) * cols);
}

/* out and matrices (count, rows, cols). workspace of num_threads × newton_schulz_floats. */
void newton_schulz(const float *matrices, int count, int rows, int cols, const float *coefficients, int steps,
                   int first_segment, int segment, float smallest_norm, float *out, float *workspace,
                   int num_threads) {
    int is_wide = rows < cols, n = is_wide ? cols : rows, m = is_wide ? rows : cols, row = row_stride(m);
    int64_t size = (int64_t)m * n, x_floats = (int64_t)n * row;
#pragma omp parallel for schedule(static, 1) num_threads(num_threads)
    for (int thread = 0; thread < num_threads; thread++) {
        float *x = workspace + thread * newton_schulz_floats(n, m), *y = x + x_floats;
        for (int i = thread; i < count; i += num_threads) {
            memset(x, 0, sizeof(float) * x_floats); /* what pads rows to whole vectors */
            if (is_wide) transpose(matrices + i * size, cols, rows, cols, x, row);
            else copy_rows(matrices + i * size, cols, rows, cols, x, row);
            to_unit_norm(x, x_floats, smallest_norm);
            const float *last = iterate(x, y, y + x_floats, n, m, coefficients, steps, first_segment, segment);
            if (is_wide) transpose(last, row, n, m, out + i * size, cols);
            else copy_rows(last, row, rows, cols, out + i * size, cols);
        }
    }
}
