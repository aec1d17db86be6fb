/* A GPU in one thread for `linear/pdl.cu`: the threads of a block take turns.

   KERNEL_SOURCE is the .cu file. A launch is `emulate(blocks, threads, arguments)`, with addresses of arguments as
   the driver's cuLaunchKernelEx has them. */

#include "emulated.hpp"

#define __expf expf

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
template <bool IS_ALWAYS>
static void load_word(unsigned int& word, const char* at, bool is_wanted) {
    if (IS_ALWAYS || is_wanted) std::memcpy(&word, at, 4);
}
template <bool IS_ALWAYS>
static void load_word_of_x(unsigned int& word, const char* at, bool is_wanted) {
    if (IS_ALWAYS || is_wanted) std::memcpy(&word, at, 4);
    is_early_read |= !is_waited[current];
}
static unsigned int subtract(unsigned int a, unsigned int b) {
    return pack(half_of(a, 0) - half_of(b, 0), half_of(a, 1) - half_of(b, 1));
}
static unsigned int multiply(unsigned int a, unsigned int b) {
    return pack(half_of(a, 0) * half_of(b, 0), half_of(a, 1) * half_of(b, 1));
}
static unsigned int and_or(unsigned int codes, unsigned int mask, unsigned int bits) { return (codes & mask) | bits; }
static unsigned int load_pair(const char* at) { unsigned int pair; std::memcpy(&pair, at, 4); return pair; }
static double load_double(const double* at) {
    is_early_read |= !is_waited[current];
    return *at;
}

static unsigned int largest_of_warp(unsigned int value) {
    for (int distance = 16; distance > 0; distance /= 2) {
        const unsigned int other = __shfl_xor_sync(0xffffffffu, value, distance);
        value = value > other ? value : other;
    }
    return value;
}
static void let_next_kernel_start() {}
static void wait_for_kernel_before() { is_waited[current] = true; }

struct Shared;
static Shared& memory_of_block();
#define shared memory_of_block()
#include KERNEL_SOURCE
#undef shared

static Shared memory;
static Shared& memory_of_block() { return memory; }

// Whether all went by the rules: nothing was read too early.
extern "C" int emulate(unsigned int num_blocks, unsigned int threads_of_block, void** arguments) {
    body = [](void** given) { call(linear_pdl, given); };
    body_arguments = arguments;
    num_threads = threads_of_block;
    is_early_read = false;
    for (unsigned int block = 0; block < num_blocks; ++block) {
        std::memset(&memory, 0xff, sizeof memory);  // not a number, wherever nothing was written
        std::fill_n(is_waited, num_threads, false);
        run_blocks(block, 1);
    }
    return !is_early_read;
}
