/* SPDX-License-Identifier: GPL-2.0-only OR Apache-2.0 */
/* NAPI polls per network device, aggregated per CPU.
 *
 * A poll can take well under a microsecond, so this must not cost much: each CPU has a few cells in
 * an array that user space maps, found by the device's address, without a hash map.  A device is
 * known by its address, index and namespace together, as an address may be used again. */
struct napi_cell {
	u64 dev;
	u64 net;
	u64 polls;
	u64 work;
	u64 budget_hits;
	u32 ifindex;
	u32 netns;
	char device[16];
};

MMAP_ARRAY(napi_cells, struct napi_cell, NCPU * NAPI_CELLS);
MMAP_ARRAY(napi_count, struct ring_count, NCPU);

static __always_inline void napi_add(struct napi_cell *c, int work, int budget)
{
	c->polls++;
	c->work += work > 0 ? work : 0;
	c->budget_hits += work >= budget;
}

int napi_poll(struct bpf_raw_tracepoint_args *ctx)
{
	u64 napi = ctx->args[0], dev = 0, net = 0;
	u32 cpu = bpf_get_smp_processor_id(), ifindex = 0;
	READ(dev, napi, NAPI_DEV); /* none for a CPU's backlog */
	if (dev) {
		READ(ifindex, dev, NETDEV_IFINDEX);
		READ(net, dev, NETDEV_NET);
	}
	u32 first = dev ? (dev >> 12 ^ dev >> 6) % NAPI_CELLS : 0;
#pragma unroll
	for (u32 i = 0; i < NAPI_PROBES; i++) {
		u32 at = cpu * NAPI_CELLS + (first + i) % NAPI_CELLS;
		struct napi_cell *c = napi_cells.lookup(&at);
		if (!c)
			return 0;
		if (c->dev == dev && c->net == net && c->ifindex == ifindex) {
			napi_add(c, ctx->args[1], ctx->args[2]);
			return 0;
		}
		if (c->polls) /* another device's */
			continue;
		c->dev = dev;
		c->net = net;
		c->ifindex = ifindex;
		if (dev) {
			u32 inum = 0;
			READ(inum, net, NET_INUM);
			c->netns = inum;
			bpf_probe_read_kernel(c->device, sizeof(c->device),
					      (void *)dev + NETDEV_NAME);
		}
		napi_add(c, ctx->args[1], ctx->args[2]);
		return 0;
	}
	struct ring_count *n = napi_count.lookup(&cpu);
	if (n)
		n->lost++; /* all its cells belong to other devices */
	return 0;
}
