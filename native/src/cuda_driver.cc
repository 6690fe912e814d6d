#include "lmcache/cuda_driver.h"

#include <dlfcn.h>

#include <type_traits>

namespace lmcache {

CudaDriver::CudaDriver(const std::string& library) {
    void* const handle = ::dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (handle == nullptr) throw CudaError("cannot open the NVIDIA driver " + library + ": " + ::dlerror());
    const auto find = [&](auto& call, const char* symbol) {
        call = reinterpret_cast<std::remove_reference_t<decltype(call)>>(::dlsym(handle, symbol));
        return call != nullptr;
    };
#define LMCACHE_FIND_CALL(member, symbol, parameters) \
    if (!find(member, symbol)) throw CudaError("the NVIDIA driver " + library + " is too old: it lacks " + (symbol));
    LMCACHE_CUDA_CALLS(LMCACHE_FIND_CALL)
#undef LMCACHE_FIND_CALL
    find(copy_batch, "cuMemcpyBatchAsync");
    check(init(0), "cuInit");
}

void CudaDriver::check(CuResult result, const char* call) const {
    if (result == 0) return;
    const char* name = nullptr;
    if (error_name(result, &name) != 0 || name == nullptr) name = "an unknown error";
    throw CudaError(std::string(call) + " failed: " + name + " (" + std::to_string(result) + ")");
}

}  // namespace lmcache
