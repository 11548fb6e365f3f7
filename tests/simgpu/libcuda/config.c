/* SPDX-License-Identifier: Apache-2.0
 * The scenario: "key=value" lines of the file that SIMGPU_CONFIG names (tests/simgpu/scenario.py
 * writes it).  SIMGPU_TRUTH is the folder for truth files. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "sim.h"

struct config config = {
    .devices = 1, .memory = 80ULL << 30, .driver_version = 13000, .kernels_at_once = 16,
    .h2d_bytes_per_s = 25000000000, .d2h_bytes_per_s = 25000000000,
    .d2d_bytes_per_s = 1500000000000, .copy_ns = 5000, .kernel_ns = 10000,
    .module_load_ns = 500000, .graph_node_ns = 2000, .events = 1 << 18, .log_launches = 1,
    .name = "Simulated GPU",
};

enum { MAX_KERNELS = 64, MAX_FAILURES = 64 };
static struct { char name[96]; u64 ns, ns_per_block; } kernels[MAX_KERNELS];
static struct { u32 symbol; u64 first, times; int result; } failures[MAX_FAILURES];
static u32 kernel_count, failure_count;
static u64 failing[MAX_SYMBOLS / 64]; /* bit set: the symbol has failures */

static void bad(const char *line) {
    fprintf(stderr, "simgpu: SIMGPU_CONFIG has a line that is not understood: %s\n", line);
    exit(2);
}

static void failure(const char *symbol, const char *value, const char *line) {
    unsigned long long first, times;
    int result;
    if (failure_count == MAX_FAILURES || sscanf(value, "%llu:%llu:%d", &first, &times, &result) != 3)
        bad(line);
    for (u32 i = 0; i < symbol_count; i++)
        if (!strcmp(symbols[i].name, symbol)) {
            failures[failure_count].symbol = i;
            failures[failure_count].first = first;
            failures[failure_count].times = times;
            failures[failure_count++].result = result;
            failing[i / 64] |= 1ULL << (i % 64);
            return;
        }
    bad(line);
}

static void kernel(const char *name, const char *value, const char *line) {
    unsigned long long ns, each;
    if (kernel_count == MAX_KERNELS || sscanf(value, "%llu:%llu", &ns, &each) != 2 ||
        strlen(name) >= sizeof kernels[0].name)
        bad(line);
    strcpy(kernels[kernel_count].name, name);
    kernels[kernel_count].ns = ns;
    kernels[kernel_count++].ns_per_block = each;
}

static void setting(char *line) {
    static const struct { const char *key; u64 *value; } numbers[] = {
        {"devices", &config.devices}, {"memory", &config.memory},
        {"driver_version", &config.driver_version}, {"kernels_at_once", &config.kernels_at_once},
        {"h2d_bytes_per_s", &config.h2d_bytes_per_s}, {"d2h_bytes_per_s", &config.d2h_bytes_per_s},
        {"d2d_bytes_per_s", &config.d2d_bytes_per_s}, {"copy_ns", &config.copy_ns},
        {"kernel_ns", &config.kernel_ns}, {"module_load_ns", &config.module_load_ns},
        {"graph_node_ns", &config.graph_node_ns}, {"events", &config.events},
        {"log_launches", &config.log_launches}, {"nested", &config.nested},
    };
    char whole[256], *end;
    snprintf(whole, sizeof whole, "%s", line);
    char *value = strchr(line, '=');
    if (!value) bad(whole);
    *value++ = 0;
    if (!strncmp(line, "fail.", 5)) { failure(line + 5, value, whole); return; }
    if (!strncmp(line, "kernel.", 7)) { kernel(line + 7, value, whole); return; }
    if (!strcmp(line, "name") && strlen(value) < sizeof config.name) {
        strcpy(config.name, value);
        return;
    }
    for (u32 i = 0; i < sizeof numbers / sizeof *numbers; i++)
        if (!strcmp(line, numbers[i].key)) {
            *numbers[i].value = strtoull(value, &end, 10);
            if (*value && !*end) return;
        }
    bad(whole);
}

static void load(void) {
    const char *path = getenv("SIMGPU_CONFIG"), *truth = getenv("SIMGPU_TRUTH");
    snprintf(config.truth, sizeof config.truth, "%s", truth ? truth : "");
    FILE *f = path && *path ? fopen(path, "re") : NULL;
    if (path && *path && !f) { perror("simgpu: SIMGPU_CONFIG"); exit(2); }
    char line[256];
    while (f && fgets(line, sizeof line, f)) {
        line[strcspn(line, "\n")] = 0;
        if (*line) setting(line);
    }
    if (f) fclose(f);
    if (config.devices > MAX_DEVICES || !config.kernels_at_once || config.kernels_at_once > 128 ||
        !config.h2d_bytes_per_s || !config.d2h_bytes_per_s || !config.d2d_bytes_per_s)
        bad("a number is out of range");
}

void config_load(void) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, load);
}

void config_kernel(const char *name, u64 *ns, u64 *ns_per_block) {
    *ns = config.kernel_ns;
    *ns_per_block = 0;
    for (u32 i = 0; i < kernel_count; i++)
        if (!strcmp(kernels[i].name, name)) {
            *ns = kernels[i].ns;
            *ns_per_block = kernels[i].ns_per_block;
        }
}

int config_failure(u32 symbol, u64 nth) {
    if (!(failing[symbol / 64] >> (symbol % 64) & 1)) return OK;
    for (u32 i = 0; i < failure_count; i++)
        if (failures[i].symbol == symbol && nth - failures[i].first < failures[i].times &&
            nth >= failures[i].first)
            return failures[i].result;
    return OK;
}
