/* Causal attention of a ragged batch over a paged cache, without copying the cache.
 *
 * The batch is a list of *items*: `count` consecutive tokens of one sequence, the first of them at position
 * `start`. A decode step is an item of one token; a prompt is split into items of a few tokens. The sequence's
 * block table locates the keys of position p:
 *
 *     slot(p) = table[p / block_size] * block_size + p % block_size
 *
 * A *query* is one head of one token. An item's queries that share a kv head see nearly the same positions, so
 * keys and values are read once for all of them, 16 positions at a time, counted from position 0, with the
 * running maximum and sum of an online softmax. A *tile* is as many queries as fit the registers:
 *
 *     block of 16 positions      tile of queries
 *     load_rows                  score       products of queries and keys         [tile][16]
 *     pack_keys                  weigh       maximum, exponentials and their sum, in place
 *                                add_values  weights times values, added to the sums of earlier blocks
 *
 * Keys and values in 8 bits are decoded once for all queries of a chunk. The scales are not applied
 * to them: a position's score is multiplied by its key's scale, and its weight by its value's scale.
 *
 * A score is four sums, of channels 0, 4, 8, ..., of 1, 5, 9, ..., and so on: (s0 + s1) + (s2 + s3). They are
 * the lanes of a quarter of a register with AVX-512, of a half with AVX2, and of a whole one of 4 floats. The 4
 * registers of WIDTH positions and 4 channels, the unit of `pack_keys`:
 *
 *     register c     position c: 4 channels | position c + 4: 4 channels | ...                  c = 0 .. 3
 *
 * If a register has 4 floats, the rows of the cache already have this order.
 *
 * 512 positions, counted from position 0, are a *segment*. Each has its own maximum, sum and sums of values,
 * and a query's segments are merged in the order of positions. So a long context can be computed by several
 * threads: an item of one token may be limited to one segment; its result is then stored in `parts`, and the
 * thread that finishes a token's last segment merges them.
 *
 * A soft cap c turns a score s into c tanh(s / c). A sink is a score of a query head without a position: it is added
 * to the sum of the softmax when a result is stored, and no value is added for it.
 *
 * A query's result depends only on its own positions, in an order that is independent of chunking: a prompt
 * computed whole, in chunks, token by token, or segment by segment gives the same bits. Slots that a query may
 * not see are never multiplied by anything, so their content cannot reach the result.
 *
 * A chunk of work is one item and one kv head. */
#include "kv_codes.h"

#define MAX_HEAD 512
#define POSITIONS 16 /* positions that are processed together; `block_size` is the cache's */
#define SEGMENT 512
#define STATE_FLOATS 8192 /* most floats of accumulators: 32 KB */
#if WIDTH == 16
#define TILE 6 /* queries: 24 of 32 registers */
#elif WIDTH == 8
#define TILE 3 /* 12 of 16 registers */
#else
#define TILE 4 /* 16 of 32 registers */
#endif

typedef struct {
    int64_t T;
    const float *q; /* [T][N][H] */
    int64_t q_token_stride;
    float *out;                 /* [T][N][H], contiguous */
    const void *keys, *values;  /* [slots][G][H]: floats or codes */
    const int64_t *table;
    int64_t table_stride;
    const int64_t *items; /* [I][6]: first token, count, row of the table, start, segment (-1: all), its part */
    int64_t N, G, H, block_size;
    int64_t window; /* 0: none */
    double scale;
    float *parts; /* [parts]: peak, total and H sums of every query head; then G counters of finished segments */
    int64_t kind;                           /* kind of keys and values: AS_FLOAT, or codes (kv_codes.h) */
    const float *key_scales, *value_scales; /* scales of codes: [blocks][G][block_size] */
    double softcap;                         /* cap of scores; 0: none */
    const float *sinks;                     /* [N], or NULL */
} attend_args;

typedef struct {
    float peak, total;
} softmax_state;

