/* Helpers and maps of the programs. No header of libbpf: the kernel's own are enough. */
#ifndef VNET_COMMON_H
#define VNET_COMMON_H

#include <linux/bpf.h>
#include <linux/pkt_cls.h>
#include "shared.h"

#define SEC(name) __attribute__((section(name), used))
#define INLINE static __attribute__((always_inline))

static void *(*const bpf_map_lookup_elem)(void *map, const void *key) = (void *)BPF_FUNC_map_lookup_elem;
static __u64 (*const bpf_ktime_get_ns)(void) = (void *)BPF_FUNC_ktime_get_ns;
static __u64 (*const bpf_ktime_get_coarse_ns)(void) = (void *)BPF_FUNC_ktime_get_coarse_ns;
static long (*const bpf_skb_load_bytes)(const void *skb, __u32 offset, void *to, __u32 len) =
	(void *)BPF_FUNC_skb_load_bytes;
static long (*const bpf_redirect)(__u32 device, __u64 flags) = (void *)BPF_FUNC_redirect;
static long (*const bpf_redirect_peer)(__u32 device, __u64 flags) = (void *)BPF_FUNC_redirect_peer;
static long (*const bpf_clone_redirect)(struct __sk_buff *skb, __u32 device, __u64 flags) =
	(void *)BPF_FUNC_clone_redirect;
static long (*const bpf_skb_change_type)(struct __sk_buff *skb, __u32 type) =
	(void *)BPF_FUNC_skb_change_type;
static long (*const bpf_skb_get_tunnel_key)(struct __sk_buff *skb, struct bpf_tunnel_key *key, __u32 size,
					    __u64 flags) = (void *)BPF_FUNC_skb_get_tunnel_key;
static long (*const bpf_skb_set_tunnel_key)(struct __sk_buff *skb, struct bpf_tunnel_key *key, __u32 size,
					    __u64 flags) = (void *)BPF_FUNC_skb_set_tunnel_key;
static long (*const bpf_skb_change_head)(struct __sk_buff *skb, __u32 len, __u64 flags) =
	(void *)BPF_FUNC_skb_change_head;
static long (*const bpf_skb_store_bytes)(struct __sk_buff *skb, __u32 offset, const void *from, __u32 len,
					 __u64 flags) = (void *)BPF_FUNC_skb_store_bytes;
static long (*const bpf_skb_change_tail)(struct __sk_buff *skb, __u32 len, __u64 flags) =
	(void *)BPF_FUNC_skb_change_tail;
static long (*const bpf_skb_adjust_room)(struct __sk_buff *skb, __s32 len_diff, __u32 mode, __u64 flags) =
	(void *)BPF_FUNC_skb_adjust_room;

static __u32 (*const bpf_get_hash_recalc)(struct __sk_buff *skb) = (void *)BPF_FUNC_get_hash_recalc;
static long (*const bpf_redirect_neigh)(__u32 device, void *next, int len, __u64 flags) =
	(void *)BPF_FUNC_redirect_neigh;
static long (*const bpf_fib_lookup)(void *ctx, struct bpf_fib_lookup *params, int len, __u32 flags) =
	(void *)BPF_FUNC_fib_lookup;
static struct bpf_sock *(*const bpf_skc_lookup_tcp)(void *ctx, struct bpf_sock_tuple *tuple, __u32 size,
						     __u64 netns, __u64 flags) = (void *)BPF_FUNC_skc_lookup_tcp;
static long (*const bpf_map_update_elem)(void *map, const void *key, const void *value, __u64 flags) =
	(void *)BPF_FUNC_map_update_elem;
static long (*const bpf_map_push_elem)(void *map, const void *value, __u64 flags) = (void *)BPF_FUNC_map_push_elem;
static long (*const bpf_l4_csum_replace)(struct __sk_buff *skb, __u32 offset, __u64 from, __u64 to, __u64 flags) =
	(void *)BPF_FUNC_l4_csum_replace;
static long (*const bpf_sk_release)(void *sock) = (void *)BPF_FUNC_sk_release;

