/* A linear layer for 2 to 128 tokens: Hopper's TMA and wgmma, with weights loaded before the wait (PDL).

       y[m, n] = sum over k of x[m, k] * w[n, k]

   linear/pdl.cu holds its weights in registers, and every warp reads x by itself, which with more than eight
   tokens becomes the larger part of the reads. Here both operands pass through shared memory. A block consists of

       one warp        that issues the TMA copies: boxes of 64 columns, STAGES of them in flight
       ROWS / 64       *warpgroups*, each of which multiplies 64 rows of W (left) by all tokens (right)
       three warps     that add up squares for the norm in the meantime (PARTS)

   and a stage of shared memory is handed over by two barriers: `full` opens when its bytes have arrived, `empty` when
   all warpgroups have multiplied them.

       W ──box──►┐ stage 0 │ stage 1 │ ...     ┌► sums, in registers: ROWS x tokens
       x ──box──►┘  full?  ──► multiply ───────┘──► empty!  ──► next box

   The boxes of W for all stages are requested while the previous kernel still runs (`griddepcontrol.wait`), the
   boxes of x, which that kernel computes, after it. The next kernel may start when the last box is in flight
   (`lets_in`): its own requests are read while this one multiplies and stores.

   A matrix of a few megabytes has too few tiles of ROWS rows to fill the GPU. SPLIT adjacent blocks, a *cluster*,
   then share a tile and split its columns: each stores its sums in its shared memory, and block s adds up the sums of
   tokens s, s + SPLIT, ... in the order of the blocks. The same input gives the same bits.

   The work after the product is chosen by the defines of linear/pdl.cu, and rounds as there:

       BIAS         a bias per output
       ACTIVATION   0 none, 1 silu, 2 gelu_tanh, 3 gelu: W stacks N rows of the gate on N rows of `up`
       ADDS         stores r = y + residual, r * gain and, per tile and token, the sum of r^2
       PARTS        x is the r * gain of a kernel with ADDS: the result is divided by the root mean square of r

   Compiled with these defines and
       IS_BFLOAT16            1: bfloat16; 0: float16
       TOKENS                 tokens that a block multiplies; the number of tokens M is an argument, at most TOKENS
       ROWS                   rows of W; in a gated layer, half of them belong to the gate and half to `up`
       STAGES, SPLIT          as above
       BLOCKS                 blocks per SM
   N and K are arguments: one kernel serves all matrices with the same tiling.

   With LOW_RANK, tokens have LoRA adapters (linear/low_rank.py), which add B h as additional columns of W and of x. The
   h of all adapters are side by side, and a token has zeros at the adapters of other tokens:

       [ W | B1 B2 B3 .. ] [ x | 0 h2 0 .. ]'        chunks of B and h are stages like any other

   Every part of a matrix (q, k, v) has its own h; B of a part has zeros in the rows of other parts, which TMA fills in
   past the ends of the part. Chunks without an adapter of any token (`active`), or without weights for this matrix
   (`used`), are skipped. The previous kernel computes h (linear/shrink.cu).

   With WEIGHTS, W has codes of 8 or 4 bits (linear/coded.py has the layout), and lanes of the loading warp load 32 rows
   each. A lane of a multiplying warp unpacks its own codes (coded.cuh), and W is the left operand, from registers: of
   single warps, which read x by themselves, for few tokens, otherwise of warpgroups. The sums of a group of columns are
   multiplied by its scale in float32, and added up:

       COLUMNS                columns of a stage, 128 or 256
       TEAMS                  teams of ROWS / 16 warps, which take stages in turn. With few stages, unpacking is most of
                              the time; each of several teams unpacks its first stage while the previous kernel runs
       BY_WARPS               1: warps multiply individually
       GROUP                  columns that share a scale; 0: one scale per row, applied at the end
       MINIMA                 sums += minimum * sum of x, computed as a product with ones
       SCALE_ROWS             rows that share a scale, 1 or 128
       ROUNDS                 1: W itself is scaled and rounded, as in a dense matrix: with many tokens, the
                              sums of groups would take more registers and time than the weights
       MANY                   1: there are more tokens than TOKENS: each tile has one block per TOKENS tokens
       FP8_TOKENS             1: x is in FP8 as well, with one scale per token, and the tensor cores multiply codes by
                              codes. A lane's piece is all it needs of 32 columns; these are in the order of the
                              layout of W, and so is x (`quantize_rows`) */

