/* A wall clock that can be set for one program. Loaded by LD_PRELOAD, it adds the number of seconds in the text file
 * $CLOCK_AHEAD to every reading of CLOCK_REALTIME. The file is mapped, so changes apply at once. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static const char *ahead;

__attribute__((constructor)) static void open_file(void)
{
    const char *path = getenv("CLOCK_AHEAD");
    int fd = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    void *mapped = fd < 0 ? MAP_FAILED : mmap(NULL, 4096, PROT_READ, MAP_SHARED, fd, 0);

    ahead = mapped == MAP_FAILED ? NULL : mapped;
    if (fd >= 0)
        close(fd);
}

int clock_gettime(clockid_t clock, struct timespec *time)
{
    int failed = (int)syscall(SYS_clock_gettime, clock, time);

    if (!failed && clock == CLOCK_REALTIME && ahead)
        time->tv_sec += atoll(ahead);
    return failed;
}

time_t time(time_t *where)
{
    struct timespec now;

    clock_gettime(CLOCK_REALTIME, &now);
    if (where)
        *where = now.tv_sec;
    return now.tv_sec;
}
