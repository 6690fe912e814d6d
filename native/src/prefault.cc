#include "lmcache/prefault.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>

#include "lmcache/parallel_for.h"
#include "lmcache/rounding.h"

namespace lmcache {
namespace {

constexpr int kMadvPopulateWrite = 23;  // Linux 5.14; older headers do not name it
// What a thread takes at a time. Meanwhile the kernel holds the lock of the address space, and no other thread of this
// process can map or unmap memory: with large pieces a server would answer no calls while L1 grows.
constexpr std::size_t kPieceBytes = 1ULL << 20;

constexpr int kMadvCollapse = 25;  // Linux 6.1
// What a thread asks for at a time: each call costs some waiting for all processors. The lock is not held meanwhile.
constexpr std::size_t kCollapsedBytes = 32ULL << 20;

int touch(std::byte* begin, std::byte* end, std::size_t page_bytes) {
    if (madvise(begin, static_cast<std::size_t>(end - begin), kMadvPopulateWrite) == 0) return 0;
    if (errno != EINVAL) return errno;
    // Adding zero atomically writes the page and cannot undo what another thread writes.
    for (std::byte* at = begin; at < end; at += page_bytes) {
        __atomic_fetch_add(reinterpret_cast<unsigned char*>(at), static_cast<unsigned char>(0), __ATOMIC_RELAXED);
    }
    return 0;
}

// False when it makes no sense to go on.
bool collapse(std::byte* begin, std::byte* end, std::size_t page_bytes) {
    // A large page is not made out of nothing.
    for (std::byte* at = begin; at < end; at += kLargePageBytes)
        if (madvise(at, page_bytes, kMadvPopulateWrite) != 0) return false;
    if (madvise(begin, static_cast<std::size_t>(end - begin), kMadvCollapse) == 0) return true;
    return errno == EAGAIN || errno == EBUSY;  // of some pieces only: they are in use, say by a device
}

// Calls `work(from, to)` for pieces of the range, from several threads, until one returns false.
template <typename Work>
void in_pieces(std::uintptr_t begin, std::uintptr_t end, std::size_t piece_bytes, std::size_t threads,
               const Work& work) {
    parallel_for(div_ceil(end - begin, piece_bytes), threads, [&](std::size_t number) {
        const std::uintptr_t from = begin + number * piece_bytes;
        const std::uintptr_t to = std::min(from + piece_bytes, end);
        return work(reinterpret_cast<std::byte*>(from), reinterpret_cast<std::byte*>(to));
    });
}

}  // namespace

void take_large_pages(std::uintptr_t address, std::size_t size_bytes, std::size_t threads) {
    const auto page_bytes = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
    const std::uintptr_t begin = round_up(address, kLargePageBytes);
    const std::uintptr_t end = (address + size_bytes) / kLargePageBytes * kLargePageBytes;
    if (begin >= end) return;
    in_pieces(begin, end, kCollapsedBytes, threads,
              [&](std::byte* from, std::byte* to) { return collapse(from, to, page_bytes); });
}

int prefault(std::uintptr_t address, std::size_t size_bytes, std::size_t threads, bool large_pages) {
    if (size_bytes == 0) return 0;
    const auto page_bytes = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
    if (large_pages) take_large_pages(address, size_bytes, threads);
    const std::uintptr_t begin = address / page_bytes * page_bytes;
    const std::uintptr_t end = round_up(address + size_bytes, page_bytes);
    std::atomic<int> fault{0};
    in_pieces(begin, end, kPieceBytes, threads, [&](std::byte* from, std::byte* to) {
        const int found = touch(from, to, page_bytes);
        if (found != 0) fault = found;
        return found == 0;
    });
    return fault;
}

}  // namespace lmcache
