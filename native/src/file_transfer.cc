#include "lmcache/file_transfer.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "file_folders.h"
#include "lmcache/rounding.h"
#include "lmcache/sigbus_guard.h"
#include "use_times.h"

namespace lmcache {
namespace {

// For the reason of kFolderMode (file_folders.h).
constexpr mode_t kFileMode = 0660;

// From this size on mapping a file costs less than it saves.
constexpr std::size_t kMappedBytes = 1 << 20;

int open_file(const std::string& path, int flags, mode_t mode) {
    int fd;
    do {
        fd = ::open(path.c_str(), flags | O_CLOEXEC | O_NOFOLLOW, mode);
    } while (fd < 0 && errno == EINTR);
    return fd;
}

bool is_cached(int fd, std::size_t offset) {
    char byte;
    const iovec part{&byte, 1};
    return ::preadv2(fd, &part, 1, static_cast<off_t>(offset), RWF_NOWAIT) == 1;
}

}  // namespace

std::optional<IoOutcome> FileTransfer::begin() {
    const FileJob& job = *job_;
    if (job.writes() && job.is_broken.load(std::memory_order_relaxed)) return io_failure(ECANCELED);
    is_direct_ = options().use_odirect;
    if (is_direct_ && !(is_aligned(job.addresses[index_]) && is_aligned(job.sizes[index_]))) {
        is_direct_ = false;
        ++context_->buffered_fallbacks;
    }
    if (const int error = job.writes() ? open_new() : open_existing(); error != 0) return finish(io_failure(error));
    if (size_bytes_ == 0) return finish({});
    const bool may_map = !job.frame_names.empty() && !is_direct_ && options().queue_depth == 0;
    if (may_map && copy_mapped()) {
        (void)file_.close();
        return IoOutcome{static_cast<std::int64_t>(size_bytes_), 0};
    }
    return plan_part();
}

// Opens with O_DIRECT where asked for and possible; is_direct_ tells which it became. Returns an errno.
int FileTransfer::open(const std::string& path, int flags, mode_t mode) {
    int fd = -1;
    if (is_direct_) {
        fd = open_file(path, flags | O_DIRECT, mode);
        if (fd < 0 && (errno == EINVAL || errno == EOPNOTSUPP)) {
            // Some file systems create the file before they refuse the flag.
            if ((flags & O_CREAT) != 0) ::unlink(path.c_str());
            is_direct_ = false;
            ++context_->buffered_fallbacks;
            fd = open_file(path, flags, mode);
        }
    } else {
        fd = open_file(path, flags, mode);
    }
    file_ = UniqueFd(fd);
    return fd >= 0 ? 0 : errno;
}

int FileTransfer::open_new() {
    size_bytes_ = job_->sizes[index_];
    return file_folders::in_folder_of(job_->temporary_paths[index_], file_folders::base_of(job_->paths[index_]), [&] {
        return open(job_->temporary_paths[index_], O_WRONLY | O_CREAT | O_EXCL, kFileMode);
    });
}

int FileTransfer::open_existing() {
    // O_NONBLOCK: somebody's FIFO under this name must not hang a thread. It means nothing to a file.
    if (const int error = open(job_->paths[index_], O_RDONLY | O_NONBLOCK, 0); error != 0) return error;
    struct stat info{};
    if (::fstat(file_.get(), &info) != 0) return errno;
    if (!S_ISREG(info.st_mode)) return EINVAL;
    size_bytes_ = std::min<std::uint64_t>(static_cast<std::uint64_t>(info.st_size), job_->sizes[index_]);
    return 0;
}

bool FileTransfer::leave_direct() {
    const int flags = ::fcntl(file_.get(), F_GETFL);
    if (flags < 0 || ::fcntl(file_.get(), F_SETFL, flags & ~O_DIRECT) != 0) return false;
    is_direct_ = false;
    ++context_->buffered_fallbacks;
    return true;
}

// Plans what to ask for; an outcome when that is not possible.
std::optional<IoOutcome> FileTransfer::plan_part() {
    // What remains after a short transfer may not be aligned any more.
    if (is_direct_ && !is_aligned(done_bytes_) && !leave_direct()) return finish(io_failure(errno));
    std::uint64_t wanted = size_bytes_ - done_bytes_;
    if (!job_->writes()) {
        if (done_bytes_ == 0 && options().read_ahead_bytes != 0)
            wanted = std::min<std::uint64_t>(wanted, options().read_ahead_bytes);
        // Whole blocks, as O_DIRECT asks; the read ends at the end of the file, and the memory is whole blocks too.
        if (is_direct_) wanted = round_up<std::uint64_t>(wanted, options().block_bytes);
    }
    part_ = {job_->memory(index_) + done_bytes_, wanted};
    return std::nullopt;
}

std::int64_t FileTransfer::move() const {
    const auto offset = static_cast<off_t>(done_bytes_);
    const ssize_t moved =
        job_->writes() ? ::pwritev(file_.get(), &part_, 1, offset) : ::preadv(file_.get(), &part_, 1, offset);
    return moved < 0 ? -errno : moved;
}

void FileTransfer::start(IoUring& ring, std::uint64_t tag) const {
    if (job_->writes())
        ring.write(file_.get(), &part_, 1, done_bytes_, tag);
    else
        ring.read(file_.get(), &part_, 1, done_bytes_, tag);
}

std::optional<IoOutcome> FileTransfer::absorb(std::int64_t moved) {
    if (moved == -EINTR || moved == -EAGAIN) return std::nullopt;
    if (moved == -EINVAL && is_direct_) return leave_direct() ? plan_part() : finish(io_failure(EINVAL));
    if (moved < 0) return finish(io_failure(static_cast<int>(-moved)));
    if (moved == 0 && job_->writes()) return finish(io_failure(EIO));
    done_bytes_ += static_cast<std::uint64_t>(moved);
    // Nothing more where there should be: truncated since fstat.
    if (moved == 0 || done_bytes_ >= size_bytes_)
        return finish({static_cast<std::int64_t>(std::min(done_bytes_, job_->sizes[index_])), 0});
    return plan_part();
}

// A large frame that the page cache has, as far as its first and last byte tell, is checked in the same pass in which
// it is copied. False: not so; it has to be read.
bool FileTransfer::copy_mapped() const {
    const auto size = static_cast<std::size_t>(size_bytes_);
    if (size < kMappedBytes || !is_cached(file_.get(), 0) || !is_cached(file_.get(), size - 1)) return false;
    void* const mapped = ::mmap(nullptr, size, PROT_READ, MAP_SHARED, file_.get(), 0);
    if (mapped == MAP_FAILED) return false;
    const auto* const source = static_cast<const std::byte*>(mapped);
    FrameFault fault = FrameFault::kNone;
    const bool copied = guarded(source, size, [&] {  // truncated meanwhile, it raises SIGBUS
        fault = frame_copy_verified(job_->memory(index_), source, size, job_->namespace_digest(index_),
                                    job_->chunk_hash(index_));
    });
    ::munmap(mapped, size);
    return copied && fault == FrameFault::kNone;
}

bool FileTransfer::is_frame(std::uint64_t size_bytes) const {
    return frame_verify(job_->memory(index_), size_bytes, job_->namespace_digest(index_), job_->chunk_hash(index_)) ==
           FrameFault::kNone;
}

IoOutcome FileTransfer::finish_read(IoOutcome outcome) {
    (void)file_.close();
    const bool wants_frame = outcome.error == 0 && !job_->frame_names.empty();
    return wants_frame && !is_frame(static_cast<std::uint64_t>(outcome.value)) ? io_failure(EBADMSG) : outcome;
}

IoOutcome FileTransfer::finish_write(IoOutcome outcome) {
    if (!file_.valid()) return outcome;
    if (outcome.error == 0) {
        mark_new(file_.get(), job_->submitted, index_);
        if (const int error = file_.close(); error != 0) outcome = io_failure(error);
    }
    if (outcome.error != 0) ::unlink(job_->temporary_paths[index_].c_str());
    return outcome;
}

}  // namespace lmcache
