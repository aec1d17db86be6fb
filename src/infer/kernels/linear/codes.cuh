/* Codes of 8 or 4 bits as pairs of bfloat16, for linear/wgmma.cu and linear/pdl.cu (linear/coded.py has the layout).

   A lane reads its codes in pieces of 16 bytes, makes pairs of bfloat16 of them and hands these to the matrix unit as
   registers. Every code is exact in bfloat16, which has 8 bits of significand:

       int4   128 + q is 0x4300 | q: one instruction for two, and 128 + zero is subtracted
       int8   128 + the lower seven bits, less 128, or 256 where the sign is set: 0x4300 | the sign bit
       fp8    sign, exponent and significand of the first code of two lie in their places, those of the second are
              moved there; the exponents differ by 2^120 */

enum Weights { AS_TOKENS, FP8, INT8, INT4 };
constexpr int BITS = WEIGHTS == INT4 ? 4 : 8;
constexpr int BAND_ROWS = 32, CELL = 128;                         // rows of a band, columns of a cell
constexpr int BLOCK_BYTES = 16 * 64 * BITS / 8, PIECES = BITS / 4;  // 16 x 64 weights; pieces for each lane
constexpr bool HAS_SCALES = GROUP && SCALE_ROWS == 1;             // scales are in the cells
constexpr int SCALE_BYTES = HAS_SCALES ? (GROUP < CELL ? CELL / GROUP : 1) * BAND_ROWS * 4 : 0;
constexpr int CODE_BYTES = BAND_ROWS * CELL * BITS / 8, CELL_BYTES = CODE_BYTES + SCALE_BYTES * (1 + MINIMA);

struct Pairs {
    u32 r[4];  // 16 columns: rows g and g + 8 of columns 2t and 2t + 1, then of 2t + 8 and 2t + 9
};

constexpr u32 LOW_NIBBLES = 0x000f000f, OF_128 = 0x43004300, OF_ONE = 0x3f803f80, OF_2_POW_120 = 0x7b807b80;

#ifndef EMULATED

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

__device__ __forceinline__ u32 and_or(u32 codes, u32 mask, u32 bits) {  // one instruction
    asm("lop3.b32 %0, %0, %1, %2, 0xea;" : "+r"(codes) : "r"(mask), "r"(bits));
    return codes;
}

#endif

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

// As `pairs_of`, but scaled and rounded as in a dense matrix: codes (of 4 bits, 128 + q) * scale + shift, in float32.
__device__ __forceinline__ Pairs rounded_pairs(const Piece* pieces, int step, const float* scale, const float* shift) {
    Pairs pairs;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const u32 exact = WEIGHTS == INT4 ? and_or(pieces[0].r[step] >> 4 * i, LOW_NIBBLES, OF_128)
                                          : of_bytes(pieces[step / 2 % PIECES].r[step % 2 * 2 + i / 2], i % 2);
        const float2 code = unpack(exact);
        pairs.r[i] = pack(float2{code.x * scale[i % 2] + shift[i % 2], code.y * scale[i % 2] + shift[i % 2]});
    }
    return pairs;
}

__device__ __forceinline__ float scale_of(u32 word) { return __uint_as_float(WEIGHTS == INT4 ? word & ~15u : word); }
