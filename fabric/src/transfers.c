/* Data transfers: messages, tagged messages, and remote memory access (RMA). */
#include <stdlib.h>
#include <string.h>

#include "vnet.h"

/* Arguments of a transfer. */
struct transfer {
	const void *start;
	size_t len;
	fi_addr_t address;
	uint64_t tag, ignore; /* messages: tag and ignored bits; RMA: key and offset of the remote memory */
	uint64_t data;
	void *context;
	uint64_t kind;  /* flags that the completion reports, such as FI_SEND | FI_TAGGED */
	uint64_t flags; /* flags of the call, or the endpoint's default flags */
	bool is_silent; /* fi_inject() and the like: only a failure produces a completion */
};

static ssize_t submit_locked(struct vnet_ep *ep, const struct transfer *transfer)
{
	const vnet_rdma_peer *peer = vnet_av_get(ep->av, transfer->address);
	if (!ep->rdma || !peer)
		return ep->rdma ? -FI_EINVAL : -FI_EOPBADSTATE;
	bool is_inject = transfer->flags & FI_INJECT;
	bool is_reported = transfer->flags & FI_COMPLETION || !ep->is_tx_selective;
	bool is_early = !(transfer->flags & (FI_TRANSMIT_COMPLETE | FI_DELIVERY_COMPLETE | FI_COMMIT_COMPLETE | FI_MATCH_COMPLETE));
	uint32_t flags = transfer->kind & FI_TAGGED ? VNET_RDMA_TAGGED : 0;
	if (transfer->flags & FI_REMOTE_CQ_DATA)
		flags |= VNET_RDMA_DATA;
	if (is_inject && transfer->len > VNET_INJECT)
		return -FI_EINVAL;
	/* The library copies a small send, which then completes at once. A write completes when its data is in the target's memory. */
	if (is_inject || (transfer->kind & FI_SEND && is_early && transfer->len <= VNET_EAGER))
		flags |= VNET_RDMA_BUFFERED;
	struct vnet_op *op = NULL;
	if (transfer->is_silent)
		flags |= VNET_RDMA_QUIET;
	else if (!(op = vnet_new_op(ep, transfer->context, transfer->kind, is_reported)))
		return -FI_ENOMEM;
	uint64_t context = (uintptr_t)op;
	int result;
	if (transfer->kind & FI_READ)
		result = vnet_rdma_read(ep->rdma, peer, (void *)transfer->start, transfer->len, transfer->tag, transfer->ignore, context);
	else if (transfer->kind & FI_WRITE)
		result = vnet_rdma_write(ep->rdma, peer, transfer->start, transfer->len, transfer->tag, transfer->ignore, transfer->data, context, flags);
	else
		result = vnet_rdma_send(ep->rdma, peer, transfer->start, transfer->len, transfer->tag, transfer->data, context, flags);
	if (result) {
		if (op)
			vnet_drop_op(ep, op);
		if (result == -FI_EAGAIN)
			vnet_ep_progress(ep);
		return result;
	}
	struct vnet_cntr *cntr = ep->cntrs[transfer->kind & FI_WRITE ? VNET_CNTR_WRITE : VNET_CNTR_SEND];
	if (transfer->is_silent && cntr)
		cntr->value++;
	return 0;
}

static ssize_t submit(struct fid_ep *fid, const struct transfer *transfer)
{
	struct vnet_ep *ep = (struct vnet_ep *)fid;
	pthread_mutex_lock(&ep->domain->lock);
	ssize_t result = submit_locked(ep, transfer);
	pthread_mutex_unlock(&ep->domain->lock);
	return result;
}

/* Receives. */

static void report_peek(struct vnet_ep *ep, const struct transfer *transfer, const vnet_rdma_completion *seen)
{
	struct fi_cq_err_entry entry = {.op_context = transfer->context, .flags = transfer->kind, .tag = transfer->tag};
	fi_addr_t source = FI_ADDR_NOTAVAIL;
	if (seen) {
		entry.flags |= seen->flags & VNET_RDMA_DATA ? FI_REMOTE_CQ_DATA : 0;
		entry.len = seen->len;
		entry.tag = seen->tag;
		entry.data = seen->data;
		source = vnet_av_find(ep->av, &seen->peer);
	} else {
		entry.err = FI_ENOMSG;
	}
	if (ep->rx_cq)
		vnet_cq_push(ep->rx_cq, &entry, source);
}

