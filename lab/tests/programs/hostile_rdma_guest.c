/* A hostile guest of the interconnect: opens attachments like the helper, then writes nonsense into its queues and control frames: random
 * entries, positions, keys, offsets, lengths and guest physical addresses.
 *
 *     hostile_rdma_guest INTERFACE ADDRESS SECONDS SEED
 *
 * Prints how many attachments it opened and how many of them the daemon has ended. */

#define _GNU_SOURCE
#include <arpa/inet.h>
#include <fcntl.h>
#include <linux/if_packet.h>
#include <net/if.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { PAGE = 4096, PAGES = 194, ENTRIES = 2048, WORDS = 16, ETHERTYPE = 0x88b5, RUNS = 97 };
enum { OPEN = 1, OPENED = 2, SHARE = 4, SHARED = 5, RING = 6, NEIGHBOUR = 8, CLOSE = 9, CLOSED = 10 };

static const uint8_t GROUP[6] = { 0x03, 0x76, 0x6e, 0x65, 0x74, 0x01 };
static uint64_t state;
static int packets;
static struct sockaddr_ll to;
static uint8_t mac[6], token[16];
static uint64_t attachment;
static uint8_t *queues;
static uint64_t frames_of_queues[PAGES];

static uint64_t random64(void)
{
    state = state * 6364136223846793005u + 1442695040888963407u;
    return state >> 32 | state << 32;
}

static void die(const char *what)
{
    perror(what);
    exit(1);
}

static uint8_t *put(uint8_t *at, uint64_t value, int bytes)
{
    for (int place = 0; place < bytes; place++)
        at[place] = (uint8_t)(value >> 8 * (bytes - 1 - place));
    return at + bytes;
}

static uint8_t *begin(uint8_t *frame, int kind)
{
    memset(frame, 0, 1514);
    memcpy(frame, GROUP, 6);
    memcpy(frame + 6, mac, 6);
    put(frame + 12, ETHERTYPE, 2);
    memcpy(frame + 14, "vrdm\1", 5);
    frame[19] = (uint8_t)kind;
    put(frame + 22, attachment, 8);
    memcpy(frame + 30, token, 16);
    return frame + 46;
}

static void transmit(const uint8_t *frame, const uint8_t *end)
{
    size_t len = (size_t)(end - frame);
    sendto(packets, frame, len < 60 ? 60 : len, 0, (struct sockaddr *)&to, sizeof to);
}

/* Waits for an answer of this kind, or for CLOSED. Returns its kind, or 0. */
static int answer(int kind, uint8_t *frame)
{
    for (int tries = 0; tries < 200; tries++) {
        ssize_t len = recv(packets, frame, 1514, MSG_DONTWAIT);
        if (len < 46 || memcmp(frame + 14, "vrdm\1", 5) || memcmp(frame + 30, token, 16) || frame[6] != 0x02) {
            if (len < 0)
                usleep(2000);
            continue;
        }
        if (frame[19] == kind || frame[19] == CLOSED)
            return frame[19];
    }
    return 0;
}

static int attach(uint32_t address, int port)
{
    uint8_t frame[1514], *at;
    attachment = 0;
    for (int place = 0; place < 16; place++)
        token[place] = (uint8_t)random64();
    at = begin(frame, OPEN);
    at += 10;
    at = put(at, 0xffff, 2);
    memcpy(at, &address, 4);
    at += 4 + 4;
    at = put(at, (uint64_t)port, 2);
    at += 1;
    at = put(at, 1000, 4);
    at = put(at, 10, 4);
    transmit(frame, at);
    if (answer(OPENED, frame) != OPENED)
        return 0;
    for (int place = 0; place < 8; place++)
        attachment = attachment << 8 | frame[22 + place];
    memset(queues, 0, (size_t)PAGES * PAGE);
    for (int first = 0; first < PAGES; first += RUNS) {
        at = begin(frame, SHARE);
        at = put(at, 0xffffffff, 4);
        at = put(at, (uint64_t)PAGES * PAGE, 8);
        at = put(at, PAGES, 2);
        at = put(at, (uint64_t)first, 2);
        at = put(at, RUNS, 2);
        for (int run = 0; run < RUNS; run++) {
            at = put(at, frames_of_queues[first + run] * PAGE, 8);
            at = put(at, 1, 4);
        }
        transmit(frame, at);
        if (answer(SHARED, frame) != SHARED)
            return 0;
    }
    return frame[14 + 32 + 6] == 1;
}