#ifndef __cluster_dims__
#define __cluster_dims__(...) __attribute__((cluster_dims(__VA_ARGS__)))
#endif
#ifndef __grid_constant__
#define __grid_constant__ __attribute__((grid_constant))
#endif

typedef unsigned int u32;

#ifndef LOW_RANK
#define LOW_RANK 0
#endif
#ifndef WEIGHTS
#define WEIGHTS 0
#define MANY 0
#define TEAMS 1
#define FP8_TOKENS 0
#endif

#include "linear.cuh"
#include "wgmma.cuh"
#if WEIGHTS
#include "codes.cuh"
#include "coded.cuh"
#endif

constexpr bool CODED = WEIGHTS != 0, EARLY = TEAMS > 1;
constexpr bool GATED = ACTIVATION != 0;
constexpr int OF_TEAM = ROWS / 16, WARPS = TEAMS * OF_TEAM;  // warps that multiply
constexpr int THREADS = 32 * (WARPS + 4);
constexpr int OUT_ROWS = GATED ? ROWS / 2 : ROWS;

#if !WEIGHTS
#define COLUMNS 64
#endif
constexpr int BOX = 64, CHUNK = COLUMNS;  // columns of a box of W, and of a stage
constexpr int TOKEN_BYTES = FP8_TOKENS ? 1 : 2, X_BOX = 128 / TOKEN_BYTES;  // bytes of an x element; columns of a box
constexpr int X_BYTES = TOKENS * CHUNK * TOKEN_BYTES;

#if WEIGHTS
constexpr int BANDS = ROWS / BAND_ROWS;
constexpr int SPAN = GROUP == 0 ? CHUNK : GROUP > CELL ? CELL : GROUP, SPANS = CHUNK / SPAN;  // columns under one scale
constexpr int BAND_BYTES = CHUNK / CELL * CELL_BYTES, W_BYTES = BANDS * BAND_BYTES;
constexpr int STAGE_BYTES = (W_BYTES + X_BYTES + 1023) / 1024 * 1024;
constexpr int SHARED = GROUP ? GROUP : CHUNK;  // columns that share a scale of 128 rows
constexpr int NUM_SUMS = TOKENS / 2;
constexpr bool SCALES_SUMS = GROUP && !ROUNDS;  // scale the sums of each group; else sums at the end, or W itself
constexpr int KEPT = !BY_WARPS && SCALES_SUMS && SPANS * NUM_SUMS * (1 + MINIMA) <= 64 ? SPANS : 1;  // groups with separate sums
constexpr bool ADDS_ONES = MINIMA && !ROUNDS;
constexpr int CHAINS = BY_WARPS && TOKENS == 8 ? 2 : 1;  // independent sums of a group
static_assert(SCALE_ROWS == 1 || SPANS == 1, "one scale for each stage of a band");
static_assert(!ROUNDS || GROUP && !BY_WARPS, "what is not grouped is scaled at the end");
static_assert(TEAMS <= STAGES, "a stage to begin with for each");
static_assert(!FP8_TOKENS || WEIGHTS == FP8 && !GROUP && !BY_WARPS, "codes with codes, scaled at the end");
#else
constexpr int BANDS = 1, W_BYTES = ROWS * CHUNK * 2, STAGE_BYTES = W_BYTES + X_BYTES;
#endif

constexpr int OWN = (TOKENS + SPLIT - 1) / SPLIT;  // tokens that this block finishes
constexpr int OWN_OF_WARP = (OWN + WARPS - 1) / WARPS;
constexpr int PAIRS = OUT_ROWS / 2;                // a lane finishes two rows of a token,
constexpr int TURNS = (PAIRS + 31) / 32;           // in this many turns
constexpr int PITCH = ROWS + 4;                    // 4: the sums of a warp access 32 different banks
constexpr int LANES = OWN <= 2 ? 2 : OWN <= 4 ? 4 : OWN <= 8 ? 8 : OWN <= 16 ? 16 : 32;  // lanes with different tokens
constexpr bool HOLDS_RESIDUAL = ADDS && OWN_OF_WARP * TURNS <= 16;

static_assert(!LOW_RANK || !WEIGHTS, "coded weights are multiplied without adapters");
static_assert(ROWS % 64 == 0, "64 rows to a warpgroup");
static_assert(TOKENS % 8 == 0 && TOKENS <= 128, "one instruction for all tokens");
static_assert(!GATED || !(ADDS || BIAS), "a gated layer does not write into the stream, and has no bias");

