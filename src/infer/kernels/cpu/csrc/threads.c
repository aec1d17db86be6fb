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
 * system has put aside delays nothing unless it holds a chunk. There is no order among threads, so results
 * must not depend on which thread computes what; they do not, since chunks never share an output.
 *
 * On cores that other programs keep busy, workers are put aside with a chunk in hand again and again, for a
 * whole time slice: milliseconds of waiting for microseconds of work. So help is taken only while it pays.
 * Workers 0 .. `helpers` - 1 may take chunks, and a balance counts the time that they have saved lately:
 *
 *     the time that the caller would have needed     is added, up to a time slice
 *     for their chunks
 *     the time that it waited for a late one         is taken off; if the balance falls below zero, there is
 *                                                    one helper less, for a time of work that is 32 times
 *                                                    the deficit
 *     when that time is over                         one helper more; again after the same time, until all
 *                                                    are back
 *
 * So whatever else runs on the machine, waiting costs about a thirtieth of the time more than it saves, or
 * more where a single wait is so long that the pause after it is cut short; and threads that had no room are tried
 * again after two seconds at the latest. A worker that wakes up on the caller's own core, where the two would take
 * turns at the work of one, moves to another; where there is none it is in the way, and that counts as a loss. The
 * clock decides which thread computes, never what comes out.
 *
 * Idle means idle: a worker looks for work for a tenth of a millisecond and then sleeps in the kernel, as
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
#define LATE 200000ll              /* nanoseconds, beyond what the caller's own chunks took */
#define LOST_BY_WAKING 20000ll     /* nanoseconds: two changes of threads on the caller's core */
#define PAUSE_PER_LOSS 32          /* time of work with one helper less, per time lost */
#define LONGEST_PAUSE 2000000000ll /* nanoseconds */
#define MOST_BALANCE 4000000ll     /* nanoseconds: the cost of one wait that is forgiven */

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
static _Atomic int caller_core = -1;      /* core where this operation was begun */
static _Atomic int has_worker_on_its_core;
static _Atomic int caller_is_asleep;      /* set until the last chunk is done */
static pthread_mutex_t caller_lock = PTHREAD_MUTEX_INITIALIZER; /* one program at a time */
static pthread_mutex_t sleep_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t all_done = PTHREAD_COND_INITIALIZER;
static worker workers[MAX_WORKERS];
static int num_workers;
static uint64_t op_number;
#if defined(__linux__)
static cpu_set_t allowed_cores; /* cores of the caller when the workers were started */
#endif
static int64_t pause_length, pause_left; /* nanoseconds of work until one helper more is tried */
static int64_t balance;                  /* nanoseconds that helpers have saved, less what they cost */

static int64_t now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

/* The number of the core that this thread is on, -1 where the system does not say. */
static int this_core(void) {
#if defined(__linux__)
    return sched_getcpu();
#else
    return -1;
#endif
}

/* Leave this core to the caller, for any other that the process may use; 0 where there is none. */
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
            atomic_fetch_add(&chunks_done, 1);
            if (atomic_load(&caller_is_asleep)) { /* read after the count was raised: see wait_for */
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

/* Sleep until there is work, or, `ignoring` what there is now, until the next call for help. */
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
    atomic_store(&caller_is_asleep, 1); /* before the count is read: one of the two sees the other */
    while (atomic_load(&chunks_done) < count) pthread_cond_wait(&all_done, &sleep_lock);
    atomic_store(&caller_is_asleep, 0);
    pthread_mutex_unlock(&sleep_lock);
}

/* Do an operation together; returns the nanoseconds that were lost by it, beyond the balance. */
static int64_t run_shared(const operation *op, int64_t count) {
    int64_t start = now(), waited = 0, own = 0;
    atomic_store_explicit(&chunks_done, 0, memory_order_relaxed);
    atomic_store_explicit(&current, op, memory_order_release);
    atomic_store_explicit(&caller_core, this_core(), memory_order_relaxed);
    op_number++;
    /* Sequentially consistent, with `is_asleep` read after it: a worker that goes to sleep now has either
     * seen this ticket or is seen asleep. */
    atomic_store(&ticket, op_number << 40 | (uint64_t)count << 20);
    call_helpers();
    while (do_one_chunk()) own++;
    int64_t end = now();
    if (atomic_load_explicit(&chunks_done, memory_order_acquire) < count) {
        wait_for(count);
        waited = now() - end;
        if (waited <= LATE + end - start) waited = 0; /* some chunk has to be the last */
    }
    if (atomic_exchange(&has_worker_on_its_core, 0) && !waited) waited = LOST_BY_WAKING;
    balance += own ? (end - start) / own * (count - own) - waited : -waited;
    if (balance > MOST_BALANCE) balance = MOST_BALANCE;
    int64_t missing = balance < 0 ? -balance : 0;
    balance += missing;
    return missing;
}

/* Set the number of helpers for the next operation, after one that took these nanoseconds, or lost `lost`. */
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

/* Run operations in order, for the given rows and items; each sees the results of those before it. */
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

/* A forked child has none of its parent's threads, and locks in whatever state they were. */
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
#if defined(__linux__)
        if (sched_getaffinity(0, sizeof allowed_cores, &allowed_cores)) CPU_ZERO(&allowed_cores);
#endif
        while (num_workers < num_threads - 1 && num_workers < MAX_WORKERS) {
            if (start_worker(&workers[num_workers])) break; /* fewer will do */
            num_workers++;
        }
        helpers = num_workers;
    }
    int64_t have = num_workers + 1;
    pthread_mutex_unlock(&caller_lock);
    return have;
}

const char *infer_variant(void) { return VARIANT; }
