/* Translation: packets of established conversations leave without a tunnel's headers.
 *
 * The sending host's program replaces a packet's addresses by the two hosts', its source port by an index and its destination port by
 * TRANSLATED_PORT. The receiving host's program restores them from the index, whose meaning both vnetds have agreed on. No header is added
 * or removed, so a super-frame stays one all the way, fits the underlay's MTU, and carries no tunnel's offload state.
 *
 * A packet takes the tunnel if the index does not tell all of it: with IP options, as a fragment, with a DSCP, or with another time to live
 * than agreed. */

/* Ethernet header, IPv4 header and ports of a frame. */
struct packet {
	__u16 unused;
	__u16 dst[3], src[3], type;
	struct ip4 ip;
	/* Source and destination, in the byte order of a frame. */
	__u32 ports;
};

/* Bytes of a frame's headers up to the ports. struct outer begins with the same fields. */
#define PACKET_LEN (ETH_LEN + IP_LEN + 4)

#define ECN 3
/* Where the transport header is in a frame with an IPv4 header without options, and in it the checksums. */
#define L4 (ETH_LEN + IP_LEN)
#define TCP_SUM 16
#define UDP_SUM 6
/* Flags of a TCP header. */
#define TCP_FIN 1
#define TCP_SYN 2
#define TCP_RST 4
#define TCP_ACK 16

/* Whether the packet has nothing that translation would lose. */
INLINE int is_translatable(struct __sk_buff *skb, struct packet *is)
{
	return !skb->vlan_present && is->type == ETH_P_IP_BE && is->ip.version == 0x45 &&
	       !(is->ip.fragment & ~DONT_FRAGMENT_BE) && (is->ip.protocol == TCP || is->ip.protocol == UDP) && !ip_sum(&is->ip);
}

/* A partial checksum: the sum of the pseudo-header's addresses, protocol and length. */
INLINE __u16 pseudo_sum(const struct ip4 *ip)
{
	__u32 len = __builtin_bswap16(ip->len) - IP_LEN;
	__u32 sum = fold(ip->src) + fold(ip->dst) + __builtin_bswap16(ip->protocol) + __builtin_bswap16(len);

	return fold(sum);
}

/* Offset of the packet's transport checksum. */
INLINE __u32 sum_at(const struct packet *is)
{
	return L4 + (is->ip.protocol == TCP ? TCP_SUM : UDP_SUM);
}

/* A UDP checksum that becomes zero is written as its other form: zero means that there is none. */
INLINE __u64 sum_flags(const struct packet *is)
{
	return is->ip.protocol == UDP ? BPF_F_MARK_MANGLED_0 : 0;
}

/* Makes the checksum of a guest's packet that of its new `ports`. A checksum that the kernel is to complete (CHECKSUM_PARTIAL) needs a
 * check: the guest has chosen where the kernel will write it, which could be over the hosts' addresses and ports. 0: unchanged, because
 * the checksum cannot be kept right; -1: the packet is damaged. */
INLINE int replace_ports(struct __sk_buff *skb, const struct packet *is, __u32 ports)
{
	__u32 at = sum_at(is);
	__u16 before, after;

	if (bpf_skb_load_bytes(skb, at, &before, sizeof(before)) || (is->ip.protocol == UDP && !before))
		return 0;
	/* A partial checksum does not cover the ports, so the helper leaves it as it is; a complete one changes. */
	if (fold(is->ports) == fold(ports) ||
	    bpf_l4_csum_replace(skb, at, is->ports, ports, sum_flags(is) | sizeof(ports)))
		return 0;
	if (bpf_skb_load_bytes(skb, at, &after, sizeof(after)))
		return -1;
	if (before != after)
		return 1;
	/* A tunnel inside the guest has a complete checksum although the kernel is to complete one: that of the inner packet. */
	if (before != pseudo_sum(&is->ip))
		return 0;
	/* The kernel refuses this if it will write the checksum at `at` or behind. */
	return bpf_skb_change_tail(skb, at + 1, 0) ? 1 : -1;
}

/* Rewrites addresses and ports, given in the byte order of a frame, and updates both checksums for the addresses; that of the transport
 * header covers the new ports already. Nonzero: the packet is damaged. */
