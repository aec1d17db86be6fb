/* Multiply by a matrix of small integers; linear.h has the layout of both operands.
 *
 * The dot product of two groups is exact (128 * (q_w . q0) + q_w . q1,  below 2^28, or with one digit q_w . q0), and
 * the result of a row is
 *
 *     y[m][n] = bias[n] + sum over groups g, in order, of  (d_w[n][g] * d_x[m][g]) * (q_w . q_x)
 *                                        with minima    + m_w[n][g] * (d_x[m][g] * sum q_x)
 *
 * with one float addition per group (two with minima, and in int6, which adds the halves of a group separately), always
 * in the same order: a row's result depends neither on the number of rows computed with it nor on the instruction set.
 * The sum of a group's activations is the same for all rows of the matrix; activations.c computes it.
 *
 * VNNI multiplies unsigned by signed bytes. int4 weights are unsigned; int8 weights become unsigned by adding the
 * constant c = 128; sum (q_w + c) q_x = sum q_w q_x + c sum q_x  is corrected by starting each sum at -c sum q_x. int6
 * weights are stored with c = 32 added, on any processor.
 *
 * x86 without VNNI multiplies 16-bit integers: two digits of an activation at once, and the weights are unpacked once
 * for all rows of a pass. With one digit, it multiplies bytes, and adds in 16 bits as long as that is exact.
 *
 * Processors with AMX multiply 16 lines (8 rows of two digits) by a whole tile in one instruction, in the same layout;
 * the integer sums, and so the results, are the same.
 *
 * The NEON kernels are in linear_neon.h.
 *
 * Memory-bound for one row, compute-bound from about eight rows on. */
#define _GNU_SOURCE
#include "linear.h"

#if defined(HAVE_VNNI) && defined(__AMX_INT8__) && defined(__linux__)
#define HAVE_AMX 1
#include <sys/syscall.h>
#include <unistd.h>
#endif

#if defined(HAVE_NEON)
#include "linear_neon.h"
#elif defined(HAVE_AVX512) || defined(HAVE_AVX2)

/* The factors of a group of weights, for as many rows of a tile as a register has lanes. */
typedef struct {
    vr scale, minimum; /* int8 has no minimum; in int6, it is the scale of the second half */
} group_scales;

ALWAYS_INLINE group_scales load_scales(const uint16_t *tile_scales, int64_t g, const int bits) {
    if (bits == 8) return (group_scales){.scale = load_halves(tile_scales + g * LANES)};
    const uint16_t *both = tile_scales + g * 2 * LANES;
    return (group_scales){load_halves(both), load_halves(both + LANES)};
}

/* Weights are read once, sequentially. The hardware prefetches, but restarts at every page of 4 KB, so the next page
 * is prefetched here, which saves a quarter of the time of a small batch. */
ALWAYS_INLINE void prefetch_next(const uint8_t *w, const uint16_t *tile_scales, int64_t g, const int bits) {
    enum { DISTANCE = 4096 };
    const int group_bytes = GROUP * LANES * bits / 8, scale_bytes = bits == 8 ? 32 : 64;
    const char *scales = (const char *)tile_scales + g * scale_bytes;
    for (int at = 0; at < group_bytes; at += 64) __builtin_prefetch(w + DISTANCE + at);
    __builtin_prefetch(scales + DISTANCE / group_bytes * scale_bytes);
}

/* total + a * b, rounded once, and in the same way in every function here. */
ALWAYS_INLINE vr multiply_add(vr a, vr b, vr total) {
#if defined(HAVE_AVX512)
    return (vr)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)total);
#else
    return (vr)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)total);
#endif
}

/* Parts in which a group is added: int6 groups have two. */
#define PARTS_OF(kind) ((kind) == 6 ? 2 : 1)

/* Add one more group, or a part of it, of row `at` of the activations. */
ALWAYS_INLINE vr add_group(vr total, vri sum, group_scales w, const activations *act, int64_t at, const int bits,
                           const int part) {
    total = multiply_add(__builtin_convertvector(sum, vr), (part ? w.minimum : w.scale) * act->scales[at], total);
    return bits < 6 ? multiply_add(w.minimum, splat_vr(act->sums[at]), total) : total;
}

