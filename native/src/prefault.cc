#include "lmcache/prefault.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <thread>
#include <vector>

#include "lmcache/limits.h"

namespace lmcache {
namespace {

constexpr int kMadvPopulateWrite = 23;  // Linux 5.14; older headers do not name it
// What a thread takes at a time. Meanwhile the kernel holds the lock of the address space, and no other thread of this
// process can map or unmap memory: with large pieces a server would answer no calls while L1 grows.
constexpr std::size_t kPieceBytes = 1ULL << 20;

int touch(std::byte* begin, std::byte* end, std::size_t page_bytes) {
    if (madvise(begin, static_cast<std::size_t>(end - begin), kMadvPopulateWrite) == 0) return 0;
    if (errno != EINVAL) return errno;
    // Adding zero atomically writes the page and cannot undo what another thread writes.
    for (std::byte* at = begin; at < end; at += page_bytes) {
        __atomic_fetch_add(reinterpret_cast<unsigned char*>(at), static_cast<unsigned char>(0), __ATOMIC_RELAXED);
    }
    return 0;
}

}  // namespace

int prefault(std::uintptr_t address, std::size_t size_bytes, std::size_t threads) {
    if (size_bytes == 0) return 0;
    const auto page_bytes = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
    const std::uintptr_t begin = address / page_bytes * page_bytes;
    const std::uintptr_t end = (address + size_bytes + page_bytes - 1) / page_bytes * page_bytes;
    const std::size_t pieces = (end - begin + kPieceBytes - 1) / kPieceBytes;
    std::atomic<std::size_t> next{0};
    std::atomic<int> fault{0};
    const auto work = [&] {
        for (std::size_t piece = next++; piece < pieces && fault == 0; piece = next++) {
            const std::uintptr_t from = begin + piece * kPieceBytes;
            const std::uintptr_t to = std::min(from + kPieceBytes, end);
            const int found = touch(reinterpret_cast<std::byte*>(from), reinterpret_cast<std::byte*>(to), page_bytes);
            if (found != 0) fault = found;
        }
    };
    std::vector<std::thread> others;
    const std::size_t wanted = std::clamp<std::size_t>(threads, 1, std::min(pieces, kMaxPrefaultThreads));
    for (std::size_t i = 1; i < wanted; ++i) others.emplace_back(work);
    work();
    for (std::thread& other : others) other.join();
    return fault;
}

}  // namespace lmcache
