/* The attention of a warp over 16 positions, and the merging of warps and splits: the parts that `decode_attention.cu`
   and `decode_projected.cu` share. The first comment of `decode_attention.cu` explains lanes (g, t), fragments and the
   way they are loaded. */

typedef unsigned short Element;
typedef unsigned int Pair;  // two elements, the first one in the lower half

// A piece is 8 elements of the cache: 16-bit numbers, or 8-bit codes (kernels/elementwise/kv_codes.py).
#if CODES
typedef unsigned char Kept;
typedef uint2 Piece;
#else
typedef Element Kept;
typedef uint4 Piece;
#endif

constexpr int N = G * M;
constexpr int WARP = 32;
constexpr int THREADS = WARPS * WARP;
constexpr int TILE = 16;              // positions of one instruction
constexpr int STRIDE = WARPS * TILE;  // positions from a warp's tile to its next
constexpr bool PAIRED = CODES && H == 128;  // pieces are adjacent in pairs, so that a load has 16 bytes
constexpr int K_PIECES = H / 32;      // pieces of a key that one lane loads
constexpr int V_PIECES = H / 64;
constexpr int ROWS = H / 16;             // tiles of rows that make up the output
constexpr float SLACK = 8.0f;            // a weight is at most 2^SLACK
constexpr float LOWEST = -1e30f;         // below any score, yet finite: LOWEST - LOWEST is 0, -inf - -inf is not
constexpr float SMALLEST_SCALE = 1e-18f;  // smallest scale of codes: values below it do not count
constexpr float UNSEEN = 2.0f * LOWEST;  // the weight 2^(UNSEEN - LOWEST) is 0

static_assert(H == 64 || H == 128, "heads of 64 or 128");
static_assert(M <= 8, "heads are the 8 columns of a matrix");
static_assert(BLOCK_SIZE % TILE == 0, "a tile must lie in one block");

// ---- instructions that C++ has no name for; an emulator defines its own ---------------------------

#ifndef EMULATED
__device__ void multiply(float (&c)[4], Pair a0, Pair a1, Pair a2, Pair a3, Pair b0, Pair b1) {
#if IS_BFLOAT16 && !CODES
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

__device__ Pair pack_half(float low, float high) {
    Pair pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

#if CODES
__device__ Pair decode_fp8(Pair codes) {  // the two codes in the lower half, as float16
    Pair pair;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(pair) : "h"((unsigned short)codes));
    return pair;
}

__device__ Pair encode_fp8(float low, float high) {
    unsigned short codes;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(high), "f"(low));
    return codes;
}

__device__ Pair subtract_half(Pair a, Pair b) {
    Pair pair;
    asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(pair) : "r"(a), "r"(b));
    return pair;
}

