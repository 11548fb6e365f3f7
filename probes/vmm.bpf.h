/* SPDX-License-Identifier: GPL-2.0-only OR Apache-2.0 */
/* Virtual memory management: physical memory goes with its last handle and its last mapping.
 *
 * It is one block with a count of both.  A mapping is a block of its own, of address space.  Source:
 * CUDA driver API reference, "Virtual Memory Management" (cuMemCreate, cuMemMap, cuMemRelease,
 * cuMemUnmap, cuMemRetainAllocationHandle). */

#define VMM_GRANULARITY (2ULL << 20) /* of addresses: cuMemGetAllocationGranularity */
#define VMM_RANGE 16 /* mappings of one call that are dealt with here: a program goes on with itself */

/* What the way in took, until the way out knows whether the call worked. */
enum vmm_held { VMM_UNKNOWN, VMM_DROPPED, VMM_TAKEN };
struct vmm_key { u32 thread, index; };
struct vmm_unmapping {
	struct memory_block mapping, physical;
	u64 address, handle;
	u32 held, process;
};

/* Ranges are rarely of more than one mapping; threads can be in the call at once. */
BPF_F_TABLE("hash", struct vmm_key, struct vmm_unmapping, vmm_unmapping, 16384, BPF_F_NO_PREALLOC);

enum { MEMORY_UNMAP, MEMORY_UNMAPPED };
BPF_PROG_ARRAY(memory_programs, 2);

static __always_inline void vmm_physical_key(struct memory_key *k, u32 process, u64 handle)
{
	k->process = process;
	k->space = MEMORY_PHYSICAL;
	k->address = handle;
}

/* A handle or a mapping less.  What it is of goes to `out`. */
static __always_inline u32 vmm_drop(u32 process, u64 handle, u32 mapping, struct memory_block *out)
{
	struct memory_key k;
	vmm_physical_key(&k, process, handle);
	struct memory_physical *p = memory_physical.lookup(&k);
	if (!p || !(mapping ? p->maps : p->handles))
		return VMM_UNKNOWN;
	*out = p->b;
	__sync_fetch_and_add(mapping ? &p->maps : &p->handles, -1);
	if (p->handles || p->maps)
		return VMM_DROPPED;
	return memory_physical.delete(&k) ? VMM_DROPPED : VMM_TAKEN;
}

/* Undo that. */
static __always_inline void vmm_put_back(u32 process, u64 handle, u32 mapping,
					 struct memory_block *b)
{
	struct memory_key k;
	vmm_physical_key(&k, process, handle);
	struct memory_physical *p = memory_physical.lookup(&k);
	if (p) {
		__sync_fetch_and_add(mapping ? &p->maps : &p->handles, 1);
		return;
	}
	struct memory_physical back = { .b = *b, .handles = !mapping, .maps = mapping };
	if (!memory_physical.insert(&k, &back))
		return;
	memory_note(NOTE_OVERFLOWED);
	if (!memory_tell(LEDGER_ADD, &k, b, 0, back.handles, back.maps))
		memory_placeless(process, b);
}

/* cuMemCreate has returned. */
static __always_inline void vmm_created(struct memory_key *k, struct memory_block *b)
{
	struct memory_physical new = { .b = *b, .handles = 1 };
	struct memory_physical *old = memory_physical.lookup(k);
	if (old) {
		struct memory_block gone = old->b;
		memory_minus(k->process, &gone);
		memory_note(NOTE_REPLACED);
	}
	if (!memory_physical.update(k, &new))
		return;
	memory_note(NOTE_OVERFLOWED);
	if (!memory_tell(LEDGER_ADD, k, b, 0, 1, 0))
		memory_placeless(k->process, b);
}

/* A mapping that has no room here takes its physical memory along: what user space keeps never
 * refers to what is kept here. */
static __always_inline void vmm_overflow(struct memory_key *k, struct memory_block *b, u64 handle,
					 u32 known)
{
	struct memory_key pk;
	vmm_physical_key(&pk, k->process, handle);
	struct memory_physical *p = memory_physical.lookup(&pk);
	memory_note(NOTE_OVERFLOWED);
	if (p) {
		struct memory_physical moved = *p;
		if (!memory_physical.delete(&pk) &&
		    !memory_tell(LEDGER_ADD, &pk, &moved.b, 0, moved.handles, moved.maps))
			memory_placeless(k->process, &moved.b);
	}
	if (!memory_tell(LEDGER_ADD, k, b, handle, 0, 0))
		memory_placeless(k->process, b);
}

