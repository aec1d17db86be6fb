/* Collectives of the ranks of one model, each a process with a GPU: sums, gathers and one-way messages.

       slots of a rank    [2][RANKS][BLOCKS][UNITS][THREADS]  of 16 bytes, in its memory; the others write to them
       a slot             word · number · word · number       8 bytes of a share, and the number of the exchange

   Every rank writes its share to the slots of all other ranks and reads their shares from its own slots. A slot itself
   shows when it has been written: a pair of word and number arrives whole, so no thread needs a fence or a barrier.
   Shares are added in rank order, in float32, so every rank gets the same bits.

   A thread exchanges only with the threads of the same index on the other ranks. It has two sets of slots, used in
   turn. It writes to a set again two exchanges later. By then it has read the numbers of the exchange in between, which
   the others wrote after they had read the first one, so the set is free. `numbers` counts the exchanges of each thread
   in device memory, so a captured graph can be replayed.

   A lost rank never writes. A waiting thread polls `aborted`, a word in host memory that all processes have mapped, and
   sets it when the wait exceeds `limit` nanoseconds. All results since then are invalid; later exchanges find `dead`
   set and do nothing.

   The next kernel may start once all ranks have been heard, and never earlier: ranks may share a GPU, and blocks that
   wait for this kernel would occupy SMs that another rank needs to get here.

   One-way messages use `tell` on the sender and `hear` on each listener, which need not run at the same time: hidden
   states from one stage of layers to the next, and drawn ids from rank 0 to all ranks.

       inbox of a listener    [DEPTH][BLOCKS][UNITS][THREADS]  slots as above; the sender writes to them
       taken, at the sender   [BLOCKS][THREADS]  words per listener: the last number that the listener has read

   A thread reuses a set of slots DEPTH numbers later, when all listeners have confirmed that they have read it.

   Compiled with RANKS, BLOCKS, THREADS, UNITS, DEPTH and KIND: 0 float32, 1 bfloat16, 2 float16. */

typedef unsigned int word;
typedef unsigned long long address;

enum { SUM, SIDE_BY_SIDE };  // `all_reduce`, `all_gather`

__device__ __forceinline__ void send(uint4 *slot, uint2 share, word number) {
    asm volatile("st.volatile.global.v4.u32 [%0], {%1, %2, %3, %2};" ::"l"(slot), "r"(share.x), "r"(number),
                 "r"(share.y)
                 : "memory");
}

__device__ __forceinline__ uint4 look(const uint4 *slot) {
    uint4 found;
    asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(found.x), "=r"(found.y), "=r"(found.z), "=r"(found.w)
                 : "l"(slot)
                 : "memory");
    return found;
}

__device__ __forceinline__ unsigned long long now() {
    unsigned long long nanoseconds;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(nanoseconds));
    return nanoseconds;
}

constexpr int NUMBERS = KIND == 0 ? 2 : 4;  // numbers in 8 bytes

__device__ __forceinline__ void add(float *sums, uint2 share) {
    const word words[2] = {share.x, share.y};
    for (int i = 0; i < 2; ++i) {
        if (KIND == 0) {
            sums[i] += __uint_as_float(words[i]);
        } else if (KIND == 1) {
            sums[2 * i] += __uint_as_float(words[i] << 16);
            sums[2 * i + 1] += __uint_as_float(words[i] & 0xffff0000u);
        } else {
            float low, high;
            asm("{ .reg .f16 a, b; mov.b32 {a, b}, %2; cvt.f32.f16 %0, a; cvt.f32.f16 %1, b; }"
                : "=f"(low), "=f"(high)
                : "r"(words[i]));
            sums[2 * i] += low;
            sums[2 * i + 1] += high;
        }
    }
}

__device__ __forceinline__ word pack(const float *sums) {
    word both;
    if (KIND == 0) return __float_as_uint(sums[0]);
    if (KIND == 1) asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(sums[1]), "f"(sums[0]));
    if (KIND == 2) asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(sums[1]), "f"(sums[0]));
    return both;
}

__device__ bool is_over(volatile word *aborted, volatile word *dead, unsigned long long since,
                        unsigned long long limit) {
    if (*dead) return true;
    bool late = now() - since > limit;
    if (late) *aborted = 1;
    if (!late && !*aborted) return false;
    *dead = 1;
    __threadfence_system();
    return true;
}

struct Ranks {
    const address *slots;
    word *numbers, *aborted, *dead;
    unsigned long long limit;
    int rank;
};
#define OF_RANKS                                                                                                    \
    const address *slots, word *numbers, word *aborted, word *dead, unsigned long long limit, int rank

constexpr int OF_RANK = BLOCKS * UNITS * THREADS;

/* Send the first `num_units` of this thread's pieces to all ranks, and call `take` with each rank's pieces in rank
   order: (rank, unit, piece). False: a rank is lost. */
