#include "lmcache/mapped_copier.h"

#include <poll.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <map>
#include <stdexcept>
#include <thread>

#include "await_job.h"
#include "check.h"
#include "lmcache/flush.h"

using lmcache::MappedCopier;
using Numbers = std::vector<std::uint64_t>;

namespace {

constexpr std::size_t kPage = 4096;
constexpr std::size_t kRecord = 32;

// A file in memory, mapped. It can be made shorter than its mapping: then the pages behind its end cannot be had.
struct Mapping {
    explicit Mapping(std::size_t pages) : size(pages * kPage) {
        fd = ::memfd_create("mapped_copier_test", MFD_CLOEXEC);
        CHECK(fd >= 0 && ::ftruncate(fd, static_cast<off_t>(size)) == 0);
        void* const mapped = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        CHECK(mapped != MAP_FAILED);
        data = static_cast<std::byte*>(mapped);
    }
    ~Mapping() {
        ::munmap(data, size);
        ::close(fd);
    }
    Mapping(const Mapping&) = delete;
    Mapping& operator=(const Mapping&) = delete;
    std::uint64_t page(std::size_t index) const { return reinterpret_cast<std::uint64_t>(data + index * kPage); }

    int fd = -1;
    std::size_t size;
    std::byte* data = nullptr;
};

struct Memory {
    explicit Memory(std::size_t pages) : bytes(static_cast<std::byte*>(std::aligned_alloc(kPage, pages * kPage))) {
        for (std::size_t i = 0; i < pages * kPage; ++i) bytes[i] = static_cast<std::byte>((i * 31 + i / kPage) & 0xff);
    }
    ~Memory() { std::free(bytes); }
    Memory(const Memory&) = delete;
    Memory& operator=(const Memory&) = delete;
    std::uint64_t page(std::size_t index) const { return reinterpret_cast<std::uint64_t>(bytes + index * kPage); }
    std::byte* bytes;
};

std::vector<std::byte> records(std::size_t count) {
    std::vector<std::byte> made(count * kRecord);
    for (std::size_t i = 0; i < made.size(); ++i) made[i] = static_cast<std::byte>(1 + i / kRecord);
    return made;
}

void goes_there_and_back(bool flush, unsigned threads) {
    Mapping mapping(17);
    Memory from(16), to(16);
    std::memset(to.bytes, 0, 16 * kPage);
    MappedCopier copier({mapping.data, mapping.size, threads, flush});
    Numbers places, sources, sizes, record_places, targets;
    for (std::size_t i = 0; i < 16; ++i) {
        places.push_back(mapping.page(1 + i));
        sources.push_back(from.page(i));
        targets.push_back(to.page(i));
        sizes.push_back(kPage);
        record_places.push_back(mapping.page(0) + i * kRecord);
    }
    const auto wrote =
        wait_for(copier, copier.submit_write(places, sources, sizes, record_places, records(16), kRecord));
    CHECK(wrote == MappedCopier::Results(16, 1));
    CHECK(std::memcmp(mapping.data + kPage, from.bytes, 16 * kPage) == 0);
    CHECK(mapping.data[15 * kRecord] == std::byte{16});
    CHECK(wait_for(copier, copier.submit_read(targets, places, sizes)) == MappedCopier::Results(16, 1));
    CHECK(std::memcmp(to.bytes, from.bytes, 16 * kPage) == 0);
    // A record alone.
    CHECK(wait_for(copier, copier.submit_write({0}, {0}, {0}, {record_places[3]}, std::vector<std::byte>(kRecord),
                                               kRecord)) == MappedCopier::Results(1, 1));
    CHECK(mapping.data[3 * kRecord] == std::byte{0} && mapping.data[4 * kRecord] == std::byte{5});
    CHECK(wait_for(copier, copier.submit_read({}, {}, {})).empty());
}

TEST_CASE(a_lost_page_fails_its_element) {
    Mapping mapping(9);
    Memory memory(8);
    MappedCopier copier({mapping.data, mapping.size, 2, true});
    CHECK(::ftruncate(mapping.fd, 5 * kPage) == 0);  // pages 5 to 8 are gone
    Numbers places, addresses, sizes, record_places;
    for (std::size_t i = 0; i < 8; ++i) {
        places.push_back(mapping.page(1 + i));
        addresses.push_back(memory.page(i));
        sizes.push_back(kPage);
        record_places.push_back(mapping.page(0) + i * kRecord);
    }
    const MappedCopier::Results half{1, 1, 1, 1, 0, 0, 0, 0};
    CHECK(wait_for(copier, copier.submit_write(places, addresses, sizes, record_places, records(8), kRecord)) == half);
    CHECK(mapping.data[3 * kRecord] == std::byte{4} && mapping.data[4 * kRecord] == std::byte{0});
    CHECK(wait_for(copier, copier.submit_read(addresses, places, sizes)) == half);
    // Its threads go on.
    CHECK(::ftruncate(mapping.fd, 9 * kPage) == 0);
    CHECK(wait_for(copier, copier.submit_read(addresses, places, sizes)) == MappedCopier::Results(8, 1));
}

// A fault elsewhere ends the process as ever.
TEST_CASE(other_faults_are_not_ours) {
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
    const pid_t child = ::fork();
    if (child == 0) {
        Mapping mapping(1), other(1);
        MappedCopier copier({mapping.data, mapping.size, 1, false});
        CHECK(::ftruncate(other.fd, 0) == 0);
        const volatile std::byte byte = other.data[0];
        _exit(static_cast<int>(byte));
    }
    int status = 0;
    CHECK(::waitpid(child, &status, 0) == child);
    CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGBUS);
#endif
}