/* The start value for the sum of the last digit of row `at`. */
ALWAYS_INLINE int32_t start_of(const activations *act, int64_t at, const int bits, const int part) {
    if (bits == 6) return part ? act->half_starts[at] : act->starts[at];
    return bits == 8 && INT8_OFFSET != 0 ? act->starts[at] : 0; /* all are 0 without an offset */
}

/* The vector of a part that is multiplied in turn `i`: the two that share a byte are consecutive. */
ALWAYS_INLINE int vector_of(const int i, const int part, const int kind) {
    return PARTS_OF(kind) == 2 ? part * 4 + i : kind == 8 ? i : i / 2 + i % 2 * 4;
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
typedef __m512i raw_vector; /* weights of a vector, or of half of one */
#define LOAD_RAW(from) _mm512_loadu_si512(from)
#define SPLAT_BYTE(byte) _mm512_set1_epi8(byte)
#define LOOK_UP(q) _mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_setr_epi8(MXFP4_TABLE)), q)
#else
typedef __m256i raw_vector;
#define LOAD_RAW(from) _mm256_loadu_si256((const __m256i *)(from))
#define SPLAT_BYTE(byte) _mm256_set1_epi8(byte)
#define LOOK_UP(q) _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_setr_epi8(MXFP4_TABLE)), q)
#endif
typedef uint16_t pairs_of_bytes __attribute__((vector_size(sizeof(raw_vector)), may_alias));

/* Move bits `from` and up of every byte to bit `to`, and apply the mask. */
ALWAYS_INLINE raw_vector move_bits(raw_vector raw, const int from, const int to, const char mask) {
    pairs_of_bytes moved = from > to ? (pairs_of_bytes)raw >> (from - to) : (pairs_of_bytes)raw << (to - from);
    return (raw_vector)(moved & (pairs_of_bytes)SPLAT_BYTE(mask));
}

/* Load vector v of a group as bytes; int8 unchanged. */
ALWAYS_INLINE raw_vector load_vector(const uint8_t *w, const int v, const int kind) {
    if (kind == 8) return LOAD_RAW(w + v * 64);
    raw_vector q = move_bits(LOAD_RAW(w + v % 4 * 64), v / 4 * 4, 0, 15);
    if (kind == MXFP4) return LOOK_UP(q);
    if (kind == 5) return q | move_bits(LOAD_RAW(w + 256), v, 4, 16);
    if (kind == 6) return q | move_bits(LOAD_RAW(w + 256 + v / 4 * 64), v % 4 * 2, 4, 48);
    return q;
}

#if defined(HAVE_VNNI)
/* Add four products of bytes to every lane's sum: 16 rows of weights times four adjacent activations. gcc would load
 * these by a separate instruction, and the number of instructions limits a batch. */
#ifndef ADD_PRODUCTS /* tests define it in C, for processors without VNNI */
#define ADD_PRODUCTS(sum, weights, four) \
    __asm__("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(weights), "m"(*(const int32_t(*)[1])(four)))
#endif

/* Add a part of a group of weights times the same part of `rows` activations. */
ALWAYS_INLINE void add_part(vri *totals, const uint8_t *w, const int8_t *q, const int part, const int rows,
                            const int kind, const int digits) {
    const int lines = rows * digits, vectors = 8 / PARTS_OF(kind);
    vri sums[LINES];
#pragma GCC unroll 32
    for (int i = 0; i < lines; i++) sums[i] = i % digits == digits - 1 ? totals[i / digits] : (vri){0};
#pragma GCC unroll 8
    for (int turn = 0; turn < vectors; turn++) {
        const int v = vector_of(turn, part, kind);
        const raw_vector weights = load_vector(w, v, kind);
#pragma GCC unroll 32
        for (int i = 0; i < lines; i++) ADD_PRODUCTS(sums[i], weights, q + i * GROUP + v * 4);
    }
#pragma GCC unroll 32
    for (int i = 0; i < rows; i++) totals[i] = digits == 2 ? (sums[2 * i] << 7) + sums[2 * i + 1] : sums[i];
}
#else
typedef int16_t words __attribute__((vector_size(sizeof(raw_vector)), may_alias));
#if defined(HAVE_AVX512)
#define ADD_NEIGHBOURS(a, b) (vri) _mm512_madd_epi16((raw_vector)(a), (raw_vector)(b)) /* of 16 bits */
#define ADD_BYTES(a, b) (words) _mm512_maddubs_epi16(a, b)
#define ABSOLUTE(w) _mm512_abs_epi8(w)
#define WITH_SIGN_OF(w, x) _mm512_mask_sub_epi8(x, _mm512_movepi8_mask(w), _mm512_setzero_si512(), x)
#else
#define ADD_NEIGHBOURS(a, b) (vri) _mm256_madd_epi16((raw_vector)(a), (raw_vector)(b))
#define ADD_BYTES(a, b) (words) _mm256_maddubs_epi16(a, b)
#define ABSOLUTE(w) _mm256_abs_epi8(w)
#define WITH_SIGN_OF(w, x) _mm256_sign_epi8(x, w)
#endif

/* Broadcast four bytes to every lane. */
ALWAYS_INLINE raw_vector splat_four(const int8_t *four) {
    int32_t bits;
    memcpy(&bits, four, 4);
    return (raw_vector)((vri){0} + bits);
}

/* Force a sum to be computed here. gcc would compute all products first, which do not fit the registers. */
ALWAYS_INLINE vri now(vri sum) {
    __asm__("" : "+v"(sum));
    return sum;
}

/* Add a part of a group of weights times the same part of `rows` activations. The weights are unpacked once for all
 * rows. Two digits are one 16-bit integer, so weights become 16-bit integers, too. With one digit, products of bytes
 * are added in 16 bits as long as they fit.
 */
ALWAYS_INLINE void add_part(vri *totals, const uint8_t *w, const int8_t *q, const int part, const int rows,
                            const int kind, const int digits) {
    const int vectors = 8 / PARTS_OF(kind);
    /* sums of pairs are below 15, 31, 24, 63 or 127 times 127 * 2: the number of them that fits 16 bits */
    const int fitting = kind == 4 ? 8 : kind == 6 ? 2 : kind == 8 ? 1 : 4;
    words pairs[LINES];
#pragma GCC unroll 8
    for (int turn = 0; turn < vectors; turn++) {
        const int v = vector_of(turn, part, kind);
        const raw_vector weights = load_vector(w, v, kind);
        if (digits == 2) {
            const words both = (words)weights, odd = both >> 8;
            words even = both & 255;
            if (kind == 8) even = both << 8 >> 8;
#pragma GCC unroll 32
            for (int i = 0; i < rows; i++) {
                const int8_t *four = q + i * 2 * GROUP + v * 8;
                totals[i] = now(totals[i] + ADD_NEIGHBOURS(even, splat_four(four)));
                totals[i] = now(totals[i] + ADD_NEIGHBOURS(odd, splat_four(four + 4)));
            }
            continue;
        }
#pragma GCC unroll 32
        for (int i = 0; i < rows; i++) {
            const raw_vector x = splat_four(q + i * GROUP + v * 4);
            words sums = kind == 8 ? ADD_BYTES(ABSOLUTE(weights), WITH_SIGN_OF(weights, x)) : ADD_BYTES(weights, x);
            if (turn % fitting) sums += pairs[i];
            pairs[i] = (words)now((vri)sums);
            if (turn % fitting == fitting - 1) totals[i] += ADD_NEIGHBOURS(pairs[i], (words){0} + 1);
        }
    }
}
#endif

/* Multiply one tile by `rows` rows of activations, from row m on. `rows`, `kind` and `digits` are constants wherever
 * this is inlined, so the loops over them are unrolled and the sums stay in registers: a variable index would force
 * them into memory. */
ALWAYS_INLINE void multiply_tile(const linear_args *a, const activations *act, int64_t tile, int64_t m,
                                 const int rows, const int kind, const int digits) {
    const int bits = BITS_OF(kind), parts = PARTS_OF(kind);
    const int64_t groups = act->groups;
    const uint8_t *w = a->data + tile * groups * bits * 64;
    const uint16_t *w_scales = a->scales + tile * groups * (bits == 8 ? 1 : 2) * LANES;
    vr total[LINES][PARTS];
#pragma GCC unroll 32
    for (int i = 0; i < rows * PARTS; i++) total[i / PARTS][i % PARTS] = (vr){0};
    int64_t place = place_of(act, m);
    for (int64_t g = 0; g < groups; g++, w += bits * 64, place += block_rows(digits)) {
        const int8_t *q = act->q + place * digits * GROUP;
        prefetch_next(w, w_scales, g, bits);
#pragma GCC unroll 1
        for (int n = 0; n < PARTS; n++) {
            group_scales scales = load_scales(w_scales + n * WIDTH, g, bits);
#pragma GCC unroll 2
            for (int part = 0; part < parts; part++) {
                vri sums[LINES];
#pragma GCC unroll 32
                for (int i = 0; i < rows; i++) sums[i] = (vri){0} + start_of(act, place + i, bits, part);
                add_part(sums, w + n * WIDTH * 4, q, part, rows, kind, digits);
#pragma GCC unroll 32
                for (int i = 0; i < rows; i++)
                    total[i][n] = add_group(total[i][n], sums[i], scales, act, place + i, bits, part);
            }
        }
    }
#pragma GCC unroll 32
    for (int i = 0; i < rows; i++) finish_row(a, tile, m + i, load((const float *)total[i]));
}

#if defined(HAVE_AMX)
static int may_use_amx;

/* The registers of AMX are so large that Linux requires a process to request them. */
__attribute__((constructor)) static void ask_for_amx(void) {
    enum { REQUEST = 0x1023, TILE_DATA = 18 };
    may_use_amx = syscall(SYS_arch_prctl, REQUEST, TILE_DATA) == 0;
}

typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t bytes_per_row[16];
    uint8_t rows[16];
} tile_config;

/* Registers 0, 3: sums, 16 x 16 integers. 1, 4: activations, 16 lines of a group or part of a group. 2: weights. */
static void configure_tiles(int depth) {
    tile_config config = {.palette = 1};
    config.bytes_per_row[0] = config.bytes_per_row[2] = config.bytes_per_row[3] = 64;
    config.bytes_per_row[1] = config.bytes_per_row[4] = (uint16_t)depth;
    config.rows[0] = config.rows[1] = config.rows[3] = config.rows[4] = 16;
    config.rows[2] = (uint8_t)(depth / 4);
    _tile_loadconfig(&config);
}

/* Unpack a group of weights of fewer bits to bytes. AMX loads tiles from memory, and waits until they are written there,
 * so this is done UNPACKED_AHEAD groups early. */
#define UNPACKED_AHEAD 6
ALWAYS_INLINE void unpack(const uint8_t *from, uint8_t *to, const int kind) {
#pragma GCC unroll 8
    for (int v = 0; v < 8; v++) _mm512_store_si512(to + v * 64, load_vector(from, v, kind));
}

/* Like multiply_tile, for one or two blocks of 16 lines. */
ALWAYS_INLINE void multiply_tile_amx(const linear_args *a, const activations *act, int64_t tile, int64_t m,
                                     const int blocks, const int kind, const int digits) {
    const int block = LINES / digits, rows = blocks * block, bits = BITS_OF(kind), parts = PARTS_OF(kind);
    const int64_t groups = act->groups, next_block = groups * block;
    const int64_t group_bytes = bits * 64;
    const uint8_t *w = a->data + tile * groups * group_bytes;
    const uint16_t *w_scales = a->scales + tile * groups * (bits == 8 ? 1 : 2) * LANES;
    vi sums[2][2][2 * LINES]; /* part; this group or the last, 2 KB apart: 4 KB apart, loads would wait for stores */
    uint8_t bytes[8][512] __attribute__((aligned(64))); /* a ring */
    vf total[2 * LINES];
    for (int i = 0; i < rows; i++) total[i] = (vf){0};
    int64_t place = place_of(act, m);
    for (int64_t g = 0; bits < 8 && g < UNPACKED_AHEAD && g < groups; g++) unpack(w + g * group_bytes, bytes[g], kind);
    /* Sums go through memory, which takes long: a group's sums are added while the next group is computed. */
    for (int64_t g = 0; g <= groups; g++, place += block) {
        const uint8_t *weights = w + g * group_bytes;
        if (g < groups) prefetch_next(weights, w_scales, g, bits);
        if (bits < 8) weights = bytes[g % 8];
        for (int part = 0; g < groups && part < parts; part++) {
            const int8_t *q = act->q + place * digits * GROUP + part * 16;
            _tile_loadd(2, weights + part * 256, 64);
            _tile_loadd(1, q, GROUP);
            _tile_zero(0);
            _tile_dpbsud(0, 1, 2);
            _tile_stored(0, sums[part][g & 1], 64);
            if (blocks == 2) {
                _tile_loadd(4, q + next_block * digits * GROUP, GROUP);
                _tile_zero(3);
                _tile_dpbsud(3, 4, 2);
                _tile_stored(3, sums[part][g & 1] + LINES, 64);
            }
        }
        if (bits < 8 && g + UNPACKED_AHEAD < groups)
            unpack(w + (g + UNPACKED_AHEAD) * group_bytes, bytes[(g + UNPACKED_AHEAD) % 8], kind);
        if (g == 0) continue;
        group_scales scales = load_scales(w_scales, g - 1, bits);
        for (int part = 0; part < parts; part++) {
            const vi *line = sums[part][(g - 1) & 1];
#pragma GCC unroll 32
            for (int i = 0; i < rows; i++) {
                const int64_t at = place - block + i / block * next_block + i % block;
                vi sum = digits == 2 ? (line[2 * i] << 7) + line[2 * i + 1] : line[i];
                total[i] = add_group(total[i], sum + start_of(act, at, bits, part), scales, act, at, bits, part);
            }
        }
    }
#pragma GCC unroll 32
    for (int i = 0; i < rows; i++) finish_row(a, tile, m + i, total[i]);
}

/* Multiply two blocks at a time, which share the loaded and unpacked weights of a tile. */
ALWAYS_INLINE int64_t multiply_chunk_amx(const linear_args *a, const activations *act, int64_t first, int64_t last,
                                         const int bits, const int digits) {
    const int block = LINES / digits;
    int64_t m = 0;
    if (!may_use_amx || a->M < block) return m;
    configure_tiles(GROUP / PARTS_OF(bits));
    for (; m + 2 * block <= a->M; m += 2 * block)
        for (int64_t tile = first; tile < last; tile++) multiply_tile_amx(a, act, tile, m, 2, bits, digits);
    for (; m + block <= a->M; m += block)
        for (int64_t tile = first; tile < last; tile++) multiply_tile_amx(a, act, tile, m, 1, bits, digits);
    _tile_release();
    return m;
}
#endif

/* Multiply the tiles `first` to `last` by all rows. */
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
    /* The rows left after multiples of eight take one pass: a window of drafts has three to seven rows, and a second
     * pass would unpack the weights again. */
    MULTIPLY_BY(8) MULTIPLY_BY(7) MULTIPLY_BY(6) MULTIPLY_BY(5) MULTIPLY_BY(4) MULTIPLY_BY(3) MULTIPLY_BY(2)
    MULTIPLY_BY(1)
}

