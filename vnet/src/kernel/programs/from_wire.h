/* Ingress of the wire, the host's VXLAN device. Known flows go to guests, other frames come up to vnetd with a head, and frames
 * from hosts of no link are dropped. */

SEC("classifier/from_wire")
int from_wire(struct __sk_buff *skb)
{
	__u32 device = skb->ifindex, remote;
	struct port *found = bpf_map_lookup_elem(&ports, &device), port;
	struct bpf_tunnel_key key = {};
	struct wire_head head = {};
	struct flow flow;
	struct peer *peer;

	if (!found)
		return TC_ACT_SHOT;
	port = *found;
	if (bpf_skb_get_tunnel_key(skb, &key, TUNNEL_KEY_LEN, 0))
		return TC_ACT_SHOT;
	remote = key.remote_ipv4;
	peer = bpf_map_lookup_elem(&peers, &remote);
	if (!peer)
		return TC_ACT_SHOT;
	head.remote = remote;
	head.network = key.tunnel_id;
	head.from = peer->from;
	if (decide(skb, head.from, key.tunnel_id, &flow) && flow.kind == TO_INTERFACE)
		return to_guest(skb, flow.device, flow.own_address);
	if (bpf_skb_change_head(skb, sizeof(head), 0) || bpf_skb_store_bytes(skb, 0, &head, sizeof(head), 0))
		return TC_ACT_SHOT;
	return bpf_redirect(port.other, 0);
}
