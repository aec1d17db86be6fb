/* A GPU in one thread for `linear/wgmma.cu` and `linear/grouped.cu` (GATHER): TMA and a matrix unit that work behind the threads' backs.

   Both are as slow as they may be. A box that is asked for leaves noise in its place and lands later, the last one
   first; a product is computed when a thread waits for it, by each warp later than by the one before it. A book is
   kept of every *line*, eight rows of a stage: is a copy under way to it, and how many reads are owed before there
   may be the next. What a copy brought is kept a second time, so that a line written to by another is noticed
   when it is read.

       copy_box ──► under way ──► landed, owes 4 steps x every thread that multiplies it ──► free again

   Who breaks a rule is told so by `emulate(blocks, threads, shared bytes, arguments)`, which returns the first
   rule that was broken, or nothing. From then on no thread waits any more. */

#define STACK_BYTES (32 << 10)
#ifdef GATHER
#define SPLIT 1
#endif
#include "emulated.hpp"

#define __shared__
#define __expf expf

typedef unsigned int u32;
typedef unsigned long long u64;
struct TensorMap;

static float __fdividef(float a, float b) { return a / b; }
static int __popc(u32 bits) { return __builtin_popcount(bits); }
static int __ffs(u32 bits) { return __builtin_ffs(bits); }
static u32 pack(float2 value) { return pack(value.x, value.y); }

// ---- rules, and waiting ----------------------------------------------------------------------------

constexpr u32 MAX_IDLE = 64 * MAX_THREADS;  // turns

static const char* broken;
static u32 num_idle;

static void require(bool is_kept, const char* rule) {
    if (!is_kept && !broken) broken = rule;
}

template <typename F>
static void wait_while(F is_closed) {
    for (; is_closed() && !broken; give_up_turn()) require(++num_idle < MAX_IDLE, "a thread waits for ever");
    num_idle = 0;
}

struct Meeting {
    u32 num_here, round;
    u32 come(u32 num_expected) {
        const u32 mine = round;
        if (++num_here == num_expected) num_here = 0, ++round;
        return mine;
    }
    void join(u32 num_expected) {
        const u32 mine = come(num_expected);
        wait_while([&] { return round == mine; });
    }
};

// ---- shared memory ---------------------------------------------------------------------------------

constexpr u32 BEGIN = 1024 + 16;  // of what a kernel may use: at no address that it could build on
constexpr u32 SIZE = 256 << 10, LINE = 1024, NUM_LINES = SIZE / LINE;
alignas(LINE) static char memories[SPLIT][SIZE], brought[SPLIT][SIZE];

#ifdef GATHER  // warpgroups of padding read nothing: a stage that is overwritten too early shows in the sums
constexpr bool COUNTS_READS = false;
#else
constexpr bool COUNTS_READS = true;
#endif
struct Line {
    int num_copies, num_reads;  // under way; owed
};
static Line lines[SPLIT][NUM_LINES];

static char* memory_of[1];  // of the thread that begins
#define memory *memory_of

static u32 own_block() { return current / num_threads; }
static u32 shared_address(const void* at) { return (const char*)at - memories[own_block()]; }

// ---- the kernels before and behind -----------------------------------------------------------------

struct Matrix {
    const char* at;
    long long num_rows, num_columns, row_bytes, box_rows;
};
static Matrix matrix_of(const void* map) { Matrix matrix; std::memcpy(&matrix, map, sizeof matrix); return matrix; }

static bool is_waited[MAX_THREADS], has_let_in[SPLIT], is_shown[MAX_THREADS];
static const char *tokens_at, *h_at, *residual_at, *residual_end;

static void let_next_kernel_start() { has_let_in[own_block()] = true; }
static void wait_for_kernel_before() { is_waited[current] = true; }
static u32 load_pair(const char* at) {
    require(is_waited[current] || at < residual_at || at >= residual_end, "the residual is read before the wait");
    u32 pair;
    std::memcpy(&pair, at, 4);
    return pair;
}
static double load_double(const double* at) {
    require(is_waited[current], "squares are read before the wait");
    return *at;
}