#else /* any other processor: four lanes */

typedef int32_t ints4 __attribute__((vector_size(16), aligned(1), may_alias));
typedef float floats4 __attribute__((vector_size(16)));

/* Unpack a group of weights of four adjacent rows of a tile to integers, one lane each. */
static inline void unpack_four(const uint8_t *w, ints4 *weights, const int kind) {
    static const int table[16] = {MXFP4_TABLE};
    for (int k = 0; k < GROUP; k++) {
        const int in_lane = __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__ ? k % 4 : 3 - k % 4; /* the byte of k % 4 */
        ints4 raw = *(const ints4 *)(w + k / 4 % (kind == 8 ? 8 : 4) * 64), high = raw;
        if (kind == 8) weights[k] = (raw << (24 - 8 * in_lane)) >> 24;
        else weights[k] = (raw >> (8 * in_lane + k / 16 * 4)) & 15;
        if (kind == 5 || kind == 6) high = *(const ints4 *)(w + 256 + (kind == 6 ? k / 16 * 64 : 0));
        if (kind == 5) weights[k] |= (high >> (8 * in_lane + k / 4) & 1) << 4;
        if (kind == 6) weights[k] = (weights[k] | (high >> (8 * in_lane + k / 4 % 4 * 2) & 3) << 4) - INT6_OFFSET;
        for (int i = 0; kind == MXFP4 && i < 4; i++) weights[k][i] = table[weights[k][i]];
    }
}

