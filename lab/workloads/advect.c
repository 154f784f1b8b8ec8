/* ADVECT, the advective equation (after Nanos, Goumas, Koziris: Exploring I/O virtualization data paths for MPI
 * applications in a cluster of VMs, VHPC 2010): u_t + a u_x + b u_y + c u_z = 0 on X x Y x Z cells over T steps, by
 * first-order upwind differences with positive velocities. P x Q x R ranks share the cells; in each step, a rank sends
 * its three upper faces and receives three lower ones.
 *
 * Every cell is computed by the same operations in the same order on any rank, so the checksum is the same for every
 * split. Times are reported separately for packing and unpacking faces, sending, waiting and computing. */
#include "common.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define USAGE "usage: advect S|W|A|B|XxYxZxT [PxQxR]: cells and steps; ranks in each dimension"
#define SHIFT_STEPS 3

/* Checksums of this program, which are the same for all splits and variants. No other program computes them: shifts()
 * verifies the faces against results that are known in advance. */
struct size {
    char class;
    int cells[3], steps;
    uint64_t checksum;
};
static const struct size sizes[] = {
    {'S', {32, 32, 32}, 64, UINT64_C(0x34e9cc723a9470f8)},
    {'W', {64, 64, 64}, 256, UINT64_C(0xc86a79030ca2598f)},
    {'A', {128, 128, 128}, 512, UINT64_C(0xfe63c988b57961a7)},
    /* Not 1024 steps: where the hill has passed, cells get so small that some processors compute 40 times slower. */
    {'B', {256, 256, 256}, 256, UINT64_C(0x596ba2bf0fd9c4de)},
};

static struct size size;
static int split[3] = {1, 1, 1}, n[3], first[3], lower[3], upper[3];
static double *cells, *next, *face_out[3], *face_in[3]; /* cells: [x][y][z] with one lower layer around. */
static double pack_s, send_s, wait_s, compute_s;

static size_t at(int x, int y, int z)
{
    return ((size_t)x * (size_t)(n[1] + 1) + (size_t)y) * (size_t)(n[2] + 1) + (size_t)z;
}

/* Splits the longest dimension of the cells by each prime factor of the number of ranks, largest factor first. */
static void choose_split(void)
{
    for (int rest = ranks; rest > 1;) {
        int factor = rest;
        for (int divisor = 2; divisor * divisor <= factor; divisor++)
            while (factor % divisor == 0 && factor > divisor)
                factor /= divisor;
        int longest = 0;
        for (int dim = 1; dim < 3; dim++)
            if (size.cells[dim] / split[dim] > size.cells[longest] / split[longest])
                longest = dim;
        split[longest] *= factor;
        rest /= factor;
    }
}

static void parse(int argc, char **argv)
{
    char end;
    int *c = size.cells;
    if (argc < 2 || argc > 3)
        refuse(USAGE);
    for (const struct size *known = sizes; known < sizes + sizeof sizes / sizeof *sizes; known++)
        if (argv[1][0] == known->class && !argv[1][1])
            size = *known;
    if (!size.class && sscanf(argv[1], "%dx%dx%dx%d%c", c, c + 1, c + 2, &size.steps, &end) != 4)
        refuse(USAGE);
    if (!size.class)
        size.class = '-';
    set_class(size.class);
    if (argc == 2)
        choose_split();
    else if (sscanf(argv[2], "%dx%dx%d%c", split, split + 1, split + 2, &end) != 3)
        refuse(USAGE);
    for (int dim = 0; dim < 3; dim++)
        if (c[dim] < 1 || c[dim] > 4096 || size.steps < 1 || split[dim] < 1 || split[dim] > c[dim])
            refuse("each dimension has 1 to 4096 cells, and at least one for each rank of its split");
    if ((int64_t)split[0] * split[1] * split[2] != ranks)
        refuse("%dx%dx%d is not a split for %d ranks", split[0], split[1], split[2], ranks);
}

