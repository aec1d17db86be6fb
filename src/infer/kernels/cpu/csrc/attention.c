/* Causal attention of a ragged batch over a paged cache, without copying the cache anywhere.
 *
 * The batch is a list of *items*: `count` consecutive tokens of one sequence, the first of them at position
 * `start`. A decode step is an item of one token; a prompt is cut into items of a few. The keys of
 * position p lie where the sequence's block table says:
 *
 *     slot(p) = table[p / block_size] * block_size + p % block_size
 *
 * Positions are visited in blocks of 16, counted from position 0, with the running maximum and sum of
 * the online softmax. 16 keys are transposed once and then serve all queries of the item and all query
 * heads that share the kv head:
 *
 *     keys           channel 0 .. H-1            transposed      position 0 .. 15
 *     position 0     k00 k01 ...                 channel 0       k00 k10 ... k15,0
 *     position 1     k10 k11 ...                 channel 1       k01 k11 ...
 *
 * A query's result depends on its own positions only, in an order that no chunking changes: a prompt
 * computed whole, in pieces, or token by token gives the same bits. Slots that a query may not see are
 * never multiplied with anything, so whatever they hold cannot reach it.
 *
 * A chunk of work is one item and one kv head. */
#include "infer.h"

#define MAX_HEAD 256
#define STATE_FLOATS 8192 /* of accumulators at a time: 32 KB */
#if defined(HAVE_AVX512)
#define QUERIES 4 /* together: their scores, and later their sums, take half of the registers */
#else
#define QUERIES 1
#endif

typedef struct {
    int64_t T;
    const float *q; /* [T][N][H] */
    int64_t q_token_stride;
    float *out;                 /* [T][N][H], contiguous */
    const float *keys, *values; /* [slots][G][H] */
    const int64_t *table;
    int64_t table_stride;
    const int64_t *items; /* [I][4]: first token, count, row of the table, start */
    int64_t N, G, H, block_size;
    int64_t window; /* 0: none */
    double scale;
} attend_args;

#if defined(__clang__) || !defined(__GNUC__)
static void transpose(const float *const rows[16], int64_t h, float *out) {
    for (int j = 0; j < 16; j++)
        for (int i = 0; i < 16; i++) out[i * 16 + j] = rows[j][h + i];
}
#else
/* 16x16 in four rounds; round s exchanges the lanes in which bit s of row and lane number differ. */
static void transpose(const float *const rows[16], int64_t h, float *out) {
    static const vi low[4] = {
        {0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30},
        {0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29},
        {0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27},
        {0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23},
    };
    static const vi high[4] = {
        {1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31},
        {2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31},
        {4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31},
        {8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31},
    };
    vf r[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) r[i] = load(rows[i] + h);
#pragma GCC unroll 4
    for (int s = 0; s < 4; s++)
#pragma GCC unroll 16
        for (int i = 0; i < 16; i++)
            if (!(i & 1 << s)) {
                vf a = r[i], b = r[i | 1 << s];
                r[i] = __builtin_shuffle(a, b, low[s]);
                r[i | 1 << s] = __builtin_shuffle(a, b, high[s]);
            }
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) store(out + i * 16, r[i]);
}
#endif

typedef struct {
    float peak, total;
} softmax_state;

/* `count` queries of one kv head and one block of 16 positions, of which lanes lo .. hi-1 are seen by all.
 * What a query computes does not depend on the others: they share the loads of keys and values, and one's
 * multiplications fill the time in which another's maximum or sum is awaited. */
static inline __attribute__((always_inline)) void visit(const int count, const float *const q[],
                                                        const float *keys_t, const float *const values[16],
                                                        int lo, int hi, int64_t H, float scale,
                                                        softmax_state *state, float *acc, int64_t padded) {
    vf s[QUERIES][4] = {{{0}}};
    float w[QUERIES][LANES];
    int64_t h = 0;
    for (; h + 4 <= H; h += 4) {
        vf k0 = load(keys_t + h * 16), k1 = load(keys_t + h * 16 + 16);
        vf k2 = load(keys_t + h * 16 + 32), k3 = load(keys_t + h * 16 + 48);
        for (int i = 0; i < count; i++) {
            s[i][0] += q[i][h] * k0, s[i][1] += q[i][h + 1] * k1;
            s[i][2] += q[i][h + 2] * k2, s[i][3] += q[i][h + 3] * k3;
        }
    }
    for (; h < H; h++)
        for (int i = 0; i < count; i++) s[i][0] += q[i][h] * load(keys_t + h * 16);

    const vi lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    vi seen = (lanes >= lo) & (lanes < hi);
    for (int i = 0; i < count; i++) {
        vf scores = ((s[i][0] + s[i][1]) + (s[i][2] + s[i][3])) * scale;
        scores = (vf)(((vi)scores & seen) | ((vi)splat(-INFINITY) & ~seen));
#if defined(HAVE_AVX512)
        float block_peak = _mm512_reduce_max_ps((__m512)scores);
#else
        float block_peak = max_lanes(scores);
#endif
        if (!(block_peak <= state[i].peak)) { /* also if it is NaN: then all becomes NaN, as it should */
            float shrink = expf(state[i].peak - block_peak); /* e^-inf = 0 the first time */
            state[i].peak = block_peak;
            state[i].total *= shrink;
            for (int64_t c = 0; c < H; c += LANES)
                store(acc + i * padded + c, load(acc + i * padded + c) * shrink);
        }
        vf weights = exp_lanes(scores - state[i].peak);
        weights = (vf)((vi)weights & seen);
        store(w[i], weights);
#if defined(HAVE_AVX512)
        state[i].total += _mm512_reduce_add_ps((__m512)weights);
#else
        state[i].total += sum_lanes(weights);
#endif
    }
    int64_t c = 0;
    for (; c + 4 * LANES <= H; c += 4 * LANES) {
        vf a[QUERIES][4];
        for (int i = 0; i < count; i++)
            for (int n = 0; n < 4; n++) a[i][n] = load(acc + i * padded + c + n * LANES);
        for (int j = lo; j < hi; j++) {
            const float *v = values[j] + c;
            vf v0 = load(v), v1 = load(v + 16), v2 = load(v + 32), v3 = load(v + 48);
            for (int i = 0; i < count; i++) {
                a[i][0] += w[i][j] * v0, a[i][1] += w[i][j] * v1;
                a[i][2] += w[i][j] * v2, a[i][3] += w[i][j] * v3;
            }
        }
        for (int i = 0; i < count; i++)
            for (int n = 0; n < 4; n++) store(acc + i * padded + c + n * LANES, a[i][n]);
    }
    for (; c < H; c += LANES)
        for (int i = 0; i < count; i++) {
            vf a = load(acc + i * padded + c);
            if (H - c >= LANES)
                for (int j = lo; j < hi; j++) a += w[i][j] * load(values[j] + c);
            else
                for (int j = lo; j < hi; j++) a += w[i][j] * load_some(values[j] + c, H - c);
            store(acc + i * padded + c, a);
        }
}

