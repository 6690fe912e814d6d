// A page of objects as JSON text, for operators.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace lmcache {

// What surrounds the objects of a namespace: `before` HASH `between` SIZE `after`. An empty `before`: they are left
// out.
struct ListingTexts {
    std::string before, between, after;
};

struct ObjectListing {
    std::string text;  // objects with commas between them
    std::size_t objects = 0;
};

// Columns of one length, with 32 bytes of `hashes` an object. std::invalid_argument where a position has no texts.
ObjectListing list_as_text(std::span<const std::uint32_t> positions, std::span<const std::uint8_t> hashes,
                           std::span<const std::uint64_t> sizes_bytes, const std::vector<ListingTexts>& texts);

}  // namespace lmcache
