// One thread of a RespClient: its connections, and what it does for the objects of a job.
#pragma once

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "lmcache/resp_client.h"

namespace lmcache {

inline constexpr int kMaxRedirects = 5;
inline constexpr std::uint64_t kMaxValueBytes = RespManifest::kMaxBytes;  // beyond: not what anybody stored
inline constexpr std::string_view kManifestEnd = "63";                    // of a GETRANGE
static_assert(RespManifest::kBytes == 64);

inline std::int64_t signed_bytes(std::uint64_t bytes) { return static_cast<std::int64_t>(bytes); }

[[noreturn]] inline void not_expected() { throw RespFault(EPROTO, "the server answers with another kind of reply"); }

// Belongs to one thread. resp_worker_parts.cc has what it does for objects in parts, resp_worker_pages.cc what for
// pages.
class RespWorker {
public:
    explicit RespWorker(RespContext& context) : context_(context) {}

    // The objects from `begin` to `end` of a job; all of them have a result afterwards, whatever the servers answer.
    void run(RespJob& job, std::size_t begin, std::size_t end) noexcept;

private:
    // An object whose answer is outstanding, and who is to be asked.
    struct Pending {
        std::size_t index;
        std::uint32_t node;
        bool asking = false;  // after an ASK
    };
    // An object that is stored in parts, or is to be.
    struct Split {
        std::size_t index;
        RespManifest manifest;
    };
    using Write = std::function<void(RespPipeline&)>;
    // Reads the rest of a reply that is no error; returns an errno.
    using Read = std::function<int(RespConnection&, const RespHead&)>;
    // The same of one of several names, for reads by its position.
    using WriteOne = std::function<void(RespPipeline&, const std::string&)>;
    using ReadOne = std::function<int(RespConnection&, const RespHead&, std::size_t)>;

    struct Link {
        std::unique_ptr<RespConnection> connection;
        std::uint64_t tenant = 0;  // to whom
    };

    void run_act(RespJob& job, std::size_t begin, std::size_t end);
    // The deadline of an exchange that begins now.
    RespDeadline deadline() const { return std::min(context_.deadline(), limit_); }
    bool is_late() const { return std::chrono::steady_clock::now() >= limit_; }
    RespConnection& connection(std::uint32_t node, RespDeadline deadline);
    void drop(std::uint32_t node) { connections_[node].connection.reset(); }
    void drop_retired();
    void forget_fault(std::uint32_t node, const RespFault& fault);
    int refuse(std::string_view text);
    void end_demoted(std::uint32_t node);

    void run_objects(RespJob& job, std::size_t begin, std::size_t end);
    void run_group(RespJob& job, std::span<const Pending> group, std::vector<Pending>& again);
    void write_group(RespJob& job, std::span<const Pending> group, RespConnection& connection, RespDeadline deadline);
    void read_object(RespJob& job, const Pending& pending, RespConnection& connection, std::vector<Pending>& again,
                     RespDeadline deadline);
    IoOutcome read_frame(RespJob& job, std::size_t index, RespConnection& connection, std::uint64_t size,
                         RespDeadline deadline);
    IoOutcome read_deleted(const Pending& pending, RespConnection& connection, const RespHead& head,
                           std::string& redirected, RespDeadline deadline);
    bool verify(const RespJob& job, std::size_t index, std::uint64_t size) const;

    int exchange(std::string_view name, const Write& write, const Read& read);
    std::vector<int> exchange_all(std::span<const std::string> names, const WriteOne& write, const ReadOne& read);
    void find_sizes_of_splits(RespJob& job, std::span<const Pending> group);
    IoOutcome store_split(const RespJob& job, std::size_t index);
    int store_parts(const RespJob& job, std::size_t index, const RespManifest& manifest);
    int publish(ObjectKeyView key, const RespManifest& manifest, bool& is_ours);
    int find_manifest(std::string_view name, std::optional<RespManifest>& found);
    std::vector<int> find_manifests(std::span<const std::string> names,
                                    std::vector<std::optional<RespManifest>>& found);
    std::optional<RespManifest> read_manifest(RespConnection& connection, const RespHead& head);
    std::vector<std::string> names_of_parts(ObjectKeyView key, const RespManifest& manifest, std::uint32_t parts) const;
    IoOutcome load_split(RespJob& job, const Split& split);
    void delete_parts(ObjectKeyView key, const RespManifest& manifest, std::uint32_t parts);
    void delete_parts_of(const RespJob& job, std::span<const Split> splits);
    int delete_object(ObjectKeyView key);
    std::vector<int> unlink_all(std::span<const std::string> names);

    void run_page(RespJob& job);
    RespPage read_page(const RespJob& job, RespConnection& connection, std::vector<std::string>& names);
    void keep_unexpiring(RespConnection& connection, std::vector<std::string>& names);
    bool keep_orphans(std::vector<std::string>& names);
    void describe(RespPage& page, RespConnection& connection, std::span<const std::string> names);
    void run_command(RespJob& job);
    // On a connection to that node, again on a new one where the first had been closed. An errno.
    int on_node(std::uint32_t node, const std::function<void(RespConnection&)>& act);

    std::string name_of(ObjectKeyView key) const { return resp_object_name(context_.options.prefix, key); }

    RespContext& context_;
    std::vector<Link> connections_;  // by node
    std::uint64_t assignments_seen_ = 0;
    std::vector<Split> splits_;                 // of the objects being run
    RespDeadline limit_ = RespDeadline::max();  // of the job
    bool is_demoted_ = false;                   // the server that is being asked takes no writes now
};

}  // namespace lmcache
