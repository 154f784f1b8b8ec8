/* Opens two endpoints of the provider in one process, and checks that each call used by MPI and similar applications behaves as
 * libfabric specifies. */
#include <netinet/in.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>
#include <rdma/fabric.h>
#include <rdma/fi_atomic.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_errno.h>
#include <rdma/fi_rma.h>
#include <rdma/fi_tagged.h>

#define CHECK(call) do { long got_ = (call); if (got_) { fprintf(stderr, "%d: %s: %ld %s\n", __LINE__, #call, got_, fi_strerror(-got_)); exit(1); } } while (0)
#define ASSERT(fact) do { if (!(fact)) { fprintf(stderr, "%d: %s\n", __LINE__, #fact); exit(1); } } while (0)

enum { BIG = 1 << 20 };

struct side {
	struct fid_domain *domain;
	struct fid_av *av;
	struct fid_cq *cq;
	struct fid_cntr *cntr;
	struct fid_ep *ep;
	fi_addr_t other;
	char *memory;
};

/* With `rx_cq`, receives have a completion queue of their own. */
static void open_side(struct side *side, struct fid_fabric *fabric, struct fi_info *info, enum fi_av_type type, struct fid_cq **rx_cq)
{
	struct fi_cq_attr cq = {.format = FI_CQ_FORMAT_TAGGED, .wait_obj = FI_WAIT_UNSPEC};
	struct fi_av_attr av = {.type = type};
	CHECK(fi_domain(fabric, info, &side->domain, NULL));
	CHECK(fi_av_open(side->domain, &av, &side->av, NULL));
	CHECK(fi_cq_open(side->domain, &cq, &side->cq, NULL));
	CHECK(fi_cntr_open(side->domain, NULL, &side->cntr, NULL));
	CHECK(fi_endpoint(side->domain, info, &side->ep, NULL));
	CHECK(fi_ep_bind(side->ep, &side->av->fid, 0));
	CHECK(fi_ep_bind(side->ep, &side->cq->fid, rx_cq ? FI_TRANSMIT : FI_TRANSMIT | FI_RECV));
	if (rx_cq) {
		CHECK(fi_cq_open(side->domain, &cq, rx_cq, NULL));
		CHECK(fi_ep_bind(side->ep, &(*rx_cq)->fid, FI_RECV));
	}
	CHECK(fi_ep_bind(side->ep, &side->cntr->fid, FI_WRITE | FI_READ));
	ASSERT(fi_ep_bind(side->ep, &side->cntr->fid, FI_REMOTE_READ) == -FI_ENOSYS);
	CHECK(fi_enable(side->ep));
	side->memory = calloc(2, BIG);
}

/* Closes the side, except for its endpoint. */
static void close_side(struct side *side)
{
	CHECK(fi_close(&side->cq->fid));
	CHECK(fi_close(&side->cntr->fid));
	CHECK(fi_close(&side->av->fid));
	CHECK(fi_close(&side->domain->fid));
	free(side->memory);
}

static void introduce(struct side *to, struct side *whom)
{
	char name[64], text[64];
	size_t len = sizeof name, text_len = sizeof text;
	CHECK(fi_getname(&whom->ep->fid, name, &len));
	ASSERT(fi_av_insert(to->av, name, 1, &to->other, 0, NULL) == 1);
	const char *prefix = ((struct sockaddr *)name)->sa_family == AF_INET6 ? "fi_sockaddr_in6://[::1]:" : "fi_sockaddr_in://127.0.0.1:";
	ASSERT(!strncmp(fi_av_straddr(to->av, name, text, &text_len), prefix, strlen(prefix)));
	char found[64];
	size_t found_len = sizeof found;
	CHECK(fi_av_lookup(to->av, to->other, found, &found_len));
	ASSERT(found_len == len && !memcmp(found, name, len));
}

