// What FileIO works on: jobs over files of one kind.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <ctime>
#include <span>
#include <string>
#include <vector>

#include "lmcache/frame.h"
#include "lmcache/job_queue.h"
#include "lmcache/transfer_loop.h"

namespace lmcache {

enum class FileAct : std::uint8_t { kWrite, kRead, kStat, kUnlink, kRemoveEmpty, kMarkUsed };

inline constexpr std::size_t kFrameNameBytes = kDigestBytes + kChunkHashBytes;

enum class Publication : std::uint8_t { kPending, kWritten, kFailed };

struct FileJob : Job<IoResults> {
    FileAct act = FileAct::kStat;
    std::vector<std::string> paths;
    std::vector<std::string> temporary_paths;  // writes
    std::vector<std::uint64_t> addresses;      // reads and writes
    std::vector<std::uint64_t> sizes;          // reads: capacities
    std::vector<std::byte> frame_names;        // reads of frames: kFrameNameBytes a file
    timespec submitted{};                      // reads, writes and marks

    // Only writes have it; guarded by the publisher's mutex.
    std::vector<Publication> publication;
    std::size_t next_to_publish = 0;
    std::atomic<bool> is_broken{false};  // a file failed: those behind it are not published

    bool writes() const { return act == FileAct::kWrite; }
    std::byte* memory(std::size_t index) const { return reinterpret_cast<std::byte*>(addresses[index]); }
    std::span<const std::byte, kDigestBytes> namespace_digest(std::size_t index) const {
        return std::span(frame_names).subspan(index * kFrameNameBytes).first<kDigestBytes>();
    }
    std::span<const std::byte, kChunkHashBytes> chunk_hash(std::size_t index) const {
        return std::span(frame_names).subspan(index * kFrameNameBytes + kDigestBytes).first<kChunkHashBytes>();
    }
};

}  // namespace lmcache
