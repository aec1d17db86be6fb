/* Building blocks of the CUDA C++ linears: instructions that C++ has no name for, the gate, the layout of numbers.

   Loads are `asm volatile`, which the compiler does not move. It may move an ordinary load, or one through the
   read-only path (ld.global.nc), to the place where its result is needed: below the wait, which would defeat the
   purpose of the kernel. Loads of the previous kernel's results also declare memory as clobbered, so that they stay
   below the wait. */

// ---- instructions -------------------------------------------------------------------------------

struct Piece {
    u32 r[4];  // 8 elements, in pairs
};

struct Yes {
    static constexpr bool value = true;
};
struct No {
    static constexpr bool value = false;
};

#ifndef EMULATED  // a test that runs this file on a CPU defines its own versions

// Weights: no other block reads them and they do not change, so they bypass the L1 cache.
template <bool IS_ALWAYS>
__device__ __forceinline__ void load_weights(Piece& piece, const char* at, bool is_wanted) {
    if constexpr (IS_ALWAYS) {
        asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(piece.r[0]), "=r"(piece.r[1]), "=r"(piece.r[2]), "=r"(piece.r[3]) : "l"(at));
    } else {
        asm volatile("{ .reg .pred p; setp.ne.u32 p, %5, 0; "
                     "@p ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4]; }"
                     : "+r"(piece.r[0]), "+r"(piece.r[1]), "+r"(piece.r[2]), "+r"(piece.r[3])
                     : "l"(at), "r"((u32)is_wanted));
    }
}

// Activations: the previous kernel wrote them, so they are never read before the wait.
template <bool IS_ALWAYS>
__device__ __forceinline__ void load_activations(Piece& piece, const char* at, bool is_wanted) {
    if constexpr (IS_ALWAYS) {
        asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(piece.r[0]), "=r"(piece.r[1]), "=r"(piece.r[2]), "=r"(piece.r[3]) : "l"(at) : "memory");
    } else {
        asm volatile("{ .reg .pred p; setp.ne.u32 p, %5, 0; @p ld.global.v4.u32 {%0, %1, %2, %3}, [%4]; }"
                     : "+r"(piece.r[0]), "+r"(piece.r[1]), "+r"(piece.r[2]), "+r"(piece.r[3])
                     : "l"(at), "r"((u32)is_wanted) : "memory");
    }
}

// Load a word of weights, or of their scales; below, a word of activations.
template <bool IS_ALWAYS>
__device__ __forceinline__ void load_word(u32& word, const char* at, bool is_wanted) {
    if constexpr (IS_ALWAYS) {
        asm volatile("ld.global.L1::no_allocate.u32 %0, [%1];" : "=r"(word) : "l"(at));
    } else {
        asm volatile("{ .reg .pred p; setp.ne.u32 p, %2, 0; @p ld.global.L1::no_allocate.u32 %0, [%1]; }"
                     : "+r"(word) : "l"(at), "r"((u32)is_wanted));
    }
}

template <bool IS_ALWAYS>
__device__ __forceinline__ void load_word_of_x(u32& word, const char* at, bool is_wanted) {
    if constexpr (IS_ALWAYS) {
        asm volatile("ld.global.u32 %0, [%1];" : "=r"(word) : "l"(at) : "memory");
    } else {
        asm volatile("{ .reg .pred p; setp.ne.u32 p, %2, 0; @p ld.global.u32 %0, [%1]; }"
                     : "+r"(word) : "l"(at), "r"((u32)is_wanted) : "memory");
    }
}

__device__ __forceinline__ u32 load_pair(const char* at) {
    u32 pair;
    asm volatile("ld.global.u32 %0, [%1];" : "=r"(pair) : "l"(at) : "memory");
    return pair;
}

__device__ __forceinline__ double load_double(const double* at) {
    double value;
    asm volatile("ld.global.f64 %0, [%1];" : "=d"(value) : "l"(at) : "memory");
    return value;
}

__device__ __forceinline__ void multiply(float* sums, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
#if IS_BFLOAT16
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
#else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
#endif
        "{%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

__device__ __forceinline__ u32 largest_of_warp(u32 value) {
    u32 largest;
    asm("redux.sync.max.u32 %0, %1, 0xffffffff;" : "=r"(largest) : "r"(value));
    return largest;
}

__device__ __forceinline__ void let_next_kernel_start() { asm volatile("griddepcontrol.launch_dependents;"); }

__device__ __forceinline__ void wait_for_kernel_before() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// Data read from other blocks has arrived by now: stored results depend on it, and no store moves below this.
__device__ __forceinline__ void arrive_in_cluster() {
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}

__device__ __forceinline__ void wait_for_cluster() { asm volatile("barrier.cluster.wait.aligned;" ::: "memory"); }

__device__ __forceinline__ u32 pack(float2 value) {
    u32 pair;
#if IS_BFLOAT16
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(value.y), "f"(value.x));  // the upper half comes first
#else
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(value.y), "f"(value.x));
#endif
    return pair;
}

