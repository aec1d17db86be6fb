/* A thread pool that processes the chunks of one operation after another.
 *
 * The next free chunk, the number of chunks and the number of the operation are one 64-bit number, the *ticket*.
 * A thread takes a chunk by incrementing the ticket with compare-and-swap:
 *
 *     ticket   ┌──────── 24 bits ────────┬──── 20 bits ────┬──── 20 bits ────┐
 *              │ number of the operation │ chunks it has   │ next free chunk │
 *              └─────────────────────────┴─────────────────┴─────────────────┘
 *
 * An operation is over when its chunks are done, not when every thread has checked in: a worker that the system
 * has preempted delays nothing unless it holds a chunk. Threads run in any order, and results do not depend on
 * which thread computes which chunk, since chunks never share an output.
 *
 * On cores that other programs keep busy, workers are often preempted while they hold a chunk, for a whole time
 * slice: milliseconds of waiting for microseconds of work. So helpers are used only while they pay off.
 * Workers 0 .. `helpers` - 1 may take chunks, and a balance tracks the time that they have recently saved:
 *
 *     the time that the caller would have needed     is added, up to a time slice
 *     for their chunks
 *     the time that it waited for a late chunk       is subtracted; if the balance falls below zero, there is
 *                                                    one helper less, for a working time of 32 times the
 *                                                    deficit
 *     when that time is over                         there is one helper more; again after the same time, until
 *                                                    all are back
 *
 * So for any load on the machine, waiting costs about a thirtieth of the time more than it saves, or more if a
 * single wait is so long that the pause after it is capped; and removed helpers are tried again after at most two
 * seconds. A worker that wakes up on the caller's own core, where the two would only share the core, moves to another
 * core; if there is none, it is in the way, and that counts as a loss. The clock decides which thread computes, but
 * never affects results.
 *
 * Idle workers use no CPU: a worker polls for work for a tenth of a millisecond and then sleeps in the kernel, as
 * does a caller that waits longer for a chunk. */
#define _GNU_SOURCE
#include "infer.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <time.h>

#define MAX_CHUNKS ((1 << 20) - 1)
#define MAX_WORKERS 255
#define SPINS_BEFORE_SLEEP 3000
#define LATE 200000ll              /* nanoseconds, beyond the time of the caller's own chunks */
#define LOST_BY_WAKING 20000ll     /* nanoseconds: two context switches on the caller's core */
#define PAUSE_PER_LOSS 32          /* working time with one helper less, per time lost */
#define LONGEST_PAUSE 2000000000ll /* nanoseconds */
#define MOST_BALANCE 4000000ll     /* nanoseconds: the longest single wait that is tolerated */

typedef struct {
    pthread_t thread;
    pthread_cond_t wake;
    _Atomic int is_asleep;
} worker;

static _Atomic uint64_t ticket;
static _Atomic int64_t chunks_done;
static _Atomic(const operation *) current;
static _Atomic int stopping;
static _Atomic int helpers;               /* workers that may take chunks; only the caller changes it */
static _Atomic int caller_core = -1;      /* core on which this operation started */
static _Atomic int has_worker_on_its_core;
static _Atomic int caller_is_asleep;      /* set until the last chunk is done */
static pthread_mutex_t caller_lock = PTHREAD_MUTEX_INITIALIZER; /* one program at a time */
static pthread_mutex_t sleep_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t all_done = PTHREAD_COND_INITIALIZER;
static worker workers[MAX_WORKERS];
static int num_workers;
static uint64_t op_number;
#if defined(__linux__)
static cpu_set_t allowed_cores; /* affinity of the caller when the workers were started */
#endif
static int64_t pause_length, pause_left; /* nanoseconds of work until another helper is tried */
static int64_t balance;                  /* nanoseconds that helpers have saved, minus their cost */

static int64_t now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

/* The number of the core of this thread; -1 if the system does not provide it. */
static int this_core(void) {
#if defined(__linux__)
    return sched_getcpu();
#else
    return -1;
#endif
}

