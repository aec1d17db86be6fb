/* What a warp does with 16 positions, and how warps and splits are put together: the pieces of `decode_attention.cu`,
   whose first comment explains lanes (g, t), fragments and why they are loaded as they are, and of
   `decode_projected.cu`. */

typedef unsigned short Element;
typedef unsigned int Pair;  // two elements, the first one in the lower half

constexpr int N = G * M;
constexpr int WARP = 32;
constexpr int THREADS = WARPS * WARP;
constexpr int TILE = 16;              // positions of one instruction
constexpr int STRIDE = WARPS * TILE;  // from a warp's tile to its next
constexpr int K_PIECES = H / 32;      // 16-byte pieces of a key that one lane loads
constexpr int V_PIECES = H / 64;
constexpr int ROWS = H / 16;             // tiles of rows that make up the output
constexpr float SLACK = 8.0f;            // a weight is at most 2^SLACK
constexpr float LOWEST = -1e30f;         // below any score, yet finite: LOWEST - LOWEST is 0, -inf - -inf is not
constexpr float UNSEEN = 2.0f * LOWEST;  // the weight 2^(UNSEEN - LOWEST) is 0

static_assert(H == 64 || H == 128, "heads of 64 or 128");
static_assert(M <= 8, "heads are the 8 columns of a matrix");
static_assert(BLOCK_SIZE % TILE == 0, "a tile must lie in one block");

// ---- instructions that C++ has no name for; an emulator brings its own ---------------------------

#ifndef EMULATED
__device__ void multiply(float (&c)[4], Pair a0, Pair a1, Pair a2, Pair a3, Pair b0, Pair b1) {
#if IS_BFLOAT16
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
#else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
#endif
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

__device__ Pair transpose(Pair row) {  // lane (g, t) gives columns 2t, 2t+1 of row g and gets rows 2t, 2t+1 of column g
    Pair column;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(column) : "r"(row));
    return column;
}

__device__ Pair pack(float low, float high) {
    Pair pair;
#if IS_BFLOAT16
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
#else
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
#endif
    return pair;
}

__device__ float2 unpack(Pair pair) {
#if IS_BFLOAT16
    return float2{__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u)};
#else
    float2 x;
    asm("{.reg .b16 low, high; mov.b32 {low, high}, %2; cvt.f32.f16 %0, low; cvt.f32.f16 %1, high;}"
        : "=f"(x.x), "=f"(x.y)
        : "r"(pair));
    return x;
#endif
}

