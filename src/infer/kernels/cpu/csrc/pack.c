/* Pack weights into the layout of linear.h, and unpack single rows.
 *
 * A row can be packed at any place in its matrix: the parts of a fused matrix arrive one by one, and
 * their boundaries need not be boundaries of tiles. Scale and minimum are rounded to float16 *before* the weights
 * are quantised with them, so their rounding costs almost no accuracy.
 *
 * An embedding that is tied to the head is not stored twice: rows are read from the packed head. */
#include "linear.h"

typedef struct {
    int64_t num_rows;
    const float *rows;     /* [num_rows][K], or NULL: `q`, `d` and in int4 `m` hold quantised weights */
    const int8_t *q;       /* [num_rows][K] */
    const uint16_t *d, *m; /* [num_rows][K / 32]; in int6, m has the scales of second halves */
    int64_t K;
    int64_t first_row;     /* first of these rows in the matrix */
    uint8_t *data;
    uint16_t *scales;
    int64_t bits;
    int64_t rows_per_chunk;
} pack_args;

static inline uint16_t float_to_half(float value) {
#if defined(HAVE_AVX512) || defined(HAVE_AVX2)
    return (uint16_t)_mm_extract_epi16(_mm_cvtps_ph(_mm_set_ss(value), _MM_FROUND_TO_NEAREST_INT), 0);
#else
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
#endif
}

enum { NAN_SCALE = 0x7e00 };

/* A group of weights, each d * q + m; m is 0 in int8, and the scale of the second half in int6. */
typedef struct {
    int8_t q[GROUP] __attribute__((aligned(16)));
    uint16_t d, m;
} group;

static void put_group(const pack_args *a, int64_t row, int64_t g, int64_t groups, const group *w) {
    int64_t cell = (row / LANES) * groups + g;
    int64_t lane = row % LANES;
    if (a->bits == 8) {
        a->scales[cell * LANES + lane] = w->d;
        uint8_t *out = a->data + cell * 512 + lane * 4;
        for (int v = 0; v < 8; v++)
            for (int k = 0; k < 4; k++) out[v * 64 + k] = (uint8_t)(w->q[v * 4 + k] + INT8_OFFSET);
    } else {
        a->scales[cell * 2 * LANES + lane] = w->d;
        a->scales[(cell * 2 + 1) * LANES + lane] = w->m;
        uint8_t *out = a->data + cell * a->bits * 64 + lane * 4;
        for (int v = 0; v < 4; v++)
            for (int k = 0; k < 4; k++)
                out[v * 64 + k] = (uint8_t)((w->q[v * 4 + k] & 15) | (w->q[v * 4 + k + 16] & 15) << 4);
        for (int64_t plane = 0, width = a->bits - 4; plane < width; plane++)
            for (int k = 0; k < 4; k++) {
                int bits = 0;
                for (int64_t v = 0; v < 8 / width; v++) bits |= w->q[(plane * 4 + v) * 4 + k] >> 4 << v * width;
                out[(4 + plane) * 64 + k] = (uint8_t)bits;
            }
    }
}

/* 32 floats: packing a model takes minutes of arithmetic with them. */
typedef struct {
    vf low, high;
} vf32;

ALWAYS_INLINE float sum_group(vf32 terms) {
#if defined(HAVE_AVX512)
    return _mm512_reduce_add_ps((__m512)(terms.low + terms.high)); /* the tree of sum_lanes */
#else
    return sum_lanes(terms.low + terms.high);
#endif
}

/* Round weights to the nearest integers from `least` to `most`. */
ALWAYS_INLINE vf divide_lanes(vf w, float inverse, float minimum, float least, float most) {
    vf exact = smaller(larger((w - minimum) * inverse, splat(least)), splat(most));
    return exact + 12582912.0f - 12582912.0f; /* 1.5 * 2^23: adding it rounds to an integer */
}
ALWAYS_INLINE vf32 divide(vf32 w, float scale, float minimum, float least, float most) {
    float inverse = scale != 0.0f ? 1.0f / scale : 0.0f;
    return (vf32){divide_lanes(w.low, inverse, minimum, least, most),
                  divide_lanes(w.high, inverse, minimum, least, most)};
}

