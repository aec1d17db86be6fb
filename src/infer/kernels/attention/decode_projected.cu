/* Attention of few decoding rows, from the fused projection to the output in one launch.

   It implements `attend_projected` of `decode.py` with the warps and fragments of `decode_attention.cu`; read that
   first. With few rows, latency dominates and not bandwidth, so all data older than the projection is requested
   before the kernel that computes the projection has ended:

       before   item of work ─► block table ─► first tile of keys and values; angles; gains of the norm
       after    queries, and the newest key and value ─► norm, rotation ─► scores ─► part ─► ticket ─► parts ─► out

   The fragment of the queries suits the rotation. In each 32 elements, lane (g, t) has 8t..8t+7 of head g, so
   element h and its partner h + H/2 are in the same lane, in pieces c and c + H/64, and the sum of squares for the
   norm is a sum over 4 lanes. Every warp norms and rotates the queries by itself, without any exchange. If a column
   is left, the newest key is normed and rotated there as one more query head.

   The newest position is not in the cache yet. Warps walk backwards from the end of an item, so this position is in
   the first tile of warp 0 of a row's last split. The lanes whose fragment should hold its key and value overwrite the
   loaded data with them, and write them to the cache. Nothing else reads that slot.

   Compiled with the defines of decode_attention.cu, and
       HAS_NORM   queries and keys are normed before they are rotated */

#include "decode.cuh"

constexpr int HALF = K_PIECES / 2;  // pieces of a head's first half
constexpr int PREFETCHED = 2;       // tiles of a warp, after its first, that are prefetched to L2 before the wait
constexpr int LINES = CODES ? 1 : V_PIECES;  // lines of a position
constexpr int BATCH = 8;            // splits that are read at once
constexpr bool HAS_ROOM = M < 8;    // a column of the queries is left for the newest key

// Angles and gains of the newest token's heads, in shared memory because keys fill the registers.
__shared__ __align__(16) float angle_cos[H / 2], angle_sin[H / 2], gains[2][H];  // gains of queries and of keys

__device__ void load_angles(const float* cos, const float* sin, const Element* q_gain, const Element* k_gain,
                            int position, float offset) {
    for (int i = threadIdx.x; i < H / 2; i += THREADS) {
        angle_cos[i] = cos[(long long)position * (H / 2) + i];
        angle_sin[i] = sin[(long long)position * (H / 2) + i];
    }
    if (HAS_NORM)
        for (int i = threadIdx.x; i < H; i += THREADS) {
            gains[0][i] = unpack(q_gain[i]).x + offset;
            gains[1][i] = unpack(k_gain[i]).x + offset;
        }
}

__device__ float2 read_two(const float* at) { return *reinterpret_cast<const float2*>(at); }

__device__ void load_head(uint4 (&x)[K_PIECES], const Element* head, int t) {
#pragma unroll
    for (int c = 0; c < K_PIECES; ++c) x[c] = *reinterpret_cast<const uint4*>(head + key_element(c, t));
}

__device__ uint4 of_lane(const uint4& x, int lane) {
    return uint4{__shfl_sync(0xffffffffu, x.x, lane), __shfl_sync(0xffffffffu, x.y, lane),
                 __shfl_sync(0xffffffffu, x.z, lane), __shfl_sync(0xffffffffu, x.w, lane)};
}

// Norm and rotate the head that the 4 lanes of a g hold together.
__device__ void transform(uint4 (&x)[K_PIECES], const float* gain, float eps, int t) {
    float inv_rms = 1.0f;
    if (HAS_NORM) {
        float squares = 0.0f;
#pragma unroll
        for (int c = 0; c < K_PIECES; ++c)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float2 both = unpack(word(x[c], i));
                squares += both.x * both.x + both.y * both.y;
            }
        squares += __shfl_xor_sync(0xffffffffu, squares, 1);
        squares += __shfl_xor_sync(0xffffffffu, squares, 2);
        inv_rms = rsqrtf(squares / H + eps);
    }
