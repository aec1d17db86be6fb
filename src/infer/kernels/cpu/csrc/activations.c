/* Activations into integers, on their way to a product: the second half of the layout in linear.h.
 *
 * Done once per product, for all tiles together. Integers do not round when they are added, so what is kept
 * of a group beside its integers and its scale is exact, too, or rounded once. */
#include "linear.h"

int64_t infer_linear_scratch(int64_t M, int64_t K) {
    int64_t groups = (K + GROUP - 1) / GROUP;
    return (M + BLOCK_ROWS - 1) / BLOCK_ROWS * groups * (LINES * GROUP + BLOCK_ROWS * 8);
}

#if defined(HAVE_AVX512)
static inline int32_t sum_of_ints(vi v) { return _mm512_reduce_add_epi32((__m512i)v); }
#else
static inline int32_t sum_of_ints(vi v) {
    int32_t total = 0;
    for (int i = 0; i < LANES; i++) total += v[i];
    return total;
}
#endif

static inline void put_digits(vi whole, int8_t *q) {
    vi high = (whole + 64) >> 7;
    *(bytes16 *)q = __builtin_convertvector(high, bytes16);
    *(bytes16 *)(q + GROUP) = __builtin_convertvector(whole - (high << 7), bytes16);
}

static void quantize_row(const linear_args *a, const activations *act, int64_t m) {
    const float *x = a->x + m * a->x_stride;
    const float largest = 127.0f * 128.0f;
    int64_t place = place_of(act, m);
    vf probe = {0}; /* stays 0 unless some x is NaN or infinite */
    for (int64_t g = 0; g < act->groups; g++, place += BLOCK_ROWS) {
        const float *group = x + g * GROUP;
        int64_t left = a->K - g * GROUP;
        vf low = left >= 16 ? load(group) : load_some(group, left);
        vf high = left >= 32 ? load(group + 16) : left > 16 ? load_some(group + 16, left - 16) : (vf){0};
        probe += low * 0.0f + high * 0.0f;
        float peak = peak_of_lanes(larger(absolute(low), absolute(high)));
        float inverse = peak > 0.0f ? largest / peak : 0.0f;
        if (!(inverse <= 3.0e38f)) inverse = 0.0f; /* all of the group is below what a float can divide by */
        /* adding 1.5 * 2^23 rounds to the nearest integer and leaves it in the low bits */
        vi low_q = ((vi)(low * inverse + 12582912.0f) << 16) >> 16;
        vi high_q = ((vi)(high * inverse + 12582912.0f) << 16) >> 16;
        put_digits(low_q, act->q + place * DIGITS * GROUP);
        put_digits(high_q, act->q + place * DIGITS * GROUP + 16);
        act->scales[place] = inverse > 0.0f ? peak / largest : 0.0f;
        int32_t sum = sum_of_ints(low_q + high_q);
        if (a->bits == 4) act->sums[place] = act->scales[place] * (float)sum;
        else act->starts[place] = -INT8_OFFSET * sum;
    }
    float broken = sum_lanes(probe);
    if (broken != 0.0f) act->scales[place_of(act, m)] = broken; /* NaN: the whole row must be NaN */
}

void infer_linear_quantize(const void *args, int64_t chunk) {
    const linear_args *a = args;
    activations act = split_scratch(a);
    int64_t first = chunk * a->rows_per_chunk, last = first + a->rows_per_chunk;
    for (int64_t m = first; m < last && m < a->M; m++) quantize_row(a, &act, m);
}
