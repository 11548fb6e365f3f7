/* SPDX-License-Identifier: GPL-2.0-only OR Apache-2.0 */
/* Allocations and frees, judged by what they return.  What they are (kind of memory, which argument
 * is what) is in the table of functions. */
#include "blocks.bpf.h"
#include "contexts.bpf.h"
#include "vmm.bpf.h"

/* A block that may be closed several times (cuIpcOpenMemHandle of the same handle). */
enum { HELD_NOTHING, HELD_BLOCK, HELD_SHARE };

static __always_inline u64 memory_arg(struct call *c, u32 n)
{
	switch (n) {
	case 1: return c->a[0];
	case 2: return c->a[1];
	case 3: return c->a[2];
	case 4: return c->a[3];
	}
	return 0;
}

static __always_inline u64 memory_word(struct function *f, u64 address)
{
	u64 v = 0;

	bpf_probe_read_user(&v, f->flags & FLAG_NARROW ? 4 : 8, (void *)address);
	return v;
}

/* Bytes asked for; a pitched allocation returns how long a row is. */
static __always_inline u64 memory_size(struct function *f, struct call *c, s32 result)
{
	u64 mask = f->flags & FLAG_NARROW ? 0xffffffff : ~0ULL, n = memory_arg(c, f->bytes) & mask;

	if (f->form != FORM_PITCH)
		return n;
	if (!result)
		n = memory_word(f, c->a[1]);
	return n * (memory_arg(c, f->times) & mask);
}

/* Of an allocation only the return matters. */
int memory_alloc_begin(struct pt_regs *ctx)
{
	struct thread *t;
	struct function *f;
	cuda_enter(ctx, &t, &f);
	return 0;
}

int memory_alloc_return(struct pt_regs *ctx)
{
	struct thread *t;
	struct function *f;
	struct call *c = cuda_leave(ctx, &t, &f);
	if (!c)
		return 0;
	s32 result = PT_REGS_RC(ctx);
	u64 now = bpf_ktime_get_ns();

	c->end = now;
	c->bytes = memory_size(f, c, result);
	c->stack = 0;
	cuda_count(t, f, now - c->t, c->bytes, result != 0);
	if (f->form == FORM_RETAIN)
		return result ? 0 : vmm_retain(t, c, now);
	if (!result)
		stack_take(ctx, c, STACK_OF_MEMORY);
	stack_users.call(ctx, STACK_OF_MEMORY);
	return 0;
}

static __always_inline int memory_enter(struct pt_regs *ctx, struct thread *t, struct function *f,
					struct call *c)
{
	s32 result = PT_REGS_RC(ctx);
	u64 now = c->end;
	u32 kind = f->memory, process = t->process;
	struct memory_block b = { .bytes = c->bytes, .born = now, .kind = kind, .stack = c->stack };
	struct memory_key k = { .process = process, .space = memory_space(kind) };

	if (kind == MEMORY_MAPPED)
		return vmm_map(t, f, c, &b, result, now);
	if (!result) {
		k.address = f->out ? memory_word(f, c->a[0]) : c->a[0];
		b.context = kind >= MEMORY_PHYSICAL && kind <= MEMORY_RESERVED ? 0 : context_of(t);
	}
	struct memory_total *total = memory_total(process, b.context, kind);
	if (!total)
		return 0;
	if (result) {
		__sync_fetch_and_add(&total->failed, 1);
		memory_event(t, f, total, now, MEMORY_ALLOC, kind, result, b.bytes, 0, 0);
		return 0;
	}
	if (kind == MEMORY_IPC) {
		struct memory_block *open = memory_blocks.lookup(&k);
		if (open) {
			memory_share(open, 1);
			goto event;
		}
	}
	memory_plus(total, process, &b);
	if (kind == MEMORY_PHYSICAL)
		vmm_created(&k, &b);
	else
		memory_keep(&k, &b);
event:
	memory_event(t, f, total, now, MEMORY_ALLOC, kind, 0, b.bytes, k.address, b.stack);
	return 0;
}

/* An allocation has returned, and its stack is taken: enter it into the books. */
int memory_allocated(struct pt_regs *ctx)
{
	struct thread *t;
	struct function *f;
	struct call *c = cuda_left(&t, &f);
	if (!c)
		return 0;
	memory_enter(ctx, t, f, c);
	stacks_finish(ctx, c->stack);
	return 0;
}

