/* MPI with one rank, for builds without MPI: only the functions that the kernels call. A message to oneself is a copy.
 * */
#ifndef SINGLE_RANK_H
#define SINGLE_RANK_H

#include <stdlib.h>
#include <string.h>

typedef int MPI_Comm;
typedef size_t MPI_Datatype; /* The size of an element. */
typedef int MPI_Op;
typedef int MPI_Request;
typedef int MPI_Status;

#define MPI_COMM_WORLD 0
#define MPI_PROC_NULL (-1)
#define MPI_IN_PLACE ((void *)1)
#define MPI_STATUS_IGNORE ((MPI_Status *)0)
#define MPI_STATUSES_IGNORE ((MPI_Status *)0)
#define MPI_REQUEST_NULL 0
#define MPI_DOUBLE sizeof(double)
#define MPI_INT sizeof(int)
#define MPI_UINT64_T sizeof(uint64_t)
#define MPI_SUM 0
#define MPI_MAX 0

static inline void MPI_Init(int *argc, char ***argv) { (void)argc, (void)argv; }
static inline void MPI_Finalize(void) {}
static inline void MPI_Abort(MPI_Comm comm, int status) { (void)comm, exit(status); }
static inline void MPI_Barrier(MPI_Comm comm) { (void)comm; }
static inline void MPI_Comm_rank(MPI_Comm comm, int *rank) { (void)comm, *rank = 0; }
static inline void MPI_Comm_size(MPI_Comm comm, int *size) { (void)comm, *size = 1; }

static inline void MPI_Comm_split(MPI_Comm comm, int color, int key, MPI_Comm *part)
{
    (void)color, (void)key;
    *part = comm;
}

/* One rank's contribution is the result: the kernels only reduce in place. */
static inline void MPI_Allreduce(const void *in, void *out, int count, MPI_Datatype type, MPI_Op op, MPI_Comm comm)
{
    (void)in, (void)out, (void)count, (void)type, (void)op, (void)comm;
}

static inline void MPI_Alltoall(const void *in, int count, MPI_Datatype type, void *out, int out_count,
                                MPI_Datatype out_type, MPI_Comm comm)
{
    (void)out_count, (void)out_type, (void)comm;
    memcpy(out, in, (size_t)count * type);
}

static inline void MPI_Alltoallv(const void *in, const int *counts, const int *starts, MPI_Datatype type, void *out,
                                 const int *out_counts, const int *out_starts, MPI_Datatype out_type, MPI_Comm comm)
{
    (void)starts, (void)out_counts, (void)out_starts, (void)out_type, (void)comm;
    memcpy(out, in, (size_t)counts[0] * type);
}

static inline void MPI_Sendrecv(const void *in, int count, MPI_Datatype type, int to, int tag, void *out, int out_count,
                                MPI_Datatype out_type, int from, int out_tag, MPI_Comm comm, MPI_Status *status)
{
    (void)out_count, (void)out_type, (void)from, (void)tag, (void)out_tag, (void)comm, (void)status;
    if (to != MPI_PROC_NULL)
        memcpy(out, in, (size_t)count * type);
}

/* The only other rank that a message can name is MPI_PROC_NULL. */
static inline void MPI_Send(const void *in, int count, MPI_Datatype type, int to, int tag, MPI_Comm comm)
{
    (void)in, (void)count, (void)type, (void)to, (void)tag, (void)comm;
}

static inline void MPI_Recv(void *out, int count, MPI_Datatype type, int from, int tag, MPI_Comm comm,
                            MPI_Status *status)
{
    (void)out, (void)count, (void)type, (void)from, (void)tag, (void)comm, (void)status;
}

static inline void MPI_Isend(const void *in, int count, MPI_Datatype type, int to, int tag, MPI_Comm comm,
                             MPI_Request *request)
{
    MPI_Send(in, count, type, to, tag, comm);
    *request = MPI_REQUEST_NULL;
}

static inline void MPI_Irecv(void *out, int count, MPI_Datatype type, int from, int tag, MPI_Comm comm,
                             MPI_Request *request)
{
    MPI_Recv(out, count, type, from, tag, comm, MPI_STATUS_IGNORE);
    *request = MPI_REQUEST_NULL;
}

static inline void MPI_Waitall(int count, MPI_Request *requests, MPI_Status *statuses)
{
    (void)count, (void)requests, (void)statuses;
}

#endif
