/* The small operations between the matrices: norms, rotary positions, gates, scales.
 *
 * Each touches every number once or twice; the calls cost more than the arithmetic.
 * Rows are independent, and a row is always computed by one thread in one order.
 *
 * A row has 16 sums, each of the numbers i, i + 16, ..., in PARTS registers; they are added as one tree. */
#include "infer.h"

typedef struct {
    int64_t T;
    const float *x;
    int64_t token_stride, head_stride;
    const float *residual; /* NULL: there is nothing to add */
    int64_t residual_stride;
    const float *weight;
    float *y;       /* heads of a token are contiguous; may be x itself */
    int64_t y_stride;
    float *sum;     /* x + residual, contiguous */
    int64_t N, D;
    double eps, offset;
    int64_t tokens_per_chunk;
} norm_args;

/* The sum of a row's numbers, or of their squares, after adding a residual if given; stores x + residual. */
ALWAYS_INLINE float sum_of_row(const float *x, const float *residual, float *kept, int64_t D, const int is_squared) {
    vr sums[PARTS] = {0};
    float lanes[16];
    int64_t i = 0;
    for (; i + 16 <= D; i += 16)
#pragma GCC unroll 4
        for (int n = 0; n < PARTS; n++) {
            vr v = load_vr(x + i + n * WIDTH);
            if (residual) store_vr(kept + i + n * WIDTH, v += load_vr(residual + i + n * WIDTH));
            sums[n] += is_squared ? v * v : v;
        }
    if (i == D) return sum_parts(sums);
    for (int n = 0; n < PARTS; n++) store_vr(lanes + n * WIDTH, sums[n]);
    for (int lane = 0; i < D; i++, lane++) {
        float v = x[i];
        if (residual) kept[i] = v += residual[i];
        lanes[lane] += is_squared ? v * v : v;
    }
    for (int n = 0; n < PARTS; n++) sums[n] = load_vr(lanes + n * WIDTH);
    return sum_parts(sums);
}

/* y = x / sqrt(mean(x^2) + eps) * (weight + offset), or of the rounded sum if there is a residual. */
void infer_rms_norm(const void *args, int64_t chunk) {
    const norm_args *a = args;
    const float offset = (float)a->offset;
    int64_t first = chunk * a->tokens_per_chunk * a->N, last = first + a->tokens_per_chunk * a->N, D = a->D;
    if (last > a->T * a->N) last = a->T * a->N;
    for (int64_t row = first; row < last; row++) {
        const float *x = a->x + row / a->N * a->token_stride + row % a->N * a->head_stride;
        float *y = a->y + row / a->N * a->y_stride + row % a->N * D, total;
        if (a->residual) {
            float *sum = a->sum + row * D;
            total = sum_of_row(x, a->residual + row * a->residual_stride, sum, D, 1);
            x = sum;
        } else {
            total = sum_of_row(x, NULL, y, D, 1);
        }
        float inverse = 1.0f / sqrtf(total / (float)D + (float)a->eps);
        int64_t i = 0;
        for (; i + WIDTH <= D; i += WIDTH)
            store_vr(y + i, load_vr(x + i) * inverse * (load_vr(a->weight + i) + offset));
        for (; i < D; i++) y[i] = x[i] * inverse * (a->weight[i] + offset);
    }
}

typedef struct {
    int64_t T;
    const float *x;
    int64_t stride;
    const float *residual; /* NULL: there is nothing to add */
    int64_t residual_stride;
    const float *weight, *bias;
    float *y;   /* contiguous, as is `sum` */
    float *sum; /* x + residual */
    int64_t D;
    double eps;
    int64_t tokens_per_chunk;
} layer_norm_args;

/* y = (x - mean) / sqrt(variance + eps) * weight + bias, or of the rounded sum if there is a residual. The variance
 * is computed from the differences, in a separate pass: mean(x^2) - mean^2 would cancel if x is far from 0. */
void infer_layer_norm(const void *args, int64_t chunk) {
    const layer_norm_args *a = args;
    int64_t first = chunk * a->tokens_per_chunk, last = first + a->tokens_per_chunk, D = a->D;
    if (last > a->T) last = a->T;
    for (int64_t t = first; t < last; t++) {
        const float *x = a->x + t * a->stride;
        float *y = a->y + t * D, total;
        if (a->residual) {
            float *sum = a->sum + t * D;
            total = sum_of_row(x, a->residual + t * a->residual_stride, sum, D, 0);
            x = sum;
        } else {
            total = sum_of_row(x, NULL, y, D, 0);
        }
        float mean = total / (float)D;
        for (int64_t i = 0; i < D; i++) y[i] = x[i] - mean;
        float inverse = 1.0f / sqrtf(sum_of_row(y, NULL, y, D, 1) / (float)D + (float)a->eps);
        for (int64_t i = 0; i < D; i++) y[i] = y[i] * inverse * a->weight[i] + a->bias[i];
    }
}