struct bpf_map_def {
	__u32 type, key_size, value_size, max_entries, map_flags, id, pinning;
};

#define MAP(name, kind, key, value, entries, flags)                                                    \
	struct bpf_map_def SEC("maps") name = { .type = (kind), .key_size = sizeof(key),               \
		.value_size = sizeof(value), .max_entries = (entries), .map_flags = (flags) }

MAP(flows, BPF_MAP_TYPE_HASH, struct flow_key, struct flow, FLOWS_MAX, BPF_F_NO_PREALLOC);
MAP(tallies, BPF_MAP_TYPE_ARRAY, __u32, struct tally, FLOWS_MAX, BPF_F_MMAPABLE);
MAP(ports, BPF_MAP_TYPE_HASH, __u32, struct port, PORTS_MAX, BPF_F_NO_PREALLOC);
MAP(state, BPF_MAP_TYPE_ARRAY, __u32, struct state, 1, BPF_F_MMAPABLE);
MAP(peers, BPF_MAP_TYPE_HASH, struct peer_key, struct peer, PEERS_MAX, BPF_F_NO_PREALLOC);
MAP(conversations, BPF_MAP_TYPE_LRU_HASH, struct conversation, struct translated, CONVERSATIONS_MAX, 0);
MAP(translations, BPF_MAP_TYPE_HASH, struct translation_key, struct translation, TRANSLATIONS_MAX, BPF_F_NO_PREALLOC);
/* A queue has no keys. */
struct bpf_map_def SEC("maps") wanted = { .type = BPF_MAP_TYPE_QUEUE, .value_size = sizeof(struct wanted),
	.max_entries = WANTED_MAX };

/* Bytes of a tunnel key in Linux 5.10. */
#define TUNNEL_KEY_LEN 28
#define TTL 64
#define VLAN_TAG 4
/* linux/if_packet.h */
#define PACKET_HOST 0

/* 1 on kernels with bpf_ktime_get_coarse_ns (Linux 5.11); vnetd sets it when it loads the programs. */
static const volatile __u32 has_coarse_clock SEC(".rodata") = 0;

/* CLOCK_MONOTONIC, up to a tick late where the kernel can: reading the time itself takes a twentieth of a small frame's way. */
INLINE __u64 now(void)
{
	return has_coarse_clock ? bpf_ktime_get_coarse_ns() : bpf_ktime_get_ns();
}

/* Whether the version in the flow's bucket is still the flow's. The bucket is read after the last call of a helper and checked at
 * once: the verifier of Linux 6.1 forgets the bounds of values that it spills to the stack for a call. */
INLINE int is_current(const struct state *is, const struct flow *flow, int which)
{
	__u32 bucket = *(const volatile __u32 *)&flow->buckets[which];

	return bucket < VERSIONS && is->versions[bucket] == flow->versions[which];
}

/* Whether the verdict still holds. */
INLINE int holds(const struct flow *flow, __u64 now_ns)
{
	__u32 zero = 0;
	struct state *is = bpf_map_lookup_elem(&state, &zero);

	if (!is || now_ns >= is->end_ns || is->clock_ns >= flow->until_ns || is->generation != flow->generation)
		return 0;
	return is_current(is, flow, 0) && is_current(is, flow, 1);
}

/* Delivers the frame to a guest. A frame for the guest's own address skips the device's queue, and the guest's kernel accepts it as
 * addressed to it; for other frames, the receiving end determines the packet type. */
INLINE long to_guest(struct __sk_buff *skb, __u32 device, __u32 own_address)
{
	if (!own_address)
		return bpf_redirect(device, 0);
	/* Kernels before 6.12 keep the type that the sending end gave. */
	bpf_skb_change_type(skb, PACKET_HOST);
	return bpf_redirect_peer(device, 0);
}