/* The work of a tile: queries of one kv head that see the same positions of a block. */
typedef struct {
    int64_t padded;         /* H, rounded up to registers */
    const float *q;         /* [queries][padded] */
    softmax_state *state;   /* [queries] */
    float *sums;            /* [queries][padded] */
    const float *const *keys, *const *values; /* [16] rows of this block */
    const float *packed;    /* the keys again, in the order of pack_keys */
    const float *key_scales, *value_scales; /* [16], or NULL: keys and values are floats */
    float scale, softcap;
    int lo, hi; /* positions lo .. hi-1 of the block are seen */
} tile_work;

/* Load 4 channels of the rows c, c + 4, ...: one register of keys. */
ALWAYS_INLINE vr gather(const float *const *rows, int64_t h) {
#if WIDTH == 16
    __m256 low = _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(rows[0] + h)), _mm_loadu_ps(rows[4] + h), 1);
    __m256 high =
        _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(rows[8] + h)), _mm_loadu_ps(rows[12] + h), 1);
    return (vr)_mm512_castpd_ps(
        _mm512_insertf64x4(_mm512_castpd256_pd512(_mm256_castps_pd(low)), _mm256_castps_pd(high), 1));
#elif WIDTH == 8
    return (vr)_mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(rows[0] + h)), _mm_loadu_ps(rows[4] + h), 1);
#else
    return load_vr(rows[0] + h);
#endif
}

/* Repeat 4 channels of a query for each position of a register of keys. */
ALWAYS_INLINE vr repeat(const float *q) {
#if WIDTH == 16
    return (vr)_mm512_broadcast_f32x4(_mm_loadu_ps(q));
#elif WIDTH == 8
    return (vr)_mm256_broadcast_ps((const __m128 *)q);
#else
    return load_vr(q);
#endif
}

/* Compute (s0 + s1) + (s2 + s3) per position; `s` has the order of pack_keys, the result is ordered by position. */
ALWAYS_INLINE vr add_channels(const vr s[4]) {
#if WIDTH == 16
    __m512 s0 = (__m512)s[0], s1 = (__m512)s[1], s2 = (__m512)s[2], s3 = (__m512)s[3];
    __m512 a = _mm512_add_ps(_mm512_shuffle_ps(s0, s1, 0x88), _mm512_shuffle_ps(s0, s1, 0xdd));
    __m512 b = _mm512_add_ps(_mm512_shuffle_ps(s2, s3, 0x88), _mm512_shuffle_ps(s2, s3, 0xdd));
    return (vr)_mm512_add_ps(_mm512_shuffle_ps(a, b, 0x88), _mm512_shuffle_ps(a, b, 0xdd));
#elif WIDTH == 8
    return (vr)_mm256_hadd_ps(_mm256_hadd_ps((__m256)s[0], (__m256)s[1]), _mm256_hadd_ps((__m256)s[2], (__m256)s[3]));
#elif defined(HAVE_NEON)
    return (vr)vpaddq_f32(vpaddq_f32((float32x4_t)s[0], (float32x4_t)s[1]),
                          vpaddq_f32((float32x4_t)s[2], (float32x4_t)s[3]));
#else
    vr sum;
    for (int c = 0; c < 4; c++) sum[c] = (s[c][0] + s[c][1]) + (s[c][2] + s[c][3]);
    return sum;
#endif
}

static void pack_keys(const float *const rows[POSITIONS], int64_t padded, float *packed) {
    for (int first = 0; first < POSITIONS; first += WIDTH, packed += padded * WIDTH)
        for (int c = 0; c < 4; c++)
            for (int64_t h = 0; h < padded; h += 4) store_vr(packed + (h + c) * WIDTH, gather(rows + first + c, h));
}

/* c tanh(s / c), computed as c - 2c / (1 + e^(2s/c)). */
static __attribute__((noinline)) vr cap(vr s, float c) {
    vr x = clamp_vr(s * (2.0f / c), splat_vr(-80.0f), splat_vr(80.0f));
    return choose_vr(s != s, s, c - 2.0f * c / (1.0f + exp_lanes(x)));
}

