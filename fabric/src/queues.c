/* Address vectors and completion queues. */
#include <arpa/inet.h>
#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

#include "vnet.h"

/* Address vectors. */

static vnet_rdma_peer peer_of(const union vnet_name *name)
{
	vnet_rdma_peer peer = {.family = 4};
	if (name->any.sa_family == AF_INET6) {
		peer.family = 6;
		peer.port = ntohs(name->v6.sin6_port);
		peer.scope = name->v6.sin6_scope_id;
		memcpy(peer.ip, &name->v6.sin6_addr, 16);
	} else {
		peer.port = ntohs(name->v4.sin_port);
		memcpy(peer.ip, &name->v4.sin_addr, 4);
	}
	return peer;
}

static size_t place_of(const struct vnet_av *av, const vnet_rdma_peer *peer)
{
	uint64_t words[2];
	memcpy(words, peer->ip, sizeof words);
	uint64_t mixed = (words[0] ^ words[1] * 0xff51afd7ed558ccdull) + ((uint64_t)peer->port << 40);
	return (size_t)((mixed ^ mixed >> 29) * 0x9e3779b97f4a7c15ull >> 32) & (av->places_len - 1);
}

fi_addr_t vnet_av_find(const struct vnet_av *av, const vnet_rdma_peer *peer)
{
	if (!av || !av->places_len)
		return FI_ADDR_NOTAVAIL;
	for (size_t place = place_of(av, peer); av->places[place]; place = (place + 1) & (av->places_len - 1)) {
		uint32_t number = av->places[place] - 1;
		/* vnet_rdma_same_peer() rejects removed entries, whose family is 0. */
		if (vnet_rdma_same_peer(&av->peers[number], peer))
			return number;
	}
	return FI_ADDR_NOTAVAIL;
}

const vnet_rdma_peer *vnet_av_get(const struct vnet_av *av, fi_addr_t address)
{
	return av && address < av->count && av->peers[address].family ? &av->peers[address] : NULL;
}

static int av_grow(struct vnet_av *av)
{
	size_t room = av->room ? 2 * av->room : 64;
	vnet_rdma_peer *peers = realloc(av->peers, room * sizeof *peers);
	if (!peers)
		return -FI_ENOMEM;
	av->peers = peers;
	uint32_t *places = calloc(2 * room, sizeof *places);
	if (!places)
		return -FI_ENOMEM;
	free(av->places);
	av->places = places;
	av->places_len = 2 * room;
	av->room = room;
	for (size_t number = 0; number < av->count; number++) {
		size_t place = place_of(av, &av->peers[number]);
		while (places[place])
			place = (place + 1) & (av->places_len - 1);
		places[place] = number + 1;
	}
	return 0;
}

static int insert_locked(struct vnet_av *av, const void *addresses, size_t count, fi_addr_t *out)
{
	size_t len = av->addr_format == FI_SOCKADDR_IN6 ? sizeof(struct sockaddr_in6) : sizeof(struct sockaddr_in);
	for (size_t i = 0; i < count; i++) {
		if (av->count == av->room && av_grow(av))
			return i;
		union vnet_name name;
		memcpy(&name, (const char *)addresses + i * len, len);
		av->peers[av->count] = peer_of(&name);
		size_t place = place_of(av, &av->peers[av->count]);
		while (av->places[place])
			place = (place + 1) & (av->places_len - 1);
		av->places[place] = av->count + 1;
		if (out)
			out[i] = av->count;
		av->count++;
	}
	return count;
}

static int av_insert(struct fid_av *fid, const void *addresses, size_t count, fi_addr_t *out, uint64_t flags, void *context)
{
	struct vnet_av *av = (struct vnet_av *)fid;
	(void)flags, (void)context;
	pthread_mutex_lock(&av->domain->lock);
	int result = insert_locked(av, addresses, count, out);
	pthread_mutex_unlock(&av->domain->lock);
	return result;
}

static int av_insertsvc(struct fid_av *av, const char *node, const char *service, fi_addr_t *out, uint64_t flags, void *context)
{
	struct fi_info *info;
	int result = vnet_getinfo(FI_VERSION(1, 17), node, service, FI_SOURCE & 0, NULL, &info);
	if (result)
		return result;
	result = av_insert(av, info->dest_addr, 1, out, flags, context);
	fi_freeinfo(info);
	return result;
}

/* A removed fi_addr_t is never reused, and operations to it fail. Its hash table slot stays occupied, because open addressing
 * must probe past it to find later entries. */