/* Waits for the next completion of `side`. The test does not drive the peer, because progress is automatic on both sides. */
static struct fi_cq_tagged_entry next(struct side *side)
{
	struct fi_cq_tagged_entry entry;
	long got = fi_cq_sread(side->cq, &entry, 1, NULL, 20000);
	if (got != 1) {
		struct fi_cq_err_entry error = {0};
		fi_cq_readerr(side->cq, &error, 0);
		fprintf(stderr, "completion: %s, %s\n", fi_strerror(-got), fi_strerror(error.err));
		exit(1);
	}
	return entry;
}

static struct fi_cq_err_entry next_error(struct side *side)
{
	struct fi_cq_tagged_entry entry;
	struct fi_cq_err_entry error = {0};
	ASSERT(fi_cq_sread(side->cq, &entry, 1, NULL, 20000) == -FI_EAVAIL);
	ASSERT(fi_cq_readerr(side->cq, &error, 0) == 1);
	return error;
}

static void test_tagged(struct side *a, struct side *b)
{
	size_t sizes[] = {0, 1, 5000, 16385, BIG};
	for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
		memset(a->memory, 'a' + i, sizes[i]);
		CHECK(fi_trecv(b->ep, b->memory, BIG, NULL, FI_ADDR_UNSPEC, 0x700, 0xff, &sizes[i]));
		CHECK(fi_tsenddata(a->ep, a->memory, sizes[i], NULL, 99, a->other, 0x7aa, &sizes[0]));
		struct fi_cq_tagged_entry got = next(b);
		ASSERT(got.op_context == &sizes[i] && got.len == sizes[i] && got.tag == 0x7aa && got.data == 99);
		ASSERT(got.flags == (FI_RECV | FI_TAGGED | FI_REMOTE_CQ_DATA) && got.buf == b->memory);
		ASSERT(!memcmp(a->memory, b->memory, sizes[i]));
		got = next(a);
		ASSERT(got.op_context == &sizes[0] && got.flags == (FI_SEND | FI_TAGGED));
	}
	/* An inject produces no completion, and the application may reuse the buffer at once. */
	memcpy(a->memory, "inject", 7);
	CHECK(fi_tinject(a->ep, a->memory, 7, a->other, 5));
	memset(a->memory, 0, 7);
	CHECK(fi_trecv(b->ep, b->memory, 7, NULL, b->other, 5, 0, NULL));
	ASSERT(next(b).len == 7 && !strcmp(b->memory, "inject"));
	/* FI_INJECT of a message call only allows the reuse of the buffer: the operation completes, even with a NULL context. */
	struct iovec iov = {a->memory, 7};
	struct fi_msg_tagged msg = {.msg_iov = &iov, .iov_count = 1, .addr = a->other, .tag = 5};
	CHECK(fi_tsendmsg(a->ep, &msg, FI_INJECT));
	struct fi_cq_tagged_entry sent = next(a);
	ASSERT(sent.op_context == NULL && sent.flags == (FI_SEND | FI_TAGGED));
	CHECK(fi_trecv(b->ep, b->memory, 7, NULL, b->other, 5, 0, NULL));
	ASSERT(next(b).len == 7);
	ASSERT(fi_tinject(a->ep, a->memory, 10000, a->other, 5) == -FI_EINVAL);
	/* A message longer than the receive buffer is truncated. */
	CHECK(fi_trecv(b->ep, b->memory, 3, NULL, b->other, 6, 0, b));
	CHECK(fi_tinject(a->ep, a->memory, 7, a->other, 6));
	struct fi_cq_err_entry error = next_error(b);
	ASSERT(error.err == FI_ETRUNC && error.op_context == b);
	/* After a receive is cancelled, the next message goes to the next posted buffer. */
	CHECK(fi_trecv(b->ep, b->memory, 7, NULL, b->other, 8, 0, a));
	CHECK(fi_cancel(&b->ep->fid, a));
	error = next_error(b);
	ASSERT(error.err == FI_ECANCELED && error.op_context == a);
	CHECK(fi_tinject(a->ep, a->memory, 7, a->other, 8));
	CHECK(fi_trecv(b->ep, b->memory, 7, NULL, b->other, 8, 0, b));
	ASSERT(next(b).op_context == b);
}

