/* LD_PRELOAD: the wall clock of a program is off by as many seconds as the file in CLOCK_OFFSET_FILE says at that
 * moment. Other clocks and relative waits stay as they are, as when an administrator sets a machine's clock; libfaketime
 * shifts clock_nanosleep as well.
 *
 * The file holds a 64-bit integer in the machine's byte order. The kernel's own clock, which dates files, stays, and
 * what the kernel would do to waits that are under way when its clock jumps is not imitated. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

/* A machine has not been up for so long: what is larger is a time of the wall clock. */
#define WALL 1000000000

static const volatile int64_t *offset;

__attribute__((constructor)) static void open_offset(void) {
    const char *path = getenv("CLOCK_OFFSET_FILE");
    int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (file < 0)
        return;
    void *place = mmap(NULL, sizeof *offset, PROT_READ, MAP_SHARED, file, 0);
    if (place != MAP_FAILED)
        offset = place;
    close(file);
}

static int64_t shift(void) { return offset ? *offset : 0; }

int clock_gettime(clockid_t clock, struct timespec *now) {
    int failed = (int)syscall(SYS_clock_gettime, clock, now);
    if (!failed && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE))
        now->tv_sec += shift();
    return failed;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    int failed = (int)syscall(SYS_gettimeofday, now, zone);
    if (!failed)
        now->tv_sec += shift();
    return failed;
}

time_t time(time_t *where) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (where)
        *where = now.tv_sec;
    return now.tv_sec;
}

/* A moment that was computed with the shifted clock, for libc's waits, which know the real one. */
static struct timespec real(const struct timespec *moment) {
    struct timespec found = *moment;
    if (found.tv_sec > WALL)
        found.tv_sec -= shift();
    return found;
}

int pthread_cond_timedwait(pthread_cond_t *restrict condition, pthread_mutex_t *restrict mutex,
                           const struct timespec *restrict until) {
    static int (*next)(pthread_cond_t *, pthread_mutex_t *, const struct timespec *);
    if (!next)
        next = dlsym(RTLD_NEXT, "pthread_cond_timedwait");
    struct timespec moment = real(until);
    return next(condition, mutex, &moment);
}

int sem_timedwait(sem_t *restrict semaphore, const struct timespec *restrict until) {
    static int (*next)(sem_t *, const struct timespec *);
    if (!next)
        next = dlsym(RTLD_NEXT, "sem_timedwait");
    struct timespec moment = real(until);
    return next(semaphore, &moment);
}
