/* Writes of keys and values to the cache, as floats or as codes of 8 bits. */
#include "kv_codes.h"

typedef struct {
    int64_t T;
    const float *k, *v; /* [T][G][H], the heads of a token are contiguous */
    int64_t k_stride, v_stride;
    void *keys, *values;              /* [slots][G][H]: floats or codes */
    float *key_scales, *value_scales; /* scales of codes: [blocks][G][block_size] */
    const int64_t *slots;             /* [T]; -1 is padding: nothing is written for it */
    const float *fixed;               /* [2][G]: fixed scales of keys and values; NULL: computed per head */
    int64_t kind, G, H, block_size;
    int64_t tokens_per_chunk;
} write_args;

static void write_head(int64_t kind, const float *x, uint8_t *codes, float *scale, int64_t H, const float *fixed) {
    float largest = 0.0f;
    for (int64_t h = 0; h < H; h++) {
        float magnitude = fabsf(x[h]);
        if (!(magnitude <= largest) && largest == largest) largest = magnitude; /* NaN stays: the scale is NaN */
    }
    if (largest < 1e-30f) largest = 0.0f; /* its scale has no inverse */
    const float top = kind == AS_FP8 ? 448.0f : 127.0f;
    const float inverse = fixed ? 1.0f / *fixed : largest == 0.0f ? 0.0f : top / largest;
    *scale = fixed ? *fixed + largest * 0.0f : largest * (1.0f / top);
    if (!(largest <= 0x1.fffffep127f)) /* not finite: only the scale shows it */
        memset(codes, 0, (size_t)H);
    else if (kind == AS_FP8)
        for (int64_t h = 0; h < H; h++) codes[h] = encode_fp8(fmaxf(-top, fminf(top, x[h] * inverse)));
    else
        for (int64_t h = 0; h < H; h++) codes[h] = (uint8_t)(int8_t)rintf(x[h] * inverse);
}

void infer_write_cache(const void *args, int64_t chunk) {
    const write_args *a = args;
    const size_t token_bytes = (size_t)(a->G * a->H) * sizeof(float);
    int64_t first = chunk * a->tokens_per_chunk, last = first + a->tokens_per_chunk;
    if (last > a->T) last = a->T;
    for (int64_t t = first; t < last; t++) {
        const int64_t slot = a->slots[t], H = a->H;
        if (slot < 0) continue;
        if (a->kind == AS_FLOAT) {
            memcpy((float *)a->keys + slot * a->G * H, a->k + t * a->k_stride, token_bytes);
            memcpy((float *)a->values + slot * a->G * H, a->v + t * a->v_stride, token_bytes);
            continue;
        }
        for (int64_t g = 0; g < a->G; g++) {
            const int64_t head = (slot * a->G + g) * H;
            const int64_t scale = (slot / a->block_size * a->G + g) * a->block_size + slot % a->block_size;
            write_head(a->kind, a->k + t * a->k_stride + g * H, (uint8_t *)a->keys + head, a->key_scales + scale, H,
                       a->fixed ? a->fixed + g : NULL);
            write_head(a->kind, a->v + t * a->v_stride + g * H, (uint8_t *)a->values + head, a->value_scales + scale,
                       H, a->fixed ? a->fixed + a->G + g : NULL);
        }
    }
}
