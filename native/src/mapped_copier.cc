#include "lmcache/mapped_copier.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <numeric>
#include <stdexcept>
#include <string>
#include <system_error>

#include "lmcache/bus_guard.h"
#include "lmcache/copy.h"
#include "lmcache/flush.h"
#include "lmcache/quiet_threads.h"

namespace lmcache {
namespace {

constexpr std::size_t kPieceBytes = 256 << 10;  // small elements are taken several at a time

std::byte* at(std::uint64_t address) { return reinterpret_cast<std::byte*>(address); }

}  // namespace

MappedCopier::MappedCopier(const MappedCopierOptions& options) : options_(options) {
    if (options.threads == 0 || options.threads > kMaxThreads)
        throw std::invalid_argument("threads must be between 1 and " + std::to_string(kMaxThreads));
    if (options.mapping == nullptr || options.mapping_bytes == 0)
        throw std::invalid_argument("the mapping must have an address and a size");
    install_bus_handler();
    event_fd_ = ::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (event_fd_ < 0) throw std::system_error(errno, std::generic_category(), "eventfd");
    try {
        start_quiet_threads(threads_, options.threads, "lmcache-dax", [this] { work(); });
    } catch (...) {
        close();
        ::close(event_fd_);
        throw;
    }
}

MappedCopier::~MappedCopier() {
    close();
    ::close(event_fd_);
}

void MappedCopier::close() {
    std::vector<std::thread> threads;
    {
        std::lock_guard lock(mutex_);
        closing_ = true;
        threads.swap(threads_);
    }
    work_ready_.notify_all();
    for (std::thread& thread : threads) thread.join();
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
    auto job = std::make_shared<Job>();
    job->destinations = std::move(destinations);
    job->sources = std::move(sources);
    job->sizes = std::move(sizes);
    const std::uint64_t total = std::accumulate(job->sizes.begin(), job->sizes.end(), std::uint64_t{1});
    job->piece = std::max<std::size_t>(1, kPieceBytes * job->sizes.size() / total);
    return start(std::move(job));
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
    auto job = std::make_shared<Job>();
    job->is_write = true;
    job->destinations = std::move(destinations);
    job->sources = std::move(sources);
    job->sizes = std::move(sizes);
    job->record_places = std::move(record_places);
    job->records = std::move(records);
    job->record_bytes = record_bytes;
    return start(std::move(job));
}

std::uint64_t MappedCopier::start(std::shared_ptr<Job> job) {
    job->left = job->sizes.size();
    job->results.assign(job->left, 0);
    std::lock_guard lock(mutex_);
    if (closing_) throw std::invalid_argument("the copier is closed");
    const std::uint64_t number = ++last_job_;
    job->number = number;
    if (job->left == 0) {
        finish(*job);
    } else {
        queue_.push_back(std::move(job));
        work_ready_.notify_one();
    }
    return number;
}

void MappedCopier::work() noexcept {
    std::unique_lock lock(mutex_);
    while (true) {
        work_ready_.wait(lock, [this] { return closing_ || !queue_.empty(); });
        if (queue_.empty()) return;
        const std::shared_ptr<Job> job = queue_.front();
        const std::size_t begin = job->next;
        const std::size_t end = job->is_write ? job->sizes.size() : std::min(begin + job->piece, job->sizes.size());
        job->next = end;
        if (end == job->sizes.size()) queue_.pop_front();
        const bool more = !queue_.empty();
        lock.unlock();
        if (more) work_ready_.notify_one();  // each wakes the next, as in PagedCopier
        if (job->is_write) {
            write(*job);
        } else {
            read(*job, begin, end);
        }
        lock.lock();
        job->left -= end - begin;
        if (job->left == 0) finish(*job);
    }
}

void MappedCopier::read(Job& job, std::size_t begin, std::size_t end) const noexcept {
    const CopyKernels& kernels = best_copy_kernels();
    for (std::size_t i = begin; i < end; ++i) {
        job.results[i] = guarded(options_.mapping, options_.mapping_bytes,
                                 [&] { kernels.stream(at(job.destinations[i]), at(job.sources[i]), job.sizes[i]); });
    }
    store_fence();
}

void MappedCopier::write(Job& job) const noexcept {
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

void MappedCopier::finish(Job& job) noexcept {
    finished_.emplace_back(job.number, std::move(job.results));
    const std::uint64_t one = 1;
    [[maybe_unused]] const ssize_t put = ::write(event_fd_, &one, sizeof one);
}

std::vector<std::pair<std::uint64_t, MappedCopier::Results>> MappedCopier::drain() {
    std::lock_guard lock(mutex_);
    std::uint64_t count;
    [[maybe_unused]] const ssize_t got = ::read(event_fd_, &count, sizeof count);
    return std::exchange(finished_, {});
}

}  // namespace lmcache
