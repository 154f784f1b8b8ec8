/* fi_getinfo(): returns one entry for each IPv4 address of this host. It returns IPv6 addresses only if no IPv4
 * address of a network device matches the request, and loopback addresses only if no other address matches it. */
#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "vnet.h"

/* Whether FI_PROVIDER or the hints name this provider. Without a name, libfabric probes all providers. */
static bool is_named(const struct fi_info *hints)
{
	const char *wanted = getenv("FI_PROVIDER");
	const char *own = hints && hints->fabric_attr ? hints->fabric_attr->prov_name : NULL;
	return (wanted && strstr(wanted, "vnet") && wanted[0] != '^') || (own && !strcmp(own, "vnet"));
}

/* Prints one line that says why the provider is unusable, but only if the user or the application named the provider. */
static int say(const struct fi_info *hints, const char *why, const char *what)
{
	if (is_named(hints))
		fprintf(stderr, "libfabric:vnet: %s%s\n", why, what);
	return -FI_ENODATA;
}

/* Rejects an unsupported hint. Applications probe many combinations of hints, so the message appears only with
 * FI_LOG_LEVEL=info or debug. */
static int decline(const char *why, const char *what)
{
	const char *level = getenv("FI_LOG_LEVEL");
	if (level && (!strcmp(level, "info") || !strcmp(level, "debug")))
		fprintf(stderr, "libfabric:vnet: %s%s\n", why, what);
	return -FI_ENODATA;
}

