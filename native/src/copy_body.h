// The copy loop of every path. A path's source file defines LMCACHE_ISA (a target attribute, or nothing) and a struct
// `Isa` and then includes this. Target attributes go on each function rather than on the whole file, so that inline
// functions of the standard library are never emitted with instructions that another CPU lacks.
//
// Isa provides:
//   using Block                       kBlockBytes of data, a multiple of 32
//   load(const std::byte*), store(std::byte*, Block), stream(std::byte*, Block); stream needs kBlockBytes alignment
//   crc_word(crc, word), crc_block(Lanes&, const Block&, const std::byte*)   advances all lanes over one block
// crc_block gets both the block and where it came from and uses whichever is faster; when it reads memory again, it
// does so after the load (see CopyKernels::copy_runs).
#pragma once

#include <cstring>

#include "copy_paths.h"
#include "lmcache/rounding.h"

namespace lmcache {
namespace {

#define LMCACHE_INLINE LMCACHE_ISA __attribute__((always_inline)) inline

LMCACHE_INLINE Lanes load_lanes(const LaneChecksum& sum) {
    const std::uint32_t at = sum.next_lane;
    return {sum.lanes[at], sum.lanes[(at + 1) % 4], sum.lanes[(at + 2) % 4], sum.lanes[(at + 3) % 4]};
}

LMCACHE_INLINE void save_lanes(LaneChecksum& sum, const Lanes& lanes) {
    const std::uint32_t at = sum.next_lane;
    sum.lanes[at] = static_cast<std::uint32_t>(lanes.c0);
    sum.lanes[(at + 1) % 4] = static_cast<std::uint32_t>(lanes.c1);
    sum.lanes[(at + 2) % 4] = static_cast<std::uint32_t>(lanes.c2);
    sum.lanes[(at + 3) % 4] = static_cast<std::uint32_t>(lanes.c3);
}

LMCACHE_INLINE void prefetch(const std::byte* source, std::ptrdiff_t ahead) {
    __builtin_prefetch(reinterpret_cast<const void*>(reinterpret_cast<std::uintptr_t>(source) + ahead));
}

// One word into the checksum; the lanes stay where they are.
LMCACHE_INLINE void absorb_word(LaneChecksum& sum, std::uint64_t word) {
    std::uint32_t& lane = sum.lanes[sum.next_lane];
    lane = static_cast<std::uint32_t>(Isa::crc_word(lane, word));
    sum.next_lane = (sum.next_lane + 1) % 4;
}

// Fewer than 8 bytes, or the bytes that complete a begun word. Each source byte is read once.
template <StoreKind kKind>
LMCACHE_INLINE void copy_bytes(std::byte* destination, const std::byte* source, std::size_t size, LaneChecksum& sum) {
    std::uint64_t bytes = 0;
    std::memcpy(&bytes, source, size);
    if constexpr (kKind != StoreKind::kChecksumOnly) std::memcpy(destination, &bytes, size);
    sum.pending |= bytes << (8 * sum.pending_bytes);
    sum.pending_bytes += static_cast<std::uint32_t>(size);
    if (sum.pending_bytes == 8) {
        absorb_word(sum, sum.pending);
        sum.pending = 0;
        sum.pending_bytes = 0;
    }
}

// Whole blocks. The source is prefetched `ahead` bytes further on. The checksum comes between load and store: a load
// that follows a store to an address with the same low 12 bits waits for it, and slots and blocks both begin at page
// starts.
template <StoreKind kKind, bool kStream>
LMCACHE_INLINE void copy_blocks(Lanes& lanes, std::byte*& destination, const std::byte*& source, std::size_t bytes,
                                std::ptrdiff_t ahead) {
    for (const std::byte* const end = source + bytes; source != end; source += Isa::kBlockBytes) {
        prefetch(source, ahead);
        const typename Isa::Block block = Isa::load(source);
        Isa::crc_block(lanes, block, source);
        if constexpr (kKind != StoreKind::kChecksumOnly) {
            if constexpr (kStream) {
                Isa::stream(destination, block);
            } else {
                Isa::store(destination, block);
            }
            destination += Isa::kBlockBytes;
        }
    }
}

// What is left of a run behind its last whole block.
template <StoreKind kKind>
LMCACHE_INLINE void copy_tail(std::byte* destination, const std::byte* source, std::size_t size, LaneChecksum& sum) {
    for (; size >= 8; size -= 8, source += 8) {
        const std::uint64_t word = word_at(source, 0);
        if constexpr (kKind != StoreKind::kChecksumOnly) {
            std::memcpy(destination, &word, 8);
            destination += 8;
        }
        absorb_word(sum, word);
    }
    if (size != 0) copy_bytes<kKind>(destination, source, size, sum);
}

// Where to prefetch while a run is copied: `near` bytes of it `kCopyAheadBytes` further on in the same run, then, for
// its last part, `far_ahead` bytes further on, which is in a later run.
struct Prefetch {
    std::size_t near_bytes;
    std::ptrdiff_t far_ahead;
};

// A run of any length, in any state of the checksum.
template <StoreKind kKind>
LMCACHE_INLINE void copy_odd_run(std::byte* destination, const std::byte* source, std::size_t size, LaneChecksum& sum,
                                 const Prefetch& prefetch) {
    if (sum.pending_bytes != 0) {
        const std::size_t missing = 8 - sum.pending_bytes;
        const std::size_t head = size < missing ? size : missing;
        copy_bytes<kKind>(destination, source, head, sum);
        source += head;
        if constexpr (kKind != StoreKind::kChecksumOnly) destination += head;
        size -= head;
    }
    const std::size_t whole_bytes = size / Isa::kBlockBytes * Isa::kBlockBytes;
    const std::size_t near_bytes = prefetch.near_bytes < whole_bytes ? prefetch.near_bytes : whole_bytes;
    Lanes lanes = load_lanes(sum);
    if (kKind == StoreKind::kStreaming && reinterpret_cast<std::uintptr_t>(destination) % Isa::kBlockBytes == 0) {
        copy_blocks<kKind, true>(lanes, destination, source, near_bytes, kCopyAheadBytes);
        copy_blocks<kKind, true>(lanes, destination, source, whole_bytes - near_bytes, prefetch.far_ahead);
    } else {
        copy_blocks<kKind, false>(lanes, destination, source, near_bytes, kCopyAheadBytes);
        copy_blocks<kKind, false>(lanes, destination, source, whole_bytes - near_bytes, prefetch.far_ahead);
    }
    save_lanes(sum, lanes);
    copy_tail<kKind>(destination, source, size - whole_bytes, sum);
}

template <StoreKind kKind>
LMCACHE_INLINE void copy_odd_runs(const Runs& runs, LaneChecksum& sum, const Prefetch& prefetch) {
    const std::byte* source = runs.source;
    std::byte* destination = runs.destination;
    for (std::size_t i = 0; i < runs.count; ++i) {
        copy_odd_run<kKind>(destination, source, runs.run_bytes, sum, prefetch);
        source += runs.source_stride;
        if constexpr (kKind != StoreKind::kChecksumOnly) destination += runs.destination_stride;
    }
}

// Runs of whole blocks that begin where a word begins: the registers stay in place from run to run.
template <StoreKind kKind, bool kStream>
LMCACHE_INLINE void copy_even_runs(const Runs& runs, LaneChecksum& sum, const Prefetch& prefetch) {
    Lanes lanes = load_lanes(sum);
    const std::byte* run = runs.source;
    std::byte* target = runs.destination;
    const std::size_t far_bytes = runs.run_bytes - prefetch.near_bytes;
    for (std::size_t i = 0; i < runs.count; ++i) {
        const std::byte* source = run;
        std::byte* destination = target;
        copy_blocks<kKind, kStream>(lanes, destination, source, prefetch.near_bytes, kCopyAheadBytes);
        copy_blocks<kKind, kStream>(lanes, destination, source, far_bytes, prefetch.far_ahead);
        run += runs.source_stride;
        if constexpr (kKind != StoreKind::kChecksumOnly) target += runs.destination_stride;
    }
    save_lanes(sum, lanes);
}

template <StoreKind kKind>
LMCACHE_ISA void copy_some(const Runs& runs, LaneChecksum& sum, const Prefetch& prefetch) {
    if (sum.pending_bytes != 0 || runs.run_bytes % Isa::kBlockBytes != 0) {
        copy_odd_runs<kKind>(runs, sum, prefetch);
    } else if (kKind == StoreKind::kStreaming &&
               reinterpret_cast<std::uintptr_t>(runs.destination) % Isa::kBlockBytes == 0 &&
               static_cast<std::size_t>(runs.destination_stride) % Isa::kBlockBytes == 0) {
        copy_even_runs<kKind, true>(runs, sum, prefetch);
    } else {
        copy_even_runs<kKind, false>(runs, sum, prefetch);
    }
}

template <StoreKind kKind>
LMCACHE_ISA void copy_all(const Runs& all, LaneChecksum& checksum) {
    if (all.count == 0 || all.run_bytes == 0) return;
    Runs runs = all;
    const auto run_bytes = static_cast<std::ptrdiff_t>(all.run_bytes);
    if (runs.source_stride == run_bytes &&
        (kKind == StoreKind::kChecksumOnly || runs.destination_stride == run_bytes)) {
        runs.run_bytes *= runs.count;
        runs.source_stride *= static_cast<std::ptrdiff_t>(runs.count);
        runs.count = 1;
    }
    // A short run is prefetched while the run `lead` before it is copied, a long one in part, while the one before it
    // is.
    const std::size_t lead = div_ceil(kCopyAheadBytes, runs.run_bytes);
    Prefetch prefetch{0, static_cast<std::ptrdiff_t>(lead) * runs.source_stride};
    if (lead == 1) {
        prefetch.near_bytes = (runs.run_bytes - kCopyAheadBytes) / Isa::kBlockBytes * Isa::kBlockBytes;
        prefetch.far_ahead +=
            static_cast<std::ptrdiff_t>(kCopyAheadBytes) - static_cast<std::ptrdiff_t>(runs.run_bytes);
    }
    const std::byte* const past = runs.source + static_cast<std::ptrdiff_t>(runs.count) * runs.source_stride;
    LaneChecksum sum = checksum;
    const std::size_t last = lead < runs.count ? lead : runs.count;
    Runs tail = runs;
    runs.count -= last;
    copy_some<kKind>(runs, sum, prefetch);
    // The last runs prefetch what follows all runs, taken to be of the same shape.
    const auto done = static_cast<std::ptrdiff_t>(runs.count);
    tail.source += done * runs.source_stride;
    if constexpr (kKind != StoreKind::kChecksumOnly) tail.destination += done * runs.destination_stride;
    tail.count = last;
    prefetch.far_ahead = all.next_source == nullptr ? 0 : prefetch.far_ahead + (all.next_source - past);
    copy_some<kKind>(tail, sum, prefetch);
    checksum = sum;
}

void copy_runs(const Runs& runs, LaneChecksum& checksum, StoreKind kind) {
    switch (kind) {
        case StoreKind::kStreaming:
            return copy_all<StoreKind::kStreaming>(runs, checksum);
        case StoreKind::kCached:
            return copy_all<StoreKind::kCached>(runs, checksum);
        case StoreKind::kChecksumOnly:
            return copy_all<StoreKind::kChecksumOnly>(runs, checksum);
    }
}

LMCACHE_ISA void stream_copy(std::byte* destination, const std::byte* source, std::size_t size_bytes) {
    constexpr std::size_t kStep = Isa::kBlockBytes;
    std::size_t head = (kStep - reinterpret_cast<std::uintptr_t>(destination) % kStep) % kStep;
    if (head > size_bytes) head = size_bytes;
    std::memcpy(destination, source, head);
    destination += head;
    source += head;
    size_bytes -= head;
    for (; size_bytes >= 4 * kStep; size_bytes -= 4 * kStep, source += 4 * kStep, destination += 4 * kStep) {
        const typename Isa::Block blocks[] = {Isa::load(source), Isa::load(source + kStep),
                                              Isa::load(source + 2 * kStep), Isa::load(source + 3 * kStep)};
        for (std::size_t i = 0; i < 4; ++i) Isa::stream(destination + i * kStep, blocks[i]);
    }
    for (; size_bytes >= kStep; size_bytes -= kStep, source += kStep, destination += kStep) {
        Isa::stream(destination, Isa::load(source));
    }
    std::memcpy(destination, source, size_bytes);
}

}  // namespace
}  // namespace lmcache
