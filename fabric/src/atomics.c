/* Atomic operations on a peer's memory. A call takes at most one buffer each for operands, compare values and results. */
#include <stdlib.h>

#include "vnet.h"

/* Arguments of an atomic operation. */
struct atomic {
	vnet_rdma_atomic_op op;
	fi_addr_t address;
	void *context;
	uint64_t flags; /* flags of the call, or the endpoint's default flags */
	bool is_silent; /* fi_inject_atomic(): only a failure produces a completion */
};

/* Returns 0 if the provider implements `op` for `datatype`. `flags` says whether the call compares or fetches.
 * Sets the bytes per element and the maximum number of elements per call. */
static int check(enum fi_datatype datatype, enum fi_op op, uint64_t flags, size_t *size, size_t *count)
{
	static const size_t sizes[] = {1, 1, 2, 2, 4, 4, 8, 8, 4, 8}; /* indexed from FI_INT8 to FI_DOUBLE */
	if ((unsigned)datatype > FI_DOUBLE || (unsigned)op > FI_MSWAP)
		return -FI_EOPNOTSUPP;
	bool is_float = datatype == FI_FLOAT || datatype == FI_DOUBLE;
	bool is_of_bits = op == FI_BOR || op == FI_BAND || op == FI_BXOR || op == FI_MSWAP;
	bool is_compare = op >= FI_CSWAP;
	if ((is_float && is_of_bits) || is_compare != !!(flags & FI_COMPARE_ATOMIC) || (op == FI_ATOMIC_READ && !(flags & FI_FETCH_ATOMIC)))
		return -FI_EOPNOTSUPP;
	*size = sizes[datatype];
	*count = VNET_ATOMIC_BYTES / *size;
	return 0;
}

int vnet_query_atomic(struct fid_domain *domain, enum fi_datatype type, enum fi_op op, struct fi_atomic_attr *attr, uint64_t flags)
{
	(void)domain;
	return check(type, op, flags, &attr->size, &attr->count);
}

static ssize_t submit_locked(struct vnet_ep *ep, const struct atomic *atomic)
{
	const vnet_rdma_peer *peer = vnet_av_get(ep->av, atomic->address);
	if (!ep->rdma || !peer)
		return ep->rdma ? -FI_EINVAL : -FI_EOPBADSTATE;
	bool is_reported = atomic->flags & FI_COMPLETION || !ep->is_tx_selective;
	struct vnet_op *op = NULL;
	if (!atomic->is_silent && !(op = vnet_new_op(ep, atomic->context, FI_ATOMIC | (atomic->op.found ? FI_READ : FI_WRITE), is_reported)))
		return -FI_ENOMEM;
	int result = vnet_rdma_atomic(ep->rdma, peer, &atomic->op, (uintptr_t)op, atomic->is_silent ? VNET_RDMA_QUIET : 0);
	if (result) {
		if (op)
			vnet_drop_op(ep, op);
		if (result == -FI_EAGAIN)
			vnet_ep_progress(ep);
	} else if (atomic->is_silent && ep->cntrs[VNET_CNTR_WRITE]) {
		ep->cntrs[VNET_CNTR_WRITE]->value++;
	}
	return result;
}