typedef struct {
    int64_t T;
    const float *x; /* [T][D] */
    int64_t stride;
    const float *added; /* [T][D]; NULL: there is nothing to add */
    int64_t added_stride;
    float *y; /* [T][D] */
    int64_t D;
    double factor;
    int64_t tokens_per_chunk;
} scale_args;

void infer_scale(const void *args, int64_t chunk) {
    const scale_args *a = args;
    int64_t first = chunk * a->tokens_per_chunk, last = first + a->tokens_per_chunk, D = a->D;
    if (last > a->T) last = a->T;
    for (int64_t t = first; t < last; t++) {
        const float *x = a->x + t * a->stride, *added = a->added + t * a->added_stride;
        if (a->added)
            for (int64_t i = 0; i < D; i++) a->y[t * D + i] = x[i] * (float)a->factor + added[i];
        else
            for (int64_t i = 0; i < D; i++) a->y[t * D + i] = x[i] * (float)a->factor;
    }
}

typedef struct {
    int64_t T;
    const float *gate_up; /* [T][2F]: gates, then ups; [T][F] without ups */
    int64_t stride;
    float *y; /* [T][F] */
    int64_t F;
    int64_t is_gated;
    int64_t kind; /* 0 silu, 1 gelu by tanh, 2 gelu by erf */
    int64_t columns_per_chunk;
} gate_args;

/* x * sigmoid(u): u = x is SiLU; GELU's tanh form is u = 2 sqrt(2/pi) (x + 0.044715 x^3). */
ALWAYS_INLINE vr activate(vr x, const int kind) {
    if (kind == 2) {
        for (int i = 0; i < WIDTH; i++) x[i] = 0.5f * x[i] * (1.0f + erff(x[i] * 0.70710678f));
        return x;
    }
    vr u = kind == 0 ? x : 1.5957691216f * (x + 0.044715f * x * x * x);
    return x / (1.0f + exp_lanes(-u));
}
ALWAYS_INLINE void activate_row(const float *gate, const float *up, float *y, int64_t count, const int kind) {
    int64_t i = 0;
    for (; i + WIDTH <= count; i += WIDTH) {
        vr v = activate(load_vr(gate + i), kind);
        store_vr(y + i, up ? v * load_vr(up + i) : v);
    }
    if (i == count) return;
    vr v = activate(load_up_to(gate + i, count - i), kind);
    store_up_to(y + i, up ? v * load_up_to(up + i, count - i) : v, count - i);
}

/* act(gate) * up, or act(gate) alone. */
void infer_activation(const void *args, int64_t chunk) {
    const gate_args *a = args;
    int64_t per_row = (a->F + a->columns_per_chunk - 1) / a->columns_per_chunk;
    int64_t row = chunk / per_row, first = chunk % per_row * a->columns_per_chunk;
    int64_t last = first + a->columns_per_chunk < a->F ? first + a->columns_per_chunk : a->F;
    const float *gate = a->gate_up + row * a->stride + first, *up = a->is_gated ? gate + a->F : NULL;
    float *y = a->y + row * a->F + first;
    if (a->kind == 0) activate_row(gate, up, y, last - first, 0);
    else if (a->kind == 1) activate_row(gate, up, y, last - first, 1);
    else activate_row(gate, up, y, last - first, 2);
}

typedef struct {
    int64_t T;
    const float *q, *k; /* heads of one token are H apart */
    int64_t q_stride, k_stride;
    const float *cos, *sin; /* [P][R] */
    const int64_t *positions;
    float *q_out, *k_out; /* [T][N][H] and [T][G][H] */
    int64_t N, G, R;
    int64_t tokens_per_chunk;
} rope_args;

/* Rotate the pairs of some heads (channels i and i + R) by the angles of their position. */
static void turn(const float *x, int64_t num_heads, const float *cos, const float *sin, int64_t R, float *y) {
    for (const float *end = x + num_heads * 2 * R; x < end; x += 2 * R, y += 2 * R) {
        int64_t i = 0;
        for (; i + WIDTH <= R; i += WIDTH) {
            vr c = load_vr(cos + i), s = load_vr(sin + i), x1 = load_vr(x + i), x2 = load_vr(x + R + i);
            store_vr(y + i, x1 * c - x2 * s);
            store_vr(y + R + i, x2 * c + x1 * s);
        }
        for (; i < R; i++) {
            float x1 = x[i], x2 = x[R + i];
            y[i] = x1 * cos[i] - x2 * sin[i];
            y[R + i] = x2 * cos[i] + x1 * sin[i];
        }
    }
}

void infer_rope(const void *args, int64_t chunk) {
    const rope_args *a = args;
    int64_t R = a->R, first = chunk * a->tokens_per_chunk, last = first + a->tokens_per_chunk;
    if (last > a->T) last = a->T;
    for (int64_t t = first; t < last; t++) {
        const float *cos = a->cos + a->positions[t] * R, *sin = a->sin + a->positions[t] * R;
        turn(a->q + t * a->q_stride, a->N, cos, sin, R, a->q_out + t * a->N * 2 * R);
        turn(a->k + t * a->k_stride, a->G, cos, sin, R, a->k_out + t * a->G * 2 * R);
    }
}
