#include "lmcache/resp_nodes.h"

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <stdexcept>
#include <string>

namespace lmcache {
namespace {

constexpr std::array<std::uint16_t, 256> make_crc_table() {
    std::array<std::uint16_t, 256> table{};
    for (unsigned byte = 0; byte < 256; ++byte) {
        unsigned crc = byte << 8;
        for (int bit = 0; bit < 8; ++bit) crc = (crc & 0x8000) != 0 ? (crc << 1) ^ 0x1021 : crc << 1;
        table[byte] = static_cast<std::uint16_t>(crc);
    }
    return table;
}
constexpr auto kCrcTable = make_crc_table();

template <typename Number>
bool parse(std::string_view text, Number& number) {
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
    return error == std::errc{} && end == text.data() + text.size();
}

}  // namespace

std::uint16_t resp_slot(std::string_view name) {
    if (const std::size_t open = name.find('{'); open != std::string_view::npos) {
        const std::size_t close = name.find('}', open + 1);
        if (close != std::string_view::npos && close != open + 1) name = name.substr(open + 1, close - open - 1);
    }
    unsigned crc = 0;
    for (const char character : name)
        crc = ((crc << 8) & 0xffff) ^ kCrcTable[(crc >> 8) ^ static_cast<unsigned char>(character)];
    return static_cast<std::uint16_t>(crc % kRespSlots);
}

std::optional<RespRedirect> parse_resp_redirect(std::string_view error) {
    RespRedirect redirect;
    if (error.starts_with("ASK ")) {
        redirect.is_ask = true;
        error.remove_prefix(4);
    } else if (error.starts_with("MOVED ")) {
        error.remove_prefix(6);
    } else {
        return std::nullopt;
    }
    const std::size_t space = error.find(' ');
    const std::size_t colon = error.rfind(':');  // an IPv6 address has more of them
    if (space == std::string_view::npos || colon == std::string_view::npos || colon < space) return std::nullopt;
    redirect.address.host = error.substr(space + 1, colon - space - 1);
    if (!parse(error.substr(0, space), redirect.slot) || redirect.slot >= kRespSlots ||
        !parse(error.substr(colon + 1), redirect.address.port) || redirect.address.host == "?")
        return std::nullopt;
    return redirect;
}

std::uint32_t RespNodes::index_of(const RespAddress& address) {
    auto found = std::ranges::find(nodes_, address, &Node::address);
    if (found == nodes_.end()) {
        found = nodes_.size() < kMaxNodes ? nodes_.insert(nodes_.end(), Node{})
                                          : std::ranges::find(nodes_, true, &Node::is_retired);
        if (found == nodes_.end())
            throw RespFault(EPROTO, "the servers name more than " + std::to_string(kMaxNodes) + " nodes");
        *found = Node{.address = address, .tenant = ++last_tenant_};
    }
    found->is_retired = false;
    return static_cast<std::uint32_t>(found - nodes_.begin());
}

void RespNodes::assign(std::span<const RespAddress> addresses, std::span<const RespSlotRange> ranges) {
    if (addresses.empty() || addresses.size() > kMaxNodes)
        throw std::invalid_argument("there must be 1 to " + std::to_string(kMaxNodes) + " addresses");
    for (const RespSlotRange& range : ranges)
        if (range.first > range.last || range.last >= kRespSlots || range.node >= addresses.size())
            throw std::invalid_argument("a range of slots is not one");
    MutexLock lock(mutex_);
    for (Node& node : nodes_) node.is_retired = std::ranges::find(addresses, node.address) == addresses.end();
    std::vector<std::uint32_t> indices;
    for (const RespAddress& address : addresses) indices.push_back(index_of(address));
    assigned_ = indices;
    ++assignments_;
    slots_.fill(indices[0]);
    is_cluster_ = !ranges.empty();
    for (const RespSlotRange& range : ranges)
        std::fill(slots_.begin() + range.first, slots_.begin() + range.last + 1, indices[range.node]);
}

RespAddress RespNodes::address(std::uint32_t node) {
    MutexLock lock(mutex_);
    if (node >= nodes_.size()) throw RespFault(EHOSTUNREACH, "there is no such server");
    return nodes_[node].address;
}

std::uint32_t RespNodes::node_of(std::string_view name) {
    const std::uint16_t slot = resp_slot(name);
    MutexLock lock(mutex_);
    return slots_[is_cluster_ ? slot : 0];
}

std::optional<std::uint32_t> RespNodes::assigned(std::uint32_t position) {
    MutexLock lock(mutex_);
    if (position >= assigned_.size()) return std::nullopt;
    return assigned_[position];
}

std::uint64_t RespNodes::tenant(std::uint32_t node) {
    MutexLock lock(mutex_);
    return node < nodes_.size() && !nodes_[node].is_retired ? nodes_[node].tenant : 0;
}

std::uint32_t RespNodes::redirect(const RespRedirect& redirect, std::uint32_t from) {
    MutexLock lock(mutex_);
    RespAddress address = redirect.address;
    if (address.host.empty()) address.host = nodes_[from].address.host;
    const std::uint32_t node = index_of(address);
    if (!redirect.is_ask) {
        if (is_cluster_) slots_[redirect.slot] = node;
        ++changes_;
    }
    return node;
}

bool RespNodes::may_connect(std::uint32_t node) {
    MutexLock lock(mutex_);
    return node < nodes_.size() && std::chrono::steady_clock::now() >= nodes_[node].next_attempt;
}

void RespNodes::connected(std::uint32_t node, bool successfully) {
    MutexLock lock(mutex_);
    Node& found = nodes_[node];
    if (successfully) {
        found.failures = 0;
        return;
    }
    constexpr unsigned kMostDoubled = 6;
    const auto pause = std::min(kMaxPause, kFirstPause * (1U << std::min(found.failures, kMostDoubled)));
    ++found.failures;
    found.next_attempt = std::chrono::steady_clock::now() + pause;
    ++changes_;
}

std::uint64_t RespNodes::changes() {
    MutexLock lock(mutex_);
    return changes_;
}

}  // namespace lmcache
