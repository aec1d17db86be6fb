/* Multiply by a matrix of small integers.
 *
 * Weights: 32 neighbours of a row (a *group*) share one scale d, a half; each weight is d * q.
 *     int8   q in -127 .. 127              8.5 bits per weight
 *     int4   q in -8 .. 7                  4.5 bits per weight
 * Activations are brought to a similar form when they arrive: 32 of them share a scale, max|x| over the
 * largest integer, and an integer has one or two *digits*, each an int8:
 *     1 digit    q               up to 127: little is left of what lies beside one very loud channel
 *     2 digits   128 * q0 + q1   up to 16256: no error worth mentioning, for twice the arithmetic
 * The dot product of two groups is exact (two digits:  128 * (q_w . q0) + q_w . q1,  below 2^28), and the
 * result of a row is
 *
 *     y[m][n] = bias[n] + sum over groups g, in order, of  (d_w[n][g] * d_x[m][g]) * (q_w . q_x)
 *
 * one float addition per group, always in the same order: a row's result does not depend on how many
 * rows are computed with it, nor on the instruction set's way of adding integers.
 *
 * Layout: 16 rows form a *tile*, and the instruction that multiplies four pairs of bytes and adds them to a
 * 32-bit lane wants four consecutive k of one row in a lane, 16 rows in a register:
 *
 *     tile, group:   8 vectors of 64 bytes, vector v =  row0: k=4v..4v+3 | row1: k=4v..4v+3 | ... | row15
 *     int4:          4 vectors; low halves of its bytes are vector v, high halves vector v + 4
 *     scales:        [tile][group][16] halves, apart, so that vectors stay aligned
 *
 * AVX-512's instruction multiplies unsigned by signed. The weights become the unsigned side by adding a
 * constant c (128, or 8 for int4), and  sum (q_w + c) q_x = sum q_w q_x + c sum q_x  is put right by
 * starting each sum at  -c sum q_x,  which is known when the activations are quantised.
 *
 * Processors with AMX multiply 16 rows (8 of two digits) by a whole tile in one instruction, in this same
 * layout; the integer sums are the same, so the results are, too.
 *
 * Bound by reading the weights for one row, by arithmetic from about eight rows on. */
#define _GNU_SOURCE
#include "infer.h"

#if defined(HAVE_AVX512) && defined(__AMX_INT8__) && defined(__linux__)
#define HAVE_AMX 1
#include <sys/syscall.h>
#include <unistd.h>
#endif

#define GROUP 32
#define LINES 16
#define ALWAYS_INLINE static inline __attribute__((always_inline))

#if defined(HAVE_AVX512)
#define INT8_OFFSET 128 /* what is added to an int8 weight to make it unsigned */
#else
#define INT8_OFFSET 0
#endif
#define INT4_OFFSET 8

typedef int8_t bytes16 __attribute__((vector_size(16)));

typedef struct {
    int64_t M;
    const float *x;
    int64_t x_stride;
    float *y;
    int64_t y_stride;
    const uint8_t *data;
    const uint16_t *scales;
    const float *bias; /* may be NULL */
    uint8_t *scratch;  /* quantised x: see `activations` */
    int64_t N, K;
    int64_t bits, digits;                    /* of a weight, of an activation */
    int64_t tiles_per_chunk, rows_per_chunk; /* of the product, of infer_linear_quantize */
} linear_args;

/* Quantised rows. A *line* is one digit of one row; 16 lines are a block, which has all their first groups,
 * then all their second ones, and so on: what is read together lies together. */
typedef struct {
    int8_t *q;       /* [blocks][groups][16 lines][32], the digits of a row in neighbouring lines */
    float *scales;   /* [blocks][groups][rows of a block] */
    int32_t *starts; /* the same: what the integer sum of the last digit starts with */
    int64_t groups, rows;
} activations;

int64_t infer_linear_scratch(int64_t M, int64_t K, int64_t digits) {
    int64_t rows = LINES / digits, groups = (K + GROUP - 1) / GROUP;
    return (M + rows - 1) / rows * groups * (LINES * GROUP + rows * 8);
}