/* Compute the scores of a tile: [count][16]. */
ALWAYS_INLINE void score(const int count, const int is_packed, const tile_work *t, float *scores) {
    for (int first = 0; first < POSITIONS; first += WIDTH) {
        const float *packed = t->packed + first * t->padded, *q = t->q;
        const float *const *rows = t->keys + first;
        const int64_t padded = t->padded;
        vr s[TILE][4] = {{{0}}};
        for (int64_t h = 0; h < padded; h += 4) {
            vr k[4];
            for (int c = 0; c < 4; c++) k[c] = is_packed ? load_vr(packed + (h + c) * WIDTH) : gather(rows + c, h);
            for (int i = 0; i < count; i++) {
                vr channels = repeat(q + i * padded + h);
                for (int c = 0; c < 4; c++) s[i][c] += channels * k[c];
            }
        }
        vr scale = splat_vr(t->scale);
        if (t->key_scales) scale *= load_vr(t->key_scales + first);
        for (int i = 0; i < count; i++) {
            vr capped = add_channels(s[i]) * scale;
            if (t->softcap != 0.0f) capped = cap(capped, t->softcap);
            store_vr(scores + i * POSITIONS + first, capped);
        }
    }
}

/* Set a new maximum, and rescale the sums that used the old one. */
static __attribute__((noinline)) void raise_peak(const tile_work *t, int i, float peak) {
    softmax_state *state = t->state + i;
    float before = state->peak;
    state->peak = peak;
    if (state->total == 0.0f) return; /* nothing has been summed yet */
    float shrink = expf(before - peak);
    state->total *= shrink;
    float *sums = t->sums + i * t->padded;
    for (int64_t c = 0; c < t->padded; c += WIDTH) store_vr(sums + c, load_vr(sums + c) * shrink);
}

/* Turn the scores of a tile into weights, in place. Each step is done for all queries before the next one, so that
 * the maxima of several queries are computed in parallel. */
ALWAYS_INLINE void weigh(const int count, const int is_whole, const tile_work *t, float *scores) {
    static const int32_t lanes[POSITIONS] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    vri seen[PARTS];
    float peaks[TILE];
    for (int n = 0; !is_whole && n < PARTS; n++) {
        vri lane;
        memcpy(&lane, lanes + n * WIDTH, sizeof lane);
        seen[n] = (lane >= t->lo) & (lane < t->hi);
    }
#pragma GCC unroll 8
    for (int i = 0; i < count; i++) {
        vr s[PARTS];
        for (int n = 0; n < PARTS; n++) {
            float *at = scores + i * POSITIONS + n * WIDTH;
            s[n] = load_vr(at);
            if (!is_whole) store_vr(at, s[n] = choose_vr(seen[n], s[n], splat_vr(-INFINITY)));
        }
        peaks[i] = max_parts(s);
    }
    for (int i = 0; i < count; i++)
        if (!(peaks[i] <= t->state[i].peak)) raise_peak(t, i, peaks[i]); /* also for NaN, which then spreads */
    enum { PAIR = PARTS > 1 ? 2 : 1 }; /* registers at once: more would not fit 16 or 32 registers */
#pragma GCC unroll 1
    for (int i = 0; i < count; i++)
#pragma GCC unroll 1
        for (int n = 0; n < PARTS; n += PAIR) {
            float *at = scores + i * POSITIONS + n * WIDTH;
            vr weights[PAIR];
            for (int m = 0; m < PAIR; m++) weights[m] = exp_lanes(load_vr(at + m * WIDTH) - t->state[i].peak);
            for (int m = 0; m < PAIR; m++)
                store_vr(at + m * WIDTH, is_whole ? weights[m] : (vr)((vri)weights[m] & seen[n + m]));
        }
#pragma GCC unroll 8
    for (int i = 0; i < count; i++) {
        vr s[PARTS];
        for (int n = 0; n < PARTS; n++) s[n] = load_vr(scores + i * POSITIONS + n * WIDTH);
        t->state[i].total += sum_parts(s);
    }
}

