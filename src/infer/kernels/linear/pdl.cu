/* A linear layer for few tokens that loads its weights while the previous kernel still runs (PDL).

       y[m, n] = sum over k of x[m, k] * w[n, k]

   Decoding runs a chain of small matrices, each of which waits for the previous one. It waits for x, a few
   kilobytes; its weights, a hundred times as many bytes, have been in memory all along. So every warp first
   loads its share of W into registers and waits afterwards (*programmatic dependent launch*: a kernel may
   start when all blocks of the previous one have started, and `griddepcontrol.wait` waits for its end):

       kernel n       ..load W........| wait | x, mma, sums, store |
       kernel n + 1              ....load W..................| wait | x, mma, sums, store |

   A load is in flight as soon as it is issued; only an instruction that uses its register waits for it. So a warp
   issues all the loads that its registers can take, DEPTH chunks of its share, and goes on to the wait. After that,
   the registers are a ring: once a chunk is multiplied, its registers are reloaded with the chunk DEPTH turns later.
   For matrices much larger than all registers, this is an ordinary pipeline without any gain.

   Division of work. A *block* of WARPS warps owns ROWS = 16 * RT rows of W, in a gated layer the same rows of the
   gate and of `up`. Its warps take the columns in *chunks* of 64 in turn; in turn i, warp v takes chunk
   i * WARPS + v. No two warps read the same weights, and none waits for another until the sums are added at the end.

   The matrix instruction multiplies 16 rows of W (left) by 8 tokens (right) over 16 columns. With g = lane / 4 and
   t = lane % 4, each lane must provide the columns 2t, 2t+1, 2t+8, 2t+9 of the rows g, g + 8 and of the token g, in
   pieces of 4 bytes. But a dot product may add its terms in any order, as long as both sides agree. So a lane
   loads 16 contiguous bytes and uses the first half as columns of instruction 0 and the second half as columns of
   instruction 1:

       lane t of a row           8t   8t+1   8t+2   8t+3   8t+4   8t+5   8t+6   8t+7       of 32 columns
       instruction, its column   0:2t 0:2t+1 0:2t+8 0:2t+9 1:2t   1:2t+1 1:2t+8 1:2t+9

   and neither operand passes through shared memory.

   The sums. Each warp stores a partial tile [token, row] in shared memory; after one barrier, each thread adds
   up two adjacent rows of a token, in the order of the warps. The same input gives the same bits.

   The work after the product is chosen by defines, and rounds where `skinny_kernel` of linear/triton_kernels.py does:

       BIAS         a bias per output
       ACTIVATION   0 none, 1 silu, 2 gelu_tanh, 3 gelu: W stacks N rows of the gate on N rows of `up`
       ADDS         stores r = y + residual, r * gain and, per block and token, the sum of r^2
       PARTS        x is the r * gain of a kernel with ADDS: the result is divided by the root mean square of r

   Compiled once per matrix, with these defines and
       IS_BFLOAT16            1: bfloat16; 0: float16
       N, K                   outputs (of the gate half when gated; a multiple of 8), inputs (a multiple of 64)
       MT                     tiles of 8 tokens; the number of tokens M is an argument, at most 8 * MT
       RT, WARPS              as above
       DEPTH                  chunks that a warp holds in registers before it waits
   The only headers are those next to this file: NVRTC has no others, and without them it compiles in a second.

   With WEIGHTS, W has codes of 8 or 4 bits: a chunk of a tile is two pieces of 16 bytes per lane, or one, and is held
   in this form. It is unpacked (codes.cuh) when it is multiplied, with the columns in the native order of the matrix
   instruction. A lane still reads x in pieces of 16 bytes, and the four lanes of a row then exchange words: reading
   words of 4 bytes would take four times as many requests, one for each token and 16 columns. A single token is read
   in words. The sums of a group of columns are multiplied by its scale and added up:

       BY_WORDS               1: x is read in words
       GROUP                  columns that share a scale; 0: one scale per row, applied to a warp's sums
       SCALE_ROWS             rows that share a scale, 1 or 128

   With EXPERTS, w is the first of a stack of matrices, and a block uses the matrices that its token chose. Every warp
   finds them from the token's router logits (`choose_experts`), which costs less than a separate launch for it:

       1    gate and up: a block has one choice of one token, and multiplies its result by the choice's weight
       2    down: a block has one token, a warp one of its choices, and the sum over the warps is the token's sum:

            token ──► expert 5: columns 0 .. K of x ──► warps 0, 8    ┐
                      expert 2: columns K .. 2K     ──► warps 1, 9    ├──► y of the token
                      ...                                             ┘

   The first kernel can load nothing before its wait, because the previous kernel computes the logits. It lets the
   second one start after that wait: by then the logits are complete, and the second kernel may choose from them and
   load its weights while the first still runs. The blocks of all tokens for one tile of rows are adjacent, so an
   expert of two tokens is read from memory once.

       3    rows that were sorted by expert (moe/grouped.py): a block multiplies TOKENS rows of one expert, finds them
            by `row_order`, and writes them to their places; with WEIGHTED, it multiplies by their weights

       CHOICES, NUM_EXPERTS   experts of a token, and of the layer
       NORMALIZED             the weights of a token's experts add up to 1
       IS_SECOND              with EXPERTS 3: the previous kernel reads the same order and waits before it lets this one
                              start */

