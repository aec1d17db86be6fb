/* Expert products of many rows: Hopper's TMA and wgmma, over blocks of rows that chose the same expert.

       y[r, n] = sum over k of x[r, k] * w[e, n, k]        e is the expert of row r

   The rows are sorted by expert, padded to blocks of 128 (moe/grouped.py). A tile is one block of rows by 256 rows of
   its expert's matrix; in a gated layer, 128 of the gate and the same 128 of `up`. One thread block runs per SM, and
   the thread blocks take tiles in turn. A thread block consists of

       two *warpgroups*   each of which multiplies 64 rows of x (left) by all 256 of W (right)
       four warps         that load both into STAGES stages of shared memory, and start with the next tile while the
                          results of this one are stored

   Tiles are large because the bandwidth of L2 is the limit: a stage of 64 columns is 32 KiB of W and 16 KiB of x, and
   its arithmetic grows with the product of the two. 192 rows were not faster (docs/log.md).

       GATHER   gate and up: row r of x is its token's row, row_order[r] / rows_per_input. TMA cannot gather rows, so
                each loading thread copies pieces of 16 bytes (cp.async), in the layout that the tensor cores read.
                Results are stored in sorted order, gated, for TMA to read
       else     down: x is in sorted order; results are multiplied by their weights and go to rows row_order[r]

   Warpgroups whose rows are all padding multiply nothing. Compiled with GATHER, ACTIVATION, STAGES and IS_BFLOAT16;
   K is a multiple of 64, N one of 8. */

#ifndef __grid_constant__
#define __grid_constant__ __attribute__((grid_constant))
#endif

typedef unsigned int u32;

#include "linear.cuh"
#include "wgmma.cuh"

constexpr bool GATED = ACTIVATION != 0;
constexpr int ROWS = 128, GROUPS = ROWS / 64, LOADERS = 128, THREADS = 128 * GROUPS + LOADERS;
constexpr int TALL = 256, OUTPUTS = GATED ? TALL / 2 : TALL;  // rows of W in a tile; outputs
constexpr int CHUNK = 64, X_BYTES = ROWS * CHUNK * 2, W_BYTES = TALL * CHUNK * 2, STAGE_BYTES = X_BYTES + W_BYTES;
constexpr int LOADER_REGISTERS = 40, REGISTERS = 232;

constexpr u32 NOWHERE = 0xffffffffu;  // place of padding, which is not copied: rows do not affect each other

#ifndef EMULATED

template <int COUNT>
__device__ __forceinline__ void take_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT)); }

template <int COUNT>
__device__ __forceinline__ void leave_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT)); }

// Copy 16 bytes to shared memory, and arrive at a barrier once all copies that this thread has issued are complete.
__device__ __forceinline__ void copy_piece(u32 to, const char* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

__device__ __forceinline__ void arrive_with_pieces(u64* barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(barrier)) : "memory");
}

// Load data that the previous kernel wrote; requested here, waited for at the first use.
__device__ __forceinline__ int load_int(const int* at) {
    int value;
    asm volatile("ld.global.s32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
    return value;
}

__device__ __forceinline__ float load_float(const float* at) {
    float value;
    asm volatile("ld.global.f32 %0, [%1];" : "=f"(value) : "l"(at) : "memory");
    return value;
}

// Make data that threads (not TMA) copied visible to the tensor cores.
__device__ __forceinline__ void show_to_matrix_unit() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

__device__ __forceinline__ void store_piece(char* to, const Piece& piece) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};"
                 ::"l"(to), "r"(piece.r[0]), "r"(piece.r[1]), "r"(piece.r[2]), "r"(piece.r[3]) : "memory");
}

__device__ __forceinline__ void hold(float* sums) {  // no use of the sums moves above this
#pragma unroll
    for (int i = 0; i < TALL / 2; ++i) asm volatile("" : "+f"(sums[i])::"memory");
}

#define SUMS_8 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
#define SUMS_10 ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define SUMS_12 ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111"
#define SUMS_14 ", %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"

