// A driver without a device: the calls of cuda_driver.h on host memory. Streams are threads, so copies are as
// asynchronous, and as unordered between streams, as real ones. It notices what a real driver would punish, or not
// notice.
#include "fake_cuda.h"

#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "lmcache/cuda_driver.h"

using namespace lmcache;

namespace {

constexpr int kInvalidValue = 1;
constexpr int kInvalidContext = 201;
constexpr int kIllegalAddress = 700;

struct Fault {
    int skip;
    int times;
    int code;
};

struct Fake {
    std::mutex mutex;
    std::condition_variable changed;
    std::map<std::uintptr_t, std::size_t> host;  // registered or allocated
    std::map<std::uintptr_t, std::size_t> device;
    std::map<std::uintptr_t, std::size_t> left;  // of a lost context: may be given back late
    std::set<CuEvent> events;  // those of a lost context are never destroyed, and no leak of the tests
    std::map<std::string, Fault> faults;
    std::map<std::string, long> calls;
    std::map<std::string, int> costs;
    std::map<std::pair<int, int>, long> copies;
    std::string misuse;
    int delay = 0;
    int lost = 0;
    int context = 0;  // counts those that were lost: work that a lost one left in its streams never runs
    long alive = 0;
    bool spoil_kernel = false;
    bool capturing = false;
    bool held = true;
};

Fake& fake() {
    static auto* const one = new Fake;  // outlives every thread
    return *one;
}

thread_local std::vector<CuContext> t_contexts;
thread_local int t_capture_mode = 0;
const CuContext kPrimary = reinterpret_cast<CuContext>(0x1000);

void note_misuse(const std::string& words) {
    if (fake().misuse.empty()) fake().misuse = words;
}

int injected(const std::string& call) {
    const auto found = fake().faults.find(call);
    if (found == fake().faults.end()) return 0;
    Fault& fault = found->second;
    if (fault.skip > 0) return --fault.skip, 0;
    if (fault.times <= 0) return 0;
    --fault.times;
    return fault.code;
}

// What every call begins with: the code that it has to return, if any.
int enter(const std::string& call, bool needs_context = true) {
    Fake& f = fake();
    const std::lock_guard lock(f.mutex);
    ++f.calls[call];
    if (f.capturing && needs_context && t_capture_mode != kCuCaptureModeRelaxed) {
        note_misuse(call + " while the engine records a graph");
    }
    if (f.lost != 0) return f.lost;
    if (const int code = injected(call)) return code;
    if (needs_context && (t_contexts.empty() || t_contexts.back() != kPrimary)) {
        note_misuse(call + " without the right context");
        return kInvalidContext;
    }
    return 0;
}

bool inside(const std::map<std::uintptr_t, std::size_t>& regions, std::uintptr_t address, std::size_t size_bytes) {
    auto after = regions.upper_bound(address);
    if (after == regions.begin()) return false;
    const auto& [begin, length] = *std::prev(after);
    return address + size_bytes <= begin + length;
}

struct Run {
    std::uintptr_t source;
    std::uintptr_t destination;
    std::size_t size_bytes;
};

// Mutex held. Whether the run is between device memory and one piece of pinned memory.
bool valid(const Run& run, const char* when) {
    Fake& f = fake();
    const bool to_host =
        inside(f.device, run.source, run.size_bytes) && inside(f.host, run.destination, run.size_bytes);
    const bool to_device =
        inside(f.host, run.source, run.size_bytes) && inside(f.device, run.destination, run.size_bytes);
    if (!to_host && !to_device) note_misuse(std::string("a copy of memory that is not pinned or not there, ") + when);
    return to_host || to_device;
}

struct Stream {
    explicit Stream(int stream_priority) : priority(stream_priority), thread([this] { run(); }) {}
    ~Stream() {
        add(nullptr);
        thread.join();
    }
    void add(std::function<void()> work) {
        const std::lock_guard lock(mutex);
        queue.push_back(std::move(work));
        ++submitted;
        ready.notify_all();
    }
    void finish() {
        std::unique_lock lock(mutex);
        const long all = submitted;
        done_changed.wait(lock, [&] { return done >= all; });
    }
    void run() {
        while (true) {
            std::function<void()> work;
            {
                std::unique_lock lock(mutex);
                ready.wait(lock, [this] { return !queue.empty(); });
                work = std::move(queue.front());
                queue.pop_front();
            }
            if (!work) return;
            work();
            const std::lock_guard lock(mutex);
            ++done;
            done_changed.notify_all();
        }
    }
    const int priority;
    std::mutex mutex;
    std::condition_variable ready;
    std::condition_variable done_changed;
    std::deque<std::function<void()>> queue;
    long submitted = 0;
    long done = 0;
    std::thread thread;
};

struct Point {  // in the work of a stream
    bool passed = false;
};

struct Event {
    std::shared_ptr<Point> point;
};

Stream& stream_of(CuStream stream) { return *reinterpret_cast<Stream*>(stream); }

void execute(const std::vector<Run>& runs, int context, int cost, int priority, bool spoil) {
    Fake& f = fake();
    const auto is_lost = [&] { return f.lost != 0 || f.context != context; };
    int delay;
    {
        const std::lock_guard lock(f.mutex);
        if (is_lost()) return;
        if (const int code = injected("execution")) {
            f.lost = code;
            return;
        }
        delay = f.delay == 0 ? 0 : f.delay + static_cast<int>(f.calls["execution"]++ * 7919 % f.delay);
    }
    delay += cost * static_cast<int>(runs.size());
    if (delay != 0) std::this_thread::sleep_for(std::chrono::microseconds(delay));
    for (const Run& run : runs) {
        if (spoil && &run == &runs.back()) return;
        // Under the lock, so that memory is not given back meanwhile. Not what makes a real copy fast.
        const std::lock_guard lock(f.mutex);
        if (is_lost()) return;
        if (!valid(run, "when it ran")) {
            f.lost = kIllegalAddress;
            return;
        }
        ++f.copies[{inside(f.device, run.destination, run.size_bytes), priority}];
        std::memcpy(reinterpret_cast<void*>(run.destination), reinterpret_cast<void*>(run.source), run.size_bytes);
    }
}

int start(const char* call, std::vector<Run> runs, CuStream stream) {
    int context;
    int cost;
    bool spoil;
    {
        Fake& f = fake();
        const std::lock_guard lock(f.mutex);
        for (const Run& run : runs)
            if (!valid(run, "when it was launched")) return kInvalidValue;
        context = f.context;
        cost = f.costs[call];
        spoil = f.spoil_kernel && std::string(call) == "cuLaunchKernel";
    }
    Stream& on = stream_of(stream);
    on.add([runs = std::move(runs), context, cost, spoil, priority = on.priority] {
        execute(runs, context, cost, priority, spoil);
    });
    return 0;
}

int keep(std::map<std::uintptr_t, std::size_t>& regions, void* memory, std::size_t size_bytes) {
    Fake& f = fake();
    const std::lock_guard lock(f.mutex);
    const auto begin = reinterpret_cast<std::uintptr_t>(memory);
    const auto after = regions.lower_bound(begin);
    if ((after != regions.end() && after->first < begin + size_bytes) || inside(regions, begin, 1))
        return kInvalidValue;
    f.left.erase(begin);
    regions[begin] = size_bytes;
    ++f.alive;
    return 0;
}

int drop(std::map<std::uintptr_t, std::size_t>& regions, void* memory, const char* call) {
    Fake& f = fake();
    const std::lock_guard lock(f.mutex);
    if (f.left.erase(reinterpret_cast<std::uintptr_t>(memory)) != 0) return 0;
    if (regions.erase(reinterpret_cast<std::uintptr_t>(memory)) == 0) {
        note_misuse(std::string(call) + " of what is none");
        return kInvalidValue;
    }
    --f.alive;
    return 0;
}

void count_alive(int change) {
    const std::lock_guard lock(fake().mutex);
    fake().alive += change;
}

}  // namespace

