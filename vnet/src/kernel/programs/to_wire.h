/* Frames that leave by the wire, and ingress of the wire's TAP, where vnetd sends trials. */

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
	if (!headers || size + headers <= segment_max)
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

/* Ethernet, IPv4, UDP and VXLAN before a frame. */
struct outer {
	__u16 unused;
	__u8 eth[12];
	__u16 type;
	__u8 version, tos;
	__u16 len, id, fragment;
	__u8 ttl, protocol;
	__u16 sum;
	__u32 src, dst;
	__u16 sport, dport, udp_len, udp_sum;
	__u32 flags, vni;
};

INLINE __u16 ip_sum(struct outer *out)
{
	__u64 sum = bpf_csum_diff(0, 0, (__be32 *)&out->version, 20, 0);

	sum = (sum & 0xffff) + (sum >> 16 & 0xffff);
	sum = (sum & 0xffff) + (sum >> 16);
	return ~sum;
}

/* Makes the frame a datagram and sends it without the VXLAN device. Returns 0 for a frame that needs the device; it is unchanged. */
INLINE long encapsulate(struct __sk_buff *skb, struct flow *flow, __u32 network)
{
	__u32 len = *(volatile __u32 *)&skb->len, size = *(volatile __u32 *)&skb->gso_size, headers;
	__u64 flags = BPF_F_ADJ_ROOM_ENCAP_L3_IPV4 | BPF_F_ADJ_ROOM_ENCAP_L4_UDP | BPF_F_ADJ_ROOM_ENCAP_L2(ETH_LEN) |
		      BPF_F_ADJ_ROOM_ENCAP_L2_ETH;
	__u32 underlay = flow->underlay;
	struct outer out = {};
	__u16 inner_type;
	__u8 tos[2];

	if (!underlay || skb->vlan_present)
		return 0;
	if (bpf_skb_load_bytes(skb, 0, out.eth, sizeof(out.eth) + 2) || bpf_skb_load_bytes(skb, ETH_LEN, tos, 2))
		return 0;
	inner_type = out.type;
	if (inner_type == ETH_P_IP_BE)
		out.tos = tos[1];
	else if (inner_type == ETH_P_IPV6_BE)
		out.tos = tos[1] >> 4;
	else
		return 0;
	if (size) {
		headers = tcp_headers(skb);
		/* Not UDP: a program's frame counts as one of an untrusted source, and the kernel segments such a frame at once. Without
		 * FIXED_GSO, segments become smaller by the headers' length. */
		if (!headers || size + headers > flow->segment_max + OUTER_LEN)
			return 0;
		if (size + headers <= flow->segment_max)
			flags |= BPF_F_ADJ_ROOM_FIXED_GSO;
	} else if (len > flow->segment_max + ETH_LEN) {
		return 0;
	}
	/* RFC 6040: the mark of an ECN-capable transport, or of congestion. */
	out.tos &= flow->ecn_mask;
	out.version = 0x45;
	out.len = __builtin_bswap16(len + OUTER_LEN - ETH_LEN);
	out.fragment = DONT_FRAGMENT_BE;
	out.ttl = TTL;
	out.protocol = UDP;
	out.src = __builtin_bswap32(flow->local);
	out.dst = __builtin_bswap32(flow->remote);
	out.sum = ip_sum(&out);
	out.sport = __builtin_bswap16(flow->first_port + (bpf_get_hash_recalc(skb) & flow->port_mask));
	out.dport = __builtin_bswap16(flow->port);
	out.udp_len = __builtin_bswap16(len + 16);
	out.flags = VXLAN_FLAGS_BE;
	out.vni = __builtin_bswap32(network << 8);
	if (bpf_skb_adjust_room(skb, OUTER_LEN, BPF_ADJ_ROOM_MAC, flags))
		return 0;
	/* bpf_redirect_neigh replaces the addresses before the headers, so a copy of the frame's own follows the headers. */
	if (bpf_skb_store_bytes(skb, OUTER_LEN, out.eth, sizeof(out.eth), 0) ||
	    bpf_skb_store_bytes(skb, OUTER_LEN + 12, &inner_type, 2, 0))
		return TC_ACT_SHOT;
	out.type = ETH_P_IP_BE;
	if (bpf_skb_store_bytes(skb, 0, out.eth, OUTER_LEN, 0))
		return TC_ACT_SHOT;
	return bpf_redirect_neigh(underlay, 0, 0, 0);
}

