/* SPDX-License-Identifier: GPL-2.0-only OR Apache-2.0 */
/* Contexts: which one is current in a thread, and when one ends with all its memory.
 *
 * A context has a number, never used again, as its handle can be given again.  Memory of a thread
 * whose current context was set before the probes were attached belongs to one more context of its
 * process, "unknown", which ends with the only context that the process has. */

#define CONTEXT_DEPTH 8 /* of a thread's stack of contexts */
#define CONTEXT_DEVICES 16

struct context_current { u64 handle[CONTEXT_DEPTH]; u32 depth, pad; };
struct context_process {
	u64 primary[CONTEXT_DEVICES]; /* handle of each device's primary context, 0: not seen */
	u64 sum;                      /* of the handles of all contexts: the handle, if there is one */
	u64 users[CONTEXT_DEVICES];   /* of the primary context */
	u64 contexts;                 /* how many */
};
struct context_key { u64 handle; u32 process, pad; }; /* handle 0: the unknown one */

BPF_F_TABLE("lru_hash", u32, struct context_current, context_current, 16384, 0);
BPF_F_TABLE("hash", u32, struct context_process, context_processes, 4096, BPF_F_NO_PREALLOC);
BPF_ARRAY(context_none, struct context_process, 1); /* zeros, for which BPF's stack is too small */
BPF_F_TABLE("hash", struct context_key, u32, contexts, 4096, BPF_F_NO_PREALLOC);

static __always_inline struct context_process *context_process(u32 process)
{
	struct context_process *p = context_processes.lookup(&process);
	if (p)
		return p;
	u32 zero = 0;
	struct context_process *none = context_none.lookup(&zero);
	if (none)
		context_processes.insert(&process, none);
	return context_processes.lookup(&process);
}

/* Number of a context, a new one where it has none. */
static __always_inline u32 context_number(struct context_process *p, u32 process, u64 handle)
{
	struct context_key k = { .handle = handle, .process = process };
	u32 *known = contexts.lookup(&k);
	if (known)
		return *known;
	u32 number = cuda_number(NEXT_ID);
	if (contexts.insert(&k, &number)) {
		known = contexts.lookup(&k); /* another thread was first, or there is no room */
		return known ? *known : 0;
	}
	if (handle)
		__sync_fetch_and_add(&p->contexts, 1);
	__sync_fetch_and_add(&p->sum, handle);
	return number;
}

/* Number of the context in which this thread allocates. */
static __always_inline u32 context_of(struct thread *t)
{
	u32 id = t->id, process = t->process;
	struct context_process *p = context_process(process);
	if (!p)
		return 0;
	struct context_current *c = context_current.lookup(&id);
	u32 depth = c ? c->depth : 0;
	return context_number(p, process, depth ? c->handle[(depth - 1) & (CONTEXT_DEPTH - 1)] : 0);
}

/* What the thread's stack of contexts is after a call that returned 0. */
static __always_inline void context_set(struct thread *t, u32 form, u64 handle)
{
	u32 id = t->id;
	struct context_current *c = context_current.lookup(&id);
	if (!c) {
		struct context_current zero = {};
		context_current.update(&id, &zero);
		c = context_current.lookup(&id);
		if (!c)
			return;
	}
	u32 depth = c->depth;
	if (form == FORM_DESTROY) {
		if (!depth || c->handle[(depth - 1) & (CONTEXT_DEPTH - 1)] != handle)
			return;
		form = FORM_POP;
	}
	if (depth && (form == FORM_POP || form == FORM_SET))
		depth--;
	if (form != FORM_POP && handle && depth < CONTEXT_DEPTH)
		c->handle[depth++ & (CONTEXT_DEPTH - 1)] = handle;
	c->depth = depth;
}

/* Whether the process has been seen from its beginning on. */
static __always_inline int context_whole(u32 process)
{
	u64 init = (u64)process << 32 | CUINIT_SLOT;
	return cuda_cells_of.lookup(&init) != NULL;
}

/* Handle of the context that a call is to end; 0: none, or it is not known which. */
static __always_inline u64 context_ending(struct context_process *p, u32 process, u32 form,
					  u64 argument)
{
	if (form == FORM_DESTROY)
		return argument;
	u32 device = argument;
	if (device >= CONTEXT_DEVICES)
		return 0;
	u64 primary = p->primary[device & (CONTEXT_DEVICES - 1)];
	if (form == FORM_PRIMARY_RESET)
		return primary || p->contexts != 1 ? primary : p->sum;
	/* One that came from before the attach may have more users. */
	return p->users[device & (CONTEXT_DEVICES - 1)] == 1 && context_whole(process) ? primary : 0;
}

