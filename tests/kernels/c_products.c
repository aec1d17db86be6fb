/* The products of kernels/cpu against their definition, bit for bit: linked with linear.c, activations.c, pack.c.
 *
 * What linear.c says a product is, is written here once more, number by number, without tiles, blocks, lanes or
 * tables, and with fmaf wherever a processor that has it rounds once. Every shape is multiplied from memory that
 * ends where it must, so that an address sanitizer sees a read too far, into a result with room around it that
 * must stay as it was. Prints the variant and how many numbers were compared; exits with 1 at the first other one. */
#include <stdio.h>
#include <stdlib.h>

#include "linear.h"

void infer_linear_int8(const void *args, int64_t chunk);
void infer_linear_int4(const void *args, int64_t chunk);
#ifndef HAVE_NEON
void infer_linear_int5(const void *args, int64_t chunk);
void infer_linear_int6(const void *args, int64_t chunk);
static void (*const PRODUCTS[])(const void *, int64_t) = {infer_linear_int4, infer_linear_int5, infer_linear_int6, 0,
                                                          infer_linear_int8};
static const int64_t KINDS[] = {4, 8, 5, 6};
#else
static void (*const PRODUCTS[])(const void *, int64_t) = {infer_linear_int4, 0, 0, 0, infer_linear_int8};
static const int64_t KINDS[] = {4, 8};
#endif
enum { NUM_KINDS = sizeof KINDS / sizeof *KINDS };
void infer_linear_quantize(const void *args, int64_t chunk);
void infer_pack(const void *args, int64_t chunk);
int64_t infer_linear_scratch(int64_t M, int64_t K, int64_t digits);

static const float SENTINEL = 12345.0f;
static int64_t num_compared;
static uint64_t random_state = 88172645463325252u;

static uint32_t random_bits(void) { /* xorshift */
    random_state ^= random_state << 13, random_state ^= random_state >> 7, random_state ^= random_state << 17;
    return (uint32_t)(random_state >> 32);
}
static float random_float(void) { return (float)(int32_t)random_bits() * (1.0f / 1073741824.0f); } /* -2 .. 2 */

/* Exactly so many bytes; `gap` first, so that they begin at an odd place. */
static void *room(size_t num_bytes) {
    void *memory = NULL;
    if (posix_memalign(&memory, 64, num_bytes ? num_bytes : 1)) exit(2);
    return memset(memory, 0x7f, num_bytes); /* floats of 3.4e38, scales that are NaN: nothing may rest on zeros */
}

typedef struct {
    int64_t M, N, K, bits, digits;
    float *x, *bias;
    int8_t *q;       /* of the weights, [N][K] */
    uint16_t *d, *m; /* [N][groups]; m of 6 bits: scales of the second halves */
} problem;

/* Integers of one group of a row; returns their scale. */
static float quantize(const float *x, int64_t count, int64_t digits, int32_t *integers) {
    const float largest = digits == 2 ? 16256.0f : 127.0f;
    float peak = 0.0f;
    for (int64_t k = 0; k < count; k++) peak = fabsf(x[k]) > peak ? fabsf(x[k]) : peak;
    float inverse = peak > 0.0f ? largest / peak : 0.0f;
    if (inverse > 3.0e38f) inverse = 0.0f;
    for (int64_t k = 0; k < count; k++) integers[k] = (int32_t)(fmaf(x[k], inverse, 12582912.0f) - 12582912.0f);
    return inverse > 0.0f ? peak / largest : 0.0f;
}

static float expected(const problem *it, int64_t row, int64_t n) {
    int64_t groups = (it->K + GROUP - 1) / GROUP;
    float total = 0.0f;
    for (int64_t g = 0; g < groups; g++) {
        int64_t left = it->K - g * GROUP, count = left < GROUP ? left : GROUP;
        int32_t integers[GROUP], dot = 0, sum = 0, second = 0;
        float scale = quantize(it->x + row * it->K + g * GROUP, count, it->digits, integers);
        for (int64_t k = 0; k < count; k++) {
            const int32_t q = it->q[n * it->K + g * GROUP + k] - (it->bits == 6 ? 32 : 0);
            *(it->bits == 6 && k >= 16 ? &second : &dot) += q * integers[k];
            sum += integers[k];
        }
        total = fmaf((float)dot, half_to_float(it->d[n * groups + g]) * scale, total);
        if (it->bits == 6) total = fmaf((float)second, half_to_float(it->m[n * groups + g]) * scale, total);
        if (it->bits < 6) total = fmaf(half_to_float(it->m[n * groups + g]), scale * (float)sum, total);
    }
    return it->bias ? total + it->bias[n] : total;
}

