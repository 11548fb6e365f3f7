/* A call inside a signal handler that interrupted a function, on the same stack. */
#include "snapshot.h"
#include <signal.h>

static volatile int *nowhere;

static void handler(int number)
{
	(void)number;
	take_snapshot();
	_exit(0);
}

__attribute__((noipa)) static int faults(int n)
{
	volatile int room[50] = {n};

	return *nowhere + room[0]; /* interrupted at this instruction, not after a call */
}

int main(void)
{

	signal(SIGSEGV, handler);
	return faults(1) + 1;
}
