/* Every kernel of the C library on the same invented numbers: `c_driver LIBRARY OUTPUT`.
 *
 * For processors that can be emulated but have no Python here. It computes what it is told to and judges
 * nothing: the results go to OUTPUT, so that the files of two libraries can be compared.
 *
 *     a line "<name> bytes <size>"     then so many bytes, which must be equal
 *     a line "<name> floats <size>"    then so many bytes of floats, which may differ in their last digits
 *
 * Sizes are awkward on purpose: no multiple of a tile, of a group or of a vector. All arguments of a kernel
 * are 8 bytes wide, so a list of int64_t is what the library expects (kernels/cpu/operations.py). */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef int64_t word;
typedef struct {
    void *run;
    word *args, kind, chunks, rows_per_chunk;
} operation;

enum { FIXED, PER_ROW };
static void *library;
static FILE *output;
static uint64_t random_state = 88172645463325252u;

static void *find(const char *name) {
    void *found = dlsym(library, name);
    if (!found) fprintf(stderr, "%s\n", dlerror()), exit(2);
    return found;
}

/* Zeroed, and aligned as the callers of the library align. */
static void *room(size_t num_bytes) {
    size_t whole = (num_bytes + 127) / 64 * 64;
    void *memory = aligned_alloc(64, whole);
    return memory ? memset(memory, 0, whole) : (exit(2), NULL);
}

static uint32_t random_bits(void) { /* xorshift */
    random_state ^= random_state << 13, random_state ^= random_state >> 7, random_state ^= random_state << 17;
    return (uint32_t)(random_state >> 32);
}
static float random_float(void) { return (float)(int32_t)random_bits() * (1.0f / 1073741824.0f); } /* -2 .. 2 */
static float *random_floats(word count) {
    float *numbers = room((size_t)count * sizeof(float));
    for (word i = 0; i < count; i++) numbers[i] = random_float();
    return numbers;
}

static word p(const void *pointer) { return (word)(intptr_t)pointer; }
static word d(double value) {
    word bits;
    memcpy(&bits, &value, 8);
    return bits;
}

static void emit(const char *name, const char *type, const void *data, word size) {
    fprintf(output, "%s %s %lld\n", name, type, (long long)size);
    fwrite(data, 1, (size_t)size, output);
}
static void emit_floats(const char *name, const float *data, word count) { emit(name, "floats", data, count * 4); }

#define RUN(name, chunks, ...) \
    ((void (*)(void *, word, word *))find("infer_run_one"))(find(name), chunks, (word[]){__VA_ARGS__})

/* Quantise x and multiply, as a list of two operations; y and the quantised x. */
static void multiply(const char *name, const char *type, const float *x, const void *data, const void *scales,
                     const float *bias, word M, word N, word K, word bits) {
    word digits = 2, scratch_size = ((word(*)(word, word, word))find("infer_linear_scratch"))(M, K, digits), tiles = (N + 15) / 16;
    float *y = room((size_t)(M * N) * 4);
    void *scratch = room((size_t)scratch_size);
    char label[100];
    word args[] = {0, p(x), K, p(y), N, p(data), p(scales), p(bias), p(scratch), N, K, bits, digits, 1, 3, 0};
    int32_t *order = room((size_t)K * 4);
    for (word k = 0; k < K; k++) order[k] = (int32_t)((k * 7 + 3) % K);
    if (K % 7) args[15] = p(order); /* every column once; with another K columns stay where they are */
    operation ops[] = {{find("infer_linear_quantize"), args, PER_ROW, 1, 3},
                       {find(bits == 8 ? "infer_linear_int8" : "infer_linear_int4"), args, FIXED, tiles, 0}};
    ((void (*)(operation *, word, word, word))find("infer_run"))(ops, 2, M, 0);
    snprintf(label, sizeof label, "%s_int%d_%dx%dx%d", name, (int)bits, (int)M, (int)N, (int)K);
    emit(label, type, y, M * N * 4);
    word rows = 8, cells = (M + rows - 1) / rows * ((K + 31) / 32); /* blocks of 8 rows, two lines each */
    char *x_scales = (char *)scratch + cells * 16 * 32;
    emit("quantized_x", "bytes", scratch, cells * 16 * 32);
    emit_floats("quantized_x_scales", (float *)x_scales, cells * rows);
    if (bits == 8) emit("quantized_x_starts", "bytes", x_scales + cells * rows * 4, cells * rows * 4);
    else emit_floats("quantized_x_sums", (float *)x_scales + cells * rows, cells * rows);
}

