/* Frames that leave by the wire, and ingress of the wire's TAP, where vnetd sends frames by the wire. */

/* Bytes that one call adds or removes at most, a multiple of 4 below the kernel's limit of 4 095. */
#define ROOM_MAX 4080

/* Length of the IP and TCP headers of a frame without a VLAN tag; 0 for other frames. */
INLINE __u32 tcp_headers(struct __sk_buff *skb)
{
	__u32 ip_len, protocol = skb->protocol;
	__u8 first, next, offset;

	if (protocol == ETH_P_IP_BE) {
		if (bpf_skb_load_bytes(skb, ETH_LEN, &first, 1) || bpf_skb_load_bytes(skb, ETH_LEN + 9, &next, 1))
			return 0;
		ip_len = (first & 15) * 4;
	} else if (protocol == ETH_P_IPV6_BE) {
		if (bpf_skb_load_bytes(skb, ETH_LEN + 6, &next, 1))
			return 0;
		ip_len = 40;
	} else {
		return 0;
	}
	if (next != TCP || bpf_skb_load_bytes(skb, ETH_LEN + ip_len + 12, &offset, 1))
		return 0;
	return ip_len + (offset >> 4) * 4;
}

/* Makes the segments of a TCP frame fit the path: adding room lowers gso_size, and removing it with FIXED_GSO does not raise it
 * again. Frames that still do not fit leave in IP fragments. Not 0: the frame is damaged. */
INLINE int fit(struct __sk_buff *skb, __u32 segment_max)
{
	__u32 size = *(volatile __u32 *)&skb->gso_size, headers, less;

	if (!size)
		return 0;
	headers = tcp_headers(skb);
	if (!headers)
		return 0;
	/* The VLAN tag is inserted into the frame before the tunnel's headers. */
	if (skb->vlan_present)
		headers += VLAN_TAG;
	if (size + headers <= segment_max)
		return 0;
	less = size + headers - segment_max;
	/* 8 948 to 1 398 takes two. */
	for (int times = 0; times < 2 && less; times++) {
		__u32 now = less < ROOM_MAX ? less : ROOM_MAX;

		if (bpf_skb_adjust_room(skb, now, BPF_ADJ_ROOM_MAC, 0))
			return 0;
		if (bpf_skb_adjust_room(skb, -(__s32)now, BPF_ADJ_ROOM_MAC, BPF_F_ADJ_ROOM_FIXED_GSO))
			return -1;
		less -= now;
	}
	return 0;
}

#define OUTER_LEN 50
#define VXLAN_FLAGS_BE __builtin_bswap32(0x08000000)
#define DONT_FRAGMENT_BE __builtin_bswap16(0x4000)
/* Since Linux 5.13. */
#ifndef BPF_F_ADJ_ROOM_ENCAP_L2_ETH
#define BPF_F_ADJ_ROOM_ENCAP_L2_ETH (1ULL << 6)
#endif

/* Ethernet, IPv4, UDP and VXLAN before a frame, and the frame's own Ethernet header. */
struct outer {
	__u16 unused;
	__u8 eth[12];
	__u16 type;
	struct ip4 ip;
	__u16 sport, dport, udp_len, udp_sum;
	__u32 flags, vni;
	__u8 inner[12];
	__u16 inner_type;
};

/* IPv4 header and ports of a frame; zeros for IPv6. */
struct l3 {
	struct ip4 ip;
	__u32 ports;
};

/* A number that is the same for all frames of a flow. Of TCP it is the socket's. The kernel would dissect other frames. */
INLINE __u32 hash_of(struct __sk_buff *skb, const struct l3 *in)
{
	__u32 known = *(volatile __u32 *)&skb->hash, hash;

	if (known)
		return known;
	if (in->ip.version != 0x45)
		return bpf_get_hash_recalc(skb);
	hash = in->ip.src * 31 + in->ip.dst + in->ip.protocol;
	/* Only a datagram's first fragment has ports. */
	if ((in->ip.protocol == TCP || in->ip.protocol == UDP) && !(in->ip.fragment & __builtin_bswap16(0x3fff)))
		hash = hash * 31 + in->ports;
	/* 2^32 divided by the golden ratio: the upper bits depend on all bits. */
	return hash * 0x9e3779b1u >> 16;
}