typedef unsigned int u32;

#ifndef EXPERTS
#define EXPERTS 0
#endif
#if EXPERTS != 1 && EXPERTS != 2
#define CHOICES 1
#endif
#ifndef IS_SECOND
#define IS_SECOND 0
#define WEIGHTED 0
#endif
#ifndef WEIGHTS
#define WEIGHTS 0
#define BY_WORDS 0
#endif

#include "linear.cuh"
#if WEIGHTS
#include "codes.cuh"
constexpr int SPANS = GROUP && GROUP < 64 ? 64 / GROUP : 1;  // parts of a chunk: columns under one scale
constexpr int OF_TILE = 4 * PIECES + (GROUP ? 2 * SPANS : 0);  // registers per chunk of a tile
static_assert(RT <= 2 && !MINIMA, "no more rows than a band has: those past the end are zeros");
static_assert(WEIGHTS < LUT4, "tables leave no registers for weights");
#else
constexpr int PIECES = 4, OF_TILE = 16;
#endif

constexpr bool GATED = ACTIVATION != 0;
constexpr int TILES = GATED ? 2 * RT : RT;  // tiles of 16 rows of W per block
constexpr int ROWS = 16 * RT;               // outputs of a block
constexpr int TOKENS = 8 * MT;
constexpr int THREADS = 32 * WARPS;

constexpr int CHUNK = 64;
constexpr int CHUNKS = K / CHUNK;
constexpr int SHARERS = EXPERTS == 2 ? WARPS / CHOICES : WARPS;  // warps that share the chunks of a matrix
constexpr int TURNS = (CHUNKS + SHARERS - 1) / SHARERS;
constexpr bool IS_RAGGED = CHUNKS % SHARERS != 0;    // some warps have no chunk in the last turn
constexpr bool IS_CUT = N % ROWS != 0;               // the last tile has rows past the end
constexpr int HELD = DEPTH < TURNS ? DEPTH : TURNS;  // chunks of W in registers
constexpr int WANTED_X = MT == 1 ? 4 : MT < 8 ? 2 : 1;
constexpr int HELD_X = WANTED_X < TURNS ? WANTED_X : TURNS;  // chunks of x

// Turns per unrolled iteration, after which both rings are where they began: so a slot is a fixed register.
constexpr int ROUND = HELD % HELD_X == 0 ? HELD : HELD_X % HELD == 0 ? HELD_X : HELD * HELD_X;

// Separate sums per tile: an instruction waits for the previous one that adds to the same registers.
constexpr int CHAINS = TILES * MT == 1 ? 4 : TILES * MT < 4 ? 2 : 1;

constexpr int PAIRS = ROWS / 2;  // a thread finishes two rows of one token
constexpr int UNITS = TOKENS * PAIRS;
constexpr int UNITS_PER_THREAD = (UNITS + THREADS - 1) / THREADS;
constexpr int PITCH = TILES * 16 + 4;     // 4: lanes of a fragment access 32 different banks
constexpr int SQUARES = MT == 1 ? 8 : 4;  // loads of sums of squares in flight during the product
constexpr int TOKENS_OF_WARP = TOKENS < 32 ? TOKENS : 32;
constexpr int SUM_SLOTS = THREADS / TOKENS > WARPS ? WARPS : THREADS / TOKENS;

