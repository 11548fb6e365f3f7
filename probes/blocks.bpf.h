/* SPDX-License-Identifier: GPL-2.0-only OR Apache-2.0 */
/* The books of memory: what is live, and sums of it by context and by stack.
 *
 * Sums are exact whatever user space does: it only reads them.  A block is found again by process,
 * space and address.  Where the table of blocks is full, the block goes to user space (ring
 * memory_ledger), and so do, from then on, calls on blocks that are not in the table.
 *
 * An address can be given again before the call that freed it has returned here, so a call takes
 * its block out on the way in, and puts it back if it fails.
 *
 * Blocks belong to a context, which takes them along when it ends: sums are kept by context, so that
 * they need only be left out then.  Blocks of context 0 belong to the process. */

/* As MEMORY_KINDS; DEVICE to POOL share one space of addresses, each other kind has its own. */
enum memory_kind {
	MEMORY_DEVICE, MEMORY_PITCH, MEMORY_MANAGED, MEMORY_ASYNC, MEMORY_POOL, MEMORY_PHYSICAL,
	MEMORY_MAPPED, MEMORY_RESERVED, MEMORY_HOST, MEMORY_REGISTERED, MEMORY_IPC,
};
enum memory_op { MEMORY_ALLOC, MEMORY_FREE, MEMORY_RELEASE }; /* as ALLOC_OPS */

/* What user space does with a block that is not in the table (probes/ledger.py). */
enum memory_entry {
	LEDGER_ADD,    /* one more, that found no room here */
	LEDGER_FREE,   /* one less, if it was born before t */
	LEDGER_DROP,   /* a handle of physical memory was released */
	LEDGER_RETAIN, /* there is one more handle of it */
	LEDGER_MAP,    /* it was mapped */
	LEDGER_UNMAP,  /* a mapping of it has gone */
	LEDGER_RANGE,  /* all mappings from address on, `bytes` long */
	LEDGER_REST,   /* the same, and those that are in the kernel's table */
};

struct memory_key { u32 process, space; u64 address; };
struct memory_block {
	u64 bytes, born; /* born: when the call returned */
	u32 stack, context, kind;
	u32 shares;      /* opened so many times more (MEMORY_IPC) */
};
struct memory_physical { struct memory_block b; u64 handles, maps; };
struct memory_mapping { struct memory_block b; u64 handle; };

/* What has gone comes first: read in this order, what is live never looks negative. */
struct memory_sum { u64 frees, freed, allocs, allocated, born; /* born: sum of times >> 20 */ };
struct memory_total_key { u32 process, context, kind, pad; };
struct memory_total {
	struct memory_sum all, bare; /* bare: without a stack */
	u64 failed, unknown, shed;
	u64 placeless, without; /* live blocks that are in no table, and their bytes */
};
struct context_end { u64 t, handle; u32 process, thread, function, pad; };
struct memory_stack_key { u32 process, context, stack, kind; };

enum memory_note {
	NOTE_OVERFLOWED,  /* blocks that went to user space */
	NOTE_BARE,        /* allocations for whose stack there was no room */
	NOTE_PLACELESS,   /* blocks for which there was no room anywhere */
	NOTE_REPLACED,    /* blocks whose address was given again, without a free that was seen */
	NOTE_UNSURE,      /* contexts that may have ended */
	NOTE_UNTOLD,      /* calls on blocks that are not here, of which user space could not be told */
	NOTE_UNCOUNTED,   /* calls for whose counters there was no room */
	NOTES = 8,
};

MMAP_ARRAY(memory_notes, u64, NOTES);
BPF_F_TABLE("hash", struct memory_key, struct memory_block, memory_blocks, MEMORY_BLOCKS,
	    BPF_F_NO_PREALLOC);
BPF_F_TABLE("hash", struct memory_key, struct memory_physical, memory_physical, MEMORY_VMM,
	    BPF_F_NO_PREALLOC);
BPF_F_TABLE("hash", struct memory_key, struct memory_mapping, memory_mapped, MEMORY_VMM,
	    BPF_F_NO_PREALLOC);
BPF_F_TABLE("hash", struct memory_total_key, struct memory_total, memory_totals, MEMORY_TOTALS,
	    BPF_F_NO_PREALLOC);