/* A block of address space that refers to physical memory: one mapping less. */
static __always_inline void vmm_mapping_gone(u32 process, u64 handle, u32 held, u64 address,
					     struct memory_block *mapping,
					     struct memory_block *physical, u64 t)
{
	memory_minus(process, mapping);
	if (held == VMM_TAKEN)
		memory_minus(process, physical);
	else if (held == VMM_UNKNOWN)
		memory_forward(LEDGER_UNMAP, process, MEMORY_PHYSICAL, handle, 0, t);
}

/* cuMemMap(address, bytes, offset, handle, flags) has returned. */
static __always_inline int vmm_map(struct thread *t, struct function *f, struct call *c,
				   struct memory_block *b, s32 result, u64 now)
{
	u32 process = t->process;
	struct memory_key k = { .process = process, .space = MEMORY_MAPPED, .address = c->a[0] };
	struct memory_block gone = {};
	u64 handle = c->a[3];

	struct memory_total *total = memory_total(process, 0, MEMORY_MAPPED);
	if (!total)
		return 0;
	if (result) {
		__sync_fetch_and_add(&total->failed, 1);
		memory_event(t, f, total, now, MEMORY_ALLOC, MEMORY_MAPPED, result, b->bytes,
			     k.address, 0);
		return 0;
	}
	struct memory_mapping *old = memory_mapped.lookup(&k);
	if (old) {
		struct memory_mapping before = *old;
		u32 held = vmm_drop(process, before.handle, 1, &gone);
		vmm_mapping_gone(process, before.handle, held, k.address, &before.b, &gone, now);
		memory_note(NOTE_REPLACED);
	}
	memory_plus(total, process, b);
	struct memory_key pk;
	vmm_physical_key(&pk, process, handle);
	struct memory_physical *p = memory_physical.lookup(&pk);
	if (p)
		__sync_fetch_and_add(&p->maps, 1);
	else
		memory_forward(LEDGER_MAP, process, MEMORY_PHYSICAL, handle, 0, now);
	struct memory_mapping new = { .b = *b, .handle = handle };
	if (memory_mapped.update(&k, &new))
		vmm_overflow(&k, b, handle, p != NULL);
	memory_event(t, f, total, now, MEMORY_ALLOC, MEMORY_MAPPED, 0, b->bytes, k.address, b->stack);
	return 0;
}

/* cuMemRetainAllocationHandle(*handle, address) has returned 0. */
static __always_inline int vmm_retain(struct thread *t, struct call *c, u64 now)
{
	u64 handle = 0;
	bpf_probe_read_user(&handle, sizeof(handle), (void *)c->a[0]);
	struct memory_key k;
	vmm_physical_key(&k, t->process, handle);
	struct memory_physical *p = memory_physical.lookup(&k);
	if (p)
		__sync_fetch_and_add(&p->handles, 1);
	else
		memory_forward(LEDGER_RETAIN, t->process, MEMORY_PHYSICAL, handle, 0, now);
	return 0;
}

/* cuMemRelease(handle) */
static __always_inline int vmm_release_begin(struct thread *t, struct call *c)
{
	struct memory_block b = {};
	u32 held = vmm_drop(t->process, c->a[0], 0, &b);
	c->bytes = held;
	__builtin_memcpy(&c->a[1], &b, sizeof(b));
	return 0;
}

static __always_inline int vmm_release(struct thread *t, struct function *f, struct call *c,
				       s32 result, u64 now)
{
	u64 handle = c->a[0];
	u32 held = c->bytes;
	struct memory_block b;
	__builtin_memcpy(&b, &c->a[1], sizeof(b));
	struct memory_total *total = memory_total(t->process, 0, MEMORY_PHYSICAL);
	if (!total)
		return 0;
	if (result) {
		__sync_fetch_and_add(&total->failed, 1);
		if (held)
			vmm_put_back(t->process, handle, 0, &b);
	} else if (held == VMM_TAKEN) {
		memory_minus(t->process, &b);
	} else if (held == VMM_UNKNOWN &&
		   !memory_forward(LEDGER_DROP, t->process, MEMORY_PHYSICAL, handle, 0, c->t)) {
		__sync_fetch_and_add(&total->unknown, 1);
	}
	memory_event(t, f, total, now, MEMORY_FREE, MEMORY_PHYSICAL, result, b.bytes, handle, 0);
	return 0;
}

/* cuMemUnmap(address, bytes): takes all mappings in the range, whole ones only.  One at a time:
 * a[2] is where the next may be, 0 after the last, and `bytes` counts them. */
static __always_inline int vmm_unmap_begin(struct pt_regs *ctx, struct call *c)
{
	c->a[2] = c->a[0];
	memory_programs.call(ctx, MEMORY_UNMAP);
	return 0;
}

