#include "lmcache/folder_scan.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <set>
#include <stdexcept>
#include <string>

#include "check.h"

using lmcache::FolderScan;

namespace {

void make_file(const std::string& path, std::size_t bytes, time_t accessed, time_t modified) {
    const int fd = ::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL, 0600);
    CHECK(fd >= 0);
    CHECK(::ftruncate(fd, static_cast<off_t>(bytes)) == 0);
    const timespec times[2] = {{accessed, 7}, {modified, 9}};
    CHECK(::futimens(fd, times) == 0);
    CHECK(::close(fd) == 0);
}

std::string name(const std::string& prefix, char digit) { return prefix + std::string(62, digit) + ".data"; }

TEST_CASE(only_our_files_are_listed_youngest_first) {
    char made[] = "/tmp/lmcache_folder_scan_XXXXXX";
    CHECK(::mkdtemp(made) != nullptr);
    const std::string base = made, first = base + "/0a", second = base + "/ff", third = base + "/1b";
    for (const std::string& folder : {first, second, third}) CHECK(::mkdir(folder.c_str(), 0700) == 0);
    make_file(first + "/" + name("0a", '1'), 5000, 100, 50);
    make_file(first + "/" + name("0a", '2'), 0, 10, 200);
    make_file(second + "/" + name("ff", '3'), 1, 5, 5);
    make_file(second + "/.x.0.tmp", 1, 5, 5);
    // Not ours: another folder's object, other digits, other lengths, a link, a folder.
    make_file(second + "/" + name("0a", '4'), 1, 5, 5);
    make_file(second + "/" + name("ff", 'G'), 1, 5, 5);
    make_file(second + "/ff.data", 1, 5, 5);
    CHECK(::symlink("/etc/passwd", (second + "/" + name("ff", '5')).c_str()) == 0);
    CHECK(::mkdir((second + "/" + name("ff", '6')).c_str(), 0700) == 0);

    const std::string file = second + "/ff.data";
    for (const unsigned threads : {1U, 2U, 8U}) {
        const FolderScan scan = lmcache::scan_folders({first, second, third, base + "/gone", file, base}, threads);
        CHECK(scan.hashes.size() == 3 && scan.used_ns.size() == 3 && scan.sizes.size() == 3);
        CHECK(scan.temporary == std::vector<std::string>{second + "/.x.0.tmp"});
        CHECK(scan.empty == std::vector<std::string>{third});
        CHECK(scan.unreadable.size() == 1 && scan.unreadable[0].first == file && scan.unreadable[0].second == ENOTDIR);
        const auto order = lmcache::youngest_first(scan.used_ns.data(), scan.used_ns.size());
        CHECK(order.size() == 3);
        CHECK(scan.hashes[order[0]][0] == std::byte{0x0a} && scan.hashes[order[0]][31] == std::byte{0x22});
        CHECK(scan.used_ns[order[0]] == 200'000'000'009 && scan.sizes[order[0]] == 0);
        CHECK(scan.hashes[order[1]][31] == std::byte{0x11});
        CHECK(scan.used_ns[order[1]] == 100'000'000'007 && scan.sizes[order[1]] >= 5000);
        CHECK(scan.hashes[order[2]][0] == std::byte{0xff} && scan.hashes[order[2]][31] == std::byte{0x33});
    }
    const FolderScan names = lmcache::list_folders({first, second, third, base + "/gone", file}, 2);
    CHECK(names.hashes.size() == 5 && names.sizes.empty() && names.used_ns.empty());  // a link and a folder, too
    CHECK(names.unreadable.size() == 1 && names.unreadable[0].first == file);
    CHECK(lmcache::scan_folders({}, 4).hashes.empty());
    CHECK(refused([&] { lmcache::scan_folders({first}, 0); }));
    const std::string command = "rm -rf '" + base + "'";
    CHECK(std::system(command.c_str()) == 0);
}

}  // namespace
