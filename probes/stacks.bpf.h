/* SPDX-License-Identifier: GPL-2.0-only OR Apache-2.0 */
/* Stacks of threads inside a call: Python's frames, read from the interpreter's own structures.
 *
 * stack_take() goes on to the program stack_walked, which walks them and hashes what it sees, writing
 * nothing; a stack known by its hash costs no more.  At the first sight of one stacks_finish() goes on
 * to stack_first_sight: what names the code objects goes out on the ring cuda_code, as those may be
 * gone when user space looks, and then the frames on cuda_stack.  These are programs of their own for
 * the verifier, which would walk them once for each way through each program that takes stacks.
 *
 * Every address here comes from the process: a read that fails leaves zeros and ends the walk, and
 * loops are bounded.  Uprobe programs can be preempted, so nothing is kept in per-CPU memory.
 *
 * Loops have one counter and hardly a branch: each branch multiplies the paths that the verifier
 * walks. */

#include "ownpid.bpf.h"

#define STACK_FRAMES 128
#define STACK_THREADS 512 /* thread states of a process that are looked through */
#define STACK_COPY 512     /* stack is copied in pieces, up to the first that is not there */

/* As probes/stacks.py has them. */
enum { STACK_NO_ROOM = 1, STACK_RING_FULL, STACK_FIRST };
enum { STACK_WHOLE, STACK_NATIVE, STACK_UNSUPPORTED, STACK_UNKNOWN, STACK_UNREADABLE, STACK_DEEP,
       STACK_MANY_THREADS, STACK_CHANGED, STACK_SEVERAL };

/* Where things lie in one process's interpreter, found and verified by user space. */
struct python {
	u64 heads; /* address of the list of interpreters */
	u32 number; /* user space's, of these facts */
	u32 state;  /* STACK_WHOLE: readable; STACK_NATIVE: no Python; STACK_UNSUPPORTED */
	u32 interpreter_next, interpreter_threads;
	u16 thread_next, thread_id, thread_frame, cframe_frame; /* cframe_frame 0xffff: none between */
	u8 frame_code, frame_previous, frame_instr, frame_owner, frame_size;
	u8 code_first, name, table; /* the latter two: which of four pointers from code_names on */
	u16 code_names, zero;
	u8 text_length, text_size, bytes_length, bytes_data;
	u64 instr_mask; /* 3.10: f_lasti is an int */
	u64 table_mask; /* 3.10: three pointers; the word after co_linetable changes */
};

struct stack_key {
	u64 hash, ret, native;
	u32 process, pad;
};

struct stack_frame {
	u64 code, instr;
	u32 signature, owner;
};

struct stack_code {
	u64 code;
	u32 process, pad;
};

struct stack_walk {
	u64 hash;
	u32 count, status;
};

struct stack_new { /* a stack that its thread sees for the first time */
	struct stack_key key;
	u64 state, first;
	u32 id, status, pid, python;
	u64 at; /* the frame whose code is to be named next */
	u32 named, kept; /* frames so far; whether there was room for all that was to be sent */
};

BPF_HASH(pythons, u32, struct python, 16384); /* by PID in dsprobe's own PID namespace */
BPF_HASH(stack_ids, struct stack_key, u32, STACKS);
BPF_TABLE("lru_hash", struct stack_code, u32, stack_codes, 65536);
BPF_TABLE("lru_hash", u64, u64, stack_threads, 16384); /* thread state of each thread */
BPF_HASH(stacks_new, u64, struct stack_new, 8192); /* by pid_tgid */
enum { STACK_TAKE, STACK_NAMES, STACK_SEND };
BPF_PROG_ARRAY(stack_programs, 3);
enum { STACK_OF_CALL, STACK_OF_MEMORY };
BPF_PROG_ARRAY(stack_users, 2); /* that go on when the stack of a call was taken */
BPF_QUEUE(stacks_lost, u32, 16384); /* numbers that were given and of which nothing was sent */
MMAP_ARRAY(stack_numbers, u64, 2); /* given so far; times that there was none to give */
RING(cuda_stack, 512);
RING(cuda_code, 512);
#if NATIVE_STACKS
RING(cuda_native, 1024);
#else
RING(cuda_native, 1);
#endif

static __always_inline void stack_counted(struct ring_count *n, int lost)
{
	if (!n)
		return;
	__sync_fetch_and_add(&n->produced, 1);
	__sync_fetch_and_add(&n->lost, lost);
}

static __always_inline void cuda_stack_counted(int lost)
{
	u32 cpu = bpf_get_smp_processor_id();

	stack_counted(cuda_stack_count.lookup(&cpu), lost);
}

