/* Ingress of the host's end of a guest's veth: the kernel forwards known flows, all other frames come up to vnetd. */

SEC("classifier/from_guest")
int from_guest(struct __sk_buff *skb)
{
	__u32 device = skb->ifindex;
	struct port *found = bpf_map_lookup_elem(&ports, &device), port;
	struct flow flow;

	if (!found)
		return TC_ACT_SHOT;
	port = *found;
	if (!decide(skb, port.from, port.network, &flow))
		return bpf_redirect(port.other, 0);
	if (flow.kind == TO_INTERFACE)
		return to_guest(skb, flow.device, flow.own_address);
	if (flow.kind == TO_LINK) {
		long sent = encapsulate(skb, &flow, port.network);

		if (sent)
			return sent;
		if (fit(skb, flow.segment_max) || split(skb, &flow, port.network) < 0)
			return TC_ACT_SHOT;
		return to_wire(skb, flow.device, flow.remote, port.network);
	}
	return TC_ACT_SHOT;
}
