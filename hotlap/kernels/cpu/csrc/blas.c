#include "blas.h"

blas_t hotlap_blas;

void hotlap_set_blas(hotlap_sgemm_t sgemm, hotlap_sgemm_pack_get_size_t pack_get_size,
                     hotlap_sgemm_pack_t pack, hotlap_sgemm_compute_t compute) {
    hotlap_blas = (blas_t){sgemm, pack_get_size, pack, compute};
}
