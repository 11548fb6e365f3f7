/* SPDX-License-Identifier: Apache-2.0
 * Streams, events and engines.
 *
 * Time on the device is computed, not acted out: when work is put on a stream, its start is the
 * latest of now, the end of what is before it on the stream, and the moment an engine is free (taken
 * in the order of submission).  Whoever waits for it sleeps until its end, so calls block for real. */
#include <pthread.h>
#include <string.h>

#include "api.h"

enum { MAX_STREAMS = 1024, MAX_EVENTS = 65536, QUEUE = 1024, SLOTS = 128 };

struct stream {
    bool live, apart; /* apart: not ordered against the default stream */
    struct ctx *ctx;
    u32 device;
    u64 tail;         /* when all that was submitted is done */
    u64 count, ends[QUEUE];
    struct graph *capture;
};
struct mark { bool live, recorded, untimed; u64 at; struct ctx *ctx; };

static struct stream streams[MAX_STREAMS], defaults[MAX_DEVICES];
static struct mark marks[MAX_EVENTS];
static u32 stream_end, mark_end, mark_hint; /* nothing live from here on; where to look first */
static u64 engines[MAX_DEVICES][ENGINES][SLOTS]; /* when each is free */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static __thread struct stream *own[MAX_DEVICES]; /* this thread's default streams */
static pthread_key_t own_key;
static pthread_once_t own_once = PTHREAD_ONCE_INIT;

static struct stream *new_stream(struct ctx *ctx, bool apart) {
    struct stream *s = NULL;
    pthread_mutex_lock(&lock);
    for (u32 i = 0; i < MAX_STREAMS && !s; i++)
        if (!streams[i].live) {
            s = &streams[i];
            s->live = true;
            s->apart = apart;
            s->ctx = ctx;
            s->device = ctx->device;
            s->tail = s->count = 0;
            s->capture = NULL;
            memset(s->ends, 0, sizeof s->ends);
            if (i >= stream_end) stream_end = i + 1;
        }
    pthread_mutex_unlock(&lock);
    return s;
}

static void own_end(void *streams_of_thread) {
    struct stream **all = streams_of_thread;
    for (u32 d = 0; d < MAX_DEVICES; d++)
        if (all[d]) all[d]->live = false;
}

static void own_begin(void) { pthread_key_create(&own_key, own_end); }

static struct stream *own_stream(struct ctx *ctx) {
    struct stream **s = &own[ctx->device];
    if (!*s || !(*s)->live) {
        *s = new_stream(ctx, false);
        pthread_once(&own_once, own_begin);
        pthread_setspecific(own_key, own);
    }
    return *s;
}

int stream_of(const struct call *c, void *handle, struct stream **out) {
    struct ctx *ctx = ctx_current();
    if (!ctx) return INVALID_CONTEXT;
    uintptr_t h = (uintptr_t)handle;
    if (h == 1 || (h == 0 && !c->per_thread)) { /* CU_STREAM_LEGACY */
        *out = &defaults[ctx->device];
        return OK;
    }
    if (h == 2 || h == 0) { /* CU_STREAM_PER_THREAD */
        *out = own_stream(ctx);
        return *out ? OK : OUT_OF_MEMORY;
    }
    struct stream *s = handle;
    bool inside = s >= streams && s < streams + MAX_STREAMS &&
                  (h - (uintptr_t)streams) % sizeof *s == 0;
    *out = s;
    return inside && s->live ? OK : INVALID_HANDLE;
}

static bool is_default(const struct stream *s) { return s >= defaults && s < defaults + MAX_DEVICES; }

static u32 device_of(const struct stream *s) {
    return is_default(s) ? (u32)(s - defaults) : s->device;
}

static u64 later(u64 a, u64 b) { return a > b ? a : b; }

/* When work submitted now may start as far as streams go. */
static u64 ready_at(const struct stream *s, u64 now) {
    u64 at = later(now, s->tail);
    if (s->apart) return at;
    if (!is_default(s)) return later(at, defaults[s->device].tail);
    for (u32 i = 0; i < stream_end; i++) /* the default stream waits for all but those apart */
        if (streams[i].live && !streams[i].apart && streams[i].device == device_of(s))
            at = later(at, streams[i].tail);
    return at;
}

int stream_submit(struct call *c, struct stream *s, enum engine engine, u64 ns) {
    if (s->capture) {
        graph_append(s->capture, engine, ns);
        return OK;
    }
    u64 now = now_ns(), (*of_device)[SLOTS] = engines[device_of(s)];
    pthread_mutex_lock(&lock);
    /* A full queue holds its caller up until the oldest of it is done. */
    u64 room = s->ends[s->count % QUEUE];
    if (room > now) {
        pthread_mutex_unlock(&lock);
        wait_until(room);
        now = now_ns();
        pthread_mutex_lock(&lock);
    }
    u64 start = ready_at(s, now);
    u64 *slot = of_device[engine];
    if (engine == COMPUTE)
        for (u64 i = 1, n = config.kernels_at_once; i < n && *slot > start; i++)
            if (of_device[COMPUTE][i] < *slot) slot = &of_device[COMPUTE][i];
    start = later(start, *slot);
    *slot = s->tail = s->ends[s->count++ % QUEUE] = start + ns;
    pthread_mutex_unlock(&lock);
    c->gpu_start = start;
    c->gpu_end = start + ns;
    return OK;
}

static u64 tail_of(const struct stream *s) {
    pthread_mutex_lock(&lock);
    u64 tail = is_default(s) ? ready_at(s, 0) : s->tail;
    pthread_mutex_unlock(&lock);
    return tail;
}

void stream_join(struct call *c, struct stream *s) {
    u64 tail = tail_of(s);
    c->gpu_end = tail;
    if (tail > now_ns()) wait_until(tail);
}

