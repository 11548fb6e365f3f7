/* SPDX-License-Identifier: Apache-2.0
 * Graphs: a list of work, by hand or captured from a stream, that runs in its order. */
#include <pthread.h>
#include <stdlib.h>

#include "api.h"

enum { MAX_GRAPHS = 1024, MAX_NODES = 1 << 20 };

struct node { enum engine engine; u64 ns; };
struct graph { bool live, exec; u32 count, room; struct node *nodes; };

static struct graph graphs[MAX_GRAPHS];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static struct graph *new_graph(bool exec) {
    struct graph *g = NULL;
    pthread_mutex_lock(&lock);
    for (u32 i = 0; i < MAX_GRAPHS && !g; i++)
        if (!graphs[i].live) {
            g = &graphs[i];
            *g = (struct graph){.live = true, .exec = exec};
        }
    pthread_mutex_unlock(&lock);
    return g;
}

static bool graph_ok(const struct graph *g, bool exec) {
    return g >= graphs && g < graphs + MAX_GRAPHS && g->live && g->exec == exec;
}

static int drop(struct graph *g, bool exec) {
    if (!graph_ok(g, exec)) return INVALID_VALUE;
    pthread_mutex_lock(&lock);
    free(g->nodes);
    *g = (struct graph){0};
    pthread_mutex_unlock(&lock);
    return OK;
}

void graph_append(struct graph *g, enum engine engine, u64 ns) {
    pthread_mutex_lock(&lock);
    if (g->count == g->room && g->room < MAX_NODES) {
        u32 room = g->room ? g->room * 2 : 16;
        struct node *more = realloc(g->nodes, room * sizeof *more);
        if (!more) abort();
        g->nodes = more;
        g->room = room;
    }
    if (g->count < g->room) g->nodes[g->count++] = (struct node){engine, ns};
    pthread_mutex_unlock(&lock);
}

int graph_create(struct call *c, void **out, u32 flags) {
    if (flags) return INVALID_VALUE;
    *out = new_graph(false);
    c->out = (u64)(uintptr_t)*out;
    return *out ? OK : OUT_OF_MEMORY;
}

/* Edges are not kept: nodes run in the order they were added, which respects them. */
int graph_add_kernel(struct call *c, void **node, void *graph, void **after, u64 count,
                     void *params) {
    (void)after, (void)count;
    const struct kernel_params *p = params;
    struct graph *g = graph;
    u64 ns;
    if (!graph_ok(g, false) || !p || !node) return INVALID_VALUE;
    u64 blocks = (u64)p->gx * p->gy * p->gz, threads = (u64)p->bx * p->by * p->bz;
    int r = kernel_duration(p->f, blocks, &ns);
    if (r) return r;
    if (!blocks || !threads || threads > 1024) return INVALID_VALUE;
    graph_append(g, COMPUTE, ns);
    c->out = g->count;
    *node = (void *)(uintptr_t)c->out;
    return OK;
}

int graph_destroy(struct call *c, void *graph) {
    (void)c;
    return drop(graph, false);
}

int graph_exec_destroy(struct call *c, void *exec) {
    (void)c;
    return drop(exec, true);
}

int graph_instantiate(struct call *c, void **out, void *graph, u64 flags) {
    (void)flags;
    struct graph *g = graph;
    if (!ctx_current()) return INVALID_CONTEXT;
    if (!graph_ok(g, false)) return INVALID_VALUE;
    wait_until(now_ns() + config.graph_node_ns * g->count);
    struct graph *exec = new_graph(true);
    if (!exec) return OUT_OF_MEMORY;
    for (u32 i = 0; i < g->count; i++) graph_append(exec, g->nodes[i].engine, g->nodes[i].ns);
    *out = exec;
    c->out = (u64)(uintptr_t)exec;
    return OK;
}

int graph_instantiate_log(struct call *c, void **out, void *graph, void **node, char *log, u64 size) {
    (void)node, (void)log, (void)size;
    return graph_instantiate(c, out, graph, 0);
}

int graph_instantiate_params(struct call *c, void **out, void *graph, void *params) {
    return params ? graph_instantiate(c, out, graph, 0) : INVALID_VALUE;
}

int graph_launch(struct call *c, void *exec, void *stream) {
    struct graph *g = exec;
    struct stream *s;
    if (!graph_ok(g, true)) return INVALID_VALUE;
    int r = stream_of(c, stream, &s);
    u64 start = 0;
    for (u32 i = 0; i < g->count && !r; i++) {
        r = stream_submit(c, s, g->nodes[i].engine, g->nodes[i].ns);
        if (!i) start = c->gpu_start;
    }
    c->gpu_start = start;
    return r;
}

/* --- capture ------------------------------------------------------------------------------------ */

int capture_begin(struct call *c, void *stream, i32 mode) {
    struct stream *s;
    int r = stream_of(c, stream, &s);
    if (r) return r;
    if (mode < 0 || mode > 2 || stream_capture(s)) return INVALID_VALUE;
    if ((uintptr_t)stream == 1 || (!stream && !c->per_thread)) return CAPTURE_UNSUPPORTED;
    stream_set_capture(s, new_graph(false));
    return stream_capture(s) ? OK : OUT_OF_MEMORY;
}

int capture_end(struct call *c, void *stream, void **graph) {
    struct stream *s;
    int r = stream_of(c, stream, &s);
    if (r) return r;
    if (!graph || !stream_capture(s)) return INVALID_VALUE;
    *graph = stream_capture(s);
    c->out = (u64)(uintptr_t)*graph;
    stream_set_capture(s, NULL);
    return OK;
}

int capture_active(struct call *c, void *stream, i32 *out) {
    struct stream *s;
    int r = stream_of(c, stream, &s);
    if (r) return r;
    *out = stream_capture(s) ? 1 : 0;
    return OK;
}

void graph_forked(void) { lock = MUTEX_NEW; }
