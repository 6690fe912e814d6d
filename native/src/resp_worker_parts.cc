// Objects that are stored in parts.
#include <algorithm>
#include <cerrno>
#include <functional>
#include <iterator>
#include <utility>

#include "resp_worker.h"

namespace lmcache {
namespace {

// While it lives nothing is too late: what has no payload and keeps the server in order is worth an exchange.
class Unlimited {
public:
    explicit Unlimited(RespDeadline& limit) : limit_(limit), before_(std::exchange(limit, RespDeadline::max())) {}
    ~Unlimited() { limit_ = before_; }
    Unlimited(const Unlimited&) = delete;
    Unlimited& operator=(const Unlimited&) = delete;

private:
    RespDeadline& limit_;
    const RespDeadline before_;
};

}  // namespace

// One command to whoever has the name. Returns an errno.
int RespWorker::exchange(std::string_view name, const Write& write, const Read& read) {
    std::uint32_t node = context_.nodes.node_of(name);
    bool asking = false;
    for (int hops = 0; hops <= kMaxRedirects; ++hops) {
        if (is_late()) return ETIMEDOUT;
        int error = 0;
        std::string refused;
        const int fault = on_node(node, [&](RespConnection& connection) {
            const RespDeadline deadline = this->deadline();
            RespPipeline commands;
            if (asking) commands.add({"ASKING"});
            write(commands);
            connection.write(commands, deadline);
            if (asking) (void)connection.read_reply(deadline);
            const RespHead head = connection.read_head(deadline);
            if (head.is_error())
                refused = head.text;
            else
                error = read(connection, head);
        });
        if (fault != 0 || refused.empty()) return fault != 0 ? fault : error;
        const auto redirect = parse_resp_redirect(refused);
        if (!redirect) {
            const int number = refuse(refused);
            end_demoted(node);
            return number;
        }
        node = context_.nodes.redirect(*redirect, node);
        asking = redirect->is_ask;
    }
    return EAGAIN;
}

// A command for each name, in one pipeline to each node. Those that are sent elsewhere go one by one. An errno each.
std::vector<int> RespWorker::exchange_all(std::span<const std::string> names, const WriteOne& write,
                                          const ReadOne& read) {
    std::vector<int> errors(names.size(), 0);
    std::vector<std::size_t> redirected;
    std::vector<Pending> pending;
    for (std::size_t i = 0; i < names.size(); ++i) pending.push_back({i, context_.nodes.node_of(names[i])});
    std::ranges::stable_sort(pending, {}, &Pending::node);
    for (auto rest = std::span<const Pending>(pending); !rest.empty();) {
        const std::uint32_t node = rest[0].node;
        const auto last = std::ranges::find_if(rest, [&](const Pending& p) { return p.node != node; });
        auto group = rest.first(static_cast<std::size_t>(last - rest.begin()));
        rest = rest.subspan(group.size());
        const int fault = is_late() ? ETIMEDOUT : on_node(node, [&](RespConnection& connection) {
            const RespDeadline deadline = this->deadline();
            RespPipeline commands;
            for (const Pending& each : group) write(commands, names[each.index]);
            connection.write(commands, deadline);
            for (; !group.empty(); group = group.subspan(1)) {
                const std::size_t index = group[0].index;
                const RespHead head = connection.read_head(deadline);
                if (!head.is_error())
                    errors[index] = read(connection, head, index);
                else if (parse_resp_redirect(head.text))
                    redirected.push_back(index);
                else
                    errors[index] = refuse(head.text);
            }
        });
        for (const Pending& each : group) errors[each.index] = fault;  // those without an answer
    }
    for (const std::size_t index : redirected)
        errors[index] = exchange(
            names[index], [&](RespPipeline& commands) { write(commands, names[index]); },
            [&](RespConnection& connection, const RespHead& head) { return read(connection, head, index); });
    return errors;
}

std::optional<RespManifest> RespWorker::read_manifest(RespConnection& connection, const RespHead& head) {
    if (head.kind != '$' || head.number > signed_bytes(RespManifest::kBytes)) not_expected();
    const std::string image =
        head.is_null() ? "" : connection.read_text(static_cast<std::uint64_t>(head.number), deadline());
    return RespManifest::parse(std::as_bytes(std::span(image)));
}

// What stands under the name of an object: nothing, or something else, is no manifest. An errno.
int RespWorker::find_manifest(std::string_view name, std::optional<RespManifest>& found) {
    return exchange(
        name, [&](RespPipeline& commands) { commands.add({"GETRANGE", name, "0", kManifestEnd}); },
        [&](RespConnection& connection, const RespHead& head) {
            found = read_manifest(connection, head);
            return 0;
        });
}

// Does what find_manifest does for each name. Returns an errno each.
std::vector<int> RespWorker::find_manifests(std::span<const std::string> names,
                                            std::vector<std::optional<RespManifest>>& found) {
    found.assign(names.size(), std::nullopt);
    return exchange_all(
        names,
        [](RespPipeline& commands, const std::string& name) { commands.add({"GETRANGE", name, "0", kManifestEnd}); },
        [&](RespConnection& connection, const RespHead& head, std::size_t index) {
            found[index] = read_manifest(connection, head);
            return 0;
        });
}

void RespWorker::find_sizes_of_splits(RespJob& job, std::span<const Pending> group) {
    std::vector<std::size_t> indexes;
    std::vector<std::string> names;
    for (const Pending& each : group)
        if (job.results.values[each.index] == signed_bytes(RespManifest::kBytes)) {
            indexes.push_back(each.index);
            names.push_back(name_of(job.key(each.index)));
        }
    std::vector<std::optional<RespManifest>> manifests;
    const std::vector<int> errors = find_manifests(names, manifests);
    for (std::size_t i = 0; i < indexes.size(); ++i) {
        const int error = errors[i] == 0 && !manifests[i] ? ENOENT : errors[i];
        job.results.set(indexes[i],
                        error != 0 ? io_failure(error) : IoOutcome{signed_bytes(manifests[i]->total_bytes), 0});
    }
}

IoOutcome RespWorker::store_split(const RespJob& job, std::size_t index) {
    const ObjectKeyView key = job.key(index);
    const std::uint64_t part_bytes = context_.options.max_value_bytes;
    if (job.sizes[index] / part_bytes >= RespManifest::kMaxParts) return io_failure(EFBIG);
    const RespManifest manifest = RespManifest::make(job.sizes[index], part_bytes);
    if (const int error = store_parts(job, index, manifest); error != 0) return io_failure(error);
    const Unlimited unlimited(limit_);
    bool is_ours = false;
    const int error = publish(key, manifest, is_ours);
    if (error != 0 || !is_ours) {
        delete_parts(key, manifest, manifest.parts);
        return error != 0 ? io_failure(error) : IoOutcome{signed_bytes(job.sizes[index]), 0};
    }
    // A writer that dies before this leaves parts that expire.
    const std::vector<int> kept = exchange_all(
        names_of_parts(key, manifest, manifest.parts),
        [](RespPipeline& commands, const std::string& name) { commands.add({"PERSIST", name}); },
        [](RespConnection&, const RespHead& head, std::size_t) { return head.kind == ':' ? 0 : EPROTO; });
    if (const auto failed = std::ranges::find_if(kept, std::identity{}); failed != kept.end())
        return io_failure(*failed);
    return {signed_bytes(job.sizes[index]), 0};
}

// Makes the object visible, unless another write has done it. An errno.
int RespWorker::publish(ObjectKeyView key, const RespManifest& manifest, bool& is_ours) {
    const RespManifest::Image image = manifest.image();
    const std::string_view content(reinterpret_cast<const char*>(image.data()), image.size());
    const std::string name = name_of(key);
    const auto read = [&](RespConnection&, const RespHead& head) {
        if (head.kind != '+' && !head.is_null()) not_expected();
        is_ours = !head.is_null();
        return 0;
    };
    const int error = exchange(name, [&](RespPipeline& commands) { commands.add({"SET", name, content, "NX"}); }, read);
    if (error != 0 || is_ours) return error;
    std::optional<RespManifest> found;
    const int unreadable = find_manifest(name, found);
    if (unreadable != 0 && unreadable != EPROTOTYPE) return unreadable;
    if (found && found->total_bytes == manifest.total_bytes) {
        is_ours = found->write_id == manifest.write_id;  // the command was sent twice, because its answer was lost
        return 0;
    }
    // What nobody can load must not stand in the way.
    const int refused = exchange(name, [&](RespPipeline& commands) { commands.add({"SET", name, content}); }, read);
    if (refused == 0 && found) delete_parts(key, *found, found->parts);
    return refused;
}

int RespWorker::store_parts(const RespJob& job, std::size_t index, const RespManifest& manifest) {
    constexpr std::string_view kUnfinishedSeconds = "3600";
    const ObjectKeyView key = job.key(index);
    for (std::uint32_t part = 0; part < manifest.parts; ++part) {
        const std::string name = manifest.part_name(context_.options.prefix, key, part);
        const std::byte* const memory = job.memory(index) + manifest.part_bytes * part;
        // SETEX: its value is the last argument.
        const int error = exchange(
            name,
            [&](RespPipeline& commands) {
                commands.add({"SETEX", name, kUnfinishedSeconds}, memory, manifest.bytes_of(part));
            },
            [](RespConnection&, const RespHead& head) { return head.kind == '+' ? 0 : EPROTO; });
        if (error != 0) {
            delete_parts(key, manifest, part);
            return error;
        }
    }
    return 0;
}

IoOutcome RespWorker::load_split(RespJob& job, const Split& split) {
    const auto& [index, manifest] = split;
    const ObjectKeyView key = job.key(index);
    for (std::uint32_t part = 0; part < manifest.parts; ++part) {
        const std::uint64_t offset = manifest.part_bytes * part;
        if (offset >= job.sizes[index]) break;  // padding, which there is no memory for
        const std::span<std::byte> memory(job.memory(index) + offset,
                                          std::min(manifest.bytes_of(part), job.sizes[index] - offset));
        const std::string name = manifest.part_name(context_.options.prefix, key, part);
        const int error = exchange(
            name, [&](RespPipeline& commands) { commands.add({"GET", name}); },
            [&](RespConnection& connection, const RespHead& head) {
                if (head.kind != '$') not_expected();
                if (head.is_null()) return ENOENT;
                const auto size = static_cast<std::uint64_t>(head.number);
                if (size > kMaxValueBytes) throw RespFault(EPROTO, "the server sends a larger part than any object is");
                connection.read_bulk(memory, size, deadline());
                return size == manifest.bytes_of(part) ? 0 : EBADMSG;
            });
        if (error == ENOENT) (void)delete_object(key);  // the server dropped a part: nobody can have the rest
        if (error != 0) return io_failure(error);
    }
    return verify(job, index, manifest.total_bytes) ? IoOutcome{signed_bytes(manifest.total_bytes), 0}
                                                    : io_failure(EBADMSG);
}

std::vector<std::string> RespWorker::names_of_parts(ObjectKeyView key, const RespManifest& manifest,
                                                    std::uint32_t parts) const {
    std::vector<std::string> names;
    for (std::uint32_t part = 0; part < parts; ++part)
        names.push_back(manifest.part_name(context_.options.prefix, key, part));
    return names;
}

void RespWorker::delete_parts(ObjectKeyView key, const RespManifest& manifest, std::uint32_t parts) {
    const Unlimited unlimited(limit_);
    (void)unlink_all(names_of_parts(key, manifest, parts));
}

// Those of many small objects in few pipelines.
void RespWorker::delete_parts_of(const RespJob& job, std::span<const Split> splits) {
    const Unlimited unlimited(limit_);
    std::vector<std::string> names;
    for (const auto& [index, manifest] : splits) {
        std::ranges::move(names_of_parts(job.key(index), manifest, manifest.parts), std::back_inserter(names));
        if (names.size() < RespManifest::kMaxParts) continue;
        (void)unlink_all(names);
        names.clear();
    }
    (void)unlink_all(names);
}

// An errno each.
std::vector<int> RespWorker::unlink_all(std::span<const std::string> names) {
    return exchange_all(
        names, [](RespPipeline& commands, const std::string& name) { commands.add({"UNLINK", name}); },
        [](RespConnection&, const RespHead& head, std::size_t) { return head.kind == ':' ? 0 : EPROTO; });
}

int RespWorker::delete_object(ObjectKeyView key) {
    RespJob job;
    job.act = RespAct::kDelete;
    job.keys.assign(key.begin(), key.end());
    job.results.resize(1);
    run_objects(job, 0, 1);
    return job.results.errors[0];
}

}  // namespace lmcache
