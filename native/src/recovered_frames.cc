#include "lmcache/recovered_frames.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <string_view>
#include <unordered_map>

#include "lmcache/frame.h"
#include "lmcache/parallel_for.h"
#include "lmcache/rounding.h"

namespace lmcache {
namespace {

constexpr std::uint32_t kPieceUnits = 16384;  // of one piece of work

// Assigns an index to each pair of digest and encoded namespace.
class NamespaceNames {
public:
    std::uint32_t index_of(const FrameHeader& header) {
        const std::string_view digest(reinterpret_cast<const char*>(header.namespace_digest), kDigestBytes);
        const std::string_view encoded(reinterpret_cast<const char*>(header.name_space), header.namespace_bytes);
        if (!all_.empty() && is_same(all_[last_], digest, encoded)) return last_;  // usual: neighbours share it
        const auto [entry, is_new] =
            ids_.try_emplace(std::string(digest) + std::string(encoded), static_cast<std::uint32_t>(all_.size()));
        if (is_new) {
            RecoveredNamespace added;
            std::memcpy(added.digest.data(), digest.data(), kDigestBytes);
            added.encoded.assign(encoded.begin(), encoded.end());
            all_.push_back(std::move(added));
        }
        return last_ = entry->second;
    }
    std::uint32_t index_of(const RecoveredNamespace& other) {
        std::string key(reinterpret_cast<const char*>(other.digest.data()), kDigestBytes);
        key.append(other.encoded.begin(), other.encoded.end());
        const auto [entry, is_new] = ids_.try_emplace(std::move(key), static_cast<std::uint32_t>(all_.size()));
        if (is_new) all_.push_back(other);
        return entry->second;
    }
    const std::vector<RecoveredNamespace>& all() const { return all_; }

private:
    static bool is_same(const RecoveredNamespace& known, std::string_view digest, std::string_view encoded) {
        return std::memcmp(known.digest.data(), digest.data(), kDigestBytes) == 0 &&
               std::equal(known.encoded.begin(), known.encoded.end(), encoded.begin(), encoded.end(),
                          [](std::uint8_t a, char b) { return a == static_cast<std::uint8_t>(b); });
    }

    std::unordered_map<std::string, std::uint32_t> ids_;
    std::vector<RecoveredNamespace> all_;
    std::uint32_t last_ = 0;
};

// A word of the table that may describe a slot. `name_space` is an index into the piece's own names.
struct Entry {
    RecoveredFrame frame;  // of a staged slot only the place is set
    Owner owner;
    bool resident;
};

struct Piece {
    std::vector<Entry> entries;
    std::vector<std::uint32_t> refused;
    NamespaceNames names;
};

bool read_header(const std::byte* at, std::uint64_t slot_bytes, std::uint64_t align_bytes, NamespaceNames& names,
                 RecoveredFrame& frame) {
    FrameHeader header;
    std::memcpy(&header, at, sizeof header);
    if (frame_check_format(header) != FrameFault::kNone) return false;
    const std::uint64_t frame_bytes = kFrameHeaderBytes + header.payload_bytes;
    if (round_up(frame_bytes, align_bytes) != slot_bytes) return false;
    std::memcpy(frame.hash.data(), header.chunk_hash, kChunkHashBytes);
    frame.name_space = names.index_of(header);
    return true;
}

void search(const SlotTable& table, const std::byte* arena, std::uint32_t begin, std::uint32_t end,
            std::uint32_t committed_units, std::uint64_t align_bytes, Piece& piece) {
    for (std::uint32_t unit = begin; unit < end; ++unit) {
        if (table.is_zero(unit)) continue;
        const auto slot = table.at(unit);
        if (!slot || slot->units > committed_units - unit) {
            piece.refused.push_back(unit);
            continue;
        }
        Entry entry{};
        entry.frame.first_unit = unit;
        entry.frame.units = slot->units;
        entry.resident = slot->resident;
        if (!slot->resident) {
            entry.owner = word_owner(slot->value);
        } else {
            entry.frame.last_use = slot->value;
            const std::uint64_t slot_bytes = slot->units * align_bytes;
            if (slot_bytes < kFrameHeaderBytes ||
                !read_header(arena + unit * align_bytes, slot_bytes, align_bytes, piece.names, entry.frame)) {
                piece.refused.push_back(unit);
                continue;
            }
        }
        piece.entries.push_back(entry);
    }
}

std::vector<Entry> merge(std::vector<Piece>& pieces, RecoveredFrames& result) {
    std::vector<Entry> entries;
    NamespaceNames names;
    for (Piece& piece : pieces) {
        std::vector<std::uint32_t> ids;
        for (const RecoveredNamespace& known : piece.names.all()) ids.push_back(names.index_of(known));
        for (Entry& entry : piece.entries) {
            if (entry.resident) entry.frame.name_space = ids[entry.frame.name_space];
            entries.push_back(entry);
        }
        result.refused.insert(result.refused.end(), piece.refused.begin(), piece.refused.end());
    }
    result.namespaces = names.all();
    return entries;
}

// Ranges overlap only where memory was damaged. Frames in such ranges are refused; uncommitted slots, which may still
// be written, are kept, shortened by what another one covers.
void keep_apart(const std::vector<Entry>& entries, RecoveredFrames& result) {
    std::uint64_t end = 0;
    std::size_t last = 0;  // the entry that ends there
    std::vector<bool> overlaps(entries.size());
    for (std::size_t i = 0; i < entries.size(); ++i) {
        const RecoveredFrame& frame = entries[i].frame;
        if (frame.first_unit < end) overlaps[i] = overlaps[last] = true;
        if (const std::uint64_t slot_end = std::uint64_t{frame.first_unit} + frame.units; slot_end > end) {
            end = slot_end;
            last = i;
        }
    }
    std::uint32_t staged_end = 0;
    for (std::size_t i = 0; i < entries.size(); ++i) {
        const RecoveredFrame& frame = entries[i].frame;
        if (!entries[i].resident) {
            const std::uint32_t slot_end = frame.first_unit + frame.units;
            const std::uint32_t first = std::max(frame.first_unit, staged_end);
            if (first != frame.first_unit) result.refused.push_back(frame.first_unit);
            if (first >= slot_end) continue;
            result.slots.push_back({first, slot_end - first, entries[i].owner});
            staged_end = slot_end;
        } else if (overlaps[i]) {
            result.refused.push_back(frame.first_unit);
        } else {
            result.frames.push_back(frame);
        }
    }
}

}  // namespace

RecoveredFrames recover_frames(const SlotTable& table, const std::byte* arena, std::uint32_t committed_units,
                               std::uint64_t align_bytes, std::size_t threads) {
    RecoveredFrames result;
    if (!table) return result;
    std::vector<Piece> pieces(div_ceil(committed_units, kPieceUnits));
    parallel_for(pieces.size(), threads, [&](std::size_t number) {
        const auto begin = static_cast<std::uint32_t>(number * kPieceUnits);
        const std::uint32_t end = begin + std::min(kPieceUnits, committed_units - begin);
        search(table, arena, begin, end, committed_units, align_bytes, pieces[number]);
        return true;
    });
    keep_apart(merge(pieces, result), result);
    return result;
}

}  // namespace lmcache