INLINE int rewrite(struct __sk_buff *skb, struct packet *is, const __be32 hosts[2], __u32 ports)
{
	__u32 change = fold_64((__u64)~is->ip.src + ~is->ip.dst + hosts[0] + hosts[1]);

	if (bpf_l4_csum_replace(skb, sum_at(is), 0, change, sum_flags(is) | BPF_F_PSEUDO_HDR))
		return -1;
	is->ip.src = hosts[0];
	is->ip.dst = hosts[1];
	is->ports = ports;
	is->ip.sum = 0;
	is->ip.sum = ip_sum(&is->ip);
	return bpf_skb_store_bytes(skb, 0, is->dst, PACKET_LEN, 0);
}

/* Counts a frame of a conversation that is not translated, and tells vnetd of conversations with many frames. */
INLINE void note(const struct wanted *one, struct translated *known)
{
	struct translated first = { .frames = 1 };

	/* Not atomic: a lost count does no harm. vnetd hears of it later if the queue is full. */
	if (!known)
		bpf_map_update_elem(&conversations, &one->is, &first, BPF_NOEXIST);
	else if (++known->frames % WANTED_FRAMES == 0)
		bpf_map_push_elem(&wanted, one, 0);
}

/* Whether a translated frame fits the path MTU. The segment length of a UDP super-frame is unknown: a tunnel inside the guest adds headers
 * that gso_size does not include. But it is at most the guest's MTU, and TRANSLATES_DATAGRAMS says that this fits. */
INLINE int fits_translated(struct __sk_buff *skb, __u16 protocol, const struct flow *flow)
{
	__u32 len = *(volatile __u32 *)&skb->len, size = *(volatile __u32 *)&skb->gso_size, headers;
	__u32 packet_max = flow->segment_max + OUTER_LEN;

	if (!size)
		return len <= packet_max + ETH_LEN;
	if (protocol == UDP)
		return flow->translates & TRANSLATES_DATAGRAMS;
	headers = tcp_headers(skb);
	return headers && size + headers <= packet_max;
}

/* Whether the TCP segment neither opens nor closes its connection: a stateful firewall must not see these without the others. */
INLINE int is_established(struct __sk_buff *skb)
{
	__u8 flags;

	return !bpf_skb_load_bytes(skb, L4 + 13, &flags, 1) &&
	       (flags & (TCP_SYN | TCP_FIN | TCP_RST | TCP_ACK)) == TCP_ACK;
}

/* Sends a frame translated if its conversation is. 0: it is unchanged. */
INLINE long translate(struct __sk_buff *skb, const struct verdict *verdict, const struct port *port)
{
	const struct flow *flow = &verdict->flow;
	struct packet is = {};
	struct wanted one = {};
	struct translated *known;
	__be32 hosts[2];
	__u32 ports;
	int done;

	/* A datagram of the wire has no DSCP, and filters on the way may look for that of its frame. */
	if (!flow->translates || !flow->underlay || bpf_skb_load_bytes(skb, 0, is.dst, PACKET_LEN) ||
	    !is_translatable(skb, &is) || is.ip.tos & ~ECN ||
	    (is.ip.protocol == TCP && !is_established(skb)))
		return 0;
	__builtin_memcpy(one.is.dst, is.dst, sizeof(is.dst) + sizeof(is.src));
	one.is.network = port->network;
	one.is.source = is.ip.src;
	one.is.destination = is.ip.dst;
	one.is.ports = is.ports;
	one.is.protocol = is.ip.protocol;
	one.is.ttl = is.ip.ttl;
	one.remote = flow->remote;
	one.from = port->from;
	known = bpf_map_lookup_elem(&conversations, &one.is);
	if (!known || known->remote != flow->remote || verdict->now_ns >= known->until_ns) {
		note(&one, known);
		return 0;
	}
	ports = *(volatile __u16 *)&known->index | (__u32)__builtin_bswap16(TRANSLATED_PORT) << 16;
	if (!fits_translated(skb, one.is.protocol, flow))
		return 0;
	/* As in judge(): the entry's memory may be another conversation's now. */
	if (bpf_map_lookup_elem(&conversations, &one.is) != known)
		return 0;
	known->frames++;
	done = replace_ports(skb, &is, ports);
	if (done <= 0)
		return done ? TC_ACT_SHOT : 0;
	hosts[0] = __builtin_bswap32(flow->local);
	hosts[1] = __builtin_bswap32(flow->remote);
	is.ip.ttl = TTL;
	return rewrite(skb, &is, hosts, ports) ? TC_ACT_SHOT : to_next_hop(flow->underlay, flow->next_hop);
}

