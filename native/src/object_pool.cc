#include "lmcache/object_pool.h"

#include <sys/mman.h>

#include <new>

namespace lmcache {

std::uint32_t ObjectPool::take() {
    std::uint32_t index = unused_;
    if (index != kNoObject) {
        unused_ = (*this)[index].older;
    } else {
        if (size_ == blocks_.size() * kBlockObjects) add_block();
        index = size_++;
    }
    Object& object = (*this)[index];
    object.newer = kNoObject;
    object.older = kNoObject;
    object.readers = 0;
    object.units_high = 0;
    object.state = ObjectState::kUnused;
    object.temporary = false;
    object.linked = false;
    object.in_main = false;
    object.sampled = false;
    return index;
}

void ObjectPool::give_back(std::uint32_t index) {
    Object& object = (*this)[index];
    object.state = ObjectState::kUnused;
    object.older = unused_;
    unused_ = index;
}

void ObjectPool::add_block() {
    constexpr std::size_t kBlockBytes = kBlockObjects * sizeof(Object);
    blocks_.reserve(blocks_.size() + 1);
    void* block = std::aligned_alloc(kBlockBytes, kBlockBytes);
    if (block == nullptr) throw std::bad_alloc();
    // A huge page would be cleared whole by the call that first touches it, which takes milliseconds on some machines.
    // The kernel makes one of small pages in the background, once the block is full.
    if (!blocks_.empty()) madvise(blocks_.back().get(), kBlockBytes, MADV_HUGEPAGE);
    blocks_.emplace_back(static_cast<Object*>(block));
}

std::size_t ObjectPool::memory_bytes() const {
    return blocks_.size() * kBlockObjects * sizeof(Object) + blocks_.capacity() * sizeof(blocks_[0]);
}

}  // namespace lmcache
