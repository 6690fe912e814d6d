// The table of a raw device: its pages, and what they tell when it is opened.
#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "lmcache/frame.h"
#include "lmcache/raw_index.h"
#include "lmcache/rounding.h"

namespace lmcache {
namespace {

constexpr char kMagic[8] = {'L', 'M', 'C', 'T', 'A', 'B', 'L', '1'};

struct PageHeader {
    char magic[8];
    std::uint64_t number;
    std::uint8_t device[kDeviceIdBytes];
    std::uint8_t checksum[kChecksumBytes];  // of the page with these bytes zero
    std::uint8_t zero[16];
};
static_assert(sizeof(PageHeader) == RawIndex::kPageHeaderBytes);

bool is_zero(std::span<const std::byte> bytes) {
    return bytes.front() == std::byte{0} && std::memcmp(bytes.data(), bytes.data() + 1, bytes.size() - 1) == 0;
}

}  // namespace

void RawIndex::page_image(std::uint32_t page, std::byte* image) {
    if (page >= pages_) throw std::invalid_argument("there is no such page");
    PageHeader header{};
    std::memcpy(header.magic, kMagic, sizeof kMagic);
    header.number = page;
    std::memcpy(header.device, options_.device, sizeof header.device);
    std::memset(image, 0, options_.page_bytes);
    std::memcpy(image, &header, sizeof header);
    std::memcpy(image + sizeof header, &entries_[std::size_t{page} * entries_per_page_],
                entries_per_page_ * sizeof(RawEntry));
    const PayloadChecksum checksum = payload_checksum({image, options_.page_bytes});
    std::memcpy(image + offsetof(PageHeader, checksum), checksum.data(), checksum.size());
    dirty_.erase(page);
}

bool RawIndex::verifies(std::uint32_t page, std::span<const std::byte> content) {
    PageHeader header;
    std::memcpy(&header, content.data(), sizeof header);
    if (std::memcmp(header.magic, kMagic, sizeof kMagic) != 0 || header.number != page ||
        std::memcmp(header.device, options_.device, sizeof header.device) != 0)
        return false;
    std::copy(content.begin(), content.end(), scratch_.begin());
    std::memset(scratch_.data() + offsetof(PageHeader, checksum), 0, kChecksumBytes);
    const PayloadChecksum checksum = payload_checksum(scratch_);
    return std::memcmp(header.checksum, checksum.data(), checksum.size()) == 0;
}

void RawIndex::load_pages(std::uint32_t first, std::span<const std::byte> pages, std::span<const std::uint32_t> spaces,
                          bool forget) {
    const std::size_t page_bytes = options_.page_bytes;
    const std::size_t count = pages.size() / page_bytes;
    if (pages.size() % page_bytes != 0 || first > pages_ || count > pages_ - first)
        throw std::invalid_argument("there are no such pages");
    for (std::size_t i = 0; i < count; ++i) {
        const auto page = static_cast<std::uint32_t>(first + i);
        const auto content = pages.subspan(i * page_bytes, page_bytes);
        if (is_zero(content)) continue;  // never written
        const std::uint32_t first_slot = page * entries_per_page_;
        if (!verifies(page, content)) {
            dirty_.insert(page);
            const std::uint32_t end = std::min(first_slot + entries_per_page_, options_.slots);
            for (std::uint32_t slot = first_slot; slot < end && !forget; ++slot) slots_to_scan_.push_back(slot);
            continue;
        }
        for (std::uint32_t place = 0; place < entries_per_page_; ++place) {
            RawEntry found;
            std::memcpy(&found, content.data() + kPageHeaderBytes + place * sizeof found, sizeof found);
            if (found.generation == 0) continue;
            next_generation_ = std::max(next_generation_, found.generation + 1);
            const std::uint32_t slot = first_slot + place;
            if (slot >= options_.slots) dirty_.insert(page);  // used before, and given up
            if (forget || slot >= options_.slots || found.generation < first_generation_) continue;
            if (found.units == 0) {
                entries_[slot].generation = found.generation;
                continue;
            }
            const std::uint32_t space = found.number < spaces.size() ? spaces[found.number] : kUnnamed;
            if (space == kUnnamed || found.units * kUnitBytes > options_.slot_bytes) {
                dirty_.insert(page);
                slots_to_scan_.push_back(slot);
            } else {
                recover(slot, space, found);
            }
        }
    }
}

void RawIndex::add(std::uint32_t slot, std::uint32_t space, std::span<const std::byte, kChunkHashBytes> hash,
                   std::uint64_t size_bytes, std::uint64_t generation) {
    if (space >= spaces_.size()) throw std::invalid_argument("there is no such namespace");
    if (entry(slot).units != 0 || size_bytes == 0 || size_bytes > options_.slot_bytes) return;
    RawEntry found{};
    std::memcpy(found.hash, hash.data(), kChunkHashBytes);
    found.number = spaces_[space].number;
    found.units = static_cast<std::uint32_t>(div_ceil(size_bytes, kUnitBytes));
    found.generation = generation;
    next_generation_ = std::max(next_generation_, generation + 1);
    if (generation >= first_generation_) recover(slot, space, found);
}

void RawIndex::recover(std::uint32_t slot, std::uint32_t space, const RawEntry& found) {
    const std::uint32_t other =
        find(space, std::span<const std::byte, kChunkHashBytes>(reinterpret_cast<const std::byte*>(found.hash), 32));
    if (other != kNoObject) {
        dirty_.insert(page_of(other));
        dirty_.insert(page_of(slot));
        if (entries_[other].generation > found.generation) {
            entries_[slot].generation = found.generation;
            return;
        }
        unclaim(other);
    }
    claim(slot, space, found);
}

void RawIndex::finish_recovery(std::uint64_t gap) {
    next_generation_ += gap;
    for (std::uint32_t slot = 0; slot < options_.slots; ++slot)
        if (entries_[slot].units == 0) put_back(slot, false);
    slots_to_scan_ = {};
}

std::vector<std::uint32_t> RawIndex::youngest_first() const {
    std::vector<std::uint32_t> slots = claimed_from(0, objects_);
    std::stable_sort(slots.begin(), slots.end(),
                     [this](std::uint32_t a, std::uint32_t b) { return entries_[a].used_at > entries_[b].used_at; });
    return slots;
}

std::vector<std::uint32_t> RawIndex::pages_of(std::span<const std::uint32_t> slots) const {
    std::vector<std::uint32_t> pages;
    for (const std::uint32_t slot : slots) pages.push_back(page_of(check_slot(slot)));
    std::sort(pages.begin(), pages.end());
    pages.erase(std::unique(pages.begin(), pages.end()), pages.end());
    return pages;
}

std::vector<std::uint32_t> RawIndex::dirty_pages() const {
    std::vector<std::uint32_t> pages;
    for (std::uint32_t page = dirty_.lowest(); page != BitSet::kNone; page = dirty_.lowest(page + 1))
        pages.push_back(page);
    return pages;
}

}  // namespace lmcache
