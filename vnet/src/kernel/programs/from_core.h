/* Ingress of vnetd's TAP: frames that vnetd delivers go to the guest. */

SEC("classifier/from_core")
int from_core(struct __sk_buff *skb)
{
	__u32 device = skb->ifindex;
	struct port *port = bpf_map_lookup_elem(&ports, &device);
	__u16 dst[3];

	if (!port || bpf_skb_load_bytes(skb, 0, dst, sizeof(dst)))
		return TC_ACT_SHOT;
	/* clang may make memcmp a call, which programs cannot make. */
	return to_guest(skb, port->other, dst[0] == port->mac[0] && dst[1] == port->mac[1] && dst[2] == port->mac[2]);
}