static long peek(struct side *side, uint64_t tag, uint64_t flags, void *context, struct fi_cq_tagged_entry *seen)
{
	struct fi_msg_tagged msg = {.addr = FI_ADDR_UNSPEC, .tag = tag, .context = context};
	for (int tries = 0; tries < 20000; tries++) {
		CHECK(fi_trecvmsg(side->ep, &msg, FI_PEEK | flags));
		long got = fi_cq_sread(side->cq, seen, 1, NULL, 20000);
		if (got == 1)
			return 1;
		struct fi_cq_err_entry error = {0};
		ASSERT(got == -FI_EAVAIL && fi_cq_readerr(side->cq, &error, 0) == 1 && error.err == FI_ENOMSG && error.op_context == context);
		nanosleep(&(struct timespec){.tv_nsec = 500000}, NULL);
	}
	return 0;
}

static void test_peek(struct side *a, struct side *b)
{
	struct fi_context one, two;
	struct fi_cq_tagged_entry seen;
	for (int i = 0; i < 3; i++) {
		a->memory[0] = i;
		CHECK(fi_tinject(a->ep, a->memory, 10 + i, a->other, 40));
	}
	ASSERT(peek(b, 40, 0, &one, &seen) == 1 && seen.len == 10 && seen.tag == 40 && seen.op_context == &one);
	ASSERT(peek(b, 40, FI_CLAIM, &one, &seen) == 1 && seen.len == 10);
	ASSERT(peek(b, 40, FI_DISCARD, &two, &seen) == 1 && seen.len == 11);
	CHECK(fi_trecv(b->ep, b->memory, 100, NULL, FI_ADDR_UNSPEC, 40, 0, &two));
	ASSERT(next(b).len == 12 && b->memory[0] == 2);
	struct iovec iov = {b->memory, 100};
	struct fi_msg_tagged msg = {.msg_iov = &iov, .iov_count = 1, .addr = FI_ADDR_UNSPEC, .tag = 40, .context = &one};
	CHECK(fi_trecvmsg(b->ep, &msg, FI_CLAIM));
	struct fi_cq_tagged_entry got = next(b);
	ASSERT(got.op_context == &one && got.len == 10 && b->memory[0] == 0);
}

static void test_several(struct side *a, struct side *b)
{
	struct iovec iov = {b->memory, 1000};
	struct fi_msg msg = {.msg_iov = &iov, .iov_count = 1, .addr = FI_ADDR_UNSPEC, .context = &msg};
	size_t least = 300;
	CHECK(fi_setopt(&b->ep->fid, FI_OPT_ENDPOINT, FI_OPT_MIN_MULTI_RECV, &least, sizeof least));
	CHECK(fi_recvmsg(b->ep, &msg, FI_MULTI_RECV));
	for (int i = 0; i < 3; i++) {
		memset(a->memory, i + 1, 300);
		CHECK(fi_inject(a->ep, a->memory, 300, a->other));
		struct fi_cq_tagged_entry got = next(b);
		ASSERT(got.buf == b->memory + 300 * i && got.len == 300 && got.op_context == &msg);
		ASSERT(got.flags == (FI_RECV | FI_MSG | (i == 2 ? FI_MULTI_RECV : 0)));
		ASSERT(b->memory[300 * i] == i + 1);
	}
	/* The small message exhausts the multi-receive buffer, possibly while the large one is still in transfer. Only the last
	 * completion may release the buffer (FI_MULTI_RECV). */
	iov.iov_len = BIG + 300;
	CHECK(fi_recvmsg(b->ep, &msg, FI_MULTI_RECV));
	CHECK(fi_send(a->ep, a->memory, BIG, NULL, a->other, a));
	CHECK(fi_inject(a->ep, a->memory, 50, a->other));
	for (int i = 0; i < 2; i++)
		ASSERT(!(next(b).flags & FI_MULTI_RECV) == !i);
	ASSERT(next(a).op_context == a);
}

