#include "lmcache/ledger.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <cstring>
#include <map>
#include <optional>
#include <span>
#include <unordered_map>
#include <vector>

#include "bindings.h"

namespace {

using lmcache::Ledger;
using lmcache::LedgerChange;
using lmcache::LedgerHold;
using lmcache::LedgerKeys;
using lmcache::LedgerPage;
using lmcache::LedgerStats;

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
LedgerKeys keys_of(nb::handle sequence, const Ledger* added_to = nullptr) {
    const Items items(sequence, "keys must be a sequence of ObjectKey");
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

std::vector<std::uint64_t> sizes_of(nb::handle sequence) {
    const Items items(sequence, "sizes must be a sequence of integers");
    std::vector<std::uint64_t> sizes;
    sizes.reserve(items.size());
    for (std::size_t i = 0; i < items.size(); ++i) sizes.push_back(nb::cast<std::uint64_t>(items[i]));
    return sizes;
}

// Rows of columns, in that order.
LedgerKeys keys_of_rows(const Ledger& added_to, nb::handle namespaces, const PackedView<std::uint32_t>& positions,
                        const PackedView<std::uint8_t>& hashes, std::span<const std::uint32_t> rows,
                        const PackedView<std::uint64_t>& column, std::vector<std::uint64_t>& sizes) {
    constexpr std::uint32_t kNotLookedAt = ~std::uint32_t{0};
    const Items items(namespaces, "namespaces must be a sequence");
    KeysBuilder builder(&added_to);
    std::vector<std::uint32_t> places(items.size(), kNotLookedAt);
    if (hashes.size() != positions.size() * lmcache::kChunkHashBytes || column.size() != positions.size())
        throw std::invalid_argument("columns must have one length");
    for (const std::uint32_t row : rows) {
        if (row >= positions.size() || positions.data()[row] >= places.size())
            throw std::invalid_argument("a row or a position is out of range");
        std::uint32_t& place = places[positions.data()[row]];
        if (place == kNotLookedAt) place = builder.position_of(items[positions.data()[row]]);
        builder.keys.positions.push_back(place);
        const std::uint8_t* hash = hashes.data() + std::size_t{row} * lmcache::kChunkHashBytes;
        builder.keys.hashes.insert(builder.keys.hashes.end(), hash, hash + lmcache::kChunkHashBytes);
        sizes.push_back(column.data()[row]);
    }
    return std::move(builder.keys);
}

// A short call is over before another thread would have the GIL.
template <typename Call>
auto without_gil_if_long(std::size_t keys, Call&& call) {
    constexpr std::size_t kShortKeys = 512;
    if (keys <= kShortKeys) return call();
    const nb::gil_scoped_release released;
    return call();
}

void bind_values(nb::module_& m) {
    nb::class_<LedgerHold>(m, "LedgerHold");
    nb::class_<LedgerChange>(m, "LedgerChange")
        .def_ro("objects", &LedgerChange::objects)
        .def_ro("bytes", &LedgerChange::bytes);
    nb::class_<LedgerPage>(m, "LedgerPage")
        .def("__len__", [](const LedgerPage& self) { return self.positions.size(); })
        .def_prop_ro("namespaces",
                     [](const LedgerPage& self) {
                         nb::list encoded;
                         for (const std::string& name : self.namespaces)
                             encoded.append(nb::bytes(name.data(), name.size()));
                         return encoded;
                     })
        .def_prop_ro("positions", [](const LedgerPage& self) { return packed(self.positions); })
        .def_prop_ro("hashes", [](const LedgerPage& self) { return packed(self.hashes); })
        .def_prop_ro("charges_bytes", [](const LedgerPage& self) { return packed(self.charges_bytes); })
        .def_ro("next_start", &LedgerPage::next_start);
    nb::class_<LedgerStats>(m, "LedgerStats")
        .def_ro("objects", &LedgerStats::objects)
        .def_ro("used_bytes", &LedgerStats::used_bytes)
        .def_ro("reserved_bytes", &LedgerStats::reserved_bytes)
        .def_ro("folders", &LedgerStats::folders)
        .def_ro("leaving_objects", &LedgerStats::leaving_objects)
        .def_ro("read_objects", &LedgerStats::read_objects)
        .def_ro("namespaces", &LedgerStats::namespaces)
        .def_ro("memory_bytes", &LedgerStats::memory_bytes);
}

void bind_contents(nb::class_<Ledger>& ledger) {
    ledger.def(
        "known",
        [](const Ledger& self, nb::handle objects) {
            const LedgerKeys keys = keys_of(objects);
            return packed(without_gil_if_long(keys.size(), [&] { return self.known(keys); }));
        },
        nb::arg("keys"));
    ledger.def(
        "stored",
        [](Ledger& self, nb::handle objects, nb::handle sizes) {
            const LedgerKeys keys = keys_of(objects, &self);
            const auto sizes_bytes = sizes_of(sizes);
            return without_gil_if_long(keys.size(), [&] { return self.stored(keys, sizes_bytes); });
        },
        nb::arg("keys"), nb::arg("sizes_bytes"));
    ledger.def(
        "found",
        [](Ledger& self, nb::handle objects, nb::handle sizes) {
            const LedgerKeys keys = keys_of(objects, &self);
            const auto sizes_bytes = sizes_of(sizes);
            return without_gil_if_long(keys.size(), [&] { return self.found(keys, sizes_bytes); });
        },
        nb::arg("keys"), nb::arg("sizes_bytes"));
    ledger.def(
        "found_rows",
        [](Ledger& self, nb::handle namespaces, nb::handle positions, nb::handle hashes, nb::handle sizes,
           nb::handle rows) {
            const PackedView<std::uint32_t> positions_view(positions, "positions");
            const PackedView<std::uint8_t> hashes_view(hashes, "hashes");
            const PackedView<std::uint64_t> sizes_view(sizes, "sizes_bytes");
            const PackedView<std::uint32_t> rows_view(rows, "rows");
            std::vector<std::uint64_t> sizes_bytes;
            const LedgerKeys keys = keys_of_rows(self, namespaces, positions_view, hashes_view,
                                                 {rows_view.data(), rows_view.size()}, sizes_view, sizes_bytes);
            return without_gil_if_long(keys.size(), [&] { return self.found(keys, sizes_bytes); });
        },
        nb::arg("namespaces"), nb::arg("positions"), nb::arg("hashes"), nb::arg("sizes_bytes"), nb::arg("rows"));
    ledger.def(
        "touch",
        [](Ledger& self, nb::handle objects) {
            const LedgerKeys keys = keys_of(objects);
            return without_gil_if_long(keys.size(), [&] { return self.touch(keys); });
        },
        nb::arg("keys"));
    ledger.def(
        "lost",
        [](Ledger& self, nb::handle objects) {
            const LedgerKeys keys = keys_of(objects);
            return without_gil_if_long(keys.size(), [&] { return self.lost(keys); });
        },
        nb::arg("keys"));
    ledger.def("begin_scan", &Ledger::begin_scan);
    ledger.def(
        "list",
        [](const Ledger& self, std::uint32_t start, std::size_t most, std::optional<std::uint8_t> unseen_by) {
            const nb::gil_scoped_release released;
            return self.list(start, most, unseen_by);
        },
        nb::arg("start"), nb::arg("most"), nb::arg("unseen_by") = nb::none());
}

void bind_eviction(nb::class_<Ledger>& ledger) {
    ledger.def(
        "victims",
        [](Ledger& self, std::uint64_t wanted_bytes, std::size_t most) {
            const nb::gil_scoped_release released;
            return self.victims(wanted_bytes, most);
        },
        nb::arg("wanted_bytes"), nb::arg("most"));
    ledger.def(
        "evicted",
        [](Ledger& self, nb::handle objects) {
            const LedgerKeys keys = keys_of(objects);
            return without_gil_if_long(keys.size(), [&] { return self.evicted(keys); });
        },
        nb::arg("keys"));
    ledger.def(
        "not_evicted",
        [](Ledger& self, nb::handle objects) {
            const LedgerKeys keys = keys_of(objects);
            without_gil_if_long(keys.size(), [&] { self.not_evicted(keys); });
        },
        nb::arg("keys"));
    ledger.def(
        "hold",
        [](Ledger& self, nb::handle objects) {
            const LedgerKeys keys = keys_of(objects);
            return without_gil_if_long(keys.size(), [&] { return self.hold(keys); });
        },
        nb::arg("keys"));
    ledger.def("let_go", &Ledger::let_go, nb::arg("hold"));
}

void bind_capacity(nb::class_<Ledger>& ledger) {
    ledger.def(
        "set_capacity",
        [](Ledger& self, std::optional<std::uint64_t> limit_bytes, std::uint64_t unit_bytes,
           std::uint64_t object_overhead_bytes, std::uint64_t folder_bytes) {
            self.set_capacity({limit_bytes, unit_bytes, object_overhead_bytes, folder_bytes});
        },
        nb::kw_only(), nb::arg("limit_bytes").none(), nb::arg("unit_bytes"), nb::arg("object_overhead_bytes"),
        nb::arg("folder_bytes"));
    ledger.def(
        "set_limit",
        [](Ledger& self, const std::string& salt, std::uint64_t limit_bytes) { self.set_limit(salt, limit_bytes); },
        nb::arg("salt"), nb::arg("limit_bytes"));
    ledger.def(
        "lacking",
        [](const Ledger& self, nb::handle objects, std::uint64_t charge_bytes, std::uint64_t other_bytes) {
            return self.lacking(keys_of(objects), charge_bytes, other_bytes);
        },
        nb::arg("keys"), nb::arg("charge_bytes"), nb::arg("other_bytes"));
    ledger.def(
        "reserve",
        [](Ledger& self, nb::handle objects, std::uint64_t charge_bytes) {
            self.reserve(keys_of(objects, &self), charge_bytes);
        },
        nb::arg("keys"), nb::arg("charge_bytes"));
    ledger.def(
        "give_back",
        [](Ledger& self, nb::handle objects, std::uint64_t charge_bytes) {
            self.give_back(keys_of(objects), charge_bytes);
        },
        nb::arg("keys"), nb::arg("charge_bytes"));
}

}  // namespace

void bind_ledger(nb::module_& m) {
    bind_values(m);
    nb::class_<Ledger> ledger(m, "Ledger");
    ledger.def(
        "__init__",
        [](Ledger* self, const std::string& policy) { new (self) Ledger(lmcache::eviction_policy_named(policy)); },
        nb::arg("policy"));
    bind_contents(ledger);
    bind_eviction(ledger);
    bind_capacity(ledger);
    ledger.def("stats", &Ledger::stats);
    ledger.def("check", &Ledger::check, nb::call_guard<nb::gil_scoped_release>());
}
