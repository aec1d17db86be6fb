/* The products of linear.c on NEON, where a register holds four lanes.
 *
 * Four adjacent rows of a tile, a *quad* of columns of the result, are 16 bytes in each of its vectors: one register.
 * Sums and totals stay in the 32 registers from the first group to the last, so the order of statements matters here:
 * with the rows of `multiply_rows` one after the other, gcc spills sums to memory and half of the speed is lost.
 * `tests/kernels/test_c_neon.py` counts these spills.
 *
 *     rows at a time   held in registers                                       by
 *     8 or 4           one quad of all rows; four passes over a tile           multiply_rows
 *     2                two quads of both; two passes over a tile               multiply_few
 *     1                the whole tile, read once in memory order               multiply_few
 *
 * From the second pass on, a tile is in the L1 cache. Its first pass would wait for memory, so the first block of rows
 * prefetches the next tile in the meantime, a quarter in each pass; later blocks find it in a cache. One row reads
 * memory sequentially, which these processors detect by themselves: explicit prefetches make them slower.
 *
 * Lanes are macro arguments because instructions encode them as immediates. */
#ifndef LINEAR_NEON_H
#define LINEAR_NEON_H

#include "linear.h"

_Static_assert(INT8_OFFSET == 0, "integer sums start with 0");

#define DOT(sum, w, x, lane) vdotq_laneq_s32(sum, vreinterpretq_s8_u8(w), x, lane)

static inline float32x4_t load_four_halves(const uint16_t *p) {
    return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p)));
}

typedef struct {
    const uint8_t *data;
    const uint16_t *scales;
    int64_t vectors, scale_step; /* steps per group: vectors of 64 bytes, float16 scales */
} weight_tile;

ALWAYS_INLINE weight_tile find_tile(const linear_args *a, int64_t groups, int64_t tile, const int bits) {
    const int64_t vectors = bits == 4 ? 4 : 8, scale_step = bits == 4 ? 2 * LANES : LANES;
    return (weight_tile){a->data + tile * groups * vectors * 64, a->scales + tile * groups * scale_step, vectors,
                         scale_step};
}

/* Store columns 4r to 4r + 3 of the tile, for row m. */
ALWAYS_INLINE void finish_quad(const linear_args *a, int64_t tile, int r, int64_t m, float32x4_t total) {
    int64_t n = tile * LANES + r * 4, count = a->N - n;
    float *y = a->y + m * a->y_stride + n;
    if (count >= 4) {
        vst1q_f32(y, a->bias ? total + vld1q_f32(a->bias + n) : total);
    } else {
        for (int64_t i = 0; i < count; i++) y[i] = a->bias ? total[i] + a->bias[n + i] : total[i];
    }
}

/* Load the weights of a quad; in int4, the first 16 of a group are low nibbles, the others high nibbles. */
ALWAYS_INLINE void load_quad(const uint8_t *w, uint8x16_t *to, const int bits) {
#pragma GCC unroll 4
    for (int v = 0; v < 4; v++) to[v] = vld1q_u8(w + v * 64);
#pragma GCC unroll 4
    for (int v = 0; v < 4; v++) to[v + 4] = bits == 4 ? to[v] >> 4 : vld1q_u8(w + (v + 4) * 64);
    if (bits == 8) return;
#pragma GCC unroll 4
    for (int v = 0; v < 4; v++) to[v] &= 15;
}

/* Add one more group for four rows whose activations have these scales and sums. */
ALWAYS_INLINE void add_group(float32x4_t *total, const int32x4_t *sum, const uint16_t *w_scales, const float *x_scales,
                             const float *x_sums, const int bits) {
    float32x4_t scale = load_four_halves(w_scales), xs = vld1q_f32(x_scales);
#define ADD_ROW(i) \
    total[i] = vfmaq_f32(total[i], vcvtq_f32_s32(sum[i]), vmulq_laneq_f32(scale, xs, i))
    ADD_ROW(0), ADD_ROW(1), ADD_ROW(2), ADD_ROW(3);
    if (bits == 8) return;
    float32x4_t minimum = load_four_halves(w_scales + LANES), sums = vld1q_f32(x_sums);
#define ADD_MINIMUM(i) total[i] = vfmaq_laneq_f32(total[i], minimum, sums, i)
    ADD_MINIMUM(0), ADD_MINIMUM(1), ADD_MINIMUM(2), ADD_MINIMUM(3);
}

