/* Ingress of the host's end of a guest's veth, and transmission of the container's end of a netkit pair: the kernel forwards known
 * flows, all other frames come up to vnetd. */

/* Sends a frame in a datagram, or by the VXLAN device. TC_ACT_UNSPEC: the frame is unchanged, and vnetd decides. */
INLINE long by_tunnel(struct __sk_buff *skb, struct verdict *verdict, const struct port *port)
{
	struct flow *flow = &verdict->flow;
	struct outer out = {};
	int is_own = head_of(skb, flow, port->network, &out);
	long sent = is_own ? encapsulate(skb, flow, &out) : 0;

	if (!sent)
		sent = split(skb, flow, port->network, &out, is_own);
	/* vnetd segments what does not fit the path to a VTEP, or drops it. */
	if (!sent && !flow->device)
		return TC_ACT_UNSPEC;
	count(verdict);
	if (sent)
		return sent;
	if (fit(skb, flow->segment_max))
		return TC_ACT_SHOT;
	return to_wire(skb, flow->device, flow->remote, port->network);
}

/* Forwards a frame of a port's guest if its flow is known. TC_ACT_UNSPEC: the frame is unchanged, and vnetd decides.
 * `at_ingress`: the frame may skip the queue of a container's device. */
INLINE long forward(struct __sk_buff *skb, const struct port *port, int at_ingress)
{
	struct verdict verdict;
	struct flow *flow = &verdict.flow;
	long sent;

	if (!find(skb, 0, port->from, port->network, &verdict))
		return TC_ACT_UNSPEC;
	if (flow->kind == TO_INTERFACE) {
		count(&verdict);
		return to_guest(skb, flow->device, at_ingress && flow->own_address);
	}
	if (flow->kind != TO_LINK)
		return TC_ACT_SHOT;
	sent = translate(skb, &verdict, port);
	if (!sent)
		return by_tunnel(skb, &verdict, port);
	count(&verdict);
	return sent;
}

/* Frames of a device that is vnetd's own. */
INLINE long from_own(struct __sk_buff *skb, int at_ingress)
{
	__u32 device = skb->ifindex;
	struct port *found = bpf_map_lookup_elem(&ports, &device), port;
	long verdict;

	if (!found)
		return TC_ACT_SHOT;
	port = *found;
	verdict = forward(skb, &port, at_ingress);
	return verdict == TC_ACT_UNSPEC ? bpf_redirect(port.other, 0) : verdict;
}

SEC("classifier/from_guest")
int from_guest(struct __sk_buff *skb)
{
	return from_own(skb, 1);
}

/* Runs while the container sends, with the host's end as the device. bpf_redirect_peer works at an ingress only. */
SEC("classifier/from_container")
int from_container(struct __sk_buff *skb)
{
	return from_own(skb, 0);
}
