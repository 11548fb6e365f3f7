/* SPDX-License-Identifier: GPL-2.0-only OR Apache-2.0 */
/* The second half of stacks.bpf.h: sends a stack that was seen for the first time. */

/* The smaller of n and the largest number of so many bits, without a branch. */
#define STACK_BOUND(n, bits) \
	(((n) | -(((n) >> (bits) | -((n) >> (bits))) >> 63)) & ((1ULL << (bits)) - 1))

/* n, or 0 where the read failed. */
#define STACK_IF_READ(n, result) ((n) & ~((s64)(result) >> 63))

/* Copy a string object of n characters at p: all of it if it is ASCII; then as much as other
 * characters may take in addition, which may not be there. */
#define STACK_TEXT(to, size, more) do { \
	wide = 3 * n + 24; \
	n += text; \
	wide = STACK_BOUND(wide, 9); \
	n = STACK_BOUND(n, 9); \
	size = STACK_IF_READ(n, stack_read(to, n & 511, p)); \
	more = STACK_IF_READ(wide, stack_read(to + (n & 511), wide & 511, p + n)); \
} while (0)

/* Copy what names the code objects of a stack, once each; whether there was room for all. */
static __always_inline int stack_names(struct python *python, u32 process, u32 pid,
				       struct cuda_stack *r)
{
	struct stack_frame *frames = (struct stack_frame *)r->frames;
	u64 names[4] = {}, p, n;
	u64 name = python->name, table = python->table;
	u64 to_names = python->code_names, to_first = python->code_first;
	u64 length = python->text_length, text = python->text_size;
	u64 bytes = python->bytes_length, data = python->bytes_data;
	struct stack_code key = { .process = process };

	#pragma clang loop unroll(disable)
	for (u32 i = 0; i < STACK_FRAMES; i++) {
		if (i >= *(volatile u32 *)&r->count)
			break;
		u32 signature = frames[i].signature;
		if (!signature)
			continue;
		key.code = frames[i].code;
		u32 *have = stack_codes.lookup(&key);
		if (have && *have == signature)
			continue;
		struct cuda_code *c = cuda_code.ringbuf_reserve(sizeof(*c));
		cuda_code_counted(!c);
		if (!c)
			return 0;
		c->t = bpf_ktime_get_ns();
		c->code = key.code;
		c->process = process;
		c->pid = pid;
		c->signature = signature;
		c->python = python->number;
		s32 first = 0;
		stack_read(&first, 4, key.code + to_first);
		c->first = first;
		stack_read(names, 32, key.code + to_names);
		u64 wide;
		p = names[0];
		n = 0;
		stack_read(&n, 8, p + length);
		STACK_TEXT(c->file, c->file_size, c->file_wide);
		p = names[name & 3];
		n = 0;
		stack_read(&n, 8, p + length);
		STACK_TEXT(c->name, c->name_size, c->name_wide);
		p = names[table & 3];
		n = 0;
		stack_read(&n, 8, p + bytes);
		c->whole = STACK_BOUND(n, 31);
		n = STACK_BOUND(n, 11);
		c->table_size = STACK_IF_READ(n, stack_read(c->table, n & 2047, p + data));
		cuda_code.ringbuf_submit(c, BPF_RB_NO_WAKEUP);
		stack_codes.update(&key, &signature);
	}
	return 1;
}

#if NATIVE_STACKS
/* Copy the top of the stack for user space to unwind; whether there was room. */
static __always_inline int stack_copy(struct pt_regs *ctx, struct stack_new *new)
{
	struct cuda_native *c = cuda_native.ringbuf_reserve(sizeof(*c));
	u64 sp = *(volatile u64 *)&ctx->sp; /* or else &ctx->sp is kept, which the verifier refuses */
	u32 i, size = 0;

	cuda_native_counted(!c);
	if (!c)
		return 0;
	c->t = bpf_ktime_get_ns();
	c->id = new->id;
	c->process = new->key.process;
	c->pid = new->pid;
	c->ip = new->key.ret;
	c->sp = sp;
	c->bp = ctx->bp;
	c->bx = ctx->bx;
	c->r12 = ctx->r12;
	c->r13 = ctx->r13;
	c->r14 = ctx->r14;
	c->r15 = ctx->r15;
	#pragma clang loop unroll(disable)
	for (i = 0; i < sizeof(c->copy) / STACK_COPY; i++) {
		if (stack_read((u8 *)c->copy + i * STACK_COPY, STACK_COPY, sp + i * STACK_COPY))
			break;
		size += STACK_COPY;
	}
	c->size = size;
	cuda_native.ringbuf_submit(c, BPF_RB_NO_WAKEUP);
	return 1;
}
#endif

int stack_first_sight(struct pt_regs *ctx)
{
	u64 thread = bpf_get_current_pid_tgid();
	struct stack_new *found = stacks_new.lookup(&thread), new;
	struct stack_walk again = {};
	struct python *python;
	struct cuda_stack *r;
	int kept = 1;

	if (!found)
		return 0;
	new = *found;
	stacks_new.delete(&thread);
	r = cuda_stack.ringbuf_reserve(sizeof(*r));
	cuda_stack_counted(!r);
	if (!r) {
		stack_ids.delete(&new.key); /* it comes again */
		stacks_lost.push(&new.id, 0);
		return 0;
	}
	r->t = bpf_ktime_get_ns();
	r->id = new.id;
	r->process = new.key.process;
	r->pid = new.pid;
	r->python = new.python;
	r->status = new.status;
	r->ret = new.key.ret;
	r->hash = new.key.hash;
	r->native = new.key.native;
	r->first = new.first;
	python = pythons.lookup(&new.pid);
	if (python && new.state)
		stack_walk(python, new.state, (struct stack_frame *)r->frames, &again);
	r->second = again.hash;
	r->count = again.count; /* read back below: the verifier then takes it for any number */
	if (python && new.state)
		kept = stack_names(python, new.key.process, new.pid, r);
#if NATIVE_STACKS
	kept &= stack_copy(ctx, &new);
#endif
	cuda_stack.ringbuf_submit(r, BPF_RB_NO_WAKEUP);
	if (!kept)
		stack_ids.delete(&new.key); /* it comes again, and with it what found no room */
	return 0;
}
