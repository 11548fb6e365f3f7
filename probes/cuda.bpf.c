/* SPDX-License-Identifier: GPL-2.0-only OR Apache-2.0 */
/* Ends of threads and processes that use CUDA, and children of those that are wanted. */
#include "cuda.bpf.h"
#include "stacks.bpf.h"
#include "firstsight.bpf.h"

static __always_inline void cuda_process_ends(u32 tgid, u32 why)
{
	u32 *at = cuda_procs_of.lookup(&tgid);
	struct process *p = at ? cuda_procs.lookup(at) : NULL;
	if (!p || cuda_procs_of.delete(&tgid)) /* threads that end together may both come here */
		return;
	p->ended = why;
	cuda_ring_bell(bpf_ktime_get_ns());
}

static __always_inline void cuda_thread_ends(u64 key)
{
	u32 *at = cuda_threads_of.lookup(&key);
	struct thread *t = at ? cuda_threads.lookup(at) : NULL;
	if (!t)
		return;
	cuda_threads_of.delete(&key);
	cuda_forget_task(bpf_get_current_task());
	t->ended = 1;
}

/* Memory and all else of a process goes with its last thread, whichever that is. */
int cuda_exit(struct bpf_raw_tracepoint_args *ctx)
{
	u64 key = bpf_get_current_pid_tgid();
	u32 tgid = key >> 32;
	u64 signal = 0;
	int live = 1;
	cuda_thread_ends(key);
	READ(signal, ctx->args[0], TASK_SIGNAL);
	READ(live, signal, SIGNAL_LIVE);
	if (live > 0)
		return 0;
	cuda_process_ends(tgid, 1);
	stacks_gone(ctx->args[0]);
	u32 own = own_pid(ctx->args[0]);
	cuda_wanted.delete(&own);
	return 0;
}

/* The thread that executes another program takes the number of the main thread. */
int cuda_exec(struct bpf_raw_tracepoint_args *ctx)
{
	u64 key = bpf_get_current_pid_tgid();
	u32 tgid = key >> 32;
	cuda_thread_ends(key);
	cuda_thread_ends((u64)tgid << 32 | (u32)ctx->args[1]);
	cuda_process_ends(tgid, 2);
	stacks_gone(bpf_get_current_task());
	return 0;
}

int cuda_fork(struct bpf_raw_tracepoint_args *ctx)
{
	struct cuda_config *c = cuda_settings();
	stacks_forked(ctx->args[0], ctx->args[1]);
	if (!c || !c->filter)
		return 0;
	u32 parent = own_pid(ctx->args[0]), child = own_pid(ctx->args[1]), one = 1;
	if (parent != child && cuda_wanted.lookup(&parent))
		cuda_wanted.update(&child, &one);
	return 0;
}
