/* FT, fast Fourier transforms (RNR-94-007, section 2.2): a diffusion equation solved in the frequency domain. Ranks
 * share planes; each three-dimensional transform exchanges all data between all ranks, in few messages of maximum size.
 * */
#include "common.h"

#include <complex.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#define ITERATIONS 6
#define ALPHA 1e-6
#define LINES 16 /* Lines transformed side by side, so that processors can use vector instructions. */
#define LENGTH_MAX 256

/* Checksums of NPB 3.x, ft. */
struct size {
    char class;
    int nx, ny, nz;
    double complex checksums[ITERATIONS];
};
static const struct size sizes[] = {
    {'S', 64, 64, 64,
     {5.546087004964e+2 + 4.845363331978e+2 * I, 5.546385409189e+2 + 4.865304269511e+2 * I,
      5.546148406171e+2 + 4.883910722336e+2 * I, 5.545423607415e+2 + 4.901273169046e+2 * I,
      5.544255039624e+2 + 4.917475857993e+2 * I, 5.542683411902e+2 + 4.932597244941e+2 * I}},
    {'W', 128, 128, 32,
     {5.673612178944e+2 + 5.293246849175e+2 * I, 5.631436885271e+2 + 5.282149986629e+2 * I,
      5.594024089970e+2 + 5.270996558037e+2 * I, 5.560698047020e+2 + 5.260027904925e+2 * I,
      5.530898991250e+2 + 5.249400845633e+2 * I, 5.504159734538e+2 + 5.239212247086e+2 * I}},
    {'A', 256, 256, 128,
     {5.046735008193e+2 + 5.114047905510e+2 * I, 5.059412319734e+2 + 5.098809666433e+2 * I,
      5.069376896287e+2 + 5.098144042213e+2 * I, 5.077892868474e+2 + 5.101336130759e+2 * I,
      5.085233095391e+2 + 5.104914655194e+2 * I, 5.091487099959e+2 + 5.107917842803e+2 * I}},
};

static const struct size *size;
static int nx, ny, nz, own_y, own_z; /* own_y and own_z: planes of this rank in frequency and in space. */
static size_t own;                   /* This rank's number of points, in either domain. */
/* In space: [z][y][x], with this rank's z. In frequency: [y][x][z], with this rank's y. */
static double complex *space, *frequency, *evolved, *packed;
static double *decay;
static double complex roots[LENGTH_MAX]; /* exp(-2 pi i k / LENGTH_MAX) */

/* Transforms LINES lines of n points (Stockham's algorithm); `a` and `b` are [n][LINES]. Returns the one that holds the
 * result. */
static double complex *transform_lines(double complex *a, double complex *b, int n, bool inverse)
{
    for (int half = n / 2, stride = LINES; half >= 1; half /= 2, stride *= 2) {
        for (int k = 0; k < half; k++) {
            double complex root = roots[k * (LENGTH_MAX / 2 / half)];
            root = inverse ? conj(root) : root;
            const double complex *in = a + k * stride, *in2 = a + (k + half) * stride;
            double complex *out = b + 2 * k * stride, *out2 = out + stride;
            for (int m = 0; m < stride; m++) {
                double complex low = in[m], high = in2[m];
                out[m] = low + high;
                out2[m] = (low - high) * root;
            }
        }
        double complex *swap = a;
        a = b;
        b = swap;
    }
    return a;
}

/* Transforms `planes` planes of `count` lines: line l of a plane begins at l * next, its points are `step` apart. */
static void transform(double complex *data, int planes, int count, int next, int n, int step, bool inverse)
{
    size_t plane_points = (size_t)count * (size_t)n;
#pragma omp parallel for
    for (int plane = 0; plane < planes; plane++) {
        double complex a[LENGTH_MAX * LINES], b[LENGTH_MAX * LINES];
        for (int line = 0; line < count; line += LINES) {
            double complex *first = data + (size_t)plane * plane_points + (size_t)line * (size_t)next;
            for (int k = 0; k < n; k++)
                for (int l = 0; l < LINES; l++)
                    a[k * LINES + l] = first[(size_t)l * (size_t)next + (size_t)k * (size_t)step];
            const double complex *done = transform_lines(a, b, n, inverse);
            for (int k = 0; k < n; k++)
                for (int l = 0; l < LINES; l++)
                    first[(size_t)l * (size_t)next + (size_t)k * (size_t)step] = done[k * LINES + l];
        }
    }
}

/* The number of values that this rank exchanges with each other rank. */
static int share(void)
{
    return 2 * (int)(own / (size_t)ranks); /* Counted in doubles: a complex number has two. */
}

/* Copies space to or from the blocks that ranks exchange: [rank][y][x][z], with one rank's y and another's z. */
static void pack(bool into)
{
#pragma omp parallel for
    for (int y = 0; y < ny; y++)
        for (int x = 0; x < nx; x++)
            for (int z = 0; z < own_z; z++) {
                double complex *there = packed + ((size_t)y * (size_t)nx + (size_t)x) * (size_t)own_z + z;
                double complex *here = space + ((size_t)z * (size_t)ny + (size_t)y) * (size_t)nx + x;
                *(into ? there : here) = *(into ? here : there);
            }
}