/* Folds a one's complement sum to 32 bits. */
INLINE __u32 fold_64(__u64 sum)
{
	sum = (sum & 0xffffffff) + (sum >> 32);
	return (sum & 0xffffffff) + (sum >> 32);
}

/* Folds a one's complement sum to 16 bits. */
INLINE __u32 fold(__u32 sum)
{
	sum = (sum & 0xffff) + (sum >> 16);
	return (sum & 0xffff) + (sum >> 16);
}

/* The checksum of an IPv4 header without options (RFC 1071); 0 if the header contains its right one. */
INLINE __u16 ip_sum(const struct ip4 *ip)
{
	__u32 words[IP_LEN / 4];

	__builtin_memcpy(words, ip, IP_LEN);
	return ~fold(fold_64((__u64)words[0] + words[1] + words[2] + words[3] + words[4]));
}

/* Headers of a datagram for the frame, without what depends on its length; `type` is the frame's own. Returns 0 for a frame that
 * needs the VXLAN device. */
INLINE int head_of(struct __sk_buff *skb, struct flow *flow, __u32 network, struct outer *out)
{
	struct l3 in = {};
	__u8 first[2];

	if (!flow->underlay || skb->vlan_present || bpf_skb_load_bytes(skb, 0, out->inner, ETH_LEN))
		return 0;
	if (out->inner_type == ETH_P_IP_BE) {
		if (bpf_skb_load_bytes(skb, ETH_LEN, &in, sizeof(in)))
			return 0;
		out->ip.tos = in.ip.tos;
	} else if (out->inner_type == ETH_P_IPV6_BE) {
		if (bpf_skb_load_bytes(skb, ETH_LEN, first, sizeof(first)))
			return 0;
		out->ip.tos = first[1] >> 4;
	} else {
		return 0;
	}
	/* RFC 6040: the mark of an ECN-capable transport, or of congestion. */
	out->ip.tos &= flow->ecn_mask;
	out->ip.version = 0x45;
	out->ip.fragment = DONT_FRAGMENT_BE;
	out->ip.ttl = TTL;
	out->ip.protocol = UDP;
	out->ip.src = __builtin_bswap32(flow->local);
	out->ip.dst = __builtin_bswap32(flow->remote);
	out->sport = __builtin_bswap16(flow->first_port + (hash_of(skb, &in) & flow->port_mask));
	out->dport = __builtin_bswap16(flow->port);
	out->flags = VXLAN_FLAGS_BE;
	out->vni = __builtin_bswap32(network << 8);
	return 1;
}

/* Writes the headers before a frame of `len` bytes, for which there is room, and the frame's own Ethernet header, which
 * bpf_skb_adjust_room moves to the front. Not 0: the frame is damaged. */
INLINE int write_head(struct __sk_buff *skb, struct outer *out, __u32 len)
{
	out->type = ETH_P_IP_BE;
	out->ip.len = __builtin_bswap16(len + OUTER_LEN - ETH_LEN);
	out->udp_len = __builtin_bswap16(len + 16);
	out->ip.sum = 0;
	out->ip.sum = ip_sum(&out->ip);
	return bpf_skb_store_bytes(skb, 0, out->eth, OUTER_LEN + ETH_LEN, 0);
}

/* Makes room for the headers before a frame. Not 0: the kernel refuses. */
INLINE long make_room(struct __sk_buff *skb, __u64 flags)
{
	flags |= BPF_F_ADJ_ROOM_ENCAP_L3_IPV4 | BPF_F_ADJ_ROOM_ENCAP_L4_UDP | BPF_F_ADJ_ROOM_ENCAP_L2(ETH_LEN) |
		 BPF_F_ADJ_ROOM_ENCAP_L2_ETH;
	return bpf_skb_adjust_room(skb, OUTER_LEN, BPF_ADJ_ROOM_MAC, flags);
}

/* linux/socket.h */
#define AF_INET 2

/* Sends a datagram to the next hop that vnetd has found. The kernel would look up the route again for each. */
INLINE long to_next_hop(__u32 underlay, __u32 next_hop)
{
	struct bpf_redir_neigh next = { .nh_family = AF_INET, .ipv4_nh = __builtin_bswap32(next_hop) };

	if (!next_hop)
		return bpf_redirect_neigh(underlay, 0, 0, 0);
	return bpf_redirect_neigh(underlay, &next, sizeof(next), 0);
}

