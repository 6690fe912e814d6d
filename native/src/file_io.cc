#include "lmcache/file_io.h"

#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <ctime>
#include <span>
#include <stdexcept>
#include <utility>

#include "file_folders.h"
#include "lmcache/limits.h"
#include "lmcache/object_path.h"
#include "lmcache/sigbus_guard.h"
#include "lmcache/transfer_loop.h"
#include "use_times.h"

namespace lmcache {
namespace {

const FileIOOptions& checked(const FileIOOptions& options) {
    if (options.threads == 0 || options.threads > FileIO::kMaxThreads)
        throw std::invalid_argument("threads must be between 1 and " + std::to_string(FileIO::kMaxThreads));
    const std::size_t block = options.block_bytes;
    if (block == 0 || (block & (block - 1)) != 0) throw std::invalid_argument("block_bytes must be a power of two");
    if (options.queue_depth > FileIO::kMaxQueueDepth)
        throw std::invalid_argument("queue_depth must be at most " + std::to_string(FileIO::kMaxQueueDepth));
    return options;
}

std::shared_ptr<FileJob> make_job(FileAct act, std::vector<std::string> paths) {
    auto job = std::make_shared<FileJob>();
    job->act = act;
    job->elements = paths.size();
    job->paths = std::move(paths);
    const bool moves_content = act == FileAct::kWrite || act == FileAct::kRead;
    // Lookups and deletions are short and go first; lookups decide how long an engine waits.
    job->lane = moves_content ? Lane::kNormal : act == FileAct::kMarkUsed ? Lane::kIdle : Lane::kFirst;
    return job;
}

IoOutcome stat_file(const std::string& path) {
    struct stat info{};
    if (::lstat(path.c_str(), &info) != 0) return io_failure(errno);
    if (!S_ISREG(info.st_mode)) return io_failure(EINVAL);
    return {static_cast<std::int64_t>(info.st_size), 0};
}

IoOutcome outcome_of(int error) { return error == 0 ? IoOutcome{} : io_failure(error); }

}  // namespace

// Gives the files of reads and writes to the io_uring.
struct FileIO::TransferSource {
    Taken take(FileTransfer& transfer) {
        JobQueue<FileJob>::Piece piece;
        const Taken taken = io->queue_.poll(piece);
        if (taken == Taken::kPiece) transfer = FileTransfer(io->context_, std::move(piece.job), piece.begin);
        return taken;
    }
    void end(const FileTransfer& transfer, IoOutcome outcome) { io->end_transfer(transfer, outcome); }
    FileIO* io;
};

FileIO::FileIO(const FileIOOptions& options)
    : context_{checked(options)},
      publisher_([this](const std::shared_ptr<FileJob>& job) { end_file(job); }),
      queue_(kMaxIoJobs, options.queue_depth != 0) {
    install_sigbus_handler();
    queue_.start_threads(options.threads, "lmcache-files", [this] { work(); });
    // At its end it marks what was read last: the other threads may have left.
    if (options.queue_depth != 0)
        start_io_uring<FileTransfer>(queue_, options.queue_depth, TransferSource{this}, [this] { work(); });
}

std::uint64_t FileIO::submit(std::shared_ptr<FileJob> job) {
    const std::size_t count = job->elements;
    if (count > kMaxJobFiles)
        throw std::invalid_argument("a job has at most " + std::to_string(kMaxJobFiles) + " files");
    if (job->lane == Lane::kNormal) {
        if (job->addresses.size() != count || job->sizes.size() != count)
            throw std::invalid_argument("paths, addresses and sizes must have the same length");
        ::clock_gettime(CLOCK_REALTIME, &job->submitted);
    }
    job->results.resize(count);
    if (!job->writes()) return queue_.submit(std::move(job));
    if (job->temporary_paths.size() != count)
        throw std::invalid_argument("paths and temporary paths must have the same length");
    job->publication.resize(count, Publication::kPending);
    return queue_.submit(job, [&] {
        if (count != 0) publisher_.add(job);
    });
}

void FileIO::work() {
    JobQueue<FileJob>::Piece piece;
    while (queue_.take(piece)) run(piece.job, piece.begin);
}

void FileIO::run(const std::shared_ptr<FileJob>& job, std::size_t index) {
    const std::string& path = job->paths[index];
    switch (job->act) {
        case FileAct::kWrite:
        case FileAct::kRead: {
            FileTransfer transfer(context_, job, index);
            const IoOutcome outcome = run_to_end(transfer);
            return end_transfer(transfer, outcome);
        }
        case FileAct::kMarkUsed:
            mark_used(path, job->submitted, index);
            break;
        case FileAct::kStat:
            job->results.set(index, stat_file(path));
            break;
        case FileAct::kUnlink:
            job->results.set(index, outcome_of(::unlink(path.c_str()) == 0 ? 0 : errno));
            break;
        case FileAct::kRemoveEmpty:
            job->results.set(index, outcome_of(file_folders::remove_empty(path)));
            break;
    }
    end_file(job);
}

void FileIO::end_transfer(const FileTransfer& transfer, IoOutcome outcome) {
    FileJob& job = *transfer.job();
    job.results.set(transfer.index(), outcome);
    if (job.writes())
        publisher_.publish(job, transfer.index(), outcome.error == 0 ? Publication::kWritten : Publication::kFailed);
    else
        end_file(transfer.job());
}

void FileIO::end_file(const std::shared_ptr<FileJob>& job) {
    if (!queue_.ended(*job) || job->act != FileAct::kRead) return;
    // Marks wait until nobody waits for a transfer: on the last files of a job they would compete with those that read
    // them, and each may have to wait itself, for the file system's journal.
    auto marks = make_job(FileAct::kMarkUsed, std::move(job->paths));
    marks->submitted = job->submitted;
    queue_.submit_idle(std::move(marks));
}

std::uint64_t FileIO::submit_write(std::vector<std::string> paths, std::vector<std::string> temporary_paths,
                                   std::vector<std::uint64_t> addresses, std::vector<std::uint64_t> sizes) {
    auto job = make_job(FileAct::kWrite, std::move(paths));
    job->temporary_paths = std::move(temporary_paths);
    job->addresses = std::move(addresses);
    job->sizes = std::move(sizes);
    return submit(std::move(job));
}

std::uint64_t FileIO::submit_read(std::vector<std::string> paths, std::vector<std::uint64_t> addresses,
                                  std::vector<std::uint64_t> capacities) {
    auto job = make_job(FileAct::kRead, std::move(paths));
    job->addresses = std::move(addresses);
    job->sizes = std::move(capacities);
    return submit(std::move(job));
}

std::uint64_t FileIO::submit_read_frames(const std::string& base, std::vector<std::uint64_t> addresses,
                                         std::vector<std::uint64_t> capacities, std::vector<std::byte> frame_names) {
    if (frame_names.size() % kFrameNameBytes != 0)
        throw std::invalid_argument("frame_names must hold a namespace digest and a chunk hash for each file");
    std::vector<std::string> paths;
    paths.reserve(frame_names.size() / kFrameNameBytes);
    for (auto rest = std::span<const std::byte>(frame_names); !rest.empty(); rest = rest.subspan(kFrameNameBytes))
        paths.push_back(object_path(base, rest.first<kDigestBytes>(), rest.subspan<kDigestBytes, kChunkHashBytes>()));
    auto job = make_job(FileAct::kRead, std::move(paths));
    job->addresses = std::move(addresses);
    job->sizes = std::move(capacities);
    job->frame_names = std::move(frame_names);
    return submit(std::move(job));
}

std::uint64_t FileIO::submit_stat(std::vector<std::string> paths) {
    return submit(make_job(FileAct::kStat, std::move(paths)));
}

std::uint64_t FileIO::submit_unlink(std::vector<std::string> paths) {
    return submit(make_job(FileAct::kUnlink, std::move(paths)));
}

std::uint64_t FileIO::submit_remove_empty(std::vector<std::string> folders) {
    return submit(make_job(FileAct::kRemoveEmpty, std::move(folders)));
}

}  // namespace lmcache