static ssize_t receive_locked(struct vnet_ep *ep, const struct transfer *transfer)
{
	const vnet_rdma_peer *from = ep->is_directed ? vnet_av_get(ep->av, transfer->address) : NULL;
	uint32_t flags = transfer->kind & FI_TAGGED ? VNET_RDMA_TAGGED : 0;
	uintptr_t claim = (uintptr_t)transfer->context;
	if (!ep->rdma)
		return -FI_EOPBADSTATE;
	if (transfer->flags & FI_PEEK) {
		vnet_rdma_completion seen;
		bool takes = transfer->flags & (FI_CLAIM | FI_DISCARD);
		int found = vnet_rdma_peek(ep->rdma, from, transfer->tag, transfer->ignore, flags, takes ? claim : 0, &seen);
		if (found < 0)
			return found;
		report_peek(ep, transfer, found ? &seen : NULL);
		if (!found || !(transfer->flags & FI_DISCARD))
			return 0;
	}
	bool is_discarded = transfer->flags & FI_DISCARD;
	bool is_reported = (transfer->flags & FI_COMPLETION || !ep->is_rx_selective) && !(transfer->flags & FI_PEEK);
	struct vnet_op *op = vnet_new_op(ep, transfer->context, transfer->kind, is_reported);
	if (!op)
		return -FI_ENOMEM;
	op->start = (void *)transfer->start;
	int result;
	if (transfer->flags & (FI_CLAIM | FI_DISCARD)) {
		result = vnet_rdma_receive_claimed(ep->rdma, claim, (void *)transfer->start, is_discarded ? 0 : transfer->len, (uintptr_t)op,
						   is_discarded ? VNET_RDMA_DISCARD : 0);
	} else {
		size_t least = 0;
		if (transfer->flags & FI_MULTI_RECV) {
			op->flags |= FI_MULTI_RECV;
			least = ep->min_multi_recv ? ep->min_multi_recv : 1;
		}
		op->is_posted = true;
		op->next = ep->posted;
		if (op->next)
			op->next->before = op;
		ep->posted = op;
		result = vnet_rdma_receive_several(ep->rdma, from, (void *)transfer->start, transfer->len, transfer->tag, transfer->ignore, least,
						   (uintptr_t)op, flags);
	}
	if (result)
		vnet_drop_op(ep, op);
	return result;
}

static ssize_t receive(struct fid_ep *fid, const struct transfer *transfer)
{
	struct vnet_ep *ep = (struct vnet_ep *)fid;
	pthread_mutex_lock(&ep->domain->lock);
	ssize_t result = receive_locked(ep, transfer);
	pthread_mutex_unlock(&ep->domain->lock);
	return result;
}

static uint64_t tx_flags(struct fid_ep *ep)
{
	return ((struct vnet_ep *)ep)->tx_flags & ~FI_INJECT;
}

static uint64_t rx_flags(struct fid_ep *ep)
{
	return ((struct vnet_ep *)ep)->rx_flags;
}

/* Initializes `start` and `len` from a vector with at most one buffer. */
#define ONE(iov, count) .start = (count) ? (iov)[0].iov_base : NULL, .len = (count) ? (iov)[0].iov_len : 0

/* Messages. */

static ssize_t msg_recvmsg(struct fid_ep *ep, const struct fi_msg *msg, uint64_t flags)
{
	if (msg->iov_count > 1)
		return -FI_EINVAL;
	struct transfer transfer = {
		ONE(msg->msg_iov, msg->iov_count), .address = msg->addr, .context = msg->context, .kind = FI_RECV | FI_MSG, .flags = flags | rx_flags(ep),
	};
	return receive(ep, &transfer);
}

static ssize_t msg_recvv(struct fid_ep *ep, const struct iovec *iov, void **desc, size_t count, fi_addr_t source, void *context)
{
	struct fi_msg msg = {.msg_iov = iov, .desc = desc, .iov_count = count, .addr = source, .context = context};
	return msg_recvmsg(ep, &msg, 0);
}

static ssize_t msg_recv(struct fid_ep *ep, void *start, size_t len, void *desc, fi_addr_t source, void *context)
{
	struct iovec iov = {start, len};
	return msg_recvv(ep, &iov, &desc, 1, source, context);
}

