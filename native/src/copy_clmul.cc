// The AVX-512 copy with another way to take the checksum of long runs, which leaves the CPU room to wait for memory:
// the CRC instruction alone takes nearly as long as a fast memory does.
#if defined(__x86_64__)

#include "copy_paths.h"
#include "crc_fold.h"

namespace lmcache {
namespace {

constexpr std::size_t kLeastBytes = 2 * kFoldStepBytes;        // of a checksum alone
constexpr std::size_t kLeastCopiedBytes = 8 * kFoldStepBytes;  // of each run that is copied

void checksum_run(const Runs& run, LaneChecksum& checksum) {
    Runs rest = run;
    const std::size_t folded_bytes = run.run_bytes / kFoldStepBytes * kFoldStepBytes;
    fold_lanes(checksum, run.source, folded_bytes);
    rest.source += folded_bytes;
    rest.run_bytes -= folded_bytes;
    kAvx512Copy.copy_runs(rest, checksum, StoreKind::kChecksumOnly);
}

void copy_long_runs(const Runs& runs, LaneChecksum& checksum, StoreKind kind) {
    const std::byte* source = runs.source;
    std::byte* destination = runs.destination;
    for (std::size_t i = 0; i < runs.count; ++i) {
        const std::byte* const next_run = source + runs.source_stride;
        fold_and_copy(checksum, source, runs.run_bytes, destination, kind,
                      i + 1 == runs.count ? runs.next_source : next_run);
        source = next_run;
        destination += runs.destination_stride;
    }
}

void copy_runs(const Runs& runs, LaneChecksum& checksum, StoreKind kind) {
    if (checksum.pending_bytes == 0) {
        if (kind == StoreKind::kChecksumOnly) {
            if (runs.count == 1 && runs.run_bytes >= kLeastBytes) return checksum_run(runs, checksum);
        } else if (runs.run_bytes >= kLeastCopiedBytes && runs.run_bytes % kFoldStepBytes == 0) {
            return copy_long_runs(runs, checksum, kind);
        }
    }
    kAvx512Copy.copy_runs(runs, checksum, kind);
}

void stream_copy(std::byte* destination, const std::byte* source, std::size_t size_bytes) {
    kAvx512Copy.stream(destination, source, size_bytes);
}

}  // namespace

const CopyKernels kClmulCopy = {"clmul", copy_runs, stream_copy};

}  // namespace lmcache

#endif
