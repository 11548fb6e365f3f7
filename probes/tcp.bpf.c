/* SPDX-License-Identifier: GPL-2.0-only OR Apache-2.0 */
/* One event per retransmission call (net/ipv4/tcp_output.c).
 *
 * The sockets are read at offsets from BTF rather than through the tracepoint's own fields, which
 * differ between kernels: "family" came with 5.16, "err" with 6.16. */
#define AF_INET 2
#define AF_INET6 10
#define TCP_SYN_SENT 2
#define TCP_NEW_SYN_RECV 12
#define TCP_CA_RECOVERY 3
#define TCP_CA_LOSS 4
#define EAGAIN 11
#define ENOMEM 12
#define EBUSY 16
#define EINVAL 22
#define EHOSTUNREACH 113
#define V4_MAPPED 0xffff0000U /* bytes 00 00 ff ff */

enum { KIND_DATA, KIND_SYN, KIND_SYNACK };
enum { CAUSE_UNKNOWN, CAUSE_RTO, CAUSE_FAST, CAUSE_PROBE };

RING(tcp_retransmit, 256);

/* Space in the ring for one more event, all zero; NULL where there is none (then it is counted). */
static __always_inline void tcp_count(u32 lost)
{
	u32 cpu = bpf_get_smp_processor_id();
	struct ring_count *n = tcp_retransmit_count.lookup(&cpu);
	if (!n)
		return;
	if (lost)
		__sync_fetch_and_add(&n->lost, 1);
	else
		__sync_fetch_and_add(&n->produced, 1);
}

static __always_inline void tcp_addresses(struct tcp_retransmit *e, u64 common, u64 sk)
{
	u16 family = 0, dport = 0, sport = 0;
	u32 s[4] = {}, d[4] = {};
	u64 net = 0;
	READ(family, common, SOCK_FAMILY);
	READ(sport, common, SOCK_NUM);
	READ(dport, common, SOCK_DPORT);
	READ(net, sk, SOCK_NET);
	e->mapped = 0;
	e->family = 4;
	if (family == AF_INET6) {
		READ(s, common, SOCK_SADDR6);
		READ(d, common, SOCK_DADDR6);
		e->mapped = !d[0] && !d[1] && d[2] == V4_MAPPED;
		e->family = e->mapped ? 4 : 6;
	} else {
		s[2] = d[2] = V4_MAPPED;
		READ(s[3], common, SOCK_SADDR);
		READ(d[3], common, SOCK_DADDR);
	}
	__builtin_memcpy(e->saddr, s, 16);
	__builtin_memcpy(e->daddr, d, 16);
	e->sport = sport;
	e->dport = (u16)(dport << 8 | dport >> 8);
	u32 inum = 0;
	READ(inum, net, NET_INUM);
	e->netns = inum;
}

int tcp_retransmit_skb(struct bpf_raw_tracepoint_args *ctx)
{
	u64 sk = ctx->args[0], skb = ctx->args[1];
	tcp_count(0);
	struct tcp_retransmit *e = tcp_retransmit.ringbuf_reserve(sizeof(struct tcp_retransmit));
	if (!e) {
		tcp_count(1);
		return 0;
	}
	u8 state = 0, ca = 0;
	u16 segments = 0;
	READ(state, sk, SOCK_STATE);
	READ(ca, sk, ICSK_CA_STATE);
	READ(segments, skb, SKB_CB + TCP_CB_GSO_SEGS);
	ca = ca >> ICSK_CA_SHIFT & ICSK_CA_MASK;
	e->t = bpf_ktime_get_ns();
	e->state = state;
	e->kind = state == TCP_SYN_SENT ? KIND_SYN : KIND_DATA;
	e->cause = ca == TCP_CA_LOSS ? CAUSE_RTO : ca == TCP_CA_RECOVERY ? CAUSE_FAST : CAUSE_PROBE;
	if (state == TCP_SYN_SENT)
		e->cause = CAUSE_RTO; /* a SYN is only ever sent again by its timer */
	e->segments = segments;
#ifdef TCP_RETRANSMIT_ERR
	e->err = (s16)ctx->args[2];
	/* These mean that __tcp_retransmit_skb() gave up before it sent or counted anything. */
	if (e->err == -EBUSY || e->err == -EAGAIN || e->err == -EINVAL || e->err == -ENOMEM ||
	    e->err == -EHOSTUNREACH)
		e->segments = 0;
#else
	e->err = 0;
#endif
	tcp_addresses(e, sk, sk);
	tcp_retransmit.ringbuf_submit(e, BPF_RB_NO_WAKEUP);
	return 0;
}

int tcp_retransmit_synack(struct bpf_raw_tracepoint_args *ctx)
{
	u64 sk = ctx->args[0], req = ctx->args[1];
	tcp_count(0);
	struct tcp_retransmit *e = tcp_retransmit.ringbuf_reserve(sizeof(struct tcp_retransmit));
	if (!e) {
		tcp_count(1);
		return 0;
	}
	e->t = bpf_ktime_get_ns();
	e->state = TCP_NEW_SYN_RECV;
	e->kind = KIND_SYNACK;
	e->cause = CAUSE_RTO; /* likewise */
	e->segments = 1;
	e->err = 0;
	tcp_addresses(e, req, sk); /* struct request_sock begins with the same sock_common */
	tcp_retransmit.ringbuf_submit(e, BPF_RB_NO_WAKEUP);
	return 0;
}