static int av_remove(struct fid_av *fid, fi_addr_t *addresses, size_t count, uint64_t flags)
{
	struct vnet_av *av = (struct vnet_av *)fid;
	int result = 0;
	(void)flags;
	pthread_mutex_lock(&av->domain->lock);
	for (size_t i = 0; i < count && !result; i++) {
		if (vnet_av_get(av, addresses[i]))
			av->peers[addresses[i]].family = 0;
		else
			result = -FI_EINVAL;
	}
	pthread_mutex_unlock(&av->domain->lock);
	return result;
}

static int av_lookup(struct fid_av *fid, fi_addr_t address, void *out, size_t *len)
{
	struct vnet_av *av = (struct vnet_av *)fid;
	union vnet_name name = {.any.sa_family = AF_INET};
	pthread_mutex_lock(&av->domain->lock);
	const vnet_rdma_peer *found = vnet_av_get(av, address);
	vnet_rdma_peer peer = found ? *found : (vnet_rdma_peer){0};
	pthread_mutex_unlock(&av->domain->lock);
	if (!peer.family)
		return -FI_EINVAL;
	if (peer.family == 6) {
		name.v6 = (struct sockaddr_in6){.sin6_family = AF_INET6, .sin6_port = htons(peer.port), .sin6_scope_id = peer.scope};
		memcpy(&name.v6.sin6_addr, peer.ip, 16);
	} else {
		name.v4.sin_port = htons(peer.port);
		memcpy(&name.v4.sin_addr, peer.ip, 4);
	}
	size_t room = *len;
	*len = vnet_name_len(&name);
	memcpy(out, &name, room < *len ? room : *len);
	return 0;
}

static const char *av_straddr(struct fid_av *av, const void *address, char *out, size_t *len)
{
	const union vnet_name *name = address;
	char ip[INET6_ADDRSTRLEN] = "?";
	(void)av;
	if (name->any.sa_family == AF_INET6) {
		inet_ntop(AF_INET6, &name->v6.sin6_addr, ip, sizeof ip);
		*len = snprintf(out, *len, "fi_sockaddr_in6://[%s]:%u", ip, ntohs(name->v6.sin6_port)) + 1;
	} else {
		inet_ntop(AF_INET, &name->v4.sin_addr, ip, sizeof ip);
		*len = snprintf(out, *len, "fi_sockaddr_in://%s:%u", ip, ntohs(name->v4.sin_port)) + 1;
	}
	return out;
}

static int av_close(struct fid *fid)
{
	struct vnet_av *av = (struct vnet_av *)fid;
	free(av->peers);
	free(av->places);
	free(av);
	return 0;
}

static struct fi_ops av_fid_ops = {
	.size = sizeof(struct fi_ops),
	.close = av_close,
	.bind = vnet_no_bind,
	.control = vnet_no_control,
	.ops_open = vnet_no_ops_open,
};

static struct fi_ops_av av_ops = {
	.size = sizeof av_ops,
	.insert = av_insert,
	.insertsvc = av_insertsvc,
	.remove = av_remove,
	.lookup = av_lookup,
	.straddr = av_straddr,
};

int vnet_av_open(struct fid_domain *domain, struct fi_av_attr *attr, struct fid_av **out, void *context)
{
	if (attr && (attr->flags || attr->name || attr->rx_ctx_bits))
		return -FI_ENOSYS;
	struct vnet_av *av = calloc(1, sizeof *av);
	if (!av)
		return -FI_ENOMEM;
	if (attr && attr->type == FI_AV_UNSPEC)
		attr->type = FI_AV_TABLE;
	av->domain = (struct vnet_domain *)domain;
	av->addr_format = av->domain->addr_format;
	av->fid.fid.fclass = FI_CLASS_AV;
	av->fid.fid.context = context;
	av->fid.fid.ops = &av_fid_ops;
	av->fid.ops = &av_ops;
	*out = &av->fid;
	return 0;
}

/* Completion queues. */

static void cq_raise(struct vnet_cq *cq)
{
	if (cq->event >= 0 && !cq->is_raised)
		cq->is_raised = write(cq->event, &(uint64_t){1}, sizeof(uint64_t)) > 0;
}

static void cq_lower(struct vnet_cq *cq)
{
	uint64_t count;
	if (cq->is_raised && !cq->count)
		cq->is_raised = read(cq->event, &count, sizeof count) < 0;
}

/* Adds the endpoint's descriptor to the queue's epoll descriptor, so that polling the queue reports the endpoint's events. */
int vnet_cq_watch(struct vnet_cq *cq, struct vnet_ep *ep)
{
	if (!cq || cq->epoll < 0)
		return 0;
	int fd = vnet_rdma_descriptor(ep->rdma);
	if (fd < 0)
		return fd;
	struct epoll_event event = {.events = EPOLLIN};
	return epoll_ctl(cq->epoll, EPOLL_CTL_ADD, fd, &event) && errno != EEXIST ? -errno : 0;
}

