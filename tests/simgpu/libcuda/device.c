/* SPDX-License-Identifier: Apache-2.0
 * Devices, contexts, initialisation, injection, and the look-up of entry points. */
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "api.h"

enum { MAX_CTX = 64, STACK = 16 };

_Atomic bool driver_ready, driver_forked;
static struct ctx contexts[MAX_CTX];
static struct ctx *primary[MAX_DEVICES];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static __thread struct ctx *stack[STACK];
static __thread u32 top; /* contexts on this thread's stack */

static bool device_ok(i32 device) { return device >= 0 && (u64)device < config.devices; }

/* The driver loads the library that CUDA_INJECTION64_PATH names and calls its entry point. */
static void inject(void) {
    const char *path = getenv("CUDA_INJECTION64_PATH");
    if (!path || !*path) return;
    void *library = dlopen(path, RTLD_NOW);
    int (*start)(void) = NULL;
    if (library) *(void **)&start = dlsym(library, "InitializeInjection");
    if (start) start();
    else fprintf(stderr, "simgpu: CUDA_INJECTION64_PATH: %s\n", dlerror());
}

int init(struct call *c, u32 flags) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    (void)c;
    if (flags) return INVALID_VALUE;
    if (driver_forked) return NOT_INITIALIZED;
    atomic_store(&driver_ready, true);
    pthread_once(&once, inject);
    return OK;
}

int driver_version(struct call *c, i32 *out) {
    (void)c;
    *out = (i32)config.driver_version;
    return OK;
}