// Multiply 64 rows of x by 256 rows of W over 16 columns.
__device__ __forceinline__ void add_tall_product(float* s, u64 x, u64 w) {
    asm volatile("{ wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {"
                 SUMS_0 SUMS_1 SUMS_2 SUMS_3 SUMS_4 SUMS_6 SUMS_8 SUMS_10 SUMS_12 SUMS_14 "}, %128, %129, " PLUS
                 : OF_32(s), OF_32((s) + 32), OF_32((s) + 64), OF_32((s) + 96) : "l"(x), "l"(w));
}

#endif

struct Shared {
    alignas(1024) char stages[STAGES][STAGE_BYTES];
    u64 full[STAGES], empty[STAGES];
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) grouped_wgmma(
    const __grid_constant__ TensorMap w_map,  // [E * N, K] or [E * 2N, K], boxes of OUTPUTS rows
    const __grid_constant__ TensorMap x_map,  // [blocks * ROWS, K], boxes of ROWS; not with GATHER
    const char* x,                            // [inputs, K]
    const int* row_order,                     // [blocks * ROWS]: `num_rows` for padding
    const int* block_experts,                 // [blocks]: -1 for unused blocks, which come last
    const float* weights,                     // [num_rows]
    char* y,                                  // [blocks * ROWS, N] with GATHER, else [num_rows, N]
    long long x_row_bytes, int num_rows, int rows_per_input, int N, int K, int num_blocks
) {
    extern __shared__ char memory[];
    Shared& shared = *(Shared*)(((u64)memory + 1023) / 1024 * 1024);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int num_chunks = K / CHUNK, num_cuts = (N + OUTPUTS - 1) / OUTPUTS, num_tiles = num_blocks * num_cuts;

    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; ++s) {
            make_barrier(&shared.full[s], GATHER ? 1 + LOADERS : 1);
            make_barrier(&shared.empty[s], 4 * GROUPS);
        }
        publish_barriers();
        fetch_map(w_map);
        if (!GATHER) fetch_map(x_map);
    }
    __syncthreads();
    wait_for_kernel_before();

    int slot = 0;
    u32 parity = 0;
    auto go_on = [&] {
        if (++slot == STAGES) slot = 0, parity ^= 1;
    };

    if (warp >= 4 * GROUPS) {  // -- load
        leave_registers<LOADER_REGISTERS>();
        const int loader = threadIdx.x - 128 * GROUPS;
        const int piece = loader % 8, first = loader / 8;  // piece of a row; first row, then every sixteenth
        if (GATHER || loader == 0) {
            for (int tile = blockIdx.x; tile < num_tiles; tile += gridDim.x) {
                const int block = tile / num_cuts, output = tile % num_cuts * OUTPUTS;
                const int expert = load_int(block_experts + block);
                if (expert < 0) break;
                const int w_row = expert * (GATED ? 2 * N : N) + output;
                u32 places[GATHER ? ROWS / 16 : 1];  // places of the pieces in x, in units of pieces
                if (GATHER) {
#pragma unroll
                    for (int i = 0; i < ROWS / 16; ++i) {
                        const int row = load_int(row_order + block * ROWS + first + 16 * i);
                        places[i] = row < num_rows ? (u32)(row / rows_per_input) * (u32)(x_row_bytes / 16) + piece : NOWHERE;
                    }
                }
                for (int chunk = 0; chunk < num_chunks; ++chunk) {
                    wait_until(&shared.empty[slot], parity ^ 1);
                    char* to = shared.stages[slot];
                    u64* full = &shared.full[slot];
                    if (loader == 0) {
                        expect_bytes(full, GATHER ? W_BYTES : STAGE_BYTES);
                        copy_box(to, w_map, w_row, chunk * CHUNK, full, READ_AGAIN);
                        if (GATED) copy_box(to + W_BYTES / 2, w_map, w_row + N, chunk * CHUNK, full, READ_AGAIN);
                        if (!GATHER) copy_box(to + W_BYTES, x_map, block * ROWS, chunk * CHUNK, full, READ_AGAIN);
                    }
                    if (GATHER) {
                        const u32 at = shared_address(to) + W_BYTES + first * 128 + (piece ^ first % 8) * 16;
#pragma unroll
                        for (int i = 0; i < ROWS / 16; ++i)
                            if (places[i] != NOWHERE)
                                copy_piece(at + i * (16 * 128), x + (u64)(places[i] + chunk * (CHUNK * 2 / 16)) * 16);
                        arrive_with_pieces(full);
                    }
                    go_on();
                }
            }
        }
        if (loader == 0) let_next_kernel_start();
    } else {  // -- multiply
        take_registers<REGISTERS>();
        const int group = warp / 4, own = warp % 4 * 16 + lane / 4;  // own: this row, and own + 8
        float sums[TALL / 2];
        int expert = -1, first_row = 0, rows[2], next_expert = -1, next_first_row = 0, next_rows[2];
        float row_weights[2], next_weights[2] = {1.0f, 1.0f};
        auto ask_for_rows = [&](int tile) {
            next_expert = -1;
            if (tile >= num_tiles) return;
            const int block = tile / num_cuts;
            next_expert = load_int(block_experts + block);
            const int* order = row_order + block * ROWS + group * 64;
            next_first_row = load_int(order);
            next_rows[0] = load_int(order + own);
            next_rows[1] = load_int(order + own + 8);
        };
        auto ask_for_weights = [&] {
            if (GATHER || next_expert < 0) return;
#pragma unroll
            for (int half = 0; half < 2; ++half)
                if (next_rows[half] < num_rows) next_weights[half] = load_float(weights + next_rows[half]);
        };
        ask_for_rows(blockIdx.x);
        ask_for_weights();
        for (int tile = blockIdx.x;; tile += gridDim.x) {
            expert = next_expert, first_row = next_first_row;
#pragma unroll
            for (int half = 0; half < 2; ++half) rows[half] = next_rows[half], row_weights[half] = next_weights[half];
            if (expert < 0) break;
            ask_for_rows(tile + gridDim.x);  // they arrive while this tile is multiplied
            const int block = tile / num_cuts, output = tile % num_cuts * OUTPUTS;
            if (first_row >= num_rows) {  // padding
                for (int chunk = 0; chunk < num_chunks; ++chunk) {
                    wait_until(&shared.full[slot], parity);
                    __syncwarp();
                    if (lane == 0) arrive(&shared.empty[slot]);
                    go_on();
                }
                ask_for_weights();
                continue;
            }
#pragma unroll
            for (int i = 0; i < TALL / 2; ++i) sums[i] = 0.0f;
            int before = 0;
            for (int chunk = 0; chunk < num_chunks; ++chunk) {
                wait_until(&shared.full[slot], parity);
                if (GATHER) show_to_matrix_unit();
                const u64 w = operand(shared.stages[slot]);
                const u64 x_rows = operand(shared.stages[slot] + W_BYTES + group * (64 * CHUNK * 2));
                begin_products();
#pragma unroll
                for (int step = 0; step < CHUNK / 16; ++step)  // 16 columns are 32 bytes
                    add_tall_product(sums, x_rows + step * 2, w + step * 2);
                end_products();
                wait_for_products<1>();  // products of the previous chunk
                if (chunk > 0 && lane == 0) arrive(&shared.empty[before]);
                before = slot;
                go_on();
            }
            wait_for_products<0>();
            if (lane == 0) arrive(&shared.empty[before]);
            hold(sums);
            ask_for_weights();

            const int column = output + lane % 4 * 8;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int row = rows[half];
                const bool is_stored = row < num_rows;
                const long long place = GATHER ? block * ROWS + group * 64 + own + 8 * half : row;
                char* to = y + (place * N + column) * 2;
#pragma unroll
                for (int part = 0; part < OUTPUTS / 32; ++part) {
                    Piece words;
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        const float* s = sums + 4 * (4 * part + i) + 2 * half;
                        float2 total = {s[0], s[1]};
                        if (GATED) {
                            total.x = activate(total.x) * s[TALL / 4];
                            total.y = activate(total.y) * s[TALL / 4 + 1];
                        } else {
                            total.x *= row_weights[half];
                            total.y *= row_weights[half];
                        }
                        words.r[i] = pack(total);
                    }
                    exchange_in_fours(words, lane % 4);
                    if (is_stored && column + 32 * part < N)
                        store_piece(to + part * 64, words);
                }
            }
        }
    }
}
