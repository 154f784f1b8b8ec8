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
static long (*const bpf_skb_load_bytes)(const void *skb, __u32 offset, void *to, __u32 len) =
	(void *)BPF_FUNC_skb_load_bytes;
static long (*const bpf_redirect)(__u32 device, __u64 flags) = (void *)BPF_FUNC_redirect;
static long (*const bpf_redirect_peer)(__u32 device, __u64 flags) = (void *)BPF_FUNC_redirect_peer;
static long (*const bpf_skb_change_type)(struct __sk_buff *skb, __u32 type) =
	(void *)BPF_FUNC_skb_change_type;

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

#define VLAN_TAG 4
/* linux/if_packet.h */
#define PACKET_HOST 0

/* Whether the version at `bucket` is still the flow's. Read after the last call of a helper and checked at once: Linux 6.1
 * forgets the bounds of what a call leaves on the stack. */
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

/* Hands the frame to a guest: past the device's queue when it is the guest's own, which the kernel then takes for
 * addressed to it; others keep the type that the receiving end gives them. */
INLINE long to_guest(struct __sk_buff *skb, __u32 device, __u32 own_address)
{
	if (!own_address)
		return bpf_redirect(device, 0);
	/* Kernels before 6.12 keep the type that the sending end gave. */
	bpf_skb_change_type(skb, PACKET_HOST);
	return bpf_redirect_peer(device, 0);
}

/* The valid verdict for the frame, counted; or none, for vnetd to decide. */
INLINE struct flow *decide(struct __sk_buff *skb, __u16 from, __u32 network)
{
	/* Context fields are read once: clang would merge the loads into code that the verifier refuses. */
	__u32 len = *(volatile __u32 *)&skb->len, segments = *(volatile __u32 *)&skb->gso_segs;
	struct flow_key key = { .network = network, .from = from };
	struct flow *flow;
	struct tally *tally;
	__u64 now_ns;
	__u32 slot;

	/* Destination and source, as they lie in the frame. */
	if (bpf_skb_load_bytes(skb, 0, key.dst, sizeof(key.dst) + sizeof(key.src)))
		return 0;
	/* vnetd answers, floods and limits group frames. */
	if (key.dst[0] & 1)
		return 0;
	flow = bpf_map_lookup_elem(&flows, &key);
	if (!flow)
		return 0;
	now_ns = bpf_ktime_get_ns();
	if (!holds(flow, now_ns))
		return 0;
	if (skb->vlan_present)
		len += VLAN_TAG;
	/* vnetd counts what is too long. */
	if (!segments && len > flow->len_max)
		return 0;
	slot = flow->slot;
	tally = bpf_map_lookup_elem(&tallies, &slot);
	if (!tally)
		return 0;
	__sync_fetch_and_add(&tally->frames, 1);
	__sync_fetch_and_add(&tally->bytes, (__u64)len);
	tally->used_ns = now_ns;
	return flow;
}

#endif