// ---- what a warp does together ---------------------------------------------------------------------

static Meeting warps[MAX_THREADS / WARP_SIZE], shuffles[MAX_THREADS / WARP_SIZE];
static bool is_alone[MAX_THREADS];  // whether a thread has done since what the others of its warp may not have done

static void __syncwarp() {
    warps[current / WARP_SIZE].join(WARP_SIZE);
    is_alone[current] = false;
}

#define __shfl_xor_sync shuffle  // in which all lanes have to take part
static double posted[2][MAX_THREADS];
static double shuffle(u32, double value, int distance) {
    Meeting& meeting = shuffles[current / WARP_SIZE];
    double* board = posted[meeting.round % 2];
    board[current] = value;
    meeting.join(WARP_SIZE);
    return board[current ^ distance];
}

// ---- barriers in shared memory, TMA ----------------------------------------------------

enum State : unsigned char { PRIVATE = 1, PUBLIC = 2 };
struct Barrier {
    int num_bytes;
    unsigned char num_missing, num_expected, phase, state;
    void settle() {
        if (num_missing || num_bytes) return;
        phase ^= 1;
        num_missing = num_expected;
    }
};
static_assert(sizeof(Barrier) == sizeof(u64), "in the place of one");
struct Copy {
    u32 block, to;
    Matrix from;
    int row, column;
    Barrier* barrier;
};
static std::vector<Barrier*> not_public;
static std::vector<Copy> copies;  // under way
static u32 num_polls;

static Barrier& as_public(u64* barrier) {
    require(((Barrier*)barrier)->state == PUBLIC, "a barrier is used before it is made and published");
    return *(Barrier*)barrier;
}
static void make_barrier(u64* barrier, int num_arrivals) {
    *(Barrier*)barrier = Barrier{0, (unsigned char)num_arrivals, (unsigned char)num_arrivals, 0, PRIVATE};
    not_public.push_back((Barrier*)barrier);
}
static void publish_barriers() {
    for (Barrier* barrier : not_public) barrier->state = PUBLIC;
    not_public.clear();
}
static void arrive_with(u64* at, int num_bytes) {
    Barrier& barrier = as_public(at);
    is_alone[current] = true;
    require(barrier.num_missing > 0, "more have arrived than a barrier expects");
    barrier.num_bytes += num_bytes;
    --barrier.num_missing;
    barrier.settle();
}
static void expect_bytes(u64* at, int num_bytes) { arrive_with(at, num_bytes); }
static void arrive(u64* at) {
    arrive_with(at, 0);
    give_up_turn();  // a thread that waited may now go first
}

static u32 swizzled(u32 address) { return address ^ (address >> 7 & 7) << 4; }

static void land(const Copy& copy) {
    const Matrix& from = copy.from;
    for (int r = 0; r < from.box_rows; ++r)
        for (int c = 0; c < 64; ++c) {
            const long long row = copy.row + r, column = copy.column + c;
            unsigned short element = 0;
            if (row >= 0 && row < from.num_rows && column < from.num_columns)
                std::memcpy(&element, from.at + row * from.row_bytes + column * 2, 2);
            const u32 to = swizzled(copy.to + r * 128 + c * 2);
            std::memcpy(memories[copy.block] + to, &element, 2);
            std::memcpy(brought[copy.block] + to, &element, 2);
        }
    for (int r = 0; r < from.box_rows; r += 8) --lines[copy.block][(copy.to + r * 128) / LINE].num_copies;
    copy.barrier->num_bytes -= from.box_rows * 128;
    copy.barrier->settle();
    num_idle = 0;
}

// Pieces that a thread copied by itself, and the barrier at which it arrives when they have come.
struct Pieces {
    std::vector<std::pair<char*, const char*>> places;
    Barrier* barrier;
};
static Pieces own_pieces[MAX_THREADS];
static std::vector<Pieces> pieces_under_way;

