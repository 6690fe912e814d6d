#include "lmcache/prefault.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <fstream>
#include <string>
#include <vector>

#include "check.h"

using namespace lmcache;

namespace {

const std::size_t kPage = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
constexpr std::size_t kSize = 80ULL << 20;  // several pieces for several threads

std::size_t resident_pages(void* address, std::size_t size) {
    std::vector<unsigned char> pages(size / kPage);
    CHECK(mincore(address, size, pages.data()) == 0);
    std::size_t count = 0;
    for (const unsigned char page : pages) count += page & 1;
    return count;
}

// Of shared memory that is mapped here as large pages.
std::size_t large_kib() {
    std::ifstream maps("/proc/self/smaps");
    const std::string label = "ShmemPmdMapped:";
    std::size_t total = 0;
    for (std::string line; std::getline(maps, line);)
        if (line.starts_with(label)) total += std::stoul(line.substr(label.size()));
    return total;
}

// Whether this kernel makes large pages of shared memory when it is asked to.
bool kernel_makes_large_pages() {
    const int fd = memfd_create("large", MFD_CLOEXEC);
    CHECK(fd >= 0 && ftruncate(fd, 2 * kLargePageBytes) == 0);
    void* const memory = mmap(nullptr, 2 * kLargePageBytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    CHECK(memory != MAP_FAILED);
    const auto first = reinterpret_cast<std::uintptr_t>(memory);
    auto* const large = static_cast<char*>(memory) + (kLargePageBytes - first % kLargePageBytes) % kLargePageBytes;
    *large = 1;
    const bool made = madvise(large, kLargePageBytes, 25 /* MADV_COLLAPSE */) == 0;
    CHECK(munmap(memory, 2 * kLargePageBytes) == 0);
    close(fd);
    return made;
}

TEST_CASE(pages_are_there_and_keep_what_they_hold) {
    const int fd = memfd_create("prefault", MFD_CLOEXEC);
    CHECK(fd >= 0 && ftruncate(fd, kSize) == 0);
    void* const memory = mmap(nullptr, kSize, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    CHECK(memory != MAP_FAILED);
    auto* const bytes = static_cast<unsigned char*>(memory);
    bytes[5] = 77;
    bytes[kSize - 1] = 78;
    CHECK(resident_pages(memory, kSize) == 2);
    const auto address = reinterpret_cast<std::uintptr_t>(memory);
    CHECK(prefault(address + 10, kPage, 1) == 0);  // touches the two pages that it overlaps
    CHECK(resident_pages(memory, kSize) == 3);
    CHECK(prefault(address, 0, 4, true) == 0);
    CHECK(prefault(address, kSize, 3, true) == 0);
    CHECK(resident_pages(memory, kSize) == kSize / kPage);
    if (address % kLargePageBytes == 0 && kernel_makes_large_pages()) CHECK(large_kib() > 0);
    CHECK(bytes[5] == 77 && bytes[6] == 0 && bytes[kSize - 1] == 78);
    CHECK(munmap(memory, kSize) == 0);
    CHECK(prefault(address, kSize, 2, true) != 0);  // nothing is mapped there any more
    close(fd);
}

}  // namespace