/* Add weights times values to the sums of the tile, for `registers` registers of channels from channel c on. */
ALWAYS_INLINE void add_values(const int count, const int registers, const float *weights, const tile_work *t,
                              int64_t c) {
    vr sum[TILE][4];
    const int64_t padded = t->padded;
    float *sums = t->sums + c;
    for (int i = 0; i < count; i++)
        for (int n = 0; n < registers; n++) sum[i][n] = load_vr(sums + i * padded + n * WIDTH);
    for (int j = t->lo; j < t->hi; j++) {
        vr v[4];
        for (int n = 0; n < registers; n++) v[n] = load_vr(t->values[j] + c + n * WIDTH);
        for (int i = 0; i < count; i++)
            for (int n = 0; n < registers; n++) sum[i][n] += weights[i * POSITIONS + j] * v[n];
    }
    for (int i = 0; i < count; i++)
        for (int n = 0; n < registers; n++) store_vr(sums + i * padded + n * WIDTH, sum[i][n]);
}

/* A query's result does not depend on the other queries of its tile: they only share loads of keys and values. */
ALWAYS_INLINE void visit(const int count, const int is_packed, const tile_work *t) {
    float weights[TILE * POSITIONS] __attribute__((aligned(64)));
    score(count, is_packed, t, weights);
    if (t->hi - t->lo == POSITIONS)
        weigh(count, 1, t, weights);
    else
        weigh(count, 0, t, weights);
    for (int n = 0; t->value_scales && n < count * POSITIONS; n += WIDTH)
        store_vr(weights + n, load_vr(weights + n) * load_vr(t->value_scales + n % POSITIONS));
    int64_t c = 0;
    for (; c + 4 * WIDTH <= t->padded; c += 4 * WIDTH) add_values(count, 4, weights, t, c);
    for (; c < t->padded; c += WIDTH) add_values(count, 1, weights, t, c);
}

ALWAYS_INLINE void visit_some(int64_t count, const int is_packed, const tile_work *t) {
    switch (count) {
    case 1: visit(1, is_packed, t); break;
    case 2: visit(2, is_packed, t); break;
    case 3: visit(3, is_packed, t); break;
#if TILE > 3
    case 4: visit(4, is_packed, t); break;
#endif
#if TILE > 4
    case 5: visit(5, is_packed, t); break;
    case 6: visit(6, is_packed, t); break;
#endif
    }
}
static __attribute__((noinline)) void visit_direct(int64_t count, const tile_work *t) { visit_some(count, 0, t); }
static __attribute__((noinline)) void visit_packed(int64_t count, const tile_work *t) { visit_some(count, 1, t); }

/* The first position that a query at `position` sees. */
static inline int64_t lowest_seen(const attend_args *a, int64_t position) {
    return a->window && position >= a->window ? position - a->window + 1 : 0;
}

/* Find the slots of 16 positions from `block` on, -1 if no query sees them; for codes, also the scales of head g. */
static void find_slots(const attend_args *a, const int64_t *table, int64_t g, int64_t block, int64_t low, int64_t high,
                       int64_t slots[POSITIONS], float key_scales[POSITIONS], float value_scales[POSITIONS]) {
    int64_t at = block / a->block_size, offset = block - at * a->block_size;
    const int64_t first = at, first_offset = offset;
    for (int j = 0; j < POSITIONS; j++, offset++) {
        if (offset == a->block_size) at++, offset = 0;
        slots[j] = block + j < low || block + j > high ? -1 : table[at] * a->block_size + offset;
    }
    if (a->kind == AS_FLOAT) return;
    at = first, offset = first_offset;
    for (int j = 0; j < POSITIONS; j++, offset++) {
        if (offset == a->block_size) at++, offset = 0;
        const int64_t scale = slots[j] < 0 ? -1 : (table[at] * a->G + g) * a->block_size + offset;
        key_scales[j] = scale < 0 ? 0.0f : a->key_scales[scale];
        value_scales[j] = scale < 0 ? 0.0f : a->value_scales[scale];
    }
}