/* Common implementation of all atomic calls. `compare` is NULL without a compare buffer, `result` without a result buffer. */
static ssize_t submit_as(struct fid_ep *fid, const struct fi_msg_atomic *msg, const struct fi_ioc *compare, size_t compares,
			 const struct fi_ioc *result, size_t results, uint64_t flags, bool is_silent)
{
	struct vnet_ep *ep = (struct vnet_ep *)fid;
	uint64_t kind = (compare ? FI_COMPARE_ATOMIC : 0) | (result ? FI_FETCH_ATOMIC : 0);
	size_t size, most;
	int error = check(msg->datatype, msg->op, kind, &size, &most);
	if (error)
		return error;
	if (msg->iov_count > 1 || msg->rma_iov_count != 1 || (compare && compares != 1) || (result && results != 1))
		return -FI_EINVAL;
	size_t count = msg->rma_iov->count;
	bool has_operands = msg->op != FI_ATOMIC_READ;
	if (!count || count > most || (has_operands && (!msg->iov_count || msg->msg_iov->count != count)) ||
	    (compare && compare->count != count) || (result && result->count != count))
		return -FI_EINVAL;
	struct atomic atomic = {
		.op = {
			.key = msg->rma_iov->key,
			.offset = msg->rma_iov->addr,
			.operands = has_operands ? msg->msg_iov->addr : NULL,
			.compare = compare ? compare->addr : NULL,
			.found = result ? result->addr : NULL,
			.count = count,
			.change = msg->op,
			.datatype = msg->datatype,
		},
		.address = msg->addr,
		.context = msg->context,
		.flags = flags,
		.is_silent = is_silent,
	};
	pthread_mutex_lock(&ep->domain->lock);
	ssize_t done = submit_locked(ep, &atomic);
	pthread_mutex_unlock(&ep->domain->lock);
	return done;
}

static ssize_t submit(struct fid_ep *ep, const struct fi_msg_atomic *msg, const struct fi_ioc *compare, size_t compares,
		      const struct fi_ioc *result, size_t results, uint64_t flags)
{
	return submit_as(ep, msg, compare, compares, result, results, flags, false);
}

static uint64_t tx_flags(struct fid_ep *ep)
{
	return ((struct vnet_ep *)ep)->tx_flags & ~FI_INJECT;
}

/* Builds the fi_msg_atomic for a call with separate arguments. This is a macro because the message points to a compound
 * literal, which must live in the caller's scope. */
#define MESSAGE(iov, iovs, dest, address, number, type, what, ctx)                                                     \
	{                                                                                                              \
		.msg_iov = (iov), .iov_count = (iovs), .addr = (dest),                                                 \
		.rma_iov = &(struct fi_rma_ioc){.addr = (address), .count = ioc_count(iov, iovs), .key = (number)}, \
		.rma_iov_count = 1, .datatype = (type), .op = (what), .context = (ctx),                                \
	}

static size_t ioc_count(const struct fi_ioc *iov, size_t count)
{
	return count ? iov->count : 0;
}

static ssize_t atomic_writemsg(struct fid_ep *ep, const struct fi_msg_atomic *msg, uint64_t flags)
{
	return submit(ep, msg, NULL, 0, NULL, 0, flags);
}

static ssize_t atomic_writev(struct fid_ep *ep, const struct fi_ioc *iov, void **desc, size_t count, fi_addr_t dest, uint64_t addr,
			     uint64_t key, enum fi_datatype type, enum fi_op op, void *context)
{
	struct fi_msg_atomic msg = MESSAGE(iov, count, dest, addr, key, type, op, context);
	(void)desc;
	return atomic_writemsg(ep, &msg, tx_flags(ep));
}

static ssize_t atomic_write(struct fid_ep *ep, const void *start, size_t count, void *desc, fi_addr_t dest, uint64_t addr, uint64_t key,
			    enum fi_datatype type, enum fi_op op, void *context)
{
	struct fi_ioc iov = {(void *)start, count};
	return atomic_writev(ep, &iov, &desc, 1, dest, addr, key, type, op, context);
}

static ssize_t atomic_inject(struct fid_ep *ep, const void *start, size_t count, fi_addr_t dest, uint64_t addr, uint64_t key,
			     enum fi_datatype type, enum fi_op op)
{
	struct fi_ioc iov = {(void *)start, count};
	struct fi_msg_atomic msg = MESSAGE(&iov, 1, dest, addr, key, type, op, NULL);
	return submit_as(ep, &msg, NULL, 0, NULL, 0, FI_INJECT, true);
}

static ssize_t atomic_readwritemsg(struct fid_ep *ep, const struct fi_msg_atomic *msg, struct fi_ioc *result, void **result_desc,
				   size_t results, uint64_t flags)
{
	(void)result_desc;
	return submit(ep, msg, NULL, 0, result, results, flags);
}