static problem make_problem(int64_t M, int64_t N, int64_t K, int64_t bits, int64_t digits) {
    problem it = {M, N, K, bits, digits, NULL, NULL, NULL, NULL, NULL};
    int64_t groups = (K + GROUP - 1) / GROUP;
    it.x = room((size_t)(M * K) * 4), it.q = room((size_t)(N * K));
    it.d = room((size_t)(N * groups) * 2), it.m = room((size_t)(N * groups) * 2);
    if (random_bits() % 2) {
        it.bias = room((size_t)N * 4);
        for (int64_t n = 0; n < N; n++) it.bias[n] = random_float();
    }
    for (int64_t i = 0; i < M * K; i++) it.x[i] = random_float() * (i % 37 == 5 ? 300.0f : 1.0f); /* loud channels */
    for (int64_t k = 0; k < K && k < GROUP; k++) it.x[k] = random_bits() % 2 ? 0.0f : 1e-42f;     /* a silent group */
    for (int64_t i = 0; i < N * K; i++) it.q[i] = (int8_t)(bits == 8 ? random_bits() % 255 - 127 : random_bits() % (1 << bits));
    for (int64_t k = 0; k < K; k++) it.q[k] = bits == 8 ? -127 : (1 << bits) - 1; /* sums as large as they get */
    for (int64_t k = 0; k < K; k++) it.x[(M - 1) * K + k] = bits == 8 ? 2.0f : -2.0f;
    for (int64_t i = 0; i < N * groups; i++) it.d[i] = (uint16_t)(0x2000 + random_bits() % 0x1400); /* 0.008 .. 1 */
    for (int64_t i = 0; i < N * groups; i++) it.m[i] = (uint16_t)(random_bits() & 0xbbff);          /* below 1 */
    return it;
}

static void fail(const problem *it, const char *what, int64_t m, int64_t n, float got, float wanted) {
    printf("%s of row %d, column %d is %.9g, not %.9g: M=%d N=%d K=%d bits=%d digits=%d\n", what, (int)m, (int)n, got,
           wanted, (int)it->M, (int)it->N, (int)it->K, (int)it->bits, (int)it->digits);
    exit(1);
}

static void check(int64_t M, int64_t N, int64_t K, int64_t bits, int64_t digits) {
    problem it = make_problem(M, N, K, bits, digits);
    int64_t cells = (N + 15) / 16 * ((K + GROUP - 1) / GROUP), num_tiles = (N + 15) / 16, stride = N + 3;
    uint8_t *data = room((size_t)(cells * 64 * bits));
    uint16_t *scales = room((size_t)(cells * (bits == 8 ? 32 : 64)));
    memset(data, 0, (size_t)(cells * 64 * bits)), memset(scales, 0, (size_t)(cells * (bits == 8 ? 32 : 64)));
    int64_t pack[] = {N, 0, (intptr_t)it.q, (intptr_t)it.d, (intptr_t)it.m, K, 0, (intptr_t)data, (intptr_t)scales,
                      bits, N};
    infer_pack(pack, 0);
    float *y = room((size_t)((M + 1) * stride) * 4);
    for (int64_t i = 0; i < (M + 1) * stride; i++) y[i] = SENTINEL;
    linear_args args = {.M = M, .x = it.x, .x_stride = K, .y = y, .y_stride = stride, .data = data, .scales = scales};
    args.bias = it.bias, args.N = N, args.K = K, args.bits = bits, args.digits = digits;
    args.scratch = room((size_t)infer_linear_scratch(M, K, digits));
    args.tiles_per_chunk = 2, args.rows_per_chunk = 5;
    for (int64_t chunk = 0; chunk * 5 < M; chunk++) infer_linear_quantize(&args, chunk);
    for (int64_t chunk = 0; chunk * 2 < num_tiles; chunk++) PRODUCTS[bits - 4](&args, chunk);
    for (int64_t m = 0; m <= M; m++)
        for (int64_t n = 0; n < stride; n++, num_compared++) {
            int is_result = m < M && n < N;
            float wanted = is_result ? expected(&it, m, n) : SENTINEL, got = y[m * stride + n];
            if (memcmp(&got, &wanted, 4)) fail(&it, is_result ? "result" : "what lies beside it", m, n, got, wanted);
        }
    free(it.x), free(it.bias), free(it.q), free(it.d), free(it.m);
    free(data), free(scales), free(y), free(args.scratch);
}

int main(void) {
    static const int64_t sizes[][2] = {{16, 32}, {37, 100}, {17, 45}, {50, 64}, {3, 7}, {33, 160}}; /* N, K */
    for (int64_t digits = 1; digits <= 2; digits++)
        for (int kind = 0; kind < NUM_KINDS; kind++)
            for (int64_t M = 1; M <= 19; M++) { /* every way to cut rows, and every rest */
                const int64_t bits = KINDS[kind], *size = sizes[(M + bits) % 6];
                check(M, size[0], size[1], bits, digits);
                if (M < 4) check(M, 95, 70, bits, digits);
            }
    for (int64_t digits = 1; digits <= 2; digits++)
        for (int kind = 0; kind < NUM_KINDS; kind++) check(67, 21, 70, KINDS[kind], digits); /* two blocks at once, one, rows */
    printf("%s %lld\n", VARIANT, (long long)num_compared);
    return 0;
}
