/* Endpoints. Each libfabric endpoint opens an interconnect node with one endpoint, so that an IP address and a port name it. */
#include <arpa/inet.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "vnet.h"

static int error_of(uint32_t status)
{
	switch (status) {
	case VNET_RDMA_UNREACHABLE: return FI_EHOSTUNREACH;
	case VNET_RDMA_PEER_RESTARTED: return FI_ECONNRESET;
	case VNET_RDMA_BAD_KEY: return FI_EACCES;
	case VNET_RDMA_NOT_READY: return FI_ENORX;
	case VNET_RDMA_TRUNCATED: return FI_ETRUNC;
	case VNET_RDMA_CANCELLED: return FI_ECANCELED;
	case VNET_RDMA_TIMED_OUT: return FI_ETIMEDOUT;
	default: return FI_EIO;
	}
}

static void unlink_op(struct vnet_ep *ep, struct vnet_op *op)
{
	if (!op->is_posted)
		return;
	*(op->before ? &op->before->next : &ep->posted) = op->next;
	if (op->next)
		op->next->before = op->before;
	op->is_posted = false;
}

struct vnet_op *vnet_new_op(struct vnet_ep *ep, void *context, uint64_t flags, bool is_reported)
{
	struct vnet_op *op = ep->free_ops;
	if (op)
		ep->free_ops = op->next;
	else if (!(op = malloc(sizeof *op)))
		return NULL;
	*op = (struct vnet_op){.context = context, .flags = flags, .is_reported = is_reported};
	return op;
}

void vnet_drop_op(struct vnet_ep *ep, struct vnet_op *op)
{
	unlink_op(ep, op);
	op->next = ep->free_ops;
	ep->free_ops = op;
}

static void count(struct vnet_ep *ep, int place, bool is_error)
{
	if (ep->cntrs[place])
		*(is_error ? &ep->cntrs[place]->errors : &ep->cntrs[place]->value) += 1;
}

static int cntr_of(uint64_t flags)
{
	if (flags & FI_RECV)
		return VNET_CNTR_RECV;
	if (flags & FI_READ)
		return VNET_CNTR_READ;
	return flags & FI_WRITE ? VNET_CNTR_WRITE : VNET_CNTR_SEND;
}

static void take_arrival(struct vnet_ep *ep, const vnet_rdma_completion *done)
{
	struct fi_cq_err_entry entry = {
		.flags = FI_RMA | FI_REMOTE_WRITE | FI_REMOTE_CQ_DATA,
		.len = done->len,
		.data = done->data,
	};
	count(ep, VNET_CNTR_REMOTE_WRITE, false);
	if (ep->rx_cq)
		vnet_cq_push(ep->rx_cq, &entry, vnet_av_find(ep->av, &done->peer));
}

/* Reports the failure of an operation whose context the application has back: a send that was copied and completed at once, or
 * an inject. Such an error has no op_context. */
static void take_loss(struct vnet_ep *ep, const vnet_rdma_completion *done)
{
	static const uint64_t flags[] = {
		[VNET_RDMA_SEND] = FI_SEND,
		[VNET_RDMA_WRITE] = FI_RMA | FI_WRITE,
		[VNET_RDMA_ATOMIC] = FI_ATOMIC | FI_WRITE,
	};
	struct fi_cq_err_entry entry = {.err = error_of(done->status), .prov_errno = done->status};
	if (done->kind < sizeof flags / sizeof *flags)
		entry.flags = flags[done->kind];
	count(ep, cntr_of(entry.flags), true);
	if (ep->tx_cq)
		vnet_cq_push(ep->tx_cq, &entry, FI_ADDR_NOTAVAIL);
}