static void prepare(void)
{
    int place[3] = {rank / split[2] / split[1], rank / split[2] % split[1], rank % split[2]};
    int step[3] = {split[1] * split[2], split[2], 1};
    for (int dim = 0; dim < 3; dim++) {
        first[dim] = part_start(size.cells[dim], place[dim], split[dim]);
        n[dim] = part_start(size.cells[dim], place[dim] + 1, split[dim]) - first[dim];
        lower[dim] = place[dim] > 0 ? rank - step[dim] : MPI_PROC_NULL;
        upper[dim] = place[dim] + 1 < split[dim] ? rank + step[dim] : MPI_PROC_NULL;
    }
    for (int dim = 0; dim < 3; dim++) {
        size_t points = (size_t)n[(dim + 1) % 3] * (size_t)n[(dim + 2) % 3];
        face_out[dim] = allocate(points, sizeof(double));
        face_in[dim] = allocate(points, sizeof(double));
    }
    cells = allocate(at(n[0] + 1, 0, 0), sizeof(double));
    next = allocate(at(n[0] + 1, 0, 0), sizeof(double));
}

/* Copies the layer at `position` of a dimension to or from the face; returns its number of cells. */
static int copy_face(int dim, int position, double *face, bool to_face)
{
    int from[3] = {1, 1, 1}, end[3] = {n[0] + 1, n[1] + 1, n[2] + 1}, count = 0;
    from[dim] = position;
    end[dim] = position + 1;
    for (int x = from[0]; x < end[0]; x++)
        for (int y = from[1]; y < end[1]; y++) {
            double *row = cells + at(x, y, from[2]), *part = face + count;
            for (int z = 0; z < end[2] - from[2]; z++)
                *(to_face ? part + z : row + z) = *(to_face ? row + z : part + z);
            count += end[2] - from[2];
        }
    return count;
}

/* Sends upper faces and receives lower ones. There is no inflow at the borders of the cube: those layers stay zero. */
static void exchange(void)
{
    MPI_Request requests[6];
    double begun = now();
    int counts[3];
    for (int dim = 0; dim < 3; dim++)
        counts[dim] = upper[dim] == MPI_PROC_NULL ? n[(dim + 1) % 3] * n[(dim + 2) % 3]
                                                  : copy_face(dim, n[dim], face_out[dim], true);
    double packed = now();
    for (int dim = 0; dim < 3; dim++)
        MPI_Irecv(face_in[dim], counts[dim], MPI_DOUBLE, lower[dim], dim, MPI_COMM_WORLD, &requests[dim]);
    for (int dim = 0; dim < 3; dim++)
        MPI_Isend(face_out[dim], counts[dim], MPI_DOUBLE, upper[dim], dim, MPI_COMM_WORLD, &requests[3 + dim]);
    double sent = now();
    MPI_Waitall(6, requests, MPI_STATUSES_IGNORE);
    double received = now();
    for (int dim = 0; dim < 3; dim++)
        if (lower[dim] != MPI_PROC_NULL)
            copy_face(dim, 0, face_in[dim], false);
    send_s += sent - packed;
    wait_s += received - sent;
    pack_s += packed - begun + now() - received;
}

static void compute(const double courant[3])
{
    double begun = now();
    double cx = courant[0], cy = courant[1], cz = courant[2];
#pragma omp parallel for
    for (int x = 1; x <= n[0]; x++)
        for (int y = 1; y <= n[1]; y++) {
            const double *u = cells + at(x, y, 0), *ux = cells + at(x - 1, y, 0), *uy = cells + at(x, y - 1, 0);
            double *to = next + at(x, y, 0);
            for (int z = 1; z <= n[2]; z++)
                to[z] = PERTURBED(u[z] - cx * (u[z] - ux[z]) - cy * (u[z] - uy[z]) - cz * (u[z] - u[z - 1]));
        }
    double *swap = cells;
    cells = next;
    next = swap;
    compute_s += now() - begun;
}

static void advance(int steps, const double courant[3])
{
    for (int step = 0; step < steps; step++) {
        exchange();
        compute(courant);
    }
}

/* Mixes 64 bits (the finalizer of MurmurHash3). */
static uint64_t mixed(uint64_t x)
{
    x = (x ^ x >> 33) * UINT64_C(0xff51afd7ed558ccd);
    x = (x ^ x >> 33) * UINT64_C(0xc4ceb9fe1a85ec53);
    return x ^ x >> 33;
}