/* Makes the frame a datagram with these headers and sends it without the VXLAN device. Returns 0 for a frame that needs the device;
 * it is unchanged. */
INLINE long encapsulate(struct __sk_buff *skb, const struct flow *flow, struct outer *out)
{
	__u32 len = *(volatile __u32 *)&skb->len, size = *(volatile __u32 *)&skb->gso_size, headers;
	__u64 flags = 0;

	if (size) {
		headers = tcp_headers(skb);
		/* Not UDP: a program's frame counts as one of an untrusted source, and the kernel segments such a frame at once. Without
		 * FIXED_GSO, segments become smaller by the headers' length. */
		if (!headers || size + headers > flow->segment_max + OUTER_LEN)
			return 0;
		if (size + headers <= flow->segment_max)
			flags = BPF_F_ADJ_ROOM_FIXED_GSO;
	} else if (len > flow->segment_max + ETH_LEN) {
		return 0;
	}
	if (make_room(skb, flags))
		return 0;
	return write_head(skb, out, len) ? TC_ACT_SHOT : to_next_hop(flow->underlay, flow->next_hop);
}

/* Tells the VXLAN device where the frame goes. Not 0: the kernel refuses. */
INLINE long aim(struct __sk_buff *skb, __u32 remote, __u32 network)
{
	struct bpf_tunnel_key key = { .tunnel_id = network, .remote_ipv4 = remote, .tunnel_ttl = TTL };

	return bpf_skb_set_tunnel_key(skb, &key, TUNNEL_KEY_LEN, BPF_F_ZERO_CSUM_TX);
}

/* Sends a frame by the VXLAN device. */
INLINE long to_wire(struct __sk_buff *skb, __u32 device, __u32 remote, __u32 network)
{
	return aim(skb, remote, network) ? TC_ACT_SHOT : bpf_redirect(device, 0);
}

#define MORE_FRAGMENTS 0x2000
#define FRAGMENT_OFFSET 0x1fff
/* Payload of the second part of a fragment that does not fit: more than an underlay usually lacks, and a multiple of 8. */
#define REST 96

/* Finds the addresses of Ethernet for packets to the flow's other host, as for packets from the wire's TAP: the kernel tells them
 * only for devices that may forward. Returns 0 if it does not know them. */
INLINE int next_hop(struct __sk_buff *skb, struct flow *flow, __u8 eth[12])
{
	struct bpf_fib_lookup hop = { .family = AF_INET, .l4_protocol = UDP, .tot_len = IP_LEN };
	__u32 device = flow->device;
	struct port *wire = bpf_map_lookup_elem(&ports, &device);

	if (!wire)
		return 0;
	hop.ifindex = wire->other;
	hop.ipv4_src = __builtin_bswap32(flow->local);
	hop.ipv4_dst = __builtin_bswap32(flow->remote);
	if (bpf_fib_lookup(skb, &hop, sizeof(hop), 0) || hop.ifindex != flow->underlay)
		return 0;
	for (int at = 0; at < 6; at++) {
		eth[at] = hop.dmac[at];
		eth[6 + at] = hop.smac[at];
	}
	/* Kernels before 5.19 tell addresses that they do not know yet. */
	return eth[0] | eth[1] | eth[2] | eth[3] | eth[4] | eth[5];
}

/* Removes bytes from a frame whose headers and payload are written afterwards: from the end or, as the kernel does not shorten a
 * tunnel's packet there, behind the first Ethernet header. Not 0: the kernel refuses. */
INLINE long shorten(struct __sk_buff *skb, __u32 is_datagram, __u32 less)
{
	if (!is_datagram)
		return bpf_skb_change_tail(skb, *(volatile __u32 *)&skb->len - less, 0);
	for (int times = 0; times < 3 && less; times++) {
		__u32 now = less < ROOM_MAX ? less : ROOM_MAX;

		if (bpf_skb_adjust_room(skb, -(__s32)now, BPF_ADJ_ROOM_MAC, 0))
			return -1;
		less -= now;
	}
	return less;
}

