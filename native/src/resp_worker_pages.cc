// Pages of names, and commands.
#include <algorithm>
#include <cerrno>
#include <charconv>
#include <utility>

#include "resp_worker.h"

namespace lmcache {

namespace {

constexpr std::int64_t kMostIdleSeconds = std::int64_t{1} << 32;  // no server is older

}  // namespace

void RespWorker::run_page(RespJob& job) {
    std::vector<std::string> names;
    RespPage page;
    const auto node = context_.nodes.assigned(*job.node);
    if (!node) return job.results.set(0, io_failure(EHOSTUNREACH));
    limit_ = context_.deadline();  // of the whole page: lookups wait for this thread
    const int fault = on_node(*node, [&](RespConnection& connection) {
        names.clear();
        page = read_page(job, connection, names);
        if (job.act == RespAct::kScan) describe(page, connection, names);
        if (job.act == RespAct::kSweepOrphans) keep_unexpiring(connection, names);
    });
    if (fault != 0) return job.results.set(0, io_failure(fault));
    auto count = static_cast<std::int64_t>(names.size());
    if (job.act != RespAct::kScan) {
        if (job.act == RespAct::kSweepOrphans && !keep_orphans(names)) return job.results.set(0, io_failure(ETIMEDOUT));
        const std::vector<int> errors = unlink_all(names);
        if (std::ranges::count(errors, ETIMEDOUT) != 0) return job.results.set(0, io_failure(ETIMEDOUT));
        count = std::ranges::count(errors, 0);
    }
    job.results.set(0, {count, 0});
    job.results.page = std::move(page);
}

RespPage RespWorker::read_page(const RespJob& job, RespConnection& connection, std::vector<std::string>& names) {
    constexpr std::string_view kCount = "1000";
    const std::string& prefix = context_.options.prefix;
    const bool of_objects = job.act == RespAct::kScan;  // else of parts
    RespPipeline commands;
    commands.add({"SCAN", std::to_string(job.cursor), "MATCH",
                  of_objects ? resp_object_pattern(prefix) : resp_part_pattern(prefix), "COUNT", kCount});
    const RespDeadline deadline = this->deadline();
    connection.write(commands, deadline);
    const RespReply reply = connection.read_reply(deadline);
    if (reply.is_error()) throw RespFault(refuse(reply.text), reply.text);
    if (reply.items.size() != 2) not_expected();
    RespPage page;
    const std::string& cursor = reply.items[0].text;
    const auto [end, error] = std::from_chars(cursor.data(), cursor.data() + cursor.size(), page.cursor);
    if (error != std::errc{} || end != cursor.data() + cursor.size()) not_expected();
    for (const RespReply& item : reply.items[1].items) {
        const bool is_ours = of_objects ? parse_resp_object_name(prefix, item.text).has_value()
                                        : parse_resp_part_name(prefix, item.text).has_value();
        if (is_ours) names.push_back(item.text);
    }
    return page;
}

// Parts whose write has ended, or is said to. Where this user may not ask, that is none.
void RespWorker::keep_unexpiring(RespConnection& connection, std::vector<std::string>& names) {
    RespPipeline commands;
    for (const std::string& name : names) commands.add({"TTL", name});
    const RespDeadline deadline = this->deadline();
    connection.write(commands, deadline);
    std::vector<std::string> kept;
    for (std::string& name : names) {
        const RespReply seconds = connection.read_reply(deadline);
        if (seconds.kind == RespReply::Kind::kNumber && seconds.number == -1) kept.push_back(std::move(name));
    }
    names = std::move(kept);
}

// Of parts that do not expire: that is said of them after their manifest was written, so that one which is not there
// has been deleted or written over. False: too late to tell.
bool RespWorker::keep_orphans(std::vector<std::string>& names) {
    std::vector<std::string> objects;
    for (const std::string& name : names)
        objects.push_back(name_of(parse_resp_part_name(context_.options.prefix, name)->key));
    std::vector<std::optional<RespManifest>> manifests;
    const std::vector<int> errors = find_manifests(objects, manifests);
    if (std::ranges::count(errors, ETIMEDOUT) != 0) return false;
    std::vector<std::string> kept;
    for (std::size_t i = 0; i < names.size(); ++i) {
        const auto part = parse_resp_part_name(context_.options.prefix, names[i]);
        const bool is_orphan = errors[i] == 0 && (!manifests[i] || manifests[i]->write_id != part->write_id);
        if (is_orphan) kept.push_back(std::move(names[i]));
    }
    names = std::move(kept);
    return true;
}

// Size and last use of each; those that are gone meanwhile are left out.
void RespWorker::describe(RespPage& page, RespConnection& connection, std::span<const std::string> names) {
    RespPipeline commands;
    for (const std::string& name : names) {
        commands.add({"OBJECT", "IDLETIME", name});  // before what may count as a use
        commands.add({"STRLEN", name});
        commands.add({"GETRANGE", name, "0", kManifestEnd});
    }
    const RespDeadline deadline = this->deadline();
    connection.write(commands, deadline);
    for (const std::string& name : names) {
        const RespReply idle = connection.read_reply(deadline);  // an error under a policy that counts uses
        const RespReply length = connection.read_reply(deadline);
        const RespReply beginning = connection.read_reply(deadline);
        if (length.kind != RespReply::Kind::kNumber || length.number <= 0) continue;
        if (length.number > signed_bytes(kMaxValueBytes)) continue;
        auto size = static_cast<std::uint64_t>(length.number);
        if (size == RespManifest::kBytes) {
            const auto manifest = RespManifest::parse(std::as_bytes(std::span(beginning.text)));
            if (manifest) size = manifest->total_bytes;
        }
        const auto key = parse_resp_object_name(context_.options.prefix, name);
        page.keys.insert(page.keys.end(), key->begin(), key->end());
        page.sizes.push_back(size);
        page.idle_seconds.push_back(
            idle.kind == RespReply::Kind::kNumber
                ? static_cast<std::uint64_t>(std::clamp<std::int64_t>(idle.number, 0, kMostIdleSeconds))
                : 0);
    }
}

void RespWorker::run_command(RespJob& job) {
    const auto ask = [&](RespConnection& connection) {
        RespPipeline commands;
        commands.add(job.arguments);
        const RespDeadline deadline = context_.deadline();
        connection.write(commands, deadline);
        job.results.reply = connection.read_reply(deadline);
    };
    const auto first = job.node ? context_.nodes.assigned(*job.node) : context_.nodes.node_of(job.arguments[1]);
    if (!first) return job.results.set(0, io_failure(EHOSTUNREACH));
    std::uint32_t node = *first;
    int error = on_node(node, ask);
    for (int hops = 0; error == 0 && hops < kMaxRedirects && job.results.reply->is_error(); ++hops) {
        const auto redirect = parse_resp_redirect(job.results.reply->text);
        if (!redirect || redirect->is_ask) break;
        node = context_.nodes.redirect(*redirect, node);
        error = on_node(node, ask);
    }
    if (error != 0) job.results.set(0, io_failure(error));
}

}  // namespace lmcache
