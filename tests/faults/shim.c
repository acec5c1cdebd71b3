/* Loaded into a job with LD_PRELOAD: makes the n-th operation on files below a folder fail, or sets the clock back.

   What is to fail is said in a control block, a file that is mapped into the memory of every process of the job, so that
   operations are counted across processes, and a process that was started before the fault was chosen learns of it. Its
   layout is that of `Control` in injury.py. Only operations on paths that begin with `folder` are counted. */

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/types.h>
#include <time.h>
#include <unistd.h>

enum { NOTHING, FAIL, SHORT, KILL, KILL_GROUP, TEAR, LIE, CLOCK };
enum { OPEN = 1, WRITE = 2, FSYNC = 4, RENAME = 8, UNLINK = 16, MKDIR = 32, TRUNCATE = 64, READ = 128, CLOSE = 256 };

struct control {
    int64_t count;  /* operations so far */
    int64_t first;  /* the first that is hit, counted from 1; 0: none */
    int64_t last;   /* and the last */
    int64_t shift;  /* seconds that CLOCK sets the clock back */
    int32_t action;
    int32_t error;  /* errno of FAIL */
    uint32_t kinds; /* which operations count */
    int32_t fired;  /* how many were hit */
    char folder[4096];
};

static struct control *control;

__attribute__((constructor)) static void map_control(void) {
    const char *path = getenv("FAULT_CONTROL");
    if (!path) return;
    int fd = (int)syscall(SYS_openat, AT_FDCWD, path, O_RDWR | O_CLOEXEC);
    if (fd < 0) return;
    void *block = mmap(NULL, sizeof(struct control), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    syscall(SYS_close, fd);
    if (block != MAP_FAILED) control = block;
}

static int is_below(const char *path) {
    size_t length = strlen(control->folder);
    return length && strncmp(path, control->folder, length) == 0 && (path[length] == '/' || path[length] == 0);
}

/* Whether `path`, relative to the folder of descriptor `at`, lies in the folder that counts. */
static int counts_path(int at, const char *path) {
    char full[8192], link[64];
    if (!control || !path) return 0;
    if (path[0] == '/') return is_below(path);
    if (at == AT_FDCWD) {
        if (syscall(SYS_getcwd, full, 4096) < 0) return 0;
    } else {
        snprintf(link, sizeof link, "/proc/self/fd/%d", at);
        ssize_t length = readlink(link, full, 4095);
        if (length < 0) return 0;
        full[length] = 0;
    }
    strncat(full, "/", sizeof full - strlen(full) - 1);
    strncat(full, path, sizeof full - strlen(full) - 1);
    return is_below(full);
}

static int counts_fd(int fd) {
    char full[4096], link[64];
    if (!control || fd < 0) return 0;
    int before = errno;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, full, sizeof full - 1);
    errno = before;
    if (length < 0) return 0;
    full[length] = 0;
    return is_below(full);
}

/* Count one operation; return what is to be done to it. KILL does not return. */
static int hit(unsigned kind) {
    if (!(control->kinds & kind)) return NOTHING;
    int64_t number = __atomic_add_fetch(&control->count, 1, __ATOMIC_SEQ_CST);
    if (!control->first || number < control->first || number > control->last) return NOTHING;
    __atomic_add_fetch(&control->fired, 1, __ATOMIC_SEQ_CST);
    if (control->action == KILL) kill(getpid(), SIGKILL);
    if (control->action == KILL_GROUP) kill(0, SIGKILL);
    return control->action;
}

static int failed(void) {
    errno = control->error;
    return -1;
}

/* Data */

static ssize_t written(int fd, const void *data, size_t size, off_t offset, int at_offset) {
    size_t taken = size;
    if (counts_fd(fd)) {
        int action = hit(WRITE);
        if (action == FAIL) return failed();
        if (action == LIE) return (ssize_t)size;
        if (action == SHORT || action == TEAR) taken = size > 1 ? size / 2 : size;
        if (action == TEAR) {
            syscall(at_offset ? SYS_pwrite64 : SYS_write, fd, data, taken, offset);
            kill(0, SIGKILL);
        }
    }
    return at_offset ? syscall(SYS_pwrite64, fd, data, taken, offset) : syscall(SYS_write, fd, data, taken);
}

ssize_t write(int fd, const void *data, size_t size) { return written(fd, data, size, 0, 0); }
ssize_t pwrite(int fd, const void *data, size_t size, off_t offset) { return written(fd, data, size, offset, 1); }
ssize_t pwrite64(int fd, const void *data, size_t size, off64_t offset) { return written(fd, data, size, offset, 1); }

ssize_t read(int fd, void *data, size_t size) {
    if (control && control->kinds & READ && counts_fd(fd)) {
        int action = hit(READ);
        if (action == FAIL) return failed();
        if (action == SHORT && size > 1) size /= 2;
    }
    return syscall(SYS_read, fd, data, size);
}

