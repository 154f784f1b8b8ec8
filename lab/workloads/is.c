/* IS, integer sort (RNR-94-007, section 2.2): the rank of each key, ten times, by buckets. Ranks exchange all keys, so
 * that each rank has those of consecutive buckets: a few large messages between all ranks. */
#include "common.h"

#include <string.h>

#define ITERATIONS 10
#define BUCKETS 1024
#define TESTS 5
#define PARTS 32 /* Number of parts of this rank's keys; threads share them. */
#define RANKS_MAX 256

/* In iteration i, the key with index `index[t]` has rank `base[t] + i + rise` for the first `rising` tests, and
 * `base[t] - i - fall` for the others. Values of NPB 3.x, is.c. */
struct size {
    char class;
    int log2_keys, log2_range, rising, rise, fall;
    int index[TESTS], base[TESTS];
};
static const struct size sizes[] = {
    {'S', 16, 11, 3, 0, 0, {48427, 17148, 23627, 62548, 4431}, {0, 18, 346, 64917, 65463}},
    {'W', 20, 16, 2, -2, 0, {357773, 934767, 875723, 898999, 404505}, {1249, 11698, 1039987, 1043896, 1048018}},
    {'A', 23, 19, 3, -1, -1, {2112377, 662041, 5336171, 3642833, 4250760}, {104, 17523, 123928, 8288932, 8388264}},
};

static const struct size *size;
static int shift;                       /* The bucket of a key is key >> shift. */
static int first_index, own_count;      /* This rank's part of the sequence of keys. */
static int *keys, *by_bucket, *received, received_count;
static int *below;                      /* Number of smaller keys, for each key value of this rank's buckets. */
static int bucket_start[BUCKETS + 1];   /* Number of keys in lower buckets, over all ranks. */
static int rank_bucket[RANKS_MAX + 1];      /* The first bucket of each rank. */

/* Generates the keys: means of four random numbers, scaled. */
static void make_keys(void)
{
    uint64_t state = random_jump(RANDOM_SEED, 4 * (uint64_t)first_index + (PERTURBED(1.0) != 1));
    int quarter = (1 << size->log2_range) / 4;
    for (int n = 0; n < own_count; n++) {
        double total = random_next(&state);
        for (int more = 0; more < 3; more++)
            total += random_next(&state);
        keys[n] = (int)(quarter * total);
    }
}

/* Sorts this rank's keys into `by_bucket`; stores each bucket's number of keys in `counts`. */
static void sort_into_buckets(int *counts)
{
    static int next[PARTS][BUCKETS];
#pragma omp parallel for schedule(static, 1)
    for (int part = 0; part < PARTS; part++) {
        memset(next[part], 0, sizeof next[part]);
        for (int n = part_start(own_count, part, PARTS); n < part_start(own_count, part + 1, PARTS); n++)
            next[part][keys[n] >> shift]++;
    }
    int position = 0;
    for (int bucket = 0; bucket < BUCKETS; bucket++) {
        int from = position;
        for (int part = 0; part < PARTS; part++) {
            int count = next[part][bucket];
            next[part][bucket] = position;
            position += count;
        }
        counts[bucket] = position - from;
    }
#pragma omp parallel for schedule(static, 1)
    for (int part = 0; part < PARTS; part++)
        for (int n = part_start(own_count, part, PARTS); n < part_start(own_count, part + 1, PARTS); n++)
            by_bucket[next[part][keys[n] >> shift]++] = keys[n];
}

/* Assigns consecutive buckets to each rank, so that all ranks have about as many keys. */
static void share_buckets(void)
{
    int bucket = 0;
    for (int owner = 0; owner < ranks; owner++) {
        rank_bucket[owner] = bucket;
        int until = part_start(1 << size->log2_keys, owner + 1, ranks);
        while (bucket < BUCKETS && bucket_start[bucket + 1] <= until)
            bucket++;
    }
    rank_bucket[ranks] = BUCKETS;
}

/* Sends each rank the keys of its buckets. */
static void exchange(const int *counts)
{
    static int send[RANKS_MAX], send_start[RANKS_MAX], receive[RANKS_MAX], receive_start[RANKS_MAX];
    for (int other = 0; other < ranks; other++) {
        send[other] = 0;
        for (int bucket = rank_bucket[other]; bucket < rank_bucket[other + 1]; bucket++)
            send[other] += counts[bucket];
    }
    MPI_Alltoall(send, 1, MPI_INT, receive, 1, MPI_INT, MPI_COMM_WORLD);
    received_count = 0;
    for (int other = 0, sent = 0; other < ranks; other++) {
        send_start[other] = sent;
        receive_start[other] = received_count;
        sent += send[other];
        received_count += receive[other];
    }
    MPI_Alltoallv(by_bucket, send, send_start, MPI_INT, received, receive, receive_start, MPI_INT, MPI_COMM_WORLD);
}

