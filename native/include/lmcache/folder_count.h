// Which folders an adapter that keeps files needs: one for each namespace, and in it one for each first byte of the
// chunk hashes that are there. A folder counts while an object, or a store under way, is in it. Not thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <unordered_map>
#include <unordered_set>
#include <utility>

namespace lmcache {

class FolderCount {
public:
    void enter(std::uint32_t name_space, std::uint8_t first_byte) {
        if (++users_[inner(name_space, first_byte)] == 1) ++users_[outer(name_space)];
    }
    void leave(std::uint32_t name_space, std::uint8_t first_byte) {
        if (leave(inner(name_space, first_byte))) leave(outer(name_space));
    }

    std::size_t size() const { return users_.size(); }
    bool contains(std::uint32_t name_space, std::uint8_t first_byte) const {
        return users_.contains(inner(name_space, first_byte));
    }
    bool contains(std::uint32_t name_space) const { return users_.contains(outer(name_space)); }
    std::size_t memory_bytes() const {
        constexpr std::size_t kNodeOverheadBytes = 16;
        return users_.size() * (sizeof(*users_.begin()) + kNodeOverheadBytes) + users_.bucket_count() * sizeof(void*);
    }

private:
    static constexpr std::uint64_t kOuter = 256;
    static std::uint64_t outer(std::uint32_t name_space) { return std::uint64_t{name_space} << 9 | kOuter; }
    static std::uint64_t inner(std::uint32_t name_space, std::uint8_t first_byte) {
        return std::uint64_t{name_space} << 9 | first_byte;
    }
    // Whether that was its last user.
    bool leave(std::uint64_t folder) {
        const auto found = users_.find(folder);
        if (--found->second != 0) return false;
        users_.erase(found);
        return true;
    }

    std::unordered_map<std::uint64_t, std::uint32_t> users_;
};

}  // namespace lmcache
