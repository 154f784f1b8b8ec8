/* BT, block tridiagonal solver (RNR-94-007, section 3): the equations of cfd.h by approximate factorization;
 * each time step solves lines of 5 by 5 blocks in x, y and z. */
#include "cfd.h"

#include <string.h>

/* Values of NPB 3.x, bt. */
static const struct cfd_size sizes[] = {
    {'S', 12, 60, 0.010,
     {1.7034283709541311e-1, 1.2975252070034097e-2, 3.2527926989486055e-2, 2.6436421275166801e-2,
      1.9211784131744430e-1},
     {4.9976913345811579e-4, 4.5195666782961927e-5, 7.3973765172921357e-5, 7.3821238632439731e-5,
      8.9269630987491446e-4}, 0},
    {'W', 24, 200, 0.0008,
     {0.1125590409344e+3, 0.1180007595731e+2, 0.2710329767846e+2, 0.2469174937669e+2, 0.2638427874317e+3},
     {0.4419655736008e+1, 0.4638531260002, 0.1011551749967e+1, 0.9235878729944, 0.1018045837718e+2}, 0},
    {'A', 64, 200, 0.0008,
     {1.0806346714637264e+2, 1.1319730901220813e+1, 2.5974354511582465e+1, 2.3665622544678910e+1,
      2.5278963211748344e+2},
     {4.2348416040525025, 4.4390282496995698e-1, 9.6692480136345650e-1, 8.8302063039765474e-1, 9.7379901770829278}, 0},
};

/* Expresses each point by the next one: x[k] = rhs[k] - C[k] x[k + 1], with C stored by columns. */
static void eliminate(const struct cfd_line *line, double *coefficients, state *rhs)
{
    double (*columns)[5][5] = (double (*)[5][5])coefficients;
    for (int k = 0; k < line->count; k++) {
        const state *u = (const state *)cfd.u + line->at + (size_t)k * line->stride;
        double lower[5][5], own[5][5] = {{0}}, upper[5][5], right[6][5];
        cfd_neighbor_block(u[-(ptrdiff_t)line->stride], line->dim, -1, lower);
        cfd_neighbor_block(u[line->stride], line->dim, 1, upper);
        cfd_add_own_block(u[0], line->dim, own);
        memcpy(right[5], rhs[k], sizeof right[5]);
        for (int row = 0; row < 5; row++) {
            own[row][row] += 1;
            for (int m = 0; m < 5; m++) {
                for (int c = 0; c < 5; c++)
                    own[row][c] -= lower[row][m] * columns[k - 1][c][m];
                right[m][row] = upper[row][m];
                right[5][row] -= lower[row][m] * rhs[k - 1][m];
            }
        }
        cfd_solve_block(own, right, 6);
        memcpy(columns[k], right, sizeof columns[k]);
        memcpy(rhs[k], right[5], sizeof rhs[k]);
    }
}

static void substitute(const struct cfd_line *line, const double *coefficients, state *rhs)
{
    const double (*columns)[5][5] = (const double (*)[5][5])coefficients;
    for (int k = line->count - 1; k >= 0; k--)
        for (int c = 0; c < 5; c++)
            for (int m = 0; m < 5; m++)
                rhs[k][m] -= columns[k][c][m] * rhs[k + 1][c];
}

static void scale(void)
{
#pragma omp parallel for
    for (size_t n = 0; n < cfd_at(cfd.n, -2, 0); n++)
        for (int m = 0; m < 5; m++)
            cfd.rhs[n][m] *= cfd.dt;
}

static void run(int steps)
{
    static const struct cfd_solver solver = {1, 25, eliminate, substitute};
    cfd_initialize();
    for (int step = 0; step < steps; step++) {
        cfd_rhs();
        scale();
        for (int dim = 0; dim < 3; dim++)
            cfd_solve(dim, &solver);
        cfd_add(1);
    }
}

int main(int argc, char **argv)
{
    const struct cfd_size *size = cfd_begin(argc, argv, "BT", sizes);
    double seconds = cfd_time(run, size->steps), n = size->n;
    cfd_rhs();
    return report(seconds, size->steps * (3478.8 * n * n * n - 17655.7 * n * n + 28023.7 * n), cfd_verified(size), "");
}
