/* SP, scalar pentadiagonal solver (RNR-94-007, section 3): the equations of cfd.h by approximate factorization with
 * diagonalized Jacobians; each time step solves five scalar systems per line of points in x, y and z: three for waves
 * that move with the fluid, two for sound waves. */
#include "cfd.h"

#include <math.h>
#include <string.h>

#define HALF_ROOT 0.70710678118654752440 /* 1 / sqrt(2) */

/* Values of NPB 3.x, sp. */
static const struct cfd_size sizes[] = {
    {'S', 12, 100, 0.015,
     {2.7470315451339479e-2, 1.0360746705285417e-2, 1.6235745065095532e-2, 1.5840557224455615e-2,
      3.4849040609362460e-2},
     {2.7289258557377227e-5, 1.0364446640837285e-5, 1.6154798287166471e-5, 1.5750704994480102e-5,
      3.4177666183390531e-5}, 0},
    {'W', 36, 400, 0.0015,
     {0.1893253733584e-2, 0.1717075447775e-3, 0.2778153350936e-3, 0.2887475409984e-3, 0.3143611161242e-2},
     {0.7542088599534e-4, 0.6512852253086e-5, 0.1049092285688e-4, 0.1128838671535e-4, 0.1212845639773e-3}, 0},
    {'A', 64, 400, 0.0015,
     {2.4799822399300195, 1.1276337964368832, 1.5028977888770491, 1.4217816211695179, 2.1292113035138280},
     {1.0900140297820550e-4, 3.7343951769282091e-5, 5.0092785406541633e-5, 4.7671093939528255e-5,
      1.3621613399213001e-4}, 0},
};

/* Flow quantities derived from a state: 1 / density, velocities, kinetic energy per mass, speed of sound. */
struct flow {
    double inverse, velocity[3], kinetic, sound;
};
static struct flow *flows; /* Of all points, including the rows adjacent to this rank's. */

static void make_flows(void)
{
    int first = cfd.below == MPI_PROC_NULL ? 0 : -1, end = cfd.rows + (cfd.above != MPI_PROC_NULL);
#pragma omp parallel for
    for (int z = 0; z < cfd.n; z++)
        for (size_t n = cfd_at(z, first, 0); n < cfd_at(z, end, 0); n++) {
            const double *u = cfd.u[n];
            struct flow *flow = &flows[n];
            flow->inverse = 1 / u[0];
            flow->kinetic = 0;
            for (int dim = 0; dim < 3; dim++) {
                flow->velocity[dim] = u[1 + dim] * flow->inverse;
                flow->kinetic += 0.5 * flow->velocity[dim] * flow->velocity[dim];
            }
            flow->sound = sqrt(C1 * C2 * (u[4] * flow->inverse - flow->kinetic));
        }
}

/* The largest diffusion coefficient of any component. */
static double diffusion(const struct flow *flow, int dim)
{
    return cfd_damping[dim] + fmax(CONDUCTION, 4.0 / 3) * VISCOSITY * flow->inverse;
}

/* The five coefficients of a point in the fluid's three equations. Dissipation is one-sided at the boundary. */
static void make_row(const struct flow *flow, const struct cfd_line *line, int k, double row[5])
{
    int dim = line->dim, position = line->first + k, last = cfd.n - 2;
    const struct flow *lower = flow - line->stride, *upper = flow + line->stride;
    double convection = cfd.dt * cfd.t2, diffusing = cfd.dt * cfd.t1, fourth = cfd.dt * DISSIPATION;
    row[0] = position > 2 ? fourth : 0;
    row[1] = -convection * lower->velocity[dim] - diffusing * diffusion(lower, dim) - (position > 1 ? 4 * fourth : 0);
    row[2] = 1 + 2 * diffusing * diffusion(flow, dim) + (position == 1 || position == last ? 5 : 6) * fourth;
    row[3] = convection * upper->velocity[dim] - diffusing * diffusion(upper, dim) - (position < last ? 4 * fourth : 0);
    row[4] = position < last - 1 ? fourth : 0;
}

/* Eliminates the two previous points from one equation: x[k] = rhs[k] - own[0] x[k + 1] - own[1] x[k + 2]. `own`
 * belongs to this point, own - 6 to the previous one; the `count` right-hand sides are adjacent. */
static void eliminate_row(const double row[5], double *own, double *rhs, int count)
{
    const double *one = own - 6, *two = own - 12;
    double lower = row[1] - row[0] * two[0];
    double inverse = 1 / (row[2] - row[0] * two[1] - lower * one[0]);
    own[0] = (row[3] - lower * one[1]) * inverse;
    own[1] = row[4] * inverse;
    for (int m = 0; m < count; m++)
        rhs[m] = (rhs[m] - row[0] * rhs[m - 10] - lower * rhs[m - 5]) * inverse;
}

