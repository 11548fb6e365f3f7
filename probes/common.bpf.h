/* SPDX-License-Identifier: GPL-2.0-only OR Apache-2.0 */
/* Put before every module.  The loader defines NCPU, and a packed struct for each ring from its
 * stream's declaration, so the two cannot differ. */
#include <uapi/linux/ptrace.h>
#include <linux/types.h>

#ifndef __always_inline
#define __always_inline inline __attribute__((always_inline))
#endif

/* Exact counts beside a ring: reserved or not, every event is counted first. */
struct ring_count {
	u64 produced;
	u64 lost;
	u64 pad[6]; /* a cache line per CPU */
};

/* Array maps that user space maps and reads without a system call (Linux 5.5). */
#define MMAP_ARRAY(name, leaf, size) \
	BPF_F_TABLE("array", u32, leaf, name, size, BPF_F_MMAPABLE)
#define RING(name, pages) \
	BPF_RINGBUF_OUTPUT(name, pages); \
	MMAP_ARRAY(name##_count, struct ring_count, NCPU)

#define HIST_SLOTS 32

/* Slot of a log2 histogram: i for [2^i, 2^(i+1)), the last for all above.  A binary search, as BPF
 * has no count-leading-zeros. */
static __always_inline u32 hist_slot(u64 v)
{
	u32 r = 0;
	u32 lo = v >> 32 ? 0xffffffff : (u32)v;
	if (lo >= 1 << 16) { r += 16; lo >>= 16; }
	if (lo >= 1 << 8) { r += 8; lo >>= 8; }
	if (lo >= 1 << 4) { r += 4; lo >>= 4; }
	if (lo >= 1 << 2) { r += 2; lo >>= 2; }
	r += lo >> 1 & 1;
	asm volatile("" : "+r"(r)); /* or clang drops the mask, which the verifier needs */
	return r & (HIST_SLOTS - 1);
}

/* Add 1 and return what was there (Linux 5.12).  By bytes, as bcc compiles for the first version of
 * the instruction set, which had no such instruction: BPF_STX | BPF_ATOMIC | BPF_DW, r9 += r8,
 * BPF_ADD | BPF_FETCH.  r8 and r9 are names on x86_64 too, for which bcc parses first. */
static __always_inline u64 next_number(u64 *counter)
{
	u64 n = 1;

	asm volatile("r9 = %1\nr8 = %0\n.byte 0xdb, 0x89, 0, 0, 1, 0, 0, 0\n%0 = r8"
		     : "+r"(n) : "r"(counter) : "r8", "r9", "memory");
	return n;
}

/* Copy a field of a kernel structure whose offset the loader found in BTF. */
#define READ(dst, base, offset) bpf_probe_read_kernel(&(dst), sizeof(dst), (void *)(base) + (offset))
