/* SPDX-License-Identifier: GPL-2.0-only OR Apache-2.0 */
/* Calls of CUDA driver functions: who makes them, what they are, and how deep.
 *
 * Processes, threads, counters and streams live in mapped arrays, which user space reads without a
 * system call; hashes hold only where in them a thing lies.  Index 0 is "none" everywhere.  A place
 * is given back by user space once it has read the last of it, through a queue.  What a thread
 * writes to its own struct thread needs no atomics; everything else here does.
 *
 * Numbers of processes and threads are the session's, and never used again. */

#include "ownpid.bpf.h"

#define CUDA_FUNCTIONS 8192
#define CUDA_PROCS 2048
#define CUDA_THREADS 8192
#define CUDA_CELLS 16384
#define CUDA_SLOTS 512  /* names of functions */
#define CUDA_DEPTH 4    /* calls open at once in a thread: a callback that makes calls, and so on */
#define CUDA_LOCAL_STREAMS 4
#define STREAM_PER_THREAD 2 /* CU_STREAM_PER_THREAD */

enum cuda_class {
	CLASS_NONE, CLASS_LAUNCH, CLASS_CALL, CLASS_ALLOC, CLASS_FREE, CLASS_CONTEXT, CLASS_NAME,
};

/* probes/functions.py says what each means. */
enum cuda_form {
	FORM_PLAIN,
	FORM_KERNEL, FORM_CONFIG, FORM_MULTI, FORM_GRAPH, FORM_OLD,
	FORM_BOX2, FORM_BOX3, FORM_BATCH, FORM_BATCH3,
	FORM_PITCH, FORM_RETAIN, FORM_IMPORT,
	FORM_CREATE, FORM_DESTROY, FORM_PRIMARY_RETAIN, FORM_PRIMARY_RELEASE, FORM_PRIMARY_RESET,
	FORM_SET, FORM_PUSH, FORM_POP,
	FORM_NAMED, FORM_ALIAS, FORM_TOLD,
	FORM_GRID,
};

enum cuda_flag {
	FLAG_PER_THREAD = 1, /* suffix _ptsz or _ptds: stream 0 is the thread's own */
	FLAG_ENTRY_ONLY = 2, /* no probe on the return: count, and leave nothing open */
	FLAG_UNCOUNTED = 4,  /* another program on this instruction counts the call */
	FLAG_NARROW = 8,     /* from before CUDA 3.2: addresses and sizes are 32 bits */
};

/* One function of one library; the attach cookie is its index.  Written before it is attached. */
struct function {
	u64 probe;            /* where in the file the probed instruction lies */
	u64 text_lo, text_hi; /* where the executable segment does */
	u32 name;             /* meta.string id of the symbol */
	u32 flags;
	u16 slot;             /* number of the symbol, the same for all libraries; < CUDA_SLOTS */
	u8 cls, form;         /* enum cuda_class, enum cuda_form */
	u8 kind, copy, memory; /* CALL_KINDS, COPIES, MEMORY_KINDS */
	u8 out, address;      /* arguments from 1, 0 for none: points to an address or handle; is one */
	u8 bytes, times, shift; /* size is bytes * times << shift, the first two being arguments */
	u8 stream, pad[3];
};

struct call {
	u64 sp, ret, t;
	u64 a[6];       /* arguments in registers */
	u64 stream, bytes; /* for whoever opened it */
	u32 cookie, copy;
	u64 end;        /* when it returned, for programs that go on after cuda_leave() */
	u32 stack, then; /* what stack_take() found, and the program that waits for it */
};

struct cuda_gap {       /* the longest of one interval between two readings */
	u64 longest, end, within_time;
	u32 within, epoch;
};

struct cuda_cached { u64 stream; u32 at, pad; };

struct thread {
	u32 id, process; /* session numbers */
	u32 tgid, tid, ns_tid;
	u32 proc;        /* index in cuda_procs */
	u32 ended, depth;
	char comm[16];
	struct call open[CUDA_DEPTH];
	/* launches */
	u64 count, shed, last;
	u64 in_time;     /* the longest traced call since the last launch, and its name */
	u32 in_name, pad;
	struct cuda_gap gaps[2];
	u32 hist[HIST_SLOTS];
	struct cuda_cached streams[CUDA_LOCAL_STREAMS];
};

enum cuda_budget_of { BUDGET_LAUNCH, BUDGET_CALL, BUDGET_ALLOC, BUDGETS };

struct cuda_bucket { u64 window; u64 used; };

struct process {
	u64 since; /* 0: nobody is here */
	u32 id, tgid, ns_tgid, ended;
	struct cuda_bucket budget[BUDGETS];
	u32 cells[CUDA_SLOTS]; /* index in cuda_cells by slot */
};

struct cell {
	u32 process, name;
	u64 count, failed, busy, bytes;
	u32 hist[HIST_SLOTS];
};

struct cuda_config {
	u64 slow_ns;            /* calls that take so long are always kept, with their stack */
	u32 budget[BUDGETS];    /* single events per window (2^27 ns) and process */
	u32 filter;             /* only processes in cuda_wanted */
	u32 epoch;              /* number of the interval between two readings */
	u32 pad;
};

enum cuda_counter { NEXT_PROC, NEXT_THREAD, NEXT_CELL, NEXT_STREAM, NEXT_ID, NEXT_KERNEL, COUNTERS = 8 };
enum cuda_lost_why {
	LOST_PROCESS, LOST_THREAD, LOST_CELL, LOST_DEPTH, LOST_STREAM, LOST_KERNEL, LOST_NAME,
	CUDA_LOST = 16,
};

MMAP_ARRAY(cuda_config, struct cuda_config, 1);
MMAP_ARRAY(cuda_functions, struct function, CUDA_FUNCTIONS);
MMAP_ARRAY(cuda_procs, struct process, CUDA_PROCS);
MMAP_ARRAY(cuda_threads, struct thread, CUDA_THREADS);
MMAP_ARRAY(cuda_cells, struct cell, CUDA_CELLS);
MMAP_ARRAY(cuda_next, u64, COUNTERS);
MMAP_ARRAY(cuda_lost, u64, CUDA_LOST);
BPF_HASH(cuda_procs_of, u32, u32, CUDA_PROCS);     /* by tgid */
BPF_HASH(cuda_threads_of, u64, u32, CUDA_THREADS); /* by pid_tgid */
MMAP_ARRAY(cuda_near, u64, CUDA_THREADS);          /* task << 16 | place of its thread */
BPF_HASH(cuda_cells_of, u64, u32, CUDA_CELLS);     /* by process << 32 | slot */
BPF_HASH(cuda_wanted, u32, u32, 65536);            /* PIDs of ours, where config.filter is set */
BPF_QUEUE(cuda_free_procs, u32, CUDA_PROCS);
BPF_QUEUE(cuda_free_threads, u32, CUDA_THREADS);
BPF_QUEUE(cuda_free_cells, u32, CUDA_CELLS);
RING(cuda_seen, 4); /* a bell: cuda_procs has something new */