int vnet_cq_push(struct vnet_cq *cq, const struct fi_cq_err_entry *entry, fi_addr_t source)
{
	if (cq->count == cq->room) {
		struct vnet_entry *ring = malloc(2 * cq->room * sizeof *ring);
		if (!ring)
			return -FI_ENOMEM;
		for (size_t i = 0; i < cq->count; i++)
			ring[i] = cq->ring[(cq->head + i) % cq->room];
		free(cq->ring);
		cq->ring = ring;
		cq->room *= 2;
		cq->head = 0;
	}
	cq->ring[(cq->head + cq->count++) % cq->room] = (struct vnet_entry){*entry, source};
	cq_raise(cq);
	return 0;
}

static ssize_t cq_take(struct vnet_cq *cq, char *out, size_t count, fi_addr_t *source)
{
	static const size_t sizes[] = {
		[FI_CQ_FORMAT_CONTEXT] = sizeof(struct fi_cq_entry),
		[FI_CQ_FORMAT_MSG] = sizeof(struct fi_cq_msg_entry),
		[FI_CQ_FORMAT_DATA] = sizeof(struct fi_cq_data_entry),
		[FI_CQ_FORMAT_TAGGED] = sizeof(struct fi_cq_tagged_entry),
	};
	size_t taken = 0;
	while (taken < count && cq->count) {
		struct vnet_entry *next = &cq->ring[cq->head];
		if (next->entry.err)
			return taken ? (ssize_t)taken : -FI_EAVAIL;
		/* Every completion format is a prefix of fi_cq_tagged_entry, which is a prefix of fi_cq_err_entry. */
		memcpy(out + taken * sizes[cq->format], &next->entry, sizes[cq->format]);
		if (source)
			source[taken] = next->source;
		cq->head = (cq->head + 1) % cq->room;
		cq->count--;
		taken++;
	}
	return taken ? (ssize_t)taken : -FI_EAGAIN;
}

static ssize_t cq_readfrom(struct fid_cq *fid, void *out, size_t count, fi_addr_t *source)
{
	struct vnet_cq *cq = (struct vnet_cq *)fid;
	pthread_mutex_lock(&cq->domain->lock);
	if (!cq->count)
		vnet_domain_progress(cq->domain);
	ssize_t result = cq_take(cq, out, count, source);
	cq_lower(cq);
	pthread_mutex_unlock(&cq->domain->lock);
	return result;
}

static ssize_t cq_read(struct fid_cq *cq, void *out, size_t count)
{
	return cq_readfrom(cq, out, count, NULL);
}

static ssize_t cq_readerr(struct fid_cq *fid, struct fi_cq_err_entry *out, uint64_t flags)
{
	struct vnet_cq *cq = (struct vnet_cq *)fid;
	(void)flags;
	pthread_mutex_lock(&cq->domain->lock);
	ssize_t result = -FI_EAGAIN;
	if (cq->count && cq->ring[cq->head].entry.err) {
		*out = cq->ring[cq->head].entry;
		cq->head = (cq->head + 1) % cq->room;
		cq->count--;
		result = 1;
		cq_lower(cq);
	}
	pthread_mutex_unlock(&cq->domain->lock);
	return result;
}

static ssize_t cq_sreadfrom(struct fid_cq *fid, void *out, size_t count, fi_addr_t *source, const void *cond, int timeout)
{
	struct vnet_cq *cq = (struct vnet_cq *)fid;
	struct timespec start, now;
	(void)cond;
	if (cq->epoll < 0)
		return -FI_ENOSYS;
	clock_gettime(CLOCK_MONOTONIC, &start);
	for (;;) {
		ssize_t result = cq_readfrom(fid, out, count, source);
		if (result != -FI_EAGAIN || __atomic_exchange_n(&cq->is_signalled, false, __ATOMIC_ACQ_REL))
			return result;
		clock_gettime(CLOCK_MONOTONIC, &now);
		long passed_ms = (now.tv_sec - start.tv_sec) * 1000 + (now.tv_nsec - start.tv_nsec) / 1000000;
		if (timeout >= 0 && passed_ms >= timeout)
			return -FI_EAGAIN;
		pthread_mutex_lock(&cq->domain->lock);
		vnet_domain_rest(cq->domain);
		pthread_mutex_unlock(&cq->domain->lock);
		struct pollfd wait = {.fd = cq->epoll, .events = POLLIN};
		poll(&wait, 1, timeout < 0 ? -1 : timeout - (int)passed_ms);
	}
}

static ssize_t cq_sread(struct fid_cq *cq, void *out, size_t count, const void *cond, int timeout)
{
	return cq_sreadfrom(cq, out, count, NULL, cond, timeout);
}

