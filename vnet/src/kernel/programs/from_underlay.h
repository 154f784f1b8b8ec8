/* Ingress of the underlay's device. Frames of known flows that end in a guest are taken from the wire's datagrams without the VXLAN
 * device. All other packets continue: to other programs and filters of the device, and to the host's network stack. */

/* TC_ACT_OK would skip the other programs and filters. */
#define CONTINUE TC_ACT_UNSPEC

SEC("classifier/from_underlay")
int from_underlay(struct __sk_buff *skb)
{
	__u32 protocol = *(volatile __u32 *)&skb->protocol, type = *(volatile __u32 *)&skb->pkt_type;
	struct outer out = {};
	struct peer *found, peer;
	struct flow flow;
	__u32 remote;
	__u8 eth[14];

	if (protocol != ETH_P_IP_BE || type != PACKET_HOST || skb->vlan_present)
		return CONTINUE;
	if (bpf_skb_load_bytes(skb, 0, out.eth, OUTER_LEN))
		return CONTINUE;
	/* The VXLAN device marks the frame of a datagram that met congestion (RFC 6040). */
	if (out.protocol != UDP || out.dport != __builtin_bswap16(WIRE_PORT) || out.version != 0x45 || (out.tos & 3) == 3 ||
	    out.fragment & __builtin_bswap16(0x3fff) || out.udp_sum || out.flags != VXLAN_FLAGS_BE ||
	    out.vni & __builtin_bswap32(0xff))
		return CONTINUE;
	remote = __builtin_bswap32(out.src);
	found = bpf_map_lookup_elem(&peers, &remote);
	if (!found)
		return CONTINUE;
	peer = *found;
	/* A device that is not on the route to the peer is left to the stack's checks of sources. */
	if (peer.device != skb->ifindex || peer.local != __builtin_bswap32(out.dst) || ip_sum(&out))
		return CONTINUE;
	if (bpf_skb_load_bytes(skb, OUTER_LEN, eth, sizeof(eth)))
		return CONTINUE;
	if (!decide_at(skb, OUTER_LEN, peer.from, __builtin_bswap32(out.vni) >> 8, &flow))
		return CONTINUE;
	if (bpf_skb_adjust_room(skb, -OUTER_LEN, BPF_ADJ_ROOM_MAC, BPF_F_ADJ_ROOM_FIXED_GSO) ||
	    bpf_skb_store_bytes(skb, 0, eth, sizeof(eth), 0))
		return TC_ACT_SHOT;
	return to_guest(skb, flow.device, 1);
}
