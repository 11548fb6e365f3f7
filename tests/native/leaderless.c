/* A program that goes on after its first thread has ended. */
#include "snapshot.h"

static pthread_t first;

__attribute__((noipa)) static int survivor(void)
{
	FILE *maps;
	int c;

	pthread_join(first, 0);
	do { /* until the kernel has taken its memory from it */
		maps = fopen("/proc/self/maps", "r");
		c = fgetc(maps);
		fclose(maps);
	} while (c != EOF);
	take_snapshot();
	return 1;
}

static void *work(void *unused)
{
	(void)unused;
	survivor();
	_exit(0);
}

int main(void)
{
	pthread_t thread;

	first = pthread_self();
	pthread_create(&thread, 0, work, 0);
	pthread_exit(0);
}
