/* See cfd.h. */
#include "cfd.h"

#include <math.h>
#include <string.h>

struct cfd cfd;

/* Coefficients of the exact solution: by component, of 1, x, y, z, x^2, y^2, z^2, x^3 and so on. */
static const double exact_coefficients[5][13] = {
    {2, 0, 0, 4, 5, 3, 0.5, 0.02, 0.01, 0.03, 0.5, 0.4, 0.3},
    {1, 0, 0, 0, 1, 2, 3, 0.01, 0.03, 0.02, 0.4, 0.3, 0.5},
    {2, 2, 0, 0, 0, 2, 3, 0.04, 0.03, 0.05, 0.3, 0.5, 0.4},
    {2, 2, 0, 0, 0, 2, 3, 0.03, 0.05, 0.04, 0.2, 0.1, 0.3},
    {5, 4, 3, 2, 0.1, 0.4, 0.3, 0.05, 0.04, 0.03, 0.1, 0.3, 0.2},
};

static double exact(int component, double x, double y, double z)
{
    const double *c = exact_coefficients[component];
    return c[0] + x * (c[1] + x * (c[4] + x * (c[7] + x * c[10]))) + y * (c[2] + y * (c[5] + y * (c[8] + y * c[11])))
           + z * (c[3] + z * (c[6] + z * (c[9] + z * c[12])));
}

static double position(int k)
{
    return (double)k / (cfd.n - 1);
}

/* Interpolates between opposite faces in each dimension, and blends the three. */
static double blended(int component, double x, double y, double z)
{
    double px = (1 - x) * exact(component, 0, y, z) + x * exact(component, 1, y, z);
    double py = (1 - y) * exact(component, x, 0, z) + y * exact(component, x, 1, z);
    double pz = (1 - z) * exact(component, x, y, 0) + z * exact(component, x, y, 1);
    return px + py + pz - px * py - px * pz - py * pz + px * py * pz;
}

static bool inner(int k)
{
    return k > 0 && k < cfd.n - 1;
}

/* Sets u to the exact solution on the boundary, and to `value` elsewhere. */
static void fill(double (*value)(int, double, double, double))
{
#pragma omp parallel for
    for (int z = 0; z < cfd.n; z++)
        for (int y = 0; y < cfd.rows; y++)
            for (int x = 0; x < cfd.n; x++) {
                int row = cfd.first_row + y;
                for (int m = 0; m < 5; m++)
                    cfd.u[cfd_at(z, y, x)][m] = (inner(x) && inner(row) && inner(z) ? value : exact)(
                        m, position(x), position(row), position(z));
            }
}

double cfd_time(void (*run)(int steps), int steps)
{
    run(1);
    double begun = start();
    run(steps);
    return now() - begun;
}

void cfd_initialize(void)
{
    fill(blended);
}

/* Sends the two last rows of u on one side and receives as many on the other. */
static void exchange(int from_row, int to, int to_row, int from)
{
    static state *out, *in;
    size_t row = (size_t)cfd.n, count = 2 * row * row;
    if (!out) {
        out = allocate(count, sizeof *out);
        in = allocate(count, sizeof *in);
    }
    for (int z = 0; z < cfd.n; z++)
        memcpy(out + (size_t)z * 2 * row, cfd.u + cfd_at(z, from_row, 0), 2 * row * sizeof *out);
    MPI_Sendrecv(out, (int)count * 5, MPI_DOUBLE, to, 0, in, (int)count * 5, MPI_DOUBLE, from, 0, MPI_COMM_WORLD,
                 MPI_STATUS_IGNORE);
    for (int z = 0; z < cfd.n && from != MPI_PROC_NULL; z++)
        memcpy(cfd.u + cfd_at(z, to_row, 0), in + (size_t)z * 2 * row, 2 * row * sizeof *in);
}

/* The quantities that are differenced in one dimension: convective fluxes, times 1 / (2 h), and diffusing quantities,
 * times 1 / h^2. */
struct flux {
    state convective, diffusive;
};

