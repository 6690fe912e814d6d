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

class CudaMover::Taken {
public:
    explicit Taken(CudaMover& mover) : mover_(mover) {
        const std::lock_guard lock(mover_.mutex_);
        lane_ = mover_.free_.back();
        mover_.free_.pop_back();
    }
    Taken(const Taken&) = delete;
    Taken& operator=(const Taken&) = delete;
    ~Taken() {
        const std::lock_guard lock(mover_.mutex_);
        mover_.free_.push_back(lane_);
    }
    Lane& operator*() const { return *lane_; }

private:
    CudaMover& mover_;
    Lane* lane_;
};

CudaMover::CudaMover(std::shared_ptr<const CudaCopyWays> ways, std::size_t threads)
    : ways_(std::move(ways)), device_(*ways_->device()) {
    const CudaDevice::Current current(device_);
    free_.reserve(threads);
    try {
        for (std::size_t i = 0; i < threads; ++i) {
            lanes_.push_back(std::make_unique<Lane>(*ways_));
            make(*lanes_.back());
            free_.push_back(lanes_.back().get());
        }
    } catch (...) {
        for (const auto& lane : lanes_) destroy(*lane);
        throw;
    }
}

CudaMover::~CudaMover() {
    try {
        const CudaDevice::Current current(device_);
        for (const auto& lane : lanes_) destroy(*lane);
    } catch (const CudaError&) {
        // Gone with their context.
    }
}

void CudaMover::make(Lane& lane) const {
    const CudaDriver& driver = device_.driver();
    driver.check(driver.stream_create(&lane.loads, kCuStreamNonBlocking, device_.load_priority()),
                 "cuStreamCreateWithPriority");
    driver.check(driver.stream_create(&lane.stores, kCuStreamNonBlocking, device_.store_priority()),
                 "cuStreamCreateWithPriority");
    driver.check(driver.event_create(&lane.end, kCuEventDisableTiming | kCuEventBlockingSync), "cuEventCreate");
}

void CudaMover::destroy(Lane& lane) const noexcept {
    const CudaDriver& driver = device_.driver();
    if (lane.loads != nullptr) driver.stream_destroy(lane.loads);
    if (lane.stores != nullptr) driver.stream_destroy(lane.stores);
    if (lane.end != nullptr) driver.event_destroy(lane.end);
}

void CudaMover::copy(Lane& lane, CopyDirection direction, const PagedGroup& group, std::byte* host,
                     std::span<const std::int64_t> blocks, CuStream stream) const {
    lane.runs.clear();
    group.for_each_run(blocks, [&](std::uintptr_t address, std::size_t offset, std::size_t size_bytes) {
        lane.runs.push_back({address, host + offset, size_bytes});
    });
    lane.copies.start(direction, lane.runs, stream);
}

void CudaMover::await_end(const Lane& lane, CuStream stream) const {
    const CudaDriver& driver = device_.driver();
    driver.check(driver.event_record(lane.end, stream), "cuEventRecord");
    driver.check(driver.event_synchronize(lane.end), "cuEventSynchronize");
}

bool CudaMover::gather(const PagedGroup& group, std::byte* payload, std::span<const std::int64_t> blocks,
                       StoreKind kind, PayloadChecksum& checksum) noexcept {
    const Taken taken(*this);
    Lane& lane = *taken;
    const std::size_t size_bytes = group.payload_bytes();
    try {
        const CudaDevice::Current current(device_);
        try {
            const bool in_place = device_.is_registered(payload, size_bytes);
            std::byte* const landing = in_place ? payload : lane.staging.get(size_bytes);
            copy(lane, CopyDirection::kToHost, group, landing, blocks, lane.stores);
            await_end(lane, lane.stores);
            checksum = copy_with_checksum(payload, landing, size_bytes, in_place ? StoreKind::kChecksumOnly : kind);
            return true;
        } catch (...) {
            // What was started must have ended before anybody else may use slot or blocks. Where this fails too, the
            // context is lost, and all copies with it.
            device_.driver().stream_synchronize(lane.stores);
            throw;
        }
    } catch (const std::exception& error) {
        device_.note_failure(error.what());
        return false;
    }
}

bool CudaMover::scatter(const PagedGroup& group, const std::byte* payload, std::span<const std::int64_t> blocks,
                        StoreKind kind, const CudaFence* fence, PayloadChecksum& checksum) noexcept {
    const Taken taken(*this);
    Lane& lane = *taken;
    const std::size_t size_bytes = group.payload_bytes();
    try {
        const CudaDevice::Current current(device_);
        try {
            if (fence != nullptr) fence->hold_back(lane.loads);
            if (device_.is_registered(payload, size_bytes)) {
                copy(lane, CopyDirection::kToDevice, group, const_cast<std::byte*>(payload), blocks, lane.loads);
                // While the copy runs. Both read the same bytes if the frame's header has not changed after both.
                checksum = copy_with_checksum(nullptr, payload, size_bytes, StoreKind::kChecksumOnly);
            } else {
                std::byte* const staged = lane.staging.get(size_bytes);
                checksum = copy_with_checksum(staged, payload, size_bytes, kind);
                copy(lane, CopyDirection::kToDevice, group, staged, blocks, lane.loads);
            }
            await_end(lane, lane.loads);
            return true;
        } catch (...) {
            device_.driver().stream_synchronize(lane.loads);  // as above
            throw;
        }
    } catch (const std::exception& error) {
        device_.note_failure(error.what());
        return false;
    }
}

}  // namespace lmcache
