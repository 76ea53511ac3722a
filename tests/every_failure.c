// Lets one file operation of this process fail, or kills the process there: for every_failure.py, by LD_PRELOAD.
//
// Once arm() was called, the functions below count the operations on a folder and on all in it, and write a line
// about each to a file. Operation `chosen` fails with `error`; with error = ENOSPC a
// write first writes its half, and all that takes space fails from then on, as on a full disk. With error = KILL
// the process is killed before the operation, and with error = TORN after half of a write.
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

enum { KILL = -1, TORN = -2 };
static char prefix[PATH_MAX];
static int armed, error, log_file;
static long chosen, count;

void arm(const char *folder, long number, int fault, int descriptor) {
    snprintf(prefix, sizeof prefix, "%s", folder);
    chosen = number, error = fault, log_file = descriptor, count = 0;
    armed = 1;
}

void disarm(void) { armed = 0; }

// The path of a file, from a descriptor and a name, which may be empty.
static void locate(char *path, int folder, const char *name) {
    char link[64];
    path[0] = 0;
    if (name[0] != '/') {
        if (folder == AT_FDCWD)
            snprintf(link, sizeof link, "/proc/self/cwd");
        else
            snprintf(link, sizeof link, "/proc/self/fd/%d", folder);
        ssize_t length = readlink(link, path, PATH_MAX - 1);
        path[length < 0 ? 0 : length] = 0;
        if (name[0])
            strncat(path, "/", PATH_MAX - strlen(path) - 1);
    }
    strncat(path, name, PATH_MAX - strlen(path) - 1);
}

// What to do about an operation: 0 let it be, 1 let it fail, 2 write half of it.
static int fails(const char *operation, int folder, const char *name, int takes_space) {
    char path[PATH_MAX], line[PATH_MAX + 64];
    if (!armed)
        return 0;
    int before = errno;
    locate(path, folder, name);
    size_t end = strlen(prefix);
    if (strncmp(path, prefix, end) || (path[end] && path[end] != '/')) {
        errno = before;
        return 0;
    }
    long number = __sync_add_and_fetch(&count, 1);
    int length = snprintf(line, sizeof line, "%s %s\n", operation, path + end);
    syscall(SYS_write, log_file, line, length);
    errno = before;
    if (number == chosen) {
        int is_write = !strcmp(operation, "write");
        if (error == KILL || (error == TORN && !is_write))
            kill(getpid(), SIGKILL);
        if (error == TORN || (error == ENOSPC && is_write))
            return 2;
        errno = error;
        return 1;
    }
    if (number > chosen && chosen && error == ENOSPC && takes_space) {
        errno = error;
        return 1;
    }
    return 0;
}

#define REAL(name) \
    static __typeof__(name) *real; \
    if (!real) real = (__typeof__(name) *)dlsym(RTLD_NEXT, #name)

#define OPEN(name, ...) \
    mode_t mode = 0; \
    if (flags & (O_CREAT | O_TMPFILE)) { \
        va_list rest; \
        va_start(rest, flags); \
        mode = va_arg(rest, mode_t); \
        va_end(rest); \
    } \
    REAL(name); \
    if (fails("open", folder, path, flags & O_CREAT)) return -1; \
    return real(__VA_ARGS__, flags, mode)

int open(const char *path, int flags, ...) { int folder = AT_FDCWD; OPEN(open, path); }
int open64(const char *path, int flags, ...) { int folder = AT_FDCWD; OPEN(open64, path); }
int openat(int folder, const char *path, int flags, ...) { OPEN(openat, folder, path); }
int openat64(int folder, const char *path, int flags, ...) { OPEN(openat64, folder, path); }

DIR *opendir(const char *path) {
    REAL(opendir);
    return fails("list", AT_FDCWD, path, 0) ? NULL : real(path);
}

ssize_t write(int file, const void *content, size_t size) {
    REAL(write);
    int what = fails("write", file, "", 1);
    if (what == 1)
        return -1;
    ssize_t written = real(file, content, what == 2 && size > 1 ? size / 2 : size);
    if (what == 2 && error == TORN)
        kill(getpid(), SIGKILL);
    return written;
}

ssize_t writev(int file, const struct iovec *parts, int number) {
    REAL(writev);
    return fails("writev", file, "", 1) ? -1 : real(file, parts, number);
}

ssize_t pwrite64(int file, const void *content, size_t size, off64_t place) {
    REAL(pwrite64);
    return fails("pwrite", file, "", 1) ? -1 : real(file, content, size, place);
}

// The file is closed in any case, and a network's file system may say only now that it could not write.
int close(int file) {
    REAL(close);
    int flags = armed ? fcntl(file, F_GETFL) : -1;
    int failed = flags >= 0 && (flags & O_ACCMODE) != O_RDONLY && fails("close", file, "", 0);
    int before = errno, result = real(file);
    if (failed)
        errno = before;
    return failed ? -1 : result;
}

#define OF_FILE(name, operation, type, ...) \
    int name type { \
        REAL(name); \
        return fails(operation, file, "", 0) ? -1 : real(__VA_ARGS__); \
    }
OF_FILE(fsync, "fsync", (int file), file)
OF_FILE(fdatasync, "fsync", (int file), file)
OF_FILE(ftruncate, "truncate", (int file, off_t size), file, size)
OF_FILE(ftruncate64, "truncate", (int file, off64_t size), file, size)
OF_FILE(fchmod, "chmod", (int file, mode_t mode), file, mode)

#define OF_PATH(name, operation, space, type, folder, ...) \
    int name type { \
        REAL(name); \
        return fails(operation, folder, path, space) ? -1 : real(__VA_ARGS__); \
    }
OF_PATH(mkdir, "mkdir", 1, (const char *path, mode_t mode), AT_FDCWD, path, mode)
OF_PATH(mkdirat, "mkdir", 1, (int folder, const char *path, mode_t mode), folder, folder, path, mode)
OF_PATH(unlink, "remove", 0, (const char *path), AT_FDCWD, path)
OF_PATH(unlinkat, "remove", 0, (int folder, const char *path, int flags), folder, folder, path, flags)
OF_PATH(rmdir, "rmdir", 0, (const char *path), AT_FDCWD, path)
OF_PATH(chmod, "chmod", 0, (const char *path, mode_t mode), AT_FDCWD, path, mode)
OF_PATH(fchmodat, "chmod", 0, (int folder, const char *path, mode_t mode, int flags), folder,
        folder, path, mode, flags)
OF_PATH(rename, "rename", 0, (const char *path, const char *to), AT_FDCWD, path, to)
OF_PATH(renameat, "rename", 0, (int folder, const char *path, int target, const char *to), folder,
        folder, path, target, to)
