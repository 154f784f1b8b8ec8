/* The layout of every map that the programs and vnetd share. vnet/src/kernel/shared.rs has the same structs; a test compares
 * them. */
#ifndef VNET_SHARED_H
#define VNET_SHARED_H

#include <linux/types.h>

/* Maximum number of installed flows, each with one slot of `tallies`. */
#define FLOWS_MAX 65536
/* Maximum number of devices with a program: two for each of 1 024 interfaces, and the wire's. */
#define PORTS_MAX 2050
/* Buckets of learned addresses, and the one that never changes (route/learning.rs). */
#define VERSIONS 4097

/* A flow, as the router's cache has it; or one of datagrams that two applications seal end to end, of which only these take a sealed
 * link's wire: then `dst` and `src` have two IPv4 addresses and two ports, see struct datagram. */
struct flow_key {
	__u32 network;
	__u16 from;
	__u8 dst[6];
	__u8 src[6];
	__u16 is_sealed;
};

/* Source and destination of sealed datagrams, in the byte order of a frame, in place of the 12 bytes of a flow's addresses. */
struct datagram {
	__u32 src, dst;
	__u16 sport, dport;
};

/* First byte of a sealed packet of the interconnect (docs/interconnect.md). */
#define SEALED_PACKET 0x20

enum { TO_INTERFACE = 1, TO_LINK = 2 };

/* A verdict with one destination, and the conditions under which it holds. */
struct flow {
	/* Time of the state's clock at which it ends. */
	__u64 until_ns;
	/* Number of its installation. */
	__u64 id;
	/* Generation of the table that decided. */
	__u32 generation;
	/* Versions of two buckets. */
	__u32 buckets[2];
	__u32 versions[2];
	/* Index of its tally. */
	__u32 slot;
	/* TO_INTERFACE or TO_LINK. */
	__u16 kind;
	/* TO_INTERFACE: the frame is for the device's own address. */
	__u16 own_address;
	/* Device that takes the frame. */
	__u32 device;
	/* Longest unsegmented frame in bytes, including a VLAN tag. */
	__u32 len_max;
	/* TO_LINK: the other host's IPv4 address, in host byte order; longest IP packet that leaves in one datagram. */
	__u32 remote;
	__u32 segment_max;
	/* TO_LINK: device, UDP port, source address and next hop of datagrams that programs make; underlay 0: the VXLAN device makes
	 * all; device 0: no VXLAN device, so that other frames come up; next_hop 0: the kernel looks up the route. */
	__u32 underlay;
	__u32 port;
	__u32 local;
	__u32 next_hop;
	/* TO_LINK: first source port, and the bits of the flow's hash that are added to it. */
	__u16 first_port;
	__u16 port_mask;
	/* TO_LINK: bits of the guest's ECN field that the datagram carries. */
	__u32 ecn_mask;
	/* TO_INTERFACE: the guest's network namespace (nsid), NO_NAMESPACE: unknown. */
	__u32 namespace;
	/* Of sealed datagrams: destination and source address of their frames, which the key does not have. */
	__u16 stations[6];
	/* TO_LINK: bits of TRANSLATES. */
	__u32 translates;
};

/* The other host takes translated packets; the guest's packets are not longer than the path's. */
#define TRANSLATES 1
#define TRANSLATES_DATAGRAMS 2

#define NO_NAMESPACE 0xffffffff

/* Frames and bytes of a flow. */
struct tally {
	__u64 frames;
	__u64 bytes;
	/* CLOCK_MONOTONIC time of the last frame. */
	__u64 used_ns;
	/* Pads it to a cache line, against false sharing: different processors count the two directions of a connection. */
	__u64 zero[5];
};

/* A device with a program. */
struct port {
	__u32 network;
	__u16 from;
	/* The guest's address, in the byte order of a frame. */
	__u16 mac[3];
	/* vnetd's TAP, which gets frames without a verdict; for that TAP, the guest's device. */
	__u32 other;
};