// The number of blocks that an SM should hold, from the registers of the arrays below and some spare ones.
constexpr int OF_SUMS = 4 * TILES * MT * CHAINS, OF_SQUARES = PARTS ? 2 * SQUARES : 0;
constexpr int REGISTERS = OF_TILE * TILES * HELD + (WEIGHTS ? 24 : 0) + OF_SUMS + 8 * MT * HELD_X + OF_SQUARES + 40;
constexpr int ROUNDED = (REGISTERS + 7) / 8 * 8;
constexpr int BLOCKS = 65536 / (THREADS * (ROUNDED > 255 ? 255 : ROUNDED));
constexpr int MIN_BLOCKS = BLOCKS < 1 ? 1 : BLOCKS * THREADS > 2048 ? 2048 / THREADS : BLOCKS;

static_assert(K % CHUNK == 0 && N % 8 == 0, "whole chunks of columns, and rows in eights");
static_assert(!ADDS || (PAIRS & (PAIRS - 1)) == 0 && PAIRS <= 32, "the squares of a token are added within a warp");
static_assert(!PARTS || THREADS >= TOKENS, "a thread adds up squares of one token");
static_assert(!EXPERTS || !BIAS && WARPS % (EXPERTS == 2 ? CHOICES : 1) == 0, "whole experts, without a bias");
static_assert(EXPERTS != 1 && EXPERTS != 2 || MT == 1, "one token");
static_assert(EXPERTS != 3 || !ADDS && !PARTS, "rows of several tokens are not the stream's");

// ---- the kernel ---------------------------------------------------------------------------------

// A lane's part of a chunk of W.
struct Chunk {
    Piece pieces[TILES][PIECES];  // not coded: [..][half of the tile's rows, then of the chunk]
#if WEIGHTS
    u32 words[TILES][GROUP ? 2 * SPANS : 2];  // scales, with the zeros of int4
#endif
};
#if WEIGHTS
constexpr int CELLS = (K + CELL - 1) / CELL, SHARED = GROUP ? GROUP : CELL, GROUPS = (K + SHARED - 1) / SHARED;
#endif

struct Shared {
    alignas(16) float partial[WARPS][TOKENS][PITCH];
    double square_sums[SUM_SLOTS][TOKENS];
};
#ifndef EMULATED
__shared__ Shared shared;
#endif

// grid: a block for each tile of ROWS rows.
extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) linear_pdl(
    const char* __restrict__ x,         // [M, K]; its rows are `x_stride` bytes apart
    const char* __restrict__ w,         // [N, K]; [2N, K] when gated; or cells [N / 32][K / 128] of codes
#if WEIGHTS
    const char* __restrict__ scales,    // scales, if not in cells: [N / 32][32], or [N / 32][groups]
#endif
    const char* __restrict__ bias,      // [N]
    char* __restrict__ y,               // [M, N]; with ADDS, r * gain
    const char* __restrict__ residual,  // [M, N]; its rows are `residual_stride` bytes apart
    const char* __restrict__ gain,      // [N]
    char* __restrict__ sum,             // [M, N]: r
    double* __restrict__ squares,       // [parts, M]: written with ADDS, read with PARTS
    long long x_stride, long long residual_stride, int M, int num_parts, float eps, float offset
#if EXPERTS
    , const char* __restrict__ logits,            // [M, NUM_EXPERTS], from the router
    long long expert_bytes, long long scale_bytes  // bytes from one expert's matrix, and its scales, to the next
#endif
#if EXPERTS == 3
    , const char* __restrict__ row_order,  // [blocks, TOKENS] rows of y, or M
    const char* __restrict__ experts,      // [blocks], or -1
    const char* __restrict__ weights,      // [M], floats
    int num_blocks, int rows_per_input     // blocks of rows; rows of y that read the same row of x
#endif
) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int g = lane / 4, t = lane % 4;

