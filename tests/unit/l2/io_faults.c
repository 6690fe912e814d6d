// A disk that does what a test says. Preloaded; in the process under test only file threads call these two.
// The file named by IO_FAULTS has two bytes: what happens to reads and to writes. 0 nothing, E EIO, N ENOSPC, S half of
// it, I EINTR the first time, Z nothing is read, F a byte comes flipped, T half is written and the whole is reported,
// 3 EIO at the third call from now.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/uio.h>

typedef ssize_t (*Transfer)(int, const struct iovec*, int, off_t);

static volatile char* faults(void) {
    static volatile char* mapped = NULL;
    if (mapped == NULL) {
        int fd = open(getenv("IO_FAULTS"), O_RDWR);
        mapped = mmap(NULL, 2, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    }
    return mapped;
}

static ssize_t transfer(int which, const char* name, int fd, const struct iovec* part, int count, off_t offset) {
    Transfer real = (Transfer)dlsym(RTLD_NEXT, name);
    volatile char* fault = faults() + which;
    struct iovec half = {part->iov_base, part->iov_len};
    if (half.iov_len > 4096) half.iov_len = (half.iov_len / 2 + 4095) / 4096 * 4096;  // whole blocks, as O_DIRECT has it
    switch (*fault) {
        case 'E':
            errno = EIO;
            return -1;
        case 'N':
            errno = ENOSPC;
            return -1;
        case 'I':
            *fault = 0;
            errno = EINTR;
            return -1;
        case 'S':
            return real(fd, &half, 1, offset);
        case 'Z':
            return 0;
        case 'F': {
            ssize_t moved = real(fd, part, count, offset);
            if (moved > 0) ((char*)part->iov_base)[moved / 2] ^= 1;
            return moved;
        }
        case 'T':
            return real(fd, &half, 1, offset) < 0 ? -1 : (ssize_t)part->iov_len;
        case '1':
            *fault = 0;
            errno = EIO;
            return -1;
        case '2':
        case '3':
            *fault = (char)(*fault - 1);
            break;
    }
    return real(fd, part, count, offset);
}

ssize_t preadv(int fd, const struct iovec* part, int count, off_t offset) {
    return transfer(0, "preadv", fd, part, count, offset);
}
ssize_t preadv64(int fd, const struct iovec* part, int count, off_t offset) {
    return transfer(0, "preadv64", fd, part, count, offset);
}
ssize_t pwritev(int fd, const struct iovec* part, int count, off_t offset) {
    return transfer(1, "pwritev", fd, part, count, offset);
}
ssize_t pwritev64(int fd, const struct iovec* part, int count, off_t offset) {
    return transfer(1, "pwritev64", fd, part, count, offset);
}
