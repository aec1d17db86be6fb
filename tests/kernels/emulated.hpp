/* A GPU in one thread: enough of CUDA C++ to run a kernel on a CPU, some blocks at a time.

   Each thread is a coroutine with a stack of its own. They take turns; one gives up its turn where it would wait
   for others, at a barrier or where a warp does something together. What a warp exchanges is kept in two boards
   that take turns as well: a fast lane may post its next value before a slow one has read the last. A coroutine is
   entered once through its context and from then on by a jump, which spares a system call per turn.

   An emulator includes this, says what else its kernel calls, and includes the kernel. */

#pragma once

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
#define __forceinline__
#define __global__
#define __launch_bounds__(...)

using std::max;
using std::min;

struct alignas(8) float2 { float x, y; };
struct Index { unsigned int x; };
static Index blockIdx, threadIdx;

// ---- threads that take turns ---------------------------------------------------------------------

constexpr unsigned int WARP_SIZE = 32, MAX_BLOCKS = 8, MAX_THREADS = 4096;  // that run at the same time
#ifdef STACK_BYTES
constexpr size_t STACK = STACK_BYTES;
#else
constexpr size_t STACK = 128 << 10;
#endif

struct Thread {
    ucontext_t context;
    jmp_buf resume;
    std::vector<char> stack;
    bool is_begun, is_done;
    unsigned int num_exchanges, num_barriers;
};
static Thread threads[MAX_THREADS];
static unsigned int num_threads, current;  // of a block; the one whose turn it is, counted through all blocks
static unsigned int num_arrived[MAX_BLOCKS];
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
    const unsigned int block = current / num_threads, wanted = ++threads[current].num_barriers * num_threads;
    ++num_arrived[block];
    while (num_arrived[block] < wanted) give_up_turn();
}

static void (*body)(void** arguments);  // of the kernel
static void** body_arguments;

static void run_thread() {
    body(body_arguments);
    threads[current].is_done = true;
    _longjmp(scheduler, 1);
}

static void run_blocks(unsigned int first, unsigned int num_blocks) {
    const unsigned int num_all = num_blocks * num_threads;
    std::fill_n(num_arrived, num_blocks, 0);
    for (unsigned int t = 0; t < num_all; ++t) {
        Thread& thread = threads[t];
        thread.stack.resize(STACK);
        thread.is_begun = thread.is_done = false;
        thread.num_exchanges = thread.num_barriers = 0;
        getcontext(&thread.context);
        thread.context.uc_stack.ss_sp = thread.stack.data();
        thread.context.uc_stack.ss_size = STACK;
        makecontext(&thread.context, run_thread, 0);
    }
    for (bool is_running = true; is_running;) {
        is_running = false;
        for (current = 0; current < num_all; ++current) {
            if (threads[current].is_done) continue;
            is_running = true;
            threadIdx = Index{current % num_threads};
            blockIdx = Index{first + current / num_threads};
            take_turn();
        }
    }
}

// Call a kernel with the addresses of its arguments, as the driver's cuLaunchKernelEx does.
template <typename... A, size_t... I>
static void call(void (*kernel)(A...), void** arguments, std::index_sequence<I...>) {
    kernel(*static_cast<A*>(arguments[I])...);
}
template <typename... A>
static void call(void (*kernel)(A...), void** arguments) {
    call(kernel, arguments, std::index_sequence_for<A...>{});
}

// ---- numbers of 16 bits --------------------------------------------------------------------------

static float __uint_as_float(unsigned int bits) { float x; std::memcpy(&x, &bits, 4); return x; }
static unsigned int __float_as_uint(float x) { unsigned int bits; std::memcpy(&bits, &x, 4); return bits; }

