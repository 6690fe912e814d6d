// Makes the pages of a mapping ahead of their use.
#pragma once

#include <cstddef>
#include <cstdint>

namespace lmcache {

constexpr std::size_t kLargePageBytes = 2ULL << 20;

// Touches every page of the range for writing, without changing its content, in up to `threads` threads. Returns 0 or
// an errno. Safe while others use the memory.
//
// With `large_pages` every aligned kLargePageBytes that lie wholly in the range become one large page, where the kernel
// agrees: copies then need a translation, and disks a segment, per 2 MiB instead of per 4 KiB. On shared memory too,
// whatever the machine's settings say of large pages there (MADV_COLLAPSE, Linux 6.1). For the owner of the memory
// only, as new pages are charged to the caller; who maps it afterwards gets large pages without asking.
int prefault(std::uintptr_t address, std::size_t size_bytes, std::size_t threads, bool large_pages = false);

// The large pages alone, as far as the kernel agrees: safe where there may be no memory at all, which is then not made
// by hand but refused. Where nothing was before this costs a small part of what it does once there are small pages,
// which have to be copied and given back.
void take_large_pages(std::uintptr_t address, std::size_t size_bytes, std::size_t threads);

}  // namespace lmcache
