/* SPDX-License-Identifier: Apache-2.0
 * Calls that are left by longjmp, and calls made inside calls, from the callback that the simulated
 * driver makes inside each call that can block.  Prints what it did as JSON. */
#include <setjmp.h>

#include "../simgpu/workloads/common.h"

static jmp_buf out;
static int jump, inside;
static int (*sync_ctx)(void), (*sync_stream)(void *), (*copy)(u64, const void *, u64);

static void told(u32 symbol, u64 begun, const u64 *args) {
    (void)symbol, (void)begun, (void)args;
    if (jump) {
        jump = 0;
        longjmp(out, 1);
    }
    if (inside) {
        inside = 0;
        must(sync_stream(NULL), "cuStreamSynchronize");
    }
}

int main(void) {
    static char host[4096];
    u64 p;
    driver_start();
    sync_ctx = symbol("cuCtxSynchronize");
    sync_stream = symbol("cuStreamSynchronize");
    copy = symbol("cuMemcpyHtoD_v2");
    must(((int (*)(u64 *, u64))symbol("cuMemAlloc_v2"))(&p, 4096), "cuMemAlloc_v2");
    ((void (*)(void (*)(u32, u64, const u64 *)))symbol("simgpu_on_call"))(told);
    volatile int left = 0;
    for (volatile int i = 0; i < 100; i++) {
        jump = i % 3 == 0;
        if (setjmp(out) == 0) must(sync_ctx(), "cuCtxSynchronize");
        else left++;
    }
    for (volatile int i = 0; i < 20; i++) { /* from further and further down */
        jump = 1;
        volatile char *deeper = __builtin_alloca(256);
        deeper[0] = 0;
        if (setjmp(out) == 0) must(sync_ctx(), "cuCtxSynchronize");
    }
    for (int i = 0; i < 10; i++) {
        inside = i % 2;
        must(copy(p, host, 4096), "cuMemcpyHtoD_v2");
    }
    printf("{\"cuCtxSynchronize\": [120, %d], \"cuMemcpyHtoD_v2\": [10, 10],"
           " \"cuStreamSynchronize\": [5, 5]}\n", 100 - left);
    return 0;
}
