/* Shared by the C files: vectors, float16 conversion, and the structure of an operation.
 *
 * An *operation* is a function and a block of arguments. The function is called for chunk 0, 1, 2, ...,
 * in any order, by any thread; chunks of one operation must not write to each other's output. threads.c
 * distributes them.
 *
 * All arguments are 8 bytes wide (pointer, int64_t or double), so that the caller can build a block of
 * them without knowing C's alignment rules. The first is always the number of rows, the only value that
 * changes when a recorded list of operations is run again for another batch.
 *
 * `vr` is one register of floats: WIDTH is 16 with AVX-512, 8 with AVX2, and 4 with NEON and elsewhere. Its
 * operators are the same C for every processor; only operations that C cannot express (shuffles, dot products of
 * small integers) are written per instruction set. Sums have 16 partial sums in 16 / WIDTH registers, which are
 * added as one tree, so that every width gives the same bits.
 *
 * `vf` is 16 floats for any width. If registers are narrower, the compiler passes these values through the
 * stack, so performance-critical loops are written with `vr`. */
#ifndef INFER_H
#define INFER_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(INFER_PORTABLE)
#define VARIANT "portable"
#elif defined(__AVX512F__) && defined(__AVX512BW__)
#if defined(__AVX512VNNI__)
#define VARIANT "avx512-vnni"
#define HAVE_VNNI 1
#else
#define VARIANT "avx512"
#endif
#define HAVE_AVX512 1
#include <immintrin.h>
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define VARIANT "avx2"
#define HAVE_AVX2 1
#include <immintrin.h>
#elif defined(__aarch64__) && defined(__ARM_FEATURE_DOTPROD)
#if defined(__ARM_FEATURE_MATMUL_INT8)
#define VARIANT "neon-i8mm"
#define HAVE_I8MM 1
#else
#define VARIANT "neon-dotprod"
#endif
#define HAVE_NEON 1
#include <arm_neon.h>
#else
#define VARIANT "portable"
#endif

#if defined(HAVE_AVX512)
#define WIDTH 16
#elif defined(HAVE_AVX2)
#define WIDTH 8
#else
#define WIDTH 4
#endif
#define PARTS (16 / WIDTH) /* registers that hold 16 floats */

#define ALWAYS_INLINE static inline __attribute__((always_inline))

