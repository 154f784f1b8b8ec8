/* Ingress of the underlay's device. Frames of known flows that end in a guest are taken from the datagrams of the wire and of VXLAN
 * links. All other packets continue: to other programs and filters of the device, and to the host's network stack. */

/* TC_ACT_OK would skip the other programs and filters. */
#define CONTINUE TC_ACT_UNSPEC

/* How long all datagrams of a peer are left to vnetd's socket after the kernel has coalesced some for it (UDP_GRO), in ns. Frames of
 * one flow would otherwise overtake each other. */
#define COALESCED_NS 1000000000ULL

/* Length of the IP packet at `at`, by its own header; 0: neither IPv4 nor IPv6. */
INLINE __u32 ip_len(struct __sk_buff *skb, __u32 at)
{
	__u16 words[3];

	if (bpf_skb_load_bytes(skb, at, words, sizeof(words)))
		return 0;
	switch (*(__u8 *)words >> 4) {
	case 4:
		return __builtin_bswap16(words[1]);
	case 6:
		return __builtin_bswap16(words[2]) + 40;
	}
	return 0;
}

/* Whether the packet consists of one datagram of `peer`, and none was coalesced recently. */
INLINE int is_single(struct __sk_buff *skb, struct peer *peer)
{
	__u32 len = *(volatile __u32 *)&skb->len, segment = *(volatile __u32 *)&skb->gso_size;

	/* A super-frame has one IP header for all its segments. */
	if (segment && ip_len(skb, OUTER_LEN + ETH_LEN) + OUTER_LEN + ETH_LEN != len) {
		peer->coalesced_ns = bpf_ktime_get_ns();
		return 0;
	}
	return !peer->coalesced_ns || bpf_ktime_get_ns() - peer->coalesced_ns > COALESCED_NS;
}

SEC("classifier/from_underlay")
int from_underlay(struct __sk_buff *skb)
{
	__u32 protocol = *(volatile __u32 *)&skb->protocol, type = *(volatile __u32 *)&skb->pkt_type;
	struct peer_key at = {};
	struct verdict verdict;
	struct outer out = {};
	struct packet packet;
	struct peer *peer;
	__u16 from;

	if (protocol != ETH_P_IP_BE || type != PACKET_HOST || skb->vlan_present)
		return CONTINUE;
	if (bpf_skb_load_bytes(skb, 0, out.eth, PACKET_LEN))
		return CONTINUE;
	if (out.dport == __builtin_bswap16(TRANSLATED_PORT)) {
		__builtin_memcpy(&packet, &out, sizeof(packet));
		return is_translatable(skb, &packet) ? restore(skb, &packet) : CONTINUE;
	}
	if (out.ip.protocol != UDP || bpf_skb_load_bytes(skb, PACKET_LEN, &out.udp_len, OUTER_LEN + ETH_LEN - PACKET_LEN))
		return CONTINUE;
	/* The VXLAN device marks the frame of a datagram that met congestion (RFC 6040). The UDP checksum need not be verified (RFC 7348
	 * section 5): the guest verifies the frame's own, of which the helper below keeps the state right. */
	if (out.ip.version != 0x45 || (out.ip.tos & 3) == 3 || out.ip.fragment & __builtin_bswap16(0x3fff) ||
	    out.flags != VXLAN_FLAGS_BE || out.vni & __builtin_bswap32(0xff))
		return CONTINUE;
	at.remote = __builtin_bswap32(out.ip.src);
	at.port = __builtin_bswap16(out.dport);
	peer = bpf_map_lookup_elem(&peers, &at);
	if (!peer)
		return CONTINUE;
	from = *(volatile __u16 *)&peer->from;
	/* A device that is not on the route to the peer is left to the stack's checks of sources. */
	if (peer->device != skb->ifindex || peer->local != __builtin_bswap32(out.ip.dst) || ip_sum(&out.ip) ||
	    !is_single(skb, peer))
		return CONTINUE;
	if (!find(skb, OUTER_LEN, from, __builtin_bswap32(out.vni) >> 8, &verdict))
		return CONTINUE;
	count(&verdict);
	if (bpf_skb_adjust_room(skb, -OUTER_LEN, BPF_ADJ_ROOM_MAC, BPF_F_ADJ_ROOM_FIXED_GSO) ||
	    bpf_skb_store_bytes(skb, 0, out.inner, ETH_LEN, 0))
		return TC_ACT_SHOT;
	return to_guest(skb, verdict.flow.device, 1);
}