#if EXPERTS == 3
    const int tile = blockIdx.x / num_blocks, own_token = 0, num_tokens = TOKENS, place = warp;
    row_order += blockIdx.x % num_blocks * (long long)(TOKENS * 4);
    auto row_of = [&](int token) { return (int)load_pair(row_order + token * 4); };
    if (!IS_SECOND) wait_for_kernel_before();
    let_next_kernel_start();
    const int expert = (int)load_pair(experts + blockIdx.x % num_blocks * 4);
    if (expert < 0) return;
    w += expert * expert_bytes;
#if WEIGHTS
    scales += expert * scale_bytes;
#endif
#elif EXPERTS
    const int num_blocks = EXPERTS == 1 ? M * CHOICES : M;  // blocks of a tile of rows
    const int tile = blockIdx.x / num_blocks, result = blockIdx.x % num_blocks;
    const int own_token = EXPERTS == 1 ? result / CHOICES : result, num_tokens = 1;
    const int choice = EXPERTS == 1 ? result % CHOICES : warp % CHOICES;
    const int place = EXPERTS == 1 ? warp : warp / CHOICES;  // place of this warp among the sharers
    x += own_token * x_stride + (EXPERTS == 2 ? choice * (K * 2) : 0);
    y += result * (long long)(N * 2);
    sum += result * (long long)(N * 2);
    residual += own_token * residual_stride;
    if (EXPERTS == 1) wait_for_kernel_before();
    let_next_kernel_start();
    const Choice chosen = choose_experts(logits + own_token * (NUM_EXPERTS * 2), choice);
    w += chosen.expert * expert_bytes;
#if WEIGHTS
    scales += chosen.expert * scale_bytes;
#endif
#else
    const int tile = blockIdx.x, own_token = 0, num_tokens = M, place = warp;
    let_next_kernel_start();
#endif

    // -- weights, before the wait

    const int first_row = tile * ROWS;
    const long long column = place * CHUNK + t * (BY_WORDS ? 2 : 8);
    Chunk held[HELD];
#if WEIGHTS
    auto band_of = [&](int i) { return (long long)(first_row / 16 + i % RT) / 2 + (i < RT ? 0 : N / BAND_ROWS); };
    auto in_band = [&](int i) { return (first_row / 16 + i % RT) % 2; };  // 0: the first 16 rows, 1: the others
    auto load_chunk = [&](auto always, Chunk& slot, int turn, bool is_turn) {
        const int chunk = turn * SHARERS + place;
        const bool is_wanted = is_turn && (!IS_RAGGED || chunk < CHUNKS);
#pragma unroll
        for (int i = 0; i < TILES; ++i) {
            const char* const cell = w + (band_of(i) * CELLS + chunk / 2) * CELL_BYTES;
#pragma unroll
            for (int j = 0; j < PIECES; ++j) {
                if (IS_RAGGED) slot.pieces[i][j] = Piece{{0, 0, 0, 0}};
                load_weights<always.value && !IS_RAGGED>(
                    slot.pieces[i][j], cell + (chunk % 2 * 2 + in_band(i)) * BLOCK_BYTES + lane * 16 + j * 512, is_wanted);
            }
#pragma unroll
            for (int j = 0; j < (GROUP ? 2 * SPANS : 0); ++j) {  // words of rows g and g + 8
                const int span = GROUP < 128 ? chunk % 2 * SPANS + j / 2 : 0, row = in_band(i) * 16 + j % 2 * 8 + g;
                const char* const at = HAS_SCALES ? cell + CODE_BYTES + (span * BAND_ROWS + row) * 4
                                                  : scales + (band_of(i) * GROUPS + chunk * CHUNK / SHARED) * 4;
                if (IS_RAGGED) slot.words[i][j] = 0;
                load_word<always.value && !IS_RAGGED>(slot.words[i][j], at, is_wanted);
            }
        }
    };
    u32 of_rows[TILES][2];  // scales per row
#pragma unroll
    for (int i = 0; i < (GROUP ? 0 : TILES); ++i)
#pragma unroll
        for (int r = 0; r < 2; ++r)
            load_word<true>(of_rows[i][r], scales + (band_of(i) * BAND_ROWS + in_band(i) * 16 + r * 8 + g) * 4, true);