/* Load the rows of kv head g in these slots, zeros for slot -1. Rows whose size is not a multiple of a register are
 * copied to `room`, [16][padded], and codes are decoded into it. */
static void load_rows(const attend_args *a, const void *cache, int64_t g, const int64_t slots[POSITIONS],
                      int64_t padded, float *room, const float *rows[POSITIONS]) {
    static const float zeros[MAX_HEAD] __attribute__((aligned(64))) = {0};
    for (int j = 0; j < POSITIONS; j++) {
        const int64_t first = (slots[j] * a->G + g) * a->H;
        rows[j] = slots[j] < 0 ? zeros : room + j * padded; /* zeros after H */
        if (slots[j] < 0) continue;
        if (a->kind != AS_FLOAT)
            decode_codes(a->kind, (const uint8_t *)cache + first, room + j * padded, a->H);
        else if (padded == a->H)
            rows[j] = (const float *)cache + first;
        else
            memcpy(room + j * padded, (const float *)cache + first, (size_t)a->H * sizeof(float));
    }
}

#if WIDTH == 16
/* load_rows and pack_keys for codes, in heads of whole registers: 4 channels of a row are 4 bytes, so they
 * are reordered before they are decoded, at a quarter of the size. */
ALWAYS_INLINE void pack_codes(const int64_t kind, const attend_args *a, int64_t g, const int64_t slots[POSITIONS],
                              float *packed) {
    static const uint8_t zeros[MAX_HEAD] = {0};
    const uint8_t *rows[POSITIONS];
    for (int j = 0; j < POSITIONS; j++)
        rows[j] = slots[j] < 0 ? zeros : (const uint8_t *)a->keys + (slots[j] * a->G + g) * a->H;
    for (int64_t h = 0; h < a->H; h += 16)
        for (int c = 0; c < 4; c++) {
            __m128i r[4], quads[4];
            for (int n = 0; n < 4; n++) r[n] = _mm_loadu_si128((const __m128i *)(rows[c + 4 * n] + h));
            __m128i low01 = _mm_unpacklo_epi32(r[0], r[1]), low23 = _mm_unpacklo_epi32(r[2], r[3]);
            __m128i high01 = _mm_unpackhi_epi32(r[0], r[1]), high23 = _mm_unpackhi_epi32(r[2], r[3]);
            quads[0] = _mm_unpacklo_epi64(low01, low23), quads[1] = _mm_unpackhi_epi64(low01, low23);
            quads[2] = _mm_unpacklo_epi64(high01, high23), quads[3] = _mm_unpackhi_epi64(high01, high23);
            for (int n = 0; n < 4; n++)
                store(packed + (h + 4 * n + c) * WIDTH, kind == AS_FP8 ? decode_fp8(quads[n]) : decode_int8(quads[n]));
        }
}
#endif

/* The queries of a chunk and their state. */
typedef struct {
    const attend_args *a;
    const int64_t *table;
    int64_t g, padded, num;
    int64_t positions[STATE_FLOATS / WIDTH];
    float *out[STATE_FLOATS / WIDTH], sinks[STATE_FLOATS / WIDTH]; /* a sink of -inf is none */
    softmax_state state[STATE_FLOATS / WIDTH], joined_state[STATE_FLOATS / WIDTH];
    float queries[STATE_FLOATS] __attribute__((aligned(64)));
    float sums[STATE_FLOATS] __attribute__((aligned(64))), joined_sums[STATE_FLOATS] __attribute__((aligned(64)));
    float packed[MAX_HEAD * POSITIONS] __attribute__((aligned(64)));
    float key_room[MAX_HEAD * POSITIONS] __attribute__((aligned(64)));
    float value_room[MAX_HEAD * POSITIONS] __attribute__((aligned(64)));
} work;

