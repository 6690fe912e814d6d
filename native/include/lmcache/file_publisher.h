// Gives written files their final names, in the order in which they were submitted.
#pragma once

#include <cstddef>
#include <deque>
#include <functional>
#include <memory>
#include <utility>

#include "lmcache/file_job.h"
#include "lmcache/mutex.h"

namespace lmcache {

class FilePublisher {
public:
    // `ended` is called once for each file of a job, when its outcome is final, without any lock held.
    explicit FilePublisher(std::function<void(const std::shared_ptr<FileJob>&)> ended) : ended_(std::move(ended)) {}

    // The order of these calls is the order of publication. Before any file of the job is written.
    void add(std::shared_ptr<FileJob> job);

    // A file of a job was written under its temporary name, or that failed; its outcome is in the job's results.
    // Renames whatever is ready: one thread at a time does, the others leave their file to it and go on writing.
    void publish(FileJob& job, std::size_t index, Publication state);

private:
    static void rename_one(FileJob& job, std::size_t index);

    const std::function<void(const std::shared_ptr<FileJob>&)> ended_;
    Mutex mutex_;
    std::deque<std::shared_ptr<FileJob>> order_ LMCACHE_GUARDED_BY(mutex_);
    bool is_publishing_ LMCACHE_GUARDED_BY(mutex_) = false;
};

}  // namespace lmcache
