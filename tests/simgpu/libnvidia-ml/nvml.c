/* A stand-in for libnvidia-ml.so.1: simulated GPUs for tests, which say so in their names.
 *
 * All values come from the text file $SIMNVML_STATE, read again at each call, so that a test can
 * change them while dsprobe runs.  Lines are key=value; of a device 0.key=value, of a MIG device
 * 0.mig1.key=value (of device 0, in place 1).  tests/simgpu/nvml.py lists the keys.  Layouts are
 * those of nvidia-ml-py's ctypes structures.
 */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define API __attribute__((visibility("default")))

typedef unsigned u32;
typedef unsigned long long u64;
typedef int R;

enum { OK, UNINITIALIZED, INVALID, NOT_SUPPORTED, NO_PERMISSION, NOT_FOUND = 6, NO_SIZE = 7,
       NOT_LOADED = 9, TIMEOUT = 10, LOST = 15, MISMATCH = 18, BAD_VERSION = 25 };
enum { GPUS = 8, PARTS = 7, LISTED = 32 };

typedef struct device { u32 gpu; int part; } *dev;  /* part -1: the whole device */
static struct device devices[GPUS * (PARTS + 1)];
static int inits;

static dev at(u32 gpu, int part) {
    dev d = &devices[gpu * (PARTS + 1) + (u32)(part + 1)];
    d->gpu = gpu;
    d->part = part;
    return d;
}

/* -- the file ---------------------------------------------------------------------------------- */

static int find(const char *key, char *out, size_t size) {
    const char *path = getenv("SIMNVML_STATE");
    FILE *f = path ? fopen(path, "r") : NULL;
    char line[1024];
    size_t n = strlen(key);
    int found = 0;
    if (!f) return 0;
    while (!found && fgets(line, sizeof line, f))
        if (!strncmp(line, key, n) && line[n] == '=') {
            line[strcspn(line, "\n")] = 0;
            snprintf(out, size, "%s", line + n + 1);
            found = 1;
        }
    fclose(f);
    return found;
}

static int of_device(dev d, const char *key, char *out, size_t size) {
    char name[64];
    if (d->part < 0) snprintf(name, sizeof name, "%u.%s", d->gpu, key);
    else snprintf(name, sizeof name, "%u.mig%d.%s", d->gpu, d->part, key);
    return find(name, out, size);
}

static u64 global(const char *key, u64 otherwise) {
    char s[64];
    return find(key, s, sizeof s) ? strtoull(s, NULL, 0) : otherwise;
}

static double number(dev d, const char *key, double otherwise) {
    char s[64];
    return of_device(d, key, s, sizeof s) ? strtod(s, NULL) : otherwise;
}

static u32 count(void) {
    u64 n = global("gpus", 1);
    return n > GPUS ? GPUS : (u32)n;
}

static u32 parts(dev d) {
    double n = number(d, "mig", 0);
    return n > PARTS ? PARTS : (u32)n;
}

/* What every call does first: hang while the test says so, fail as a whole. */
static R enter(void) {
    while (global("hang", 0)) usleep(5000);
    if (global("crash", 0)) abort();
    if (global("not_loaded", 0)) return NOT_LOADED;
    return OK;
}

static R check(dev d, const char *field) {
    char s[512], *word, *rest = s;
    R r = enter();
    if (r) return r;
    if (!inits) return UNINITIALIZED;
    if (d < devices || d >= devices + GPUS * (PARTS + 1) || d->gpu >= count()) return INVALID;
    if (number(at(d->gpu, -1), "lost", 0)) return LOST;
    if (d->part >= (int)parts(at(d->gpu, -1))) return NOT_FOUND;
    if (of_device(d, "unsupported", s, sizeof s))
        while ((word = strsep(&rest, ","))) if (!strcmp(word, field)) return NOT_SUPPORTED;
    if (of_device(d, "forbidden", s, sizeof s))
        for (rest = s; (word = strsep(&rest, ","));) if (!strcmp(word, field)) return NO_PERMISSION;
    return OK;
}

