/* SPDX-License-Identifier: Apache-2.0
 * What really happened, in a file mapped shared: it is whole however the process ends.
 * tests/simgpu/truth.py reads it; its dtypes are these structs. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "sim.h"

enum { VERSION = 1, NAME = 48 };

struct event {
    u64 begun, ended;       /* ended 0: has not returned */
    u64 gpu_start, gpu_end; /* of the work it put on the device, or waited for; 0: none */
    u64 out;                /* address or handle it gave */
    u64 args[MAX_ARGS];
    u32 tid;
    i32 result;
    u16 symbol;
    u8 depth;               /* 1: called from outside the library */
    u8 arg_count;
    _Atomic u32 kept;       /* 1: filled in */
};
_Static_assert(sizeof(struct event) == 128, "as truth.py has it");

struct counts { _Atomic u64 calls, returned, failed; };
struct live { _Atomic u64 bytes, blocks, peak; };

struct header {
    char magic[8];
    u32 version, size;
    u32 pid, symbols;
    u64 start_ticks, opened, capacity;
    _Atomic u64 events; /* begun; those past `capacity` are counted, not kept */
    struct live live[KINDS];
    struct counts counts[MAX_SYMBOLS];
    char names[MAX_SYMBOLS][NAME];
};

static struct header *_Atomic truth;
static pthread_mutex_t opening = PTHREAD_MUTEX_INITIALIZER;
static size_t mapped;
static void (*_Atomic told)(u32 symbol, u64 begun, const u64 *args);
static __thread u32 tid, depth;

u64 now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (u64)t.tv_sec * 1000000000 + (u64)t.tv_nsec;
}

void wait_until(u64 ns) {
    struct timespec t = {(time_t)(ns / 1000000000), (long)(ns % 1000000000)};
    while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &t, NULL) == EINTR) {}
}

/* Start of this process in clock ticks since boot (proc(5), /proc/PID/stat, field 22). */
static u64 start_ticks(void) {
    char text[1024];
    int fd = open("/proc/self/stat", O_RDONLY | O_CLOEXEC);
    ssize_t n = fd < 0 ? -1 : read(fd, text, sizeof text - 1);
    if (fd >= 0) close(fd);
    if (n <= 0) return 0;
    text[n] = 0;
    char *p = strrchr(text, ')');
    unsigned long long ticks = 0;
    if (p) sscanf(p + 1, " %*c%*s%*s%*s%*s%*s%*s%*s%*s%*s%*s%*s%*s%*s%*s%*s%*s%*s%*s %llu", &ticks);
    return ticks;
}

enum { PATH = 640 };

/* PIDs of two namespaces can be equal: files are numbered. */
static void file_name(char *path, u64 ticks, int number, const char *end) {
    snprintf(path, PATH, "%s/%d-%llu-%d.%s", config.truth, (int)getpid(), (unsigned long long)ticks,
             number, end);
}

