/* Ingress of the host's end of a guest's veth: the kernel forwards known flows, all other frames come up to vnetd. */

SEC("classifier/from_guest")
int from_guest(struct __sk_buff *skb)
{
	__u32 device = skb->ifindex;
	struct port *port = bpf_map_lookup_elem(&ports, &device);
	struct flow *flow;

	if (!port)
		return TC_ACT_SHOT;
	flow = decide(skb, port->from, port->network);
	if (flow && flow->kind == TO_INTERFACE)
		return to_guest(skb, flow->device, flow->own_address);
	if (flow && flow->kind == TO_LINK) {
		long sent = encapsulate(skb, flow, port->network);

		if (sent)
			return sent;
		if (fit(skb, flow->segment_max) || split(skb, flow, port->network) < 0)
			return TC_ACT_SHOT;
		return to_wire(skb, flow->device, flow->remote, port->network);
	}
	return bpf_redirect(port->other, 0);
}