static void copy_piece(u32 to, const char* from) {
    require(is_waited[current], "pieces are copied before the wait");
    require(!lines[own_block()][to / LINE].num_copies, "a piece is copied to where a box is under way");
    char* at = memories[own_block()] + to;
    std::memset(at, 0xff, 16);
    own_pieces[current].places.push_back({at, from});
}
static void arrive_with_pieces(u64* barrier) {
    own_pieces[current].barrier = &as_public(barrier);
    pieces_under_way.push_back(std::exchange(own_pieces[current], Pieces{}));
}
static void show_to_matrix_unit() { is_shown[current] = true; }

static void wait_until(u64* at, u32 parity) {
    Barrier& barrier = as_public(at);
    is_alone[current] = true;
    is_shown[current] = false;
    wait_while([&] {
        if (++num_polls % 61 == 0 && !copies.empty()) {
            const Copy last = copies.back();
            copies.pop_back();
            land(last);
        }
        if (num_polls % 7 == 0 && !pieces_under_way.empty()) {
            const Pieces last = std::move(pieces_under_way.back());
            pieces_under_way.pop_back();
            for (const auto& [to, from] : last.places) std::memcpy(to, from, 16);
            require(last.barrier->num_missing > 0, "more have arrived than a barrier expects");
            --last.barrier->num_missing;
            last.barrier->settle();
            num_idle = 0;
        }
        return barrier.phase == parity;
    });
}

constexpr u64 READ_ONCE = 0, READ_AGAIN = 1;

static void fetch_map(const TensorMap&) {}

static void copy_box(char* to, const TensorMap& map, int row, int column, u64* barrier, u64) {
    const Matrix from = matrix_of(&map);
    const bool is_x = from.at == tokens_at || from.at == h_at;
    const u32 at = shared_address(to), num_reading = is_x ? num_threads - 128 : 128;
    require(at % LINE == 0 && from.box_rows % 8 == 0, "a box does not begin at a multiple of 1024");
    require(!is_x || is_waited[current], "tokens are copied before the wait");
    require(is_x || !has_let_in[own_block()], "weights are asked for when the next kernel is already let in");
    for (u32 line = at / LINE; line < at / LINE + from.box_rows / 8; ++line) {
        Line& book = lines[own_block()][line];
        require(!book.num_copies && !book.num_reads, "a stage is overwritten that is still to be read");
        book = Line{1, COUNTS_READS ? int(4 * num_reading) : 0};
    }
    std::memset(to, 0xff, from.box_rows * 128);
    copies.push_back(Copy{own_block(), at, from, row, column, &as_public(barrier)});
}

// ---- the matrix unit -------------------------------------------------------------------------------

struct Product {
    float* sums;
    u64 w, x;
    int num_tokens;
};
struct Unit {  // as a thread sees it
    std::vector<Product> told;
    std::vector<u32> ends;  // of the groups that were committed
    u32 num_done;
    bool is_begun;
};
static Unit units[MAX_THREADS];

struct Operand {  // what its 64 bits say
    u32 begin, to_next_eight;
    explicit Operand(u64 bits) : begin((bits & 0x3fff) << 4), to_next_eight((bits >> 32 & 0x3fff) << 4) {
        require(bits >> 62 == 1 && (bits >> 49 & 7) == 0, "an operand is not in the pattern of 128 bytes");
        require(begin % LINE < 128 && to_next_eight == LINE, "an operand begins within eight rows");
    }
    float element(int row, int k) const {
        const u32 at = swizzled(begin + row / 8 * to_next_eight + row % 8 * 128 + k * 2);
        return to_float(*(const unsigned short*)(memories[own_block()] + at));
    }
    void check(int num_rows, bool is_read) const {
        for (u32 line = begin / LINE; line < begin / LINE + num_rows / 8; ++line) {
            Line& book = lines[own_block()][line];
            require(!book.num_copies && (!COUNTS_READS || book.num_reads > 0),
                    "a stage is multiplied before its bytes have come");
            if (!is_read || !COUNTS_READS) continue;
            --book.num_reads;
            if (current % WARP_SIZE == 0)
                require(!std::memcmp(memories[own_block()] + line * LINE, brought[own_block()] + line * LINE, LINE),
                        "a stage was written over before it was read");
        }
    }
};

