/* SPDX-License-Identifier: GPL-2.0-only OR Apache-2.0 */
/* Counts hits by cookie, of the processes that are wanted. */
#define COUNTER_PLACES 4096

struct counter_hits { u64 entries, returns; };

MMAP_ARRAY(counter_hits, struct counter_hits, COUNTER_PLACES);
MMAP_ARRAY(counter_filter, u64, 1);
BPF_HASH(counter_wanted, u32, u32, 65536);

static u64 (*counter_cookie)(void *) = (void *)174; /* bpf_get_attach_cookie */

static __always_inline struct counter_hits *counter_here(void *ctx)
{
	u32 i = counter_cookie(ctx), zero = 0, tgid = bpf_get_current_pid_tgid() >> 32;
	u64 *filter = counter_filter.lookup(&zero);
	if (!filter || (*filter && !counter_wanted.lookup(&tgid)))
		return 0;
	return counter_hits.lookup(&i);
}

int counter_enter(struct pt_regs *ctx)
{
	struct counter_hits *h = counter_here(ctx);
	if (h)
		__sync_fetch_and_add(&h->entries, 1);
	return 0;
}

int counter_leave(struct pt_regs *ctx)
{
	struct counter_hits *h = counter_here(ctx);
	if (h)
		__sync_fetch_and_add(&h->returns, 1);
	return 0;
}

int counter_fork(struct bpf_raw_tracepoint_args *ctx)
{
	u32 parent = 0, child = 0, one = 1;
	READ(parent, ctx->args[0], TASK_TGID);
	READ(child, ctx->args[1], TASK_TGID);
	if (parent != child && counter_wanted.lookup(&parent))
		counter_wanted.update(&child, &one);
	return 0;
}