static void take(struct vnet_ep *ep, const vnet_rdma_completion *done)
{
	if (done->kind == VNET_RDMA_ARRIVAL) {
		take_arrival(ep, done);
		return;
	}
	struct vnet_op *op = done->flags & VNET_RDMA_LATE ? NULL : (struct vnet_op *)(uintptr_t)done->context;
	if (!op) {
		take_loss(ep, done);
		return;
	}
	bool is_receive = done->kind == VNET_RDMA_RECEIVE;
	struct vnet_cq *cq = is_receive ? ep->rx_cq : ep->tx_cq;
	struct fi_cq_err_entry entry = {
		.op_context = op->context,
		.flags = op->flags | (done->flags & VNET_RDMA_DATA ? FI_REMOTE_CQ_DATA : 0),
		.len = done->len,
		.buf = is_receive ? (char *)op->start + done->offset : NULL,
		.data = done->data,
		.tag = done->tag,
	};
	bool is_last = !(op->flags & FI_MULTI_RECV) || done->flags & VNET_RDMA_RELEASED;
	if (!is_last)
		entry.flags &= ~FI_MULTI_RECV;
	if (done->status != VNET_RDMA_SUCCESS) {
		entry.err = error_of(done->status);
		entry.prov_errno = done->status;
	}
	count(ep, cntr_of(op->flags), entry.err != 0);
	if (cq && (op->is_reported || entry.err))
		vnet_cq_push(cq, &entry, is_receive ? vnet_av_find(ep->av, &done->peer) : FI_ADDR_NOTAVAIL);
	if (is_last)
		vnet_drop_op(ep, op);
}

void vnet_ep_progress(struct vnet_ep *ep)
{
	vnet_rdma_completion done[16];
	if (!ep->rdma)
		return;
	/* An application that reads only its tx_cq gets no further notices of writes. */
	bool is_full = ep->rx_cq && ep->rx_cq->count >= VNET_CQ_FULL;
	int taken = is_full ? vnet_rdma_poll_own(ep->rdma, done, 16) : vnet_rdma_poll(ep->rdma, done, 16);
	for (int i = 0; i < taken; i++)
		take(ep, &done[i]);
}

int vnet_ep_register(struct vnet_ep *ep, const struct vnet_mr *mr)
{
	return vnet_rdma_register_at(ep->rdma, mr->start, mr->len, mr->access, mr->base, mr->fid.key);
}

static int enable(struct vnet_ep *ep)
{
	char ip[INET6_ADDRSTRLEN], bind[INET6_ADDRSTRLEN + 24];
	if (ep->rdma)
		return 0;
	if (!ep->av)
		return -FI_ENOAV;
	if (ep->name.any.sa_family == AF_INET6) {
		inet_ntop(AF_INET6, &ep->name.v6.sin6_addr, ip, sizeof ip);
		snprintf(bind, sizeof bind, "[%s%%%u]:%u", ip, ep->name.v6.sin6_scope_id, ntohs(ep->name.v6.sin6_port));
	} else {
		inet_ntop(AF_INET, &ep->name.v4.sin_addr, ip, sizeof ip);
		snprintf(bind, sizeof bind, "%s:%u", ip, ntohs(ep->name.v4.sin_port));
	}
	/* Operations have no deadline, and messages wait without limit until the peer has room: a receive may be posted much later than
	 * the message is sent, so only the death of a peer fails an operation. */
	vnet_rdma_set_timeout(0);
	/* Programs register memory of their own, such as MPI windows. */
	vnet_rdma_set_own_memory(1);
	int result = vnet_rdma_open(bind, &ep->node);
	if (!result)
		result = vnet_rdma_endpoint_open(ep->node, 0, &ep->rdma);
	if (result) {
		fprintf(stderr, "libfabric:vnet: %s\n", vnet_rdma_error());
		return result;
	}
	/* sockaddr_in and sockaddr_in6 hold the port at the same offset. */
	ep->name.v4.sin_port = htons(vnet_rdma_port(ep->node));
	result = vnet_cq_watch(ep->rx_cq, ep);
	if (!result)
		result = vnet_cq_watch(ep->tx_cq, ep);
	pthread_mutex_lock(&ep->domain->lock);
	for (struct vnet_mr *mr = ep->domain->mrs; mr && !result; mr = mr->next)
		result = vnet_ep_register(ep, mr);
	pthread_mutex_unlock(&ep->domain->lock);
	return result;
}