/* Returns 0 if the provider supports everything that the hints request. */
static int check(const struct fi_info *hints)
{
	if (!hints)
		return 0;
	if (hints->caps & ~(uint64_t)VNET_CAPS)
		return decline("not available: ", fi_tostr(&(uint64_t){hints->caps & ~(uint64_t)VNET_CAPS}, FI_TYPE_CAPS));
	if (hints->addr_format != FI_FORMAT_UNSPEC && hints->addr_format != FI_SOCKADDR && hints->addr_format != FI_SOCKADDR_IN &&
	    hints->addr_format != FI_SOCKADDR_IN6)
		return decline("addresses are FI_SOCKADDR_IN or FI_SOCKADDR_IN6", "");
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
	/* The provider requires no memory registration mode bit. It returns the supported bits that the application sets. */
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

static struct fi_info *entry(const struct fi_info *hints, uint32_t version, const char *device, const union vnet_name *source)
{
	struct fi_info *info = fi_allocinfo();
	if (!info)
		return NULL;
	info->caps = hints && hints->caps ? hints->caps | VNET_CAPS_DOMAIN : VNET_CAPS;
	if (info->caps & (FI_MSG | FI_TAGGED) && !(info->caps & (FI_SEND | FI_RECV)))
		info->caps |= FI_SEND | FI_RECV;
	if (info->caps & (FI_RMA | FI_ATOMIC) && !(info->caps & (FI_READ | FI_WRITE | FI_REMOTE_READ | FI_REMOTE_WRITE)))
		info->caps |= FI_READ | FI_WRITE | FI_REMOTE_READ | FI_REMOTE_WRITE;
	info->addr_format = source->any.sa_family == AF_INET6 ? FI_SOCKADDR_IN6 : FI_SOCKADDR_IN;
	info->src_addrlen = vnet_name_len(source);
	info->src_addr = malloc(info->src_addrlen);
	if (!info->src_addr || fill_domain(info, hints, device)) {
		fi_freeinfo(info);
		return NULL;
	}
	memcpy(info->src_addr, source, info->src_addrlen);
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

static int resolve(const struct fi_info *hints, int family, const char *node, const char *service, union vnet_name *address)
{
	/* Without a node name the result is a wildcard address: IPv4, unless the application requests a family. */
	struct addrinfo wanted = {.ai_family = node || family ? family : AF_INET, .ai_socktype = SOCK_DGRAM}, *found;
	if (getaddrinfo(node, service, &wanted, &found))
		return say(hints, "no address is known for ", node ? node : service);
	memcpy(address, found->ai_addr, found->ai_addrlen < sizeof *address ? found->ai_addrlen : sizeof *address);
	freeaddrinfo(found);
	return 0;
}

/* Finds the source address that the kernel's routing selects for packets to `to`. */
static int source_for(const struct fi_info *hints, const union vnet_name *to, union vnet_name *source)
{
	char text[INET6_ADDRSTRLEN] = "?";
	socklen_t len = sizeof *source;
	int fd = socket(to->any.sa_family, SOCK_DGRAM | SOCK_CLOEXEC, 0);
	if (fd < 0)
		return -errno;
	int result = connect(fd, &to->any, vnet_name_len(to)) || getsockname(fd, &source->any, &len);
	close(fd);
	source->v4.sin_port = 0;
	inet_ntop(to->any.sa_family, to->any.sa_family == AF_INET6 ? (void *)&to->v6.sin6_addr : (void *)&to->v4.sin_addr, text, sizeof text);
	return result ? say(hints, "there is no route to ", text) : 0;
}

/* Returns an address from the hints. Its family is 0 if the hints contain no IPv4 or IPv6 address. */
static union vnet_name given(const void *address, size_t len)
{
	union vnet_name name = {0};
	const struct sockaddr *any = address;
	if (any && len >= sizeof name.v4 && any->sa_family == AF_INET)
		memcpy(&name.v4, address, sizeof name.v4);
	else if (any && len >= sizeof name.v6 && any->sa_family == AF_INET6)
		memcpy(&name.v6, address, sizeof name.v6);
	return name;
}

static bool is_any(const union vnet_name *name)
{
	return name->any.sa_family == AF_INET6 ? IN6_IS_ADDR_UNSPECIFIED(&name->v6.sin6_addr) : name->v4.sin_addr.s_addr == htonl(INADDR_ANY);
}

static bool is_same(const union vnet_name *a, const union vnet_name *b)
{
	if (a->any.sa_family == AF_INET6)
		return !memcmp(&a->v6.sin6_addr, &b->v6.sin6_addr, sizeof a->v6.sin6_addr);
	return a->v4.sin_addr.s_addr == b->v4.sin_addr.s_addr;
}

static bool is_wanted(const struct fi_info *hints, const char *device)
{
	const char *own = getenv("FI_VNET_INTERFACE");
	const char *name = hints && hints->domain_attr ? hints->domain_attr->name : NULL;
	return (!own || !strcmp(own, device)) && (!name || !strcmp(name, device));
}

/* The request of one fi_getinfo() call. */
struct wish {
	const struct fi_info *hints;
	uint32_t version;
	union vnet_name source, dest; /* family 0: not specified */
	int family;
	bool is_loopback;
};

/* Appends entries for the addresses of one family, either on loopback or on other devices. Returns the new tail of the list. */
static struct fi_info **add_entries(const struct wish *wish, const struct ifaddrs *device, struct fi_info **last)
{
	for (; device; device = device->ifa_next) {
		if (!device->ifa_addr || device->ifa_addr->sa_family != wish->family || !(device->ifa_flags & IFF_UP) ||
		    !!(device->ifa_flags & IFF_LOOPBACK) != wish->is_loopback || !is_wanted(wish->hints, device->ifa_name))
			continue;
		union vnet_name own = {0};
		memcpy(&own, device->ifa_addr, wish->family == AF_INET6 ? sizeof own.v6 : sizeof own.v4);
		bool has_source = wish->source.any.sa_family && !is_any(&wish->source);
		if (has_source ? !is_same(&own, &wish->source) : wish->family == AF_INET6 && IN6_IS_ADDR_LINKLOCAL(&own.v6.sin6_addr))
			continue;
		own.v4.sin_port = wish->source.v4.sin_port;
		struct fi_info *info = entry(wish->hints, wish->version, device->ifa_name, &own);
		if (!info)
			continue;
		size_t len = vnet_name_len(&wish->dest);
		if (wish->dest.any.sa_family && (info->dest_addr = malloc(len))) {
			memcpy(info->dest_addr, &wish->dest, len);
			info->dest_addrlen = len;
		}
		*last = info;
		last = &info->next;
	}
	return last;
}

/* Sets the source address, destination address and family from the hints, `node` and `service`. */
static int addresses(struct wish *wish, const char *node, const char *service, uint64_t flags)
{
	const struct fi_info *hints = wish->hints;
	uint32_t format = hints ? hints->addr_format : FI_FORMAT_UNSPEC;
	wish->family = format == FI_SOCKADDR_IN6 ? AF_INET6 : format == FI_SOCKADDR_IN ? AF_INET : 0;
	if (hints) {
		wish->source = given(hints->src_addr, hints->src_addrlen);
		wish->dest = given(hints->dest_addr, hints->dest_addrlen);
	}
	if (node || service) {
		bool is_source = flags & FI_SOURCE || !node;
		int result = resolve(hints, wish->family, node, service, is_source ? &wish->source : &wish->dest);
		if (result)
			return result;
		if (is_source && !node && wish->source.any.sa_family == AF_INET6)
			wish->source.v6.sin6_addr = in6addr_any;
		else if (is_source && !node)
			wish->source.v4.sin_addr.s_addr = htonl(INADDR_ANY);
	}
	if (wish->dest.any.sa_family && !wish->source.any.sa_family) {
		int result = source_for(hints, &wish->dest, &wish->source);
		if (result)
			return result;
	}
	if (wish->source.any.sa_family)
		wish->family = wish->source.any.sa_family;
	return 0;
}

int vnet_getinfo(uint32_t version, const char *node, const char *service, uint64_t flags, const struct fi_info *hints,
		 struct fi_info **info)
{
	struct wish wish = {.hints = hints, .version = version};
	int result = check(hints);
	if (!result)
		result = addresses(&wish, node, service, flags);
	if (result)
		return result;
	struct ifaddrs *devices;
	if (getifaddrs(&devices))
		return -errno;
	/* Returns only the first non-empty class (IPv4, IPv6, loopback IPv4, loopback IPv6): Open MPI distributes similar entries
	 * round-robin among its ranks, and all ranks need the same class to reach each other. */
	static const int families[] = {AF_INET, AF_INET6};
	int asked = wish.family;
	*info = NULL;
	for (int kind = 0; kind < 4 && !*info; kind++) {
		wish.family = families[kind % 2];
		wish.is_loopback = kind / 2;
		if (!asked || asked == wish.family)
			add_entries(&wish, devices, info);
	}
	freeifaddrs(devices);
	return *info ? 0 : say(hints, "no interface that is up has a matching address; FI_VNET_INTERFACE names one", "");
}
