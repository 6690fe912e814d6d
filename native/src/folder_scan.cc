#include "lmcache/folder_scan.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>
#include <numeric>
#include <stdexcept>
#include <string_view>

#include "lmcache/limits.h"
#include "lmcache/object_path.h"
#include "lmcache/parallel_for.h"
#include "lmcache/unique_fd.h"

namespace lmcache {
namespace {

constexpr std::string_view kTemporarySuffix = ".tmp";
constexpr std::int64_t kSecondNs = 1'000'000'000;

using Hash = std::array<std::byte, kChunkHashBytes>;

struct Found {
    ino_t inode;
    Hash hash;
};

int digit(char c) {
    if (c >= '0' && c <= '9') return c - '0';
    return c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

bool parse_object(std::string_view name, std::string_view folder, Hash& hash) {
    if (name.size() != 2 * kChunkHashBytes + kObjectSuffix.size() || !name.ends_with(kObjectSuffix)) return false;
    for (std::size_t i = 0; i < kChunkHashBytes; ++i) {
        const int high = digit(name[2 * i]), low = digit(name[2 * i + 1]);
        if (high < 0 || low < 0) return false;
        hash[i] = static_cast<std::byte>(high << 4 | low);
    }
    return folder.size() >= 2 && name.substr(0, 2) == folder.substr(folder.size() - 2);
}

std::int64_t nanoseconds(const timespec& time) { return time.tv_sec * kSecondNs + time.tv_nsec; }

enum class Look : bool { kAtNames, kAtFiles };

int scan_folder(const std::string& path, FolderScan& scan, Look look) {
    UniqueFd folder(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW));
    if (!folder.valid()) return errno == ENOENT ? 0 : errno;  // removed since it was listed
    DIR* const opened = ::fdopendir(folder.get());
    if (opened == nullptr) return errno;
    const int fd = folder.release();
    const std::unique_ptr<DIR, int (*)(DIR*)> directory(opened, ::closedir);
    std::vector<Found> found;
    bool is_empty = true;
    errno = 0;
    while (const dirent* entry = ::readdir(opened)) {
        const std::string_view name = entry->d_name;
        Found object{entry->d_ino, {}};
        is_empty = is_empty && (name == "." || name == "..");
        if (parse_object(name, path, object.hash)) {
            found.push_back(object);
        } else if (name.ends_with(kTemporarySuffix)) {
            scan.temporary.push_back(path + '/' + entry->d_name);
        }
        errno = 0;
    }
    const int error = errno;
    if (is_empty && error == 0) scan.empty.push_back(path);
    if (look == Look::kAtNames) {
        for (const Found& object : found) scan.hashes.push_back(object.hash);
        return error;
    }
    // File systems keep inodes in tables by their number: in this order a cold disk is read once, and forward.
    std::sort(found.begin(), found.end(), [](const Found& a, const Found& b) { return a.inode < b.inode; });
    for (const Found& object : found) {
        struct stat info{};
        if (::fstatat(fd, object_name(object.hash).c_str(), &info, AT_SYMLINK_NOFOLLOW) != 0) continue;
        if (!S_ISREG(info.st_mode)) continue;
        scan.hashes.push_back(object.hash);
        scan.used_ns.push_back(std::max(nanoseconds(info.st_atim), nanoseconds(info.st_mtim)));
        scan.sizes.push_back(static_cast<std::uint64_t>(std::max<off_t>(info.st_size, info.st_blocks * 512)));
    }
    return error;
}

template <typename T>
void append(std::vector<T>& to, std::vector<T>& from) {
    to.insert(to.end(), std::make_move_iterator(from.begin()), std::make_move_iterator(from.end()));
}

FolderScan scan_each(const std::vector<std::string>& folders, unsigned threads, Look look) {
    if (threads < 1 || threads > kMaxParallelThreads)
        throw std::invalid_argument("threads must be 1 to " + std::to_string(kMaxParallelThreads));
    std::vector<FolderScan> parts(folders.size());
    parallel_for(folders.size(), threads, [&](std::size_t i) {
        if (const int error = scan_folder(folders[i], parts[i], look); error != 0)
            parts[i].unreadable.emplace_back(folders[i], error);
        return true;
    });
    FolderScan all;
    for (FolderScan& part : parts) {
        append(all.hashes, part.hashes);
        append(all.used_ns, part.used_ns);
        append(all.sizes, part.sizes);
        append(all.temporary, part.temporary);
        append(all.empty, part.empty);
        append(all.unreadable, part.unreadable);
    }
    return all;
}

}  // namespace

FolderScan scan_folders(const std::vector<std::string>& folders, unsigned threads) {
    return scan_each(folders, threads, Look::kAtFiles);
}

FolderScan list_folders(const std::vector<std::string>& folders, unsigned threads) {
    return scan_each(folders, threads, Look::kAtNames);
}

std::vector<std::uint32_t> youngest_first(const std::int64_t* used_ns, std::size_t count) {
    std::vector<std::uint32_t> order(count);
    std::iota(order.begin(), order.end(), 0U);
    std::stable_sort(order.begin(), order.end(),
                     [used_ns](std::uint32_t a, std::uint32_t b) { return used_ns[a] > used_ns[b]; });
    return order;
}

}  // namespace lmcache
