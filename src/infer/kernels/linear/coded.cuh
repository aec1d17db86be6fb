/* The pieces of linear/wgmma.cu for weights of 8 or 4 bits (linear/coded.py has their layout).

   A lane reads its codes in pieces of 16 bytes, makes pairs of bfloat16 of them and hands these to the matrix unit as
   registers. Every code is exact in bfloat16, which has 8 bits of significand:

       int4   128 + q is 0x4300 | q: one instruction for two, and 128 + zero is subtracted
       int8   128 + the lower seven bits, less 128, or 256 where the sign is set: 0x4300 | the sign bit
       fp8    sign, exponent and significand moved to their places; 2^120 is what the exponents differ by */

struct Pairs {
    u32 r[4];  // of 16 columns: rows g and g + 8 of columns 2t and 2t + 1, then of 2t + 8 and 2t + 9
};

__device__ __forceinline__ Piece load_codes(const char* at) {
    Piece piece;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(piece.r[0]), "=r"(piece.r[1]), "=r"(piece.r[2]), "=r"(piece.r[3]) : "r"(shared_address(at)));
    return piece;
}

__device__ __forceinline__ float load_scale(const float* at) {
    float value;
    asm volatile("ld.global.nc.f32 %0, [%1];" : "=f"(value) : "l"(at));
    return value;
}

// As many bytes as lie together, a multiple of 16.
__device__ __forceinline__ void copy_bytes(void* to, const void* from, int num_bytes, u64* barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;"
                 ::"r"(shared_address(to)), "l"(from), "r"(num_bytes), "r"(shared_address(barrier)), "l"(READ_ONCE)
                 : "memory");
}

// ---- numbers --------------------------------------------------------------------------------------

constexpr u32 LOW_NIBBLES = 0x000f000f, OF_128 = 0x43004300, OF_ONE = 0x3f803f80, OF_2_POW_120 = 0x7b807b80;

__device__ __forceinline__ u32 subtract(u32 a, u32 b) {
    u32 difference;
    asm("sub.rn.bf16x2 %0, %1, %2;" : "=r"(difference) : "r"(a), "r"(b));
    return difference;
}

__device__ __forceinline__ u32 multiply(u32 a, u32 b) {
    u32 product;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
    return product;
}

__device__ __forceinline__ u32 of_bytes(u32 codes) {  // the lower one of each half
    if constexpr (WEIGHTS == INT8) return subtract(codes & 0x007f007f | OF_128, codes & 0x00800080 | OF_128);
    return multiply((codes & 0x00800080) << 8 | (codes & 0x007f007f) << 4, OF_2_POW_120);
}

// The `step`-th 16 of 64 columns; a zero of each row is in the lower bits of the word with its scale.
__device__ __forceinline__ Pairs pairs_of(const Piece* pieces, int step, const u32* words) {
    Pairs pairs;
    if constexpr (WEIGHTS == INT4) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const u32 zero = (words[i % 2] & 15) * 0x00010001 | OF_128;
            pairs.r[i] = subtract(pieces[0].r[step] >> 4 * i & LOW_NIBBLES | OF_128, zero);
        }
    } else {
#pragma unroll
        for (int i = 0; i < 4; ++i)
            pairs.r[i] = of_bytes(pieces[step / 2].r[step % 2 * 2 + i / 2] >> i % 2 * 8);
    }
    return pairs;
}

__device__ __forceinline__ float scale_of(u32 word) { return __uint_as_float(WEIGHTS == INT4 ? word & ~15u : word); }

// ---- the matrix unit, W from registers ----------------------------------------------------------------

#define LEFT(a, b, c, d, x) "}, {%" #a ", %" #b ", %" #c ", %" #d "}, %" #x ", "
#define ANEW "0, 1, 1, 0; }"  // sums = W x
#define MORE "1, 1, 1, 0; }"  // sums += W x
#define OPERANDS_OF_PAIRS "r"(w.r[0]), "r"(w.r[1]), "r"(w.r[2]), "r"(w.r[3]), "l"(x)
#define SUMS_OF_8 "%0, %1, %2, %3"
#define PRODUCT(how)                                                                                             \
    if constexpr (NUM_TOKENS == 8) {                                                                             \
        asm volatile(WGMMA(8) SUMS_OF_8 LEFT(4, 5, 6, 7, 8) how : OF_4(s) : OPERANDS_OF_PAIRS);                  \
    } else if constexpr (NUM_TOKENS == 16) {                                                                     \
        asm volatile(WGMMA(16) SUMS_0 LEFT(8, 9, 10, 11, 12) how : OF_8(s) : OPERANDS_OF_PAIRS);                 \
    } else if constexpr (NUM_TOKENS == 32) {                                                                     \
        asm volatile(WGMMA(32) SUMS_0 SUMS_1 LEFT(16, 17, 18, 19, 20) how : OF_16(s) : OPERANDS_OF_PAIRS);       \
    } else if constexpr (NUM_TOKENS == 48) {                                                                     \
        asm volatile(WGMMA(48) SUMS_0 SUMS_1 SUMS_2 LEFT(24, 25, 26, 27, 28) how                                 \
                     : OF_16(s), OF_8((s) + 16) : OPERANDS_OF_PAIRS);                                            \
    } else if constexpr (NUM_TOKENS == 64) {                                                                     \
        asm volatile(WGMMA(64) SUMS_0 SUMS_1 SUMS_2 SUMS_3 LEFT(32, 33, 34, 35, 36) how                          \
                     : OF_32(s) : OPERANDS_OF_PAIRS);                                                            \
    } else if constexpr (NUM_TOKENS == 96) {                                                                     \
        asm volatile(WGMMA(96) SUMS_0 SUMS_1 SUMS_2 SUMS_3 SUMS_4 LEFT(48, 49, 50, 51, 52) how                   \
                     : OF_32(s), OF_16((s) + 32) : OPERANDS_OF_PAIRS);                                           \
    } else {                                                                                                     \
        asm volatile(WGMMA(128) SUMS_0 SUMS_1 SUMS_2 SUMS_3 SUMS_4 SUMS_6 LEFT(64, 65, 66, 67, 68) how           \
                     : OF_32(s), OF_32((s) + 32) : OPERANDS_OF_PAIRS);                                           \
    }

// 64 rows of W times all tokens over 16 columns: the warpgroup's sums, or added to them.
template <int NUM_TOKENS>
__device__ __forceinline__ void add_product(float* s, const Pairs& w, u64 x, bool is_first) {
    if (is_first) {
        PRODUCT(ANEW)
    } else {
        PRODUCT(MORE)
    }
}

// After the wait: what is read of the sums stays below it.
template <int COUNT>
__device__ __forceinline__ void take(float* sums) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) asm volatile("" : "+f"(sums[i])::"memory");
}
