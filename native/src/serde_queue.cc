#include "lmcache/serde_queue.h"

#include <sys/resource.h>

#include <stdexcept>
#include <string>

namespace lmcache {
namespace {

constexpr int kNicer = 10;  // than the thread that made the queue: what engines and the message loop do goes first

}  // namespace

SerdeQueue::SerdeQueue(std::shared_ptr<const SerdeChain> chain, std::size_t threads)
    : chain_(std::move(chain)), queue_(kMaxIoJobs) {
    if (threads == 0 || threads > kMaxThreads)
        throw std::invalid_argument("threads must be between 1 and " + std::to_string(kMaxThreads));
    queue_.start_threads(threads, "lmcache-serde", [this] { work(); });
}

std::uint64_t SerdeQueue::submit(std::shared_ptr<SerdeJob> job) {
    const std::size_t count = job->sources.size();
    if (job->source_bytes.size() != count || job->destinations.size() != count ||
        job->destination_bytes.size() != count || job->positions.size() != count ||
        job->chunk_hashes.size() != kChunkHashBytes * count)
        throw std::invalid_argument("the lists of a serde job must have the same length");
    for (const std::uint32_t position : job->positions) {
        if (position >= job->templates.size()) throw std::invalid_argument("a position is beyond the templates");
    }
    job->elements = count;
    job->results.frame_bytes.assign(count, 0);
    job->results.faults.assign(count, static_cast<std::uint8_t>(SerdeFault::kFailed));
    return queue_.submit(std::move(job));
}

void SerdeQueue::work() noexcept {
    // A thread is a process to the kernel, and 0 is the caller. Everybody may be nicer, up to 19.
    (void)::setpriority(PRIO_PROCESS, 0, ::getpriority(PRIO_PROCESS, 0) + kNicer);
    JobQueue<SerdeJob>::Piece piece;
    while (queue_.take(piece)) {
        for (std::size_t i = piece.begin; i < piece.end; ++i) {
            const SerdeResult result = run(*piece.job, i);
            piece.job->results.frame_bytes[i] = result.frame_bytes;
            piece.job->results.faults[i] = static_cast<std::uint8_t>(result.fault);
        }
        queue_.ended(*piece.job, piece.end - piece.begin);
    }
}

SerdeResult SerdeQueue::run(const SerdeJob& job, std::size_t element) const noexcept {
    const std::span<const std::byte> source(reinterpret_cast<const std::byte*>(job.sources[element]),
                                            job.source_bytes[element]);
    const std::span<std::byte> destination(reinterpret_cast<std::byte*>(job.destinations[element]),
                                           job.destination_bytes[element]);
    const std::span<const std::byte, kChunkHashBytes> chunk_hash(job.chunk_hashes.data() + kChunkHashBytes * element,
                                                                 kChunkHashBytes);
    const SerdeTemplates& templates = job.templates[job.positions[element]];
    try {
        return job.encodes ? chain_->encode(source, destination, templates, chunk_hash)
                           : chain_->decode(source, destination, templates, chunk_hash);
    } catch (...) {  // the root of a thread: no memory, or a stage from outside
        return {SerdeFault::kFailed};
    }
}

}  // namespace lmcache
