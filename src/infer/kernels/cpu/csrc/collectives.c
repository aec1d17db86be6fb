/* Collectives of several processes, the ranks of one model, in shared memory: sums, gathers and pipes.
 *
 *     header   aborted · for each rank: arrived, sleepers, ticks, waiting, times   a cache line each
 *     shares   rank 0: even, odd · rank 1: even, odd · ...                         CAPACITY floats each
 *     pipes    rank 0: sent, taken, slots · rank 1: ...                            PIPE_SLOTS of CAPACITY floats
 *
 * Exchanges are numbered. A rank copies its share to one of its two buffers, even or odd like the number, and
 * announces that it has arrived; it then waits until all ranks have arrived, and reads all shares in rank order. So
 * every rank gets the same bits. A rank that goes on to the next exchange writes to its other buffer. It reuses the
 * first one only after all ranks have arrived at the next exchange, which they do after they have read this one. The
 * ranks of an exchange are consecutive; if layers are split into stages, the ranks of each stage are a group.
 *
 * A pipe moves rows from one stage to the next: its rank writes a slot when the reader has taken the previous content.
 *
 * Every word has one writer, and the data that its number announces is written before it. So ranks on several machines
 * can each have a copy of this memory, and a thread per word that is read elsewhere forwards its changes.
 *
 * A waiting rank polls for a while and then sleeps in the kernel. `aborted` ends every wait, now and later: results
 * are then invalid, and the caller must check it. */
#define _GNU_SOURCE
#include "infer.h"

#include <stdatomic.h>
#include <time.h>
#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#define MAX_RANKS 64
#define HEADER_BYTES 8192
#define SPINS_BEFORE_SLEEP 20000
#define SLEEP 20000000ll /* nanoseconds until a sleeper looks at `aborted` again */
#define OUTSIDE INT64_MIN
#define PIPE_SLOTS 8
#define NUM_TIMES 3 /* kinds of waits: for a sum, for rows of another stage, for a message */
#define MESSAGE 2

typedef struct {
    _Atomic uint32_t value;
    _Atomic uint32_t sleepers;
    uint32_t counts[PIPE_SLOTS]; /* in a pipe's `sent`: floats in each slot */
    uint8_t rest[24];
} word; /* a number that ranks wait for */

typedef struct {
    _Atomic uint32_t value; /* number of the exchange at which the rank has arrived */
    _Atomic uint32_t sleepers;
    _Atomic uint32_t ticks;   /* count of finished layers and rows */
    _Atomic uint32_t waiting; /* 0: it computes; 1: it waits for other ranks; 2: it waits for a message */
    _Atomic uint64_t times[NUM_TIMES]; /* nanoseconds of waiting, by kind */
    uint32_t counts[2]; /* floats in its even and its odd share */
    uint8_t rest[16];
} rank_line; /* a word, and fields that only its rank writes */

typedef struct {
    word aborted;
    rank_line ranks[MAX_RANKS];
} region;

typedef struct {
    word sent, taken;
    float slots[];
} stage_pipe;

static void sleep_while(word *at, uint32_t seen) {
    struct timespec limit = {0, SLEEP};
#if defined(__linux__)
    atomic_fetch_add(&at->sleepers, 1);
    syscall(SYS_futex, &at->value, FUTEX_WAIT, seen, &limit, NULL, 0);
    atomic_fetch_sub(&at->sleepers, 1);
#else
    limit.tv_nsec = 100000;
    (void)seen, (void)at, nanosleep(&limit, NULL);
#endif
}

/* Set a word that others may wait for; readers that see it also see all earlier writes. */
void infer_word_set(word *at, uint32_t value) {
    atomic_store(&at->value, value);
#if defined(__linux__)
    if (atomic_load(&at->sleepers)) syscall(SYS_futex, &at->value, FUTEX_WAKE, INT32_MAX, NULL, NULL, 0);
#endif
}

uint32_t infer_word_get(word *at) { return atomic_load_explicit(&at->value, memory_order_acquire); }

