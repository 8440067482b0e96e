/* The functions of a BLAS that the kernels call, as plain loops. Compiled with sanitizers, they
   catch wrong sizes and leading dimensions, which a BLAS in machine code would not. */

#include <stddef.h>

enum { TRANSPOSE = 112 };

void sgemm_(const char *trans_a, const char *trans_b, const int *m, const int *n, const int *k,
            const float *alpha, const float *a, const int *lda, const float *b, const int *ldb,
            const float *beta, float *c, const int *ldc) {
    for (ptrdiff_t j = 0; j < *n; j++)
        for (ptrdiff_t i = 0; i < *m; i++) {
            float sum = 0;
            for (ptrdiff_t l = 0; l < *k; l++)
                sum += (*trans_a == 'T' ? a[i * *lda + l] : a[l * *lda + i]) *
                       (*trans_b == 'T' ? b[l * *ldb + j] : b[j * *ldb + l]);
            c[j * *ldc + i] = *alpha * sum + (*beta ? *beta * c[j * *ldc + i] : 0);
        }
}

size_t cblas_sgemm_pack_get_size(int operand, int m, int n, int k) {
    (void)operand, (void)m;
    return sizeof(float) * n * k;
}

/* dest (n, k) = alpha * b^T of b (k, n). */
void cblas_sgemm_pack(int layout, int operand, int trans, int m, int n, int k, float alpha,
                      const float *src, int ld, float *dest) {
    (void)layout, (void)operand, (void)m;
    for (ptrdiff_t j = 0; j < n; j++)
        for (ptrdiff_t l = 0; l < k; l++)
            dest[j * k + l] = alpha * (trans == TRANSPOSE ? src[j * ld + l] : src[l * ld + j]);
}

void cblas_sgemm_compute(int layout, int trans_a, int trans_b, int m, int n, int k, const float *a,
                         int lda, const float *b, int ldb, float beta, float *c, int ldc) {
    (void)layout, (void)trans_a, (void)trans_b, (void)ldb;
    for (ptrdiff_t i = 0; i < m; i++)
        for (ptrdiff_t j = 0; j < n; j++) {
            float sum = 0;
            for (ptrdiff_t l = 0; l < k; l++) sum += a[i * lda + l] * b[j * k + l];
            c[i * ldc + j] = sum + (beta ? beta * c[i * ldc + j] : 0);
        }
}
