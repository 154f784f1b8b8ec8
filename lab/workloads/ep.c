/* EP, embarrassingly parallel (RNR-94-007, section 2.2): pairs of Gaussian deviates by the polar method, counted by
 * square annulus. Ranks communicate only to add up the results. */
#include "common.h"

#include <math.h>

#define SEED UINT64_C(271828183)
#define BATCH (1 << 16) /* Pairs per jump in the sequence of random numbers. */
#define ANNULI 10

struct size {
    char class;
    int log2_pairs;
    double sum_x, sum_y;
};
static const struct size sizes[] = {
    {'S', 24, -3.247834652034740e+3, -6.958407078382297e+3},
    {'W', 25, -2.863319731645753e+3, -6.320053679109499e+3},
    {'A', 28, -4.295875165629892e+3, -1.580732573678431e+4},
};

/* Adds one batch of pairs: sums in total[0] and [1], then a count for each annulus. */
static void add_batch(uint64_t batch, double *total)
{
    uint64_t state = random_jump(SEED, 2 * BATCH * batch);
    for (int pair = 0; pair < BATCH; pair++) {
        double x = 2 * random_next(&state) - 1, y = 2 * random_next(&state) - 1;
        double square = x * x + y * y;
        if (square > 1)
            continue;
        double factor = sqrt(-2 * log(square) / square);
        x = PERTURBED(x * factor);
        y *= factor;
        total[0] += x;
        total[1] += y;
        total[2 + (int)fmax(fabs(x), fabs(y))]++;
    }
}

int main(int argc, char **argv)
{
    char class = begin(argc, argv, "EP");
    const struct size *size = sizes;
    while (size->class != class)
        size++;
    int batches = (1 << size->log2_pairs) / BATCH;
    double total[2 + ANNULI] = {0};

    double begun = start();
    int first = part_start(batches, rank, ranks), end = part_start(batches, rank + 1, ranks);
#pragma omp parallel for reduction(+ : total)
    for (int batch = first; batch < end; batch++)
        add_batch((uint64_t)batch, total);
    sum(total, 2 + ANNULI);
    double seconds = now() - begun;

    bool verified = agrees("sum of X", total[0], size->sum_x, 1e-8) & agrees("sum of Y", total[1], size->sum_y, 1e-8);
    return report(seconds, ldexp(2, size->log2_pairs), verified, "");
}