#else
    const char* const w_lane = w + ((IS_CUT ? 0 : first_row + g) * (long long)K + column) * 2;
    auto offset_of = [&](int i, int half_of_rows) -> long long {  // offset of lane g's row in the i-th tile, in bytes
        const int row = i % RT * 16 + half_of_rows * 8, up = i < RT ? 0 : N;
        return (IS_CUT ? min(first_row + row + g, N - 1) + up : row + up) * (long long)(K * 2);
    };
    auto load_chunk = [&](auto always, Chunk& slot, int turn, bool is_turn) {
        // Past the end of K both operands are zeroed: a register could hold anything, even infinity.
        const bool is_wanted = is_turn && (!IS_RAGGED || turn * SHARERS + place < CHUNKS);
#pragma unroll
        for (int i = 0; i < TILES; ++i) {
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                if (IS_RAGGED) slot.pieces[i][j] = Piece{{0, 0, 0, 0}};
                load_weights<always.value && !IS_RAGGED>(
                    slot.pieces[i][j], w_lane + offset_of(i, j / 2) + turn * (SHARERS * CHUNK * 2) + j % 2 * 64, is_wanted);
            }
        }
    };
#endif
#pragma unroll
    for (int s = 0; s < HELD; ++s) load_chunk(Yes{}, held[s], s, true);

    // The outputs that this thread will finish, and inputs of them that are older than the previous kernel.
    int token_of[UNITS_PER_THREAD], out_row[UNITS_PER_THREAD];
    bool is_mine[UNITS_PER_THREAD];
    float2 gains[UNITS_PER_THREAD], biases[UNITS_PER_THREAD];
#if EXPERTS == 3
    int rows[UNITS_PER_THREAD];
    float shares[UNITS_PER_THREAD];
#endif
#pragma unroll
    for (int j = 0; j < UNITS_PER_THREAD; ++j) {
        const int unit = j * THREADS + threadIdx.x;
        token_of[j] = unit / PAIRS;
        out_row[j] = first_row + unit % PAIRS * 2;
        is_mine[j] = token_of[j] < min(num_tokens, TOKENS) && (!IS_CUT || out_row[j] < N);
#if EXPERTS == 3
        shares[j] = 1.0f;
        rows[j] = UNITS % THREADS == 0 || unit < UNITS ? row_of(token_of[j]) : M;
        is_mine[j] &= rows[j] < M;
        if (WEIGHTED && is_mine[j]) shares[j] = __uint_as_float(load_pair(weights + rows[j] * 4));
#endif
        gains[j] = biases[j] = float2{0.0f, 0.0f};
        if (ADDS && is_mine[j]) gains[j] = unpack(load_pair(gain + out_row[j] * 2));
        if (BIAS && is_mine[j]) biases[j] = unpack(load_pair(bias + out_row[j] * 2));
    }

    if (EXPERTS == 0 || EXPERTS == 2 || EXPERTS == 3 && IS_SECOND) wait_for_kernel_before();

    // -- activations

    const char* x_lane[MT];
#pragma unroll
    for (int m = 0; m < MT; ++m) {
#if EXPERTS == 3
        const int row = min(row_of(m * 8 + g), M - 1) / rows_per_input;
#else
        const int row = min(m * 8 + g, num_tokens - 1);
#endif
        x_lane[m] = x + row * x_stride + column * 2;
    }
    Piece tokens[HELD_X][MT][2];
    auto load_tokens = [&](auto always, Piece(&slot)[MT][2], int turn, bool is_turn) {
        const bool is_wanted = is_turn && (!IS_RAGGED || turn * SHARERS + place < CHUNKS);
#pragma unroll
        for (int m = 0; m < MT; ++m) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                if (IS_RAGGED) slot[m][half] = Piece{{0, 0, 0, 0}};
                const char* const at = x_lane[m] + turn * (SHARERS * CHUNK * 2) + half * 64;
                if (!BY_WORDS) load_activations<always.value && !IS_RAGGED>(slot[m][half], at, is_wanted);
#pragma unroll
                for (int j = 0; j < (BY_WORDS ? 4 : 0); ++j)  // columns 2t and 2t + 8 of two times 16
                    load_word_of_x<always.value && !IS_RAGGED>(slot[m][half].r[j], at + j * 16, is_wanted);
            }
        }
    };
#pragma unroll
    for (int s = 0; s < HELD_X; ++s) load_tokens(Yes{}, tokens[s], s, true);

    // The inputs of the epilogue are requested now, and arrive during the product.
    u32 residuals[UNITS_PER_THREAD];
