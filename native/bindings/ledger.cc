#include "lmcache/ledger.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <cstring>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "bindings.h"
#include "listing.h"

namespace {

using lmcache::Ledger;
using lmcache::LedgerHold;
using lmcache::LedgerKeys;
using lmcache::LedgerPage;
using lmcache::LedgerStats;
using lmcache::NamespaceFolders;

using ObjectKeys = Annotated<"collections.abc.Sequence[lmcache.core.key.ObjectKey]">;
using Namespaces = Annotated<"collections.abc.Sequence[lmcache.core.key.Namespace]">;
using Sizes = std::vector<std::uint64_t>;

std::span<const std::uint8_t> bytes_of(nb::handle object, std::size_t size, const char* name) {
    char* data = nullptr;
    Py_ssize_t length = 0;
    if (PyBytes_Check(object.ptr()) == 0 || PyBytes_AsStringAndSize(object.ptr(), &data, &length) != 0 ||
        static_cast<std::size_t>(length) != size) {
        throw std::invalid_argument(std::string(name) + " must be " + std::to_string(size) + " bytes");
    }
    return {reinterpret_cast<const std::uint8_t*>(data), size};
}

// Builds LedgerKeys from namespaces (lmcache.core.key.Namespace). Each is looked at once. For calls that add objects to
// a ledger: with what it keeps of a namespace, where that is new to it.
class KeysBuilder {
public:
    explicit KeysBuilder(const Ledger* added_to) : added_to_(added_to) {}

    std::uint32_t position_of(nb::handle name_space) {
        if (name_space.ptr() == last_) return last_position_;
        const auto known = by_object_.find(name_space.ptr());
        last_position_ = known != by_object_.end() ? known->second : add(name_space);
        last_ = name_space.ptr();
        return last_position_;
    }

    LedgerKeys keys;

private:
    std::uint32_t add(nb::handle name_space) {
        LedgerKeys::Namespace entry;
        const nb::object digest = name_space.attr("digest");
        std::memcpy(entry.digest.data(), bytes_of(digest, lmcache::kDigestBytes, "a digest").data(),
                    lmcache::kDigestBytes);
        const auto [known, is_new] =
            by_digest_.try_emplace(entry.digest, static_cast<std::uint32_t>(keys.namespaces.size()));
        by_object_.emplace(name_space.ptr(), known->second);
        if (!is_new) return known->second;
        if (added_to_ != nullptr && !added_to_->knows(entry.digest)) {
            entry.salt = nb::cast<std::string>(name_space.attr("cache_salt"));
            const auto encoded = nb::cast<nb::bytes>(name_space.attr("encode")());
            entry.encoded.assign(encoded.c_str(), encoded.size());
        }
        keys.namespaces.push_back(std::move(entry));
        return known->second;
    }