/* Sends a frame by the VXLAN device. */
INLINE long to_wire(struct __sk_buff *skb, __u32 device, __u32 remote, __u32 network)
{
	struct bpf_tunnel_key key = { .tunnel_id = network, .remote_ipv4 = remote, .tunnel_ttl = TTL };

	if (bpf_skb_set_tunnel_key(skb, &key, TUNNEL_KEY_LEN, BPF_F_ZERO_CSUM_TX))
		return TC_ACT_SHOT;
	return bpf_redirect(device, 0);
}

#define IP_LEN 20
#define MORE_FRAGMENTS 0x2000
#define FRAGMENT_OFFSET 0x1fff
/* Payload of the second part of a fragment that does not fit: more than an underlay usually lacks, and a multiple of 8. */
#define REST 128

/* Makes two of an IP fragment that is too long for one datagram, as a router would: sends the first part and leaves the second. The
 * VXLAN device would send two datagrams, too, but as fragments, which the other host would have to reassemble before it
 * removes the tunnel's headers. Returns 0 for other frames, and a negative number if the frame is damaged. */
INLINE int split(struct __sk_buff *skb, struct flow *flow, __u32 network)
{
	__u32 len = *(volatile __u32 *)&skb->len, payload = len - ETH_LEN - IP_LEN, fragment;
	struct bpf_tunnel_key key = { .tunnel_id = network, .remote_ipv4 = flow->remote, .tunnel_ttl = TTL };
	struct outer part = {};
	__u8 rest[REST];

	if (skb->gso_size || skb->vlan_present || skb->protocol != ETH_P_IP_BE || len <= flow->segment_max + ETH_LEN ||
	    len > flow->segment_max + ETH_LEN + REST)
		return 0;
	if (bpf_skb_load_bytes(skb, ETH_LEN, &part.version, IP_LEN) || bpf_skb_load_bytes(skb, len - REST, rest, REST))
		return 0;
	fragment = __builtin_bswap16(part.fragment);
	/* A whole datagram's checksum may be missing yet, and one that must not be fragmented goes as it is. */
	if (part.version != 0x45 || part.len != __builtin_bswap16(len - ETH_LEN) || payload % 8 ||
	    !(fragment & (MORE_FRAGMENTS | FRAGMENT_OFFSET)) || fragment & ~(MORE_FRAGMENTS | FRAGMENT_OFFSET) ||
	    (fragment & FRAGMENT_OFFSET) + payload / 8 > FRAGMENT_OFFSET)
		return 0;
	part.len = __builtin_bswap16(IP_LEN + payload - REST);
	part.fragment = __builtin_bswap16(fragment | MORE_FRAGMENTS);
	part.sum = 0;
	part.sum = ip_sum(&part);
	if (bpf_skb_change_tail(skb, len - REST, 0))
		return 0;
	if (bpf_skb_store_bytes(skb, ETH_LEN, &part.version, IP_LEN, 0) ||
	    bpf_skb_set_tunnel_key(skb, &key, TUNNEL_KEY_LEN, BPF_F_ZERO_CSUM_TX) ||
	    bpf_clone_redirect(skb, flow->device, 0))
		return -1;
	part.len = __builtin_bswap16(IP_LEN + REST);
	part.fragment = __builtin_bswap16(fragment + (payload - REST) / 8);
	part.sum = 0;
	part.sum = ip_sum(&part);
	if (bpf_skb_change_tail(skb, ETH_LEN + IP_LEN + REST, 0) ||
	    bpf_skb_store_bytes(skb, ETH_LEN, &part.version, IP_LEN, 0) ||
	    bpf_skb_store_bytes(skb, ETH_LEN + IP_LEN, rest, REST, 0))
		return -1;
	return 1;
}

SEC("classifier/try_wire")
int try_wire(struct __sk_buff *skb)
{
	__u32 device = skb->ifindex, remote;
	struct port *port = bpf_map_lookup_elem(&ports, &device);

	if (!port || bpf_skb_load_bytes(skb, TRIAL_REMOTE, &remote, sizeof(remote)))
		return TC_ACT_SHOT;
	return to_wire(skb, port->other, __builtin_bswap32(remote), 0);
}