void device_join(u32 device) {
    pthread_mutex_lock(&lock);
    u64 at = defaults[device].tail;
    for (u32 i = 0; i < stream_end; i++)
        if (streams[i].live && streams[i].device == device) at = later(at, streams[i].tail);
    pthread_mutex_unlock(&lock);
    if (at > now_ns()) wait_until(at);
}

struct graph *stream_capture(struct stream *s) { return s->capture; }
void stream_set_capture(struct stream *s, struct graph *graph) { s->capture = graph; }

int stream_create(struct call *c, void **out, u32 flags) {
    struct ctx *ctx = ctx_current();
    if (!ctx) return INVALID_CONTEXT;
    if (flags > 1) return INVALID_VALUE;
    *out = new_stream(ctx, flags == 1); /* CU_STREAM_NON_BLOCKING */
    c->out = (u64)(uintptr_t)*out;
    return *out ? OK : OUT_OF_MEMORY;
}

int stream_create_priority(struct call *c, void **out, u32 flags, i32 priority) {
    (void)priority;
    return stream_create(c, out, flags);
}

int stream_destroy(struct call *c, void *stream) {
    struct stream *s;
    if ((uintptr_t)stream <= 2) return INVALID_HANDLE;
    int r = stream_of(c, stream, &s);
    if (!r) s->live = false; /* what is on it still takes its engines' time */
    return r;
}

int stream_query(struct call *c, void *stream) {
    struct stream *s;
    int r = stream_of(c, stream, &s);
    if (r) return r;
    return s->capture ? CAPTURE_UNSUPPORTED : tail_of(s) > now_ns() ? NOT_READY : OK;
}

int stream_sync(struct call *c, void *stream) {
    struct stream *s;
    int r = stream_of(c, stream, &s);
    if (r) return r;
    if (s->capture) return CAPTURE_UNSUPPORTED;
    stream_join(c, s);
    return OK;
}

/* --- events ------------------------------------------------------------------------------------- */

static struct mark *mark_of(void *event) {
    struct mark *m = event;
    bool inside = m >= marks && m < marks + MAX_EVENTS &&
                  ((uintptr_t)m - (uintptr_t)marks) % sizeof *m == 0;
    return inside && m->live ? m : NULL;
}

int event_create(struct call *c, void **out, u32 flags) {
    struct ctx *ctx = ctx_current();
    if (!ctx) return INVALID_CONTEXT;
    if (flags > 7) return INVALID_VALUE;
    pthread_mutex_lock(&lock);
    u32 i = mark_hint;
    while (i < mark_end && marks[i].live) i++;
    if (i < MAX_EVENTS) {
        marks[i] = (struct mark){.live = true, .untimed = flags & 2, .ctx = ctx};
        if (i >= mark_end) mark_end = i + 1;
        mark_hint = i + 1;
        *out = &marks[i];
    }
    pthread_mutex_unlock(&lock);
    c->out = i < MAX_EVENTS ? (u64)(uintptr_t)*out : 0;
    return i < MAX_EVENTS ? OK : OUT_OF_MEMORY;
}

int event_destroy(struct call *c, void *event) {
    (void)c;
    struct mark *m = mark_of(event);
    if (!m) return INVALID_HANDLE;
    pthread_mutex_lock(&lock);
    m->live = false;
    if (m - marks < mark_hint) mark_hint = (u32)(m - marks);
    pthread_mutex_unlock(&lock);
    return OK;
}

int event_record(struct call *c, void *event, void *stream) {
    struct stream *s;
    struct mark *m = mark_of(event);
    if (!m) return INVALID_HANDLE;
    int r = stream_of(c, stream, &s);
    if (r || s->capture) return r;
    m->at = later(tail_of(s), now_ns());
    m->recorded = true;
    return OK;
}

int event_record_flags(struct call *c, void *event, void *stream, u32 flags) {
    return flags > 1 ? INVALID_VALUE : event_record(c, event, stream);
}

int event_query(struct call *c, void *event) {
    (void)c;
    struct mark *m = mark_of(event);
    return !m ? INVALID_HANDLE : m->at > now_ns() ? NOT_READY : OK;
}

int event_sync(struct call *c, void *event) {
    struct mark *m = mark_of(event);
    if (!m) return INVALID_HANDLE;
    c->gpu_end = m->at;
    if (m->at > now_ns()) wait_until(m->at);
    return OK;
}

int event_elapsed(struct call *c, float *out, void *start, void *end) {
    (void)c;
    struct mark *a = mark_of(start), *b = mark_of(end);
    if (!a || !b || !a->recorded || !b->recorded || a->untimed || b->untimed) return INVALID_HANDLE;
    if (later(a->at, b->at) > now_ns()) return NOT_READY;
    *out = (float)((double)(i64)(b->at - a->at) / 1e6);
    return OK;
}

int stream_wait(struct call *c, void *stream, void *event, u32 flags) {
    struct stream *s;
    struct mark *m = mark_of(event);
    if (!m) return INVALID_HANDLE;
    if (flags > 1) return INVALID_VALUE;
    int r = stream_of(c, stream, &s);
    if (r) return r;
    pthread_mutex_lock(&lock);
    s->tail = later(s->tail, m->at);
    pthread_mutex_unlock(&lock);
    return OK;
}

void streams_drop_ctx(struct ctx *ctx) {
    pthread_mutex_lock(&lock);
    for (u32 i = 0; i < stream_end; i++)
        if (streams[i].ctx == ctx) streams[i].live = false;
    for (u32 i = 0; i < mark_end; i++)
        if (marks[i].ctx == ctx) marks[i].live = false;
    mark_hint = 0;
    pthread_mutex_unlock(&lock);
}

void streams_forked(void) { lock = MUTEX_NEW; }
