/* Code shared by all workloads: ranks, classes, pseudo-random numbers, timing, verification and the report.
 *
 * One source makes three programs: serial, OpenMP (-fopenmp) and MPI (-DUSE_MPI). Without MPI, single_rank.h replaces
 * it. The kernels are written from the NAS report (Bailey et al., The NAS Parallel Benchmarks, RNR-94-007, March 1994).
 * Sizes of classes and reference values are those of NPB 3.x, which the report's authors publish. */
#ifndef COMMON_H
#define COMMON_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef USE_MPI
#include <mpi.h>
#else
#include "single_rank.h"
#endif

/* A build with -DPERTURB makes every kernel's result slightly wrong, to test that verification detects it. */
#ifdef PERTURB
#define PERTURBED(x) ((x) * (1 + 1e-6))
#else
#define PERTURBED(x) (x)
#endif

extern int rank, ranks;

/* Starts MPI. Returns the class, 'S', 'W' or 'A', from the first argument. */
char begin(int argc, char **argv, const char *kernel);

/* Starts MPI; for workloads that take other arguments. `class` is the text for messages and the report. */
void join_ranks(int argc, char **argv, const char *kernel);
void set_class(char class);

/* Refuses arguments: all ranks call it, rank 0 prints the error on standard error and ends with status 2. No rank aborts: mpirun
 * may kill ranks that abort before it has read what they printed. */
_Noreturn void refuse(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* Prints this rank's error on standard error, and ends all ranks with status 2. */
_Noreturn void fail(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* Allocates memory, set to zero; exits on failure. */
void *allocate(size_t count, size_t size);

/* Waits for all ranks; returns the time in seconds. */
double start(void);
double now(void);

/* Whether two values agree within a relative tolerance; if not, rank 0 prints both. */
bool agrees(const char *what, double got, double expected, double tolerance);

/* Rank 0 prints the result as one line of JSON; `more` holds the workload's own members, beginning with a comma. A run
 * that is not verified prints no figures. Returns the exit status of the program. */
int report(double seconds, double operations, bool verified, const char *more);

/* Sums values over all ranks. */
void sum(double *values, int count);

/* The start of part `part` of 0..`total` split into `parts` parts, whose sizes differ by one at most. */
int part_start(int total, int part, int parts);

/* Pseudo-random numbers, section 2.3 of the report: x' = 5^13 x mod 2^46. The product modulo 2^64 has the correct
 * lowest 46 bits. */
#define RANDOM_A UINT64_C(1220703125)
#define RANDOM_MASK ((UINT64_C(1) << 46) - 1)
#define RANDOM_SEED UINT64_C(314159265)

/* The state after `steps` further numbers. */
uint64_t random_jump(uint64_t state, uint64_t steps);

/* The next number, in (0, 1). */
static inline double random_next(uint64_t *state)
{
    *state = *state * RANDOM_A & RANDOM_MASK;
    return (double)*state * 0x1p-46;
}

#endif
