/* MG, multigrid (RNR-94-007, section 2.2): V-cycles for Poisson's equation with periodic boundaries. Ranks share the
 * cube in up to three dimensions and exchange faces on each level: messages of many sizes. */
#include "common.h"

#include <math.h>
#include <string.h>

#define ITERATIONS 4
#define LEVELS_MAX 8
#define CHARGES 10 /* Number of charges of each sign. */

/* Norms of NPB 3.x, mg. */
struct size {
    char class;
    int log2_n;
    double norm;
};
static const struct size sizes[] = {
    {'S', 5, 0.5307707005734e-4},
    {'W', 7, 0.6467329375339e-5},
    {'A', 8, 0.2433365309069e-5},
};

/* Weights of a point, its 6, 12 and 8 neighbours at distance 1, sqrt 2 and sqrt 3. */
static const double a_weights[4] = {-8.0 / 3, 0, 1.0 / 6, 1.0 / 12};
static const double s_weights[4] = {-3.0 / 8, 1.0 / 32, -1.0 / 64, 0};

/* One level of this rank's part of the cube, x fastest, surrounded by one layer of neighbours' points. */
struct level {
    int n[3]; /* This rank's points in x, y and z. */
    double *u, *r;
};

static const struct size *size;
static struct level levels[LEVELS_MAX + 1]; /* levels[1] has two points in each dimension. */
static double *v;                           /* The right-hand side: charges. */
static int split[3], place[3], lower[3], upper[3];

static size_t row_of(const struct level *level, int y, int z)
{
    return ((size_t)z * (size_t)(level->n[1] + 2) + (size_t)y) * (size_t)(level->n[0] + 2);
}

static size_t points(const struct level *level)
{
    return row_of(level, 0, level->n[2] + 2);
}

/* The rank at a position of the periodic grid. */
static int rank_at(int x, int y, int z)
{
    return ((z + split[2]) % split[2] * split[1] + (y + split[1]) % split[1]) * split[0] + (x + split[0]) % split[0];
}

/* Assigns parts of the cube. The coarsest level has two points in a dimension, so at most two ranks share a dimension.
 * */
static void make_grid(void)
{
    if (ranks != 1 && ranks != 2 && ranks != 4 && ranks != 8)
        refuse("the number of ranks must be 1, 2, 4 or 8, not %d", ranks);
    split[2] = ranks >= 2 ? 2 : 1;
    split[1] = ranks >= 4 ? 2 : 1;
    split[0] = ranks >= 8 ? 2 : 1;
    place[0] = rank % split[0];
    place[1] = rank / split[0] % split[1];
    place[2] = rank / split[0] / split[1];
    for (int dim = 0; dim < 3; dim++) {
        int step[3] = {dim == 0, dim == 1, dim == 2};
        upper[dim] = rank_at(place[0] + step[0], place[1] + step[1], place[2] + step[2]);
        lower[dim] = rank_at(place[0] - step[0], place[1] - step[1], place[2] - step[2]);
    }
    for (int k = 1; k <= size->log2_n; k++) {
        for (int dim = 0; dim < 3; dim++)
            levels[k].n[dim] = (1 << k) / split[dim];
        levels[k].u = allocate(points(&levels[k]), sizeof(double));
        levels[k].r = allocate(points(&levels[k]), sizeof(double));
    }
    v = allocate(points(&levels[size->log2_n]), sizeof(double));
}

/* Copies the layer at `at` in dimension `dim` to or from a buffer; returns its number of points. */
static int layer(const struct level *level, double *field, int dim, int at, double *buffer, bool into)
{
    int from[3] = {0, 0, 0}, end[3], count = 0;
    for (int d = 0; d < 3; d++)
        end[d] = level->n[d] + 2;
    from[dim] = at;
    end[dim] = at + 1;
    for (int z = from[2]; z < end[2]; z++)
        for (int y = from[1]; y < end[1]; y++) {
            double *row = field + row_of(level, y, z) + from[0];
            size_t bytes = sizeof *row * (size_t)(end[0] - from[0]);
            memcpy(into ? (void *)(buffer + count) : (void *)row, into ? (void *)row : (void *)(buffer + count), bytes);
            count += end[0] - from[0];
        }
    return count;
}