/* Move from this core, which the caller uses, to any other allowed one; 0 if there is none. */
static int leave_core(int core) {
#if defined(__linux__)
    cpu_set_t others = allowed_cores;
    if (core >= CPU_SETSIZE) return 0;
    CPU_CLR(core, &others);
    return CPU_COUNT(&others) > 0 && sched_setaffinity(0, sizeof others, &others) == 0;
#else
    return (void)core, 0;
#endif
}

/* Take one chunk of the current operation and compute it; 0 if none is left. */
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
            atomic_fetch_add(&chunks_done, 1);
            if (atomic_load(&caller_is_asleep)) { /* read after the count was incremented: see wait_for */
                pthread_mutex_lock(&sleep_lock);
                pthread_cond_signal(&all_done);
                pthread_mutex_unlock(&sleep_lock);
            }
            return 1;
        }
    }
}

static int has_work(const worker *self) {
    uint64_t seen = atomic_load(&ticket);
    return self < workers + atomic_load(&helpers) && (seen & MAX_CHUNKS) < (seen >> 20 & MAX_CHUNKS);
}

/* Sleep until there is work or, with `ignoring`, until the next wake-up even if there is work now. */
static void sleep_until_called(worker *self, int ignoring) {
    pthread_mutex_lock(&sleep_lock);
    atomic_store(&self->is_asleep, 1);
    while ((ignoring || !has_work(self)) && !atomic_load(&stopping)) {
        pthread_cond_wait(&self->wake, &sleep_lock);
        ignoring = 0;
    }
    atomic_store(&self->is_asleep, 0);
    pthread_mutex_unlock(&sleep_lock);
}

static void *work(void *argument) {
    worker *self = argument;
    int idle = 0;
    while (!atomic_load_explicit(&stopping, memory_order_acquire)) {
        int core = this_core();
        int is_in_the_way = core >= 0 && core == atomic_load_explicit(&caller_core, memory_order_relaxed);
        if (is_in_the_way && has_work(self) && leave_core(core)) {
            idle = 0;
        } else if (is_in_the_way && has_work(self)) {
            atomic_store(&has_worker_on_its_core, 1);
            sleep_until_called(self, 1);
            idle = 0;
        } else if (has_work(self) && do_one_chunk()) {
            idle = 0;
        } else if (!is_in_the_way && ++idle < SPINS_BEFORE_SLEEP) {
            relax();
        } else {
            sleep_until_called(self, 0);
            idle = 0;
        }
    }
    return NULL;
}

static void call_helpers(void) {
    for (worker *each = workers; each < workers + helpers; each++) {
        if (!atomic_load(&each->is_asleep)) continue;
        pthread_mutex_lock(&sleep_lock);
        pthread_cond_signal(&each->wake);
        pthread_mutex_unlock(&sleep_lock);
    }
}

/* Wait for the chunks that others hold. */
static void wait_for(int64_t count) {
    for (int spins = 0; spins < SPINS_BEFORE_SLEEP; spins++) {
        if (atomic_load_explicit(&chunks_done, memory_order_acquire) == count) return;
        relax();
    }
    pthread_mutex_lock(&sleep_lock);
    atomic_store(&caller_is_asleep, 1); /* set before the count is read: one of the two sees the other */
    while (atomic_load(&chunks_done) < count) pthread_cond_wait(&all_done, &sleep_lock);
    atomic_store(&caller_is_asleep, 0);
    pthread_mutex_unlock(&sleep_lock);
}

