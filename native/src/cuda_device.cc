#include "lmcache/cuda_device.h"

#include <utility>

namespace lmcache {

CudaDevice::Current::Current(const CudaDevice& device) : driver_(device.driver_) {
    driver_.check(driver_.context_push(device.context_), "cuCtxPushCurrent");
    const CuResult exchanged = driver_.exchange_capture_mode(&capture_mode_);
    if (exchanged == 0) return;
    CuContext popped;
    driver_.context_pop(&popped);
    driver_.check(exchanged, "cuThreadExchangeStreamCaptureMode");
}

CudaDevice::Current::~Current() {
    driver_.exchange_capture_mode(&capture_mode_);
    CuContext popped;
    driver_.context_pop(&popped);
}

std::shared_ptr<CudaDevice> CudaDevice::open(const std::string& library, int ordinal) {
    return std::shared_ptr<CudaDevice>(new CudaDevice(library, ordinal));
}

CudaDevice::CudaDevice(const std::string& library, int ordinal) : driver_(library) {
    driver_.check(driver_.device_get(&device_, ordinal), "cuDeviceGet");
    int serves = 0;
    driver_.check(driver_.device_attribute(&serves, kCuHostPointersServeDevice, device_), "cuDeviceGetAttribute");
    host_pointers_serve_device_ = serves != 0;
    driver_.check(driver_.context_retain(&context_, device_), "cuDevicePrimaryCtxRetain");
    try {
        const Current current(*this);
        driver_.check(driver_.priority_range(&lowest_priority_, &highest_priority_), "cuCtxGetStreamPriorityRange");
    } catch (...) {
        driver_.context_release(device_);
        throw;
    }
}

CudaDevice::~CudaDevice() {
    unregister_memory(0, ~std::size_t{0});
    driver_.context_release(device_);
}

void CudaDevice::register_memory(std::uintptr_t address, std::size_t size_bytes) {
    const Current current(*this);
    driver_.check(driver_.host_register(reinterpret_cast<void*>(address), size_bytes, kCuHostPortableAndMapped),
                  "cuMemHostRegister");
    const MutexLock lock(mutex_);
    registered_.emplace(address, size_bytes);
}

void CudaDevice::unregister_memory(std::uintptr_t address, std::size_t size_bytes) noexcept {
    std::vector<std::uintptr_t> ended;
    {
        const MutexLock lock(mutex_);
        auto piece = registered_.lower_bound(address);
        while (piece != registered_.end() && piece->first - address < size_bytes) {
            ended.push_back(piece->first);
            piece = registered_.erase(piece);
        }
    }
    if (ended.empty()) return;
    try {
        const Current current(*this);
        for (const std::uintptr_t piece : ended) driver_.host_unregister(reinterpret_cast<void*>(piece));
    } catch (const CudaError&) {
        // The context is lost, and its registrations with it.
    }
}

bool CudaDevice::is_registered(const void* address, std::size_t size_bytes) const {
    const auto begin = reinterpret_cast<std::uintptr_t>(address);
    const MutexLock lock(mutex_);
    auto after = registered_.upper_bound(begin);
    if (after == registered_.begin()) return false;
    const auto& [piece, piece_bytes] = *std::prev(after);
    return begin - piece <= piece_bytes && size_bytes <= piece_bytes - (begin - piece);
}

std::shared_ptr<CudaFence> CudaDevice::fence(std::uintptr_t stream) {
    return std::make_shared<CudaFence>(shared_from_this(), stream);
}

std::string CudaDevice::take_failure() {
    const MutexLock lock(mutex_);
    return std::exchange(failure_, {});
}

void CudaDevice::note_failure(const std::string& failure) noexcept {
    const MutexLock lock(mutex_);
    failure_ = failure;
}

CudaFence::CudaFence(std::shared_ptr<const CudaDevice> device, std::uintptr_t stream) : device_(std::move(device)) {
    const CudaDevice::Current current(*device_);
    const CudaDriver& driver = device_->driver();
    driver.check(driver.event_create(&event_, kCuEventDisableTiming | kCuEventBlockingSync), "cuEventCreate");
    const CuResult recorded = driver.event_record(event_, reinterpret_cast<CuStream>(stream));
    if (recorded == 0) return;
    driver.event_destroy(event_);
    driver.check(recorded, "cuEventRecord");
}

CudaFence::~CudaFence() {
    try {
        const CudaDevice::Current current(*device_);
        device_->driver().event_destroy(event_);
    } catch (const CudaError&) {
        // Gone with its context.
    }
}

void CudaFence::wait() const {
    const CudaDevice::Current current(*device_);
    device_->driver().check(device_->driver().event_synchronize(event_), "cuEventSynchronize");
}

void CudaFence::hold_back(CuStream stream) const {
    device_->driver().check(device_->driver().stream_wait_event(stream, event_, 0), "cuStreamWaitEvent");
}

CudaHostBuffer::~CudaHostBuffer() {
    if (memory_ == nullptr) return;
    try {
        const CudaDevice::Current current(device_);
        device_.driver().host_free(memory_);
    } catch (const CudaError&) {
        // Gone with its context.
    }
}

std::byte* CudaHostBuffer::get(std::size_t size_bytes) {
    if (size_bytes > size_bytes_) {
        const CudaDriver& driver = device_.driver();
        if (memory_ != nullptr) driver.host_free(std::exchange(memory_, nullptr));
        size_bytes_ = 0;
        driver.check(driver.host_alloc(&memory_, size_bytes, kCuHostPortableAndMapped), "cuMemHostAlloc");
        size_bytes_ = size_bytes;
    }
    return static_cast<std::byte*>(memory_);
}

}  // namespace lmcache
