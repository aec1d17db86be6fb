/* Bring weights into the layout of linear.c, and single rows back out of it.
 *
 * A row is packed wherever it lies in its matrix: the parts of a fused matrix arrive one by one, and
 * their borders need not be those of tiles. The scale is rounded to a half *before* the weights are
 * divided by it, so its rounding costs no accuracy.
 *
 * An embedding that is tied to the head is not kept a second time: rows are read from the packed head. */
#include "infer.h"

#define GROUP 32

#if defined(HAVE_AVX512)
#define INT8_OFFSET 128
#else
#define INT8_OFFSET 0
#endif

typedef struct {
    int64_t num_rows;
    const float *rows;     /* [num_rows][K], or NULL: `q` and `d` hold the numbers already */
    const int8_t *q;       /* [num_rows][K] */
    const uint16_t *d;     /* [num_rows][K / 32] */
    int64_t K;
    int64_t first_row;     /* where in the matrix they go */
    uint8_t *data;
    uint16_t *scales;
    int64_t bits;
    int64_t rows_per_chunk;
} pack_args;

uint16_t float_to_half(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    uint32_t sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return (uint16_t)(sign | 0x7e00u);
    if (magnitude >= 0x477ff000u) return (uint16_t)(sign | 0x7c00u); /* rounds to infinity */
    if (magnitude < 0x38800000u) {                                  /* subnormal: count steps of 2^-24 */
        float steps;
        memcpy(&steps, &magnitude, 4);
        return (uint16_t)(sign | (uint32_t)lrintf(steps * 16777216.0f));
    }
    uint32_t rounded = magnitude - 0x38000000u + 0xfffu + (magnitude >> 13 & 1u);
    return (uint16_t)(sign | rounded >> 13);
}

static void put_group(const pack_args *a, int64_t row, int64_t g, int64_t groups, const int8_t *q, uint16_t d) {
    int64_t cell = (row / LANES) * groups + g;
    int64_t lane = row % LANES;
    a->scales[cell * LANES + lane] = d;
    if (a->bits == 8) {
        uint8_t *out = a->data + cell * 512 + lane * 4;
        for (int v = 0; v < 8; v++)
            for (int k = 0; k < 4; k++) out[v * 64 + k] = (uint8_t)(q[v * 4 + k] + INT8_OFFSET);
    } else {
        uint8_t *out = a->data + cell * 256 + lane * 4;
        for (int v = 0; v < 4; v++)
            for (int k = 0; k < 4; k++) {
                uint8_t low = (uint8_t)(q[v * 4 + k] + 8), high = (uint8_t)(q[v * 4 + k + 16] + 8);
                out[v * 64 + k] = (uint8_t)(low | high << 4);
            }
    }
}

/* Every loop over a group is written so that a compiler finds nothing in it that must stay in order: packing
 * a model is minutes of this. */
static void divide(const float *w, float scale, float low, float high, float *q) {
    float inverse = scale != 0.0f ? 1.0f / scale : 0.0f;
    for (int k = 0; k < GROUP; k++) {
        float exact = w[k] * inverse;
        exact = exact < low ? low : exact;
        q[k] = rintf(exact > high ? high : exact);
    }
}

static float squared_error(const float *w, float scale, const float *q) {
    float squares[GROUP];
    for (int k = 0; k < GROUP; k++) {
        float off = w[k] - scale * q[k];
        squares[k] = off * off;
    }
    for (int k = 0; k < GROUP / 2; k++) squares[k] += squares[k + GROUP / 2];
    for (int k = 0; k < GROUP / 4; k++) squares[k] += squares[k + GROUP / 4];
    return ((squares[0] + squares[1]) + (squares[2] + squares[3])) +
           ((squares[4] + squares[5]) + (squares[6] + squares[7]));
}

/* The scale and the integers of 32 weights. A group with a NaN, an infinity or weights too large for a
 * half gets a scale that is not finite, so nothing hides it. Floats without their sign are in the order of their
 * bits, so the peak is found among integers. */
