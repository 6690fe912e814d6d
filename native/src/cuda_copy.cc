#include "lmcache/cuda_copy.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <utility>

#include "lmcache/cuda_kernel.h"
#include "lmcache/rounding.h"

namespace lmcache {
namespace {

constexpr int kTrialRounds = 3;
constexpr double kKernelMustWinBy = 1.25;
constexpr std::size_t kKernelRunBytes = 32 << 10;  // longer runs are cut, so that all blocks of threads have work
constexpr std::size_t kKernelAlignBytes = 16;
constexpr unsigned kKernelBlocks = 64;
constexpr unsigned kKernelThreads = 256;

struct KernelRun {  // as the kernel reads it
    std::uint64_t source;
    std::uint64_t destination;
    std::uint64_t size_bytes;
};
static_assert(sizeof(KernelRun) == 24);

CuDevicePointer as_device(const std::byte* host) { return reinterpret_cast<std::uintptr_t>(host); }

bool kernel_takes(std::span<const DeviceRun> runs) {
    return std::all_of(runs.begin(), runs.end(), [](const DeviceRun& run) {
        return (run.device | as_device(run.host) | run.size_bytes) % kKernelAlignBytes == 0;
    });
}

// Memory on the device for the length of a trial, and a stream.
struct TrialSpace {
    const CudaDriver& driver;
    CuStream stream = nullptr;
    CuDevicePointer device = 0;

