/* Find the tokens of a row that can be drawn; kernels/sampling/gumbel.py draws one of them.
 *
 * The drawn id has the largest sum of a scaled logit and noise, and noise is a hash of the id: the smaller its
 * 31 bits, the larger the noise. The sum of the likeliest id is computed first. Another id exceeds it only with
 * a logit that is less than NEAR below the largest, or with noise more than NEAR above the noise of the likeliest,
 * in one of e^NEAR hashes. So most ids are ruled out by two comparisons, without a logarithm. */
#include "infer.h"

#define NEAR 7.0
#define SLACK 1.001 /* more than the error of rounding to float32 */

typedef uint32_t vu __attribute__((vector_size(64)));

typedef struct {
    int64_t S;
    const float *logits;
    int64_t stride, V;
    const int64_t *best; /* likeliest id per row; `peak`: its logit */
    const float *peak, *temperature;
    const uint32_t *keys; /* two keys per row */
    int64_t capacity;
    int32_t *ids; /* [S, capacity] */
    float *values;
    int64_t *counts; /* number of ids; if more than `capacity`, not all are written */
} likely_args;

/* The mixer of gumbel.py. */
ALWAYS_INLINE vu hash_ids(vu ids, uint32_t key0, uint32_t key1) {
    vu x = ids * 0x9E3779B1u + key0;
    x ^= x >> 16;
    x *= 0x7FEB352Du;
    x ^= x >> 15;
    x += key1;
    x *= 0x846CA68Bu;
    x ^= x >> 16;
    return x & 0x7FFFFFFFu;
}

/* The largest hash whose noise is more than NEAR above the noise of this hash. */
static uint32_t most_of(uint32_t hash) {
    double noise = -log(-log1p(-(hash + 0.5) * (1.0 - 0x1p-24) * 0x1p-31));
    double most = -expm1(-exp(-(noise + NEAR))) * SLACK * 0x1p31 + 1.0;
    return most < 0x7FFFFFFF ? (uint32_t)most : 0x7FFFFFFFu;
}

void infer_likely(const void *args, int64_t row) {
    const likely_args *a = args;
    const float *logits = a->logits + row * a->stride;
    uint32_t key0 = a->keys[2 * row], key1 = a->keys[2 * row + 1];
    float peak = a->peak[row], temperature = a->temperature[row];
    vu lane;
    for (int i = 0; i < LANES; i++) lane[i] = (uint32_t)i;
    vu most = (vu){0} + most_of(hash_ids((vu){0} + (uint32_t)a->best[row], key0, key1)[0]);
    vf near = splat((float)(peak - NEAR * SLACK * temperature));
    int32_t *ids = a->ids + row * a->capacity;
    float *values = a->values + row * a->capacity;
    int64_t count = 0;
    for (int64_t first = 0; first < a->V; first += LANES) {
        int64_t left = a->V - first;
        vf x = left >= LANES ? load(logits + first) : load_some(logits + first, left);
        vi can_win = (vi)(hash_ids(lane + (uint32_t)first, key0, key1) <= most) | (x >= near);
        int64_t words[LANES / 2], any = 0;
        memcpy(words, &can_win, sizeof words);
        for (int i = 0; i < LANES / 2; i++) any |= words[i];
        if (!any) continue;
        for (int i = 0; i < LANES && i < left; i++) {
            if (!can_win[i]) continue;
            if (count < a->capacity) {
                ids[count] = (int32_t)(first + i);
                values[count] = (logits[first + i] - peak) / temperature;
            }
            count++;
        }
    }
    for (int64_t i = count; i < a->capacity; i++) {
        ids[i] = 0;
        values[i] = -INFINITY;
    }
    a->counts[row] = count;
}
