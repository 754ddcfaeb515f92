/* A disk that fails: preloaded into a daemon, it lets the n-th call of one kind on files below a folder fail, or ends the
 * process there as a power cut would (after half of a write).
 *
 *   cc -shared -fPIC -O1 -o inject.so inject.c -ldl
 *
 *   FAULT_FOLDER   the folder; calls on other files are never touched
 *   FAULT_COUNTS   a file that receives the number of calls of each kind (see KINDS), as native unsigned longs
 *   FAULT_CALL     one or more of write, sync, rename, open, read, close, truncate or unlink; without it calls are only counted
 *   FAULT_NTH      which call, from 1
 *   FAULT_TIMES    how many from there on fail; 0: all
 *   FAULT_EVERY    instead: every so many calls one fails
 *   FAULT_ERRNO    the error; 0: the process ends there
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <unistd.h>
#include <stdio.h>

enum { WRITE, SYNC, RENAME, OPEN, READ, CLOSE, TRUNCATE, UNLINK, KINDS };
static const char *NAMES[KINDS] = {"write", "sync", "rename", "open", "read", "close", "truncate", "unlink"};
#define FDS_MAX 65536

static char folder[PATH_MAX];
static size_t folder_length;
static unsigned long *counts;
static int error_number;
static unsigned chosen; /* a bit for each kind */
static unsigned long nth, times, every;
static unsigned char is_ours[FDS_MAX]; /* by descriptor: whether it was opened below the folder */

#define REAL(name) static __typeof__(&name) real; if (!real) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)

/* Where the library was preloaded into a process that forks daemons, each calls it with its own variables. */
__attribute__((constructor)) void begin_faults(void) {
    const char *path = getenv("FAULT_FOLDER"), *call = getenv("FAULT_CALL"), *where = getenv("FAULT_COUNTS");
    if (!path || !where) return;
    int fd = open(where, O_RDWR);
    if (fd < 0) return;
    counts = mmap(NULL, KINDS * sizeof *counts, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (counts == MAP_FAILED) { counts = NULL; return; }
    for (int kind = 0; call && kind < KINDS; kind++) if (strstr(call, NAMES[kind])) chosen |= 1u << kind;
    nth = getenv("FAULT_NTH") ? strtoul(getenv("FAULT_NTH"), NULL, 10) : 0;
    times = getenv("FAULT_TIMES") ? strtoul(getenv("FAULT_TIMES"), NULL, 10) : 1;
    every = getenv("FAULT_EVERY") ? strtoul(getenv("FAULT_EVERY"), NULL, 10) : 0;
    error_number = getenv("FAULT_ERRNO") ? atoi(getenv("FAULT_ERRNO")) : 5;
    snprintf(folder, sizeof folder, "%s", path);
    folder_length = strlen(folder);
}

static int below(int directory, const char *path) {
    if (!folder_length || !path) return 0;
    if (path[0] == '/') return !strncmp(path, folder, folder_length);
    if (directory == AT_FDCWD) return 0; /* a daemon names files by their full paths */
    return directory >= 0 && directory < FDS_MAX && is_ours[directory];
}

static int ours(int fd) { return folder_length && fd >= 0 && fd < FDS_MAX && is_ours[fd]; }

/* Counts a call; whether it is to fail. Where the process is to end, it does. */
static int fails(int kind) {
    if (!counts) return 0;
    unsigned long number = __atomic_add_fetch(&counts[kind], 1, __ATOMIC_SEQ_CST);
    if (!(chosen & 1u << kind)) return 0;
    if (every ? number % every : number < nth || (times && number >= nth + times)) return 0;
    if (!error_number && kind != WRITE) kill(getpid(), SIGKILL);
    errno = error_number;
    return 1;
}

static ssize_t cut(ssize_t (*real)(int, const void *, size_t), int fd, const void *data, size_t length) {
    ssize_t written = real(fd, data, length / 2);
    if (!error_number) kill(getpid(), SIGKILL);
    if (written > 0 && error_number == ENOSPC) return written; /* a full disk takes what it has room for, then fails */
    errno = error_number;
    return -1;
}

ssize_t write(int fd, const void *data, size_t length) {
    REAL(write);
    return ours(fd) && fails(WRITE) ? cut(real, fd, data, length) : real(fd, data, length);
}

ssize_t writev(int fd, const struct iovec *parts, int count) {
    REAL(writev);
    if (ours(fd) && fails(WRITE)) { if (!error_number) kill(getpid(), SIGKILL); return -1; }
    return real(fd, parts, count);
}

#define PWRITE(name, offset_type) \
    ssize_t name(int fd, const void *data, size_t length, offset_type offset) { \
        REAL(name); \
        if (ours(fd) && fails(WRITE)) { if (!error_number) kill(getpid(), SIGKILL); return -1; } \
        return real(fd, data, length, offset); \
    }
PWRITE(pwrite, off_t)
PWRITE(pwrite64, off64_t)

#define FAILING(kind, name, parameters, mine, arguments) \
    int name parameters { REAL(name); if (mine && fails(kind)) return -1; return real arguments; }
FAILING(SYNC, fsync, (int fd), ours(fd), (fd))
FAILING(SYNC, fdatasync, (int fd), ours(fd), (fd))
FAILING(TRUNCATE, ftruncate, (int fd, off_t length), ours(fd), (fd, length))
FAILING(TRUNCATE, ftruncate64, (int fd, off64_t length), ours(fd), (fd, length))
FAILING(RENAME, rename, (const char *from, const char *to), below(AT_FDCWD, to), (from, to))
FAILING(RENAME, renameat, (int a, const char *from, int b, const char *to), below(b, to), (a, from, b, to))
FAILING(UNLINK, unlink, (const char *path), below(AT_FDCWD, path), (path))
FAILING(UNLINK, unlinkat, (int at, const char *path, int flags), below(at, path), (at, path, flags))

int close(int fd) {
    REAL(close);
    int mine = ours(fd);
    if (mine) is_ours[fd] = 0;
    int failed = mine && fails(CLOSE), saved = errno;
    int result = real(fd); /* Linux closes the descriptor also where close fails */
    if (!failed) return result;
    errno = saved;
    return -1;
}

#define READING(name, parameters, arguments) \
    ssize_t name parameters { REAL(name); if (ours(fd) && fails(READ)) return -1; return real arguments; }
READING(read, (int fd, void *data, size_t length), (fd, data, length))
READING(pread, (int fd, void *data, size_t length, off_t offset), (fd, data, length, offset))
READING(pread64, (int fd, void *data, size_t length, off64_t offset), (fd, data, length, offset))

static int noted(int fd, int mine) {
    if (mine && fd >= 0 && fd < FDS_MAX) is_ours[fd] = 1;
    return fd;
}

#define OPENING(name, parameters, directory, real_arguments) \
    int name parameters { \
        REAL(name); \
        mode_t mode = 0; \
        if (flags & (O_CREAT | O_TMPFILE)) { va_list more; va_start(more, flags); mode = va_arg(more, mode_t); va_end(more); } \
        int mine = below(directory, path); \
        if (mine && fails(OPEN)) return -1; \
        return noted(real real_arguments, mine); \
    }
OPENING(open, (const char *path, int flags, ...), AT_FDCWD, (path, flags, mode))
OPENING(open64, (const char *path, int flags, ...), AT_FDCWD, (path, flags, mode))
OPENING(openat, (int at, const char *path, int flags, ...), at, (at, path, flags, mode))
OPENING(openat64, (int at, const char *path, int flags, ...), at, (at, path, flags, mode))