__device__ __forceinline__ float2 unpack(u32 pair) {
    float2 value;
#if IS_BFLOAT16
    value.x = __uint_as_float(pair << 16);  // a bfloat16 is the upper half of a float32
    value.y = __uint_as_float(pair & 0xffff0000u);
#else
    asm("{ .reg .b16 low, high; mov.b32 {low, high}, %2; cvt.f32.f16 %0, low; cvt.f32.f16 %1, high; }"
        : "=f"(value.x), "=f"(value.y) : "r"(pair));
#endif
    return value;
}

#endif

// ---- lanes in fours --------------------------------------------------------------------------------

// Transpose the words of four lanes: lane t gets word t of each. Columns 8t .. 8t + 7 become 2t, 2t + 1 of every 8.
__device__ __forceinline__ void exchange_in_fours(Piece& piece, int t) {
#pragma unroll
    for (int distance = 1; distance < 4; distance *= 2) {
        const bool is_upper = t & distance;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            u32 &low = piece.r[distance == 1 ? 2 * i : i], &high = piece.r[distance == 1 ? 2 * i + 1 : i + 2];
            const u32 other = __shfl_xor_sync(0xffffffffu, is_upper ? low : high, distance);
            low = is_upper ? other : low;
            high = is_upper ? high : other;
        }
    }
}

// ---- the gate -----------------------------------------------------------------------------------

__device__ __forceinline__ float sigmoid(float x) { return __fdividef(1.0f, 1.0f + __expf(-x)); }

__device__ __forceinline__ float activate(float x) {
    if (ACTIVATION == 1) return x * sigmoid(x);
    // (1 + tanh(u)) / 2 is sigmoid(2u); 1.5957691216 is 2 sqrt(2/pi)
    if (ACTIVATION == 2) return x * sigmoid(1.5957691216057308f * (x + 0.044715f * x * x * x));
    return 0.5f * x * (1.0f + erff(x * 0.7071067811865476f));
}

// Additions of doubles have a high latency: adding in pairs shortens the chain.
template <int COUNT, typename F>
__device__ __forceinline__ double sum_in_pairs(F element) {
    double values[COUNT];
#pragma unroll
    for (int i = 0; i < COUNT; ++i) values[i] = element(i);
#pragma unroll
    for (int distance = 1; distance < COUNT; distance *= 2)
#pragma unroll
        for (int i = 0; i + distance < COUNT; i += 2 * distance) values[i] += values[i + distance];
    return values[0];
}

// ---- the router's choice --------------------------------------------------------------------------

#if EXPERTS == 1 || EXPERTS == 2
struct Choice {
    int expert;
    float weight;
};

// The expert of a token's `choice` (best first; ties go to the first) and its weight; all lanes of a warp take part. A
// 16-bit number and its place form a 32-bit key that compares as an integer: the best expert has the largest key.
__device__ __forceinline__ Choice choose_experts(const char* logits, int choice) {
    constexpr int PAIRS_OF_LANE = (NUM_EXPERTS / 2 + 31) / 32;
    const int lane = threadIdx.x % 32;
    u32 pairs[PAIRS_OF_LANE], keys[PAIRS_OF_LANE][2];
#pragma unroll
    for (int i = 0; i < PAIRS_OF_LANE; ++i) {
        const int pair = i * 32 + lane;
        if (pair < NUM_EXPERTS / 2) pairs[i] = load_pair(logits + pair * 4);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const u32 bits = pairs[i] >> half * 16 & 0xffffu, ordered = bits & 0x8000u ? ~bits & 0xffffu : bits | 0x8000u;
            keys[i][half] = pair < NUM_EXPERTS / 2 ? ordered << 16 | 0xffffu - (pair * 2 + half) : 0u;
        }
    }
    u32 wanted = 0;
    float best = 0.0f, own = 0.0f, total = 0.0f;
#pragma unroll
    for (int c = 0; c < CHOICES; ++c) {
        u32 largest = 0;
#pragma unroll
        for (int i = 0; i < PAIRS_OF_LANE; ++i) largest = max(largest, max(keys[i][0], keys[i][1]));
        largest = largest_of_warp(largest);
#pragma unroll
        for (int i = 0; i < PAIRS_OF_LANE; ++i)
#pragma unroll
            for (int half = 0; half < 2; ++half) keys[i][half] = keys[i][half] == largest ? 0u : keys[i][half];
        const u32 ordered = largest >> 16, bits = ordered & 0x8000u ? ordered & 0x7fffu : ~ordered & 0xffffu;
        const float logit = unpack(bits).x;
        if (c == 0) best = logit;
        const float share = __expf(logit - best);
        if (NORMALIZED) total += share;
        if (c == choice) wanted = largest, own = share;
    }
    if (!NORMALIZED) {
#pragma unroll
        for (int i = 0; i < PAIRS_OF_LANE; ++i) {
            const float2 both = unpack(pairs[i]);
            if (i * 32 + lane < NUM_EXPERTS / 2) total += __expf(both.x - best) + __expf(both.y - best);
        }
#pragma unroll
        for (int distance = 16; distance > 0; distance /= 2) total += __shfl_xor_sync(0xffffffffu, total, distance);
    }
    return {int(0xffffu - (wanted & 0xffffu)), own / total};
}
#endif
