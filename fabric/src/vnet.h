/* The objects of the provider. Each object starts with its libfabric structure, so that a pointer to one is a pointer to the
 * other. */
#ifndef VNET_FI_H
#define VNET_FI_H

#include <pthread.h>
#include <stdbool.h>
#include <netinet/in.h>
#include <rdma/fabric.h>
#include <rdma/fi_atomic.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_eq.h>
#include <rdma/fi_errno.h>
#include <rdma/fi_rma.h>
#include <rdma/fi_tagged.h>
#include <rdma/providers/fi_prov.h>
#include <vnet_rdma.h>

/* Maximum size of an injected operation, and of a send that the library copies and completes at once, in bytes. */
#define VNET_INJECT 8192
#define VNET_EAGER 16384
#define VNET_MSG_MAX (1ull << 40)
/* Maximum size of the operands of one atomic operation, in bytes. */
#define VNET_ATOMIC_BYTES 240
#define VNET_CAPS_TX (FI_MSG | FI_TAGGED | FI_RMA | FI_ATOMIC | FI_SEND | FI_READ | FI_WRITE)
#define VNET_CAPS_RX                                                                                                   \
	(FI_MSG | FI_TAGGED | FI_RMA | FI_ATOMIC | FI_RECV | FI_REMOTE_READ | FI_REMOTE_WRITE | FI_MULTI_RECV | FI_SOURCE | FI_DIRECTED_RECV)
#define VNET_CAPS_DOMAIN (FI_LOCAL_COMM | FI_REMOTE_COMM)
#define VNET_CAPS (VNET_CAPS_TX | VNET_CAPS_RX | VNET_CAPS_DOMAIN)
#define VNET_ORDER (FI_ORDER_SAS | FI_ORDER_SAW | FI_ORDER_RAW)

struct vnet_ep;

/* An IPv4 or IPv6 address with a port. */
union vnet_name {
	struct sockaddr any;
	struct sockaddr_in v4;
	struct sockaddr_in6 v6;
};

/* Address vector: an array of peers indexed by fi_addr_t, and a hash table that maps an address to its index (open addressing,
 * load factor at most 1/2). */
struct vnet_av {
	struct fid_av fid;
	struct vnet_domain *domain;
	uint32_t addr_format;
	vnet_rdma_peer *peers;
	size_t count, room;
	uint32_t *places; /* hash table slots: index of the peer + 1, or 0 if empty */
	size_t places_len;
};

struct vnet_domain {
	struct fid_domain fid;
	pthread_mutex_t lock; /* guards all objects of the domain */
	uint32_t addr_format; /* FI_SOCKADDR_IN or FI_SOCKADDR_IN6 */
	int mr_mode;
	struct vnet_ep *eps;
	struct vnet_mr *mrs;
};

struct vnet_mr {
	struct fid_mr fid;
	struct vnet_domain *domain;
	struct vnet_mr *next;
	void *start;
	size_t len;
	uint64_t base;
	uint32_t access;
};

struct vnet_entry {
	struct fi_cq_err_entry entry; /* err is 0 if the operation succeeded */
	fi_addr_t source;
};

/* Maximum number of completions in a queue with which endpoints still take notices of peers' writes (FI_REMOTE_CQ_DATA). */
#define VNET_CQ_FULL 1024

/* Completion queue: a ring that doubles when it is full. The number of outstanding operations and VNET_CQ_FULL bound its size. */
struct vnet_cq {
	struct fid_cq fid;
	struct vnet_domain *domain;
	enum fi_cq_format format;
	struct vnet_entry *ring;
	size_t head, count, room;
	bool is_signalled;
	enum fi_wait_obj wait;
	/* `epoll` watches the endpoints' descriptors and `event`, an eventfd that is readable while the ring holds completions
	 * or after fi_cq_signal(). Both are -1 if `wait` is FI_WAIT_NONE. */
	int epoll, event;
	bool is_raised;
};

struct vnet_cntr {
	struct fid_cntr fid;
	struct vnet_domain *domain;
	uint64_t value, errors;
};