/* Prefetch a quarter of a group of the next tile; returns the address of the next quarter. */
ALWAYS_INLINE const uint8_t *ask_for_quarter(const uint8_t *ahead, const int bits) {
    __builtin_prefetch(ahead);
    if (bits == 8) __builtin_prefetch(ahead + 64);
    return ahead + bits * 16;
}

#define FOUR_DOTS(sums, w, x, lane) \
    sums[0] = DOT(sums[0], w, x[0], lane), sums[1] = DOT(sums[1], w, x[1], lane), \
    sums[2] = DOT(sums[2], w, x[2], lane), sums[3] = DOT(sums[3], w, x[3], lane)

#if defined(HAVE_I8MM)
/* The sums of one group, for `rows` rows and the quad W.
 *
 * The instruction takes eight consecutive k of two lines and of two rows of weights, and adds to a 2 x 2 matrix:
 *
 *     lines      q0: k=0..7 | q1: k=0..7         the two digits of one row, or two rows of one digit
 *     weights    w0: k=0..7 | w1: k=0..7         two adjacent rows of a tile
 *     sums       q0 . w0 | q0 . w1 | q1 . w0 | q1 . w1
 *
 * A quad has four k of four columns in a register: zipped with the register of the next four k, it has this form. */
#define ZIP(half, a, b) vreinterpretq_s8_s32(vzip##half##q_s32(vreinterpretq_s32_u8(a), vreinterpretq_s32_u8(b)))
ALWAYS_INLINE void sum_group(const uint8x16_t *W, const int8_t *q, int32x4_t *sum, const int rows, const int digits) {
    const int pairs = rows * digits / 2;
    int32x4_t sum01[4], sum23[4];
    int8x16_t x[4];
#pragma GCC unroll 4
    for (int j = 0; j < pairs; j++) sum01[j] = sum23[j] = vdupq_n_s32(0);
#pragma GCC unroll 4
    for (int eight = 0; eight < GROUP / 8; eight++) {
        int8x16_t w01 = ZIP(1, W[2 * eight], W[2 * eight + 1]), w23 = ZIP(2, W[2 * eight], W[2 * eight + 1]);
#pragma GCC unroll 4
        for (int j = 0; j < pairs; j++) {
            const int8_t *line = q + 2 * j * GROUP + eight * 8;
            x[j] = vcombine_s8(vld1_s8(line), vld1_s8(line + GROUP));
        }
#pragma GCC unroll 4
        for (int j = 0; j < pairs; j++) sum01[j] = vmmlaq_s32(sum01[j], x[j], w01);
#pragma GCC unroll 4
        for (int j = 0; j < pairs; j++) sum23[j] = vmmlaq_s32(sum23[j], x[j], w23);
    }
#pragma GCC unroll 4
    for (int j = 0; j < pairs; j++) {
        int64x2_t near = vreinterpretq_s64_s32(sum01[j]), far = vreinterpretq_s64_s32(sum23[j]);
        int32x4_t q0 = vreinterpretq_s32_s64(vzip1q_s64(near, far));
        int32x4_t q1 = vreinterpretq_s32_s64(vzip2q_s64(near, far));
        if (digits == 2) sum[j] = (q0 << 7) + q1;
        else sum[2 * j] = q0, sum[2 * j + 1] = q1;
    }
}
#else
/* The sums of one group, for `rows` rows and the quad W: four consecutive dot products add to four sums. */
ALWAYS_INLINE void sum_group(const uint8x16_t *W, const int8_t *q, int32x4_t *sum, const int rows, const int digits) {
    int8x16_t x[4];
#pragma GCC unroll 8
    for (int i = 0; i < rows; i++) sum[i] = vdupq_n_s32(0);
#pragma GCC unroll 2
    for (int digit = 0; digit < digits; digit++) {
        if (digit == 1) {
#pragma GCC unroll 8
            for (int i = 0; i < rows; i++) sum[i] <<= 7;
        }
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++) {
#pragma GCC unroll 2
            for (int four = 0; four < rows; four += 4) {
#pragma GCC unroll 4
                for (int i = 0; i < 4; i++)
                    x[i] = vld1q_s8(q + ((four + i) * digits + digit) * GROUP + half * 16);
                FOUR_DOTS((sum + four), W[4 * half + 0], x, 0);
                FOUR_DOTS((sum + four), W[4 * half + 1], x, 1);
                FOUR_DOTS((sum + four), W[4 * half + 2], x, 2);
                FOUR_DOTS((sum + four), W[4 * half + 3], x, 3);
            }
        }
    }
}
#endif