static void make_flux(const double *u, int dim, struct flux *flux)
{
    int normal = 1 + dim;
    double inverse = 1 / u[0], velocity = u[normal] * inverse;
    double kinetic = 0.5 * (u[1] * u[1] + u[2] * u[2] + u[3] * u[3]) * inverse, pressure = C2 * (u[4] - kinetic);
    double viscosity = VISCOSITY * cfd.t1, damped = cfd_damping[dim] * cfd.t1;
    flux->convective[0] = cfd.t2 * u[normal];
    flux->diffusive[0] = damped * u[0];
    for (int m = 1; m < 4; m++) {
        flux->convective[m] = cfd.t2 * (u[m] * velocity + (m == normal ? pressure : 0));
        flux->diffusive[m] = damped * u[m] + viscosity * (m == normal ? 4.0 / 3 : 1) * u[m] * inverse;
    }
    flux->convective[4] = cfd.t2 * velocity * (u[4] + pressure);
    flux->diffusive[4] = damped * u[4]
                         + viscosity * ((1 - CONDUCTION) * kinetic * inverse + velocity * velocity / 6
                                        + CONDUCTION * u[4] * inverse);
}

static void make_fluxes(const state *u, int dim, struct flux *fluxes)
{
    for (int x = 0; x < cfd.n; x++)
        make_flux(u[x], dim, &fluxes[x]);
}

/* Adds differences of fluxes to the inner points of a row. */
static void add_differences(const struct flux *lower, const struct flux *own, const struct flux *upper, state *rhs)
{
    for (int x = 1; x < cfd.n - 1; x++)
        for (int m = 0; m < 5; m++)
            rhs[x][m] += lower[x].convective[m] - upper[x].convective[m] + lower[x].diffusive[m]
                         - 2 * own[x].diffusive[m] + upper[x].diffusive[m];
}

/* Subtracts fourth-order dissipation from `count` points at position k of their lines; one-sided at the boundary. */
static void dissipate(const state *u, size_t stride, int k, int count, state *rhs)
{
    int last = cfd.n - 2;
    double far_low = k > 2, low = k > 1 ? -4 : 0, high = k < last ? -4 : 0, far_high = k < last - 1;
    double own = k == 1 || k == last ? 5 : 6;
    const double *center = u[0], *a = far_low ? u[-2 * (ptrdiff_t)stride] : center;
    const double *b = low ? u[-(ptrdiff_t)stride] : center, *c = high ? u[stride] : center;
    const double *d = far_high ? u[2 * stride] : center;
    double *to = rhs[0];
    for (int m = 0; m < 5 * count; m++)
        to[m] -= DISSIPATION * (far_low * a[m] + low * b[m] + own * center[m] + high * c[m] + far_high * d[m]);
}

/* Adds the differences in x of one row. */
static void add_x(int z, int y)
{
    struct flux space[CFD_MAX + 1], *fluxes = space + 1;
    const state *u = cfd.u + cfd_at(z, y, 0);
    state *rhs = cfd.rhs + cfd_at(z, y, 0);
    make_fluxes(u, 0, fluxes);
    add_differences(fluxes - 1, fluxes, fluxes + 1, rhs);
    for (int x = 1; x < cfd.n - 1; x++)
        dissipate(u + x, 1, x, 1, rhs + x);
}

/* Adds the differences in y or z of `count` rows; the first row is at index `row` and position `first` of its lines. */
static void add_rows(int dim, size_t row, size_t stride, int first, int count)
{
    struct flux fluxes[3][CFD_MAX];
    make_fluxes(cfd.u + row - stride, dim, fluxes[0]);
    make_fluxes(cfd.u + row, dim, fluxes[1]);
    for (int k = 0; k < count; k++, row += stride) {
        make_fluxes(cfd.u + row + stride, dim, fluxes[(k + 2) % 3]);
        add_differences(fluxes[k % 3], fluxes[(k + 1) % 3], fluxes[(k + 2) % 3], cfd.rhs + row);
        dissipate(cfd.u + row + 1, stride, first + k, cfd.n - 2, cfd.rhs + row + 1);
    }
}

