/* An RDMA ring exchange in C: each process writes into the memory of its right neighbour.
 *
 * cc ring.c -I interconnect/include -L target/release -lvnet_rdma -o ring
 * Start one process for each place: ring PLACE NAME NAME NAME..., where the names are those of all places, such as 10.77.1.1:7000/0.
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <vnet_rdma.h>

enum { LEN = 1 << 20, ROUNDS = 10, PATIENCE_MS = 30000 };

static void check(int result, const char *what)
{
	if (result < 0) {
		fprintf(stderr, "ring: %s: %s\n", what, vnet_rdma_error());
		exit(1);
	}
}

/* Waits for a completion of this kind. Others that come first are counted for later: the left neighbour may be faster. */
static uint64_t wait_for(vnet_rdma_endpoint *endpoint, uint32_t kind)
{
	static int seen[5];
	static uint64_t data[5];
	while (!seen[kind]) {
		vnet_rdma_completion completion;
		if (vnet_rdma_wait(endpoint, &completion, 1, PATIENCE_MS) != 1) {
			fprintf(stderr, "ring: no completion in 30 seconds\n");
			exit(1);
		}
		if (completion.status != VNET_RDMA_SUCCESS) {
			fprintf(stderr, "ring: %s\n", vnet_rdma_status_text(completion.status));
			exit(1);
		}
		seen[completion.kind]++;
		data[completion.kind] = completion.data;
	}
	seen[kind]--;
	return data[kind];
}

int main(int argc, char **argv)
{
	if (argc < 3) {
		fprintf(stderr, "usage: ring PLACE NAME...\n");
		return 2;
	}
	int place = atoi(argv[1]), count = argc - 2;
	const char *own = argv[2 + place];
	int left_place = (place + count - 1) % count;
	vnet_rdma_peer left, right;
	check(vnet_rdma_resolve(argv[2 + left_place], &left), "left neighbour");
	check(vnet_rdma_resolve(argv[2 + (place + 1) % count], &right), "right neighbour");

	char bind[128];
	snprintf(bind, sizeof bind, "%.*s", (int)strcspn(own, "/"), own);
	vnet_rdma_node *node;
	vnet_rdma_endpoint *endpoint;
	check(vnet_rdma_open(bind, &node), "open");
	check(vnet_rdma_endpoint_open(node, 0, &endpoint), "endpoint");

	unsigned char *inbox, *outbox = malloc(LEN), byte = 0;
	void *memory;
	uint64_t own_key, key;
	/* A neighbour on this host writes into memory of the library with one copy, if it may read and write it. */
	check(vnet_rdma_allocate(endpoint, LEN, VNET_RDMA_REMOTE_READ | VNET_RDMA_REMOTE_WRITE, &memory, &own_key), "allocate");
	inbox = memory;

	/* The left neighbour learns the key of the inbox, this process that of the right one's. */
	check(vnet_rdma_receive(endpoint, NULL, &key, sizeof key, 0, 0, 0, 0), "receive");
	check(vnet_rdma_send(endpoint, &left, &own_key, sizeof own_key, 0, 0, 0, 0), "send");
	wait_for(endpoint, VNET_RDMA_RECEIVE);

	for (int round = 0; round < ROUNDS; round++) {
		memset(outbox, place + round, LEN);
		/* The round travels as immediate data: when it arrives, so have all bytes. */
		check(vnet_rdma_write(endpoint, &right, outbox, LEN, key, 0, round, 0, VNET_RDMA_DATA), "write");
		uint64_t arrived = wait_for(endpoint, VNET_RDMA_ARRIVAL);
		for (size_t i = 0; i < LEN; i++) {
			if (arrived != (uint64_t)round || inbox[i] != (unsigned char)(left_place + round)) {
				fprintf(stderr, "ring: wrong bytes\n");
				return 1;
			}
		}
		/* Both neighbours are told that the memory may be used again. */
		check(vnet_rdma_receive(endpoint, NULL, &byte, 1, 0, 0, 0, 0), "receive");
		check(vnet_rdma_send(endpoint, &left, "", 1, 0, 0, 0, VNET_RDMA_BUFFERED), "send");
		wait_for(endpoint, VNET_RDMA_RECEIVE);
	}
	vnet_rdma_counters sent;
	vnet_rdma_node_counters all;
	check(vnet_rdma_counters_of_endpoint(endpoint, &sent), "counters of the endpoint");
	check(vnet_rdma_counters_of_node(node, &all), "counters of the node");
	printf("%d rounds of %d bytes: %llu packets, %llu repeated\n", ROUNDS, LEN, (unsigned long long)sent.packets,
	       (unsigned long long)all.resent);
	check(vnet_rdma_deregister(endpoint, own_key), "deregister");
	vnet_rdma_endpoint_close(endpoint);
	vnet_rdma_close(node);
	return 0;
}