#pragma unroll
    for (int c = 0; c < HALF; ++c) {
        Pair turned[2][4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            float2 first = unpack(word(x[c], i)), second = unpack(word(x[c + HALF], i));
            const int at = key_element(c, t) + 2 * i;
            if (HAS_NORM) {  // rounded as a separate norm would round it
                const float2 gain0 = read_two(gain + at), gain1 = read_two(gain + H / 2 + at);
                first = unpack(pack(first.x * inv_rms * gain0.x, first.y * inv_rms * gain0.y));
                second = unpack(pack(second.x * inv_rms * gain1.x, second.y * inv_rms * gain1.y));
            }
            const float2 cos = read_two(angle_cos + at), sin = read_two(angle_sin + at);
            turned[0][i] = pack(first.x * cos.x - second.x * sin.x, first.y * cos.y - second.y * sin.y);
            turned[1][i] = pack(second.x * cos.x + first.x * sin.x, second.y * cos.y + first.y * sin.y);
        }
        x[c] = uint4{turned[0][0], turned[0][1], turned[0][2], turned[0][3]};
        x[c + HALF] = uint4{turned[1][0], turned[1][1], turned[1][2], turned[1][3]};
    }
}

// 8 elements in the format of the cache; `largest` is the largest element of their head.
__device__ Piece kept_as(const uint4& x, float largest) {
#if CODES
    return encode(x, inverse_scale(largest));
#else
    return x;
#endif
}

// All parts of a batch are requested before the first is used.
__device__ Merged merge_batches(const float* sums, const float* maxima, const float* denominators, int num_splits) {
    Merged merged = {{0.0f, 0.0f, 0.0f, 0.0f}, LOWEST, 0.0f};
    for (int base = 0; base < num_splits; base += BATCH) {
        float4 sum[BATCH];
        float maximum[BATCH], denominator[BATCH];
        float larger = merged.maximum;
#pragma unroll
        for (int i = 0; i < BATCH; ++i) {
            const int at = min(base + i, num_splits - 1);
            sum[i] = __ldcg(reinterpret_cast<const float4*>(sums + (long long)at * N * H));
            maximum[i] = __ldcg(maxima + at * N);
            denominator[i] = __ldcg(denominators + at * N);
        }
#pragma unroll
        for (int i = 0; i < BATCH; ++i) {
            if (base + i >= num_splits) maximum[i] = UNSEEN;
            larger = fmaxf(larger, maximum[i]);
        }
        const float rescale = power_of_two(merged.maximum - larger);
        merged.maximum = larger;
        merged.denominator *= rescale;
#pragma unroll
        for (int i = 0; i < 4; ++i) merged.x[i] *= rescale;
#pragma unroll
        for (int i = 0; i < BATCH; ++i) add_part(merged, sum[i], maximum[i], denominator[i]);
    }
    return merged;
}

