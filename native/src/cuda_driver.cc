#include "lmcache/cuda_driver.h"

#include "lmcache/shared_library.h"

namespace lmcache {

CudaDriver::CudaDriver(const std::string& name) {
    const SharedLibrary library({name.c_str()});
    if (!library.is_open()) throw CudaError("cannot open the NVIDIA driver " + name + ": " + library.refusal());
#define LMCACHE_FIND_CALL(member, symbol, parameters) library.need<CudaError>(member, symbol);
    LMCACHE_CUDA_CALLS(LMCACHE_FIND_CALL)
#undef LMCACHE_FIND_CALL
    library.find(copy_batch, "cuMemcpyBatchAsync");
    check(init(0), "cuInit");
}

void CudaDriver::check(CuResult result, const char* call) const {
    if (result == 0) return;
    const char* name = nullptr;
    if (error_name(result, &name) != 0 || name == nullptr) name = "an unknown error";
    throw CudaError(std::string(call) + " failed: " + name + " (" + std::to_string(result) + ")");
}

}  // namespace lmcache
