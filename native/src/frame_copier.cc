#include "lmcache/frame_copier.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>

#include "lmcache/limits.h"
#include "lmcache/sigbus_guard.h"

namespace lmcache {
namespace {

constexpr std::size_t kPieceBytes = 256 << 10;  // small frames are taken several at a time

bool copy_frame(const FrameCopyJob& job, std::size_t i) noexcept {
    const FrameBatch frames = job.batch();
    if (job.sources[i] > job.mapping_bytes || frames.sizes[i] > job.mapping_bytes - job.sources[i]) return false;
    const std::byte* const source = job.mapping + job.sources[i];
    bool is_whole = false;
    const bool was_readable = guarded(job.mapping, job.mapping_bytes, [&] {
        if (frame_copy_verified(frames.memory(i), source, frames.sizes[i], frames.digest(i), frames.hash(i)) !=
            FrameFault::kNone)
            return;
        FrameHeader copied;
        std::memcpy(&copied, frames.memory(i), sizeof copied);
        is_whole = frame_header_unchanged(source, copied);
    });
    return was_readable && is_whole;
}

}  // namespace

FrameCopier::FrameCopier(unsigned threads) : queue_(kMaxIoJobs, false, true) {
    if (threads == 0 || threads > kMaxThreads)
        throw std::invalid_argument("threads must be between 1 and " + std::to_string(kMaxThreads));
    queue_.start_threads(threads, "lmcache-frames", [this] { work(); });
}

std::uint64_t FrameCopier::submit(std::shared_ptr<FrameCopyJob> job) {
    job->batch().check();
    if (job->sources.size() != job->sizes.size())
        throw std::invalid_argument("there must be a source for each address");
    install_sigbus_handler();
    std::uint64_t total = 1;
    for (const std::uint64_t size : job->sizes) total += std::min<std::uint64_t>(size, kPieceBytes);
    job->elements = job->sizes.size();
    job->party = reinterpret_cast<std::uint64_t>(job->mapping);
    job->piece = std::max<std::size_t>(1, kPieceBytes * job->elements / total);
    job->results.assign(job->elements, 0);
    return queue_.submit(std::move(job));
}

void FrameCopier::work() noexcept {
    JobQueue<FrameCopyJob>::Piece piece;
    while (queue_.take(piece)) {
        for (std::size_t i = piece.begin; i < piece.end; ++i) piece.job->results[i] = copy_frame(*piece.job, i);
        queue_.ended(*piece.job, piece.end - piece.begin);
    }
}

}  // namespace lmcache