BPF_ARRAY(memory_none, struct memory_total, 1); /* zeros, for which BPF's stack is too small */
BPF_F_TABLE("hash", struct memory_stack_key, struct memory_sum, memory_stacks, MEMORY_STACKS,
	    BPF_F_NO_PREALLOC);
BPF_F_TABLE("hash", u32, struct context_end, contexts_ended, 1024, BPF_F_NO_PREALLOC); /* by number */
RING(memory_ledger, 2048); /* a third of a second of the fastest allocator */
RING(memory_alloc, 256);

static __always_inline void memory_note(u32 what)
{
	u64 *n = memory_notes.lookup(&what);
	if (n)
		__sync_fetch_and_add(n, 1);
}

static __always_inline void memory_counted(struct ring_count *n, u32 lost)
{
	if (n)
		__sync_fetch_and_add(lost ? &n->lost : &n->produced, 1);
}

/* Change how many times more a block is open.  There are no atomics of 32 bits, so by the word that
 * it is the upper half of (a machine with the lower half first). */
static __always_inline void memory_share(struct memory_block *b, s64 by)
{
	__sync_fetch_and_add((u64 *)&b->kind, (u64)by << 32);
}

static __always_inline u32 memory_space(u32 kind)
{
	return kind < MEMORY_PHYSICAL ? MEMORY_DEVICE : kind;
}

static __always_inline u32 memory_overflowed(void)
{
	u32 which = NOTE_OVERFLOWED;
	u64 *n = memory_notes.lookup(&which);
	return n && *n;
}

/* Tell user space; whether there was room. */
static __always_inline int memory_tell(u32 entry, struct memory_key *k, struct memory_block *b,
				       u64 handle, u32 handles, u32 maps)
{
	u32 cpu = bpf_get_smp_processor_id();
	memory_counted(memory_ledger_count.lookup(&cpu), 0);
	struct memory_ledger *e = memory_ledger.ringbuf_reserve(sizeof(*e));
	if (!e) {
		memory_counted(memory_ledger_count.lookup(&cpu), 1);
		return 0;
	}
	e->t = b->born;
	e->address = k->address;
	e->bytes = b->bytes;
	e->handle = handle;
	e->process = k->process;
	e->context = b->context;
	e->stack = b->stack;
	e->handles = handles;
	e->maps = maps;
	e->entry = entry;
	e->kind = b->kind;
	memory_ledger.ringbuf_submit(e, BPF_RB_NO_WAKEUP);
	return 1;
}

/* Of a call that returned 0 on a block that is not in the table: user space knows it, or nobody.
 * Whether it was told. */
static __always_inline int memory_forward(u32 entry, u32 process, u32 kind, u64 address, u64 bytes,
					  u64 t)
{
	struct memory_key k = { .process = process, .space = memory_space(kind), .address = address };
	struct memory_block b = { .bytes = bytes, .born = t, .kind = kind };

	if (!memory_overflowed())
		return 0;
	if (!memory_tell(entry, &k, &b, 0, 0, 0))
		memory_note(NOTE_UNTOLD);
	return 1;
}

/* Counters of a process, context and kind; NULL where there is no room for more (counted). */
static __always_inline struct memory_total *memory_total(u32 process, u32 context, u32 kind)
{
	struct memory_total_key k = { .process = process, .context = context, .kind = kind };
	struct memory_total *s = memory_totals.lookup(&k);
	if (s)
		return s;
	u32 zero = 0;
	struct memory_total *none = memory_none.lookup(&zero);
	if (none)
		memory_totals.insert(&k, none); /* or another thread has */
	s = memory_totals.lookup(&k);
	if (!s)
		memory_note(NOTE_UNCOUNTED);
	return s;
}

static __always_inline void memory_add(struct memory_sum *s, struct memory_block *b)
{
	__sync_fetch_and_add(&s->born, b->born >> 20);
	__sync_fetch_and_add(&s->allocated, b->bytes);
	__sync_fetch_and_add(&s->allocs, 1);
}

static __always_inline void memory_sub(struct memory_sum *s, struct memory_block *b)
{
	__sync_fetch_and_add(&s->born, -(b->born >> 20));
	__sync_fetch_and_add(&s->freed, b->bytes);
	__sync_fetch_and_add(&s->frees, 1);
}

