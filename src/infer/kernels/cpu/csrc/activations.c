/* Quantization of activations to integers for a product: the second half of the layout in linear.h.
 *
 * This is done once per product, for all tiles together. Integers do not round when they are added, so the
 * other values of a group, besides its integers and its scale, are exact, too, or rounded once.
 *
 *     peak_of     max|x| of a group, NaN if any x is NaN
 *     put_group   the integers x * inverse, rounded to the nearest, and their sum
 *
 * Without their signs, floats have the same order as their bits read as integers, with NaN above all, so the peak is
 * the largest integer. Adding 1.5 * 2^23 to a number rounds it to an integer, which is then in the low 16 bits. */
#include "linear.h"

#define MAGIC 12582912.0f

int64_t infer_linear_scratch(int64_t M, int64_t K, int64_t digits) {
    int64_t groups = (K + GROUP - 1) / GROUP, rows = block_rows(digits);
    return (M + rows - 1) / rows * groups * (LINES * GROUP + rows * 12);
}

static inline float float_of(uint32_t bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

#if defined(HAVE_AVX512) || defined(HAVE_AVX2)
typedef int16_t words16 __attribute__((vector_size(32)));

#if defined(HAVE_AVX512)
static inline int32_t sum_of_ints(vi v) { return _mm512_reduce_add_epi32((__m512i)v); }
static inline int32_t largest_of_ints(vi v) { return _mm512_reduce_max_epi32((__m512i)v); }
#else
static inline int32_t sum_of_ints(vi v) {
    int32_t total = 0;
    for (int i = 0; i < LANES; i++) total += v[i];
    return total;
}
static inline int32_t largest_of_ints(vi v) {
    int32_t largest = 0;
    for (int i = 0; i < LANES; i++) largest = v[i] > largest ? v[i] : largest;
    return largest;
}
#endif

ALWAYS_INLINE float peak_of(const float *x) {
    vi a = (vi)load(x) & 0x7fffffff, b = (vi)load(x + 16) & 0x7fffffff, is_a = a > b;
    return float_of((uint32_t)largest_of_ints((a & is_a) | (b & ~is_a)));
}

/* Store 16 integers of a group, from number k on. */
ALWAYS_INLINE void put_digits(vi whole, int8_t *q, const int k, const int digits) {
#if defined(HAVE_WORDS)
    if (digits == 2) {
        const __m256i words = (__m256i)__builtin_convertvector(whole, words16);
        const __m256i low = _mm256_shufflelo_epi16(words, _MM_SHUFFLE(3, 1, 2, 0));
        _mm256_storeu_si256((__m256i *)(q + 2 * k), _mm256_shufflehi_epi16(low, _MM_SHUFFLE(3, 1, 2, 0)));
        return;
    }
#endif
    vi high = digits == 2 ? (whole + 64) >> 7 : whole;
    *(bytes16 *)(q + k) = __builtin_convertvector(high, bytes16);
    if (digits == 2) *(bytes16 *)(q + GROUP + k) = __builtin_convertvector(whole - (high << 7), bytes16);
}

ALWAYS_INLINE int32_t put_group(const float *x, float inverse, int8_t *q, const int digits) {
    vi low = ((vi)(load(x) * inverse + MAGIC) << 16) >> 16, high = ((vi)(load(x + 16) * inverse + MAGIC) << 16) >> 16;
    put_digits(low, q, 0, digits);
    put_digits(high, q, 16, digits);
    return sum_of_ints(low + high);
}

#elif defined(HAVE_NEON)

ALWAYS_INLINE float peak_of(const float *x) {
    uint32x4_t v[8];
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) v[i] = vreinterpretq_u32_f32(vabsq_f32(vld1q_f32(x + 4 * i)));
#pragma GCC unroll 3
    for (int width = 4; width > 0; width /= 2)
#pragma GCC unroll 4
        for (int i = 0; i < width; i++) v[i] = vmaxq_u32(v[i], v[i + width]);
    return float_of(vmaxvq_u32(v[0]));
}

ALWAYS_INLINE int32_t put_group(const float *x, float inverse, int8_t *q, const int digits) {
    const float32x4_t magic = vdupq_n_f32(MAGIC);
    int16x8_t rounded[8], whole[4], high[4];
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++)
        rounded[i] = vreinterpretq_s16_f32(vfmaq_n_f32(magic, vld1q_f32(x + 4 * i), inverse));
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        whole[i] = vuzp1q_s16(rounded[2 * i], rounded[2 * i + 1]);
        high[i] = digits == 2 ? vshrq_n_s16(vaddq_s16(whole[i], vdupq_n_s16(64)), 7) : whole[i];
    }
