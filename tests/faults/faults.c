/* Makes the n-th operation on files in a folder fail; loaded with LD_PRELOAD.
 *
 * FAULTS_FOLDER is the folder, and FAULTS_STATE a file that holds a struct state. The process and
 * its children map that file, so they share one counter. What glibc does within itself bypasses
 * this library: fwrite and fclose, but not fopen. */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

enum { READS = 1, CREATES = 2, READ = 4, WRITE = 8, SYNC = 16, CLOSE = 32, RENAME = 64,
       UNLINK = 128, MKDIR = 256, TRUNCATE = 512, MMAP = 1024, COPY = 2048, LIST = 4096 };

struct state {
    _Atomic long armed, count, first;
    long error;     /* 0 only counts, -1 kills the process */
    long stays;     /* whether all later operations fail too */
    long operations;
    char failed[512];
};

static struct state *state;
static char folder[256];
static size_t length;

__attribute__((constructor)) static void start(void) {
    const char *file = getenv("FAULTS_STATE"), *below = getenv("FAULTS_FOLDER");
    int fd = file && below ? syscall(SYS_openat, AT_FDCWD, file, O_RDWR) : -1;
    if (fd < 0) return;
    void *at = (void *)syscall(SYS_mmap, 0, sizeof *state, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    syscall(SYS_close, fd);
    strncpy(folder, below, sizeof folder - 1);
    length = strlen(folder);
    if (at != MAP_FAILED) state = at;
}

/* Return the error that an operation on an absolute path must have, or 0. */
static int fail(int operation, const char *name, const char *path) {
    if (strncmp(path, folder, length) || (path[length] && path[length] != '/')) return 0;
    if (!(state->operations & operation)) return 0;
    long number = atomic_fetch_add(&state->count, 1) + 1, first = state->first;
    if (!state->error || number < first || (number > first && !state->stays)) return 0;
    if (number == first) snprintf(state->failed, sizeof state->failed, "%s %s", name, path);
    return state->error;
}

static void die(void) { syscall(SYS_kill, getpid(), SIGKILL); for (;;) pause(); }

static int is_armed(void) { return state && state->armed; }

/* The same for a path below an open folder; kills the process if it must end here. */
static int fail_path(int operation, const char *name, int at, const char *path) {
    char whole[4096], link[64];
    if (!is_armed() || !path) return 0;
    if (*path != '/') {
        ssize_t size = 0;
        if (at == AT_FDCWD) {
            if (syscall(SYS_getcwd, whole, 2048) > 0) size = strlen(whole);
        } else {
            snprintf(link, sizeof link, "/proc/self/fd/%d", at);
            size = readlink(link, whole, 2048);
        }
        if (size <= 0) return 0;
        snprintf(whole + size, sizeof whole - size, "/%s", path);
        path = whole;
    }
    int error = fail(operation, name, path);
    if (error < 0) die();
    return error;
}

/* The same for an open file; does not kill the process. */
static int fail_open(int operation, const char *name, int fd) {
    char link[64], path[4096];
    if (!is_armed() || fd < 0) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t size = readlink(link, path, sizeof path - 1);
    if (size <= 0) return 0;
    path[size] = 0;
    return fail(operation, name, path);
}

#define NEXT(name) static __typeof__(&name) next; if (!next) next = (__typeof__(&name))dlsym(RTLD_NEXT, #name)
#define FAIL_PATH(operation, name, at, path, result) \
    do { int e = fail_path(operation, name, at, path); if (e) { errno = e; return result; } } while (0)
#define FAIL_OPEN(operation, name, fd, result) \
    do { int e = fail_open(operation, name, fd); if (e < 0) die(); if (e) { errno = e; return result; } } while (0)

#define OPERATION(flags) ((flags) & (O_CREAT | O_WRONLY | O_RDWR) ? CREATES : READS)
#define MODE() mode_t mode = 0; \
    if (flags & (O_CREAT | O_TMPFILE)) { va_list more; va_start(more, flags); mode = va_arg(more, mode_t); va_end(more); }

int open(const char *path, int flags, ...) {
    NEXT(open); MODE(); FAIL_PATH(OPERATION(flags), "open", AT_FDCWD, path, -1);
    return next(path, flags, mode);
}
int open64(const char *path, int flags, ...) {
    NEXT(open64); MODE(); FAIL_PATH(OPERATION(flags), "open", AT_FDCWD, path, -1);
    return next(path, flags, mode);
}
int openat(int at, const char *path, int flags, ...) {
    NEXT(openat); MODE(); FAIL_PATH(OPERATION(flags), "open", at, path, -1);
    return next(at, path, flags, mode);
}
int openat64(int at, const char *path, int flags, ...) {
    NEXT(openat64); MODE(); FAIL_PATH(OPERATION(flags), "open", at, path, -1);
    return next(at, path, flags, mode);
}
FILE *fopen(const char *path, const char *mode) {
    NEXT(fopen); FAIL_PATH(strpbrk(mode, "wa+") ? CREATES : READS, "fopen", AT_FDCWD, path, NULL);
    return next(path, mode);
}
FILE *fopen64(const char *path, const char *mode) {
    NEXT(fopen64); FAIL_PATH(strpbrk(mode, "wa+") ? CREATES : READS, "fopen", AT_FDCWD, path, NULL);
    return next(path, mode);
}
DIR *opendir(const char *path) {
    NEXT(opendir); FAIL_PATH(LIST, "opendir", AT_FDCWD, path, NULL);
    return next(path);
}

ssize_t read(int fd, void *to, size_t size) { NEXT(read); FAIL_OPEN(READ, "read", fd, -1); return next(fd, to, size); }
ssize_t pread(int fd, void *to, size_t size, off_t at) { NEXT(pread); FAIL_OPEN(READ, "read", fd, -1); return next(fd, to, size, at); }
ssize_t pread64(int fd, void *to, size_t size, off64_t at) { NEXT(pread64); FAIL_OPEN(READ, "read", fd, -1); return next(fd, to, size, at); }
ssize_t readv(int fd, const struct iovec *parts, int count) { NEXT(readv); FAIL_OPEN(READ, "read", fd, -1); return next(fd, parts, count); }

/* A disk becomes full, or a process ends, when half of the bytes are written. */
#define FAIL_WRITE(half) \
    int e = fail_open(WRITE, "write", fd); \
    if (e && (e < 0 || (e == ENOSPC && state->stays && state->count == state->first)) && size > 1) { \
        ssize_t written = half; if (e < 0) die(); return written; } \
    if (e < 0) die(); \
    if (e) { errno = e; return -1; }
ssize_t write(int fd, const void *from, size_t size) { NEXT(write); FAIL_WRITE(next(fd, from, size / 2)); return next(fd, from, size); }
ssize_t pwrite(int fd, const void *from, size_t size, off_t at) { NEXT(pwrite); FAIL_WRITE(next(fd, from, size / 2, at)); return next(fd, from, size, at); }
ssize_t pwrite64(int fd, const void *from, size_t size, off64_t at) { NEXT(pwrite64); FAIL_WRITE(next(fd, from, size / 2, at)); return next(fd, from, size, at); }
ssize_t writev(int fd, const struct iovec *parts, int size) { NEXT(writev); FAIL_WRITE(next(fd, parts, size / 2)); return next(fd, parts, size); }

/* No test cuts the power. */
int fsync(int fd) { FAIL_OPEN(SYNC, "fsync", fd, -1); return 0; }
int fdatasync(int fd) { FAIL_OPEN(SYNC, "fsync", fd, -1); return 0; }
int close(int fd) {
    NEXT(close);
    int writes = is_armed() && (fcntl(fd, F_GETFL) & O_ACCMODE) != O_RDONLY;
    int e = writes ? fail_open(CLOSE, "close", fd) : 0;
    if (e < 0) die();
    int result = next(fd);
    if (e) { errno = e; return -1; }
    return result;
}

int rename(const char *from, const char *to) { NEXT(rename); FAIL_PATH(RENAME, "rename", AT_FDCWD, to, -1); return next(from, to); }
int renameat(int f, const char *from, int t, const char *to) { NEXT(renameat); FAIL_PATH(RENAME, "rename", t, to, -1); return next(f, from, t, to); }
int renameat2(int f, const char *from, int t, const char *to, unsigned flags) { NEXT(renameat2); FAIL_PATH(RENAME, "rename", t, to, -1); return next(f, from, t, to, flags); }
int link(const char *from, const char *to) { NEXT(link); FAIL_PATH(RENAME, "link", AT_FDCWD, to, -1); return next(from, to); }
int symlink(const char *from, const char *to) { NEXT(symlink); FAIL_PATH(RENAME, "symlink", AT_FDCWD, to, -1); return next(from, to); }
int unlink(const char *path) { NEXT(unlink); FAIL_PATH(UNLINK, "unlink", AT_FDCWD, path, -1); return next(path); }
int unlinkat(int at, const char *path, int flags) { NEXT(unlinkat); FAIL_PATH(UNLINK, "unlink", at, path, -1); return next(at, path, flags); }
int rmdir(const char *path) { NEXT(rmdir); FAIL_PATH(UNLINK, "rmdir", AT_FDCWD, path, -1); return next(path); }
int mkdir(const char *path, mode_t mode) { NEXT(mkdir); FAIL_PATH(MKDIR, "mkdir", AT_FDCWD, path, -1); return next(path, mode); }
int mkdirat(int at, const char *path, mode_t mode) { NEXT(mkdirat); FAIL_PATH(MKDIR, "mkdir", at, path, -1); return next(at, path, mode); }

int truncate(const char *path, off_t size) { NEXT(truncate); FAIL_PATH(TRUNCATE, "truncate", AT_FDCWD, path, -1); return next(path, size); }
int truncate64(const char *path, off64_t size) { NEXT(truncate64); FAIL_PATH(TRUNCATE, "truncate", AT_FDCWD, path, -1); return next(path, size); }
int ftruncate(int fd, off_t size) { NEXT(ftruncate); FAIL_OPEN(TRUNCATE, "truncate", fd, -1); return next(fd, size); }
int ftruncate64(int fd, off64_t size) { NEXT(ftruncate64); FAIL_OPEN(TRUNCATE, "truncate", fd, -1); return next(fd, size); }
int posix_fallocate(int fd, off_t at, off_t size) { NEXT(posix_fallocate); int e = fail_open(TRUNCATE, "fallocate", fd); if (e < 0) die(); return e ? e : next(fd, at, size); }
int posix_fallocate64(int fd, off64_t at, off64_t size) { NEXT(posix_fallocate64); int e = fail_open(TRUNCATE, "fallocate", fd); if (e < 0) die(); return e ? e : next(fd, at, size); }

void *mmap(void *a, size_t size, int protection, int flags, int fd, off_t at) { NEXT(mmap); FAIL_OPEN(MMAP, "mmap", fd, MAP_FAILED); return next(a, size, protection, flags, fd, at); }
void *mmap64(void *a, size_t size, int protection, int flags, int fd, off64_t at) { NEXT(mmap64); FAIL_OPEN(MMAP, "mmap", fd, MAP_FAILED); return next(a, size, protection, flags, fd, at); }
ssize_t copy_file_range(int from, off64_t *f, int to, off64_t *t, size_t size, unsigned flags) { NEXT(copy_file_range); FAIL_OPEN(COPY, "copy", to, -1); return next(from, f, to, t, size, flags); }
ssize_t sendfile(int to, int from, off_t *at, size_t size) { NEXT(sendfile); FAIL_OPEN(COPY, "copy", to, -1); return next(to, from, at, size); }
ssize_t sendfile64(int to, int from, off64_t *at, size_t size) { NEXT(sendfile64); FAIL_OPEN(COPY, "copy", to, -1); return next(to, from, at, size); }