static activations split_scratch(const linear_args *a) {
    activations act = {.groups = (a->K + GROUP - 1) / GROUP, .rows = LINES / a->digits};
    int64_t cells = (a->M + act.rows - 1) / act.rows * act.groups;
    act.q = (int8_t *)a->scratch;
    act.scales = (float *)(a->scratch + cells * LINES * GROUP);
    act.starts = (int32_t *)(act.scales + cells * act.rows);
    return act;
}

/* Where the first group of row m is: an index of `scales`; the next one is `rows` further on. */
static inline int64_t place_of(const activations *act, int64_t m) {
    return m / act->rows * act->groups * act->rows + m % act->rows;
}

static inline vf absolute(vf v) { return (vf)((vi)v & 0x7fffffff); }
static inline vf larger(vf a, vf b) {
    vi mask = a > b;
    return (vf)(((vi)a & mask) | ((vi)b & ~mask));
}

#if defined(HAVE_AVX512)
static inline float max_of_lanes(vf v) { return _mm512_reduce_max_ps((__m512)v); }
static inline int32_t sum_of_ints(vi v) { return _mm512_reduce_add_epi32((__m512i)v); }
#else
static inline float max_of_lanes(vf v) { return max_lanes(v); }
static inline int32_t sum_of_ints(vi v) {
    int32_t total = 0;
    for (int i = 0; i < LANES; i++) total += v[i];
    return total;
}
#endif

static inline void put_digits(vi whole, int8_t *q, int64_t digits) {
    if (digits == 2) {
        vi high = (whole + 64) >> 7;
        *(bytes16 *)q = __builtin_convertvector(high, bytes16);
        q += GROUP;
        whole -= high << 7;
    }
    *(bytes16 *)q = __builtin_convertvector(whole, bytes16);
}

