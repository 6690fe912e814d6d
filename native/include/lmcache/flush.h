// Writes cache lines back to memory, which for persistent memory is the medium.
#pragma once

#include <cstddef>

namespace lmcache {

// Ordered by store_fence(), after which the lines that hold these bytes have left the processor's caches. Does nothing
// on a processor that has no such instruction.
void flush_lines(const std::byte* begin, std::size_t size_bytes);

}  // namespace lmcache
