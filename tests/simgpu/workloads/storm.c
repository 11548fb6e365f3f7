/* SPDX-License-Identifier: Apache-2.0
 * Allocates and frees from `threads` threads, `count` allocations each, of which `live` at a time;
 * the last `keep` stay.  Kinds in turn: plain, async, pool, pitch, managed, host, VMM (`kinds`: how
 * many of these).  `cross`: another thread frees.  `wrong`: frees that must fail, between. */
#include "common.h"

enum { PLAIN, ASYNC, POOL, PITCH, MANAGED, HOST, VMM, KINDS };

static struct option options[] = {
    {"threads", 1}, {"count", 1000}, {"live", 100}, {"keep", 0}, {"size", 65536}, {"kinds", 7},
    {"cross", 0}, {"wrong", 0}, {"gate", 0}, {NULL, 0},
};
struct block { u32 kind; u64 address, handle; };

static void *ctx, *pool;
static int (*set_current)(void *), (*plain)(u64 *, u64), (*async)(u64 *, u64, void *);
static int (*from_pool)(u64 *, u64, void *, void *), (*pitch)(u64 *, u64 *, u64, u64, u32);
static int (*managed)(u64 *, u64, u32), (*host)(u64 *, u64, u32), (*reserve)(u64 *, u64, u64, u64, u64);
static int (*create)(u64 *, u64, const void *, u64), (*map)(u64, u64, u64, u64, u64);
static int (*grant)(u64, u64, const void *, u64), (*unmap)(u64, u64), (*unreserve)(u64, u64);
static int (*free_plain)(u64), (*free_async)(u64, void *), (*free_host)(u64), (*release)(u64);

#define PAGE (2ULL << 20)

static struct block allocate(u64 i) {
    static const int device_0[32] = {1, 0, 1, 0}, access[3] = {1, 0, 3};
    struct block b = {.kind = (u32)(i % option(options, "kinds"))};
    u64 size = option(options, "size"), row;
    switch (b.kind) {
    case PLAIN: must(plain(&b.address, size), "cuMemAlloc_v2"); break;
    case ASYNC: must(async(&b.address, size, NULL), "cuMemAllocAsync"); break;
    case POOL: must(from_pool(&b.address, size, pool, NULL), "cuMemAllocFromPoolAsync"); break;
    case PITCH: must(pitch(&b.address, &row, 100, 64, 4), "cuMemAllocPitch_v2"); break;
    case MANAGED: must(managed(&b.address, size, 1), "cuMemAllocManaged"); break;
    case HOST: must(host(&b.address, size, 0), "cuMemHostAlloc"); break;
    case VMM: /* in the order of PyTorch's expandable segments */
        must(reserve(&b.address, PAGE, 0, 0, 0), "cuMemAddressReserve");
        must(create(&b.handle, PAGE, device_0, 0), "cuMemCreate");
        must(map(b.address, PAGE, 0, b.handle, 0), "cuMemMap");
        must(grant(b.address, PAGE, access, 1), "cuMemSetAccess");
    }
    return b;
}

static void give_back(struct block b) {
    switch (b.kind) {
    case ASYNC: case POOL: must(free_async(b.address, NULL), "cuMemFreeAsync"); break;
    case HOST: must(free_host(b.address), "cuMemFreeHost"); break;
    case VMM:
        must(unmap(b.address, PAGE), "cuMemUnmap");
        must(release(b.handle), "cuMemRelease");
        must(unreserve(b.address, PAGE), "cuMemAddressFree");
        break;
    default: must(free_plain(b.address), "cuMemFree_v2");
    }
}

static void *free_all(void *blocks) {
    must(set_current(ctx), "cuCtxSetCurrent");
    u64 live = option(options, "live");
    for (u64 i = 0; i < live; i++)
        if (((struct block *)blocks)[i].address) give_back(((struct block *)blocks)[i]);
    return NULL;
}

static void *work(void *arg) {
    (void)arg;
    u64 count = option(options, "count"), live = option(options, "live");
    u64 keep = option(options, "keep"), wrong = option(options, "wrong");
    struct block *blocks = calloc(live, sizeof *blocks);
    must(!blocks, "calloc");
    must(set_current(ctx), "cuCtxSetCurrent");
    for (u64 i = 0; i < count; i++) {
        struct block *b = &blocks[i % live];
        if (b->address) give_back(*b);
        *b = allocate(i);
        if (wrong && i % wrong == 0 && (!free_plain(b->address + 1) || free_plain(0))) abort();
    }
    for (u64 i = 0; i < keep && i < count; i++) blocks[(count - 1 - i) % live].address = 0;
    if (option(options, "cross")) {
        pthread_t other;
        pthread_create(&other, NULL, free_all, blocks);
        pthread_join(other, NULL);
    } else {
        free_all(blocks);
    }
    free(blocks);
    return NULL;
}

static void find_symbols(void) {
    set_current = symbol("cuCtxSetCurrent"), plain = symbol("cuMemAlloc_v2");
    async = symbol("cuMemAllocAsync"), from_pool = symbol("cuMemAllocFromPoolAsync");
    pitch = symbol("cuMemAllocPitch_v2"), managed = symbol("cuMemAllocManaged");
    host = symbol("cuMemHostAlloc"), reserve = symbol("cuMemAddressReserve");
    create = symbol("cuMemCreate"), map = symbol("cuMemMap"), grant = symbol("cuMemSetAccess");
    unmap = symbol("cuMemUnmap"), unreserve = symbol("cuMemAddressFree");
    free_plain = symbol("cuMemFree_v2"), free_async = symbol("cuMemFreeAsync");
    free_host = symbol("cuMemFreeHost"), release = symbol("cuMemRelease");
}

int main(int argc, char **argv) {
    pthread_t threads[64];
    read_options(argc, argv, options);
    u64 n = option(options, "threads"), kinds = option(options, "kinds");
    if (!n || n > 64 || !kinds || kinds > KINDS || !option(options, "live") ||
        option(options, "keep") > option(options, "live")) {
        fprintf(stderr, "storm: 1-64 threads, 1-%d kinds, live at least 1 and keep\n", KINDS);
        return 2;
    }
    gate(options, "begun"); /* the library is not loaded yet */
    ctx = driver_start();
    find_symbols();
    must(((int (*)(void **, int))symbol("cuDeviceGetDefaultMemPool"))(&pool, 0), "pool");
    gate(options, "ready");
    double begin = seconds();
    for (u64 i = 0; i < n; i++) pthread_create(&threads[i], NULL, work, NULL);
    for (u64 i = 0; i < n; i++) pthread_join(threads[i], NULL);
    printf("{\"allocations\": %llu, \"seconds\": %.6f}\n",
           (unsigned long long)(n * option(options, "count")), seconds() - begin);
    fflush(stdout);
    gate(options, "done");
    return 0;
}
