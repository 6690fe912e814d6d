// What lies in the folders of a file adapter (docs/formats/files.md), found by several threads.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "lmcache/frame.h"

namespace lmcache {

struct FolderScan {
    // Element i of each is one object, in no order.
    std::vector<std::array<std::byte, kChunkHashBytes>> hashes;
    std::vector<std::int64_t> used_ns;  // the later of access and modification time, since 1970
    std::vector<std::uint64_t> sizes;   // the larger of length and room on the disk, in bytes

    std::vector<std::string> temporary;                            // paths of files with the name NAME.tmp
    std::vector<std::string> empty;                                // folders without any entry
    std::vector<std::pair<std::string, std::int32_t>> unreadable;  // folders, and the errno
};

// Looks into each folder, not below it. An object is a regular file HASH.data in the folder that is named by the first
// two of its 64 hex digits; everything else is left out. Files and folders that vanish meanwhile are left out too.
// Throws std::invalid_argument for a thread count out of range.
FolderScan scan_folders(const std::vector<std::string>& folders, unsigned threads);

// The same by the names alone: no file is looked at, so there are neither `used_ns` nor `sizes`, and what has the name
// of an object counts as one.
FolderScan list_folders(const std::vector<std::string>& folders, unsigned threads);

// Positions in the order of use, the youngest first, equal ones as they were.
std::vector<std::uint32_t> youngest_first(const std::int64_t* used_ns, std::size_t count);

}  // namespace lmcache