ALWAYS_INLINE void put_bytes(vf32 q, int8_t *out) {
    *(bytes16 *)out = __builtin_convertvector(__builtin_convertvector(q.low, vi), bytes16);
    *(bytes16 *)(out + 16) = __builtin_convertvector(__builtin_convertvector(q.high, vi), bytes16);
}

ALWAYS_INLINE float squared_error(vf32 w, float scale, float minimum, vf32 q) {
    vf low = w.low - minimum - q.low * scale, high = w.high - minimum - q.high * scale;
    return sum_group((vf32){low * low, high * high});
}

/* A scale, and the position of its 0 above the smallest weight of the group. */
typedef struct {
    float scale, bottom;
} ruler;

/* Fit a line to the points (q, height) by least squares: its slope is the best scale for these integers, and its
 * value at q = 0 the best bottom. */
ALWAYS_INLINE void fit_line(vf32 heights, float sum_heights, vf32 q, ruler *r) {
    float sum_q = sum_group(q), sum_squares = sum_group((vf32){q.low * q.low, q.high * q.high});
    float sum_products = sum_group((vf32){q.low * heights.low, q.high * heights.high});
    float spread = GROUP * sum_squares - sum_q * sum_q; /* integers below 2^24: exact */
    if (!(spread > 0.0f)) return;                       /* all integers are equal */
    r->scale = (GROUP * sum_products - sum_q * sum_heights) / spread;
    r->bottom = (sum_heights - r->scale * sum_q) / GROUP;
}

/* Quantise to 0 .. 15, starting from the range from the smallest weight to the largest, and from ranges that leave out
 * a little at either end, where few weights are. For each, the integers and their line are improved in turns. The
 * four are interleaved, so that the processor can compute them in parallel. */
static void quantize_int4(vf32 w, group *out) {
    enum { ROUNDS = 3, RULERS = 4 };
    const float little = 0.06f;
    float least = -peak_of_lanes(larger(-w.low, -w.high)), range = peak_of_lanes(larger(w.low, w.high)) - least;
    vf32 heights = {w.low - least, w.high - least}; /* small numbers, whose differences lose little precision */
    float sum_heights = sum_group(heights), best_error = INFINITY;
    ruler rulers[RULERS] = {{range / 15.0f, 0.0f},
                            {range * (1.0f - little) / 15.0f, 0.0f},
                            {range * (1.0f - little) / 15.0f, range * little},
                            {range * (1.0f - 2.0f * little) / 15.0f, range * little}};
    for (int round = 0; round < ROUNDS && best_error > 0.0f; round++) {
#pragma GCC unroll 4
        for (int i = 0; i < RULERS; i++) {
            uint16_t d = float_to_half(rulers[i].scale), m = float_to_half(least + rulers[i].bottom);
            vf32 q = divide(w, half_to_float(d), half_to_float(m), 0.0f, 15.0f);
            float error = squared_error(w, half_to_float(d), half_to_float(m), q);
            int is_better = error < best_error;
            best_error = is_better ? error : best_error;
            out->d = is_better ? d : out->d;
            out->m = is_better ? m : out->m;
            fit_line(heights, sum_heights, q, rulers + i);
        }
    }
    if (best_error == INFINITY) out->d = NAN_SCALE; /* too large for float16 */
    put_bytes(divide(w, half_to_float(out->d), half_to_float(out->m), 0.0f, 15.0f), out->q);
}

/* Quantise a group. One with a NaN, an infinity or weights too large for float16 gets a scale that is not finite, so
 * that the problem is not hidden. */
static void quantize_group(const float *weights, int64_t bits, group *out) {
    vf32 w = {load(weights), load(weights + LANES)};
    if (!(sum_group((vf32){w.low * 0.0f, w.high * 0.0f}) == 0.0f)) {
        out->d = NAN_SCALE;
    } else if (bits == 8) {
        out->d = float_to_half(peak_of_lanes(larger(absolute(w.low), absolute(w.high))) / 127.0f);
        put_bytes(divide(w, half_to_float(out->d), 0.0f, -127.0f, 127.0f), out->q);
    } else {
        quantize_int4(w, out);
    }
}

