/* Fabrics, domains, memory regions, counters, and the provider structure. */
#define _GNU_SOURCE /* ppoll() */
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <time.h>

#include "vnet.h"

int vnet_no_bind(struct fid *fid, struct fid *other, uint64_t flags)
{
	(void)fid, (void)other, (void)flags;
	return -FI_ENOSYS;
}

int vnet_no_control(struct fid *fid, int command, void *arg)
{
	(void)fid, (void)command, (void)arg;
	return -FI_ENOSYS;
}

int vnet_no_ops_open(struct fid *fid, const char *name, uint64_t flags, void **ops, void *context)
{
	(void)fid, (void)name, (void)flags, (void)ops, (void)context;
	return -FI_ENOSYS;
}

/* Memory regions. Every endpoint of the domain registers every region. */

static int mr_close(struct fid *fid)
{
	struct vnet_mr *mr = (struct vnet_mr *)fid;
	struct vnet_domain *domain = mr->domain;
	pthread_mutex_lock(&domain->lock);
	for (struct vnet_mr **place = &domain->mrs; *place; place = &(*place)->next) {
		if (*place == mr) {
			*place = mr->next;
			break;
		}
	}
	for (struct vnet_ep *ep = domain->eps; ep; ep = ep->next) {
		if (ep->rdma)
			vnet_rdma_deregister(ep->rdma, mr->fid.key);
	}
	pthread_mutex_unlock(&domain->lock);
	free(mr);
	return 0;
}

static struct fi_ops mr_fid_ops = {
	.size = sizeof(struct fi_ops),
	.close = mr_close,
	.bind = vnet_no_bind,
	.control = vnet_no_control,
	.ops_open = vnet_no_ops_open,
};

static int mr_regattr(struct fid *fid, const struct fi_mr_attr *attr, uint64_t flags, struct fid_mr **out)
{
	struct vnet_domain *domain = (struct vnet_domain *)fid;
	if (flags || attr->iov_count != 1 || attr->iface != FI_HMEM_SYSTEM)
		return -FI_EINVAL;
	struct vnet_mr *mr = calloc(1, sizeof *mr);
	if (!mr)
		return -FI_ENOMEM;
	mr->domain = domain;
	mr->start = attr->mr_iov->iov_base;
	mr->len = attr->mr_iov->iov_len;
	mr->base = domain->mr_mode & (FI_MR_VIRT_ADDR | FI_MR_BASIC) ? (uintptr_t)mr->start : attr->offset;
	mr->access = (attr->access & FI_REMOTE_READ ? VNET_RDMA_REMOTE_READ : 0) |
		     (attr->access & FI_REMOTE_WRITE ? VNET_RDMA_REMOTE_WRITE : 0);
	mr->fid.fid.fclass = FI_CLASS_MR;
	mr->fid.fid.context = attr->context;
	mr->fid.fid.ops = &mr_fid_ops;
	mr->fid.mem_desc = mr;
	pthread_mutex_lock(&domain->lock);
	mr->fid.key = attr->requested_key;
	if (domain->mr_mode & (FI_MR_PROV_KEY | FI_MR_BASIC) && getrandom(&mr->fid.key, sizeof mr->fid.key, 0) < 0) {
		pthread_mutex_unlock(&domain->lock);
		free(mr);
		return -FI_ENOKEY;
	}
	int result = 0;
	for (struct vnet_ep *ep = domain->eps; ep && !result; ep = ep->next) {
		if (ep->rdma)
			result = vnet_ep_register(ep, mr);
	}
	if (!result) {
		mr->next = domain->mrs;
		domain->mrs = mr;
	}
	pthread_mutex_unlock(&domain->lock);
	if (result) {
		free(mr);
		return -FI_ENOKEY;
	}
	*out = &mr->fid;
	return 0;
}

static int mr_regv(struct fid *fid, const struct iovec *iov, size_t count, uint64_t access, uint64_t offset, uint64_t key,
		   uint64_t flags, struct fid_mr **mr, void *context)
{
	struct fi_mr_attr attr = {.mr_iov = iov, .iov_count = count, .access = access, .offset = offset, .requested_key = key, .context = context};
	return mr_regattr(fid, &attr, flags, mr);
}

static int mr_reg(struct fid *fid, const void *start, size_t len, uint64_t access, uint64_t offset, uint64_t key, uint64_t flags,
		  struct fid_mr **mr, void *context)
{
	struct iovec iov = {.iov_base = (void *)start, .iov_len = len};
	return mr_regv(fid, &iov, 1, access, offset, key, flags, mr, context);
}

static struct fi_ops_mr mr_ops = {.size = sizeof mr_ops, .reg = mr_reg, .regv = mr_regv, .regattr = mr_regattr};

/* Counters. */

static uint64_t cntr_read(struct fid_cntr *fid)
{
	struct vnet_cntr *cntr = (struct vnet_cntr *)fid;
	pthread_mutex_lock(&cntr->domain->lock);
	vnet_domain_progress(cntr->domain);
	uint64_t value = cntr->value;
	pthread_mutex_unlock(&cntr->domain->lock);
	return value;
}

