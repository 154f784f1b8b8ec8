/* The vnet interconnect for C: endpoints, registered memory, RDMA writes and reads, messages, over UDP, raw Ethernet or shared memory.
 *
 * Link with -lvnet_rdma. Functions return 0 or a negative errno; vnet_rdma_error() has the reason as text, for each thread.
 * All functions may be called from any thread. docs/interconnect.md has a guide and what is promised under failure.
 */
#ifndef VNET_RDMA_H
#define VNET_RDMA_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* A socket with a protocol engine, usually one for each process. */
typedef struct vnet_rdma_node vnet_rdma_node;
/* Operations are posted on an endpoint, and their completions are taken from it. */
typedef struct vnet_rdma_endpoint vnet_rdma_endpoint;

/* An endpoint elsewhere. Compare with vnet_rdma_same_peer(). A node at an Ethernet device has the link-local IPv6 address that is made from the device's
 * MAC address (RFC 4291, appendix A), with the scope 0. */
typedef struct vnet_rdma_peer {
	uint8_t ip[16];    /* IPv6, or IPv4 in its first four bytes */
	uint32_t scope;    /* of IPv6 */
	uint16_t port;
	uint16_t endpoint;
	uint16_t family;   /* 4 or 6 */
	uint16_t reserved;
} vnet_rdma_peer;

/* How an operation ended. */
enum vnet_rdma_status {
	VNET_RDMA_SUCCESS = 0,
	VNET_RDMA_UNREACHABLE = 1,    /* the peer does not answer; whether the operation was carried out is unknown */
	VNET_RDMA_PEER_RESTARTED = 2, /* likewise */
	VNET_RDMA_BAD_KEY = 3,        /* key, range or access right is wrong at the target */
	VNET_RDMA_NOT_READY = 4,      /* the target endpoint takes no messages */
	VNET_RDMA_TRUNCATED = 5,      /* the message was longer than the buffer */
	VNET_RDMA_CANCELLED = 6,
	VNET_RDMA_TIMED_OUT = 7,
	VNET_RDMA_PROTOCOL = 8
};

/* What ended. */
enum vnet_rdma_kind {
	VNET_RDMA_SEND = 0,
	VNET_RDMA_WRITE = 1,
	VNET_RDMA_READ = 2,
	VNET_RDMA_RECEIVE = 3,
	VNET_RDMA_ARRIVAL = 4, /* a peer's write with immediate data is in this side's memory */
	VNET_RDMA_ATOMIC = 5
};

/* Flags of operations and completions. */
#define VNET_RDMA_TAGGED 0x1u   /* `tag` is valid */
#define VNET_RDMA_DATA 0x2u     /* `data` is valid: immediate data for the target */
#define VNET_RDMA_BUFFERED 0x4u /* copy up to 16 KiB and complete at once; a later failure is a second completion, VNET_RDMA_LATE */
#define VNET_RDMA_QUIET 0x8u    /* no completion unless it fails */
#define VNET_RDMA_RELEASED 0x10u /* of a completion: the buffer, perhaps for several messages, belongs to the program again */
#define VNET_RDMA_DISCARD 0x20u  /* drop the message's bytes, without VNET_RDMA_TRUNCATED */
#define VNET_RDMA_LATE 0x40u     /* of a completion: the operation was buffered, completed before, and has failed after all */

/* What peers may do with registered memory. */
#define VNET_RDMA_REMOTE_READ 0x1u
#define VNET_RDMA_REMOTE_WRITE 0x2u

typedef struct vnet_rdma_completion {
	uint64_t context; /* as given with the operation */
	uint64_t len;     /* bytes; of a truncated message its full length */
	uint64_t tag;
	uint64_t data;
	uint64_t offset;  /* of a message in a buffer for several */
	uint32_t kind;
	uint32_t status;
	uint32_t flags;   /* VNET_RDMA_TAGGED, VNET_RDMA_DATA, VNET_RDMA_RELEASED, VNET_RDMA_LATE */
	uint32_t reserved;
	vnet_rdma_peer peer;
} vnet_rdma_completion;