TEST_CASE(bad_arguments_are_refused) {
    Mapping mapping(2);
    Memory memory(2);
    MappedCopier copier({mapping.data, mapping.size, 1, false});
    const auto m = mapping.page(0), o = memory.page(0);
    CHECK(refused([&] { copier.submit_read({o}, {m + kPage + 1}, {kPage}); }));
    CHECK(refused([&] { copier.submit_read({o}, {m - 1}, {1}); }));
    CHECK(refused([&] { copier.submit_read({o}, {m}, {~std::uint64_t{0}}); }));
    CHECK(refused([&] { copier.submit_read({o}, {m}, {}); }));
    CHECK(refused([&] { copier.submit_write({o}, {m}, {1}, {m}, records(1), kRecord); }));
    CHECK(refused([&] { copier.submit_write({m}, {o}, {1}, {o}, records(1), kRecord); }));
    CHECK(refused([&] { copier.submit_write({m}, {o}, {1}, {m}, records(2), kRecord); }));
    CHECK(refused([&] { copier.submit_write({m}, {o}, {1}, {m}, {}, 0); }));
    CHECK(refused([&] { MappedCopier({mapping.data, mapping.size, 0, false}); }));
    CHECK(refused([&] { MappedCopier({nullptr, 1, 1, false}); }));
    copier.close();
    copier.close();
    CHECK(refused([&] { copier.submit_read({o}, {m}, {1}); }));
}

TEST_CASE(many_submit_at_once) {
    constexpr std::size_t kSubmitters = 4, kRounds = 10, kElements = 8;
    constexpr std::size_t kPages = kSubmitters * kRounds * kElements;
    constexpr std::size_t kRecordPages = kPages * kRecord / kPage + 1;
    Mapping mapping(kRecordPages + kPages);
    Memory memory(kPages);
    MappedCopier copier({mapping.data, mapping.size, 3, false});
    std::vector<std::thread> threads;
    for (std::size_t t = 0; t < kSubmitters; ++t) {
        threads.emplace_back([&, t] {
            for (std::size_t round = 0; round < kRounds; ++round) {
                Numbers places, addresses, sizes, record_places;
                const std::size_t first = (t * kRounds + round) * kElements;
                for (std::size_t i = first; i < first + kElements; ++i) {
                    places.push_back(mapping.page(kRecordPages + i));
                    addresses.push_back(memory.page(i));
                    sizes.push_back(kPage);
                    record_places.push_back(mapping.page(0) + i * kRecord);
                }
                if (t % 2 == 0)
                    copier.submit_write(places, addresses, sizes, record_places, records(kElements), kRecord);
                else
                    copier.submit_read(addresses, places, sizes);
            }
        });
    }
    for (auto& thread : threads) thread.join();
    copier.close();
    const auto finished = copier.drain();
    CHECK(finished.size() == kSubmitters * kRounds);
    for (const auto& [number, results] : finished) CHECK(results == MappedCopier::Results(kElements, 1));
}

TEST_CASE(bytes_come_back_with_any_number_of_threads) {
    for (const bool flush : {false, true})
        for (const unsigned threads : {1U, 3U}) goes_there_and_back(flush, threads);
}

}  // namespace