/* Run an operation with helpers; returns the nanoseconds that they cost beyond the balance. */
static int64_t run_shared(const operation *op, int64_t count) {
    int64_t start = now(), waited = 0, own = 0;
    atomic_store_explicit(&chunks_done, 0, memory_order_relaxed);
    atomic_store_explicit(&current, op, memory_order_release);
    atomic_store_explicit(&caller_core, this_core(), memory_order_relaxed);
    op_number++;
    /* Sequentially consistent, with `is_asleep` read afterwards: a worker that goes to sleep now has either
     * seen this ticket or is seen as asleep. */
    atomic_store(&ticket, op_number << 40 | (uint64_t)count << 20);
    call_helpers();
    while (do_one_chunk()) own++;
    int64_t end = now();
    if (atomic_load_explicit(&chunks_done, memory_order_acquire) < count) {
        wait_for(count);
        waited = now() - end;
        if (waited <= LATE + end - start) waited = 0; /* a normal wait: some chunk has to be the last */
    }
    if (atomic_exchange(&has_worker_on_its_core, 0) && !waited) waited = LOST_BY_WAKING;
    balance += own ? (end - start) / own * (count - own) - waited : -waited;
    if (balance > MOST_BALANCE) balance = MOST_BALANCE;
    int64_t missing = balance < 0 ? -balance : 0;
    balance += missing;
    return missing;
}

/* Set the number of helpers for the next operation, after one that took `nanoseconds` or lost `lost`. */
static void choose_helpers(int64_t nanoseconds, int64_t lost) {
    if (lost) {
        helpers--;
        pause_length = lost < LONGEST_PAUSE / PAUSE_PER_LOSS ? lost * PAUSE_PER_LOSS : LONGEST_PAUSE;
        pause_left = pause_length;
    } else if ((pause_left -= nanoseconds) <= 0) {
        helpers++;
        pause_left = pause_length;
    }
}

static int64_t count_chunks(const operation *op, int64_t num_rows, int64_t num_items) {
    if (op->kind == FIXED) return op->chunks;
    if (op->kind == PER_ITEM) return op->chunks * num_items;
    return op->chunks * ((num_rows + op->rows_per_chunk - 1) / op->rows_per_chunk);
}

static void run_locked(const operation *op, int64_t count) {
    int is_short_of_help = helpers < num_workers;
    int64_t start = is_short_of_help ? now() : 0, lost = 0;
    if (helpers > 0 && count > 1 && count <= MAX_CHUNKS)
        lost = run_shared(op, count);
    else
        for (int64_t chunk = 0; chunk < count; chunk++) op->run(op->args, chunk);
    if (lost || is_short_of_help) choose_helpers(lost ? 0 : now() - start, lost);
}

/* Run operations in order, for the given rows and items; each sees the results of the previous ones. */
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
    for (int i = 0; i < num_workers; i++) pthread_cond_signal(&workers[i].wake);
    pthread_mutex_unlock(&sleep_lock);
    for (int i = 0; i < num_workers; i++) pthread_join(workers[i].thread, NULL);
    helpers = num_workers = 0;
    atomic_store(&stopping, 0);
}

/* Reset the pool in a forked child, which has no threads of its parent, and locks in an arbitrary state. */
static void forget_workers(void) {
    helpers = num_workers = 0;
    atomic_store(&ticket, 0);
    atomic_store(&caller_is_asleep, 0);
    pthread_mutex_init(&caller_lock, NULL);
    pthread_mutex_init(&sleep_lock, NULL);
    pthread_cond_init(&all_done, NULL);
}

static int start_worker(worker *it) {
    pthread_cond_init(&it->wake, NULL);
    atomic_store(&it->is_asleep, 0);
    return pthread_create(&it->thread, NULL, work, it);
}

/* Use `num_threads` threads from now on, including the caller's; returns the actual number. */
int64_t infer_set_threads(int64_t num_threads) {
    static int is_registered;
    pthread_mutex_lock(&caller_lock);
    if (!is_registered) {
        pthread_atfork(NULL, NULL, forget_workers);
        is_registered = 1;
    }
    if (num_threads - 1 != num_workers) {
        join_workers();
#if defined(__linux__)
        if (sched_getaffinity(0, sizeof allowed_cores, &allowed_cores)) CPU_ZERO(&allowed_cores);
#endif
        while (num_workers < num_threads - 1 && num_workers < MAX_WORKERS) {
            if (start_worker(&workers[num_workers])) break; /* fewer are enough */
            num_workers++;
        }
        helpers = num_workers;
    }
    int64_t have = num_workers + 1;
    pthread_mutex_unlock(&caller_lock);
    return have;
}

const char *infer_variant(void) { return VARIANT; }