#define CHECK(d, field) do { R r_ = check(d, field); if (r_) return r_; } while (0)
/* As on hardware: a MIG device tells its memory and processes only. */
#define WHOLE(d, field) do { CHECK(d, field); if ((d)->part >= 0) return NOT_SUPPORTED; } while (0)
#define U32(function, field, otherwise, factor) \
    API R function(dev d, u32 *out) { \
        WHOLE(d, field); *out = (u32)(number(d, field, otherwise) * (factor)); return OK; }

/* -- the library ------------------------------------------------------------------------------- */

API R nvmlInitWithFlags(u32 flags) {
    (void)flags;
    R r = enter();
    if (r) return r;
    if (global("mismatch", 0)) return MISMATCH;
    inits++;
    return OK;
}

API R nvmlInit_v2(void) { return nvmlInitWithFlags(0); }

API R nvmlShutdown(void) {
    if (!inits) return UNINITIALIZED;
    inits--;
    return OK;
}

API const char *nvmlErrorString(R r) {
    switch (r) {
    case OK: return "Success";
    case UNINITIALIZED: return "Uninitialized";
    case INVALID: return "Invalid Argument";
    case NOT_SUPPORTED: return "Not Supported";
    case NO_PERMISSION: return "Insufficient Permissions";
    case NOT_FOUND: return "Not Found";
    case NOT_LOADED: return "Driver Not Loaded";
    case TIMEOUT: return "Timeout";
    case LOST: return "GPU is lost";
    case MISMATCH: return "Driver/library version mismatch";
    default: return "Unknown Error";
    }
}

API R nvmlSystemGetDriverVersion(char *s, u32 n) {
    if (!find("driver", s, n)) snprintf(s, n, "0.0-simulated");
    return OK;
}

API R nvmlDeviceGetCount_v2(u32 *n) {
    R r = enter();
    if (r) return r;
    *n = count();
    return inits ? OK : UNINITIALIZED;
}

API R nvmlDeviceGetHandleByIndex_v2(u32 i, dev *out) {
    R r = enter();
    if (r) return r;
    if (i >= count()) return INVALID;
    *out = at(i, -1);
    return number(*out, "lost", 0) ? LOST : OK;
}

/* -- what a device is -------------------------------------------------------------------------- */

API R nvmlDeviceGetUUID(dev d, char *s, u32 n) {
    CHECK(d, "uuid");
    if (d->part < 0) snprintf(s, n, "GPU-51300000-0000-4000-8000-%012u", d->gpu);
    else snprintf(s, n, "MIG-51300000-0000-5000-8000-%06u%06d", d->gpu, d->part);
    return OK;
}

API R nvmlDeviceGetName(dev d, char *s, u32 n) {
    CHECK(d, "name");
    if (d->part < 0) snprintf(s, n, "Simulated GPU");
    else snprintf(s, n, "Simulated GPU MIG 1g");
    return OK;
}

typedef struct { char legacy[16]; u32 domain, bus, device, id, subsystem; char bus_id[32]; } pci;

API R nvmlDeviceGetPciInfo_v3(dev d, pci *p) {
    WHOLE(d, "pci");
    memset(p, 0, sizeof *p);
    p->bus = 0x19 + 0x10 * d->gpu;
    snprintf(p->bus_id, sizeof p->bus_id, "00000000:%02X:00.0", p->bus);
    return OK;
}

API R nvmlDeviceGetMigMode(dev d, u32 *current, u32 *pending) {
    WHOLE(d, "mig");
    *current = *pending = parts(d) > 0;
    return OK;
}

API R nvmlDeviceGetMaxMigDeviceCount(dev d, u32 *n) {
    WHOLE(d, "mig");
    *n = PARTS;
    return OK;
}

API R nvmlDeviceGetMigDeviceHandleByIndex(dev d, u32 i, dev *out) {
    WHOLE(d, "mig");
    if (i >= parts(d)) return NOT_FOUND;
    *out = at(d->gpu, (int)i);
    return OK;
}

/* -- what it tells ----------------------------------------------------------------------------- */

typedef struct { u64 total, free, used; } memory1;
typedef struct { u32 version; u64 total, reserved, free, used; } memory2;

API R nvmlDeviceGetMemoryInfo(dev d, memory1 *m) {
    CHECK(d, "memory_info");
    m->total = (u64)number(d, "mem_total", 8e9);
    m->used = (u64)number(d, "mem_used", 1e9);
    m->free = m->total - m->used;
    return OK;
}