/* Fills the surrounding layers with neighbours' points: x, y, z in turn, which includes edges and corners. */
static void exchange(const struct level *level, double *field)
{
    static double *out, *in;
    if (!out) {
        size_t side = (size_t)(1 << size->log2_n) + 2;
        out = allocate(side * side, sizeof *out);
        in = allocate(side * side, sizeof *in);
    }
    for (int dim = 0; dim < 3; dim++)
        for (int up = 0; up < 2; up++) {
            int to = up ? upper[dim] : lower[dim], from = up ? lower[dim] : upper[dim];
            int count = layer(level, field, dim, up ? level->n[dim] : 1, out, true);
            if (to != rank)
                MPI_Sendrecv(out, count, MPI_DOUBLE, to, up, in, count, MPI_DOUBLE, from, up, MPI_COMM_WORLD,
                             MPI_STATUS_IGNORE);
            layer(level, field, dim, up ? 0 : level->n[dim] + 1, to == rank ? out : in, false);
        }
}

/* out = base + sign * (the 27-point stencil of in). */
static void apply(const struct level *level, const double weights[4], double sign, const double *in, const double *base,
                  double *out)
{
    int nx = level->n[0];
    double w0 = sign * weights[0], w1 = sign * weights[1], w2 = sign * weights[2], w3 = sign * weights[3];
#pragma omp parallel for
    for (int z = 1; z <= level->n[2]; z++) {
        double near[(1 << LEVELS_MAX) + 2], far[(1 << LEVELS_MAX) + 2];
        for (int y = 1; y <= level->n[1]; y++) {
            const double *center = in + row_of(level, y, z);
            const double *n = in + row_of(level, y - 1, z), *s = in + row_of(level, y + 1, z);
            const double *b = in + row_of(level, y, z - 1), *t = in + row_of(level, y, z + 1);
            const double *nb = in + row_of(level, y - 1, z - 1), *nt = in + row_of(level, y - 1, z + 1);
            const double *sb = in + row_of(level, y + 1, z - 1), *st = in + row_of(level, y + 1, z + 1);
            for (int x = 0; x < nx + 2; x++) {
                near[x] = n[x] + s[x] + b[x] + t[x];
                far[x] = nb[x] + nt[x] + sb[x] + st[x];
            }
            const double *from = base + row_of(level, y, z);
            double *to = out + row_of(level, y, z);
            for (int x = 1; x <= nx; x++)
                to[x] = from[x] + w0 * center[x] + w1 * (center[x - 1] + center[x + 1] + near[x])
                        + w2 * (near[x - 1] + near[x + 1] + far[x]) + w3 * (far[x - 1] + far[x + 1]);
        }
    }
}

/* r = v - A u on a level. */
static void residual(const struct level *level, const double *right)
{
    apply(level, a_weights, -1, level->u, right, level->r);
    exchange(level, level->r);
}

/* u = u + S r. */
static void smooth(const struct level *level)
{
    apply(level, s_weights, 1, level->r, level->u, level->u);
    exchange(level, level->u);
}

/* The coarse residual is a weighted mean of the fine one: point k lies on the fine point 2 k. */
static void restrict_to(const struct level *coarse, const struct level *fine)
{
    static const double weights[4] = {0.5, 0.25, 0.125, 0.0625};
#pragma omp parallel for
    for (int z = 1; z <= coarse->n[2]; z++)
        for (int y = 1; y <= coarse->n[1]; y++)
            for (int x = 1; x <= coarse->n[0]; x++) {
                double total[4] = {0};
                for (int dz = -1; dz <= 1; dz++)
                    for (int dy = -1; dy <= 1; dy++) {
                        const double *row = fine->r + row_of(fine, 2 * y + dy, 2 * z + dz) + 2 * x;
                        int distance = (dz != 0) + (dy != 0);
                        total[distance] += row[0];
                        total[distance + 1] += row[-1] + row[1];
                    }
                coarse->r[row_of(coarse, y, z) + (size_t)x] = weights[0] * total[0] + weights[1] * total[1]
                                                              + weights[2] * total[2] + weights[3] * total[3];
            }
    exchange(coarse, coarse->r);
}