static void test_rma(struct side *a, struct side *b)
{
	struct fid_mr *mr;
	CHECK(fi_mr_reg(b->domain, b->memory, BIG, FI_REMOTE_READ | FI_REMOTE_WRITE, 0, 1234, 0, &mr, NULL));
	uint64_t key = fi_mr_key(mr), before = fi_cntr_read(a->cntr);
	size_t sizes[] = {8, 16000, BIG};
	for (size_t i = 0; i < 3; i++) {
		size_t len = sizes[i];
		memset(a->memory, 'w', len);
		memset(b->memory, 0, BIG);
		CHECK(fi_writedata(a->ep, a->memory, len, NULL, 77, a->other, BIG - len, key, a));
		struct fi_cq_tagged_entry got = next(b);
		ASSERT(got.flags == (FI_RMA | FI_REMOTE_WRITE | FI_REMOTE_CQ_DATA) && got.data == 77 && got.len == len);
		ASSERT(!memcmp(b->memory + BIG - len, a->memory, len));
		got = next(a);
		ASSERT(got.flags == (FI_WRITE | FI_RMA) && got.op_context == a);
		CHECK(fi_read(a->ep, a->memory + BIG, len, NULL, a->other, BIG - len, key, b));
		ASSERT(next(a).flags == (FI_READ | FI_RMA) && !memcmp(a->memory + BIG, a->memory, len));
	}
	CHECK(fi_cntr_wait(a->cntr, before + 6, 20000));
	CHECK(fi_inject_write(a->ep, "injected", 9, a->other, 0, key));
	CHECK(fi_read(a->ep, a->memory, 9, NULL, a->other, 0, key, b));
	next(a);
	ASSERT(!strcmp(a->memory, "injected"));
	CHECK(fi_write(a->ep, a->memory, 9, NULL, a->other, BIG, key, a));
	struct fi_cq_err_entry error = next_error(a);
	ASSERT(error.err == FI_EACCES && error.op_context == a);
	char text[100];
	ASSERT(strstr(fi_cq_strerror(a->cq, error.prov_errno, NULL, text, sizeof text), "key"));
	/* No completion says that an inject succeeded, but one says that it failed. */
	CHECK(fi_inject_write(a->ep, "injected", 9, a->other, BIG, key));
	error = next_error(a);
	ASSERT(error.err == FI_EACCES && error.op_context == NULL && error.flags == (FI_RMA | FI_WRITE));
	CHECK(fi_close(&mr->fid));
	CHECK(fi_write(a->ep, a->memory, 9, NULL, a->other, 0, key, a));
	ASSERT(next_error(a).err == FI_EACCES && fi_cntr_readerr(a->cntr) == 3);
}

static uint32_t word(const unsigned char *at)
{
	return (uint32_t)at[0] << 24 | at[1] << 16 | at[2] << 8 | at[3];
}

/* A peer that opens a channel and answers nothing, until it forgets the channel (docs/interconnect.md has the packets). What was copied and
 * completed early is then reported as lost, and FI_TRANSMIT_COMPLETE has not completed before. */