static __always_inline void context_end(struct thread *t, struct function *f, u32 number, u64 handle,
					u64 now)
{
	struct context_end e = { .t = now, .handle = handle, .process = t->process,
				 .thread = t->id, .function = f->name };
	if (contexts_ended.update(&number, &e))
		memory_note(NOTE_UNSURE);
}

/* The unknown context has ended, if there is one; whether there was. */
static __always_inline int context_end_unknown(struct thread *t, struct function *f, u64 handle,
					       u64 now)
{
	struct context_key k = { .process = t->process };
	u32 *number = contexts.lookup(&k);
	if (!number)
		return 0;
	u32 n = *number;
	if (!contexts.delete(&k))
		context_end(t, f, n, handle, now);
	return 1;
}

/* A context of which nothing was seen has ended, or may have. */
static __always_inline void context_unsure(struct thread *t, struct function *f,
					   struct context_process *p, u32 form, u64 now)
{
	if (p->contexts || form == FORM_PRIMARY_RELEASE) {
		struct context_key k = { .process = t->process };
		if (p->contexts || contexts.lookup(&k))
			memory_note(NOTE_UNSURE);
		return;
	}
	context_end_unknown(t, f, 0, now);
}

/* On the way in, as a handle can be given again before the call returns. */
int context_begin(struct pt_regs *ctx)
{
	struct thread *t;
	struct function *f;
	struct call *c = cuda_enter(ctx, &t, &f);
	if (!c)
		return 0;
	u32 form = f->form;
	if (form != FORM_DESTROY && form != FORM_PRIMARY_RELEASE && form != FORM_PRIMARY_RESET)
		return 0;
	struct context_process *p = context_process(t->process);
	if (!p)
		return 0;
	struct context_key k = { .handle = context_ending(p, t->process, form, c->a[0]),
				 .process = t->process };
	u32 *number = k.handle ? contexts.lookup(&k) : NULL;
	if (!number)
		return 0;
	u32 n = *number;
	if (contexts.delete(&k))
		return 0;
	c->stream = k.handle;
	c->bytes = n;
	return 0;
}

int context_return(struct pt_regs *ctx)
{
	struct thread *t;
	struct function *f;
	struct call *c = cuda_leave(ctx, &t, &f);
	if (!c)
		return 0;
	u32 form = f->form, device = c->a[0], number = c->bytes, failed = (s32)PT_REGS_RC(ctx) != 0;
	u64 now = bpf_ktime_get_ns(), handle = 0;
	cuda_count(t, f, now - c->t, 0, failed);
	struct context_process *p = context_process(t->process);
	if (!p)
		return 0;
	if (number) {
		struct context_key k = { .handle = c->stream, .process = t->process };
		if (failed) {
			contexts.insert(&k, &number);
			return 0;
		}
		context_end(t, f, number, k.handle, now);
		if (p->contexts == 1)
			context_end_unknown(t, f, k.handle, now);
		__sync_fetch_and_add(&p->contexts, -1);
		__sync_fetch_and_add(&p->sum, -k.handle);
	}
	if (failed)
		return 0;
	switch (form) {
	case FORM_CREATE:
	case FORM_PRIMARY_RETAIN:
		bpf_probe_read_user(&handle, sizeof(handle), (void *)c->a[0]);
		if (handle)
			context_number(p, t->process, handle);
		break;
	case FORM_PUSH:
	case FORM_SET:
	case FORM_DESTROY:
		handle = c->a[0];
	}
	if (form < FORM_PRIMARY_RETAIN || form > FORM_PRIMARY_RESET) {
		context_set(t, form, handle);
		if (form == FORM_DESTROY && !number)
			context_unsure(t, f, p, form, now);
		return 0;
	}
	if (form == FORM_PRIMARY_RETAIN)
		device = c->a[1];
	if (device >= CONTEXT_DEVICES)
		return 0;
	u64 *users = &p->users[device & (CONTEXT_DEVICES - 1)];
	u64 *primary = &p->primary[device & (CONTEXT_DEVICES - 1)];
	if (form == FORM_PRIMARY_RETAIN) {
		*primary = handle;
		__sync_fetch_and_add(users, 1);
		return 0;
	}
	u32 last = form == FORM_PRIMARY_RESET || *users <= 1;
	if (form == FORM_PRIMARY_RELEASE && *users)
		__sync_fetch_and_add(users, -1);
	if (last && !number)
		context_unsure(t, f, p, form, now);
	if (number) {
		*primary = 0;
		*users = 0;
	}
	return 0;
}
