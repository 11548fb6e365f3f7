/* SPDX-License-Identifier: Apache-2.0
 * Launches kernels from `threads` threads, `count` each, `rate` a second each (0: flat out), on
 * `streams` streams of its own each (0: the default stream), synchronising every `sync` launches. */
#include "common.h"

static struct option options[] = {
    {"threads", 1}, {"count", 1000}, {"rate", 0}, {"streams", 1}, {"sync", 0}, {"kernels", 7},
    {"gate", 0}, {NULL, 0},
};
static void *ctx, *functions[64];
static pthread_barrier_t start;

static int (*set_current)(void *), (*stream_create)(void **, u32), (*stream_sync)(void *);
static int (*launch)(void *, u32, u32, u32, u32, u32, u32, u32, void *, void **, void **);

static void *work(void *arg) {
    (void)arg;
    u64 count = option(options, "count"), rate = option(options, "rate");
    u64 streams = option(options, "streams"), sync = option(options, "sync");
    u64 kernels = option(options, "kernels");
    void *own[64] = {NULL};
    must(set_current(ctx), "cuCtxSetCurrent");
    for (u64 i = 0; i < streams; i++) must(stream_create(&own[i], 1), "cuStreamCreate");
    pthread_barrier_wait(&start);
    double begin = seconds();
    for (u64 i = 0; i < count; i++) {
        if (rate) {
            double due = begin + (double)i / (double)rate;
            while (seconds() < due) {
                double left = due - seconds();
                struct timespec t = {(time_t)left, (long)((left - (double)(time_t)left) * 1e9)};
                if (left > 1e-4) nanosleep(&t, NULL);
            }
        }
        void *stream = streams ? own[i % streams] : NULL;
        int r = launch(functions[i % kernels], 1 + (u32)i % 5, 2, 3, 32, 2, 1, 64, stream, NULL, NULL);
        must(r, "cuLaunchKernel");
        if (sync && i % sync == sync - 1) must(stream_sync(stream), "cuStreamSynchronize");
    }
    return NULL;
}

int main(int argc, char **argv) {
    pthread_t threads[64];
    read_options(argc, argv, options);
    u64 n = option(options, "threads"), kernels = option(options, "kernels");
    if (!n || n > 64 || option(options, "streams") > 64 || !kernels || kernels > 64) return 2;
    gate(options, "begun"); /* the library is not loaded yet */
    ctx = driver_start();
    set_current = symbol("cuCtxSetCurrent");
    stream_create = symbol("cuStreamCreate");
    stream_sync = symbol("cuStreamSynchronize");
    launch = symbol("cuLaunchKernel");
    int (*load)(void **, const void *) = symbol("cuModuleLoadData");
    int (*get)(void **, void *, const char *) = symbol("cuModuleGetFunction");
    void *module;
    must(load(&module, "image"), "cuModuleLoadData");
    for (u64 i = 0; i < kernels; i++) {
        char name[32];
        snprintf(name, sizeof name, "kernel_%u", (u32)i);
        must(get(&functions[i], module, name), "cuModuleGetFunction");
    }
    pthread_barrier_init(&start, NULL, (u32)n + 1);
    gate(options, "ready");
    for (u64 i = 0; i < n; i++) pthread_create(&threads[i], NULL, work, NULL);
    pthread_barrier_wait(&start);
    double begin = seconds();
    for (u64 i = 0; i < n; i++) pthread_join(threads[i], NULL);
    double took = seconds() - begin, launches = (double)(n * option(options, "count"));
    printf("{\"launches\": %.0f, \"seconds\": %.6f, \"per_second\": %.0f}\n", launches, took,
           launches / took);
    fflush(stdout);
    gate(options, "done");
    return 0;
}