/* Tell the processor that this thread is polling. */
static inline void relax(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

#define LANES 16
typedef float vf __attribute__((vector_size(64)));
typedef int32_t vi __attribute__((vector_size(64)));
typedef int8_t bytes16 __attribute__((vector_size(16)));
typedef float vr __attribute__((vector_size(4 * WIDTH)));
typedef int32_t vri __attribute__((vector_size(4 * WIDTH)));
typedef vr vr_unaligned __attribute__((aligned(4), may_alias));
typedef vf vf_unaligned __attribute__((aligned(4), may_alias));

static inline vf load(const float *p) { return *(const vf_unaligned *)p; }
static inline void store(float *p, vf v) { *(vf_unaligned *)p = v; }
static inline vf splat(float x) { return (vf){x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x}; }

/* Load the first `count` (< 16) floats, padded with zeros: never reads past the end of a row. */
static inline vf load_some(const float *p, int64_t count) {
    float lanes[LANES] = {0};
    memcpy(lanes, p, (size_t)count * sizeof(float));
    return load(lanes);
}
static inline void store_some(float *p, vf v, int64_t count) {
    float lanes[LANES];
    store(lanes, v);
    memcpy(p, lanes, (size_t)count * sizeof(float));
}

static inline vf absolute(vf v) { return (vf)((vi)v & 0x7fffffff); }
static inline vf choose(vi mask, vf a, vf b) { return (vf)(((vi)a & mask) | ((vi)b & ~mask)); }
static inline vf larger(vf a, vf b) { return choose(a > b, a, b); }
static inline vf smaller(vf a, vf b) { return choose(a < b, a, b); }

/* Sum of the lanes, always added as the same tree. */
static inline float sum_lanes(vf v) {
    float a[LANES];
    store(a, v);
    for (int width = LANES / 2; width > 0; width /= 2)
        for (int i = 0; i < width; i++) a[i] += a[i + width];
    return a[0];
}
static inline float max_lanes(vf v) {
    float a[LANES];
    store(a, v);
    for (int width = LANES / 2; width > 0; width /= 2)
        for (int i = 0; i < width; i++) a[i] = a[i] > a[i + width] ? a[i] : a[i + width];
    return a[0];
}
/* The same, if no lane is NaN. */
static inline float peak_of_lanes(vf v) {
#if defined(HAVE_AVX512)
    return _mm512_reduce_max_ps((__m512)v);
#else
    return max_lanes(v);
#endif
}

ALWAYS_INLINE vr load_vr(const float *p) { return *(const vr_unaligned *)p; }
ALWAYS_INLINE void store_vr(float *p, vr v) { *(vr_unaligned *)p = v; }
ALWAYS_INLINE vr splat_vr(float x) { return x - (vr){0}; } /* 0 + x would stay an addition, because of -0 */
ALWAYS_INLINE vr choose_vr(vri mask, vr a, vr b) { return (vr)(((vri)a & mask) | ((vri)b & ~mask)); }

/* Clamp between least and most; the result is arbitrary if x is NaN. */
ALWAYS_INLINE vr clamp_vr(vr x, vr least, vr most) {
#if WIDTH == 16
    return (vr)_mm512_min_ps(_mm512_max_ps((__m512)x, (__m512)least), (__m512)most);
#elif WIDTH == 8
    return (vr)_mm256_min_ps(_mm256_max_ps((__m256)x, (__m256)least), (__m256)most);
#elif defined(HAVE_NEON)
    return (vr)vminq_f32(vmaxq_f32((float32x4_t)x, (float32x4_t)least), (float32x4_t)most);
#else
    x = choose_vr(x < least, least, x);
    return choose_vr(x > most, most, x);
#endif
}

/* Load a register at a row's end, with `left` floats left: padded with zeros, without access past them. */
ALWAYS_INLINE vr load_up_to(const float *p, int64_t left) {
    if (left >= WIDTH) return load_vr(p);
    float lanes[WIDTH] = {0};
    for (int64_t i = 0; i < left; i++) lanes[i] = p[i];
    return load_vr(lanes);
}
ALWAYS_INLINE void store_up_to(float *p, vr v, int64_t left) {
    if (left >= WIDTH)
        store_vr(p, v);
    else
        for (int64_t i = 0; i < left; i++) p[i] = v[i];
}

/* Sum of 16 lanes in PARTS registers, added as the tree of sum_lanes. */
ALWAYS_INLINE float sum_parts(const vr v[PARTS]) {
#if WIDTH == 16
    return _mm512_reduce_add_ps((__m512)v[0]);
#elif WIDTH == 8
    __m256 eight = (__m256)(v[0] + v[1]);
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
#else
    vr four = (v[0] + v[2]) + (v[1] + v[3]);
    return (four[0] + four[2]) + (four[1] + four[3]);
#endif
}
/* The largest of 16 lanes; an arbitrary lane if some are NaN. */
ALWAYS_INLINE float max_parts(const vr v[PARTS]) {
#if WIDTH == 16
    return _mm512_reduce_max_ps((__m512)v[0]);
#elif WIDTH == 8
    __m256 eight = _mm256_max_ps((__m256)v[0], (__m256)v[1]);
    __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
#elif defined(HAVE_NEON)
    return vmaxvq_f32(vmaxq_f32(vmaxq_f32((float32x4_t)v[0], (float32x4_t)v[1]),
                                vmaxq_f32((float32x4_t)v[2], (float32x4_t)v[3])));
#else
    vr a = choose_vr(v[0] > v[1], v[0], v[1]), b = choose_vr(v[2] > v[3], v[2], v[3]);
    vr four = choose_vr(a > b, a, b);
    float low = four[0] > four[1] ? four[0] : four[1], high = four[2] > four[3] ? four[2] : four[3];
    return low > high ? low : high;
#endif
}

/* e^x for x <= 88: 2^n * e^r with |r| <= ln2/2, and e^r by its series. Below -87, it is 0. */
ALWAYS_INLINE vr exp_lanes(vr x) {
    vri too_small = x < splat_vr(-87.0f);
    vr clamped = clamp_vr(x, splat_vr(-87.0f), splat_vr(88.0f));
    vr shifted = clamped * 1.44269504f + 12582912.0f; /* 1.5 * 2^23: adding it rounds to an integer */
    vr n = shifted - 12582912.0f;
    vr r = clamped - n * 0.693359375f;
    r = r + n * 2.12194440e-4f;
    vr p = splat_vr(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    vri exponent = (vri)shifted << 23; /* the integer is in the low bits of the sum */
    vr y = (vr)((vri)p + exponent);
    return choose_vr(x != x, x, (vr)((vri)y & ~too_small)); /* NaN stays NaN */
}

/* IEEE half precision, for the scales of weight groups. */
static inline float half_to_float(uint16_t h) {
#if defined(HAVE_AVX512) || defined(HAVE_AVX2)
    return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(h)));
#else
    uint32_t sign = (uint32_t)(h & 0x8000u) << 16, magnitude = h & 0x7fffu, bits;
    float value;
    if (magnitude >= 0x7c00u) {
        bits = sign | 0x7f800000u | (magnitude & 0x3ffu) << 13;
        memcpy(&value, &bits, 4);
        return value;
    }
    if (magnitude < 0x400u) { /* subnormal: an integer times 2^-24 */
        value = (float)magnitude * 5.9604644775390625e-8f;
        return sign ? -value : value;
    }
    bits = sign | (magnitude + 0x1c000u) << 13;
    memcpy(&value, &bits, 4);
    return value;
#endif
}

#if defined(HAVE_AVX512) || defined(HAVE_AVX2)
/* Load a register of floats from float16. */
ALWAYS_INLINE vr load_halves(const uint16_t *p) {
#if WIDTH == 16
    return (vr)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
#else
    return (vr)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
#endif
}
#endif

typedef void (*chunk_fn)(const void *args, int64_t chunk);

enum { FIXED, PER_ROW, PER_ITEM };

typedef struct {
    chunk_fn run;
    int64_t *args;
    int64_t kind;           /* FIXED: `chunks` in total; PER_ROW: `chunks` for every `rows_per_chunk` rows; */
    int64_t chunks;         /* PER_ITEM: `chunks` for every item of attention.c */
    int64_t rows_per_chunk;
} operation;

#endif
