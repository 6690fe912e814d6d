// `zstd`: lossless, the exponents of 16-bit floating point through zstd, signs and mantissas as they are
// (docs/formats/serde.md). The library is the machine's own libzstd.so.1, loaded when it is first asked for.
#pragma once

#include <memory>
#include <string>

#include "lmcache/serde_stage.h"

namespace lmcache {

// "" or why the machine's libzstd cannot be used.
std::string zstd_refusal();

// `level` is zstd's, or 0 for entropy coding alone; `smallest_saving` as for make_exponent_stage. Throws
// std::invalid_argument out of range, and std::runtime_error where zstd_refusal() is not "".
std::shared_ptr<const SerdeStage> make_zstd_stage(int level, double smallest_saving);

}  // namespace lmcache