API R nvmlDeviceGetMemoryInfo_v2(dev d, memory2 *m) {
    memory1 one;
    CHECK(d, "memory_info");
    if (m->version != (2u << 24 | sizeof *m)) return BAD_VERSION;
    nvmlDeviceGetMemoryInfo(d, &one);
    m->total = one.total, m->free = one.free, m->used = one.used, m->reserved = 0;
    return OK;
}

API R nvmlDeviceGetUtilizationRates(dev d, u32 *u) {
    WHOLE(d, "sm");
    if (parts(d)) return NOT_SUPPORTED;
    u[0] = (u32)number(d, "sm", 50);
    u[1] = (u32)number(d, "memory", 25);
    return OK;
}

API R nvmlDeviceGetClockInfo(dev d, u32 kind, u32 *out) {
    const char *field = kind == 2 ? "mem_clock" : "sm_clock";
    WHOLE(d, field);
    *out = (u32)number(d, field, 1000);
    return OK;
}

API R nvmlDeviceGetMaxClockInfo(dev d, u32 kind, u32 *out) {
    const char *field = kind == 2 ? "mem_clock_max" : "sm_clock_max";
    WHOLE(d, field);
    *out = (u32)number(d, field, 2000);
    return OK;
}

API R nvmlDeviceGetCurrentClocksEventReasons(dev d, u64 *out) {
    WHOLE(d, "throttle");
    *out = (u64)number(d, "throttle", 0);
    return OK;
}

U32(nvmlDeviceGetPowerUsage, "power", 300, 1000)
U32(nvmlDeviceGetEnforcedPowerLimit, "power_limit", 700, 1000)
U32(nvmlDeviceGetCurrPcieLinkGeneration, "pcie_gen", 5, 1)
U32(nvmlDeviceGetCurrPcieLinkWidth, "pcie_width", 16, 1)

typedef struct { u32 version, sensor; int temperature; } temperature;

API R nvmlDeviceGetTemperatureV(dev d, temperature *t) {
    WHOLE(d, "temperature");
    t->temperature = (int)number(d, "temperature", 50);
    return OK;
}

API R nvmlDeviceGetTemperature(dev d, u32 sensor, u32 *t) {
    (void)sensor;
    WHOLE(d, "temperature");
    *t = (u32)number(d, "temperature", 50);
    return OK;
}

API R nvmlDeviceGetTemperatureThreshold(dev d, u32 kind, u32 *t) {
    const char *field = kind ? "temp_slowdown" : "temp_shutdown";
    WHOLE(d, field);
    if (kind > 1) return INVALID;
    *t = (u32)number(d, field, kind ? 90 : 95);
    return OK;
}

API R nvmlDeviceGetPcieThroughput(dev d, u32 counter, u32 *kib) {
    const char *field = counter ? "pcie_rx" : "pcie_tx";
    WHOLE(d, field);
    *kib = (u32)(number(d, field, 1024e3) / 1024);
    return OK;
}

API R nvmlDeviceGetTotalEccErrors(dev d, u32 kind, u32 counter, u64 *out) {
    const char *field = kind ? "ecc_uncorrected" : "ecc_corrected";
    (void)counter;
    WHOLE(d, field);
    *out = (u64)number(d, field, 0);
    return OK;
}

API R nvmlDeviceGetRemappedRows(dev d, u32 *corrected, u32 *uncorrected, u32 *pending, u32 *failed) {
    WHOLE(d, "remapped");
    *corrected = (u32)number(d, "remapped_corrected", 0);
    *uncorrected = (u32)number(d, "remapped_uncorrected", 0);
    *pending = (u32)number(d, "remap_pending", 0);
    *failed = (u32)number(d, "remap_failed", 0);
    return OK;
}

typedef struct { u32 field, scope; long long t, latency; u32 type; R result; u64 value; } field;

