/* Codes of 8 or 4 bits as pairs of bfloat16, for linear/wgmma.cu and linear/pdl.cu (linear/coded.py has the layout).

   A lane reads its codes in pieces of 16 bytes, converts them to pairs of bfloat16 and passes these to the tensor cores
   in registers. Every code is exact in bfloat16, which has 8 bits of significand:

       int4   128 + q is 0x4300 | q: one instruction for two codes; then 128 + zero is subtracted
       int8   128 + the lower seven bits, minus 128, or minus 256 if the sign is set: 0x4300 | the sign bit
       fp8    sign, exponent and significand of the first code of two are in their places, and the second code's are
              moved there; the exponents differ by 2^120
       e5m2   both are moved there; the exponents differ by 2^112
       lut4   a code is an index into the table of its row, which a lane has in registers: one instruction picks four
              bytes out of eight, so two of them and a select find the lower bytes of four numbers out of sixteen, and
              as many find the upper ones; table values are rounded to bfloat16
       nf4, fp4    one table for the matrix: shared memory has all 256 pairs of its numbers, in COPIES adjacent copies,
              so that at most two lanes read from one bank */

enum Weights { AS_TOKENS, FP8, INT8, INT4, E5M2, LUT4, NF4, FP4 };
constexpr bool ONE_TABLE = WEIGHTS == NF4 || WEIGHTS == FP4, HAS_TABLE = ONE_TABLE || WEIGHTS == LUT4;
constexpr int BITS = WEIGHTS == INT4 || HAS_TABLE ? 4 : 8;
constexpr int COPIES = 16;
constexpr int BAND_ROWS = 32, CELL = 128;                         // rows of a band, columns of a cell
constexpr int BLOCK_BYTES = 16 * 64 * BITS / 8, PIECES = BITS / 4;  // 16 x 64 weights; pieces for each lane
constexpr bool HAS_SCALES = GROUP && SCALE_ROWS == 1;             // scales are in the cells
constexpr int SCALE_BYTES = HAS_SCALES ? (GROUP < CELL ? CELL / GROUP : 1) * BAND_ROWS * 4 : 0;
constexpr int CODE_BYTES = BAND_ROWS * CELL * BITS / 8, CELL_BYTES = CODE_BYTES + SCALE_BYTES * (1 + MINIMA);

struct Pairs {
    u32 r[4];  // 16 columns: rows g and g + 8 of columns 2t and 2t + 1, then of 2t + 8 and 2t + 9
};

constexpr u32 LOW_NIBBLES = 0x000f000f, OF_128 = 0x43004300, OF_ONE = 0x3f803f80;
constexpr u32 OF_2_POW_120 = 0x7b807b80, OF_2_POW_112 = 0x77807780;

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

// The bits of `first` where the mask has ones, and of `second` elsewhere.
__device__ __forceinline__ u32 choose(u32 first, u32 second, u32 mask) { return (first & mask) | (second & ~mask); }

struct Table {
    u32 low[4], high[4];  // the lower bytes of 16 bfloat16, four to a register, and the upper ones
    u32 pairs;            // with ONE_TABLE, the address of the lane's copy of the first pair
};

// 16 columns of rows g and g + 8; each half of the word has the codes of one row.
__device__ __forceinline__ Pairs looked_up(u32 codes, const Table* tables) {
    Pairs pairs;
    if constexpr (ONE_TABLE) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const u32 at = tables[0].pairs + __byte_perm(codes, 0, 0x4440 + (i % 2 * 2 + i / 2)) * (COPIES * 4);
            asm("ld.shared.u32 %0, [%1];" : "=r"(pairs.r[i]) : "r"(at));
        }
        return pairs;
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const Table& table = tables[r];
        const u32 place = codes >> 16 * r & 0x7777;
        const u32 is_upper = __byte_perm(0x0000ff00, 0, codes >> (16 * r + 3) & 0x1111);
        const u32 low = choose(__byte_perm(table.low[2], table.low[3], place), __byte_perm(table.low[0], table.low[1], place), is_upper);
        const u32 high = choose(__byte_perm(table.high[2], table.high[3], place), __byte_perm(table.high[0], table.high[1], place), is_upper);
        pairs.r[r] = __byte_perm(low, high, 0x5140);
        pairs.r[2 + r] = __byte_perm(low, high, 0x7362);
    }
    return pairs;
}

// The first or the second of the two 8-bit codes in each half of a word.
__device__ __forceinline__ u32 of_bytes(u32 codes, bool is_second) {
    if constexpr (WEIGHTS == INT8) {
        const u32 lower = is_second ? codes >> 8 : codes;
        return subtract(and_or(lower, 0x007f007f, OF_128), and_or(lower, 0x00800080, OF_128));
    }
    if constexpr (WEIGHTS == E5M2) {
        const u32 upper = is_second ? codes : codes << 8;
        return multiply(and_or(upper, 0x80008000, upper >> 3 & 0x0fe00fe0), OF_2_POW_112);
    }
    const u32 moved = is_second ? and_or(codes << 4, 0x80f080f0, codes >> 4 & 0x07000700) : codes & 0x87f087f0;
    return multiply(moved, OF_2_POW_120);
}

// Columns 16 * `step` to 16 * `step` + 15 of 64; the zero of each row is in the lower bits of its scale's word.
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

// Like `pairs_of`, but scaled and rounded as in a dense matrix: code * scale + shift in float32, where the code of a
// 4-bit integer q is 128 + q.
__device__ __forceinline__ Pairs rounded_pairs(const Piece* pieces, int step, const float* scale, const float* shift,
                                               const Table* tables) {
    Pairs pairs;
    if constexpr (HAS_TABLE) pairs = looked_up(pieces[0].r[step], tables);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const u32 exact = HAS_TABLE         ? pairs.r[i]
                        : WEIGHTS == INT4 ? and_or(pieces[0].r[step] >> 4 * i, LOW_NIBBLES, OF_128)
                                          : of_bytes(pieces[step / 2 % PIECES].r[step % 2 * 2 + i / 2], i % 2);
        const float2 code = unpack(exact);
        pairs.r[i] = pack(float2{code.x * scale[i % 2] + shift[i % 2], code.y * scale[i % 2] + shift[i % 2]});
    }
    return pairs;
}

__device__ __forceinline__ float scale_of(u32 word) { return __uint_as_float(WEIGHTS == INT4 ? word & ~15u : word); }
