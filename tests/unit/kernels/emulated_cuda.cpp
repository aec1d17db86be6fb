/* A GPU in one thread: enough of CUDA C++ to run a kernel block by block on a CPU.

   Each thread of a block is a coroutine with a stack of its own. They take turns; one gives up its turn
   where it would wait for others, at a shuffle or a barrier. What a warp exchanges is kept in two boards that
   take turns as well: a fast lane may post its next value before a slow one has read the last. A coroutine is
   entered once through its context and from then on by a jump, which spares a system call per turn.

   KERNEL_SOURCE is the .cu file. A launch is `emulate_<kernel>(x, y, z, threads, arguments)`, with addresses
   of arguments as the driver's cuLaunchKernel has them. */

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>
#include <vector>

#define EMULATED
#define __device__ static inline
#define __global__
#define __launch_bounds__(threads)
#define __shared__ static

using std::max;
using std::min;

struct uint4 { unsigned int x, y, z, w; };
struct Index { unsigned int x, y, z; };
static Index blockIdx, gridDim, threadIdx;

constexpr unsigned int WARP = 32, MAX_THREADS = 1024;
constexpr size_t STACK = 64 << 10;

struct Thread {
    ucontext_t context;
    jmp_buf resume;
    std::vector<char> stack;
    bool is_begun, is_done;
    unsigned int num_shuffles, num_barriers;
};
static Thread threads[MAX_THREADS];
static unsigned int num_threads, current, num_arrived;
static float boards[2][MAX_THREADS];
static jmp_buf scheduler;

static void give_up_turn() {
    if (!_setjmp(threads[current].resume)) _longjmp(scheduler, 1);
}

static void take_turn() {
    if (_setjmp(scheduler)) return;
    Thread& thread = threads[current];
    if (thread.is_begun) _longjmp(thread.resume, 1);
    thread.is_begun = true;
    setcontext(&thread.context);
}

static float __shfl_xor_sync(unsigned int, float value, int distance) {
    const unsigned int me = current;
    float* board = boards[threads[me].num_shuffles++ % 2];
    board[me] = value;
    give_up_turn();  // by the next turn, the other lanes of the warp have posted theirs
    return board[me / WARP * WARP + ((me % WARP) ^ distance)];
}

static void __syncthreads() {
    const unsigned int wanted = ++threads[current].num_barriers * num_threads;
    ++num_arrived;
    while (num_arrived < wanted) give_up_turn();
}

template <typename T>
static T __ldcs(const T* address) { return *address; }
static float __uint_as_float(unsigned int bits) { float x; std::memcpy(&x, &bits, 4); return x; }
static unsigned int __float_as_uint(float x) { unsigned int bits; std::memcpy(&bits, &x, 4); return bits; }
static float half_to_float(unsigned short bits) { _Float16 x; std::memcpy(&x, &bits, 2); return (float)x; }
static unsigned short float_to_half(float value) {
    const _Float16 x = (_Float16)value;
    unsigned short bits;
    std::memcpy(&bits, &x, 2);
    return bits;
}

#include KERNEL_SOURCE

static void (*body)(void** arguments);
static void** body_arguments;

static void run_thread() {
    body(body_arguments);
    threads[current].is_done = true;
    _longjmp(scheduler, 1);
}

static void run_block() {
    num_arrived = 0;
    for (unsigned int t = 0; t < num_threads; ++t) {
        Thread& thread = threads[t];
        thread.stack.resize(STACK);
        thread.is_begun = thread.is_done = false;
        thread.num_shuffles = thread.num_barriers = 0;
        getcontext(&thread.context);
        thread.context.uc_stack.ss_sp = thread.stack.data();
        thread.context.uc_stack.ss_size = STACK;
        makecontext(&thread.context, run_thread, 0);
    }
    for (bool is_running = true; is_running;) {
        is_running = false;
        for (current = 0; current < num_threads; ++current) {
            if (threads[current].is_done) continue;
            is_running = true;
            threadIdx = Index{current, 0, 0};
            take_turn();
        }
    }
}

template <typename... A, size_t... I>
static void call(void (*kernel)(A...), void** arguments, std::index_sequence<I...>) {
    kernel(*static_cast<A*>(arguments[I])...);
}
template <typename... A>
static void call(void (*kernel)(A...), void** arguments) {
    call(kernel, arguments, std::index_sequence_for<A...>{});
}

static void run_grid(unsigned int x, unsigned int y, unsigned int z, unsigned int threads_of_block) {
    gridDim = Index{x, y, z};
    num_threads = threads_of_block;
    for (unsigned int c = 0; c < z; ++c)
        for (unsigned int b = 0; b < y; ++b)
            for (unsigned int a = 0; a < x; ++a) {
                blockIdx = Index{a, b, c};
                run_block();
            }
}

#define EMULATE(kernel)                                                                                        \
    extern "C" void emulate_##kernel(unsigned int x, unsigned int y, unsigned int z, unsigned int n, void** a) { \
        body = [](void** arguments) { call(kernel, arguments); };                                              \
        body_arguments = a;                                                                                    \
        run_grid(x, y, z, n);                                                                                  \
    }

EMULATE(paged_attention)
EMULATE(merge_splits)