/* u = u + the coarse correction, interpolated linearly. Fine points with even index lie on coarse ones. */
static void interpolate(const struct level *coarse, const struct level *fine)
{
#pragma omp parallel for
    for (int z = 1; z <= fine->n[2]; z++)
        for (int y = 1; y <= fine->n[1]; y++) {
            const double *a = coarse->u + row_of(coarse, y / 2, z / 2);
            const double *b = coarse->u + row_of(coarse, (y + 1) / 2, z / 2);
            const double *c = coarse->u + row_of(coarse, y / 2, (z + 1) / 2);
            const double *d = coarse->u + row_of(coarse, (y + 1) / 2, (z + 1) / 2);
            double *to = fine->u + row_of(fine, y, z), before = 0.25 * (a[0] + b[0] + c[0] + d[0]);
            for (int x = 1; x <= coarse->n[0]; x++) {
                double here = 0.25 * (a[x] + b[x] + c[x] + d[x]);
                to[2 * x - 1] += 0.5 * (before + here);
                to[2 * x] += here;
                before = here;
            }
        }
    exchange(fine, fine->u);
}

/* u = u + M r: one V-cycle. */
static void cycle(void)
{
    int top = size->log2_n;
    for (int k = top; k > 1; k--)
        restrict_to(&levels[k - 1], &levels[k]);
    for (int k = 1; k < top; k++)
        memset(levels[k].u, 0, sizeof(double) * points(&levels[k]));
    smooth(&levels[1]);
    for (int k = 2; k < top; k++) {
        interpolate(&levels[k - 1], &levels[k]);
        residual(&levels[k], levels[k].r);
        smooth(&levels[k]);
    }
    interpolate(&levels[top - 1], &levels[top]);
    residual(&levels[top], v);
    smooth(&levels[top]);
}

/* Places charges: +1 at the ten largest random numbers of the cube, -1 at the ten smallest. Each rank scans all
 * numbers. */
static void make_charges(void)
{
    const struct level *top = &levels[size->log2_n];
    uint64_t state = RANDOM_SEED, n = UINT64_C(1) << size->log2_n, where[2][CHARGES] = {0};
    double value[2][CHARGES];
    for (int c = 0; c < CHARGES; c++)
        value[0][c] = value[1][c] = -1;
    for (uint64_t point = 0; point < n * n * n; point++) {
        double drawn = random_next(&state);
        for (int sign = 0; sign < 2; sign++) {
            double key = sign ? drawn : 1 - drawn; /* Exact, because drawn has 46 bits. */
            if (key <= value[sign][CHARGES - 1])
                continue;
            int c = CHARGES - 1;
            for (; c > 0 && value[sign][c - 1] < key; c--) {
                value[sign][c] = value[sign][c - 1];
                where[sign][c] = where[sign][c - 1];
            }
            value[sign][c] = key;
            where[sign][c] = point;
        }
    }
    for (int sign = 0; sign < 2; sign++)
        for (int c = 0; c < CHARGES; c++) {
            uint64_t point = where[sign][c];
            int at[3] = {(int)(point % n), (int)(point / n % n), (int)(point / n / n)};
            bool own = true;
            for (int dim = 0; dim < 3; dim++) {
                at[dim] -= place[dim] * top->n[dim];
                own &= at[dim] >= 0 && at[dim] < top->n[dim];
            }
            if (own)
                v[row_of(top, at[1] + 1, at[2] + 1) + (size_t)at[0] + 1] = PERTURBED(sign ? 1.0 : -1.0);
        }
    exchange(top, v);
}

/* The root mean square of the residual. */
static double norm(void)
{
    const struct level *top = &levels[size->log2_n];
    double total = 0;
#pragma omp parallel for reduction(+ : total)
    for (int z = 1; z <= top->n[2]; z++)
        for (int y = 1; y <= top->n[1]; y++)
            for (int x = 1; x <= top->n[0]; x++) {
                double value = top->r[row_of(top, y, z) + (size_t)x];
                total += value * value;
            }
    sum(&total, 1);
    return sqrt(ldexp(total, -3 * size->log2_n));
}

static void run(int iterations)
{
    struct level *top = &levels[size->log2_n];
    memset(top->u, 0, sizeof(double) * points(top));
    residual(top, v);
    for (int iteration = 0; iteration < iterations; iteration++) {
        cycle();
        residual(top, v);
    }
}

int main(int argc, char **argv)
{
    char class = begin(argc, argv, "MG");
    for (size = sizes; size->class != class; size++)
        ;
    make_grid();
    make_charges();
    run(1); /* Touches all memory before the measurement. */

    double begun = start();
    run(ITERATIONS);
    double result = norm(), seconds = now() - begun;
    bool verified = agrees("norm of the residual", result, size->norm, 1e-8);
    return report(seconds, ldexp(58.0 * ITERATIONS, 3 * size->log2_n), verified, "");
}
