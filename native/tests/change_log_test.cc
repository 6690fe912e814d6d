// The log itself, and that L1 and a ledger note exactly what comes and goes: a reader that follows the changes from a
// listing on knows what is there, under threads too.
#include "lmcache/change_log.h"

#include <atomic>
#include <cstring>
#include <map>
#include <random>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>

#include "check.h"
#include "lmcache/l1_core.h"
#include "lmcache/ledger.h"

using namespace lmcache;

namespace {

constexpr std::uint64_t kUnit = 4096;
constexpr double kForever = 1e18;

std::array<std::uint8_t, kChunkHashBytes> hash_of(std::uint64_t number) {
    std::array<std::uint8_t, kChunkHashBytes> hash{};
    std::memcpy(hash.data(), &number, sizeof(number));
    return hash;
}

std::vector<std::uint8_t> hashes_of(std::uint64_t first, std::size_t count) {
    std::vector<std::uint8_t> hashes;
    for (std::size_t i = 0; i < count; ++i) {
        const auto hash = hash_of(first + i);
        hashes.insert(hashes.end(), hash.begin(), hash.end());
    }
    return hashes;
}

struct Core {
    explicit Core(std::uint64_t units) : core({units * kUnit, kUnit, kUnit, EvictionPolicy::kLru}) {
        core.set_committed(units * kUnit);
    }
    void store(std::uint64_t first, std::size_t count, bool temporary = false) {
        const std::vector<std::uint64_t> sizes(namespaces.size(), kUnit);
        const Reserved reserved = core.reserve(1, namespaces, "", sizes, hashes_of(first, count), kForever);
        core.commit(reserved.reservation, {}, {.temporary = temporary});
    }
    L1Core core;
    const std::vector<Digest> namespaces{Digest{1}, Digest{2}};
};

LedgerKeys ledger_keys(std::uint64_t first, std::size_t count) {
    LedgerKeys keys;
    keys.namespaces.push_back({Digest{1}, "salt", "encoded"});
    keys.positions.assign(count, 0);
    keys.hashes = hashes_of(first, count);
    return keys;
}

using Key = std::string;  // digest and hash

Key key_at(const std::vector<Digest>& namespaces, const std::vector<std::uint32_t>& positions,
           const std::vector<std::uint8_t>& hashes, std::size_t i) {
    const Digest& digest = namespaces[positions[i]];
    return std::string(digest.begin(), digest.end()) +
           std::string(&hashes[i * kChunkHashBytes], &hashes[(i + 1) * kChunkHashBytes]);
}

// Applies a page. A change that says what is known already is a fault, but for one that was listed after it.
void follow_page(const ChangePage& page, std::set<Key>& known, bool exact = true) {
    CHECK(!page.lost);
    for (std::size_t i = 0; i < page.positions.size(); ++i) {
        const Key key = key_at(page.namespaces, page.positions, page.hashes, i);
        const bool is_news = page.added[i] != 0 ? known.insert(key).second : known.erase(key) == 1;
        CHECK(is_news || !exact);
    }
}

std::set<Key> listed(L1Core& core) {
    std::set<Key> known;
    std::uint32_t start = 0;
    do {
        const ObjectPage page = core.list_objects(start, 100);
        for (std::size_t i = 0; i < page.positions.size(); ++i)
            known.insert(key_at(page.namespaces, page.positions, page.hashes, i));
        start = page.next_start;
    } while (start != 0);
    return known;
}

}  // namespace

