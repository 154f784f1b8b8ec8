/* Ingress of the wire, the host's VXLAN device. Known flows go to guests, other frames come up to vnetd with a head, and frames
 * from hosts of no link are dropped. */

SEC("classifier/from_wire")
int from_wire(struct __sk_buff *skb)
{
	__u32 device = skb->ifindex;
	struct port *found = bpf_map_lookup_elem(&ports, &device), port;
	struct bpf_tunnel_key key = {};
	struct peer_key at = { .port = WIRE_PORT };
	struct wire_head head = {};
	struct verdict verdict;
	struct peer *peer;

	if (!found)
		return TC_ACT_SHOT;
	port = *found;
	if (bpf_skb_get_tunnel_key(skb, &key, TUNNEL_KEY_LEN, 0))
		return TC_ACT_SHOT;
	at.remote = key.remote_ipv4;
	peer = bpf_map_lookup_elem(&peers, &at);
	if (!peer)
		return TC_ACT_SHOT;
	head.remote = at.remote;
	head.network = key.tunnel_id;
	head.from = peer->from;
	if (find(skb, 0, head.from, key.tunnel_id, &verdict) && verdict.flow.kind == TO_INTERFACE) {
		count(&verdict);
		return to_guest(skb, verdict.flow.device, verdict.flow.own_address);
	}
	if (bpf_skb_change_head(skb, sizeof(head), 0) || bpf_skb_store_bytes(skb, 0, &head, sizeof(head), 0))
		return TC_ACT_SHOT;
	return bpf_redirect(port.other, 0);
}
