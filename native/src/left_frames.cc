#include "lmcache/left_frames.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <string_view>
#include <unordered_map>

#include "lmcache/frame.h"
#include "lmcache/pieces.h"

namespace lmcache {
namespace {

constexpr std::uint32_t kPieceUnits = 16384;  // that a thread takes at a time

// Digests and encoded namespaces of headers as small integers.
class NamespaceNames {
public:
    std::uint32_t name(const FrameHeader& header) {
        const std::string_view digest(reinterpret_cast<const char*>(header.namespace_digest), kDigestBytes);
        const std::string_view encoded(reinterpret_cast<const char*>(header.name_space), header.namespace_bytes);
        if (!all_.empty() && same(all_[last_], digest, encoded)) return last_;  // the usual case
        const auto [entry, is_new] =
            ids_.try_emplace(std::string(digest) + std::string(encoded), static_cast<std::uint32_t>(all_.size()));
        if (is_new) {
            LeftNamespace added;
            std::memcpy(added.digest.data(), digest.data(), kDigestBytes);
            added.encoded.assign(encoded.begin(), encoded.end());
            all_.push_back(std::move(added));
        }
        return last_ = entry->second;
    }
    std::uint32_t name(const LeftNamespace& other) {
        std::string key(reinterpret_cast<const char*>(other.digest.data()), kDigestBytes);
        key.append(other.encoded.begin(), other.encoded.end());
        const auto [entry, is_new] = ids_.try_emplace(std::move(key), static_cast<std::uint32_t>(all_.size()));
        if (is_new) all_.push_back(other);
        return entry->second;
    }
    const std::vector<LeftNamespace>& all() const { return all_; }

private:
    static bool same(const LeftNamespace& known, std::string_view digest, std::string_view encoded) {
        return std::memcmp(known.digest.data(), digest.data(), kDigestBytes) == 0 &&
               std::equal(known.encoded.begin(), known.encoded.end(), encoded.begin(), encoded.end(),
                          [](std::uint8_t a, char b) { return a == static_cast<std::uint8_t>(b); });
    }

    std::unordered_map<std::string, std::uint32_t> ids_;
    std::vector<LeftNamespace> all_;
    std::uint32_t last_ = 0;
};

// A word that could be a slot's. `name_space` counts in the piece's own names.
struct Found {
    LeftFrame frame;  // of a staged slot only the place is set
    Owner owner;
    bool resident;
};

struct Piece {
    std::vector<Found> found;
    std::vector<std::uint32_t> refused;
    NamespaceNames names;
};

bool read_header(const std::byte* at, std::uint64_t slot_bytes, std::uint64_t align_bytes, NamespaceNames& names,
                 LeftFrame& frame) {
    FrameHeader header;
    std::memcpy(&header, at, sizeof header);
    if (frame_check_format(header) != FrameFault::kNone) return false;
    const std::uint64_t frame_bytes = kFrameHeaderBytes + header.payload_bytes;
    if ((frame_bytes + align_bytes - 1) / align_bytes * align_bytes != slot_bytes) return false;
    std::memcpy(frame.hash.data(), header.chunk_hash, kChunkHashBytes);
    frame.name_space = names.name(header);
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
        Found found{};
        found.frame.first_unit = unit;
        found.frame.units = slot->units;
        found.resident = slot->resident;
        if (!slot->resident) {
            found.owner = word_owner(slot->value);
        } else {
            found.frame.last_use = slot->value;
            const std::uint64_t slot_bytes = slot->units * align_bytes;
            if (slot_bytes < kFrameHeaderBytes ||
                !read_header(arena + unit * align_bytes, slot_bytes, align_bytes, piece.names, found.frame)) {
                piece.refused.push_back(unit);
                continue;
            }
        }
        piece.found.push_back(found);
    }
}

std::vector<Found> merge(std::vector<Piece>& pieces, LeftFrames& left) {
    std::vector<Found> found;
    NamespaceNames names;
    for (Piece& piece : pieces) {
        std::vector<std::uint32_t> ids;
        for (const LeftNamespace& known : piece.names.all()) ids.push_back(names.name(known));
        for (Found& one : piece.found) {
            if (one.resident) one.frame.name_space = ids[one.frame.name_space];
            found.push_back(one);
        }
        left.refused.insert(left.refused.end(), piece.refused.begin(), piece.refused.end());
    }
    left.namespaces = names.all();
    return found;
}

// Words never overlap unless memory was damaged. Then no frame of those concerned is believed, and slots that may still
// be written to are kept, shortened to what is not another's.
void keep_apart(std::vector<Found>& found, LeftFrames& left) {
    std::uint64_t end = 0;
    std::size_t reaches = 0;  // whose end that is
    std::vector<bool> overlaps(found.size());
    for (std::size_t i = 0; i < found.size(); ++i) {
        const LeftFrame& frame = found[i].frame;
        if (frame.first_unit < end) overlaps[i] = overlaps[reaches] = true;
        if (const std::uint64_t own_end = std::uint64_t{frame.first_unit} + frame.units; own_end > end) {
            end = own_end;
            reaches = i;
        }
    }
    std::uint32_t slots_end = 0;
    for (std::size_t i = 0; i < found.size(); ++i) {
        const LeftFrame& frame = found[i].frame;
        if (!found[i].resident) {
            const std::uint32_t own_end = frame.first_unit + frame.units;
            const std::uint32_t first = std::max(frame.first_unit, slots_end);
            if (first != frame.first_unit) left.refused.push_back(frame.first_unit);
            if (first >= own_end) continue;
            left.slots.push_back({first, own_end - first, found[i].owner});
            slots_end = own_end;
        } else if (overlaps[i]) {
            left.refused.push_back(frame.first_unit);
        } else {
            left.frames.push_back(frame);
        }
    }
}

}  // namespace

LeftFrames find_left_frames(const SlotTable& table, const std::byte* arena, std::uint32_t committed_units,
                            std::uint64_t align_bytes, std::size_t threads) {
    LeftFrames left;
    if (!table) return left;
    std::vector<Piece> pieces((std::size_t{committed_units} + kPieceUnits - 1) / kPieceUnits);
    share_pieces(pieces.size(), threads, [&](std::size_t number) {
        const auto begin = static_cast<std::uint32_t>(number * kPieceUnits);
        const std::uint32_t end = begin + std::min(kPieceUnits, committed_units - begin);
        search(table, arena, begin, end, committed_units, align_bytes, pieces[number]);
        return true;
    });
    std::vector<Found> found = merge(pieces, left);
    keep_apart(found, left);
    return left;
}

}  // namespace lmcache
