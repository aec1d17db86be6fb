/* Keys and values in 8 bits: codes, and one scale for each token and head (kernels/elementwise/kv_codes.py).
 *
 * An e4m3 code s eeee mmm has the bits of a float32 whose exponent is 120 too small; that float times 2^120 is
 * its value, of the small ones without a leading bit as well. */
#ifndef KV_CODES_H
#define KV_CODES_H
#include "infer.h"

enum { AS_FLOAT, AS_FP8, AS_INT8 };


/* The `count` numbers of a head. */
static inline void decode_codes(int64_t kind, const uint8_t *codes, float scale, float *out, int64_t count) {
    if (kind == AS_FP8)
        for (int64_t h = 0; h < count; h++) {
            uint32_t bits = (uint32_t)(codes[h] & 0x80) << 24 | (uint32_t)(codes[h] & 0x7f) << 20;
            float value;
            memcpy(&value, &bits, 4);
            out[h] = value * 0x1p120f * scale;
        }
    else
        for (int64_t h = 0; h < count; h++) out[h] = (float)(int8_t)codes[h] * scale;
}

/* To the nearest, and to even from the middle; |x| is at most 448. */
static inline uint8_t encode_fp8(float x) {
    float magnitude = x < 0 ? -x : x;
    uint32_t bits, sign;
    memcpy(&sign, &x, 4);
    sign = sign >> 24 & 0x80;
    if (magnitude < 0x1p-6f) { /* here codes are 2^-9 apart, as floats are from 2^14 on: the addition rounds */
        float sum = magnitude + 16384.0f;
        memcpy(&bits, &sum, 4);
        return (uint8_t)(sign | (bits & 0xf));
    }
    memcpy(&bits, &magnitude, 4);
    bits = (bits + 0x7ffff + (bits >> 20 & 1)) >> 20;
    return (uint8_t)(sign | (bits - (120 << 3)));
}

#endif