/* Numbers of a peer's registered memory to change, each in one step for all that happens there. The numbers of `change` are those of
 * libfabric's enum fi_op (FI_MIN is 0, FI_MSWAP is 18), those of `datatype` those of its enum fi_datatype up to FI_DOUBLE, which is 9. */
typedef struct vnet_rdma_atomic_op {
	uint64_t key;
	uint64_t offset;      /* of the first number: a multiple of its size, as its address is */
	const void *operands; /* copied; ignored by FI_ATOMIC_READ */
	const void *compare;  /* copied; ignored by operations that compare nothing */
	void *found;          /* where the numbers go that were there before, or NULL */
	uint32_t count;       /* of numbers: at most 240 bytes */
	uint16_t change;
	uint16_t datatype;
} vnet_rdma_atomic_op;

/* What an endpoint has sent since it was opened. */
typedef struct vnet_rdma_counters {
	uint64_t packets;   /* of its operations, and of its memory that peers read */
	uint64_t bytes;     /* of these packets, and of writes straight into memory shared with a peer */
	uint64_t held_back; /* how often its rate limit began to hold packets back */
} vnet_rdma_counters;

/* What a node's engine has done since it was opened. */
typedef struct vnet_rdma_node_counters {
	uint64_t packets_out; /* with repeated ones */
	uint64_t resent;      /* repeated ones */
	uint64_t packets_in;
	uint64_t malformed;   /* received ones that do not belong to this protocol */
	uint64_t unknown;     /* received ones of no channel of this engine */
	uint64_t useless;     /* received twice, or beyond the receive window */
	uint64_t no_memory;   /* dropped, as no memory was left to hold them until those before them had come */
	uint64_t not_ready;   /* messages refused, as the endpoint had no room or did not exist */
	uint64_t bad_keys;    /* peers' writes and reads refused because of a wrong key, range or right */
	uint64_t failed_channels;
	uint64_t held_back;   /* how often rate limits of endpoints began to hold packets back */
} vnet_rdma_node_counters;

/* The calling thread's last error. Valid until its next call. */
const char *vnet_rdma_error(void);
/* What a status means. */
const char *vnet_rdma_status_text(uint32_t status);

/* Deadline of an operation in the nodes that are opened from now on, in milliseconds. 60 s unless it is set. 0: none, and messages wait
 * without limit for an endpoint that is not open or has no room. */
void vnet_rdma_set_timeout(uint32_t timeout_ms);
/* Whether the program registers memory of its own in the nodes that are opened from now on: yes, unless it is set to 0. A program that registers only
 * memory of vnet_rdma_allocate() gets the engine of the host's vnetd by itself in a virtual machine whose helper runs, and in a container whose network prefers that engine (see
 * vnet_rdma_attachment()). */
void vnet_rdma_set_own_memory(int is_registered);
/* Opens a node at `bind`, such as "10.77.1.1:7000" or "[::]:0"; NULL: any address and port. "ether://eth0:7000": in raw Ethernet frames at this
 * device, which needs CAP_NET_RAW. -ENODEV: no such device; -EPERM: no CAP_NET_RAW, or a link of this host is sealed. */
int vnet_rdma_open(const char *bind, vnet_rdma_node **node);
/* Waits up to two seconds for acknowledgements, tells peers, and frees the node. Close its endpoints first. */
void vnet_rdma_close(vnet_rdma_node *node);
/* Fills in its counters. -ENOTSUP: the host's daemon runs the engine; its metrics have packets sent and received. */
int vnet_rdma_counters_of_node(const vnet_rdma_node *node, vnet_rdma_node_counters *counters);
/* Port of the node. */
uint16_t vnet_rdma_port(const vnet_rdma_node *node);

