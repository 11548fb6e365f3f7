/* Static and exported functions, a call that does not return at a function's end. */
#include "snapshot.h"
#include <stdlib.h>

__attribute__((noinline)) static int innermost(volatile int *x)
{
	take_snapshot();
	return *x + 1;
}

__attribute__((noinline, noreturn)) static void never_returns(volatile int *x)
{
	exit(innermost(x) == 0);
}

__attribute__((noinline)) int exported_middle(int n)
{
	volatile int room[100];

	memset((void *)room, n, sizeof room);
	if (n > 3)
		never_returns(&room[n]); /* the return address is that of the next function */
	return exported_middle(n + 1) + room[n];
}

static int compare(const void *a, const void *b)
{
	(void)a, (void)b;
	return exported_middle(0);
}

int main(void)
{
	int two[2] = {1, 2};

	qsort(two, 2, sizeof *two, compare); /* through libc, and a pointer */
	return 0;
}