static void run_matrices(word M, word N, word K, word bits) {
    word groups = (K + 31) / 32, cells = (N + 15) / 16 * groups, num_bytes = cells * 64 * bits;
    uint8_t *data = room((size_t)num_bytes);
    word scale_bytes = bits == 8 ? cells * 32 : cells * 64; /* int4 has minima, too */
    uint16_t *scales = room((size_t)scale_bytes);
    float *x = random_floats(M * K), *bias = random_floats(N);

    /* From floats, in two parts, as a fused matrix arrives. */
    float *rows = random_floats(N * K);
    for (word n = 0; n < N; n++) /* down to scales that are subnormal halves */
        for (word k = 0; k < K; k++) rows[n * K + k] = ldexpf(rows[n * K + k], (int)(n % 8) * -3);
    RUN("infer_pack", (N - 5 + 2) / 3, N - 5, p(rows), 0, 0, 0, K, 0, p(data), p(scales), bits, 3);
    RUN("infer_pack", 1, 5, p(rows + (N - 5) * K), 0, 0, 0, K, N - 5, p(data), p(scales), bits, 8);
    emit("packed", "bytes", data, num_bytes);
    emit("packed_scales", "bytes", scales, scale_bytes);
    memset(x, 0, (size_t)(K < 32 ? K : 32) * 4); /* a group of zeros */
    multiply("product", "floats", x, data, scales, bias, M, N, K, bits);
    multiply("middle_row", "floats", x + M / 2 * K, data, scales, bias, 1, N, K, bits);
    x[(M - 1) * K + K / 2] = NAN;
    multiply("product_with_nan", "floats", x, data, scales, NULL, M, N, K, bits);

    word ids[] = {0, N - 1, 1, N, -1, 7}, num_ids = 6;
    float *out = room((size_t)(num_ids * K) * 4);
    RUN("infer_embed", 3, num_ids, p(ids), p(out), K, N, p(data), p(scales), bits, 2);
    emit("lookup", "bytes", out, num_ids * K * 4);

    /* From integers, the largest among them, with scales and minima that are powers of two: no product of
     * floats is ever rounded, so the results show the integer sums to the last bit. */
    int8_t *q = room((size_t)(N * K));
    uint16_t *row_scales = room((size_t)(N * groups) * 2), *row_minima = room((size_t)(N * groups) * 2);
    int low = bits == 8 ? -127 : 0, high = bits == 8 ? 127 : 15;
    for (word i = 0; i < N * K; i++) q[i] = (int8_t)(low + (int)(random_bits() % (uint32_t)(high - low + 1)));
    for (word i = 0; i < 2 * K; i++) q[i] = (int8_t)(i < K ? low : high);
    for (word i = 0; i < N * groups; i++) row_scales[i] = i % 2 ? 0x3c00 : 0x3800; /* 1, 0.5 */
    for (word i = 0; i < N * groups; i++) row_minima[i] = i % 3 ? 0xc000 : 0x3c00; /* -2, 1 */
    RUN("infer_pack", N, N, 0, p(q), p(row_scales), p(row_minima), K, 0, p(data), p(scales), bits, 1);
    emit("packed_integers", "bytes", data, num_bytes);
    emit("packed_integers_scales", "bytes", scales, scale_bytes);
    const int largest = 127 * 128;
    for (word i = 0; i < M * K; i++) {
        int whole = i % K % 32 == 0 ? -largest : (int)(random_bits() % (uint32_t)(2 * largest + 1)) - largest;
        x[i] = (float)whole / 128.0f;
    }
    for (word i = K; i < 2 * K && i < M * K; i++) x[i] = -127.0f;
    multiply("exact_product", "bytes", x, data, scales, NULL, M, N, K, bits);
}

