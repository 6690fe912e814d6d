#include "lmcache/device_io.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <map>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "aligned_memory.h"
#include "await_job.h"
#include "check.h"
#include "lmcache/io_uring.h"

using namespace lmcache;

namespace {

constexpr std::size_t kBlock = 4096;
constexpr std::uint64_t kFileBytes = 8 << 20;

struct File {
    explicit File(bool direct) {
        char name[] = "/tmp/lmcache_device_io_XXXXXX";
        const int first = ::mkstemp(name);
        CHECK(first >= 0);
        CHECK(::ftruncate(first, kFileBytes) == 0);
        fd = ::open(name, O_RDWR | (direct ? O_DIRECT : 0));
        aligned = fd >= 0 && direct;
        if (fd < 0) fd = ::open(name, O_RDWR);  // a temporary folder without O_DIRECT
        CHECK(fd >= 0);
        ::close(first);
        ::unlink(name);
    }
    ~File() { ::close(fd); }
    File(const File&) = delete;
    File& operator=(const File&) = delete;
    int fd;
    bool aligned;
};

DeviceIOOptions options(const File& file, unsigned queue_depth, bool copy_always = false) {
    return {file.fd, 3, queue_depth, file.aligned ? kBlock : 1, copy_always};
}

void round_trip(unsigned depth, bool direct, bool copy_always) {
    const File file(direct);
    DeviceIO io(options(file, depth, copy_always));
    constexpr std::size_t kCount = 40, kSize = 65536;
    Memory source(kCount * kSize), target(kCount * kSize), heads(kCount * kBlock);
    source.fill(1);
    heads.fill(2);
    std::vector<Transfer> writes, reads;
    for (std::size_t i = 0; i < kCount; ++i) {
        const std::uint64_t offset = (kCount - i) * (kSize + kBlock);
        writes.push_back({offset, source.address(i * kSize), kSize, i % 2 ? heads.address(i * kBlock) : 0});
        reads.push_back({offset, target.address(i * kSize), kSize, 0});
    }
    const auto written = wait_for(io, io.submit_write(writes));
    for (std::size_t i = 0; i < kCount; ++i) CHECK(written.values[i] == kSize && written.errors[i] == 0);
    CHECK(wait_for(io, io.submit_sync()).errors[0] == 0);
    const auto read = wait_for(io, io.submit_read(reads));
    for (std::size_t i = 0; i < kCount; ++i) {
        CHECK(read.values[i] == kSize && read.errors[i] == 0);
        const unsigned char* const head = i % 2 ? heads.data + i * kBlock : source.data + i * kSize;
        CHECK(std::memcmp(target.data + i * kSize, head, kBlock) == 0);
        CHECK(std::memcmp(target.data + i * kSize + kBlock, source.data + i * kSize + kBlock, kSize - kBlock) == 0);
    }
    CHECK(io.copied() == (copy_always ? 2 * kCount : 0));
}

void unaligned(unsigned depth) {
    const File file(true);
    if (!file.aligned) return;
    DeviceIO io(options(file, depth));
    Memory source(16384), target(16384);
    source.fill(5);
    target.fill(6);
    CHECK(wait_for(io, io.submit_write({{8192, source.address(3), 5000, 0}})).values[0] == 5000);
    CHECK(wait_for(io, io.submit_read({{8192, target.address(7), 6000, 0}})).values[0] == 6000);
    CHECK(std::memcmp(target.data + 7, source.data + 3, 5000) == 0);
    for (std::size_t i = 5000; i < 6000; ++i) CHECK(target.data[7 + i] == 0);
    CHECK(io.copied() == 2);
}

void ends_of_the_file(unsigned depth) {
    const File file(true);
    DeviceIO io(options(file, depth));
    Memory memory(65536);
    CHECK(wait_for(io, io.submit_read({{kFileBytes - 8192, memory.address(), 65536, 0}})).values[0] == 8192);
    CHECK(wait_for(io, io.submit_read({{2 * kFileBytes, memory.address(), 65536, 0}})).values[0] == 0);
    CHECK(wait_for(io, io.submit_read({})).values.empty());
    // Beyond what a process may write: short first, then refused.
    ::signal(SIGXFSZ, SIG_IGN);
    rlimit before{};
    CHECK(::getrlimit(RLIMIT_FSIZE, &before) == 0);
    const rlimit low{kFileBytes + 4096, before.rlim_max};
    CHECK(::setrlimit(RLIMIT_FSIZE, &low) == 0);
    const auto refused = wait_for(io, io.submit_write({{kFileBytes, memory.address(), 65536, 0}}));
    CHECK(::setrlimit(RLIMIT_FSIZE, &before) == 0);
    CHECK(refused.values[0] == -1 && refused.errors[0] == EFBIG);
}

void faults(unsigned depth) {
    const int read_only = ::open("/dev/zero", O_RDONLY);
    {
        DeviceIO io({read_only, 2, depth, 1, false});
        Memory memory(8192);
        const auto finished =
            wait_for(io, io.submit_write({{0, memory.address(), 8192, 0}, {0, memory.address(), 1, 0}}));
        for (int i = 0; i < 2; ++i) CHECK(finished.values[i] == -1 && finished.errors[i] == EBADF);
        CHECK(wait_for(io, io.submit_read({{0, 1, 8192, 0}})).errors[0] == EFAULT);
    }
    ::close(read_only);
}

void many_submitters(unsigned depth) {
    const File file(false);
    DeviceIO io(options(file, depth));
    Memory source(1 << 20);
    source.fill(9);
    constexpr int kThreads = 4, kBatches = 50;
    std::vector<std::thread> threads;
    for (int t = 0; t < kThreads; ++t)
        threads.emplace_back([&, t] {
            for (int b = 0; b < kBatches; ++b) {
                std::vector<Transfer> writes;
                for (std::uint64_t i = 0; i < 4; ++i)
                    writes.push_back(
                        {static_cast<std::uint64_t>(t) * 65536 + i * kBlock, source.address(i * kBlock), kBlock, 0});
                io.submit_write(writes);
            }
        });
    int finished = 0;
    while (finished < kThreads * kBatches) {
        pollfd waiting{io.event_fd(), POLLIN, 0};
        CHECK(::poll(&waiting, 1, 60000) == 1);
        for (const auto& batch : io.drain()) {
            ++finished;
            for (const auto error : batch.results.errors) CHECK(error == 0);
        }
    }
    for (auto& thread : threads) thread.join();
}

void closing(unsigned depth) {
    const File file(false);
    DeviceIO io(options(file, depth));
    Memory source(1 << 20);
    std::vector<Transfer> writes(256, Transfer{0, source.address(), 4096, 0});
    for (int i = 0; i < 10; ++i) io.submit_write(writes);
    io.close();
    io.close();
    std::size_t done = 0;
    for (const auto& batch : io.drain()) done += batch.results.values.size();
    CHECK(done == 2560);
    CHECK(refused([&] { io.submit_read({}); }));
}

TEST_CASE(bad_options_are_refused) {
    CHECK(refused([] { DeviceIO({0, 0, 0, 1, false}); }));
    CHECK(refused([] { DeviceIO({0, 1, 5000, 1, false}); }));
    CHECK(refused([] { DeviceIO({0, 1, 0, 3, false}); }));
    CHECK(refused([] {
        DeviceIO io({0, 1, 0, 1, false});
        io.submit_write({{0, 0, 100, 8}});
    }));
}

// Threads, and rings of several depths where the kernel has them.
std::vector<unsigned> depths() {
    if (io_uring_refusal() == 0) return {0, 1, 5, 64};
    std::printf("io_uring is refused here: only threads are tested\n");
    return {0};
}

TEST_CASE(bytes_come_back_at_every_depth) {
    for (const unsigned depth : depths()) {
        round_trip(depth, false, false);
        round_trip(depth, true, false);
        round_trip(depth, true, true);
    }
}

TEST_CASE(unaligned_transfers_are_exact) {
    for (const unsigned depth : depths()) unaligned(depth);
}

TEST_CASE(transfers_past_the_end_fail_alone) {
    for (const unsigned depth : depths()) ends_of_the_file(depth);
}

TEST_CASE(faults_are_reported_by_their_number) {
    for (const unsigned depth : depths()) faults(depth);
}

TEST_CASE(many_threads_may_submit) {
    for (const unsigned depth : depths()) many_submitters(depth);
}

TEST_CASE(closing_finishes_what_was_submitted) {
    for (const unsigned depth : depths()) closing(depth);
}

}  // namespace
