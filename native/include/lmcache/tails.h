// Namespaces that need only the end of a prefix: windows of attention, recurrent states.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace lmcache {

// For each namespace, of how many chunks at the end of a prefix it must have an object; 0: of all of them. Empty: no
// namespace has a tail.
using Tails = std::span<const std::uint32_t>;

// Length of the longest prefix of `chunks` chunks that can be used: namespaces without a tail have all of it, the
// others their tail, or all of it where it is shorter. has(chunk, position in tails) tells whether an object is there.
template <typename Has>
std::size_t usable_prefix(std::size_t chunks, Tails tails, const Has& has) {
    std::vector<std::size_t> run(tails.size(), 0);  // objects of each namespace in a row up to the current chunk
    std::size_t usable = 0;
    for (std::size_t chunk = 0; chunk < chunks; ++chunk) {
        bool is_end = true;
        for (std::size_t position = 0; position < tails.size(); ++position) {
            const bool is_there = has(chunk, position);
            if (!is_there && tails[position] == 0) return usable;
            run[position] = is_there ? run[position] + 1 : 0;
            is_end &= tails[position] == 0 || run[position] >= std::min<std::size_t>(tails[position], chunk + 1);
        }
        if (is_end) usable = chunk + 1;
    }
    return usable;
}

}  // namespace lmcache
