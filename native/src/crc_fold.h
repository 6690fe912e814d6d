// CRC-32C of long runs by carry-less multiplication (crc_fold.cc). Needs AVX-512 F, VPCLMULQDQ and SSE4.2; sizes are
// multiples of kFoldStepBytes above 0.
#pragma once

#include <cstddef>
#include <cstdint>

#include "lmcache/checksum.h"
#include "lmcache/copy.h"
#include "lmcache/cpu.h"

namespace lmcache {

inline constexpr std::size_t kFoldStepBytes = 256;

inline bool can_fold(const CpuFeatures& cpu) { return cpu.avx512f && cpu.vpclmulqdq && cpu.sse42; }

// A register (not inverted) to the one after these bytes.
std::uint32_t fold_crc32c(std::uint32_t crc, const std::byte* source, std::size_t size_bytes);

// Advances all lanes. Nothing is pending.
void fold_lanes(LaneChecksum& sum, const std::byte* source, std::size_t size_bytes);

// The same, and copies the bytes. `next_source`: fetched ahead, unless nullptr.
void fold_and_copy(LaneChecksum& sum, const std::byte* source, std::size_t size_bytes, std::byte* destination,
                   StoreKind kind, const std::byte* next_source);

}  // namespace lmcache
