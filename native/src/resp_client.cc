#include "lmcache/resp_client.h"

#include <algorithm>
#include <numeric>
#include <stdexcept>
#include <utility>

#include "lmcache/limits.h"
#include "resp_worker.h"

namespace lmcache {
namespace {

constexpr std::uint64_t kPieceBytes = 256 << 10;  // small objects are asked for several at a time
constexpr std::size_t kPieceObjects = 512;        // of what moves no frames
constexpr std::size_t kMaxErrorCharacters = 300;

RespClientOptions checked(RespClientOptions options) {
    if (options.threads == 0 || options.threads > RespClient::kMaxThreads)
        throw std::invalid_argument("threads must be between 1 and " + std::to_string(RespClient::kMaxThreads));
    if (options.max_value_bytes <= RespManifest::kBytes)
        throw std::invalid_argument("max_value_bytes must be above " + std::to_string(RespManifest::kBytes));
    return options;
}

}  // namespace

RespContext::RespContext(RespClientOptions given) : options(checked(std::move(given))) {
    if (options.tls.enabled) tls.emplace(options.tls);
}

void RespContext::note_error(std::string_view text) {
    MutexLock lock(mutex);
    last_error = text.substr(0, kMaxErrorCharacters);
}

RespClient::RespClient(RespClientOptions options) : context_(std::move(options)), queue_(kMaxIoJobs) {
    queue_.start_threads(context_.options.threads, "lmcache-resp", [this] {
        RespWorker worker(context_);
        JobQueue<RespJob>::Piece piece;
        while (queue_.take(piece)) {
            worker.run(*piece.job, piece.begin, piece.end);
            queue_.ended(*piece.job, piece.end - piece.begin);
        }
    });
}

std::uint64_t RespClient::submit(std::shared_ptr<RespJob> job, std::size_t elements) {
    job->elements = elements;
    job->results.resize(elements);
    // What somebody waits for goes before what is stored in the background.
    const bool is_awaited = job->act == RespAct::kLoad || job->act == RespAct::kSize || job->act == RespAct::kCommand;
    job->lane = is_awaited ? Lane::kFirst : Lane::kNormal;
    return queue_.submit(std::move(job));
}

std::uint64_t RespClient::submit_objects(RespAct act, std::vector<std::byte> keys, std::vector<std::uint64_t> addresses,
                                         std::vector<std::uint64_t> sizes) {
    const std::size_t count = keys.size() / kObjectKeyBytes;
    if (keys.size() % kObjectKeyBytes != 0)
        throw std::invalid_argument("keys must hold a namespace digest and a chunk hash for each object");
    if (count > kMaxJobObjects)
        throw std::invalid_argument("a job has at most " + std::to_string(kMaxJobObjects) + " objects");
    auto job = std::make_shared<RespJob>();
    job->act = act;
    if (act == RespAct::kStore || act == RespAct::kLoad) {
        if (addresses.size() != count || sizes.size() != count)
            throw std::invalid_argument("keys, addresses and sizes must have the same length");
        const std::uint64_t total = std::accumulate(sizes.begin(), sizes.end(), std::uint64_t{1});
        job->piece = std::clamp<std::size_t>(kPieceBytes * count / total, 1, kPieceObjects);
        job->deadline = context_.deadline();
    } else {
        job->piece = kPieceObjects;
    }
    job->keys = std::move(keys);
    job->addresses = std::move(addresses);
    job->sizes = std::move(sizes);
    return submit(std::move(job), count);
}

std::uint64_t RespClient::submit_store(std::vector<std::byte> keys, std::vector<std::uint64_t> addresses,
                                       std::vector<std::uint64_t> sizes) {
    return submit_objects(RespAct::kStore, std::move(keys), std::move(addresses), std::move(sizes));
}

std::uint64_t RespClient::submit_load(std::vector<std::byte> keys, std::vector<std::uint64_t> addresses,
                                      std::vector<std::uint64_t> capacities) {
    return submit_objects(RespAct::kLoad, std::move(keys), std::move(addresses), std::move(capacities));
}

std::uint64_t RespClient::submit_sizes(std::vector<std::byte> keys) {
    return submit_objects(RespAct::kSize, std::move(keys), {}, {});
}

std::uint64_t RespClient::submit_delete(std::vector<std::byte> keys) {
    return submit_objects(RespAct::kDelete, std::move(keys), {}, {});
}

std::uint64_t RespClient::submit_page(RespAct act, std::uint32_t node, std::uint64_t cursor) {
    auto job = std::make_shared<RespJob>();
    job->act = act;
    job->node = node;
    job->cursor = cursor;
    return submit(std::move(job), 1);
}

std::uint64_t RespClient::submit_scan(std::uint32_t node, std::uint64_t cursor) {
    return submit_page(RespAct::kScan, node, cursor);
}

std::uint64_t RespClient::submit_sweep_parts(std::uint32_t node, std::uint64_t cursor) {
    return submit_page(RespAct::kSweepParts, node, cursor);
}

std::uint64_t RespClient::submit_sweep_orphans(std::uint32_t node, std::uint64_t cursor) {
    return submit_page(RespAct::kSweepOrphans, node, cursor);
}

std::uint64_t RespClient::submit_command(std::vector<std::string> arguments, std::optional<std::uint32_t> node) {
    if (arguments.empty() || (!node && arguments.size() < 2))
        throw std::invalid_argument("a command has a name, and an argument or a node that says where it goes");
    auto job = std::make_shared<RespJob>();
    job->act = RespAct::kCommand;
    job->arguments = std::move(arguments);
    job->node = node;
    return submit(std::move(job), 1);
}

std::string RespClient::last_error() {
    MutexLock lock(context_.mutex);
    return context_.last_error;
}

}  // namespace lmcache
