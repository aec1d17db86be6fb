/* A GPU in one thread for `linear/shrink.cu`: the blocks of a cluster take turns.

   `emulate(blocks, threads, arguments)` returns 0 if something was read before the wait, or from a block that has left. */

#include "emulated.hpp"

#define __cluster_dims__(...)
#define __expf expf

typedef unsigned int u32;
typedef unsigned long long u64;

static float __fdividef(float a, float b) { return a / b; }
static u32 pack(float2 value) { return pack(value.x, value.y); }
static u32 shared_address(const void*) { return 0; }
static void __syncwarp() {}

static bool is_waited[MAX_THREADS], has_left[SPLIT], is_broken;
static u32 num_met[MAX_THREADS], num_in_cluster;

template <bool IS_ALWAYS, typename P>
static void load_weights(P& piece, const char* at, bool is_wanted) {
    if (IS_ALWAYS || is_wanted) std::memcpy(&piece, at, 16);
}
template <bool IS_ALWAYS, typename P>
static void load_activations(P& piece, const char* at, bool is_wanted) {
    if (IS_ALWAYS || is_wanted) std::memcpy(&piece, at, 16);
    is_broken |= !is_waited[current];
}
static u32 load_pair(const char* at) { u32 pair; std::memcpy(&pair, at, 4); return pair; }
static void let_next_kernel_start() {}
static void wait_for_kernel_before() { is_waited[current] = true; }
static void arrive_in_cluster() { ++num_in_cluster, ++num_met[current]; }
static void wait_for_cluster() {
    while (num_in_cluster < num_met[current] * SPLIT * num_threads) give_up_turn();
}
static void meet_in_cluster() { arrive_in_cluster(), wait_for_cluster(); }

struct Shared;
static Shared& memory_of_block();
static float2 load_from(const float* at, int block);
#define shared memory_of_block()
#include KERNEL_SOURCE
#undef shared

static Shared memory[SPLIT];
static Shared& memory_of_block() { return memory[current / num_threads]; }
static float2 load_from(const float* at, int block) {
    is_broken |= has_left[block] || !num_met[current];
    float2 value;
    std::memcpy(&value, (const char*)&memory[block] + ((const char*)at - (const char*)&memory_of_block()), 8);
    return value;
}

extern "C" int emulate(u32 num_blocks, u32 threads_of_block, void** arguments) {
    body = [](void** given) {
        call(shrink, given);
        is_broken |= !is_waited[current];
        has_left[current / num_threads] = true;
    };
    body_arguments = arguments;
    num_threads = threads_of_block;
    is_broken = false;
    for (u32 block = 0; block < num_blocks; block += SPLIT) {
        std::memset(memory, 0xff, sizeof memory);  // not a number, wherever nothing was written
        std::fill_n(is_waited, SPLIT * num_threads, false);
        std::fill_n(num_met, SPLIT * num_threads, 0);
        std::fill_n(has_left, SPLIT, false);
        num_in_cluster = 0;
        run_blocks(block, SPLIT);
    }
    return !is_broken;
}
