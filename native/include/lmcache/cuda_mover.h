// KV blocks in a GPU's memory, copied by DMA between them and pinned host memory.
#pragma once

#include <memory>
#include <vector>

#include "lmcache/block_mover.h"
#include "lmcache/cuda_copy.h"
#include "lmcache/mutex.h"

namespace lmcache {

// Payloads inside registered memory are copied in place. Others (L1 that is not pinned yet, or cannot be) go through a
// pinned buffer of the mover's own: one more copy by the CPU.
class CudaMover final : public BlockMover {
public:
    // Throws CudaError. The methods are kept.
    CudaMover(std::shared_ptr<const CudaCopyMethods> methods, std::size_t threads);
    CudaMover(const CudaMover&) = delete;
    CudaMover& operator=(const CudaMover&) = delete;
    ~CudaMover() override;

    bool gather(const PagedGroup& group, std::byte* payload, std::span<const std::int64_t> blocks, StoreKind kind,
                PayloadChecksum& checksum) noexcept override;
    bool scatter(const PagedGroup& group, const std::byte* payload, std::span<const std::int64_t> blocks,
                 StoreKind kind, const CudaFence* fence, PayloadChecksum& checksum) noexcept override;

private:
    // What one thread uses for one chunk. There are as many as threads, so that nobody waits for one.
    struct Workspace {
        explicit Workspace(const CudaCopyMethods& methods) : copies(methods), staging(*methods.device()) {}
        CuStream loads = nullptr;
        CuStream stores = nullptr;
        CuEvent end = nullptr;
        RunCopies copies;
        CudaHostBuffer staging;
        std::vector<DeviceRun> runs;
    };
    class BorrowedWorkspace;

    void make(Workspace& workspace) const;
    void destroy(Workspace& workspace) const noexcept;
    void copy(Workspace& workspace, CopyDirection direction, const PagedGroup& group, std::byte* host,
              std::span<const std::int64_t> blocks, CuStream stream) const;
    void await_end(const Workspace& workspace, CuStream stream) const;

    const std::shared_ptr<const CudaCopyMethods> methods_;
    CudaDevice& device_;
    std::vector<std::unique_ptr<Workspace>> workspaces_;
    Mutex mutex_;
    std::vector<Workspace*> free_ LMCACHE_GUARDED_BY(mutex_);
};

}  // namespace lmcache