/* Longest TSO frame in bytes that fits an IP packet with the wire's headers (36 bytes). Interfaces accept TSO frames of any length. */
#define SUPER_FRAME_MAX 65499

/* Maximum number of links whose datagrams programs take: all links of a host. */
#define PEERS_MAX 4096

/* Where a link's datagrams come from and arrive: the other host's IPv4 address, and this host's UDP port, in host byte order. */
struct peer_key {
	__u32 remote;
	__u16 port;
	__u16 zero;
};

/* A link whose datagrams programs take. */
struct peer {
	__u16 from;
	__u16 zero[3];
	/* Device of the route to it and this host's address there, where programs take its datagrams; otherwise 0. */
	__u32 device;
	__u32 local;
	/* CLOCK_MONOTONIC time of the last packet in which the kernel had coalesced several datagrams. */
	__u64 coalesced_ns;
};

/* UDP port of the wire. */
#define WIRE_PORT 9789

/* Head of a wire's frame that comes up. The kernel inserts a VLAN tag at bytes 12 to 15 of such a packet, which are in the head. */
struct wire_head {
	__u32 remote;
	__u32 network;
	__u16 from;
	__u16 zero[3];
};

/* Tail of a frame that vnetd sends by the wire: the destination host's IPv4 address, in host byte order, and the network. If there is a
 * device of the underlay, the frame's IP packet leaves there as it is, to the next hop; 0: the kernel looks up the route. */
struct wire_tail {
	__u32 remote;
	__u32 network;
	__u32 underlay;
	__u32 next_hop;
};

/* Maximum number of conversations that programs watch, of which some are translated. */
#define CONVERSATIONS_MAX 16384
/* Maximum number of translations of other hosts. */
#define TRANSLATIONS_MAX 65536
/* Maximum number of conversations that wait for vnetd. */
#define WANTED_MAX 256
/* Frames after which vnetd is told of a conversation, and from one time to the next. */
#define WANTED_FRAMES 32
/* Destination port of translated packets, TCP and UDP. */
#define TRANSLATED_PORT 9790

/* The frames of one TCP connection or UDP flow in one direction: addresses, and source and destination port, in the byte order of a
 * frame. */
struct conversation {
	__u32 network;
	__u16 dst[3];
	__u16 src[3];
	__u32 source, destination;
	__u32 ports;
	__u16 protocol;
	__u16 ttl;
};

/* A conversation from a guest of this host. */
struct translated {
	/* CLOCK_MONOTONIC time until which its frames leave translated; 0: none yet. */
	__u64 until_ns;
	__u32 frames;
	/* The host that knows its index, and the index in the byte order of a frame. */
	__u32 remote;
	__u16 index;
	__u16 zero[3];
};

/* A conversation that has many frames. */
struct wanted {
	struct conversation is;
	__u32 remote;
	__u16 from;
	__u16 zero;
};

/* What identifies a translated packet at its destination: the host that has sent it, its source port in the byte order of a frame, and
 * its protocol. Index 0 is a proof that such packets arrive. */
struct translation_key {
	__u32 remote;
	__u16 index;
	__u16 protocol;
};

struct translation {
	struct conversation is;
	/* CLOCK_MONOTONIC time of the last packet. */
	__u64 seen_ns;
	/* Of a proof: packets that could not be restored, such as those with an unknown index. */
	__u64 lost;
};

/* Age of the leases' clock at which vnetd counts as dead, in ns: four rounds of its renewer. */
#define DEAD_NS 1000000000ULL

/* The current state that every verdict is compared with; vnetd writes to it without a system call. */
struct state {
	__u32 versions[VERSIONS];
	__u32 generation;
	/* Clock of leases: CLOCK_MONOTONIC time that vnetd wrote last. Leases do not end while vnetd is dead. */
	__u64 clock_ns;
	/* CLOCK_MONOTONIC time after which no verdict holds; vnetd postpones it. */
	__u64 end_ns;
	/* vnetd's TAP of the wire, which gets restored frames without a verdict. */
	__u32 core;
	__u32 zero;
};

#endif