static int ep_control(struct fid *fid, int command, void *arg)
{
	struct vnet_ep *ep = (struct vnet_ep *)fid;
	struct fi_alias *alias = arg;
	switch (command) {
	case FI_ENABLE: return enable(ep);
	case FI_GETOPSFLAG:
		*(uint64_t *)arg = *(uint64_t *)arg & FI_RECV ? ep->rx_flags : ep->tx_flags;
		return 0;
	case FI_SETOPSFLAG:
		*(*(uint64_t *)arg & FI_RECV ? &ep->rx_flags : &ep->tx_flags) = *(uint64_t *)arg & ~(FI_RECV | FI_TRANSMIT);
		return 0;
	default:
		(void)alias;
		return -FI_ENOSYS;
	}
}

static int ep_bind(struct fid *fid, struct fid *other, uint64_t flags)
{
	struct vnet_ep *ep = (struct vnet_ep *)fid;
	static const uint64_t events[VNET_CNTRS] = {FI_SEND, FI_RECV, FI_READ, FI_WRITE, FI_REMOTE_WRITE};
	switch (other->fclass) {
	case FI_CLASS_AV:
		ep->av = (struct vnet_av *)other;
		return 0;
	case FI_CLASS_EQ: return 0;
	case FI_CLASS_CQ:
		if (flags & FI_TRANSMIT) {
			ep->tx_cq = (struct vnet_cq *)other;
			ep->is_tx_selective = flags & FI_SELECTIVE_COMPLETION;
		}
		if (flags & FI_RECV) {
			ep->rx_cq = (struct vnet_cq *)other;
			ep->is_rx_selective = flags & FI_SELECTIVE_COMPLETION;
		}
		return 0;
	case FI_CLASS_CNTR:
		/* Peers read without notice to the owner of the memory. */
		if (flags & FI_REMOTE_READ)
			return -FI_ENOSYS;
		for (int i = 0; i < VNET_CNTRS; i++) {
			if (flags & events[i])
				ep->cntrs[i] = (struct vnet_cntr *)other;
		}
		return 0;
	default: return -FI_EINVAL;
	}
}

static int ep_close(struct fid *fid)
{
	struct vnet_ep *ep = (struct vnet_ep *)fid;
	pthread_mutex_lock(&ep->domain->lock);
	for (struct vnet_ep **place = &ep->domain->eps; *place; place = &(*place)->next) {
		if (*place == ep) {
			*place = ep->next;
			break;
		}
	}
	pthread_mutex_unlock(&ep->domain->lock);
	vnet_rdma_endpoint_close(ep->rdma);
	vnet_rdma_close(ep->node);
	while (ep->posted)
		vnet_drop_op(ep, ep->posted);
	while (ep->free_ops) {
		struct vnet_op *op = ep->free_ops;
		ep->free_ops = op->next;
		free(op);
	}
	free(ep);
	return 0;
}

static ssize_t ep_cancel(fid_t fid, void *context)
{
	struct vnet_ep *ep = (struct vnet_ep *)fid;
	pthread_mutex_lock(&ep->domain->lock);
	for (struct vnet_op *op = ep->posted; op; op = op->next) {
		if (op->context != context || vnet_rdma_cancel(ep->rdma, (uintptr_t)op))
			continue;
		struct fi_cq_err_entry entry = {
			.op_context = op->context,
			.flags = op->flags,
			.err = FI_ECANCELED,
			.prov_errno = VNET_RDMA_CANCELLED,
		};
		if (ep->rx_cq)
			vnet_cq_push(ep->rx_cq, &entry, FI_ADDR_NOTAVAIL);
		vnet_drop_op(ep, op);
		break;
	}
	pthread_mutex_unlock(&ep->domain->lock);
	return 0;
}

