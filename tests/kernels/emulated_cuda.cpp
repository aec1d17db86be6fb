/* A GPU in one thread for the kernels of decode attention, block by block.

   A GPU reads 8 or 16 bytes only at a multiple of 8 or 16; a CPU does not mind. So vectors are declared as they
   are there, and the compiler checks each use of one (`-fsanitize=alignment`) and reports to us. Shared variables
   are laid out as a GPU's compiler would: in their order, each aligned as it was declared and no better.

   The kernel before is as slow as it may be: its work cannot be seen until every thread of a block waits for it. What
   it writes is in memory when a launch begins, and not a number from the start of each block to its wait.

   KERNEL_SOURCE is the .cu file, KERNEL the function in it. A launch is `emulate(blocks, threads, arguments, ...)`,
   with addresses of arguments as the driver's cuLaunchKernelEx has them, and the places where the kernel before
   writes; it returns what went wrong, or null. */

#include "emulated.hpp"

#define __shared__ static __attribute__((section("shared"), aligned(4)))
#define __align__(size) __attribute__((aligned(size)))
__shared__ __align__(16) __attribute__((used)) char shared_memory_starts_here[16];

struct alignas(16) uint4 { unsigned int x, y, z, w; };
struct alignas(8) uint2 { unsigned int x, y; };
struct alignas(16) int4 { int x, y, z, w; };
struct alignas(16) float4 { float x, y, z, w; };
static Index gridDim;

static char fault[400];  // the first one

struct SourceLocation { const char* file; unsigned int line, column; };
extern "C" void __ubsan_handle_type_mismatch_v1(SourceLocation* where, unsigned long address) {
    if (!fault[0]) snprintf(fault, sizeof fault, "%s:%u: misaligned: 0x%lx", where->file, where->line, address);
}

// ---- what a warp does together -------------------------------------------------------------------

static unsigned int __shfl_sync(unsigned int, unsigned int value, int lane) { return exchange({{value}})[lane].w[0]; }

static bool __any_sync(unsigned int, bool is_set) {
    const Words* all = exchange({{is_set}});
    return std::any_of(all, all + WARP_SIZE, [](const Words& x) { return x.w[0]; });
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

// ---- the kernel before ---------------------------------------------------------------------------

struct Place { char* at; size_t num_bytes; };
static std::vector<std::pair<Place, std::vector<char>>> written;  // by it, and what
static bool is_waited[MAX_THREADS];
static unsigned int num_waited;  // threads of this block
constexpr int MAX_TURNS = 1000;  // from the first thread's wait to the last one's
extern "C" unsigned int num_early_loads = 0;  // of the last launch, all threads' together

static void begin_before() {
    for (auto& [place, bytes] : written) std::memset(place.at, 0xff, place.num_bytes);
    std::fill_n(is_waited, num_threads, false);
    num_waited = 0;
}

static void gdc_wait() {
    is_waited[current] = true;
    if (++num_waited == num_threads)
        for (auto& [place, bytes] : written) std::memcpy(place.at, bytes.data(), place.num_bytes);
    for (int i = 0; num_waited < num_threads && !fault[0]; ++i) {
        if (i == MAX_TURNS) snprintf(fault, sizeof fault, "some threads of a block wait, and others do not");
        give_up_turn();
    }
}

static void check_that_it_waited() {
#if PDL
    if (!is_waited[current] && !fault[0]) snprintf(fault, sizeof fault, "a thread leaves that has not waited");
#endif
}

// ---- what a thread does alone --------------------------------------------------------------------

static float power_of_two(float x) { return exp2f(x); }
static uint4 load_stream(const void* at) {
    num_early_loads += !is_waited[current];
    return *static_cast<const uint4*>(at);
}
static uint2 load_half_stream(const void* at) {
    num_early_loads += !is_waited[current];
    return *static_cast<const uint2*>(at);
}
static int take_ticket(int* counter) { return (*counter)++; }
static void prefetch(const void* at) { volatile char read = *static_cast<const char*>(at); }  // it must be there
static void gdc_launch_dependents() {}
static void __threadfence() {}
template <typename T>
static T __ldcg(const T* address) { return *address; }
template <typename T>
static void __stcg(T* address, const T& x) { *address = x; }

// ---- codes of 8 bits: from the definition of e4m3, each of its 128 magnitudes tried ---------------

static float log_of_two(float x) { return log2f(x); }
static int __float2int_rn(float x) { return (int)nearbyintf(x); }
static unsigned int pack_half(float low, float high) {
    return float_to_half(low) | (unsigned int)float_to_half(high) << 16;
}
static float of_fp8(unsigned int code) {
    const int exponent = code >> 3 & 15, mantissa = code & 7;
    if ((code & 0x7f) == 0x7f) return NAN;
    const float magnitude = exponent ? ldexpf(8 + mantissa, exponent - 10) : ldexpf(mantissa, -9);
    return code & 0x80 ? -magnitude : magnitude;
}
static unsigned int to_fp8(float x) {
    if (x != x) return 0x7f;
    unsigned int best = 0;
    for (unsigned int code = 1; code < 0x7f; ++code) {
        const float distance = fabsf(of_fp8(code) - fabsf(x)), least = fabsf(of_fp8(best) - fabsf(x));
        if (distance < least || (distance == least && code % 2 == 0)) best = code;
    }
    return best | (x < 0 ? 0x80 : 0);
}
static unsigned int decode_fp8(unsigned int codes) { return pack_half(of_fp8(codes & 0xff), of_fp8(codes >> 8 & 0xff)); }
static unsigned int encode_fp8(float low, float high) { return to_fp8(low) | to_fp8(high) << 8; }
static unsigned int subtract_half(unsigned int a, unsigned int b) {
    return pack_half(half_to_float(a & 0xffff) - half_to_float(b & 0xffff), half_to_float(a >> 16) - half_to_float(b >> 16));
}

#include KERNEL_SOURCE

extern "C" const char* emulate(unsigned int num_blocks, unsigned int threads_of_block, void** arguments,
                               unsigned int num_places, const Place* places) {
    body = [](void** given) {
        call(KERNEL, given);
        check_that_it_waited();
    };
    body_arguments = arguments;
    gridDim = Index{num_blocks};
    num_threads = threads_of_block;
    fault[0] = num_early_loads = 0;
    written.clear();
    for (const Place* place = places; place < places + num_places; ++place)
        written.push_back({*place, std::vector<char>(place->at, place->at + place->num_bytes)});
    for (unsigned int block = 0; block < num_blocks; ++block) {
        begin_before();
        run_blocks(block, 1);
    }
    return fault[0] ? fault : nullptr;
}
