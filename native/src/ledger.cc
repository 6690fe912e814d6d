#include "lmcache/ledger.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <stdexcept>
#include <unordered_map>
#include <unordered_set>
#include <utility>

namespace lmcache {

namespace {

constexpr std::size_t kMostExamined = 16384;  // records in one call, where most are passed over

}  // namespace

// ---- namespaces of a call -------------------------------------------------------------------------------------------

// A reference to each namespace of a call that adds objects, for the length of the call.
class Ledger::References {
public:
    References(Ledger& ledger, const LedgerKeys& keys) LMCACHE_REQUIRES(ledger.mutex_) : ledger_(ledger) {
        for (const LedgerKeys::Namespace& name_space : keys.namespaces) {
            if (name_space.encoded.empty() && ledger.namespaces_.find(name_space.digest) == kNoNamespace)
                throw std::invalid_argument("a namespace that is not known must be given whole");
        }
        numbers_.reserve(keys.namespaces.size());
        for (const LedgerKeys::Namespace& name_space : keys.namespaces) {
            const std::uint32_t number = ledger.namespaces_.refer(name_space.digest, name_space.salt);
            numbers_.push_back(number);
            if (number >= ledger.encoded_.size()) ledger.encoded_.resize(std::size_t{number} + 1);
            if (!ledger.encoded_[number].empty()) continue;
            ledger.encoded_[number] = name_space.encoded;
            ledger.encoded_bytes_ += name_space.encoded.size();
        }
    }
    ~References() {
        ledger_.mutex_.assert_held();
        for (const std::uint32_t number : numbers_) ledger_.release(number);
    }
    References(const References&) = delete;
    References& operator=(const References&) = delete;

