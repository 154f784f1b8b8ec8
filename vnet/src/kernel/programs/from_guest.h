/* Ingress of the host's end of a guest's veth: the kernel forwards known flows, all other frames come up to vnetd. */

SEC("classifier/from_guest")
int from_guest(struct __sk_buff *skb)
{
	__u32 device = skb->ifindex;
	struct port *found = bpf_map_lookup_elem(&ports, &device), port;
	struct verdict verdict;
	struct flow *flow = &verdict.flow;
	long sent;

	if (!found)
		return TC_ACT_SHOT;
	port = *found;
	if (!find(skb, 0, port.from, port.network, &verdict))
		return bpf_redirect(port.other, 0);
	if (flow->kind == TO_INTERFACE) {
		count(&verdict);
		return to_guest(skb, flow->device, flow->own_address);
	}
	if (flow->kind != TO_LINK)
		return TC_ACT_SHOT;
	sent = encapsulate(skb, flow, port.network);
	/* vnetd segments what does not fit the path to a VTEP, or drops it. */
	if (!sent && !flow->device)
		return bpf_redirect(port.other, 0);
	count(&verdict);
	if (sent)
		return sent;
	if (fit(skb, flow->segment_max) || split(skb, flow, port.network) < 0)
		return TC_ACT_SHOT;
	return to_wire(skb, flow->device, flow->remote, port.network);
}
