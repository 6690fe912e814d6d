#include "lmcache/block_mover.h"

namespace lmcache {

bool HostMover::gather(const PagedGroup& group, std::byte* payload, std::span<const std::int64_t> blocks,
                       StoreKind kind, PayloadChecksum& checksum) noexcept {
    LaneChecksum sum;
    group.gather(best_copy_kernels(), payload, blocks, sum, kind);
    checksum = sum.finish();
    return true;
}

bool HostMover::scatter(const PagedGroup& group, const std::byte* payload, std::span<const std::int64_t> blocks,
                        StoreKind kind, const CudaFence*, PayloadChecksum& checksum) noexcept {
    LaneChecksum sum;
    group.scatter(best_copy_kernels(), payload, blocks, sum, kind);
    store_fence();
    checksum = sum.finish();
    return true;
}

}  // namespace lmcache