struct Shared {
    union {
        alignas(1024) char stages[STAGES][STAGE_BYTES];
        float sums[TEAMS][TOKENS][PITCH];
    };
    u64 full[STAGES], empty[STAGES], has_x[EARLY ? STAGES : 1];  // has_x: for the first stages, whose W arrives earlier
    double squares[3][OWN];
#if WEIGHTS
    u32 pairs[ONE_TABLE ? 256 * COPIES : 1];  // pairs of adjacent columns, by their byte of codes
#endif
};

// grid: SPLIT blocks for each tile.
extern "C" __global__ void __cluster_dims__(SPLIT, 1, 1) __launch_bounds__(THREADS, BLOCKS) linear_wgmma(
#if WEIGHTS
    const char* __restrict__ cells,           // [N / 32][K / 128][bytes of a cell]; when gated, of 2N rows
    const float* __restrict__ scales,         // [N / 32][32], or [N / 32][groups]
    const float* __restrict__ minima,         // [N / 32][32]; or tables: of LUT4 [N / 32][32][16], else [16]
    const float* token_scales,                // [M]: with FP8_TOKENS
#else
    const __grid_constant__ TensorMap w_map,  // [N, K] or [2N, K], boxes of OUT_ROWS
#endif
    const __grid_constant__ TensorMap x_map,  // [M, K], boxes of TOKENS
    const char* __restrict__ bias,            // [N]
    char* __restrict__ y,                     // [M, N]; with ADDS, r * gain
    const char* __restrict__ residual,        // [M, N]; its rows are `residual_stride` bytes apart
    const char* __restrict__ gain,            // [N]
    char* __restrict__ sum,                   // [M, N]: r
    double* __restrict__ squares,             // [parts, M]: written with ADDS, read with PARTS
    long long residual_stride, int M, int N, int K, int num_parts, float eps, float offset, int lets_in
#if LOW_RANK
    , const __grid_constant__ TensorMap b_map_0, const __grid_constant__ TensorMap b_map_1,
    const __grid_constant__ TensorMap b_map_2,    // [rows of a part, ranks of all adapters], boxes of OUT_ROWS
    const __grid_constant__ TensorMap h_map,      // [M, parts * h_columns], boxes of TOKENS
    const char* active, const char* used,         // one bit per chunk
    int end_0, int end_1, int end_2, int h_columns  // ends of parts, 0 for missing parts; columns of a part
#endif
) {
    extern __shared__ char memory[];
    Shared& shared = *(Shared*)(((u64)memory + 1023) / 1024 * 1024);
    const int num_blocks = MANY ? (M + TOKENS - 1) / TOKENS : 1;  // blocks of tokens: adjacent ones read the same W
    const int tile = blockIdx.x / SPLIT / num_blocks, split = blockIdx.x % SPLIT;
    const int first_token = MANY ? blockIdx.x / SPLIT % num_blocks * TOKENS : 0;
    const int num_tokens = MANY ? min(M - first_token, TOKENS) : M;
    if (MANY) {
        y += (long long)first_token * N * 2;
        sum += (long long)first_token * N * 2;
        residual += first_token * residual_stride;
        squares += first_token;
#if WEIGHTS
        token_scales += first_token;
#endif
    }
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int num_chunks = (K + CHUNK - 1) / CHUNK;
    const int first_chunk = split * num_chunks / SPLIT;
    const int count = (split + 1) * num_chunks / SPLIT - first_chunk;
    const int num_ahead = min(count, STAGES);
    const bool is_loader = warp == WARPS && lane < BANDS;

#if WEIGHTS
    auto band_of = [&](int band) {  // place of a band of this tile; past the end, of the last
        constexpr int OUT_BANDS = OUT_ROWS / BAND_ROWS;
        const int num_bands = (N + BAND_ROWS - 1) / BAND_ROWS;
        return (long long)(min(tile * OUT_BANDS + band % OUT_BANDS, num_bands - 1) + band / OUT_BANDS * num_bands);
    };
    const long long loaded_band = band_of(lane % BANDS);
#endif
    auto load_weights_of = [&](int i) {
        u64* full = &shared.full[i % STAGES];
        char* to = shared.stages[i % STAGES];
#if WEIGHTS
        if (lane == 0) expect_bytes(full, EARLY && i < STAGES ? W_BYTES : W_BYTES + X_BYTES);
        copy_bytes(to + X_BYTES + lane * BAND_BYTES, cells + (loaded_band * num_chunks + first_chunk + i) * BAND_BYTES,
                   BAND_BYTES, full);
#else
        const int column = (first_chunk + i) * CHUNK;
        expect_bytes(full, STAGE_BYTES);
        copy_box(to, w_map, tile * OUT_ROWS, column, full, READ_ONCE);
        if (GATED) copy_box(to + W_BYTES / 2, w_map, N + tile * OUT_ROWS, column, full, READ_ONCE);
#endif
    };
    auto load_tokens_of = [&](int i) {
#if WEIGHTS
        u64* barrier = EARLY && i < STAGES ? &shared.has_x[i] : &shared.full[i % STAGES];
        if (lane == 0) {
            if (EARLY && i < STAGES) expect_bytes(barrier, X_BYTES);
            copy_boxes(shared.stages[i % STAGES], x_map, first_token, (first_chunk + i) * (CHUNK / X_BOX), barrier);
        }
#else
        char* to = shared.stages[i % STAGES] + W_BYTES;
        copy_box(to, x_map, 0, (first_chunk + i) * CHUNK, &shared.full[i % STAGES], READ_AGAIN);
#endif
    };

#if LOW_RANK
    const int ends[4] = {0, end_0, end_1, end_2};
    auto has_part = [&](int part) {  // true: rows of the part are in this tile
        return GATED ? part < 2 : tile * ROWS < ends[part + 1] && (tile + 1) * ROWS > ends[part];
    };
    auto load_chunk_of_adapters = [&](int i, int part, int chunk) {
        const TensorMap& map = part == 0 ? b_map_0 : part == 1 ? b_map_1 : b_map_2;
        u64* full = &shared.full[i % STAGES];
        char* to = shared.stages[i % STAGES];
        expect_bytes(full, STAGE_BYTES);
        copy_box(to, map, tile * OUT_ROWS - ends[part], chunk * CHUNK, full, READ_AGAIN);
        if (GATED) copy_box(to + W_BYTES / 2, map, N + tile * OUT_ROWS - ends[part], chunk * CHUNK, full, READ_AGAIN);
        copy_box(to + W_BYTES, h_map, 0, part * h_columns + chunk * CHUNK, full, READ_AGAIN);
    };
#endif

    // -- weights, before the wait

    if (threadIdx.x == 32 * WARPS) {
        for (int s = 0; s < STAGES; ++s) {
            make_barrier(&shared.full[s], 1);
            make_barrier(&shared.empty[s], OF_TEAM);
            if (EARLY) make_barrier(&shared.has_x[s], 1);
        }
        publish_barriers();
    }
    if (CODED && warp == WARPS) __syncwarp();
    if (is_loader) {
        for (int i = 0; i < num_ahead; ++i) load_weights_of(i);
        fetch_map(x_map);
        if (lets_in && count <= STAGES && !LOW_RANK) let_next_kernel_start();
    }
#if WEIGHTS
    for (int byte = threadIdx.x; ONE_TABLE && byte < 256; byte += THREADS) {
        const u32 pair = pack(float2{load_scale(minima + byte % 16), load_scale(minima + byte / 16)});
#pragma unroll
        for (int copy = 0; copy < COPIES; ++copy) shared.pairs[byte * COPIES + copy] = pair;
    }
#endif
    __syncwarp();
    if (SPLIT > 1) {
        arrive_in_cluster();
        wait_for_cluster();
    } else {
        __syncthreads();
    }

    float2 gains[TURNS], biases[TURNS];
    const int first_row = tile * OUT_ROWS;
    auto is_row = [&](int turn) { return turn * 32 + lane < PAIRS && first_row + (turn * 32 + lane) * 2 < N; };
    if (warp < WARPS) {
#pragma unroll
        for (int turn = 0; turn < TURNS; ++turn) {
            const int row = first_row + (turn * 32 + lane) * 2;
            gains[turn] = biases[turn] = float2{0.0f, 0.0f};
            if (ADDS && is_row(turn)) gains[turn] = unpack(load_pair(gain + row * 2));
            if (BIAS && is_row(turn)) biases[turn] = unpack(load_pair(bias + row * 2));
        }
    }

    if (!EARLY || warp >= WARPS) wait_for_kernel_before();  // others wait once their first weights are unpacked

    int total = count;  // chunks of this block
#if LOW_RANK
    const u32 chunks = load_pair(active) & load_pair(used);
    const int num_added = (has_part(0) + has_part(1) + has_part(2)) * __popc(chunks);
    total += (num_added + SPLIT - 1 - split) / SPLIT;
#endif

    u32 residuals[HOLDS_RESIDUAL ? OWN_OF_WARP : 1][TURNS];
    auto residual_at = [&](int token, int turn) {
        return load_pair(residual + token * residual_stride + (first_row + (turn * 32 + lane) * 2) * 2ll);
    };
    auto ask_for_residuals = [&] {
#pragma unroll
        for (int j = 0; j < (HOLDS_RESIDUAL ? OWN_OF_WARP : 0); ++j) {
            const int token = split + SPLIT * (warp + WARPS * j);
#pragma unroll
            for (int turn = 0; turn < TURNS; ++turn) {
                residuals[j][turn] = 0;
                if (token < num_tokens && is_row(turn)) residuals[j][turn] = residual_at(token, turn);
            }
        }
    };
    if (warp < WARPS) {
        const int team = EARLY ? warp / OF_TEAM : 0, of_team = warp - team * OF_TEAM;
        if (!EARLY) ask_for_residuals();

        // -- the product

#if WEIGHTS
        const Pairs all_one = {{OF_ONE, OF_ONE, OF_ONE, OF_ONE}};
        float sums[NUM_SUMS], products[KEPT][CHAINS][NUM_SUMS], ones[ADDS_ONES ? KEPT : 1][NUM_SUMS];
        auto clear = [](float* values) {
#pragma unroll
            for (int j = 0; j < NUM_SUMS; ++j) values[j] = 0.0f;
        };
        auto clear_group = [&](int kept) {
#pragma unroll
            for (int chain = 0; chain < CHAINS; ++chain) clear(products[kept][chain]);
            if (ADDS_ONES) clear(ones[kept]);
        };
        clear(sums);
#pragma unroll
        for (int kept = 0; kept < KEPT; ++kept) clear_group(kept);
        const long long band = band_of(of_team / 2);
        const int row_of_band = of_team % 2 * 16 + lane / 4;
        const float* const own_band = scales + band * ((num_chunks * CHUNK - 1) / SHARED + 1);  // scale of 128 rows
        Table tables[2];  // tables of rows g and g + 8
        if constexpr (ONE_TABLE) tables[0].pairs = held(shared_address(shared.pairs + lane % COPIES));
        if constexpr (WEIGHTS == LUT4) {
#pragma unroll
            for (int r = 0; r < 2; ++r) tables[r] = load_table(minima + (band * BAND_ROWS + row_of_band + 8 * r) * 16);
        }
        u32 words[SPANS][2];
        float least[SPANS][2], next = 0.0f;
        if (GROUP == 0) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                words[0][r] = __float_as_uint(load_scale(scales + band * BAND_ROWS + row_of_band + 8 * r));
                least[0][r] = MINIMA ? load_scale(minima + band * BAND_ROWS + row_of_band + 8 * r) : 0.0f;
            }
        } else if (!HAS_SCALES && team < count) {
            next = load_scale(own_band + (first_chunk + team) * CHUNK / SHARED);
        }
        auto add_up = [&](int span, int kept) {
            const float scale[2] = {ROUNDS ? 1.0f : scale_of(words[span][0]), ROUNDS ? 1.0f : scale_of(words[span][1])};
#pragma unroll
            for (int j = 0; j < NUM_SUMS; ++j) {
                float product = products[kept][0][j];
#pragma unroll
                for (int chain = 1; chain < CHAINS; ++chain) product += products[kept][chain][j];
                sums[j] += scale[j / 2 % 2] * product;
                if (ADDS_ONES) sums[j] += least[span][j / 2 % 2] * ones[kept][j];
            }
        };
        auto take_up = [&](int span, int kept) {  // after the wait
            take<NUM_SUMS>(products[kept][0]);
            if (ADDS_ONES) take<NUM_SUMS>(ones[kept]);
            add_up(span, kept);
        };
        const u32 stages = held(shared_address(shared.stages)), full = held(shared_address(shared.full));
        const u32 empty = held(shared_address(shared.empty)), has_x = EARLY ? held(shared_address(shared.has_x)) : 0;
        const u32 codes_of_lane = X_BYTES + of_team / 2 * BAND_BYTES + of_team % 2 * BLOCK_BYTES + lane * 16;
        const u32 scales_of_lane = X_BYTES + of_team / 2 * BAND_BYTES + CODE_BYTES + row_of_band * 4;
        const u32 tokens_of_lane = lane % 8 * 128 + (lane / 8 ^ lane % 8) * 16;  // in the order of ldmatrix
        u32 slot = team, parity = 0;
