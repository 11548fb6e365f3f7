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

#define STACK_NAMED 8 /* frames that one run of stack_first_sight looks at: BPF lets it go on some 30 times */

/* Copy what names a code object; whether there was room. */
static __always_inline int stack_name(struct python *python, struct stack_new *new, u64 code,
				      u64 *names, u32 signature)
{
	u64 name = python->name, table = python->table, p, n, wide;
	u64 length = python->text_length, text = python->text_size;
	struct cuda_code *c = cuda_code.ringbuf_reserve(sizeof(*c));
	s32 first = 0;

	cuda_code_counted(!c);
	if (!c)
		return 0;
	c->t = bpf_ktime_get_ns();
	c->code = code;
	c->process = new->key.process;
	c->pid = new->pid;
	c->signature = signature;
	c->python = python->number;
	stack_read(&first, 4, code + python->code_first);
	c->first = first;
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
	stack_read(&n, 8, p + python->bytes_length);
	c->whole = STACK_BOUND(n, 31);
	n = STACK_BOUND(n, 11);
	c->table_size = STACK_IF_READ(n, stack_read(c->table, n & 2047, p + python->bytes_data));
	cuda_code.ringbuf_submit(c, BPF_RB_NO_WAKEUP);
	return 1;
}

/* Send the names of the next frames' code objects, once each; whether there may be more. */
static __always_inline int stack_names(struct python *python, struct stack_new *new)
{
	u64 frame[16] = {}, names[4] = {}, at = new->at;
	u64 to_code = python->frame_code & 0x78, to_previous = python->frame_previous & 0x78;
	u64 size = python->frame_size & 0x7f, to_names = python->code_names;
	struct stack_code key = { .process = new->key.process };

	#pragma clang loop unroll(disable)
	for (u32 i = 0; i < STACK_NAMED; i++) {
		if (!at || stack_read(frame, size, at))
			return 0;
		key.code = *(u64 *)((u8 *)frame + to_code) & ~7ULL;
		at = *(u64 *)((u8 *)frame + to_previous);
		stack_read(names, 32, key.code + to_names);
		u32 signature = stack_signature(names, python->table_mask);
		u32 *have = stack_codes.lookup(&key);
		if (!signature || (have && *have == signature))
			continue;
		if (!stack_name(python, new, key.code, names, signature)) {
			new->kept = 0;
			return 0;
		}
		stack_codes.update(&key, &signature);
	}
	new->at = at;
	new->named += STACK_NAMED;
	return at && new->named < STACK_FRAMES;
}

int stack_first_sight(struct pt_regs *ctx)
{
	u64 thread = bpf_get_current_pid_tgid();
	struct stack_new *new = stacks_new.lookup(&thread);
	struct python *python;
	u64 at = 0;

	if (!new)
		return 0;
	python = new->state ? pythons.lookup(&new->pid) : 0;
	if (python) {
		if (!new->named && stack_innermost(python, new->state, &at))
			new->at = at;
		if (stack_names(python, new))
			stack_programs.call(ctx, STACK_NAMES);
	}
	stack_programs.call(ctx, STACK_SEND);
	return 0;
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

int stack_send(struct pt_regs *ctx)
{
	u64 thread = bpf_get_current_pid_tgid();
	struct stack_new *found = stacks_new.lookup(&thread), new;
	struct stack_walk again = {};
	struct python *python;
	struct cuda_stack *r;
	u32 kept;

	if (!found)
		return 0;
	new = *found;
	kept = new.kept;
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
	r->count = again.count;
#if NATIVE_STACKS
	kept &= stack_copy(ctx, &new);
#endif
	cuda_stack.ringbuf_submit(r, BPF_RB_NO_WAKEUP);
	if (!kept)
		stack_ids.delete(&new.key); /* it comes again, and with it what found no room */
	return 0;
}
