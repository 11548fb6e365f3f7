// Allocates on the simulated driver somewhere deep in C++, and says by whom it was called.
extern "C" {
#include "snapshot.h"
}
#include <dlfcn.h>
#include <algorithm>
#include <cstdlib>
#include <vector>

template <typename T> static T driver(const char *name)
{
	static void *library = dlopen("libcuda.so.1", RTLD_NOW);
	return reinterpret_cast<T>(dlsym(library, name));
}

static volatile int opaque; // how often to allocate without saying by whom

namespace pool {
struct Segment {
	__attribute__((noipa)) int grow(size_t bytes)
	{
		unsigned long long address = 0;
		int result = driver<int (*)(unsigned long long *, size_t)>("cuMemAlloc_v2")(&address, bytes);

		if (!opaque)
			take_snapshot();
		return result;
	}
};

__attribute__((noipa)) int refill(const std::vector<size_t> &sizes)
{
	volatile char room[300] = {0};
	return Segment().grow(sizes[0]) + room[opaque & 255];
}
} // namespace pool

static int compare(const void *, const void *)
{
	return pool::refill({1 << 20});
}

int main(int argc, char **argv)
{
	int two[2] = {1, 2};
	void *context = nullptr;

	if (driver<int (*)(unsigned)>("cuInit")(0) ||
	    driver<int (*)(void **, int)>("cuDevicePrimaryCtxRetain")(&context, 0) ||
	    driver<int (*)(void *)>("cuCtxSetCurrent")(context))
		return 3;
	opaque = argc > 1 ? atoi(argv[1]) : 0;
	do {
		qsort(two, 2, sizeof *two, compare);
		if (opaque)
			usleep(20000);
	} while (opaque && --opaque);
	return 0;
}