/* Opens the endpoint `number` of the node, or the first free one if it is negative. */
int vnet_rdma_endpoint_open(vnet_rdma_node *node, int number, vnet_rdma_endpoint **endpoint);
/* Closes it: its operations end without completion, its memory is deregistered. */
void vnet_rdma_endpoint_close(vnet_rdma_endpoint *endpoint);
/* Sets its share of what the node sends, from now on: among endpoints that have something to send bytes are divided by `weight`, 1 to 100 (100
 * unless it is set), and it sends at most `rate` bytes per second; 0: no limit. -EINVAL: there is no such weight. */
int vnet_rdma_endpoint_share(vnet_rdma_endpoint *endpoint, uint32_t weight, uint64_t rate);
/* Fills in its counters. -ENOTCONN: the daemon that runs its engine is gone or does not answer. */
int vnet_rdma_counters_of_endpoint(vnet_rdma_endpoint *endpoint, vnet_rdma_counters *counters);
/* Its number. */
uint16_t vnet_rdma_endpoint_number(const vnet_rdma_endpoint *endpoint);

/* The endpoint named "HOST:PORT/ENDPOINT", or "ether://MAC:PORT/ENDPOINT", such as "ether://02-00-00-00-00-01:7000/0". */
int vnet_rdma_resolve(const char *name, vnet_rdma_peer *peer);
/* Whether both are the same endpoint. */
int vnet_rdma_same_peer(const vnet_rdma_peer *a, const vnet_rdma_peer *b);

/* Registers memory for peers, until it is deregistered. Its first byte has the offset 0. With VNET_RDMA_ATTACHMENT=daemon only memory of
 * vnet_rdma_allocate() can be registered: -EFAULT. */
int vnet_rdma_register(vnet_rdma_endpoint *endpoint, void *start, size_t len, uint32_t access, uint64_t *key);
/* As vnet_rdma_register, with zeroed memory of the library, which lives as long as the node. If peers may read and write it, large writes of a process of
 * this host take one copy. The program must not write into it while it deregisters it. */
int vnet_rdma_allocate(vnet_rdma_endpoint *endpoint, size_t len, uint32_t access, void **start, uint64_t *key);
/* As vnet_rdma_register, under a key of the program's choice; the first byte has the offset `base`. */
int vnet_rdma_register_at(vnet_rdma_endpoint *endpoint, void *start, size_t len, uint32_t access, uint64_t base, uint64_t key);
/* When this returns, no peer reads or writes the memory any more. */
int vnet_rdma_deregister(vnet_rdma_endpoint *endpoint, uint64_t key);

/* The memory of an operation belongs to the library until its completion, or until the call returns with VNET_RDMA_BUFFERED. */
int vnet_rdma_write(vnet_rdma_endpoint *endpoint, const vnet_rdma_peer *peer, const void *start, size_t len, uint64_t key,
		    uint64_t offset, uint64_t data, uint64_t context, uint32_t flags);
int vnet_rdma_read(vnet_rdma_endpoint *endpoint, const vnet_rdma_peer *peer, void *start, size_t len, uint64_t key,
		   uint64_t offset, uint64_t context);
int vnet_rdma_send(vnet_rdma_endpoint *endpoint, const vnet_rdma_peer *peer, const void *start, size_t len, uint64_t tag,
		   uint64_t data, uint64_t context, uint32_t flags);
/* VNET_RDMA_QUIET is the only flag. */
int vnet_rdma_atomic(vnet_rdma_endpoint *endpoint, const vnet_rdma_peer *peer, const vnet_rdma_atomic_op *op, uint64_t context,
		     uint32_t flags);
/* Takes a message whose tag equals `tag` where the bits of `ignore` are 0, or without VNET_RDMA_TAGGED one without a tag. `from` may
 * be NULL: of any peer. */
int vnet_rdma_receive(vnet_rdma_endpoint *endpoint, const vnet_rdma_peer *from, void *start, size_t len, uint64_t tag,
		      uint64_t ignore, uint64_t context, uint32_t flags);