void cfd_rhs(void)
{
    exchange(cfd.rows - 2, cfd.above, -2, cfd.below);
    exchange(0, cfd.below, cfd.rows, cfd.above);
    size_t plane = cfd_at(1, 0, 0) - cfd_at(0, 0, 0);
    int last = cfd.n - 1;
#pragma omp parallel
    {
#pragma omp for
        for (int z = 0; z <= last; z++) {
            memcpy(cfd.rhs + cfd_at(z, -2, 0), cfd.forcing + cfd_at(z, -2, 0), plane * sizeof *cfd.rhs);
            if (z == 0 || z == last)
                continue;
            for (int y = cfd.begin; y < cfd.end; y++)
                add_x(z, y);
            add_rows(1, cfd_at(z, cfd.begin, 0), (size_t)cfd.n, cfd.first_row + cfd.begin, cfd.end - cfd.begin);
        }
#pragma omp for
        for (int y = cfd.begin; y < cfd.end; y++)
            add_rows(2, cfd_at(1, y, 0), plane, 1, cfd.n - 2);
    }
}

void cfd_add(double factor)
{
#pragma omp parallel for
    for (int z = 1; z < cfd.n - 1; z++)
        for (size_t n = cfd_at(z, cfd.begin, 0); n < cfd_at(z, cfd.end, 0); n++)
            for (int m = 0; m < 5; m++)
                cfd.u[n][m] += factor * cfd.rhs[n][m];
}

const struct cfd_size *cfd_begin(int argc, char **argv, const char *kernel, const struct cfd_size sizes[3])
{
    char class = begin(argc, argv, kernel);
    const struct cfd_size *size = sizes;
    while (size->class != class)
        size++;
    cfd.n = size->n;
    if (ranks > cfd.n / 2)
        refuse("at most %d ranks for class %c: each has two rows or more", cfd.n / 2, class);
    cfd.dt = size->dt;
    cfd.t1 = (cfd.n - 1.0) * (cfd.n - 1.0);
    cfd.t2 = 0.5 * (cfd.n - 1);
    cfd.first_row = part_start(cfd.n, rank, ranks);
    cfd.rows = part_start(cfd.n, rank + 1, ranks) - cfd.first_row;
    cfd.begin = rank == 0;
    cfd.end = cfd.rows - (rank == ranks - 1);
    cfd.below = rank > 0 ? rank - 1 : MPI_PROC_NULL;
    cfd.above = rank < ranks - 1 ? rank + 1 : MPI_PROC_NULL;
    size_t points = cfd_at(cfd.n, -2, 0);
    cfd.u = allocate(points, sizeof *cfd.u);
    cfd.rhs = allocate(points, sizeof *cfd.rhs);
    cfd.forcing = allocate(points, sizeof *cfd.forcing);
    fill(exact);
    cfd_rhs();
    for (size_t n = 0; n < points; n++)
        for (int m = 0; m < 5; m++)
            cfd.forcing[n][m] = PERTURBED(-cfd.rhs[n][m]);
    return size;
}

/* The root mean square of each component. */
static void norm(state squares)
{
    sum(squares, 5);
    for (int m = 0; m < 5; m++)
        squares[m] = sqrt(squares[m] / pow(cfd.n - 2, 3));
}

bool cfd_verified(const struct cfd_size *size)
{
    static const char *const names[5] = {"density", "momentum in x", "momentum in y", "momentum in z", "energy"};
    state residual = {0}, error = {0};
    bool verified = true;
    for (int z = 1; z < cfd.n - 1; z++)
        for (int y = cfd.begin; y < cfd.end; y++)
            for (int x = 1; x < cfd.n - 1; x++)
                for (int m = 0; m < 5; m++) {
                    double right = exact(m, position(x), position(cfd.first_row + y), position(z));
                    double off = cfd.u[cfd_at(z, y, x)][m] - right, rest = cfd.rhs[cfd_at(z, y, x)][m];
                    error[m] += off * off;
                    residual[m] += rest * rest;
                }
    norm(residual);
    norm(error);
    for (int m = 0; m < 5; m++) {
        char what[64] = "residual of ";
        verified &= agrees(strcat(what, names[m]), residual[m], size->residual[m], 1e-8);
        verified &= agrees(strcat(strcpy(what, "error of "), names[m]), error[m], size->error[m], 1e-8);
    }
    return verified;
}
