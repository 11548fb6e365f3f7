/* SPDX-License-Identifier: Apache-2.0
 * Allocations by address.  Device memory is accounted for, not there: copies move no data.
 * Sizes are counted as asked for; the real driver rounds up. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "api.h"

/* Device addresses: where Linux maps nothing of its own on x86-64 and aarch64. */
#define BASE 0x020000000000ULL
#define LIMIT 0x500000000000ULL
#define SMALLEST 512
#define BIT(kind) (1u << (kind))
#define ON_DEVICE (BIT(DEVICE) | BIT(PITCH) | BIT(MANAGED) | BIT(ASYNC) | BIT(POOL) | BIT(PHYSICAL))
#define FREEABLE (BIT(DEVICE) | BIT(PITCH) | BIT(MANAGED) | BIT(ASYNC) | BIT(POOL))
#define IPC_MAGIC 0x53494d495043ULL

struct freed { u64 address; struct freed *next; };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct block **table, *of_kind[KINDS];
static u64 buckets, blocks;
static struct freed *freed[48]; /* by log2 of the span */
static u64 fresh = BASE;

void memory_lock(void) { pthread_mutex_lock(&lock); }
void memory_unlock(void) { pthread_mutex_unlock(&lock); }
bool is_device_address(u64 address) { return address >= BASE && address < LIMIT; }

static struct block **bucket(u64 address) {
    return &table[(address * 0x9E3779B97F4A7C15ULL >> 20) & (buckets - 1)];
}

static void grow(void) {
    struct block **old = table;
    u64 count = buckets;
    buckets = count ? count * 2 : 1024;
    table = calloc(buckets, sizeof *table);
    if (!table) abort();
    for (u64 i = 0; i < count; i++)
        for (struct block *b = old[i], *next; b; b = next) {
            next = b->next;
            b->next = *bucket(b->address);
            *bucket(b->address) = b;
        }
    free(old);
}

struct block *block_add(enum kind kind, u64 address, u64 bytes, struct ctx *ctx) {
    if (blocks >= buckets) grow();
    struct block *b = calloc(1, sizeof *b);
    if (!b) abort();
    *b = (struct block){.address = address, .bytes = bytes, .kind = kind, .users = 1, .ctx = ctx};
    b->next = *bucket(address);
    *bucket(address) = b;
    b->next_of_kind = of_kind[kind];
    b->prev_of_kind = &of_kind[kind];
    if (b->next_of_kind) b->next_of_kind->prev_of_kind = &b->next_of_kind;
    of_kind[kind] = b;
    blocks++;
    truth_live(kind, bytes, 1);
    return b;
}

struct block *block_find(u64 address, u32 kinds) {
    for (struct block *b = buckets ? *bucket(address) : NULL; b; b = b->next)
        if (b->address == address && kinds & BIT(b->kind)) return b;
    return NULL;
}

struct block *block_first(enum kind kind) { return of_kind[kind]; }

void block_drop(struct block *b) {
    struct block **p = bucket(b->address);
    while (*p != b) p = &(*p)->next;
    *p = b->next;
    *b->prev_of_kind = b->next_of_kind;
    if (b->next_of_kind) b->next_of_kind->prev_of_kind = b->prev_of_kind;
    blocks--;
    truth_live(b->kind, b->bytes, -1);
    if (BIT(b->kind) & ON_DEVICE) ledger_give(b->ctx->device, b->bytes);
    if (b->kind == MANAGED || b->kind == HOST) munmap((void *)(uintptr_t)b->address, b->span);
    if (b->kind != HOST && b->span) space_give(b->address, b->span);
    free(b);
}

u64 space_take(u64 bytes, u64 *span) {
    u32 order = bytes <= SMALLEST ? 9 : 64 - (u32)__builtin_clzll(bytes - 1);
    if (order >= 46) return 0;
    *span = 1ULL << order;
    struct freed *f = freed[order];
    if (f) {
        u64 address = f->address;
        freed[order] = f->next;
        free(f);
        return address;
    }
    u64 address = (fresh + *span - 1) & ~(*span - 1);
    if (address + *span > LIMIT) return 0;
    fresh = address + *span;
    return address;
}

void space_give(u64 address, u64 span) {
    struct freed *f = malloc(sizeof *f);
    if (!f) abort();
    u32 order = (u32)__builtin_ctzll(span);
    *f = (struct freed){address, freed[order]};
    freed[order] = f;
}

/* --- device memory ----------------------------------------------------------------------------- */

