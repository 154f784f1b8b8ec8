/* LU, symmetric successive over-relaxation (RNR-94-007, section 3): the equations of cfd.h; each time step sweeps
 * through all points, first from the lowest corner to the highest and then back. A point depends on three neighbours,
 * so rows of ranks (and threads) process planes as a pipeline: many small messages, each awaited. */
#include "cfd.h"

#include <sched.h>
#include <stdatomic.h>
#include <string.h>

#ifdef _OPENMP
#include <omp.h>
#endif

#define RELAXATION 1.2
#define THREADS_MAX 64

/* Values of NPB 3.x, lu. */
static const struct cfd_size sizes[] = {
    {'S', 12, 50, 0.5,
     {1.6196343210976702e-2, 2.1976745164821318e-3, 1.5179927653399185e-3, 1.5029584435994323e-3,
      3.4264073155896461e-2},
     {6.4223319957960924e-4, 8.4144342047347926e-5, 5.8588269616485186e-5, 5.8474222595157350e-5,
      1.3103347914111294e-3}, 7.8418928865937083},
    {'W', 33, 300, 1.5e-3,
     {0.1236511638192e+2, 0.1317228477799e+1, 0.2550120713095e+1, 0.2326187750252e+1, 0.2826799444189e+2},
     {0.4867877144216, 0.5064652880982e-1, 0.9281818101960e-1, 0.8570126542733e-1, 0.1084277417792e+1},
     0.1161399311023e+2},
    {'A', 64, 250, 2.0,
     {7.7902107606689367e+2, 6.3402765259692870e+1, 1.9499249727292479e+2, 1.7845301160418537e+2,
      1.8384760349464247e+3},
     {2.9964085685471943e+1, 2.8194576365003349, 7.3473412698774742, 6.7139225687777051, 7.0715315688392578e+1},
     2.6030925604886277e+1},
};

/* Planes that each thread has finished in this sweep, each on its own cache line. */
static struct {
    _Alignas(64) atomic_int planes;
} progress[THREADS_MAX];

/* Relaxes one point: solves for the rest that its three neighbours on the given side leave. Going up (side -1), the
 * result replaces the right-hand side; going down (side 1), it is subtracted. */
static void relax(size_t n, int side)
{
    ptrdiff_t plane = (ptrdiff_t)(cfd_at(1, 0, 0) - cfd_at(0, 0, 0)), strides[3] = {1, cfd.n, plane};
    double own[5][5] = {{0}}, neighbor[5][5];
    state left = {0}, *rhs = cfd.rhs + n;
    for (int m = 0; m < 5; m++) {
        own[m][m] = 1;
        left[m] = side < 0 ? (*rhs)[m] : 0;
    }
    for (int dim = 0; dim < 3; dim++) {
        const double *u = cfd.u[n + (size_t)(side * strides[dim])], *v = cfd.rhs[n + (size_t)(side * strides[dim])];
        cfd_add_own_block(cfd.u[n], dim, own);
        cfd_neighbor_block(u, dim, side, neighbor);
        for (int row = 0; row < 5; row++)
            for (int m = 0; m < 5; m++)
                left[row] += side * RELAXATION * neighbor[row][m] * v[m];
    }
    cfd_solve_block(own, &left, 1);
    for (int m = 0; m < 5; m++)
        (*rhs)[m] = side < 0 ? left[m] : (*rhs)[m] - left[m];
}

/* Relaxes the rows from..end of a plane, in the order of the sweep. */
static void relax_rows(int z, int from, int end, int side)
{
    for (int row = 0; row < end - from; row++)
        for (int step = 1; step < cfd.n - 1; step++)
            relax(side < 0 ? cfd_at(z, from + row, step) : cfd_at(z, end - 1 - row, cfd.n - 1 - step), side);
}