static uint64_t now(void) {
    struct timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    return (uint64_t)at.tv_sec * 1000000000u + (uint64_t)at.tv_nsec;
}

static int64_t wait_for(word *at, uint32_t value, word *aborted) {
    for (int64_t spins = 0;; spins++) {
        uint32_t seen = atomic_load_explicit(&at->value, memory_order_acquire);
        if ((int32_t)(seen - value) >= 0) return 1;
        if (spins < SPINS_BEFORE_SLEEP) {
            relax();
            continue;
        }
        if (atomic_load_explicit(&aborted->value, memory_order_acquire)) return 0;
        sleep_while(at, seen);
    }
}

/* Wait until a word has reached a number, which wraps around, and record the time; 0: aborted. */
int64_t infer_word_wait(word *at, uint32_t value, region *shared, int64_t rank, int64_t kind) {
    rank_line *own = &shared->ranks[rank];
    if ((int32_t)(infer_word_get(at) - value) >= 0) return 1;
    uint64_t start = now();
    atomic_store(&own->waiting, kind == MESSAGE ? 2 : 1);
    int64_t is_there = wait_for(at, value, &shared->aborted);
    atomic_store(&own->waiting, 0);
    atomic_fetch_add(&own->times[kind], now() - start);
    return is_there;
}

/* Sleep until a word differs from the number seen, to forward it to another machine; 0: aborted. */
int64_t infer_word_watch(word *at, uint32_t seen, region *shared) {
    while (infer_word_get(at) == seen) {
        if (infer_word_get(&shared->aborted)) return 0;
        sleep_while(at, seen);
    }
    return 1;
}

typedef struct {
    int64_t M; /* rows */
    float *x;
    int64_t x_stride, N; /* numbers per row and rank */
    float *out;          /* result of a gather */
    int64_t out_stride, V; /* numbers per row of all ranks; the last ranks have fewer than N, or none */
    region *shared;
    int64_t rank, first, size, capacity; /* first rank and size of the group; floats of a share */
} exchange_args;

static float *share_of(const exchange_args *a, int64_t rank, uint32_t number) {
    return (float *)((uint8_t *)a->shared + HEADER_BYTES) + (2 * rank + (number & 1)) * a->capacity;
}

static uint32_t next_number(const exchange_args *a) {
    return atomic_load_explicit(&a->shared->ranks[a->rank].value, memory_order_relaxed) + 1;
}

/* Announce a share of `count` floats, and wait for all other ranks; 0: aborted. */
static int64_t meet(const exchange_args *a, uint32_t number, int64_t count) {
    a->shared->ranks[a->rank].counts[number & 1] = (uint32_t)count;
    infer_word_set((word *)&a->shared->ranks[a->rank], number);
    for (int64_t rank = a->first; rank < a->first + a->size; rank++)
        if (rank != a->rank && !infer_word_wait((word *)&a->shared->ranks[rank], number, a->shared, a->rank, 0))
            return 0;
    return 1;
}

/* Replace x, contiguous [M, N], by the sum over all ranks. */
void infer_all_reduce(const void *args, int64_t chunk) {
    const exchange_args *a = args;
    int64_t count = a->M * a->N;
    (void)chunk;
    for (int64_t first = 0; first < count; first += a->capacity) {
        int64_t left = count - first < a->capacity ? count - first : a->capacity;
        uint32_t number = next_number(a);
        float *x = a->x + first;
        memcpy(share_of(a, a->rank, number), x, (size_t)left * sizeof(float));
        if (!meet(a, number, left)) return;
        const float *restrict zeroth = share_of(a, a->first, number), *restrict other = share_of(a, a->first + 1, number);
        for (int64_t i = 0; i < left; i++) x[i] = zeroth[i] + other[i];
        for (int64_t rank = 2; rank < a->size; rank++) {
            other = share_of(a, a->first + rank, number);
            for (int64_t i = 0; i < left; i++) x[i] += other[i];
        }
    }
}