TEST_CASE(changes_are_read_in_order_and_in_pages) {
    ChangeLog log;
    log.watch();
    const std::uint64_t begin = log.next();
    for (std::uint64_t i = 0; i < 10'000; ++i) log.add(Digest{static_cast<std::uint8_t>(i % 3)}, hash_of(i), i, i % 2);
    std::uint64_t cursor = begin;
    std::uint64_t expected = 0;
    while (cursor != log.next()) {
        const ChangeBatch batch = log.read(cursor, 777);
        CHECK(!batch.lost && !batch.changes.empty() && batch.changes.size() <= 777);
        for (const Change& change : batch.changes) {
            CHECK(change.hash == hash_of(expected) && change.size_bytes() == expected &&
                  change.added() == (expected % 2 == 1));
            ++expected;
        }
        cursor = batch.next_cursor;
    }
    CHECK(expected == 10'000);
    const ChangePage page = page_of(log.read(begin, 7));
    CHECK(page.namespaces.size() == 3 && page.positions == std::vector<std::uint32_t>({0, 1, 2, 0, 1, 2, 0}));
    CHECK(page.next_cursor == begin + 7);
}

TEST_CASE(many_changes_are_read_in_steps_as_one) {
    ChangeLog log;
    log.watch();
    const std::uint64_t begin = log.next();
    for (std::uint64_t i = 0; i < 20'000; ++i) log.add(Digest{}, hash_of(i), i, true);
    std::size_t steps = 0;
    const auto read = [&](std::uint64_t from, std::size_t count) {
        ++steps;
        return log.read(from, count);
    };
    const ChangeBatch some = read_in_steps(begin, 10'000, read);
    CHECK(some.changes.size() == 10'000 && some.next_cursor == begin + 10'000 && steps == 3);
    const ChangeBatch rest = read_in_steps(some.next_cursor, 65'536, read);
    CHECK(rest.changes.size() == 10'000 && rest.changes.back().hash == hash_of(19'999));
    CHECK(rest.next_cursor == log.next() && read_in_steps(log.next(), 10, read).changes.empty());
    CHECK(read_in_steps(log.next() + 1, 0, read).lost);
    const ChangeBatch cut = read_in_steps(begin, 10'000, [&](std::uint64_t from, std::size_t count) {
        ChangeBatch step = log.read(from, count);
        for (std::uint64_t i = 0; i < kMaxChangesKept; ++i) log.add(Digest{}, hash_of(i), i, true);
        return step;
    });
    CHECK(!cut.lost && cut.changes.size() == 4096 && read_in_steps(cut.next_cursor, 1, read).lost);
}

TEST_CASE(the_last_state_of_each_object_of_a_page_counts) {
    std::mt19937 random(1);
    ChangeLog log;
    log.watch();
    const std::uint64_t begin = log.next();
    std::map<std::pair<std::uint8_t, std::uint64_t>, std::uint64_t> expected;  // 0: it has gone
    for (std::uint64_t i = 1; i <= 5'000; ++i) {
        const auto name_space = static_cast<std::uint8_t>(random() % 3);
        const std::uint64_t number = random() % 700;
        const bool added = random() % 2 == 0;
        log.add(Digest{name_space}, hash_of(number), i, added);
        expected[{name_space, number}] = added ? i : 0;
    }
    const ChangePage page = page_of(log.read(begin, 5'000));
    const std::vector<ObjectStates> states = last_states(page);
    CHECK(states.size() == 3);
    std::size_t objects = 0;
    for (std::size_t at = 0; at < states.size(); ++at) {
        const auto state_of = [&](const std::vector<std::uint8_t>& hashes, std::size_t i) {
            std::uint64_t number;
            std::memcpy(&number, &hashes[i * kChunkHashBytes], sizeof(number));
            ++objects;
            return expected.at({page.namespaces[at][0], number});
        };
        CHECK(states[at].there.size() == states[at].sizes_bytes.size() * kChunkHashBytes);
        for (std::size_t i = 0; i < states[at].sizes_bytes.size(); ++i)
            CHECK(state_of(states[at].there, i) == states[at].sizes_bytes[i]);
        for (std::size_t i = 0; i < states[at].gone.size() / kChunkHashBytes; ++i)
            CHECK(state_of(states[at].gone, i) == 0);
    }
    CHECK(objects == expected.size());
    CHECK(last_states(ChangePage{}).empty());
}

TEST_CASE(a_reader_that_fell_behind_is_told_and_memory_is_bounded) {
    ChangeLog log;
    CHECK(log.memory_bytes() == 0);
    log.watch();
    const std::uint64_t begin = log.next();
    for (std::uint64_t i = 0; i < kMaxChangesKept; ++i) log.add(Digest{}, hash_of(i), 1, true);
    CHECK(!log.read(begin, 1).lost);
    const std::size_t full_bytes = log.memory_bytes();
    CHECK(full_bytes == kMaxChangesKept * sizeof(Change));
    log.add(Digest{}, hash_of(0), 1, false);
    const ChangeBatch late = log.read(begin, 1);
    CHECK(late.lost && late.changes.empty() && late.next_cursor == log.next());
    const ChangeBatch oldest = log.read(begin + 1, 1);
    CHECK(!oldest.lost && oldest.changes.front().hash == hash_of(1));
    CHECK(log.read(log.next() + 1, 1).lost);
    CHECK(log.memory_bytes() == full_bytes);
}

TEST_CASE(cursors_are_void_once_nobody_watches) {
    ChangeLog log;
    CHECK(log.read(0, 1).lost);
    log.watch();
    log.watch();
    const std::uint64_t cursor = log.next();
    log.unwatch();
    CHECK(!log.read(cursor, 1).lost);
    log.unwatch();
    CHECK(log.memory_bytes() == 0 && log.read(cursor, 1).lost);
    log.watch();
    CHECK(log.read(cursor, 1).lost && !log.read(log.next(), 1).lost);
    log.unwatch();
    bool refused = false;
    try {
        log.unwatch();
    } catch (const std::invalid_argument&) {
        refused = true;
    }
    CHECK(refused);
}

TEST_CASE(changed_chunks_are_those_of_the_sets_each_once) {
    ChangeLog log;
    log.watch();
    for (const std::uint8_t name_space : {1, 2, 9, 3, 4}) log.add(Digest{name_space}, hash_of(5), 1, true);
    log.add(Digest{2}, hash_of(6), 1, false);
    const std::vector<Digest> sets{Digest{1}, Digest{2}, Digest{3}, Digest{4}};
    const ChangedChunks changed = changed_chunks(page_of(log.read(0, 100)), sets, 2);
    CHECK(changed.sets == std::vector<std::uint32_t>({0, 1, 0}));
    std::vector<std::uint8_t> expected = hashes_of(5, 1);
    const std::vector<std::uint8_t> again = expected, third = hashes_of(6, 1);
    expected.insert(expected.end(), again.begin(), again.end());
    expected.insert(expected.end(), third.begin(), third.end());
    CHECK(changed.hashes == expected);
}

TEST_CASE(an_l1_that_nobody_watches_notes_nothing) {
    Core l1(8);
    l1.store(0, 2);
    CHECK(l1.core.changes(0, 10).lost);
}

TEST_CASE(whatever_leaves_l1_is_noted) {
    Core l1(8);
    std::uint64_t cursor = l1.core.watch_changes();
    std::set<Key> known;
    const auto follow = [&](std::size_t changes) {
        const ChangePage page = l1.core.changes(cursor, 1000);
        CHECK(page.positions.size() == changes);
        follow_page(page, known);
        cursor = page.next_cursor;
        CHECK(known == listed(l1.core));
    };
    l1.store(0, 4);
    follow(8);
    l1.store(10, 1);  // evicts two
    follow(4);
    CHECK(l1.core.remove(std::vector<Digest>{Digest{1}}, hashes_of(10, 1)) == 1);
    follow(1);
    const Acquired lease = l1.core.acquire(1, std::vector<Digest>{Digest{1}}, hashes_of(0, 1), kForever);
    CHECK(lease.lease != 0);
    l1.core.clear();  // what is leased is not found any more
    follow(7);
    l1.core.release(lease.lease);
    follow(0);
    l1.store(20, 1, true);
    const Acquired last = l1.core.acquire(1, l1.namespaces, hashes_of(20, 1), kForever);
    l1.core.release(last.lease);  // temporary: gone with its last lease
    follow(4);
    const std::vector<std::uint64_t> sizes{kUnit, kUnit};
    const Reserved reserved = l1.core.reserve(2, l1.namespaces, "", sizes, hashes_of(30, 1), kForever);
    l1.core.abort(reserved.reservation);  // was never there
    follow(0);
    l1.core.unwatch_changes();
    CHECK(l1.core.changes(cursor, 1).lost);
}

TEST_CASE(resident_in_all_wants_every_namespace) {
    Core l1(8);
    l1.store(0, 2);
    l1.core.remove(std::vector<Digest>{Digest{2}}, hashes_of(1, 1));
    const std::vector<std::uint8_t> both = l1.core.resident_in_all(l1.namespaces, hashes_of(0, 3));
    CHECK(both == std::vector<std::uint8_t>({1, 0, 0}));
    const std::vector<std::uint8_t> first = l1.core.resident_in_all(std::vector<Digest>{Digest{1}}, hashes_of(0, 3));
    CHECK(first == std::vector<std::uint8_t>({1, 1, 0}));
}

TEST_CASE(a_ledger_notes_what_becomes_known_and_what_is_lost) {
    Ledger ledger(EvictionPolicy::kLru);
    std::uint64_t cursor = ledger.watch_changes();
    std::set<Key> known;
    const auto follow = [&](std::size_t changes, bool exact = true) {
        const ChangePage page = ledger.changes(cursor, 1000);
        CHECK(page.positions.size() == changes);
        follow_page(page, known, exact);
        cursor = page.next_cursor;
        CHECK(known.size() == ledger.stats().objects);
    };
    ledger.stored(ledger_keys(0, 3), std::vector<std::uint64_t>(3, 100));
    follow(3);
    ledger.stored(ledger_keys(0, 3), std::vector<std::uint64_t>(3, 100));  // no news
    follow(0);
    ledger.stored(ledger_keys(0, 1), std::vector<std::uint64_t>(1, 200));  // of another size
    follow(1, false);
    ledger.found(ledger_keys(3, 1), std::vector<std::uint64_t>(1, 100));
    follow(1);
    CHECK(ledger.known_in_all(std::vector<Digest>{Digest{1}}, hashes_of(2, 3)) == std::vector<std::uint8_t>({1, 1, 0}));
    CHECK(ledger.known_in_all(std::vector<Digest>{Digest{1}, Digest{7}}, hashes_of(2, 1)).front() == 0);
    LedgerHold hold = ledger.hold(ledger_keys(1, 1));
    ledger.lost(ledger_keys(0, 2));  // one of them is read, and not known any more
    follow(2);
    ledger.let_go(hold);
    follow(0);
    CHECK(ledger.victims(100, 1).positions.size() == 1);
    follow(0);  // may still be loaded
    ledger.evicted(ledger_keys(0, 4));
    follow(1);
    ledger.check();
}

TEST_CASE(a_reader_beside_writers_ends_up_with_what_is_there) {
    Core l1(64);
    l1.store(0, 5);
    std::uint64_t cursor = l1.core.watch_changes();
    std::set<Key> known = listed(l1.core);
    std::atomic<int> running = 2;
    std::vector<std::thread> writers;
    for (std::uint64_t writer = 0; writer < 2; ++writer) {
        writers.emplace_back([&, writer] {
            std::mt19937_64 random(writer);
            for (int i = 0; i < 2000; ++i) {
                l1.store(random() % 40, 1 + random() % 4);
                if (i % 100 == 0) l1.core.clear();
                if (i % 10 == 0) l1.core.evict(kUnit * (random() % 8));
            }
            --running;
        });
    }
    bool is_last = false;
    while (!is_last) {
        is_last = running == 0;
        ChangePage page;
        do {
            page = l1.core.changes(cursor, 256);
            follow_page(page, known);
            cursor = page.next_cursor;
        } while (!page.positions.empty());
    }
    for (std::thread& writer : writers) writer.join();
    CHECK(known == listed(l1.core));
    l1.core.check();
}