static int ep_getopt(fid_t fid, int level, int name, void *value, size_t *len)
{
	if (level != FI_OPT_ENDPOINT || name != FI_OPT_MIN_MULTI_RECV || *len < sizeof(size_t))
		return -FI_ENOPROTOOPT;
	*(size_t *)value = ((struct vnet_ep *)fid)->min_multi_recv;
	*len = sizeof(size_t);
	return 0;
}

static int ep_setopt(fid_t fid, int level, int name, const void *value, size_t len)
{
	if (level != FI_OPT_ENDPOINT || name != FI_OPT_MIN_MULTI_RECV || len != sizeof(size_t))
		return -FI_ENOPROTOOPT;
	((struct vnet_ep *)fid)->min_multi_recv = *(const size_t *)value;
	return 0;
}

static int ep_getname(fid_t fid, void *address, size_t *len)
{
	struct vnet_ep *ep = (struct vnet_ep *)fid;
	size_t room = *len;
	*len = vnet_name_len(&ep->name);
	memcpy(address, &ep->name, room < *len ? room : *len);
	return room < *len ? -FI_ETOOSMALL : 0;
}

static int ep_setname(fid_t fid, void *address, size_t len)
{
	struct vnet_ep *ep = (struct vnet_ep *)fid;
	if (ep->rdma || len != vnet_name_len(&ep->name) || ((struct sockaddr *)address)->sa_family != ep->name.any.sa_family)
		return -FI_EINVAL;
	memcpy(&ep->name, address, len);
	return 0;
}

static struct fi_ops ep_fid_ops = {
	.size = sizeof(struct fi_ops),
	.close = ep_close,
	.bind = ep_bind,
	.control = ep_control,
	.ops_open = vnet_no_ops_open,
};

static struct fi_ops_ep ep_ops = {.size = sizeof ep_ops, .cancel = ep_cancel, .getopt = ep_getopt, .setopt = ep_setopt};

static struct fi_ops_cm cm_ops = {.size = sizeof cm_ops, .setname = ep_setname, .getname = ep_getname};

int vnet_ep_open(struct fid_domain *domain, struct fi_info *info, struct fid_ep **out, void *context)
{
	struct vnet_ep *ep = calloc(1, sizeof *ep);
	if (!ep)
		return -FI_ENOMEM;
	ep->domain = (struct vnet_domain *)domain;
	ep->name.any.sa_family = ep->domain->addr_format == FI_SOCKADDR_IN6 ? AF_INET6 : AF_INET;
	if (info->src_addr && info->src_addrlen >= vnet_name_len(&ep->name))
		memcpy(&ep->name, info->src_addr, vnet_name_len(&ep->name));
	ep->tx_flags = info->tx_attr ? info->tx_attr->op_flags : 0;
	ep->rx_flags = info->rx_attr ? info->rx_attr->op_flags : 0;
	ep->min_multi_recv = 64;
	ep->is_directed = info->caps & FI_DIRECTED_RECV;
	ep->fid.fid.fclass = FI_CLASS_EP;
	ep->fid.fid.context = context;
	ep->fid.fid.ops = &ep_fid_ops;
	ep->fid.ops = &ep_ops;
	ep->fid.cm = &cm_ops;
	ep->fid.msg = &vnet_msg_ops;
	ep->fid.tagged = &vnet_tagged_ops;
	ep->fid.rma = &vnet_rma_ops;
	ep->fid.atomic = &vnet_atomic_ops;
	pthread_mutex_lock(&ep->domain->lock);
	ep->next = ep->domain->eps;
	ep->domain->eps = ep;
	pthread_mutex_unlock(&ep->domain->lock);
	*out = &ep->fid;
	return 0;
}
