/* SPDX-License-Identifier: Apache-2.0
 * What the C workloads share: options "key=value", the driver by dlopen, the gate. */
#pragma once
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

typedef uint32_t u32;
typedef uint64_t u64;

struct option { const char *key; u64 value; };

__attribute__((unused)) static u64 option(const struct option *options, const char *key) {
    for (; options->key; options++)
        if (!strcmp(options->key, key)) return options->value;
    abort();
}

/* Take the command line into `options`, which ends with a NULL key. */
__attribute__((unused)) static void read_options(int argc, char **argv, struct option *options) {
    for (int i = 1; i < argc; i++) {
        char *value = strchr(argv[i], '='), *end = NULL;
        struct option *o = options;
        if (value) *value++ = 0;
        while (o->key && strcmp(o->key, argv[i])) o++;
        if (value && o->key) o->value = strtoull(value, &end, 10);
        if (!end || end == value || *end) {
            fprintf(stderr, "%s: no such option, or no number: %s\n", argv[0], argv[i]);
            exit(2);
        }
    }
}

__attribute__((unused)) static void *symbol(const char *name) {
    static void *library;
    if (!library) library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
    void *found = library ? dlsym(library, name) : NULL;
    if (!found) {
        fprintf(stderr, "%s\n", dlerror());
        exit(1);
    }
    return found;
}

__attribute__((unused)) static void must(int result, const char *what) {
    if (!result) return;
    fprintf(stderr, "%s returned %d\n", what, result);
    exit(1);
}

__attribute__((unused)) static double seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

/* Initialise the driver and take the primary context of device 0. */
__attribute__((unused)) static void *driver_start(void) {
    void *ctx;
    must(((int (*)(u32))symbol("cuInit"))(0), "cuInit");
    must(((int (*)(void **, int))symbol("cuDevicePrimaryCtxRetain"))(&ctx, 0),
         "cuDevicePrimaryCtxRetain");
    must(((int (*)(void *))symbol("cuCtxSetCurrent"))(ctx), "cuCtxSetCurrent");
    return ctx;
}

/* Say `word` and go on when a line comes on stdin, or its end. */
__attribute__((unused)) static void gate(const struct option *options, const char *word) {
    char line[64];
    if (!option(options, "gate")) return;
    puts(word);
    fflush(stdout);
    if (!fgets(line, sizeof line, stdin)) return;
}
