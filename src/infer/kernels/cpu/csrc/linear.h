/* The memory layout of weights and activations of a product: pack.c writes it and linear.c reads it.
 *
 * Weights: 32 adjacent weights of a row are a *group*, which shares a scale d, and in int4 a minimum m, both float16.
 *     int8   w = d * q         q in -127 .. 127      8.5 bits per weight
 *     int4   w = d * q + m     q in 0 .. 15          5 bits per weight
 *     mxfp4  w = d * t[q] + m  q in 0 .. 15          the same layout; t holds twice the 4-bit floats, plus 12, and m is
 *                                                    -12 d: unsigned integers, as the products require
 *     int5   w = d * q + m     q in 0 .. 31          6 bits per weight
 *     int6   w = d * (q - 32)  q in 0 .. 63          7 bits per weight; each half of a group has its own scale
 *
 * 16 rows form a *tile*. The instruction that multiplies four pairs of bytes and adds them to a 32-bit lane takes
 * four consecutive k of one row in a lane, 16 rows in a register:
 *
 *     tile, group:   8 vectors of 64 bytes, vector v =  row0: k=4v..4v+3 | row1: k=4v..4v+3 | ... | row15
 *     int4:          4 vectors; the low nibbles of the bytes are vector v, the high nibbles vector v + 4
 *     int5:          the same for the low 4 bits, then a vector of high bits: bit v of a byte belongs to vector v
 *     int6:          the same, then two vectors of high bits: bits 2i and 2i + 1 of the first belong to vector i, of the
 *                    second to vector 4 + i
 *     scales:        int8: [tile][group][16] float16, stored separately, so that vectors stay aligned
 *     all others:    [tile][group][2][16] float16: 16 scales, then 16 minima; int6: scales of the second halves
 *
 * Activations are converted to a similar form when they arrive: 32 of them share a scale, max|x| over the largest
 * integer, and an integer has two *digits*, each an int8:  128 * q0 + q1,  up to 16256. On request, it has only one, up
 * to 127: half the arithmetic, but small channels next to a very large one lose most digits. A row's number of digits
 * never depends on the number of rows.
 *
 * x86 without VNNI has no instruction for the sum of four products of bytes, but one for two products of 16 bits. So it
 * stores two digits as one integer, in the same place, and four adjacent k in the order k, k+2, k+1, k+3, which matches
 * the lower and the upper bytes of 16 bits of weights. */
#ifndef LINEAR_H
#define LINEAR_H

#include "infer.h"

#define GROUP 32
#define MXFP4 3 /* kind of weights; the kind of integers is their number of bits: 4, 5, 6 or 8 */
#define BITS_OF(kind) ((kind) == MXFP4 ? 4 : (kind))
#define INT6_OFFSET 32
#define MXFP4_TABLE 12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0
#define LINES 16

#if (defined(HAVE_AVX512) || defined(HAVE_AVX2)) && !defined(HAVE_VNNI)
#define HAVE_WORDS 1 /* two digits of an activation are stored as one 16-bit integer */
#endif

#if defined(HAVE_VNNI)
#define INT8_OFFSET 128 /* added to an int8 weight to make it unsigned */
#else
#define INT8_OFFSET 0
#endif

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
    int64_t bits;                            /* bits per weight */
    int64_t digits;                          /* digits per activation: 2 or 1 */
    int64_t tiles_per_chunk, rows_per_chunk; /* chunks of the product, and of infer_linear_quantize */
    const int32_t *order;                    /* column of x for each column of W; NULL: the same */
} linear_args;

/* Quantised rows. A *line* is one digit of one row; 16 lines are a block, which has all their first groups,
 * then all their second groups, and so on, so that data read together is contiguous. So a block has 8 rows of two
 * digits, or 16 rows of one. */
typedef struct {
    int8_t *q;     /* [blocks][groups][16 lines][32], the digits of a row in adjacent lines */
    float *scales; /* [blocks][groups][rows of a block] */
    union {        /* the same layout, with the other value per group that a product needs: */
        int32_t *starts; /* int8, and first halves of int6: start value of the integer sum of the last digit */
        float *sums;     /* other kinds: sum of the rounded activations */
    };
    int32_t *half_starts; /* the same layout: starts of the second halves of int6 */
    int64_t groups, digits;
} activations;

static inline int64_t block_rows(int64_t digits) { return LINES / digits; }

static inline activations split_scratch(const linear_args *a, const int64_t digits) {
    activations act = {.groups = (a->K + GROUP - 1) / GROUP, .digits = digits};
    int64_t rows = block_rows(digits), cells = (a->M + rows - 1) / rows * act.groups;
    act.q = (int8_t *)a->scratch;
    act.scales = (float *)(a->scratch + cells * LINES * GROUP);
    act.sums = act.scales + cells * rows;
    act.half_starts = act.starts + cells * rows;
    return act;
}

/* The index in `scales` of the first group of row m; each next group is `block_rows` further on. */
static inline int64_t place_of(const activations *act, int64_t m) {
    int64_t rows = block_rows(act->digits);
    return m / rows * act->groups * rows + m % rows;
}

#endif
