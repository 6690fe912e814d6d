#include "lmcache/object_listing.h"

#include <algorithm>
#include <charconv>
#include <stdexcept>

#include "lmcache/limits.h"
#include "lmcache/object_path.h"

namespace lmcache {

ObjectListing list_as_text(std::span<const std::uint32_t> positions, std::span<const std::uint8_t> hashes,
                           std::span<const std::uint64_t> sizes_bytes, const std::vector<ListingTexts>& texts) {
    constexpr std::size_t kSizeDigits = 20;
    std::size_t longest = 0;
    for (const ListingTexts& of : texts)
        longest = std::max(longest, of.before.size() + of.between.size() + of.after.size());
    ObjectListing listing;
    listing.text.reserve(positions.size() * (longest + 2 * kChunkHashBytes + kSizeDigits));
    for (std::size_t i = 0; i < positions.size(); ++i) {
        if (positions[i] >= texts.size()) throw std::invalid_argument("there must be texts for each namespace");
        const ListingTexts& of = texts[positions[i]];
        if (of.before.empty()) continue;
        if (listing.objects++ != 0) listing.text += ',';
        listing.text += of.before;
        append_hex(listing.text, std::as_bytes(hashes.subspan(i * kChunkHashBytes, kChunkHashBytes)));
        listing.text += of.between;
        char digits[kSizeDigits];
        listing.text.append(digits, std::to_chars(digits, digits + kSizeDigits, sizes_bytes[i]).ptr);
        listing.text += of.after;
    }
    return listing;
}

}  // namespace lmcache
