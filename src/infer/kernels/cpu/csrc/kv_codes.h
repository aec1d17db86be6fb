/* Keys and values in 8 bits: codes, and one scale for each token and head (kernels/elementwise/kv_codes.py). */
#ifndef KV_CODES_H
#define KV_CODES_H
#include "infer.h"

enum { AS_FLOAT, AS_FP8, AS_INT8 };

typedef uint8_t unsigned16 __attribute__((vector_size(16)));

/* 16 e4m3 codes s eeee mmm: the bits of a float32 whose exponent is 120 too small. A code without a leading bit,
 * eeee = 0, has been given one, and half the power of two. */
static inline vf decode_fp8(const uint8_t *codes) {
    unsigned16 bytes;
    memcpy(&bytes, codes, 16);
    vi x = __builtin_convertvector(bytes, vi);
    vf magnitude = (vf)(((x & 0x7f) << 20) + (120 << 23));
    magnitude = choose((x & 0x78) == 0, magnitude * 2.0f - 0x1p-6f, magnitude);
    return (vf)((vi)magnitude | (x & 0x80) << 24);
}

static inline vf decode_int8(const uint8_t *codes) {
    bytes16 bytes;
    memcpy(&bytes, codes, 16);
    return __builtin_convertvector(bytes, vf);
}

/* The `count` numbers of a head. */
static inline void decode_codes(int64_t kind, const uint8_t *codes, float scale, float *out, int64_t count) {
    int64_t h = 0;
    if (kind == AS_FP8)
        for (; h + 16 <= count; h += 16) store(out + h, decode_fp8(codes + h) * scale);
    else
        for (; h + 16 <= count; h += 16) store(out + h, decode_int8(codes + h) * scale);
    if (h == count) return;
    uint8_t rest[16] = {0};
    memcpy(rest, codes + h, (size_t)(count - h));
    store_some(out + h, (kind == AS_FP8 ? decode_fp8(rest) : decode_int8(rest)) * scale, count - h);
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