    const Ledger* added_to_;
    PyObject* last_ = nullptr;
    std::uint32_t last_position_ = 0;
    std::unordered_map<PyObject*, std::uint32_t> by_object_;
    std::map<lmcache::Digest, std::uint32_t> by_digest_;
};

// A Python sequence whose items can be looked at one by one.
class Items {
public:
    Items(nb::handle sequence, const char* name) : fast_(nb::steal(PySequence_Fast(sequence.ptr(), name))) {
        if (!fast_.is_valid()) throw nb::python_error();
    }
    std::size_t size() const { return static_cast<std::size_t>(PySequence_Fast_GET_SIZE(fast_.ptr())); }
    nb::handle operator[](std::size_t i) const {
        return PySequence_Fast_GET_ITEM(fast_.ptr(), static_cast<Py_ssize_t>(i));
    }

private:
    nb::object fast_;
};

// From a sequence of ObjectKey.
LedgerKeys keys_of(const ObjectKeys& sequence, const Ledger* added_to = nullptr) {
    const Items items(sequence.object, "keys must be a sequence of ObjectKey");
    KeysBuilder builder(added_to);
    LedgerKeys& keys = builder.keys;
    keys.positions.reserve(items.size());
    keys.hashes.reserve(items.size() * lmcache::kChunkHashBytes);
    for (std::size_t i = 0; i < items.size(); ++i) {
        PyObject* key = items[i].ptr();
        if (PyTuple_Check(key) == 0 || PyTuple_GET_SIZE(key) != 2) {
            throw std::invalid_argument("a key must be an ObjectKey");
        }
        keys.positions.push_back(builder.position_of(PyTuple_GET_ITEM(key, 0)));
        const auto hash = bytes_of(PyTuple_GET_ITEM(key, 1), lmcache::kChunkHashBytes, "a chunk hash");
        keys.hashes.insert(keys.hashes.end(), hash.begin(), hash.end());
    }
    return std::move(builder.keys);
}

// Objects as columns.
struct Columns {
    const Packed<std::uint32_t, "positions">& positions;  // of each namespace
    const Packed<std::uint8_t, "hashes">& hashes;
    const Packed<std::uint64_t, "sizes_bytes">& sizes_bytes;
};

// Rows of columns, in that order.
LedgerKeys keys_of_rows(const Ledger& added_to, const Namespaces& namespaces, const Columns& columns,
                        const Packed<std::uint32_t, "rows">& rows, Sizes& sizes) {
    constexpr std::uint32_t kNotLookedAt = ~std::uint32_t{0};
    const Items items(namespaces.object, "namespaces must be a sequence");
    const auto& [positions, hashes, sizes_bytes] = columns;
    KeysBuilder builder(&added_to);
    std::vector<std::uint32_t> places(items.size(), kNotLookedAt);
    if (hashes.size() != positions.size() * lmcache::kChunkHashBytes || sizes_bytes.size() != positions.size())
        throw std::invalid_argument("columns must have one length");
    for (std::size_t i = 0; i < rows.size(); ++i) {
        const std::uint32_t row = rows[i];
        if (row >= positions.size() || positions[row] >= places.size())
            throw std::invalid_argument("a row or a position is out of range");
        std::uint32_t& place = places[positions[row]];
        if (place == kNotLookedAt) place = builder.position_of(items[positions[row]]);
        builder.keys.positions.push_back(place);
        const std::uint8_t* hash = hashes.data() + std::size_t{row} * lmcache::kChunkHashBytes;
        builder.keys.hashes.insert(builder.keys.hashes.end(), hash, hash + lmcache::kChunkHashBytes);
        sizes.push_back(sizes_bytes[row]);
    }
    return std::move(builder.keys);
}

// Names objects of one namespace.
LedgerKeys keys_of_hashes(std::span<const std::uint8_t> digest, std::span<const std::uint8_t> hashes) {
    if (digest.size() != lmcache::kDigestBytes) throw std::invalid_argument("digest must be 32 bytes");
    if (hashes.size() % lmcache::kChunkHashBytes != 0) throw std::invalid_argument("hashes must be 32 bytes each");
    LedgerKeys keys;
    std::memcpy(keys.namespaces.emplace_back().digest.data(), digest.data(), digest.size());
    keys.positions.resize(hashes.size() / lmcache::kChunkHashBytes);
    keys.hashes.assign(hashes.begin(), hashes.end());
    return keys;
}

std::vector<NamespaceFolders> folders_of(std::span<const std::uint8_t> packed) {
    constexpr std::size_t kBytes = lmcache::kDigestBytes + sizeof(NamespaceFolders::first_bytes);
    if (packed.size() % kBytes != 0) throw std::invalid_argument("passed_over must be 64 bytes a namespace");
    std::vector<NamespaceFolders> folders(packed.size() / kBytes);
    for (std::size_t i = 0; i < folders.size(); ++i) {
        const std::uint8_t* at = packed.data() + i * kBytes;
        std::memcpy(folders[i].digest.data(), at, lmcache::kDigestBytes);
        std::memcpy(folders[i].first_bytes.data(), at + lmcache::kDigestBytes, sizeof(NamespaceFolders::first_bytes));
    }
    return folders;
}

// A short call is over before another thread would have the GIL.
template <typename Call>
auto without_gil_if_long(std::size_t keys, Call&& call) {
    constexpr std::size_t kShortKeys = 512;
    if (keys <= kShortKeys) return call();
    const nb::gil_scoped_release released;
    return call();
}

// A method of the ledger with keys alone, as a function of objects.
template <auto kMethod>
auto with_keys() {
    return [](Ledger& self, const ObjectKeys& objects) {
        const LedgerKeys keys = keys_of(objects);
        return without_gil_if_long(keys.size(), [&] { return (self.*kMethod)(keys); });
    };
}

void bind_values(nb::module_& m) {
    nb::class_<LedgerHold>(m, "LedgerHold", "What one reader holds.");
    nb::class_<LedgerPage>(m, "LedgerPage",
                           "Some objects. `namespaces` are encoded; the rest are columns of one length.")
        .def("__len__", [](const LedgerPage& self) { return self.positions.size(); })
        .def_prop_ro("namespaces",
                     [](const LedgerPage& self) {
                         std::vector<AsBytes<std::string_view>> encoded;
                         for (const std::string& name : self.namespaces) encoded.push_back({name});
                         return encoded;
                     })
        .def_prop_ro("positions", as_bytes(&LedgerPage::positions),
                     "u32 each: where the object's namespace is in `namespaces`.")
        .def_prop_ro("hashes", as_bytes(&LedgerPage::hashes), "32 bytes each.")
        .def_prop_ro("charges_bytes", as_bytes(&LedgerPage::charges_bytes), "u64 each.")
        .def(
            "listing",
            [](const LedgerPage& self, const std::vector<lmcache::ListingTexts>& texts) {
                return listing(self.positions, self.hashes, self.charges_bytes, texts);
            },
            nb::arg("texts"), kListingDoc)
        .def_ro("next_start", &LedgerPage::next_start, "Where the next page starts; 0 after the last one.");
    nb::class_<LedgerStats>(m, "LedgerStats")
        .def_ro("objects", &LedgerStats::objects)
        .def_ro("used_bytes", &LedgerStats::used_bytes)
        .def_ro("reserved_bytes", &LedgerStats::reserved_bytes)
        .def_ro("folders", &LedgerStats::folders)
        .def_ro("leaving_objects", &LedgerStats::leaving_objects,
                "Victims whose deletion has not ended; among `objects`.")
        .def_ro("read_objects", &LedgerStats::read_objects)
        .def_ro("namespaces", &LedgerStats::namespaces)
        .def_ro("memory_bytes", &LedgerStats::memory_bytes);
}

void bind_contents(nb::class_<Ledger>& ledger) {
    ledger.def(
        "known",
        [](const Ledger& self, const ObjectKeys& objects) {
            const LedgerKeys keys = keys_of(objects);
            return AsBytes{without_gil_if_long(keys.size(), [&] { return self.known(keys); })};
        },
        nb::arg("keys"), "A byte each: 0 unknown, 1 known, 2 leaving.");
    ledger.def(
        "held",
        [](const Ledger& self, const ObjectKeys& objects) {
            const LedgerKeys keys = keys_of(objects);
            return AsBytes{without_gil_if_long(keys.size(), [&] { return self.held(keys); })};
        },
        nb::arg("keys"), "A byte each: 1 where somebody holds it.");
    ledger.def(
        "namespaces",
        [](const Ledger& self) {
            std::vector<AsBytes<std::string>> encoded;
            for (std::string& name : self.namespaces()) encoded.push_back({std::move(name)});
            return encoded;
        },
        "Of what is known, as they were encoded.");
    ledger.def(
        "stored",
        [](Ledger& self, const ObjectKeys& objects, const Sizes& sizes_bytes) {
            const LedgerKeys keys = keys_of(objects, &self);
            return without_gil_if_long(keys.size(), [&] { return self.stored(keys, sizes_bytes); });
        },
        nb::arg("keys"), nb::arg("sizes_bytes"),
        "Known from now on, and the youngest: the bytes that they are charged.");
    ledger.def(
        "found",
        [](Ledger& self, const ObjectKeys& objects, const Sizes& sizes_bytes, bool newer) {
            const LedgerKeys keys = keys_of(objects, &self);
            without_gil_if_long(keys.size(), [&] { self.found(keys, sizes_bytes, newer); });
        },
        nb::arg("keys"), nb::arg("sizes_bytes"), nb::arg("newer") = false,
        "Youngest first, and older than all that is known, or all newer; what is known already is left as it is.");
    ledger.def(
        "found_rows",
        [](Ledger& self, const Namespaces& namespaces, const Packed<std::uint32_t, "positions">& positions,
           const Packed<std::uint8_t, "hashes">& hashes, const Packed<std::uint64_t, "sizes_bytes">& sizes_bytes,
           const Packed<std::uint32_t, "rows">& rows, bool newer) {
            Sizes sizes;
            const LedgerKeys keys = keys_of_rows(self, namespaces, {positions, hashes, sizes_bytes}, rows, sizes);
            without_gil_if_long(keys.size(), [&] { self.found(keys, sizes, newer); });
        },
        nb::arg("namespaces"), nb::arg("positions"), nb::arg("hashes"), nb::arg("sizes_bytes"), nb::arg("rows"),
        nb::arg("newer") = false,
        "`found` of the rows (u32), in that order, of columns (u32, 32 bytes and u64 an object).");
    ledger.def("touch", with_keys<&Ledger::touch>(), nb::arg("keys"), "They were used: how many are known.");
    ledger.def("lost", with_keys<&Ledger::lost>(), nb::arg("keys"), "They are gone without having been evicted.");
    ledger.def("begin_scan", &Ledger::begin_scan,
               "The number of a scan: objects that are stored or found from now on have been seen by it.");
    ledger.def("watch_changes", &Ledger::watch_changes, "As of L1Core.");
    ledger.def("unwatch_changes", &Ledger::unwatch_changes);
    ledger.def("changes", &Ledger::changes, nb::arg("cursor"), nb::arg("most"), ReleaseGil(),
               "What became known, or is charged otherwise, and what is known no longer, in order, at most so many.");
    ledger.def(
        "known_in_all",
        [](const Ledger& self, const Packed<lmcache::Digest, "namespaces">& namespaces,
           const Packed<std::uint8_t, "hashes">& hashes) { return AsBytes{self.known_in_all(namespaces, hashes)}; },
        nb::arg("namespaces"), nb::arg("hashes"), ReleaseGil(),
        "For each chunk a byte: 1 if it is known in every one of the namespaces (packed digests).");
    ledger.def(
        "see",
        [](Ledger& self, const Packed<std::uint8_t, "digest">& digest, const Packed<std::uint8_t, "hashes">& hashes) {
            self.see(keys_of_hashes(digest, hashes));
        },
        nb::arg("digest"), nb::arg("hashes"), ReleaseGil(),
        "The scan that began last has seen what is known of these, 32 bytes each, in the namespace of that digest.");
    ledger.def(
        "list",
        [](Ledger& self, std::uint32_t start, std::size_t most, std::optional<std::uint8_t> unseen_by,
           const Packed<std::uint8_t, "passed_over">& passed_over) {
            return self.list(start, most, unseen_by, folders_of(passed_over));
        },
        nb::arg("start"), nb::arg("most"), nb::arg("unseen_by") = nb::none(), nb::arg("passed_over") = nb::bytes("", 0),
        ReleaseGil(),
        "A page of at most `most` known objects, maybe empty, from `start` on, which is 0 at first. Objects stored "
        "meanwhile may be missed. `unseen_by`: only those that this scan, one of the last 255, has not seen. "
        "`passed_over`: folders whose objects are left out, 64 bytes a namespace: its digest, then a bit for each "
        "first byte of a hash, the lowest bit of a byte first.");
}

void bind_eviction(nb::class_<Ledger>& ledger) {
    ledger.def("victims", &Ledger::victims, nb::arg("wanted_bytes"), nb::arg("most"), ReleaseGil(),
               "Who goes next until they have `wanted_bytes`, at most so many. They are leaving until `evicted` or "
               "`not_evicted`: charged, to be loaded, and no victims.");
    ledger.def("evicted", with_keys<&Ledger::evicted>(), nb::arg("keys"),
               "What has gone of them: its bytes. Those that are not leaving are left as they are.");
    ledger.def("not_evicted", with_keys<&Ledger::not_evicted>(), nb::arg("keys"),
               "Those that are leaving stay, in their previous places.");
    ledger.def("hold", with_keys<&Ledger::hold>(), nb::arg("keys"),
               "Those that are known are no victims until `let_go`.");
    ledger.def("let_go", &Ledger::let_go, nb::arg("hold"), "Idempotent.");
}

void bind_capacity(nb::class_<Ledger>& ledger) {
    ledger.def(
        "set_capacity",
        [](Ledger& self, std::optional<std::uint64_t> limit_bytes, std::uint64_t unit_bytes,
           std::uint64_t object_overhead_bytes, std::uint64_t folder_bytes) {
            self.set_capacity({limit_bytes, unit_bytes, object_overhead_bytes, folder_bytes});
        },
        nb::kw_only(), nb::arg("limit_bytes").none(), nb::arg("unit_bytes"), nb::arg("object_overhead_bytes"),
        nb::arg("folder_bytes"),
        "An object is charged its size rounded up to a unit, plus the overhead; what is known already keeps its "
        "charge. `folder_bytes` of each folder: one a namespace, and in it one for each first byte of a hash; 0 where "
        "there are none.");
    ledger.def(
        "set_limit",
        [](Ledger& self, const std::string& salt, std::uint64_t limit_bytes) { self.set_limit(salt, limit_bytes); },
        nb::arg("salt"), nb::arg("limit_bytes"),
        "Under IsolatedLRU: in which ratio the salts share. 0: no limit; such a salt gives first.");
    ledger.def(
        "lacking",
        [](const Ledger& self, const ObjectKeys& objects, std::uint64_t charge_bytes, std::uint64_t other_bytes) {
            return self.lacking(keys_of(objects), charge_bytes, other_bytes);
        },
        nb::arg("keys"), nb::arg("charge_bytes"), nb::arg("other_bytes"),
        "Bytes that must go before these keys may be stored, beside `other_bytes` of the backend.");
    ledger.def(
        "reserve",
        [](Ledger& self, const ObjectKeys& objects, std::uint64_t charge_bytes) {
            self.reserve(keys_of(objects, &self), charge_bytes);
        },
        nb::arg("keys"), nb::arg("charge_bytes"));
    ledger.def(
        "give_back",
        [](Ledger& self, const ObjectKeys& objects, std::uint64_t charge_bytes) {
            self.give_back(keys_of(objects), charge_bytes);
        },
        nb::arg("keys"), nb::arg("charge_bytes"), "Keys that were reserved for.");
}

}  // namespace

void bind_ledger(nb::module_& m) {
    bind_values(m);
    nb::class_<Ledger> ledger(m, "Ledger",
                              "What an adapter holds and in which order it may go. Keys are in prefix order. "
                              "Thread-safe. What a call costs depends on its keys, not on how many objects are known.");
    ledger.def(
        "__init__",
        [](Ledger* self, const std::string& policy) { new (self) Ledger(lmcache::eviction_policy_named(policy)); },
        nb::arg("policy"), "\"LRU\", \"IsolatedLRU\", \"S3FIFO\" or \"noop\".");
    bind_contents(ledger);
    bind_eviction(ledger);
    bind_capacity(ledger);
    ledger.def("stats", &Ledger::stats);
    ledger.def("check", &Ledger::check, ReleaseGil(), "RuntimeError that names the broken invariant. O(objects).");
}