static void attend_block(work *w, int64_t block, int64_t low, int64_t high) {
    const attend_args *a = w->a;
    const int64_t padded = w->padded, num = w->num, *positions = w->positions;
    const int is_coded = a->kind != AS_FLOAT, has_codes_packed = WIDTH == 16 && is_coded && padded == a->H;
    const int is_packed = has_codes_packed || (WIDTH > 4 && num > TILE);
    const float *keys[POSITIONS], *values[POSITIONS];
    float key_scales[POSITIONS], value_scales[POSITIONS];
    int64_t slots[POSITIONS];
    find_slots(a, w->table, w->g, block, low, high, slots, key_scales, value_scales);
    load_rows(a, a->values, w->g, slots, padded, w->value_room, values);
#if WIDTH == 16
    if (has_codes_packed && a->kind == AS_FP8) pack_codes(AS_FP8, a, w->g, slots, w->packed);
    else if (has_codes_packed) pack_codes(AS_INT8, a, w->g, slots, w->packed);
#endif
    if (!has_codes_packed) load_rows(a, a->keys, w->g, slots, padded, w->key_room, keys);
    if (is_packed && !has_codes_packed) pack_keys(keys, padded, w->packed);
    for (int64_t i = 0, together; i < num; i += together) {
        int64_t lo = lowest_seen(a, positions[i]) - block, hi = positions[i] + 1 - block;
        int64_t last = i + TILE < num ? i + TILE - 1 : num - 1;
        if (hi >= POSITIONS && lowest_seen(a, positions[last]) <= block) /* all queries see the whole block */
            together = last - i + 1;
        else /* heads of one token */
            for (together = 1; i + together <= last && positions[i + together] == positions[i];) together++;
        if (lo < 0) lo = 0;
        if (lo >= POSITIONS || hi <= 0) continue;
        tile_work t = {padded, w->queries + i * padded, w->state + i, w->sums + i * padded, keys, values, w->packed,
                       is_coded ? key_scales : NULL, is_coded ? value_scales : NULL, (float)a->scale, (float)a->softcap, (int)lo, (int)(hi < POSITIONS ? hi : POSITIONS)};
        if (is_packed) visit_packed(together, &t);
        else visit_direct(together, &t);
    }
}

static void attend_segment(work *w, int64_t segment) {
    int64_t low = lowest_seen(w->a, w->positions[0]), high = w->positions[w->num - 1];
    if (low < segment * SEGMENT) low = segment * SEGMENT;
    if (high >= (segment + 1) * SEGMENT) high = (segment + 1) * SEGMENT - 1;
    memset(w->sums, 0, (size_t)(w->num * w->padded) * sizeof(float));
    for (int64_t i = 0; i < w->num; i++) w->state[i] = (softmax_state){-INFINITY, 0.0f};
    int64_t block = low / POSITIONS * POSITIONS;
    for (; block <= high; block += POSITIONS) attend_block(w, block, low, high);
}

/* Merge one query's next segment with the earlier ones. A segment of which it sees nothing has a total of 0. */
static void join(softmax_state *joined, float *joined_sums, softmax_state next, const float *sums, int64_t size) {
    if (next.total == 0.0f) return;
    if (joined->total == 0.0f) {
        *joined = next;
        memcpy(joined_sums, sums, (size_t)size * sizeof(float));
        return;
    }
    float peak = joined->peak <= next.peak ? next.peak : joined->peak; /* a NaN reaches both factors */
    float before = expf(joined->peak - peak), after = expf(next.peak - peak);
    *joined = (softmax_state){peak, joined->total * before + next.total * after};
    for (int64_t h = 0; h < size; h++) joined_sums[h] = joined_sums[h] * before + sums[h] * after;
}

static void put_result(float *out, softmax_state state, float sink, const float *sums, int64_t H) {
    const float inverse = 1.0f / (state.total + expf(sink - state.peak));
    for (int64_t h = 0; h < H; h++) out[h] = sums[h] * inverse;
}

