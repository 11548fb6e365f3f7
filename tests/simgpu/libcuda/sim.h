/* SPDX-License-Identifier: Apache-2.0
 * The simulated driver: types and functions that its files share.
 *
 * truth.c    what was called, with what, and what came of it
 * config.c   the scenario
 * ledger.c   memory in use on each device, over all processes
 * device.c   devices, contexts, initialisation, injection, cuGetProcAddress
 * memory.c   allocations by address; vmm.c  reserve, create, map
 * streams.c  streams, events, engines: when work starts and ends
 * copies.c   copies and memsets; launch.c  modules and kernels; graph.c  graphs and capture
 */
#pragma once
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef uint8_t u8;
typedef uint16_t u16;
typedef uint32_t u32;
typedef uint64_t u64;
typedef int32_t i32;
typedef int64_t i64;

/* CUresult (cuda.h) */
enum {
    OK = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_INITIALIZED = 3, INVALID_DEVICE = 101,
    INVALID_CONTEXT = 201, INVALID_HANDLE = 400, NOT_FOUND = 500, NOT_READY = 600,
    ALREADY_REGISTERED = 712, NOT_REGISTERED = 713, NOT_SUPPORTED = 801,
    CAPTURE_UNSUPPORTED = 900, CAPTURE_INVALIDATED = 901, UNKNOWN = 999,
};

enum { MAX_DEVICES = 8, MAX_SYMBOLS = 256, MAX_ARGS = 9 };

/* Parameters that are structs, as cuda.h lays them out */
struct ipc_handle { u64 magic, pid, address, bytes, rest[4]; };
struct launch_config {
    u32 gx, gy, gz, bx, by, bz, shared;
    void *stream, *attributes;
    u32 count;
};
struct copy_2d_side { u64 x, y; u32 type; void *host; u64 device; void *array; u64 pitch; };
struct copy_2d { struct copy_2d_side from, to; u64 width, height; };
struct copy_3d_side {
    u64 x, y, z, lod; u32 type; void *host; u64 device; void *array, *reserved; u64 pitch, height;
};
struct copy_3d { struct copy_3d_side from, to; u64 width, height, depth; };
struct kernel_params {
    void *f;
    u32 gx, gy, gz, bx, by, bz, shared;
    void **params, **extra;
    void *kernel, *ctx;
};

/* --- truth.c ------------------------------------------------------------------------------- */

enum kind {
    DEVICE, PITCH, MANAGED, ASYNC, POOL, PHYSICAL, MAPPED, RESERVED, HOST, REGISTERED, IPC, KINDS
};

struct event; /* one call in the log */

/* A call in progress.  The function that does the work may fill `out` (the address or handle it
 * gives), and start and end of what it put on the device. */
struct call {
    struct event *event;
    u32 symbol;
    bool per_thread; /* a _ptsz or _ptds symbol: stream 0 is the thread's own */
    u64 out, gpu_start, gpu_end;
};

/* Counts and logs the call; returns what it must return at once (0: go on). */
int call_begin(struct call *c, u32 symbol, bool per_thread, u32 count, const u64 *args);
int call_end(struct call *c, int result);
/* One allocation more (sign 1) or less (-1). */
void truth_live(enum kind kind, u64 bytes, int sign);
u64 now_ns(void); /* CLOCK_MONOTONIC */
void wait_until(u64 ns);

/* --- config.c ------------------------------------------------------------------------------ */

struct config {
    u64 devices, memory, driver_version, kernels_at_once;
    u64 h2d_bytes_per_s, d2h_bytes_per_s, d2d_bytes_per_s, copy_ns;
    u64 kernel_ns, module_load_ns, graph_node_ns;
    u64 events, log_launches, nested;
    char name[96], truth[512];
};
extern struct config config;
void config_load(void); /* once, whoever calls first */
/* Duration of kernel `name`: a fixed part and one per block of its grid. */
void config_kernel(const char *name, u64 *ns, u64 *ns_per_block);
/* What the nth call (from 1) of a symbol is told to return; 0: nothing. */
int config_failure(u32 symbol, u64 nth);

/* --- ledger.c ------------------------------------------------------------------------------ */

bool ledger_take(u32 device, u64 bytes); /* false: the device has not that much left */
void ledger_give(u32 device, u64 bytes);
u64 ledger_used(u32 device);
void ledger_forked(void);

/* --- device.c ------------------------------------------------------------------------------ */

struct ctx { bool live, primary; u32 device, users, flags; };

extern _Atomic bool driver_ready;   /* cuInit has been called in this process */
extern _Atomic bool driver_forked;  /* ... or in one that forked it: nothing works any more */
struct ctx *ctx_current(void);      /* NULL: none */
bool ctx_in_use(const struct ctx *ctx);
void injection_start(void);

/* The generated table of symbols. */
struct symbol {
    const char *name;
    void *address;  /* as exported */
    u32 since;      /* CUDA version from which cuGetProcAddress gives it */
    bool any_time;  /* works before cuInit */
    bool told;      /* reaches the callback */
    bool launch;
};
extern const struct symbol symbols[];
extern const u32 symbol_count;

/* --- memory.c, vmm.c ------------------------------------------------------------------------ */

struct block {
    u64 address, bytes, span; /* span: address space taken */
    enum kind kind;
    u32 users;                /* PHYSICAL: handles and mappings that hold it */
    struct ctx *ctx;
    struct block *next, *next_of_kind, **prev_of_kind;
};
void memory_lock(void);
void memory_unlock(void);
/* The rest wants the lock held. */
struct block *block_add(enum kind kind, u64 address, u64 bytes, struct ctx *ctx);
struct block *block_find(u64 address, u32 kinds); /* kinds: bits 1 << kind */
struct block *block_first(enum kind kind);
void block_drop(struct block *b);
u64 space_take(u64 bytes, u64 *span); /* device addresses; a freed one is the next to be given */
void space_give(u64 address, u64 span);
void memory_drop_ctx(struct ctx *ctx); /* takes the lock itself */
void memory_forked(void);
void vmm_forked(void);
bool is_device_address(u64 address);
bool is_pinned(const void *address);

/* --- streams.c ------------------------------------------------------------------------------ */

enum engine { COMPUTE, COPY_IN, COPY_OUT, ENGINES };
struct stream;
struct graph;

int stream_of(const struct call *c, void *handle, struct stream **out);
/* Put work of `ns` on a stream: behind what is there, when the engine is free. */
int stream_submit(struct call *c, struct stream *s, enum engine engine, u64 ns);
void stream_join(struct call *c, struct stream *s); /* blocks until all of it is done */
void device_join(u32 device);
struct graph *stream_capture(struct stream *s); /* what it is being captured into, or NULL */
void stream_set_capture(struct stream *s, struct graph *graph);
void streams_drop_ctx(struct ctx *ctx);
void streams_forked(void);

/* --- launch.c, graph.c ----------------------------------------------------------------------- */

int kernel_duration(void *function, u64 blocks, u64 *ns);
void graph_append(struct graph *graph, enum engine engine, u64 ns);
void launch_forked(void);
void graph_forked(void);

#define MUTEX_NEW (pthread_mutex_t) PTHREAD_MUTEX_INITIALIZER