/* The same for one message after the other, until fewer than `least` bytes are left; 0: for one. */
int vnet_rdma_receive_several(vnet_rdma_endpoint *endpoint, const vnet_rdma_peer *from, void *start, size_t len, uint64_t tag,
			      uint64_t ignore, uint64_t least, uint64_t context, uint32_t flags);
/* Looks for a message that nobody has received: 1 fills `seen`, 0 is none. A `claim` other than 0 sets it apart for
 * vnet_rdma_receive_claimed(). */
int vnet_rdma_peek(vnet_rdma_endpoint *endpoint, const vnet_rdma_peer *from, uint64_t tag, uint64_t ignore, uint32_t flags,
		   uint64_t claim, vnet_rdma_completion *seen);
int vnet_rdma_receive_claimed(vnet_rdma_endpoint *endpoint, uint64_t claim, void *start, size_t len, uint64_t context,
			      uint32_t flags);
/* How the packets to a peer travel now: by the UDP socket, in raw Ethernet frames, or through memory shared with a process of the same host, which the host's daemon
 * gives by itself soon after the first message. VNET_RDMA_MEETING="" in the environment keeps them on the network. With
 * VNET_RDMA_ATTACHMENT=daemon, the host's daemon runs the engine and sends all packets; between two processes that it serves they
 * bypass the network. VNET_RDMA_ATTACHMENT=vm is the same from a virtual machine. Beside the UDP socket, large transfers take TCP connections, unless VNET_RDMA_STREAMS=off. To a peer that UDP does not
 * reach, all packets take one; with VNET_RDMA_ATTACHMENT=bounce, to all peers. To a peer behind a sealed link they are sealed, unless
 * VNET_RDMA_SEAL=off. */
#define VNET_RDMA_ATTACHMENT_UDP 0
#define VNET_RDMA_ATTACHMENT_SAME_HOST 1
#define VNET_RDMA_ATTACHMENT_DAEMON 2
#define VNET_RDMA_ATTACHMENT_SEALED 3
#define VNET_RDMA_ATTACHMENT_ETHERNET 4
#define VNET_RDMA_ATTACHMENT_VM 5
#define VNET_RDMA_ATTACHMENT_BOUNCE 6
int vnet_rdma_attachment(vnet_rdma_endpoint *endpoint, const vnet_rdma_peer *peer);
/* Takes a posted buffer back. 0, or -ENOENT: there is none with this context, or its message is on its way. */
int vnet_rdma_cancel(vnet_rdma_endpoint *endpoint, uint64_t context);

/* Makes progress and takes up to `max` completions. Returns their number. */
int vnet_rdma_poll(vnet_rdma_endpoint *endpoint, vnet_rdma_completion *completions, int max);
/* vnet_rdma_poll() without VNET_RDMA_ARRIVAL: as long as arrivals are not taken, few more come from each peer. */
int vnet_rdma_poll_own(vnet_rdma_endpoint *endpoint, vnet_rdma_completion *completions, int max);
/* vnet_rdma_poll(), but waits for the first one up to `timeout_ms`, or for ever if that is negative. */
int vnet_rdma_wait(vnet_rdma_endpoint *endpoint, vnet_rdma_completion *completions, int max, int timeout_ms);

/* Sleeps until there may be something to take, at most `timeout_ms`. */
void vnet_rdma_pause(vnet_rdma_endpoint *endpoint, uint32_t timeout_ms);
/* A descriptor for poll() and the like, or a negative errno: readable when there may be something to take. Before waiting on it take completions
 * until there are none, and call vnet_rdma_pause() with 0 so that peers get their answers. It belongs to the node. */
int vnet_rdma_descriptor(vnet_rdma_endpoint *endpoint);
/* Wakes a thread that waits on the descriptor, or in a call of this endpoint. */
void vnet_rdma_wake(vnet_rdma_endpoint *endpoint);

#ifdef __cplusplus
}
#endif

#endif
