// Frames to and from Redis or Valkey, and every other command that an adapter needs, on native threads with a
// connection each to each server.
//
// Invariants:
// - A frame is received straight into the caller's memory, never beyond what it has, and the memory is touched until
//   the job is reported and never afterwards.
// - A frame that was loaded is the whole frame of its key: it is verified on the thread that received it.
// - An object is visible whole or not at all. One larger than a value may be is stored in parts under names that no
//   other write has, then a manifest under its own name: parts of two writes are never mixed.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "lmcache/job_queue.h"
#include "lmcache/resp_connection.h"
#include "lmcache/resp_names.h"
#include "lmcache/resp_nodes.h"
#include "lmcache/transfer_loop.h"

namespace lmcache {

struct RespClientOptions {
    unsigned threads = 8;
    std::string prefix;
    RespCredentials credentials;
    TlsOptions tls;
    std::chrono::milliseconds timeout{30'000};  // of one exchange, of connecting, and of a whole store or load
    std::uint64_t max_value_bytes = 512 << 20;  // a larger object is stored in parts
};

enum class RespAct : std::uint8_t { kStore, kLoad, kSize, kDelete, kScan, kSweepParts, kSweepOrphans, kCommand };

// Objects that a SCAN found, in columns.
struct RespPage {
    std::uint64_t cursor = 0;  // 0: there are no more
    std::vector<std::byte> keys;
    std::vector<std::uint64_t> sizes;
    std::vector<std::uint64_t> idle_seconds;  // since their last use
};

struct RespResults : IoResults {
    std::optional<RespPage> page;
    std::optional<RespReply> reply;
};

struct RespJob : Job<RespResults> {
    RespAct act = RespAct::kSize;
    std::vector<std::byte> keys;                  // kObjectKeyBytes an object
    std::vector<std::uint64_t> addresses, sizes;  // of stores and loads
    // After it no frame of a store or load moves, as nobody waits for it.
    RespDeadline deadline = RespDeadline::max();
    std::vector<std::string> arguments;  // of a command
    // Where a command or a scan goes: a position among the addresses assigned last; without: by the command's first
    // argument.
    std::optional<std::uint32_t> node;
    std::uint64_t cursor = 0;  // of scans

    ObjectKeyView key(std::size_t index) const {
        return ObjectKeyView(keys.data() + index * kObjectKeyBytes, kObjectKeyBytes);
    }
    std::byte* memory(std::size_t index) const { return reinterpret_cast<std::byte*>(addresses[index]); }
};

// What the threads of a client share.
struct RespContext {
    explicit RespContext(RespClientOptions given);

    RespDeadline deadline() const { return std::chrono::steady_clock::now() + options.timeout; }
    void note_error(std::string_view text);

    const RespClientOptions options;
    std::optional<TlsContext> tls;
    RespNodes nodes;
    EventFd stop;
    std::atomic<std::uint64_t> connections{0};  // made so far
    std::atomic<std::uint64_t> read_only{0};    // answers that a server takes no writes

    Mutex mutex;
    std::string last_error LMCACHE_GUARDED_BY(mutex);
};

// All methods are thread-safe. A job's results have for each object a value and an errno, -1 and the errno where it
// failed: ENOENT, ENOSPC, EBADMSG (certainly not the frame of its key), EACCES, EROFS, EAGAIN, EHOSTDOWN ... Submitting
// after close(), or lists of different lengths, throws std::invalid_argument.
class RespClient {
public:
    static constexpr unsigned kMaxThreads = 1024;
    static constexpr std::size_t kMaxJobObjects = 65536;
    using Completion = JobQueue<RespJob>::Completion;

    // Does not connect. Throws TlsError, std::invalid_argument.
    explicit RespClient(RespClientOptions options);

    RespNodes& nodes() { return context_.nodes; }
    int event_fd() const { return queue_.event_fd(); }

    // `keys`: of each object the digest of its namespace and its chunk hash. Values: bytes.
    std::uint64_t submit_store(std::vector<std::byte> keys, std::vector<std::uint64_t> addresses,
                               std::vector<std::uint64_t> sizes);
    // A frame may be shorter than its memory, and longer by padding, which is dropped.
    std::uint64_t submit_load(std::vector<std::byte> keys, std::vector<std::uint64_t> addresses,
                              std::vector<std::uint64_t> capacities);
    std::uint64_t submit_sizes(std::vector<std::byte> keys);
    // Values: how many there were, 0 or 1.
    std::uint64_t submit_delete(std::vector<std::byte> keys);

    // Some objects of one server. Their sizes and last uses are read without changing when they were used.
    std::uint64_t submit_scan(std::uint32_t node, std::uint64_t cursor);
    // Deletes some parts of objects, wherever they belong to. The value is how many.
    std::uint64_t submit_sweep_parts(std::uint32_t node, std::uint64_t cursor);
    // Deletes some parts that belong to no object and do not expire.
    std::uint64_t submit_sweep_orphans(std::uint32_t node, std::uint64_t cursor);
    // Any command whose reply is small and which may be sent twice.
    std::uint64_t submit_command(std::vector<std::string> arguments, std::optional<std::uint32_t> node);

    std::vector<Completion> drain() { return queue_.drain(); }
    std::optional<RespResults> wait(std::uint64_t job, double timeout_seconds) {
        return queue_.wait(job, timeout_seconds);
    }

    // What a server or a connection said last.
    std::string last_error();
    // Counts failed attempts to connect, redirects and refused writes: what servers there are may have changed.
    std::uint64_t changes() { return context_.nodes.changes() + context_.read_only; }
    std::uint64_t connections() const { return context_.connections; }

    // Ends what is under way (ECANCELED) and stops the threads. Results stay available to drain(). Idempotent.
    void close() {
        context_.stop.signal();
        queue_.close();
    }

private:
    std::uint64_t submit(std::shared_ptr<RespJob> job, std::size_t elements);
    std::uint64_t submit_objects(RespAct act, std::vector<std::byte> keys, std::vector<std::uint64_t> addresses,
                                 std::vector<std::uint64_t> sizes);
    std::uint64_t submit_page(RespAct act, std::uint32_t node, std::uint64_t cursor);

    RespContext context_;
    JobQueue<RespJob> queue_;
};

}  // namespace lmcache