/* Drops a translated packet that cannot be restored, and counts it at the host's proof. */
INLINE long lose(struct translation_key *key)
{
	struct translation *proof;

	key->index = 0;
	proof = bpf_map_lookup_elem(&translations, key);
	if (proof)
		__sync_fetch_and_add(&proof->lost, 1);
	return TC_ACT_SHOT;
}

/* Sends a restored frame up to vnetd, as from_wire does. -1: it cannot. */
INLINE long to_core(struct __sk_buff *skb, const struct wire_head *head)
{
	__u32 zero = 0, core;
	const struct state *is = bpf_map_lookup_elem(&state, &zero);

	if (!is)
		return -1;
	core = *(volatile __u32 *)&is->core;
	if (!core || bpf_skb_change_head(skb, sizeof(*head), 0) || bpf_skb_store_bytes(skb, 0, head, sizeof(*head), 0))
		return -1;
	return bpf_redirect(core, 0);
}

/* Restores a translated packet and delivers it. TC_ACT_UNSPEC: it is not a translated packet, and unchanged. */
INLINE long restore(struct __sk_buff *skb, struct packet *is)
{
	struct peer_key at = { .remote = __builtin_bswap32(is->ip.src), .port = WIRE_PORT };
	struct translation_key key = { .remote = at.remote, .index = is->ports, .protocol = is->ip.protocol };
	struct wire_head head = { .remote = at.remote };
	struct flow_key flow = {};
	struct translation *known;
	struct verdict verdict;
	struct flow *found;
	struct peer *peer;
	__be32 hosts[2];
	__u64 seen_ns;
	__u32 ports;
	long sent;

	known = bpf_map_lookup_elem(&translations, &key);
	if (!known) {
		key.index = 0;
		/* Without a proof the host sends no translated packets. */
		return bpf_map_lookup_elem(&translations, &key) ? lose(&key) : TC_ACT_UNSPEC;
	}
	peer = bpf_map_lookup_elem(&peers, &at);
	/* Reverse path check: the device of the route to the peer. */
	if (!peer || peer->device != skb->ifindex || peer->local != __builtin_bswap32(is->ip.dst))
		return lose(&key);
	head.from = flow.from = *(volatile __u16 *)&peer->from;
	seen_ns = now();
	/* The coarse clock changes once a tick: most frames need not write to this cache line. */
	if (known->seen_ns != seen_ns)
		known->seen_ns = seen_ns;
	if (!key.index)
		return TC_ACT_SHOT;
	__builtin_memcpy(is->dst, known->is.dst, sizeof(is->dst) + sizeof(is->src));
	__builtin_memcpy(flow.dst, known->is.dst, sizeof(flow.dst) + sizeof(flow.src));
	head.network = flow.network = known->is.network;
	hosts[0] = known->is.source;
	hosts[1] = known->is.destination;
	ports = known->is.ports;
	is->ip.ttl = known->is.ttl;
	/* ECN is end to end (RFC 3168); a router's DSCP is not for the guest. */
	is->ip.tos &= ECN;
	if (bpf_map_lookup_elem(&translations, &key) != known ||
	    bpf_l4_csum_replace(skb, sum_at(is), is->ports, ports, sum_flags(is) | sizeof(ports)) ||
	    rewrite(skb, is, hosts, ports))
		return lose(&key);
	found = bpf_map_lookup_elem(&flows, &flow);
	if (found) {
		verdict.flow = *found;
		if (verdict.flow.kind == TO_INTERFACE && judge(skb, 0, ETH_P_IP_BE, &flow, &verdict)) {
			count(&verdict);
			return to_guest(skb, verdict.flow.device, verdict.flow.own_address);
		}
	}
	sent = to_core(skb, &head);
	return sent < 0 ? lose(&key) : sent;
}