static ssize_t send_message(struct fid_ep *ep, const struct fi_msg *msg, uint64_t flags, bool is_silent)
{
	if (msg->iov_count > 1)
		return -FI_EINVAL;
	struct transfer transfer = {
		ONE(msg->msg_iov, msg->iov_count), .address = msg->addr, .data = msg->data, .context = msg->context, .kind = FI_SEND | FI_MSG, .flags = flags,
		.is_silent = is_silent,
	};
	return submit(ep, &transfer);
}

static ssize_t msg_sendmsg(struct fid_ep *ep, const struct fi_msg *msg, uint64_t flags)
{
	return send_message(ep, msg, flags, false);
}

static ssize_t msg_sendv(struct fid_ep *ep, const struct iovec *iov, void **desc, size_t count, fi_addr_t dest, void *context)
{
	struct fi_msg msg = {.msg_iov = iov, .desc = desc, .iov_count = count, .addr = dest, .context = context};
	return msg_sendmsg(ep, &msg, tx_flags(ep));
}

static ssize_t msg_send(struct fid_ep *ep, const void *start, size_t len, void *desc, fi_addr_t dest, void *context)
{
	struct iovec iov = {(void *)start, len};
	return msg_sendv(ep, &iov, &desc, 1, dest, context);
}

static ssize_t inject_message(struct fid_ep *ep, const void *start, size_t len, uint64_t data, fi_addr_t dest, uint64_t flags)
{
	struct iovec iov = {(void *)start, len};
	struct fi_msg msg = {.msg_iov = &iov, .iov_count = 1, .addr = dest, .data = data};
	return send_message(ep, &msg, FI_INJECT | flags, true);
}

static ssize_t msg_inject(struct fid_ep *ep, const void *start, size_t len, fi_addr_t dest)
{
	return inject_message(ep, start, len, 0, dest, 0);
}

static ssize_t msg_senddata(struct fid_ep *ep, const void *start, size_t len, void *desc, uint64_t data, fi_addr_t dest, void *context)
{
	struct iovec iov = {(void *)start, len};
	struct fi_msg msg = {.msg_iov = &iov, .desc = &desc, .iov_count = 1, .addr = dest, .context = context, .data = data};
	return msg_sendmsg(ep, &msg, tx_flags(ep) | FI_REMOTE_CQ_DATA);
}

static ssize_t msg_injectdata(struct fid_ep *ep, const void *start, size_t len, uint64_t data, fi_addr_t dest)
{
	return inject_message(ep, start, len, data, dest, FI_REMOTE_CQ_DATA);
}

struct fi_ops_msg vnet_msg_ops = {
	.size = sizeof(struct fi_ops_msg),
	.recv = msg_recv,
	.recvv = msg_recvv,
	.recvmsg = msg_recvmsg,
	.send = msg_send,
	.sendv = msg_sendv,
	.sendmsg = msg_sendmsg,
	.inject = msg_inject,
	.senddata = msg_senddata,
	.injectdata = msg_injectdata,
};

/* Tagged messages. */

static ssize_t tagged_recvmsg(struct fid_ep *ep, const struct fi_msg_tagged *msg, uint64_t flags)
{
	if (msg->iov_count > 1)
		return -FI_EINVAL;
	struct transfer transfer = {
		ONE(msg->msg_iov, msg->iov_count), .address = msg->addr, .tag = msg->tag, .ignore = msg->ignore, .context = msg->context,
		.kind = FI_RECV | FI_TAGGED, .flags = flags | rx_flags(ep),
	};
	return receive(ep, &transfer);
}

static ssize_t tagged_recvv(struct fid_ep *ep, const struct iovec *iov, void **desc, size_t count, fi_addr_t source, uint64_t tag,
			    uint64_t ignore, void *context)
{
	struct fi_msg_tagged msg = {
		.msg_iov = iov, .desc = desc, .iov_count = count, .addr = source, .tag = tag, .ignore = ignore, .context = context,
	};
	return tagged_recvmsg(ep, &msg, 0);
}

static ssize_t tagged_recv(struct fid_ep *ep, void *start, size_t len, void *desc, fi_addr_t source, uint64_t tag, uint64_t ignore, void *context)
{
	struct iovec iov = {start, len};
	return tagged_recvv(ep, &iov, &desc, 1, source, tag, ignore, context);
}

