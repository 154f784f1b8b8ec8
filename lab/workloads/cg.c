/* CG, conjugate gradients (RNR-94-007, section 2.2): the smallest eigenvalue of a sparse symmetric matrix by inverse
 * power iteration. Ranks form a grid; each multiplies one block. A product is summed along a row of the grid, then
 * exchanged with the transposed rank: messages of medium size, and many sums of single numbers. */
#include "common.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define ITERATIONS 15
#define STEPS 25 /* Conjugate gradient steps per iteration. */
#define CONDITION 0.1
#define NONZEROS_MAX 16

/* Values of NPB 3.x, cg. */
struct size {
    char class;
    int n, nonzeros;
    double shift, zeta;
};
static const struct size sizes[] = {
    {'S', 1400, 7, 10, 8.5971775078648},
    {'W', 7000, 8, 12, 10.362595087124},
    {'A', 14000, 11, 20, 17.130235054029},
};

/* One vector of the sum of outer products that forms the matrix. */
struct vector {
    int count, index[NONZEROS_MAX];
    double value[NONZEROS_MAX];
};

static const struct size *size;
static MPI_Comm row_comm;                               /* The ranks of this rank's row of the grid. */
static int transposed;                                  /* The rank that has this one's part of a product. */
static int row_first, row_count, col_first, col_count;  /* This rank's block. */
static int part_first;                                  /* First of the col_count rows that `transposed` needs. */
static int *row_begin, *column;
static double *entry;
static double *x, *z, *p, *q, *r, *product; /* `product` is indexed by rows, all other vectors by columns. */

/* Splits ranks into a grid with as many columns as rows, or twice as many. In the latter case columns are halves of
 * rows, and the part of row block i that rank (i, j) has is the column block of rank (j / 2, 2 i + j % 2), and vice
 * versa. */
static void make_grid(void)
{
    int rows = 1;
    while (rows * rows * 4 <= ranks)
        rows *= 2;
    int columns = ranks / rows, ratio = columns / rows;
    if (rows * columns != ranks || (ratio != 1 && ratio != 2) || ratio * rows != columns)
        refuse("the number of ranks must be a power of two, not %d", ranks);
    int i = rank / columns, j = rank % columns;
    transposed = j / ratio * columns + i * ratio + j % ratio;
    MPI_Comm_split(MPI_COMM_WORLD, i, j, &row_comm);
    col_first = part_start(size->n, j, columns);
    col_count = part_start(size->n, j + 1, columns) - col_first;
    row_first = part_start(size->n, i, rows);
    row_count = part_start(size->n, i + 1, rows) - row_first;
    part_first = part_start(size->n, i * ratio + j % ratio, columns) - row_first;
}

/* A random sparse vector: positions are drawn from 0..2^k >= n until one fits and is new. */
static void draw(struct vector *vector, uint64_t *state, int row)
{
    int range = 1;
    while (range < size->n)
        range *= 2;
    vector->count = 0;
    while (vector->count < size->nonzeros) {
        double value = random_next(state);
        int index = (int)(range * random_next(state)), n = 0;
        while (n < vector->count && vector->index[n] != index)
            n++;
        if (index >= size->n || n < vector->count)
            continue;
        vector->index[vector->count] = index;
        vector->value[vector->count++] = value;
    }
    int n = 0;
    while (n < vector->count && vector->index[n] != row)
        n++;
    vector->index[n] = row; /* The element on the diagonal is 1/2, instead of a drawn one. */
    vector->value[n] = PERTURBED(0.5);
    vector->count += n == vector->count;
}

static bool own_row(int row) { return row >= row_first && row < row_first + row_count; }
static bool own_column(int col) { return col >= col_first && col < col_first + col_count; }

/* Adds up equal columns of the row that begins at `from`, and stores them at `to`; returns their new end. */
static int merge_row(int from, int end, int to, double *dense)
{
    for (int n = from; n < end; n++)
        dense[column[n]] = 0;
    for (int n = from; n < end; n++)
        dense[column[n]] += entry[n];
    for (int n = from; n < end; n++) {
        int col = column[n];
        if (isnan(dense[col]))
            continue; /* Already added up. */
        column[to] = col;
        entry[to++] = dense[col];
        dense[col] = NAN;
    }
    return to;
}

/* This rank's block of A = sum over n of CONDITION^(i/n) v v^T + (CONDITION - shift) I. Every rank draws all vectors.
 * */
