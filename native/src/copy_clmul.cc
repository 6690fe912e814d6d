// The AVX-512 copy with another way to take a checksum alone. While something is copied memory is slower than either.
#if defined(__x86_64__)

#include "copy_paths.h"
#include "crc_fold.h"

namespace lmcache {
namespace {

constexpr std::size_t kLeastBytes = 2 * kFoldStepBytes;

void copy_runs(const Runs& runs, LaneChecksum& checksum, StoreKind kind) {
    Runs rest = runs;
    if (kind == StoreKind::kChecksumOnly && runs.count == 1 && checksum.pending_bytes == 0 &&
        runs.run_bytes >= kLeastBytes) {
        const std::size_t folded_bytes = runs.run_bytes / kFoldStepBytes * kFoldStepBytes;
        fold_lanes(checksum, runs.source, folded_bytes);
        rest.source += folded_bytes;
        rest.run_bytes -= folded_bytes;
    }
    kAvx512Copy.copy_runs(rest, checksum, kind);
}

void stream_copy(std::byte* destination, const std::byte* source, std::size_t size_bytes) {
    kAvx512Copy.stream(destination, source, size_bytes);
}

}  // namespace

const CopyKernels kClmulCopy = {"clmul", copy_runs, stream_copy};

}  // namespace lmcache

#endif
