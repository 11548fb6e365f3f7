/* What a uprobe takes at the return of a call, and the truth about it: registers, the top of the
 * stack, and the stack as libgcc's own unwinder sees it.  One line of text; then it waits. */
#define _GNU_SOURCE
#include <execinfo.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <ucontext.h>
#include <unistd.h>

static unsigned char stack_copy[12288];
static void *stack_truth[128];

__attribute__((noinline)) static void take_snapshot(void)
{
	ucontext_t u;
	char dummy;

	getcontext(&u); /* as of its return to here */
	unsigned char *sp = (unsigned char *)u.uc_mcontext.gregs[REG_RSP];
	size_t size = sizeof stack_copy, length;
	pthread_attr_t attributes;
	void *low;

	pthread_getattr_np(pthread_self(), &attributes);
	pthread_attr_getstack(&attributes, &low, &length);
	if (size > (size_t)((unsigned char *)low + length - sp))
		size = (unsigned char *)low + length - sp;
	memcpy(stack_copy, sp, size);
	int n = backtrace(stack_truth, 128);
	const int order[] = {REG_RIP, REG_RSP, REG_RBP, REG_RBX, REG_R12, REG_R13, REG_R14, REG_R15};

	for (int i = 0; i < 8; i++)
		printf("%llx ", (unsigned long long)u.uc_mcontext.gregs[order[i]]);
	for (size_t i = 0; i < size; i++)
		printf("%02x", stack_copy[i]);
	for (int i = 1; i < n; i++) /* 0 is in here, where backtrace returned to */
		printf(" %llx", (unsigned long long)(uintptr_t)stack_truth[i]);
	printf("\n");
	fflush(stdout);
	while (read(0, &dummy, 1) > 0)
		;
}