static void run_dense_lookups(void) {
    enum { V = 9, K = 45, T = 5 };
    word ids[T] = {8, 0, 9, -3, 4}, kinds[] = {16, 17, 32};
    uint16_t *halves = room(V * K * 2);
    for (int i = 0; i < V * K; i++) halves[i] = (uint16_t)(random_bits() & 0xbbff); /* subnormal too; none infinite */
    float *floats = random_floats(V * K), *out = room(T * K * 4);
    for (int i = 0; i < 3; i++) {
        RUN("infer_embed", T, T, p(ids), p(out), K, V, kinds[i] == 32 ? p(floats) : p(halves), 0, kinds[i], 1);
        emit("dense_lookup", "bytes", out, T * K * 4);
    }
}

static void run_norms(word D) {
    enum { T = 5, N = 3 };
    float *x = random_floats(T * (N * D + 4)), *residual = random_floats(T * N * D), *weight = random_floats(D);
    float *y = room((size_t)(T * N * D) * 4), *sum = room((size_t)(T * N * D) * 4);
    RUN("infer_rms_norm", 3, T, p(x), N * D + 4, D, 0, 0, p(weight), p(y), N * D, 0, N, D, d(1e-5), d(1.0), 2);
    emit_floats("norm_of_heads", y, T * N * D);
    RUN("infer_rms_norm", 5, T, p(x), D + 1, 0, p(residual), D, p(weight), p(y), D, p(sum), 1, D, d(1e-6), d(0.0),
        1);
    emit_floats("norm_of_sum", y, T * D);
    emit("norm_sum", "bytes", sum, T * D * 4);
    RUN("infer_layer_norm", 3, T, p(x), D + 1, 0, 0, p(weight), p(residual), p(y), 0, D, d(1e-5), 2);
    emit_floats("layer_norm", y, T * D);
    RUN("infer_layer_norm", 5, T, p(x), D + 1, p(residual), D, p(weight), p(residual), p(y), p(sum), D, d(1e-5), 1);
    emit_floats("layer_norm_of_sum", y, T * D);
    emit("layer_norm_sum", "bytes", sum, T * D * 4);
    RUN("infer_scale", 3, T, p(x), D + 1, 0, 0, p(y), D, d(33.94), 2);
    emit("scaled", "bytes", y, T * D * 4);
    RUN("infer_scale", 3, T, p(x), D + 1, p(residual), D, p(y), D, d(1.0), 2);
    emit("added", "bytes", y, T * D * 4);
}

static void run_gates(word F) {
    enum { T = 4 };
    float *x = random_floats(T * 2 * F), *y = room((size_t)(T * F) * 4);
    for (word i = 0; i < F; i++) x[i] *= 60.0f; /* one row of extremes */
    x[0] = -INFINITY, x[1] = NAN, x[2] = INFINITY, x[3] = -0.0f;
    for (word kind = 0; kind < 3; kind++) {
        for (word is_gated = 0; is_gated < 2; is_gated++) {
            RUN("infer_activation", T * ((F + 31) / 32), T, p(x), 2 * F, p(y), F, is_gated, kind, 32);
            emit_floats("activation", y, T * F);
        }
    }
}

