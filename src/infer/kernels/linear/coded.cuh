/* The pieces of linear/wgmma.cu for weights of 8 or 4 bits (linear/coded.py has their layout).

   A lane reads its codes in pieces of 16 bytes, makes pairs of bfloat16 of them and hands these to the matrix unit as
   registers. Every code is exact in bfloat16, which has 8 bits of significand:

       int4   128 + q is 0x4300 | q: one instruction for two, and 128 + zero is subtracted
       int8   128 + the lower seven bits, less 128, or 256 where the sign is set: 0x4300 | the sign bit
       fp8    sign, exponent and significand of the first code of two lie in their places, those of the second are
              moved there; 2^120 is what the exponents differ by */

struct Pairs {
    u32 r[4];  // of 16 columns: rows g and g + 8 of columns 2t and 2t + 1, then of 2t + 8 and 2t + 9
};

// An address that the compiler keeps instead of finding it again.
__device__ __forceinline__ u32 held(u32 address) {
    asm volatile("" : "+r"(address));
    return address;
}

__device__ __forceinline__ Piece load_piece(u32 at) {
    Piece piece;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(piece.r[0]), "=r"(piece.r[1]), "=r"(piece.r[2]), "=r"(piece.r[3]) : "r"(at));
    return piece;
}

// Four matrices of 8 tokens by 8 columns, of which a lane names a row and receives two elements each.
__device__ __forceinline__ Piece load_matrices(u32 at) {
    Piece piece;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(piece.r[0]), "=r"(piece.r[1]), "=r"(piece.r[2]), "=r"(piece.r[3]) : "r"(at));
    return piece;
}

__device__ __forceinline__ u32 load_word(u32 at) {
    u32 word;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(word) : "r"(at));
    return word;
}

__device__ __forceinline__ void wait_at(u32 barrier, u32 parity) {
    asm volatile("{ .reg .pred p; again: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1; "
                 "@!p bra again; }" ::"r"(barrier), "r"(parity) : "memory");
}

__device__ __forceinline__ void arrive_at(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ u64 operand_at(u32 at) {
    return ((at & 0x3ffff) >> 4) | (u64)1 << 16 | (u64)(1024 >> 4) << 32 | (u64)1 << 62;
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

// All tokens of several boxes of columns, one after the other.
__device__ __forceinline__ void copy_boxes(char* to, const TensorMap& map, int first_box, u64* barrier) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
                 "[%0], [%1, {%2, %2, %3}], [%4], %5;"
                 ::"r"(shared_address(to)), "l"(&map), "r"(0), "r"(first_box), "r"(shared_address(barrier)), "l"(READ_AGAIN)
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

__device__ __forceinline__ u32 and_or(u32 codes, u32 mask, u32 bits) {  // in one instruction
    asm("lop3.b32 %0, %0, %1, %2, 0xea;" : "+r"(codes) : "r"(mask), "r"(bits));
    return codes;
}

// Two codes of 8 bits in each half of a word: the first ones, or the second ones.
__device__ __forceinline__ u32 of_bytes(u32 codes, bool is_second) {
    if constexpr (WEIGHTS == INT8) {
        const u32 lower = is_second ? codes >> 8 : codes;
        return subtract(and_or(lower, 0x007f007f, OF_128), and_or(lower, 0x00800080, OF_128));
    }
    const u32 moved = is_second ? and_or(codes << 4, 0x80f080f0, codes >> 4 & 0x07000700) : codes & 0x87f087f0;
    return multiply(moved, OF_2_POW_120);
}

// The `step`-th 16 of 64 columns; a zero of each row is in the lower bits of the word with its scale.
__device__ __forceinline__ Pairs pairs_of(const Piece* pieces, int step, const u32* words) {
    Pairs pairs;
    if constexpr (WEIGHTS == INT4) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const u32 zero = (words[i % 2] & 15) * 0x00010001 | OF_128;
            pairs.r[i] = subtract(and_or(pieces[0].r[step] >> 4 * i, LOW_NIBBLES, OF_128), zero);
        }
    } else {
#pragma unroll
        for (int i = 0; i < 4; ++i)
            pairs.r[i] = of_bytes(pieces[step / 2].r[step % 2 * 2 + i / 2], i % 2);
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
