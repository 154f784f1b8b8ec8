/* Every rank sends messages of many sizes to every rank, and checks the data that it receives. */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int main(int argc, char **argv)
{
	int rank, ranks;
	MPI_Init(&argc, &argv);
	MPI_Comm_rank(MPI_COMM_WORLD, &rank);
	MPI_Comm_size(MPI_COMM_WORLD, &ranks);
	for (int len = 1; len <= 1 << 20; len = len * 7 + 1) {
		char *out = malloc(len), *in = malloc((size_t)len * ranks);
		MPI_Request requests[64];
		memset(out, rank + 1, len);
		for (int i = 0; i < ranks; i++) {
			MPI_Irecv(in + (size_t)i * len, len, MPI_CHAR, i, len, MPI_COMM_WORLD, &requests[2 * i]);
			MPI_Isend(out, len, MPI_CHAR, i, len, MPI_COMM_WORLD, &requests[2 * i + 1]);
		}
		MPI_Waitall(2 * ranks, requests, MPI_STATUSES_IGNORE);
		for (int i = 0; i < ranks; i++) {
			for (int place = 0; place < len; place++) {
				if (in[(size_t)i * len + place] != i + 1) {
					fprintf(stderr, "rank %d: wrong byte %d of %d from %d\n", rank, place, len, i);
					MPI_Abort(MPI_COMM_WORLD, 1);
				}
			}
		}
		free(in);
		free(out);
	}
	int sum = 0, one = rank + 1;
	MPI_Allreduce(&one, &sum, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
	if (rank == 0 && sum == ranks * (ranks + 1) / 2)
		printf("%d ranks agree\n", ranks);
	MPI_Finalize();
	return 0;
}