static const struct { int code; const char *name, *text; } errors[] = {
    {OK, "CUDA_SUCCESS", "no error"},
    {INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {NOT_FOUND, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {NOT_READY, "CUDA_ERROR_NOT_READY", "device not ready"},
    {700, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"},
    {CAPTURE_UNSUPPORTED, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED",
     "operation not permitted when stream is capturing"},
    {UNKNOWN, "CUDA_ERROR_UNKNOWN", "unknown error"},
};

static int error_words(i32 error, const char **out, bool name) {
    for (u32 i = 0; i < sizeof errors / sizeof *errors; i++)
        if (errors[i].code == error) {
            *out = name ? errors[i].name : errors[i].text;
            return OK;
        }
    *out = NULL;
    return INVALID_VALUE;
}

int error_name(struct call *c, i32 error, const char **out) {
    (void)c;
    return error_words(error, out, true);
}

int error_string(struct call *c, i32 error, const char **out) {
    (void)c;
    return error_words(error, out, false);
}

/* --- entry points by plain name -------------------------------------------------------------- */

enum { PER_THREAD = 2 }; /* CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM */

/* The symbol without _v2 and the like, _ptsz and _ptds: what cuGetProcAddress is asked for. */
static size_t plain_length(const char *name, bool *per_thread, int *revision) {
    size_t n = strlen(name);
    *per_thread = n > 5 && (!strcmp(name + n - 5, "_ptsz") || !strcmp(name + n - 5, "_ptds"));
    if (*per_thread) n -= 5;
    *revision = 1;
    if (n > 3 && name[n - 3] == '_' && name[n - 2] == 'v' && name[n - 1] >= '2' && name[n - 1] <= '9') {
        *revision = name[n - 1] - '0';
        n -= 3;
    }
    return n;
}

int proc_address(struct call *c, const char *name, void **out, i32 version, u64 flags) {
    (void)c;
    if (!name) return INVALID_VALUE;
    *out = NULL;
    /* cuda.h: the plain name stands for the one with flags since 12.0 */
    if (version >= 12000 && !strcmp(name, "cuGraphInstantiate")) name = "cuGraphInstantiateWithFlags";
    bool wanted = (flags & PER_THREAD) != 0, found_per_thread = false;
    int found = 0;
    for (u32 i = 0; i < symbol_count; i++) {
        bool per_thread;
        int revision;
        size_t n = plain_length(symbols[i].name, &per_thread, &revision);
        if (strlen(name) != n || strncmp(symbols[i].name, name, n)) continue;
        if ((i32)symbols[i].since > version || (per_thread && !wanted)) continue;
        if (per_thread < found_per_thread || (per_thread == found_per_thread && revision <= found))
            continue;
        *out = symbols[i].address;
        found = revision;
        found_per_thread = per_thread;
    }
    return *out ? OK : NOT_FOUND;
}

int proc_address_status(struct call *c, const char *name, void **out, i32 version, u64 flags,
                        i32 *status) {
    int r = proc_address(c, name, out, version, flags);
    if (status) *status = r == NOT_FOUND; /* CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND */
    return r;
}

/* --- devices ---------------------------------------------------------------------------------- */

int device_get(struct call *c, i32 *out, i32 ordinal) {
    (void)c;
    if (!device_ok(ordinal)) return INVALID_DEVICE;
    *out = ordinal;
    return OK;
}

int device_count(struct call *c, i32 *out) {
    (void)c;
    *out = (i32)config.devices;
    return OK;
}

int device_name(struct call *c, char *out, i32 size, i32 device) {
    (void)c;
    if (!device_ok(device)) return INVALID_DEVICE;
    if (size <= 0) return INVALID_VALUE;
    snprintf(out, (size_t)size, "%s", config.name);
    return OK;
}

int device_uuid(struct call *c, u8 *out, i32 device) {
    (void)c;
    if (!device_ok(device)) return INVALID_DEVICE;
    memcpy(out, "SIMULATED-GPU-0", 16);
    out[15] = (u8)device;
    return OK;
}

int device_memory(struct call *c, u64 *out, i32 device) {
    (void)c;
    if (!device_ok(device)) return INVALID_DEVICE;
    *out = config.memory;
    return OK;
}

int device_attribute(struct call *c, i32 *out, i32 attribute, i32 device) {
    (void)c;
    if (!device_ok(device)) return INVALID_DEVICE;
    switch (attribute) { /* CUdevice_attribute */
    case 1: *out = 1024; break;   /* threads per block */
    case 16: *out = 132; break;   /* multiprocessors */
    case 75: *out = 9; break;     /* compute capability, major */
    case 76: *out = 0; break;     /* minor */
    case 41: case 102: case 115: *out = 1; break; /* unified addressing, VMM, memory pools */
    default: *out = 0;
    }
    return OK;
}

int device_pci(struct call *c, char *out, i32 size, i32 device) {
    (void)c;
    if (!device_ok(device)) return INVALID_DEVICE;
    if (size < 13) return INVALID_VALUE;
    snprintf(out, (size_t)size, "0000:%02X:00.0", (u8)(device + 1));
    return OK;
}

/* --- contexts --------------------------------------------------------------------------------- */

bool ctx_in_use(const struct ctx *ctx) {
    return ctx >= contexts && ctx < contexts + MAX_CTX && ctx->live;
}

struct ctx *ctx_current(void) {
    struct ctx *ctx = top ? stack[top - 1] : NULL;
    return ctx && ctx->live && driver_ready ? ctx : NULL;
}

static struct ctx *ctx_new(i32 device, u32 flags, bool is_primary) {
    for (u32 i = 0; i < MAX_CTX; i++)
        if (!contexts[i].live) {
            contexts[i] = (struct ctx){.live = true, .primary = is_primary, .device = (u32)device,
                                       .flags = flags};
            return &contexts[i];
        }
    return NULL;
}

/* What was allocated in a context goes with it. */
static void ctx_end(struct ctx *ctx) {
    device_join(ctx->device);
    memory_drop_ctx(ctx);
    streams_drop_ctx(ctx);
    ctx->live = false;
}

static int push(struct ctx *ctx) {
    if (top == STACK) return INVALID_VALUE;
    stack[top++] = ctx;
    return OK;
}

int ctx_create(struct call *c, void **out, u32 flags, i32 device) {
    if (!device_ok(device)) return INVALID_DEVICE;
    pthread_mutex_lock(&lock);
    struct ctx *ctx = ctx_new(device, flags, false);
    pthread_mutex_unlock(&lock);
    if (!ctx) return OUT_OF_MEMORY;
    *out = ctx;
    c->out = (u64)(uintptr_t)ctx;
    return push(ctx);
}

int ctx_create_v3(struct call *c, void **out, void *affinities, i32 count, u32 flags, i32 device) {
    (void)affinities;
    return count ? NOT_SUPPORTED : ctx_create(c, out, flags, device);
}

int ctx_create_v4(struct call *c, void **out, void *params, u32 flags, i32 device) {
    (void)params;
    return ctx_create(c, out, flags, device);
}

int ctx_destroy(struct call *c, void *ctx) {
    (void)c;
    struct ctx *x = ctx;
    if (!ctx_in_use(x) || x->primary) return INVALID_CONTEXT;
    ctx_end(x);
    if (top && stack[top - 1] == x) top--;
    return OK;
}

int ctx_push(struct call *c, void *ctx) {
    (void)c;
    return ctx_in_use(ctx) ? push(ctx) : INVALID_CONTEXT;
}

int ctx_pop(struct call *c, void **popped) {
    (void)c;
    if (!top) return INVALID_CONTEXT;
    struct ctx *ctx = stack[--top];
    if (popped) *popped = ctx;
    return OK;
}

int ctx_set(struct call *c, void *ctx) {
    (void)c;
    if (ctx && !ctx_in_use(ctx)) return INVALID_CONTEXT;
    if (top) top--;
    return ctx ? push(ctx) : OK;
}

int ctx_get(struct call *c, void **out) {
    (void)c;
    *out = ctx_current();
    return OK;
}

int ctx_device(struct call *c, i32 *out) {
    (void)c;
    struct ctx *ctx = ctx_current();
    if (!ctx) return INVALID_CONTEXT;
    *out = (i32)ctx->device;
    return OK;
}

int primary_retain(struct call *c, void **out, i32 device) {
    if (!device_ok(device)) return INVALID_DEVICE;
    pthread_mutex_lock(&lock);
    if (!primary[device]) primary[device] = ctx_new(device, 0, true);
    struct ctx *ctx = primary[device];
    if (ctx) ctx->users++;
    pthread_mutex_unlock(&lock);
    if (!ctx) return OUT_OF_MEMORY;
    *out = ctx;
    c->out = (u64)(uintptr_t)ctx;
    return OK;
}

static int primary_drop(i32 device, bool all) {
    if (!device_ok(device)) return INVALID_DEVICE;
    pthread_mutex_lock(&lock);
    struct ctx *ctx = primary[device];
    bool last = ctx && (all || ctx->users == 1);
    if (ctx && !last) ctx->users--;
    if (last) primary[device] = NULL;
    pthread_mutex_unlock(&lock);
    if (last) ctx_end(ctx);
    return ctx || all ? OK : INVALID_CONTEXT;
}

int primary_release(struct call *c, i32 device) {
    (void)c;
    return primary_drop(device, false);
}

int primary_reset(struct call *c, i32 device) {
    (void)c;
    return primary_drop(device, true);
}

int primary_state(struct call *c, i32 device, u32 *flags, i32 *active) {
    (void)c;
    if (!device_ok(device)) return INVALID_DEVICE;
    if (!flags || !active) return INVALID_VALUE;
    *flags = 0;
    *active = primary[device] != NULL;
    return OK;
}

int ctx_sync(struct call *c) {
    (void)c;
    struct ctx *ctx = ctx_current();
    if (!ctx) return INVALID_CONTEXT;
    device_join(ctx->device);
    return OK;
}
