/* What the programs and vnetd share: the layout of every map. vnet/src/kernel/shared.rs has the same structs; a test compares them. */
#ifndef VNET_SHARED_H
#define VNET_SHARED_H

#include <linux/types.h>

/* Most installed flows, each with one slot of `tallies`. */
#define FLOWS_MAX 65536
/* Most devices with a program: two for each of 1 024 interfaces, and the wire's. */
#define PORTS_MAX 2050
/* Buckets of learned addresses, and the one that never changes (route/learning.rs). */
#define VERSIONS 4097

/* A flow, as the router's cache has it. */
struct flow_key {
	__u32 network;
	__u16 from;
	__u8 dst[6];
	__u8 src[6];
	__u16 zero;
};

enum { TO_INTERFACE = 1, TO_LINK = 2 };

/* A verdict with one destination, and what it depends on. */
struct flow {
	/* Time of the state's clock at which it ends. */
	__u64 until_ns;
	/* Of the table that decided. */
	__u32 generation;
	/* Versions of two buckets. */
	__u32 buckets[2];
	__u32 versions[2];
	/* Index of its tally. */
	__u32 slot;
	/* TO_INTERFACE or TO_LINK. */
	__u32 kind;
	/* Device that takes the frame. */
	__u32 device;
	/* TO_INTERFACE: the frame is for the device's own address. */
	__u32 own_address;
	/* Longest frame in bytes, a VLAN tag included; a frame to be segmented is never too long. */
	__u32 len_max;
	/* TO_LINK: the other host's IPv4 address, in host byte order; longest segment of a TCP frame in bytes. */
	__u32 remote;
	__u32 segment_max;
};

/* What a flow has carried. */
struct tally {
	__u64 frames;
	__u64 bytes;
	/* CLOCK_MONOTONIC time of the last frame. */
	__u64 used_ns;
	__u64 zero;
};

/* A device with a program. */
struct port {
	__u32 network;
	__u16 from;
	/* The guest's address, as it lies in a frame. */
	__u16 mac[3];
	/* Where frames without a verdict go: the TAP of vnetd. For that TAP: the guest's device. */
	__u32 other;
};

/* What every verdict is checked against; vnetd writes to it without a system call. */
struct state {
	__u32 versions[VERSIONS];
	__u32 generation;
	/* Clock of leases: CLOCK_MONOTONIC time that vnetd wrote last. Leases do not end while vnetd is dead. */
	__u64 clock_ns;
	/* CLOCK_MONOTONIC time after which no verdict holds; vnetd postpones it. */
	__u64 end_ns;
};

#endif
