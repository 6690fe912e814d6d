// The methods of copying many small pieces of device memory to and from host memory, and which is the fastest here.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "lmcache/cuda_device.h"

namespace lmcache {

enum class CopyMethod {
    kSingle,  // a call a run
    kBatch,   // all runs in one call (from CUDA 12.8 on)
    kKernel,  // a kernel that reads and writes host memory itself: takes compute units from the engine
};
const char* copy_method_name(CopyMethod method);

enum class CopyDirection { kToHost, kToDevice };

struct DeviceRun {
    CuDevicePointer device;
    std::byte* host;  // pinned
    std::size_t size_bytes;
};

// What a method achieved in a trial: GB/s (10^9 bytes), 0 if it is not available or copied wrongly.
struct MethodTrial {
    CopyMethod method;
    double to_host_gb_per_second;
    double to_device_gb_per_second;
};

// The methods of one device. Thread-safe.
class CudaCopyMethods {
public:
    // Every method is tried on memory made for that: runs of `run_bytes` as a chunk has them. The copy engines win
    // unless the kernel is a quarter faster. Throws CudaError if none works.
    CudaCopyMethods(std::shared_ptr<CudaDevice> device, std::size_t run_bytes, std::size_t trial_bytes);
    CudaCopyMethods(const CudaCopyMethods&) = delete;
    CudaCopyMethods& operator=(const CudaCopyMethods&) = delete;
    ~CudaCopyMethods();

    CopyMethod best() const { return best_; }
    double one_copy_gb_per_second() const { return one_copy_gb_per_second_; }  // to host, in one piece: the limit
    const std::vector<MethodTrial>& trials() const { return trials_; }
    const std::shared_ptr<CudaDevice>& device() const { return device_; }

private:
    friend class RunCopies;
    void try_all(std::size_t run_bytes, std::size_t trial_bytes);

    const std::shared_ptr<CudaDevice> device_;
    CuModule module_ = nullptr;
    CuFunction kernel_ = nullptr;
    CopyMethod best_engine_ = CopyMethod::kSingle;  // for runs that the kernel does not take
    CopyMethod best_ = CopyMethod::kSingle;
    double one_copy_gb_per_second_ = 0;
    std::vector<MethodTrial> trials_;
};

// Starts copies of many runs. For one thread; holds the arrays that the driver reads meanwhile.
class RunCopies {
public:
    explicit RunCopies(const CudaCopyMethods& methods);

    // Returns when the copies are on their way; those of an earlier call must have ended. Context current. Throws
    // CudaError: then some may be on their way.
    void start(CopyDirection direction, std::span<const DeviceRun> runs, CuStream stream);
    void start(CopyMethod method, CopyDirection direction, std::span<const DeviceRun> runs, CuStream stream);

private:
    void start_single(CopyDirection direction, std::span<const DeviceRun> runs, CuStream stream) const;
    void start_batch(CopyDirection direction, std::span<const DeviceRun> runs, CuStream stream);
    void start_kernel(CopyDirection direction, std::span<const DeviceRun> runs, CuStream stream);

    const CudaCopyMethods& methods_;
    CudaHostBuffer kernel_runs_;
    std::vector<CuDevicePointer> destinations_;
    std::vector<CuDevicePointer> sources_;
    std::vector<std::size_t> sizes_;
};

}  // namespace lmcache
