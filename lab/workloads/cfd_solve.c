/* The implicit part of cfd.h: Jacobians of the differences, and lines of equations that cross ranks. */
#include "cfd.h"

#include <string.h>

#define REACH_MAX 2
#define COEFFICIENTS_MAX 25

/* The Jacobian of the convective fluxes in dimension `dim`, times `factor`. */
static void convective_block(const double *u, int dim, double factor, double block[5][5])
{
    int normal = 1 + dim;
    double inverse = 1 / u[0], velocity = u[normal] * inverse, energy = u[4] * inverse;
    double kinetic = 0.5 * (u[1] * u[1] + u[2] * u[2] + u[3] * u[3]) * inverse * inverse;
    memset(block, 0, 25 * sizeof(double));
    block[0][normal] = factor;
    for (int m = 1; m < 4; m++) {
        double other = u[m] * inverse;
        block[m][0] = -factor * other * velocity;
        block[m][m] += factor * velocity;
        block[m][normal] += factor * other;
        block[4][m] = -factor * C2 * other * velocity;
    }
    block[normal][0] += factor * C2 * kinetic;
    for (int m = 1; m < 4; m++)
        block[normal][m] -= factor * C2 * u[m] * inverse;
    block[normal][4] = factor * C2;
    block[4][0] = factor * velocity * (2 * C2 * kinetic - C1 * energy);
    block[4][normal] += factor * (C1 * energy - C2 * kinetic);
    block[4][4] = factor * C1 * velocity;
}

/* Adds the Jacobian of the diffusing quantities in dimension `dim`, times `factor`. */
static void add_diffusive_block(const double *u, int dim, double factor, double block[5][5])
{
    int normal = 1 + dim;
    double inverse = 1 / u[0], scale = factor * VISCOSITY * inverse, heat = CONDUCTION * scale, total = 0;
    for (int m = 1; m < 4; m++) {
        double velocity = u[m] * inverse, friction = (m == normal ? 4.0 / 3 : 1) * scale;
        block[m][0] -= friction * velocity;
        block[m][m] += friction;
        block[4][m] += (friction - heat) * velocity;
        total += (friction - heat) * velocity * velocity;
    }
    block[4][0] -= total + heat * u[4] * inverse;
    block[4][4] += heat;
    for (int m = 0; m < 5; m++)
        block[m][m] += factor * cfd_damping[dim];
}

void cfd_neighbor_block(const double *u, int dim, double side, double block[5][5])
{
    convective_block(u, dim, side * cfd.dt * cfd.t2, block);
    add_diffusive_block(u, dim, -cfd.dt * cfd.t1, block);
}

void cfd_add_own_block(const double *u, int dim, double block[5][5])
{
    add_diffusive_block(u, dim, 2 * cfd.dt * cfd.t1, block);
}

void cfd_solve_block(double block[5][5], double (*b)[5], int columns)
{
    for (int pivot = 0; pivot < 5; pivot++) {
        double inverse = 1 / block[pivot][pivot];
        for (int k = pivot + 1; k < 5; k++)
            block[pivot][k] *= inverse;
        for (int c = 0; c < columns; c++)
            b[c][pivot] *= inverse;
        for (int row = pivot + 1; row < 5; row++) {
            double factor = block[row][pivot];
            for (int k = pivot + 1; k < 5; k++)
                block[row][k] -= factor * block[pivot][k];
            for (int c = 0; c < columns; c++)
                b[c][row] -= factor * b[c][pivot];
        }
    }
    for (int pivot = 4; pivot > 0; pivot--)
        for (int row = 0; row < pivot; row++)
            for (int c = 0; c < columns; c++)
                b[c][row] -= block[row][pivot] * b[c][pivot];
}

/* Copies a line's right-hand sides from or to the field. */
static void gather(const struct cfd_line *line, state *rhs)
{
    for (int k = 0; k < line->count; k++)
        memcpy(rhs[k], cfd.rhs[line->at + (size_t)k * line->stride], sizeof *rhs);
}

static void scatter(const struct cfd_line *line, const state *rhs)
{
    for (int k = 0; k < line->count; k++)
        memcpy(cfd.rhs[line->at + (size_t)k * line->stride], rhs[k], sizeof *rhs);
}

/* Solves a line that belongs entirely to this rank. Next to it, on the boundary, solutions and coefficients are zero.
 * */
