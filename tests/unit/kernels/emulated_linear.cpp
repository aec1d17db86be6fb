/* A GPU in one thread for `linear_ahead.cu`: the threads of all blocks of a cluster take turns.

   Here they wait not only for their warp and their block, but for a cluster, for what its blocks send each other.

   KERNEL_SOURCE is the .cu file. A launch is `emulate(blocks, threads, arguments)`, with addresses of arguments as
   the driver's cuLaunchKernelEx has them. */

#include "emulated.hpp"

#define __cluster_dims__(x, y, z)
#define __expf expf

static unsigned int num_in_cluster;
static long long num_missing[MAX_BLOCKS];

static float __fdividef(float a, float b) { return a / b; }
static unsigned int pack(float2 value) { return pack(value.x, value.y); }

static bool is_waited[MAX_THREADS];  // whether this thread has waited for the kernel before
static bool is_early_read;           // whether any read what that kernel wrote before it had waited

template <bool IS_ALWAYS, typename P>
static void load_weights(P& piece, const char* at, bool is_wanted) {
    if (IS_ALWAYS || is_wanted) std::memcpy(&piece, at, 16);
}
template <bool IS_ALWAYS, typename P>
static void load_activations(P& piece, const char* at, bool is_wanted) {
    if (IS_ALWAYS || is_wanted) std::memcpy(&piece, at, 16);
    is_early_read |= !is_waited[current];
}
static unsigned int load_pair(const char* at) { unsigned int pair; std::memcpy(&pair, at, 4); return pair; }
static double load_double(const double* at) {
    is_early_read |= !is_waited[current];
    return *at;
}
static void prefetch(const char* at) { (void)*(const volatile char*)at; }

static void let_next_kernel_start() {}
static void wait_for_kernel_before() { is_waited[current] = true; }
static void expect(unsigned long long*, int num_bytes) { num_missing[current / num_threads] += num_bytes; }
static void arrive_in_cluster() { ++num_in_cluster; }
static void wait_for_cluster();
static void receive(unsigned long long*) {
    while (num_missing[current / num_threads] > 0) give_up_turn();
}

template <typename T>
static void send(float* place, T* barrier, int rank, float2 value);

struct Shared;
static Shared& shared_of(unsigned int rank);
#define shared shared_of(current / num_threads)
#include KERNEL_SOURCE
#undef shared

static Shared memories[CLUSTER];
static Shared& shared_of(unsigned int rank) { return memories[rank]; }

static void wait_for_cluster() {
    while (num_in_cluster < CLUSTER * num_threads) give_up_turn();
}

template <typename T>
static void send(float* place, T*, int rank, float2 value) {
    const size_t offset = (char*)place - (char*)&memories[current / num_threads];
    std::memcpy((char*)&memories[rank] + offset, &value, 8);
    num_missing[rank] -= 8;
}

static void run_cluster(unsigned int first_block) {
    num_in_cluster = 0;
    std::memset(memories, 0xff, sizeof memories);  // not a number, wherever nobody wrote
    std::fill_n(num_missing, CLUSTER, 0);
    std::fill_n(is_waited, CLUSTER * num_threads, false);
    run_blocks(first_block, CLUSTER);
}

// Whether all went by the rules: nothing was read too early, and each block received what it expected.
extern "C" int emulate(unsigned int num_blocks, unsigned int threads_of_block, void** arguments) {
    body = [](void** given) { call(linear_ahead, given); };
    body_arguments = arguments;
    num_threads = threads_of_block;
    is_early_read = false;
    bool is_complete = true;
    for (unsigned int block = 0; block < num_blocks; block += CLUSTER) {
        run_cluster(block);
        for (int r = 0; r < CLUSTER; ++r) is_complete &= num_missing[r] == 0;
    }
    return !is_early_read && is_complete;
}