static int cq_signal(struct fid_cq *fid)
{
	struct vnet_cq *cq = (struct vnet_cq *)fid;
	pthread_mutex_lock(&cq->domain->lock);
	__atomic_store_n(&cq->is_signalled, true, __ATOMIC_RELEASE);
	cq_raise(cq);
	pthread_mutex_unlock(&cq->domain->lock);
	return 0;
}

static const char *cq_strerror(struct fid_cq *cq, int number, const void *data, char *out, size_t len)
{
	(void)cq, (void)data;
	const char *text = vnet_rdma_status_text(number);
	if (out && len) {
		strncpy(out, text, len - 1);
		out[len - 1] = 0;
	}
	return text;
}

static int cq_control(struct fid *fid, int command, void *arg)
{
	struct vnet_cq *cq = (struct vnet_cq *)fid;
	if (command == FI_GETWAITOBJ) {
		*(enum fi_wait_obj *)arg = cq->wait;
		return 0;
	}
	if (command != FI_GETWAIT || cq->epoll < 0)
		return -FI_ENOSYS;
	*(int *)arg = cq->epoll;
	return 0;
}

/* fi_trywait(): returns 0 if the application may sleep on the descriptors of these queues, or -FI_EAGAIN if a queue holds
 * completions. */
int vnet_trywait(struct fid_fabric *fabric, struct fid **fids, int count)
{
	(void)fabric;
	for (int i = 0; i < count; i++) {
		if (fids[i]->fclass == FI_CLASS_EQ)
			continue;
		struct vnet_cq *cq = (struct vnet_cq *)fids[i];
		if (fids[i]->fclass != FI_CLASS_CQ || cq->epoll < 0)
			return -FI_EINVAL;
		pthread_mutex_lock(&cq->domain->lock);
		vnet_domain_progress(cq->domain);
		vnet_domain_rest(cq->domain);
		/* Clears a signal from fi_cq_signal(). The descriptor stays readable while the ring holds completions. */
		cq_lower(cq);
		bool is_empty = !cq->count;
		pthread_mutex_unlock(&cq->domain->lock);
		if (!is_empty)
			return -FI_EAGAIN;
	}
	return 0;
}

static int cq_close(struct fid *fid)
{
	struct vnet_cq *cq = (struct vnet_cq *)fid;
	if (cq->epoll >= 0)
		close(cq->epoll);
	if (cq->event >= 0)
		close(cq->event);
	free(cq->ring);
	free(cq);
	return 0;
}

static struct fi_ops cq_fid_ops = {
	.size = sizeof(struct fi_ops),
	.close = cq_close,
	.bind = vnet_no_bind,
	.control = cq_control,
	.ops_open = vnet_no_ops_open,
};

static struct fi_ops_cq cq_ops = {
	.size = sizeof cq_ops,
	.read = cq_read,
	.readfrom = cq_readfrom,
	.readerr = cq_readerr,
	.sread = cq_sread,
	.sreadfrom = cq_sreadfrom,
	.signal = cq_signal,
	.strerror = cq_strerror,
};

int vnet_cq_open(struct fid_domain *domain, struct fi_cq_attr *attr, struct fid_cq **out, void *context)
{
	enum fi_wait_obj wait = attr ? attr->wait_obj : FI_WAIT_NONE;
	if (wait != FI_WAIT_NONE && wait != FI_WAIT_UNSPEC && wait != FI_WAIT_FD && wait != FI_WAIT_YIELD)
		return -FI_ENOSYS;
	struct vnet_cq *cq = calloc(1, sizeof *cq);
	if (!cq)
		return -FI_ENOMEM;
	cq->room = 256;
	cq->ring = malloc(cq->room * sizeof *cq->ring);
	if (!cq->ring) {
		free(cq);
		return -FI_ENOMEM;
	}
	cq->wait = wait == FI_WAIT_UNSPEC ? FI_WAIT_FD : wait;
	cq->epoll = cq->event = -1;
	if (wait != FI_WAIT_NONE) {
		cq->epoll = epoll_create1(EPOLL_CLOEXEC);
		cq->event = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
		struct epoll_event event = {.events = EPOLLIN};
		if (cq->epoll < 0 || cq->event < 0 || epoll_ctl(cq->epoll, EPOLL_CTL_ADD, cq->event, &event)) {
			int error = errno;
			cq_close(&cq->fid.fid);
			return -error;
		}
	}
	cq->domain = (struct vnet_domain *)domain;
	cq->format = attr && attr->format != FI_CQ_FORMAT_UNSPEC ? attr->format : FI_CQ_FORMAT_CONTEXT;
	cq->fid.fid.fclass = FI_CLASS_CQ;
	cq->fid.fid.context = context;
	cq->fid.fid.ops = &cq_fid_ops;
	cq->fid.ops = &cq_ops;
	*out = &cq->fid;
	return 0;
}