#define ENTER(...) \
    if (const int code = enter(__VA_ARGS__)) return code

extern "C" {

int cuInit(unsigned) {
    ENTER("cuInit", false);
    return 0;
}
int cuDeviceGet(CuDevice* device, int ordinal) {
    ENTER("cuDeviceGet", false);
    *device = ordinal;
    return ordinal == 0 ? 0 : 101;
}
int cuDeviceGetAttribute(int* value, int, CuDevice) {
    ENTER("cuDeviceGetAttribute", false);
    *value = 1;
    return 0;
}
int cuDevicePrimaryCtxRetain(CuContext* context, CuDevice) {
    ENTER("cuDevicePrimaryCtxRetain", false);
    count_alive(1);
    *context = kPrimary;
    return 0;
}
int cuDevicePrimaryCtxRelease_v2(CuDevice) {
    count_alive(-1);
    ENTER("cuDevicePrimaryCtxRelease_v2", false);
    return 0;
}
int cuCtxPushCurrent_v2(CuContext context) {
    ENTER("cuCtxPushCurrent_v2", false);
    t_contexts.push_back(context);
    return 0;
}
int cuCtxPopCurrent_v2(CuContext* context) {
    *context = t_contexts.back();
    t_contexts.pop_back();
    return 0;
}
int cuCtxGetStreamPriorityRange(int* lowest, int* highest) {
    ENTER("cuCtxGetStreamPriorityRange");
    *lowest = 0;
    *highest = -5;
    return 0;
}
int cuThreadExchangeStreamCaptureMode(int* mode) {
    ENTER("cuThreadExchangeStreamCaptureMode", false);
    std::swap(*mode, t_capture_mode);
    return 0;
}
int cuStreamCreateWithPriority(CuStream* stream, unsigned, int priority) {
    ENTER("cuStreamCreateWithPriority");
    *stream = reinterpret_cast<CuStream>(new Stream(priority));
    count_alive(1);
    return 0;
}
int cuStreamDestroy_v2(CuStream stream) {
    delete &stream_of(stream);
    count_alive(-1);
    ENTER("cuStreamDestroy_v2");
    return 0;
}
int cuStreamSynchronize(CuStream stream) {
    ENTER("cuStreamSynchronize");
    stream_of(stream).finish();
    return enter("cuStreamSynchronize, afterwards");
}
int cuStreamWaitEvent(CuStream stream, CuEvent event, unsigned) {
    ENTER("cuStreamWaitEvent");
    stream_of(stream).add([point = reinterpret_cast<Event*>(event)->point] {
        std::unique_lock lock(fake().mutex);
        fake().changed.wait(lock, [&] { return !point || point->passed; });
    });
    return 0;
}
int cuEventCreate(CuEvent* event, unsigned) {
    ENTER("cuEventCreate");
    *event = reinterpret_cast<CuEvent>(new Event);
    count_alive(1);
    const std::lock_guard lock(fake().mutex);
    fake().events.insert(*event);
    return 0;
}
int cuEventDestroy_v2(CuEvent event) {
    delete reinterpret_cast<Event*>(event);
    count_alive(-1);
    {
        const std::lock_guard lock(fake().mutex);
        fake().events.erase(event);
    }
    ENTER("cuEventDestroy_v2");
    return 0;
}
int cuEventRecord(CuEvent event, CuStream stream) {
    ENTER("cuEventRecord");
    auto point = std::make_shared<Point>();
    reinterpret_cast<Event*>(event)->point = point;
    stream_of(stream).add([point] {
        const std::lock_guard lock(fake().mutex);
        point->passed = true;
        fake().changed.notify_all();
    });
    return 0;
}
int cuEventSynchronize(CuEvent event) {
    ENTER("cuEventSynchronize");
    {
        const auto point = reinterpret_cast<Event*>(event)->point;
        std::unique_lock lock(fake().mutex);
        fake().changed.wait(lock, [&] { return !point || point->passed; });
    }
    return enter("cuEventSynchronize, afterwards");
}
int cuMemHostRegister_v2(void* memory, std::size_t size_bytes, unsigned) {
    ENTER("cuMemHostRegister_v2");
    return keep(fake().host, memory, size_bytes);
}
int cuMemHostUnregister(void* memory) {
    ENTER("cuMemHostUnregister");
    return drop(fake().host, memory, "cuMemHostUnregister");
}
int cuMemHostAlloc(void** memory, std::size_t size_bytes, unsigned) {
    ENTER("cuMemHostAlloc");
    *memory = std::aligned_alloc(4096, (size_bytes + 4095) / 4096 * 4096);
    return keep(fake().host, *memory, size_bytes);
}
int cuMemFreeHost(void* memory) {
    ENTER("cuMemFreeHost");
    const int code = drop(fake().host, memory, "cuMemFreeHost");
    if (code == 0) std::free(memory);
    return code;
}
int cuMemAlloc_v2(CuDevicePointer* memory, std::size_t size_bytes) {
    ENTER("cuMemAlloc_v2");
    void* const made = std::aligned_alloc(4096, (size_bytes + 4095) / 4096 * 4096);
    *memory = reinterpret_cast<CuDevicePointer>(made);
    return keep(fake().device, made, size_bytes);
}
int cuMemFree_v2(CuDevicePointer memory) {
    ENTER("cuMemFree_v2");
    const int code = drop(fake().device, reinterpret_cast<void*>(memory), "cuMemFree");
    if (code == 0) std::free(reinterpret_cast<void*>(memory));
    return code;
}
int cuMemcpyDtoHAsync_v2(void* host, CuDevicePointer device, std::size_t size_bytes, CuStream stream) {
    ENTER("cuMemcpyDtoHAsync_v2");
    return start("cuMemcpyDtoHAsync_v2", {{device, reinterpret_cast<std::uintptr_t>(host), size_bytes}}, stream);
}
int cuMemcpyHtoDAsync_v2(CuDevicePointer device, const void* host, std::size_t size_bytes, CuStream stream) {
    ENTER("cuMemcpyHtoDAsync_v2");
    return start("cuMemcpyHtoDAsync_v2", {{reinterpret_cast<std::uintptr_t>(host), device, size_bytes}}, stream);
}
int cuMemcpyBatchAsync(CuDevicePointer* destinations, CuDevicePointer* sources, std::size_t* sizes, std::size_t count,
                       CuMemcpyAttributes*, std::size_t*, std::size_t, std::size_t*, CuStream stream) {
    ENTER("cuMemcpyBatchAsync");
    std::vector<Run> runs;
    for (std::size_t i = 0; i < count; ++i) runs.push_back({sources[i], destinations[i], sizes[i]});
    return start("cuMemcpyBatchAsync", std::move(runs), stream);
}
int cuModuleLoadData(CuModule* module, const void*) {
    ENTER("cuModuleLoadData");
    *module = reinterpret_cast<CuModule>(0x2000);
    count_alive(1);
    return 0;
}
int cuModuleUnload(CuModule) {
    count_alive(-1);
    ENTER("cuModuleUnload");
    return 0;
}
int cuModuleGetFunction(CuFunction* function, CuModule, const char*) {
    ENTER("cuModuleGetFunction");
    *function = reinterpret_cast<CuFunction>(0x3000);
    return 0;
}
// The one kernel: (Run* runs, u32 count), as cuda_kernel.h has it.
int cuLaunchKernel(CuFunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, CuStream stream,
                   void** parameters, void**) {
    ENTER("cuLaunchKernel");
    const auto* const runs = *static_cast<const Run* const*>(parameters[0]);
    const std::uint32_t count = *static_cast<const std::uint32_t*>(parameters[1]);
    return start("cuLaunchKernel", std::vector<Run>(runs, runs + count), stream);
}
int cuGetErrorName(int code, const char** name) {
    static const std::map<int, const char*> names{
        {1, "CUDA_ERROR_INVALID_VALUE"},         {2, "CUDA_ERROR_OUT_OF_MEMORY"},
        {100, "CUDA_ERROR_NO_DEVICE"},           {101, "CUDA_ERROR_INVALID_DEVICE"},
        {201, "CUDA_ERROR_INVALID_CONTEXT"},     {700, "CUDA_ERROR_ILLEGAL_ADDRESS"},
        {709, "CUDA_ERROR_CONTEXT_IS_DESTROYED"}};
    const auto found = names.find(code);
    if (found == names.end()) return kInvalidValue;
    *name = found->second;
    return 0;
}

// ---- the tests' side ------------------------------------------------------------------------------------------------
void fake_cuda_reset() {
    Fake& f = fake();
    const std::lock_guard lock(f.mutex);
    if (f.lost != 0) {  // with what belonged to it
        f.left.merge(f.host);
        f.host.clear();
        f.device.clear();
        f.alive = 0;
        ++f.context;
    }
    f.faults.clear();
    f.calls.clear();
    f.costs.clear();
    f.copies.clear();
    f.misuse.clear();
    f.delay = f.lost = 0;
    f.spoil_kernel = f.capturing = false;
    f.held = true;
}
void fake_cuda_map_device(void* memory, std::size_t size_bytes) {
    const std::lock_guard lock(fake().mutex);
    fake().device[reinterpret_cast<std::uintptr_t>(memory)] = size_bytes;
}
void fake_cuda_unmap_device(void* memory) {
    const std::lock_guard lock(fake().mutex);
    fake().device.erase(reinterpret_cast<std::uintptr_t>(memory));
}
void fake_cuda_fail(const char* call, int skip, int times, int code) {
    const std::lock_guard lock(fake().mutex);
    fake().faults[call] = {skip, times, code};
}
void fake_cuda_lose_context() {
    const std::lock_guard lock(fake().mutex);
    fake().lost = 709;
}
void fake_cuda_delay(int microseconds) {
    const std::lock_guard lock(fake().mutex);
    fake().delay = microseconds;
}
void fake_cuda_cost(const char* call, int microseconds) {
    const std::lock_guard lock(fake().mutex);
    fake().costs[call] = microseconds;
}
void fake_cuda_spoil_kernel(int spoil) {
    const std::lock_guard lock(fake().mutex);
    fake().spoil_kernel = spoil != 0;
}
void fake_cuda_capture(int capturing) {
    const std::lock_guard lock(fake().mutex);
    fake().capturing = capturing != 0;
}
void* fake_cuda_stream() {
    static auto* const stream = new Stream(0);
    return stream;
}
void fake_cuda_hold(void* stream) {
    {
        const std::lock_guard lock(fake().mutex);
        fake().held = true;
    }
    static_cast<Stream*>(stream)->add([] {
        std::unique_lock lock(fake().mutex);
        fake().changed.wait(lock, [] { return !fake().held; });
    });
}
void fake_cuda_release() {
    const std::lock_guard lock(fake().mutex);
    fake().held = false;
    fake().changed.notify_all();
}
void fake_cuda_finish(void* stream) { static_cast<Stream*>(stream)->finish(); }
const char* fake_cuda_misuse() {
    static std::string words;
    const std::lock_guard lock(fake().mutex);
    words = fake().misuse;
    return words.c_str();
}
long fake_cuda_calls(const char* call) {
    const std::lock_guard lock(fake().mutex);
    return fake().calls[call];
}
long fake_cuda_copies(int to_device, int priority) {
    const std::lock_guard lock(fake().mutex);
    return fake().copies[{to_device, priority}];
}
long fake_cuda_alive() {
    const std::lock_guard lock(fake().mutex);
    return fake().alive;
}

}  // extern "C"