static void begin_products() { units[current].is_begun = true; }
static void end_products() { units[current].ends.push_back(units[current].told.size()); }

template <int NUM_TOKENS>
static void add_product(float* sums, u64 w, u64 x) {
    Unit& unit = units[current];
    require(unit.is_begun, "a product without a fence before it");
#ifdef GATHER
    require(!GATHER || is_shown[current], "pieces are multiplied that the matrix unit may not see");
#endif
    Operand(w).check(64, false);
    Operand(x).check(NUM_TOKENS, false);
    unit.told.push_back(Product{sums, w, x, NUM_TOKENS});
}

static void compute(const Product& product) {
    const int lane = current % WARP_SIZE, row = current % num_threads / WARP_SIZE % 4 * 16 + lane / 4;
    const Operand w(product.w), x(product.x);
    w.check(64, true);
    x.check(product.num_tokens, true);
    float weights[2][16];
    for (int k = 0; k < 16; ++k)
        for (int half = 0; half < 2; ++half) weights[half][k] = w.element(row + 8 * half, k);
    for (int j = 0; j < product.num_tokens / 8; ++j)
        for (int c = 0; c < 2; ++c)
            for (int k = 0; k < 16; ++k) {
                const float input = x.element(8 * j + lane % 4 * 2 + c, k);
                product.sums[4 * j + c] += weights[0][k] * input;
                product.sums[4 * j + 2 + c] += weights[1][k] * input;
            }
}

template <int LEFT>
static void wait_for_products() {
    for (u32 turn = 0; turn < current % num_threads / WARP_SIZE; ++turn) give_up_turn();
    __syncwarp();
    Unit& unit = units[current];
    if (unit.ends.size() <= LEFT) return;
    for (const u32 end = unit.ends[unit.ends.size() - 1 - LEFT]; unit.num_done < end; ++unit.num_done)
        compute(unit.told[unit.num_done]);
}

static void check_units(u32 num_all) {
    for (u32 t = 0; t < num_all; ++t) {
        const Unit &unit = units[t], &first = units[t / 128 * 128];
        require(unit.num_done == unit.told.size(), "a thread leaves before its products are done");
        require(unit.told.size() == first.told.size(), "not all of a warpgroup multiply");
        for (size_t i = 0; i < unit.told.size() && !broken; ++i)
            require(unit.told[i].w == first.told[i].w && unit.told[i].x == first.told[i].x,
                    "the threads of a warpgroup multiply different operands");
    }
}

// ---- threads and blocks that meet ------------------------------------------------------------------

static Meeting meetings[SPLIT][16], cluster;
static u32 cluster_round[MAX_THREADS], num_met[MAX_THREADS], written_after[SPLIT];
static bool has_arrived[MAX_THREADS], has_left[SPLIT];

// In this kernel: before the sums take the place of the stages.
static void meet(int number, int num_expected) {
    require(units[current].num_done == units[current].told.size(), "sums are written while products are under way");
    for (const Copy& copy : copies)
        require(copy.block != own_block(), "sums are written while copies are under way");
    written_after[own_block()] = max(written_after[own_block()], num_met[current]);
    meetings[own_block()][number].join(num_expected);
}

static void arrive_in_cluster() {
    require(!is_alone[current], "a warp does not arrive together in its cluster");
    require(!has_arrived[current], "a thread arrives twice in its cluster without waiting");
    has_arrived[current] = true;
    cluster_round[current] = cluster.come(SPLIT * num_threads);
}
static void wait_for_cluster() {
    require(has_arrived[current], "a thread waits for its cluster without having arrived");
    has_arrived[current] = false;
    wait_while([] { return cluster.round == cluster_round[current]; });
}
static void meet_in_cluster() {
    arrive_in_cluster();
    wait_for_cluster();
    ++num_met[current];  // only here does each see what the others wrote
}