static int allocate(struct call *c, u64 *out, u64 bytes, enum kind kind) {
    struct ctx *ctx = ctx_current();
    if (!ctx) return INVALID_CONTEXT;
    if (!bytes) return INVALID_VALUE;
    if (!ledger_take(ctx->device, bytes)) return OUT_OF_MEMORY;
    u64 span;
    memory_lock();
    u64 address = space_take(bytes < 4096 && kind == MANAGED ? 4096 : bytes, &span);
    /* Managed memory can be touched by the CPU: pages that come into being when they are. */
    if (address && kind == MANAGED &&
        mmap((void *)(uintptr_t)address, span, PROT_READ | PROT_WRITE,
             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE, -1, 0) == MAP_FAILED) {
        space_give(address, span);
        address = 0;
    }
    if (address) block_add(kind, address, bytes, ctx)->span = span;
    memory_unlock();
    if (!address) {
        ledger_give(ctx->device, bytes);
        return OUT_OF_MEMORY;
    }
    *out = c->out = address;
    return OK;
}

int mem_alloc(struct call *c, u64 *out, u64 bytes) { return allocate(c, out, bytes, DEVICE); }

int mem_alloc_pitch(struct call *c, u64 *out, u64 *pitch, u64 width, u64 height, u32 element) {
    if (!pitch || !width || !height || (element != 4 && element != 8 && element != 16))
        return INVALID_VALUE;
    u64 row = (width + 511) & ~511ULL;
    if (row < width || height > UINT64_MAX / row) return INVALID_VALUE;
    /* Where the scenario says so, an entry point calls another: tracers must count that once. */
    int r = config.nested ? cuMemAlloc_v2(out, row * height) : allocate(c, out, row * height, PITCH);
    if (r) return r;
    *pitch = row;
    c->out = *out;
    return OK;
}

int mem_alloc_managed(struct call *c, u64 *out, u64 bytes, u32 flags) {
    return flags == 1 || flags == 2 ? allocate(c, out, bytes, MANAGED) : INVALID_VALUE;
}

int mem_alloc_async(struct call *c, u64 *out, u64 bytes, void *stream) {
    struct stream *s;
    int r = stream_of(c, stream, &s);
    return r ? r : allocate(c, out, bytes, ASYNC);
}

int mem_alloc_pool(struct call *c, u64 *out, u64 bytes, void *pool, void *stream) {
    struct stream *s;
    if (!pool) return INVALID_VALUE;
    int r = stream_of(c, stream, &s);
    return r ? r : allocate(c, out, bytes, POOL);
}

static int release(u64 address, u32 kinds) {
    memory_lock();
    struct block *b = block_find(address, kinds);
    if (b) block_drop(b);
    memory_unlock();
    return b ? OK : INVALID_VALUE;
}

int mem_free(struct call *c, u64 address) {
    (void)c;
    struct ctx *ctx = ctx_current();
    if (!ctx) return INVALID_CONTEXT;
    if (!address) return OK;
    device_join(ctx->device); /* as the real one: memory may still be in use */
    return release(address, FREEABLE);
}

/* Freed at once, where the real driver waits for the stream and keeps it in the pool. */
int mem_free_async(struct call *c, u64 address, void *stream) {
    struct stream *s;
    int r = stream_of(c, stream, &s);
    return r ? r : !address ? OK : release(address, FREEABLE);
}

int mem_info(struct call *c, u64 *unused, u64 *total) {
    (void)c;
    struct ctx *ctx = ctx_current();
    if (!ctx) return INVALID_CONTEXT;
    if (!unused || !total) return INVALID_VALUE;
    *total = config.memory;
    *unused = config.memory - ledger_used(ctx->device);
    return OK;
}

/* --- pools: names only, as their memory is accounted for by allocation -------------------------- */

static char default_pools[MAX_DEVICES];

int device_pool(struct call *c, void **out, i32 device) {
    (void)c;
    if (device < 0 || (u64)device >= config.devices) return INVALID_DEVICE;
    *out = &default_pools[device];
    return OK;
}

int pool_create(struct call *c, void **out, void *props) {
    if (!props) return INVALID_VALUE;
    *out = malloc(1);
    c->out = (u64)(uintptr_t)*out;
    return OK;
}

int pool_destroy(struct call *c, void *pool) {
    (void)c;
    if (!pool || ((char *)pool >= default_pools && (char *)pool < default_pools + MAX_DEVICES))
        return INVALID_VALUE;
    free(pool);
    return OK;
}