static uint16_t quantize_group(const float *w, int64_t bits, int8_t *out) {
    int32_t raw[GROUP], peak_bits = 0, highest_bits = 0;
    memcpy(raw, w, sizeof(raw));
    for (int k = 0; k < GROUP; k++) {
        int32_t magnitude = raw[k] & 0x7fffffff;
        peak_bits = magnitude > peak_bits ? magnitude : peak_bits;
        highest_bits = raw[k] > highest_bits ? raw[k] : highest_bits;
    }
    if (peak_bits >= 0x7f800000) {
        memset(out, 1, GROUP);
        return 0x7e00u;
    }
    float peak, q[GROUP];
    memcpy(&peak, &peak_bits, 4);
    uint16_t best = 0;
    if (bits == 8) {
        best = float_to_half(peak / 127.0f);
        divide(w, half_to_float(best), -127.0f, 127.0f, q);
    } else { /* the largest weight becomes -8, and a few larger scales are tried for a smaller error */
        float best_error = INFINITY, signed_peak = highest_bits == peak_bits ? peak : -peak;
        for (int step = 0; step <= 8; step++) {
            uint16_t d = float_to_half(signed_peak / (-8.0f + 0.2f * (float)step));
            float scale = half_to_float(d);
            divide(w, scale, -8.0f, 7.0f, q);
            float error = squared_error(w, scale, q);
            if (error < best_error) best_error = error, best = d;
        }
        if (best_error == INFINITY) { /* too large for any scale that a half can hold */
            memset(out, 1, GROUP);
            return 0x7e00u;
        }
        divide(w, half_to_float(best), -8.0f, 7.0f, q);
    }
    for (int k = 0; k < GROUP; k++) out[k] = (int8_t)(int)q[k];
    return best;
}

void infer_pack(const void *args, int64_t chunk) {
    const pack_args *a = args;
    int64_t groups = (a->K + GROUP - 1) / GROUP;
    int64_t first = chunk * a->rows_per_chunk, last = first + a->rows_per_chunk;
    if (last > a->num_rows) last = a->num_rows;
    for (int64_t row = first; row < last; row++)
        for (int64_t g = 0; g < groups; g++) {
            int8_t q[GROUP] = {0};
            uint16_t d;
            int64_t left = a->K - g * GROUP, count = left < GROUP ? left : GROUP;
            if (a->rows) {
                float w[GROUP] = {0};
                memcpy(w, a->rows + row * a->K + g * GROUP, (size_t)count * sizeof(float));
                d = quantize_group(w, a->bits, q);
            } else {
                memcpy(q, a->q + row * a->K + g * GROUP, (size_t)count);
                d = a->d[row * groups + g];
            }
            put_group(a, a->first_row + row, g, groups, q, d);
        }
}

typedef struct {
    int64_t T;
    const int64_t *ids; /* [T] */
    float *out;         /* [T][K] */
    int64_t K, num_rows;
    const uint8_t *data;
    const uint16_t *scales;
    int64_t bits; /* 8 or 4: packed as above; 16: halves, 17: bfloat16, 32: floats, all [num_rows][K] */
    int64_t rows_per_chunk;
} embed_args;

static void read_packed(const embed_args *a, int64_t row, float *out) {
    int64_t groups = (a->K + GROUP - 1) / GROUP, lane = row % LANES;
    for (int64_t g = 0; g < groups; g++) {
        int64_t cell = row / LANES * groups + g, left = a->K - g * GROUP, count = left < GROUP ? left : GROUP;
        float d = half_to_float(a->scales[cell * LANES + lane]);
        const uint8_t *data = a->data + cell * (a->bits == 8 ? 512 : 256) + lane * 4;
        for (int64_t k = 0; k < count; k++) {
            if (a->bits == 8) {
                out[g * GROUP + k] = d * (float)(int8_t)(uint8_t)(data[k / 4 * 64 + k % 4] - INT8_OFFSET);
            } else {
                uint8_t raw = data[k / 4 % 4 * 64 + k % 4];
                out[g * GROUP + k] = d * (float)((k < 16 ? raw & 15 : raw >> 4) - 8);
            }
        }
    }
}

/* Rows of an embedding, as floats; an id outside the table gives a row of NaN, never a wild read. */
void infer_embed(const void *args, int64_t chunk) {
    const embed_args *a = args;
    int64_t first = chunk * a->rows_per_chunk, last = first + a->rows_per_chunk, K = a->K;
    if (last > a->T) last = a->T;
    for (int64_t t = first; t < last; t++) {
        int64_t row = a->ids[t];
        float *out = a->out + t * K;
        const uint16_t *halves = (const uint16_t *)a->data + (row < 0 ? 0 : row) * K;
        if (row < 0 || row >= a->num_rows) {
            for (int64_t k = 0; k < K; k++) out[k] = NAN;
        } else if (a->bits == 32) {
            memcpy(out, (const float *)a->data + row * K, (size_t)K * sizeof(float));
        } else if (a->bits == 16) {
            for (int64_t k = 0; k < K; k++) out[k] = half_to_float(halves[k]);
        } else if (a->bits == 17) {
            for (int64_t k = 0; k < K; k++) {
                uint32_t bits = (uint32_t)halves[k] << 16;
                memcpy(out + k, &bits, 4);
            }
        } else {
            read_packed(a, row, out);
        }
    }
}
