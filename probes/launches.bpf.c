/* SPDX-License-Identifier: GPL-2.0-only OR Apache-2.0 */
/* Launches: every one counted, by thread and by stream, with the time since the one before; single
 * ones while there are few enough.  A server may launch a million times a second, so what is done
 * for each launch is little: no hash is looked up but that of threads. */

#define LAUNCH_STREAMS 8192
#define LAUNCH_KERNELS 65536
#define LAUNCH_NAME 256

/* A CUDA stream of a process; of a thread, where each thread has its own of that name. */
struct launch_stream {
	u64 stream;
	u32 process, thread;
	u64 first, last; /* launches without one before, and when the last one was */
	struct cuda_gap gaps[2]; /* of these only longest and epoch */
	u32 hist[HIST_SLOTS];
};

struct launch_stream_key { u64 stream; u32 process, thread; };
struct launch_kernel_key { u64 handle; u32 process, pad; };
struct launch_kernel { u32 id, pad; u64 hash; /* of its name, 0: not known */ };

struct launch_what {
	u64 handle, stream;
	u32 grid[3], block[3], shared;
};

MMAP_ARRAY(launch_streams, struct launch_stream, LAUNCH_STREAMS);
BPF_HASH(launch_streams_of, struct launch_stream_key, u32, LAUNCH_STREAMS);
BPF_QUEUE(launch_free_streams, u32, LAUNCH_STREAMS);
BPF_F_TABLE("hash", struct launch_kernel_key, struct launch_kernel, launch_kernels, LAUNCH_KERNELS,
	    BPF_F_NO_PREALLOC);
RING(cuda_kernel, 512);
RING(cuda_launch, 1024);

static __always_inline void launch_kernel_count(u32 lost)
{
	u32 cpu = bpf_get_smp_processor_id();
	struct ring_count *n = cuda_kernel_count.lookup(&cpu);
	if (!n)
		return;
	__sync_fetch_and_add(&n->produced, 1);
	if (lost)
		__sync_fetch_and_add(&n->lost, 1);
}

/* --- kernels ------------------------------------------------------------------------------- */

static __always_inline u64 launch_name_hash(char *name)
{
	u64 h = 0xcbf29ce484222325, *words = (u64 *)name;
#pragma unroll
	for (int i = 0; i < LAUNCH_NAME / 8; i++)
		h = (h ^ words[i]) * 0x100000001b3;
	return h | 1;
}

/* Number of the kernel behind a handle.  `name` is where its name is, 0 where that is not known: a
 * handle that has one keeps it.  The first time, and when a handle is given to another kernel, it
 * goes out on the ring. */
static __always_inline u32 launch_kernel(u32 process, u64 handle, u64 name)
{
	struct launch_kernel_key key = { .handle = handle, .process = process };
	struct launch_kernel *known = launch_kernels.lookup(&key), new = {};
	if (known && !name)
		return known->id;
	struct cuda_kernel *e = cuda_kernel.ringbuf_reserve(sizeof(struct cuda_kernel));
	if (!e) { /* tried again when it is next named or launched */
		launch_kernel_count(1);
		return known ? known->id : 0;
	}
	__builtin_memset(e->name, 0, sizeof(e->name));
	if (name) {
		if (bpf_probe_read_user_str(e->name, sizeof(e->name), (void *)name) < 0)
			cuda_lose(LOST_NAME, 1);
		else
			new.hash = launch_name_hash(e->name);
	}
	if (known && (!new.hash || known->hash == new.hash)) {
		new.id = known->id;
		cuda_kernel.ringbuf_discard(e, BPF_RB_NO_WAKEUP);
		return new.id;
	}
	new.id = known && !known->hash ? known->id : cuda_number(NEXT_KERNEL);
	if (launch_kernels.update(&key, &new)) {
		cuda_lose(LOST_KERNEL, 1);
		cuda_kernel.ringbuf_discard(e, BPF_RB_NO_WAKEUP);
		return 0;
	}
	launch_kernel_count(0);
	e->t = bpf_ktime_get_ns();
	e->id = new.id;
	e->process = process;
	e->handle = handle;
	cuda_kernel.ringbuf_submit(e, BPF_RB_NO_WAKEUP);
	return new.id;
}

int launches_name(struct pt_regs *ctx)
{
	struct thread *t = NULL;
	struct function *f = NULL;
	cuda_enter(ctx, &t, &f);
	return 0;
}

