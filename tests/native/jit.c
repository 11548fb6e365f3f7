/* A call through code made at run time, for which no unwind table exists. */
#include "snapshot.h"
#include <sys/mman.h>

__attribute__((noinline)) static int below(void)
{
	take_snapshot();
	return 1;
}

int main(void)
{
	/* push %rbx; mov $below,%rax; call *%rax; pop %rbx; ret */
	unsigned char code[] = {0x53, 0x48, 0xb8, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xd0, 0x5b, 0xc3};
	int (*made)(void) = mmap(0, 4096, 7, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	uintptr_t target = (uintptr_t)below;

	memcpy(code + 3, &target, 8);
	memcpy((void *)made, code, sizeof code);
	return made() + 1;
}
