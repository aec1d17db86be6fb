/* Attention of one new token per row over the paged cache, in CUDA C++.

       out[s, n] = sum over p of softmax(scale * q[s, n] . k[p]) * v[p]

   The key and value of position p of a row are in slot  table[p / BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE.

   Who does what. The GPU runs *blocks* of 128 threads; 32 threads that execute the same instruction are a
   *warp*, and a thread's place in it is its *lane*. Memory is read in pieces of 16 bytes per lane, so the
   key of one head, 256 bytes in bfloat16 with H = 128, takes 16 lanes. We call those lanes a *team*:

       grid    one block for each (kv head, split of the context, row)
       block   8 teams of 16 lanes, for H = 128 in 16 bits (16 teams for 64, 4 for 256)
       team    one position at a time: each lane holds 8 elements of it

   A tile is what a block loads before it computes: UNROLL positions for each team. Neighbouring teams take
   neighbouring positions, and the next tile's block numbers are looked up one tile ahead:

                   u = 0                    u = 1                               lane of a team
       position    0  1  2  3  4  5  6  7 | 8  9 10 ... 15 | ... | ... 31       0       1       ... 15
       team        0  1  2  3  4  5  6  7 | 0  1  2 ...  7 | ... | ...  7       h 0..7  h 8..15     h 120..127

   A dot product is 8 multiplications in each lane and then a sum over the team's lanes, by 4 shuffles: in
   the first, lane i adds what lane i ^ 8 has, then i ^ 4, i ^ 2, i ^ 1, and all lanes hold the sum.

   Why the softmax is *online*. The weights need the largest score, which is known only at the end, and by
   then the keys would have to be read again. So a team keeps three things: the largest score so far, the sum
   of exp(score - largest), and the sum of exp(score - largest) * v. When a larger score turns up, the two
   sums are multiplied by exp(old largest - new largest), and it is as if it had been known from the start.
   Two such states are put together in the same way; so are the teams' (in shared memory) and the splits'
   (by `merge_splits`). Scores are kept in units of log2, because the GPU has an instruction for 2^x.

   What it costs. Every key and value is read once: 2 * len * G * H elements per row, 4 KiB per position
   with G = 8 and H = 128 in bfloat16. At 4.8 TB/s that is 0.85 ns a position; a row of 1000 takes 0.85 us
   of the whole GPU. For each 16 bytes a lane does 8 fused multiply-adds per query head, so the HEADS query
   heads that share a kv head use a piece while it is in registers: read once, not HEADS times.

   What it leaves out, and the Triton kernel does: matrix instructions, which pay from about 4 heads on, and
   a list of work that keeps the GPU even when rows are uneven. Here a row has the same number of splits
   whatever its length; that number depends on the number of rows alone, so a graph can capture the launch.

   Compiled once for each model, with
       ELEMENT_BYTES, IS_BFLOAT16   the type of q, k, v and out: float32, float16 or bfloat16
       H, G, M                      head size, kv heads, query heads per kv head
       HEADS                        query heads of a block, which must divide M
       BLOCK_SIZE                   positions in a block of the cache
   No header is included: NVRTC has none, and it compiles in a second without them. */

#if ELEMENT_BYTES == 4
typedef float Element;
#else
typedef unsigned short Element;  // the bits of a float16 or bfloat16
#endif

constexpr int N = G * M;
constexpr int PIECE = 16 / ELEMENT_BYTES;  // elements that one load brings
constexpr int PIECES = H / PIECE;          // of the key of one head
constexpr int LANES = PIECES > 16 ? 32 : PIECES > 8 ? 16 : PIECES > 4 ? 8 : PIECES > 2 ? 4 : PIECES;  // of a team
constexpr int PER_LANE = (PIECES + LANES - 1) / LANES;  // pieces; with H = 80, 6 of 16 lanes are left without
constexpr int WIDTH = PER_LANE * PIECE;                 // elements of a key that one lane holds
constexpr int THREADS = 128;
constexpr int TEAMS = THREADS / LANES;
// Positions that a team has under way: 4 are 4 KiB of keys and values for each warp. As measured: with 3 or 4
// heads there is enough to compute for 8, and with more heads the registers would not hold them.
constexpr int UNROLL = HEADS == 3 || HEADS == 4 ? 8 : 4;
constexpr int TILE = TEAMS * UNROLL;
constexpr float LOWEST = -1e30f;  // below any score, yet finite: LOWEST - LOWEST is 0, -inf - -inf is not

static_assert(H % PIECE == 0 && H <= 256, "a head must be whole pieces, and the teams' sums fit shared memory");
static_assert(M % HEADS == 0, "the blocks of a kv head must share its query heads evenly");

// ---- numbers ------------------------------------------------------------------------------------

#if ELEMENT_BYTES == 2 && !IS_BFLOAT16 && !defined(EMULATED)
__device__ float half_to_float(unsigned short bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}

