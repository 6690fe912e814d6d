// `exponent`: lossless, for 16-bit floating point in any order (docs/formats/serde.md).
#pragma once

#include <memory>

#include "lmcache/exponent_kernels.h"
#include "lmcache/serde_stage.h"

namespace lmcache {

// How often each exponent is found in a part of a payload.
struct ExponentSample {
    std::uint32_t counts[256] = {};
    std::uint32_t total = 0;
};

// A small part of all elements, spread over the payload.
ExponentSample sample_exponents(std::span<const std::byte> payload, const ExponentKernels& kernels);

// `smallest_saving`: a payload that would shrink by less than this fraction is left as it is. Throws
// std::invalid_argument unless it is between 0 and 1.
std::shared_ptr<const SerdeStage> make_exponent_stage(double smallest_saving,
                                                      const ExponentKernels& kernels = best_exponent_kernels());

}  // namespace lmcache
