/* SPDX-License-Identifier: GPL-2.0-only OR Apache-2.0 */
/* Calls of CUDA driver functions: who makes them, what they are, and how deep.
 *
 * A program on an entry calls cuda_enter(), which opens a call in the thread's own small stack of
 * calls, and one on the return cuda_leave() and cuda_count(). */
#include "cudamaps.bpf.h"

static u64 (*cuda_cookie)(void *ctx) = (void *)174; /* bpf_get_attach_cookie, Linux 5.15 */

static __always_inline void cuda_lose(u32 why, u64 count)
{
	u64 *n = cuda_lost.lookup(&why);
	if (n)
		__sync_fetch_and_add(n, count);
}

/* One of the session's numbers, from 1. */
static __always_inline u32 cuda_number(u32 which)
{
	u64 *n = cuda_next.lookup(&which);
	return n ? next_number(n) + 1 : 0;
}

/* A place that nobody has had yet, 0 where there is none left. */
static __always_inline u32 cuda_fresh(u32 which, u32 size)
{
	u64 *n = cuda_next.lookup(&which);
	if (!n || *n >= size - 1)
		return 0;
	u64 i = next_number(n) + 1;
	return i < size ? i : 0;
}

static __always_inline struct cuda_config *cuda_settings(void)
{
	u32 zero = 0;
	return cuda_config.lookup(&zero);
}

/* Number of a task's struct pid in its own namespace. */
static __always_inline u32 cuda_ns_number(u64 task)
{
	u64 pid = 0;
	u32 level = 0, nr = 0;
	READ(pid, task, TASK_THREAD_PID);
	READ(level, pid, PID_LEVEL);
	READ(nr, pid + PID_NUMBERS + (level & 31) * UPID_SIZE, 0);
	return nr;
}

static __always_inline void cuda_ring_bell(u64 now)
{
	u32 cpu = bpf_get_smp_processor_id();
	struct ring_count *n = cuda_seen_count.lookup(&cpu);
	if (n)
		__sync_fetch_and_add(&n->produced, 1);
	struct cuda_seen *e = cuda_seen.ringbuf_reserve(sizeof(*e));
	if (!e)
		return; /* it has been rung */
	e->t = now;
	cuda_seen.ringbuf_submit(e, BPF_RB_NO_WAKEUP);
}

/* Place of the process that runs, made where it has none; 0: it is not wanted, or no room. */
static __always_inline u32 cuda_proc(u32 tgid, u64 task)
{
	u32 *at = cuda_procs_of.lookup(&tgid);
	if (at)
		return *at;
	u32 i = 0;
	if (cuda_free_procs.pop(&i))
		i = cuda_fresh(NEXT_PROC, CUDA_PROCS);
	struct process *p = cuda_procs.lookup(&i);
	if (!i || !p) {
		cuda_lose(LOST_PROCESS, 1);
		return 0;
	}
	u64 leader = 0;
	READ(leader, task, TASK_GROUP_LEADER);
	p->tgid = own_pid(task);
	p->ns_tgid = cuda_ns_number(leader);
	p->ended = 0;
	p->id = cuda_number(NEXT_ID);
	if (cuda_procs_of.insert(&tgid, &i)) { /* another thread was first, or the hash is full */
		cuda_free_procs.push(&i, 0);
		at = cuda_procs_of.lookup(&tgid);
		if (!at)
			cuda_lose(LOST_PROCESS, 1);
		return at ? *at : 0;
	}
	p->since = bpf_ktime_get_ns();
	cuda_ring_bell(p->since);
	return i;
}

/* Place of the thread that runs, made where it has none; 0: its process is not wanted, or there is no
 * room for it (counted). */
