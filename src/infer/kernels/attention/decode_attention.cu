/* Attention of one new token per row over the paged cache, at the bandwidth of memory.

       out[s, n] = sum over p of softmax(scale * q[s, n] . k[p]) * v[p]

   The key and value of position p of a row are in slot  table[p / BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE.
   `decode_work.py` explains the work list, which the device plans by itself, and the splits of a row.

   WORK AND WARPS. A *warp* is 32 threads that execute one instruction together; a thread's number in it is its
   *lane*. Four warps form a block, and a block processes one unit of work after the other: an item of the list, for
   one kv head. The positions are dealt to its warps, 16 at a time:

       positions   | 0..15 | 16..31 | 32..47 | 48..63 | 64..79 | ...
       warp        |   0   |   1    |   2    |   3    |   0    | ...

   Warps are independent. Each has its own softmax and never waits for another warp until the unit is finished;
   a barrier in the loop would delay all four by the slowest load. So the data does not pass through shared memory:
   keys and values are loaded directly into the registers from which the tensor cores read them.

   FRAGMENTS. The instruction is `mma`, a matrix product of a whole warp: C [16 x 8] += A [16 x 16] . B [16 x 8].
   Its matrices have no address; they are distributed over the lanes, and the elements in the registers of one lane
   are its *fragment*. With g = lane / 4 and t = lane % 4, and two 16-bit elements per register, a lane must provide

       A   a0: row g, columns 2t, 2t+1      a1: row g+8, same columns      a2, a3: the same rows, columns + 8
       B   b0: rows 2t, 2t+1 of column g    b1: those rows + 8             (B is stored by columns)
       C   c0, c1: row g, columns 2t, 2t+1  c2, c3: row g+8                and receives these sums, in float32

   The 8 columns are query heads: up to 8 of them share a kv head, so each key is read once for all of them.
   So both products of attention are transposed, with the positions or the head's elements as rows.

   SCORES:  S^T [16 positions x 8 heads] = K [16 x H] . q^T [H x 8], H / 16 instructions.
   In the standard layout, lane (g, t) would load columns 2t, 2t+1, then 2t+8, 2t+9 of key g: 4 bytes at a time, where
   loads should have 16. But a dot product may add its terms in any order, as long as K and q agree. So the columns
   are permuted: from each 32, a lane loads the 8 adjacent ones 8t..8t+7 at once, feeds elements 0..3 of them to one
   instruction, as if they were columns 2t, 2t+1, 2t+8, 2t+9, and 4..7 to the next. The same applies to q.

   OUTPUT:  O^T [H x 8 heads] += V^T [H x 16 positions] . P^T [16 x 8], H / 16 tiles of rows.
   P holds the weights. Lane (g, t) has P of position g and heads 2t, 2t+1, and B takes positions 2t, 2t+1 of
   head g: an 8 x 8 matrix, transposed. `movmatrix` transposes it within the warp. V^T has the same problem:
   elements of one position are adjacent, and A takes two positions in a register. Here, wide loads and a permutation
   are enough: a lane loads 8 elements of positions 2t, 2t+1, 2t+8 and 2t+9, and a byte permutation takes one element
   of two positions at a time. The mapping of elements to rows is free again: row g of tile j is element 8g + 2j of
   64, row g+8 its neighbour.

   SOFTMAX. In every C above, lane (g, t) has heads 2t and 2t+1, so it needs two maxima and two denominators, and
   rescaling needs no other lane. Weights are 2^(score - maximum). Any number near the maximum works, because it is
   divided out in the end; it only has to keep weights from overflowing. So it is updated lazily: it stays while no
   score exceeds it by more than SLACK, which saves most tiles the exchange between lanes and the rescaling. Each lane
   has separate denominators, over its own positions, until the unit is finished.

   KEEPING MEMORY BUSY. As soon as a tile's keys are multiplied, the next keys are loaded into the registers that
   become free, and likewise for values: with heads of 128, each warp has 8 KiB in flight nearly all the time. Block
   numbers are looked up one tile earlier. At the end of a unit, the first keys and values of the next one are
   requested before this one is merged, so memory stays busy during the barriers. The first unit's are requested
   while the previous kernel still runs (PDL): it writes the newest position of a row, all others are older.

   MERGING. The warps store maximum, denominator and sum in shared memory, and all threads add them. A row of one
   split is then done. Otherwise the result goes to scratch memory and the block takes a ticket; the block with the
   last ticket knows that all parts are there, adds them in the order of the splits, and resets the counter.

   CODES. Keys and values of 8 bits are loaded unchanged and converted to float16 in the registers that a matrix product
   reads: by an instruction for two e4m3 codes, and for int8 by placing a byte in the mantissa of 1024. A piece is then
   8 bytes; with heads of 128, a lane loads two adjacent pieces at once, which permutes elements once more. The score is
   multiplied by its key's scale, and the logarithm of its value's scale is added to the exponent of the weight.

   Compiled for each model, with
       IS_BFLOAT16         the type of q, k, v and out: bfloat16, or float16
       CODES               type of keys and values: 0 no codes, 1 e4m3, 2 int8 (kernels/elementwise/kv_codes.py)
       H, G, M             head size (64, 128), kv heads, query heads per kv head (up to 8)
       BLOCK_SIZE          positions in a block of the cache, a multiple of 16
       WARPS               warps of a block
       BLOCKS_PER_SM       blocks that must fit an SM, which limits the registers
       PDL                 1: programmatic dependent launch (kernels/runtime/dispatch.py) */