static uint64_t cntr_readerr(struct fid_cntr *fid)
{
	cntr_read(fid);
	return ((struct vnet_cntr *)fid)->errors;
}

static int cntr_change(struct fid_cntr *fid, bool is_set, uint64_t value, bool is_errors)
{
	struct vnet_cntr *cntr = (struct vnet_cntr *)fid;
	uint64_t *place = is_errors ? &cntr->errors : &cntr->value;
	pthread_mutex_lock(&cntr->domain->lock);
	*place = is_set ? value : *place + value;
	pthread_mutex_unlock(&cntr->domain->lock);
	return 0;
}

static int cntr_add(struct fid_cntr *fid, uint64_t value)
{
	return cntr_change(fid, false, value, false);
}

static int cntr_set(struct fid_cntr *fid, uint64_t value)
{
	return cntr_change(fid, true, value, false);
}

static int cntr_adderr(struct fid_cntr *fid, uint64_t value)
{
	return cntr_change(fid, false, value, true);
}

static int cntr_seterr(struct fid_cntr *fid, uint64_t value)
{
	return cntr_change(fid, true, value, true);
}

/* Sleeps until an endpoint of the domain has something to take, at most 0.2 ms: what other threads take or count, and the engine's timers,
 * are not announced. Returns whether something was there. */
static bool sleep_for_events(struct vnet_domain *domain)
{
	struct pollfd fds[16];
	nfds_t count = 0;
	struct timespec most = {.tv_nsec = 200000};
	pthread_mutex_lock(&domain->lock);
	vnet_domain_rest(domain);
	for (struct vnet_ep *ep = domain->eps; ep && count < sizeof fds / sizeof *fds; ep = ep->next) {
		int fd = ep->rdma ? vnet_rdma_descriptor(ep->rdma) : -1;
		if (fd >= 0)
			fds[count++] = (struct pollfd){.fd = fd, .events = POLLIN};
	}
	pthread_mutex_unlock(&domain->lock);
	return ppoll(fds, count, &most, NULL) > 0;
}

static int cntr_wait(struct fid_cntr *fid, uint64_t threshold, int timeout)
{
	struct vnet_cntr *cntr = (struct vnet_cntr *)fid;
	struct timespec start, now, pause = {.tv_nsec = 20000};
	uint64_t value = 0, before = 0;
	bool was_there = false;
	clock_gettime(CLOCK_MONOTONIC, &start);
	uint64_t errors = cntr->errors;
	for (unsigned tries = 0; (value = cntr_read(fid)) < threshold; tries++) {
		clock_gettime(CLOCK_MONOTONIC, &now);
		if (cntr->errors != errors)
			return -FI_EAVAIL;
		if (timeout >= 0 && (now.tv_sec - start.tv_sec) * 1000 + (now.tv_nsec - start.tv_nsec) / 1000000 >= timeout)
			return -FI_ETIMEDOUT;
		/* A descriptor may stay readable for what others have to take. */
		if (was_there && value == before)
			nanosleep(&pause, NULL);
		before = value;
		was_there = tries > 100 && sleep_for_events(cntr->domain);
	}
	return 0;
}

static int cntr_close(struct fid *fid)
{
	free(fid);
	return 0;
}

static struct fi_ops cntr_fid_ops = {
	.size = sizeof(struct fi_ops),
	.close = cntr_close,
	.bind = vnet_no_bind,
	.control = vnet_no_control,
	.ops_open = vnet_no_ops_open,
};

static struct fi_ops_cntr cntr_ops = {
	.size = sizeof cntr_ops,
	.read = cntr_read,
	.readerr = cntr_readerr,
	.add = cntr_add,
	.set = cntr_set,
	.wait = cntr_wait,
	.adderr = cntr_adderr,
	.seterr = cntr_seterr,
};

int vnet_cntr_open(struct fid_domain *domain, struct fi_cntr_attr *attr, struct fid_cntr **out, void *context)
{
	if (attr && attr->wait_obj != FI_WAIT_NONE && attr->wait_obj != FI_WAIT_UNSPEC)
		return -FI_ENOSYS;
	struct vnet_cntr *cntr = calloc(1, sizeof *cntr);
	if (!cntr)
		return -FI_ENOMEM;
	cntr->domain = (struct vnet_domain *)domain;
	cntr->fid.fid.fclass = FI_CLASS_CNTR;
	cntr->fid.fid.context = context;
	cntr->fid.fid.ops = &cntr_fid_ops;
	cntr->fid.ops = &cntr_ops;
	*out = &cntr->fid;
	return 0;
}

/* Domains. */

void vnet_domain_progress(struct vnet_domain *domain)
{
	for (struct vnet_ep *ep = domain->eps; ep; ep = ep->next)
		vnet_ep_progress(ep);
}

