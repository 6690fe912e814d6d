// The few calls of NVIDIA's driver API that copies need, found at run time: neither CUDA nor a GPU is needed to build.
//
// Names, signatures and numbers are those of the public driver API (CUDA 12.8; older drivers lack batched copies).
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>

namespace lmcache {

using CuResult = int;  // 0: success
using CuDevice = int;
using CuDevicePointer = std::uint64_t;
using CuContext = struct CuContextHandle*;
using CuStream = struct CuStreamHandle*;
using CuEvent = struct CuEventHandle*;
using CuModule = struct CuModuleHandle*;
using CuFunction = struct CuFunctionHandle*;

struct CuMemLocation {
    int type;
    int id;
};

struct CuMemcpyAttributes {
    int source_access_order;
    CuMemLocation source_hint;
    CuMemLocation destination_hint;
    unsigned flags;
};

inline constexpr int kCuSourceInStreamOrder = 1;
inline constexpr unsigned kCuOverlapWithCompute = 1;
inline constexpr unsigned kCuStreamNonBlocking = 1;
inline constexpr unsigned kCuEventBlockingSync = 1;
inline constexpr unsigned kCuEventDisableTiming = 2;
inline constexpr unsigned kCuHostPortableAndMapped = 1 | 2;  // the same bits for registered and for allocated memory
inline constexpr int kCuCaptureModeRelaxed = 2;
inline constexpr int kCuHostPointersServeDevice = 91;  // CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM

// A call that failed, in words: the call, the driver's name for the code, and the code.
class CudaError : public std::runtime_error {
    using std::runtime_error::runtime_error;
};

// (member, exported symbol, parameters)
#define LMCACHE_CUDA_CALLS(CALL)                                                                             \
    CALL(init, "cuInit", (unsigned))                                                                         \
    CALL(device_get, "cuDeviceGet", (CuDevice*, int))                                                        \
    CALL(device_attribute, "cuDeviceGetAttribute", (int*, int, CuDevice))                                    \
    CALL(context_retain, "cuDevicePrimaryCtxRetain", (CuContext*, CuDevice))                                 \
    CALL(context_release, "cuDevicePrimaryCtxRelease_v2", (CuDevice))                                        \
    CALL(context_push, "cuCtxPushCurrent_v2", (CuContext))                                                   \
    CALL(context_pop, "cuCtxPopCurrent_v2", (CuContext*))                                                    \
    CALL(priority_range, "cuCtxGetStreamPriorityRange", (int* lowest, int* highest))                         \
    CALL(exchange_capture_mode, "cuThreadExchangeStreamCaptureMode", (int*))                                 \
    CALL(stream_create, "cuStreamCreateWithPriority", (CuStream*, unsigned flags, int priority))             \
    CALL(stream_destroy, "cuStreamDestroy_v2", (CuStream))                                                   \
    CALL(stream_synchronize, "cuStreamSynchronize", (CuStream))                                              \
    CALL(stream_wait_event, "cuStreamWaitEvent", (CuStream, CuEvent, unsigned flags))                        \
    CALL(event_create, "cuEventCreate", (CuEvent*, unsigned flags))                                          \
    CALL(event_destroy, "cuEventDestroy_v2", (CuEvent))                                                      \
    CALL(event_record, "cuEventRecord", (CuEvent, CuStream))                                                 \
    CALL(event_synchronize, "cuEventSynchronize", (CuEvent))                                                 \
    CALL(host_register, "cuMemHostRegister_v2", (void*, std::size_t, unsigned flags))                        \
    CALL(host_unregister, "cuMemHostUnregister", (void*))                                                    \
    CALL(host_alloc, "cuMemHostAlloc", (void**, std::size_t, unsigned flags))                                \
    CALL(host_free, "cuMemFreeHost", (void*))                                                                \
    CALL(device_alloc, "cuMemAlloc_v2", (CuDevicePointer*, std::size_t))                                     \
    CALL(device_free, "cuMemFree_v2", (CuDevicePointer))                                                     \
    CALL(copy_to_host, "cuMemcpyDtoHAsync_v2", (void*, CuDevicePointer, std::size_t, CuStream))              \
    CALL(copy_to_device, "cuMemcpyHtoDAsync_v2", (CuDevicePointer, const void*, std::size_t, CuStream))      \
    CALL(module_load, "cuModuleLoadData", (CuModule*, const void*))                                          \
    CALL(module_unload, "cuModuleUnload", (CuModule))                                                        \
    CALL(module_function, "cuModuleGetFunction", (CuFunction*, CuModule, const char*))                       \
    CALL(launch, "cuLaunchKernel",                                                                           \
         (CuFunction, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y, \
          unsigned block_z, unsigned shared_bytes, CuStream, void** parameters, void** extra))               \
    CALL(error_name, "cuGetErrorName", (CuResult, const char**))

// Loaded once and kept until the process ends: a driver does not survive being unloaded.
class CudaDriver {
public:
    // Throws CudaError when the library is not there, lacks a call, or finds no device (cuInit).
    explicit CudaDriver(const std::string& name);

#define LMCACHE_DECLARE_CALL(member, symbol, parameters) CuResult(*member) parameters = nullptr;
    LMCACHE_CUDA_CALLS(LMCACHE_DECLARE_CALL)
#undef LMCACHE_DECLARE_CALL
    // Null in drivers before CUDA 12.8. Later ones keep this form beside a newer one.
    CuResult (*copy_batch)(CuDevicePointer* destinations, CuDevicePointer* sources, std::size_t* sizes,
                           std::size_t count, CuMemcpyAttributes* attributes, std::size_t* attribute_starts,
                           std::size_t attribute_count, std::size_t* failed, CuStream) = nullptr;

    // Throws CudaError unless `result` is success.
    void check(CuResult result, const char* call) const;
};

}  // namespace lmcache