static void solve_line(const struct cfd_line *line, const struct cfd_solver *solver)
{
    double coefficients[(CFD_MAX + REACH_MAX) * COEFFICIENTS_MAX];
    state rhs[CFD_MAX + 2 * REACH_MAX] = {{0}};
    int before = solver->reach * solver->coefficients;
    memset(coefficients, 0, sizeof(double) * (size_t)before);
    gather(line, rhs + REACH_MAX);
    solver->eliminate(line, coefficients + before, rhs + REACH_MAX);
    solver->substitute(line, coefficients + before, rhs + REACH_MAX);
    scatter(line, (const state *)rhs + REACH_MAX);
}

/* The line in x at (z, y) = (a, b), in y at (z, x), or in z at (y, x). */
static struct cfd_line line_at(int dim, int a, int b)
{
    size_t row = (size_t)cfd.n, plane = cfd_at(1, 0, 0) - cfd_at(0, 0, 0);
    if (dim == 0)
        return (struct cfd_line){0, 1, cfd.n - 2, cfd_at(a, b, 1), 1};
    if (dim == 1)
        return (struct cfd_line){1, cfd.first_row + cfd.begin, cfd.end - cfd.begin, cfd_at(a, cfd.begin, b), row};
    return (struct cfd_line){2, 1, cfd.n - 2, cfd_at(1, a, b), plane};
}

/* Solves lines in y, which cross ranks. One message per plane of z carries the last points' numbers of all its lines.
 * */
static void solve_across(const struct cfd_solver *solver)
{
    static double *kept, *message;
    size_t lines = (size_t)(cfd.n - 2), reach = (size_t)solver->reach, width = (size_t)solver->coefficients;
    size_t line_width = ((size_t)cfd.rows + reach) * width, passed = reach * (width + 5);
    if (!kept) {
        kept = allocate(lines * lines * line_width, sizeof *kept);
        message = allocate(lines * passed, sizeof *message);
    }
    state space[CFD_MAX + 2 * REACH_MAX] = {{0}}, *rhs = space + REACH_MAX;
    for (int z = 1; z < cfd.n - 1; z++) {
        MPI_Recv(message, (int)(lines * passed), MPI_DOUBLE, cfd.below, 1, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
        for (int x = 1; x < cfd.n - 1; x++) {
            struct cfd_line line = line_at(1, z, x);
            double *part = message + (size_t)(x - 1) * passed;
            double *own = kept + ((size_t)(z - 1) * lines + (size_t)(x - 1)) * line_width;
            if (cfd.below == MPI_PROC_NULL) /* On the boundary, all numbers are zero. */
                memset(part, 0, passed * sizeof *part);
            memcpy(own, part, reach * width * sizeof *own);
            memcpy(rhs - reach, part + reach * width, reach * sizeof *rhs);
            gather(&line, rhs);
            solver->eliminate(&line, own + reach * width, rhs);
            scatter(&line, (const state *)rhs);
            memcpy(part, own + (size_t)line.count * width, reach * width * sizeof *own);
            memcpy(part + reach * width, rhs + line.count - reach, reach * sizeof *rhs);
        }
        MPI_Send(message, (int)(lines * passed), MPI_DOUBLE, cfd.above, 1, MPI_COMM_WORLD);
    }
    passed = reach * 5;
    for (int z = 1; z < cfd.n - 1; z++) {
        MPI_Recv(message, (int)(lines * passed), MPI_DOUBLE, cfd.above, 2, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
        for (int x = 1; x < cfd.n - 1; x++) {
            struct cfd_line line = line_at(1, z, x);
            double *part = message + (size_t)(x - 1) * passed;
            const double *own = kept + ((size_t)(z - 1) * lines + (size_t)(x - 1)) * line_width;
            if (cfd.above == MPI_PROC_NULL)
                memset(part, 0, passed * sizeof *part);
            gather(&line, rhs);
            memcpy(rhs + line.count, part, reach * sizeof *rhs);
            solver->substitute(&line, own + reach * width, rhs);
            scatter(&line, (const state *)rhs);
            memcpy(part, rhs, reach * sizeof *rhs);
        }
        MPI_Send(message, (int)(lines * passed), MPI_DOUBLE, cfd.below, 2, MPI_COMM_WORLD);
    }
}

void cfd_solve(int dim, const struct cfd_solver *solver)
{
    if (dim == 1 && ranks > 1) {
        solve_across(solver);
        return;
    }
    int first = dim == 2 ? cfd.begin : 1, end = dim == 2 ? cfd.end : cfd.n - 1;
#pragma omp parallel for
    for (int a = first; a < end; a++)
        for (int b = dim == 0 ? cfd.begin : 1; b < (dim == 0 ? cfd.end : cfd.n - 1); b++) {
            struct cfd_line line = line_at(dim, a, b);
            solve_line(&line, solver);
        }
}