__device__ unsigned short float_to_half(float value) {
    unsigned short bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}
#endif

__device__ float to_float(Element element) {
#if ELEMENT_BYTES == 4
    return element;
#elif IS_BFLOAT16
    return __uint_as_float((unsigned int)element << 16);  // a bfloat16 is the upper half of a float32
#else
    return half_to_float(element);
#endif
}

__device__ Element from_float(float value) {
#if ELEMENT_BYTES == 4
    return value;
#elif IS_BFLOAT16
    const unsigned int bits = __float_as_uint(value);
    if (value != value) return 0x7fc0;                              // not a number stays that
    return (Element)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);  // to nearest, ties to even
#else
    return float_to_half(value);
#endif
}

__device__ void unpack(const uint4& piece, float* elements) {
    const unsigned int words[4] = {piece.x, piece.y, piece.z, piece.w};
#pragma unroll
    for (int w = 0; w < 4; ++w) {
#if ELEMENT_BYTES == 4
        elements[w] = __uint_as_float(words[w]);
#else
        elements[2 * w] = to_float((Element)(words[w] & 0xffff));
        elements[2 * w + 1] = to_float((Element)(words[w] >> 16));
#endif
    }
}

__device__ float sum_over_team(float x) {
#pragma unroll
    for (int distance = LANES / 2; distance > 0; distance /= 2) x += __shfl_xor_sync(0xffffffffu, x, distance);
    return x;
}

// ---- splits -------------------------------------------------------------------------------------

// Positions in a split of a row that sees `length` of them: whole tiles. The last splits may be left without.
__device__ int split_length(int length, int num_splits) {
    const int tiles = (length + TILE - 1) / TILE;
    return max((tiles + num_splits - 1) / num_splits, 1) * TILE;
}

// ---- the kernel ---------------------------------------------------------------------------------

// grid: (N / HEADS, splits, rows). Writes `out` where there is one split, otherwise `sums` and `stats`.
extern "C" __global__ void __launch_bounds__(THREADS) paged_attention(
    const Element* __restrict__ q,       // [S, N, H], with strides
    const Element* __restrict__ keys,    // [P, G, H]
    const Element* __restrict__ values,  // [P, G, H]
    const int* __restrict__ tables,      // [R, B]: blocks of each row
    const int* __restrict__ rows,        // [S]: of the tables
    const int* __restrict__ lens,        // [S]; 0: padding, whose row is not looked at
    Element* __restrict__ out,           // [S, N, H]
    float* __restrict__ sums,            // [S, splits, N, H]: weighted values, not yet divided
    float* __restrict__ stats,           // [S, splits, N, 2]: largest score and sum of weights
    long long q_row_stride, long long q_head_stride, long long table_stride, int window, float scale_log2e) {
    const int first_head = blockIdx.x * HEADS;
    const int g = first_head / M;
    const int split = blockIdx.y, num_splits = gridDim.y;
    const long long s = blockIdx.z;
    const int team = threadIdx.x / LANES, lane = threadIdx.x % LANES;

    const int row_end = lens[s];
    const int row_first = max(row_end - window, 0);
    const int length = split_length(row_end - row_first, num_splits);
    const int first = row_first + split * length;
    const int end = min(first + length, row_end);
    if (split > 0 && first >= end) return;  // the merge does not ask for it

    float query[HEADS][WIDTH], total[HEADS][WIDTH], maximum[HEADS], denominator[HEADS];
#pragma unroll
    for (int m = 0; m < HEADS; ++m) {
        maximum[m] = LOWEST;
        denominator[m] = 0.0f;
#pragma unroll
        for (int i = 0; i < WIDTH; ++i) {
            const int h = (i / PIECE * LANES + lane) * PIECE + i % PIECE;
            const Element* at = q + s * q_row_stride + (first_head + m) * q_head_stride + h;
            query[m][i] = h < H ? to_float(*at) * scale_log2e : 0.0f;
            total[m][i] = 0.0f;
        }
    }

    const int* table = tables + rows[s] * table_stride;
    int block[UNROLL];
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
        const int position = first + u * TEAMS + team;
        block[u] = position < end ? table[position / BLOCK_SIZE] : 0;
    }

    for (int tile = first; tile < end; tile += TILE) {
        // All loads first, so that they are under way together.
        uint4 key[UNROLL][PER_LANE], value[UNROLL][PER_LANE];
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
            const int position = tile + u * TEAMS + team;
            const long long slot = (long long)block[u] * BLOCK_SIZE + position % BLOCK_SIZE;
#pragma unroll
            for (int j = 0; j < PER_LANE; ++j) {
                const int h = (j * LANES + lane) * PIECE;
                const long long at = (slot * G + g) * H + h;
                key[u][j] = value[u][j] = uint4{0, 0, 0, 0};
                if (position < end && h < H) {
                    // cs, "streaming": nobody reads it again, so the cache should drop it first
                    key[u][j] = __ldcs(reinterpret_cast<const uint4*>(keys + at));
                    value[u][j] = __ldcs(reinterpret_cast<const uint4*>(values + at));
                }
            }
        }
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
            const int ahead = tile + TILE + u * TEAMS + team;
            block[u] = ahead < end ? table[ahead / BLOCK_SIZE] : 0;
        }

        float score[HEADS][UNROLL];
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
            float k[WIDTH];