int memory_unmap(struct pt_regs *ctx)
{
	struct thread *t;
	struct function *f;
	struct call *c = cuda_entered(&t, &f);
	if (!c)
		return 0;
	u64 at = c->a[2], end = c->a[0] + c->a[1];
	u32 i = c->bytes, process = t->process;
	struct memory_key k = { .process = process, .space = MEMORY_MAPPED, .address = at };

	if (at >= end) {
		c->a[2] = 0;
		return 0;
	}
	if (i >= VMM_RANGE)
		return 0;
	c->bytes = i + 1;
	struct memory_mapping *m = memory_mapped.lookup(&k);
	if (!m || !m->b.bytes) {
		c->a[2] = at + VMM_GRANULARITY;
		goto next;
	}
	struct vmm_unmapping u = { .mapping = m->b, .address = at, .handle = m->handle,
				   .process = process };
	at += u.mapping.bytes;
	c->a[2] = at;
	if (at > end || memory_mapped.delete(&k))
		goto next;
	u.held = vmm_drop(process, u.handle, 1, &u.physical);
	struct vmm_key place = { .thread = t->id, .index = i };
	if (vmm_unmapping.update(&place, &u)) {
		vmm_mapping_gone(process, u.handle, u.held, u.address, &u.mapping, &u.physical, c->t);
		memory_note(NOTE_UNTOLD);
	}
next:
	memory_programs.call(ctx, MEMORY_UNMAP);
	return 0;
}

/* The rest of a long range is for user space to go through. */
static __always_inline void vmm_rest(u32 process, u64 start, u64 end, u64 t)
{
	struct memory_key k = { .process = process, .space = MEMORY_MAPPED, .address = start };
	struct memory_block b = { .bytes = end - start, .born = t, .kind = MEMORY_MAPPED };

	if (!memory_tell(LEDGER_REST, &k, &b, 0, 0, 0))
		memory_note(NOTE_UNTOLD);
}

/* A mapping of a range that was not unmapped. */
static __always_inline void vmm_back(u32 process, struct vmm_unmapping *u)
{
	struct memory_key k = { .process = process, .space = MEMORY_MAPPED,
				.address = u->address };
	struct memory_mapping m = { .b = u->mapping, .handle = u->handle };
	if (u->held)
		vmm_put_back(process, u->handle, 1, &u->physical);
	if (memory_mapped.insert(&k, &m))
		memory_placeless(process, &u->mapping); /* another took its place in the table meanwhile */
}

/* cuMemUnmap has returned.  One mapping after the other: a[3] counts them, a[4] their bytes. */
static __always_inline int vmm_unmapped(struct pt_regs *ctx, struct call *c, u64 now)
{
	c->end = now;
	c->a[3] = 0;
	c->a[4] = 0;
	memory_programs.call(ctx, MEMORY_UNMAPPED);
	return 0;
}

static __always_inline void vmm_unmapped_one(struct call *c, u32 process, struct vmm_key *place,
					     s32 result)
{
	struct vmm_unmapping *u = vmm_unmapping.lookup(place);
	if (!u)
		return;
	if (result) {
		vmm_back(process, u);
	} else {
		c->a[4] += u->mapping.bytes;
		vmm_mapping_gone(process, u->handle, u->held, u->address, &u->mapping, &u->physical,
				 c->t);
	}
	vmm_unmapping.delete(place);
}

int memory_unmapped(struct pt_regs *ctx)
{
	struct thread *t;
	struct function *f;
	struct call *c = cuda_left(&t, &f);
	if (!c)
		return 0;
	s32 result = PT_REGS_RC(ctx);
	u32 n = c->bytes, process = t->process;
	struct vmm_key place = { .thread = t->id, .index = c->a[3] };

	if (place.index < n && n <= VMM_RANGE) {
		vmm_unmapped_one(c, process, &place, result);
		c->a[3]++;
		memory_programs.call(ctx, MEMORY_UNMAPPED);
		return 0;
	}
	struct memory_total *total = memory_total(process, 0, MEMORY_MAPPED);
	if (!total)
		return 0;
	u64 bytes = c->a[4];
	if (result)
		__sync_fetch_and_add(&total->failed, 1);
	else if (c->a[2])
		vmm_rest(process, c->a[2], c->a[0] + c->a[1], c->t);
	else if (bytes != c->a[1] &&
		 !memory_forward(LEDGER_RANGE, process, MEMORY_MAPPED, c->a[0], c->a[1], c->t))
		__sync_fetch_and_add(&total->unknown, 1);
	memory_event(t, f, total, c->end, MEMORY_FREE, MEMORY_MAPPED, result, bytes, c->a[0], 0);
	return 0;
}
