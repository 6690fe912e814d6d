// One GPU of the engine: its context, the host memory it may copy to and from, and points in the engine's work.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "lmcache/cuda_driver.h"

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

    // Makes the context current in this thread, as every call below and every copy needs. While the engine records a
    // graph, calls of other threads that it does not expect would spoil it: here they are declared harmless.
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

    // Pins memory, which has to be there, so that copies to and from it run beside everything else. Throws CudaError.
    // Pieces must not overlap, and a copy may not reach from one into the next.
    void register_memory(std::uintptr_t address, std::size_t size_bytes);
    // Ends all registrations that begin in this range. No copy may run there. A lost context is no error.
    void unregister_memory(std::uintptr_t address, std::size_t size_bytes) noexcept;
    bool is_registered(const void* address, std::size_t size_bytes) const;

    // The end of all that the engine has launched on its stream so far. Throws CudaError.
    std::shared_ptr<CudaFence> fence(std::uintptr_t stream);

    // What the last copy failed of, once; "" if none has failed since.
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

    mutable std::mutex mutex_;
    std::map<std::uintptr_t, std::size_t> registered_;  // address -> bytes
    std::string failure_;
};

// Keeps its device. Thread-safe. Counts its own users, so that a copier's thread which drops the last one needs nothing
// of the language that made it.
class CudaFence : public std::enable_shared_from_this<CudaFence> {
public:
    CudaFence(std::shared_ptr<const CudaDevice> device, std::uintptr_t stream);
    CudaFence(const CudaFence&) = delete;
    CudaFence& operator=(const CudaFence&) = delete;
    ~CudaFence();

    void wait() const;                      // on the host. Throws CudaError
    void hold_back(CuStream stream) const;  // what is launched on the stream from now on. Context current. Throws

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

    // At least this much; what was in it is gone when it grows, so nothing may use it any more. Context current. Throws
    // CudaError.
    std::byte* get(std::size_t size_bytes);

private:
    const CudaDevice& device_;
    void* memory_ = nullptr;
    std::size_t size_bytes_ = 0;
};

}  // namespace lmcache