static ssize_t send_tagged(struct fid_ep *ep, const struct fi_msg_tagged *msg, uint64_t flags, bool is_silent)
{
	if (msg->iov_count > 1)
		return -FI_EINVAL;
	struct transfer transfer = {
		ONE(msg->msg_iov, msg->iov_count), .address = msg->addr, .tag = msg->tag, .data = msg->data, .context = msg->context,
		.kind = FI_SEND | FI_TAGGED, .flags = flags, .is_silent = is_silent,
	};
	return submit(ep, &transfer);
}

static ssize_t tagged_sendmsg(struct fid_ep *ep, const struct fi_msg_tagged *msg, uint64_t flags)
{
	return send_tagged(ep, msg, flags, false);
}

static ssize_t tagged_sendv(struct fid_ep *ep, const struct iovec *iov, void **desc, size_t count, fi_addr_t dest, uint64_t tag, void *context)
{
	struct fi_msg_tagged msg = {.msg_iov = iov, .desc = desc, .iov_count = count, .addr = dest, .tag = tag, .context = context};
	return tagged_sendmsg(ep, &msg, tx_flags(ep));
}

static ssize_t tagged_data(struct fid_ep *ep, struct iovec iov, uint64_t data, fi_addr_t dest, uint64_t tag, void *context, uint64_t flags)
{
	struct fi_msg_tagged msg = {.msg_iov = &iov, .iov_count = 1, .addr = dest, .tag = tag, .context = context, .data = data};
	return tagged_sendmsg(ep, &msg, flags);
}

static ssize_t inject_tagged(struct fid_ep *ep, struct iovec iov, uint64_t data, fi_addr_t dest, uint64_t tag, uint64_t flags)
{
	struct fi_msg_tagged msg = {.msg_iov = &iov, .iov_count = 1, .addr = dest, .tag = tag, .data = data};
	return send_tagged(ep, &msg, FI_INJECT | flags, true);
}

static ssize_t tagged_send(struct fid_ep *ep, const void *start, size_t len, void *desc, fi_addr_t dest, uint64_t tag, void *context)
{
	(void)desc;
	return tagged_data(ep, (struct iovec){(void *)start, len}, 0, dest, tag, context, tx_flags(ep));
}

static ssize_t tagged_inject(struct fid_ep *ep, const void *start, size_t len, fi_addr_t dest, uint64_t tag)
{
	return inject_tagged(ep, (struct iovec){(void *)start, len}, 0, dest, tag, 0);
}

static ssize_t tagged_senddata(struct fid_ep *ep, const void *start, size_t len, void *desc, uint64_t data, fi_addr_t dest, uint64_t tag,
			       void *context)
{
	(void)desc;
	return tagged_data(ep, (struct iovec){(void *)start, len}, data, dest, tag, context, tx_flags(ep) | FI_REMOTE_CQ_DATA);
}

static ssize_t tagged_injectdata(struct fid_ep *ep, const void *start, size_t len, uint64_t data, fi_addr_t dest, uint64_t tag)
{
	return inject_tagged(ep, (struct iovec){(void *)start, len}, data, dest, tag, FI_REMOTE_CQ_DATA);
}

struct fi_ops_tagged vnet_tagged_ops = {
	.size = sizeof(struct fi_ops_tagged),
	.recv = tagged_recv,
	.recvv = tagged_recvv,
	.recvmsg = tagged_recvmsg,
	.send = tagged_send,
	.sendv = tagged_sendv,
	.sendmsg = tagged_sendmsg,
	.inject = tagged_inject,
	.senddata = tagged_senddata,
	.injectdata = tagged_injectdata,
};

/* Remote memory access (RMA). */

static ssize_t rma(struct fid_ep *ep, const struct fi_msg_rma *msg, uint64_t kind, uint64_t flags)
{
	if (msg->iov_count > 1 || msg->rma_iov_count != 1)
		return -FI_EINVAL;
	struct transfer transfer = {
		ONE(msg->msg_iov, msg->iov_count), .address = msg->addr, .tag = msg->rma_iov->key, .ignore = msg->rma_iov->addr, .data = msg->data,
		.context = msg->context, .kind = kind | FI_RMA, .flags = flags,
	};
	return submit(ep, &transfer);
}

