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
	u64 handle;
	u32 dims[7], pad; /* grid, block, shared bytes */
};

/* CUlaunchConfig begins with these seven words; CUDA_LAUNCH_PARAMS has the function before them. */
#define LAUNCH_CONFIG_STREAM 32
#define LAUNCH_PARAMS_DIMS 8
#define LAUNCH_PARAMS_STREAM 40

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

/* Or clang folds reads of several registers into one, of a computed one, which no verifier takes. */
#define LAUNCH_KEEP(v) asm volatile("" : "+r"(v))

/* `stack`: the return address, and the arguments from the seventh on. */
static __always_inline u64 launch_stream_handle(struct pt_regs *ctx, struct function *f, u64 *stack)
{
	u64 stream = 0, first = PT_REGS_PARM1(ctx);
	u64 second = PT_REGS_PARM2(ctx), fourth = PT_REGS_PARM4(ctx);
	LAUNCH_KEEP(second);
	LAUNCH_KEEP(fourth);
	if (f->form == FORM_KERNEL)
		stream = stack[3];
	else if (f->form == FORM_CONFIG)
		bpf_probe_read_user(&stream, sizeof(stream), (void *)(first + LAUNCH_CONFIG_STREAM));
	else if (f->form == FORM_MULTI)
		bpf_probe_read_user(&stream, sizeof(stream), (void *)(first + LAUNCH_PARAMS_STREAM));
	else if (f->stream == 2)
		stream = second;
	else if (f->stream)
		stream = fourth;
	return !stream && f->flags & FLAG_PER_THREAD ? STREAM_PER_THREAD : stream;
}

static __always_inline void launch_read(struct pt_regs *ctx, struct function *f, u64 *stack,
					struct launch_what *w)
{
	u64 first = PT_REGS_PARM1(ctx), second = PT_REGS_PARM2(ctx), third = PT_REGS_PARM3(ctx);
	LAUNCH_KEEP(second);
	LAUNCH_KEEP(third);
	__builtin_memset(w, 0, sizeof(*w));
	if (f->form == FORM_GRAPH)
		return;
	w->handle = first;
	if (f->form == FORM_KERNEL) {
		w->dims[0] = second;
		w->dims[1] = third;
		w->dims[2] = PT_REGS_PARM4(ctx);
		w->dims[3] = PT_REGS_PARM5(ctx);
		w->dims[4] = PT_REGS_PARM6(ctx);
		w->dims[5] = stack[1];
		w->dims[6] = stack[2];
	} else if (f->form == FORM_CONFIG) {
		w->handle = second;
		bpf_probe_read_user(w->dims, sizeof(w->dims), (void *)first);
	} else if (f->form == FORM_MULTI) {
		bpf_probe_read_user(&w->handle, sizeof(w->handle), (void *)first);
		bpf_probe_read_user(w->dims, sizeof(w->dims), (void *)(first + LAUNCH_PARAMS_DIMS));
	} else {
		w->dims[0] = f->form == FORM_GRID ? second : 1;
		w->dims[1] = f->form == FORM_GRID ? third : 1;
		w->dims[2] = 1;
	}
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

static __always_inline void launch_single(struct thread *t, struct function *f, u64 now, u64 stream,
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
	e->stream = stream;
	e->grid[0] = w->dims[0];
	e->grid[1] = w->dims[1];
	e->grid[2] = w->dims[2];
	e->block[0] = w->dims[3];
	e->block[1] = w->dims[4];
	e->block[2] = w->dims[5];
	e->shared = w->dims[6];
	cuda_launch.ringbuf_submit(e, BPF_RB_NO_WAKEUP);
}

int launches_enter(struct pt_regs *ctx)
{
	struct function *f = cuda_function(ctx);
	struct cuda_config *c = cuda_settings();
	u64 stack[4];
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

	/* The thread's own. */
	u32 epoch = c->epoch, slot = 0;
	u64 before = t->last;
	if (before) {
		u64 gap = now - before;
		slot = hist_slot(gap);
		t->hist[slot]++;
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
	u64 stream = launch_stream_handle(ctx, f, stack);
	struct launch_stream *s = launch_stream(t, stream);
	if (s) {
		u64 last = s->last;
		if (last) {
			u64 gap = now > last ? now - last : 0;
			if (last != before) /* mostly it is the same gap */
				slot = hist_slot(gap);
			__sync_fetch_and_add(&s->hist[slot & (HIST_SLOTS - 1)], 1);
			launch_gap(&s->gaps[epoch & 1], epoch, gap);
		} else {
			__sync_fetch_and_add(&s->first, 1);
		}
		s->last = now; /* after what user space looks at once this has moved */
	}
	if (cuda_budget(t, BUDGET_LAUNCH, now)) {
		struct launch_what w;
		launch_read(ctx, f, stack, &w);
		launch_single(t, f, now, stream, &w);
	} else {
		t->shed++;
	}
	t->count++; /* last: see above */
	return 0;
}
