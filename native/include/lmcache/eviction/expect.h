#pragma once

#include <stdexcept>
#include <string>

namespace lmcache {

// For `check` methods: throws std::runtime_error that names the invariant unless it holds.
inline void expect(bool holds, const char* invariant) {
    if (!holds) throw std::runtime_error(std::string("invariant broken: ") + invariant);
}

}  // namespace lmcache