void infer_attend(const void *args, int64_t chunk) {
    const attend_args *a = args;
    const int64_t *item = a->items + chunk / a->G * 4;
    const int64_t g = chunk % a->G, H = a->H, row_size = a->G * a->H;
    const int64_t first = item[0], count = item[1], start = item[3];
    const int64_t *table = a->table + item[2] * a->table_stride;
    const int64_t heads = a->N / a->G, padded = (H + LANES - 1) / LANES * LANES;
    const int64_t at_once = STATE_FLOATS / padded;
    float keys_t[MAX_HEAD * LANES] __attribute__((aligned(64)));
    float acc[STATE_FLOATS] __attribute__((aligned(64)));
    softmax_state state[STATE_FLOATS / LANES];
    static const float zeros[MAX_HEAD] = {0};

    for (int64_t pair = 0; pair < count * heads; pair += at_once) { /* a pair is a token and one of its heads */
        int64_t last_pair = pair + at_once < count * heads ? pair + at_once : count * heads;
        int64_t first_position = start + pair / heads, last_position = start + (last_pair - 1) / heads;
        int64_t low = a->window && first_position >= a->window ? first_position - a->window + 1 : 0;
        memset(acc, 0, (size_t)((last_pair - pair) * padded) * sizeof(float));
        for (int64_t i = 0; i < last_pair - pair; i++) state[i] = (softmax_state){-INFINITY, 0.0f};

        for (int64_t block = low / LANES * LANES; block <= last_position; block += LANES) {
            const float *keys[LANES], *values[LANES];
            for (int j = 0; j < LANES; j++) {
                int64_t p = block + j;
                int is_needed = p >= low && p <= last_position;
                int64_t slot =
                    is_needed ? table[p / a->block_size] * a->block_size + p % a->block_size : 0;
                keys[j] = is_needed ? a->keys + slot * row_size + g * H : zeros;
                values[j] = is_needed ? a->values + slot * row_size + g * H : zeros;
            }
            int64_t h = 0;
            for (; h + LANES <= H; h += LANES) transpose(keys, h, keys_t + h * LANES);
            for (; h < H; h++)
                for (int j = 0; j < LANES; j++) keys_t[h * LANES + j] = keys[j][h];
            for (int64_t i = pair, num; i < last_pair; i += num) {
                int64_t position = start + i / heads, last = start + (i + QUERIES - 1) / heads;
                int64_t lowest = a->window && position >= a->window ? position - a->window + 1 : 0;
                int64_t lo = lowest > block ? lowest - block : 0, hi = position - block + 1;
                int sees_all = hi >= LANES && !(a->window && last - block >= a->window);
                num = sees_all && i + QUERIES <= last_pair ? QUERIES : 1;
                if (lo >= LANES || hi <= 0) continue;
                if (hi > LANES) hi = LANES;
                const float *q[QUERIES];
                for (int64_t n = i; n < i + num; n++)
                    q[n - i] = a->q + (first + n / heads) * a->q_token_stride + (g * heads + n % heads) * H;
                softmax_state *states = state + (i - pair);
                float *sums = acc + (i - pair) * padded;
                if (num == QUERIES && QUERIES > 1)
                    visit(QUERIES, q, keys_t, values, 0, LANES, H, (float)a->scale, states, sums, padded);
                else
                    visit(1, q, keys_t, values, (int)lo, (int)hi, H, (float)a->scale, states, sums, padded);
            }
        }
        for (int64_t i = pair; i < last_pair; i++) {
            float *out = a->out + ((first + i / heads) * a->N + g * heads + i % heads) * H;
            float inverse = 1.0f / state[i - pair].total;
            for (int64_t h = 0; h < H; h++) out[h] = acc[(i - pair) * padded + h] * inverse;
        }
    }
}