static __always_inline void cuda_code_counted(int lost)
{
	u32 cpu = bpf_get_smp_processor_id();

	stack_counted(cuda_code_count.lookup(&cpu), lost);
}

#if NATIVE_STACKS
static __always_inline void cuda_native_counted(int lost)
{
	u32 cpu = bpf_get_smp_processor_id();

	stack_counted(cuda_native_count.lookup(&cpu), lost);
}
#endif

static __always_inline int stack_read(void *to, u32 size, u64 from)
{
	return bpf_probe_read_user(to, size, (void *)from);
}

/* A forked child has its parent's addresses: it is readable from its first instruction on.  To be
 * called at sched_process_fork with its two task_structs. */
static __always_inline void stacks_forked(u64 parent, u64 child)
{
	u32 from = own_pid(parent), to = own_pid(child);
	struct python *python;

	if (from == to || !to)
		return; /* a thread */
	python = pythons.lookup(&from);
	if (python) {
		struct python copy = *python;
		pythons.update(&to, &copy);
	}
}

/* To be called when a process executes another program, and when its last thread ends. */
static __always_inline void stacks_gone(u64 task)
{
	u32 pid = own_pid(task);

	pythons.delete(&pid);
}

/* The thread state whose thread_id is this thread's pthread_self(), which on x86_64 is its fs base:
 * true whoever holds the GIL, and in every PID namespace.  A thread that runs several interpreters
 * has a state in each; which of them runs is not told. */
static __always_inline u64 stack_thread(struct python *python, u64 fs, u32 *status)
{
	u64 key = bpf_get_current_pid_tgid(), interpreter = 0, state = 0, id = 0, other = 0;
	u64 match = python->zero; /* from memory, so that the verifier takes it for any number */
	u64 to_next = python->interpreter_next, to_threads = python->interpreter_threads;
	u64 next = python->thread_next, to_id = python->thread_id;
	u64 *hit = stack_threads.lookup(&key);

	stack_read(&interpreter, 8, python->heads);
	if (hit) {
		u64 links[3] = {}; /* prev, next, interp */
		u64 back = 0;

		state = *hit;
		/* still this thread's, still linked (the first words of a freed one change), and still of
		 * the only interpreter */
		if (!stack_read(&id, 8, state + to_id) && id == fs && !stack_read(links, 24, state) &&
		    !stack_read(&back, 8, links[0] ? links[0] + next : links[2] + to_threads) &&
		    back == state && links[2] == interpreter)
			return state;
	}
	stack_read(&other, 8, interpreter + to_next);
	stack_read(&state, 8, interpreter + to_threads);
	*status = STACK_MANY_THREADS;
	#pragma clang loop unroll(disable)
	for (int i = 0; i < STACK_THREADS; i++) {
		if (!state) {
			stack_read(&interpreter, 8, interpreter + to_next);
			if (!interpreter) {
				*status = STACK_NATIVE; /* a thread that Python does not know */
				return match;
			}
			stack_read(&state, 8, interpreter + to_threads);
			continue;
		}
		stack_read(&id, 8, state + to_id);
		if (id == fs) {
			if (match) {
				*status = STACK_SEVERAL;
				return 0;
			}
			match = state;
			if (!other) {
				stack_threads.update(&key, &state);
				return match;
			}
		}
		stack_read(&state, 8, state + next);
	}
	return 0;
}

/* Tells code objects apart that lie at the same address one after the other. */
static __always_inline u32 stack_signature(u64 *names, u64 table)
{
	u64 x = names[0] ^ names[1] >> 3 ^ names[2] << 7 ^ (names[3] & table) >> 5;

	return x ^ x >> 32;
}

/* Address of a thread state's innermost frame, 0 for none; whether it could be read. */
static __always_inline int stack_innermost(struct python *python, u64 state, u64 *at)
{
	if (stack_read(at, 8, state + python->thread_frame))
		return 0;
	return python->cframe_frame == 0xffff || !*at ||
	       !stack_read(at, 8, *at + python->cframe_frame);
}

/* Walk from a thread state outwards; frames are written where `out` is given. */
static __always_inline void stack_walk(struct python *python, u64 state, struct stack_frame *out,
				       struct stack_walk *walk)
{
	u64 frame[16] = {}, names[4] = {}, at = 0, hash = 0;
	u64 to_code = python->frame_code & 0x78, to_previous = python->frame_previous & 0x78;
	u64 to_instr = python->frame_instr & 0x78, to_owner = python->frame_owner & 0x7f;
	u64 size = python->frame_size & 0x7f, to_names = python->code_names;
	u64 instr_mask = python->instr_mask, table_mask = python->table_mask;
	u32 i;

