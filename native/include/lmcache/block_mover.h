// What reaches KV blocks for a copier: by ordinary loads and stores, or by a device's copy engines.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "lmcache/checksum.h"
#include "lmcache/copy.h"
#include "lmcache/paged_group.h"

namespace lmcache {

class CudaFence;

// Called by several threads at once. A call returns when nothing of it is under way any more, however it ended.
class BlockMover {
public:
    virtual ~BlockMover() = default;

    // blocks -> payload, and the payload's checksum. False when the payload is not there.
    virtual bool gather(const PagedGroup& group, std::byte* payload, std::span<const std::int64_t> blocks,
                        StoreKind kind, PayloadChecksum& checksum) noexcept = 0;

    // payload -> blocks, and the checksum of what was read. Writes no block before `fence` (null: none) has passed.
    // False when the blocks are not written. The payload may change meanwhile: whoever calls this must check, after it,
    // that the payload is still the one that the checksum is compared with.
    virtual bool scatter(const PagedGroup& group, const std::byte* payload, std::span<const std::int64_t> blocks,
                         StoreKind kind, const CudaFence* fence, PayloadChecksum& checksum) noexcept = 0;
};

// KV in host memory: copy and checksum are one pass. Knows no fences: nothing here runs behind the caller's back.
class HostMover final : public BlockMover {
public:
    bool gather(const PagedGroup& group, std::byte* payload, std::span<const std::int64_t> blocks, StoreKind kind,
                PayloadChecksum& checksum) noexcept override;
    bool scatter(const PagedGroup& group, const std::byte* payload, std::span<const std::int64_t> blocks,
                 StoreKind kind, const CudaFence* fence, PayloadChecksum& checksum) noexcept override;
};

}  // namespace lmcache
