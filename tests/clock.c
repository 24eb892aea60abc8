/* Shifts the wall clock, and nothing else, of the process that preloads it: CLOCK_OFFSET_S seconds ahead.
 * libfaketime shifts clock_nanosleep as well. The kernel's own clock, which dates files, stays. */
#include <stdlib.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static time_t offset(void)
{
    const char *text = getenv("CLOCK_OFFSET_S");
    return text ? atol(text) : 0;
}

int clock_gettime(clockid_t clock, struct timespec *now)
{
    int failed = (int)syscall(SYS_clock_gettime, clock, now);
    if (!failed && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE))
        now->tv_sec += offset();
    return failed;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone)
{
    int failed = (int)syscall(SYS_gettimeofday, now, zone);
    if (!failed && now)
        now->tv_sec += offset();
    return failed;
}

time_t time(time_t *store)
{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (store)
        *store = now.tv_sec;
    return now.tv_sec;
}