static ssize_t atomic_readwritev(struct fid_ep *ep, const struct fi_ioc *iov, void **desc, size_t count, struct fi_ioc *result,
				 void **result_desc, size_t results, fi_addr_t dest, uint64_t addr, uint64_t key, enum fi_datatype type,
				 enum fi_op op, void *context)
{
	/* FI_ATOMIC_READ has no operands, so the number of elements comes from the result buffer. */
	const struct fi_ioc *counted = op == FI_ATOMIC_READ ? result : iov;
	struct fi_msg_atomic msg = MESSAGE(counted, op == FI_ATOMIC_READ ? results : count, dest, addr, key, type, op, context);
	(void)desc;
	return atomic_readwritemsg(ep, &msg, result, result_desc, results, tx_flags(ep));
}

static ssize_t atomic_readwrite(struct fid_ep *ep, const void *start, size_t count, void *desc, void *result, void *result_desc,
				fi_addr_t dest, uint64_t addr, uint64_t key, enum fi_datatype type, enum fi_op op, void *context)
{
	struct fi_ioc iov = {(void *)start, count}, into = {result, count};
	return atomic_readwritev(ep, &iov, &desc, 1, &into, &result_desc, 1, dest, addr, key, type, op, context);
}

static ssize_t atomic_compwritemsg(struct fid_ep *ep, const struct fi_msg_atomic *msg, const struct fi_ioc *compare, void **compare_desc,
				   size_t compares, struct fi_ioc *result, void **result_desc, size_t results, uint64_t flags)
{
	(void)compare_desc, (void)result_desc;
	return submit(ep, msg, compare, compares, result, results, flags);
}

static ssize_t atomic_compwritev(struct fid_ep *ep, const struct fi_ioc *iov, void **desc, size_t count, const struct fi_ioc *compare,
				 void **compare_desc, size_t compares, struct fi_ioc *result, void **result_desc, size_t results,
				 fi_addr_t dest, uint64_t addr, uint64_t key, enum fi_datatype type, enum fi_op op, void *context)
{
	struct fi_msg_atomic msg = MESSAGE(iov, count, dest, addr, key, type, op, context);
	(void)desc;
	return atomic_compwritemsg(ep, &msg, compare, compare_desc, compares, result, result_desc, results, tx_flags(ep));
}

static ssize_t atomic_compwrite(struct fid_ep *ep, const void *start, size_t count, void *desc, const void *compare, void *compare_desc,
				void *result, void *result_desc, fi_addr_t dest, uint64_t addr, uint64_t key, enum fi_datatype type,
				enum fi_op op, void *context)
{
	struct fi_ioc iov = {(void *)start, count}, with = {(void *)compare, count}, into = {result, count};
	return atomic_compwritev(ep, &iov, &desc, 1, &with, &compare_desc, 1, &into, &result_desc, 1, dest, addr, key, type, op, context);
}

static int writevalid(struct fid_ep *ep, enum fi_datatype type, enum fi_op op, size_t *count)
{
	size_t size;
	(void)ep;
	return check(type, op, 0, &size, count);
}

static int readwritevalid(struct fid_ep *ep, enum fi_datatype type, enum fi_op op, size_t *count)
{
	size_t size;
	(void)ep;
	return check(type, op, FI_FETCH_ATOMIC, &size, count);
}

static int compwritevalid(struct fid_ep *ep, enum fi_datatype type, enum fi_op op, size_t *count)
{
	size_t size;
	(void)ep;
	return check(type, op, FI_COMPARE_ATOMIC, &size, count);
}

struct fi_ops_atomic vnet_atomic_ops = {
	.size = sizeof(struct fi_ops_atomic),
	.write = atomic_write,
	.writev = atomic_writev,
	.writemsg = atomic_writemsg,
	.inject = atomic_inject,
	.readwrite = atomic_readwrite,
	.readwritev = atomic_readwritev,
	.readwritemsg = atomic_readwritemsg,
	.compwrite = atomic_compwrite,
	.compwritev = atomic_compwritev,
	.compwritemsg = atomic_compwritemsg,
	.writevalid = writevalid,
	.readwritevalid = readwritevalid,
	.compwritevalid = compwritevalid,
};