void infer_pack(const void *args, int64_t chunk) {
    const pack_args *a = args;
    int64_t groups = (a->K + GROUP - 1) / GROUP;
    int64_t first = chunk * a->rows_per_chunk, last = first + a->rows_per_chunk;
    if (last > a->num_rows) last = a->num_rows;
    for (int64_t row = first; row < last; row++)
        for (int64_t g = 0; g < groups; g++) {
            group packed = {0};
            int64_t left = a->K - g * GROUP, count = left < GROUP ? left : GROUP, at = row * a->K + g * GROUP;
            if (a->rows) {
                float w[GROUP];
                memcpy(w, a->rows + at, (size_t)count * sizeof(float));
                for (int64_t k = count; k < GROUP; k++) w[k] = w[k - count]; /* padding that does not widen the range */
                quantize_group(w, a->bits, &packed);
            } else {
                memcpy(packed.q, a->q + at, (size_t)count);
                packed.d = a->d[row * groups + g];
                if (a->bits != 8) packed.m = a->m[row * groups + g];
            }
            put_group(a, a->first_row + row, g, groups, &packed);
        }
}

typedef struct {
    int64_t T;
    const int64_t *ids; /* [T] */
    float *out;         /* [T][K] */
    int64_t K, num_rows;
    const uint8_t *data;
    const uint16_t *scales;
    int64_t bits; /* 8, 6, 5, 4 or MXFP4: packed as above; 16: float16, 17: bfloat16, 32: float32, [num_rows][K] */
    int64_t rows_per_chunk;
} embed_args;

static void read_packed(const embed_args *a, int64_t row, float *out) {
    int64_t groups = (a->K + GROUP - 1) / GROUP, lane = row % LANES;
    for (int64_t g = 0; g < groups; g++) {
        int64_t cell = row / LANES * groups + g, left = a->K - g * GROUP, count = left < GROUP ? left : GROUP;
        const uint8_t *data = a->data + cell * BITS_OF(a->bits) * 64 + lane * 4;
        if (a->bits == 8) {
            float d = half_to_float(a->scales[cell * LANES + lane]);
            for (int64_t k = 0; k < count; k++)
                out[g * GROUP + k] = d * (float)(int8_t)(uint8_t)(data[k / 4 * 64 + k % 4] - INT8_OFFSET);
        } else {
            float d = half_to_float(a->scales[cell * 2 * LANES + lane]);
            float m = half_to_float(a->scales[(cell * 2 + 1) * LANES + lane]);
            static const int table[16] = {MXFP4_TABLE};
            for (int64_t k = 0; k < count; k++) {
                uint8_t raw = data[k / 4 % 4 * 64 + k % 4], q = k < 16 ? raw & 15 : raw >> 4;
                if (a->bits == 5) q |= (data[256 + k % 4] >> k / 4 & 1) << 4;
                if (a->bits == 6) q |= (data[256 + k / 16 * 64 + k % 4] >> k / 4 % 4 * 2 & 3) << 4;
                if (a->bits == 6) out[g * GROUP + k] = (k < 16 ? d : m) * (float)(q - INT6_OFFSET);
                else out[g * GROUP + k] = d * (float)(a->bits == MXFP4 ? table[q] : q) + m;
            }
        }
    }
}

/* Look up rows of an embedding as floats; an id outside the table gives a row of NaN instead of an invalid read.
 * INT64_MIN stands for an id that belongs to another rank, and gives zeros (collectives.c). */
void infer_embed(const void *args, int64_t chunk) {
    const embed_args *a = args;
    int64_t first = chunk * a->rows_per_chunk, last = first + a->rows_per_chunk, K = a->K;
    if (last > a->T) last = a->T;
    for (int64_t t = first; t < last; t++) {
        int64_t row = a->ids[t];
        float *out = a->out + t * K;
        const uint16_t *halves = (const uint16_t *)a->data + (row < 0 ? 0 : row) * K;
        if (row < 0 || row >= a->num_rows) {
            for (int64_t k = 0; k < K; k++) out[k] = row == INT64_MIN ? 0.0f : NAN;
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
