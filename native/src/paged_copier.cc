#include "lmcache/paged_copier.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <system_error>

#include "lmcache/copy.h"
#include "lmcache/quiet_threads.h"

namespace lmcache {
namespace {

constexpr std::size_t kSlotAlignBytes = 64;
constexpr std::size_t kPieceBytes = 256 << 10;  // small chunks are taken several at a time
// From this size of a whole load on, its destination would not stay in the caches until it is read: stores past the
// caches are then faster, copy and later read together (8 MiB and up on a Zen 3 with 32 MiB of third-level cache;
// cached stores win below by up to half when the slots are in the cache themselves).
constexpr std::size_t kStreamingLoadBytes = 8 << 20;
constexpr double kLongestWaitSeconds = 1e6;

}  // namespace

PagedCopier::PagedCopier(std::uintptr_t arena_address, std::size_t arena_bytes, std::size_t threads,
                         std::unique_ptr<BlockMover> mover)
    : arena_(reinterpret_cast<std::byte*>(arena_address)), arena_bytes_(arena_bytes), mover_(std::move(mover)) {
    if (arena_address == 0 || arena_address % kSlotAlignBytes != 0) {
        throw std::invalid_argument("arena_address must be a multiple of 64 and not 0");
    }
    if (threads < 1 || threads > kMaxCopyThreads) {
        throw std::invalid_argument("threads must be 1 to " + std::to_string(kMaxCopyThreads));
    }
    event_fd_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (event_fd_ < 0) throw std::system_error(errno, std::generic_category(), "eventfd");
    try {
        start_quiet_threads(threads_, threads, "lmcache-copy", [this] { work(); });
    } catch (...) {
        close();
        ::close(event_fd_);
        throw;
    }
}

PagedCopier::~PagedCopier() {
    close();
    ::close(event_fd_);
}

void PagedCopier::close() {
    std::vector<std::thread> threads;
    {
        std::lock_guard lock(mutex_);
        closing_ = true;
        threads.swap(threads_);
    }
    work_ready_.notify_all();
    for (std::thread& thread : threads) thread.join();
}

std::size_t PagedCopier::add_group(std::vector<Segment> segments, std::size_t blocks_per_chunk,
                                   std::size_t num_blocks) {
    auto group = std::make_shared<const PagedGroup>(std::move(segments), blocks_per_chunk, num_blocks);
    std::lock_guard lock(mutex_);
    groups_.push_back(std::move(group));
    return groups_.size() - 1;
}

std::shared_ptr<const PagedGroup> PagedCopier::group_at(std::size_t group) const {
    std::lock_guard lock(mutex_);
    if (group >= groups_.size()) throw std::invalid_argument("group " + std::to_string(group) + " was never added");
    return groups_[group];
}

std::size_t PagedCopier::payload_bytes(std::size_t group) const { return group_at(group)->payload_bytes(); }

std::shared_ptr<PagedCopier::Job> PagedCopier::make_job(std::size_t group, bool is_store,
                                                        std::span<const std::uint64_t> slots,
                                                        std::span<const std::int64_t> blocks,
                                                        std::span<const std::byte> hashes) const {
    auto job = std::make_shared<Job>();
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
    job->chunks_per_piece = std::max<std::size_t>(1, kPieceBytes / frame_bytes);
    const bool streaming = is_store || slots.size() * layout.payload_bytes() >= kStreamingLoadBytes;
    job->store_kind = streaming ? StoreKind::kStreaming : StoreKind::kCached;
    job->results.assign(slots.size(), 0);
    job->left = slots.size();
    return job;
}

PagedCopier::JobId PagedCopier::submit_store(std::size_t group, std::span<const std::uint64_t> slots,
                                             std::span<const std::int64_t> blocks, std::span<const std::byte> hashes,
                                             std::span<const std::byte> template_bytes) {
    std::shared_ptr<Job> job = make_job(group, true, slots, blocks, hashes);
    job->frame_template = frame_template_from_bytes(template_bytes);
    if (job->frame_template.payload_bytes != job->group->payload_bytes()) {
        throw std::invalid_argument("the template is for payloads of " +
                                    std::to_string(job->frame_template.payload_bytes) + " bytes, the group's have " +
                                    std::to_string(job->group->payload_bytes()));
    }
    return start(std::move(job));
}

PagedCopier::JobId PagedCopier::submit_load(std::size_t group, std::span<const std::uint64_t> slots,
                                            std::span<const std::int64_t> blocks, std::span<const std::byte> hashes,
                                            std::span<const std::byte> namespace_digest,
                                            std::shared_ptr<const CudaFence> fence) {
    if (namespace_digest.size() != kDigestBytes) throw std::invalid_argument("namespace_digest must be 32 bytes");
    std::shared_ptr<Job> job = make_job(group, false, slots, blocks, hashes);
    std::copy(namespace_digest.begin(), namespace_digest.end(), job->namespace_digest.begin());
    job->fence = std::move(fence);
    return start(std::move(job));
}

PagedCopier::JobId PagedCopier::start(std::shared_ptr<Job> job) {
    std::lock_guard lock(mutex_);
    if (closing_) throw std::invalid_argument("the copier is closed");
    if (jobs_.size() >= kMaxCopyJobs) {
        throw std::invalid_argument("more than " + std::to_string(kMaxCopyJobs) + " jobs are running or uncollected");
    }
    const JobId id = next_job_++;
    job->id = id;
    job->node = running_.insert(running_.end(), id);
    jobs_.emplace(id, job);
    if (job->left == 0) {
        finish(*job);
    } else {
        const auto first_store =
            std::find_if(queue_.begin(), queue_.end(), [](const auto& one) { return one->is_store; });
        queue_.insert(job->is_store ? queue_.end() : first_store, std::move(job));
        work_ready_.notify_one();
    }
    return id;
}

void PagedCopier::work() noexcept {
    std::unique_lock lock(mutex_);
    while (true) {
        work_ready_.wait(lock, [this] { return closing_ || !queue_.empty(); });
        if (queue_.empty()) return;
        const std::shared_ptr<Job> job = queue_.front();
        const std::size_t begin = job->next;
        const std::size_t end = std::min(begin + job->chunks_per_piece, job->slots.size());
        job->next = end;
        if (end == job->slots.size()) queue_.pop_front();
        const bool more = !queue_.empty();
        lock.unlock();
        // Each thread wakes the next. Were all woken at once, two could be put on one core, because the submitter still
        // runs on the other, and stay there for most of a job.
        if (more) work_ready_.notify_one();
        for (std::size_t chunk = begin; chunk < end; ++chunk) {
            job->results[chunk] = job->is_store ? store_chunk(*job, chunk) : load_chunk(*job, chunk);
        }
        lock.lock();
        job->left -= end - begin;
        if (job->left == 0) finish(*job);
    }
}

ChunkResult PagedCopier::store_chunk(const Job& job, std::size_t chunk) const noexcept {
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

ChunkResult PagedCopier::load_chunk(const Job& job, std::size_t chunk) const noexcept {
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

void PagedCopier::finish(const Job& job) noexcept {
    finished_.splice(finished_.end(), running_, job.node);
    settle_event_fd();
    job_finished_.notify_all();
}

void PagedCopier::settle_event_fd() noexcept {
    std::uint64_t count = 1;
    if (finished_.empty()) {
        // Reading takes all of it; nothing to read is fine.
        [[maybe_unused]] const ssize_t got = ::read(event_fd_, &count, sizeof count);
    } else {
        [[maybe_unused]] const ssize_t put = ::write(event_fd_, &count, sizeof count);
    }
}

std::optional<PagedCopier::Results> PagedCopier::wait(JobId id, double timeout_seconds) {
    const double bounded = std::isnan(timeout_seconds) ? 0.0 : std::clamp(timeout_seconds, 0.0, kLongestWaitSeconds);
    const auto deadline =
        std::chrono::steady_clock::now() +
        std::chrono::duration_cast<std::chrono::steady_clock::duration>(std::chrono::duration<double>(bounded));
    std::unique_lock lock(mutex_);
    const auto found = jobs_.find(id);
    if (found == jobs_.end()) throw std::invalid_argument("job " + std::to_string(id) + " is unknown or was collected");
    const std::shared_ptr<Job> job = found->second;
    if (!job_finished_.wait_until(lock, deadline, [&] { return job->left == 0; })) return std::nullopt;
    if (jobs_.erase(id) == 0)
        throw std::invalid_argument("job " + std::to_string(id) + " was collected while it was awaited");
    finished_.erase(job->node);
    settle_event_fd();
    return std::move(job->results);
}

std::vector<std::pair<PagedCopier::JobId, PagedCopier::Results>> PagedCopier::poll() {
    std::lock_guard lock(mutex_);
    std::vector<std::pair<JobId, Results>> reported;
    reported.reserve(finished_.size());
    for (const JobId id : finished_) {
        auto node = jobs_.extract(id);
        reported.emplace_back(id, std::move(node.mapped()->results));
    }
    finished_.clear();
    settle_event_fd();
    return reported;
}

bool PagedCopier::idle() const {
    std::lock_guard lock(mutex_);
    return running_.empty();
}

}  // namespace lmcache
