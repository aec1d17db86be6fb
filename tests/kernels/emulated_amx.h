/* AMX and VNNI in C, for a processor with AVX-512 alone: given to the compiler before linear.c, with -D__AMX_INT8__.
 *
 * Eight tiles of 16 rows of 64 bytes, as a tile_config describes them. What a processor refuses stops the program:
 * a tile that was not configured, or shapes that do not fit together. */
#include <immintrin.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#undef __AVX512VNNI__ /* not before the compiler's own headers, which would use its instructions */
#define __AVX512VNNI__ 1

static uint8_t amx_tiles[8][16][64], amx_rows[8];
static uint16_t amx_bytes[8];

static inline void amx_configure(const void *config) {
    memcpy(amx_bytes, (const uint8_t *)config + 16, sizeof amx_bytes);
    memcpy(amx_rows, (const uint8_t *)config + 48, sizeof amx_rows);
    if (*(const uint8_t *)config != 1) abort();
}
static inline void amx_release(void) { memset(amx_rows, 0, sizeof amx_rows); }
static inline void amx_zero(int t) { amx_rows[t] ? (void)memset(amx_tiles[t], 0, sizeof amx_tiles[t]) : abort(); }
static inline void amx_load(int t, const void *from, int64_t stride) {
    if (!amx_rows[t]) abort();
    for (int i = 0; i < amx_rows[t]; i++) memcpy(amx_tiles[t][i], (const uint8_t *)from + i * stride, amx_bytes[t]);
}
static inline void amx_store(int t, void *to, int64_t stride) {
    if (!amx_rows[t]) abort();
    for (int i = 0; i < amx_rows[t]; i++) memcpy((uint8_t *)to + i * stride, amx_tiles[t][i], amx_bytes[t]);
}
/* c += a b, bytes of a signed, of b unsigned, four at a time. */
static inline void amx_multiply(int c, int a, int b) {
    if (amx_rows[c] != amx_rows[a] || amx_bytes[c] != amx_bytes[b] || amx_bytes[a] != 4 * amx_rows[b]) abort();
    for (int i = 0; i < amx_rows[c]; i++)
        for (int j = 0; j < amx_bytes[c] / 4; j++) {
            int32_t sum;
            memcpy(&sum, amx_tiles[c][i] + 4 * j, 4);
            for (int k = 0; k < amx_bytes[a]; k++) sum += (int8_t)amx_tiles[a][i][k] * amx_tiles[b][k / 4][4 * j + k % 4];
            memcpy(amx_tiles[c][i] + 4 * j, &sum, 4);
        }
}

#define _tile_loadconfig(config) amx_configure(config)
#define _tile_release() amx_release()
#define _tile_zero(t) amx_zero(t)
#define _tile_loadd(t, from, stride) amx_load(t, from, stride)
#define _tile_stored(t, to, stride) amx_store(t, to, stride)
#define _tile_dpbsud(c, a, b) amx_multiply(c, a, b)
/* Four products of unsigned and signed bytes, in 16 bits by two, which 32 bits then have room for. */
__attribute__((noinline)) static __m512i vnni_add(__m512i sum, __m512i weights, const int8_t *four) {
    int32_t bits;
    memcpy(&bits, four, 4);
    const __m512i x = _mm512_set1_epi32(bits);
    const __m512i even = _mm512_and_si512(weights, _mm512_set1_epi16(255)), odd = _mm512_srli_epi16(weights, 8);
    const __m512i low = _mm512_srai_epi16(_mm512_slli_epi16(x, 8), 8), high = _mm512_srai_epi16(x, 8);
    return _mm512_add_epi32(sum, _mm512_add_epi32(_mm512_madd_epi16(even, low), _mm512_madd_epi16(odd, high)));
}
#define ADD_PRODUCTS(sum, weights, four) (sum = (vri)vnni_add((__m512i)(sum), (__m512i)(weights), four))

#define syscall(...) 0 /* the system allows it */
