#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <limits>
#include <optional>
#include <vector>

#include "bindings.h"
#include "lmcache/l1_core.h"
#include "lmcache/recovered_frames.h"

namespace {

using lmcache::L1Core;

// Digests of namespaces and chunk hashes come first in most calls.
using Digests = Packed<lmcache::Digest, "namespaces">;
using Hashes = Packed<std::uint8_t, "hashes">;
using TailChunks = Packed<std::uint32_t, "tails">;
static_assert(sizeof(lmcache::Digest) == lmcache::kDigestBytes && alignof(lmcache::Digest) == 1);

nb::typed<nb::dict, nb::str, std::uint64_t> to_dict(const lmcache::L1Stats& stats) {
    nb::typed<nb::dict, nb::str, std::uint64_t> result;
    result["capacity_bytes"] = stats.capacity_bytes;
    result["committed_bytes"] = stats.committed_bytes;
    result["used_bytes"] = stats.used_bytes;
    result["free_bytes"] = stats.free_bytes;
    result["largest_free_bytes"] = stats.largest_free_bytes;
    result["objects"] = stats.objects;
    result["staged"] = stats.staged;
    result["leases"] = stats.leases;
    result["leased_objects"] = stats.leased_objects;
    result["reservations"] = stats.reservations;
    result["quarantined_bytes"] = stats.quarantined_bytes;
    result["evicted_objects"] = stats.evicted_objects;
    result["evicted_bytes"] = stats.evicted_bytes;
    result["allocation_failures"] = stats.allocation_failures;
    result["index_bytes"] = stats.index_bytes;
    result["above_limits_bytes"] = stats.above_limits_bytes;
    result["namespaces"] = stats.namespaces;
    result["salts"] = stats.salts;
    return result;
}

void bind_reading(nb::class_<L1Core>& core) {
    core.def(
        "probe",
        [](L1Core& self, const Digests& namespaces, const Hashes& hashes) { return self.probe(namespaces, hashes); },
        nb::arg("namespaces"), nb::arg("hashes"), ReleaseGil(),
        "Length in chunks of the longest prefix that is resident in every namespace. Takes nothing, touches nothing.");
    core.def(
        "acquire",
        [](L1Core& self, lmcache::Owner owner, const Digests& namespaces, const Hashes& hashes, double deadline,
           bool is_use, const TailChunks& tails) {
            const auto reading = is_use ? lmcache::Reading::kUse : lmcache::Reading::kCopy;
            return self.acquire(owner, namespaces, hashes, deadline, reading, tails);
        },
        nb::arg("owner"), nb::arg("namespaces"), nb::arg("hashes"), nb::arg("deadline"), nb::kw_only(),
        nb::arg("is_use") = true, maybe_empty("tails"), ReleaseGil(),
        "Leases that prefix. Marks use so that a suffix is evicted before its prefix; without `is_use` the objects are "
        "held and keep the turn that they had. `tails`: u32 per namespace, of how many chunks at the end of the prefix "
        "it must have objects, 0 for all of them; what lies before a tail is not leased (NO_SLOT). Empty: no tails.");
    core.def(
        "acquire_each",
        [](L1Core& self, lmcache::Owner owner, const Digests& namespaces, const Hashes& hashes, double deadline) {
            return self.acquire_each(owner, namespaces, hashes, deadline);
        },
        nb::arg("owner"), nb::arg("namespaces"), nb::arg("hashes"), nb::arg("deadline"), ReleaseGil(),
        "Leases as one, pairwise (namespace_i, hash_i), what is resident of these objects, without use. `chunks` "
        "counts them; `slots` has one for each pair, NO_SLOT for what is not there.");
    core.def(
        "resident_each",
        [](L1Core& self, const Digests& namespaces, const Hashes& hashes) {
            return AsBytes{self.resident_each(namespaces, hashes)};
        },
        nb::arg("namespaces"), nb::arg("hashes"), ReleaseGil(),
        "One byte for each pair (namespace_i, hash_i): 1 if that object is resident.");
    core.def(
        "touch",
        [](L1Core& self, const Digests& namespaces, const Hashes& hashes, const TailChunks& tails) {
            return self.touch(namespaces, hashes, tails);
        },
        nb::arg("namespaces"), nb::arg("hashes"), nb::kw_only(), maybe_empty("tails"), ReleaseGil(),
        "Marks use of that prefix without leasing it; returns its chunks. A prompt that was stored in several steps "
        "gets its order (suffix evicted before prefix) when its whole prefix is touched at the end of the request. A "
        "namespace with a tail does not shorten the prefix: what it has is touched.");
    core.def(
        "retain",
        [](L1Core& self, const Digests& namespaces, const Hashes& hashes) { return self.retain(namespaces, hashes); },
        nb::arg("namespaces"), nb::arg("hashes"), ReleaseGil(),
        "Pairs (namespace_i, hash_i): those that would go with their last lease stay. How many are resident.");
    core.def("release", &L1Core::release, nb::arg("lease"), ReleaseGil(),
             "Idempotent; False if the lease is unknown or already released.");
    core.def("renew", &L1Core::renew, nb::arg("owner"), nb::arg("deadline"), ReleaseGil(),
             "Moves the deadline of every lease and reservation of an owner; returns how many.");
}

void bind_writing(nb::class_<L1Core>& core) {
    core.def(
        "reserve",
        [](L1Core& self, lmcache::Owner owner, const Digests& namespaces, const std::string& salt,
           const Packed<std::uint64_t, "sizes">& sizes, const Hashes& hashes, double deadline,
           const Packed<std::uint8_t, "wanted">& wanted) {
            return self.reserve(owner, namespaces, salt, sizes, hashes, deadline, wanted);
        },
        nb::arg("owner"), nb::arg("namespaces"), nb::arg("salt"), nb::arg("sizes"), nb::arg("hashes"),
        nb::arg("deadline"), nb::kw_only(), maybe_empty("wanted"), ReleaseGil(),
        "Slots for n chunks in m namespaces of one salt.\n\n"
        "`wanted`: one byte per (namespace, chunk), 0 where no slot is wanted; empty: everywhere. `sizes`: u64 bytes "
        "of the whole frame per namespace (rounded up to the alignment inside). NO_SLOT where the object is resident "
        "or staged already. Evicts inline; when room runs out the longest prefix of chunks gets slots, no chunk "
        "partly.");
    core.def(
        "commit",
        [](L1Core& self, std::uint64_t reservation, const Packed<std::uint8_t, "written">& written,
           lmcache::Owner lease_owner, double deadline,
           bool temporary) { return self.commit(reservation, written, {lease_owner, deadline, temporary}); },
        nb::arg("reservation"), maybe_empty("written"), nb::kw_only(), nb::arg("lease_owner") = 0,
        nb::arg("deadline") = 0.0, nb::arg("temporary") = false, ReleaseGil(),
        "Ends a reservation.\n\n"
        "`written`: one byte per (namespace, chunk), 1 = publish, 0 = abort; empty = publish all. With lease_owner the "
        "new objects are leased at once. `temporary` objects vanish with their last lease. An unknown, expired or "
        "already ended reservation commits nothing - never an error, never a publish.");
    core.def("abort", &L1Core::abort, nb::arg("reservation"), ReleaseGil());
    core.def(
        "quarantine", [](L1Core& self, std::uint64_t reservation) { return self.quarantine(reservation); },
        nb::arg("reservation"), ReleaseGil(),
        "Its writer is late: the keys are free for others at once, the memory with abort. It cannot be committed any "
        "more.");
}

void bind_eviction(nb::class_<L1Core>& core) {
    core.def("expire", &L1Core::expire, nb::arg("now"), ReleaseGil(),
             "Ends leases and quarantines reservations that are past their deadline. A quarantined reservation can no "
             "longer be committed; its memory stays taken until drop_owner or abort.");
    core.def("drop_owner", &L1Core::drop_owner, nb::arg("owner"), ReleaseGil(),
             "The owner is gone and writes no more: its leases end, its reservations are freed.");
    core.def("evict", &L1Core::evict, nb::arg("target_bytes"), ReleaseGil(),
             "Frees at least that many bytes if it can. Leased objects are never victims.");
    core.def(
        "set_limit",
        [](L1Core& self, const std::string& salt, std::uint64_t limit_bytes) { self.set_limit(salt, limit_bytes); },
        nb::arg("salt"), nb::arg("limit_bytes"), ReleaseGil(),
        "Under IsolatedLRU, what the objects of a salt may keep; 0 is what a salt has that was never given one. A salt "
        "goes beyond its limit while there is room; what it has beyond goes first, and never costs a salt within its "
        "limit anything. Without effect under other policies.");
    core.def("enforce_limits", &L1Core::enforce_limits, nb::kw_only(), nb::arg("spare_new") = false, ReleaseGil(),
             "Evicts what salts have above their limits as far as nobody reads it. With `spare_new` not what became "
             "resident since the last such call.");
    core.def("take_overuses", &L1Core::take_overuses, ReleaseGil(),
             "Salts that stored, or had no room to store, beyond their limits since the last call; each once for as "
             "long as it has objects.");
    core.def(
        "remove",
        [](L1Core& self, const Digests& namespaces, const Hashes& hashes, lmcache::Fate fate) {
            return self.remove(namespaces, hashes, fate);
        },
        nb::arg("namespaces"), nb::arg("hashes"), nb::kw_only(), nb::arg("fate") = lmcache::Fate::kUnknown,
        ReleaseGil(),
        "Removes unleased objects, pairwise (namespace_i, hash_i): how many. `fate` is remembered of them.");
    core.def(
        "fate_of",
        [](L1Core& self, const Digests& namespaces, const Hashes& hash) {
            if (hash.size() != lmcache::kChunkHashBytes) throw std::invalid_argument("hash must be 32 bytes");
            return self.fate_of(namespaces, hash.data());
        },
        nb::arg("namespaces"), nb::arg("hash"), ReleaseGil(),
        "Of one chunk: why the first of its objects that is not resident is not. The latest 2^19 are remembered, as "
        "32-bit fingerprints.");
    core.def("clear", &L1Core::clear, nb::kw_only(), nb::arg("spared_owner") = 0, ReleaseGil(),
             "Removes every unleased object. What `spared_owner` leases stays as it is (0: nobody is spared). Leased "
             "ones are not found any more and vanish with their last lease.");
}

void bind_report(nb::class_<L1Core>& core) {
    core.def(
        "list_objects", &L1Core::list_objects, nb::arg("start"), nb::arg("count"),
        nb::arg("most_examined") = std::numeric_limits<std::size_t>::max(), ReleaseGil(),
        "At most `count` resident objects in the order of their records, from `start` on. A record keeps its place "
        "while the object stays. With `most_examined` a page may be short, or empty, and not the last one.");
    core.def(
        "stats",
        [](L1Core& self) {
            const lmcache::L1Stats stats = [&] {
                const nb::gil_scoped_release released;
                return self.stats();
            }();
            return to_dict(stats);
        },
        "capacity_bytes, committed_bytes, used_bytes, free_bytes, largest_free_bytes, objects, staged, leases, "
        "leased_objects, reservations, quarantined_bytes, evicted_objects, evicted_bytes, allocation_failures "
        "(chunks), index_bytes, above_limits_bytes (what salts take beyond their limits), namespaces, salts (known "
        "now).");
    core.def(
        "watch_changes", &L1Core::watch_changes, ReleaseGil(),
        "A reader more, until it says `unwatch_changes`: from the cursor that this gives on it can read `changes`. "
        "The latest 2^18 are kept while somebody watches, and nothing else.");
    core.def("unwatch_changes", &L1Core::unwatch_changes, ReleaseGil());
    core.def("changes", &L1Core::changes, nb::arg("cursor"), nb::arg("most"), ReleaseGil(),
             "Which objects became resident and which left, in order, at most so many.");
    core.def(
        "resident_in_all",
        [](L1Core& self, const Digests& namespaces, const Hashes& hashes) {
            return AsBytes{self.resident_in_all(namespaces, hashes)};
        },
        nb::arg("namespaces"), nb::arg("hashes"), ReleaseGil(),
        "For each chunk a byte: 1 if it is resident in every one of the namespaces. Touches nothing.");
    core.def("set_age_sample_rate", &L1Core::set_age_sample_rate, nb::arg("rate"), ReleaseGil(),
             "The fraction of objects stored from now on that is sampled for `take_ages`, 0 (as at first) to 1. Always "
             "the same keys.");
    core.def("take_ages", &L1Core::take_ages, ReleaseGil(), "Of sampled objects, since the last call.");
    core.def(
        "usage_of", [](L1Core& self, const std::string& salt) { return self.usage_of(salt); }, nb::arg("salt"),
        ReleaseGil());
    core.def("salt_usage", &L1Core::salt_usage, ReleaseGil());
    core.def("check", &L1Core::check, ReleaseGil(),
             "Asserts every invariant (used + free == committed, lists, counts); RuntimeError names the one broken. "
             "O(objects).");
}

void bind_recovery(nb::module_& m, nb::class_<L1Core>& core) {
    m.def(
        "recover_frames",
        [](std::uintptr_t slot_table, std::uintptr_t arena, std::uint64_t committed_bytes, std::uint64_t align_bytes,
           std::size_t threads) {
            if (align_bytes == 0) throw std::invalid_argument("align_bytes must be more than 0");
            return lmcache::recover_frames(lmcache::SlotTable(slot_table), memory_at(arena),
                                           static_cast<std::uint32_t>(committed_bytes / align_bytes), align_bytes,
                                           threads);
        },
        nb::arg("slot_table"), nb::arg("arena"), nb::arg("committed_bytes"), nb::arg("align_bytes"), nb::arg("threads"),
        ReleaseGil(), "Reads the slot table at that address (no GIL). `arena`: address of the first slot.");
    core.def(
        "recover",
        [](L1Core& self, const lmcache::RecoveredFrames& found, const std::vector<std::optional<std::string>>& salts,
           const Packed<lmcache::Owner, "live_owners">& live_owners) {
            return self.recover(found, salts, live_owners);
        },
        nb::arg("found"), nb::arg("salts"), nb::arg("live_owners"), ReleaseGil(),
        "Fills a core that never held anything with the frames of the previous server. `salts`: those of "
        "`found.namespaces`, None where one is to be dropped. Slots that owners in `live_owners` (i64) were writing "
        "are quarantined, those of others are free.");
}

}  // namespace

