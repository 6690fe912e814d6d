#include "lmcache/file_publisher.h"

#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <string>

#include "file_folders.h"

namespace lmcache {

void FilePublisher::add(std::shared_ptr<FileJob> job) {
    MutexLock lock(mutex_);
    order_.push_back(std::move(job));
}

void FilePublisher::publish(FileJob& own, std::size_t own_index, Publication state) {
    MutexLock lock(mutex_);
    own.publication[own_index] = state;
    if (is_publishing_) return;
    is_publishing_ = true;
    while (!order_.empty()) {
        const std::shared_ptr<FileJob> job = order_.front();
        const std::size_t index = job->next_to_publish;
        const Publication ready = job->publication[index];
        if (ready == Publication::kPending) break;
        job->next_to_publish = index + 1;
        if (job->next_to_publish == job->elements) order_.pop_front();
        lock.unlock();
        if (ready == Publication::kWritten) rename_one(*job, index);
        if (job->results.errors[index] != 0) job->is_broken.store(true, std::memory_order_relaxed);
        ended_(job);
        lock.lock();
    }
    is_publishing_ = false;
}

void FilePublisher::rename_one(FileJob& job, std::size_t index) {
    const std::string& temporary = job.temporary_paths[index];
    const std::string& path = job.paths[index];
    int error = ECANCELED;
    // Where temporary files live elsewhere this may be the first file of its folder.
    if (!job.is_broken.load(std::memory_order_relaxed))
        error = file_folders::in_folder_of(path, file_folders::base_of(path), [&] {
            return std::rename(temporary.c_str(), path.c_str()) == 0 ? 0 : errno;
        });
    if (error == 0) return;
    ::unlink(temporary.c_str());
    job.results.set(index, io_failure(error));
}

}  // namespace lmcache