static void test_loss(struct side *a)
{
	struct sockaddr_in name = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
	socklen_t len = sizeof name;
	int fd = socket(AF_INET, SOCK_DGRAM, 0);
	unsigned char packet[2048], welcome[38] = {0x11, [27] = 1, [31] = 9, [33] = 1, [36] = 5, [37] = 0xc0};
	struct fi_cq_tagged_entry entry;
	fi_addr_t peer;
	CHECK(bind(fd, (struct sockaddr *)&name, sizeof name));
	CHECK(getsockname(fd, (struct sockaddr *)&name, &len));
	ASSERT(fi_av_insert(a->av, &name, 1, &peer, 0, NULL) == 1);
	CHECK(fi_tsend(a->ep, a->memory, 9, NULL, peer, 1, &entry));
	ASSERT(next(a).op_context == &entry);
	struct iovec iov = {a->memory, 9};
	struct fi_msg_tagged msg = {.msg_iov = &iov, .iov_count = 1, .addr = peer, .context = &iov};
	CHECK(fi_tsendmsg(a->ep, &msg, FI_TRANSMIT_COMPLETE));
	for (int messages = 0; messages < 2;) {
		struct sockaddr_in from;
		ASSERT(recvfrom(fd, packet, sizeof packet, 0, (struct sockaddr *)&from, &len) >= 16);
		if (packet[0] == 0x10) {
			memcpy(welcome + 4, packet + 28, 4);
			ASSERT(sendto(fd, welcome, sizeof welcome, 0, (struct sockaddr *)&from, len) == sizeof welcome);
		} else if (packet[0] == 0x15) {
			messages++;
			ASSERT(word(packet + 4) == 9 && fi_cq_read(a->cq, &entry, 1) == -FI_EAGAIN);
			packet[0] = 0x12;
			if (messages == 2)
				ASSERT(sendto(fd, packet, 16, 0, (struct sockaddr *)&from, len) == 16);
		}
	}
	struct fi_cq_err_entry one = next_error(a), other = next_error(a);
	ASSERT(one.err == FI_ECONNRESET && other.err == FI_ECONNRESET);
	ASSERT(!one.op_context != !other.op_context && (one.op_context ? one.op_context : other.op_context) == &iov);
	CHECK(fi_av_remove(a->av, &peer, 1, 0));
	close(fd);
}

/* A removed address is no source, and its successor is. */
static void test_removed(struct side *a, struct side *b)
{
	char name[64];
	size_t len = sizeof name;
	fi_addr_t source = 0;
	struct fi_cq_tagged_entry entry;
	CHECK(fi_getname(&a->ep->fid, name, &len));
	CHECK(fi_av_remove(b->av, &b->other, 1, 0));
	for (int i = 0; i < 2; i++) {
		CHECK(fi_trecv(b->ep, b->memory, 7, NULL, FI_ADDR_UNSPEC, 60, 0, NULL));
		CHECK(fi_tinject(a->ep, a->memory, 7, a->other, 60));
		ASSERT(fi_cq_sreadfrom(b->cq, &entry, 1, &source, NULL, 20000) == 1);
		ASSERT(source == (i ? b->other : FI_ADDR_NOTAVAIL));
		if (!i)
			ASSERT(fi_av_insert(b->av, name, 1, &b->other, 0, NULL) == 1);
	}
}

static void *insert_many(void *argument)
{
	struct side *side = argument;
	union {
		struct sockaddr_in v4;
		struct sockaddr_in6 v6;
	} name;
	fi_addr_t place;
	size_t len = sizeof name;
	CHECK(fi_getname(&side->ep->fid, &name, &len));
	for (int i = 0; i < 3000; i++) {
		/* The port is at the same offset in both kinds of address. */
		name.v4.sin_port = htons(1 + i);
		ASSERT(fi_av_insert(side->av, &name, 1, &place, 0, NULL) == 1);
		memset(&name, 0, sizeof name);
		CHECK(fi_av_lookup(side->av, place, &name, &len));
		ASSERT(ntohs(name.v4.sin_port) == 1 + i);
	}
	return NULL;
}

/* FI_THREAD_SAFE: threads insert addresses at the same time, while others send. */
static void test_threads(struct side *a, struct side *b)
{
	pthread_t threads[2];
	for (int i = 0; i < 2; i++)
		CHECK(pthread_create(&threads[i], NULL, insert_many, a));
	for (int i = 0; i < 500; i++) {
		CHECK(fi_trecv(b->ep, b->memory, 7, NULL, FI_ADDR_UNSPEC, 70, 0, NULL));
		CHECK(fi_tinject(a->ep, a->memory, 7, a->other, 70));
		ASSERT(next(b).len == 7);
	}
	for (int i = 0; i < 2; i++)
		CHECK(pthread_join(threads[i], NULL));
}

