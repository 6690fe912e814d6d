// How a copier reaches KV blocks: by loads and stores of the CPU, or by the copy engines of a device.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "lmcache/checksum.h"
#include "lmcache/copy.h"
#include "lmcache/paged_group.h"

namespace lmcache {

class CudaFence;

// Thread-safe. When a call returns, no part of its copy is still running, whatever its outcome.
class BlockMover {
public:
    virtual ~BlockMover() = default;

    // blocks -> payload, and the payload's checksum. False when the copy failed.
    virtual bool gather(const PagedGroup& group, std::byte* payload, std::span<const std::int64_t> blocks,
                        StoreKind kind, PayloadChecksum& checksum) noexcept = 0;

    // payload -> blocks, and the checksum of the bytes read. Writes no block before `fence` (null: none) has passed.
    // False when the copy failed. The payload may change during the call: the caller must check afterwards that the
    // slot still holds the frame whose checksum it compares.
    virtual bool scatter(const PagedGroup& group, const std::byte* payload, std::span<const std::int64_t> blocks,
                         StoreKind kind, const CudaFence* fence, PayloadChecksum& checksum) noexcept = 0;
};

// KV in host memory: copy and checksum are one pass. Ignores fences: nothing runs asynchronously here.
class HostMover final : public BlockMover {
public:
    bool gather(const PagedGroup& group, std::byte* payload, std::span<const std::int64_t> blocks, StoreKind kind,
                PayloadChecksum& checksum) noexcept override;
    bool scatter(const PagedGroup& group, const std::byte* payload, std::span<const std::int64_t> blocks,
                 StoreKind kind, const CudaFence* fence, PayloadChecksum& checksum) noexcept override;
};

}  // namespace lmcache
