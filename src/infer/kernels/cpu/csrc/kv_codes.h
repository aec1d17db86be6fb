/* Keys and values in 8 bits: codes, and one scale per token and head (kernels/elementwise/kv_codes.py). */
#ifndef KV_CODES_H
#define KV_CODES_H
#include "infer.h"

enum { AS_FLOAT, AS_FP8, AS_INT8 };

typedef uint8_t unsigned16 __attribute__((vector_size(16)));

/* Decode 16 codes to numbers, without their scale.
 *
 * An e4m3 code is s eeee mmm. If an instruction converts half precision, the code is expanded to a half that is 2^8
 * too small. Otherwise its bits form a float32 whose exponent is 120 too small; a subnormal code (eeee = 0) then gets
 * an implicit leading bit and half the power of two, which is corrected. */
#if defined(HAVE_AVX512)
static inline vf decode_fp8(__m128i codes) {
    __m256i halves = _mm256_and_si256(_mm256_slli_epi16(_mm256_cvtepi8_epi16(codes), 7), _mm256_set1_epi16(-0x4001));
    return (vf)_mm512_cvtph_ps(halves) * 256.0f;
}
static inline vf decode_int8(__m128i codes) { return (vf)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(codes)); }
static inline vf decode_16(int64_t kind, const uint8_t *codes) {
    __m128i bytes = _mm_loadu_si128((const __m128i *)codes);
    return kind == AS_FP8 ? decode_fp8(bytes) : decode_int8(bytes);
}
#else
static inline vf decode_16(int64_t kind, const uint8_t *codes) {
    if (kind == AS_INT8) {
        bytes16 bytes;
        memcpy(&bytes, codes, 16);
        return __builtin_convertvector(bytes, vf);
    }
    unsigned16 bytes;
    memcpy(&bytes, codes, 16);
    vi x = __builtin_convertvector(bytes, vi);
    vf magnitude = (vf)(((x & 0x7f) << 20) + (120 << 23));
    magnitude = choose((x & 0x78) == 0, magnitude * 2.0f - 0x1p-6f, magnitude);
    return (vf)((vi)magnitude | (x & 0x80) << 24);
}
#endif

/* Decode the `count` numbers of a head, without their scale. */
static inline void decode_codes(int64_t kind, const uint8_t *codes, float *out, int64_t count) {
    int64_t h = 0;
    if (kind == AS_FP8) /* two loops, so that the kind is not tested again for every 16 codes */
        for (; h + 16 <= count; h += 16) store(out + h, decode_16(AS_FP8, codes + h));
    else
        for (; h + 16 <= count; h += 16) store(out + h, decode_16(AS_INT8, codes + h));
    if (h == count) return;
    uint8_t rest[16] = {0};
    memcpy(rest, codes + h, (size_t)(count - h));
    store_some(out + h, decode_16(kind, rest), count - h);
}

/* Round to nearest, ties to even; |x| is at most 448. */
static inline uint8_t encode_fp8(float x) {
    float magnitude = x < 0 ? -x : x;
    uint32_t bits, sign;
    memcpy(&sign, &x, 4);
    sign = sign >> 24 & 0x80;
    if (magnitude < 0x1p-6f) { /* codes are 2^-9 apart here, like floats from 2^14 on: the addition rounds */
        float sum = magnitude + 16384.0f;
        memcpy(&bits, &sum, 4);
        return (uint8_t)(sign | (bits & 0xf));
    }
    memcpy(&bits, &magnitude, 4);
    bits = (bits + 0x7ffff + (bits >> 20 & 1)) >> 20;
    return (uint8_t)(sign | (bits - (120 << 3)));
}

#endif