/* Count a block in.  Its stack becomes 0 where there is no room for that. */
static __always_inline void memory_plus(struct memory_total *total, u32 process,
					struct memory_block *b)
{
	struct memory_stack_key k = { .process = process, .context = b->context, .stack = b->stack,
				      .kind = b->kind };
	struct memory_sum *s = NULL;

	memory_add(&total->all, b);
	if (b->stack) {
		s = memory_stacks.lookup(&k);
		if (!s) {
			u32 zero = 0;
			struct memory_total *none = memory_none.lookup(&zero);
			if (none)
				memory_stacks.insert(&k, &none->all);
			s = memory_stacks.lookup(&k);
		}
		if (!s) {
			memory_note(NOTE_BARE);
			b->stack = 0;
		}
	}
	if (s)
		memory_add(s, b);
	else
		memory_add(&total->bare, b);
}

/* Count a block out. */
static __always_inline void memory_minus(u32 process, struct memory_block *b)
{
	struct memory_total_key tk = { .process = process, .context = b->context, .kind = b->kind };
	struct memory_stack_key sk = { .process = process, .context = b->context,
				       .stack = b->stack, .kind = b->kind };
	struct memory_total *total = memory_totals.lookup(&tk);
	if (!total)
		return; /* its context has long ended */
	struct memory_sum *s = b->stack ? memory_stacks.lookup(&sk) : NULL;
	if (s)
		memory_sub(s, b);
	else if (!b->stack)
		memory_sub(&total->bare, b);
	memory_sub(&total->all, b);
}

/* A block that nobody can keep was allocated all the same, and nothing says that it is freed: it stays
 * live until its context or process ends. */
static __always_inline void memory_placeless(u32 process, struct memory_block *b)
{
	struct memory_total_key k = { .process = process, .context = b->context, .kind = b->kind };
	struct memory_total *total = memory_totals.lookup(&k);

	memory_note(NOTE_PLACELESS);
	if (!total)
		return;
	__sync_fetch_and_add(&total->without, b->bytes);
	__sync_fetch_and_add(&total->placeless, 1);
}

/* A block that finds no room here is for user space to keep. */
static __always_inline void memory_overflow(struct memory_key *k, struct memory_block *b)
{
	memory_note(NOTE_OVERFLOWED);
	if (!memory_tell(LEDGER_ADD, k, b, 0, 0, 0))
		memory_placeless(k->process, b);
}

/* Enter a new block into the table.  One that is there already has been freed without our seeing it,
 * or with its context. */
static __always_inline void memory_keep(struct memory_key *k, struct memory_block *b)
{
	if (!memory_blocks.insert(k, b))
		return;
	struct memory_block *old = memory_blocks.lookup(k);
	if (old) {
		struct memory_block gone = *old;
		memory_minus(k->process, &gone);
		if (!contexts_ended.lookup(&gone.context))
			memory_note(NOTE_REPLACED);
		if (!memory_blocks.update(k, b))
			return;
	}
	memory_overflow(k, b);
}

/* Take a block out of the table, if it is there and nobody else does. */
static __always_inline int memory_take(struct memory_key *k, struct memory_block *out)
{
	struct memory_block *b = memory_blocks.lookup(k);
	if (!b)
		return 0;
	*out = *b; /* before it is deleted, as its place may be given again at once */
	return !memory_blocks.delete(k);
}

/* A single event, if the budget has room for it. */
static __always_inline void memory_event(struct thread *t, struct function *f,
					 struct memory_total *total, u64 now, u32 op, u32 kind,
					 s32 result, u64 bytes, u64 address, u32 stack)
{
	if (!cuda_budget(t, BUDGET_ALLOC, now)) {
		if (total)
			__sync_fetch_and_add(&total->shed, 1);
		return;
	}
	u32 cpu = bpf_get_smp_processor_id();
	memory_counted(memory_alloc_count.lookup(&cpu), 0);
	struct memory_alloc *e = memory_alloc.ringbuf_reserve(sizeof(*e));
	if (!e) {
		memory_counted(memory_alloc_count.lookup(&cpu), 1);
		return;
	}
	e->t = now;
	e->process = t->process;
	e->thread = t->id;
	e->stack = stack;
	e->op = op;
	e->kind = kind;
	e->result = result;
	e->bytes = bytes;
	e->address = address;
	e->function = f->name;
	memory_alloc.ringbuf_submit(e, BPF_RB_NO_WAKEUP);
}
