// PagedCopier with a CudaMover, over a driver that has no device (tests/fake).
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "check.h"
#include "copied_chunks.h"
#include "fake/fake_cuda.h"
#include "lmcache/cuda_mover.h"
#include "lmcache/paged_copier.h"

using namespace lmcache;

namespace {

constexpr std::size_t kBlockBytes = 8192;
constexpr std::size_t kTrialBytes = 256 << 10;

std::shared_ptr<CudaDevice> open_device() { return CudaDevice::open(LMCACHE_FAKE_CUDA, 0); }

enum class Pinned { kAll, kNothing, kInPieces };

// Two layers of device memory that interleave, and the copier by the fake driver.
struct Fixture : CopierFixture<kBlockBytes> {
    std::shared_ptr<CudaDevice> device;

    explicit Fixture(Pinned pinned = Pinned::kAll, std::size_t threads = 3) {
        fake_cuda_map_device(kv.data(), kv.size());
        fill(1);
        device = open_device();
        if (pinned == Pinned::kAll) device->register_memory(address(arena), kArena);
        if (pinned == Pinned::kInPieces) {
            device->register_memory(address(arena), 3 * kFrame + 4096);  // the fourth frame reaches over its end
            device->register_memory(address(arena) + 3 * kFrame + 4096, 4 * kFrame);
        }
        auto methods = std::make_shared<const CudaCopyMethods>(device, kBlockBytes, kTrialBytes);
        copier = std::make_unique<PagedCopier>(address(arena), kArena, threads,
                                               std::make_unique<CudaMover>(std::move(methods), threads));
        group = add_group(*copier);
    }
    Fixture(const Fixture&) = delete;
    Fixture& operator=(const Fixture&) = delete;
    ~Fixture() {
        fake_cuda_release();
        copier.reset();
        device->unregister_memory(address(arena), kArena);
        device.reset();
        fake_cuda_unmap_device(kv.data());
    }