#pragma unroll 1
        for (int i = team; i < count; i += TEAMS) {
            const u32 stage = stages + slot * STAGE_BYTES;
            if (GROUP && !HAS_SCALES) {
                words[0][0] = words[0][1] = __float_as_uint(next);
                if (i + TEAMS < count) next = load_scale(own_band + (first_chunk + i + TEAMS) * CHUNK / SHARED);
            }
            wait_at(full + slot * 8, parity);
            if (HAS_SCALES) {
#pragma unroll
                for (int span = 0; span < SPANS; ++span) {
                    const int cell = span * SPAN / CELL, in_cell = span % (CELL / SPAN);
                    const u32 at = stage + scales_of_lane + cell * CELL_BYTES + in_cell * (BAND_ROWS * 4);
#pragma unroll
                    for (int r = 0; r < 2; ++r) {
                        words[span][r] = load_word(at + 32 * r);
                        if (MINIMA) least[span][r] = __uint_as_float(load_word(at + SCALE_BYTES + 32 * r));
                    }
                }
            }
            float scale_of_span[ROUNDS ? SPANS : 1][2], shift_of_span[ROUNDS ? SPANS : 1][2];
            if (ROUNDS) {
#pragma unroll
                for (int span = 0; span < SPANS; ++span) {
#pragma unroll
                    for (int r = 0; r < 2; ++r) {
                        const float scale = scale_of(words[span][r]), zero = WEIGHTS == INT4 ? 128 + (words[span][r] & 15) : 0;
                        scale_of_span[span][r] = scale;
                        shift_of_span[span][r] = (MINIMA ? least[span][r] : 0.0f) - zero * scale;
                    }
                }
            }
            Pairs w[CHUNK / 16];
#pragma unroll
            for (int box = 0; box < CHUNK / BOX; ++box) {
                Piece pieces[PIECES];
#pragma unroll
                for (int j = 0; j < PIECES; ++j)
                    pieces[j] = load_piece(stage + codes_of_lane + box / 2 * CELL_BYTES + box % 2 * (2 * BLOCK_BYTES) + j * 512);
#pragma unroll
                for (int step = 0; step < (FP8_TOKENS ? 2 : 4); ++step) {
                    const int span = (box * 4 + step) * 16 / SPAN;
                    if constexpr (FP8_TOKENS)
                        w[box * 4 + step] = quads_of(pieces[step]);
                    else if constexpr (ROUNDS)
                        w[box * 4 + step] = rounded_pairs(pieces, step, scale_of_span[span], shift_of_span[span], tables);
                    else if constexpr (HAS_TABLE)
                        w[box * 4 + step] = looked_up(pieces[0].r[step], tables);
                    else
                        w[box * 4 + step] = pairs_of(pieces, step, words[span]);
                }
                if (EARLY && box == 0 && i == team) {
                    wait_for_kernel_before();
                    ask_for_residuals();
                }
                if (EARLY && box == 0 && i < STAGES) wait_at(has_x + slot * 8, 0);
                if constexpr (BY_WARPS) {
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        Piece x[TOKENS / 8];
#pragma unroll
                        for (int j = 0; j < TOKENS / 8; ++j)
                            x[j] = load_matrices((stage + tokens_of_lane + box * (TOKENS * BOX * 2) + j * 1024) ^ half * 64);
#pragma unroll
                        for (int s = 0; s < 2; ++s) {
                            const int step = half * 2 + s, column = box * BOX + step * 16, span = column / SPAN;
                            if (GROUP && column % SPAN == 0) clear_group(0);
                            const u32* left = w[box * 4 + step].r;
#pragma unroll
                            for (int j = 0; j < TOKENS / 8; ++j) {
                                const u32* right = x[j].r + 2 * s;
                                multiply(products[0][step % CHAINS] + 4 * j, left[0], left[1], left[2], left[3], right[0], right[1]);
                                if (MINIMA) multiply(ones[0] + 4 * j, OF_ONE, OF_ONE, OF_ONE, OF_ONE, right[0], right[1]);
                            }
                            if (GROUP && (column + 16) % SPAN == 0) add_up(span, 0);
                        }
                    }
                    continue;
                }
                const u64 x = operand_at(stage + (FP8_TOKENS ? box * BOX : box * (TOKENS * BOX * 2)));
                begin_products();
#if FP8_TOKENS
#pragma unroll
                for (int step = 0; step < 2; ++step)  // 32 columns are 32 bytes
                    add_product_of_codes<TOKENS>(products[0][0], w[box * 4 + step], x + step * 2);
#else
#pragma unroll
                for (int step = 0; step < 4; ++step) {
                    const int column = box * BOX + step * 16, span = column / SPAN, kept = span % KEPT;
                    const bool is_first = SCALES_SUMS && column % SPAN == 0;
                    add_product<TOKENS>(products[kept][0], w[box * 4 + step], x + step * 2, is_first);
                    if (ADDS_ONES) add_product<TOKENS>(ones[kept], all_one, x + step * 2, is_first);
                    if (SCALES_SUMS && KEPT < SPANS && (column + 16) % SPAN == 0) {  // one group at a time
                        end_products();
                        wait_for_products<0>();
                        take_up(span, 0);
                        begin_products();
                    }
                }
#endif
                end_products();
                if (!SCALES_SUMS) {
                    wait_for_products<1>();  // products of the previous columns
                    const u32 before = slot < TEAMS ? slot + STAGES - TEAMS : slot - TEAMS;
                    if (box == 0 && i > team && lane == 0) arrive_at(empty + before * 8);
                }
            }
            if (BY_WARPS) {
                __syncwarp();
                if (lane == 0) arrive_at(empty + slot * 8);
            } else if (SCALES_SUMS) {
                wait_for_products<0>();
                if (lane == 0) arrive_at(empty + slot * 8);
                if (KEPT == SPANS) {
#pragma unroll
                    for (int span = 0; span < SPANS; ++span) take_up(span, span);
                }
            }
            slot += TEAMS;
            if (slot >= STAGES) slot -= STAGES, parity ^= 1;
        }
        if (EARLY && team >= count) {  // no stage for this team
            wait_for_kernel_before();
            ask_for_residuals();
        }
        if (!BY_WARPS) wait_for_products<0>();
        if (!SCALES_SUMS) take_up(0, 0);