#pragma unroll
            for (int j = 0; j < PER_LANE; ++j) unpack(key[u][j], k + j * PIECE);
            const bool is_seen = tile + u * TEAMS + team < end;
#pragma unroll
            for (int m = 0; m < HEADS; ++m) {
                float dot = 0.0f;
#pragma unroll
                for (int i = 0; i < WIDTH; ++i) dot += query[m][i] * k[i];
                dot = sum_over_team(dot);  // by all lanes of the warp, whether their position is seen or not
                score[m][u] = is_seen ? dot : 2.0f * LOWEST;
            }
        }

        // Once per tile and head: a new maximum, and what was summed so far in terms of it.
#pragma unroll
        for (int m = 0; m < HEADS; ++m) {
            float largest = maximum[m];
#pragma unroll
            for (int u = 0; u < UNROLL; ++u) largest = fmaxf(largest, score[m][u]);
            const float rescale = exp2f(maximum[m] - largest);
            maximum[m] = largest;
            denominator[m] *= rescale;
#pragma unroll
            for (int i = 0; i < WIDTH; ++i) total[m][i] *= rescale;
#pragma unroll
            for (int u = 0; u < UNROLL; ++u) {
                score[m][u] = exp2f(score[m][u] - largest);  // from here on a weight
                denominator[m] += score[m][u];
            }
        }

#pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
            float v[WIDTH];
#pragma unroll
            for (int j = 0; j < PER_LANE; ++j) unpack(value[u][j], v + j * PIECE);
#pragma unroll
            for (int m = 0; m < HEADS; ++m) {
#pragma unroll
                for (int i = 0; i < WIDTH; ++i) total[m][i] += score[m][u] * v[i];
            }
        }
    }

    // The teams' states become one: each team leaves its own, and each thread adds up some elements.
    __shared__ float team_total[TEAMS][HEADS][H];
    __shared__ float team_maximum[TEAMS][HEADS], team_denominator[TEAMS][HEADS];
#pragma unroll
    for (int m = 0; m < HEADS; ++m) {
#pragma unroll
        for (int i = 0; i < WIDTH; ++i) {
            const int h = (i / PIECE * LANES + lane) * PIECE + i % PIECE;
            if (h < H) team_total[team][m][h] = total[m][i];
        }
        if (lane == 0) {
            team_maximum[team][m] = maximum[m];
            team_denominator[team][m] = denominator[m];
        }
    }
    __syncthreads();
    for (int element = threadIdx.x; element < HEADS * H; element += THREADS) {
        const int m = element / H, h = element % H;
        float largest = LOWEST, sum = 0.0f, weights = 0.0f;
        for (int t = 0; t < TEAMS; ++t) largest = fmaxf(largest, team_maximum[t][m]);
        for (int t = 0; t < TEAMS; ++t) {
            const float rescale = exp2f(team_maximum[t][m] - largest);
            sum += rescale * team_total[t][m][h];
            weights += rescale * team_denominator[t][m];
        }
        if (num_splits == 1) {
            out[(s * N + first_head + m) * H + h] = from_float(weights == 0.0f ? 0.0f : sum / weights);
        } else {
            const long long head = (s * num_splits + split) * N + first_head + m;
            sums[head * H + h] = sum;
            if (h == 0) {
                stats[head * 2] = largest;
                stats[head * 2 + 1] = weights;
            }
        }
    }
}

// grid: (N, rows), H threads. Puts the splits of a row together, always in their order.
extern "C" __global__ void merge_splits(const float* __restrict__ sums, const float* __restrict__ stats,
                                        const int* __restrict__ lens, Element* __restrict__ out, int window,
                                        int num_splits) {
    const long long s = blockIdx.y;
    const int n = blockIdx.x, h = threadIdx.x;
    const int seen = min(lens[s], window);
    const int length = split_length(seen, num_splits);
    const int used = (seen + length - 1) / length;  // none of padding

    float largest = LOWEST, sum = 0.0f, weights = 0.0f;
    for (int split = 0; split < used; ++split)
        largest = fmaxf(largest, stats[((s * num_splits + split) * N + n) * 2]);
    for (int split = 0; split < used; ++split) {
        const long long head = (s * num_splits + split) * N + n;
        const float rescale = exp2f(stats[head * 2] - largest);
        sum += rescale * sums[head * H + h];
        weights += rescale * stats[head * 2 + 1];
    }
    out[(s * N + n) * H + h] = from_float(weights == 0.0f ? 0.0f : sum / weights);
}
