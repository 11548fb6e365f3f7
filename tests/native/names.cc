extern "C" {
#include "snapshot.h"
}
#include <string>
#include <vector>

namespace at::native {
namespace {
struct Allocator {
	template <typename T, int N>
	__attribute__((noinline)) int allocate(const std::vector<T> &sizes, T (&)[N]) const
	{
		take_snapshot();
		return int(sizes.size()) + N;
	}
};
} // namespace

__attribute__((noinline)) int empty(const std::string &device, double)
{
	long array[3] = {};
	return Allocator().allocate<long, 3>({1, 2, 3}, array) + int(device.size());
}
} // namespace at::native

static volatile int opaque;

int main()
{
	auto call = [&](int n) __attribute__((noinline)) { return at::native::empty("cuda", n) + n; };
	return call(opaque) == 0;
}