int launches_named(struct pt_regs *ctx)
{
	struct thread *t = NULL;
	struct function *f = NULL;
	struct call *o = cuda_leave(ctx, &t, &f);
	if (!o)
		return 0;
	s32 result = PT_REGS_RC(ctx);
	cuda_count(t, f, bpf_ktime_get_ns() - o->t, 0, result != 0);
	if (result)
		return 0;
	u64 given = 0, handle = 0, name = 0;
	bpf_probe_read_user(&given, sizeof(given), (void *)o->a[0]);
	if (f->form == FORM_ALIAS) {
		struct launch_kernel_key kernel = { .handle = o->a[1], .process = t->process };
		launch_kernel(t->process, o->a[1], 0);
		struct launch_kernel *known = launch_kernels.lookup(&kernel), copy;
		if (!known || !given)
			return 0;
		copy = *known;
		kernel.handle = given;
		if (launch_kernels.update(&kernel, &copy))
			cuda_lose(LOST_KERNEL, 1);
		return 0;
	}
	handle = f->form == FORM_TOLD ? o->a[1] : given;
	name = f->form == FORM_TOLD ? given : o->a[2];
	if (handle && name)
		launch_kernel(t->process, handle, name);
	return 0;
}

/* --- launches ------------------------------------------------------------------------------ */

static __always_inline void launch_read(struct pt_regs *ctx, struct function *f, u64 *stack,
					struct launch_what *w)
{
	u64 first = PT_REGS_PARM1(ctx);
	u32 words[12]; /* CUlaunchConfig: 7 words, pad, stream; CUDA_LAUNCH_PARAMS: handle before that */
	w->handle = 0;
	w->stream = 0;
	w->grid[0] = w->grid[1] = w->grid[2] = 0;
	w->block[0] = w->block[1] = w->block[2] = 0;
	w->shared = 0;
	if (f->form == FORM_KERNEL) {
		w->handle = first;
		w->grid[0] = PT_REGS_PARM2(ctx);
		w->grid[1] = PT_REGS_PARM3(ctx);
		w->grid[2] = PT_REGS_PARM4(ctx);
		w->block[0] = PT_REGS_PARM5(ctx);
		w->block[1] = PT_REGS_PARM6(ctx);
		w->block[2] = stack[1];
		w->shared = stack[2];
		w->stream = stack[3];
	} else if (f->form == FORM_CONFIG || f->form == FORM_MULTI) {
		u32 at = f->form == FORM_MULTI ? 8 : 0;
		__builtin_memset(words, 0, sizeof(words));
		if (f->form == FORM_MULTI)
			bpf_probe_read_user(&w->handle, sizeof(w->handle), (void *)first);
		else
			w->handle = PT_REGS_PARM2(ctx);
		bpf_probe_read_user(words, 28, (void *)(first + at));
		bpf_probe_read_user(&w->stream, sizeof(w->stream), (void *)(first + 32 + at));
		w->grid[0] = words[0];
		w->grid[1] = words[1];
		w->grid[2] = words[2];
		w->block[0] = words[3];
		w->block[1] = words[4];
		w->block[2] = words[5];
		w->shared = words[6];
	} else if (f->form == FORM_GRAPH) {
		w->stream = PT_REGS_PARM2(ctx);
	} else {
		w->handle = first;
		w->grid[0] = w->grid[1] = w->grid[2] = 1;
		if (f->form == FORM_GRID) {
			w->grid[0] = PT_REGS_PARM2(ctx);
			w->grid[1] = PT_REGS_PARM3(ctx);
		}
		if (f->stream)
			w->stream = PT_REGS_PARM4(ctx);
	}
	if (!w->stream && f->flags & FLAG_PER_THREAD)
		w->stream = STREAM_PER_THREAD;
}

/* Place of a stream, made where it has none; 0: no room (counted). */
static __always_inline u32 launch_new_stream(struct thread *t, u64 stream)
{
	struct launch_stream_key key = { .stream = stream, .process = t->process };
	if (stream == STREAM_PER_THREAD)
		key.thread = t->id;
	u32 *at = launch_streams_of.lookup(&key);
	if (at)
		return *at;
	u32 i = 0;
	if (launch_free_streams.pop(&i))
		i = cuda_fresh(NEXT_STREAM, LAUNCH_STREAMS);
	struct launch_stream *s = launch_streams.lookup(&i);
	if (!i || !s) {
		cuda_lose(LOST_STREAM, 1);
		return 0;
	}
	s->stream = stream;
	s->process = key.process;
	s->thread = key.thread;
	if (!launch_streams_of.insert(&key, &i))
		return i;
	s->process = 0; /* another thread was first */
	launch_free_streams.push(&i, 0);
	at = launch_streams_of.lookup(&key);
	if (!at)
		cuda_lose(LOST_STREAM, 1);
	return at ? *at : 0;
}

