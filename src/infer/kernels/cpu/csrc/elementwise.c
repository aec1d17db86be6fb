/* The small steps between the matrices: norms, rotary positions, gates, scales, cache writes.
 *
 * Each touches every number once or twice; what they cost a program is not arithmetic but the calls.
 * Rows are independent, and a row is always computed by one thread in one order. */
#include "infer.h"

static inline vf load_up_to(const float *p, int64_t left) { return left >= LANES ? load(p) : load_some(p, left); }
static inline void store_up_to(float *p, vf v, int64_t left) {
    if (left >= LANES)
        store(p, v);
    else
        store_some(p, v, left);
}

typedef struct {
    int64_t T;
    const float *x;
    int64_t token_stride, head_stride;
    const float *residual; /* NULL: there is nothing to add */
    int64_t residual_stride;
    const float *weight;
    float *y;       /* contiguous, as is `sum` */
    float *sum;     /* x + residual */
    int64_t N, D;
    double eps, offset;
    int64_t tokens_per_chunk;
} norm_args;

/* y = x / sqrt(mean(x^2) + eps) * (weight + offset), of the rounded sum where there is one. */
void infer_rms_norm(const void *args, int64_t chunk) {
    const norm_args *a = args;
    int64_t first = chunk * a->tokens_per_chunk * a->N, last = first + a->tokens_per_chunk * a->N, D = a->D;
    if (last > a->T * a->N) last = a->T * a->N;
    for (int64_t row = first; row < last; row++) {
        const float *x = a->x + row / a->N * a->token_stride + row % a->N * a->head_stride;
        float *y = a->y + row * D;
        vf squares = {0};
        for (int64_t i = 0; i < D; i += LANES) {
            vf v = load_up_to(x + i, D - i);
            if (a->residual) {
                v += load_up_to(a->residual + row * a->residual_stride + i, D - i);
                store_up_to(a->sum + row * D + i, v, D - i);
            }
            squares += v * v;
        }
        if (a->residual) x = a->sum + row * D;
        float inverse = 1.0f / sqrtf(sum_lanes(squares) / (float)D + (float)a->eps);
        for (int64_t i = 0; i < D; i += LANES) {
            vf weight = load_up_to(a->weight + i, D - i) + (float)a->offset;
            store_up_to(y + i, load_up_to(x + i, D - i) * inverse * weight, D - i);
        }
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

/* y = (x - mean) / sqrt(variance + eps) * weight + bias, of the rounded sum where there is one. The variance
 * is that of the differences, in a pass of its own: mean(x^2) - mean^2 would cancel where x is far from 0. */
void infer_layer_norm(const void *args, int64_t chunk) {
    const layer_norm_args *a = args;
    int64_t first = chunk * a->tokens_per_chunk, last = first + a->tokens_per_chunk, D = a->D;
    if (last > a->T) last = a->T;
    for (int64_t t = first; t < last; t++) {
        const float *x = a->x + t * a->stride;
        float *y = a->y + t * D;
        vf total = {0}, squares = {0};
        for (int64_t i = 0; i < D; i += LANES) {
            vf v = load_up_to(x + i, D - i);
            if (a->residual) {
                v += load_up_to(a->residual + t * a->residual_stride + i, D - i);
                store_up_to(a->sum + t * D + i, v, D - i);
            }
            total += v;
        }
        if (a->residual) x = a->sum + t * D;
        float mean = sum_lanes(total) / (float)D;
        for (int64_t i = 0; i < D; i += LANES) { /* y keeps the differences; past the row's end they count as 0 */
            store_up_to(y + i, load_up_to(x + i, D - i) - mean, D - i);
            vf v = load_up_to(y + i, D - i);
            squares += v * v;
        }
        float inverse = 1.0f / sqrtf(sum_lanes(squares) / (float)D + (float)a->eps);
        for (int64_t i = 0; i < D; i += LANES) {
            vf scaled = load_up_to(y + i, D - i) * inverse * load_up_to(a->weight + i, D - i);
            store_up_to(y + i, scaled + load_up_to(a->bias + i, D - i), D - i);
        }
    }
}

typedef struct {
    int64_t T;
    const float *x; /* [T][D] */
    int64_t stride;
    float *y; /* [T][D] */
    int64_t D;
    double factor;
    int64_t tokens_per_chunk;
} scale_args;

void infer_scale(const void *args, int64_t chunk) {
    const scale_args *a = args;
    int64_t first = chunk * a->tokens_per_chunk, last = first + a->tokens_per_chunk, D = a->D;
    if (last > a->T) last = a->T;
    for (int64_t t = first; t < last; t++)
        for (int64_t i = 0; i < D; i += LANES)
            store_up_to(a->y + t * D + i, load_up_to(a->x + t * a->stride + i, D - i) * (float)a->factor, D - i);
}

typedef struct {
    int64_t T;
    const float *gate_up; /* [T][2F]: gates, then ups; [T][F] where there are no ups */
    int64_t stride;
    float *y; /* [T][F] */
    int64_t F;
    int64_t is_gated;
    int64_t kind; /* 0 silu, 1 gelu by tanh, 2 gelu by erf */
    int64_t columns_per_chunk;
} gate_args;

/* x * sigmoid(u): u = x is SiLU; GELU's tanh form is u = 2 sqrt(2/pi) (x + 0.044715 x^3). */
static inline vf activate(vf x, int64_t kind) {
    if (kind == 2) {
        vf y;
        for (int i = 0; i < LANES; i++) y[i] = 0.5f * x[i] * (1.0f + erff(x[i] * 0.70710678f));
        return y;
    }
    vf u = kind == 0 ? x : 1.5957691216f * (x + 0.044715f * x * x * x);
    return x / (1.0f + exp_lanes(-u));
}

/* act(gate) * up, or act(gate) alone. */
void infer_activation(const void *args, int64_t chunk) {
    const gate_args *a = args;
    int64_t per_row = (a->F + a->columns_per_chunk - 1) / a->columns_per_chunk;
    int64_t row = chunk / per_row, first = chunk % per_row * a->columns_per_chunk;
    int64_t last = first + a->columns_per_chunk < a->F ? first + a->columns_per_chunk : a->F;
    const float *gate = a->gate_up + row * a->stride, *up = gate + a->F;
    for (int64_t i = first; i < last; i += LANES) {
        vf y = activate(load_up_to(gate + i, last - i), a->kind);
        if (a->is_gated) y *= load_up_to(up + i, last - i);
        store_up_to(a->y + row * a->F + i, y, last - i);
    }
}

typedef struct {
    int64_t T;
    const float *q, *k; /* heads of one token lie H apart */
    int64_t q_stride, k_stride;
    const float *cos, *sin; /* [P][R] */
    const int64_t *positions;
    float *q_out, *k_out; /* [T][N][H] and [T][G][H] */
    int64_t N, G, R;
    int64_t tokens_per_chunk;
} rope_args;

/* Turn the pairs of some heads (channels i and i + R) by the angles of their position. */
static void turn(const float *x, int64_t num_heads, const float *cos, const float *sin, int64_t R, float *y) {
    for (const float *end = x + num_heads * 2 * R; x < end; x += 2 * R, y += 2 * R)
        for (int64_t i = 0; i < R; i += LANES) {
            vf c = load_up_to(cos + i, R - i), s = load_up_to(sin + i, R - i);
            vf x1 = load_up_to(x + i, R - i), x2 = load_up_to(x + R + i, R - i);
            store_up_to(y + i, x1 * c - x2 * s, R - i);
            store_up_to(y + R + i, x2 * c + x1 * s, R - i);
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

typedef struct {
    int64_t T;
    const float *k, *v; /* the G heads of a token lie together */
    int64_t k_stride, v_stride;
    float *keys, *values; /* [slots][G * H] */
    const int64_t *slots; /* [T] */
    int64_t size;         /* G * H */
    int64_t tokens_per_chunk;
} write_args;

/* A slot of -1 is padding: nothing is written for it. */
void infer_write_cache(const void *args, int64_t chunk) {
    const write_args *a = args;
    size_t num_bytes = (size_t)a->size * sizeof(float);
    int64_t first = chunk * a->tokens_per_chunk, last = first + a->tokens_per_chunk;
    if (last > a->T) last = a->T;
    for (int64_t t = first; t < last; t++) {
        if (a->slots[t] < 0) continue;
        memcpy(a->keys + a->slots[t] * a->size, a->k + t * a->k_stride, num_bytes);
        memcpy(a->values + a->slots[t] * a->size, a->v + t * a->v_stride, num_bytes);
    }
}
