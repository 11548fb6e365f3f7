/* SPDX-License-Identifier: GPL-2.0-only OR Apache-2.0 */
/* Calls that can block: how long, on what stream, how much. */

#define CALLS_MOST 1024   /* copies of one batch that are added up */
#define CALLS_AT_ONCE 64  /* by one program, which then goes on with itself, as often as BPF lets it */

RING(cuda_call, 256);
BPF_PROG_ARRAY(calls_programs, 1);

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
	if (f->form == FORM_BATCH || f->form == FORM_BATCH3) {
		o->a[0] = bytes; /* no argument is read after this */
		o->a[1] = times < CALLS_MOST ? times : CALLS_MOST;
		return 0;
	}
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
	if (f->form == FORM_BATCH || f->form == FORM_BATCH3)
		calls_programs.call(ctx, 0);
	return 0;
}

/* Add up the copies of a batch: an array of sizes, or of CUDA_MEMCPY3D_BATCH_OP (two operands of 40
 * bytes, an extent, two words; cuda.h). */
int calls_batch(struct pt_regs *ctx)
{
	struct thread *t = NULL;
	struct function *f = NULL;
	struct call *o = cuda_entered(&t, &f);
	if (!o)
		return 0;
	u32 three = f->form == FORM_BATCH3;
	u64 step = three ? 112 : 8, size = three ? 24 : 8;
	u64 at = o->a[0] + (three ? 80 : 0), left = o->a[1], sum = o->bytes;
#pragma clang loop unroll(disable)
	for (u32 i = 0; i < CALLS_AT_ONCE; i++) {
		u64 n[4]; /* without a list of values, which would lie in a section that is not loaded */
		if (i >= left)
			break;
		n[0] = n[3] = 0;
		n[1] = n[2] = 1;
		bpf_probe_read_user(n, size & 31, (void *)at);
		sum += n[0] * n[1] * n[2];
		at += step;
	}
	o->bytes = sum;
	if (left <= CALLS_AT_ONCE)
		return 0;
	o->a[0] += CALLS_AT_ONCE * step;
	o->a[1] = left - CALLS_AT_ONCE;
	calls_programs.call(ctx, 0);
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
	o->end = now;
	o->stack = 0;
	if (duration >= c->slow_ns)
		stack_take(ctx, o, STACK_OF_CALL);
	else if (!cuda_budget(t, BUDGET_CALL, now))
		return 0;
	stack_users.call(ctx, STACK_OF_CALL);
	return 0;
}

/* A call that has returned, with its stack if it has one, is told of. */
int calls_tell(struct pt_regs *ctx)
{
	struct thread *t = NULL;
	struct function *f = NULL;
	struct call *o = cuda_left(&t, &f);
	u32 cpu = bpf_get_smp_processor_id();
	struct ring_count *n = cuda_call_count.lookup(&cpu);
	if (!o || !n)
		return 0;
	__sync_fetch_and_add(&n->produced, 1);
	u32 stack = o->stack;
	struct cuda_call *e = cuda_call.ringbuf_reserve(sizeof(struct cuda_call));
	if (!e) {
		__sync_fetch_and_add(&n->lost, 1);
		stacks_finish(ctx, stack);
		return 0;
	}
	e->t = o->end;
	e->duration = o->end - o->t;
	e->process = t->process;
	e->thread = t->id;
	e->stack = stack;
	e->function = f->name;
	e->kind = f->kind;
	e->copy = o->copy;
	e->result = PT_REGS_RC(ctx);
	e->stream = o->stream;
	e->bytes = o->bytes;
	cuda_call.ringbuf_submit(e, BPF_RB_NO_WAKEUP);
	stacks_finish(ctx, stack);
	return 0;
}
