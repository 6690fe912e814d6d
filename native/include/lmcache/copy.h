// Copies with the payload checksum fused in, one implementation per instruction set, chosen at run time.
#pragma once

#include <cstddef>
#include <cstdint>

#include "lmcache/checksum.h"

namespace lmcache {

enum class StoreKind {
    kStreaming,     // past the caches: the destination is not read soon
    kCached,        // ordinary stores: the destination is read soon
    kChecksumOnly,  // nothing is written; `destination` is not looked at
};

// `count` runs of `run_bytes` each; run i lies at source + i * source_stride and goes to destination + i *
// destination_stride.
struct Runs {
    const std::byte* source = nullptr;
    std::byte* destination = nullptr;
    std::size_t run_bytes = 0;
    std::size_t count = 0;
    std::ptrdiff_t source_stride = 0;
    std::ptrdiff_t destination_stride = 0;
    const std::byte* next_source = nullptr;  // where the caller's next runs begin, if known: fetched ahead
};

struct CopyKernels {
    const char* name;  // "clmul", "avx512", "avx2", "neon" or "portable"

    // Copies the runs in order and advances the checksum over them. The source may change while it is read, by another
    // process: then the checksum is of bytes that were read no earlier than the bytes that were written, so that a
    // match with the checksum of a frame whose header has not changed afterwards proves the copy. Streaming stores are
    // ordered only by store_fence().
    void (*copy_runs)(const Runs& runs, LaneChecksum& checksum, StoreKind kind);

    // The best plain streaming copy, no checksum. Ordered by store_fence().
    void (*stream)(std::byte* destination, const std::byte* source, std::size_t size_bytes);
};

// How far ahead of a copy its source is fetched. Found by trying: 2 to 4 KiB are much alike, without it a quarter of
// the speed is lost.
inline constexpr std::size_t kCopyAheadBytes = 3072;

// Makes all earlier stores of this thread, streaming ones too, visible before any later one.
void store_fence();

// Makes all earlier loads of this thread happen before any later one.
void load_fence();

// The kernels of this CPU's best path.
const CopyKernels& best_copy_kernels();

// Kernels by name, or nullptr if the name is unknown or this CPU cannot run them. For tests and benchmarks.
const CopyKernels* copy_kernels(const char* name);

}  // namespace lmcache