__device__ float power_of_two(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Read once: not worth a place in L1. Two loads of a key take half a line of 128 bytes each: L2 brings all of it.
__device__ uint4 load_stream(const Element* at) {
    uint4 x;
    asm volatile("ld.global.L1::no_allocate.L2::128B.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "l"(at));
    return x;
}

__device__ void prefetch(const Element* at) { asm volatile("prefetch.global.L2 [%0];" ::"l"(at)); }

__device__ int take_ticket(int* counter) {  // the holder of a later one sees what was written before
    int ticket;
    asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], 1;" : "=r"(ticket) : "l"(counter) : "memory");
    return ticket;
}

__device__ void gdc_launch_dependents() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
__device__ void gdc_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
#endif

__device__ Pair word(const uint4& x, int i) { return i == 0 ? x.x : i == 1 ? x.y : i == 2 ? x.z : x.w; }
__device__ Pair both_low(Pair first, Pair second) { return __byte_perm(first, second, 0x5410); }
__device__ Pair both_high(Pair first, Pair second) { return __byte_perm(first, second, 0x7632); }

// ---- keys, values and queries, as fragments ------------------------------------------------------

struct Keys {
    uint4 piece[2][K_PIECES];  // of positions g and g+8
};

struct Values {
    uint4 piece[4][V_PIECES];  // of positions 2t, 2t+1, 2t+8, 2t+9
};

// Where a tile's first position is: `block` holds it.
__device__ long long offset_of(int block, int position, int head) {
    return (((long long)block * BLOCK_SIZE + position % BLOCK_SIZE) * G + head) * H;
}

__device__ void load_keys(Keys& k, const Element* tile, int g, int t) {
#pragma unroll
    for (int p = 0; p < 2; ++p)
#pragma unroll
        for (int c = 0; c < K_PIECES; ++c) k.piece[p][c] = load_stream(tile + (g + p * 8) * G * H + c * 32 + t * 8);
}

__device__ void load_values(Values& v, const Element* tile, int g, int t) {
#pragma unroll
    for (int p = 0; p < 4; ++p)
#pragma unroll
        for (int c = 0; c < V_PIECES; ++c)
            v.piece[p][c] = load_stream(tile + (2 * t + p % 2 + p / 2 * 8) * G * H + c * 64 + g * 8);
}

__device__ void load_query(uint4 (&query)[K_PIECES], const Element* heads, long long head_stride, int g, int t) {
#pragma unroll
    for (int c = 0; c < K_PIECES; ++c) {
        query[c] = uint4{0, 0, 0, 0};  // of a column without a head
        if (g < M) query[c] = *reinterpret_cast<const uint4*>(heads + g * head_stride + c * 32 + t * 8);
    }
}

// ---- the softmax of a warp -----------------------------------------------------------------------

struct Softmax {  // of heads 2t and 2t+1
    float total[ROWS][4], maximum[2], denominator[2];
};

__device__ void multiply_keys(float (&score)[4], const Keys& k, const uint4 (&query)[K_PIECES], float scale_log2e) {
    float part[2][4] = {};  // two chains, for each instruction waits for the sum it adds to
#pragma unroll
    for (int c = 0; c < K_PIECES; ++c)
#pragma unroll
        for (int j = 0; j < 2; ++j)
            multiply(part[j], word(k.piece[0][c], 2 * j), word(k.piece[1][c], 2 * j), word(k.piece[0][c], 2 * j + 1),
                     word(k.piece[1][c], 2 * j + 1), word(query[c], 2 * j), word(query[c], 2 * j + 1));
#pragma unroll
    for (int e = 0; e < 4; ++e) score[e] = (part[0][e] + part[1][e]) * scale_log2e;
}

__device__ void follow_maximum(Softmax& softmax, const float (&score)[4]) {
    float largest[2] = {fmaxf(score[0], score[2]), fmaxf(score[1], score[3])};
    const bool is_larger = largest[0] > softmax.maximum[0] + SLACK || largest[1] > softmax.maximum[1] + SLACK;
    if (!__any_sync(0xffffffffu, is_larger)) return;
#pragma unroll
    for (int e = 0; e < 2; ++e) {
#pragma unroll
        for (int distance = 4; distance < WARP; distance *= 2)  // over the lanes of one t: all positions
            largest[e] = fmaxf(largest[e], __shfl_xor_sync(0xffffffffu, largest[e], distance));
        const float larger = fmaxf(softmax.maximum[e], largest[e]);
        const float rescale = power_of_two(softmax.maximum[e] - larger);
        softmax.maximum[e] = larger;
        softmax.denominator[e] *= rescale;
#pragma unroll
        for (int j = 0; j < ROWS; ++j) {
            softmax.total[j][e] *= rescale;
            softmax.total[j][e + 2] *= rescale;
        }
    }
}

__device__ void add_values(Softmax& softmax, float (&score)[4], const Values& v) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
        score[e] = power_of_two(score[e] - softmax.maximum[e % 2]);  // from here on a weight
        softmax.denominator[e % 2] += score[e];
    }
    const Pair weights0 = transpose(pack(score[0], score[1])), weights8 = transpose(pack(score[2], score[3]));
#pragma unroll
    for (int j = 0; j < ROWS; ++j) {
        const Pair v0 = word(v.piece[0][j / 4], j % 4), v1 = word(v.piece[1][j / 4], j % 4);
        const Pair v8 = word(v.piece[2][j / 4], j % 4), v9 = word(v.piece[3][j / 4], j % 4);
        multiply(softmax.total[j], both_low(v0, v1), both_high(v0, v1), both_low(v8, v9), both_high(v8, v9), weights0,
                 weights8);
    }
}

// A tile at the edge of an item: unseen positions get no weight, and no value, for 0 times not-a-number is not 0.
__device__ void hide_scores(float (&score)[4], int first, int end, int g) {  // both relative to the tile
#pragma unroll
    for (int e = 0; e < 4; ++e)
        if (g + e / 2 * 8 < first || g + e / 2 * 8 >= end) score[e] = UNSEEN;
}

__device__ void hide_values(Values& v, int first, int end, int t) {
#pragma unroll
    for (int p = 0; p < 4; ++p) {
        const int at = 2 * t + p % 2 + p / 2 * 8;
#pragma unroll
        for (int c = 0; c < V_PIECES; ++c)
            if (at < first || at >= end) v.piece[p][c] = uint4{0, 0, 0, 0};
    }
}

// ---- putting together ----------------------------------------------------------------------------

// Aligned by decree: the compiler puts shared arrays one after the other, and 4 floats are stored at once.
__shared__ __align__(16) float warp_sums[WARPS][M][H];
__shared__ float warp_maxima[WARPS][M], warp_denominators[WARPS][M];
__shared__ int last_ticket;

struct Merged {  // 4 elements of a head
    float x[4], maximum, denominator;
};

__device__ void add_part(Merged& merged, const float4& sum, float maximum, float denominator) {
    const float rescale = power_of_two(maximum - merged.maximum);
    merged.denominator += rescale * denominator;
    merged.x[0] += rescale * sum.x;
    merged.x[1] += rescale * sum.y;
    merged.x[2] += rescale * sum.z;
    merged.x[3] += rescale * sum.w;
}