static __always_inline struct launch_stream *launch_stream(struct thread *t, u64 stream)
{
	struct cuda_cached *near = &t->streams[stream * 0x9e3779b97f4a7c15 >> 62];
	u32 i = near->at;
	struct launch_stream *s = launch_streams.lookup(&i);
	/* User space takes the place of a stream that was not used for long. */
	if (s && i && near->stream == stream && s->stream == stream && s->process == t->process)
		return s;
	i = launch_new_stream(t, stream);
	if (!i)
		return NULL;
	near->stream = stream;
	near->at = i;
	return launch_streams.lookup(&i);
}

static __always_inline void launch_gap(struct cuda_gap *g, u32 epoch, u64 gap)
{
	if (g->epoch != epoch) {
		g->epoch = epoch;
		g->longest = 0;
	}
	if (gap > g->longest)
		g->longest = gap;
}

static __always_inline void launch_single(struct thread *t, struct function *f, u64 now,
					  struct launch_what *w)
{
	u32 kernel = w->handle ? launch_kernel(t->process, w->handle, 0) : 0;
	u32 cpu = bpf_get_smp_processor_id();
	struct ring_count *n = cuda_launch_count.lookup(&cpu);
	if (!n)
		return;
	__sync_fetch_and_add(&n->produced, 1);
	struct cuda_launch *e = cuda_launch.ringbuf_reserve(sizeof(struct cuda_launch));
	if (!e) {
		__sync_fetch_and_add(&n->lost, 1);
		return;
	}
	e->t = now;
	e->process = t->process;
	e->thread = t->id;
	e->function = f->name;
	e->kernel = kernel;
	e->stream = w->stream;
	e->grid[0] = w->grid[0];
	e->grid[1] = w->grid[1];
	e->grid[2] = w->grid[2];
	e->block[0] = w->block[0];
	e->block[1] = w->block[1];
	e->block[2] = w->block[2];
	e->shared = w->shared;
	cuda_launch.ringbuf_submit(e, BPF_RB_NO_WAKEUP);
}

int launches_enter(struct pt_regs *ctx)
{
	struct function *f = cuda_function(ctx);
	struct cuda_config *c = cuda_settings();
	u64 stack[4]; /* the return address, and the arguments from the seventh on */
	if (!f || !c)
		return 0;
	stack[0] = stack[1] = stack[2] = stack[3] = 0;
	bpf_probe_read_user(stack, sizeof(stack), (void *)PT_REGS_SP(ctx));
	if (cuda_inside(ctx, f, stack[0]))
		return 0;
	struct thread *t = cuda_thread();
	if (!t)
		return 0;
	if (t->depth && cuda_abandon(t, PT_REGS_SP(ctx), stack[0]))
		return 0;
	u64 now = bpf_ktime_get_ns();
	struct cell *n = f->flags & FLAG_UNCOUNTED ? NULL : cuda_cell(t, f);
	if (n)
		__sync_fetch_and_add(&n->count, 1);
	struct launch_what w;
	launch_read(ctx, f, stack, &w);

	/* The thread's own. */
	u32 epoch = c->epoch;
	if (t->last) {
		u64 gap = now - t->last;
		t->hist[hist_slot(gap)]++;
		struct cuda_gap *g = &t->gaps[epoch & 1];
		if (g->epoch != epoch || gap > g->longest) {
			g->epoch = epoch;
			g->longest = gap;
			g->end = now;
			g->within = t->in_name;
			g->within_time = t->in_time;
		}
	}
	t->last = now;
	t->in_time = 0;
	t->in_name = 0;

	/* The stream's; threads may share it. */
	struct launch_stream *s = launch_stream(t, w.stream);
	if (s) {
		u64 last = s->last;
		if (last) {
			u64 gap = now > last ? now - last : 0;
			__sync_fetch_and_add(&s->hist[hist_slot(gap)], 1);
			launch_gap(&s->gaps[epoch & 1], epoch, gap);
		} else {
			__sync_fetch_and_add(&s->first, 1);
		}
		s->last = now; /* after what user space looks at once this has moved */
	}
	if (cuda_budget(t, BUDGET_LAUNCH, now))
		launch_single(t, f, now, &w);
	else
		t->shed++;
	t->count++; /* last: see above */
	return 0;
}
