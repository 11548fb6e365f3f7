/* SPDX-License-Identifier: GPL-2.0-only OR Apache-2.0 */
/* Calls that can block: how long, on what stream, how much. */

#define CALLS_MOST 1024 /* copies of one batch that are added up */

RING(cuda_call, 256);

/* COPIES */
enum { COPY_NONE, COPY_HTOD, COPY_DTOH, COPY_DTOD, COPY_HTOH, COPY_PEER, COPY_ANY };
#define MEMORYTYPE_HOST 1 /* CUmemorytype (cuda.h) */
#define MEMORYTYPE_UNIFIED 4

static __always_inline u32 calls_direction(u32 from, u32 to)
{
	if (from < MEMORYTYPE_HOST || from >= MEMORYTYPE_UNIFIED || to < MEMORYTYPE_HOST ||
	    to >= MEMORYTYPE_UNIFIED)
		return COPY_ANY;
	if (from == MEMORYTYPE_HOST)
		return to == MEMORYTYPE_HOST ? COPY_HTOH : COPY_HTOD;
	return to == MEMORYTYPE_HOST ? COPY_DTOH : COPY_DTOD;
}

/* Bytes and direction by a CUDA_MEMCPY2D or CUDA_MEMCPY3D; the arguments say where in it lie the two
 * memory types, and the extent in bytes and lines (cuda.h). */
static __always_inline u64 calls_box(struct call *o, u32 at_from, u32 at_to, u32 at_size,
				     u32 dimensions, u32 narrow, u32 *copy)
{
	u64 box = o->a[0], wide[3];
	u32 from = 0, to = 0, small[3];
	wide[0] = wide[1] = wide[2] = 1;
	small[0] = small[1] = small[2] = 1;
	bpf_probe_read_user(&from, sizeof(from), (void *)(box + at_from));
	bpf_probe_read_user(&to, sizeof(to), (void *)(box + at_to));
	if (*copy == COPY_ANY)
		*copy = calls_direction(from, to);
	if (narrow) {
		bpf_probe_read_user(small, dimensions * 4, (void *)(box + at_size));
		return (u64)small[0] * small[1] * small[2];
	}
	bpf_probe_read_user(wide, dimensions * 8, (void *)(box + at_size));
	return wide[0] * wide[1] * wide[2];
}

static __always_inline u64 calls_batch(u64 sizes, u64 count)
{
	u64 sum = 0;
#pragma clang loop unroll(disable)
	for (u32 i = 0; i < CALLS_MOST; i++) {
		u64 size = 0;
		if (i >= count)
			break;
		bpf_probe_read_user(&size, sizeof(size), (void *)(sizes + i * 8));
		sum += size;
	}
	return sum;
}

/* CUDA_MEMCPY3D_BATCH_OP: two operands of 40 bytes, an extent, two words. */
static __always_inline u64 calls_batch3(u64 ops, u64 count)
{
	u64 sum = 0;
#pragma clang loop unroll(disable)
	for (u32 i = 0; i < CALLS_MOST; i++) {
		u64 extent[3] = {};
		if (i >= count)
			break;
		bpf_probe_read_user(extent, sizeof(extent), (void *)(ops + i * 112 + 80));
		sum += extent[0] * extent[1] * extent[2];
	}
	return sum;
}

static __always_inline u64 calls_bytes(struct pt_regs *ctx, struct call *o, struct function *f,
				       u32 *copy)
{
	u32 narrow = f->flags & FLAG_NARROW;
	if (f->form == FORM_BOX2)
		return narrow ? calls_box(o, 8, 52, 84, 2, 1, copy) : calls_box(o, 16, 72, 112, 2, 0, copy);
	if (f->form == FORM_BOX3)
		return narrow ? calls_box(o, 16, 80, 128, 3, 1, copy)
			      : calls_box(o, 32, 120, 176, 3, 0, copy);
	if (!f->bytes)
		return 0;
	u64 bytes = cuda_arg(ctx, o, f->bytes), times = 1;
	if (f->times)
		times = cuda_arg(ctx, o, f->times);
	if (f->form == FORM_BATCH)
		return calls_batch(bytes, times);
	if (f->form == FORM_BATCH3)
		return calls_batch3(bytes, times);
	if (narrow) {
		bytes = (u32)bytes;
		times = (u32)times;
	}
	return bytes * times << (f->shift & 7);
}

int calls_enter(struct pt_regs *ctx)
{
	struct thread *t = NULL;
	struct function *f = NULL;
	struct call *o = cuda_enter(ctx, &t, &f);
	if (!o)
		return 0;
	u64 stream = f->stream ? cuda_arg(ctx, o, f->stream) : 0;
	u32 copy = f->copy;
	o->stream = !stream && f->flags & FLAG_PER_THREAD ? STREAM_PER_THREAD : stream;
	o->bytes = calls_bytes(ctx, o, f, &copy);
	o->copy = copy;
	return 0;
}

int calls_return(struct pt_regs *ctx)
{
	struct thread *t = NULL;
	struct function *f = NULL;
	struct call *o = cuda_leave(ctx, &t, &f);
	struct cuda_config *c = cuda_settings();
	if (!o || !c)
		return 0;
	u64 now = bpf_ktime_get_ns(), duration = now - o->t;
	s32 result = PT_REGS_RC(ctx);
	cuda_count(t, f, duration, o->bytes, result != 0);
	u32 slow = duration >= c->slow_ns;
	if (!slow && !cuda_budget(t, BUDGET_CALL, now))
		return 0;
	u32 stack = 0;
	if (slow)
		stack = stack_id(ctx, t, o->ret);
	u32 cpu = bpf_get_smp_processor_id();
	struct ring_count *n = cuda_call_count.lookup(&cpu);
	if (!n)
		return 0;
	__sync_fetch_and_add(&n->produced, 1);
	struct cuda_call *e = cuda_call.ringbuf_reserve(sizeof(struct cuda_call));
	if (!e) {
		__sync_fetch_and_add(&n->lost, 1);
		stacks_finish(ctx, stack);
		return 0;
	}
	e->t = now;
	e->duration = duration;
	e->process = t->process;
	e->thread = t->id;
	e->stack = stack;
	e->function = f->name;
	e->kind = f->kind;
	e->copy = o->copy;
	e->result = result;
	e->stream = o->stream;
	e->bytes = o->bytes;
	cuda_call.ringbuf_submit(e, BPF_RB_NO_WAKEUP);
	stacks_finish(ctx, stack);
	return 0;
}