template <typename Take>
__device__ __forceinline__ bool meet(const Ranks &ranks, word number, unsigned long long since, const uint2 *own,
                                     int num_units, Take take) {
    const unsigned long long set = (number & 1) * RANKS;
    const int place = blockIdx.x * UNITS * THREADS + threadIdx.x;
#pragma unroll
    for (int u = 0; u < UNITS; ++u)
#pragma unroll
        for (int peer = 0; peer < RANKS; ++peer)
            if (u < num_units && peer != ranks.rank)
                send((uint4 *)ranks.slots[peer] + (set + ranks.rank) * OF_RANK + place + u * THREADS, own[u], number);
#pragma unroll
    for (int peer = 0; peer < RANKS; ++peer) {
        uint4 found[UNITS];
        const uint4 *at = (const uint4 *)ranks.slots[ranks.rank] + (set + peer) * OF_RANK + place;
        for (word tries = 1; peer != ranks.rank; ++tries) {
            bool is_whole = true;
#pragma unroll
            for (int u = 0; u < UNITS; ++u)
                if (u < num_units) found[u] = look(at + u * THREADS);
#pragma unroll
            for (int u = 0; u < UNITS; ++u)
                if (u < num_units) is_whole &= found[u].y == number && found[u].w == number;
            if (is_whole) break;
            if (tries % 1024 == 0 && is_over(ranks.aborted, ranks.dead, since, ranks.limit)) return false;
        }
#pragma unroll
        for (int u = 0; u < UNITS; ++u)
            if (u < num_units) take(peer, u, peer == ranks.rank ? own[u] : uint2{found[u].x, found[u].z});
    }
    return true;
}

__device__ __forceinline__ void wait_for_kernel_before() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ __forceinline__ void let_next_kernel_start() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}

/* Exchange `count` pieces of 8 bytes. With SIDE_BY_SIDE, each rank contributes `width` pieces to a row of y. */
extern "C" __global__ void __launch_bounds__(THREADS)
    exchange(const uint2 *x, uint2 *y, OF_RANKS, unsigned long long count, unsigned long long width, int how) {
    const Ranks ranks = {slots, numbers, aborted, dead, limit, rank};
    const unsigned long long stride = (unsigned long long)gridDim.x * THREADS;
    const int lane = blockIdx.x * THREADS + threadIdx.x;
    wait_for_kernel_before();
    if (*(volatile word *)ranks.dead) return;
    word number = ranks.numbers[lane];
    const unsigned long long since = now();
    for (unsigned long long first = lane; first < count; first += UNITS * stride) {
        uint2 own[UNITS];
        float sums[UNITS][NUMBERS];
        int num_units = 0;
#pragma unroll
        for (int u = 0; u < UNITS; ++u) {
            if (first + u * stride < count) own[u] = x[first + u * stride], num_units = u + 1;
#pragma unroll
            for (int i = 0; i < NUMBERS; ++i) sums[u][i] = -0.0f;
        }
        const bool is_met = meet(ranks, ++number, since, own, num_units, [&](int peer, int u, uint2 share) {
            const unsigned long long place = first + u * stride;
            if (how == SUM) add(sums[u], share);
            if (how == SIDE_BY_SIDE) y[(place / width * RANKS + peer) * width + place % width] = share;
        });
        if (!is_met) return;
        if (how == SUM)
#pragma unroll
            for (int u = 0; u < UNITS; ++u)
                if (u < num_units) y[first + u * stride] = uint2{pack(sums[u]), pack(sums[u] + NUMBERS / 2)};
    }
    let_next_kernel_start();
    ranks.numbers[lane] = number;
}

#if KIND == 1
/* Add a sum to the residual stream and start the norm that reads it (linear/residual.py). A block has `units` times
   THREADS pieces of one row; there are `num_parts` blocks to a row of `width` pieces. */