    std::size_t add_group(PagedCopier& to) const {
        return to.add_group(segments(kBlockBytes, kLayers * kBlockBytes), kBlocksPerChunk, kNumBlocks);
    }
    // The frames that the CPU's copier makes of the same blocks.
    std::vector<std::byte> frames_by_cpu() const {
        const Memory other(kArena);
        PagedCopier by_cpu(other.address(), kArena, 1);
        const auto job = by_cpu.submit_store(add_group(by_cpu), slots(0, kSlots), blocks_from(0, kSlots),
                                             hashes_from(0, kSlots), as_bytes(header));
        CHECK(*by_cpu.wait(job, kPatience) == Results(kSlots, kCopied));
        by_cpu.close();
        const auto* const frames = reinterpret_cast<const std::byte*>(other.data);
        return {frames, frames + kArena};
    }
};

using Results = Fixture::Results;
constexpr double kPatience = Fixture::kPatience;
constexpr std::size_t kFrame = Fixture::kFrame;

void check_clean() {
    if (*fake_cuda_misuse() != 0) std::fprintf(stderr, "misuse: %s\n", fake_cuda_misuse());
    CHECK(*fake_cuda_misuse() == 0);
    CHECK(fake_cuda_alive() == 0);
    fake_cuda_reset();
}

template <class Action>
std::string failure_of(Action&& action) {
    try {
        action();
    } catch (const CudaError& error) {
        return error.what();
    }
    return "";
}

bool has(const std::string& text, const char* words) { return text.find(words) != std::string::npos; }

TEST_CASE(what_is_missing_is_said) {
    CHECK(has(failure_of([] { CudaDevice::open("libno-such-driver.so.1", 0); }), "cannot open the NVIDIA driver"));
    CHECK(has(failure_of([] { CudaDevice::open("libc.so.6", 0); }), "too old: it lacks cuInit"));
    CHECK(has(failure_of([] { CudaDevice::open(LMCACHE_FAKE_CUDA, 1); }), "CUDA_ERROR_INVALID_DEVICE (101)"));
    fake_cuda_fail("cuInit", 0, 1, 100);
    CHECK(failure_of(open_device) == "cuInit failed: CUDA_ERROR_NO_DEVICE (100)");
    for (const char* call : {"cuDeviceGetAttribute", "cuDevicePrimaryCtxRetain", "cuCtxPushCurrent_v2",
                             "cuThreadExchangeStreamCaptureMode", "cuCtxGetStreamPriorityRange"}) {
        fake_cuda_fail(call, 0, 1, 2);
        CHECK(has(failure_of(open_device), "CUDA_ERROR_OUT_OF_MEMORY"));
    }
    check_clean();
}

TEST_CASE(frames_are_those_of_the_cpu) {
    for (const Pinned pinned : {Pinned::kAll, Pinned::kNothing, Pinned::kInPieces}) {
        for (const char* slow : {"", "cuMemcpyBatchAsync"}) {
            if (*slow != 0) fake_cuda_cost(slow, 100);  // so that one call a run, or the kernel, is preferred
            {
                Fixture f(pinned);
                CHECK(f.store(0, kSlots) == Results(kSlots, kCopied));
                const std::vector<std::byte> expected = f.frames_by_cpu();
                CHECK(std::memcmp(f.arena, expected.data(), expected.size()) == 0);
                const std::vector<std::byte> original = f.kv;
                std::fill(f.kv.begin(), f.kv.end(), std::byte{0});
                CHECK(f.load(0, kSlots) == Results(kSlots, kCopied));
                CHECK(f.kv == original);
            }
            check_clean();
        }
    }
}

TEST_CASE(the_fastest_right_way_is_taken) {
    const auto best = [] { return CudaCopyMethods(open_device(), kBlockBytes, kTrialBytes).best(); };
    fake_cuda_cost("cuMemcpyHtoDAsync_v2", 2000);
    fake_cuda_cost("cuLaunchKernel", 2000);
    CHECK(best() == CopyMethod::kBatch);
    fake_cuda_cost("cuMemcpyBatchAsync", 2000);
    fake_cuda_cost("cuLaunchKernel", 0);
    CHECK(best() == CopyMethod::kKernel);
    fake_cuda_spoil_kernel(1);
    CHECK(best() != CopyMethod::kKernel);
    fake_cuda_fail("cuMemcpyBatchAsync", 0, 1000, 2);
    CHECK(best() == CopyMethod::kSingle);
    fake_cuda_fail("cuMemcpyHtoDAsync_v2", 0, 1000, 2);
    CHECK(has(failure_of(best), "no way of copying"));
    fake_cuda_fail("cuMemAlloc_v2", 0, 1, 2);
    CHECK(has(failure_of(best), "cuMemAlloc failed: CUDA_ERROR_OUT_OF_MEMORY"));
    check_clean();
}

TEST_CASE(a_load_writes_nothing_before_its_fence) {
    {
        Fixture f;
        CHECK(f.store(0, 4) == Results(4, kCopied));
        const std::vector<std::byte> stored = f.kv;
        f.fill(5);
        const std::vector<std::byte> before = f.kv;
        fake_cuda_hold(fake_cuda_stream());
        const auto job = f.submit_load(0, 4, f.device->fence(Fixture::address(fake_cuda_stream())));
        CHECK(!f.copier->wait(job, 0.05));
        CHECK(f.kv == before);
        fake_cuda_release();
        CHECK(*f.copier->wait(job, kPatience) == Results(4, kCopied));
        const std::size_t written = 4 * kBlocksPerChunk * kLayers * kBlockBytes;
        CHECK(std::memcmp(f.kv.data(), stored.data(), written) == 0);
        CHECK(std::memcmp(f.kv.data() + written, before.data() + written, before.size() - written) == 0);
    }
    check_clean();
}

TEST_CASE(loads_go_before_stores) {
    {
        Fixture f(Pinned::kAll, 1);
        const long all_loads = fake_cuda_copies(1, -5);
        CHECK(f.store(0, 8) == Results(8, kCopied));
        CHECK(fake_cuda_copies(1, -5) == all_loads);
        fake_cuda_hold(fake_cuda_stream());
        const auto first = f.submit_load(0, 1, f.device->fence(Fixture::address(fake_cuda_stream())));
        const auto store = f.submit_store(8, 4);
        const auto second = f.submit_load(4, 2);
        fake_cuda_release();
        CHECK(*f.copier->wait(store, kPatience) == Results(4, kCopied));
        // Both loads have ended: the only thread has gone on to the store.
        CHECK(*f.copier->wait(first, 0) == Results(1, kCopied) && *f.copier->wait(second, 0) == Results(2, kCopied));
        CHECK(fake_cuda_copies(1, -5) > all_loads);
        CHECK(fake_cuda_copies(0, -5) == 0);
    }
    check_clean();
}

TEST_CASE(a_flipped_bit_is_no_hit) {
    for (const Pinned pinned : {Pinned::kAll, Pinned::kNothing}) {
        {
            Fixture f(pinned);
            CHECK(f.store(0, 3) == Results(3, kCopied));
            f.arena[kFrame + kFrameHeaderBytes + 777] ^= std::byte{4};
            CHECK(f.load(0, 3) == (Results{kCopied, kUnreadable, kCopied}));
            CHECK(f.device->take_failure().empty());
        }
        check_clean();
    }
}

// Whatever call fails, and when: what counts as copied is right, the rest is said to be not, and it goes on afterwards.
TEST_CASE(any_call_may_fail) {
    for (const char* call :
         {"cuCtxPushCurrent_v2", "cuThreadExchangeStreamCaptureMode", "cuMemcpyBatchAsync", "cuMemcpyDtoHAsync_v2",
          "cuMemcpyHtoDAsync_v2", "cuLaunchKernel", "cuEventRecord", "cuEventSynchronize",
          "cuEventSynchronize, afterwards", "cuStreamWaitEvent", "cuStreamSynchronize", "cuMemHostAlloc"}) {
        for (const Pinned pinned : {Pinned::kAll, Pinned::kInPieces}) {
            for (int skip = 0; skip < 4; ++skip) {
                {
                    Fixture f(pinned, 2);
                    fake_cuda_delay(50);
                    const std::vector<std::byte> original = f.kv;
                    fake_cuda_fail(call, skip, 2, 2);
                    const Results stored = f.store(0, kSlots);
                    for (std::size_t i = 0; i < kSlots; ++i)
                        CHECK((stored[i] == kCopied) == (f.verdict(i) == FrameFault::kNone));
                    fake_cuda_fail(call, 0, 0, 0);
                    f.device->take_failure();
                    CHECK(f.store(0, kSlots) == Results(kSlots, kCopied));

                    std::fill(f.kv.begin(), f.kv.end(), std::byte{0});
                    fake_cuda_fail(call, skip, 2, 2);
                    const Results loaded = f.load(0, kSlots);
                    const std::size_t chunk_bytes = kBlocksPerChunk * kLayers * kBlockBytes;
                    for (std::size_t i = 0; i < kSlots; ++i) {
                        CHECK(loaded[i] == kCopied || loaded[i] == kNotMoved);
                        const auto* const expected = original.data() + i * chunk_bytes;
                        if (loaded[i] == kCopied)
                            CHECK(std::memcmp(f.kv.data() + i * chunk_bytes, expected, chunk_bytes) == 0);
                    }
                    const bool failed = loaded != Results(kSlots, kCopied);
                    CHECK(failed == has(f.device->take_failure(), "CUDA_ERROR_OUT_OF_MEMORY"));
                    CHECK(f.device->take_failure().empty());
                    fake_cuda_fail(call, 0, 0, 0);
                    CHECK(f.load(0, kSlots) == Results(kSlots, kCopied));
                    CHECK(f.kv == original);
                }
                check_clean();
            }
        }
    }
}

TEST_CASE(a_lost_context_ends_every_copy) {
    {
        Fixture f;
        CHECK(f.store(0, 4) == Results(4, kCopied));
        fake_cuda_fail("execution", 3, 1, 700);  // in the middle
        fake_cuda_delay(200);
        const Results stored = f.store(4, 8);
        CHECK(stored != Results(8, kCopied));
        for (std::size_t i = 0; i < 8; ++i) CHECK((stored[i] == kCopied) == (f.verdict(4 + i) == FrameFault::kNone));
        CHECK(has(f.device->take_failure(), "CUDA_ERROR_ILLEGAL_ADDRESS"));
        CHECK(f.load(0, 4) == Results(4, kNotMoved));
        CHECK(has(failure_of([&] { f.device->fence(Fixture::address(fake_cuda_stream())); }), "cuCtxPushCurrent"));
    }
    // What belonged to the context is gone with it.
    fake_cuda_reset();
}

TEST_CASE(nothing_spoils_a_graph_that_the_engine_records) {
    fake_cuda_capture(1);
    {
        Fixture f(Pinned::kInPieces);
        CHECK(f.store(0, kSlots) == Results(kSlots, kCopied));
        CHECK(f.load(0, kSlots) == Results(kSlots, kCopied));
        f.device->fence(Fixture::address(fake_cuda_stream()))->wait();
    }
    check_clean();
}

TEST_CASE(a_range_is_unpinned_without_its_neighbours) {
    {
        const auto device = open_device();
        std::vector<std::byte> memory(4 << 12);
        const std::uintptr_t begin = Fixture::address(memory.data());
        for (std::size_t i = 0; i < 4; ++i) device->register_memory(begin + (i << 12), 1 << 12);
        CHECK(device->is_registered(memory.data() + 4095, 1) && !device->is_registered(memory.data() + 4095, 2));
        device->unregister_memory(begin + (1 << 12), 2 << 12);
        CHECK(device->is_registered(memory.data(), 4096) && !device->is_registered(memory.data() + 4096, 1));
        CHECK(!device->is_registered(memory.data() + (2 << 12), 1) &&
              device->is_registered(memory.data() + (3 << 12), 1));
        CHECK(!failure_of([&] { device->register_memory(begin, 4096); }).empty());
    }
    check_clean();
}

TEST_CASE(many_copies_at_once_in_any_order) {
    const unsigned seed = 20240607;
    std::mt19937 random(seed);
    fake_cuda_delay(100);
    {
        Fixture f(Pinned::kInPieces, 4);
        for (int round = 0; round < 20; ++round) {
            const std::vector<std::byte> original = f.kv;
            std::vector<PagedCopier::JobId> jobs;
            for (std::size_t slot = 0; slot < kSlots; slot += 2) jobs.push_back(f.submit_store(slot, 2));
            for (const auto job : jobs) CHECK(*f.copier->wait(job, kPatience) == Results(2, kCopied));
            const std::size_t kept = random() % kSlots;
            f.fill(static_cast<unsigned>(round));
            jobs.clear();
            for (std::size_t slot = 0; slot < kSlots; ++slot)
                if (slot != kept) jobs.push_back(f.submit_load(slot, 1));
            jobs.push_back(f.submit_load(kept, 1));
            for (const auto job : jobs) CHECK(*f.copier->wait(job, kPatience) == Results(1, kCopied));
            CHECK(f.kv == original);
        }
    }
    check_clean();
}

}  // namespace
