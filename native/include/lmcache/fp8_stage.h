// `fp8`: bfloat16 as 8-bit floating point with a scale for each group of 256 elements. Lossy (docs/formats/fp8.md).
#pragma once

#include <memory>
#include <string_view>

#include "lmcache/serde_stage.h"

namespace lmcache {

// kE4m3: 4 bits of exponent, 3 of mantissa, no infinity, up to 448. kE5m2: 5 and 2, up to 57,344.
enum class Fp8Format : std::uint8_t { kE4m3, kE5m2 };

inline constexpr std::size_t kFp8GroupElements = 256;

// "portable", "avx2" or "avx512"; false where this CPU cannot run it.
bool runs_fp8_path(std::string_view path);

// `path`: one of those, "" for the best. Throws std::invalid_argument for one that cannot run. All paths write the same
// bytes. Finite values are scaled by their group's largest one, which comes back exactly; infinities become that one,
// with their sign; NaN stays NaN.
std::shared_ptr<const SerdeStage> make_fp8_stage(Fp8Format format, std::string_view path = "");

}  // namespace lmcache
