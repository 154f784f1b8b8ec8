/* Code shared by SP, BT and LU (RNR-94-007, section 3): the compressible Navier-Stokes equations on a cube, discretized
 * by finite differences, with a forcing term that makes a given polynomial the exact solution.
 *
 * Ranks share the cube in y. Fields are [z][y][x] with two rows of neighbours' points on each side. */
#ifndef CFD_H
#define CFD_H

#include "common.h"

#define CFD_MAX 64 /* Maximum number of points in a dimension. */

#define C1 1.4
#define C2 0.4
#define VISCOSITY 0.1        /* C3 C4 of the report. */
#define CONDUCTION (C1 * C1) /* C1 C5 of the report. */
#define DISSIPATION 0.25     /* Coefficient of fourth-order dissipation. */

/* Coefficients of second-order artificial dissipation, by dimension. */
static const double cfd_damping[3] = {0.75, 0.75, 1};

/* Density, momentum in x, y and z, energy: each per unit of volume. */
typedef double state[5];

struct cfd {
    int n;                     /* Points in each dimension, including those on the boundary. */
    int rows, first_row;       /* This rank's number of rows in y, and the first of them. */
    int begin, end;            /* Its rows that are not on the boundary: begin..end of 0..rows. */
    int below, above;          /* The ranks with lower and higher y. */
    double dt, t1, t2;         /* The time step; 1 / h^2 and 1 / (2 h). */
    state *u, *rhs, *forcing;
};
extern struct cfd cfd;

/* Reference values of a class: the final residual and error, by component. */
struct cfd_size {
    char class;
    int n, steps;
    double dt;
    state residual, error;
    double integral; /* Used by LU only. */
};

/* Index of the row's first point; y counts this rank's rows, from -2 to rows + 1. */
static inline size_t cfd_at(int z, int y, int x)
{
    return ((size_t)z * (size_t)(cfd.rows + 4) + (size_t)(y + 2)) * (size_t)cfd.n + (size_t)x;
}

/* Starts MPI, reads the class, allocates fields and computes the forcing term. */
const struct cfd_size *cfd_begin(int argc, char **argv, const char *kernel, const struct cfd_size sizes[3]);

/* Measures `steps` time steps; returns seconds. `run` starts at the initial values each time; a first, unmeasured run
 * touches all memory. */
double cfd_time(void (*run)(int steps), int steps);

/* Sets u to its initial values: exact on the boundary, interpolated elsewhere. */
void cfd_initialize(void);

/* Receives the neighbours' rows of u; rhs = forcing + (the differences that approximate -du/dt of the equations). */
void cfd_rhs(void);

/* Adds `factor` * rhs to u. */
void cfd_add(double factor);

/* Whether the norms of residual and error match the reference values of the class. */
bool cfd_verified(const struct cfd_size *size);

/* The Jacobian of a neighbour's contribution to a point in dimension `dim`, times -dt: of the lower neighbour (side -1)
 * or the upper one (side 1). `u` is the neighbour's state. */
void cfd_neighbor_block(const double *u, int dim, double side, double block[5][5]);

/* Adds the point's own contribution in dimension `dim`, times -dt. */
void cfd_add_own_block(const double *u, int dim, double block[5][5]);

/* Solves block * x = b for `columns` right-hand sides b[columns][5], in place. No pivoting is needed: the blocks are
 * diagonally dominant. */
void cfd_solve_block(double block[5][5], double (*b)[5], int columns);

/* The part of a line that belongs to this rank, without points on the boundary. */
struct cfd_line {
    int dim, first, count; /* `first`: the first point's position on the whole line. */
    size_t at;             /* The first point's index in fields; the next point is `stride` further. */
    size_t stride;
};

/* A direct solver for lines. A point stores `coefficients` numbers, and needs those and the right-hand sides of the
 * `reach` points before it; back substitution needs the solutions of the `reach` points behind it. */
struct cfd_solver {
    int reach, coefficients;
    void (*eliminate)(const struct cfd_line *line, double *coefficients, state *rhs);
    void (*substitute)(const struct cfd_line *line, const double *coefficients, state *rhs);
};

/* Solves all lines in dimension `dim`, for rhs, in place. Lines in y cross all ranks: elimination proceeds from rank to
 * rank, plane by plane, and back substitution in the opposite direction. */
void cfd_solve(int dim, const struct cfd_solver *solver);

#endif
