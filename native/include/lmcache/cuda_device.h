// One GPU of the engine: its context, the host memory it may copy to and from, and points in the engine's work.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "lmcache/cuda_driver.h"
#include "lmcache/mutex.h"

namespace lmcache {

class CudaFence;

// Thread-safe. Shares the context that the engine's framework uses (the device's primary one).
class CudaDevice : public std::enable_shared_from_this<CudaDevice> {
public:
    // `ordinal` counts the devices that this process sees. Throws CudaError.
    static std::shared_ptr<CudaDevice> open(const std::string& library, int ordinal);
    CudaDevice(const CudaDevice&) = delete;
    CudaDevice& operator=(const CudaDevice&) = delete;
    ~CudaDevice();

    // Makes the context current in this thread, as every call below and every copy needs. Declares the calls of this
    // thread harmless to a graph that the engine may be capturing, which they would otherwise invalidate.
    class Current {
    public:
        explicit Current(const CudaDevice& device);
        Current(const Current&) = delete;
        Current& operator=(const Current&) = delete;
        ~Current();

    private:
        const CudaDriver& driver_;
        int capture_mode_ = kCuCaptureModeRelaxed;
    };

    // Pins memory, whose pages must exist, so that copies to and from it are asynchronous. Throws CudaError.
    // Pieces must not overlap, and a copy may not reach from one into the next.
    void register_memory(std::uintptr_t address, std::size_t size_bytes);
    // Ends all registrations that begin in this range. No copy may run there. A lost context is no error.
    void unregister_memory(std::uintptr_t address, std::size_t size_bytes) noexcept;
    bool is_registered(const void* address, std::size_t size_bytes) const;

    // The end of everything that the engine has launched on that stream so far. Throws CudaError.
    std::shared_ptr<CudaFence> fence(std::uintptr_t stream);

    // The error of the last copy that failed, once; "" if none has failed since the last call.
    std::string take_failure();
    void note_failure(const std::string& failure) noexcept;

    const CudaDriver& driver() const { return driver_; }
    int load_priority() const { return highest_priority_; }  // a request waits for a load, nobody for a store
    int store_priority() const { return lowest_priority_; }
    bool host_pointers_serve_device() const { return host_pointers_serve_device_; }

private:
    CudaDevice(const std::string& library, int ordinal);

    const CudaDriver driver_;
    CuDevice device_ = 0;
    CuContext context_ = nullptr;
    int lowest_priority_ = 0;
    int highest_priority_ = 0;
    bool host_pointers_serve_device_ = false;

    mutable Mutex mutex_;
    std::map<std::uintptr_t, std::size_t> registered_ LMCACHE_GUARDED_BY(mutex_);  // address -> bytes
    std::string failure_ LMCACHE_GUARDED_BY(mutex_);
};

// A point in the engine's work. Keeps its device. Thread-safe. Owned by std::shared_ptr on the Python side too, so that
// a copier's thread may release the last reference without the GIL.
class CudaFence : public std::enable_shared_from_this<CudaFence> {
public:
    CudaFence(std::shared_ptr<const CudaDevice> device, std::uintptr_t stream);
    CudaFence(const CudaFence&) = delete;
    CudaFence& operator=(const CudaFence&) = delete;
    ~CudaFence();

    void wait() const;                      // on the host. Throws CudaError
    void hold_back(CuStream stream) const;  // work launched on the stream from now on. Context current. Throws

private:
    const std::shared_ptr<const CudaDevice> device_;
    CuEvent event_ = nullptr;
};

// Pinned host memory that grows. For one thread.
class CudaHostBuffer {
public:
    explicit CudaHostBuffer(const CudaDevice& device) : device_(device) {}
    CudaHostBuffer(const CudaHostBuffer&) = delete;
    CudaHostBuffer& operator=(const CudaHostBuffer&) = delete;
    ~CudaHostBuffer();

    // At least that many bytes. Growing discards the content, so no copy may be using it. Context current. Throws
    // CudaError.
    std::byte* get(std::size_t size_bytes);

private:
    const CudaDevice& device_;
    void* memory_ = nullptr;
    std::size_t size_bytes_ = 0;
};

}  // namespace lmcache
