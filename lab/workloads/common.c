/* See common.h. */
#include "common.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#ifdef _OPENMP
#include <omp.h>
#endif

int rank, ranks;
static const char *kernel_name;
static char class_name;

void join_ranks(int argc, char **argv, const char *kernel)
{
    kernel_name = kernel;
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
}

void set_class(char class)
{
    class_name = class;
}

char begin(int argc, char **argv, const char *kernel)
{
    join_ranks(argc, argv, kernel);
    if (argc < 2 || strlen(argv[1]) != 1 || !strchr("SWA", argv[1][0]))
        refuse("usage: %s S|W|A", argv[0]);
    set_class(argv[1][0]);
    return class_name;
}

/* One write: mpirun mixes what ranks write with what it writes itself. */
static void say(const char *format, va_list arguments)
{
    char text[256];
    vsnprintf(text, sizeof text, format, arguments);
    fprintf(stderr, "%s: %s\n", kernel_name, text);
}

_Noreturn void refuse(const char *format, ...)
{
    if (rank == 0) {
        va_list arguments;
        va_start(arguments, format);
        say(format, arguments);
        va_end(arguments);
    }
    MPI_Finalize();
    exit(rank == 0 ? 2 : 0);
}

_Noreturn void fail(const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    say(format, arguments);
    va_end(arguments);
    MPI_Abort(MPI_COMM_WORLD, 2);
    abort();
}

void *allocate(size_t count, size_t size)
{
    void *memory = calloc(count ? count : 1, size);
    if (!memory)
        fail("no memory for %zu times %zu bytes", count, size);
    return memory;
}

double now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

double start(void)
{
    MPI_Barrier(MPI_COMM_WORLD);
    return now();
}

bool agrees(const char *what, double got, double expected, double tolerance)
{
    bool same = fabs(got - expected) <= tolerance * fabs(expected);
    if (!same && rank == 0)
        fprintf(stderr, "%s class %c: %s is %.15e, not %.15e\n", kernel_name, class_name, what, got, expected);
    return same;
}

int report(double seconds, double operations, bool verified, const char *more)
{
    int wrong = !verified, threads = 1;
    MPI_Allreduce(MPI_IN_PLACE, &wrong, 1, MPI_INT, MPI_MAX, MPI_COMM_WORLD);
    MPI_Allreduce(MPI_IN_PLACE, &seconds, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
#ifdef _OPENMP
    threads = omp_get_max_threads();
#endif
    if (rank == 0 && wrong)
        fprintf(stderr, "%s class %c: the result is wrong, so there are no figures\n", kernel_name, class_name);
    if (rank == 0 && !wrong)
        printf("{\"kernel\": \"%s\", \"class\": \"%c\", \"ranks\": %d, \"threads\": %d, \"seconds\": %.6f, "
               "\"mops\": %.3f, \"verified\": true%s}\n",
               kernel_name, class_name, ranks, threads, seconds, operations / seconds * 1e-6, more);
    MPI_Finalize();
    return wrong;
}

void sum(double *values, int count)
{
    MPI_Allreduce(MPI_IN_PLACE, values, count, MPI_DOUBLE, MPI_SUM, MPI_COMM_WORLD);
}

int part_start(int total, int part, int parts)
{
    return (int)((int64_t)total * part / parts);
}

uint64_t random_jump(uint64_t state, uint64_t steps)
{
    for (uint64_t power = RANDOM_A; steps; steps >>= 1, power = power * power & RANDOM_MASK)
        if (steps & 1)
            state = state * power & RANDOM_MASK;
    return state;
}