static float2 load_from(const float* at, int rank) {
    require(num_met[current] > written_after[rank], "sums of a block are read before the cluster has met");
    require(!has_left[rank], "a block has left and another reads its memory");
    float2 value;
    std::memcpy(&value, memories[rank] + shared_address(at), 8);
    return value;
}

#ifdef GATHER
static Index gridDim;
template <int COUNT> static void take_registers() {}
template <int COUNT> static void leave_registers() {}
static void hold(float*) {}
template <typename T> static T load(const T* at) {
    require(is_waited[current], "results of the previous kernel are read before the wait");
    return *at;
}
static int load_int(const int* at) { return load(at); }
static float load_float(const float* at) { return load(at); }
static void add_tall_product(float* sums, u64 x, u64 w) { add_product<256>(sums, x, w); }
template <typename T> static void store_piece(char* to, const T& piece) {
    require((unsigned long)to % 16 == 0, "a piece is stored between multiples of 16 bytes");
    std::memcpy(to, piece.r, 16);
}
#endif

// ---- a launch --------------------------------------------------------------------------------------

#include KERNEL_SOURCE
#undef memory

static void run_cluster(u32 first_block, u32 shared_bytes) {
    const u32 num_all = SPLIT * num_threads;
    std::memset(memories, 0xff, sizeof memories);  // not a number, wherever nothing was written
    std::memset(lines, 0, sizeof lines);
    std::memset(warps, 0, sizeof warps);
    std::memset(shuffles, 0, sizeof shuffles);
    std::memset(meetings, 0, sizeof meetings);
    std::fill_n(is_waited, num_all, false);
    std::fill_n(has_arrived, num_all, false);
    std::fill_n(is_alone, num_all, false);
    std::fill_n(num_met, num_all, 0);
    std::fill_n(units, num_all, Unit{});
    for (u32 block = 0; block < SPLIT; ++block)
        has_left[block] = has_let_in[block] = false, written_after[block] = 0;
    cluster = Meeting{};
    copies.clear();
    pieces_under_way.clear();
    num_idle = num_polls = 0;
    run_blocks(first_block, SPLIT);
    check_units(num_all);
    require(copies.empty() && pieces_under_way.empty(), "a block leaves while copies are under way");
    for (u32 block = 0; block < SPLIT; ++block) {
        require(has_let_in[block], "the next kernel is not let in");
        for (u32 at = 0; at < SIZE; ++at)
            require((at >= BEGIN && at < BEGIN + shared_bytes) || memories[block][at] == char(0xff),
                    "more shared memory is written than was asked for");
    }
}

extern "C" const char* emulate(u32 num_blocks, u32 threads_of_block, u32 shared_bytes, void** arguments) {
    alignas(64) static char maps[2][128];  // as the driver passes them
    for (int i = 0; i < 2; ++i) arguments[i] = std::memcpy(maps[i], arguments[i], 128);
    tokens_at = matrix_of(maps[1]).at;
    h_at = nullptr;
#if LOW_RANK
    alignas(64) static char added[4][128];
    for (int i = 0; i < 4; ++i) arguments[16 + i] = std::memcpy(added[i], arguments[16 + i], 128);
    h_at = matrix_of(added[3]).at;
#endif
#ifdef GATHER
    gridDim.x = num_blocks;
    if (GATHER) tokens_at = nullptr;  // the map is not used
    residual_at = residual_end = nullptr;
    body = [](void** given) {
        memory_of[0] = memories[own_block()] + BEGIN;
        call(grouped_wgmma, given);
    };
#else
    residual_at = residual_end = *(const char**)arguments[4];
    if (ADDS) residual_end += *(long long*)arguments[8] * *(int*)arguments[9];
    body = [](void** given) {
        memory_of[0] = memories[own_block()] + BEGIN;
        call(linear_wgmma, given);
        has_left[own_block()] = true;
    };
#endif
    body_arguments = arguments;
    num_threads = threads_of_block;
    broken = nullptr;
    for (u32 block = 0; block < num_blocks && !broken; block += SPLIT) run_cluster(block, shared_bytes);
    return broken;
}
