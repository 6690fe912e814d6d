#include "lmcache/file_io.h"

#include <dirent.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <map>
#include <span>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "aligned_memory.h"
#include "await_job.h"
#include "check.h"
#include "lmcache/frame.h"
#include "lmcache/io_uring.h"
#include "lmcache/object_path.h"

using lmcache::FileIO;
using lmcache::FileIOOptions;
using lmcache::IoResults;

namespace {

unsigned queue_depth = 0;  // of the io_uring that the tests use; 0: threads

std::string make_folder() {
    char name[] = "/tmp/lmcache_file_io_XXXXXX";
    CHECK(::mkdtemp(name) != nullptr);
    return name;
}

void remove_folder(const std::string& folder) {
    const std::string command = "rm -rf '" + folder + "'";
    CHECK(std::system(command.c_str()) == 0);
}

std::vector<std::string> names(const std::string& folder, const std::string& prefix, std::size_t count) {
    std::vector<std::string> result;
    for (std::size_t i = 0; i < count; ++i) result.push_back(folder + "/" + prefix + std::to_string(i));
    return result;
}

std::size_t entries(const std::string& folder) {
    DIR* listing = ::opendir(folder.c_str());
    if (listing == nullptr) return 0;
    std::size_t count = 0;
    while (const dirent* entry = ::readdir(listing))
        if (entry->d_name[0] != '.') ++count;
    ::closedir(listing);
    return count;
}

bool exists(const std::string& path) { return ::access(path.c_str(), F_OK) == 0; }

// What was written is read back, by every combination of O_DIRECT, alignment and read-ahead; files have a private mode.
void test_round_trip() {
    const std::string folder = make_folder();
    for (const bool direct : {false, true}) {
        for (const std::size_t size : {std::size_t{8192}, std::size_t{5000}, std::size_t{1}, std::size_t{262144}}) {
            for (const std::size_t shift : {std::size_t{0}, std::size_t{16}}) {
                const std::size_t read_ahead = shift == 0 ? 0 : 4096;
                FileIO io({2, direct, 4096, read_ahead, queue_depth});
                constexpr std::size_t kCount = 9;
                const std::size_t room = 270336;
                Memory source(room * kCount), target(room * kCount);
                source.fill(static_cast<unsigned>(size));
                std::memset(target.data, 0xee, target.size_bytes);
                std::vector<std::uint64_t> from, to, sizes(kCount, size), capacities(kCount, room - 4096);
                for (std::size_t i = 0; i < kCount; ++i) {
                    from.push_back(source.address(i * room + shift));
                    to.push_back(target.address(i * room + shift));
                }
                const std::string sub =
                    folder + "/ns" + std::to_string(size) + (direct ? "d" : "b") + std::to_string(shift) + "/aa";
                const auto paths = names(sub, "object", kCount);
                const IoResults written = wait_for(io, io.submit_write(paths, names(sub, ".t", kCount), from, sizes));
                for (std::size_t i = 0; i < kCount; ++i) {
                    CHECK(written.values[i] == static_cast<std::int64_t>(size) && written.errors[i] == 0);
                }
                CHECK(entries(sub) == kCount);
                struct stat info{};
                CHECK(::stat(paths[0].c_str(), &info) == 0 && (info.st_mode & 0007) == 0);
                const IoResults read = wait_for(io, io.submit_read(paths, to, capacities));
                for (std::size_t i = 0; i < kCount; ++i) {
                    CHECK(read.values[i] == static_cast<std::int64_t>(size) && read.errors[i] == 0);
                    CHECK(std::memcmp(source.data + i * room + shift, target.data + i * room + shift, size) == 0);
                    CHECK(target.data[i * room + room - 1] == 0xee);
                }
                const bool fits = shift == 0 && size % 4096 == 0;
                if (!direct || fits) CHECK(io.buffered_fallbacks() == 0);
                if (direct && !fits) CHECK(io.buffered_fallbacks() >= kCount);
            }
        }
    }
    remove_folder(folder);
}

// A read that is given the names of frames says which of the files are those frames; large ones from the page cache are
// copied out of a mapping.
void test_verified_reads(std::size_t payload_bytes) {
    using namespace lmcache;
    const std::string folder = make_folder();
    const std::size_t room = kFrameHeaderBytes + payload_bytes + 8192;
    constexpr std::size_t kGood = 0, kFlipped = 1, kOtherKey = 2, kShort = 3, kHeadless = 4, kEmpty = 5, kCount = 6;
    const std::array<std::byte, kDigestBytes> digest{std::byte{1}};
    const FrameHeader header = frame_template(std::as_bytes(std::span("ns", 2)), digest, payload_bytes, "", {});
    Memory source(room * kCount), target(room * kCount);
    source.fill(3);
    std::vector<std::byte> frame_names;
    std::vector<std::string> paths;
    std::vector<std::uint64_t> from, to, sizes(kCount, room), capacities(kCount, room);
    sizes[kShort] = room - 12288;  // within the payload
    sizes[kHeadless] = 4095;
    sizes[kEmpty] = 0;
    for (std::size_t i = 0; i < kCount; ++i) {
        std::array<std::byte, kChunkHashBytes> hash{std::byte(i)};
        from.push_back(source.address(i * room));
        to.push_back(target.address(i * room));
        frame_seal(reinterpret_cast<std::byte*>(from[i]), header, hash);
        if (i == kOtherKey) hash[31] = std::byte{9};
        frame_names.insert(frame_names.end(), digest.begin(), digest.end());
        frame_names.insert(frame_names.end(), hash.begin(), hash.end());
        paths.push_back(object_path(folder, digest, hash));
    }
    source.data[kFlipped * room + kFrameHeaderBytes + payload_bytes - 1] ^= 1;
    for (const bool direct : {false, true}) {
        for (const std::size_t read_ahead : {std::size_t{0}, std::size_t{4096}}) {
            FileIO io({2, direct, 4096, read_ahead, queue_depth});
            wait_for(io, io.submit_write(paths, names(folder, "tmp", kCount), from, sizes));
            std::memset(target.data, 0xee, target.size_bytes);
            const IoResults read = wait_for(io, io.submit_read_frames(folder, to, capacities, frame_names));
            CHECK(read.errors[kGood] == 0 && read.values[kGood] == room);
            CHECK(std::memcmp(source.data, target.data, room) == 0);
            for (std::size_t i = 1; i < kCount; ++i) CHECK(read.errors[i] == EBADMSG && read.values[i] == -1);
        }
    }
    FileIO io({1, false, 4096, 0, queue_depth});
    frame_names.pop_back();
    CHECK(refused([&] { io.submit_read_frames(folder, to, capacities, frame_names); }));
    remove_folder(folder);
}

// Nothing holds a file any more once its read is reported: on a network file system an open one could not be deleted
// together with its folder.
void test_reported_files_are_closed() {
    using namespace lmcache;
    const std::string folder = make_folder();
    constexpr std::size_t kPayload = 1 << 20, kFrame = kFrameHeaderBytes + kPayload;
    const std::array<std::byte, kDigestBytes> digest{std::byte{1}};
    const std::array<std::byte, kChunkHashBytes> hash{std::byte{2}};
    Memory source(kFrame), target(kFrame);
    source.fill(5);
    const FrameHeader header = frame_template(std::as_bytes(std::span("ns", 2)), digest, kPayload, "", {});
    frame_seal(reinterpret_cast<std::byte*>(source.data), header, hash);
    std::vector<std::byte> name(digest.begin(), digest.end());
    name.insert(name.end(), hash.begin(), hash.end());
    FileIO io({1, false, 4096, 0, queue_depth});
    wait_for(io, io.submit_write({object_path(folder, digest, hash)}, {folder + "/.t"}, {source.address()}, {kFrame}));
    const int next_fd = ::dup(0);  // the file will get the same
    CHECK(next_fd >= 0 && ::close(next_fd) == 0);
    for (int round = 0; round < 300; ++round) {
        io.submit_read_frames(folder, {target.address()}, {kFrame}, name);
        while (io.drain().empty()) {
        }
        CHECK(::fcntl(next_fd, F_GETFD) == -1);
    }
    remove_folder(folder);
}

// A file longer than the memory is read up to it; a missing file, a folder, a link and a FIFO give an errno and no
// hang.
void test_strange_files() {
    const std::string folder = make_folder();
    FileIO io({2, false, 4096, 0, queue_depth});
    Memory memory(16384);
    memory.fill(1);
    const std::string path = folder + "/long";
    wait_for(io, io.submit_write({path}, {path + ".t"}, {memory.address()}, {16384}));
    Memory target(16384);
    std::memset(target.data, 0, 16384);
    CHECK(wait_for(io, io.submit_read({path}, {target.address()}, {8192})).values[0] == 8192);
    CHECK(std::memcmp(target.data, memory.data, 8192) == 0 && target.data[8192] == 0);

    CHECK(::mkdir((folder + "/folder").c_str(), 0700) == 0);
    CHECK(::symlink(path.c_str(), (folder + "/link").c_str()) == 0);
    CHECK(::mkfifo((folder + "/fifo").c_str(), 0600) == 0);
    const std::vector<std::string> strange{folder + "/none", folder + "/folder", folder + "/link", folder + "/fifo"};
    const std::vector<std::uint64_t> to(4, target.address()), room(4, 4096);
    const IoResults read = wait_for(io, io.submit_read(strange, to, room));
    const IoResults sizes = wait_for(io, io.submit_stat(strange));
    for (std::size_t i = 0; i < 4; ++i) CHECK(read.values[i] == -1 && sizes.values[i] == -1);
    CHECK(read.errors[0] == ENOENT && read.errors[1] == EINVAL && read.errors[2] == ELOOP && read.errors[3] == EINVAL);
    CHECK(wait_for(io, io.submit_stat({path})).values[0] == 16384);
    const IoResults gone = wait_for(io, io.submit_unlink({path, path}));
    CHECK((gone.values[0] == 0) != (gone.values[1] == 0));
    CHECK(!exists(path));
    remove_folder(folder);
}

// After the first failure of a batch nothing behind it is published, no temporary file stays, other batches go on.
void test_failure_ends_the_batch() {
    const std::string folder = make_folder();
    FileIO io({4, false, 4096, 0, queue_depth});
    Memory memory(4096);
    memory.fill(2);
    constexpr std::size_t kCount = 32;
    const auto paths = names(folder, "object", kCount);
    CHECK(::mkdir(paths[7].c_str(), 0700) == 0);  // a file cannot be renamed over a folder
    const std::vector<std::uint64_t> from(kCount, memory.address()), sizes(kCount, 4096);
    const std::uint64_t first = io.submit_write(paths, names(folder, ".t", kCount), from, sizes);
    const std::uint64_t second = io.submit_write({folder + "/other"}, {folder + "/.other"}, {memory.address()}, {4096});
    std::map<std::uint64_t, IoResults> others;
    const IoResults result = wait_for(io, first, others);
    for (std::size_t i = 0; i < kCount; ++i) {
        CHECK(result.errors[i] == (i < 7 ? 0 : i == 7 ? EISDIR : ECANCELED));
        CHECK(exists(paths[i]) == (i <= 7));
        CHECK(!exists(folder + "/.t" + std::to_string(i)));
    }
    CHECK(wait_for(io, second, others).values[0] == 4096);

    // A base folder that went away is an error, and is not made again.
    const std::string lost = folder + "/gone/ns/aa/object";
    CHECK(wait_for(io, io.submit_write({lost}, {lost + ".t"}, {memory.address()}, {4096})).errors[0] == ENOENT);
    CHECK(!exists(folder + "/gone"));
    remove_folder(folder);
}

// A process killed while it writes 64 files, in two batches by four threads, leaves a prefix.
void test_kill_leaves_a_prefix() {
    int partial = 0;
    for (int round = 0; round < 12; ++round) {
        const std::string folder = make_folder();
        const auto paths = names(folder, "object", 64);
        const pid_t child = ::fork();
        CHECK(child >= 0);
        if (child == 0) {
            FileIO io({4, round % 2 == 0, 4096, 0, queue_depth});
            Memory memory(1 << 20);
            memory.fill(3);
            const auto temporary = names(folder, ".t", 64);
            for (std::size_t half = 0; half < 64; half += 32) {
                const std::vector<std::string> to(paths.begin() + half, paths.begin() + half + 32);
                const std::vector<std::string> by(temporary.begin() + half, temporary.begin() + half + 32);
                io.submit_write(to, by, std::vector<std::uint64_t>(32, memory.address()),
                                std::vector<std::uint64_t>(32, 1 << 20));
            }
            io.close();
            ::_exit(0);
        }
        // Kill when a few files are there: polled, so that it happens in the middle at any speed.
        const std::size_t wanted = 1 + static_cast<std::size_t>(round) * 5;
        while (entries(folder) < wanted) ::usleep(100);
        ::kill(child, SIGKILL);
        CHECK(::waitpid(child, nullptr, 0) == child);
        std::size_t length = 0;
        while (length < 64 && exists(paths[length])) ++length;
        CHECK(entries(folder) == length);
        if (length < 64) ++partial;
        for (std::size_t i = 0; i < length; ++i) {
            struct stat info{};
            CHECK(::stat(paths[i].c_str(), &info) == 0 && info.st_size == 1 << 20);
        }
        remove_folder(folder);
    }
    CHECK(partial > 0);
}

// Recency on disk: what was read last is youngest; within a batch the first file (the prefix) is youngest.
void test_recency() {
    const std::string folder = make_folder();
    FileIO io({2, false, 4096, 0, queue_depth});
    FileIO reader({2, false, 4096, 0});
    Memory memory(4096);
    memory.fill(4);
    const auto paths = names(folder, "object", 3);
    const std::vector<std::uint64_t> from(3, memory.address()), sizes(3, 4096);
    wait_for(io, io.submit_write(paths, names(folder, ".t", 3), from, sizes));
    const auto used = [&](std::size_t i) {
        struct stat info{};
        CHECK(::stat(paths[i].c_str(), &info) == 0);
        return static_cast<double>(info.st_atim.tv_sec) + 1e-9 * static_cast<double>(info.st_atim.tv_nsec);
    };
    CHECK(used(0) > used(1) && used(1) > used(2));
    ::usleep(2000);
    wait_for(reader, reader.submit_read({paths[2]}, {memory.address()}, {4096}));
    reader.close();  // marks what it read before it ends
    CHECK(used(2) > used(0) && used(0) > used(1));
    remove_folder(folder);
}

// Files are marked as used when no transfer is under way any more, whatever the other threads have to do.
void test_marks_wait() {
    const std::string folder = make_folder();
    constexpr std::uint64_t kLarge = 128 << 20;
    const std::string small = folder + "/small", large = folder + "/large";
    FileIO io({2, false, 4096, 0, queue_depth});
    Memory memory(4096), room(kLarge);
    memory.fill(4);
    wait_for(io, io.submit_write({small}, {small + ".t"}, {memory.address()}, {4096}));
    const int fd = ::open(large.c_str(), O_WRONLY | O_CREAT, 0600);
    CHECK(fd >= 0 && ::ftruncate(fd, kLarge) == 0);
    ::close(fd);
    // Reading does not change the status time, marking does; by more than its grain after a pause.
    const auto changed_ns = [&] {
        struct stat info{};
        CHECK(::stat(small.c_str(), &info) == 0);
        return info.st_ctim.tv_sec * 1'000'000'000L + info.st_ctim.tv_nsec;
    };
    const long written_ns = changed_ns();
    ::usleep(20000);
    io.submit_read({large}, {room.address()}, {kLarge});
    io.submit_read({small}, {memory.address()}, {4096});
    for (std::size_t ended = 0; ended < 2;) {
        const bool marked = changed_ns() != written_ns;
        ended += io.drain().size();
        CHECK(!marked || ended == 2);
    }
    io.close();
    CHECK(changed_ns() != written_ns);
    remove_folder(folder);
}

// Out of space is an errno, leaves nothing behind, and ends when there is room again.
void test_full_disk() {
    const std::string folder = make_folder();
    if (::mount("tmpfs", folder.c_str(), "tmpfs", 0, "size=256k") != 0) {
        std::fprintf(stderr, "skipped test_full_disk: no right to mount\n");
        remove_folder(folder);
        return;
    }
    {
        FileIO io({2, false, 4096, 0, queue_depth});
        Memory memory(65536);
        memory.fill(5);
        const auto paths = names(folder, "object", 8);
        const std::vector<std::uint64_t> from(8, memory.address()), sizes(8, 65536);
        const IoResults result = wait_for(io, io.submit_write(paths, names(folder, ".t", 8), from, sizes));
        std::size_t stored = 0;
        while (stored < 8 && result.errors[stored] == 0) ++stored;
        CHECK(stored < 5);
        CHECK(result.errors[stored] == ENOSPC || result.errors[stored] == ECANCELED);
        CHECK(entries(folder) == stored);
        bool full = false;
        for (const int error : result.errors) full = full || error == ENOSPC;
        CHECK(full);
        for (const auto& path : paths) ::unlink(path.c_str());
        CHECK(wait_for(io, io.submit_write({paths[0]}, {folder + "/.t"}, {memory.address()}, {65536})).errors[0] == 0);
    }
    CHECK(::umount(folder.c_str()) == 0);
    remove_folder(folder);
}

// A write that the system cuts short goes on, and what then fails is reported: here by a limit on the file size.
void test_short_write() {
    const std::string folder = make_folder();
    const pid_t child = ::fork();
    CHECK(child >= 0);
    if (child == 0) {
        ::signal(SIGXFSZ, SIG_IGN);
        const rlimit limit{100000, 100000};
        CHECK(::setrlimit(RLIMIT_FSIZE, &limit) == 0);
        FileIO io({1, true, 4096, 0, queue_depth});
        Memory memory(1 << 18);
        memory.fill(6);
        const std::string path = folder + "/object";
        const IoResults result = wait_for(io, io.submit_write({path}, {path + ".t"}, {memory.address()}, {1 << 18}));
        CHECK(result.errors[0] == EFBIG);
        CHECK(!exists(path) && !exists(path + ".t"));
        ::_exit(0);
    }
    int status = 0;
    CHECK(::waitpid(child, &status, 0) == child);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    remove_folder(folder);
}

// Many threads submit every kind at once while another drains; close() ends everything that was submitted.
void test_concurrency_and_close() {
    const std::string folder = make_folder();
    FileIO io({3, true, 4096, 0, queue_depth});
    Memory memory(65536);
    memory.fill(7);
    std::atomic<std::size_t> submitted{0};
    std::size_t drained = 0;
    std::vector<std::thread> clients;
    for (int client = 0; client < 3; ++client) {
        clients.emplace_back([&, client] {
            for (int round = 0; round < 20; ++round) {
                const auto paths = names(folder, "c" + std::to_string(client) + "_" + std::to_string(round) + "_", 4);
                std::vector<std::string> temporary;
                for (const auto& path : paths) temporary.push_back(path + ".t");
                io.submit_write(paths, temporary, std::vector<std::uint64_t>(4, memory.address()),
                                std::vector<std::uint64_t>(4, 65536));
                io.submit_stat(paths);
                io.submit_unlink({folder + "/none"});
                submitted += 3;
            }
        });
    }
    while (drained < 100) drained += io.drain().size();
    for (auto& client : clients) client.join();
    io.close();
    io.close();
    drained += io.drain().size();
    CHECK(drained == submitted.load());
    CHECK(entries(folder) == 3 * 20 * 4);
    CHECK(refused([&] { io.submit_stat({folder}); }));
    remove_folder(folder);
}

void test_bad_arguments() {
    CHECK(refused([] { FileIO({0, false, 4096, 0}); }));
    CHECK(refused([] { FileIO({FileIO::kMaxThreads + 1, false, 4096, 0}); }));
    CHECK(refused([] { FileIO({1, false, 1000, 0}); }));
    CHECK(refused([] { FileIO({1, false, 4096, 0, FileIO::kMaxQueueDepth + 1}); }));
    FileIO io({1, false, 4096, 0, queue_depth});
    CHECK(refused([&] { io.submit_write({"/a", "/b"}, {"/c", "/d"}, {1}, {1, 2}); }));
    CHECK(refused([&] { io.submit_write({"/a"}, {}, {1}, {1}); }));
    CHECK(refused([&] { io.submit_read({"/a"}, {1}, {}); }));
    CHECK(refused([&] { io.submit_stat(std::vector<std::string>(FileIO::kMaxJobFiles + 1)); }));
    CHECK(wait_for(io, io.submit_stat({})).values.empty());
}

// By threads, and by rings of several depths where the kernel has them.
template <class Test>
void at_every_depth(Test&& test) {
    for (const unsigned depth : {0U, 1U, 8U}) {
        if (depth != 0 && lmcache::io_uring_refusal() != 0) {
            std::printf("io_uring is refused here: only threads are tested\n");
            break;
        }
        queue_depth = depth;
        test();
    }
}

TEST_CASE(bad_arguments_are_refused) { at_every_depth(test_bad_arguments); }

TEST_CASE(a_kill_leaves_a_prefix) { at_every_depth(test_kill_leaves_a_prefix); }

TEST_CASE(a_short_write_fails_its_file) { at_every_depth(test_short_write); }

TEST_CASE(files_come_back) { at_every_depth(test_round_trip); }

TEST_CASE(files_are_closed_before_they_are_reported) { at_every_depth(test_reported_files_are_closed); }

TEST_CASE(strange_files_are_reported) { at_every_depth(test_strange_files); }

TEST_CASE(a_failure_ends_its_batch) { at_every_depth(test_failure_ends_the_batch); }

TEST_CASE(the_last_use_is_marked) { at_every_depth(test_recency); }

TEST_CASE(marks_of_use_wait) { at_every_depth(test_marks_wait); }

TEST_CASE(a_full_disk_is_reported) { at_every_depth(test_full_disk); }

TEST_CASE(many_threads_may_submit_until_it_closes) { at_every_depth(test_concurrency_and_close); }

TEST_CASE(verified_reads_find_every_damage) {
    at_every_depth([] {
        for (const std::size_t payload_bytes : {700U << 10, 2U << 20}) test_verified_reads(payload_bytes);
    });
}

}  // namespace
