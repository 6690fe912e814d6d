#include "lmcache/cuda_mover.h"

#include <cstring>
#include <stdexcept>
#include <utility>

namespace lmcache {
namespace {

// destination = source, with the checksum of what was read.
PayloadChecksum copy_with_checksum(std::byte* destination, const std::byte* source, std::size_t size_bytes,
                                   StoreKind kind) {
    LaneChecksum sum;
    best_copy_kernels().copy_runs({.source = source, .destination = destination, .run_bytes = size_bytes, .count = 1},
                                  sum, kind);
    store_fence();
    return sum.finish();
}

}  // namespace

class CudaMover::BorrowedWorkspace {
public:
    explicit BorrowedWorkspace(CudaMover& mover) : mover_(mover) {
        const MutexLock lock(mover_.mutex_);
        workspace_ = mover_.free_.back();
        mover_.free_.pop_back();
    }
    BorrowedWorkspace(const BorrowedWorkspace&) = delete;
    BorrowedWorkspace& operator=(const BorrowedWorkspace&) = delete;
    ~BorrowedWorkspace() {
        const MutexLock lock(mover_.mutex_);
        mover_.free_.push_back(workspace_);
    }
    Workspace& operator*() const { return *workspace_; }

private:
    CudaMover& mover_;
    Workspace* workspace_;
};

CudaMover::CudaMover(std::shared_ptr<const CudaCopyMethods> methods, std::size_t threads)
    : methods_(std::move(methods)), device_(*methods_->device()) {
    const CudaDevice::Current current(device_);
    free_.reserve(threads);
    try {
        for (std::size_t i = 0; i < threads; ++i) {
            workspaces_.push_back(std::make_unique<Workspace>(*methods_));
            make(*workspaces_.back());
            free_.push_back(workspaces_.back().get());
        }
    } catch (...) {
        for (const auto& workspace : workspaces_) destroy(*workspace);
        throw;
    }
}

CudaMover::~CudaMover() {
    try {
        const CudaDevice::Current current(device_);
        for (const auto& workspace : workspaces_) destroy(*workspace);
    } catch (const CudaError&) {
        // Gone with their context.
    }
}

void CudaMover::make(Workspace& workspace) const {
    const CudaDriver& driver = device_.driver();
    driver.check(driver.stream_create(&workspace.loads, kCuStreamNonBlocking, device_.load_priority()),
                 "cuStreamCreateWithPriority");
    driver.check(driver.stream_create(&workspace.stores, kCuStreamNonBlocking, device_.store_priority()),
                 "cuStreamCreateWithPriority");
    driver.check(driver.event_create(&workspace.end, kCuEventDisableTiming | kCuEventBlockingSync), "cuEventCreate");
}

void CudaMover::destroy(Workspace& workspace) const noexcept {
    const CudaDriver& driver = device_.driver();
    if (workspace.loads != nullptr) driver.stream_destroy(workspace.loads);
    if (workspace.stores != nullptr) driver.stream_destroy(workspace.stores);
    if (workspace.end != nullptr) driver.event_destroy(workspace.end);
}

void CudaMover::copy(Workspace& workspace, CopyDirection direction, const PagedGroup& group, std::byte* host,
                     std::span<const std::int64_t> blocks, CuStream stream) const {
    workspace.runs.clear();
    group.for_each_run(blocks, [&](std::uintptr_t address, std::size_t offset, std::size_t size_bytes) {
        workspace.runs.push_back({address, host + offset, size_bytes});
    });
    workspace.copies.start(direction, workspace.runs, stream);
}

void CudaMover::await_end(const Workspace& workspace, CuStream stream) const {
    const CudaDriver& driver = device_.driver();
    driver.check(driver.event_record(workspace.end, stream), "cuEventRecord");
    driver.check(driver.event_synchronize(workspace.end), "cuEventSynchronize");
}

bool CudaMover::gather(const PagedGroup& group, std::byte* payload, std::span<const std::int64_t> blocks,
                       StoreKind kind, PayloadChecksum& checksum) noexcept {
    const BorrowedWorkspace borrowed(*this);
    Workspace& workspace = *borrowed;
    const std::size_t size_bytes = group.payload_bytes();
    try {
        const CudaDevice::Current current(device_);
        try {
            const bool in_place = device_.is_registered(payload, size_bytes);
            std::byte* const landing = in_place ? payload : workspace.staging.get(size_bytes);
            copy(workspace, CopyDirection::kToHost, group, landing, blocks, workspace.stores);
            await_end(workspace, workspace.stores);
            checksum = copy_with_checksum(payload, landing, size_bytes, in_place ? StoreKind::kChecksumOnly : kind);
            return true;
        } catch (...) {
            // What was started must have ended before anybody else may use slot or blocks. Where this fails too, the
            // context is lost, and all copies with it.
            device_.driver().stream_synchronize(workspace.stores);
            throw;
        }
    } catch (const std::exception& error) {
        device_.note_failure(error.what());
        return false;
    }
}

bool CudaMover::scatter(const PagedGroup& group, const std::byte* payload, std::span<const std::int64_t> blocks,
                        StoreKind kind, const CudaFence* fence, PayloadChecksum& checksum) noexcept {
    const BorrowedWorkspace borrowed(*this);
    Workspace& workspace = *borrowed;
    const std::size_t size_bytes = group.payload_bytes();
    try {
        const CudaDevice::Current current(device_);
        try {
            if (fence != nullptr) fence->hold_back(workspace.loads);
            if (device_.is_registered(payload, size_bytes)) {
                copy(workspace, CopyDirection::kToDevice, group, const_cast<std::byte*>(payload), blocks,
                     workspace.loads);
                // While the copy runs. Both read the same bytes if the frame's header has not changed after both.
                checksum = copy_with_checksum(nullptr, payload, size_bytes, StoreKind::kChecksumOnly);
            } else {
                std::byte* const staged = workspace.staging.get(size_bytes);
                checksum = copy_with_checksum(staged, payload, size_bytes, kind);
                copy(workspace, CopyDirection::kToDevice, group, staged, blocks, workspace.loads);
            }
            await_end(workspace, workspace.loads);
            return true;
        } catch (...) {
            device_.driver().stream_synchronize(workspace.loads);  // as above
            throw;
        }
    } catch (const std::exception& error) {
        device_.note_failure(error.what());
        return false;
    }
}

}  // namespace lmcache
