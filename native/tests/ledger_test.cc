// The ledger under several threads, and what random calls from Python (tests/unit/l2/test_ledger_model.py) do not
// reach: large batches, and objects that are held across a loss.
#include "lmcache/ledger.h"

#include <atomic>
#include <cstring>
#include <random>
#include <thread>

#include "check.h"

using namespace lmcache;

namespace {

constexpr EvictionPolicy kPolicies[] = {EvictionPolicy::kLru, EvictionPolicy::kIsolatedLru, EvictionPolicy::kS3Fifo,
                                        EvictionPolicy::kNoop};
constexpr std::uint64_t kObjectBytes = 4096;

// Keys numbered from `first` on, all of the namespace with that number.
LedgerKeys keys(std::uint64_t first, std::size_t count, std::uint8_t name_space = 0) {
    LedgerKeys result;
    Digest digest{};
    digest[0] = name_space;
    result.namespaces.push_back({digest, "salt " + std::to_string(name_space), "encoded"});
    result.positions.assign(count, 0);
    result.hashes.resize(count * kChunkHashBytes);
    for (std::size_t i = 0; i < count; ++i) {
        const std::uint64_t number = first + i;
        std::memcpy(&result.hashes[i * kChunkHashBytes + 1], &number, sizeof(number));
    }
    return result;
}

LedgerKeys keys_of(const LedgerPage& page, std::uint8_t name_space = 0) {
    LedgerKeys result = keys(0, 0, name_space);
    result.positions.assign(page.positions.size(), 0);
    result.hashes = page.hashes;
    return result;
}

std::vector<std::uint64_t> sizes(std::size_t count) { return std::vector<std::uint64_t>(count, kObjectBytes); }

std::vector<std::uint64_t> numbers_of(const LedgerPage& page) {
    std::vector<std::uint64_t> numbers(page.positions.size());
    for (std::size_t i = 0; i < numbers.size(); ++i)
        std::memcpy(&numbers[i], &page.hashes[i * kChunkHashBytes + 1], sizeof(std::uint64_t));
    return numbers;
}

}  // namespace

TEST_CASE(a_whole_batch_that_could_not_be_deleted_keeps_its_order) {
    constexpr std::size_t kCount = 50'000;
    for (const EvictionPolicy policy : {EvictionPolicy::kLru, EvictionPolicy::kIsolatedLru, EvictionPolicy::kS3Fifo}) {
        Ledger ledger(policy);
        ledger.set_capacity({.limit_bytes = kCount * kObjectBytes});
        ledger.found(keys(0, kCount), sizes(kCount));
        const LedgerPage first = ledger.victims(~std::uint64_t{0}, kCount);
        CHECK(first.positions.size() == kCount && ledger.stats().leaving_objects == kCount);
        CHECK(ledger.victims(1, 1).positions.empty());
        ledger.not_evicted(keys_of(first));
        ledger.check();
        const LedgerPage second = ledger.victims(~std::uint64_t{0}, kCount);
        CHECK(numbers_of(second) == numbers_of(first));
        CHECK(numbers_of(first).front() == kCount - 1);  // the youngest was reported first
        CHECK(ledger.evicted(keys_of(second)) == kCount * kObjectBytes);
        CHECK(ledger.stats().objects == 0 && ledger.stats().namespaces == 0);
        ledger.check();
    }
}

TEST_CASE(what_is_lost_and_stored_again_while_it_is_read_stays_held) {
    Ledger ledger(EvictionPolicy::kLru);
    ledger.stored(keys(0, 4), sizes(4));
    LedgerHold hold = ledger.hold(keys(1, 2));
    LedgerHold second = ledger.hold(keys(1, 1));
    ledger.lost(keys(0, 4));
    CHECK(ledger.stats().objects == 0 && ledger.stats().used_bytes == 0 && ledger.stats().namespaces == 1);
    ledger.stored(keys(1, 1), sizes(1));
    CHECK(ledger.victims(1, 10).positions.empty());
    ledger.let_go(hold);
    CHECK(ledger.victims(1, 10).positions.empty());
    ledger.check();
    ledger.let_go(second);
    CHECK(numbers_of(ledger.victims(1, 10)) == std::vector<std::uint64_t>{1});
    ledger.check();
}

