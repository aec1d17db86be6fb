/* Multiply by a matrix of small integers; linear.h has the layout of both operands.
 *
 * The dot product of two groups is exact (128 * (q_w . q0) + q_w . q1,  below 2^28, or with one digit q_w . q0), and
 * the result of a row is
 *
 *     y[m][n] = bias[n] + sum over groups g, in order, of  (d_w[n][g] * d_x[m][g]) * (q_w . q_x)
 *                                              and in int4  + m_w[n][g] * (d_x[m][g] * sum q_x)
 *
 * one float addition per group (int4: two), always in the same order: a row's result does not depend on how
 * many rows are computed with it, nor on the instruction set's way of adding integers. The sum of a group's
 * activations is the same for all rows of the matrix and was taken when they were quantised (activations.c).
 *
 * AVX-512's instruction multiplies unsigned by signed. Weights in int4 are unsigned; those in int8 become unsigned by
 * adding a constant c = 128, and  sum (q_w + c) q_x = sum q_w q_x + c sum q_x  is put right by starting each sum
 * at  -c sum q_x.
 *
 * Processors with AMX multiply 16 lines (8 rows of two digits) by a whole tile in one instruction, in this same
 * layout; the integer sums are the same, so the results are, too.
 *
 * The kernels of NEON are in linear_neon.h.
 *
 * Bound by reading the weights for one row, by arithmetic from about eight rows on. */
#define _GNU_SOURCE
#include "linear.h"

#if defined(HAVE_AVX512) && defined(__AMX_INT8__) && defined(__linux__)
#define HAVE_AMX 1
#include <sys/syscall.h>
#include <unistd.h>
#endif

#if defined(HAVE_NEON)
#include "linear_neon.h"
#elif defined(HAVE_AVX512) || defined(HAVE_AVX2)

/* The factors of a group of weights, for the 16 rows of a tile. */
typedef struct {
    vf scale, minimum; /* int8 has no minimum */
} group_scales;

ALWAYS_INLINE group_scales load_scales(const uint16_t *tile_scales, int64_t g, const int bits) {
    if (bits == 8) return (group_scales){.scale = load_halves(tile_scales + g * LANES)};
    const uint16_t *both = tile_scales + g * 2 * LANES;
    return (group_scales){load_halves(both), load_halves(both + LANES)};
}

/* Weights are read once, from one end to the other. The processor notices and prefetches, but begins anew at every
 * page of 4 KB, so the next page is prefetched here: this saves a quarter of the time of a small batch. */
ALWAYS_INLINE void prefetch_next(const uint8_t *w, const uint16_t *tile_scales, int64_t g, const int bits) {
    enum { DISTANCE = 4096 };
    const int group_bytes = GROUP * LANES * bits / 8, scale_bytes = bits == 4 ? 64 : 32;
    const char *scales = (const char *)tile_scales + g * scale_bytes;
    for (int at = 0; at < group_bytes; at += 64) __builtin_prefetch(w + DISTANCE + at);
    __builtin_prefetch(scales + DISTANCE / group_bytes * scale_bytes);
}

/* total + a * b, rounded once where the processor can, and in the same way in every function here. */
static inline vf multiply_add(vf a, vf b, vf total) {
#if defined(HAVE_AVX512)
    return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)total);
#else
    return total + a * b;
#endif
}