/* Copies blocks, each with another rank's z, to or from complete lines. */
static void join(double complex *blocks, double complex *lines, bool into_lines)
{
    size_t bytes = sizeof *lines * (size_t)own_z;
    int columns = own_y * nx;
#pragma omp parallel for
    for (int column = 0; column < columns; column++)
        for (int other = 0; other < ranks; other++) {
            double complex *line = lines + (size_t)column * (size_t)nz + other * own_z;
            double complex *block = blocks + ((size_t)other * (size_t)columns + (size_t)column) * (size_t)own_z;
            memcpy(into_lines ? line : block, into_lines ? block : line, bytes);
        }
}

static void to_frequency(void)
{
    transform(space, own_z, ny, nx, nx, 1, false);
    transform(space, own_z, nx, 1, ny, nx, false);
    pack(true);
    MPI_Alltoall(packed, share(), MPI_DOUBLE, evolved, share(), MPI_DOUBLE, MPI_COMM_WORLD);
    join(evolved, frequency, true);
    transform(frequency, own_y, nx, nz, nz, 1, false);
}

/* Transforms `evolved` back to space. */
static void to_space(void)
{
    transform(evolved, own_y, nx, nz, nz, 1, true);
    join(space, evolved, false);
    MPI_Alltoall(space, share(), MPI_DOUBLE, packed, share(), MPI_DOUBLE, MPI_COMM_WORLD);
    pack(false);
    transform(space, own_z, nx, 1, ny, nx, true);
    transform(space, own_z, ny, nx, nx, 1, true);
}

/* Random numbers, x fastest, real parts before imaginary ones. */
static void make_values(void)
{
    size_t plane = (size_t)nx * (size_t)ny;
#pragma omp parallel for
    for (int z = 0; z < own_z; z++) {
        uint64_t state = random_jump(RANDOM_SEED, 2 * plane * (uint64_t)(rank * own_z + z));
        for (size_t n = 0; n < plane; n++) {
            double real = random_next(&state);
            space[(size_t)z * plane + n] = PERTURBED(real) + random_next(&state) * I;
        }
    }
}

static int wrapped(int k, int n)
{
    return k >= n / 2 ? k - n : k;
}

/* The factor that a time step applies to each frequency: exp(-4 alpha pi^2 k^2). */
static void make_decay(void)
{
    double factor = -4 * ALPHA * acos(-1) * acos(-1);
#pragma omp parallel for
    for (int y = 0; y < own_y; y++)
        for (int x = 0; x < nx; x++)
            for (int z = 0; z < nz; z++) {
                int kx = wrapped(x, nx), ky = wrapped(rank * own_y + y, ny), kz = wrapped(z, nz);
                decay[((size_t)y * (size_t)nx + (size_t)x) * (size_t)nz + (size_t)z] =
                    exp(factor * (kx * kx + ky * ky + kz * kz));
            }
}

static void evolve(void)
{
#pragma omp parallel for
    for (size_t n = 0; n < own; n++)
        evolved[n] = frequency[n] *= decay[n];
}

/* The mean of 1024 points distributed over the cube. */
static double complex checksum(void)
{
    double parts[2] = {0};
    for (int n = 1; n <= 1024; n++) {
        int x = n % nx, y = 3 * n % ny, z = 5 * n % nz - rank * own_z;
        if (z < 0 || z >= own_z)
            continue;
        double complex value = space[((size_t)z * (size_t)ny + (size_t)y) * (size_t)nx + (size_t)x];
        parts[0] += creal(value);
        parts[1] += cimag(value);
    }
    sum(parts, 2);
    return (parts[0] + parts[1] * I) / ((double)nx * ny * nz);
}

static void run(double complex *checksums, int iterations)
{
    make_decay();
    make_values();
    to_frequency();
    for (int iteration = 0; iteration < iterations; iteration++) {
        evolve();
        to_space();
        checksums[iteration] = checksum();
    }
}

static void prepare(void)
{
    nx = size->nx;
    ny = size->ny;
    nz = size->nz;
    if (ny % ranks || nz % ranks)
        refuse("the number of ranks must be a power of two up to %d, not %d", ny < nz ? ny : nz, ranks);
    own_y = ny / ranks;
    own_z = nz / ranks;
    own = (size_t)nx * (size_t)ny * (size_t)own_z;
    space = allocate(own, sizeof *space);
    frequency = allocate(own, sizeof *space);
    evolved = allocate(own, sizeof *space);
    packed = allocate(own, sizeof *space);
    decay = allocate(own, sizeof *decay);
    for (int k = 0; k < LENGTH_MAX; k++)
        roots[k] = cexp(-2 * acos(-1) * k / LENGTH_MAX * I);
}

int main(int argc, char **argv)
{
    char class = begin(argc, argv, "FT");
    for (size = sizes; size->class != class; size++)
        ;
    prepare();
    double complex checksums[ITERATIONS];
    run(checksums, 1); /* Touches all memory before the measurement. */

    double begun = start();
    run(checksums, ITERATIONS);
    double seconds = now() - begun;
    bool verified = true;
    for (int n = 0; n < ITERATIONS; n++)
        verified &= agrees("a checksum's real part", creal(checksums[n]), creal(size->checksums[n]), 1e-12)
                    & agrees("a checksum's imaginary part", cimag(checksums[n]), cimag(size->checksums[n]), 1e-12);
    double total = (double)nx * ny * nz;
    double operations =
        total * (14.8157 + 7.19641 * log(total) + (5.23518 + 7.21113 * log(total)) * ITERATIONS);
    return report(seconds, operations, verified, "");
}