#define PUT_BYTES(at, a, b) vst1q_s8(q + at, vuzp1q_s8(vreinterpretq_s8_s16(a), vreinterpretq_s8_s16(b)))
    PUT_BYTES(0, high[0], high[1]);
    PUT_BYTES(16, high[2], high[3]);
    if (digits == 2) {
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) high[i] = vsubq_s16(whole[i], vshlq_n_s16(high[i], 7));
        PUT_BYTES(GROUP, high[0], high[1]);
        PUT_BYTES(GROUP + 16, high[2], high[3]);
    }
    int32x4_t sums = vpaddlq_s16(whole[0]);
    sums = vpadalq_s16(vpadalq_s16(vpadalq_s16(sums, whole[1]), whole[2]), whole[3]);
    return vaddvq_s32(sums);
}

#else /* any other processor: four lanes */

typedef int32_t ints4 __attribute__((vector_size(16), aligned(4), may_alias));
typedef float floats4 __attribute__((vector_size(16), aligned(4), may_alias));
typedef int8_t bytes4 __attribute__((vector_size(4), aligned(1), may_alias));

ALWAYS_INLINE float peak_of(const float *x) {
    ints4 peak = *(const ints4 *)x & 0x7fffffff;
    for (int i = 4; i < GROUP; i += 4) {
        ints4 v = *(const ints4 *)(x + i) & 0x7fffffff, is_more = v > peak;
        peak = (v & is_more) | (peak & ~is_more);
    }
    int32_t low = peak[0] > peak[1] ? peak[0] : peak[1], high = peak[2] > peak[3] ? peak[2] : peak[3];
    return float_of((uint32_t)(low > high ? low : high));
}

ALWAYS_INLINE int32_t put_group(const float *x, float inverse, int8_t *q, const int digits) {
    ints4 sums = {0};
    for (int i = 0; i < GROUP; i += 4) {
        ints4 whole = ((ints4)(*(const floats4 *)(x + i) * inverse + MAGIC) << 16) >> 16;
        ints4 high = whole;
        if (digits == 2) high = (whole + 64) >> 7;
        *(bytes4 *)(q + i) = __builtin_convertvector(high, bytes4);
        if (digits == 2) *(bytes4 *)(q + GROUP + i) = __builtin_convertvector(whole - (high << 7), bytes4);
        sums += whole;
    }
    return sums[0] + sums[1] + sums[2] + sums[3];
}
#endif

/* The sum of the first 16 integers of a group. */
ALWAYS_INLINE int32_t sum_first_half(const int8_t *q, const int digits) {
    int32_t high = 0, low = 0;
#if defined(HAVE_WORDS)
    for (int k = 0; digits == 2 && k < GROUP; k += 2) low += (int16_t)((uint8_t)q[k] | q[k + 1] * 256);
    if (digits == 2) return low;
#endif
    for (int k = 0; k < GROUP / 2; k++) high += q[k], low += digits == 2 ? q[GROUP + k] : 0;
    return digits == 2 ? high * 128 + low : high;
}

ALWAYS_INLINE void quantize_row(const linear_args *a, const activations *act, int64_t m, const int digits) {
    const float largest = digits == 2 ? 127.0f * 128.0f : 127.0f;
    int64_t place = place_of(act, m);
    float probe = 0.0f; /* stays 0 unless some x is NaN or infinite */
    for (int64_t g = 0; g < act->groups; g++, place += block_rows(digits)) {
        const float *x = a->x + m * a->x_stride + g * GROUP;
        int64_t left = a->K - g * GROUP;
        float some[GROUP];
        if (left < GROUP || a->order) { /* padded with zeros, so as not to read past the end of a row */
            const int64_t count = left < GROUP ? left : GROUP;
            memset(some, 0, sizeof some);
            for (int64_t k = 0; k < count; k++)
                some[k] = a->order ? a->x[m * a->x_stride + a->order[g * GROUP + k]] : x[k];
            x = some;
        }
        float peak = peak_of(x), inverse = peak > 0.0f ? largest / peak : 0.0f;
        probe += peak * 0.0f;
        if (!(inverse <= 3.0e38f)) inverse = 0.0f; /* the whole group is too small to divide by */
        int32_t sum = put_group(x, inverse, act->q + place * digits * GROUP, digits);
        act->scales[place] = inverse > 0.0f ? peak / largest : 0.0f;
        if (a->bits == 6) {
            const int32_t first = sum_first_half(act->q + place * digits * GROUP, digits);
            act->starts[place] = -INT6_OFFSET * first;
            act->half_starts[place] = -INT6_OFFSET * (sum - first);
        } else if (a->bits == 8) {
            act->starts[place] = -INT8_OFFSET * sum;
        } else {
            act->sums[place] = act->scales[place] * (float)sum;
        }
    }
    if (probe != 0.0f) act->scales[place_of(act, m)] = probe; /* NaN: the whole row must be NaN */
}

void infer_linear_quantize(const void *args, int64_t chunk) {
    const linear_args *a = args;
    activations act = split_scratch(a, a->digits);
    int64_t first = chunk * a->rows_per_chunk, last = first + a->rows_per_chunk;
    for (int64_t m = first; m < last && m < a->M; m++)
        if (a->digits == 1) quantize_row(a, &act, m, 1);
        else quantize_row(a, &act, m, 2);
}