// grid: any number of blocks; each strides over the units.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) decode_projected(
    const Element* qkv,  // [S, (N + 2 G) H]; not restrict, so that no read moves before the wait
    Kept* keys,          // [P, G, H]
    Kept* values,        // [P, G, H]
    float* key_scales, float* value_scales,  // `Cache`
    const int* __restrict__ tables, Element* out, const int4* __restrict__ items, const int* __restrict__ num_items,
    float* sums, float* maxima, float* denominators, int* tickets,           // `Scratch`
    const Element* __restrict__ q_gain, const Element* __restrict__ k_gain,  // [H]
    const float* __restrict__ cos, const float* __restrict__ sin,            // [positions, H / 2]
    long long qkv_stride, long long table_stride, int max_splits, float scale_log2e, float eps, float offset) {
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4;
    const Scratch scratch = {sums, maxima, denominators, tickets, max_splits};
    const Cache cache = {keys, values, key_scales, value_scales};
    const int num_units = *num_items * G;
    bool has_waited = false;
    for (int unit = blockIdx.x; unit < num_units || !has_waited; unit += gridDim.x) {
        const Item item = read_item(items, unit / G, unit < num_units);
        const int head = unit % G, lowest = item.first / TILE * TILE;
        const int* table = tables + item.row * table_stride;
        int position = item.end > item.first ? (item.end - 1) / TILE * TILE - warp * TILE : lowest - TILE;
        const int first_position = position;
        Keys k = {};
        Values v = {};
        int block = 0;  // block of the tile after the one that is loaded
        if (position >= lowest) {
            const Tile tile = tile_of(table[position / BLOCK_SIZE], position, head);
            load_keys(k, cache, tile, g, t);
            load_values(v, cache, tile, g, t);
            if (position - STRIDE >= lowest) block = table[(position - STRIDE) / BLOCK_SIZE];
        }
        const bool has_newest = warp == 0 && item.length > 0 && item.end == item.length;
        if (item.length > 0) load_angles(cos, sin, q_gain, k_gain, item.length - 1, offset);
        __syncthreads();
        if (!has_waited) {
#if PDL
            gdc_launch_dependents();
#pragma unroll
            for (int i = 1; i <= PREFETCHED; ++i) {  // a position of a head is one or two lines of 128 bytes
                const int ahead = first_position - i * STRIDE;
                if (ahead < lowest) break;
                const long long tile = tile_of(table[ahead / BLOCK_SIZE], ahead, head).at;
#pragma unroll
                for (int line = lane; line < TILE * LINES; line += WARP) {
                    const long long at = tile + (long long)(line / LINES) * G * H + line % LINES * 64;
                    prefetch(keys + at);
                    prefetch(values + at);
                }
            }
            gdc_wait();
#endif
            has_waited = true;
            if (unit >= num_units) return;
        }

        const Element* token = qkv + item.s * qkv_stride;
        const bool is_key = HAS_ROOM && has_newest && g == M;
        uint4 query[K_PIECES] = {}, key[K_PIECES] = {};
        if ((g < M || is_key) && item.length > 0)
            load_head(query, token + (is_key ? N + head : head * M + g) * H, t);
        const int newest = (item.length - 1) % TILE;  // place of the newest position in the tile
        float value_largest = 0.0f;
        if (has_newest) {
            if (!HAS_ROOM) load_head(key, token + (N + head) * H, t);
            const Element* value = token + (N + G + head) * H;
#if CODES
            uint4 whole[K_PIECES];
            load_head(whole, value, t);
            value_largest = largest_of(whole);
#endif
#pragma unroll
            for (int p = 0; p < 4; ++p)
#pragma unroll
                for (int c = 0; c < V_PIECES; ++c)
                    if (2 * t + p % 2 + p / 2 * 8 == newest)
                        v.piece[p][c] = kept_as(*reinterpret_cast<const uint4*>(value + value_element(c, g)), value_largest);
        }
        transform(query, gains[is_key], eps, t);
        if (has_newest) {
            if (!HAS_ROOM) transform(key, gains[1], eps, t);
#pragma unroll
            for (int c = 0; c < K_PIECES; ++c)
                if (HAS_ROOM) {
                    key[c] = of_lane(query[c], M * 4 + t);
                    if (is_key) query[c] = uint4{0, 0, 0, 0};
                }
            const Tile tile = tile_of(table[position / BLOCK_SIZE], position, head);
            Kept* new_key = keys + tile.at + (long long)newest * G * H;
            Kept* new_value = values + tile.at + (long long)newest * G * H;
            float key_largest = 0.0f;
#if CODES
            key_largest = largest_of(key);
#pragma unroll
            for (int p = 0; p < 2; ++p)
                if (g + p * 8 == newest) {
                    k.scale[p] = key_largest * (1.0f / LARGEST_CODE);
                    k.value_scale[p] = value_largest * (1.0f / LARGEST_CODE);
                    key_scales[tile.scale + newest] = k.scale[p];
                    value_scales[tile.scale + newest] = k.value_scale[p];
                }
#endif
#pragma unroll
            for (int p = 0; p < 2; ++p)
#pragma unroll
                for (int c = 0; c < K_PIECES; ++c)
                    if (g + p * 8 == newest) {
                        k.piece[p][c] = kept_as(key[c], key_largest);
                        *reinterpret_cast<Piece*>(new_key + key_element(c, t)) = k.piece[p][c];
                    }
#pragma unroll
            for (int p = 0; p < 4; ++p)
#pragma unroll
                for (int c = 0; c < V_PIECES; ++c)
                    if (2 * t + p % 2 + p / 2 * 8 == newest)
                        *reinterpret_cast<Piece*>(new_value + value_element(c, g)) = v.piece[p][c];
        }
        const float score_scale = scale_log2e * to_half(query);

        Softmax softmax = {{}, {LOWEST, LOWEST}, {0.0f, 0.0f}};
        for (; position >= lowest; position -= STRIDE) {
            const int after = position - STRIDE;
            const Tile next_tile = tile_of(block, after, head);
            const bool is_whole = position >= item.first && position + TILE <= item.end;
            Scores score;
            multiply_keys(score, k, query, score_scale);
            if (after >= lowest) load_keys(k, cache, next_tile, g, t);
            if (!is_whole) hide_scores(score, item.first - position, item.end - position, g);
            follow_maximum(softmax, score);
            if (!is_whole) hide_values(v, item.first - position, item.end - position, t);
            add_values(softmax, score, v);
            if (after >= lowest) load_values(v, cache, next_tile, g, t);
            if (after - STRIDE >= lowest) block = table[(after - STRIDE) / BLOCK_SIZE];
        }

        leave_part(softmax, warp, g, t);
        finish_item(item, head, out, scratch, merge_batches);
    }
}