static inline floats4 four_halves(const uint16_t *p) {
    return (floats4){half_to_float(p[0]), half_to_float(p[1]), half_to_float(p[2]), half_to_float(p[3])};
}

/* Multiply `rows` rows, eight at most, by four columns of a tile from column n on. */
ALWAYS_INLINE void multiply_four(const linear_args *a, const activations *act, int64_t n, int64_t m, int64_t rows,
                                 const int kind, const int digits) {
    const int bits = BITS_OF(kind);
    const int64_t cell = n / LANES * act->groups, in_tile = n % LANES;
    floats4 total[8] = {{0}};
    int64_t place = place_of(act, m);
    for (int64_t g = 0; g < act->groups; g++, place += block_rows(digits)) {
        ints4 weights[GROUP];
        unpack_four(a->data + (cell + g) * bits * 64 + in_tile * 4, weights, kind);
        const uint16_t *w_scales = a->scales + (cell + g) * (bits == 8 ? 1 : 2) * LANES + in_tile;
        floats4 scale = four_halves(w_scales), minimum = bits < 8 ? four_halves(w_scales + LANES) : scale;
        for (int64_t i = 0; i < rows; i++) {
            const int8_t *q = act->q + (place + i) * digits * GROUP;
            const int parts = bits == 6 ? 2 : 1, size = GROUP / parts;
            for (int part = 0; part < parts; part++) {
                ints4 sum = {0};
                for (int digit = 0; digit < digits; digit++) {
                    sum <<= 7;
                    for (int k = part * size; k < (part + 1) * size; k++) sum += weights[k] * q[digit * GROUP + k];
                }
                floats4 by = (part ? minimum : scale) * act->scales[place + i];
                total[i] = total[i] + __builtin_convertvector(sum, floats4) * by;
            }
            if (bits < 6) total[i] = total[i] + minimum * act->sums[place + i];
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
#ifdef HAVE_NEON /* few rows read the matrix once, and prefetchers restart with every chunk: half as many are 1 */
    if (a->M <= 8) size *= 2; /* to 3 % faster on two cores of a Neoverse N1. The other half is empty */
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
#ifndef HAVE_NEON /* NEON stores the same weights as int8 */
void infer_linear_int5(const void *args, int64_t chunk) {
    if (((const linear_args *)args)->digits == 1) multiply_chunk(args, chunk, 5, 1);
    else multiply_chunk(args, chunk, 5, 2);
}
void infer_linear_int6(const void *args, int64_t chunk) {
    if (((const linear_args *)args)->digits == 1) multiply_chunk(args, chunk, 6, 1);
    else multiply_chunk(args, chunk, 6, 2);
}
void infer_linear_mxfp4(const void *args, int64_t chunk) {
    if (((const linear_args *)args)->digits == 1) multiply_chunk(args, chunk, MXFP4, 1);
    else multiply_chunk(args, chunk, MXFP4, 2);
}
#endif