__device__ void leave_part(Softmax& softmax, int warp, int g, int t) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
        const int m = 2 * t + e;
#pragma unroll
        for (int distance = 4; distance < WARP; distance *= 2)
            softmax.denominator[e] += __shfl_xor_sync(0xffffffffu, softmax.denominator[e], distance);
        if (m >= M) continue;
#pragma unroll
        for (int j = 0; j < ROWS; j += 2)
            *reinterpret_cast<float4*>(&warp_sums[warp][m][j / 4 * 64 + g * 8 + j % 4 * 2]) =
                float4{softmax.total[j][e], softmax.total[j][e + 2],  //
                       softmax.total[j + 1][e], softmax.total[j + 1][e + 2]};
        if (g == 0) {
            warp_maxima[warp][m] = softmax.maximum[e];
            warp_denominators[warp][m] = softmax.denominator[e];
        }
    }
}

__device__ Merged merge_warps(int m, int h) {
    Merged merged = {{0.0f, 0.0f, 0.0f, 0.0f}, LOWEST, 0.0f};
#pragma unroll
    for (int w = 0; w < WARPS; ++w) merged.maximum = fmaxf(merged.maximum, warp_maxima[w][m]);
#pragma unroll
    for (int w = 0; w < WARPS; ++w)
        add_part(merged, *reinterpret_cast<const float4*>(&warp_sums[w][m][h]), warp_maxima[w][m],
                 warp_denominators[w][m]);
    return merged;
}

__device__ void store_out(Element* out, const Merged& merged) {
    const float scale = merged.denominator == 0.0f ? 0.0f : 1.0f / merged.denominator;  // 0: padding
    *reinterpret_cast<uint2*>(out) =
        uint2{pack(merged.x[0] * scale, merged.x[1] * scale), pack(merged.x[2] * scale, merged.x[3] * scale)};
}

// ---- work ----------------------------------------------------------------------------------------

struct Item {
    int s, row, first, end, split, num_splits, length;
};

__device__ Item read_item(const int4* items, int index, bool exists) {
    if (!exists) return Item{0, 0, 0, 0, 0, 0, 0};  // without positions
    const int4 x = items[2 * index], y = items[2 * index + 1];
    return Item{x.x, x.y, x.z, x.w, y.x, y.y, y.z};
}

struct Scratch {          // where parts of rows wait for each other
    float* sums;          // [S, max_splits, N, H]: weighted values, not yet divided
    float* maxima;        // [S, max_splits, N]
    float* denominators;  // the same
    int* tickets;         // [S, G]
    int max_splits;
};

// All warps have left their parts of an item: put them together, and with the row's other splits if they are done.
// `merge` adds the splits of 4 elements. What other SMs write or have written is in L2: stored and loaded
// with `cg`, past our own L1. A ticket makes visible what every thread stored before the barrier, not its holder alone.
template <typename Merge>
__device__ void finish_item(const Item& item, int head, Element* out, const Scratch& scratch, const Merge& merge) {
    __syncthreads();
    const long long out_head = (long long)item.s * N + head * M;
    const long long row_head = (long long)item.s * scratch.max_splits * N + head * M;
    for (int i = threadIdx.x; i < M * H / 4; i += THREADS) {
        const int m = i / (H / 4), h = i % (H / 4) * 4;
        const Merged merged = merge_warps(m, h);
        if (item.num_splits == 1) {
            store_out(out + (out_head + m) * H + h, merged);
            continue;
        }
        const long long part = row_head + item.split * N + m;
        __stcg(reinterpret_cast<float4*>(scratch.sums + part * H + h),
               float4{merged.x[0], merged.x[1], merged.x[2], merged.x[3]});
        if (h == 0) {
            __stcg(scratch.maxima + part, merged.maximum);
            __stcg(scratch.denominators + part, merged.denominator);
        }
    }
    if (item.num_splits > 1) {
        __syncthreads();  // every thread has stored before one of them takes the ticket
        int* counter = scratch.tickets + item.s * G + head;
        if (threadIdx.x == 0) last_ticket = take_ticket(counter);
        __syncthreads();
        if (last_ticket == item.num_splits - 1) {
            if (threadIdx.x == 0) *counter = 0;
            for (int i = threadIdx.x; i < M * H / 4; i += THREADS) {
                const int m = i / (H / 4), h = i % (H / 4) * 4;
                const long long part = row_head + m;
                store_out(out + (out_head + m) * H + h,
                          merge(scratch.sums + part * H + h, scratch.maxima + part, scratch.denominators + part,
                                item.num_splits));
            }
        }
    }
    __syncthreads();  // the next item may overwrite what the warps left
}