static void make_matrix(void)
{
    struct vector *vectors = allocate((size_t)size->n, sizeof *vectors);
    uint64_t state = random_jump(RANDOM_SEED, 1); /* The first number is not used. */
    int *end = allocate((size_t)row_count + 1, sizeof *end);
    for (int v = 0; v < size->n; v++) {
        draw(&vectors[v], &state, v);
        int in_columns = 0;
        for (int n = 0; n < vectors[v].count; n++)
            in_columns += own_column(vectors[v].index[n]);
        for (int n = 0; n < vectors[v].count; n++)
            if (own_row(vectors[v].index[n]))
                end[vectors[v].index[n] - row_first + 1] += in_columns + 1; /* One more for the diagonal. */
    }
    for (int row = 0; row < row_count; row++)
        end[row + 1] += end[row];
    column = allocate((size_t)end[row_count], sizeof *column);
    entry = allocate((size_t)end[row_count], sizeof *entry);
    row_begin = allocate((size_t)row_count + 1, sizeof *row_begin);
    memcpy(row_begin, end, sizeof *end * ((size_t)row_count + 1));
    double weight = 1, ratio = pow(CONDITION, 1.0 / size->n);
    for (int v = 0; v < size->n; v++, weight *= ratio)
        for (int a = 0; a < vectors[v].count; a++) {
            int row = vectors[v].index[a];
            for (int b = 0; own_row(row) && b < vectors[v].count; b++) {
                int col = vectors[v].index[b];
                if (!own_column(col))
                    continue;
                column[end[row - row_first]] = col - col_first;
                entry[end[row - row_first]++] = weight * vectors[v].value[a] * vectors[v].value[b]
                                                + (row == v && col == v ? CONDITION - size->shift : 0);
            }
        }
    double *dense = allocate((size_t)col_count, sizeof *dense);
    int to = 0;
    for (int row = 0; row < row_count; row++) {
        int from = row_begin[row];
        row_begin[row] = to;
        to = merge_row(from, end[row], to, dense);
    }
    row_begin[row_count] = to;
    free(dense);
    free(end);
    free(vectors);
}

/* out = A in, both indexed by columns. */
static void multiply(const double *in, double *out)
{
#pragma omp parallel for
    for (int row = 0; row < row_count; row++) {
        double total = 0;
        for (int n = row_begin[row]; n < row_begin[row + 1]; n++)
            total += entry[n] * in[column[n]];
        product[row] = total;
    }
    MPI_Allreduce(MPI_IN_PLACE, product, row_count, MPI_DOUBLE, MPI_SUM, row_comm);
    MPI_Sendrecv(product + part_first, col_count, MPI_DOUBLE, transposed, 0, out, col_count, MPI_DOUBLE, transposed, 0,
                 MPI_COMM_WORLD, MPI_STATUS_IGNORE);
}

/* The dot product: each row of the grid has every column once. */
static double dot(const double *a, const double *b)
{
    double total = 0;
#pragma omp parallel for reduction(+ : total)
    for (int n = 0; n < col_count; n++)
        total += a[n] * b[n];
    MPI_Allreduce(MPI_IN_PLACE, &total, 1, MPI_DOUBLE, MPI_SUM, row_comm);
    return total;
}

/* Solves A z = x approximately. */
static void solve(void)
{
    size_t bytes = sizeof *x * (size_t)col_count;
    memset(z, 0, bytes);
    memcpy(r, x, bytes);
    memcpy(p, x, bytes);
    double rho = dot(r, r);
    for (int step = 0; step < STEPS; step++) {
        multiply(p, q);
        double alpha = rho / dot(p, q), before = rho;
#pragma omp parallel for
        for (int n = 0; n < col_count; n++) {
            z[n] += alpha * p[n];
            r[n] -= alpha * q[n];
        }
        rho = dot(r, r);
#pragma omp parallel for
        for (int n = 0; n < col_count; n++)
            p[n] = r[n] + rho / before * p[n];
    }
    multiply(z, q); /* The report requires the residual of each solution. */
#pragma omp parallel for
    for (int n = 0; n < col_count; n++)
        r[n] = x[n] - q[n];
}

/* One inverse power iteration; returns zeta, and the norm of the residual in `residual`. */
static double iterate(double *residual)
{
    solve();
    *residual = sqrt(dot(r, r));
    double zeta = size->shift + 1 / dot(x, z), scale = 1 / sqrt(dot(z, z));
    for (int n = 0; n < col_count; n++)
        x[n] = scale * z[n];
    return zeta;
}

static void ones(void)
{
    for (int n = 0; n < col_count; n++)
        x[n] = 1;
}

int main(int argc, char **argv)
{
    char class = begin(argc, argv, "CG");
    for (size = sizes; size->class != class; size++)
        ;
    make_grid();
    make_matrix();
    double **vectors[] = {&x, &z, &p, &q, &r};
    for (int n = 0; n < 5; n++)
        *vectors[n] = allocate((size_t)col_count, sizeof(double));
    product = allocate((size_t)row_count, sizeof(double));
    double residual, zeta = 0;
    ones();
    iterate(&residual); /* Touches all memory before the measurement. */
    ones();

    double begun = start();
    for (int iteration = 0; iteration < ITERATIONS; iteration++)
        zeta = iterate(&residual);
    double seconds = now() - begun;

    bool verified = agrees("zeta", zeta, size->zeta, 1e-10) & (residual < 1e-10);
    double products = size->nonzeros * (size->nonzeros + 1.0);
    double operations = 2.0 * ITERATIONS * size->n * (3 + products + STEPS * (5 + products) + 3);
    return report(seconds, operations, verified, "");
}