/* A number for each cell of the cube, independent of the split. */
static uint64_t number(int x, int y, int z)
{
    return ((uint64_t)x * (uint64_t)size.cells[1] + (uint64_t)y) * (uint64_t)size.cells[2] + (uint64_t)z;
}

/* Small integers for shifts(), on which all operations are exact. */
static double pattern(int x, int y, int z)
{
    return x < 0 || y < 0 || z < 0 ? 0 : (double)(mixed(number(x, y, z)) >> 54);
}

/* A hill, computed by operations that IEEE 754 rounds identically on every machine. */
static double hill(int x, int y, int z)
{
    int at_cell[3] = {x, y, z};
    double height = 1;
    for (int dim = 0; dim < 3; dim++) {
        double position = (at_cell[dim] + 0.5) / size.cells[dim];
        height *= 4 * position * (1 - position);
    }
    return height;
}

static void fill(double (*value)(int, int, int))
{
    for (int x = 1; x <= n[0]; x++)
        for (int y = 1; y <= n[1]; y++)
            for (int z = 1; z <= n[2]; z++)
                cells[at(x, y, z)] = value(first[0] + x - 1, first[1] + y - 1, first[2] + z - 1);
}

/* With a Courant number of 1 in one dimension, each step shifts all cells by exactly one. */
static bool shifts(int dim)
{
    double courant[3] = {dim == 0, dim == 1, dim == 2};
    int by[3] = {SHIFT_STEPS * (dim == 0), SHIFT_STEPS * (dim == 1), SHIFT_STEPS * (dim == 2)}, wrong = 0;
    fill(pattern);
    advance(SHIFT_STEPS, courant);
    for (int x = 1; x <= n[0]; x++)
        for (int y = 1; y <= n[1]; y++)
            for (int z = 1; z <= n[2]; z++)
                wrong += cells[at(x, y, z)]
                         != pattern(first[0] + x - 1 - by[0], first[1] + y - 1 - by[1], first[2] + z - 1 - by[2]);
    if (wrong)
        fprintf(stderr, "ADVECT: rank %d: %d cells are not what a shift in dimension %d gives\n", rank, wrong, dim);
    return !wrong;
}

/* The sum of all cells' bits, each mixed with its position: the same for every order of summation. */
static uint64_t checksum(void)
{
    uint64_t total = 0;
    for (int x = 1; x <= n[0]; x++)
        for (int y = 1; y <= n[1]; y++)
            for (int z = 1; z <= n[2]; z++) {
                uint64_t bits;
                memcpy(&bits, &cells[at(x, y, z)], sizeof bits);
                total += mixed(bits ^ mixed(number(first[0] + x - 1, first[1] + y - 1, first[2] + z - 1)));
            }
    MPI_Allreduce(MPI_IN_PLACE, &total, 1, MPI_UINT64_T, MPI_SUM, MPI_COMM_WORLD);
    return total;
}

int main(int argc, char **argv)
{
    static const double courant[3] = {0.3, 0.2, 0.4};
    join_ranks(argc, argv, "ADVECT");
    parse(argc, argv);
    prepare();
    bool verified = shifts(0) & shifts(1) & shifts(2); /* Also touches all memory before the measurement. */
    fill(hill);
    pack_s = send_s = wait_s = compute_s = 0;

    double begun = start();
    advance(size.steps, courant);
    double seconds = now() - begun;

    uint64_t got = checksum();
    if (size.class != '-' && got != size.checksum) {
        verified = false;
        if (rank == 0)
            fprintf(stderr, "ADVECT class %c: the checksum is %016llx, not %016llx\n", size.class,
                    (unsigned long long)got, (unsigned long long)size.checksum);
    }
    double times[4] = {pack_s, compute_s, send_s, wait_s};
    char more[400];
    sum(times, 4);
    snprintf(more, sizeof more,
             ", \"split\": \"%dx%dx%d\", \"checksum\": \"%016llx\", \"pack_s\": %.6f, \"compute_s\": %.6f, "
             "\"send_s\": %.6f, \"wait_s\": %.6f",
             split[0], split[1], split[2], (unsigned long long)got, times[0] / ranks, times[1] / ranks,
             times[2] / ranks, times[3] / ranks);
    return report(seconds, 9.0 * size.cells[0] * size.cells[1] * size.cells[2] * size.steps, verified, more);
}
