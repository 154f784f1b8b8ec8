/* What the provider offers: one entry for each IPv4 address of this host, loopback only without others or when asked for. */
#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "vnet.h"

/* One line on what the user can mend, when this provider was asked for: otherwise all there are get tried. */
static int say(const char *why, const char *what)
{
	const char *wanted = getenv("FI_PROVIDER");
	if (wanted && strstr(wanted, "vnet") && wanted[0] != '^')
		fprintf(stderr, "libfabric:vnet: %s%s\n", why, what);
	return -FI_ENODATA;
}

/* What an application wants and does not get: many ask for one thing after the other, so only FI_LOG_LEVEL shows it. */
static int decline(const char *why, const char *what)
{
	const char *level = getenv("FI_LOG_LEVEL");
	if (level && (!strcmp(level, "info") || !strcmp(level, "debug")))
		fprintf(stderr, "libfabric:vnet: %s%s\n", why, what);
	return -FI_ENODATA;
}

/* Whether the application's wishes are within what there is. */
static int check(const struct fi_info *hints)
{
	if (!hints)
		return 0;
	if (hints->caps & ~(uint64_t)VNET_CAPS)
		return decline("not available: ", fi_tostr(&(uint64_t){hints->caps & ~(uint64_t)VNET_CAPS}, FI_TYPE_CAPS));
	if (hints->addr_format != FI_FORMAT_UNSPEC && hints->addr_format != FI_SOCKADDR && hints->addr_format != FI_SOCKADDR_IN)
		return decline("addresses are IPv4 (FI_SOCKADDR_IN)", "");
	if (hints->ep_attr) {
		if (hints->ep_attr->type != FI_EP_UNSPEC && hints->ep_attr->type != FI_EP_RDM)
			return decline("endpoints are FI_EP_RDM", "");
		if (hints->ep_attr->protocol != FI_PROTO_UNSPEC || hints->ep_attr->max_msg_size > VNET_MSG_MAX ||
		    hints->ep_attr->tx_ctx_cnt > 1 || hints->ep_attr->rx_ctx_cnt > 1)
			return decline("the endpoint's attributes are not available", "");
	}
	if (hints->tx_attr &&
	    (hints->tx_attr->msg_order & ~(uint64_t)VNET_ORDER || hints->tx_attr->inject_size > VNET_INJECT ||
	     hints->tx_attr->iov_limit > 1 || hints->tx_attr->rma_iov_limit > 1 || hints->tx_attr->comp_order))
		return decline("order, inject size or vectors of sends are not available", "");
	if (hints->rx_attr && (hints->rx_attr->msg_order & ~(uint64_t)VNET_ORDER || hints->rx_attr->iov_limit > 1 ||
			       hints->rx_attr->comp_order))
		return decline("order or vectors of receives are not available", "");
	if (hints->domain_attr && (hints->domain_attr->cq_data_size > 8 || hints->domain_attr->mr_key_size > 8))
		return decline("keys and remote data have 8 bytes", "");
	return 0;
}

static int fill_domain(struct fi_info *info, const struct fi_info *hints, const char *device)
{
	const struct fi_domain_attr *wanted = hints ? hints->domain_attr : NULL;
	struct fi_domain_attr *attr = info->domain_attr;
	int bits = FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY;

	attr->name = strdup(device);
	attr->threading = FI_THREAD_SAFE;
	attr->control_progress = attr->data_progress = FI_PROGRESS_AUTO;
	attr->resource_mgmt = FI_RM_ENABLED;
	attr->av_type = wanted && wanted->av_type != FI_AV_UNSPEC ? wanted->av_type : FI_AV_TABLE;
	/* Nothing is needed; what the application offers is used. */
	if (wanted && wanted->mr_mode == FI_MR_BASIC)
		attr->mr_mode = FI_MR_BASIC;
	else if (wanted && wanted->mr_mode == FI_MR_SCALABLE)
		attr->mr_mode = FI_MR_SCALABLE;
	else
		attr->mr_mode = wanted ? wanted->mr_mode & bits : 0;
	attr->mr_key_size = attr->cq_data_size = 8;
	attr->cq_cnt = attr->ep_cnt = attr->tx_ctx_cnt = attr->rx_ctx_cnt = attr->cntr_cnt = 1024;
	attr->max_ep_tx_ctx = attr->max_ep_rx_ctx = 1;
	attr->mr_iov_limit = 1;
	attr->mr_cnt = 65536;
	attr->caps = VNET_CAPS_DOMAIN;
	return attr->name ? 0 : -FI_ENOMEM;
}