static float bfloat_to_float(unsigned short bits) { return __uint_as_float((unsigned int)bits << 16); }
static unsigned short float_to_bfloat(float value) {
    const unsigned int bits = __float_as_uint(value);
    if (value != value) return 0x7fc0;
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;  // to the nearest, and to even from the middle
}
// By bits: C++ has no name for this type that every compiler of every processor knows.
static float half_to_float(unsigned short half) {
    const unsigned int sign = (half & 0x8000u) << 16, magnitude = half & 0x7fff;
    if (magnitude >= 0x7c00) return __uint_as_float(sign | 0x7f800000 | (magnitude & 0x3ff) << 13);
    if (magnitude >= 0x400) return __uint_as_float(sign | (magnitude + (112 << 10)) << 13);  // 112: 127 - 15
    return __uint_as_float(sign | __float_as_uint((float)magnitude * 0x1p-24f));
}
static unsigned short float_to_half(float value) {
    const unsigned int bits = __float_as_uint(value), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
    if (magnitude > 0x7f800000) return sign | 0x7e00 | (magnitude >> 13 & 0x3ff);
    if (magnitude >= 0x477ff000) return sign | 0x7c00;  // from halfway to 2^16 on: infinity
    if (magnitude >= 0x38800000) return sign | (magnitude - (112u << 23) + 0xfff + (magnitude >> 13 & 1)) >> 13;
    // Below 2^-14 halves are 2^-24 apart, as floats are from 0.5 on: the addition rounds, to even from the middle.
    return sign | __float_as_uint(__uint_as_float(magnitude) + 0.5f) - __float_as_uint(0.5f);
}
#if IS_BFLOAT16
static float to_float(unsigned short bits) { return bfloat_to_float(bits); }
static unsigned short to_bits(float value) { return float_to_bfloat(value); }
#else
static float to_float(unsigned short bits) { return half_to_float(bits); }
static unsigned short to_bits(float value) { return float_to_half(value); }
#endif
#if CODES  // kept in 8 bits: matrices are of float16, whatever the rest is
static float of_matrix(unsigned int pair, int i) { return half_to_float(i ? pair >> 16 : pair & 0xffff); }
#else
static float of_matrix(unsigned int pair, int i) { return to_float(i ? pair >> 16 : pair & 0xffff); }
#endif
static float half_of(unsigned int pair, int i) { return to_float(i ? pair >> 16 : pair & 0xffff); }
static unsigned int pack(float low, float high) { return to_bits(low) | (unsigned int)to_bits(high) << 16; }
static float2 unpack(unsigned int pair) { return float2{half_of(pair, 0), half_of(pair, 1)}; }

#define rsqrtf inverse_root  // newer C libraries have one of their own
static float inverse_root(float x) { return 1.0f / sqrtf(x); }

// ---- what a warp does together -------------------------------------------------------------------

struct Words { unsigned int w[6]; };
static Words word_boards[2][MAX_THREADS];

static const Words* exchange(const Words& own) {  // what each lane of the warp posts; every lane sees all
    const unsigned int me = current;
    Words* board = word_boards[threads[me].num_exchanges++ % 2];
    board[me] = own;
    give_up_turn();  // by the next turn, the other lanes of the warp have posted theirs
    return board + me / WARP_SIZE * WARP_SIZE;
}

static unsigned int __byte_perm(unsigned int low, unsigned int high, unsigned int selector) {
    const unsigned long long bytes = (unsigned long long)high << 32 | low;
    unsigned int result = 0;
    for (int i = 0; i < 4; ++i) {
        const unsigned int chosen = selector >> 4 * i & 0xf;
        unsigned int byte = bytes >> 8 * (chosen & 7) & 0xff;
        if (chosen & 8) byte = byte & 0x80 ? 0xff : 0;  // the sign of the byte, eight times
        result |= byte << 8 * i;
    }
    return result;
}

template <typename T>
static T __shfl_xor_sync(unsigned int, T value, int distance) {
    Words words;
    std::memcpy(words.w, &value, sizeof value);
    std::memcpy(&value, exchange(words)[current % WARP_SIZE ^ distance].w, sizeof value);
    return value;
}

// D = A B + D with A [16, 16] and B [16, 8], from the definition: which lane holds which element.
static void multiply(float* d, unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
    const int lane = current % WARP_SIZE, row = lane / 4, column = lane % 4 * 2;
    const Words* all = exchange({{a0, a1, a2, a3, b0, b1}});
    for (int e = 0; e < 4; ++e)
        for (int k = 0; k < 16; ++k) {
            const int of_k = k % 8 / 2, upper = k / 8;
            const Words& with_a = all[row * 4 + of_k];
            const Words& with_b = all[(column + e % 2) * 4 + of_k];
            d[e] += of_matrix(with_a.w[2 * upper + e / 2], k % 2) * of_matrix(with_b.w[4 + upper], k % 2);
        }
}