extern "C" __global__ void __launch_bounds__(THREADS)
    exchange_add(const uint2 *x, const uint2 *residual, const uint2 *gain, uint2 *sum, uint2 *scaled, double *squares,
                 OF_RANKS, unsigned long long residual_stride, int width, int num_parts, int units, float offset) {
    const Ranks ranks = {slots, numbers, aborted, dead, limit, rank};
    const int lane = blockIdx.x * THREADS + threadIdx.x, row = blockIdx.x / num_parts, part = blockIdx.x % num_parts;
    const int first = part * units * THREADS + threadIdx.x;
    const int num_units = max(0, min(units, (width - first + THREADS - 1) / THREADS));
    uint2 gains[UNITS], olds[UNITS], own[UNITS];
    float sums[UNITS][NUMBERS];
#pragma unroll
    for (int u = 0; u < UNITS; ++u)
        if (u < num_units) gains[u] = gain[first + u * THREADS];
    wait_for_kernel_before();
    const word number = ranks.numbers[lane] + (num_units > 0);  // an exchange of nothing does not count
#pragma unroll
    for (int u = 0; u < UNITS; ++u)
        if (u < num_units) {
            own[u] = x[(unsigned long long)row * width + first + u * THREADS];
            olds[u] = residual[row * residual_stride + first + u * THREADS];
#pragma unroll
            for (int i = 0; i < NUMBERS; ++i) sums[u][i] = -0.0f;
        }
    /* if a rank is lost, all threads still run to the end, with invalid sums: they reduce the squares together */
    if (!*(volatile word *)ranks.dead)
        meet(ranks, number, now(), own, num_units, [&](int peer, int u, uint2 share) { add(sums[u], share); });
    let_next_kernel_start();
    ranks.numbers[lane] = number;
    double square = 0.0;
#pragma unroll
    for (int u = 0; u < UNITS; ++u)
        if (u < num_units) {
            const unsigned long long place = (unsigned long long)row * width + first + u * THREADS;
            add(sums[u], olds[u]);
            const uint2 r = uint2{pack(sums[u]), pack(sums[u] + 2)};
            float rounded[NUMBERS] = {0.0f, 0.0f, 0.0f, 0.0f}, factors[NUMBERS] = {offset, offset, offset, offset};
            add(rounded, r);
            add(factors, gains[u]);
#pragma unroll
            for (int i = 0; i < NUMBERS; ++i) {
                square += (double)(rounded[i] * rounded[i]);
                factors[i] *= rounded[i];
            }
            sum[place] = r;
            scaled[place] = uint2{pack(factors), pack(factors + 2)};
        }
#pragma unroll
    for (int step = 16; step; step /= 2) square += __shfl_xor_sync(0xffffffffu, square, step);
    __shared__ double of_warps[THREADS / 32];
    if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = square;
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int i = 1; i < THREADS / 32; ++i) square += of_warps[i];
        squares[part * (gridDim.x / num_parts) + row] = square;
    }
}
#endif

/* The counters of this rank's threads for one channel, and the words that end its waits. */
#define OF_WAY word *numbers, word *aborted, word *dead, unsigned long long limit, unsigned long long count

__device__ __forceinline__ unsigned long long place_of(word number) {
    return ((number % DEPTH) * BLOCKS + blockIdx.x) * (unsigned long long)(UNITS * THREADS) + threadIdx.x;
}

/* Send `count` pieces of 8 bytes to the inboxes of all listeners. */
extern "C" __global__ void __launch_bounds__(THREADS)
    tell(const uint2 *x, const address *inboxes, const address *taken, int num_listeners, OF_WAY) {
    const unsigned long long stride = (unsigned long long)gridDim.x * THREADS;
    const int lane = blockIdx.x * THREADS + threadIdx.x;
    wait_for_kernel_before();
    if (*(volatile word *)dead) return;
    word number = numbers[lane];
    const unsigned long long since = now();
    for (unsigned long long first = lane; first < count; first += UNITS * stride) {
        ++number;
        for (int to = 0; to < num_listeners; ++to) {
            const volatile word *read = (const volatile word *)taken[to] + lane;
            for (word tries = 1; (int)(number - DEPTH - *read) > 0; ++tries)
                if (tries % 1024 == 0 && is_over(aborted, dead, since, limit)) return;
        }
#pragma unroll
        for (int u = 0; u < UNITS; ++u)
            if (first + u * stride < count) {
                const uint2 piece = x[first + u * stride];
                for (int to = 0; to < num_listeners; ++to)
                    send((uint4 *)inboxes[to] + place_of(number) + u * THREADS, piece, number);
            }
    }
    let_next_kernel_start();
    numbers[lane] = number;
}

/* Receive `count` pieces from the inbox, in the order in which they were sent. */
extern "C" __global__ void __launch_bounds__(THREADS) hear(uint2 *y, const uint4 *inbox, word *taken, OF_WAY) {
    const unsigned long long stride = (unsigned long long)gridDim.x * THREADS;
    const int lane = blockIdx.x * THREADS + threadIdx.x;
    wait_for_kernel_before();
    if (*(volatile word *)dead) return;
    word number = numbers[lane];
    const unsigned long long since = now();
    for (unsigned long long first = lane; first < count; first += UNITS * stride) {
        ++number;
        uint4 found[UNITS];
        for (word tries = 1;; ++tries) {
            bool is_whole = true;
#pragma unroll
            for (int u = 0; u < UNITS; ++u)
                if (first + u * stride < count && is_whole) {  // a single load per poll while nothing has arrived
                    found[u] = look(inbox + place_of(number) + u * THREADS);
                    is_whole = found[u].y == number && found[u].w == number;
                }
            if (is_whole) break;
            if (tries % 256 == 0 && is_over(aborted, dead, since, limit)) return;
            __nanosleep(64);  // leaves memory bandwidth to a stage that computes on the same GPU
        }
#pragma unroll
        for (int u = 0; u < UNITS; ++u)
            if (first + u * stride < count) y[first + u * stride] = uint2{found[u].x, found[u].z};
        ((volatile word *)taken)[lane] = number;
    }
    let_next_kernel_start();
    numbers[lane] = number;
}