#pragma unroll
    for (int j = 0; j < UNITS_PER_THREAD; ++j) {
        residuals[j] = 0;
        if (ADDS && is_mine[j])
            residuals[j] = load_pair(residual + token_of[j] * residual_stride + out_row[j] * 2);
    }
    double squares_held[SQUARES];
    const int square_token = threadIdx.x % TOKENS;
    const int first_part = square_token < num_tokens ? threadIdx.x / TOKENS : num_parts;
    if (PARTS) {
#pragma unroll
        for (int j = 0; j < SQUARES; ++j) {
            const int part = first_part + j * (THREADS / TOKENS);
            squares_held[j] = 0.0;
            if (part < num_parts) squares_held[j] = load_double(squares + part * M + own_token + square_token);
        }
    }

    // -- the product

    float sums[CHAINS][TILES][MT][4];
#pragma unroll
    for (int chain = 0; chain < CHAINS; ++chain)
#pragma unroll
        for (int i = 0; i < TILES; ++i)
#pragma unroll
            for (int m = 0; m < MT; ++m)
#pragma unroll
                for (int c = 0; c < 4; ++c) sums[chain][i][m][c] = 0.0f;

    auto take_turn = [&](int turn, Chunk& weights, Piece(&inputs)[MT][2]) {
#if WEIGHTS
#pragma unroll
        for (int m = 0; m < MT; ++m)
#pragma unroll
            for (int half = 0; half < (BY_WORDS ? 0 : 2); ++half) exchange_in_fours(inputs[m][half], t);
#pragma unroll
        for (int i = 0; i < TILES; ++i) {
            float products[MT][4];
#pragma unroll
            for (int step = 0; step < 4; ++step) {
                const u32* const words = GROUP ? weights.words[i] + step * SPANS / 4 * 2 : of_rows[i];
                const Pairs pairs = pairs_of(weights.pieces[i], step, words);
#pragma unroll
                for (int m = 0; m < MT; ++m) {
                    const u32* right = inputs[m][step / 2].r + step % 2 * 2;
                    float* into = GROUP ? products[m] : sums[step % CHAINS][i][m];
#pragma unroll
                    for (int c = 0; c < (GROUP && step * SPANS % 4 == 0 ? 4 : 0); ++c) into[c] = 0.0f;
                    multiply(into, pairs.r[0], pairs.r[1], pairs.r[2], pairs.r[3], right[0], right[1]);
#pragma unroll
                    for (int c = 0; c < (GROUP && (step + 1) * SPANS % 4 == 0 ? 4 : 0); ++c)
                        sums[0][i][m][c] += scale_of(words[c / 2]) * into[c];
                }
            }
        }
#else
#pragma unroll
        for (int half = 0; half < 2; ++half) {
#pragma unroll
            for (int j = 0; j < 4; j += 2) {
#pragma unroll
                for (int i = 0; i < TILES; ++i) {
                    const u32 *low = weights.pieces[i][half].r + j, *high = weights.pieces[i][2 + half].r + j;
#pragma unroll
                    for (int m = 0; m < MT; ++m) {
                        const u32* right = inputs[m][half].r + j;
                        float* into = sums[(half * 2 + j / 2) % CHAINS][i][m];
                        multiply(into, low[0], high[0], low[1], high[1], right[0], right[1]);
                    }
                }
            }
        }
#endif
        if (TURNS > HELD_X) load_tokens(No{}, inputs, turn + HELD_X, turn + HELD_X < TURNS);
        if (TURNS > HELD) load_chunk(No{}, weights, turn + HELD, turn + HELD < TURNS);
    };
    if (TURNS <= ROUND) {
#pragma unroll
        for (int s = 0; s < TURNS; ++s) take_turn(s, held[s % HELD], tokens[s % HELD_X]);
    } else {
#pragma unroll 1
        for (int first = 0; first < TURNS; first += ROUND) {
#pragma unroll
            for (int s = 0; s < ROUND; ++s)
                if (TURNS % ROUND == 0 || first + s < TURNS) take_turn(first + s, held[s % HELD], tokens[s % HELD_X]);
        }
    }

    // -- the sums of the block's warps