    TrialSpace(const CudaDevice& owner, std::size_t size_bytes) : driver(owner.driver()) {
        driver.check(driver.stream_create(&stream, kCuStreamNonBlocking, owner.store_priority()),
                     "cuStreamCreateWithPriority");
        const CuResult allocated = driver.device_alloc(&device, size_bytes);
        if (allocated == 0) return;
        driver.stream_destroy(stream);
        driver.check(allocated, "cuMemAlloc");
    }
    TrialSpace(const TrialSpace&) = delete;
    TrialSpace& operator=(const TrialSpace&) = delete;
    ~TrialSpace() {
        driver.stream_synchronize(stream);
        driver.device_free(device);
        driver.stream_destroy(stream);
    }
};

}  // namespace

const char* copy_method_name(CopyMethod method) {
    switch (method) {
        case CopyMethod::kSingle:
            return "single";
        case CopyMethod::kBatch:
            return "batch";
        case CopyMethod::kKernel:
            return "kernel";
    }
    return "";
}

CudaCopyMethods::CudaCopyMethods(std::shared_ptr<CudaDevice> device, std::size_t run_bytes, std::size_t trial_bytes)
    : device_(std::move(device)) {
    const CudaDevice::Current current(*device_);
    const CudaDriver& driver = device_->driver();
    if (device_->host_pointers_serve_device() && driver.module_load(&module_, kCopyKernelPtx) == 0 &&
        driver.module_function(&kernel_, module_, kCopyKernelName) != 0) {
        kernel_ = nullptr;
    }
    try {
        try_all(run_bytes, trial_bytes);
    } catch (...) {
        if (module_ != nullptr) driver.module_unload(module_);
        throw;
    }
}

CudaCopyMethods::~CudaCopyMethods() {
    if (module_ == nullptr) return;
    try {
        const CudaDevice::Current current(*device_);
        device_->driver().module_unload(module_);
    } catch (const CudaError&) {
        // Gone with its context.
    }
}

void CudaCopyMethods::try_all(std::size_t run_bytes, std::size_t trial_bytes) {
    const CudaDriver& driver = device_->driver();
    CudaHostBuffer host(*device_);
    std::byte* const written = host.get(2 * trial_bytes);
    std::byte* const read = written + trial_bytes;
    TrialSpace space(*device_, trial_bytes);
    RunCopies copies(*this);

    const auto timed = [&](CopyMethod method, CopyDirection direction, std::span<const DeviceRun> runs) {
        double best_seconds = 1e9;
        for (int round = 0; round < kTrialRounds; ++round) {
            const auto begin = std::chrono::steady_clock::now();
            copies.start(method, direction, runs, space.stream);
            driver.check(driver.stream_synchronize(space.stream), "cuStreamSynchronize");
            const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - begin;
            best_seconds = std::min(best_seconds, taken.count());
        }
        return static_cast<double>(trial_bytes) / best_seconds / 1e9;
    };
    const DeviceRun whole{space.device, written, trial_bytes};
    one_copy_gb_per_second_ = timed(CopyMethod::kSingle, CopyDirection::kToHost, {&whole, 1});

    // Host memory in order, device memory in the reverse: a method that leaves a run out or takes it twice is noticed.
    run_bytes = std::clamp(run_bytes, kKernelAlignBytes, trial_bytes) & ~(kKernelAlignBytes - 1);
    const std::size_t count = trial_bytes / run_bytes;
    std::vector<DeviceRun> there(count);
    std::vector<DeviceRun> back(count);
    for (std::size_t i = 0; i < count; ++i) {
        const CuDevicePointer device = space.device + (count - 1 - i) * run_bytes;
        there[i] = {device, written + i * run_bytes, run_bytes};
        back[i] = {device, read + i * run_bytes, run_bytes};
    }
    const auto speed = [](const MethodTrial& trial) {
        return std::min(trial.to_host_gb_per_second, trial.to_device_gb_per_second);
    };
    unsigned seed = 1;
    double best_speed = 0;
    for (const CopyMethod method : {CopyMethod::kSingle, CopyMethod::kBatch, CopyMethod::kKernel}) {
        if (method == CopyMethod::kBatch && driver.copy_batch == nullptr) continue;
        if (method == CopyMethod::kKernel && kernel_ == nullptr) continue;
        MethodTrial trial{method, 0, 0};
        for (std::size_t i = 0; i < trial_bytes; i += sizeof seed) {
            seed = seed * 1664525 + 1013904223;  // Numerical Recipes' generator
            std::memcpy(written + i, &seed, sizeof seed);
        }
        std::memset(read, 0, trial_bytes);
        try {
            trial.to_device_gb_per_second = timed(method, CopyDirection::kToDevice, there);
            trial.to_host_gb_per_second = timed(method, CopyDirection::kToHost, back);
            if (std::memcmp(written, read, count * run_bytes) != 0) trial = {method, 0, 0};
        } catch (const CudaError&) {
            driver.check(driver.stream_synchronize(space.stream), "cuStreamSynchronize");
            trial = {method, 0, 0};
        }
        trials_.push_back(trial);
        const double needed = method == CopyMethod::kKernel ? best_speed * kKernelMustWinBy : best_speed;
        if (speed(trial) <= needed) continue;
        best_speed = speed(trial);
        best_ = method;
        if (method != CopyMethod::kKernel) best_engine_ = method;
    }
    if (best_speed == 0) throw CudaError("no way of copying to and from the GPU returned what was written");
}

RunCopies::RunCopies(const CudaCopyMethods& methods) : methods_(methods), kernel_runs_(*methods.device()) {}

void RunCopies::start(CopyDirection direction, std::span<const DeviceRun> runs, CuStream stream) {
    const bool by_kernel = methods_.best_ == CopyMethod::kKernel && kernel_takes(runs);
    start(by_kernel ? CopyMethod::kKernel : methods_.best_engine_, direction, runs, stream);
}

void RunCopies::start(CopyMethod method, CopyDirection direction, std::span<const DeviceRun> runs, CuStream stream) {
    if (runs.empty()) return;
    switch (method) {
        case CopyMethod::kSingle:
            return start_single(direction, runs, stream);
        case CopyMethod::kBatch:
            return start_batch(direction, runs, stream);
        case CopyMethod::kKernel:
            return start_kernel(direction, runs, stream);
    }
}

void RunCopies::start_single(CopyDirection direction, std::span<const DeviceRun> runs, CuStream stream) const {
    const CudaDriver& driver = methods_.device_->driver();
    for (const DeviceRun& run : runs) {
        if (direction == CopyDirection::kToHost) {
            driver.check(driver.copy_to_host(run.host, run.device, run.size_bytes, stream), "cuMemcpyDtoHAsync");
        } else {
            driver.check(driver.copy_to_device(run.device, run.host, run.size_bytes, stream), "cuMemcpyHtoDAsync");
        }
    }
}

void RunCopies::start_batch(CopyDirection direction, std::span<const DeviceRun> runs, CuStream stream) {
    destinations_.clear();
    sources_.clear();
    sizes_.clear();
    for (const DeviceRun& run : runs) {
        const bool to_host = direction == CopyDirection::kToHost;
        destinations_.push_back(to_host ? as_device(run.host) : run.device);
        sources_.push_back(to_host ? run.device : as_device(run.host));
        sizes_.push_back(run.size_bytes);
    }
    CuMemcpyAttributes attributes{kCuSourceInStreamOrder, {0, 0}, {0, 0}, kCuOverlapWithCompute};
    std::size_t first = 0;
    std::size_t failed = 0;
    const CudaDriver& driver = methods_.device_->driver();
    driver.check(driver.copy_batch(destinations_.data(), sources_.data(), sizes_.data(), sizes_.size(), &attributes,
                                   &first, 1, &failed, stream),
                 "cuMemcpyBatchAsync");
}

void RunCopies::start_kernel(CopyDirection direction, std::span<const DeviceRun> runs, CuStream stream) {
    std::size_t count = 0;
    for (const DeviceRun& run : runs) count += div_ceil(run.size_bytes, kKernelRunBytes);
    std::byte* const memory = kernel_runs_.get(count * sizeof(KernelRun));
    std::size_t filled = 0;
    for (const DeviceRun& run : runs) {
        for (std::size_t done = 0; done < run.size_bytes; done += kKernelRunBytes) {
            const CuDevicePointer host = as_device(run.host) + done;
            const CuDevicePointer device = run.device + done;
            const bool to_host = direction == CopyDirection::kToHost;
            const KernelRun part{to_host ? device : host, to_host ? host : device,
                                 std::min(kKernelRunBytes, run.size_bytes - done)};
            std::memcpy(memory + filled++ * sizeof part, &part, sizeof part);
        }
    }
    std::uint64_t runs_pointer = as_device(memory);
    auto run_count = static_cast<std::uint32_t>(count);
    void* parameters[] = {&runs_pointer, &run_count};
    const CudaDriver& driver = methods_.device_->driver();
    driver.check(driver.launch(methods_.kernel_, std::min(run_count, kKernelBlocks), 1, 1, kKernelThreads, 1, 1, 0,
                               stream, parameters, nullptr),
                 "cuLaunchKernel");
}

}  // namespace lmcache
