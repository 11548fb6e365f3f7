/* SPDX-License-Identifier: GPL-2.0-only OR Apache-2.0 */
/* PIDs as dsprobe's own PID namespace counts them: those that its user space can do anything with.
 * Where that is not the host's, the kernel's helpers give others. */

/* A task's own; 0 where it has none in our namespace. */
static __always_inline u32 own_tid(u64 task)
{
	u32 found = 0;
#if PID_NAMESPACE
	u64 pid = 0;
	u32 level = 0, inode = 0;

	READ(pid, task, TASK_THREAD_PID);
	READ(level, pid, PID_LEVEL);
	#pragma clang loop unroll(disable)
	for (u32 i = 0; i < 32; i++) { /* MAX_PID_NS_LEVEL, include/linux/pid_namespace.h */
		struct { u32 number, pad; u64 ns; } upid = {};

		if (i > level)
			break;
		READ(upid, pid, PID_NUMBERS + i * sizeof(upid));
		READ(inode, upid.ns, NS_INODE);
		if (inode == PID_NAMESPACE)
			found = upid.number;
	}
#else
	READ(found, task, TASK_PID);
#endif
	return found;
}

/* Its process's. */
static __always_inline u32 own_pid(u64 task)
{
	u64 leader = 0;

	READ(leader, task, TASK_GROUP_LEADER);
	return own_tid(leader);
}
