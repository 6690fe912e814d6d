#include "lmcache/limits.h"

namespace lmcache {
static_assert(kFrameHeaderBytes % 4096 == 0);
}  // namespace lmcache