static void run_heads(word H) {
    enum { T = 5, N = 4, G = 2, POSITIONS = 9, SLOTS = 12 };
    word R = H / 2, positions[T] = {0, 8, 3, 3, 1}, slots[T] = {11, 0, -1, 4, 5}, stride = (N + 2 * G) * H;
    float *qkv = random_floats(T * stride), *cos = random_floats(POSITIONS * R), *sin = random_floats(POSITIONS * R);
    float *q_out = room((size_t)(T * N * H) * 4), *k_out = room((size_t)(T * G * H) * 4);
    float *keys = random_floats(SLOTS * G * H), *values = random_floats(SLOTS * G * H);
    float *k = qkv + N * H, *v = k + G * H;
    RUN("infer_rope", 3, T, p(qkv), p(k), stride, stride, p(cos), p(sin), p(positions), p(q_out), p(k_out), N, G, R, 2);
    emit_floats("turned_queries", q_out, T * N * H);
    emit_floats("turned_keys", k_out, T * G * H);
    RUN("infer_write_cache", 3, T, p(k), p(v), stride, stride, p(keys), p(values), 0, 0, p(slots), 0, 0, G, H, 0, 2);
    emit("cache_keys", "bytes", keys, SLOTS * G * H * 4);
    emit("cache_values", "bytes", values, SLOTS * G * H * 4);
}

static void run_attention(word H, word window) {
    enum { N = 4, G = 2, BLOCK = 16, BLOCKS = 40, T = 22, ROW = 38 };
    word table[2][ROW], parts = 2;
    for (word i = 0; i < ROW; i++) table[0][i] = (i * 11 + 5) % BLOCKS, table[1][i] = (i * 7 + 3) % BLOCKS;
    /* first, count, row, start, segment, part: the last token's context has two segments */
    word items[][6] = {{0, 1, 0, 0, -1, 0},  {1, 1, 1, 50, -1, 0},  {2, 16, 0, 21, -1, 0},
                       {18, 3, 1, 15, -1, 0}, {21, 1, 0, 600, 1, 1}, {21, 1, 0, 600, 0, 0}};
    float *q = random_floats(T * (N * H + 3)), *out = room((size_t)(T * N * H) * 4);
    float *kept = room((size_t)(parts * (N * (H + 2) + G)) * 4);
    float *keys = random_floats(BLOCKS * BLOCK * G * H), *values = random_floats(BLOCKS * BLOCK * G * H);
    RUN("infer_attend", 6 * G, T, p(q), N * H + 3, p(out), p(keys), p(values), p(table), ROW, p(items), N, G, H, BLOCK,
        window, d(1.0 / sqrt((double)H)), p(kept), 0, 0, 0, d(0.0), 0);
    emit_floats("attention", out, T * N * H);
    float sinks[N] = {0.5f, -1.0f, 3.0f, -INFINITY};
    RUN("infer_attend", 6 * G, T, p(q), N * H + 3, p(out), p(keys), p(values), p(table), ROW, p(items), N, G, H, BLOCK,
        window, d(1.0 / sqrt((double)H)), p(kept), 0, 0, 0, d(5.0), p(sinks));
    emit_floats("attention_with_sinks", out, T * N * H);

    /* Over codes of 8 bits; then codes of tiny heads, and of heads with NaN or infinity. */
    float *k_scales = room(BLOCKS * BLOCK * G * 4), *v_scales = room(BLOCKS * BLOCK * G * 4);
    word num = BLOCKS * BLOCK, *slots = room((size_t)num * sizeof(word)), size = num * G * H;
    for (word i = 0; i < num; i++) slots[i] = i;
    for (word kind = 1; kind < 3; kind++) {
        uint8_t *k_codes = room((size_t)size), *v_codes = room((size_t)size);
        RUN("infer_write_cache", (num + 1) / 2, num, p(keys), p(values), G * H, G * H, p(k_codes), p(v_codes), p(k_scales),
            p(v_scales), p(slots), 0, kind, G, H, BLOCK, 2);
        emit("key_codes", "bytes", k_codes, size);
        emit_floats("key_scales", k_scales, num * G);
        RUN("infer_attend", 6 * G, T, p(q), N * H + 3, p(out), p(k_codes), p(v_codes), p(table), ROW, p(items), N, G, H,
            BLOCK, window, d(1.0 / sqrt((double)H)), p(kept), kind, p(k_scales), p(v_scales), d(0.0), 0);
        emit_floats("attention_over_codes", out, T * N * H);
        float odd[4 * G * 512];
        for (word i = 0; i < 4 * G * H; i++) odd[i] = keys[i] * (i / (G * H) < 2 ? i < G * H ? 1e-37f : 1e-44f : 1.0f);
        odd[2 * G * H + 1] = NAN, odd[3 * G * H + 1] = -INFINITY;
        RUN("infer_write_cache", 2, 4, p(odd), p(odd), G * H, G * H, p(k_codes), p(v_codes), p(k_scales), p(v_scales),
            p(slots), 0, kind, G, H, BLOCK, 2);
        emit("odd_codes", "bytes", k_codes, 4 * G * H);
        emit_floats("odd_scales", k_scales, 4 * G);
    }
}

