/* SPDX-License-Identifier: GPL-2.0-only OR Apache-2.0 */
/* Softirq runs and raise-to-run latency, aggregated per CPU and vector.
 *
 * Everything is keyed by CPU: a softirq runs on the CPU that raised it, in whatever task happens to
 * be there, and handlers do not nest on a CPU (kernel/softirq.c). */
#define NVEC 10

struct softirq_cell {
	u64 raised_at;  /* first raise that no run has answered yet, 0 for none */
	u64 entered_at; /* 0 outside the handler */
	u64 count;
	u64 busy;
	u64 waits;
	u64 wait;
	u64 discarded; /* raises stamped later than the run that answered them */
	u32 run_hist[HIST_SLOTS];
	u32 wait_hist[HIST_SLOTS];
};

MMAP_ARRAY(softirq_cells, struct softirq_cell, NCPU * NVEC);
RING(softirq_slow, 64);

static __always_inline struct softirq_cell *softirq_cell(u32 vec)
{
	if (vec >= NVEC)
		return NULL;
	u32 i = bpf_get_smp_processor_id() * NVEC + vec;
	return softirq_cells.lookup(&i);
}

static __always_inline void softirq_report(u64 now, u64 duration, u32 vec, u8 kind)
{
	u32 cpu = bpf_get_smp_processor_id();
	struct ring_count *n = softirq_slow_count.lookup(&cpu);
	if (!n)
		return;
	__sync_fetch_and_add(&n->produced, 1);
	struct softirq_slow *e = softirq_slow.ringbuf_reserve(sizeof(struct softirq_slow));
	if (!e) {
		__sync_fetch_and_add(&n->lost, 1);
		return;
	}
	u64 id = bpf_get_current_pid_tgid();
	e->t = now;
	e->duration = duration;
	e->cpu = cpu;
	e->vec = vec;
	e->kind = kind;
	e->pid = id >> 32;
	e->tid = id;
	bpf_get_current_comm(e->comm, sizeof(e->comm));
	softirq_slow.ringbuf_submit(e, BPF_RB_NO_WAKEUP);
}

int softirq_raise(struct bpf_raw_tracepoint_args *ctx)
{
	struct softirq_cell *c = softirq_cell(ctx->args[0]);
	if (c && !c->raised_at)
		c->raised_at = bpf_ktime_get_ns();
	return 0;
}

int softirq_entry(struct bpf_raw_tracepoint_args *ctx)
{
	u32 vec = ctx->args[0];
	struct softirq_cell *c = softirq_cell(vec);
	if (!c)
		return 0;
	u64 now = bpf_ktime_get_ns();
	u64 raised = c->raised_at;
	c->raised_at = 0; /* from here on a raise asks for the next run */
	c->entered_at = now;
	c->count++;
	if (!raised)
		return 0;
	if (raised > now) { /* a hard interrupt raised it between the two reads above */
		c->discarded++;
		return 0;
	}
	u64 wait = now - raised;
	c->waits++;
	c->wait += wait;
	c->wait_hist[hist_slot(wait)]++;
	if (wait >= SOFTIRQ_SLOW_NS)
		softirq_report(now, wait, vec, 1);
	return 0;
}

int softirq_exit(struct bpf_raw_tracepoint_args *ctx)
{
	u32 vec = ctx->args[0];
	struct softirq_cell *c = softirq_cell(vec);
	if (!c || !c->entered_at)
		return 0;
	u64 now = bpf_ktime_get_ns();
	u64 busy = now - c->entered_at;
	c->entered_at = 0;
	c->busy += busy;
	c->run_hist[hist_slot(busy)]++;
	if (busy >= SOFTIRQ_SLOW_NS)
		softirq_report(now, busy, vec, 0);
	return 0;
}