/* Store the result of a token's segment; the thread that stores the last one merges them all. */
static void keep_part(work *w, const int64_t *item) {
    const attend_args *a = w->a;
    const int64_t H = a->H, segment = item[4], num_segments = item[3] / SEGMENT + 1;
    const int64_t head_floats = H + 2, part_floats = a->N * head_floats + a->G;
    float *parts = a->parts + (item[5] - segment) * part_floats; /* part of the token's first segment */
    int32_t *num_done = (int32_t *)(parts + a->N * head_floats) + w->g;
    for (int64_t i = 0; i < w->num; i++) {
        float *kept = parts + segment * part_floats + (w->g * w->num + i) * head_floats;
        memcpy(kept, w->state + i, sizeof(softmax_state));
        memcpy(kept + 2, w->sums + i * w->padded, (size_t)H * sizeof(float));
    }
    if (__atomic_add_fetch(num_done, 1, __ATOMIC_ACQ_REL) < num_segments) return;
    *num_done = 0;
    for (int64_t i = 0; i < w->num; i++) {
        softmax_state state = {-INFINITY, 0.0f}, next;
        for (int64_t s = 0; s < num_segments; s++) {
            const float *kept = parts + s * part_floats + (w->g * w->num + i) * head_floats;
            memcpy(&next, kept, sizeof next);
            join(&state, w->joined_sums, next, kept + 2, H);
        }
        put_result(w->out[i], state, w->sinks[i], w->joined_sums, H);
    }
}

static void attend_all(work *w) {
    int64_t segment = lowest_seen(w->a, w->positions[0]) / SEGMENT, last = w->positions[w->num - 1] / SEGMENT;
    const int is_joined = segment < last;
    softmax_state *state = is_joined ? w->joined_state : w->state;
    float *sums = is_joined ? w->joined_sums : w->sums;
    for (int64_t i = 0; is_joined && i < w->num; i++) state[i] = (softmax_state){-INFINITY, 0.0f};
    for (; segment <= last; segment++) {
        attend_segment(w, segment);
        for (int64_t i = 0; is_joined && i < w->num; i++)
            join(state + i, sums + i * w->padded, w->state[i], w->sums + i * w->padded, w->a->H);
    }
    for (int64_t i = 0; i < w->num; i++) put_result(w->out[i], state[i], w->sinks[i], sums + i * w->padded, w->a->H);
}

void infer_attend(const void *args, int64_t chunk) {
    const attend_args *a = args;
    const int64_t *item = a->items + chunk / a->G * 6;
    const int64_t first = item[0], start = item[3], H = a->H, heads = a->N / a->G;
    work w;
    w.a = a, w.g = chunk % a->G, w.padded = (H + WIDTH - 1) / WIDTH * WIDTH;
    w.table = a->table + item[2] * a->table_stride;
    if (w.padded != H) {
        memset(w.key_room, 0, sizeof w.key_room);
        memset(w.value_room, 0, sizeof w.value_room);
        memset(w.queries, 0, sizeof w.queries);
    }
    const int64_t at_once = STATE_FLOATS / w.padded;
    int64_t token = 0, head = 0;
    while (token < item[1]) {
        for (w.num = 0; w.num < at_once && token < item[1]; w.num++) {
            const int64_t n = w.g * heads + head;
            const float *q = a->q + (first + token) * a->q_token_stride + n * H;
            memcpy(w.queries + w.num * w.padded, q, (size_t)H * sizeof(float));
            w.out[w.num] = a->out + ((first + token) * a->N + n) * H;
            w.positions[w.num] = start + token;
            w.sinks[w.num] = a->sinks ? a->sinks[n] : -INFINITY;
            if (++head == heads) head = 0, token++;
        }
        if (item[4] < 0) {
            attend_all(&w);
        } else {
            attend_segment(&w, item[4]);
            keep_part(&w, item);
        }
    }
}
