/* Orthogonalisation of small matrices, as in hotlap/optim/newton_schulz.py: each from its norm to its last product on
   one core, whose cache it does not leave. */

#include "common.h"

/* Floats of workspace a thread, for matrices whose short side is m and long side n. */
int64_t newton_schulz_floats(int m, int n) { return 2 * (int64_t)m * n + 4 * (int64_t)m * m; }

/* to (cols, rows) = from (rows, cols), transposed. */
static void transpose(const float *from, int rows, int cols, float *to) {
    for (int row = 0; row < rows; row++)
        for (int col = 0; col < cols; col++) to[(int64_t)col * rows + row] = from[(int64_t)row * cols + col];
}

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
    for (int64_t at = 0; at < count; at++) {
        x[at] /= largest;
        sum += x[at] * x[at];
    }
    float norm = sqrtf(sum), least_norm = smallest / largest;
    norm = norm < least_norm ? least_norm : norm;
    for (int64_t at = 0; at < count; at++) x[at] /= norm;
}

/* x (m, n) after the steps of `coefficients` (steps, 3), in x or y: the address is returned. In a segment of steps x is
   multiplied once, by the product of the segment's polynomials. */
static float *iterate(float *x, float *y, float *square, int m, int n, const float *coefficients, int steps,
                      int first_segment, int segment) {
    float *gram = square, *polynomial = gram + m * m, *all = polynomial + m * m, *next = all + m * m, *swapped;
    for (int done = 0, length; done < steps; done += length) {
        length = least(done ? segment : first_segment, steps - done);
        product('N', 'T', m, m, n, 1, x, n, x, n, 0, gram, m);
        for (int i = 0; i < length; i++) {
            const float *of_step = coefficients + 3 * (done + i);
            memcpy(polynomial, gram, sizeof(float) * m * m);
            product('N', 'N', m, m, m, of_step[2], gram, m, gram, m, of_step[1], polynomial, m);
            if (length == 1) break;
            for (int d = 0; d < m; d++) polynomial[d * m + d] += of_step[0];
            if (i) {
                product('N', 'N', m, m, m, 1, all, m, polynomial, m, 0, next, m);
                swapped = all, all = next, next = swapped;
            } else {
                memcpy(all, polynomial, sizeof(float) * m * m);
            }
            if (i < length - 1) {
                product('N', 'N', m, m, m, 1, gram, m, polynomial, m, 0, next, m);
                product('N', 'N', m, m, m, 1, next, m, polynomial, m, 0, gram, m);
            }
        }
        if (length == 1) {
            /* Beside the polynomial, where its rounding is not that of a sum with its diagonal. */
            memcpy(y, x, sizeof(float) * m * n);
            product('N', 'N', m, n, m, 1, polynomial, m, x, n, coefficients[3 * done], y, n);
        } else {
            product('N', 'N', m, n, m, 1, all, m, x, n, 0, y, n);
        }
        swapped = x, x = y, y = swapped;
    }
    return x;
}

/* out and matrices (count, rows, cols). workspace of num_threads × newton_schulz_floats. */
void newton_schulz(const float *matrices, int count, int rows, int cols, const float *coefficients, int steps,
                   int first_segment, int segment, float smallest_norm, float *out, float *workspace,
                   int num_threads) {
    int is_tall = rows > cols, m = is_tall ? cols : rows, n = is_tall ? rows : cols;
    int64_t size = (int64_t)m * n;
#pragma omp parallel for schedule(static, 1) num_threads(num_threads)
    for (int thread = 0; thread < num_threads; thread++) {
        float *x = workspace + thread * newton_schulz_floats(m, n), *y = x + size;
        for (int i = thread; i < count; i += num_threads) {
            if (is_tall) transpose(matrices + i * size, rows, cols, x);
            else memcpy(x, matrices + i * size, sizeof(float) * size);
            to_unit_norm(x, size, smallest_norm);
            const float *last = iterate(x, y, y + size, m, n, coefficients, steps, first_segment, segment);
            if (is_tall) transpose(last, m, n, out + i * size);
            else memcpy(out + i * size, last, sizeof(float) * size);
        }
    }
}
