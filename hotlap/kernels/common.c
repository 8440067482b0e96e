#include "common.h"

sgemm_t *sgemm;

void set_sgemm(sgemm_t *address) { sgemm = address; }