static ssize_t inject_write(struct fid_ep *ep, struct iovec iov, fi_addr_t peer, struct fi_rma_iov remote, uint64_t data, uint64_t flags)
{
	struct transfer transfer = {
		.start = iov.iov_base, .len = iov.iov_len, .address = peer, .tag = remote.key, .ignore = remote.addr, .data = data,
		.kind = FI_WRITE | FI_RMA, .flags = FI_INJECT | flags, .is_silent = true,
	};
	return submit(ep, &transfer);
}

static ssize_t rma_one(struct fid_ep *ep, struct iovec iov, fi_addr_t peer, struct fi_rma_iov remote, uint64_t data, void *context,
		       uint64_t kind, uint64_t flags)
{
	remote.len = iov.iov_len;
	struct fi_msg_rma msg = {
		.msg_iov = &iov, .iov_count = 1, .addr = peer, .rma_iov = &remote, .rma_iov_count = 1, .context = context, .data = data,
	};
	return rma(ep, &msg, kind, flags);
}

static ssize_t rma_readmsg(struct fid_ep *ep, const struct fi_msg_rma *msg, uint64_t flags)
{
	return rma(ep, msg, FI_READ, flags);
}

static ssize_t rma_writemsg(struct fid_ep *ep, const struct fi_msg_rma *msg, uint64_t flags)
{
	return rma(ep, msg, FI_WRITE, flags);
}

static ssize_t rma_read(struct fid_ep *ep, void *start, size_t len, void *desc, fi_addr_t source, uint64_t addr, uint64_t key, void *context)
{
	(void)desc;
	return rma_one(ep, (struct iovec){start, len}, source, (struct fi_rma_iov){.addr = addr, .key = key}, 0, context, FI_READ, tx_flags(ep));
}

static ssize_t rma_readv(struct fid_ep *ep, const struct iovec *iov, void **desc, size_t count, fi_addr_t source, uint64_t addr, uint64_t key,
			 void *context)
{
	return count == 1 ? rma_read(ep, iov->iov_base, iov->iov_len, desc, source, addr, key, context) : -FI_EINVAL;
}

static ssize_t rma_write(struct fid_ep *ep, const void *start, size_t len, void *desc, fi_addr_t dest, uint64_t addr, uint64_t key, void *context)
{
	(void)desc;
	return rma_one(ep, (struct iovec){(void *)start, len}, dest, (struct fi_rma_iov){.addr = addr, .key = key}, 0, context, FI_WRITE, tx_flags(ep));
}

static ssize_t rma_writev(struct fid_ep *ep, const struct iovec *iov, void **desc, size_t count, fi_addr_t dest, uint64_t addr, uint64_t key,
			  void *context)
{
	return count == 1 ? rma_write(ep, iov->iov_base, iov->iov_len, desc, dest, addr, key, context) : -FI_EINVAL;
}

static ssize_t rma_inject(struct fid_ep *ep, const void *start, size_t len, fi_addr_t dest, uint64_t addr, uint64_t key)
{
	return inject_write(ep, (struct iovec){(void *)start, len}, dest, (struct fi_rma_iov){.addr = addr, .key = key}, 0, 0);
}

static ssize_t rma_writedata(struct fid_ep *ep, const void *start, size_t len, void *desc, uint64_t data, fi_addr_t dest, uint64_t addr,
			     uint64_t key, void *context)
{
	(void)desc;
	return rma_one(ep, (struct iovec){(void *)start, len}, dest, (struct fi_rma_iov){.addr = addr, .key = key}, data, context, FI_WRITE,
		       tx_flags(ep) | FI_REMOTE_CQ_DATA);
}

static ssize_t rma_injectdata(struct fid_ep *ep, const void *start, size_t len, uint64_t data, fi_addr_t dest, uint64_t addr, uint64_t key)
{
	return inject_write(ep, (struct iovec){(void *)start, len}, dest, (struct fi_rma_iov){.addr = addr, .key = key}, data, FI_REMOTE_CQ_DATA);
}

struct fi_ops_rma vnet_rma_ops = {
	.size = sizeof(struct fi_ops_rma),
	.read = rma_read,
	.readv = rma_readv,
	.readmsg = rma_readmsg,
	.write = rma_write,
	.writev = rma_writev,
	.writemsg = rma_writemsg,
	.inject = rma_inject,
	.writedata = rma_writedata,
	.injectdata = rma_injectdata,
};