static void test_atomic(struct side *a, struct side *b)
{
	struct fid_mr *mr;
	struct fi_atomic_attr attr;
	uint64_t *numbers = (uint64_t *)b->memory, one = 1, found = 0, operand = 77, compare;
	double *fraction = (double *)(b->memory + 512), half = 0.5;
	memset(b->memory, 0, 1024);
	CHECK(fi_mr_reg(b->domain, b->memory, 1024, FI_REMOTE_READ | FI_REMOTE_WRITE, 0, 55, 0, &mr, NULL));
	CHECK(fi_query_atomic(b->domain, FI_UINT64, FI_SUM, &attr, 0));
	ASSERT(attr.count == 30 && attr.size == 8);
	ASSERT(fi_query_atomic(b->domain, FI_DOUBLE, FI_BOR, &attr, 0) == -FI_EOPNOTSUPP);
	ASSERT(fi_query_atomic(b->domain, FI_UINT64, FI_CSWAP, &attr, 0) == -FI_EOPNOTSUPP);
	CHECK(fi_atomic(a->ep, &one, 1, NULL, a->other, 0, 55, FI_UINT64, FI_SUM, &one));
	struct fi_cq_tagged_entry got = next(a);
	ASSERT(got.flags == (FI_ATOMIC | FI_WRITE) && got.op_context == &one);
	CHECK(fi_inject_atomic(a->ep, &one, 1, a->other, 0, 55, FI_UINT64, FI_SUM));
	CHECK(fi_fetch_atomic(a->ep, NULL, 1, NULL, &found, NULL, a->other, 0, 55, FI_UINT64, FI_ATOMIC_READ, &found));
	got = next(a);
	ASSERT(got.flags == (FI_ATOMIC | FI_READ) && got.op_context == &found && found == 2);
	for (compare = 2; compare < 4; compare++) {
		CHECK(fi_compare_atomic(a->ep, &operand, 1, NULL, &compare, NULL, &found, NULL, a->other, 0, 55, FI_UINT64, FI_CSWAP, a));
		next(a);
		ASSERT(found == (compare == 2 ? 2 : 77) && numbers[0] == 77);
	}
	CHECK(fi_fetch_atomic(a->ep, &half, 1, NULL, &found, NULL, a->other, 512, 55, FI_DOUBLE, FI_SUM, a));
	next(a);
	ASSERT(*fraction == 0.5 && found == 0);
	ASSERT(fi_atomic(a->ep, a->memory, 31, NULL, a->other, 0, 55, FI_UINT64, FI_SUM, a) == -FI_EINVAL);
	CHECK(fi_fetch_atomic(a->ep, &one, 1, NULL, &found, NULL, a->other, 1024, 55, FI_UINT64, FI_SUM, a));
	ASSERT(next_error(a).err == FI_EACCES);
	CHECK(fi_close(&mr->fid));
}

/* Sleeps on the completion queue's descriptor, like an application that polls several descriptors. */
static void test_descriptor(struct fid_fabric *fabric, struct side *a, struct side *b)
{
	struct fi_cq_tagged_entry entry;
	struct fid *fids[] = {&b->cq->fid};
	struct pollfd wait = {.events = POLLIN};
	CHECK(fi_control(&b->cq->fid, FI_GETWAIT, &wait.fd));
	for (int i = 0; i < 20; i++) {
		CHECK(fi_trecv(b->ep, b->memory, 100, NULL, FI_ADDR_UNSPEC, 50, 0, b));
		while (fi_trywait(fabric, fids, 1))
			ASSERT(fi_cq_read(b->cq, &entry, 1) == -FI_EAGAIN);
		ASSERT(poll(&wait, 1, 0) == 0 || fi_cq_read(b->cq, &entry, 1) == -FI_EAGAIN);
		/* The pause also covers the case in which the library's thread receives, because the application has not polled for a while. */
		nanosleep(&(struct timespec){.tv_nsec = i % 4 * 10000000}, NULL);
		CHECK(fi_tinject(a->ep, a->memory, 10, a->other, 50));
		while (fi_cq_read(b->cq, &entry, 1) != 1) {
			if (!fi_trywait(fabric, fids, 1))
				ASSERT(poll(&wait, 1, 20000) == 1);
		}
		ASSERT(entry.len == 10);
	}
	CHECK(fi_cq_signal(b->cq));
	ASSERT(fi_cq_sread(b->cq, &entry, 1, NULL, 20000) == -FI_EAGAIN);
	ASSERT(fi_cq_sread(b->cq, &entry, 1, NULL, 20) == -FI_EAGAIN);
}