static void pass(bool sending, int z, int row, int other)
{
    double *numbers = cfd.rhs[cfd_at(z, row, 0)];
    if (sending)
        MPI_Send(numbers, 5 * cfd.n, MPI_DOUBLE, other, 0, MPI_COMM_WORLD);
    else
        MPI_Recv(numbers, 5 * cfd.n, MPI_DOUBLE, other, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
}

/* One thread's part of a sweep. The first thread waits for the previous rank, each other one for the previous thread.
 * */
static void sweep_part(int side, int thread, int threads)
{
    int part = side < 0 ? thread : threads - 1 - thread, count = cfd.end - cfd.begin;
    int from = cfd.begin + part_start(count, part, threads), end = cfd.begin + part_start(count, part + 1, threads);
    for (int plane = 1; plane < cfd.n - 1; plane++) {
        int z = side < 0 ? plane : cfd.n - 1 - plane;
        if (thread == 0)
            pass(false, z, side < 0 ? -1 : cfd.rows, side < 0 ? cfd.below : cfd.above);
        else
            while (atomic_load_explicit(&progress[thread - 1].planes, memory_order_acquire) < plane)
                sched_yield();
        relax_rows(z, from, end, side);
        atomic_store_explicit(&progress[thread].planes, plane, memory_order_release);
        if (thread == threads - 1)
            pass(true, z, side < 0 ? cfd.rows - 1 : 0, side < 0 ? cfd.above : cfd.below);
    }
}

static void sweep(int side)
{
    for (int thread = 0; thread < THREADS_MAX; thread++)
        atomic_store(&progress[thread].planes, 0);
#ifdef _OPENMP
    int wanted = omp_get_max_threads() < THREADS_MAX ? omp_get_max_threads() : THREADS_MAX;
#pragma omp parallel num_threads(wanted)
    sweep_part(side, omp_get_thread_num(), omp_get_num_threads());
#else
    sweep_part(side, 0, 1);
#endif
}

static void run(int steps)
{
    cfd_initialize();
    cfd_rhs();
    for (int step = 0; step < steps; step++) {
#pragma omp parallel for
        for (size_t n = 0; n < cfd_at(cfd.n, -2, 0); n++)
            for (int m = 0; m < 5; m++)
                cfd.rhs[n][m] *= cfd.dt;
        sweep(-1);
        sweep(1);
        cfd_add(1 / (RELAXATION * (2 - RELAXATION)));
        cfd_rhs();
    }
}

/* The weight of a point on a side of `from`..`last` in the trapezoidal rule; 0 outside. */
static double weight(int k, int from, int last)
{
    return k < from || k > last ? 0 : k == from || k == last ? 1 : 2;
}

/* The integral of pressure over six inner planes. */
static double surface_integral(void)
{
    int last = cfd.n - 2;
    double total = 0;
    for (int z = 2; z <= last; z++)
        for (int y = cfd.begin; y < cfd.end; y++)
            for (int x = 1; x <= last; x++) {
                const double *u = cfd.u[cfd_at(z, y, x)];
                int row = cfd.first_row + y;
                double wx = weight(x, 1, last), wy = weight(row, 1, last - 1), wz = weight(z, 2, last);
                double planes = (z == 2 || z == last) * wx * wy + (row == 1 || row == last - 1) * wx * wz
                                + (x == 1 || x == last) * wy * wz;
                total += planes * C2 * (u[4] - 0.5 * (u[1] * u[1] + u[2] * u[2] + u[3] * u[3]) / u[0]);
            }
    sum(&total, 1);
    return 0.25 * total / ((cfd.n - 1.0) * (cfd.n - 1.0));
}

int main(int argc, char **argv)
{
    const struct cfd_size *size = cfd_begin(argc, argv, "LU", sizes);
    double seconds = cfd_time(run, size->steps), n = size->n;
    bool verified = cfd_verified(size) & agrees("surface integral", surface_integral(), size->integral, 1e-8);
    double operations = size->steps * (1984.77 * n * n * n - 10923.3 * n * n + 27770.9 * n - 144010);
    return report(seconds, operations, verified, "");
}
