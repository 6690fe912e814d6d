#include "lmcache/paged_copier.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>

#include "lmcache/copy.h"
#include "lmcache/limits.h"

namespace lmcache {
namespace {

constexpr std::size_t kSlotAlignBytes = 64;
constexpr std::size_t kPieceBytes = 256 << 10;  // small chunks are taken several at a time
// From this size of a whole load on, its destination would not stay in the caches until it is read: stores past the
// caches are then faster, copy and later read together (8 MiB and up on a Zen 3 with 32 MiB of third-level cache;
// cached stores win below by up to half when the slots are in the cache themselves).
constexpr std::size_t kStreamingLoadBytes = 8 << 20;

}  // namespace

PagedCopier::PagedCopier(std::uintptr_t arena_address, std::size_t arena_bytes, std::size_t threads,
                         std::unique_ptr<BlockMover> mover)
    : arena_(reinterpret_cast<std::byte*>(arena_address)),
      arena_bytes_(arena_bytes),
      mover_(std::move(mover)),
      queue_(kMaxCopyJobs) {
    if (arena_address == 0 || arena_address % kSlotAlignBytes != 0) {
        throw std::invalid_argument("arena_address must be a multiple of 64 and not 0");
    }
    if (threads < 1 || threads > kMaxCopyThreads) {
        throw std::invalid_argument("threads must be 1 to " + std::to_string(kMaxCopyThreads));
    }
    queue_.start_threads(threads, "lmcache-copy", [this] { work(); });
}

std::size_t PagedCopier::add_group(std::vector<Segment> segments, std::size_t blocks_per_chunk,
                                   std::size_t num_blocks) {
    auto group = std::make_shared<const PagedGroup>(std::move(segments), blocks_per_chunk, num_blocks);
    MutexLock lock(groups_mutex_);
    groups_.push_back(std::move(group));
    return groups_.size() - 1;
}

std::shared_ptr<const PagedGroup> PagedCopier::group_at(std::size_t group) const {
    MutexLock lock(groups_mutex_);
    if (group >= groups_.size()) throw std::invalid_argument("group " + std::to_string(group) + " was never added");
    return groups_[group];
}

std::size_t PagedCopier::payload_bytes(std::size_t group) const { return group_at(group)->payload_bytes(); }

std::shared_ptr<CopyJob> PagedCopier::make_job(std::size_t group, bool is_store, std::span<const std::uint64_t> slots,
                                               std::span<const std::int64_t> blocks,
                                               std::span<const std::byte> hashes) const {
    auto job = std::make_shared<CopyJob>();
    job->group = group_at(group);
    const PagedGroup& layout = *job->group;
    if (blocks.size() != slots.size() * layout.blocks_per_chunk()) {
        throw std::invalid_argument("blocks must hold " + std::to_string(layout.blocks_per_chunk()) +
                                    " ids for each slot");
    }
    if (hashes.size() != slots.size() * kChunkHashBytes)
        throw std::invalid_argument("hashes must hold 32 bytes for each slot");
    const std::size_t frame_bytes = kFrameHeaderBytes + layout.payload_bytes();
    for (const std::uint64_t slot : slots) {
        if (slot == kNoSlot) continue;
        if (slot % kSlotAlignBytes != 0 || frame_bytes > arena_bytes_ || slot > arena_bytes_ - frame_bytes) {
            throw std::invalid_argument("slot " + std::to_string(slot) + " is not aligned to 64 or its frame of " +
                                        std::to_string(frame_bytes) + " bytes leaves the arena");
        }
    }
    const std::int64_t lowest = is_store ? 0 : kNoBlock;
    for (const std::int64_t id : blocks) {
        if (id < lowest || id >= static_cast<std::int64_t>(layout.num_blocks())) {
            throw std::invalid_argument("block id " + std::to_string(id) + " is outside " + std::to_string(lowest) +
                                        " to " + std::to_string(layout.num_blocks() - 1));
        }
    }
    job->is_store = is_store;
    job->slots.assign(slots.begin(), slots.end());
    job->blocks.assign(blocks.begin(), blocks.end());
    job->hashes.assign(hashes.begin(), hashes.end());
    job->elements = slots.size();
    job->piece = std::max<std::size_t>(1, kPieceBytes / frame_bytes);
    const bool streaming = is_store || slots.size() * layout.payload_bytes() >= kStreamingLoadBytes;
    job->store_kind = streaming ? StoreKind::kStreaming : StoreKind::kCached;
    job->lane = is_store ? Lane::kNormal : Lane::kFirst;
    job->results.assign(slots.size(), 0);
    return job;
}

PagedCopier::JobId PagedCopier::submit_store(std::size_t group, std::span<const std::uint64_t> slots,
                                             std::span<const std::int64_t> blocks, std::span<const std::byte> hashes,
                                             std::span<const std::byte> template_bytes) {
    std::shared_ptr<CopyJob> job = make_job(group, true, slots, blocks, hashes);
    job->frame_template = frame_template_from_bytes(template_bytes);
    if (job->frame_template.payload_bytes != job->group->payload_bytes()) {
        throw std::invalid_argument("the template is for payloads of " +
                                    std::to_string(job->frame_template.payload_bytes) + " bytes, the group's have " +
                                    std::to_string(job->group->payload_bytes()));
    }
    return queue_.submit(std::move(job));
}

PagedCopier::JobId PagedCopier::submit_load(std::size_t group, std::span<const std::uint64_t> slots,
                                            std::span<const std::int64_t> blocks, std::span<const std::byte> hashes,
                                            std::span<const std::byte> namespace_digest,
                                            std::shared_ptr<const CudaFence> fence) {
    if (namespace_digest.size() != kDigestBytes) throw std::invalid_argument("namespace_digest must be 32 bytes");
    std::shared_ptr<CopyJob> job = make_job(group, false, slots, blocks, hashes);
    std::copy(namespace_digest.begin(), namespace_digest.end(), job->namespace_digest.begin());
    job->fence = std::move(fence);
    return queue_.submit(std::move(job));
}

void PagedCopier::work() noexcept {
    JobQueue<CopyJob>::Piece piece;
    while (queue_.take(piece)) {
        CopyJob& job = *piece.job;
        for (std::size_t chunk = piece.begin; chunk < piece.end; ++chunk)
            job.results[chunk] = job.is_store ? store_chunk(job, chunk) : load_chunk(job, chunk);
        queue_.ended(job, piece.end - piece.begin);
    }
}

ChunkResult PagedCopier::store_chunk(const CopyJob& job, std::size_t chunk) const noexcept {
    if (job.slots[chunk] == kNoSlot) return kUnreadable;
    const PagedGroup& group = *job.group;
    std::byte* const frame = arena_ + job.slots[chunk];
    frame_invalidate(frame);
    PayloadChecksum checksum;
    if (!mover_->gather(group, frame + kFrameHeaderBytes,
                        std::span(job.blocks).subspan(chunk * group.blocks_per_chunk(), group.blocks_per_chunk()),
                        job.store_kind, checksum)) {
        return kUnreadable;
    }
    const std::span<const std::byte, kChunkHashBytes> hash(job.hashes.data() + chunk * kChunkHashBytes,
                                                           kChunkHashBytes);
    frame_publish(frame, job.frame_template, hash, checksum);
    return kCopied;
}

ChunkResult PagedCopier::load_chunk(const CopyJob& job, std::size_t chunk) const noexcept {
    if (job.slots[chunk] == kNoSlot) return kUnreadable;
    const PagedGroup& group = *job.group;
    const std::byte* const frame = arena_ + job.slots[chunk];
    FrameHeader header;
    std::memcpy(&header, frame, sizeof header);
    const std::span<const std::byte, kChunkHashBytes> hash(job.hashes.data() + chunk * kChunkHashBytes,
                                                           kChunkHashBytes);
    const FrameFault fault = frame_check_header(header, group.payload_bytes(), job.namespace_digest, hash);
    if (fault != FrameFault::kNone || header.payload_bytes != group.payload_bytes()) return kUnreadable;
    PayloadChecksum found;
    if (!mover_->scatter(group, frame + kFrameHeaderBytes,
                         std::span(job.blocks).subspan(chunk * group.blocks_per_chunk(), group.blocks_per_chunk()),
                         job.store_kind, job.fence.get(), found)) {
        return kNotMoved;
    }
    const bool verified = std::memcmp(found.data(), header.payload_checksum, kChecksumBytes) == 0 &&
                          frame_header_unchanged(frame, header);
    return verified ? kCopied : kUnreadable;
}

}  // namespace lmcache