/* The owner reads only the completion queue of its own operations: notices of a peer's writes stop the peer, not fill the memory. */
static void test_unread(struct fid_fabric *fabric, struct fi_info *info, struct side *a)
{
	enum { WRITES = 4000 };
	struct fi_cq_tagged_entry entries[64];
	struct fid_cq *unread;
	struct side c = {0};
	struct fid_mr *mr;
	int done = 0, idle = 0, notices = 0;
	open_side(&c, fabric, info, FI_AV_TABLE, &unread);
	introduce(a, &c);
	CHECK(fi_mr_reg(c.domain, c.memory, 8, FI_REMOTE_WRITE, 0, 9, 0, &mr, NULL));
	for (int i = 0; i < WRITES; i++) {
		while (fi_writedata(a->ep, a->memory, 8, NULL, i, a->other, 0, 9, a) == -FI_EAGAIN)
			;
	}
	for (; idle < 100; idle++) {
		long got = fi_cq_read(a->cq, entries, 64);
		if (got > 0)
			done += got, idle = 0;
		ASSERT(fi_cq_read(c.cq, entries, 1) == -FI_EAGAIN);
		nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
	}
	ASSERT(done >= 1024 && done <= 1024 + 16 + 256);
	while (done < WRITES || notices < WRITES) {
		long got = fi_cq_read(a->cq, entries, 64), took = fi_cq_read(unread, entries, 64);
		done += got > 0 ? got : 0;
		notices += took > 0 ? took : 0;
	}
	CHECK(fi_close(&mr->fid));
	CHECK(fi_close(&c.ep->fid));
	CHECK(fi_close(&unread->fid));
	close_side(&c);
}

/* The optional argument is the IP address of both endpoints; the default is 127.0.0.1. */
int main(int argc, char **argv)
{
	struct fi_info *hints = fi_allocinfo(), *info;
	struct fid_fabric *fabric;
	struct side a = {0}, b = {0};
	hints->caps = FI_MSG | FI_TAGGED | FI_RMA | FI_ATOMIC | FI_MULTI_RECV | FI_DIRECTED_RECV | FI_SOURCE;
	hints->ep_attr->type = FI_EP_RDM;
	hints->fabric_attr->prov_name = strdup("vnet");
	CHECK(fi_getinfo(FI_VERSION(1, 17), argc > 1 ? argv[1] : "127.0.0.1", NULL, FI_SOURCE, hints, &info));
	CHECK(fi_fabric(info->fabric_attr, &fabric, NULL));
	open_side(&a, fabric, info, FI_AV_MAP, NULL);
	open_side(&b, fabric, info, FI_AV_TABLE, NULL);
	introduce(&a, &b);
	introduce(&b, &a);
	test_tagged(&a, &b);
	test_peek(&a, &b);
	test_several(&a, &b);
	test_rma(&a, &b);
	test_atomic(&a, &b);
	test_descriptor(fabric, &a, &b);
	test_removed(&a, &b);
	test_threads(&a, &b);
	if (info->addr_format == FI_SOCKADDR_IN)
		test_loss(&a);
	test_unread(fabric, info, &a);
	ASSERT(fi_close(&a.domain->fid) == -FI_EBUSY);
	struct side *sides[] = {&a, &b};
	for (int i = 0; i < 2; i++) {
		CHECK(fi_close(&sides[i]->ep->fid));
		close_side(sides[i]);
	}
	CHECK(fi_close(&fabric->fid));
	fi_freeinfo(info);
	fi_freeinfo(hints);
	puts("ok");
	return 0;
}
