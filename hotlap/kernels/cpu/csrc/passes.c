/* One pass over activations each: norm with rotation (hotlap/model/layers.py, rotary.py) and a weighted sum (layers.py). */

#include "common.h"
#include "norms.h"

/* RMS norm of each head, then its rotation. x and out (T, H, D), inverse_rms (T, H); cos and sin (T, D / 2), or NULL
   for no rotation. */
void norm_forward(const float *x, const float *cos, const float *sin, int T, int H, int D, float epsilon, float *out,
                  float *inverse_rms, int num_threads) {
#pragma omp parallel for schedule(static) num_threads(num_threads)
    for (int64_t row = 0; row < (int64_t)T * H; row++) {
        int64_t angles = row / H * (D / 2);
        inverse_rms[row] = norm_row(x + row * D, cos ? cos + angles : NULL, cos ? sin + angles : NULL, D, epsilon,
                                    out + row * D);
    }
}

/* From grad, that for out, grad_x. */
void norm_backward(const float *grad, const float *out, const float *inverse_rms, const float *cos, const float *sin,
                   int T, int H, int D, float *grad_x, int num_threads) {
#pragma omp parallel for schedule(static) num_threads(num_threads)
    for (int64_t row = 0; row < (int64_t)T * H; row++) {
        int64_t angles = row / H * (D / 2);
        norm_row_backward(grad + row * D, out + row * D, inverse_rms[row], cos ? cos + angles : NULL,
                          cos ? sin + angles : NULL, D, grad_x + row * D);
    }
}

/* out = the sum of weights[i] · streams[i]; all of `count` numbers. */
void mix_forward(const float *weights, const float *const *streams, int num_streams, int64_t count, float *out,
                 int num_threads) {
    const float *a = streams[0], *b = streams[1], *c = num_streams > 2 ? streams[2] : NULL;
    float of_a = weights[0], of_b = weights[1], of_c = c ? weights[2] : 0;
#pragma omp parallel for simd schedule(static) num_threads(num_threads)
    for (int64_t at = 0; at < count; at++) out[at] = of_a * a[at] + of_b * b[at] + (c ? of_c * c[at] : 0);
}

/* From grad, that for out, those for the streams and, as many for each row of `row` numbers as streams, for the weights. */
void mix_backward(const float *grad, const float *weights, const float *const *streams, int num_streams, int rows, int row,
                  float *const *grads, float *grad_weights, int num_threads) {
#pragma omp parallel for schedule(static) num_threads(num_threads)
    for (int i = 0; i < rows; i++)
        for (int stream = 0; stream < num_streams; stream++) {
            int64_t first = (int64_t)i * row;
            const float *of_row = grad + first;
            grad_weights[num_streams * i + stream] =
                weigh_row(of_row, streams[stream] + first, weights[stream], row, grads[stream] + first);
        }
}
