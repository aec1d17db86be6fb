/* A GPU in one thread for `linear_ahead.cu`: the threads of all blocks of a cluster take turns, as coroutines.

   As in emulated_cuda.cpp, a thread gives up its turn where it waits for others. Here these are a whole warp, for
   a shuffle or a matrix instruction; a block, at its barrier; and a cluster, for what its blocks send each other.
   The matrix instruction is spelled out from its definition: which lane holds which element of A, B and C.

   KERNEL_SOURCE is the .cu file. A launch is `emulate(blocks, threads, arguments)`, with addresses of arguments as
   the driver's cuLaunchKernelEx has them. */

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>
#include <vector>

#define EMULATED
#define __device__ static inline
#define __forceinline__
#define __global__
#define __launch_bounds__(threads, blocks)
#define __cluster_dims__(x, y, z)

using std::max;
using std::min;

struct float2 { float x, y; };
struct Index { unsigned int x; };
static Index blockIdx, threadIdx;

constexpr unsigned int WARP = 32, MAX_THREADS = 8 * 512;
constexpr size_t STACK = 128 << 10;

struct Posted { unsigned int a[4], b[2]; double value; };
struct Thread {
    ucontext_t context;
    jmp_buf resume;
    std::vector<char> stack;
    bool is_begun, is_done;
    unsigned int num_exchanges, num_barriers;
};
static Thread threads[MAX_THREADS];
static unsigned int num_threads, current;  // `current` counts through the whole cluster
static unsigned int num_arrived[8], num_in_cluster;
static long long num_missing[8];
static Posted boards[2][MAX_THREADS];
static jmp_buf scheduler;

static void give_up_turn() {
    if (!_setjmp(threads[current].resume)) _longjmp(scheduler, 1);
}

static const Posted* exchange(const Posted& mine) {
    const unsigned int me = current;
    Posted* board = boards[threads[me].num_exchanges++ % 2];
    board[me] = mine;
    give_up_turn();  // by the next turn, the other lanes of the warp have posted theirs
    return board + me / WARP * WARP;
}

static double __shfl_xor_sync(unsigned int, double value, int distance) {
    const unsigned int lane = current % WARP;
    Posted mine;
    mine.value = value;
    return exchange(mine)[lane ^ distance].value;
}

static void __syncthreads() {
    const unsigned int block = current / num_threads, wanted = ++threads[current].num_barriers * num_threads;
    ++num_arrived[block];
    while (num_arrived[block] < wanted) give_up_turn();
}

static float __uint_as_float(unsigned int bits) { float x; std::memcpy(&x, &bits, 4); return x; }
static unsigned int __float_as_uint(float x) { unsigned int bits; std::memcpy(&bits, &x, 4); return bits; }
static float __fdividef(float a, float b) { return a / b; }
#define __expf expf
#define rsqrtf inverse_root
static float inverse_root(float x) { return 1.0f / sqrtf(x); }

#if IS_BFLOAT16
static float element(unsigned int pair, int upper) { return __uint_as_float(upper ? pair & 0xffff0000u : pair << 16); }
static unsigned int bits_of(float value) {
    const unsigned int bits = __float_as_uint(value);
    return (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
}
#else
static float element(unsigned int pair, int upper) {
    _Float16 x;
    const unsigned short bits = upper ? pair >> 16 : pair & 0xffff;
    std::memcpy(&x, &bits, 2);
    return (float)x;
}
static unsigned int bits_of(float value) {
    const _Float16 x = (_Float16)value;
    unsigned short bits;
    std::memcpy(&bits, &x, 2);
    return bits;
}
#endif

static unsigned int pack(float2 value) { return bits_of(value.x) | bits_of(value.y) << 16; }
static float2 unpack(unsigned int pair) { return {element(pair, 0), element(pair, 1)}; }

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

// D = A B + D with A [16, 16] and B [16, 8]: the layout of the fragments as the instruction set defines it.
static void multiply(float* sums, unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
    const unsigned int lane = current % WARP, g = lane / 4, t = lane % 4;
    Posted mine;
    const unsigned int a[4] = {a0, a1, a2, a3}, b[2] = {b0, b1};
    std::memcpy(mine.a, a, 16);
    std::memcpy(mine.b, b, 8);
    const Posted* warp = exchange(mine);
    auto left = [&](int row, int k) { return element(warp[row % 8 * 4 + k % 8 / 2].a[k / 8 * 2 + row / 8], k % 2); };
    auto right = [&](int k, int col) { return element(warp[col * 4 + k % 8 / 2].b[k / 8], k % 2); };
    for (int c = 0; c < 4; ++c)
        for (int k = 0; k < 16; ++k) sums[c] += left(g + c / 2 * 8, k) * right(k, 2 * t + c % 2);
}

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

static void** kernel_arguments;

template <typename... A, size_t... I>
static void call(void (*kernel)(A...), void** arguments, std::index_sequence<I...>) {
    kernel(*static_cast<A*>(arguments[I])...);
}
template <typename... A>
static void call(void (*kernel)(A...), void** arguments) {
    call(kernel, arguments, std::index_sequence_for<A...>{});
}

static void run_thread() {
    call(linear_ahead, kernel_arguments);
    threads[current].is_done = true;
    _longjmp(scheduler, 1);
}

static void take_a_turn() {
    if (_setjmp(scheduler)) return;
    Thread& thread = threads[current];
    if (thread.is_begun) _longjmp(thread.resume, 1);
    thread.is_begun = true;
    setcontext(&thread.context);
}

static void run_cluster(unsigned int first_block) {
    num_in_cluster = 0;
    std::memset(memories, 0xff, sizeof memories);  // not a number, wherever nobody wrote
    for (int r = 0; r < CLUSTER; ++r) num_arrived[r] = num_missing[r] = 0;
    for (unsigned int t = 0; t < CLUSTER * num_threads; ++t) {
        Thread& thread = threads[t];
        thread.stack.resize(STACK);
        thread.is_begun = thread.is_done = is_waited[t] = false;
        thread.num_exchanges = thread.num_barriers = 0;
        getcontext(&thread.context);
        thread.context.uc_stack.ss_sp = thread.stack.data();
        thread.context.uc_stack.ss_size = STACK;
        makecontext(&thread.context, run_thread, 0);
    }
    for (bool is_running = true; is_running;) {
        is_running = false;
        for (current = 0; current < CLUSTER * num_threads; ++current) {
            if (threads[current].is_done) continue;
            is_running = true;
            threadIdx = Index{current % num_threads};
            blockIdx = Index{first_block + current / num_threads};
            take_a_turn();
        }
    }
}

// Whether all went by the rules: nothing was read too early, and each block received what it expected.
extern "C" int emulate(unsigned int num_blocks, unsigned int num_threads_of_block, void** arguments) {
    num_threads = num_threads_of_block;
    kernel_arguments = arguments;
    is_early_read = false;
    bool is_complete = true;
    for (unsigned int block = 0; block < num_blocks; block += CLUSTER) {
        run_cluster(block);
        for (int r = 0; r < CLUSTER; ++r) is_complete &= num_missing[r] == 0;
    }
    return !is_early_read && is_complete;
}