/* Sends pending acknowledgements to all peers before the application sleeps, so that the peers do not wait for them. */
void vnet_domain_rest(struct vnet_domain *domain)
{
	for (struct vnet_ep *ep = domain->eps; ep; ep = ep->next) {
		if (ep->rdma)
			vnet_rdma_pause(ep->rdma, 0);
	}
}

static int domain_close(struct fid *fid)
{
	struct vnet_domain *domain = (struct vnet_domain *)fid;
	if (domain->eps || domain->mrs)
		return -FI_EBUSY;
	pthread_mutex_destroy(&domain->lock);
	free(domain);
	return 0;
}

static struct fi_ops domain_fid_ops = {
	.size = sizeof(struct fi_ops),
	.close = domain_close,
	.bind = vnet_no_bind,
	.control = vnet_no_control,
	.ops_open = vnet_no_ops_open,
};

static struct fi_ops_domain domain_ops = {
	.size = sizeof domain_ops,
	.av_open = vnet_av_open,
	.cq_open = vnet_cq_open,
	.endpoint = vnet_ep_open,
	.cntr_open = vnet_cntr_open,
	.query_atomic = vnet_query_atomic,
};

int vnet_domain_open(struct fid_fabric *fabric, struct fi_info *info, struct fid_domain **out, void *context)
{
	(void)fabric;
	struct vnet_domain *domain = calloc(1, sizeof *domain);
	if (!domain)
		return -FI_ENOMEM;
	pthread_mutex_init(&domain->lock, NULL);
	domain->addr_format = info->addr_format == FI_SOCKADDR_IN6 ? FI_SOCKADDR_IN6 : FI_SOCKADDR_IN;
	domain->mr_mode = info->domain_attr ? info->domain_attr->mr_mode : 0;
	domain->fid.fid.fclass = FI_CLASS_DOMAIN;
	domain->fid.fid.context = context;
	domain->fid.fid.ops = &domain_fid_ops;
	domain->fid.ops = &domain_ops;
	domain->fid.mr = &mr_ops;
	*out = &domain->fid;
	return 0;
}

/* Fabrics. */

static int fabric_close(struct fid *fid)
{
	free(fid);
	return 0;
}

static ssize_t eq_read(struct fid_eq *eq, uint32_t *event, void *start, size_t len, uint64_t flags)
{
	(void)eq, (void)event, (void)start, (void)len, (void)flags;
	return -FI_EAGAIN;
}

static ssize_t eq_readerr(struct fid_eq *eq, struct fi_eq_err_entry *start, uint64_t flags)
{
	(void)eq, (void)start, (void)flags;
	return -FI_EAGAIN;
}

static ssize_t eq_sread(struct fid_eq *eq, uint32_t *event, void *start, size_t len, int timeout, uint64_t flags)
{
	(void)timeout;
	return eq_read(eq, event, start, len, flags);
}

static struct fi_ops_eq eq_ops = {.size = sizeof eq_ops, .read = eq_read, .readerr = eq_readerr, .sread = eq_sread};

static struct fi_ops fabric_fid_ops = {
	.size = sizeof(struct fi_ops),
	.close = fabric_close,
	.bind = vnet_no_bind,
	.control = vnet_no_control,
	.ops_open = vnet_no_ops_open,
};

/* FI_EP_RDM endpoints are connectionless, so an event queue never receives an event. */
static int eq_open(struct fid_fabric *fabric, struct fi_eq_attr *attr, struct fid_eq **out, void *context)
{
	(void)fabric, (void)attr;
	struct fid_eq *eq = calloc(1, sizeof *eq);
	if (!eq)
		return -FI_ENOMEM;
	eq->fid.fclass = FI_CLASS_EQ;
	eq->fid.context = context;
	eq->fid.ops = &fabric_fid_ops;
	eq->ops = &eq_ops;
	*out = eq;
	return 0;
}

static struct fi_ops_fabric fabric_ops = {
	.size = sizeof fabric_ops,
	.domain = vnet_domain_open,
	.eq_open = eq_open,
	.trywait = vnet_trywait,
};

static int fabric_open(struct fi_fabric_attr *attr, struct fid_fabric **out, void *context)
{
	struct fid_fabric *fabric = calloc(1, sizeof *fabric);
	if (!fabric)
		return -FI_ENOMEM;
	fabric->fid.fclass = FI_CLASS_FABRIC;
	fabric->fid.context = context;
	fabric->fid.ops = &fabric_fid_ops;
	fabric->ops = &fabric_ops;
	fabric->api_version = attr->api_version;
	*out = fabric;
	return 0;
}

static void cleanup(void)
{
}

struct fi_provider vnet_provider = {
	.version = FI_VERSION(1, 0),
	.fi_version = FI_VERSION(1, 17),
	.name = "vnet",
	.getinfo = vnet_getinfo,
	.fabric = fabric_open,
	.cleanup = cleanup,
};

struct fi_provider *vnet_fi_provider(void)
{
	return &vnet_provider;
}