static void eliminate(const struct cfd_line *line, double *coefficients, state *rhs)
{
    for (int k = 0; k < line->count; k++) {
        const struct flow *flow = flows + line->at + (size_t)k * line->stride;
        double row[5], sound = cfd.dt * cfd.t2 * flow[-(ptrdiff_t)line->stride].sound;
        double sound_above = cfd.dt * cfd.t2 * flow[line->stride].sound, *own = coefficients + 6 * k;
        make_row(flow, line, k, row);
        eliminate_row(row, own, rhs[k], 3);
        row[1] -= sound;
        row[3] += sound_above;
        eliminate_row(row, own + 2, rhs[k] + 3, 1);
        row[1] += 2 * sound;
        row[3] -= 2 * sound_above;
        eliminate_row(row, own + 4, rhs[k] + 4, 1);
    }
}

static void substitute(const struct cfd_line *line, const double *coefficients, state *rhs)
{
    for (int k = line->count - 1; k >= 0; k--) {
        const double *own = coefficients + 6 * k;
        for (int m = 0; m < 5; m++) {
            const double *pair = own + (m < 3 ? 0 : 2 * (m - 2));
            rhs[k][m] -= pair[0] * rhs[k + 1][m] + pair[1] * rhs[k + 2][m];
        }
    }
}

/* Transforms to the eigenvectors of the Jacobian in x. */
static void to_x(const struct flow *flow, const double *u, double *r)
{
    const double *v = flow->velocity;
    double pressure = C2 / (flow->sound * flow->sound)
                      * (flow->kinetic * r[0] - v[0] * r[1] - v[1] * r[2] - v[2] * r[3] + r[4]);
    double scale = HALF_ROOT * flow->inverse;
    double along = scale * (v[0] * r[0] - r[1]), wave = scale * flow->sound * pressure;
    double across_y = flow->inverse * (v[1] * r[0] - r[2]), across_z = -flow->inverse * (v[2] * r[0] - r[3]);
    (void)u;
    r[0] -= pressure;
    r[1] = across_z;
    r[2] = across_y;
    r[3] = wave - along;
    r[4] = wave + along;
}

/* Transforms from the eigenvectors in x to those in y. */
static void x_to_y(const struct flow *flow, const double *u, double *r)
{
    double half = 0.5 * (r[3] + r[4]), side = HALF_ROOT * r[2], along = HALF_ROOT * (r[3] - r[4]);
    (void)flow, (void)u;
    double first = r[0];
    r[0] = -r[1];
    r[1] = first;
    r[2] = along;
    r[3] = half - side;
    r[4] = half + side;
}

/* Transforms from the eigenvectors in y to those in z. */
static void y_to_z(const struct flow *flow, const double *u, double *r)
{
    double half = 0.5 * (r[3] + r[4]), side = HALF_ROOT * r[0], along = HALF_ROOT * (r[3] - r[4]);
    (void)flow, (void)u;
    double second = r[1];
    r[0] = along;
    r[1] = -r[2];
    r[2] = second;
    r[3] = half - side;
    r[4] = half + side;
}

/* Transforms from the eigenvectors in z back to changes of the state. */
static void from_z(const struct flow *flow, const double *u, double *r)
{
    const double *v = flow->velocity;
    double scale = HALF_ROOT * u[0], wave = scale / flow->sound * (r[3] + r[4]);
    double density = r[2] + wave, along = scale * (r[3] - r[4]), x = u[0] * r[1], y = u[0] * r[0];
    r[0] = density;
    r[1] = v[0] * density - x;
    r[2] = v[1] * density + y;
    r[3] = v[2] * density + along;
    r[4] = flow->kinetic * density - v[0] * x + v[1] * y + flow->sound * flow->sound / C2 * wave + v[2] * along;
}

/* Multiplies all right-hand sides by `factor`, then transforms them. */
static void change(void (*transform)(const struct flow *, const double *, double *), double factor)
{
#pragma omp parallel for
    for (int z = 1; z < cfd.n - 1; z++)
        for (int y = cfd.begin; y < cfd.end; y++)
            for (size_t n = cfd_at(z, y, 1); n < cfd_at(z, y, cfd.n - 1); n++) {
                for (int m = 0; m < 5; m++)
                    cfd.rhs[n][m] *= factor;
                transform(&flows[n], cfd.u[n], cfd.rhs[n]);
            }
}

static void run(int steps)
{
    static const struct cfd_solver solver = {2, 6, eliminate, substitute};
    cfd_initialize();
    for (int step = 0; step < steps; step++) {
        cfd_rhs();
        make_flows();
        change(to_x, cfd.dt);
        cfd_solve(0, &solver);
        change(x_to_y, 1);
        cfd_solve(1, &solver);
        change(y_to_z, 1);
        cfd_solve(2, &solver);
        change(from_z, 1);
        cfd_add(1);
    }
}

int main(int argc, char **argv)
{
    const struct cfd_size *size = cfd_begin(argc, argv, "SP", sizes);
    flows = allocate(cfd_at(cfd.n, -2, 0), sizeof *flows);
    double seconds = cfd_time(run, size->steps), n = size->n;
    cfd_rhs();
    double operations = size->steps * (881.174 * n * n * n - 4683.91 * n * n + 11484.5 * n - 19272.4);
    return report(seconds, operations, cfd_verified(size), "");
}
