/* SPDX-License-Identifier: Apache-2.0
 * Forks `children` processes that each make `count` allocations and launches, free all but `keep`,
 * and exit; every `kill`th ends by SIGKILL instead (0: none), every `exec`th is this program
 * executed anew (0: none).  The parent does not touch the driver, as CUDA does not survive fork. */
#include <signal.h>
#include <sys/wait.h>

#include "common.h"

static struct option options[] = {
    {"children", 4}, {"count", 100}, {"keep", 3}, {"kill", 0}, {"exec", 0}, {"gate", 0},
    {"alone", 0}, {NULL, 0}, /* alone: be the child */
};

static void child(void) {
    u64 count = option(options, "count"), keep = option(options, "keep");
    driver_start();
    int (*alloc)(u64 *, u64) = symbol("cuMemAlloc_v2"), (*release)(u64) = symbol("cuMemFree_v2");
    int (*launch)(void *, u32, u32, u32, u32, u32, u32, u32, void *, void **, void **) =
        symbol("cuLaunchKernel");
    int (*load)(void **, const void *) = symbol("cuModuleLoadData");
    int (*get)(void **, void *, const char *) = symbol("cuModuleGetFunction");
    void *module, *f;
    must(load(&module, "image"), "cuModuleLoadData");
    must(get(&f, module, "child"), "cuModuleGetFunction");
    for (u64 i = 0; i < count; i++) {
        u64 p;
        must(alloc(&p, 4096 + i), "cuMemAlloc_v2");
        must(launch(f, 1, 1, 1, 32, 1, 1, 0, NULL, NULL, NULL), "cuLaunchKernel");
        if (i >= keep) must(release(p), "cuMemFree_v2");
    }
}

static void begin(u64 number, const char *self) {
    u64 every_kill = option(options, "kill"), every_exec = option(options, "exec");
    if (every_exec && number % every_exec == 0) {
        char count[40], keep[40];
        snprintf(count, sizeof count, "count=%llu", (unsigned long long)option(options, "count"));
        snprintf(keep, sizeof keep, "keep=%llu", (unsigned long long)option(options, "keep"));
        execl("/proc/self/exe", self, "alone=1", count, keep, NULL);
        must(errno, "execl");
    }
    child();
    if (every_kill && number % every_kill == 0) raise(SIGKILL);
    _exit(0);
}

int main(int argc, char **argv) {
    read_options(argc, argv, options);
    if (option(options, "alone")) {
        child();
        return 0;
    }
    gate(options, "ready");
    u64 n = option(options, "children"), bad = 0;
    for (u64 i = 1; i <= n; i++)
        if (fork() == 0) begin(i, argv[0]);
    for (int status; wait(&status) > 0;)
        bad += !(WIFEXITED(status) && !WEXITSTATUS(status)) &&
               !(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL && option(options, "kill"));
    printf("{\"children\": %llu, \"failed\": %llu}\n", (unsigned long long)n, (unsigned long long)bad);
    fflush(stdout);
    gate(options, "done");
    return bad != 0;
}
