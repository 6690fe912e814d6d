// Recency of files, which survives restarts as their access time. It is set by hand, so that mount options do not
// matter. Best effort: a file of another user, or one that is gone, is left as it is.
#pragma once

#include <fcntl.h>
#include <sys/stat.h>

#include <cstddef>
#include <ctime>
#include <string>

namespace lmcache {

inline timespec microseconds_before(timespec time, std::size_t microseconds) {
    const long nanoseconds = static_cast<long>(microseconds % 1000000) * 1000;
    time.tv_sec -= static_cast<time_t>(microseconds / 1000000);
    if (time.tv_nsec < nanoseconds) {
        time.tv_sec -= 1;
        time.tv_nsec += 1000000000;
    }
    time.tv_nsec -= nanoseconds;
    return time;
}

// File `index` of a job counts as used that many microseconds before the job: suffixes are first to go. A new file gets
// the time as modification time too, since the later of both counts.
inline void mark_new(int fd, timespec submitted, std::size_t index) {
    const timespec used = microseconds_before(submitted, index);
    const timespec times[2] = {used, used};
    (void)::futimens(fd, times);
}

inline void mark_used(const std::string& path, timespec submitted, std::size_t index) {
    const timespec times[2] = {microseconds_before(submitted, index), {0, UTIME_OMIT}};
    (void)::utimensat(AT_FDCWD, path.c_str(), times, AT_SYMLINK_NOFOLLOW);
}

}  // namespace lmcache
