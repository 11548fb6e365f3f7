/* SPDX-License-Identifier: Apache-2.0
 * Copies and memsets: an engine for each direction, a fixed cost and a bandwidth.
 * No byte moves; what is modelled is when the call returns (CUDA driver API, "API synchronization
 * behavior"): a synchronous copy when it is done, unless it stays on the device; an asynchronous one
 * at once, unless its host memory is pageable. */
#include "api.h"

#define NS 1000000000.0

static u64 copy_duration(enum engine engine, u64 bytes) {
    u64 rate = engine == COPY_IN ? config.h2d_bytes_per_s
               : engine == COPY_OUT ? config.d2h_bytes_per_s : config.d2d_bytes_per_s;
    return config.copy_ns + (u64)((double)bytes / (double)rate * NS);
}

static enum engine engine_of(bool to_device, bool from_device) {
    return to_device == from_device ? COMPUTE : to_device ? COPY_IN : COPY_OUT;
}

static int transfer(struct call *c, void *stream, enum engine engine, u64 bytes, bool blocks) {
    struct stream *s;
    int r = stream_of(c, stream, &s);
    if (r) return r;
    if (!bytes) return OK;
    if (blocks && stream_capture(s)) return CAPTURE_UNSUPPORTED;
    r = stream_submit(c, s, engine, copy_duration(engine, bytes));
    if (r || !blocks) return r;
    if (config.nested) return c->per_thread ? cuStreamSynchronize_ptsz(stream) : cuStreamSynchronize(stream);
    wait_until(c->gpu_end);
    return OK;
}

/* `host` is pageable: such a copy goes through a buffer of the driver's, and the call waits. */
static bool pageable(const void *host) {
    return !is_device_address((u64)(uintptr_t)host) && !is_pinned(host);
}

int copy_h2d(struct call *c, u64 to, const void *from, u64 bytes) {
    if (!to || !from) return INVALID_VALUE;
    return transfer(c, NULL, COPY_IN, bytes, true);
}

int copy_d2h(struct call *c, void *to, u64 from, u64 bytes) {
    if (!to || !from) return INVALID_VALUE;
    return transfer(c, NULL, COPY_OUT, bytes, true);
}

int copy_d2d(struct call *c, u64 to, u64 from, u64 bytes) {
    if (!to || !from) return INVALID_VALUE;
    return transfer(c, NULL, COMPUTE, bytes, false);
}

int copy_h2d_async(struct call *c, u64 to, const void *from, u64 bytes, void *stream) {
    if (!to || !from) return INVALID_VALUE;
    return transfer(c, stream, COPY_IN, bytes, pageable(from));
}

int copy_d2h_async(struct call *c, void *to, u64 from, u64 bytes, void *stream) {
    if (!to || !from) return INVALID_VALUE;
    return transfer(c, stream, COPY_OUT, bytes, pageable(to));
}

int copy_d2d_async(struct call *c, u64 to, u64 from, u64 bytes, void *stream) {
    if (!to || !from) return INVALID_VALUE;
    return transfer(c, stream, COMPUTE, bytes, false);
}

int copy(struct call *c, u64 to, u64 from, u64 bytes) {
    if (!to || !from) return INVALID_VALUE;
    enum engine engine = engine_of(is_device_address(to), is_device_address(from));
    return transfer(c, NULL, engine, bytes, engine != COMPUTE);
}

int copy_async(struct call *c, u64 to, u64 from, u64 bytes, void *stream) {
    if (!to || !from) return INVALID_VALUE;
    bool in = is_device_address(to), out = is_device_address(from);
    bool waits = (!in && pageable((void *)(uintptr_t)to)) || (!out && pageable((void *)(uintptr_t)from));
    return transfer(c, stream, engine_of(in, out), bytes, waits);
}

int copy_peer(struct call *c, u64 to, void *to_ctx, u64 from, void *from_ctx, u64 bytes) {
    if (!ctx_in_use(to_ctx) || !ctx_in_use(from_ctx)) return INVALID_CONTEXT;
    return copy_d2d(c, to, from, bytes);
}

int copy_peer_async(struct call *c, u64 to, void *to_ctx, u64 from, void *from_ctx, u64 bytes,
                    void *stream) {
    if (!ctx_in_use(to_ctx) || !ctx_in_use(from_ctx)) return INVALID_CONTEXT;
    return copy_d2d_async(c, to, from, bytes, stream);
}

/* --- of two and three dimensions ---------------------------------------------------------------- */

enum { TYPE_HOST = 1, TYPE_DEVICE, TYPE_ARRAY, TYPE_UNIFIED }; /* CUmemorytype */

static bool on_device(u32 type, u64 device) {
    return type == TYPE_UNIFIED ? is_device_address(device) : type != TYPE_HOST;
}

static int transfer_box(struct call *c, void *stream, u32 from_type, u64 from, const void *from_host,
                        u32 to_type, u64 to, const void *to_host, u64 bytes, bool async) {
    if (from_type - 1 >= TYPE_UNIFIED || to_type - 1 >= TYPE_UNIFIED) return INVALID_VALUE;
    bool in = on_device(to_type, to), out = on_device(from_type, from);
    bool waits = in != out && (!async || pageable(in ? from_host : to_host));
    return transfer(c, stream, engine_of(in, out), bytes, waits);
}

static int box_2d(struct call *c, const struct copy_2d *w, void *stream, bool async) {
    if (!w) return INVALID_VALUE;
    return transfer_box(c, stream, w->from.type, w->from.device, w->from.host, w->to.type,
                        w->to.device, w->to.host, w->width * w->height, async);
}

static int box_3d(struct call *c, const struct copy_3d *w, void *stream, bool async) {
    if (!w) return INVALID_VALUE;
    return transfer_box(c, stream, w->from.type, w->from.device, w->from.host, w->to.type,
                        w->to.device, w->to.host, w->width * w->height * w->depth, async);
}

int copy_2d(struct call *c, const struct copy_2d *what) { return box_2d(c, what, NULL, false); }
int copy_3d(struct call *c, const struct copy_3d *what) { return box_3d(c, what, NULL, false); }

int copy_2d_async(struct call *c, const struct copy_2d *what, void *stream) {
    return box_2d(c, what, stream, true);
}

int copy_3d_async(struct call *c, const struct copy_3d *what, void *stream) {
    return box_3d(c, what, stream, true);
}

/* --- memsets: asynchronous on device memory ------------------------------------------------------ */

static int fill(struct call *c, u64 to, u64 bytes, void *stream) {
    return to ? transfer(c, stream, COMPUTE, bytes, false) : INVALID_VALUE;
}

int set_8(struct call *c, u64 to, u8 value, u64 count) {
    (void)value;
    return fill(c, to, count, NULL);
}

int set_16(struct call *c, u64 to, u16 value, u64 count) {
    (void)value;
    return fill(c, to, count * 2, NULL);
}

int set_32(struct call *c, u64 to, u32 value, u64 count) {
    (void)value;
    return fill(c, to, count * 4, NULL);
}

int set_8_async(struct call *c, u64 to, u8 value, u64 count, void *stream) {
    (void)value;
    return fill(c, to, count, stream);
}

int set_16_async(struct call *c, u64 to, u16 value, u64 count, void *stream) {
    (void)value;
    return fill(c, to, count * 2, stream);
}

int set_32_async(struct call *c, u64 to, u32 value, u64 count, void *stream) {
    (void)value;
    return fill(c, to, count * 4, stream);
}
