/* The one thread pool of the process: small, lazy, joined at exit, rebuilt in a forked child.
 *
 * A job is `tasks` calls of one function, claimed one at a time from an atomic counter, so the work is balanced and
 * what a task does depends on its number only. The caller takes part and returns when every task is done. Idle workers
 * sleep on a condition variable. One job runs at a time: a caller that finds the pool busy (another thread's job, or
 * its own when it is itself a task) does its tasks alone, which gives the same result.
 *
 * Only threads.pyx includes this header, so that there is one pool.
 */
#ifndef EC_THREADS_H
#define EC_THREADS_H

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>

#define EC_WORKERS_MAX 63
#define EC_WORKER_STACK ((size_t)512 << 10)

typedef void (*ec_task_fn)(void *context, int64_t task);

static struct {
    pthread_mutex_t job; /* held by the caller whose job runs */
    pthread_mutex_t lock; /* guards everything below */
    pthread_cond_t wake, done;
    pthread_t workers[EC_WORKERS_MAX];
    int worker_count;
    int stopping;
    uint64_t generation; /* number of the newest job */
    int seats;           /* workers that may still join it */
    int busy;            /* workers inside it */
    ec_task_fn run;
    void *context;
    int64_t tasks;
    atomic_int_fast64_t next;
} ec_pool = {.job = PTHREAD_MUTEX_INITIALIZER, .lock = PTHREAD_MUTEX_INITIALIZER, .wake = PTHREAD_COND_INITIALIZER, .done = PTHREAD_COND_INITIALIZER};

static void ec_pool_drain(ec_task_fn run, void *context, int64_t tasks)
{
    for (;;) {
        int64_t task = atomic_fetch_add_explicit(&ec_pool.next, 1, memory_order_relaxed);
        if (task >= tasks)
            return;
        run(context, task);
    }
}

static void *ec_pool_worker(void *unused)
{
    (void)unused;
    uint64_t seen = 0;
    pthread_mutex_lock(&ec_pool.lock);
    for (;;) {
        while (!ec_pool.stopping && (ec_pool.generation == seen || ec_pool.seats == 0))
            pthread_cond_wait(&ec_pool.wake, &ec_pool.lock);
        if (ec_pool.stopping)
            break;
        seen = ec_pool.generation;
        ec_pool.seats -= 1;
        ec_pool.busy += 1;
        ec_task_fn run = ec_pool.run;
        void *context = ec_pool.context;
        int64_t tasks = ec_pool.tasks;
        pthread_mutex_unlock(&ec_pool.lock);
        ec_pool_drain(run, context, tasks);
        pthread_mutex_lock(&ec_pool.lock);
        if (--ec_pool.busy == 0)
            pthread_cond_signal(&ec_pool.done);
    }
    pthread_mutex_unlock(&ec_pool.lock);
    return NULL;
}

/* Start workers until there are `wanted`, or as many as the system gives. Called with the lock held. */
static void ec_pool_hire(int wanted)
{
    sigset_t all, before;
    pthread_attr_t attributes;
    if (ec_pool.worker_count >= wanted || pthread_attr_init(&attributes) != 0)
        return;
    pthread_attr_setstacksize(&attributes, EC_WORKER_STACK);
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before); /* signals belong to Python's main thread */
    while (ec_pool.worker_count < wanted &&
           pthread_create(&ec_pool.workers[ec_pool.worker_count], &attributes, ec_pool_worker, NULL) == 0)
        ec_pool.worker_count += 1;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attributes);
}

static void ec_parallel_for(ec_task_fn run, void *context, int64_t tasks, int num_threads)
{
    if (tasks <= 1 || num_threads <= 1 || pthread_mutex_trylock(&ec_pool.job) != 0) {
        for (int64_t task = 0; task < tasks; ++task)
            run(context, task);
        return;
    }
    int helpers = num_threads - 1 < EC_WORKERS_MAX ? num_threads - 1 : EC_WORKERS_MAX;
    if (helpers > tasks - 1)
        helpers = (int)(tasks - 1);
    pthread_mutex_lock(&ec_pool.lock);
    if (!ec_pool.stopping) {
        ec_pool_hire(helpers);
        ec_pool.run = run;
        ec_pool.context = context;
        ec_pool.tasks = tasks;
        ec_pool.seats = helpers < ec_pool.worker_count ? helpers : ec_pool.worker_count;
        ec_pool.generation += 1;
    }
    atomic_store_explicit(&ec_pool.next, 0, memory_order_relaxed);
    int seats = ec_pool.seats;
    for (int i = 0; i < seats; ++i)
        pthread_cond_signal(&ec_pool.wake);
    pthread_mutex_unlock(&ec_pool.lock);

    ec_pool_drain(run, context, tasks);

    pthread_mutex_lock(&ec_pool.lock);
    ec_pool.seats = 0; /* who has not come yet need not */
    while (ec_pool.busy > 0)
        pthread_cond_wait(&ec_pool.done, &ec_pool.lock);
    pthread_mutex_unlock(&ec_pool.lock);
    pthread_mutex_unlock(&ec_pool.job);
}

static int ec_pool_size(void)
{
    pthread_mutex_lock(&ec_pool.lock);
    int count = ec_pool.worker_count;
    pthread_mutex_unlock(&ec_pool.lock);
    return count;
}

/* Jobs that workers were woken for since the start. */
static uint64_t ec_pool_jobs(void)
{
    pthread_mutex_lock(&ec_pool.lock);
    uint64_t jobs = ec_pool.generation;
    pthread_mutex_unlock(&ec_pool.lock);
    return jobs;
}

/* Wait for a running job, stop and join the workers; later jobs run in their callers. */
static void ec_pool_stop(void)
{
    pthread_mutex_lock(&ec_pool.job);
    pthread_mutex_lock(&ec_pool.lock);
    ec_pool.stopping = 1;
    pthread_cond_broadcast(&ec_pool.wake);
    pthread_mutex_unlock(&ec_pool.lock);
    for (int i = 0; i < ec_pool.worker_count; ++i)
        pthread_join(ec_pool.workers[i], NULL);
    ec_pool.worker_count = 0;
    pthread_mutex_unlock(&ec_pool.job);
}

/* A forked child has none of the workers, and locks in whatever state the parent's threads left them. */
static void ec_pool_after_fork(void)
{
    const pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
    const pthread_cond_t condition = PTHREAD_COND_INITIALIZER;
    ec_pool.job = mutex;
    ec_pool.lock = mutex;
    ec_pool.wake = condition;
    ec_pool.done = condition;
    ec_pool.worker_count = 0;
    ec_pool.seats = 0;
    ec_pool.busy = 0;
}

static int ec_pool_install(void) { return pthread_atfork(NULL, NULL, ec_pool_after_fork); }

#endif