#define ETH_LEN 14
#define IP_LEN 20
#define UDP_LEN 8
#define ETH_P_IP_BE __builtin_bswap16(0x0800)
#define ETH_P_IPV6_BE __builtin_bswap16(0x86dd)
#define ETH_P_ARP_BE __builtin_bswap16(0x0806)
#define ICMPV6 58
/* RFC 4861: from router solicitation to redirect. */
#define ND_FIRST 133
#define ND_LAST 137
#define TCP 6
#define UDP 17
#define BPF_TCP_LISTEN 10

/* An IPv4 header without options. */
struct ip4 {
	__u8 version, tos;
	__u16 len, id, fragment;
	__u8 ttl, protocol;
	__u16 sum;
	__u32 src, dst;
};

/* Headers of a frame: Ethernet type, IPv4 without options, ports. */
struct inner {
	__u16 unused;
	__u16 type;
	struct ip4 ip;
	__u16 sport, dport;
};

/* Whether a program may take the frame at `at` out of its tunnel: an IPv4 packet, whole or a fragment. Removing a tunnel's headers
 * leaves the tunnel's offload state on the buffer, which would damage a super-frame that the guest forwards: those must be TCP
 * and for a connection of the guest's namespace. */
INLINE int may_leave_tunnel(struct __sk_buff *skb, __u32 at, const struct flow *flow, __u32 segment)
{
	__u32 namespace = flow->namespace;
	struct bpf_sock_tuple tuple = {};
	struct bpf_sock *sock;
	struct inner in;
	int ends;

	if (flow->kind != TO_INTERFACE || !flow->own_address)
		return 0;
	/* The buffer keeps the protocol of the tunnel's packet. */
	if (bpf_skb_load_bytes(skb, at + 12, &in.type, sizeof(in) - 2) || in.type != ETH_P_IP_BE)
		return 0;
	if (!segment)
		return 1;
	if (in.ip.version != 0x45 || in.ip.protocol != TCP || namespace == NO_NAMESPACE)
		return 0;
	tuple.ipv4.saddr = in.ip.src;
	tuple.ipv4.daddr = in.ip.dst;
	tuple.ipv4.sport = in.sport;
	tuple.ipv4.dport = in.dport;
	sock = bpf_skc_lookup_tcp(skb, &tuple, sizeof(tuple.ipv4), namespace, 0);
	if (!sock)
		return 0;
	ends = sock->state != BPF_TCP_LISTEN;
	bpf_sk_release(sock);
	return ends;
}

/* Whether the frame of this Ethernet type is of ARP or neighbour discovery (ND). */
INLINE int is_neighbours(struct __sk_buff *skb, __u16 ethertype)
{
	__u8 next, type;

	if (ethertype == ETH_P_ARP_BE)
		return 1;
	if (ethertype != ETH_P_IPV6_BE || bpf_skb_load_bytes(skb, ETH_LEN + 6, &next, 1) || next != ICMPV6 ||
	    bpf_skb_load_bytes(skb, ETH_LEN + 40, &type, 1))
		return 0;
	return type >= ND_FIRST && type <= ND_LAST;
}

INLINE int is_vnetd_alive(__u64 now_ns)
{
	__u32 zero = 0;
	const struct state *is = bpf_map_lookup_elem(&state, &zero);

	return is && now_ns < is->clock_ns + DEAD_NS;
}

/* Makes the key that of a sealed datagram in the frame at `at`. 0: the frame is none. */
INLINE int is_sealed_datagram(struct __sk_buff *skb, __u32 at, struct flow_key *key)
{
	struct {
		struct ip4 ip;
		struct {
			__u16 sport, dport;
		} ports;
		__u16 len, sum;
		__u8 first;
	} in;
	struct datagram datagram;

	if (skb->vlan_present || bpf_skb_load_bytes(skb, at + ETH_LEN, &in, IP_LEN + UDP_LEN + 1))
		return 0;
	/* Not a fragment: only the first has ports. */
	if (in.ip.version != 0x45 || in.ip.protocol != UDP || in.ip.fragment & __builtin_bswap16(0x3fff) ||
	    in.first != SEALED_PACKET)
		return 0;
	datagram.src = in.ip.src;
	datagram.dst = in.ip.dst;
	datagram.sport = in.ports.sport;
	datagram.dport = in.ports.dport;
	__builtin_memcpy(key->dst, &datagram, sizeof(datagram));
	key->is_sealed = 1;
	return 1;
}