    std::span<const std::uint32_t> numbers() const { return numbers_; }

private:
    Ledger& ledger_;
    std::vector<std::uint32_t> numbers_;
};

void Ledger::release(std::uint32_t name_space) {
    if (namespaces_.references(name_space) == 1) {
        encoded_bytes_ -= encoded_[name_space].size();
        encoded_[name_space] = {};
    }
    namespaces_.release(name_space);
}

std::vector<std::uint32_t> Ledger::numbers_of(const LedgerKeys& keys) const {
    std::vector<std::uint32_t> numbers;
    numbers.reserve(keys.namespaces.size());
    for (const LedgerKeys::Namespace& name_space : keys.namespaces)
        numbers.push_back(namespaces_.find(name_space.digest));
    return numbers;
}

// ---- finding --------------------------------------------------------------------------------------------------------

std::uint32_t Ledger::find(std::uint64_t key_hash, std::uint32_t name_space, const std::uint8_t* hash) const {
    return keys_.find(key_hash, [&](std::uint32_t index) {
        mutex_.assert_held();
        const Object& object = objects_[index];
        return object.name_space == name_space && std::memcmp(object.hash.data(), hash, kChunkHashBytes) == 0;
    });
}

template <typename Visit>
void Ledger::sweep(const LedgerKeys& keys, std::span<const std::uint32_t> numbers, bool reversed, Visit&& visit) const {
    constexpr std::size_t kAhead = 32;
    std::array<std::uint64_t, kAhead> key_hashes;
    const auto key_at = [&](std::size_t i) { return reversed ? keys.size() - 1 - i : i; };
    for (std::size_t begin = 0; begin < keys.size(); begin += kAhead) {
        const std::size_t count = std::min(kAhead, keys.size() - begin);
        for (std::size_t i = 0; i < count; ++i) {
            const std::size_t key = key_at(begin + i);
            key_hashes[i] = hash_key_(numbers[keys.positions[key]], keys.hash(key));
            keys_.prefetch(key_hashes[i]);
        }
        for (std::size_t i = 0; i < count; ++i) {
            const std::uint32_t candidate = keys_.candidate(key_hashes[i]);
            if (candidate != kNoObject) objects_.prefetch(candidate);
        }
        for (std::size_t i = 0; i < count; ++i) {
            const std::size_t key = key_at(begin + i);
            visit(key, numbers[keys.positions[key]], key_hashes[i]);
        }
    }
}

template <typename Visit>
void Ledger::for_each_known(const LedgerKeys& keys, bool reversed, Visit&& visit) {
    sweep(keys, numbers_of(keys), reversed, [&](std::size_t key, std::uint32_t number, std::uint64_t key_hash) {
        mutex_.assert_held();
        const std::uint32_t index = find(key_hash, number, keys.hash(key));
        if (index != kNoObject && objects_[index].state != ObjectState::kDetached) visit(key, index, key_hash);
    });
}

bool Ledger::knows(const Digest& digest) const {
    const MutexLock lock(mutex_);
    return namespaces_.find(digest) != kNoNamespace;
}

std::vector<Known> Ledger::known(const LedgerKeys& keys) const {
    const MutexLock lock(mutex_);
    std::vector<Known> known(keys.size(), Known::kNo);
    sweep(keys, numbers_of(keys), false, [&](std::size_t key, std::uint32_t number, std::uint64_t key_hash) {
        mutex_.assert_held();
        const std::uint32_t index = find(key_hash, number, keys.hash(key));
        if (index == kNoObject || objects_[index].state == ObjectState::kDetached) return;
        known[key] = objects_[index].state == ObjectState::kLeaving ? Known::kLeaving : Known::kYes;
    });
    return known;
}

std::vector<std::uint8_t> Ledger::held(const LedgerKeys& keys) const {
    const MutexLock lock(mutex_);
    std::vector<std::uint8_t> held(keys.size(), 0);
    sweep(keys, numbers_of(keys), false, [&](std::size_t key, std::uint32_t number, std::uint64_t key_hash) {
        mutex_.assert_held();
        const std::uint32_t index = find(key_hash, number, keys.hash(key));
        held[key] = index != kNoObject && objects_[index].readers != 0 ? 1 : 0;
    });
    return held;
}

std::vector<std::string> Ledger::namespaces() const {
    const MutexLock lock(mutex_);
    std::vector<std::string> encoded;
    for (const std::string& name : encoded_) {
        if (!name.empty()) encoded.push_back(name);
    }
    return encoded;
}

// ---- records ------------------------------------------------------------------------------------------------------

std::vector<std::uint64_t> Ledger::charges(const LedgerKeys& keys, std::span<const std::uint64_t> sizes_bytes) const {
    if (sizes_bytes.size() != keys.size()) throw std::invalid_argument("there must be one size for each key");
    std::vector<std::uint64_t> charges;
    charges.reserve(sizes_bytes.size());
    for (const std::uint64_t size_bytes : sizes_bytes) {
        const std::uint64_t unit = capacity_.unit_bytes;
        const std::uint64_t units = std::min(size_bytes / unit + (size_bytes % unit != 0), kMaxCharge / unit);
        charges.push_back(std::min(units * unit + capacity_.object_overhead_bytes, kMaxCharge));
    }
    return charges;
}

std::uint32_t Ledger::add(std::uint32_t name_space, const std::uint8_t* hash, std::uint64_t key_hash) {
    const std::uint32_t index = objects_.take();
    Object& object = objects_[index];
    std::memcpy(object.hash.data(), hash, kChunkHashBytes);
    object.name_space = name_space;
    object.state = ObjectState::kDetached;
    keys_.insert(key_hash, index);
    namespaces_.refer(name_space);
    return index;
}

void Ledger::drop(std::uint32_t index, std::uint64_t key_hash) {
    note_change(index, false);
    end_counting(index);
    if (objects_[index].readers == 0) {
        forget(index, key_hash);
    } else {
        objects_[index].state = ObjectState::kDetached;
    }
}

void Ledger::forget(std::uint32_t index, std::uint64_t key_hash) {
    keys_.erase(key_hash, index);
    const std::uint32_t name_space = objects_[index].name_space;
    objects_.give_back(index);
    release(name_space);
}

void Ledger::begin_counting(std::uint32_t index, std::uint64_t charge_bytes) {
    Object& object = objects_[index];
    object.set_charge(charge_bytes);
    object.cycle = scan_;
    used_bytes_ += charge_bytes;
    ++known_;
    if (capacity_.folder_bytes != 0) folders_.enter(object.name_space, object.hash[0]);
}

void Ledger::end_counting(std::uint32_t index) {
    const Object& object = objects_[index];
    used_bytes_ -= object.charge();
    --known_;
    if (capacity_.folder_bytes != 0) folders_.leave(object.name_space, object.hash[0]);
}

template <typename Enter>
void Ledger::become_resident(std::uint32_t index, Enter&& enter) {
    Object& object = objects_[index];
    object.state = ObjectState::kResident;
    namespaces_.add_units(object.name_space, object.charge());
    enter();  // weighs the salt as well, unless the object is being read
    if (object.readers != 0) order_.usage_changed(namespaces_.salt_of(object.name_space));
}

void Ledger::leave(std::uint32_t index) {
    const Object& object = objects_[index];
    namespaces_.subtract_units(object.name_space, object.charge());
    order_.leave(index);
    if (object.readers != 0) order_.usage_changed(namespaces_.salt_of(object.name_space));
}

// ---- what the backend holds -----------------------------------------------------------------------------------------

std::uint64_t Ledger::stored(const LedgerKeys& keys, std::span<const std::uint64_t> sizes_bytes) {
    const MutexLock lock(mutex_);
    const std::vector<std::uint64_t> charges_bytes = charges(keys, sizes_bytes);
    const References references(*this, keys);
    std::uint64_t bytes = 0;
    sweep(keys, references.numbers(), true, [&](std::size_t key, std::uint32_t number, std::uint64_t key_hash) {
        mutex_.assert_held();
        std::uint32_t index = find(key_hash, number, keys.hash(key));
        if (index == kNoObject) index = add(number, keys.hash(key), key_hash);
        const ObjectState state = objects_[index].state;
        const bool is_news = state == ObjectState::kDetached || objects_[index].charge() != charges_bytes[key];
        if (state == ObjectState::kResident) leave(index);
        if (state == ObjectState::kLeaving) --leaving_;
        if (state != ObjectState::kDetached) end_counting(index);
        begin_counting(index, charges_bytes[key]);
        if (is_news) note_change(index, true);
        become_resident(index, [&] {
            mutex_.assert_held();
            if (state == ObjectState::kDetached) {
                order_.enter(index, key_hash);
            } else {
                order_.enter_again(index);
            }
        });
        order_.to_newest(index);
        bytes += charges_bytes[key];
    });
    return bytes;
}

void Ledger::found(const LedgerKeys& keys, std::span<const std::uint64_t> sizes_bytes, bool newer) {
    const MutexLock lock(mutex_);
    const std::vector<std::uint64_t> charges_bytes = charges(keys, sizes_bytes);
    const References references(*this, keys);
    sweep(keys, references.numbers(), newer, [&](std::size_t key, std::uint32_t number, std::uint64_t key_hash) {
        mutex_.assert_held();
        std::uint32_t index = find(key_hash, number, keys.hash(key));
        if (index != kNoObject && objects_[index].state != ObjectState::kDetached) {
            see_again(index, charges_bytes[key]);
            return;
        }
        if (index == kNoObject) index = add(number, keys.hash(key), key_hash);
        begin_counting(index, charges_bytes[key]);
        note_change(index, true);
        if (newer) {
            become_resident(index, [&] {
                mutex_.assert_held();
                order_.enter(index, key_hash);
            });
            order_.to_newest(index);
        } else {
            become_resident(index, [&] {
                mutex_.assert_held();
                order_.enter_oldest(index);
            });
        }
    });
}

// Where this scan finds it of another size, somebody has deleted it and stored it anew.
void Ledger::see_again(std::uint32_t index, std::uint64_t charge_bytes) {
    Object& object = objects_[index];
    const bool was_seen = std::exchange(object.cycle, scan_) == scan_;
    if (was_seen || object.charge() == charge_bytes || object.state != ObjectState::kResident) return;
    leave(index);
    end_counting(index);
    begin_counting(index, charge_bytes);
    note_change(index, true);
    become_resident(index, [&] {
        mutex_.assert_held();
        order_.enter_again(index);
    });
    order_.to_newest(index);
}

std::size_t Ledger::touch(const LedgerKeys& keys) {
    const MutexLock lock(mutex_);
    std::size_t touched = 0;
    for_each_known(keys, true, [&](std::size_t, std::uint32_t index, std::uint64_t) {
        mutex_.assert_held();
        ++touched;
        if (objects_[index].state != ObjectState::kResident) return;
        order_.use(index);
        order_.to_newest(index);
    });
    return touched;
}

void Ledger::lost(const LedgerKeys& keys) {
    const MutexLock lock(mutex_);
    for_each_known(keys, false, [&](std::size_t, std::uint32_t index, std::uint64_t key_hash) {
        mutex_.assert_held();
        if (objects_[index].state == ObjectState::kLeaving) {
            --leaving_;
        } else {
            leave(index);
        }
        drop(index, key_hash);
    });
}

class Ledger::PageBuilder {
public:
    explicit PageBuilder(const Ledger& ledger) : ledger_(ledger) {}

