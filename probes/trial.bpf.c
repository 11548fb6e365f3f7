/* SPDX-License-Identifier: GPL-2.0-only OR Apache-2.0 */
/* What a probe sees of a call, to be compared with what the caller knows of it. */
#define TRIAL_REGISTERS 6
#define TRIAL_STACK 6

struct trial_seen {
	u64 registers[TRIAL_REGISTERS];
	u64 stack[TRIAL_STACK];
	u64 result;
	u32 entries, returns;
};

MMAP_ARRAY(trial_seen, struct trial_seen, TRIAL_FUNCTIONS);

static u64 (*trial_cookie)(void *) = (void *)174; /* bpf_get_attach_cookie */

int trial_enter(struct pt_regs *ctx)
{
	u32 i = trial_cookie(ctx);
	struct trial_seen *s = trial_seen.lookup(&i);
	if (!s)
		return 0;
	s->registers[0] = PT_REGS_PARM1(ctx);
	s->registers[1] = PT_REGS_PARM2(ctx);
	s->registers[2] = PT_REGS_PARM3(ctx);
	s->registers[3] = PT_REGS_PARM4(ctx);
	s->registers[4] = PT_REGS_PARM5(ctx);
	s->registers[5] = PT_REGS_PARM6(ctx);
	/* Above the return address (System V ABI, AMD64 supplement, 3.2.3). */
	bpf_probe_read_user(s->stack, sizeof(s->stack), (void *)(PT_REGS_SP(ctx) + 8));
	__sync_fetch_and_add(&s->entries, 1);
	return 0;
}

int trial_leave(struct pt_regs *ctx)
{
	u32 i = trial_cookie(ctx);
	struct trial_seen *s = trial_seen.lookup(&i);
	if (!s)
		return 0;
	s->result = PT_REGS_RC(ctx);
	__sync_fetch_and_add(&s->returns, 1);
	return 0;
}

/* What a hit costs without a program's own work. */
int trial_nothing(struct pt_regs *ctx)
{
	return 0;
}

int trial_nothing_back(struct pt_regs *ctx)
{
	return 0;
}
