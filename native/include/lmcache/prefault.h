// Putting memory behind a mapping ahead of its use.
#pragma once

#include <cstddef>
#include <cstdint>

namespace lmcache {

// Touches every page of the range for writing, without changing its content, in up to `threads` threads. Returns 0 or
// an errno. Safe while others use the memory.
int prefault(std::uintptr_t address, std::size_t size_bytes, std::size_t threads);

}  // namespace lmcache