static int synced(long call, int fd) {
    if (counts_fd(fd)) {
        int action = hit(FSYNC);
        if (action == FAIL) return failed();
        if (action == LIE) return 0;
    }
    return (int)syscall(call, fd);
}

int fsync(int fd) { return synced(SYS_fsync, fd); }
int fdatasync(int fd) { return synced(SYS_fdatasync, fd); }

int ftruncate(int fd, off_t length) {
    if (counts_fd(fd) && hit(TRUNCATE) == FAIL) return failed();
    return (int)syscall(SYS_ftruncate, fd, length);
}
int ftruncate64(int fd, off64_t length) { return ftruncate(fd, length); }

int truncate(const char *path, off_t length) {
    if (counts_path(AT_FDCWD, path) && hit(TRUNCATE) == FAIL) return failed();
    return (int)syscall(SYS_truncate, path, length);
}
int truncate64(const char *path, off64_t length) { return truncate(path, length); }

static int is_file(int fd) {
    struct stat found;
    return fstat(fd, &found) == 0 && S_ISREG(found.st_mode);
}

int close(int fd) { /* of files only: no system reports an error of the disk when a folder is closed */
    int is_hit = control && control->kinds & CLOSE && counts_fd(fd) && is_file(fd) && hit(CLOSE) == FAIL;
    int result = (int)syscall(SYS_close, fd);
    return is_hit ? failed() : result;
}

/* Names */

static int opened(int at, const char *path, int flags, mode_t mode) {
    if (counts_path(at, path) && hit(OPEN) == FAIL) return failed();
    return (int)syscall(SYS_openat, at, path, flags, mode);
}

static mode_t mode_of(int flags, va_list rest) { return flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0; }

#define DEFINE_OPEN(name)                                   \
    int name(const char *path, int flags, ...) {            \
        va_list rest;                                       \
        va_start(rest, flags);                              \
        mode_t mode = mode_of(flags, rest);                 \
        va_end(rest);                                       \
        return opened(AT_FDCWD, path, flags, mode);         \
    }
#define DEFINE_OPENAT(name)                                 \
    int name(int at, const char *path, int flags, ...) {    \
        va_list rest;                                       \
        va_start(rest, flags);                              \
        mode_t mode = mode_of(flags, rest);                 \
        va_end(rest);                                       \
        return opened(at, path, flags, mode);               \
    }
DEFINE_OPEN(open)
DEFINE_OPEN(open64)
DEFINE_OPENAT(openat)
DEFINE_OPENAT(openat64)

int renameat(int from_at, const char *from, int to_at, const char *to) {
    if ((counts_path(from_at, from) || counts_path(to_at, to)) && hit(RENAME) == FAIL) return failed();
    return (int)syscall(SYS_renameat2, from_at, from, to_at, to, 0);
}
int rename(const char *from, const char *to) { return renameat(AT_FDCWD, from, AT_FDCWD, to); }

int linkat(int from_at, const char *from, int to_at, const char *to, int flags) {
    if (counts_path(to_at, to) && hit(RENAME) == FAIL) return failed();
    return (int)syscall(SYS_linkat, from_at, from, to_at, to, flags);
}
int link(const char *from, const char *to) { return linkat(AT_FDCWD, from, AT_FDCWD, to, 0); }

int unlinkat(int at, const char *path, int flags) {
    if (counts_path(at, path) && hit(UNLINK) == FAIL) return failed();
    return (int)syscall(SYS_unlinkat, at, path, flags);
}
int unlink(const char *path) { return unlinkat(AT_FDCWD, path, 0); }
int rmdir(const char *path) { return unlinkat(AT_FDCWD, path, AT_REMOVEDIR); }

int mkdirat(int at, const char *path, mode_t mode) {
    if (counts_path(at, path) && hit(MKDIR) == FAIL) return failed();
    return (int)syscall(SYS_mkdirat, at, path, mode);
}
int mkdir(const char *path, mode_t mode) { return mkdirat(AT_FDCWD, path, mode); }

/* The clock: once the first operation that is to be hit was counted, the time of day is `shift` seconds earlier. */

static int64_t shift_now(void) {
    if (!control || control->action != CLOCK) return 0;
    return __atomic_load_n(&control->count, __ATOMIC_SEQ_CST) >= control->first ? control->shift : 0;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    int result = (int)syscall(SYS_clock_gettime, clock, now);
    if (!result && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec -= shift_now();
    return result;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    int result = (int)syscall(SYS_gettimeofday, now, zone);
    if (!result) now->tv_sec -= shift_now();
    return result;
}

time_t time(time_t *out) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (out) *out = now.tv_sec;
    return now.tv_sec;
}
