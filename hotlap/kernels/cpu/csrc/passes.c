/* One pass over activations each: RMS norm with a rotation, and a weighted sum. The same in
   PyTorch: hotlap/model/layers.py and rotary.py. */

#include "norms.h"

void hotlap_norm_forward(const float *x, const float *cos, const float *sin, int T, int H, int D,
                         float epsilon, float *out, float *inverse_rms, int num_threads) {
#pragma omp parallel for schedule(static) num_threads(num_threads)
    for (int64_t row = 0; row < (int64_t)T * H; row++) {
        int64_t angles = row / H * (D / 2);
        inverse_rms[row] = rms_norm_row(x + row * D, cos ? cos + angles : NULL,
                                        cos ? sin + angles : NULL, D, epsilon, out + row * D);
    }
}

void hotlap_norm_backward(const float *grad_out, const float *out, const float *inverse_rms,
                          const float *cos, const float *sin, int T, int H, int D, float *grad_x,
                          int num_threads) {
#pragma omp parallel for schedule(static) num_threads(num_threads)
    for (int64_t row = 0; row < (int64_t)T * H; row++) {
        int64_t angles = row / H * (D / 2);
        rms_norm_row_backward(grad_out + row * D, out + row * D, inverse_rms[row],
                              cos ? cos + angles : NULL, cos ? sin + angles : NULL, D,
                              grad_x + row * D);
    }
}

void hotlap_mix_forward(const float *weights, const float *const *streams, int num_streams,
                        int64_t count, float *out, int num_threads) {
    const float *a = streams[0], *b = streams[1], *c = num_streams > 2 ? streams[2] : NULL;
    float weight_a = weights[0], weight_b = weights[1], weight_c = c ? weights[2] : 0;
#pragma omp parallel for simd schedule(static) num_threads(num_threads)
    for (int64_t i = 0; i < count; i++)
        out[i] = weight_a * a[i] + weight_b * b[i] + (c ? weight_c * c[i] : 0);
}

void hotlap_mix_backward(const float *grad_out, const float *weights, const float *const *streams,
                         int num_streams, int rows, int cols, float *const *grad_streams,
                         float *grad_weights, int num_threads) {
#pragma omp parallel for schedule(static) num_threads(num_threads)
    for (int row = 0; row < rows; row++)
        for (int s = 0; s < num_streams; s++) {
            int64_t first = (int64_t)row * cols;
            grad_weights[(int64_t)num_streams * row + s] = scale_row_backward(
                grad_out + first, streams[s] + first, weights[s], cols, grad_streams[s] + first);
        }
}
