// The servers of one Redis or Valkey, which of them has a name, and when one that failed is tried again.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "lmcache/mutex.h"
#include "lmcache/resp_stream.h"

namespace lmcache {

inline constexpr std::size_t kRespSlots = 16384;

// The slot of a name in a cluster: CRC-16 (XMODEM) of it, or of what is between its first "{" and the next "}".
std::uint16_t resp_slot(std::string_view name);

// From first to last, both included, of node `node` of a list of addresses.
struct RespSlotRange {
    std::uint16_t first = 0, last = 0;
    std::uint32_t node = 0;
};

// What "MOVED 3999 127.0.0.1:6381" and "ASK ..." say.
struct RespRedirect {
    bool is_ask = false;  // for this one command only
    std::uint16_t slot = 0;
    RespAddress address;  // no host: that of the server which said it
};
std::optional<RespRedirect> parse_resp_redirect(std::string_view error);

// Thread-safe. A node keeps its index, until kMaxNodes are known and another takes the place of one that is retired.
class RespNodes {
public:
    static constexpr std::size_t kMaxNodes = 1024;

    // Replaces the assignment of slots. Without ranges the first address has every slot. Nodes that are not among the
    // addresses are retired: servers whose addresses change with each restart would fill the list. Throws
    // std::invalid_argument.
    void assign(std::span<const RespAddress> addresses, std::span<const RespSlotRange> ranges);

    RespAddress address(std::uint32_t node);
    std::uint32_t node_of(std::string_view name);
    // The node of the address at that position of the last assignment.
    std::optional<std::uint32_t> assigned(std::uint32_t position);

    // Another number after each assignment: connections to retired nodes may be closed then.
    std::uint64_t assignments() const { return assignments_; }
    // Who has the index now: another number for another server, 0 for a node that is retired.
    std::uint64_t tenant(std::uint32_t node);

    // The node of a redirect that node `from` answered with; MOVED assigns the slot. Throws RespFault when there are
    // too many nodes.
    std::uint32_t redirect(const RespRedirect& redirect, std::uint32_t from);

    // After a failed attempt to connect a node is left alone for a while: doubled with each, at most kMaxPause.
    bool may_connect(std::uint32_t node);
    void connected(std::uint32_t node, bool successfully);

    // Counts redirects and failed attempts to connect: what nodes there are may have changed.
    std::uint64_t changes();

private:
    static constexpr std::chrono::milliseconds kFirstPause{50};
    static constexpr std::chrono::milliseconds kMaxPause{2000};

    struct Node {
        RespAddress address;
        std::uint64_t tenant = 0;
        bool is_retired = false;
        unsigned failures = 0;
        RespDeadline next_attempt{};
    };
    std::uint32_t index_of(const RespAddress& address) LMCACHE_REQUIRES(mutex_);

    Mutex mutex_;
    std::deque<Node> nodes_ LMCACHE_GUARDED_BY(mutex_);
    std::vector<std::uint32_t> assigned_ LMCACHE_GUARDED_BY(mutex_);
    std::uint64_t last_tenant_ LMCACHE_GUARDED_BY(mutex_) = 0;
    std::atomic<std::uint64_t> assignments_{0};
    std::array<std::uint32_t, kRespSlots> slots_ LMCACHE_GUARDED_BY(mutex_){};
    bool is_cluster_ LMCACHE_GUARDED_BY(mutex_) = false;
    std::uint64_t changes_ LMCACHE_GUARDED_BY(mutex_) = 0;
};

}  // namespace lmcache