static struct fi_info *entry(const struct fi_info *hints, uint32_t version, const char *device, struct sockaddr_in source)
{
	struct fi_info *info = fi_allocinfo();
	if (!info)
		return NULL;
	info->caps = hints && hints->caps ? hints->caps | VNET_CAPS_DOMAIN : VNET_CAPS;
	if (info->caps & (FI_MSG | FI_TAGGED) && !(info->caps & (FI_SEND | FI_RECV)))
		info->caps |= FI_SEND | FI_RECV;
	if (info->caps & (FI_RMA | FI_ATOMIC) && !(info->caps & (FI_READ | FI_WRITE | FI_REMOTE_READ | FI_REMOTE_WRITE)))
		info->caps |= FI_READ | FI_WRITE | FI_REMOTE_READ | FI_REMOTE_WRITE;
	info->addr_format = FI_SOCKADDR_IN;
	info->src_addrlen = sizeof source;
	info->src_addr = malloc(sizeof source);
	if (!info->src_addr || fill_domain(info, hints, device)) {
		fi_freeinfo(info);
		return NULL;
	}
	memcpy(info->src_addr, &source, sizeof source);
	info->ep_attr->type = FI_EP_RDM;
	info->ep_attr->protocol_version = 1;
	info->ep_attr->max_msg_size = VNET_MSG_MAX;
	info->ep_attr->max_order_raw_size = VNET_MSG_MAX;
	info->ep_attr->mem_tag_format = 0xaaaaaaaaaaaaaaaaull;
	info->ep_attr->tx_ctx_cnt = info->ep_attr->rx_ctx_cnt = 1;
	info->tx_attr->caps = info->caps & VNET_CAPS_TX;
	info->tx_attr->op_flags = hints && hints->tx_attr ? hints->tx_attr->op_flags : 0;
	info->tx_attr->msg_order = info->rx_attr->msg_order = VNET_ORDER;
	info->tx_attr->inject_size = VNET_INJECT;
	info->tx_attr->size = info->rx_attr->size = 16384;
	info->tx_attr->iov_limit = info->tx_attr->rma_iov_limit = info->rx_attr->iov_limit = 1;
	info->rx_attr->caps = info->caps & VNET_CAPS_RX;
	info->rx_attr->op_flags = hints && hints->rx_attr ? hints->rx_attr->op_flags : 0;
	info->fabric_attr->name = strdup("vnet");
	info->fabric_attr->prov_version = vnet_provider.version;
	info->fabric_attr->api_version = version;
	return info;
}

static int resolve(const char *node, const char *service, struct sockaddr_in *address)
{
	struct addrinfo hints = {.ai_family = AF_INET, .ai_socktype = SOCK_DGRAM}, *found;
	if (getaddrinfo(node, service, &hints, &found))
		return say("no IPv4 address is known for ", node ? node : service);
	memcpy(address, found->ai_addr, sizeof *address);
	freeaddrinfo(found);
	return 0;
}

/* The address from which packets to `to` leave. */
static int source_for(const struct sockaddr_in *to, struct sockaddr_in *source)
{
	socklen_t len = sizeof *source;
	int fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
	if (fd < 0)
		return -errno;
	int result = connect(fd, (const struct sockaddr *)to, sizeof *to) || getsockname(fd, (struct sockaddr *)source, &len);
	close(fd);
	source->sin_port = 0;
	return result ? say("there is no route to ", inet_ntoa(to->sin_addr)) : 0;
}

static bool is_wanted(const struct fi_info *hints, const char *device)
{
	const char *own = getenv("FI_VNET_INTERFACE");
	const char *name = hints && hints->domain_attr ? hints->domain_attr->name : NULL;
	return (!own || !strcmp(own, device)) && (!name || !strcmp(name, device));
}

int vnet_getinfo(uint32_t version, const char *node, const char *service, uint64_t flags, const struct fi_info *hints,
		 struct fi_info **info)
{
	struct sockaddr_in source = {.sin_family = AF_INET}, dest = {.sin_family = AF_INET};
	bool has_source = false, has_dest = false;
	int result = check(hints);
	if (result)
		return result;
	if (hints && hints->src_addr && hints->src_addrlen >= sizeof source) {
		memcpy(&source, hints->src_addr, sizeof source);
		has_source = true;
	}
	if (hints && hints->dest_addr && hints->dest_addrlen >= sizeof dest) {
		memcpy(&dest, hints->dest_addr, sizeof dest);
		has_dest = true;
	}
	if (node || service) {
		bool is_source = flags & FI_SOURCE || !node;
		result = resolve(node, service, is_source ? &source : &dest);
		if (result)
			return result;
		*(is_source ? &has_source : &has_dest) = true;
		if (is_source && !node)
			source.sin_addr.s_addr = htonl(INADDR_ANY);
	}
	if (has_dest && !has_source) {
		result = source_for(&dest, &source);
		if (result)
			return result;
		has_source = true;
	}

	struct ifaddrs *devices, *device;
	if (getifaddrs(&devices))
		return -errno;
	struct fi_info *first = NULL, **last = &first;
	bool is_any = !has_source || source.sin_addr.s_addr == htonl(INADDR_ANY);
	/* Loopback only if it was asked for or nothing else is there: Open MPI gives entries that look alike to its ranks in turn. */
	for (int loopback = 0; loopback < 2 && !(loopback && first); loopback++) {
		for (device = devices; device; device = device->ifa_next) {
			if (!device->ifa_addr || device->ifa_addr->sa_family != AF_INET || !(device->ifa_flags & IFF_UP) ||
			    !!(device->ifa_flags & IFF_LOOPBACK) != loopback || !is_wanted(hints, device->ifa_name))
				continue;
			struct sockaddr_in own = *(struct sockaddr_in *)device->ifa_addr;
			if (!is_any && own.sin_addr.s_addr != source.sin_addr.s_addr)
				continue;
			own.sin_port = source.sin_port;
			*last = entry(hints, version, device->ifa_name, own);
			if (!*last)
				continue;
			if (has_dest && ((*last)->dest_addr = malloc(sizeof dest))) {
				memcpy((*last)->dest_addr, &dest, sizeof dest);
				(*last)->dest_addrlen = sizeof dest;
			}
			last = &(*last)->next;
		}
	}
	freeifaddrs(devices);
	*info = first;
	return first ? 0 : say("no interface that is up has a matching IPv4 address; FI_VNET_INTERFACE names one", "");
}