#else
        const int group = warp / 4;
        float sums[TOKENS / 2];
#pragma unroll
        for (int i = 0; i < TOKENS / 2; ++i) sums[i] = 0.0f;
        for (int i = 0; i < total; ++i) {
            const char* stage = shared.stages[i % STAGES];
            wait_until(&shared.full[i % STAGES], i / STAGES & 1);
            const u64 w = operand(stage + group * (64 * CHUNK * 2)), x = operand(stage + W_BYTES);
            begin_products();
#pragma unroll
            for (int step = 0; step < CHUNK / 16; ++step)  // 16 columns are 32 bytes
                add_product<TOKENS>(sums, w + step * 2, x + step * 2);
            end_products();
            wait_for_products<1>();  // products of the previous chunk
            if (i > 0 && lane == 0) arrive(&shared.empty[(i - 1) % STAGES]);
        }
        wait_for_products<0>();
#endif

        // -- the sums, to shared memory

        meet(1, 32 * WARPS);  // no warp reads stages anymore
        const int row = of_team * 16 + lane / 4, t = lane % 4;
#pragma unroll
        for (int j = 0; j < TOKENS / 8; ++j) {
            if (j * 8 < num_tokens) {
                float* at = &shared.sums[team][j * 8 + 2 * t][row];
                at[0] = sums[4 * j];
                at[PITCH] = sums[4 * j + 1];
                at[8] = sums[4 * j + 2];
                at[PITCH + 8] = sums[4 * j + 3];
            }
        }
    } else if (is_loader) {
        for (int i = 0; i < num_ahead; ++i) load_tokens_of(i);
        for (int i = STAGES; i < count; ++i) {
            wait_until(&shared.empty[i % STAGES], (i / STAGES - 1) & 1);
            load_weights_of(i);
            load_tokens_of(i);
        }
#if LOW_RANK
        int next = count, number = 0;
        for (int part = 0; part < 3; ++part) {
            for (u32 left = has_part(part) ? chunks : 0; left; left &= left - 1) {
                if (number++ % SPLIT != split) continue;
                if (next >= STAGES) wait_until(&shared.empty[next % STAGES], (next / STAGES - 1) & 1);
                load_chunk_of_adapters(next++, part, __ffs(left) - 1);
            }
        }
#endif
        if (lets_in) let_next_kernel_start();
    } else if (PARTS && warp > WARPS) {
        const int helper = warp - WARPS - 1;
        constexpr int STEP = 3 * (32 / LANES);  // threads for each token
        for (int round = 0; round < OWN; round += 32) {  // all lanes take part in the shuffle
            const int own = round + lane % LANES, token = split + SPLIT * own;
            double total = 0.0;
#pragma unroll 1
            for (int first = helper * (32 / LANES) + lane / LANES; first < num_parts; first += 8 * STEP) {
                double held[8];
#pragma unroll
                for (int j = 0; j < 8; ++j) {
                    const int part = first + j * STEP;
                    held[j] = 0.0;
                    if (token < num_tokens && part < num_parts) held[j] = load_double(squares + (long long)part * M + token);
                }
                total += sum_in_pairs<8>([&](int j) { return held[j]; });
            }
#pragma unroll
            for (int distance = 16; distance >= LANES; distance /= 2)
                total += __shfl_xor_sync(0xffffffffu, total, distance);
            if (lane < LANES && own < OWN) shared.squares[helper][own] = total;
        }
    }
    __syncwarp();
    if (SPLIT > 1)
        meet_in_cluster();
    else
        __syncthreads();

    // -- the work after the product

    auto sum_at = [&](int token, int row) {
        float2 parts[SPLIT * TEAMS];
#pragma unroll
        for (int p = 0; p < SPLIT * TEAMS; ++p) {
            const float* at = &shared.sums[p % TEAMS][token][row];
            parts[p] = SPLIT == 1 ? *(const float2*)at : load_from(at, p / TEAMS);
        }
        float2 total = parts[0];
#pragma unroll
        for (int p = 1; p < SPLIT * TEAMS; ++p) {
            total.x += parts[p].x;
            total.y += parts[p].y;
        }
        return total;
    };
    if (warp < WARPS) {
#pragma unroll(OWN_OF_WARP < 4 ? OWN_OF_WARP : 4)
        for (int j = 0; j < OWN_OF_WARP; ++j) {
            const int own = warp + WARPS * j, token = split + SPLIT * own;
            if (token >= num_tokens) break;
            float inverse = 1.0f;
            if (PARTS) {
                const double square = shared.squares[0][own] + shared.squares[1][own] + shared.squares[2][own];
                inverse = rsqrtf((float)square / (float)K + eps);
            }
#if FP8_TOKENS
            inverse *= load_float(token_scales + token);
#endif
            double square = 0.0;
#pragma unroll
            for (int turn = 0; turn < TURNS; ++turn) {
                if (!is_row(turn)) continue;
                const int pair = turn * 32 + lane;
                const long long place = ((long long)token * N + first_row + pair * 2) * 2;
                float2 total = sum_at(token, pair * 2);
                if (PARTS || FP8_TOKENS) {
                    total.x *= inverse;
                    total.y *= inverse;
                }
                if (BIAS) {
                    total.x += biases[turn].x;
                    total.y += biases[turn].y;
                }
                if (GATED) {
                    const float2 up = sum_at(token, OUT_ROWS + pair * 2);
                    total.x = activate(total.x) * (PARTS || FP8_TOKENS ? up.x * inverse : up.x);
                    total.y = activate(total.y) * (PARTS || FP8_TOKENS ? up.y * inverse : up.y);
                }
                if (!ADDS) {
                    *(u32*)(y + place) = pack(total);
                    continue;
                }
                const float2 old = unpack(HOLDS_RESIDUAL ? residuals[j][turn] : residual_at(token, turn));
                const u32 added = pack(float2{total.x + old.x, total.y + old.y});
                const float2 r = unpack(added);
                *(u32*)(sum + place) = added;
                *(u32*)(y + place) = pack(float2{r.x * (gains[turn].x + offset), r.y * (gains[turn].y + offset)});
                square += (double)(r.x * r.x) + (double)(r.y * r.y);
            }
            if (ADDS) {
#pragma unroll
                for (int distance = 16; distance > 0; distance /= 2)
                    square += __shfl_xor_sync(0xffffffffu, square, distance);
                if (lane == 0 && first_row < N) squares[(long long)tile * M + token] = square;
            }
        }
    }
    if (SPLIT > 1) {  // a block's shared memory and barriers must stay valid until all blocks have read and arrived
        __syncwarp();
        arrive_in_cluster();
        wait_for_cluster();
    }
}
