/* Ingress of a device that is not vnetd's own, such as a LAN's or a virtual machine's TAP, and of the TAP behind it. The kernel forwards
 * known flows. All other frames continue to the host's network stack, and vnetd gets a copy of those that are not for the host. */

SEC("classifier/from_lan")
int from_lan(struct __sk_buff *skb)
{
	__u32 device = skb->ifindex;
	struct port *found = bpf_map_lookup_elem(&ports, &device), port;
	__u16 dst[3];
	long verdict;

	if (!found)
		return TC_ACT_UNSPEC;
	port = *found;
	if (bpf_skb_load_bytes(skb, 0, dst, sizeof(dst)))
		return TC_ACT_UNSPEC;
	if (dst[0] == port.mac[0] && dst[1] == port.mac[1] && dst[2] == port.mac[2])
		return TC_ACT_UNSPEC;
	verdict = forward(skb, &port, 1);
	if (verdict != TC_ACT_UNSPEC)
		return verdict;
	/* vnetd reads the copy at a packet socket, which sees frames before the program `ends`. */
	bpf_clone_redirect(skb, port.other, BPF_F_INGRESS);
	return TC_ACT_UNSPEC;
}

SEC("classifier/ends")
int ends(struct __sk_buff *skb)
{
	(void)skb;
	return TC_ACT_SHOT;
}
