/* Sums and rows that the ranks of one model, each a process with a GPU, make together.

       slots of a rank    [2][RANKS][BLOCKS][UNITS][THREADS]  of 16 bytes, in its memory; the others write to them
       a slot             word · number · word · number       8 bytes of a share, and the number of the exchange

   Every rank writes its share to the slots of all others and reads theirs from its own. A slot says itself when it has
   been written: a pair of word and number arrives whole, so nobody waits for a fence or a barrier. Shares are added in
   the order of the ranks, in float32, so every rank has the same bits.

   A thread exchanges with the threads of the same number on the other ranks and with no others. It has two sets of
   slots, used in turn. It writes to a set again two exchanges later, when it has read the numbers of the exchange
   between them, which the others wrote after they had read this one: the set is free. `numbers` counts the exchanges of
   each thread in device memory, so a captured graph can be replayed.

   A rank that is gone never writes. Whoever waits looks at `aborted` now and then, a word in memory of the host that
   all processes have mapped, and sets it when the wait has taken `limit` nanoseconds. Nothing that was computed since
   can be used then; later exchanges find `dead` set and do nothing.

   The next kernel may start when all have been heard, and never earlier: ranks may share a GPU, and blocks that wait for
   this kernel would take the room of those that another rank needs to get here.

   Compiled with RANKS, BLOCKS, THREADS, UNITS and KIND: 0 float32, 1 bfloat16, 2 float16. */

typedef unsigned int word;
typedef unsigned long long address;

enum { SUM, SIDE_BY_SIDE, FIRST };  // `all_reduce`, `all_gather`, `first`

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

/* Exchange `count` pieces of 8 bytes. Side by side, a rank has `width` of them in a row of y. */
extern "C" __global__ void __launch_bounds__(THREADS)
    exchange(const uint2 *x, uint2 *y, const address *slots, word *numbers, word *aborted, word *dead,
             unsigned long long count, unsigned long long width, unsigned long long limit, int rank, int how) {
    const unsigned long long stride = (unsigned long long)gridDim.x * THREADS;
    const int lane = blockIdx.x * THREADS + threadIdx.x;
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
    if (*(volatile word *)dead) return;
    word number = numbers[lane];
    const unsigned long long since = now();
    for (unsigned long long first = lane; first < count; first += UNITS * stride) {
        ++number;
        const unsigned long long set = (number & 1) * RANKS;
        const int in_set = blockIdx.x * UNITS * THREADS + threadIdx.x;
        constexpr int OF_RANK = BLOCKS * UNITS * THREADS;
        uint2 own[UNITS];
        float sums[UNITS][NUMBERS];
#pragma unroll
        for (int u = 0; u < UNITS; ++u) {
            if (first + u * stride >= count) continue;
            own[u] = x[first + u * stride];
#pragma unroll
            for (int i = 0; i < NUMBERS; ++i) sums[u][i] = -0.0f;
#pragma unroll
            for (int peer = 0; peer < RANKS; ++peer)
                if (peer != rank)
                    send((uint4 *)slots[peer] + (set + rank) * OF_RANK + in_set + u * THREADS, own[u], number);
        }
#pragma unroll
        for (int peer = 0; peer < RANKS; ++peer) {
            uint4 found[UNITS];
            const uint4 *at = (const uint4 *)slots[rank] + (set + peer) * OF_RANK + in_set;
            for (word tries = 1; peer != rank; ++tries) {
                bool is_whole = true;
#pragma unroll
                for (int u = 0; u < UNITS; ++u)
                    if (first + u * stride < count) found[u] = look(at + u * THREADS);
#pragma unroll
                for (int u = 0; u < UNITS; ++u)
                    if (first + u * stride < count) is_whole &= found[u].y == number && found[u].w == number;
                if (is_whole) break;
                if (tries % 1024 == 0 && is_over(aborted, dead, since, limit)) return;
            }
#pragma unroll
            for (int u = 0; u < UNITS; ++u) {
                const unsigned long long place = first + u * stride;
                if (place >= count) continue;
                const uint2 share = peer == rank ? own[u] : uint2{found[u].x, found[u].z};
                if (how == SUM) add(sums[u], share);
                if (how == SIDE_BY_SIDE) y[(place / width * RANKS + peer) * width + place % width] = share;
                if (how == FIRST && peer == 0) y[place] = share;
            }
        }
        if (how == SUM)
#pragma unroll
            for (int u = 0; u < UNITS; ++u)
                if (first + u * stride < count)
                    y[first + u * stride] = uint2{pack(sums[u]), pack(sums[u] + NUMBERS / 2)};
    }
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
    numbers[lane] = number;
}