/* Sends an IP fragment that is too long for one datagram as two smaller fragments, as a router would: in datagrams with the headers
 * `out`, if `is_own`. The VXLAN device would send two
 * datagrams, too, but as fragments, which the other host would have to reassemble before it removes the tunnel's headers.
 * Returns 0 for other frames; they are unchanged. */
INLINE long split(struct __sk_buff *skb, struct flow *flow, __u32 network, struct outer *out, int is_own)
{
	__u32 len = *(volatile __u32 *)&skb->len, payload = len - ETH_LEN - IP_LEN, fragment, at;
	struct ip4 part;
	__u8 rest[REST], eth[12];

	if (!flow->device || skb->gso_size || skb->vlan_present || skb->protocol != ETH_P_IP_BE ||
	    len <= flow->segment_max + ETH_LEN || len > flow->segment_max + ETH_LEN + REST || payload < 2 * REST)
		return 0;
	if (bpf_skb_load_bytes(skb, ETH_LEN, &part, IP_LEN) || bpf_skb_load_bytes(skb, len - REST, rest, REST))
		return 0;
	fragment = __builtin_bswap16(part.fragment);
	/* A whole datagram's checksum may be missing yet, and one that must not be fragmented goes as it is. */
	if (part.version != 0x45 || part.len != __builtin_bswap16(len - ETH_LEN) || payload % 8 ||
	    !(fragment & (MORE_FRAGMENTS | FRAGMENT_OFFSET)) || fragment & ~(MORE_FRAGMENTS | FRAGMENT_OFFSET) ||
	    (fragment & FRAGMENT_OFFSET) + payload / 8 > FRAGMENT_OFFSET)
		return 0;
	at = is_own && next_hop(skb, flow, eth) ? OUTER_LEN : 0;
	part.len = __builtin_bswap16(IP_LEN + payload - REST);
	part.fragment = __builtin_bswap16(fragment | MORE_FRAGMENTS);
	part.sum = 0;
	part.sum = ip_sum(&part);
	if (bpf_skb_change_tail(skb, len - REST, 0))
		return 0;
	if (bpf_skb_store_bytes(skb, ETH_LEN, &part, IP_LEN, 0))
		return TC_ACT_SHOT;
	if (at) {
		__builtin_memcpy(out->eth, eth, sizeof(eth));
		if (make_room(skb, 0) || write_head(skb, out, len - REST) || bpf_clone_redirect(skb, flow->underlay, 0))
			return TC_ACT_SHOT;
	} else if (aim(skb, flow->remote, network) || bpf_clone_redirect(skb, flow->device, 0)) {
		return TC_ACT_SHOT;
	}
	part.len = __builtin_bswap16(IP_LEN + REST);
	part.fragment = __builtin_bswap16(fragment + (payload - REST) / 8);
	part.sum = 0;
	part.sum = ip_sum(&part);
	if (shorten(skb, at, payload - 2 * REST) ||
	    bpf_skb_store_bytes(skb, at + ETH_LEN, &part, IP_LEN, 0) ||
	    bpf_skb_store_bytes(skb, at + ETH_LEN + IP_LEN, rest, REST, 0))
		return TC_ACT_SHOT;
	if (!at)
		return to_wire(skb, flow->device, flow->remote, network);
	/* The headers have the addresses of Ethernet. */
	return write_head(skb, out, ETH_LEN + IP_LEN + REST) ? TC_ACT_SHOT : bpf_redirect(flow->underlay, 0);
}

SEC("classifier/core_to_wire")
int core_to_wire(struct __sk_buff *skb)
{
	__u32 device = skb->ifindex, len = *(volatile __u32 *)&skb->len;
	struct port *port = bpf_map_lookup_elem(&ports, &device);
	struct wire_tail tail;

	if (!port || len < ETH_LEN + sizeof(tail))
		return TC_ACT_SHOT;
	device = port->other;
	len -= sizeof(tail);
	if (bpf_skb_load_bytes(skb, len, &tail, sizeof(tail)) || bpf_skb_change_tail(skb, len, 0))
		return TC_ACT_SHOT;
	if (tail.underlay)
		return to_next_hop(tail.underlay, tail.next_hop);
	return to_wire(skb, device, tail.remote, tail.network);
}
