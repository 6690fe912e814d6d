#include "lmcache/frame_copier.h"

#include <sys/mman.h>
#include <unistd.h>

#include <memory>
#include <utility>
#include <vector>

#include "await_job.h"
#include "check.h"
#include "sealed_frames.h"

using namespace lmcache;

namespace {

using Results = FrameCopier::Results;

std::shared_ptr<FrameCopyJob> job_of(const Frames& frames, const std::byte* mapping) {
    auto job = std::make_shared<FrameCopyJob>();
    job->addresses = frames.targets;
    job->sizes = frames.sizes;
    job->sources = frames.offsets;
    job->namespace_digests = frames.digests;
    job->chunk_hashes = frames.hashes;
    job->mapping = mapping;
    job->mapping_bytes = frames.source.size();
    return job;
}

Results copied(FrameCopier& copier, std::shared_ptr<FrameCopyJob> job) {
    return wait_for(copier, copier.submit(std::move(job)));
}

TEST_CASE(mapped_frames_are_copied_and_verified) {
    Frames frames({5000, 70'000, 12'288, 300'000, 2 << 20});
    FrameCopier copier(3);
    CHECK(copied(copier, job_of(frames, frames.source.data())) == Results(5, 1));
    CHECK(frames.target == frames.source);
    frames.source[frames.offsets[1] + kFrameHeaderBytes] ^= std::byte{1};
    frames.hashes[2 * kChunkHashBytes] ^= std::byte{1};
    const auto beyond = job_of(frames, frames.source.data());
    beyond->sources[3] = frames.source.size() - 4096;
    beyond->sources[4] = ~std::uint64_t{0};
    CHECK(copied(copier, beyond) == Results({1, 0, 0, 0, 0}));
    const auto endless = job_of(frames, frames.source.data());
    const std::uint64_t first = frames.sizes[0];  // the sum of all is 2^64 - 1
    endless->sizes = {first, ~0ULL, 1ULL << 63, (1ULL << 62) - first, 1ULL << 62};
    CHECK(copied(copier, endless) == Results({1, 0, 0, 0, 0}));
}

TEST_CASE(memory_that_was_cut_off_fails_its_frames) {
    Frames frames({5000, 70'000});
    const int fd = ::memfd_create("frames", MFD_CLOEXEC);
    CHECK(::write(fd, frames.source.data(), frames.source.size()) == static_cast<ssize_t>(frames.source.size()));
    void* const mapping = ::mmap(nullptr, frames.source.size(), PROT_READ, MAP_SHARED, fd, 0);
    CHECK(mapping != MAP_FAILED);
    CHECK(::ftruncate(fd, static_cast<off_t>(frames.offsets[1] + 8192)) == 0);
    FrameCopier copier(2);
    CHECK(copied(copier, job_of(frames, static_cast<const std::byte*>(mapping))) == Results({1, 0}));
    CHECK(copied(copier, job_of(frames, frames.source.data())) == Results({1, 1}));  // its threads go on
    ::munmap(mapping, frames.source.size());
    ::close(fd);
}

TEST_CASE(what_was_submitted_is_done_when_close_returns) {
    const Frames frames({1 << 20, 1 << 20, 1 << 20, 1 << 20});
    std::vector<std::vector<std::byte>> targets(8, frames.target);
    FrameCopier copier(2);
    for (auto& target : targets) {
        const auto job = job_of(frames, frames.source.data());
        for (std::size_t i = 0; i < job->addresses.size(); ++i)
            job->addresses[i] = reinterpret_cast<std::uint64_t>(target.data() + frames.offsets[i]);
        copier.submit(job);
    }
    copier.close();
    const auto completions = copier.drain();
    CHECK(completions.size() == targets.size());
    for (const auto& completion : completions) CHECK(completion.results == Results(4, 1));
    for (const auto& target : targets) CHECK(target == frames.source);
}

TEST_CASE(what_makes_no_sense_is_refused) {
    Frames frames({5000, 70'000});
    CHECK(refused([] { FrameCopier copier(0); }));
    CHECK(refused([] { FrameCopier copier(FrameCopier::kMaxThreads + 1); }));
    FrameCopier copier(1);
    const auto job = job_of(frames, frames.source.data());
    job->sources.pop_back();
    CHECK(refused([&] { copier.submit(job); }));
    copier.close();
    CHECK(refused([&] { copier.submit(job_of(frames, frames.source.data())); }));
}

}  // namespace