static void run_likely(word V, word capacity) {
    enum { S = 3 };
    float *logits = random_floats(S * V), *values = room((size_t)(S * capacity) * 4);
    float peak[S] = {-INFINITY, -INFINITY, 2.5f}, temperature[S] = {0.1f, 1.0f, 40.0f};
    uint32_t keys[2 * S] = {1, 2, 0xffffffff, 0x80000000, 12345, 678};
    word best[S] = {0}, counts[S];
    int32_t *ids = room((size_t)(S * capacity) * 4);
    logits[V - 1] = -INFINITY, logits[V] = -0.0f, logits[2 * V + V / 2] = NAN;
    for (word s = 0; s < 2; s++)
        for (word i = 0; i < V; i++)
            if (logits[s * V + i] > peak[s]) peak[s] = logits[s * V + i], best[s] = i;
    RUN("infer_likely", S, S, p(logits), V, V, p(best), p(peak), p(temperature), p(keys), capacity, p(ids), p(values),
        p(counts));
    emit("likely_ids", "bytes", ids, S * capacity * 4);
    emit_floats("likely_values", values, S * capacity);
    emit("likely_counts", "bytes", counts, sizeof counts);
}

int main(int argc, char **argv) {
    if (argc != 3) return 2;
    library = dlopen(argv[1], RTLD_NOW | RTLD_LOCAL);
    if (!library) return fprintf(stderr, "%s\n", dlerror()), 2;
    output = fopen(argv[2], "wb");
    if (!output) return perror(argv[2]), 2;
    const char *variant = ((const char *(*)(void))find("infer_variant"))();
    ((word(*)(word))find("infer_set_threads"))(3);

    static const word shapes[][3] = {{1, 16, 32}, {1, 37, 100}, {2, 19, 64},   {3, 17, 45},  {5, 21, 70},
                                     {7, 33, 64}, {16, 18, 33}, {19, 37, 100}, {33, 23, 96}, {40, 9, 31}};
    for (int i = 0; i < 10; i++)
        for (word bits = 4; bits <= 8; bits += 4) run_matrices(shapes[i][0], shapes[i][1], shapes[i][2], bits);
    run_dense_lookups();
    static const word sizes[] = {7, 45, 64};
    for (int i = 0; i < 3; i++) run_norms(sizes[i]), run_gates(sizes[i]);
    static const word head_sizes[] = {20, 64, 80, 96, 128, 256, 512};
    for (int i = 0; i < 7; i++) {
        run_heads(head_sizes[i]);
        run_attention(head_sizes[i], 0), run_attention(head_sizes[i], 9);
    }
    run_likely(5, 4), run_likely(45, 64), run_likely(1003, 300);
    ((word(*)(word))find("infer_set_threads"))(1);
    if (fclose(output)) return perror(argv[2]), 2;
    return puts(variant) < 0;
}
