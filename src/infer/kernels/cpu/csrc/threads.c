/* A pool of threads that share the chunks of one operation after another.
 *
 * The next chunk to take, how many there are and which operation they belong to are one 64-bit number,
 * the *ticket*. A thread takes a chunk by moving the ticket on with compare-and-swap:
 *
 *     ticket   ┌──────── 24 bits ────────┬──── 20 bits ────┬──── 20 bits ────┐
 *              │ number of the operation │ chunks it has   │ next free chunk │
 *              └─────────────────────────┴─────────────────┴─────────────────┘
 *
 * An operation is over when its chunks are done, not when every thread has been seen: a worker that the
 * system has put aside delays nobody unless it holds a chunk. That is what keeps a busy machine from
 * bringing everything to a halt, as barriers do. There is no order among threads, so results must not
 * depend on who computes what; they do not, since chunks never share an output.
 *
 * Idle means idle: a worker looks for work for a few microseconds and then sleeps in the kernel. */
#define _GNU_SOURCE
#include "infer.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>

#define MAX_CHUNKS ((1 << 20) - 1)
#define MAX_WORKERS 255
#define SPINS_BEFORE_SLEEP 3000
#define SPINS_BEFORE_YIELD 500

static _Atomic uint64_t ticket;
static _Atomic int64_t chunks_done;
static _Atomic(const operation *) current;
static _Atomic int stopping;
static _Atomic int sleepers;
static pthread_mutex_t caller_lock = PTHREAD_MUTEX_INITIALIZER; /* one program at a time */
static pthread_mutex_t sleep_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t wake = PTHREAD_COND_INITIALIZER;
static pthread_t workers[MAX_WORKERS];
static int num_workers;
static uint64_t op_number;

static inline void relax(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* Take one chunk of the operation on offer and do it; 0 if there is none left. */
static int do_one_chunk(void) {
    uint64_t seen = atomic_load_explicit(&ticket, memory_order_acquire);
    for (;;) {
        uint64_t next = seen & MAX_CHUNKS, count = seen >> 20 & MAX_CHUNKS;
        if (next >= count) return 0;
        if (atomic_compare_exchange_weak_explicit(&ticket, &seen, seen + 1, memory_order_acq_rel,
                                                  memory_order_acquire)) {
            /* We hold a chunk, so `current` cannot move on before we count it as done. */
            const operation *op = atomic_load_explicit(&current, memory_order_acquire);
            op->run(op->args, (int64_t)next);
            atomic_fetch_add_explicit(&chunks_done, 1, memory_order_release);
            return 1;
        }
    }
}

static int has_work(void) {
    uint64_t seen = atomic_load(&ticket);
    return (seen & MAX_CHUNKS) < (seen >> 20 & MAX_CHUNKS);
}

static void *work(void *unused) {
    int idle = 0;
    (void)unused;
    while (!atomic_load_explicit(&stopping, memory_order_acquire)) {
        if (do_one_chunk()) {
            idle = 0;
        } else if (++idle < SPINS_BEFORE_SLEEP) {
            relax();
        } else {
            pthread_mutex_lock(&sleep_lock);
            atomic_fetch_add(&sleepers, 1);
            while (!has_work() && !atomic_load(&stopping)) pthread_cond_wait(&wake, &sleep_lock);
            atomic_fetch_sub(&sleepers, 1);
            pthread_mutex_unlock(&sleep_lock);
            idle = 0;
        }
    }
    return NULL;
}

static void wake_sleepers(void) {
    if (atomic_load(&sleepers) == 0) return;
    pthread_mutex_lock(&sleep_lock);
    pthread_cond_broadcast(&wake);
    pthread_mutex_unlock(&sleep_lock);
}

static void run_shared(const operation *op, int64_t count) {
    int idle = 0;
    atomic_store_explicit(&chunks_done, 0, memory_order_relaxed);
    atomic_store_explicit(&current, op, memory_order_release);
    op_number++;
    /* Sequentially consistent, with `sleepers` read after it: a worker that goes to sleep now has either
     * seen this ticket or is counted. */
    atomic_store(&ticket, op_number << 40 | (uint64_t)count << 20);
    wake_sleepers();
    while (do_one_chunk()) {
    }
    while (atomic_load_explicit(&chunks_done, memory_order_acquire) < count) {
        relax();
        if (++idle > SPINS_BEFORE_YIELD) sched_yield(); /* whoever holds the chunk may need this core */
    }
}

static int64_t count_chunks(const operation *op, int64_t num_rows, int64_t num_items) {
    if (op->kind == FIXED) return op->chunks;
    if (op->kind == PER_ITEM) return op->chunks * num_items;
    return op->chunks * ((num_rows + op->rows_per_chunk - 1) / op->rows_per_chunk);
}

static void run_locked(const operation *op, int64_t count) {
    if (num_workers > 0 && count > 1 && count <= MAX_CHUNKS)
        run_shared(op, count);
    else
        for (int64_t chunk = 0; chunk < count; chunk++) op->run(op->args, chunk);
}

/* Run operations in order, for so many rows and items; each sees what those before it have written. */
void infer_run(const operation *ops, int64_t num_ops, int64_t num_rows, int64_t num_items) {
    pthread_mutex_lock(&caller_lock);
    for (const operation *op = ops; op < ops + num_ops; op++) {
        op->args[0] = num_rows;
        run_locked(op, count_chunks(op, num_rows, num_items));
    }
    pthread_mutex_unlock(&caller_lock);
}

/* Run one operation whose chunks the caller has counted. */
void infer_run_one(chunk_fn run, int64_t num_chunks, int64_t *args) {
    operation op = {run, args, FIXED, num_chunks, 0};
    pthread_mutex_lock(&caller_lock);
    run_locked(&op, num_chunks);
    pthread_mutex_unlock(&caller_lock);
}

static void join_workers(void) {
    atomic_store(&stopping, 1);
    pthread_mutex_lock(&sleep_lock);
    pthread_cond_broadcast(&wake);
    pthread_mutex_unlock(&sleep_lock);
    for (int i = 0; i < num_workers; i++) pthread_join(workers[i], NULL);
    num_workers = 0;
    atomic_store(&stopping, 0);
}

/* A forked child has none of its parent's threads, and locks in whatever state they were. */
static void forget_workers(void) {
    num_workers = 0;
    atomic_store(&sleepers, 0);
    atomic_store(&ticket, 0);
    pthread_mutex_init(&caller_lock, NULL);
    pthread_mutex_init(&sleep_lock, NULL);
    pthread_cond_init(&wake, NULL);
}

/* Compute with `num_threads` threads from now on, the caller's included; returns how many there are. */
int64_t infer_set_threads(int64_t num_threads) {
    static int is_registered;
    pthread_mutex_lock(&caller_lock);
    if (!is_registered) {
        pthread_atfork(NULL, NULL, forget_workers);
        is_registered = 1;
    }
    if (num_threads - 1 != num_workers) {
        join_workers();
        while (num_workers < num_threads - 1 && num_workers < MAX_WORKERS) {
            if (pthread_create(&workers[num_workers], NULL, work, NULL)) break; /* fewer will do */
            num_workers++;
        }
    }
    int64_t have = num_workers + 1;
    pthread_mutex_unlock(&caller_lock);
    return have;
}

const char *infer_variant(void) { return VARIANT; }