/* Writes entries that look like submissions, with random memory, offsets, lengths and keys. */
static void write_entries(void)
{
    volatile uint64_t *head = (volatile uint64_t *)queues;
    for (uint64_t count = random64() % 64; count > 0; count--) {
        volatile uint64_t *entry = (volatile uint64_t *)(queues + 2 * PAGE) + *head % ENTRIES * WORDS;
        for (int word = 0; word < WORDS; word++)
            entry[word] = random64() % 4 ? random64() % 8 : random64();
        entry[0] = (1 + random64() % 10) | random64() % 1024 << 8 | random64() % 20 << 32 | random64() % 4 << 48;
        *head += 1;
    }
    if (random64() % 200 == 0)
        queues[random64() % (PAGES * PAGE)] ^= (uint8_t)random64();
}

static void write_frame(void)
{
    uint8_t frame[1514], *at;
    int runs = (int)(1 + random64() % 100);
    switch (random64() % 8) {
    case 0:
        at = begin(frame, RING);
        at = put(at, random64(), 4);
        at = put(at, random64(), 4);
        at = put(at, random64() % 2, 1);
        break;
    case 1:
        at = begin(frame, NEIGHBOUR) + 10;
        at = put(at, 0xffff, 2);
        at = put(at, random64(), 4);
        at = put(at, random64(), 6);
        break;
    case 2:
        at = begin(frame, (int)(random64() % 16));
        for (int place = 0; place < 200; place++)
            at = put(at, random64(), 1);
        break;
    default:
        at = begin(frame, SHARE);
        at = put(at, random64() % 8, 4);
        at = put(at, random64() % 2 ? (uint64_t)runs * PAGE : random64(), 8);
        at = put(at, (uint64_t)runs, 2);
        at = put(at, 0, 2);
        at = put(at, (uint64_t)runs, 2);
        for (int run = 0; run < runs; run++) {
            uint64_t wild = random64() >> random64() % 40;
            at = put(at, random64() % 4 ? frames_of_queues[random64() % PAGES] * PAGE : wild, 8);
            at = put(at, random64() % 16 ? 1 : random64(), 4);
        }
    }
    transmit(frame, at);
}

int main(int argc, char **argv)
{
    struct ifreq interface = { 0 };
    uint32_t address;
    int opened = 0, ended = 0;
    if (argc != 5 || inet_pton(AF_INET, argv[2], &address) != 1)
        return 2;
    state = strtoull(argv[4], NULL, 10);
    packets = socket(AF_PACKET, SOCK_RAW | SOCK_CLOEXEC, htons(ETHERTYPE));
    strncpy(interface.ifr_name, argv[1], IFNAMSIZ - 1);
    if (packets < 0 || ioctl(packets, SIOCGIFHWADDR, &interface) < 0)
        die("packet socket");
    memcpy(mac, interface.ifr_hwaddr.sa_data, 6);
    to.sll_family = AF_PACKET;
    to.sll_protocol = htons(ETHERTYPE);
    to.sll_ifindex = (int)if_nametoindex(argv[1]);
    to.sll_halen = 6;
    queues = mmap(NULL, (size_t)PAGES * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_LOCKED, -1, 0);
    int pagemap = open("/proc/self/pagemap", O_RDONLY);
    if (queues == MAP_FAILED || pagemap < 0)
        die("memory");
    memset(queues, 1, (size_t)PAGES * PAGE);
    for (int page = 0; page < PAGES; page++) {
        off_t at = (off_t)(((uintptr_t)queues / PAGE + (uintptr_t)page) * 8);
        if (pread(pagemap, &frames_of_queues[page], 8, at) != 8)
            die("pagemap");
        frames_of_queues[page] &= (1ull << 55) - 1;
    }
    time_t end = time(NULL) + atoi(argv[3]);
    for (int port = 20000; time(NULL) < end; port++) {
        uint8_t frame[1514];
        if (!attach(address, port)) {
            usleep(50000);
            continue;
        }
        opened++;
        for (int turn = 0; turn < 300 && time(NULL) < end; turn++) {
            write_entries();
            write_frame();
            ssize_t len = recv(packets, frame, sizeof frame, MSG_DONTWAIT);
            if (len > 45 && frame[19] == CLOSED && !memcmp(frame + 30, token, 16)) {
                ended++;
                break;
            }
        }
        transmit(frame, begin(frame, CLOSE));
    }
    printf("opened %d ended %d\n", opened, ended);
    return 0;
}