API R nvmlDeviceGetFieldValues(dev d, int n, field *f) {
    WHOLE(d, "fields");
    for (int i = 0; i < n; i++) {
        const char *key = f[i].field == 138 ? "nvlink_tx_kib" : f[i].field == 139 ? "nvlink_rx_kib"
                                                                                 : NULL;
        char s[64];
        f[i].result = key && of_device(d, key, s, sizeof s) ? OK : NOT_SUPPORTED;
        if (!f[i].result) f[i].type = 3, f[i].value = strtoull(s, NULL, 0);
    }
    return OK;
}

/* -- processes: pids=PID:BYTES:SM%,..., with - for what is not told ----------------------------- */

typedef struct { u32 pid; u64 memory; u32 gi, ci; } process;
typedef struct { u32 pid; u64 t; u32 sm, memory, encoder, decoder; } share;

static u32 listed(dev d, const char *key, process *p, u32 *sm) {
    char s[1024], *word, *rest = s;
    u32 n = 0;
    if (!of_device(d, key, s, sizeof s)) return 0;
    while (n < LISTED && (word = strsep(&rest, ","))) {
        char bytes[32], used[32];
        u32 pid;
        if (sscanf(word, "%u:%31[^:]:%31s", &pid, bytes, used) != 3) continue;
        p[n] = (process){pid, *bytes == '-' ? ~0ull : strtoull(bytes, NULL, 0), ~0u, ~0u};
        sm[n++] = *used == '-' ? ~0u : (u32)strtoul(used, NULL, 0);
    }
    return n;
}

static R give(dev d, const char *key, u32 *n, process *out) {
    process p[LISTED];
    u32 sm[LISTED], room = *n;
    *n = listed(d, key, p, sm);
    if (*n > room) return NO_SIZE;
    if (out) memcpy(out, p, *n * sizeof *p);
    return OK;
}

API R nvmlDeviceGetComputeRunningProcesses_v3(dev d, u32 *n, process *out) {
    CHECK(d, "processes");
    return give(d, "pids", n, out);
}

API R nvmlDeviceGetGraphicsRunningProcesses_v3(dev d, u32 *n, process *out) {
    CHECK(d, "graphics");
    return give(d, "graphics_pids", n, out);
}

API R nvmlDeviceGetProcessUtilization(dev d, share *out, u32 *n, u64 since) {
    process p[LISTED];
    u32 sm[LISTED], told = 0;
    struct timespec now;
    WHOLE(d, "shares");
    (void)since;
    u32 all = listed(d, "pids", p, sm);
    for (u32 i = 0; i < all; i++) told += sm[i] != ~0u;
    if (!told) return NOT_FOUND;
    if (!out || *n < told) {
        *n = told;
        return NO_SIZE;
    }
    clock_gettime(CLOCK_REALTIME, &now);
    told = 0;
    for (u32 i = 0; i < all; i++)
        if (sm[i] != ~0u)
            out[told++] = (share){p[i].pid, (u64)now.tv_sec * 1000000 + (u64)now.tv_nsec / 1000,
                                  sm[i], 0, 0, 0};
    *n = told;
    return OK;
}

/* -- events: another xid_seq raises the Xid that xid names -------------------------------------- */

typedef struct { dev device; u64 type, data; u32 gi, ci; } event;
static struct events { u64 seen[GPUS]; char registered[GPUS]; } events;

API R nvmlEventSetCreate(struct events **s) {
    *s = &events;
    return OK;
}

API R nvmlEventSetFree(struct events *s) {
    (void)s;
    return OK;
}

API R nvmlDeviceRegisterEvents(dev d, u64 kinds, struct events *s) {
    (void)kinds;
    WHOLE(d, "xid");
    s->seen[d->gpu] = (u64)number(d, "xid_seq", 0);
    s->registered[d->gpu] = 1;
    return OK;
}

API R nvmlEventSetWait_v2(struct events *s, event *e, u32 ms) {
    for (u32 waited = 0;; waited += 5) {
        for (u32 i = 0; i < GPUS; i++) {
            dev d = at(i, -1);
            u64 seq = s->registered[i] ? (u64)number(d, "xid_seq", 0) : 0;
            if (!s->registered[i] || seq == s->seen[i]) continue;
            s->seen[i] = seq;
            *e = (event){d, 0x8, (u64)number(d, "xid", 0), ~0u, ~0u};
            return OK;
        }
        if (waited >= ms) return TIMEOUT;
        usleep(5000);
    }
}
