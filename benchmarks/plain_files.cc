// The floor that file adapters are measured against: one file an object, opened, moved by one pwritev or preadv,
// closed.
//
//   plain_files THREADS COUNT SIZE_BYTES DIRECT(0|1)
//
// Commands on stdin: "write FOLDER", "read FOLDER"; each answers with its wall seconds. Ends with stdin.
#include <fcntl.h>
#include <sys/uio.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <iostream>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace {

class Pool {
public:
    explicit Pool(std::size_t threads) {
        for (std::size_t i = 0; i < threads; ++i) threads_.emplace_back([this] { work(); });
    }

    template <typename Move>
    double run(std::size_t count, Move move) {
        const auto started = std::chrono::steady_clock::now();
        std::unique_lock lock(mutex_);
        move_ = move;
        count_ = count;
        next_ = 0;
        busy_ = threads_.size();
        ++round_;
        begin_.notify_all();
        end_.wait(lock, [this] { return busy_ == 0; });
        return std::chrono::duration<double>(std::chrono::steady_clock::now() - started).count();
    }

private:
    void work() {
        std::size_t seen = 0;
        std::unique_lock lock(mutex_);
        for (;;) {
            begin_.wait(lock, [&] { return round_ != seen; });
            seen = round_;
            lock.unlock();
            for (std::size_t i; (i = next_.fetch_add(1)) < count_;) move_(i);
            lock.lock();
            if (--busy_ == 0) end_.notify_one();
        }
    }

    std::mutex mutex_;
    std::condition_variable begin_, end_;
    std::function<void(std::size_t)> move_;
    std::atomic<std::size_t> next_{0};
    std::size_t count_ = 0, busy_ = 0, round_ = 0;
    std::vector<std::thread> threads_;
};

void check(bool good, const char* what) {
    if (good) return;
    std::perror(what);
    std::_Exit(1);
}

}  // namespace

int main(int argc, char** argv) {
    if (argc != 5) return 2;
    const std::size_t threads = std::stoul(argv[1]), count = std::stoul(argv[2]), size = std::stoul(argv[3]);
    const int direct = std::atoi(argv[4]) != 0 ? O_DIRECT : 0;
    void* memory = nullptr;
    check(::posix_memalign(&memory, 4096, count * size) == 0, "memory");
    std::memset(memory, 7, count * size);
    char* bytes = static_cast<char*>(memory);
    Pool pool(threads);
    std::string command, folder;
    while (std::cin >> command >> folder) {
        const auto path = [&](std::size_t i) { return folder + "/" + std::to_string(i) + ".data"; };
        const double seconds =
            command == "write"
                ? pool.run(count,
                           [&](std::size_t i) {
                               const int fd = ::open(path(i).c_str(), O_WRONLY | O_CREAT | O_CLOEXEC | direct, 0600);
                               check(fd >= 0, "open");
                               const iovec part{bytes + i * size, size};
                               check(::pwritev(fd, &part, 1, 0) == static_cast<ssize_t>(size), "pwritev");
                               check(::close(fd) == 0, "close");
                           })
                : pool.run(count, [&](std::size_t i) {
                      const int fd = ::open(path(i).c_str(), O_RDONLY | O_CLOEXEC | direct);
                      check(fd >= 0, "open");
                      const iovec part{bytes + i * size, size};
                      check(::preadv(fd, &part, 1, 0) == static_cast<ssize_t>(size), "preadv");
                      check(::close(fd) == 0, "close");
                  });
        std::printf("%.9f\n", seconds);
        std::fflush(stdout);
    }
    std::_Exit(0);
}
