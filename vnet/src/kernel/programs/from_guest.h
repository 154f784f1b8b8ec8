/* Ingress of the host's end of a guest's veth: the kernel forwards known flows, all other frames come up to vnetd. */

/* Forwards a frame of a port's guest if its flow is known. TC_ACT_UNSPEC: the frame is unchanged, and vnetd decides. */
INLINE long forward(struct __sk_buff *skb, const struct port *port)
{
	struct verdict verdict;
	struct flow *flow = &verdict.flow;
	long sent;

	if (!find(skb, 0, port->from, port->network, &verdict))
		return TC_ACT_UNSPEC;
	if (flow->kind == TO_INTERFACE) {
		count(&verdict);
		return to_guest(skb, flow->device, flow->own_address);
	}
	if (flow->kind != TO_LINK)
		return TC_ACT_SHOT;
	sent = encapsulate(skb, flow, port->network);
	if (!sent)
		sent = split(skb, flow, port->network);
	/* vnetd segments what does not fit the path to a VTEP, or drops it. */
	if (!sent && !flow->device)
		return TC_ACT_UNSPEC;
	count(&verdict);
	if (sent)
		return sent;
	if (fit(skb, flow->segment_max))
		return TC_ACT_SHOT;
	return to_wire(skb, flow->device, flow->remote, port->network);
}

SEC("classifier/from_guest")
int from_guest(struct __sk_buff *skb)
{
	__u32 device = skb->ifindex;
	struct port *found = bpf_map_lookup_elem(&ports, &device), port;
	long verdict;

	if (!found)
		return TC_ACT_SHOT;
	port = *found;
	verdict = forward(skb, &port);
	return verdict == TC_ACT_UNSPEC ? bpf_redirect(port.other, 0) : verdict;
}