static __always_inline u32 cuda_thread_place(u64 task)
{
	u64 key = bpf_get_current_pid_tgid();
	u32 tgid = key >> 32;
	u32 *at = cuda_threads_of.lookup(&key);
	if (at)
		return *at;
	struct cuda_config *c = cuda_settings();
	u32 own = own_pid(task);
	if (!c || !own || (c->filter && !cuda_wanted.lookup(&own)))
		return 0;
	u32 proc = cuda_proc(tgid, task);
	struct process *p = cuda_procs.lookup(&proc);
	if (!proc || !p)
		return 0;
	u32 i = 0;
	if (cuda_free_threads.pop(&i))
		i = cuda_fresh(NEXT_THREAD, CUDA_THREADS);
	struct thread *t = cuda_threads.lookup(&i);
	if (!i || !t) {
		cuda_lose(LOST_THREAD, 1);
		return 0;
	}
	t->proc = proc;
	t->process = p->id;
	t->tgid = own;
	t->tid = own_tid(task);
	t->ns_tid = cuda_ns_number(task);
	t->ended = 0;
	t->depth = 0;
	bpf_get_current_comm(t->comm, sizeof(t->comm));
	if (cuda_threads_of.insert(&key, &i)) {
		cuda_free_threads.push(&i, 0);
		cuda_lose(LOST_THREAD, 1);
		return 0;
	}
	t->id = cuda_number(NEXT_ID);
	return i;
}

/* Where in cuda_near a task's thread is remembered: an array costs a tenth of a hash. */
static __always_inline u32 cuda_near_slot(u64 task)
{
	return task * 0x9e3779b97f4a7c15 >> 51;
}

/* The thread that runs; NULL as above. */
static __always_inline struct thread *cuda_thread(void)
{
	u64 task = bpf_get_current_task();
	u32 slot = cuda_near_slot(task);
	u64 *near = cuda_near.lookup(&slot);
	if (!near)
		return NULL;
	u64 seen = *near; /* read and written as one word, as other threads may use it too */
	u32 i = seen & 0xffff;
	if (seen >> 16 != task << 16 >> 16 || !i) { /* pointers differ in their lower 48 bits */
		i = cuda_thread_place(task);
		*near = task << 16 | i;
	}
	return i ? cuda_threads.lookup(&i) : NULL;
}

/* The thread that runs, if it was ever seen to call anything. */
static __always_inline struct thread *cuda_known(void)
{
	u64 task = bpf_get_current_task(), key = bpf_get_current_pid_tgid();
	u32 slot = cuda_near_slot(task);
	u64 *near = cuda_near.lookup(&slot);
	u64 seen = near ? *near : 0;
	u32 i = seen & 0xffff;
	if (!i || seen >> 16 != task << 16 >> 16) {
		u32 *at = cuda_threads_of.lookup(&key);
		if (!at)
			return NULL;
		i = *at;
	}
	return cuda_threads.lookup(&i);
}

/* The task ends: another one may come to lie where it did. */
static __always_inline void cuda_forget_task(u64 task)
{
	u32 slot = cuda_near_slot(task);
	u64 *near = cuda_near.lookup(&slot);
	if (near && *near >> 16 == task << 16 >> 16)
		*near = 0;
}

/* The function whose probe was hit. */
static __always_inline struct function *cuda_function(struct pt_regs *ctx)
{
	u32 i = cuda_cookie(ctx);
	return cuda_functions.lookup(&i);
}

/* Whether a return address lies in the library itself. */
static __always_inline int cuda_inside(struct pt_regs *ctx, struct function *f, u64 ret)
{
	u64 at = ret - (PT_REGS_IP(ctx) - f->probe);
	return at >= f->text_lo && at < f->text_hi;
}

/* Argument n, from 1, of a call that is being entered; those past the sixth are on the stack.
 * Source: System V ABI for x86-64, 3.2.3. */
static __always_inline u64 cuda_arg(struct pt_regs *ctx, struct call *o, u32 n)
{
	u64 v = 0;
	if (n - 1 < 6)
		return o->a[n - 1];
	if (n > 6)
		bpf_probe_read_user(&v, sizeof(v), (void *)(o->sp + 8 * (u64)(n - 6)));
	return v;
}

