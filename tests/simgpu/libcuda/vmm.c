/* SPDX-License-Identifier: Apache-2.0
 * Virtual memory management: address space is reserved, physical memory created, one mapped into
 * the other.  Physical memory goes when its last handle and its last mapping have gone. */
#include <stdlib.h>

#include "api.h"

#define GRANULARITY (2ULL << 20)
#define BIT(kind) (1u << (kind))

/* A mapping holds its physical memory. */
struct mapping { struct block *at, *physical; struct mapping *next; };
static struct mapping *mappings;
static u64 next_handle = 0x10000;

static i32 device_of(const void *prop) { /* CUmemAllocationProp.location.id */
    return ((const i32 *)prop)[3];
}

int mem_granularity(struct call *c, u64 *out, void *prop, i32 option) {
    (void)c, (void)option;
    if (!prop) return INVALID_VALUE;
    *out = GRANULARITY;
    return OK;
}

int vmm_reserve(struct call *c, u64 *out, u64 bytes, u64 align, u64 near, u64 flags) {
    (void)near;
    if (!bytes || bytes % GRANULARITY || (align & (align - 1)) || flags) return INVALID_VALUE;
    u64 span;
    memory_lock();
    u64 address = space_take(bytes > align ? bytes : align, &span);
    if (address) block_add(RESERVED, address, bytes, NULL)->span = span;
    memory_unlock();
    if (!address) return OUT_OF_MEMORY;
    *out = c->out = address;
    return OK;
}

static bool overlaps(const struct block *b, u64 address, u64 bytes) {
    return b->address < address + bytes && address < b->address + b->bytes;
}

static bool mapped_in(u64 address, u64 bytes) {
    for (struct mapping *m = mappings; m; m = m->next)
        if (overlaps(m->at, address, bytes)) return true;
    return false;
}

int vmm_address_free(struct call *c, u64 address, u64 bytes) {
    (void)c;
    memory_lock();
    struct block *b = block_find(address, BIT(RESERVED));
    bool good = b && b->bytes == bytes && !mapped_in(address, bytes);
    if (good) block_drop(b);
    memory_unlock();
    return good ? OK : INVALID_VALUE;
}

/* Physical memory is of a device, not of a context. */
static struct ctx places[MAX_DEVICES];

int vmm_create(struct call *c, u64 *out, u64 bytes, void *prop, u64 flags) {
    if (!prop || !bytes || bytes % GRANULARITY || flags) return INVALID_VALUE;
    i32 device = device_of(prop);
    if (device < 0 || (u64)device >= config.devices) return INVALID_DEVICE;
    if (!ledger_take((u32)device, bytes)) return OUT_OF_MEMORY;
    memory_lock();
    places[device].device = (u32)device;
    *out = c->out = next_handle++;
    block_add(PHYSICAL, *out, bytes, &places[device]);
    memory_unlock();
    return OK;
}

static void let_go(struct block *physical) {
    if (--physical->users == 0) block_drop(physical);
}

/* The memory behind a handle that has not been released; NULL: there is no such handle. */
static struct block *handle_find(u64 handle) {
    struct block *b = block_find(handle, BIT(PHYSICAL));
    u32 mapped = 0;
    for (struct mapping *m = mappings; b && m; m = m->next) mapped += m->physical == b;
    return b && b->users > mapped ? b : NULL;
}

int vmm_release(struct call *c, u64 handle) {
    (void)c;
    memory_lock();
    struct block *b = handle_find(handle);
    if (b) let_go(b);
    memory_unlock();
    return b ? OK : INVALID_VALUE;
}

static bool reserved(u64 address, u64 bytes) {
    for (struct block *b = block_first(RESERVED); b; b = b->next_of_kind)
        if (address >= b->address && address - b->address <= b->bytes &&
            bytes <= b->bytes - (address - b->address))
            return true;
    return false;
}

int vmm_map(struct call *c, u64 address, u64 bytes, u64 offset, u64 handle, u64 flags) {
    if (!bytes || bytes % GRANULARITY || address % GRANULARITY || offset || flags)
        return INVALID_VALUE;
    memory_lock();
    struct block *physical = handle_find(handle);
    bool good = physical && bytes <= physical->bytes && reserved(address, bytes) &&
                !mapped_in(address, bytes);
    if (good) {
        struct mapping *m = malloc(sizeof *m);
        if (!m) abort();
        *m = (struct mapping){block_add(MAPPED, address, bytes, NULL), physical, mappings};
        mappings = m;
        physical->users++;
        c->out = address;
    }
    memory_unlock();
    return good ? OK : INVALID_VALUE;
}

/* Takes whole mappings only, and all that lie in the range. */
int vmm_unmap(struct call *c, u64 address, u64 bytes) {
    (void)c;
    u64 covered = 0;
    memory_lock();
    for (struct mapping *m = mappings; m; m = m->next)
        if (m->at->address >= address && m->at->address + m->at->bytes <= address + bytes)
            covered += m->at->bytes;
    bool good = bytes && covered == bytes;
    for (struct mapping **p = &mappings, *m; good && (m = *p);) {
        if (!overlaps(m->at, address, bytes)) {
            p = &m->next;
            continue;
        }
        *p = m->next;
        block_drop(m->at);
        let_go(m->physical);
        free(m);
    }
    memory_unlock();
    return good ? OK : INVALID_VALUE;
}

int vmm_retain(struct call *c, u64 *out, u64 address) {
    int r = INVALID_VALUE;
    memory_lock();
    for (struct mapping *m = mappings; m && r; m = m->next)
        if (address >= m->at->address && address - m->at->address < m->at->bytes) {
            m->physical->users++;
            *out = c->out = m->physical->address;
            r = OK;
        }
    memory_unlock();
    return r;
}

int mem_access(struct call *c, u64 address, u64 bytes, void *desc, u64 count) {
    (void)c;
    if (!desc || !count) return INVALID_VALUE;
    memory_lock();
    bool good = bytes && mapped_in(address, bytes);
    memory_unlock();
    return good ? OK : INVALID_VALUE;
}

void vmm_forked(void) { mappings = NULL; }
