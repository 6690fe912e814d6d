#include <poll.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include "aligned_memory.h"
#include "await_job.h"
#include "check.h"
#include "lmcache/file_io.h"
#include "lmcache/io_uring.h"

using lmcache::FileIO;
using lmcache::IoResults;

namespace {

constexpr std::size_t kFileBytes = 4096;

bool exists(const std::string& path) { return ::access(path.c_str(), F_OK) == 0; }

// Removes what is empty, one level up too, and nothing else.
void test_what_goes(const std::string& base) {
    FileIO io({2, false, 4096, 0});
    const std::string first = base + "/namespace/aa", second = base + "/namespace/bb", other = base + "/other/cc";
    for (const char* folder : {"/namespace", "/namespace/aa", "/namespace/bb", "/other", "/other/cc"})
        CHECK(::mkdir((base + folder).c_str(), 0700) == 0);
    Memory memory(kFileBytes);
    const std::string file = second + "/file";
    CHECK(wait_for(io, io.submit_write({file}, {file + ".t"}, {memory.address()}, {kFileBytes})).errors[0] == 0);
    const IoResults some = wait_for(io, io.submit_remove_empty({first, second, other, base + "/gone/dd"}));
    CHECK(some.errors == (std::vector<std::int32_t>{0, ENOTEMPTY, 0, 0}));
    CHECK(!exists(first) && exists(file) && !exists(base + "/other"));
    CHECK(wait_for(io, io.submit_unlink({file})).errors[0] == 0);
    CHECK(wait_for(io, io.submit_remove_empty({second})).errors[0] == 0);
    CHECK(!exists(base + "/namespace") && exists(base));
}

// Servers that write into one folder and remove it when it is empty: no write fails, and what was written is there.
void test_servers_share_folders(const std::string& base, unsigned queue_depth, bool apart) {
    constexpr int kServers = 3, kRounds = 400;
    std::vector<std::thread> servers;
    CHECK(::mkdir((base + "/tmp").c_str(), 0700) == 0);
    for (int server = 0; server < kServers; ++server) {
        servers.emplace_back([&, server] {
            FileIO io({2, false, 4096, 0, queue_depth});
            Memory memory(kFileBytes);
            for (int round = 0; round < kRounds; ++round) {
                const std::string folder = base + "/namespace/" + (round % 8 == 0 ? "aa" : "bb");
                const std::string name = "/" + std::to_string(server) + "_" + std::to_string(round);
                const std::string path = folder + name, temporary = (apart ? base + "/tmp" : folder) + name + ".t";
                const auto written =
                    wait_for(io, io.submit_write({path}, {temporary}, {memory.address()}, {kFileBytes}));
                CHECK(written.errors[0] == 0);
                CHECK(exists(path));
                CHECK(wait_for(io, io.submit_unlink({path})).errors[0] == 0);
                const int error = wait_for(io, io.submit_remove_empty({folder})).errors[0];
                CHECK(error == 0 || error == ENOTEMPTY);
            }
        });
    }
    for (auto& server : servers) server.join();
    CHECK(!exists(base + "/namespace"));
    CHECK(::rmdir((base + "/tmp").c_str()) == 0);
}

// What lies above the two folders is not made: a base that is gone stays gone.
void test_a_base_that_is_gone(const std::string& base) {
    FileIO io({1, false, 4096, 0});
    Memory memory(kFileBytes);
    const std::string path = base + "/gone/namespace/aa/file";
    CHECK(wait_for(io, io.submit_write({path}, {path + ".t"}, {memory.address()}, {kFileBytes})).errors[0] == ENOENT);
    CHECK(!exists(base + "/gone"));
}

// A folder of its own for a test, which leaves it empty.
struct Base {
    Base() { CHECK(::mkdtemp(path) != nullptr); }
    ~Base() { CHECK(::rmdir(path) == 0); }
    Base(const Base&) = delete;
    Base& operator=(const Base&) = delete;
    char path[40] = "/tmp/lmcache_file_folders_XXXXXX";
};

TEST_CASE(empty_folders_are_removed) {
    const Base base;
    test_what_goes(base.path);
}

TEST_CASE(a_base_that_is_gone_is_not_made) {
    const Base base;
    test_a_base_that_is_gone(base.path);
}

TEST_CASE(servers_share_folders) {
    const Base base;
    for (const unsigned queue_depth : {0U, 4U}) {
        if (queue_depth != 0 && lmcache::io_uring_refusal() != 0) break;
        for (const bool apart : {false, true}) test_servers_share_folders(base.path, queue_depth, apart);
    }
}

}  // namespace