/* Place of a function's counters in a process, made here; 0: no room (counted). */
static __always_inline u32 cuda_new_cell(struct process *p, struct function *f)
{
	u64 key = (u64)p->id << 32 | f->slot;
	u32 i = 0;
	if (cuda_free_cells.pop(&i))
		i = cuda_fresh(NEXT_CELL, CUDA_CELLS);
	struct cell *c = cuda_cells.lookup(&i);
	if (!i || !c) {
		cuda_lose(LOST_CELL, 1);
		return 0;
	}
	c->name = f->name;
	c->process = p->id;
	if (!cuda_cells_of.insert(&key, &i))
		return i;
	c->process = 0; /* another thread was first */
	cuda_free_cells.push(&i, 0);
	u32 *at = cuda_cells_of.lookup(&key);
	if (!at)
		cuda_lose(LOST_CELL, 1);
	return at ? *at : 0;
}

/* The counters of a function in a process; NULL where there is no room for more (counted). */
static __always_inline struct cell *cuda_cell(struct thread *t, struct function *f)
{
	u32 proc = t->proc;
	struct process *p = cuda_procs.lookup(&proc);
	if (!p)
		return NULL;
	u32 *at = &p->cells[f->slot & (CUDA_SLOTS - 1)];
	u32 i = *at;
	if (!i) {
		i = cuda_new_cell(p, f);
		if (!i)
			return NULL;
		*at = i;
	}
	return cuda_cells.lookup(&i);
}

/* Whether a return address is that of the page to which the kernel makes calls with a uretprobe
 * return (kernel/events/uprobes.c). */
static __always_inline int cuda_is_trampoline(u64 ret)
{
#ifdef XOL_VADDR
	u64 mm = 0, area = 0, address = 0;
	READ(mm, bpf_get_current_task(), TASK_MM);
	READ(area, mm, MM_XOL_AREA);
	if (area)
		READ(address, area, XOL_VADDR);
	return address && ret == address;
#else
	return 0;
#endif
}

/* The stack grows down: what was opened at or below this frame is not there any more (longjmp), but
 * for a call that has jumped here, which is why this one returns to the trampoline: then it is part
 * of that one, and 1 is returned. */
static __always_inline int cuda_abandon(struct thread *t, u64 sp, u64 ret)
{
	u32 depth = t->depth;
#pragma unroll
	for (int i = CUDA_DEPTH - 1; i >= 0; i--) {
		if (depth != i + 1 || t->open[i].sp > sp)
			continue;
		if (t->open[i].sp == sp && cuda_is_trampoline(ret))
			return 1;
		depth = i;
	}
	t->depth = depth;
	return 0;
}

/* The way in: counts the call and opens it.  NULL where it is nested in another (its return address
 * lies in the library), where its process is not wanted, or where returns are not traced. */
static __always_inline struct call *cuda_enter(struct pt_regs *ctx, struct thread **thread,
					       struct function **function)
{
	struct function *f = cuda_function(ctx);
	if (!f)
		return NULL;
	u64 sp = PT_REGS_SP(ctx), ret = 0;
	bpf_probe_read_user(&ret, sizeof(ret), (void *)sp);
	if (cuda_inside(ctx, f, ret))
		return NULL;
	struct thread *t = cuda_thread();
	if (!t)
		return NULL;
	*thread = t;
	*function = f;
	if (cuda_abandon(t, sp, ret))
		return NULL;
	u32 depth = t->depth;
	struct cell *c = cuda_cell(t, f);
	if (c && !(f->flags & FLAG_UNCOUNTED))
		__sync_fetch_and_add(&c->count, 1);
	if (f->flags & FLAG_ENTRY_ONLY)
		return NULL;
	if (depth >= CUDA_DEPTH) { /* left by longjmp from further and further down, most likely */
		cuda_lose(LOST_DEPTH, CUDA_DEPTH);
		depth = 0;
	}
	struct call *o = &t->open[depth & (CUDA_DEPTH - 1)];
	o->sp = sp;
	o->ret = ret;
	o->a[0] = PT_REGS_PARM1(ctx);
	o->a[1] = PT_REGS_PARM2(ctx);
	o->a[2] = PT_REGS_PARM3(ctx);
	o->a[3] = PT_REGS_PARM4(ctx);
	o->a[4] = PT_REGS_PARM5(ctx);
	o->a[5] = PT_REGS_PARM6(ctx);
	o->stream = 0;
	o->bytes = 0;
	o->cookie = cuda_cookie(ctx);
	o->t = bpf_ktime_get_ns();
	t->depth = depth + 1;
	return o;
}