/* A file that becomes truth when it is whole; -1: none. */
static int new_file(char *path, u64 ticks) {
    int fd = -1;
    if (!config.truth[0]) return fd;
    errno = EEXIST;
    for (int i = 0; fd < 0 && errno == EEXIST && i < 100; i++) {
        file_name(path, ticks, i, "new");
        fd = open(path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
    }
    if (fd < 0) fprintf(stderr, "simgpu: %s: %s; truth is not kept\n", path, strerror(errno));
    return fd;
}

static void publish(const char *path, u64 ticks) {
    char name[PATH];
    int r = -1;
    errno = EEXIST;
    for (int i = 0; r < 0 && errno == EEXIST && i < 100; i++) {
        file_name(name, ticks, i, "truth");
        r = link(path, name);
    }
    if (r < 0) fprintf(stderr, "simgpu: %s: %s; truth is not kept\n", name, strerror(errno));
    unlink(path);
}

static struct header *open_truth(void) {
    pthread_mutex_lock(&opening);
    struct header *t = atomic_load(&truth);
    if (!t) {
        config_load();
        u64 ticks = start_ticks();
        size_t head = (sizeof *t + 4095) & ~(size_t)4095;
        u64 capacity = config.events;
        char path[PATH];
        int fd = new_file(path, ticks);
        if (fd < 0) capacity = 0; /* nobody could read them */
        mapped = head + capacity * sizeof(struct event);
        if (fd >= 0 && ftruncate(fd, (off_t)mapped)) {
            perror("simgpu: truth");
            close(fd);
            fd = -1;
        }
        t = mmap(NULL, mapped, PROT_READ | PROT_WRITE,
                 fd < 0 ? MAP_PRIVATE | MAP_ANONYMOUS : MAP_SHARED, fd, 0);
        if (t == MAP_FAILED) {
            perror("simgpu: truth");
            _exit(70);
        }
        t->version = VERSION;
        t->size = (u32)head;
        t->pid = (u32)getpid();
        t->start_ticks = ticks;
        t->opened = now_ns();
        t->capacity = capacity;
        t->symbols = symbol_count;
        for (u32 i = 0; i < symbol_count; i++) strncpy(t->names[i], symbols[i].name, NAME - 1);
        memcpy(t->magic, "SIMTRUTH", 8);
        if (fd >= 0) {
            publish(path, ticks);
            close(fd);
        }
        atomic_store(&truth, t);
    }
    pthread_mutex_unlock(&opening);
    return t;
}

static struct header *get(void) {
    struct header *t = atomic_load_explicit(&truth, memory_order_acquire);
    return t ? t : open_truth();
}

static struct event *log_call(struct header *t, u32 symbol, u32 count, const u64 *args) {
    u64 n = atomic_fetch_add(&t->events, 1);
    if (n >= t->capacity) return NULL;
    struct event *e = (struct event *)((char *)t + t->size) + n;
    if (!tid) tid = (u32)syscall(SYS_gettid);
    e->begun = now_ns();
    e->tid = tid;
    e->symbol = (u16)symbol;
    e->depth = (u8)depth;
    e->arg_count = (u8)(count > MAX_ARGS ? MAX_ARGS : count);
    for (u32 i = 0; i < e->arg_count; i++) e->args[i] = args[i];
    atomic_store_explicit(&e->kept, 1, memory_order_release);
    return e;
}

int call_begin(struct call *c, u32 symbol, bool per_thread, u32 count, const u64 *args) {
    struct header *t = get();
    const struct symbol *s = &symbols[symbol];
    u64 nth = atomic_fetch_add(&t->counts[symbol].calls, 1) + 1;
    *c = (struct call){.symbol = symbol, .per_thread = per_thread};
    depth++;
    if (!s->launch || config.log_launches) c->event = log_call(t, symbol, count, args);
    if (s->told) {
        void (*tell)(u32, u64, const u64 *) = atomic_load_explicit(&told, memory_order_relaxed);
        if (tell) tell(symbol, c->event ? c->event->begun : now_ns(), args);
    }
    int failure = config_failure(symbol, nth);
    if (failure) return failure;
    return s->any_time || driver_ready ? OK : NOT_INITIALIZED;
}

int call_end(struct call *c, int result) {
    struct header *t = get();
    if (result) atomic_fetch_add_explicit(&t->counts[c->symbol].failed, 1, memory_order_relaxed);
    atomic_fetch_add_explicit(&t->counts[c->symbol].returned, 1, memory_order_relaxed);
    depth--;
    if (c->event) {
        c->event->result = result;
        c->event->out = c->out;
        c->event->gpu_start = c->gpu_start;
        c->event->gpu_end = c->gpu_end;
        c->event->ended = now_ns();
    }
    return result;
}

void truth_live(enum kind kind, u64 bytes, int sign) {
    struct live *l = &get()->live[kind];
    if (sign < 0) {
        atomic_fetch_sub(&l->bytes, bytes);
        atomic_fetch_sub(&l->blocks, 1);
        return;
    }
    u64 total = atomic_fetch_add(&l->bytes, bytes) + bytes;
    atomic_fetch_add(&l->blocks, 1);
    u64 peak = atomic_load(&l->peak);
    while (total > peak && !atomic_compare_exchange_weak(&l->peak, &peak, total)) {}
}

/* For tests: `f` is called inside each call of [alloc], [free] and [block], in the calling thread,
 * with the symbol, the begin time in the log, and the arguments. */
__attribute__((visibility("default")))
void simgpu_on_call(void (*f)(u32 symbol, u64 begun, const u64 *args)) { atomic_store(&told, f); }

__attribute__((visibility("default"))) const char *simgpu_symbol(u32 symbol) {
    return symbol < symbol_count ? symbols[symbol].name : NULL;
}

/* A forked child begins with nothing: a truth of its own, no memory, a driver that refuses. */
static void forked(void) {
    struct header *t = atomic_exchange(&truth, NULL);
    if (t) munmap(t, mapped);
    opening = MUTEX_NEW;
    tid = 0;
    if (atomic_exchange(&driver_ready, false)) atomic_store(&driver_forked, true);
    ledger_forked();
    memory_forked();
    vmm_forked();
    streams_forked();
    launch_forked();
    graph_forked();
}

__attribute__((constructor)) static void watch_forks(void) { pthread_atfork(NULL, NULL, forked); }