/* Whether a frame with these addresses is one of the two stations of the flow. */
INLINE int is_between(const struct flow *flow, const __u16 stations[6])
{
	__u16 differs = 0;

	for (int at = 0; at < 6; at++)
		differs |= flow->stations[at] ^ stations[at];
	return !differs;
}

/* A frame's valid verdict, and what the flow's tally gets for the frame. */
struct verdict {
	struct flow flow;
	__u64 now_ns;
	__u32 len;
};

/* Copies the verdict of the flow if it is valid for the frame at `at`, of this Ethernet type. */
INLINE int judge(struct __sk_buff *skb, __u32 at, __u16 ethertype, const struct flow_key *key, struct verdict *to)
{
	/* Context fields are read once: clang would merge the loads into code that the verifier refuses. */
	__u32 len = *(volatile __u32 *)&skb->len - at, segment = *(volatile __u32 *)&skb->gso_size;
	struct flow *flow = &to->flow;
	struct flow *found;

	if (at && !may_leave_tunnel(skb, at, flow, segment))
		return 0;
	to->now_ns = now();
	if (!holds(flow, to->now_ns))
		return 0;
	/* vnetd decides about ARP and ND. When it has died, established flows still need their neighbours' answers. */
	if (!at && is_neighbours(skb, ethertype) && is_vnetd_alive(to->now_ns))
		return 0;
	if (skb->vlan_present)
		len += VLAN_TAG;
	/* vnetd counts what is too long. */
	if (segment ? flow->kind == TO_LINK && len > SUPER_FRAME_MAX : len > flow->len_max)
		return 0;
	to->len = len;
	/* Since Linux 6.1 the memory of an entry that vnetd replaces can become another flow's at once, while a program reads it. */
	found = bpf_map_lookup_elem(&flows, key);
	return found && found->id == flow->id;
}

/* Copies the valid verdict for the frame at `at`. 0: vnetd decides. Behind a tunnel's headers, only frames that programs may take
 * out of it have a verdict. */
INLINE int find(struct __sk_buff *skb, __u32 at, __u16 from, __u32 network, struct verdict *to)
{
	struct flow_key key = { .network = network, .from = from };
	__u16 stations[6] = {};
	struct flow *found;
	__u16 ethertype;

	/* Destination, source and type, as they lie in the frame. The kernel keeps a VLAN tag elsewhere. */
	if (bpf_skb_load_bytes(skb, at, key.dst, ETH_LEN))
		return 0;
	ethertype = key.is_sealed;
	key.is_sealed = 0;
	/* vnetd answers, floods and limits group frames. */
	if (key.dst[0] & 1)
		return 0;
	found = bpf_map_lookup_elem(&flows, &key);
	if (!found && ethertype == ETH_P_IP_BE) {
		__builtin_memcpy(stations, key.dst, sizeof(stations));
		if (is_sealed_datagram(skb, at, &key))
			found = bpf_map_lookup_elem(&flows, &key);
	}
	if (!found)
		return 0;
	to->flow = *found;
	/* Nobody sends in another station's name. */
	if (key.is_sealed && !is_between(&to->flow, stations))
		return 0;
	return judge(skb, at, ethertype, &key, to);
}

/* Counts a frame that takes the way of its verdict. */
INLINE void count(const struct verdict *verdict)
{
	__u32 slot = verdict->flow.slot;
	struct tally *tally = bpf_map_lookup_elem(&tallies, &slot);

	/* Every slot has one. */
	if (!tally)
		return;
	__sync_fetch_and_add(&tally->frames, 1);
	__sync_fetch_and_add(&tally->bytes, (__u64)verdict->len);
	/* The coarse clock changes once a tick: most frames need not write to this cache line. */
	if (tally->used_ns != verdict->now_ns)
		tally->used_ns = verdict->now_ns;
}

#endif
