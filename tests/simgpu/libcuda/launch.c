/* SPDX-License-Identifier: Apache-2.0
 * Modules, libraries, kernels and their launches.  Any name is a kernel, but one that begins with
 * "missing"; its duration is the scenario's. */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "api.h"

enum { MAX_KERNELS = 8192, MAX_MODULES = 1024 };

/* A CUfunction, or a CUkernel, of which the CUfunction is another. */
struct kernel {
    char *name; /* NULL: free */
    void *module;
    bool of_library;
    u64 ns, ns_per_block;
};
struct module { bool live, library; };

static struct kernel kernels[MAX_KERNELS];
static struct module modules[MAX_MODULES];
static u32 kernel_end;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static bool module_ok(const struct module *m, bool library) {
    return m >= modules && m < modules + MAX_MODULES && m->live && m->library == library;
}

static int load(struct call *c, void **out, const void *image, bool library) {
    if (!ctx_current() && !library) return INVALID_CONTEXT;
    if (!image) return INVALID_VALUE;
    wait_until(now_ns() + config.module_load_ns);
    int r = OUT_OF_MEMORY;
    pthread_mutex_lock(&lock);
    for (u32 i = 0; i < MAX_MODULES && r; i++)
        if (!modules[i].live) {
            modules[i] = (struct module){true, library};
            *out = &modules[i];
            c->out = (u64)(uintptr_t)*out;
            r = OK;
        }
    pthread_mutex_unlock(&lock);
    return r;
}

static int unload(struct module *m, bool library) {
    if (!module_ok(m, library)) return INVALID_HANDLE;
    pthread_mutex_lock(&lock);
    for (u32 i = 0; i < kernel_end; i++)
        if (kernels[i].module == m) {
            free(kernels[i].name);
            kernels[i] = (struct kernel){0};
        }
    m->live = false;
    pthread_mutex_unlock(&lock);
    return OK;
}

/* The one kernel of that name in the module, made when first asked for. */
static int find(struct call *c, void **out, void *module, const char *name, bool of_library) {
    if (!name) return INVALID_VALUE;
    if (!*name || !strncmp(name, "missing", 7)) return NOT_FOUND;
    struct kernel *k = NULL, *unused = NULL;
    pthread_mutex_lock(&lock);
    for (u32 i = 0; i < kernel_end && !k; i++) {
        struct kernel *x = &kernels[i];
        if (x->name && x->module == module && x->of_library == of_library && !strcmp(x->name, name))
            k = x;
        else if (!x->name && !unused) unused = x;
    }
    if (!k && !unused && kernel_end < MAX_KERNELS) unused = &kernels[kernel_end++];
    if (!k && unused) {
        k = unused;
        *k = (struct kernel){.name = strdup(name), .module = module, .of_library = of_library};
        config_kernel(name, &k->ns, &k->ns_per_block);
    }
    pthread_mutex_unlock(&lock);
    if (!k) return OUT_OF_MEMORY;
    *out = k;
    c->out = (u64)(uintptr_t)k;
    return OK;
}

static struct kernel *kernel_of(void *handle) {
    struct kernel *k = handle;
    bool inside = k >= kernels && k < kernels + MAX_KERNELS &&
                  ((uintptr_t)k - (uintptr_t)kernels) % sizeof *k == 0;
    return inside && k->name ? k : NULL;
}

int module_load(struct call *c, void **out, const void *image) { return load(c, out, image, false); }

int module_load_ex(struct call *c, void **out, const void *image, u32 count, void *options,
                   void **values) {
    (void)count, (void)options, (void)values;
    return load(c, out, image, false);
}

int module_load_file(struct call *c, void **out, const char *path) {
    return load(c, out, path, false);
}

int module_load_fat(struct call *c, void **out, const void *image) {
    return load(c, out, image, false);
}

int library_load(struct call *c, void **out, const void *code, void *jit, void **jit_values,
                 u32 jit_count, void *options, void **values, u32 count) {
    (void)jit, (void)jit_values, (void)jit_count, (void)options, (void)values, (void)count;
    return load(c, out, code, true);
}

int module_unload(struct call *c, void *module) {
    (void)c;
    return unload(module, false);
}

int library_unload(struct call *c, void *library) {
    (void)c;
    return unload(library, true);
}

int module_function(struct call *c, void **out, void *module, const char *name) {
    return module_ok(module, false) ? find(c, out, module, name, false) : INVALID_HANDLE;
}

int library_kernel(struct call *c, void **out, void *library, const char *name) {
    return module_ok(library, true) ? find(c, out, library, name, true) : INVALID_HANDLE;
}

int kernel_function(struct call *c, void **out, void *kernel) {
    struct kernel *k = kernel_of(kernel);
    if (!k || !k->of_library) return INVALID_HANDLE;
    return find(c, out, k->module, k->name, false);
}

static int name_of(void *handle, const char **out) {
    struct kernel *k = kernel_of(handle);
    *out = k ? k->name : NULL;
    return k ? OK : INVALID_HANDLE;
}

int kernel_name(struct call *c, const char **out, void *kernel) {
    (void)c;
    return name_of(kernel, out);
}

int function_name(struct call *c, const char **out, void *function) {
    (void)c;
    return name_of(function, out);
}

int kernel_duration(void *function, u64 blocks, u64 *ns) {
    struct kernel *k = kernel_of(function); /* a CUkernel may be launched, too (cuda.h) */
    if (!k) return INVALID_HANDLE;
    *ns = k->ns + k->ns_per_block * blocks;
    return OK;
}

int launch(struct call *c, void *f, u32 gx, u32 gy, u32 gz, u32 bx, u32 by, u32 bz, u32 shared,
           void *stream, void **params, void **extra) {
    (void)params, (void)extra;
    struct stream *s;
    u64 ns, blocks = (u64)gx * gy * gz, threads = (u64)bx * by * bz;
    int r = stream_of(c, stream, &s);
    if (!r) r = kernel_duration(f, blocks, &ns);
    if (!r && (!blocks || !threads || threads > 1024 || shared > 232448)) r = INVALID_VALUE;
    return r ? r : stream_submit(c, s, COMPUTE, ns);
}

int launch_cooperative(struct call *c, void *f, u32 gx, u32 gy, u32 gz, u32 bx, u32 by, u32 bz,
                       u32 shared, void *stream, void **params) {
    return launch(c, f, gx, gy, gz, bx, by, bz, shared, stream, params, NULL);
}

int launch_ex(struct call *c, const struct launch_config *x, void *f, void **params, void **extra) {
    if (!x) return INVALID_VALUE;
    return launch(c, f, x->gx, x->gy, x->gz, x->bx, x->by, x->bz, x->shared, x->stream, params, extra);
}

void launch_forked(void) { lock = MUTEX_NEW; }