/* Add one more group, of row `at` of the activations. */
ALWAYS_INLINE vf add_group(vf total, vi sum, group_scales w, const activations *act, int64_t at, const int bits) {
    total = multiply_add(__builtin_convertvector(sum, vf), w.scale * act->scales[at], total);
    return bits == 4 ? multiply_add(w.minimum, splat(act->sums[at]), total) : total;
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

#if defined(HAVE_AVX512)
/* Add four products of bytes to every lane's sum: 16 rows of weights times four neighbours of an activation. gcc
 * would load those by a separate instruction, and instructions are what limits a batch. */
ALWAYS_INLINE vi add_products(vi sum, __m512i weights, const int8_t *four) {
    __asm__("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(weights), "m"(*(const int32_t(*)[1])four));
    return sum;
}
#endif

#if defined(HAVE_AVX512)
ALWAYS_INLINE __m512i mxfp4_table(void) { return _mm512_broadcast_i32x4(_mm_setr_epi8(MXFP4_TABLE)); }
#endif

/* One tile times `rows` rows of activations, from row m on. `rows`, `bits` and `digits` are constants wherever this
 * is inlined, so the loops over them disappear. */
ALWAYS_INLINE void multiply_tile(const linear_args *a, const activations *act, int64_t tile, int64_t m,
                                 const int rows, const int kind, const int digits) {
    const int lines = rows * digits, bits = kind == MXFP4 ? 4 : kind;
    const int64_t groups = act->groups;
    const int vectors = bits == 4 ? 4 : 8;
    const uint8_t *w = a->data + tile * groups * vectors * 64;
    const uint16_t *w_scales = a->scales + tile * groups * (bits == 4 ? 2 : 1) * LANES;
    vf total[LINES];
    for (int i = 0; i < rows; i++) total[i] = (vf){0};
    int64_t place = place_of(act, m);
    for (int64_t g = 0; g < groups; g++, w += vectors * 64, place += block_rows(digits)) {
        const int8_t *q = act->q + place * digits * GROUP;
        prefetch_next(w, w_scales, g, bits);
        vi sums[LINES];
        const int has_starts = bits == 8 && INT8_OFFSET != 0; /* they are all 0 without an offset */
        for (int i = 0; i < lines; i++)
            sums[i] = (vi){0} + (has_starts && i % digits == digits - 1 ? act->starts[place + i / digits] : 0);
#if defined(HAVE_AVX512)
#pragma GCC unroll 8
        for (int v = 0; v < vectors; v++) {
            __m512i raw = _mm512_loadu_si512(w + v * 64);
            __m512i low = bits == 4 ? _mm512_and_si512(raw, _mm512_set1_epi8(15)) : raw;
            if (kind == MXFP4) low = _mm512_shuffle_epi8(mxfp4_table(), low);
            for (int i = 0; i < lines; i++) sums[i] = add_products(sums[i], low, q + i * GROUP + v * 4);
            if (bits == 4) {
                __m512i high = _mm512_and_si512(_mm512_srli_epi16(raw, 4), _mm512_set1_epi8(15));
                if (kind == MXFP4) high = _mm512_shuffle_epi8(mxfp4_table(), high);
                for (int i = 0; i < lines; i++) sums[i] = add_products(sums[i], high, q + i * GROUP + 16 + v * 4);
            }
        }
#elif defined(HAVE_AVX2)
        const __m256i ones = _mm256_set1_epi16(1), nibble = _mm256_set1_epi8(15);
        const __m256i table = _mm256_broadcastsi128_si256(_mm_setr_epi8(MXFP4_TABLE));
        for (int i = 0; i < lines; i++) {
            const int8_t *x = q + i * GROUP;
            union { vi all; __m256i half[2]; } sum = {sums[i]};
            for (int h = 0; h < 2; h++) {
                __m256i s = sum.half[h], pairs = _mm256_setzero_si256();
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
                    /* sums of pairs are below 15 * 127 * 2, so eight of them fit into 16 bits */
                    __m256i low = _mm256_and_si256(raw, nibble);
                    __m256i high = _mm256_and_si256(_mm256_srli_epi16(raw, 4), nibble);
                    if (kind == MXFP4) low = _mm256_shuffle_epi8(table, low), high = _mm256_shuffle_epi8(table, high);
                    pairs = _mm256_add_epi16(pairs, _mm256_maddubs_epi16(low, xs));
                    memcpy(&four, x + 16 + v * 4, 4);
                    pairs = _mm256_add_epi16(pairs, _mm256_maddubs_epi16(high, _mm256_set1_epi32(four)));
                    if (kind == MXFP4) { /* up to 24 * 127 * 2 each: only two of them fit */
                        s = _mm256_add_epi32(s, _mm256_madd_epi16(pairs, ones));
                        pairs = _mm256_setzero_si256();
                    }
                }
                if (bits == 4 && kind != MXFP4) s = _mm256_madd_epi16(pairs, ones);
                sum.half[h] = s;
            }
            sums[i] = sum.all;
        }
#endif
        group_scales scales = load_scales(w_scales, g, bits);
        for (int i = 0; i < rows; i++) {
            vi sum = digits == 2 ? (sums[2 * i] << 7) + sums[2 * i + 1] : sums[i];
            total[i] = add_group(total[i], sum, scales, act, place + i, bits);
        }
    }
#pragma GCC unroll 32
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

/* Registers 0, 3: sums, 16 x 16 integers. 1, 4: activations, 16 lines of a group. 2: weights, one group. */
static void configure_tiles(void) {
    tile_config config = {.palette = 1};
    config.bytes_per_row[0] = config.bytes_per_row[2] = config.bytes_per_row[3] = 64;
    config.bytes_per_row[1] = config.bytes_per_row[4] = GROUP;
    config.rows[0] = config.rows[1] = config.rows[3] = config.rows[4] = 16;
    config.rows[2] = 8;
    _tile_loadconfig(&config);
}

/* A group of int4 weights as bytes. AMX tiles are loaded from memory, after it has been written, so this is
 * done one group early. */
ALWAYS_INLINE void unpack(const uint8_t *from, uint8_t *to, const int kind) {
    for (int v = 0; v < 4; v++) {
        __m512i raw = _mm512_loadu_si512(from + v * 64), mask = _mm512_set1_epi8(15);
        __m512i low = _mm512_and_si512(raw, mask), high = _mm512_and_si512(_mm512_srli_epi16(raw, 4), mask);
        if (kind == MXFP4) low = _mm512_shuffle_epi8(mxfp4_table(), low), high = _mm512_shuffle_epi8(mxfp4_table(), high);
        _mm512_store_si512(to + v * 64, low);
        _mm512_store_si512(to + 256 + v * 64, high);
    }
}

/* The same as multiply_tile, for one or two blocks of 16 lines. */
ALWAYS_INLINE void multiply_tile_amx(const linear_args *a, const activations *act, int64_t tile, int64_t m,
                                     const int blocks, const int kind, const int digits) {
    const int block = LINES / digits, rows = blocks * block, bits = kind == MXFP4 ? 4 : kind;
    const int64_t groups = act->groups, next_block = groups * block;
    const int64_t group_bytes = bits == 4 ? 256 : 512;
    const uint8_t *w = a->data + tile * groups * group_bytes;
    const uint16_t *w_scales = a->scales + tile * groups * (bits == 4 ? 2 : 1) * LANES;
    vi sums[2][2 * LINES];
    uint8_t nibbles[2][512] __attribute__((aligned(64)));
    vf total[2 * LINES];
    for (int i = 0; i < rows; i++) total[i] = (vf){0};
    int64_t place = place_of(act, m);
    /* Sums go through memory and take their time: those of a group are added when the next one is under way. */
    for (int64_t g = 0; g <= groups; g++, place += block) {
        const uint8_t *weights = w + g * group_bytes;
        if (g < groups) prefetch_next(weights, w_scales, g, bits);
        if (bits == 4 && g == 0) unpack(weights, nibbles[0], kind);
        if (bits == 4) weights = nibbles[g & 1];
        if (g < groups) {
            const int8_t *q = act->q + place * digits * GROUP;
            _tile_loadd(2, weights, 64);
            _tile_loadd(1, q, GROUP);
            _tile_zero(0);
            _tile_dpbsud(0, 1, 2);
            _tile_stored(0, sums[g & 1], 64);
            if (blocks == 2) {
                _tile_loadd(4, q + next_block * digits * GROUP, GROUP);
                _tile_zero(3);
                _tile_dpbsud(3, 4, 2);
                _tile_stored(3, sums[g & 1] + LINES, 64);
            }
        }
        if (bits == 4 && g + 1 < groups) unpack(w + (g + 1) * group_bytes, nibbles[(g + 1) & 1], kind);
        if (g == 0) continue;
        group_scales scales = load_scales(w_scales, g - 1, bits);
        const vi *line = sums[(g - 1) & 1];
#pragma GCC unroll 32
        for (int i = 0; i < rows; i++) {
            const int64_t at = place - block + i / block * next_block + i % block;
            vi sum = digits == 2 ? (line[2 * i] << 7) + line[2 * i + 1] : line[i];
            if (bits == 8) sum += act->starts[at];
            total[i] = add_group(total[i], sum, scales, act, at, bits);
        }
    }
#pragma GCC unroll 32
    for (int i = 0; i < rows; i++) finish_row(a, tile, m + i, total[i]);
}

/* Two blocks at a time: the loaded and unpacked weights of a tile then serve both. */
ALWAYS_INLINE int64_t multiply_chunk_amx(const linear_args *a, const activations *act, int64_t first, int64_t last,
                                         const int bits, const int digits) {
    const int block = LINES / digits;
    int64_t m = 0;
    if (!may_use_amx || a->M < block) return m;
    configure_tiles();
    for (; m + 2 * block <= a->M; m += 2 * block)
        for (int64_t tile = first; tile < last; tile++) multiply_tile_amx(a, act, tile, m, 2, bits, digits);
    for (; m + block <= a->M; m += block)
        for (int64_t tile = first; tile < last; tile++) multiply_tile_amx(a, act, tile, m, 1, bits, digits);
    _tile_release();
    return m;
}
#endif

/* The tiles `first` to `last` times all rows. */
ALWAYS_INLINE void multiply_tiles(const linear_args *a, const activations *act, int64_t first, int64_t last,
                                  const int bits, const int digits) {
#if defined(HAVE_AMX)
    int64_t m = multiply_chunk_amx(a, act, first, last, bits, digits);
#else
    int64_t m = 0;
#endif
#define MULTIPLY_BY(rows) \
    for (; m + rows <= a->M; m += rows) \
        for (int64_t tile = first; tile < last; tile++) multiply_tile(a, act, tile, m, rows, bits, digits);
    /* The rows left over from eights are one pass: a window of drafts is three to seven rows, and a second pass would
     * unpack the weights again. */
    MULTIPLY_BY(8) MULTIPLY_BY(7) MULTIPLY_BY(6) MULTIPLY_BY(5) MULTIPLY_BY(4) MULTIPLY_BY(3) MULTIPLY_BY(2)
    MULTIPLY_BY(1)
}

#else /* four lanes of any processor */

typedef int32_t ints4 __attribute__((vector_size(16), aligned(1), may_alias));
typedef float floats4 __attribute__((vector_size(16)));

/* A group of weights of four neighbours in a tile, as integers: one lane each. */
static inline void unpack_four(const uint8_t *w, ints4 *weights, const int kind) {
    static const int table[16] = {MXFP4_TABLE};
    const int bits = kind == MXFP4 ? 4 : kind;
    for (int k = 0; k < GROUP; k++) {
        const int in_lane = __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__ ? k % 4 : 3 - k % 4; /* the byte of k % 4 */
        ints4 raw = *(const ints4 *)(w + k / 4 % (bits == 4 ? 4 : 8) * 64);
        if (bits == 8) weights[k] = (raw << (24 - 8 * in_lane)) >> 24;
        else weights[k] = (raw >> (8 * in_lane + k / 16 * 4)) & 15;
        for (int i = 0; kind == MXFP4 && i < 4; i++) weights[k][i] = table[weights[k][i]];
    }
}

static inline floats4 four_halves(const uint16_t *p) {
    return (floats4){half_to_float(p[0]), half_to_float(p[1]), half_to_float(p[2]), half_to_float(p[3])};
}

/* `rows` rows, eight at most, times four columns of a tile from column n on. */
ALWAYS_INLINE void multiply_four(const linear_args *a, const activations *act, int64_t n, int64_t m, int64_t rows,
                                 const int kind, const int digits) {
    const int bits = kind == MXFP4 ? 4 : kind;
    const int64_t cell = n / LANES * act->groups, in_tile = n % LANES;
    floats4 total[8] = {{0}};
    int64_t place = place_of(act, m);
    for (int64_t g = 0; g < act->groups; g++, place += block_rows(digits)) {
        ints4 weights[GROUP];
        unpack_four(a->data + (cell + g) * bits * 64 + in_tile * 4, weights, kind);
        const uint16_t *w_scales = a->scales + (cell + g) * (bits == 4 ? 2 : 1) * LANES + in_tile;
        floats4 scale = four_halves(w_scales), minimum = bits == 4 ? four_halves(w_scales + LANES) : scale;
        for (int64_t i = 0; i < rows; i++) {
            const int8_t *q = act->q + (place + i) * digits * GROUP;
            ints4 sum = {0};
            for (int digit = 0; digit < digits; digit++) {
                sum <<= 7;
                for (int k = 0; k < GROUP; k++) sum += weights[k] * q[digit * GROUP + k];
            }
            total[i] = total[i] + __builtin_convertvector(sum, floats4) * (scale * act->scales[place + i]);
            if (bits == 4) total[i] = total[i] + minimum * act->sums[place + i];
        }
    }
    for (int64_t i = 0; i < rows; i++)
        for (int64_t j = 0; j < 4 && n + j < a->N; j++)
            a->y[(m + i) * a->y_stride + n + j] = a->bias ? total[i][j] + a->bias[n + j] : total[i][j];
}

ALWAYS_INLINE void multiply_tiles(const linear_args *a, const activations *act, int64_t first, int64_t last,
                                  const int bits, const int digits) {
    for (int64_t m = 0; m < a->M; m += 8)
        for (int64_t n = first * LANES; n < last * LANES && n < a->N; n += 4)
            multiply_four(a, act, n, m, a->M - m < 8 ? a->M - m : 8, bits, digits);
}
#endif

ALWAYS_INLINE void multiply_chunk(const linear_args *a, int64_t chunk, const int bits, const int digits) {
    activations act = split_scratch(a, digits);
    int64_t num_tiles = (a->N + LANES - 1) / LANES;
    int64_t size = a->tiles_per_chunk;
#ifdef HAVE_NEON /* few rows read the matrix once, and prefetchers begin anew with every chunk: half as many are 1 to */
    if (a->M <= 8) size *= 2; /* 3 % faster on two cores of a Neoverse N1. The other half is empty */
#endif
    int64_t first = chunk * size, last = first + size < num_tiles ? first + size : num_tiles;
    if (first >= num_tiles) return;
    multiply_tiles(a, &act, first, last, bits, digits);
}

void infer_linear_int8(const void *args, int64_t chunk) {
    if (((const linear_args *)args)->digits == 1) multiply_chunk(args, chunk, 8, 1);
    else multiply_chunk(args, chunk, 8, 2);
}
void infer_linear_int4(const void *args, int64_t chunk) {
    if (((const linear_args *)args)->digits == 1) multiply_chunk(args, chunk, 4, 1);
    else multiply_chunk(args, chunk, 4, 2);
}
#ifndef HAVE_NEON /* there the same weights are kept in int8 */
void infer_linear_mxfp4(const void *args, int64_t chunk) {
    if (((const linear_args *)args)->digits == 1) multiply_chunk(args, chunk, MXFP4, 1);
    else multiply_chunk(args, chunk, MXFP4, 2);
}
#endif
