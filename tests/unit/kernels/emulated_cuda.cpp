/* A GPU in one thread: enough of CUDA C++ to run the kernels of decode attention block by block on a CPU.

   Each thread of a block is a coroutine with a stack of its own. They take turns; one gives up its turn where it
   would wait for others, at a barrier or where a warp does something together. What a warp exchanges is kept in
   two boards that take turns as well: a fast lane may post its next value before a slow one has read the last. A
   coroutine is entered once through its context and from then on by a jump, which spares a system call per turn.

   A GPU reads 8 or 16 bytes only at a multiple of 8 or 16; a CPU does not mind. So vectors are declared as they
   are there, and the compiler checks each use of one (`-fsanitize=alignment`) and reports to us. Shared variables
   are laid out as a GPU's compiler would: in their order, each aligned as it was declared and no better.

   KERNEL_SOURCE is the .cu file, KERNEL the function in it. A launch is `emulate(blocks, threads, arguments)`, with
   addresses of arguments as the driver's cuLaunchKernelEx has them; it returns what went wrong, or null. */

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <utility>
#include <vector>

#define EMULATED
#define __device__ static inline
#define __global__
#define __launch_bounds__(...)
#define __shared__ static __attribute__((section("shared"), aligned(4)))
#define __align__(size) __attribute__((aligned(size)))
__shared__ __align__(16) __attribute__((used)) char shared_memory_starts_here[16];

using std::max;
using std::min;

struct alignas(16) uint4 { unsigned int x, y, z, w; };
struct alignas(8) uint2 { unsigned int x, y; };
struct alignas(16) int4 { int x, y, z, w; };
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct Index { unsigned int x; };
static Index blockIdx, gridDim, threadIdx;

static char fault[400];  // the first one

struct SourceLocation { const char* file; unsigned int line, column; };
extern "C" void __ubsan_handle_type_mismatch_v1(SourceLocation* where, unsigned long address) {
    if (!fault[0]) snprintf(fault, sizeof fault, "%s:%u: misaligned: 0x%lx", where->file, where->line, address);
}

constexpr unsigned int WARP_SIZE = 32, MAX_THREADS = 1024;
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

static void __syncthreads() {
    const unsigned int wanted = ++threads[current].num_barriers * num_threads;
    ++num_arrived;
    while (num_arrived < wanted) give_up_turn();
}

static float __uint_as_float(unsigned int bits) { float x; std::memcpy(&x, &bits, 4); return x; }
static unsigned int __float_as_uint(float x) { unsigned int bits; std::memcpy(&bits, &x, 4); return bits; }

#if IS_BFLOAT16
static float to_float(unsigned short bits) { return __uint_as_float((unsigned int)bits << 16); }
static unsigned short to_bits(float value) {
    const unsigned int bits = __float_as_uint(value);
    if (value != value) return 0x7fc0;
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;  // to the nearest, and to even from the middle
}
#else
static float to_float(unsigned short bits) { _Float16 x; std::memcpy(&x, &bits, 2); return (float)x; }
static unsigned short to_bits(float value) {
    const _Float16 x = (_Float16)value;
    unsigned short bits;
    std::memcpy(&bits, &x, 2);
    return bits;
}
#endif
static float half_of(unsigned int pair, int i) { return to_float(i ? pair >> 16 : pair & 0xffff); }

// ---- what a warp does together -------------------------------------------------------------------

struct Words {
    unsigned int w[6];
};
static Words word_boards[2][MAX_THREADS];

static const Words* exchange(const Words& own) {  // what each lane of the warp posts; every lane sees all
    const unsigned int me = current;
    Words* board = word_boards[threads[me].num_shuffles++ % 2];
    board[me] = own;
    give_up_turn();  // by the next turn, the other lanes of the warp have posted theirs
    return board + me / WARP_SIZE * WARP_SIZE;
}

static float __shfl_xor_sync(unsigned int, float value, int distance) {
    const int lane = current % WARP_SIZE;
    return __uint_as_float(exchange({{__float_as_uint(value)}})[lane ^ distance].w[0]);
}

static unsigned int __shfl_sync(unsigned int, unsigned int value, int lane) { return exchange({{value}})[lane].w[0]; }

static bool __any_sync(unsigned int, bool is_set) {
    const Words* all = exchange({{is_set}});
    return std::any_of(all, all + WARP_SIZE, [](const Words& x) { return x.w[0]; });
}

// From the definition: which lane holds which element of A, B and C.
static void multiply(float (&c)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
    const int lane = current % WARP_SIZE, row = lane / 4, column = lane % 4 * 2;
    const Words* all = exchange({{a0, a1, a2, a3, b0, b1}});
    for (int e = 0; e < 4; ++e)
        for (int k = 0; k < 16; ++k) {
            const int of_k = k % 8 / 2, upper = k / 8;
            const Words& with_a = all[row * 4 + of_k];
            const Words& with_b = all[(column + e % 2) * 4 + of_k];
            c[e] += half_of(with_a.w[2 * upper + e / 2], k % 2) * half_of(with_b.w[4 + upper], k % 2);
        }
}

static unsigned int transpose(unsigned int row) {
    const int lane = current % WARP_SIZE, g = lane / 4, t = lane % 4;
    const Words* all = exchange({{row}});
    unsigned int column = 0;
    for (int i = 0; i < 2; ++i) {
        const unsigned int pair = all[(2 * t + i) * 4 + g / 2].w[0];
        column |= (g % 2 ? pair >> 16 : pair & 0xffff) << 16 * i;
    }
    return column;
}

// ---- what a thread does alone --------------------------------------------------------------------

static unsigned int pack(float low, float high) { return to_bits(low) | (unsigned int)to_bits(high) << 16; }
static float2 unpack(unsigned int pair) { return float2{half_of(pair, 0), half_of(pair, 1)}; }
static float power_of_two(float x) { return exp2f(x); }
static float rsqrtf(float x) { return 1.0f / sqrtf(x); }
static uint4 load_stream(const unsigned short* at) { return *reinterpret_cast<const uint4*>(at); }
static int take_ticket(int* counter) { return (*counter)++; }
static void prefetch(const unsigned short* at) { volatile unsigned short read = *at; }  // it must be there
static void let_next_start() {}
static void wait_for_before() {}
static void __threadfence() {}
template <typename T>
static T __ldcg(const T* address) { return *address; }
template <typename T>
static void __stcg(T* address, const T& x) { *address = x; }

static unsigned int __byte_perm(unsigned int a, unsigned int b, unsigned int selector) {
    const unsigned long long both = a | (unsigned long long)b << 32;
    unsigned int result = 0;
    for (int i = 0; i < 4; ++i) result |= (unsigned int)(both >> 8 * (selector >> 4 * i & 7) & 0xff) << 8 * i;
    return result;
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
            threadIdx = Index{current};
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

extern "C" const char* emulate(unsigned int num_blocks, unsigned int threads_of_block, void** arguments) {
    body = [](void** given) { call(KERNEL, given); };
    body_arguments = arguments;
    gridDim = Index{num_blocks};
    num_threads = threads_of_block;
    fault[0] = 0;
    for (unsigned int x = 0; x < num_blocks; ++x) {
        blockIdx = Index{x};
        run_block();
    }
    return fault[0] ? fault : nullptr;
}