/* Gather the columns of all ranks side by side: [M, N] per rank become [M, V]. */
void infer_all_gather(const void *args, int64_t chunk) {
    const exchange_args *a = args;
    int64_t at_once = a->capacity / a->N;
    (void)chunk;
    for (int64_t first = 0; first < a->M; first += at_once) {
        int64_t rows = a->M - first < at_once ? a->M - first : at_once;
        uint32_t number = next_number(a);
        float *own = share_of(a, a->rank, number);
        int64_t left = a->V - (a->rank - a->first) * a->N, have = left < a->N ? left : a->N;
        for (int64_t row = 0; row < rows && have > 0; row++)
            memcpy(own + row * a->N, a->x + (first + row) * a->x_stride, (size_t)have * sizeof(float));
        if (!meet(a, number, rows * a->N)) return;
        for (int64_t rank = 0; rank < a->size; rank++) {
            int64_t width = a->V - rank * a->N < a->N ? a->V - rank * a->N : a->N;
            for (int64_t row = 0; row < rows && width > 0; row++)
                memcpy(a->out + (first + row) * a->out_stride + rank * a->N,
                       share_of(a, a->first + rank, number) + row * a->N, (size_t)width * sizeof(float));
        }
    }
}

typedef struct {
    int64_t M; /* rows */
    float *x;
    int64_t N; /* numbers of a row */
    stage_pipe *through;
    region *shared;
    int64_t rank, capacity; /* floats of a slot */
} pass_args;

static float *slot_of(const pass_args *a, uint32_t number) {
    return a->through->slots + (number % PIPE_SLOTS) * a->capacity;
}

/* Pass x, contiguous [M, N], on to the next stage. */
void infer_pass_on(const void *args, int64_t chunk) {
    const pass_args *a = args;
    int64_t count = a->M * a->N;
    (void)chunk;
    for (int64_t first = 0; first < count; first += a->capacity) {
        int64_t left = count - first < a->capacity ? count - first : a->capacity;
        uint32_t number = infer_word_get(&a->through->sent) + 1;
        if (!infer_word_wait(&a->through->taken, number - PIPE_SLOTS, a->shared, a->rank, 1)) return;
        memcpy(slot_of(a, number), a->x + first, (size_t)left * sizeof(float));
        a->through->sent.counts[number % PIPE_SLOTS] = (uint32_t)left;
        infer_word_set(&a->through->sent, number);
        atomic_fetch_add(&a->shared->ranks[a->rank].ticks, 1);
    }
}

/* Take x, contiguous [M, N], from the previous stage. */
void infer_take_rows(const void *args, int64_t chunk) {
    const pass_args *a = args;
    int64_t count = a->M * a->N;
    (void)chunk;
    for (int64_t first = 0; first < count; first += a->capacity) {
        int64_t left = count - first < a->capacity ? count - first : a->capacity;
        uint32_t number = infer_word_get(&a->through->taken) + 1;
        if (!infer_word_wait(&a->through->sent, number, a->shared, a->rank, 1)) return;
        memcpy(a->x + first, slot_of(a, number), (size_t)left * sizeof(float));
        infer_word_set(&a->through->taken, number);
    }
}

/* Report that one more layer has been computed, so that a rank without exchanges shows progress. */
void infer_tick(const void *args, int64_t chunk) {
    const pass_args *a = args;
    (void)chunk;
    atomic_fetch_add(&a->shared->ranks[a->rank].ticks, 1);
}

typedef struct {
    int64_t T;
    const int64_t *ids;
    int64_t *out;
    int64_t first, num_rows;
} own_ids_args;

/* Map ids to rows of a table with a range of the vocabulary; OUTSIDE: an id of another range. */
void infer_own_ids(const void *args, int64_t chunk) {
    const own_ids_args *a = args;
    (void)chunk;
    for (int64_t t = 0; t < a->T; t++) {
        int64_t row = a->ids[t] - a->first;
        a->out[t] = row >= 0 && row < a->num_rows ? row : OUTSIDE;
    }
}
