/* Writes between two nodes by the C interface, every byte of which is checked.
 *
 * cc ether_bytes.c -I interconnect/include -L target/release -lvnet_rdma -o ether_bytes
 * ether_bytes serve BIND     prints how many rounds it took and how many bytes were wrong
 * ether_bytes write BIND NAME ROUNDS     prints the attachment by which the packets travelled
 *
 * Each round is a write with other bytes than all before; the server answers when it has checked them. Lengths cover one packet, several, and what
 * is pulled.
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <vnet_rdma.h>

enum { LEN = 512 << 10, PATIENCE_MS = 30000 };
static const uint64_t LAST = UINT64_MAX;
static const size_t LENGTHS[] = { 1, 31, 1300, 1500, 16384, 16385, 65507, LEN };
enum { KINDS = sizeof LENGTHS / sizeof *LENGTHS };

static vnet_rdma_node *node;
static vnet_rdma_endpoint *endpoint;
static uint64_t key;
static uint8_t inbox[LEN], outbox[LEN];

static void check(int result, const char *what)
{
	if (result < 0) {
		fprintf(stderr, "ether_bytes: %s: %s\n", what, vnet_rdma_error());
		exit(1);
	}
}

static uint8_t content(uint64_t round, size_t place)
{
	return (uint8_t)((round << 32 | place) * UINT64_C(0x9e3779b97f4a7c15) >> 56);
}

static vnet_rdma_completion wait_for(uint32_t kind)
{
	vnet_rdma_completion completion;
	do {
		if (vnet_rdma_wait(endpoint, &completion, 1, PATIENCE_MS) != 1) {
			fprintf(stderr, "ether_bytes: no completion in 30 seconds\n");
			exit(1);
		}
		if (completion.status != VNET_RDMA_SUCCESS) {
			fprintf(stderr, "ether_bytes: %s\n", vnet_rdma_status_text(completion.status));
			exit(1);
		}
	} while (completion.kind != kind);
	return completion;
}

static void open_at(const char *bind)
{
	check(vnet_rdma_open(bind, &node), "open");
	check(vnet_rdma_endpoint_open(node, 0, &endpoint), "endpoint");
	check(vnet_rdma_register(endpoint, inbox, LEN, VNET_RDMA_REMOTE_WRITE, &key), "register");
}

static void serve(void)
{
	uint64_t rounds = 0, wrong = 0, expected;
	check(vnet_rdma_receive(endpoint, NULL, outbox, sizeof key, 0, 0, 0, 0), "receive");
	printf("ready\n");
	fflush(stdout);
	vnet_rdma_peer peer = wait_for(VNET_RDMA_RECEIVE).peer;
	check(vnet_rdma_send(endpoint, &peer, &key, sizeof key, 0, 0, 0, 0), "send");
	while ((expected = wait_for(VNET_RDMA_ARRIVAL).data) != LAST) {
		for (size_t place = 0; place < LENGTHS[expected % KINDS]; place++)
			wrong += inbox[place] != content(expected, place);
		rounds++;
		check(vnet_rdma_send(endpoint, &peer, &wrong, sizeof wrong, 0, 0, 0, VNET_RDMA_BUFFERED), "answer");
	}
	printf("rounds %llu wrong %llu\n", (unsigned long long)rounds, (unsigned long long)wrong);
}

static void write_to(const char *name, uint64_t rounds)
{
	vnet_rdma_peer peer;
	uint64_t target = 0, wrong = 0;
	check(vnet_rdma_resolve(name, &peer), "name");
	check(vnet_rdma_receive(endpoint, NULL, &target, sizeof target, 0, 0, 0, 0), "receive");
	check(vnet_rdma_send(endpoint, &peer, &key, sizeof key, 0, 0, 0, 0), "send");
	wait_for(VNET_RDMA_RECEIVE);
	for (uint64_t round = 0; round < rounds; round++) {
		size_t len = LENGTHS[round % KINDS];
		for (size_t place = 0; place < len; place++)
			outbox[place] = content(round, place);
		check(vnet_rdma_receive(endpoint, &peer, &wrong, sizeof wrong, 0, 0, 0, 0), "receive");
		check(vnet_rdma_write(endpoint, &peer, outbox, len, target, 0, round, 0, VNET_RDMA_DATA), "write");
		wait_for(VNET_RDMA_RECEIVE);
		if (wrong) {
			fprintf(stderr, "ether_bytes: %llu bytes of round %llu arrived wrong\n", (unsigned long long)wrong,
				(unsigned long long)round);
			exit(1);
		}
	}
	check(vnet_rdma_write(endpoint, &peer, outbox, 1, target, 0, LAST, 0, VNET_RDMA_DATA), "write");
	wait_for(VNET_RDMA_WRITE);
	printf("attachment %d\n", vnet_rdma_attachment(endpoint, &peer));
}

int main(int argc, char **argv)
{
	if (argc == 3 && !strcmp(argv[1], "serve")) {
		open_at(argv[2]);
		serve();
	} else if (argc == 5 && !strcmp(argv[1], "write")) {
		open_at(argv[2]);
		write_to(argv[3], strtoull(argv[4], NULL, 10));
	} else {
		fprintf(stderr, "usage: ether_bytes serve BIND | write BIND NAME ROUNDS\n");
		return 2;
	}
	vnet_rdma_endpoint_close(endpoint);
	vnet_rdma_close(node);
	return 0;
}
