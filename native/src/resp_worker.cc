#include "resp_worker.h"

#include <algorithm>
#include <cerrno>
#include <exception>
#include <new>
#include <utility>

#include "lmcache/frame.h"

namespace lmcache {
namespace {

// Whether an exchange that failed on a connection that was used before may be tried on a new one.
bool may_be_stale(const RespFault& fault) {
    return fault.error == ECONNRESET || fault.error == EPIPE || fault.error == ECONNABORTED;
}

}  // namespace

void RespWorker::run(RespJob& job, std::size_t begin, std::size_t end) noexcept {
    const auto fail = [&](int error) {
        connections_.clear();  // answers may be outstanding
        for (std::size_t i = begin; i < end; ++i) job.results.set(i, io_failure(error));
    };
    try {
        limit_ = job.deadline;
        drop_retired();
        run_act(job, begin, end);
    } catch (const RespFault& fault) {
        fail(fault.error);
        context_.note_error(fault.what());
    } catch (const std::bad_alloc&) {
        fail(ENOMEM);
    } catch (const std::exception& error) {
        fail(EIO);
        context_.note_error(error.what());
    }
}

void RespWorker::run_act(RespJob& job, std::size_t begin, std::size_t end) {
    switch (job.act) {
        case RespAct::kScan:
        case RespAct::kSweepParts:
        case RespAct::kSweepOrphans:
            return run_page(job);
        case RespAct::kCommand:
            return run_command(job);
        default:
            return run_objects(job, begin, end);
    }
}

// ---- connections ----------------------------------------------------------------------------------------------------
RespConnection& RespWorker::connection(std::uint32_t node, RespDeadline deadline) {
    if (connections_.size() <= node) connections_.resize(node + 1);
    std::unique_ptr<RespConnection>& found = connections_[node].connection;
    const std::uint64_t tenant = context_.nodes.tenant(node);
    if (found && connections_[node].tenant == tenant) return *found;
    found.reset();
    const RespAddress address = context_.nodes.address(node);
    if (!context_.nodes.may_connect(node))
        throw RespFault(EHOSTDOWN, address.text() + " could not be reached a moment ago");
    try {
        found = std::make_unique<RespConnection>(address, context_.tls ? &*context_.tls : nullptr,
                                                 context_.options.credentials, context_.stop.get(), deadline);
    } catch (const RespFault& fault) {
        if (fault.error != ECANCELED) context_.nodes.connected(node, false);
        throw;
    }
    connections_[node].tenant = tenant;
    context_.nodes.connected(node, true);
    ++context_.connections;
    return *found;
}

void RespWorker::drop_retired() {
    const std::uint64_t assignments = context_.nodes.assignments();
    if (std::exchange(assignments_seen_, assignments) == assignments) return;
    for (std::uint32_t node = 0; node < connections_.size(); ++node) {
        const std::uint64_t tenant = context_.nodes.tenant(node);
        if (tenant == 0 || tenant != connections_[node].tenant) drop(node);
    }
}

void RespWorker::forget_fault(std::uint32_t node, const RespFault& fault) {
    if (node < connections_.size()) drop(node);
    if (fault.error != EHOSTDOWN && fault.error != ECANCELED) context_.note_error(fault.what());
}

// An error of the server; its errno.
int RespWorker::refuse(std::string_view text) {
    const int number = resp_error_number(text);
    if (number == EROFS) {
        ++context_.read_only;
        is_demoted_ = true;
    }
    context_.note_error(text);
    return number;
}

// A name may stand for another server by now.
void RespWorker::end_demoted(std::uint32_t node) {
    if (std::exchange(is_demoted_, false) && node < connections_.size()) drop(node);
}

int RespWorker::on_node(std::uint32_t node, const std::function<void(RespConnection&)>& act) {
    for (bool is_second = false;; is_second = true) {
        bool was_used = false;
        try {
            RespConnection& found = connection(node, context_.deadline());
            was_used = found.was_used;
            act(found);
            found.was_used = true;
            end_demoted(node);
            return 0;
        } catch (const RespFault& fault) {
            forget_fault(node, fault);
            if (is_second || !was_used || !may_be_stale(fault)) return fault.error;
        }
    }
}

// ---- objects --------------------------------------------------------------------------------------------------------
void RespWorker::run_objects(RespJob& job, std::size_t begin, std::size_t end) {
    splits_.clear();
    std::vector<Pending> pending, again;
    for (std::size_t i = begin; i < end; ++i) {
        if (job.act == RespAct::kStore && job.sizes[i] > context_.options.max_value_bytes)
            job.results.set(i, store_split(job, i));
        else
            pending.push_back({i, context_.nodes.node_of(name_of(job.key(i)))});
    }
    for (int hops = 0; hops <= kMaxRedirects && !pending.empty(); ++hops) {
        std::ranges::stable_sort(pending, {}, &Pending::node);
        again.clear();
        for (auto rest = std::span<const Pending>(pending); !rest.empty();) {
            const auto last = std::ranges::find_if(rest, [&](const Pending& p) { return p.node != rest[0].node; });
            const auto count = static_cast<std::size_t>(last - rest.begin());
            run_group(job, rest.first(count), again);
            rest = rest.subspan(count);
        }
        pending.swap(again);
    }
    for (const Pending& lost : pending) job.results.set(lost.index, io_failure(EAGAIN));
    const std::vector<Split> splits = std::exchange(splits_, {});  // an incomplete one is deleted, which runs objects
    if (job.act == RespAct::kDelete) return delete_parts_of(job, splits);
    if (job.act != RespAct::kLoad) return;
    for (const Split& split : splits) job.results.set(split.index, load_split(job, split));
}

// Objects of one node, in one pipeline.
void RespWorker::run_group(RespJob& job, std::span<const Pending> group, std::vector<Pending>& again) {
    const std::uint32_t node = group[0].node;
    std::size_t done = 0;
    if (is_late()) {
        for (const Pending& pending : group) job.results.set(pending.index, io_failure(ETIMEDOUT));
        return;
    }
    for (bool is_second = false;; is_second = true) {
        bool was_used = false;
        try {
            RespConnection& found = connection(node, context_.deadline());
            const RespDeadline deadline = this->deadline();
            was_used = found.was_used;
            write_group(job, group.subspan(done), found, deadline);
            for (; done < group.size(); ++done) {
                read_object(job, group[done], found, again, deadline);
                found.was_used = true;
            }
            break;
        } catch (const RespFault& fault) {
            forget_fault(node, fault);
            if (!is_second && was_used && may_be_stale(fault)) continue;
            for (; done < group.size(); ++done) job.results.set(group[done].index, io_failure(fault.error));
            break;
        }
    }
    end_demoted(node);
    if (job.act == RespAct::kSize) find_sizes_of_splits(job, group);
}

void RespWorker::write_group(RespJob& job, std::span<const Pending> group, RespConnection& connection,
                             RespDeadline deadline) {
    RespPipeline commands;
    for (const Pending& pending : group) {
        const std::string name = name_of(job.key(pending.index));
        if (pending.asking) commands.add({"ASKING"});
        switch (job.act) {
            case RespAct::kStore:
                commands.add({"SET", name}, job.memory(pending.index), job.sizes[pending.index]);
                break;
            case RespAct::kLoad:
                commands.add({"GET", name});
                break;
            case RespAct::kDelete:
                // What is stored in parts is known by its manifest; of a frame this is the beginning.
                commands.add({"GETRANGE", name, "0", kManifestEnd});
                if (pending.asking) commands.add({"ASKING"});
                commands.add({"UNLINK", name});
                break;
            default:
                commands.add({"STRLEN", name});
                break;
        }
    }
    connection.write(commands, deadline);
}

void RespWorker::read_object(RespJob& job, const Pending& pending, RespConnection& connection,
                             std::vector<Pending>& again, RespDeadline deadline) {
    if (pending.asking) (void)connection.read_reply(deadline);
    const RespHead head = connection.read_head(deadline);
    std::string error(head.is_error() ? head.text : std::string_view{});
    IoOutcome outcome;
    if (job.act == RespAct::kDelete) {
        outcome = read_deleted(pending, connection, head, error, deadline);
    } else if (!error.empty()) {
        outcome = {};
    } else if (job.act == RespAct::kStore) {
        if (head.kind != '+') not_expected();
        outcome.value = signed_bytes(job.sizes[pending.index]);
    } else if (job.act == RespAct::kSize) {
        if (head.kind != ':') not_expected();
        outcome = head.number > 0 ? IoOutcome{head.number, 0} : io_failure(ENOENT);
    } else if (head.kind != '$') {
        not_expected();
    } else if (head.is_null()) {
        outcome = io_failure(ENOENT);
    } else {
        outcome = read_frame(job, pending.index, connection, static_cast<std::uint64_t>(head.number), deadline);
    }
    if (!error.empty()) {
        if (const auto redirect = parse_resp_redirect(error)) {
            again.push_back({pending.index, context_.nodes.redirect(*redirect, pending.node), redirect->is_ask});
            return;
        }
        outcome = io_failure(refuse(error));
        // Something else has this name. It has no frame, and a store replaces it.
        if (outcome.error == EPROTOTYPE) outcome.error = job.act == RespAct::kLoad ? EBADMSG : ENOENT;
    }
    job.results.set(pending.index, outcome);
}

IoOutcome RespWorker::read_frame(RespJob& job, std::size_t index, RespConnection& connection, std::uint64_t size,
                                 RespDeadline deadline) {
    if (size > kMaxValueBytes) throw RespFault(EPROTO, "the server sends a larger value than any object is");
    if (size == RespManifest::kBytes) {
        RespManifest::Image image;
        connection.read_bulk(image, size, deadline);
        const auto manifest = RespManifest::parse(image);
        if (!manifest) return io_failure(EBADMSG);
        splits_.push_back({index, *manifest});
        return {};
    }
    connection.read_bulk({job.memory(index), job.sizes[index]}, size, deadline);
    return verify(job, index, size) ? IoOutcome{signed_bytes(size), 0} : io_failure(EBADMSG);
}

bool RespWorker::verify(const RespJob& job, std::size_t index, std::uint64_t size) const {
    const ObjectKeyView key = job.key(index);
    return frame_verify(job.memory(index), std::min(size, job.sizes[index]), key.first<kDigestBytes>(),
                        key.last<kChunkHashBytes>()) == FrameFault::kNone;
}

// `error` becomes that of the UNLINK: another kind of value has no beginning to get, and is deleted all the same.
IoOutcome RespWorker::read_deleted(const Pending& pending, RespConnection& connection, const RespHead& head,
                                   std::string& error, RespDeadline deadline) {
    if (!head.is_error()) {
        if (head.kind != '$' || head.number > signed_bytes(RespManifest::kBytes)) not_expected();
        const std::string beginning =
            head.is_null() ? "" : connection.read_text(static_cast<std::uint64_t>(head.number), deadline);
        if (const auto manifest = RespManifest::parse(std::as_bytes(std::span(beginning))))
            splits_.push_back({pending.index, *manifest});
    }
    if (pending.asking) (void)connection.read_reply(deadline);
    const RespHead unlinked = connection.read_head(deadline);
    error = unlinked.is_error() ? unlinked.text : std::string_view{};
    if (error.empty() && unlinked.kind != ':') not_expected();
    return {unlinked.number > 0 ? 1 : 0, 0};
}

}  // namespace lmcache
