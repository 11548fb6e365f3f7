/* SPDX-License-Identifier: GPL-2.0-only OR Apache-2.0 */
/* Run-queue length, sampled on each CPU by a perf event: the running task leads to its CPU's rq. */
struct runq_cell {
	u64 samples;
	u64 total;
	u64 longest;
	u64 pad[5]; /* a cache line per CPU */
};

MMAP_ARRAY(runq_cells, struct runq_cell, NCPU);

int runq_sample(struct bpf_perf_event_data *ctx)
{
	u32 cpu = bpf_get_smp_processor_id();
	struct runq_cell *c = runq_cells.lookup(&cpu);
	u64 task = bpf_get_current_task(), cfs_rq = 0, rq = 0;
	u32 running = 0;
	if (!c)
		return 0;
	READ(cfs_rq, task, TASK_CFS_RQ);
	READ(rq, cfs_rq, CFS_RQ_RQ);
	if (READ(running, rq, RQ_NR_RUNNING))
		return 0;
	c->samples++;
	c->total += running;
	if (running > c->longest)
		c->longest = running;
	return 0;
}