#pragma unroll
    for (int i = 0; i < TILES; ++i) {
#pragma unroll
        for (int m = 0; m < MT; ++m) {
#pragma unroll
            for (int c = 0; c < 4; ++c) {
                float total = sums[0][i][m][c];
#pragma unroll
                for (int chain = 1; chain < CHAINS; ++chain) total += sums[chain][i][m][c];
#if WEIGHTS
                if (!GROUP) total *= scale_of(of_rows[i][c / 2]);
#endif
                shared.partial[warp][m * 8 + 2 * t + c % 2][i * 16 + g + c / 2 * 8] = total;
            }
        }
    }
    if (PARTS) {
        double total = sum_in_pairs<SQUARES>([&](int j) { return squares_held[j]; });
#pragma unroll 1
        for (int part = first_part + SQUARES * (THREADS / TOKENS); part < num_parts; part += THREADS / TOKENS)
            total += load_double(squares + part * M + own_token + square_token);
#pragma unroll
        for (int distance = 16; distance >= TOKENS_OF_WARP; distance /= 2)
            total += __shfl_xor_sync(0xffffffffu, total, distance);
        if (lane < TOKENS_OF_WARP) shared.square_sums[threadIdx.x / (TOKENS > 32 ? TOKENS : 32)][square_token] = total;
    }
    __syncthreads();

    auto sum_of_warps = [&](int token, int row) {  // rows >= ROWS belong to `up`
        float2 total = *(const float2*)&shared.partial[0][token][row];
#pragma unroll
        for (int v = 1; v < WARPS; ++v) {
            const float2 other = *(const float2*)&shared.partial[v][token][row];
            total.x += other.x;
            total.y += other.y;
        }
        return total;
    };

    // -- the work after the product

#pragma unroll
    for (int j = 0; j < UNITS_PER_THREAD; ++j) {
        const int token = token_of[j], row = (j * THREADS + threadIdx.x) % PAIRS * 2;
#if EXPERTS == 3
        const long long place = ((long long)rows[j] * N + out_row[j]) * 2;
#else
        const long long place = ((long long)token * N + out_row[j]) * 2;
#endif
        float2 total = {0.0f, 0.0f};
        if (is_mine[j]) {
            total = sum_of_warps(token, row);
            if (PARTS) {
                const double square = sum_in_pairs<SUM_SLOTS>([&](int i) { return shared.square_sums[i][token]; });
                const float inverse = rsqrtf((float)square / (float)K + eps);
                total.x *= inverse;
                total.y *= inverse;
                if (GATED) {
                    const float2 up = sum_of_warps(token, ROWS + row);
                    total.x = activate(total.x + biases[j].x) * (up.x * inverse);
                    total.y = activate(total.y + biases[j].y) * (up.y * inverse);
                }
            } else if (GATED) {
                const float2 up = sum_of_warps(token, ROWS + row);
                total.x = activate(total.x + biases[j].x) * up.x;
                total.y = activate(total.y + biases[j].y) * up.y;
            }
#if EXPERTS == 1
            total.x *= chosen.weight;
            total.y *= chosen.weight;
#elif EXPERTS == 3
            total.x *= shares[j];
            total.y *= shares[j];
#endif
            if (BIAS && !GATED) {
                total.x += biases[j].x;
                total.y += biases[j].y;
            }
        }
        if (!ADDS) {
            if (is_mine[j]) *(u32*)(y + place) = pack(total);
        } else {
            const float2 old = unpack(residuals[j]);
            const u32 added = pack(float2{total.x + old.x, total.y + old.y});
            const float2 r = unpack(added);
            if (is_mine[j]) {
                *(u32*)(sum + place) = added;
                *(u32*)(y + place) = pack(float2{r.x * (gains[j].x + offset), r.y * (gains[j].y + offset)});
            }
            double square = is_mine[j] ? (double)(r.x * r.x) + (double)(r.y * r.y) : 0.0;
#pragma unroll
            for (int distance = PAIRS / 2; distance > 0; distance /= 2)
                square += __shfl_xor_sync(0xffffffffu, square, distance);
            if (row == 0 && token < min(num_tokens, TOKENS)) squares[(long long)tile * M + own_token + token] = square;
        }
    }
}