/* Multiply eight or four rows by one tile, and store the first `count` rows. */
ALWAYS_INLINE void multiply_rows(const linear_args *a, const activations *act, int64_t tile, int64_t m, int64_t count,
                                 const int rows, const int bits, const int digits, const int asks_ahead) {
    const int64_t groups = act->groups, first = place_of(act, m);
    const weight_tile it = find_tile(a, groups, tile, bits);
    const uint8_t *ahead = it.data + groups * it.vectors * 64;
    for (int r = 0; r < 4 && tile * LANES + r * 4 < a->N; r++) {
        const uint8_t *w = it.data + r * 16;
        const uint16_t *w_scales = it.scales + r * 4;
        const int8_t *q = act->q + first * digits * GROUP;
        const float *x_scales = act->scales + first, *x_sums = act->sums + first;
        float32x4_t total[8];
#pragma GCC unroll 8
        for (int i = 0; i < rows; i++) total[i] = vdupq_n_f32(0.0f);
        for (int64_t g = 0; g < groups; g++) {
            uint8x16_t W[8];
            int32x4_t sum[8];
            load_quad(w, W, bits);
            if (asks_ahead) ahead = ask_for_quarter(ahead, bits);
            sum_group(W, q, sum, rows, digits);
#pragma GCC unroll 2
            for (int four = 0; four < rows; four += 4)
                add_group(total + four, sum + four, w_scales, x_scales + four, x_sums + four, bits);
            w += it.vectors * 64, w_scales += it.scale_step;
            q += LINES * GROUP, x_scales += LINES / digits, x_sums += LINES / digits;
        }
#pragma GCC unroll 8
        for (int i = 0; i < rows; i++)
            if (i < count) finish_quad(a, tile, r, m + i, total[i]);
    }
}

/* Multiply both digits of a row by one register of weights of every quad. */
#define FEW_DOTS(w, half, lane) \
    for (int i = 0; i < rows * quads; i++) { \
        high[i] = DOT(high[i], w[i % quads], x[i / quads][half], lane); \
        if (digits == 2) low[i] = DOT(low[i], w[i % quads], x[i / quads][2 + half], lane); \
    }

/* Multiply one row by a tile, or two rows by one half of it and then by the other. */
ALWAYS_INLINE void multiply_few(const linear_args *a, const activations *act, int64_t tile, int64_t m, const int rows,
                                const int bits, const int digits) {
    const int quads = 4 / rows;
    const int64_t groups = act->groups, first = place_of(act, m);
    const weight_tile it = find_tile(a, groups, tile, bits);
    for (int r = 0; r < 4 && tile * LANES + r * 4 < a->N; r += quads) {
        const uint8_t *w = it.data + r * 16;
        const uint16_t *w_scales = it.scales + r * 4;
        const int8_t *q = act->q + first * digits * GROUP;
        const float *x_scales = act->scales + first, *x_sums = act->sums + first;
        float32x4_t total[4] = {{0}, {0}, {0}, {0}};
        for (int64_t g = 0; g < groups; g++) {
            int32x4_t high[4] = {{0}, {0}, {0}, {0}}, low[4] = {{0}, {0}, {0}, {0}};
            int8x16_t x[2][4];
            uint8x16_t raw[4], part[4];
#pragma GCC unroll 2
            for (int i = 0; i < rows; i++)
#pragma GCC unroll 4
                for (int j = 0; j < 2 * digits; j++) x[i][j] = vld1q_s8(q + i * digits * GROUP + j * 16);
#define FEW_VECTORS(v, half, lane) \
    for (int i = 0; i < quads; i++) raw[i] = vld1q_u8(w + v * 64 + i * 16); \
    if (bits == 8) { \
        FEW_DOTS(raw, half, lane) \
    } else { \
        for (int i = 0; i < quads; i++) part[i] = raw[i] & 15; \
        FEW_DOTS(part, 0, lane) \
        for (int i = 0; i < quads; i++) part[i] = raw[i] >> 4; \
        FEW_DOTS(part, 1, lane) \
    }
            FEW_VECTORS(0, 0, 0)
            FEW_VECTORS(1, 0, 1)
            FEW_VECTORS(2, 0, 2)
            FEW_VECTORS(3, 0, 3)
            if (bits == 8) {
                FEW_VECTORS(4, 1, 0)
                FEW_VECTORS(5, 1, 1)
                FEW_VECTORS(6, 1, 2)
                FEW_VECTORS(7, 1, 3)
            }
#pragma GCC unroll 4
            for (int i = 0; i < 4; i++) {
                int32x4_t sum = digits == 2 ? (high[i] << 7) + low[i] : high[i];
                float32x4_t scale = load_four_halves(w_scales + i % quads * 4) * x_scales[i / quads];
                total[i] = vfmaq_f32(total[i], vcvtq_f32_s32(sum), scale);
                if (bits == 4) {
                    float32x4_t minimum = load_four_halves(w_scales + LANES + i % quads * 4);
                    total[i] = vfmaq_n_f32(total[i], minimum, x_sums[i / quads]);
                }
            }
            w += it.vectors * 64, w_scales += it.scale_step;
            q += LINES * GROUP, x_scales += LINES / digits, x_sums += LINES / digits;
        }
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++)
            if (tile * LANES + (r + i % quads) * 4 < a->N) finish_quad(a, tile, r + i % quads, m + i / quads, total[i]);
    }
}