#include "decode.cuh"

// Add 4 elements of all splits of a row, one split after the other: the next item occupies the registers.
__device__ Merged merge_splits(const float* sums, const float* maxima, const float* denominators, int num_splits) {
    Merged merged = {{0.0f, 0.0f, 0.0f, 0.0f}, LOWEST, 0.0f};
    for (int i = 0; i < num_splits; ++i) merged.maximum = fmaxf(merged.maximum, __ldcg(maxima + i * N));
    for (int i = 0; i < num_splits; ++i)
        add_part(merged, __ldcg(reinterpret_cast<const float4*>(sums + (long long)i * N * H)), __ldcg(maxima + i * N),
                 __ldcg(denominators + i * N));
    return merged;
}

// grid: any number of blocks; each strides over the units.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) decode_attention(
    const Element* q,                // [S, N, H], with strides; not restrict, so that no read moves before the wait
    const Kept* keys,                // [P, G, H]
    const Kept* values,              // [P, G, H]
    const float* key_scales,         // `Cache`
    const float* value_scales,
    const int* __restrict__ tables,  // [R, B]: blocks of each row
    Element* out,                    // [S, N, H]
    const int4* __restrict__ items,  // [W, 8 ints]
    const int* __restrict__ num_items,
    float* sums, float* maxima, float* denominators, int* tickets,  // `Scratch`
    long long q_row_stride, long long q_head_stride, long long table_stride, int max_splits, float scale_log2e) {
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4;

    const Scratch scratch = {sums, maxima, denominators, tickets, max_splits};
    const Cache cache = {keys, values, key_scales, value_scales};

    // The list and the tables are older than the previous kernel.
    const int num_units = *num_items * G;
    int unit = blockIdx.x;
    Item item = read_item(items, unit / G, unit < num_units);
    int position = item.first / TILE * TILE + warp * TILE;
    int block = 0;  // block of the tile after the one that is loaded
    if (position < item.end) block = tables[item.row * table_stride + position / BLOCK_SIZE];

    Keys k = {};
    Values v = {};
    uint4 query[K_PIECES];
    float score_scale = scale_log2e;
    const auto load_tile = [&](int of_block) {
        const Tile tile = tile_of(of_block, position, unit % G);
        load_keys(k, cache, tile, g, t);
        load_values(v, cache, tile, g, t);
    };
    bool is_loaded = false;
#if PDL
    is_loaded = position < item.end && position + TILE < item.length;  // without the newest position
    if (is_loaded) load_tile(block);
    gdc_launch_dependents();
    gdc_wait();
#endif

    const auto begin_unit = [&](int first_block) {  // request the first data of `unit`
        if (position < item.end) {
            if (!is_loaded) load_tile(first_block);
            const int after = position + STRIDE;
            if (after < item.end) block = tables[item.row * table_stride + after / BLOCK_SIZE];
        }
        if (unit < num_units)
            score_scale = scale_log2e * load_query(
                query, q + item.s * q_row_stride + unit % G * M * q_head_stride, q_head_stride, g, t);
    };
    begin_unit(block);
    is_loaded = false;

    while (unit < num_units) {
        const int* table = tables + item.row * table_stride;
        const int head = unit % G;
        unit += gridDim.x;  // the next unit, from here on
        const Item next = read_item(items, unit / G, unit < num_units);
        const int next_position = next.first / TILE * TILE + warp * TILE;
        int next_block = 0;
        if (next_position < next.end) next_block = tables[next.row * table_stride + next_position / BLOCK_SIZE];

        Softmax softmax = {{}, {LOWEST, LOWEST}, {0.0f, 0.0f}};
        for (; position < item.end; position += STRIDE) {
            const int after = position + STRIDE;
            const Tile next_tile = tile_of(block, after, head);
            const bool is_whole = position >= item.first && position + TILE <= item.end;
            Scores score;
            multiply_keys(score, k, query, score_scale);
            if (after < item.end) load_keys(k, cache, next_tile, g, t);
            if (!is_whole) hide_scores(score, item.first - position, item.end - position, g);
            follow_maximum(softmax, score);
            if (!is_whole) hide_values(v, item.first - position, item.end - position, t);
            add_values(softmax, score, v);
            if (after < item.end) load_values(v, cache, next_tile, g, t);
            if (after + STRIDE < item.end) block = table[(after + STRIDE) / BLOCK_SIZE];
        }

        const Item done = item;
        item = next;
        position = next_position;
        begin_unit(next_block);

        leave_part(softmax, warp, g, t);
        finish_item(done, head, out, scratch, merge_splits);
    }
}