void bind_l1(nb::module_& m) {
    m.def(
        "usable_prefix",
        [](const Packed<std::uint8_t, "present">& present, const TailChunks& tails) {
            const std::size_t width = tails.size();
            if (width == 0 || present.size() % width != 0)
                throw std::invalid_argument("present must hold one byte for each chunk and each of tails");
            return lmcache::usable_prefix(present.size() / width, tails, [&](std::size_t chunk, std::size_t position) {
                return present[chunk * width + position] != 0;
            });
        },
        nb::arg("present"), nb::arg("tails"),
        "Chunks of the longest prefix that can be used. `present`: one byte for each [chunk][namespace]; `tails`: u32 "
        "per namespace as in L1Core.acquire. What lies before the first chunk counts as there.");
    nb::enum_<lmcache::Fate>(m, "Fate", "Why an object is not resident.")
        .value("UNKNOWN", lmcache::Fate::kUnknown, "never here, or forgotten")
        .value("EVICTED", lmcache::Fate::kEvicted, "to make room")
        .value("OVER_QUOTA", lmcache::Fate::kOverQuota, "while its salt had more than its limit")
        .value("CLEARED", lmcache::Fate::kCleared, "by an operator")
        .value("ABANDONED", lmcache::Fate::kAbandoned, "its writer vanished before the commit")
        .value("NO_ROOM", lmcache::Fate::kNoRoom, "no slot could be had for it")
        .value("CORRUPT", lmcache::Fate::kCorrupt, "it did not verify")
        .value("BEING_STORED", lmcache::Fate::kBeingStored, "reserved, not committed yet");
    nb::class_<L1Core> core(
        m, "L1Core",
        "Allocator, index, leases and reservations over one arena. Time is passed in. Slots are offsets from the arena "
        "start. `namespaces` are packed digests, 32 bytes each; nothing is kept of one without objects.\n\n"
        "Object states: absent -> staged(owner) -> resident(readers) -> absent. Owners are small integers chosen by "
        "the caller.");
    core.def(
        "__init__",
        [](L1Core* self, std::uint64_t capacity_bytes, std::uint64_t first_offset, std::uint64_t align_bytes,
           const std::string& policy, std::uintptr_t slot_table) {
            new (self) L1Core({.capacity_bytes = capacity_bytes,
                               .first_offset = first_offset,
                               .align_bytes = align_bytes,
                               .policy = lmcache::eviction_policy_named(policy),
                               .slot_table = slot_table});
        },
        nb::arg("capacity_bytes"), nb::arg("first_offset"), nb::arg("align_bytes"), nb::arg("policy"), nb::kw_only(),
        nb::arg("slot_table") = 0,
        "policy: \"LRU\", \"IsolatedLRU\", \"S3FIFO\" or \"noop\". Usable range: [first_offset, first_offset + "
        "capacity_bytes). `slot_table`: address of one u64 for each align_bytes of the capacity, zero at first, in "
        "memory that outlives the process; what is handed out is written down there (docs/formats/shared_memory.md). "
        "0: nothing is kept.");
    core.def("close", &L1Core::close, ReleaseGil(),
             "Waits for the call that is under way. From then on every method raises ServerUnavailable and touches "
             "nothing. Idempotent.");
    bind_recovery(m, core);
    core.def("set_committed", &L1Core::set_committed, nb::arg("committed_bytes"), ReleaseGil(),
             "How much of the capacity has memory behind it; the allocator never goes beyond. Only grows.");
    bind_reading(core);
    bind_writing(core);
    bind_eviction(core);
    bind_report(core);
}