/* The way out: the call that returns, which is open no more; NULL where it was not open.  It stays
 * as it is until the thread makes its next call.  The result is PT_REGS_RC(ctx). */
static __always_inline struct call *cuda_leave(struct pt_regs *ctx, struct thread **thread,
					       struct function **function)
{
	struct thread *t = cuda_known();
	if (!t || !t->depth)
		return NULL;
	u64 sp = PT_REGS_SP(ctx) - 8; /* the return address has been taken off */
	u32 cookie = cuda_cookie(ctx);
	struct call *o = NULL;
#pragma unroll
	for (int i = CUDA_DEPTH - 1; i >= 0; i--) {
		if (i < t->depth && t->open[i].sp == sp && t->open[i].cookie == cookie) {
			o = &t->open[i];
			t->depth = i;
			break;
		}
	}
	/* read back, so that the verifier goes on with any of them, not once for each */
	if (o)
		o = &t->open[*(volatile u32 *)&t->depth & (CUDA_DEPTH - 1)];
	struct function *f = o ? cuda_functions.lookup(&cookie) : NULL;
	if (!f)
		return NULL;
	*thread = t;
	*function = f;
	return o;
}

/* What cuda_enter() has opened, to a program that goes on after one that called it; and in the same
 * way what cuda_leave() gave.  NULL never happens. */
static __always_inline struct call *cuda_again(u32 entered, struct thread **thread,
					       struct function **function)
{
	struct thread *t = cuda_known();
	if (!t)
		return NULL;
	struct call *o = &t->open[(t->depth - entered) & (CUDA_DEPTH - 1)];
	u32 cookie = o->cookie;
	*thread = t;
	*function = cuda_functions.lookup(&cookie);
	return *function ? o : NULL;
}

static __always_inline struct call *cuda_entered(struct thread **thread, struct function **function)
{
	return cuda_again(1, thread, function);
}

static __always_inline struct call *cuda_left(struct thread **thread, struct function **function)
{
	return cuda_again(0, thread, function);
}

/* Sum up a call that has returned. */
static __always_inline void cuda_count(struct thread *t, struct function *f, u64 duration, u64 bytes,
				       u32 failed)
{
	if (duration > t->in_time) {
		t->in_time = duration;
		t->in_name = f->name;
	}
	struct cell *c = cuda_cell(t, f);
	if (!c)
		return;
	if (failed)
		__sync_fetch_and_add(&c->failed, 1);
	else if (bytes)
		__sync_fetch_and_add(&c->bytes, bytes);
	__sync_fetch_and_add(&c->hist[hist_slot(duration)], 1);
	__sync_fetch_and_add(&c->busy, duration); /* last: once it has moved the rest is there */
}

/* Whether one more single event of the process may be written.  A count per window of 2^27 ns
 * (134 ms), which threads may race for: it bounds, it need not be exact. */
static __always_inline int cuda_budget(struct thread *t, u32 which, u64 now)
{
	u32 proc = t->proc;
	struct process *p = cuda_procs.lookup(&proc);
	struct cuda_config *c = cuda_settings();
	if (!p || !c || which >= BUDGETS)
		return 0;
	struct cuda_bucket *b = &p->budget[which];
	u64 window = now >> 27;
	if (b->window != window) {
		b->window = window;
		b->used = 0;
	}
	if (b->used >= c->budget[which])
		return 0;
	b->used++;
	return 1;
}
