// Limits shared with src/lmcache/core/limits.py.
#pragma once

#include <cstddef>
#include <cstdint>

namespace lmcache {

inline constexpr std::size_t kFrameHeaderBytes = 4096;
inline constexpr std::size_t kFrameAlignBytes = 4096;
inline constexpr std::size_t kChunkHashBytes = 32;
inline constexpr std::size_t kDigestBytes = 32;
inline constexpr std::uint64_t kNoSlot = ~std::uint64_t{0};
inline constexpr std::size_t kMaxObjectsPerCall = std::size_t{1} << 22;

inline constexpr std::size_t kMaxNamespaceBytes = 2048;
inline constexpr std::size_t kMaxSerdeNameBytes = 32;
inline constexpr std::size_t kMaxSerdeParamsBytes = 1788;
inline constexpr std::uint64_t kMaxObjectBytes = std::uint64_t{4} << 30;
inline constexpr std::size_t kMaxSegmentDims = 8;
inline constexpr std::size_t kMaxCopyThreads = 64;
inline constexpr std::size_t kMaxCopyJobs = 65536;
inline constexpr std::size_t kMaxIoJobs = 65536;
inline constexpr std::size_t kMaxParallelThreads = 64;
inline constexpr std::size_t kMaxChangesKept = std::size_t{1} << 18;  // of an index, 18 MiB, while somebody watches

}  // namespace lmcache
