// KV blocks in a GPU's memory, copied by DMA between them and pinned host memory.
#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "lmcache/block_mover.h"
#include "lmcache/cuda_copy.h"

namespace lmcache {

// Payloads inside registered memory are copied in place. Others (L1 that is not pinned yet, or cannot be) go through a
// pinned buffer of the mover's own: one more copy by the CPU.
class CudaMover final : public BlockMover {
public:
    // Throws CudaError. The ways are kept.
    CudaMover(std::shared_ptr<const CudaCopyWays> ways, std::size_t threads);
    CudaMover(const CudaMover&) = delete;
    CudaMover& operator=(const CudaMover&) = delete;
    ~CudaMover() override;

    bool gather(const PagedGroup& group, std::byte* payload, std::span<const std::int64_t> blocks, StoreKind kind,
                PayloadChecksum& checksum) noexcept override;
    bool scatter(const PagedGroup& group, const std::byte* payload, std::span<const std::int64_t> blocks,
                 StoreKind kind, const CudaFence* fence, PayloadChecksum& checksum) noexcept override;

private:
    // What one thread uses for one chunk. There are as many as threads, so that nobody waits for one.
    struct Lane {
        explicit Lane(const CudaCopyWays& ways) : copies(ways), staging(*ways.device()) {}
        CuStream loads = nullptr;
        CuStream stores = nullptr;
        CuEvent end = nullptr;
        RunCopies copies;
        CudaHostBuffer staging;
        std::vector<DeviceRun> runs;
    };
    class Taken;

    void make(Lane& lane) const;
    void destroy(Lane& lane) const noexcept;
    void copy(Lane& lane, CopyDirection direction, const PagedGroup& group, std::byte* host,
              std::span<const std::int64_t> blocks, CuStream stream) const;
    void await_end(const Lane& lane, CuStream stream) const;

    const std::shared_ptr<const CudaCopyWays> ways_;
    CudaDevice& device_;
    std::vector<std::unique_ptr<Lane>> lanes_;
    std::mutex mutex_;
    std::vector<Lane*> free_;
};

}  // namespace lmcache
