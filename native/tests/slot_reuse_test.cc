// A reader with a stale lease copies from a slot that another process keeps filling with other chunks. Whatever a load
// reports as good is exactly one whole chunk, the one asked for.
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <new>
#include <vector>

#include "check.h"
#include "lmcache/paged_copier.h"

using namespace lmcache;

namespace {

constexpr std::size_t kPayload = 64 << 10;
constexpr std::size_t kFrame = kFrameHeaderBytes + kPayload;
constexpr int kRounds = 4000;
constexpr double kPatience = 60.0;

struct Shared {
    std::atomic<bool> stop{false};
    std::atomic<int> stores{0};
};

const std::vector<std::byte> kDigest(32, std::byte{1});

// Chunk k: hash of bytes k, payload of bytes k.
std::vector<std::byte> hash_of(int chunk) { return std::vector<std::byte>(32, static_cast<std::byte>(chunk)); }

std::size_t add_group(PagedCopier& copier, std::vector<std::byte>& kv) {
    return copier.add_group({{reinterpret_cast<std::uintptr_t>(kv.data()), kPayload, kPayload, {}}}, 1,
                            kv.size() / kPayload);
}

void keep_storing(std::byte* arena, Shared& shared) {
    std::vector<std::byte> kv(3 * kPayload);
    for (std::size_t i = 0; i < kv.size(); ++i) kv[i] = static_cast<std::byte>(i / kPayload);
    PagedCopier copier(reinterpret_cast<std::uintptr_t>(arena), kFrame, 1);
    const std::size_t group = add_group(copier, kv);
    const FrameHeader header = frame_template({}, kDigest, kPayload, "", {});
    const std::span<const std::byte> packed(reinterpret_cast<const std::byte*>(&header), sizeof header);
    const std::vector<std::uint64_t> slot{0};
    while (!shared.stop) {
        for (int chunk = 0; chunk < 3; ++chunk) {
            const std::vector<std::int64_t> blocks{chunk};
            copier.wait(copier.submit_store(group, slot, blocks, hash_of(chunk), packed), kPatience);
        }
        ++shared.stores;
    }
}

TEST_CASE(a_load_beside_stores_to_its_slot_gives_one_whole_chunk_or_fails) {
    const std::size_t size = kFrame + 4096;
    void* const memory = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(memory != MAP_FAILED);
    auto* const arena = static_cast<std::byte*>(memory);
    auto& shared = *new (arena + kFrame) Shared;
    const pid_t writer = fork();
    CHECK(writer >= 0);
    if (writer == 0) {
        keep_storing(arena, shared);
        _exit(0);
    }
    int status = 0;
    while (shared.stores == 0) {
        CHECK(waitpid(writer, &status, WNOHANG) == 0);  // it runs
        usleep(100);
    }

    std::vector<std::byte> kv(kPayload);
    PagedCopier copier(reinterpret_cast<std::uintptr_t>(arena), kFrame, 1);
    const std::size_t group = add_group(copier, kv);
    const std::vector<std::uint64_t> slot{0};
    const std::vector<std::int64_t> blocks{0};
    int good = 0;
    for (int round = 0; round < kRounds; ++round) {
        const int chunk = round % 3;
        const auto results = copier.wait(copier.submit_load(group, slot, blocks, hash_of(chunk), kDigest), kPatience);
        CHECK(results.has_value());
        if ((*results)[0] == 0) continue;
        ++good;
        CHECK(std::ranges::all_of(kv, [&](std::byte byte) { return byte == static_cast<std::byte>(chunk); }));
    }
    shared.stop = true;
    CHECK(waitpid(writer, &status, 0) == writer && status == 0);
    std::printf("%d of %d loads good beside %d rounds of stores\n", good, kRounds, shared.stores.load());
}

}  // namespace