    std::size_t size() const { return page_.positions.size(); }
    void add(const Object& object) {
        ledger_.mutex_.assert_held();
        const auto [position, is_new] =
            positions_.try_emplace(object.name_space, static_cast<std::uint32_t>(page_.namespaces.size()));
        if (is_new) page_.namespaces.push_back(ledger_.encoded_[object.name_space]);
        page_.positions.push_back(position->second);
        page_.hashes.insert(page_.hashes.end(), object.hash.begin(), object.hash.end());
        page_.charges_bytes.push_back(object.charge());
    }
    void end_at(std::uint32_t next_start) { page_.next_start = next_start; }
    LedgerPage page() { return std::move(page_); }

private:
    const Ledger& ledger_;
    LedgerPage page_;
    std::unordered_map<std::uint32_t, std::uint32_t> positions_;  // by number of the namespace
};

// ---- eviction -------------------------------------------------------------------------------------------------------

LedgerPage Ledger::victims(std::uint64_t wanted_bytes, std::size_t most) {
    const MutexLock lock(mutex_);
    PageBuilder builder(*this);
    std::uint64_t chosen_bytes = 0;
    while (chosen_bytes < wanted_bytes && builder.size() < most) {
        const std::uint32_t index = order_.victim();
        if (index == kNoObject) break;
        leave(index);
        objects_[index].state = ObjectState::kLeaving;
        ++leaving_;
        chosen_bytes += objects_[index].charge();
        builder.add(objects_[index]);
    }
    return builder.page();
}

std::uint64_t Ledger::evicted(const LedgerKeys& keys) {
    const MutexLock lock(mutex_);
    std::uint64_t bytes = 0;
    for_each_known(keys, false, [&](std::size_t, std::uint32_t index, std::uint64_t key_hash) {
        mutex_.assert_held();
        if (objects_[index].state != ObjectState::kLeaving) return;
        bytes += objects_[index].charge();
        --leaving_;
        order_.evicted(index, key_hash);
        drop(index, key_hash);
    });
    return bytes;
}

void Ledger::not_evicted(const LedgerKeys& keys) {
    const MutexLock lock(mutex_);
    // The youngest first: each then finds its place at the old end of its queue.
    for_each_known(keys, true, [&](std::size_t, std::uint32_t index, std::uint64_t) {
        mutex_.assert_held();
        if (objects_[index].state != ObjectState::kLeaving) return;
        --leaving_;
        become_resident(index, [&] {
            mutex_.assert_held();
            order_.enter_again(index);
        });
        order_.put_back(index);
    });
}

LedgerHold Ledger::hold(const LedgerKeys& keys) {
    const MutexLock lock(mutex_);
    LedgerHold hold;
    for_each_known(keys, false, [&](std::size_t, std::uint32_t index, std::uint64_t) {
        mutex_.assert_held();
        Object& object = objects_[index];
        if (object.readers++ == 0 && object.state == ObjectState::kResident) order_.begin_reading(index);
        hold.objects_.push_back(index);
    });
    held_ += hold.objects_.size();
    return hold;
}

void Ledger::let_go(LedgerHold& hold) {
    const MutexLock lock(mutex_);
    for (const std::uint32_t index : std::exchange(hold.objects_, {})) {  // the youngest first, as in `evicted`
        Object& object = objects_[index];
        --held_;
        if (--object.readers != 0) continue;
        if (object.state == ObjectState::kDetached) {
            forget(index, hash_of(object));
        } else if (object.state == ObjectState::kResident) {
            order_.end_reading(index);
            order_.put_back(index);
        }
    }
}

// ---- capacity -------------------------------------------------------------------------------------------------------

void Ledger::set_capacity(const LedgerCapacity& capacity) {
    if (capacity.unit_bytes == 0) throw std::invalid_argument("unit_bytes must be more than 0");
    const MutexLock lock(mutex_);
    const bool has_folders = capacity.folder_bytes != 0;
    if (has_folders != (capacity_.folder_bytes != 0) && namespaces_.size() != 0) {
        throw std::invalid_argument("folder_bytes cannot become or cease to be 0 while there are objects");
    }
    capacity_ = capacity;
    order_.set_room(capacity.limit_bytes.value_or(0));
}

void Ledger::set_limit(std::string_view salt, std::uint64_t limit_bytes) {
    const MutexLock lock(mutex_);
    limit_salt(order_, namespaces_, salt, limit_bytes);
}

std::size_t Ledger::new_folders(const LedgerKeys& keys, std::span<const std::uint32_t> numbers) const {
    std::unordered_set<std::uint64_t> folders;  // by position of the namespace
    for (std::size_t key = 0; key < keys.size(); ++key) {
        const std::uint64_t position = keys.positions[key];
        const std::uint32_t number = numbers[position];
        const std::uint8_t first_byte = *keys.hash(key);
        if (number != kNoNamespace && folders_.contains(number, first_byte)) continue;
        folders.insert(position << 9 | first_byte);
        if (number == kNoNamespace || !folders_.contains(number)) folders.insert(position << 9 | 256);
    }
    return folders.size();
}

std::uint64_t Ledger::lacking(const LedgerKeys& keys, std::uint64_t charge_bytes, std::uint64_t other_bytes) const {
    const MutexLock lock(mutex_);
    if (!capacity_.limit_bytes) return 0;
    std::size_t folders = folders_.size();
    if (capacity_.folder_bytes != 0) folders += new_folders(keys, numbers_of(keys));
    const std::uint64_t total =
        used_bytes_ + reserved_bytes_ + folders * capacity_.folder_bytes + other_bytes + charge_bytes;
    return total - std::min(total, *capacity_.limit_bytes);
}

void Ledger::reserve(const LedgerKeys& keys, std::uint64_t charge_bytes) {
    const MutexLock lock(mutex_);
    reserved_bytes_ += charge_bytes;
    if (capacity_.folder_bytes == 0) return;
    const References references(*this, keys);
    for (std::size_t key = 0; key < keys.size(); ++key) {
        const std::uint32_t number = references.numbers()[keys.positions[key]];
        namespaces_.refer(number);
        folders_.enter(number, *keys.hash(key));
    }
}

void Ledger::give_back(const LedgerKeys& keys, std::uint64_t charge_bytes) {
    const MutexLock lock(mutex_);
    reserved_bytes_ -= charge_bytes;
    if (capacity_.folder_bytes == 0) return;
    const std::vector<std::uint32_t> numbers = numbers_of(keys);
    for (std::size_t key = 0; key < keys.size(); ++key) {
        const std::uint32_t number = numbers[keys.positions[key]];
        if (number == kNoNamespace) throw std::invalid_argument("the keys have not been reserved for");
        folders_.leave(number, *keys.hash(key));
        release(number);
    }
}

// ---- listings -------------------------------------------------------------------------------------------------------

std::uint8_t Ledger::begin_scan() {
    const MutexLock lock(mutex_);
    return ++scan_;
}

void Ledger::see(const LedgerKeys& keys) {
    const MutexLock lock(mutex_);
    for_each_known(keys, false, [&](std::size_t, std::uint32_t index, std::uint64_t) {
        mutex_.assert_held();
        objects_[index].cycle = scan_;
    });
}

LedgerPage Ledger::list(std::uint32_t start, std::size_t most, std::optional<std::uint8_t> unseen_by,
                        std::span<const NamespaceFolders> passed_over) {
    const MutexLock lock(mutex_);
    std::unordered_map<std::uint32_t, const NamespaceFolders*> left_out;  // by number of the namespace
    for (const NamespaceFolders& folders : passed_over) {
        const std::uint32_t number = namespaces_.find(folders.digest);
        if (number != kNoNamespace) left_out[number] = &folders;
    }
    const auto is_left_out = [&](const Object& object) {
        const auto found = left_out.find(object.name_space);
        return found != left_out.end() && found->second->contains(object.hash[0]);
    };
    const auto age = [latest = scan_](std::uint8_t scan) { return static_cast<std::uint8_t>(latest - scan); };
    PageBuilder builder(*this);
    for (std::uint32_t index = start; index < objects_.size(); ++index) {
        if (builder.size() == most || index - start == kMostExamined) {
            builder.end_at(index);
            break;
        }
        Object& object = objects_[index];
        if (object.state != ObjectState::kResident && object.state != ObjectState::kLeaving) continue;
        if (unseen_by && age(object.cycle) <= age(*unseen_by)) continue;
        if (!left_out.empty() && is_left_out(object)) {
            object.cycle = scan_;  // its number would come round again
            continue;
        }
        builder.add(object);
    }
    return builder.page();
}

}  // namespace lmcache
