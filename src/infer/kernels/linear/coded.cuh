/* The parts of linear/wgmma.cu for weights of 8 or 4 bits: copies, reads, and products with W from registers. */

// An address that the compiler keeps in a register instead of recomputing it.
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

// Four matrices of 8 tokens by 8 columns: a lane passes the address of one row and receives two elements of each.
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

__device__ __forceinline__ float load_float(const float* at) {  // not .nc: the previous kernel wrote it
    float value;
    asm volatile("ld.global.f32 %0, [%1];" : "=f"(value) : "l"(at) : "memory");
    return value;
}

// Load the table of a row, rounded to bfloat16.
__device__ __forceinline__ Table load_table(const float* at) {
    Table table;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        float4 four;
        asm volatile("ld.global.nc.v4.f32 {%0, %1, %2, %3}, [%4];"
                     : "=f"(four.x), "=f"(four.y), "=f"(four.z), "=f"(four.w) : "l"(at + 4 * i));
        const u32 first = pack(float2{four.x, four.y}), second = pack(float2{four.z, four.w});
        table.low[i] = __byte_perm(first, second, 0x6420);
        table.high[i] = __byte_perm(first, second, 0x7531);
    }
    return table;
}

constexpr u64 READ_TWICE = 0x1000000000000000;  // normal eviction priority in L2

// Copy contiguous bytes, a multiple of 16.
__device__ __forceinline__ void copy_bytes(void* to, const void* from, int num_bytes, u64* barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;"
                 ::"r"(shared_address(to)), "l"(from), "r"(num_bytes), "r"(shared_address(barrier)), "l"(MANY ? READ_TWICE : READ_ONCE)
                 : "memory");
}

// Copy all tokens of several boxes of columns, one box after the other.
__device__ __forceinline__ void copy_boxes(char* to, const TensorMap& map, int first_token, int first_box, u64* barrier) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
                 "[%0], [%1, {%2, %3, %4}], [%5], %6;"
                 ::"r"(shared_address(to)), "l"(&map), "r"(0), "r"(first_token), "r"(first_box), "r"(shared_address(barrier)), "l"(READ_AGAIN)
                 : "memory");
}

// ---- tensor cores, W from registers -------------------------------------------------------------------

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

// Multiply 64 rows of W by all tokens over 16 columns, and store in the warpgroup's sums or add to them.
template <int NUM_TOKENS>
__device__ __forceinline__ void add_product(float* s, const Pairs& w, u64 x, bool is_first) {
    if (is_first) {
        PRODUCT(ANEW)
    } else {
        PRODUCT(MORE)
    }
}

// All 32 columns of a piece of FP8 codes: each register has four codes of row g, or of row g + 8. They are the columns
// 2t, 2t + 1, 2t + 8, 2t + 9 of each 16, where the tensor cores read 4t .. 4t + 3. The lower byte of each half has the
// last four bits of both codes, the upper byte their first four: the sign of one, three bits of the other, and again.
__device__ __forceinline__ Pairs quads_of(const Piece& piece) {
    Pairs quads;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const u32 lower = __byte_perm(piece.r[2 * i], piece.r[2 * i + 1], 0x6420);
        const u32 upper = __byte_perm(piece.r[2 * i], piece.r[2 * i + 1], 0x7531), moved = upper << 4;
        quads.r[2 * i] = choose(choose(upper, moved, 0x80808080), lower >> 4, 0xf0f0f0f0);
        quads.r[2 * i + 1] = choose(choose(upper, moved, 0x70707070), lower, 0xf0f0f0f0);
    }
    return quads;
}

#define QUADS(tokens) "{ wgmma.mma_async.sync.aligned.m64n" #tokens "k32.f32.e4m3.e4m3 {"

// Like `add_product`, over 32 columns with both operands in FP8.
template <int NUM_TOKENS>
__device__ __forceinline__ void add_product_of_codes(float* s, const Pairs& w, u64 x) {
    static_assert(NUM_TOKENS == 96 || NUM_TOKENS == 128, "where there are many tokens");
    if constexpr (NUM_TOKENS == 96) {
        asm volatile(QUADS(96) SUMS_0 SUMS_1 SUMS_2 SUMS_3 SUMS_4 LEFT(48, 49, 50, 51, 52) "1, 1, 1; }"
                     : OF_32(s), OF_16((s) + 32) : OPERANDS_OF_PAIRS);
    } else {
        asm volatile(QUADS(128) SUMS_0 SUMS_1 SUMS_2 SUMS_3 SUMS_4 SUMS_6 LEFT(64, 65, 66, 67, 68) "1, 1, 1; }"
                     : OF_32(s), OF_32((s) + 32) : OPERANDS_OF_PAIRS);
    }
}

// Called after the wait, so that no read of the sums moves above it.
template <int COUNT>
__device__ __forceinline__ void take(float* sums) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) asm volatile("" : "+f"(sums[i])::"memory");
}
