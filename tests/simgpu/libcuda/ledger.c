/* SPDX-License-Identifier: Apache-2.0
 * Memory in use on each device, over all processes that share a truth folder.
 *
 * Each process owns a slot of a shared file and a lock on the slot's byte.  The kernel drops the
 * lock when the process ends, however it ends: the slot of a dead process is free and counts for
 * nothing.  Open-file-description locks (fcntl(2)), so that no other close() in the process ends
 * them. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include "sim.h"

enum { SLOTS = 512 };
struct ledger { _Atomic u64 live[SLOTS][MAX_DEVICES]; };

static struct ledger *ledger;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int fd = -1, mine = -1;

static bool slot_lock(int slot, short type) {
    struct flock l = {.l_type = type, .l_whence = SEEK_SET, .l_start = slot, .l_len = 1};
    return fcntl(fd, F_OFD_SETLK, &l) == 0;
}

static void clear(int slot) {
    for (u32 d = 0; d < MAX_DEVICES; d++) atomic_store(&ledger->live[slot][d], 0);
}

static void ledger_open(void) {
    char path[640];
    config_load();
    if (config.truth[0]) {
        snprintf(path, sizeof path, "%s/ledger", config.truth);
        fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0666);
        if (fd >= 0 && ftruncate(fd, sizeof *ledger)) { close(fd); fd = -1; }
        if (fd < 0) perror("simgpu: ledger");
    }
    ledger = mmap(NULL, sizeof *ledger, PROT_READ | PROT_WRITE,
                  fd < 0 ? MAP_PRIVATE | MAP_ANONYMOUS : MAP_SHARED, fd, 0);
    if (ledger == MAP_FAILED) { perror("simgpu: ledger"); _exit(70); }
    mine = 0;
    while (fd >= 0 && !slot_lock(mine, F_WRLCK))
        if (++mine == SLOTS) { fprintf(stderr, "simgpu: more than %d processes\n", SLOTS); _exit(70); }
    clear(mine);
}

static void ready(void) {
    pthread_mutex_lock(&lock);
    if (!ledger) ledger_open();
    pthread_mutex_unlock(&lock);
}

static void reap(void) {
    for (int i = 0; fd >= 0 && i < SLOTS; i++) {
        bool used = false;
        for (u32 d = 0; d < MAX_DEVICES; d++) used |= atomic_load(&ledger->live[i][d]) != 0;
        if (!used || i == mine || !slot_lock(i, F_WRLCK)) continue;
        clear(i);
        slot_lock(i, F_UNLCK);
    }
}

static u64 sum(u32 device) {
    u64 total = 0;
    for (u32 i = 0; i < SLOTS; i++) total += atomic_load(&ledger->live[i][device]);
    return total;
}

bool ledger_take(u32 device, u64 bytes) {
    ready();
    if (bytes > config.memory) return false;
    /* Claimed before it is checked: two processes may both be refused, never both be served. */
    atomic_fetch_add(&ledger->live[mine][device], bytes);
    if (sum(device) <= config.memory) return true;
    reap();
    if (sum(device) <= config.memory) return true;
    atomic_fetch_sub(&ledger->live[mine][device], bytes);
    return false;
}

void ledger_give(u32 device, u64 bytes) { atomic_fetch_sub(&ledger->live[mine][device], bytes); }

u64 ledger_used(u32 device) {
    ready();
    reap();
    u64 used = sum(device);
    return used < config.memory ? used : config.memory;
}

void ledger_forked(void) {
    if (ledger) munmap(ledger, sizeof *ledger);
    if (fd >= 0) close(fd); /* the parent's lock lives on with its own descriptor */
    ledger = NULL;
    fd = mine = -1;
    lock = MUTEX_NEW;
}
