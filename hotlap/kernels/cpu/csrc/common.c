#include "common.h"
#include "weights.h"

sgemm_t *sgemm;
pack_size_t *pack_size;
pack_t *pack;
packed_product_t *packed_product;

void set_blas(sgemm_t *sgemm_, pack_size_t *pack_size_, pack_t *pack_, packed_product_t *packed_product_) {
    sgemm = sgemm_, pack_size = pack_size_, pack = pack_, packed_product = packed_product_;
}
