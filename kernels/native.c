/* The CPU operations of kernels/ops.py. One translation unit: this file holds what the others share.

   Tensors come as addresses, contiguous, of bfloat16 (is_bf16 = 1) or float32; all arithmetic is float32. -ffast-math is
   not used: NaN and infinity keep their meaning, and linking with it would make the whole process flush denormals.
   Sums that may be reassociated say so by `omp simd reduction`.

   A result for one row of the batch never depends on the other rows: sums run in an order fixed by absolute positions.

   No OpenMP runtime is linked, since a second team of threads would fight with torch's for the cores. The caller passes
   GOMP_parallel as found in the runtime that torch itself uses (libgomp; LLVM's libomp has it too). */

#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

#define EXPORT __attribute__((visibility("default")))
#define INLINE static inline __attribute__((always_inline))
#ifdef __clang__
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif
#define MIN(a, b) ((a) < (b) ? (a) : (b))
#define MAX(a, b) ((a) > (b) ? (a) : (b))

/* vf: one register of floats. TILE_ROWS x 2 of them, with a spare few, fill the register file. */
#if defined(__AVX512F__)
#define LANES 16
#define TILE_ROWS 10
#elif defined(__AVX__)
#define LANES 8
#define TILE_ROWS 6
#elif defined(__aarch64__)
#define LANES 4
#define TILE_ROWS 10
#else
#define LANES 4
#define TILE_ROWS 6
#endif
typedef float vf __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

typedef int64_t i64;
typedef uint16_t bf16;

/* --- threads --- */

typedef void team_fn(void (*)(void *), void *, unsigned, unsigned);
static team_fn *team;

EXPORT void native_init(void *gomp_parallel) { team = (team_fn *)gomp_parallel; }

typedef struct {
    void (*task)(const void *, i64 begin, i64 end);
    const void *arg;
    i64 n, grain, next;
} Region;

static void work(void *data) {
    Region *r = data;
    for (i64 begin; (begin = __atomic_fetch_add(&r->next, r->grain, __ATOMIC_RELAXED)) < r->n;)
        r->task(r->arg, begin, MIN(begin + r->grain, r->n));
}

/* Runs task over 0..n-1 in pieces of `grain`, handed out in order to the threads as they come free. */
static void parallel(void (*task)(const void *, i64, i64), const void *arg, i64 n, i64 grain) {
    Region region = {task, arg, n, MAX(grain, 1), 0};
    if (n <= region.grain)
        work(&region);
    else
        team(work, &region, 0, 0);
}

/* Pieces of about 16k elements: below that a fork costs more than it gains. */
INLINE i64 grain_of_rows(i64 row_elements) { return MAX(16384 / MAX(row_elements, 1), 1); }

/* --- numbers --- */

INLINE float to_float(bf16 x) {
    uint32_t bits = (uint32_t)x << 16;
    float f;
    memcpy(&f, &bits, 4);
    return f;
}

/* Round to nearest even; NaN stays NaN. */
INLINE bf16 to_bf16(float f) {
    uint32_t bits;
    memcpy(&bits, &f, 4);
    uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    return f == f ? rounded : 0x7fc0;
}

INLINE const char *at(const void *base, i64 index, int is_bf16) {
    return (const char *)base + index * (is_bf16 ? 2 : 4);
}

/* dst[i] = src[offset + i] */
INLINE void load(float *restrict dst, const void *src, i64 offset, i64 n, int is_bf16) {
    if (is_bf16) {
        const bf16 *s = (const bf16 *)src + offset;
#pragma omp simd
        for (i64 i = 0; i < n; i++) dst[i] = to_float(s[i]);
    } else {
        memcpy(dst, (const float *)src + offset, n * 4);
    }
}

INLINE void store(void *dst, i64 offset, const float *restrict src, i64 n, int is_bf16) {
    if (is_bf16) {
        bf16 *d = (bf16 *)dst + offset;
#pragma omp simd
        for (i64 i = 0; i < n; i++) d[i] = to_bf16(src[i]);
    } else {
        memcpy((float *)dst + offset, src, n * 4);
    }
}

/* e^x within 2 units in the last place, exactly 1 at 0, for x clamped to the range of normal results.
   Cody and Waite's reduction, the Taylor polynomial of degree 7 on |r| <= ln(2)/2. */
INLINE float exp_f(float x) {
    x = x < -87.3f ? -87.3f : x;
    x = x > 88.3f ? 88.3f : x;
    float n = (x * 1.44269504f + 12582912.0f) - 12582912.0f;
    float r = x - n * 0.693359375f + n * 2.12194440e-4f;
    float p = 1.98412698e-4f;
    p = p * r + 1.38888889e-3f;
    p = p * r + 8.33333333e-3f;
    p = p * r + 4.16666667e-2f;
    p = p * r + 1.66666667e-1f;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    int32_t bits = ((int32_t)n + 127) << 23;
    float power;
    memcpy(&power, &bits, 4);
    return p * power;
}

INLINE float tanh_f(float x) { return 1.0f - 2.0f / (1.0f + exp_f(2.0f * x)); }

#include "native_elementwise.c"
#include "native_attention.c"
#include "native_linear.c"