/* Addresses that somebody freed while another call had taken the block out, and when. */
BPF_F_TABLE("lru_hash", struct memory_key, u64, memory_freed, 4096, 0);

/* A free has failed: its block comes back, unless another free of it has worked meanwhile.  That one
 * leaves word first and looks for the block then; here it is the other way round. */
static __always_inline void memory_put_back(struct memory_key *k, struct memory_block *b, u64 since,
					    struct memory_total *unknown)
{
	struct memory_block other = {};

	if (memory_blocks.insert(k, b)) {
		if (!memory_blocks.lookup(k)) {
			memory_overflow(k, b);
			return;
		}
		memory_minus(k->process, b); /* its address has been given again */
	} else {
		u64 *freed = memory_freed.lookup(k);
		if (!freed || *freed < since || !memory_take(k, &other))
			return;
		memory_minus(k->process, &other);
	}
	if (unknown)
		__sync_fetch_and_add(&unknown->unknown, -1);
}

int memory_free_begin(struct pt_regs *ctx)
{
	struct thread *t;
	struct function *f;
	struct call *c = cuda_enter(ctx, &t, &f);
	if (!c || !c->a[0])
		return 0;
	if (f->memory == MEMORY_PHYSICAL)
		return vmm_release_begin(t, c);
	if (f->memory == MEMORY_MAPPED)
		return vmm_unmap_begin(ctx, c);
	struct memory_key k = { .process = t->process, .space = memory_space(f->memory),
				.address = c->a[0] };
	struct memory_block b = {};
	if (f->memory == MEMORY_IPC) {
		struct memory_block *open = memory_blocks.lookup(&k);
		if (open && open->shares) {
			memory_share(open, -1);
			c->bytes = HELD_SHARE;
			return 0;
		}
	}
	u32 held = memory_take(&k, &b);
	if (!held && k.space == MEMORY_DEVICE) {
		k.space = MEMORY_IPC; /* from cuMemPoolImportPointer, which is freed as any other */
		held = memory_take(&k, &b);
	}
	if (held) {
		c->bytes = HELD_BLOCK;
		__builtin_memcpy(&c->a[1], &b, sizeof(b)); /* no argument after the first is read */
	}
	return 0;
}

int memory_free_return(struct pt_regs *ctx)
{
	struct thread *t;
	struct function *f;
	struct call *c = cuda_leave(ctx, &t, &f);
	if (!c)
		return 0;
	s32 result = PT_REGS_RC(ctx);
	u64 now = bpf_ktime_get_ns();
	u32 held = c->bytes, process = t->process;
	struct memory_block b = { .kind = f->memory };
	struct memory_key k = { .process = process, .space = memory_space(f->memory),
				.address = c->a[0] };

	cuda_count(t, f, now - c->t, 0, result != 0);
	if (f->memory == MEMORY_PHYSICAL)
		return vmm_release(t, f, c, result, now);
	if (f->memory == MEMORY_MAPPED)
		return vmm_unmapped(ctx, c, now);
	if (!k.address && !result)
		return 0; /* freeing NULL is nothing */
	if (held == HELD_BLOCK) {
		__builtin_memcpy(&b, &c->a[1], sizeof(b));
		k.space = memory_space(b.kind);
	} else if (!held && !result) {
		memory_freed.update(&k, &now);
		struct memory_block *back = memory_blocks.lookup(&k);
		if (back && back->born < c->t && memory_take(&k, &b))
			held = HELD_BLOCK;
	}
	struct memory_total *total = memory_total(process, b.context, b.kind);
	if (!total)
		return 0;
	if (result) {
		__sync_fetch_and_add(&total->failed, 1);
		struct memory_block *open = held == HELD_SHARE ? memory_blocks.lookup(&k) : NULL;
		if (open)
			memory_share(open, 1);
		else if (held == HELD_BLOCK)
			memory_put_back(&k, &b, c->t, memory_total(process, 0, f->memory));
	} else if (held == HELD_BLOCK) {
		memory_minus(process, &b);
	} else if (!held &&
		   !memory_forward(LEDGER_FREE, process, f->memory, k.address, 0, c->t)) {
		__sync_fetch_and_add(&total->unknown, 1);
	}
	memory_event(t, f, total, now, MEMORY_FREE, b.kind, result, b.bytes, k.address, 0);
	return 0;
}