/* i8mm has two sums per pair of lines, so it takes eight rows of two digits in two parts. */
#if defined(HAVE_I8MM)
#define PART(rows, digits) (rows * digits > 8 ? 4 : rows)
#else
#define PART(rows, digits) rows
#endif
#define MULTIPLY_ROWS(rows, bits, digits, asks_ahead) \
    for (int i = 0; i < rows && i < count; i += PART(rows, digits)) \
        multiply_rows(a, act, tile, m + i, count - i, PART(rows, digits), bits, digits, asks_ahead)

/* Kernels that multiply a tile by `count` rows from row m on. Each is a separate function, for which compilers can
 * allocate registers. */
typedef void (*neon_kernel)(const linear_args *a, const activations *act, int64_t tile, int64_t m, int64_t count);
typedef struct {
    neon_kernel eight[2], four[2], two, one; /* [1]: also prefetches the next tile */
} neon_kernels;

#define NEON_KERNEL(name, body) \
    static __attribute__((noinline)) void name(const linear_args *a, const activations *act, int64_t tile, int64_t m, \
                                               int64_t count) { \
        (void)count; \
        body; \
    }
#define NEON_KERNELS(name, bits, digits) \
    NEON_KERNEL(name##_8, MULTIPLY_ROWS(8, bits, digits, 0)) \
    NEON_KERNEL(name##_8_ahead, MULTIPLY_ROWS(8, bits, digits, 1)) \
    NEON_KERNEL(name##_4, MULTIPLY_ROWS(4, bits, digits, 0)) \
    NEON_KERNEL(name##_4_ahead, MULTIPLY_ROWS(4, bits, digits, 1)) \
    NEON_KERNEL(name##_2, multiply_few(a, act, tile, m, 2, bits, digits)) \
    NEON_KERNEL(name##_1, multiply_few(a, act, tile, m, 1, bits, digits)) \
    static const neon_kernels name = {{name##_8, name##_8_ahead}, {name##_4, name##_4_ahead}, name##_2, name##_1};

NEON_KERNELS(product_int8, 8, 2)
NEON_KERNELS(product_int4, 4, 2)
NEON_KERNELS(product_int8_one_digit, 8, 1)
NEON_KERNELS(product_int4_one_digit, 4, 1)

/* Multiply the tiles `first` to `last` by all rows: by eight, and the rest in the cheapest way. Eight rows cost as much
 * as six, four as much as three; rows past the last one are computed but not stored; a block has memory for them. */
ALWAYS_INLINE void multiply_tiles(const linear_args *a, const activations *act, int64_t first, int64_t last,
                                  const int bits, const int digits) {
    const neon_kernels *kernels = digits == 2 ? (bits == 8 ? &product_int8 : &product_int4)
                                              : (bits == 8 ? &product_int8_one_digit : &product_int4_one_digit);
    for (int64_t m = 0, rows; m < a->M; m += rows) {
        int64_t left = a->M - m;
        rows = left > 5 ? 8 : left > 2 ? 4 : left;
        neon_kernel run = rows == 8   ? kernels->eight[m == 0]
                          : rows == 4 ? kernels->four[m == 0]
                          : rows == 2 ? kernels->two
                                      : kernels->one;
        for (int64_t tile = first; tile < last; tile++) run(a, act, tile, m, left < rows ? left : rows);
    }
}

#endif