int pool_trim(struct call *c, void *pool, u64 keep) {
    (void)c, (void)keep;
    return pool ? OK : INVALID_VALUE;
}

int pool_set(struct call *c, void *pool, i32 attribute, void *value) {
    (void)c, (void)attribute;
    return pool && value ? OK : INVALID_VALUE;
}

/* --- host memory -------------------------------------------------------------------------------- */

int host_alloc_flags(struct call *c, void **out, u64 bytes, u32 flags) {
    struct ctx *ctx = ctx_current();
    if (!ctx) return INVALID_CONTEXT;
    if (!bytes || flags > 7) return INVALID_VALUE;
    void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) return OUT_OF_MEMORY;
    memory_lock();
    block_add(HOST, (u64)(uintptr_t)p, bytes, ctx)->span = bytes;
    memory_unlock();
    *out = p;
    c->out = (u64)(uintptr_t)p;
    return OK;
}

int host_alloc(struct call *c, void **out, u64 bytes) { return host_alloc_flags(c, out, bytes, 0); }

int host_free(struct call *c, void *address) {
    (void)c;
    return address ? release((u64)(uintptr_t)address, BIT(HOST)) : OK;
}

int host_register(struct call *c, void *address, u64 bytes, u32 flags) {
    (void)flags;
    struct ctx *ctx = ctx_current();
    if (!ctx) return INVALID_CONTEXT;
    if (!address || !bytes) return INVALID_VALUE;
    u64 at = (u64)(uintptr_t)address;
    memory_lock();
    bool again = block_find(at, BIT(REGISTERED) | BIT(HOST)) != NULL;
    if (!again) block_add(REGISTERED, at, bytes, ctx);
    memory_unlock();
    c->out = at;
    return again ? ALREADY_REGISTERED : OK;
}

int host_unregister(struct call *c, void *address) {
    (void)c;
    return release((u64)(uintptr_t)address, BIT(REGISTERED)) ? NOT_REGISTERED : OK;
}

bool is_pinned(const void *address) {
    u64 at = (u64)(uintptr_t)address;
    bool found = false;
    memory_lock();
    for (int kind = HOST; kind <= REGISTERED; kind++)
        for (struct block *b = of_kind[kind]; b && !found; b = b->next_of_kind)
            found = at - b->address < b->bytes;
    memory_unlock();
    return found;
}

/* --- memory of another process ------------------------------------------------------------------ */

int ipc_get(struct call *c, void *handle, u64 address) {
    (void)c;
    memory_lock();
    struct block *b = block_find(address, BIT(DEVICE) | BIT(PITCH));
    struct ipc_handle h = {IPC_MAGIC, (u64)getpid(), address, b ? b->bytes : 0, {0}};
    memory_unlock();
    if (!b || !handle) return INVALID_VALUE;
    memcpy(handle, &h, sizeof h);
    return OK;
}

int ipc_open(struct call *c, u64 *out, struct ipc_handle handle, u32 flags) {
    struct ctx *ctx = ctx_current();
    if (!ctx) return INVALID_CONTEXT;
    if (flags != 1 || handle.magic != IPC_MAGIC || !handle.bytes) return INVALID_VALUE;
    if (handle.pid == (u64)getpid()) return INVALID_CONTEXT; /* not for the one who gave it */
    u64 span;
    memory_lock();
    u64 address = space_take(handle.bytes, &span);
    if (address) block_add(IPC, address, handle.bytes, ctx)->span = span;
    memory_unlock();
    if (!address) return OUT_OF_MEMORY;
    *out = c->out = address;
    return OK;
}

int ipc_close(struct call *c, u64 address) {
    (void)c;
    return release(address, BIT(IPC));
}

/* --- ends of contexts and processes -------------------------------------------------------------- */

void memory_drop_ctx(struct ctx *ctx) {
    memory_lock();
    for (int kind = 0; kind < KINDS; kind++)
        for (struct block *b = of_kind[kind], *next; b; b = next) {
            next = b->next_of_kind;
            /* VMM objects belong to the process (cuda.h: cuMemCreate), not to a context */
            if (b->ctx == ctx && kind != PHYSICAL && kind != MAPPED && kind != RESERVED)
                block_drop(b);
        }
    memory_unlock();
}

/* The child's table is the parent's, of which nothing is the child's; its pages are not reused. */
void memory_forked(void) {
    lock = MUTEX_NEW;
    table = NULL;
    buckets = blocks = 0;
    memset(of_kind, 0, sizeof of_kind);
    memset(freed, 0, sizeof freed);
}