static void quantize_row(const linear_args *a, const activations *act, int64_t m) {
    const float *x = a->x + m * a->x_stride;
    const int32_t offset = a->bits == 4 ? INT4_OFFSET : INT8_OFFSET;
    const int64_t digits = a->digits;
    const float largest = digits == 2 ? 127.0f * 128.0f : 127.0f;
    int64_t place = place_of(act, m);
    vf probe = {0}; /* stays 0 unless some x is NaN or infinite */
    for (int64_t g = 0; g < act->groups; g++, place += act->rows) {
        const float *group = x + g * GROUP;
        int64_t left = a->K - g * GROUP;
        vf low = left >= 16 ? load(group) : load_some(group, left);
        vf high = left >= 32 ? load(group + 16) : left > 16 ? load_some(group + 16, left - 16) : (vf){0};
        probe += low * 0.0f + high * 0.0f;
        float peak = max_of_lanes(larger(absolute(low), absolute(high)));
        float inverse = peak > 0.0f ? largest / peak : 0.0f;
        if (!(inverse <= 3.0e38f)) inverse = 0.0f; /* all of the group is below what a float can divide by */
        /* adding 1.5 * 2^23 rounds to the nearest integer and leaves it in the low bits */
        vi low_q = ((vi)(low * inverse + 12582912.0f) << 16) >> 16;
        vi high_q = ((vi)(high * inverse + 12582912.0f) << 16) >> 16;
        put_digits(low_q, act->q + place * digits * GROUP, digits);
        put_digits(high_q, act->q + place * digits * GROUP + 16, digits);
        act->scales[place] = inverse > 0.0f ? peak / largest : 0.0f;
        act->starts[place] = -offset * sum_of_ints(low_q + high_q);
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

/* One group more: total + sum * (d * x_scale), rounded twice and in the same way in every function here. */
static inline vf add_group(vf total, vi sum, vf d, float x_scale) {
#if defined(HAVE_AVX512)
    return (vf)_mm512_fmadd_ps(_mm512_cvtepi32_ps((__m512i)sum), (__m512)(d * x_scale), (__m512)total);
#else
    return total + __builtin_convertvector(sum, vf) * (d * x_scale);
#endif
}

static inline void finish_row(const linear_args *a, int64_t tile, int64_t m, vf total) {
    int64_t n = tile * LANES, count = a->N - n;
    float *y = a->y + m * a->y_stride + n;
    if (count >= LANES) {
        store(y, a->bias ? total + load(a->bias + n) : total);
    } else {
        store_some(y, a->bias ? total + load_some(a->bias + n, count) : total, count);
    }
}

/* One tile times `rows` rows of activations, from row m on. `rows`, `bits` and `digits` are constants
 * wherever this is inlined, so the loops over them disappear. */
ALWAYS_INLINE void multiply_tile(const linear_args *a, const activations *act, int64_t tile, int64_t m,
                                 const int rows, const int bits, const int digits) {
    const int lines = rows * digits;
    const int64_t groups = act->groups;
    const int vectors = bits == 4 ? 4 : 8;
    const uint8_t *w = a->data + tile * groups * vectors * 64;
    const uint16_t *w_scales = a->scales + tile * groups * LANES;
    vf total[LINES];
    for (int i = 0; i < rows; i++) total[i] = (vf){0};
    int64_t place = place_of(act, m);
    for (int64_t g = 0; g < groups; g++, w += vectors * 64, place += LINES / digits) {
        const int8_t *q = act->q + place * digits * GROUP;
        vi sums[LINES];
        for (int i = 0; i < lines; i++)
            sums[i] = (vi){0} + (i % digits == digits - 1 ? act->starts[place + i / digits] : 0);
#if defined(HAVE_AVX512)
#pragma GCC unroll 8
        for (int v = 0; v < vectors; v++) {
            __m512i raw = _mm512_loadu_si512(w + v * 64);
            __m512i low = bits == 4 ? _mm512_and_si512(raw, _mm512_set1_epi8(15)) : raw;
            for (int i = 0; i < lines; i++) {
                int32_t four;
                memcpy(&four, q + i * GROUP + v * 4, 4);
                sums[i] = (vi)_mm512_dpbusd_epi32((__m512i)sums[i], low, _mm512_set1_epi32(four));
            }
            if (bits == 4) {
                __m512i high = _mm512_and_si512(_mm512_srli_epi16(raw, 4), _mm512_set1_epi8(15));
                for (int i = 0; i < lines; i++) {
                    int32_t four;
                    memcpy(&four, q + i * GROUP + 16 + v * 4, 4);
                    sums[i] = (vi)_mm512_dpbusd_epi32((__m512i)sums[i], high, _mm512_set1_epi32(four));
                }
            }
        }
#elif defined(HAVE_AVX2)
        const __m256i ones = _mm256_set1_epi16(1), nibble = _mm256_set1_epi8(15);
        for (int i = 0; i < lines; i++) {
            const int8_t *x = q + i * GROUP;
            union { vi all; __m256i half[2]; } sum = {sums[i]};
            for (int h = 0; h < 2; h++) {
                __m256i s = sum.half[h];
                for (int v = 0; v < vectors; v++) {
                    __m256i raw = _mm256_loadu_si256((const __m256i *)(w + v * 64 + h * 32));
                    int32_t four;
                    memcpy(&four, x + v * 4, 4);
                    __m256i xs = _mm256_set1_epi32(four);
                    if (bits == 8) { /* |w| times sign(w) x: no product of two bytes can overflow 16 bits */
                        __m256i p = _mm256_maddubs_epi16(_mm256_abs_epi8(raw), _mm256_sign_epi8(xs, raw));
                        s = _mm256_add_epi32(s, _mm256_madd_epi16(p, ones));
                        continue;
                    }
                    __m256i p = _mm256_maddubs_epi16(_mm256_and_si256(raw, nibble), xs);
                    s = _mm256_add_epi32(s, _mm256_madd_epi16(p, ones));
                    memcpy(&four, x + 16 + v * 4, 4);
                    __m256i high = _mm256_and_si256(_mm256_srli_epi16(raw, 4), nibble);
                    p = _mm256_maddubs_epi16(high, _mm256_set1_epi32(four));
                    s = _mm256_add_epi32(s, _mm256_madd_epi16(p, ones));
                }
                sum.half[h] = s;
            }
            sums[i] = sum.all;
        }
#elif defined(HAVE_NEON)
        for (int i = 0; i < lines; i++) {
            const int8_t *x = q + i * GROUP;
            int8x16_t x0 = vld1q_s8(x), x1 = vld1q_s8(x + 16);
            union { vi all; int32x4_t quarter[4]; } sum = {sums[i]};
            for (int r = 0; r < 4; r++) {
                int32x4_t s = sum.quarter[r];
                const uint8_t *p = w + r * 16;
                if (bits == 8) {
                    s = vdotq_laneq_s32(s, vld1q_s8((const int8_t *)p), x0, 0);
                    s = vdotq_laneq_s32(s, vld1q_s8((const int8_t *)p + 64), x0, 1);
                    s = vdotq_laneq_s32(s, vld1q_s8((const int8_t *)p + 128), x0, 2);
                    s = vdotq_laneq_s32(s, vld1q_s8((const int8_t *)p + 192), x0, 3);
                    s = vdotq_laneq_s32(s, vld1q_s8((const int8_t *)p + 256), x1, 0);
                    s = vdotq_laneq_s32(s, vld1q_s8((const int8_t *)p + 320), x1, 1);
                    s = vdotq_laneq_s32(s, vld1q_s8((const int8_t *)p + 384), x1, 2);
                    s = vdotq_laneq_s32(s, vld1q_s8((const int8_t *)p + 448), x1, 3);
                } else {
                    const uint8x16_t nibble = vdupq_n_u8(15);
                    uint8x16_t w0 = vld1q_u8(p), w1 = vld1q_u8(p + 64), w2 = vld1q_u8(p + 128),
                               w3 = vld1q_u8(p + 192);
                    s = vdotq_laneq_s32(s, vreinterpretq_s8_u8(vandq_u8(w0, nibble)), x0, 0);
                    s = vdotq_laneq_s32(s, vreinterpretq_s8_u8(vandq_u8(w1, nibble)), x0, 1);
                    s = vdotq_laneq_s32(s, vreinterpretq_s8_u8(vandq_u8(w2, nibble)), x0, 2);
                    s = vdotq_laneq_s32(s, vreinterpretq_s8_u8(vandq_u8(w3, nibble)), x0, 3);
                    s = vdotq_laneq_s32(s, vreinterpretq_s8_u8(vshrq_n_u8(w0, 4)), x1, 0);
                    s = vdotq_laneq_s32(s, vreinterpretq_s8_u8(vshrq_n_u8(w1, 4)), x1, 1);
                    s = vdotq_laneq_s32(s, vreinterpretq_s8_u8(vshrq_n_u8(w2, 4)), x1, 2);
                    s = vdotq_laneq_s32(s, vreinterpretq_s8_u8(vshrq_n_u8(w3, 4)), x1, 3);
                }
                sum.quarter[r] = s;
            }
            sums[i] = sum.all;
        }
#else
        for (int i = 0; i < lines; i++) {
            const int8_t *x = q + i * GROUP;
            for (int n = 0; n < LANES; n++)
                for (int k = 0; k < GROUP; k++) {
                    uint8_t raw = w[k / 4 % vectors * 64 + n * 4 + k % 4];
                    int32_t weight = bits == 8 ? (int8_t)raw : k < 16 ? raw & 15 : raw >> 4;
                    sums[i][n] += weight * x[k];
                }
        }
#endif
        vf d = load_halves(w_scales + g * LANES);
        for (int i = 0; i < rows; i++) {
            vi sum = digits == 2 ? (sums[2 * i] << 7) + sums[2 * i + 1] : sums[i];
            total[i] = add_group(total[i], sum, d, act->scales[place + i]);
        }
    }
#pragma GCC unroll 16
    for (int i = 0; i < rows; i++) finish_row(a, tile, m + i, total[i]);
}

#if defined(HAVE_AMX)
static int may_use_amx;

/* The registers of AMX are so large that Linux wants to be asked before a process uses them. */
__attribute__((constructor)) static void ask_for_amx(void) {
    enum { REQUEST = 0x1023, TILE_DATA = 18 };
    may_use_amx = syscall(SYS_arch_prctl, REQUEST, TILE_DATA) == 0;
}

typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t bytes_per_row[16];
    uint8_t rows[16];
} tile_config;

/* Register 0: sums, 16 x 16 integers. 1: activations, 16 lines of a group. 2: weights, one group. */
static void configure_tiles(void) {
    tile_config config = {.palette = 1};
    config.bytes_per_row[0] = config.bytes_per_row[2] = 64;
    config.bytes_per_row[1] = GROUP;
    config.rows[0] = config.rows[1] = 16;
    config.rows[2] = 8;
    _tile_loadconfig(&config);
}

/* What multiply_tile does, for 16 rows of one digit or 8 of two. */
ALWAYS_INLINE void multiply_tile_amx(const linear_args *a, const activations *act, int64_t tile, int64_t m,
                                     const int bits, const int digits) {
    const int rows = LINES / digits;
    const int64_t groups = act->groups;
    const int64_t group_bytes = bits == 4 ? 256 : 512;
    const uint8_t *w = a->data + tile * groups * group_bytes;
    const uint16_t *w_scales = a->scales + tile * groups * LANES;
    vi sums[2][16];
    uint8_t nibbles[2][512] __attribute__((aligned(64)));
    vf total[LINES];
    for (int i = 0; i < rows; i++) total[i] = (vf){0};
    int64_t place = place_of(act, m);
    /* Sums go through memory and take their time: those of a group are added when the next one is under way. */
    for (int64_t g = 0; g <= groups; g++, place += rows) {
        const uint8_t *weights = w + g * group_bytes;
        if (bits == 4 && g < groups) {
            for (int v = 0; v < 4; v++) {
                __m512i raw = _mm512_loadu_si512(weights + v * 64), mask = _mm512_set1_epi8(15);
                _mm512_store_si512(nibbles[g & 1] + v * 64, _mm512_and_si512(raw, mask));
                _mm512_store_si512(nibbles[g & 1] + 256 + v * 64,
                                   _mm512_and_si512(_mm512_srli_epi16(raw, 4), mask));
            }
            weights = nibbles[g & 1];
        }
        if (g < groups) {
            _tile_loadd(1, act->q + place * digits * GROUP, GROUP);
            _tile_loadd(2, weights, 64);
            _tile_zero(0);
            _tile_dpbsud(0, 1, 2);
            _tile_stored(0, sums[g & 1], 64);
        }
        if (g == 0) continue;
        vf d = load_halves(w_scales + (g - 1) * LANES);
        const vi *line = sums[(g - 1) & 1];
        const int32_t *starts = act->starts + place - rows;
        const float *x_scales = act->scales + place - rows;
#pragma GCC unroll 16
        for (int i = 0; i < rows; i++) {
            vi sum = digits == 2 ? (line[2 * i] << 7) + line[2 * i + 1] : line[i];
            total[i] = add_group(total[i], sum + starts[i], d, x_scales[i]);
        }
    }
#pragma GCC unroll 16
    for (int i = 0; i < rows; i++) finish_row(a, tile, m + i, total[i]);
}
#endif

ALWAYS_INLINE void multiply_chunk(const linear_args *a, int64_t chunk, const int bits, const int digits) {
    activations act = split_scratch(a);
    int64_t num_tiles = (a->N + LANES - 1) / LANES;
    int64_t first = chunk * a->tiles_per_chunk, last = first + a->tiles_per_chunk;
    if (last > num_tiles) last = num_tiles;
    int64_t m = 0;
#if defined(HAVE_AMX)
    const int rows = LINES / digits;
    if (may_use_amx && a->M >= rows) {
        configure_tiles();
        for (; m + rows <= a->M; m += rows)
            for (int64_t tile = first; tile < last; tile++) multiply_tile_amx(a, &act, tile, m, bits, digits);
        _tile_release();
    }
#endif
#define MULTIPLY_BY(rows) \
    for (; m + rows <= a->M; m += rows) \
        for (int64_t tile = first; tile < last; tile++) multiply_tile(a, &act, tile, m, rows, bits, digits);
    MULTIPLY_BY(8) MULTIPLY_BY(4) MULTIPLY_BY(2) MULTIPLY_BY(1)
}

void infer_linear_int8(const void *args, int64_t chunk) {
    const linear_args *a = args;
    a->digits == 2 ? multiply_chunk(a, chunk, 8, 2) : multiply_chunk(a, chunk, 8, 1);
}
void infer_linear_int4(const void *args, int64_t chunk) {
    const linear_args *a = args;
    a->digits == 2 ? multiply_chunk(a, chunk, 4, 2) : multiply_chunk(a, chunk, 4, 1);
}