/* Counts the received keys: sets below[] for all keys in this rank's buckets. */
static void count_keys(void)
{
    int first = rank_bucket[rank] << shift, end = rank_bucket[rank + 1] << shift;
    if (ranks == 1) { /* Received in order of buckets: threads share the buckets. */
#pragma omp parallel for schedule(dynamic, 16)
        for (int bucket = 0; bucket < BUCKETS; bucket++) {
            memset(below + ((size_t)bucket << shift), 0, sizeof *below << shift);
            for (int n = bucket_start[bucket]; n < bucket_start[bucket + 1]; n++)
                below[received[n]]++;
        }
    } else {
        memset(below, 0, sizeof *below * (size_t)(end - first));
        for (int n = 0; n < received_count; n++)
            below[received[n] - first]++;
    }
    int position = bucket_start[rank_bucket[rank]];
    for (int key = first; key < end; key++) {
        int count = below[key - first];
        below[key - first] = position;
        position += count;
    }
}

/* Ranks all keys; returns whether the test keys have the expected ranks. */
static bool iterate(int iteration)
{
    int counts[BUCKETS], totals[BUCKETS + TESTS] = {0};
    if (rank == 0) {
        keys[iteration] = iteration;
        keys[iteration + ITERATIONS] = (1 << size->log2_range) - iteration;
    }
    sort_into_buckets(counts);
    memcpy(totals, counts, sizeof counts);
    for (int test = 0; test < TESTS; test++) {
        int n = size->index[test] - first_index;
        totals[BUCKETS + test] = n >= 0 && n < own_count ? keys[n] : 0;
    }
    MPI_Allreduce(MPI_IN_PLACE, totals, BUCKETS + TESTS, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
    for (int bucket = 0; bucket < BUCKETS; bucket++)
        bucket_start[bucket + 1] = bucket_start[bucket] + totals[bucket];
    share_buckets();
    exchange(counts);
    count_keys();

    bool right = true;
    for (int test = 0; test < TESTS; test++) {
        int key = totals[BUCKETS + test], first = rank_bucket[rank] << shift;
        int expected = size->base[test] + (test < size->rising ? iteration + size->rise : -iteration - size->fall);
        if (key >= first && key < rank_bucket[rank + 1] << shift)
            right &= below[key - first] == expected;
    }
    return right;
}

/* Puts the received keys in the positions given by their ranks; returns whether that yields all keys, in order. */
static bool sorted(void)
{
    int first = rank_bucket[rank] << shift, position = bucket_start[rank_bucket[rank]];
    int *place = allocate((size_t)received_count, sizeof *place);
    bool right = position + received_count == bucket_start[rank_bucket[rank + 1]];
    double numbers[3] = {received_count, 0, 0}; /* Number of keys, and their sums before and after. */
    for (int n = 0; n < received_count; n++)
        place[below[received[n] - first]++ - position] = received[n];
    for (int n = 0; n < received_count; n++) {
        right &= n == 0 || place[n - 1] <= place[n];
        numbers[2] += place[n];
    }
    for (int n = 0; n < own_count; n++)
        numbers[1] += keys[n];
    sum(numbers, 3);
    return right && numbers[0] == 1 << size->log2_keys && numbers[1] == numbers[2];
}

int main(int argc, char **argv)
{
    char class = begin(argc, argv, "IS");
    for (size = sizes; size->class != class; size++)
        ;
    if (ranks > RANKS_MAX)
        refuse("at most %d ranks", RANKS_MAX);
    int total = 1 << size->log2_keys;
    shift = size->log2_range - 10;
    first_index = part_start(total, rank, ranks);
    own_count = part_start(total, rank + 1, ranks) - first_index;
    keys = allocate((size_t)own_count, sizeof *keys);
    by_bucket = allocate((size_t)own_count, sizeof *keys);
    received = allocate((size_t)total, sizeof *keys);
    below = allocate((size_t)1 << size->log2_range, sizeof *below);
    make_keys();
    bool right = iterate(1); /* Touches all memory; repeated in the measurement below. */

    double begun = start();
    for (int iteration = 1; iteration <= ITERATIONS; iteration++)
        right &= iterate(iteration);
    double seconds = now() - begun;
    right &= sorted();
    return report(seconds, (double)ITERATIONS * total, right, "");
}
