/* The first product of LoRA adapters, h = A x, for up to 128 tokens: each token with the A of its own adapter.

   This is the only launch that adapters add between two matrices of a layer: the second product, B h, is computed as
   additional columns of the matrix itself (linear/wgmma.cu). It reads few bytes and is on the critical path, so only
   its latency counts. As in linear/pdl.cu, every warp requests its whole share of A before it waits for the kernel that
   computes x (PDL), and the matrix instruction takes 16 rows of A on the left and 8 tokens on the right.

   Tokens are grouped into *tiles* of up to 8 with the same adapter, once per step (linear/low_rank.py):

       table    row 0: a bit for each chunk of 64 columns of h in which some token has an adapter
                row 1 + i: slot of tile i, or 0; the indices of its 8 tokens plus 1, or 0

   A *cluster* of SPLIT blocks computes 16 ranks of a tile. Its warps take chunks of 64 columns in turn; the sums are
   added in the shared memory of each block, then in the first block. h has columns for all slots, and zeros in the
   slots of other tokens: it was zeroed before, and these columns are never written.

   Compiled with
       IS_BFLOAT16          1: bfloat16; 0: float16
       K                    columns of A, a multiple of 64
       PARTS, RANK          parts of the matrix, and the ranks reserved per part, a multiple of 16
       WARPS, SPLIT         as above */

#ifndef __cluster_dims__
#define __cluster_dims__(...) __attribute__((cluster_dims(__VA_ARGS__)))
#endif
#define ACTIVATION 0

typedef unsigned int u32;

#include "linear.cuh"
#include "wgmma.cuh"

constexpr int TOKENS = 8, CHUNK = 64, CHUNKS = K / CHUNK, SHARERS = SPLIT * WARPS;
constexpr int TURNS = (CHUNKS + SHARERS - 1) / SHARERS;
constexpr bool IS_RAGGED = CHUNKS % SHARERS != 0;
constexpr int BLOCKS_OF_RANKS = PARTS * RANK / 16;
constexpr int ROW_BYTES = 64;  // bytes of a row of the table
constexpr int PITCH = 20;      // 4 more than ranks: lanes of a fragment access 32 different banks

static_assert(K % CHUNK == 0 && RANK % 16 == 0, "whole chunks of columns, and whole blocks of ranks");
static_assert(32 * WARPS >= TOKENS * 8, "a thread for every two ranks of a token");

struct Shared {
    alignas(16) float partial[WARPS][TOKENS][PITCH];
    alignas(16) float sums[TOKENS][PITCH];
};
#ifndef EMULATED
__shared__ Shared shared;
#endif

// grid: for each tile, each block of 16 ranks and each split, in this order.
extern "C" __global__ void __cluster_dims__(SPLIT, 1, 1) __launch_bounds__(32 * WARPS) shrink(
    const char* __restrict__ x,      // [M, K]; its rows are `x_stride` bytes apart
    const char* __restrict__ a,      // [slots, PARTS * RANK, K]
    const char* __restrict__ table,
    const char* __restrict__ used,   // bits of the chunks of h for which some adapter has weights; 0: none
    char* __restrict__ h,            // [M, ..]; its rows are `h_stride` bytes apart
    long long x_stride, long long h_stride, int h_columns) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int split = blockIdx.x % SPLIT, block = blockIdx.x / SPLIT % BLOCKS_OF_RANKS;
    const char* const row = table + (1 + blockIdx.x / SPLIT / BLOCKS_OF_RANKS) * ROW_BYTES;
    let_next_kernel_start();
    const int slot = (int)load_pair(row);
    if (slot == 0 || load_pair(used) == 0) {
        wait_for_kernel_before();  // the next kernel relies on this wait
        return;
    }
    const int token = (int)load_pair(row + 4 + g * 4) - 1;

    // -- A, before the wait

    const int first = split * WARPS + warp;  // chunk
    const long long column = first * CHUNK + t * 8;
    const char* const a_lane = a + (((long long)(slot - 1) * PARTS * RANK + block * 16 + g) * K + column) * 2;
    auto is_chunk = [&](int turn) { return !IS_RAGGED || turn * SHARERS + first < CHUNKS; };
    Piece weights[TURNS][4], tokens[TURNS][2];
#pragma unroll
    for (int turn = 0; turn < TURNS; ++turn) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            if (IS_RAGGED) weights[turn][j] = Piece{{0, 0, 0, 0}};
            const char* const at = a_lane + j / 2 * (8ll * K * 2) + turn * (SHARERS * CHUNK * 2) + j % 2 * 64;
            load_weights<!IS_RAGGED>(weights[turn][j], at, is_chunk(turn));
        }
    }
    wait_for_kernel_before();

    // -- the product

    const char* const x_lane = x + (token < 0 ? 0 : token) * x_stride + column * 2;
#pragma unroll
    for (int turn = 0; turn < TURNS; ++turn) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            if (IS_RAGGED) tokens[turn][half] = Piece{{0, 0, 0, 0}};
            load_activations<!IS_RAGGED>(tokens[turn][half], x_lane + turn * (SHARERS * CHUNK * 2) + half * 64, is_chunk(turn));
        }
    }
    float sums[4][4] = {};
#pragma unroll
    for (int turn = 0; turn < TURNS; ++turn) {
#pragma unroll
        for (int step = 0; step < 4; ++step) {
            const int half = step / 2, j = step % 2 * 2;
            const u32 *low = weights[turn][half].r + j, *high = weights[turn][2 + half].r + j;
            const u32* right = tokens[turn][half].r + j;
            multiply(sums[step], low[0], high[0], low[1], high[1], right[0], right[1]);
        }
    }

    // -- the sums of all warps

#pragma unroll
    for (int c = 0; c < 4; ++c)
        shared.partial[warp][2 * t + c % 2][g + c / 2 * 8] = sums[0][c] + sums[1][c] + sums[2][c] + sums[3][c];
    __syncthreads();
    const int own = threadIdx.x / 8, pair = threadIdx.x % 8 * 2;
    float2 total = {0.0f, 0.0f};
    if (own < TOKENS) {
#pragma unroll
        for (int v = 0; v < WARPS; ++v) {
            const float2 other = *(const float2*)&shared.partial[v][own][pair];
            total.x += other.x;
            total.y += other.y;
        }
        *(float2*)&shared.sums[own][pair] = total;
    }
    if (SPLIT > 1) meet_in_cluster();
    if (split == 0 && own < TOKENS) {
#pragma unroll
        for (int s = 1; s < SPLIT; ++s) {
            const float2 other = load_from(&shared.sums[own][pair], s);
            total.x += other.x;
            total.y += other.y;
        }
        const int place = (int)load_pair(row + 4 + own * 4) - 1, rank = block * 16 + pair;
        const int to = rank / RANK * h_columns + (slot - 1) * RANK + rank % RANK;
        if (place >= 0) *(u32*)(h + place * h_stride + to * 2) = pack(total);
    }
    if (SPLIT > 1) {  // a block's shared memory must stay valid until the first block has read it
        __syncwarp();
        arrive_in_cluster();
        wait_for_cluster();
    }
}
