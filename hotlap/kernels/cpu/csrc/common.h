/* Shared by all kernels: small helpers, sums over threads, and parts of a workspace.

   A thread takes a chunk of tokens through all matmuls of a kernel, so that what it computes stays
   in its core's cache; a BLAS call over all tokens would share them out anew for each matmul. In
   the forward, whichever thread is free takes the next chunk: results do not depend on which one
   does. In the backward each thread has a fixed range of tokens, since the last bits of its share
   of a weight's gradient depend on the range. The shape letters are those of kernels.h. */

#ifndef HOTLAP_COMMON_H
#define HOTLAP_COMMON_H

#include <math.h>
#include <omp.h>
#include <stdint.h>
#include <string.h>

#include "kernels.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
enum { GUARD_FLOATS = 32 };
#else
#define ASAN_POISON_MEMORY_REGION(address, bytes)
#define ASAN_UNPOISON_MEMORY_REGION(address, bytes)
enum { GUARD_FLOATS = 0 };
#endif

static const float LOG2_E = 1.4426950408889634f;

static inline int min_int(int a, int b) { return a < b ? a : b; }
static inline int max_int(int a, int b) { return a > b ? a : b; }

/* Rounded up to whole cache lines. The parts of all threads are then aligned alike, on which the
   last bits of a BLAS's matmul may depend. */
static inline int64_t round_to_cache_line(int64_t floats) { return (floats + 15) / 16 * 16; }

/* Floats that part() takes of a workspace. */
static inline int64_t part_floats(int64_t floats) { return floats + GUARD_FLOATS; }

/* The next `floats` of a workspace; *workspace moves past them. When compiled with
   AddressSanitizer, each part is followed by poisoned floats, so that an overrun into the next part
   is caught too. */
static inline float *part(float **workspace, int64_t floats) {
    float *first = *workspace;
    *workspace += part_floats(floats);
    ASAN_UNPOISON_MEMORY_REGION(first, floats * sizeof(float)); /* other parts may have been here */
    ASAN_POISON_MEMORY_REGION(first + floats, GUARD_FLOATS * sizeof(float));
    return first;
}

/* The range of T tokens that belongs to a thread in a backward. */
typedef struct {
    int first, past;
} range_t;

static inline range_t thread_tokens(int T, int thread, int num_threads) {
    return (range_t){(int64_t)T * thread / num_threads, (int64_t)T * (thread + 1) / num_threads};
}

/* sum (count,) += each of shares (num_shares, count). Called by all threads of a parallel region.
 */
static inline void add_shares(float *sum, const float *shares, int num_shares, int64_t count) {
#pragma omp for schedule(static)
    for (int64_t i = 0; i < count; i++)
        for (int share = 0; share < num_shares; share++) sum[i] += shares[share * count + i];
}

#endif