__device__ float log_of_two(float x) {
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
#endif

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

// For data that is read only once: it bypasses L1. Two loads of a key take half a line of 128 bytes each, and L2
// fetches the whole line.
__device__ uint4 load_stream(const void* at) {
    uint4 x;
    asm volatile("ld.global.L1::no_allocate.L2::128B.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "l"(at));
    return x;
}

__device__ uint2 load_half_stream(const void* at) {
    uint2 x;
    asm volatile("ld.global.L1::no_allocate.L2::128B.v2.u32 {%0,%1}, [%2];" : "=r"(x.x), "=r"(x.y) : "l"(at));
    return x;
}

__device__ void prefetch(const void* at) { asm volatile("prefetch.global.L2 [%0];" ::"l"(at)); }

__device__ int take_ticket(int* counter) {  // the holder of a later ticket sees all earlier holders' writes
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

// ---- codes, which are multiplied as float16, where every code is exact ------------------------------

#if CODES
__device__ uint4 widen(const uint2& codes) {
#if CODES == 1
    return uint4{decode_fp8(codes.x), decode_fp8(codes.x >> 16), decode_fp8(codes.y), decode_fp8(codes.y >> 16)};
#else  // 1024 + (128 + code), built from its bits, minus 1152
    const Pair x = codes.x ^ 0x80808080u, y = codes.y ^ 0x80808080u, base = 0x64646464u, bias = 0x64806480u;
    return uint4{subtract_half(__byte_perm(x, base, 0x4140), bias), subtract_half(__byte_perm(x, base, 0x4342), bias),
                 subtract_half(__byte_perm(y, base, 0x4140), bias), subtract_half(__byte_perm(y, base, 0x4342), bias)};
#endif
}

__device__ Pair encode_two(Pair elements, float inverse) {
    const float2 x = unpack(elements);
#if CODES == 1
    return encode_fp8(x.x * inverse, x.y * inverse);
#else
    return (__float2int_rn(x.x * inverse) & 0xff) | (__float2int_rn(x.y * inverse) & 0xff) << 8;
#endif
}

__device__ uint2 encode(const uint4& x, float inverse) {
    return uint2{encode_two(x.x, inverse) | encode_two(x.y, inverse) << 16,
                 encode_two(x.z, inverse) | encode_two(x.w, inverse) << 16};
}

__device__ float larger_of(float a, float b) { return a <= b || b != b ? b : a; }  // NaN if either is NaN

// The largest element of the head that the 4 lanes of a g hold together; 0 if its scale would have no inverse.
__device__ float largest_of(const uint4 (&x)[K_PIECES]) {
    float largest = 0.0f;
#pragma unroll
    for (int c = 0; c < K_PIECES; ++c)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float2 both = unpack(word(x[c], i));
            largest = larger_of(largest, larger_of(fabsf(both.x), fabsf(both.y)));
        }
    largest = larger_of(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
    largest = larger_of(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
    return largest < 1e-30f ? 0.0f : largest;
}

constexpr float LARGEST_CODE = CODES == 1 ? 448.0f : 127.0f;
__device__ float inverse_scale(float largest) { return LARGEST_CODE / (largest == 0.0f ? 1.0f : largest); }

#else
__device__ const uint4& widen(const uint4& elements) { return elements; }
#endif

// Convert the queries of a warp to float16, like codes. If they are too large for it, they are first divided by a power
// of two. Returns this power, by which the scores must be multiplied.
__device__ float to_half(uint4 (&query)[K_PIECES]) {
    float factor = 1.0f;
#if CODES && IS_BFLOAT16
    float largest = largest_of(query), shrink = 1.0f;
    if (__any_sync(0xffffffffu, largest >= 65536.0f)) {  // the largest bfloat16 below is a float16, too
        for (int distance = 4; distance < WARP; distance *= 2)  // over all heads except heads with NaN
            largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, distance));
        const unsigned int exponent = __float_as_uint(largest) >> 23;
        factor = __uint_as_float((exponent - 15) << 23);
        shrink = __uint_as_float((2 * 127 + 15 - exponent) << 23);
    }
#pragma unroll
    for (int c = 0; c < K_PIECES; ++c) {
        const float2 x = unpack(query[c].x), y = unpack(query[c].y), z = unpack(query[c].z), w = unpack(query[c].w);
        query[c] = uint4{pack_half(x.x * shrink, x.y * shrink), pack_half(y.x * shrink, y.y * shrink),
                         pack_half(z.x * shrink, z.y * shrink), pack_half(w.x * shrink, w.y * shrink)};
    }
#endif
    return factor;
}

// ---- keys, values and queries, as fragments ------------------------------------------------------

struct Keys {
    Piece piece[2][K_PIECES];  // pieces of positions g and g+8
#if CODES
    float scale[2], value_scale[2];  // scales of these positions
#endif
};

struct Values {
    Piece piece[4][V_PIECES];  // pieces of positions 2t, 2t+1, 2t+8, 2t+9
};

struct Cache {
    const Kept *keys, *values;                 // [P, G, H]
    const float *key_scales, *value_scales;    // scales of codes: [blocks, G, BLOCK_SIZE]
};

struct Tile {  // offsets of its first position in keys or values, and in their scales
    long long at, scale;
};

__device__ Tile tile_of(int block, int position, int head) {  // `block` holds the position
    const int offset = position % BLOCK_SIZE;
    return Tile{(((long long)block * BLOCK_SIZE + offset) * G + head) * H,
                ((long long)block * G + head) * BLOCK_SIZE + offset};
}

// The first of the 8 adjacent elements of piece c: of a key in lane t, and of a value in lane g.
__device__ constexpr int key_element(int c, int t) { return PAIRED ? c / 2 * 64 + t * 16 + c % 2 * 8 : c * 32 + t * 8; }
__device__ constexpr int value_element(int c, int g) { return PAIRED ? g * 16 + c * 8 : c * 64 + g * 8; }

template <int PIECES, typename Element_of>
__device__ void load_pieces(Piece (&piece)[PIECES], const Kept* head, const Element_of& element_of) {
#pragma unroll
    for (int c = 0; c < PIECES; c += PAIRED ? 2 : 1) {
#if !CODES
        piece[c] = load_stream(head + element_of(c));
#elif H == 128
        const uint4 both = load_stream(head + element_of(c));
        piece[c] = uint2{both.x, both.y};
        piece[c + 1] = uint2{both.z, both.w};
#else
        piece[c] = load_half_stream(head + element_of(c));
#endif
    }
}

__device__ void load_keys(Keys& k, const Cache& cache, const Tile& tile, int g, int t) {
#pragma unroll
    for (int p = 0; p < 2; ++p) {
        load_pieces(k.piece[p], cache.keys + tile.at + (g + p * 8) * G * H, [&](int c) { return key_element(c, t); });
#if CODES  // bypasses L1: a line may be requested before the previous kernel has written the newest scale in it
        k.scale[p] = __ldcg(cache.key_scales + tile.scale + g + p * 8);
        k.value_scale[p] = __ldcg(cache.value_scales + tile.scale + g + p * 8);
#endif
    }
}

__device__ void load_values(Values& v, const Cache& cache, const Tile& tile, int g, int t) {
#pragma unroll
    for (int p = 0; p < 4; ++p)
        load_pieces(v.piece[p], cache.values + tile.at + (2 * t + p % 2 + p / 2 * 8) * G * H,
                    [&](int c) { return value_element(c, g); });
}

__device__ float load_query(uint4 (&query)[K_PIECES], const Element* heads, long long head_stride, int g, int t) {
#pragma unroll
    for (int c = 0; c < K_PIECES; ++c) {
        query[c] = uint4{0, 0, 0, 0};  // zeros for a column without a head
        if (g < M) query[c] = *reinterpret_cast<const uint4*>(heads + g * head_stride + key_element(c, t));
    }
    return to_half(query);
}

// ---- the softmax of a warp -----------------------------------------------------------------------

struct Softmax {  // the state of heads 2t and 2t+1
    float total[ROWS][4], maximum[2], denominator[2];
};

// The scores of positions g and g+8. The weight of codes includes their scale: its exponent is the score plus the
// logarithm of the scale. So the softmax follows the maximum of this sum, and a weight fits float16 for any scale.
struct Scores {
    float x[4];
#if CODES
    float log_scale[2];
#endif
};

__device__ float exponent(const Scores& score, int e) {
#if CODES
    return score.x[e] + score.log_scale[e / 2];
#else
    return score.x[e];
#endif
}

__device__ void multiply_keys(Scores& score, const Keys& k, const uint4 (&query)[K_PIECES], float scale_log2e) {
    float part[2][4] = {};  // two chains, because each instruction waits for the sum it adds to
#pragma unroll
    for (int c = 0; c < K_PIECES; ++c) {
        const uint4 k0 = widen(k.piece[0][c]), k8 = widen(k.piece[1][c]);
#pragma unroll
        for (int j = 0; j < 2; ++j)
            multiply(part[j], word(k0, 2 * j), word(k8, 2 * j), word(k0, 2 * j + 1), word(k8, 2 * j + 1),
                     word(query[c], 2 * j), word(query[c], 2 * j + 1));
    }
#pragma unroll
    for (int e = 0; e < 4; ++e) score.x[e] = (part[0][e] + part[1][e]) * scale_log2e;
#if CODES
#pragma unroll
    for (int e = 0; e < 4; ++e) score.x[e] *= k.scale[e / 2];
#pragma unroll
    for (int p = 0; p < 2; ++p)  // for a head of zeros, any number works
        score.log_scale[p] = log_of_two(k.value_scale[p] < SMALLEST_SCALE ? SMALLEST_SCALE : k.value_scale[p]);
#endif
}

__device__ void follow_maximum(Softmax& softmax, const Scores& score) {
    float largest[2] = {fmaxf(exponent(score, 0), exponent(score, 2)), fmaxf(exponent(score, 1), exponent(score, 3))};
    const bool is_larger = largest[0] > softmax.maximum[0] + SLACK || largest[1] > softmax.maximum[1] + SLACK;
    if (!__any_sync(0xffffffffu, is_larger)) return;
#pragma unroll
    for (int e = 0; e < 2; ++e) {
#pragma unroll
        for (int distance = 4; distance < WARP; distance *= 2)  // over the lanes with the same t: all positions
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

__device__ void add_values(Softmax& softmax, const Scores& score, const Values& v) {
    float weight[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) {
        weight[e] = power_of_two(exponent(score, e) - softmax.maximum[e % 2]);
        softmax.denominator[e % 2] += CODES ? power_of_two(score.x[e] - softmax.maximum[e % 2]) : weight[e];
    }
#if CODES
    const Pair weights0 = transpose(pack_half(weight[0], weight[1]));
    const Pair weights8 = transpose(pack_half(weight[2], weight[3]));
#else
    const Pair weights0 = transpose(pack(weight[0], weight[1])), weights8 = transpose(pack(weight[2], weight[3]));
#endif
#pragma unroll
    for (int c = 0; c < V_PIECES; ++c) {
        const uint4 at0 = widen(v.piece[0][c]), at1 = widen(v.piece[1][c]);
        const uint4 at8 = widen(v.piece[2][c]), at9 = widen(v.piece[3][c]);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const Pair v0 = word(at0, j), v1 = word(at1, j), v8 = word(at8, j), v9 = word(at9, j);
            multiply(softmax.total[c * 4 + j], both_low(v0, v1), both_high(v0, v1), both_low(v8, v9),
                     both_high(v8, v9), weights0, weights8);
        }
    }
}

// A tile at the edge of an item: unseen positions get weight 0 and value 0, because 0 times NaN is not 0.
__device__ void hide_scores(Scores& score, int first, int end, int g) {  // `first` and `end` are relative to the tile
#pragma unroll
    for (int e = 0; e < 4; ++e)
        if (g + e / 2 * 8 < first || g + e / 2 * 8 >= end) {
            score.x[e] = UNSEEN;
#if CODES
            score.log_scale[e / 2] = 0.0f;
#endif
        }
}

__device__ void hide_values(Values& v, int first, int end, int t) {
#pragma unroll
    for (int p = 0; p < 4; ++p) {
        const int at = 2 * t + p % 2 + p / 2 * 8;
#pragma unroll
        for (int c = 0; c < V_PIECES; ++c)
            if (at < first || at >= end) v.piece[p][c] = Piece{};
    }
}

// ---- merging -------------------------------------------------------------------------------------

// Aligned explicitly: the compiler packs shared arrays without gaps, and 4 floats are stored at once.
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
            *reinterpret_cast<float4*>(&warp_sums[warp][m][value_element(j / 4, g) + j % 4 * 2]) =
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
    if (!exists) return Item{0, 0, 0, 0, 0, 0, 0};  // an item without positions
    const int4 x = items[2 * index], y = items[2 * index + 1];
    return Item{x.x, x.y, x.z, x.w, y.x, y.y, y.z};
}

struct Scratch {          // memory for the partial results of rows until they are merged
    float* sums;          // [S, max_splits, N, H]: weighted values, not yet divided
    float* maxima;        // [S, max_splits, N]
    float* denominators;  // the same
    int* tickets;         // [S, G]
    int max_splits;
};

// Merge the parts of an item that all warps have stored and, if the row's other splits are done, merge the splits.
// `merge` adds the splits of 4 elements. Data of other SMs is in L2, so it is stored and loaded with `cg`, which
// bypasses L1. A ticket makes visible what all threads stored before the barrier, not only its holder's stores.
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
    __syncthreads();  // the next item may overwrite the parts of the warps
}
