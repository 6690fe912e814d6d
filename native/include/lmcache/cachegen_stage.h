// `cachegen`: bfloat16 as one of 15 or 31 steps of the largest of 256 elements, and those entropy-coded. Lossy
// (docs/formats/cachegen.md).
#pragma once

#include <memory>

#include "lmcache/serde_stage.h"

namespace lmcache {

inline constexpr std::size_t kCachegenGroupElements = 256;

// `bins`: 16 or 32; a value becomes one of bins - 1 steps, from -largest to +largest. Throws std::invalid_argument. A
// payload with infinities or NaN is left as it is.
std::shared_ptr<const SerdeStage> make_cachegen_stage(unsigned bins);

}  // namespace lmcache
