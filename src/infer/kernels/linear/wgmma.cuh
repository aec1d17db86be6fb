/* Building blocks of linear/wgmma.cu: the instructions of Hopper's TMA, barriers and wgmma.

   A *warpgroup* is four warps that multiply together: W from shared memory times x from shared memory, sums in
   registers. Both operands have TMA's 128-byte swizzle: rows of 64 elements, with the 16-byte pieces of row r in the
   order of their number xor (r % 8), so that the same piece of eight rows covers all banks. */

typedef unsigned long long u64;

struct alignas(64) TensorMap {
    char bytes[128];  // address of a matrix and the boxes in which it is copied, encoded by the driver
};

#ifndef EMULATED

__device__ __forceinline__ u32 shared_address(const void* at) { return (u32)__cvta_generic_to_shared(at); }

// ---- barriers in shared memory --------------------------------------------------------------------

__device__ __forceinline__ void make_barrier(u64* barrier, int num_arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(num_arrivals)
                 : "memory");
}

// Make the finished barriers visible to TMA, and to the other blocks of the cluster.
__device__ __forceinline__ void publish_barriers() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

__device__ __forceinline__ void expect_bytes(u64* barrier, int num_bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
                 "r"(num_bytes) : "memory");
}

__device__ __forceinline__ void arrive(u64* barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

__device__ __forceinline__ void wait_until(u64* barrier, u32 parity) {
    asm volatile("{ .reg .pred p; again: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1; "
                 "@!p bra again; }" ::"r"(shared_address(barrier)), "r"(parity) : "memory");
}

__device__ __forceinline__ void meet_in_cluster() {
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

__device__ __forceinline__ void meet(int number, int num_threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(number), "r"(num_threads) : "memory");
}

__device__ __forceinline__ float2 load_from(const float* at, int rank) {  // the same place in block `rank`
    float2 value;
    asm volatile("{ .reg .b32 there; mapa.shared::cluster.u32 there, %2, %3; "
                 "ld.shared::cluster.v2.f32 {%0, %1}, [there]; }"
                 : "=f"(value.x), "=f"(value.y) : "r"(shared_address(at)), "r"(rank) : "memory");
    return value;
}

// ---- TMA --------------------------------------------------------------------------------

constexpr u64 READ_ONCE = 0x12F0000000000000, READ_AGAIN = 0x14F0000000000000;  // evicted from L2 first, or last

// Copy the box at (row, column) of a matrix; past its ends it is filled with zeros, which also count as bytes.
__device__ __forceinline__ void copy_box(
    char* to, const TensorMap& map, int row, int column, u64* barrier, u64 policy) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
                 "[%0], [%1, {%2, %3}], [%4], %5;"
                 ::"r"(shared_address(to)), "l"(&map), "r"(column), "r"(row), "r"(shared_address(barrier)), "l"(policy)
                 : "memory");
}

__device__ __forceinline__ void fetch_map(const TensorMap& map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// ---- tensor cores -----------------------------------------------------------------------------------

__device__ __forceinline__ void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ __forceinline__ void end_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

template <int LEFT>
__device__ __forceinline__ void wait_for_products() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}

#if IS_BFLOAT16
#define WGMMA(tokens) "{ wgmma.mma_async.sync.aligned.m64n" #tokens "k16.f32.bf16.bf16 {"
#else
#define WGMMA(tokens) "{ wgmma.mma_async.sync.aligned.m64n" #tokens "k16.f32.f16.f16 {"
#endif
#define SUMS_0 "%0, %1, %2, %3, %4, %5, %6, %7"
#define SUMS_1 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define SUMS_2 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define SUMS_3 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define SUMS_4 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define SUMS_6 ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define PLUS "1, 1, 1, 0, 0; }"  // sums += W x, neither operand negated nor transposed
#define OF_4(s) "+f"((s)[0]), "+f"((s)[1]), "+f"((s)[2]), "+f"((s)[3])
#define OF_8(s) OF_4(s), OF_4((s) + 4)
#define OF_16(s) OF_8(s), OF_8((s) + 8)
#define OF_32(s) OF_16(s), OF_16((s) + 16)
#define OPERANDS "l"(w), "l"(x)

// Multiply 64 rows of W by all tokens over 16 columns, and add to the warpgroup's sums.
template <int NUM_TOKENS>
__device__ __forceinline__ void add_product(float* s, u64 w, u64 x) {
    if constexpr (NUM_TOKENS == 16) {
        asm volatile(WGMMA(16) SUMS_0 "}, %8, %9, " PLUS : OF_8(s) : OPERANDS);
    } else if constexpr (NUM_TOKENS == 32) {
        asm volatile(WGMMA(32) SUMS_0 SUMS_1 "}, %16, %17, " PLUS : OF_16(s) : OPERANDS);
    } else if constexpr (NUM_TOKENS == 48) {
        asm volatile(WGMMA(48) SUMS_0 SUMS_1 SUMS_2 "}, %24, %25, " PLUS : OF_16(s), OF_8((s) + 16) : OPERANDS);
    } else if constexpr (NUM_TOKENS == 64) {
        asm volatile(WGMMA(64) SUMS_0 SUMS_1 SUMS_2 SUMS_3 "}, %32, %33, " PLUS : OF_32(s) : OPERANDS);
    } else if constexpr (NUM_TOKENS == 96) {
        asm volatile(WGMMA(96) SUMS_0 SUMS_1 SUMS_2 SUMS_3 SUMS_4 "}, %48, %49, " PLUS
                     : OF_32(s), OF_16((s) + 32) : OPERANDS);
    } else {
        static_assert(NUM_TOKENS == 128, "16, 32, 48, 64, 96 or 128 tokens");
        asm volatile(WGMMA(128) SUMS_0 SUMS_1 SUMS_2 SUMS_3 SUMS_4 SUMS_6 "}, %64, %65, " PLUS
                     : OF_32(s), OF_32((s) + 32) : OPERANDS);
    }
}

#endif

// The descriptor of an operand: its address, 1024 bytes from eight rows to the next eight, the 128-byte swizzle.
__device__ __forceinline__ u64 operand(const char* at) {
    return ((shared_address(at) & 0x3ffff) >> 4) | (u64)1 << 16 | (u64)(1024 >> 4) << 32 | (u64)1 << 62;
}
