/* SPDX-License-Identifier: GPL-2.0-only OR Apache-2.0 */
/* NAPI polls per network device, aggregated per CPU.
 *
 * A device is keyed by its address, index and namespace together: the address alone may be that of
 * a device that has gone. */
struct napi_key {
	u64 dev;
	u64 net;
	u64 ifindex;
};

struct napi_cell {
	u64 polls;
	u64 work;
	u64 budget_hits;
	u32 netns;
	u32 ifindex;
	char device[16];
};

BPF_F_TABLE("percpu_hash", struct napi_key, struct napi_cell, napi_cells, 1024, 0);
MMAP_ARRAY(napi_lost, struct ring_count, NCPU);

int napi_poll(struct bpf_raw_tracepoint_args *ctx)
{
	u64 napi = ctx->args[0];
	int work = ctx->args[1];
	int budget = ctx->args[2];
	struct napi_key key = {};
	READ(key.dev, napi, NAPI_DEV);
	if (key.dev) {
		u32 ifindex = 0;
		READ(ifindex, key.dev, NETDEV_IFINDEX);
		key.ifindex = ifindex;
		READ(key.net, key.dev, NETDEV_NET);
	}
	struct napi_cell *c = napi_cells.lookup(&key);
	if (!c) {
		struct napi_cell fresh = {};
		fresh.ifindex = key.ifindex;
		if (key.dev) {
			READ(fresh.netns, key.net, NET_INUM);
			bpf_probe_read_kernel(fresh.device, sizeof(fresh.device),
					      (void *)key.dev + NETDEV_NAME);
		}
		napi_cells.update(&key, &fresh);
		c = napi_cells.lookup(&key);
	}
	if (!c) { /* the map is full */
		u32 cpu = bpf_get_smp_processor_id();
		struct ring_count *n = napi_lost.lookup(&cpu);
		if (n)
			__sync_fetch_and_add(&n->lost, 1);
		return 0;
	}
	c->polls++;
	c->work += work > 0 ? work : 0;
	c->budget_hits += work >= budget;
	return 0;
}