/* An outstanding operation. */
struct vnet_op {
	struct vnet_op *next, *before; /* links in the list of posted receives or of free operations */
	void *context;
	void *start;
	uint64_t flags; /* flags that the completion reports */
	bool is_reported; /* a success produces a completion; errors always do */
	bool is_posted;   /* the operation is in the list of posted receives */
};

enum { VNET_CNTR_SEND, VNET_CNTR_RECV, VNET_CNTR_READ, VNET_CNTR_WRITE, VNET_CNTR_REMOTE_WRITE, VNET_CNTRS };

struct vnet_ep {
	struct fid_ep fid;
	struct vnet_domain *domain;
	struct vnet_ep *next;
	struct vnet_av *av;
	struct vnet_cq *tx_cq, *rx_cq;
	bool is_tx_selective, is_rx_selective;
	bool is_directed; /* FI_DIRECTED_RECV: a receive that names a source accepts only messages from it */
	uint64_t tx_flags, rx_flags;
	struct vnet_cntr *cntrs[VNET_CNTRS];
	vnet_rdma_node *node;
	vnet_rdma_endpoint *rdma;
	union vnet_name name;
	size_t min_multi_recv;
	struct vnet_op *free_ops, *posted;
};

extern struct fi_provider vnet_provider;
struct fi_provider *vnet_fi_provider(void);

int vnet_getinfo(uint32_t version, const char *node, const char *service, uint64_t flags, const struct fi_info *hints,
		 struct fi_info **info);
int vnet_domain_open(struct fid_fabric *fabric, struct fi_info *info, struct fid_domain **domain, void *context);
int vnet_av_open(struct fid_domain *domain, struct fi_av_attr *attr, struct fid_av **av, void *context);
int vnet_cq_open(struct fid_domain *domain, struct fi_cq_attr *attr, struct fid_cq **cq, void *context);
int vnet_trywait(struct fid_fabric *fabric, struct fid **fids, int count);
int vnet_cntr_open(struct fid_domain *domain, struct fi_cntr_attr *attr, struct fid_cntr **cntr, void *context);
int vnet_ep_open(struct fid_domain *domain, struct fi_info *info, struct fid_ep **ep, void *context);

/* Size of the socket address, in bytes. */
static inline size_t vnet_name_len(const union vnet_name *name)
{
	return name->any.sa_family == AF_INET6 ? sizeof name->v6 : sizeof name->v4;
}

/* The caller must hold the domain's lock, except for vnet_cq_watch(), which changes no object of the domain. */
fi_addr_t vnet_av_find(const struct vnet_av *av, const vnet_rdma_peer *peer);
const vnet_rdma_peer *vnet_av_get(const struct vnet_av *av, fi_addr_t address);
int vnet_cq_watch(struct vnet_cq *cq, struct vnet_ep *ep);
int vnet_cq_push(struct vnet_cq *cq, const struct fi_cq_err_entry *entry, fi_addr_t source);
struct vnet_op *vnet_new_op(struct vnet_ep *ep, void *context, uint64_t flags, bool is_reported);
void vnet_drop_op(struct vnet_ep *ep, struct vnet_op *op);
int vnet_ep_register(struct vnet_ep *ep, const struct vnet_mr *mr);
void vnet_ep_progress(struct vnet_ep *ep);
void vnet_domain_progress(struct vnet_domain *domain);
void vnet_domain_rest(struct vnet_domain *domain);

extern struct fi_ops_msg vnet_msg_ops;
extern struct fi_ops_tagged vnet_tagged_ops;
extern struct fi_ops_rma vnet_rma_ops;
extern struct fi_ops_atomic vnet_atomic_ops;
int vnet_query_atomic(struct fid_domain *domain, enum fi_datatype type, enum fi_op op, struct fi_atomic_attr *attr, uint64_t flags);

/* Stubs for operations that this provider does not implement; they return -FI_ENOSYS. */
int vnet_no_bind(struct fid *fid, struct fid *other, uint64_t flags);
int vnet_no_control(struct fid *fid, int command, void *arg);
int vnet_no_ops_open(struct fid *fid, const char *name, uint64_t flags, void **ops, void *context);

#endif