	walk->status = STACK_UNREADABLE;
	if (!stack_innermost(python, state, &at))
		return;
	walk->status = STACK_DEEP;
	#pragma clang loop unroll(disable)
	for (i = 0; i < STACK_FRAMES; i++) {
		if (!at) {
			walk->status = STACK_WHOLE;
			break;
		}
		if (stack_read(frame, size, at)) {
			walk->status = STACK_UNREADABLE;
			break;
		}
		u64 code = *(u64 *)((u8 *)frame + to_code) & ~7ULL; /* the low bits are tags from 3.14 on */
		u64 instr = *(u64 *)((u8 *)frame + to_instr) & instr_mask;
		at = *(u64 *)((u8 *)frame + to_previous);
		stack_read(names, 32, code + to_names); /* where that fails: zeros */
		u32 signature = stack_signature(names, table_mask);
		if (out) {
			out[i].code = code;
			out[i].instr = instr;
			out[i].signature = signature;
			out[i].owner = ((u8 *)frame)[to_owner];
		}
		hash = (hash ^ code ^ signature) * 0x9E3779B97F4A7C15ULL;
		hash = (hash ^ hash >> 29 ^ instr) * 0xBF58476D1CE4E5B9ULL;
	}
	/* the last one may just fit */
	if (i == STACK_FRAMES && !at)
		walk->status = STACK_WHOLE;
	walk->count = i;
	walk->hash = hash;
}

/* The number of the calling thread's stack; `ret` is where its call of the driver returns to. */
static __always_inline u32 stack_id(struct pt_regs *ctx, struct thread *t, u64 ret)
{
	u64 task = bpf_get_current_task(), fs = 0, state = 0, thread = bpf_get_current_pid_tgid();
	u32 pid = own_pid(task), zero = 0;
	struct python *python = pythons.lookup(&pid);
	struct stack_walk walk = { .status = STACK_UNKNOWN };
	struct stack_new new = { .key.ret = ret, .key.process = t->process, .pid = pid };

	READ(fs, task, TASK_FSBASE);
	if (python) {
		new.python = python->number;
		walk.status = python->state;
		if (walk.status == STACK_WHOLE)
			state = stack_thread(python, fs, &walk.status);
	}
	if (state)
		stack_walk(python, state, 0, &walk);
	new.key.hash = walk.hash ^ walk.status;
#if NATIVE_STACKS
	new.key.native = fs - ctx->sp;
#endif
	u32 *known = stack_ids.lookup(&new.key);
	if (known)
		return *known;

	u64 *number = stack_numbers.lookup(&zero);
	if (!number)
		return 0;
	new.id = STACK_FIRST + next_number(number);
	if (stack_ids.insert(&new.key, &new.id)) {
		known = stack_ids.lookup(&new.key); /* another thread was first */
		if (known)
			return *known;
		u32 one = 1;
		number = stack_numbers.lookup(&one);
		if (number)
			__sync_fetch_and_add(number, 1);
		return STACK_NO_ROOM;
	}
	new.state = state;
	new.first = walk.hash;
	new.status = walk.status;
	new.kept = 1;
	if (stacks_new.update(&thread, &new)) {
		cuda_stack_counted(1);
		stack_ids.delete(&new.key);
		return STACK_RING_FULL;
	}
	return new.id;
}

int stack_walked(struct pt_regs *ctx)
{
	struct thread *t;
	struct function *f;
	struct call *o = cuda_left(&t, &f);

	if (!o)
		return 0;
	o->stack = stack_id(ctx, t, o->ret);
	stack_users.call(ctx, o->then);
	return 0;
}

/* Take the stack of a call that has returned, and go on with program `then` of stack_users, which
 * finds it in the call, and ends with stacks_finish().  Returns where stacks cannot be taken. */
static __always_inline void stack_take(struct pt_regs *ctx, struct call *o, u32 then)
{
	o->then = then;
	stack_programs.call(ctx, STACK_TAKE);
}

/* The end of a program that had stack `id` taken: sends what is new of it, and does not return then. */
static __always_inline void stacks_finish(struct pt_regs *ctx, u32 id)
{
	u64 thread = bpf_get_current_pid_tgid();
	struct stack_new *new = id < STACK_FIRST ? 0 : stacks_new.lookup(&thread);

	if (!new)
		return;
	stack_programs.call(ctx, STACK_NAMES);
	cuda_stack_counted(1); /* the program is not there */
	stack_ids.delete(&new->key);
	stacks_new.delete(&thread);
}
