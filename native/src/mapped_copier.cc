#include "lmcache/mapped_copier.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <numeric>
#include <stdexcept>
#include <string>
#include <utility>

#include "lmcache/copy.h"
#include "lmcache/flush.h"
#include "lmcache/limits.h"
#include "lmcache/sigbus_guard.h"

namespace lmcache {
namespace {

constexpr std::size_t kPieceBytes = 256 << 10;  // small elements are taken several at a time

std::byte* at(std::uint64_t address) { return reinterpret_cast<std::byte*>(address); }

const MappedCopierOptions& checked(const MappedCopierOptions& options) {
    if (options.threads == 0 || options.threads > MappedCopier::kMaxThreads)
        throw std::invalid_argument("threads must be between 1 and " + std::to_string(MappedCopier::kMaxThreads));
    if (options.mapping == nullptr || options.mapping_bytes == 0)
        throw std::invalid_argument("the mapping must have an address and a size");
    return options;
}

}  // namespace

MappedCopier::MappedCopier(const MappedCopierOptions& options) : options_(checked(options)), queue_(kMaxIoJobs) {
    install_sigbus_handler();
    queue_.start_threads(options.threads, "lmcache-dax", [this] { work(); });
}

void MappedCopier::check_inside(std::uint64_t address, std::uint64_t size, const char* what) const {
    const auto begin = reinterpret_cast<std::uint64_t>(options_.mapping);
    if (address < begin || size > options_.mapping_bytes || address - begin > options_.mapping_bytes - size)
        throw std::invalid_argument(std::string(what) + " is not inside the mapping");
}

std::uint64_t MappedCopier::submit_read(std::vector<std::uint64_t> destinations, std::vector<std::uint64_t> sources,
                                        std::vector<std::uint64_t> sizes) {
    if (sources.size() != destinations.size() || sizes.size() != destinations.size())
        throw std::invalid_argument("destinations, sources and sizes must have the same length");
    for (std::size_t i = 0; i < sources.size(); ++i) check_inside(sources[i], sizes[i], "a source");
    auto job = std::make_shared<MappedJob>();
    job->destinations = std::move(destinations);
    job->sources = std::move(sources);
    job->sizes = std::move(sizes);
    const std::uint64_t total = std::accumulate(job->sizes.begin(), job->sizes.end(), std::uint64_t{1});
    job->elements = job->sizes.size();
    job->piece = std::max<std::size_t>(1, kPieceBytes * job->elements / total);
    job->results.assign(job->elements, 0);
    return queue_.submit(std::move(job));
}

std::uint64_t MappedCopier::submit_write(std::vector<std::uint64_t> destinations, std::vector<std::uint64_t> sources,
                                         std::vector<std::uint64_t> sizes, std::vector<std::uint64_t> record_places,
                                         std::vector<std::byte> records, std::size_t record_bytes) {
    const std::size_t count = destinations.size();
    if (sources.size() != count || sizes.size() != count || record_places.size() != count)
        throw std::invalid_argument("destinations, sources, sizes and record places must have the same length");
    if (record_bytes == 0 || records.size() / record_bytes != count || records.size() % record_bytes != 0)
        throw std::invalid_argument("records must hold record_bytes for each element");
    for (std::size_t i = 0; i < count; ++i) {
        if (sizes[i] != 0) check_inside(destinations[i], sizes[i], "a destination");
        check_inside(record_places[i], record_bytes, "a record");
    }
    auto job = std::make_shared<MappedJob>();
    job->is_write = true;
    job->destinations = std::move(destinations);
    job->sources = std::move(sources);
    job->sizes = std::move(sizes);
    job->record_places = std::move(record_places);
    job->records = std::move(records);
    job->record_bytes = record_bytes;
    job->elements = job->piece = count;
    job->results.assign(count, 0);
    return queue_.submit(std::move(job));
}

void MappedCopier::work() noexcept {
    JobQueue<MappedJob>::Piece piece;
    while (queue_.take(piece)) {
        if (piece.job->is_write)
            write(*piece.job);
        else
            read(*piece.job, piece.begin, piece.end);
        queue_.ended(*piece.job, piece.end - piece.begin);
    }
}

void MappedCopier::read(MappedJob& job, std::size_t begin, std::size_t end) const noexcept {
    const CopyKernels& kernels = best_copy_kernels();
    for (std::size_t i = begin; i < end; ++i) {
        job.results[i] = guarded(options_.mapping, options_.mapping_bytes,
                                 [&] { kernels.stream(at(job.destinations[i]), at(job.sources[i]), job.sizes[i]); });
    }
    store_fence();
}

void MappedCopier::write(MappedJob& job) const noexcept {
    const CopyKernels& kernels = best_copy_kernels();
    for (std::size_t i = 0; i < job.sizes.size(); ++i) {
        std::byte* const destination = at(job.destinations[i]);
        std::byte* const place = at(job.record_places[i]);
        const bool copied = guarded(options_.mapping, options_.mapping_bytes, [&] {
            if (job.sizes[i] != 0) {
                kernels.stream(destination, at(job.sources[i]), job.sizes[i]);
                if (options_.flush) flush_lines(destination, job.sizes[i]);
            }
            store_fence();
            std::memcpy(place, job.records.data() + i * job.record_bytes, job.record_bytes);
            if (options_.flush) flush_lines(place, job.record_bytes);
            store_fence();
        });
        if (!copied) return;
        job.results[i] = 1;
    }
}

}  // namespace lmcache