TEST_CASE(pages_name_every_object_once_and_end) {
    Ledger ledger(EvictionPolicy::kLru);
    ledger.found(keys(0, 200'000), sizes(200'000));
    const std::uint8_t scan = ledger.begin_scan();
    ledger.found(keys(0, 150'000), sizes(150'000));
    for (const bool unseen : {false, true}) {
        std::size_t listed = 0, pages = 0;
        std::uint32_t start = 0;
        do {
            const LedgerPage page = ledger.list(start, 1000, unseen ? std::optional<std::uint8_t>(scan) : std::nullopt);
            CHECK(page.positions.size() <= 1000 && page.next_start != start);
            listed += page.positions.size();
            start = page.next_start;
            CHECK(++pages < 1000);
        } while (start != 0);
        CHECK(listed == (unseen ? 50'000U : 200'000U));
    }
}

TEST_CASE(what_a_scan_has_seen_and_folders_that_it_passes_over_are_left_out) {
    const auto in_folder = [](std::uint8_t first_byte, std::uint64_t first, std::size_t count) {
        LedgerKeys result = keys(first, count);
        for (std::size_t i = 0; i < count; ++i) result.hashes[i * kChunkHashBytes] = first_byte;
        return result;
    };
    Ledger ledger(EvictionPolicy::kLru);
    for (const std::uint8_t first_byte : {0, 7, 8, 255}) ledger.found(in_folder(first_byte, 0, 100), sizes(100));
    ledger.found(keys(0, 10, 1), sizes(10));
    const std::uint8_t scan = ledger.begin_scan();
    ledger.see(in_folder(8, 0, 40));
    ledger.see(in_folder(8, 5000, 10));  // not known
    ledger.stored(in_folder(8, 2000, 10), sizes(10));
    CHECK(ledger.list(0, 10'000, scan).positions.size() == 370);
    NamespaceFolders folders{keys(0, 0).namespaces[0].digest, {}};
    folders.first_bytes[0] = 1 << 7 | 1;
    folders.first_bytes[31] = 1 << 7;
    const NamespaceFolders of_nobody{keys(0, 0, 9).namespaces[0].digest, {1}};
    const NamespaceFolders passed_over[] = {of_nobody, folders};
    const LedgerPage rest = ledger.list(0, 10'000, scan, passed_over);
    CHECK(rest.positions.size() == 60 + 10);  // of the folder 8, and of another namespace's folder 0
    CHECK(ledger.list(0, 10'000, std::nullopt, passed_over).positions.size() == 110 + 10);
    ledger.check();
}

TEST_CASE(threads_may_call_at_once) {
    for (const EvictionPolicy policy : kPolicies) {
        Ledger ledger(policy);
        ledger.set_capacity({.limit_bytes = 1000 * kObjectBytes, .folder_bytes = 4096});
        std::atomic<bool> stop = false;
        std::vector<std::thread> threads;
        for (std::uint8_t thread = 0; thread < 4; ++thread) {
            threads.emplace_back([&ledger, thread] {
                std::mt19937_64 random(thread);
                for (int step = 0; step < 500; ++step) {
                    const LedgerKeys some = keys(random() % 500, 1 + random() % 20, thread % 2);
                    ledger.reserve(some, kObjectBytes * some.size());
                    ledger.stored(some, sizes(some.size()));
                    ledger.give_back(some, kObjectBytes * some.size());
                    LedgerHold hold = ledger.hold(some);
                    ledger.touch(some);
                    const LedgerPage victims = ledger.victims(5 * kObjectBytes, 5);
                    for (std::uint8_t name_space = 0; name_space < 2; ++name_space) {
                        random() % 2 ? static_cast<void>(ledger.evicted(keys_of(victims, name_space)))
                                     : ledger.not_evicted(keys_of(victims, name_space));
                    }
                    if (random() % 8 == 0) ledger.lost(some);
                    ledger.known(some);
                    ledger.let_go(hold);
                    ledger.set_limit("salt 0", random() % 2 * 1000);
                }
            });
        }
        std::thread reader([&] {
            while (!stop) CHECK(ledger.stats().objects <= 2 * 520);
        });
        for (std::thread& thread : threads) thread.join();
        stop = true;
        reader.join();
        ledger.check();
        CHECK(ledger.stats().read_objects == 0 && ledger.stats().reserved_bytes == 0);
    }
}
