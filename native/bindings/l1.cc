#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <optional>
#include <set>
#include <span>
#include <tuple>
#include <vector>

#include "bindings.h"
#include "lmcache/l1_core.h"
#include "lmcache/left_frames.h"

namespace {

using lmcache::L1Core;

// Small arrays are copied: a Python buffer may be a slice that is not aligned to its elements.
template <typename T>
std::vector<T> copy_elements(nb::handle object, const char* name) {
    const PackedView<T> view(object, name);
    std::vector<T> elements(view.size());
    if (!elements.empty()) std::memcpy(elements.data(), view.data(), elements.size() * sizeof(T));
    return elements;
}

template <typename T>
nb::bytes pack(const std::vector<T>& elements) {
    return nb::bytes(reinterpret_cast<const char*>(elements.data()), elements.size() * sizeof(T));
}

// Hashes or flags, seen in place for the length of a call.
class BytesArgument {
public:
    BytesArgument(nb::handle object, const char* name) : view_(object, name) {}
    std::span<const std::uint8_t> span() const { return {view_.data(), view_.size()}; }

private:
    PackedView<std::uint8_t> view_;
};

// Digests of namespaces, seen in place as well.
class NamespacesArgument {
public:
    explicit NamespacesArgument(nb::handle object) : view_(object, "namespaces") {}
    lmcache::NamespaceDigests span() const { return {view_.data(), view_.size()}; }

private:
    static_assert(sizeof(lmcache::Digest) == lmcache::kDigestBytes && alignof(lmcache::Digest) == 1);
    PackedView<lmcache::Digest> view_;
};

// Namespaces and hashes come first in most calls.
struct Keys {
    Keys(nb::handle namespaces_object, nb::handle hashes_object)
        : namespaces_view(namespaces_object), hashes(hashes_object, "hashes"), namespaces(namespaces_view.span()) {}
    NamespacesArgument namespaces_view;
    BytesArgument hashes;
    lmcache::NamespaceDigests namespaces;
};

template <typename Call>
auto without_gil(Call&& call) {
    const nb::gil_scoped_release released;
    return call();
}

void translate_closed(const std::exception_ptr& fault, void*) {
    try {
        std::rethrow_exception(fault);
    } catch (const lmcache::Closed&) {
        const nb::object type = nb::module_::import_("lmcache.errors").attr("ServerUnavailable");
        PyErr_SetString(type.ptr(), "The server is shutting down: L1 is closed.");
    }
}

lmcache::EvictionPolicy policy_of(const std::string& name) {
    using lmcache::EvictionPolicy;
    if (name == "LRU") return EvictionPolicy::kLru;
    if (name == "IsolatedLRU") return EvictionPolicy::kIsolatedLru;
    if (name == "S3FIFO") return EvictionPolicy::kS3Fifo;
    if (name == "noop") return EvictionPolicy::kNoop;
    throw std::invalid_argument("policy must be LRU, IsolatedLRU, S3FIFO or noop, not \"" + name + "\"");
}

nb::dict to_dict(const lmcache::L1Stats& stats) {
    nb::dict result;
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
        [](L1Core& self, nb::handle namespaces, nb::handle hashes) {
            const Keys keys(namespaces, hashes);
            return without_gil([&] { return self.probe(keys.namespaces, keys.hashes.span()); });
        },
        nb::arg("namespaces"), nb::arg("hashes"));
    core.def(
        "touch",
        [](L1Core& self, nb::handle namespaces, nb::handle hashes, nb::handle tails) {
            const Keys keys(namespaces, hashes);
            const auto tail_chunks = copy_elements<std::uint32_t>(tails, "tails");
            return without_gil([&] { return self.touch(keys.namespaces, keys.hashes.span(), tail_chunks); });
        },
        nb::arg("namespaces"), nb::arg("hashes"), nb::arg("tails") = nb::bytes("", 0));
    core.def(
        "acquire",
        [](L1Core& self, lmcache::Owner owner, nb::handle namespaces, nb::handle hashes, double deadline, bool is_use,
           nb::handle tails) {
            const Keys keys(namespaces, hashes);
            const auto reading = is_use ? lmcache::Reading::kUse : lmcache::Reading::kCopy;
            const auto tail_chunks = copy_elements<std::uint32_t>(tails, "tails");
            const auto acquired = without_gil([&] {
                return self.acquire(owner, keys.namespaces, keys.hashes.span(), deadline, reading, tail_chunks);
            });
            return std::make_tuple(acquired.lease, acquired.chunks, pack(acquired.offsets));
        },
        nb::arg("owner"), nb::arg("namespaces"), nb::arg("hashes"), nb::arg("deadline"), nb::arg("is_use") = true,
        nb::arg("tails") = nb::bytes("", 0));
    core.def("release", &L1Core::release, nb::arg("lease"), nb::call_guard<nb::gil_scoped_release>());
    core.def("renew", &L1Core::renew, nb::arg("owner"), nb::arg("deadline"), nb::call_guard<nb::gil_scoped_release>());
    core.def(
        "make_permanent",
        [](L1Core& self, nb::handle namespaces, nb::handle hashes) {
            const Keys keys(namespaces, hashes);
            return without_gil([&] { return self.make_permanent(keys.namespaces, keys.hashes.span()); });
        },
        nb::arg("namespaces"), nb::arg("hashes"));
}

void bind_writing(nb::class_<L1Core>& core) {
    core.def(
        "reserve",
        [](L1Core& self, lmcache::Owner owner, nb::handle namespaces, const std::string& salt, nb::handle sizes,
           nb::handle hashes, double deadline, nb::handle wanted) {
            const Keys keys(namespaces, hashes);
            const auto sizes_bytes = copy_elements<std::uint64_t>(sizes, "sizes");
            const BytesArgument flags(wanted, "wanted");
            const auto reserved = without_gil([&] {
                return self.reserve(owner, keys.namespaces, salt, sizes_bytes, keys.hashes.span(), deadline,
                                    flags.span());
            });
            return std::make_tuple(reserved.reservation, pack(reserved.offsets), reserved.chunks_without_room);
        },
        nb::arg("owner"), nb::arg("namespaces"), nb::arg("salt"), nb::arg("sizes"), nb::arg("hashes"),
        nb::arg("deadline"), nb::arg("wanted") = nb::bytes("", 0));
    core.def(
        "commit",
        [](L1Core& self, std::uint64_t reservation, nb::handle written, lmcache::Owner lease_owner, double deadline,
           bool temporary) {
            const BytesArgument flags(written, "written");
            const auto committed =
                without_gil([&] { return self.commit(reservation, flags.span(), {lease_owner, deadline, temporary}); });
            return std::make_tuple(committed.records.size(), committed.lease, pack(committed.records));
        },
        nb::arg("reservation"), nb::arg("written"), nb::arg("lease_owner") = 0, nb::arg("deadline") = 0.0,
        nb::arg("temporary") = false);
    core.def("abort", &L1Core::abort, nb::arg("reservation"), nb::call_guard<nb::gil_scoped_release>());
    core.def(
        "quarantine", [](L1Core& self, std::uint64_t reservation) { return self.quarantine(reservation); },
        nb::arg("reservation"), nb::call_guard<nb::gil_scoped_release>());
}

void bind_upkeep(nb::class_<L1Core>& core) {
    core.def("expire", &L1Core::expire, nb::arg("now"), nb::call_guard<nb::gil_scoped_release>());
    core.def("drop_owner", &L1Core::drop_owner, nb::arg("owner"), nb::call_guard<nb::gil_scoped_release>());
    core.def(
        "evict",
        [](L1Core& self, std::uint64_t target_bytes) {
            const auto removed = without_gil([&] { return self.evict(target_bytes); });
            return std::make_pair(removed.objects, removed.size_bytes);
        },
        nb::arg("target_bytes"));
    core.def(
        "set_limit",
        [](L1Core& self, const std::string& salt, std::uint64_t limit_bytes) {
            without_gil([&] { self.set_limit(salt, limit_bytes); });
        },
        nb::arg("salt"), nb::arg("limit_bytes"));
    core.def(
        "enforce_limits",
        [](L1Core& self, bool spare_new) {
            const auto removed = without_gil([&] { return self.enforce_limits(spare_new); });
            return std::make_pair(removed.objects, removed.size_bytes);
        },
        nb::arg("spare_new") = false);
    core.def(
        "remove",
        [](L1Core& self, nb::handle namespaces, nb::handle hashes) {
            const Keys keys(namespaces, hashes);
            return without_gil([&] { return self.remove(keys.namespaces, keys.hashes.span()); });
        },
        nb::arg("namespaces"), nb::arg("hashes"));
    core.def("clear", [](L1Core& self) {
        const auto removed = without_gil([&] { return self.clear(); });
        return std::make_pair(removed.objects, removed.size_bytes);
    });
    core.def(
        "list_objects",
        [](L1Core& self, std::uint32_t start, std::size_t count) {
            const auto page = without_gil([&] { return self.list_objects(start, count); });
            return std::make_tuple(pack(page.namespaces), pack(page.positions), pack(page.hashes),
                                   pack(page.sizes_bytes), page.next_start);
        },
        nb::arg("start"), nb::arg("count"));
    core.def("stats", [](L1Core& self) { return to_dict(without_gil([&] { return self.stats(); })); });
    core.def("set_age_sample_rate", &L1Core::set_age_sample_rate, nb::arg("rate"),
             nb::call_guard<nb::gil_scoped_release>());
    core.def("take_ages", [](L1Core& self) {
        auto ages = without_gil([&] { return self.take_ages(); });
        return std::make_tuple(std::move(ages.lifetimes), std::move(ages.idle_before_eviction),
                               std::move(ages.reuse_gaps));
    });
    core.def("take_overuses", [](L1Core& self) {
        std::vector<std::pair<std::string, std::uint64_t>> overuses;
        for (auto& [salt, limit_bytes] : without_gil([&] { return self.take_overuses(); })) {
            overuses.emplace_back(std::move(salt), limit_bytes);
        }
        return overuses;
    });
    core.def(
        "usage_of",
        [](L1Core& self, const std::string& salt) { return without_gil([&] { return self.usage_of(salt); }); },
        nb::arg("salt"));
    core.def("salt_usage", &L1Core::salt_usage, nb::call_guard<nb::gil_scoped_release>());
    core.def("check", &L1Core::check, nb::call_guard<nb::gil_scoped_release>());
}

void bind_adoption(nb::module_& m, nb::class_<L1Core>& core) {
    nb::class_<lmcache::LeftFrames>(m, "LeftFrames")
        .def("__len__", [](const lmcache::LeftFrames& self) { return self.frames.size(); })
        .def_prop_ro("namespaces",
                     [](const lmcache::LeftFrames& self) {
                         nb::list names;
                         for (const auto& [digest, encoded] : self.namespaces) {
                             names.append(nb::make_tuple(nb::bytes(digest.data(), digest.size()),
                                                         nb::bytes(encoded.data(), encoded.size())));
                         }
                         return names;
                     })
        .def_prop_ro("owners", [](const lmcache::LeftFrames& self) {
            std::set<lmcache::Owner> owners;
            for (const lmcache::LeftSlot& slot : self.slots) owners.insert(slot.owner);
            return std::vector<lmcache::Owner>(owners.begin(), owners.end());
        });
    m.def(
        "find_left_frames",
        [](std::uintptr_t slot_table, std::uintptr_t arena, std::uint64_t committed_bytes, std::uint64_t align_bytes,
           std::size_t threads) {
            if (align_bytes == 0) throw std::invalid_argument("align_bytes must be more than 0");
            return without_gil([&] {
                return lmcache::find_left_frames(
                    lmcache::SlotTable(slot_table), reinterpret_cast<const std::byte*>(arena),
                    static_cast<std::uint32_t>(committed_bytes / align_bytes), align_bytes, threads);
            });
        },
        nb::arg("slot_table"), nb::arg("arena"), nb::arg("committed_bytes"), nb::arg("align_bytes"),
        nb::arg("threads"));
    core.def(
        "adopt",
        [](L1Core& self, const lmcache::LeftFrames& left, const std::vector<std::optional<std::string>>& salts,
           nb::handle live_owners) {
            const auto owners = copy_elements<lmcache::Owner>(live_owners, "live_owners");
            const auto adopted = without_gil([&] { return self.adopt(left, salts, owners); });
            return std::make_tuple(adopted.objects, adopted.size_bytes, adopted.refused, adopted.set_aside,
                                   adopted.set_aside_bytes);
        },
        nb::arg("left"), nb::arg("salts"), nb::arg("live_owners"));
}

}  // namespace

void bind_l1(nb::module_& m) {
    m.attr("NO_SLOT") = lmcache::kNoSlot;
    nb::register_exception_translator(translate_closed);
    nb::class_<L1Core> core(m, "L1Core");
    core.def(
        "__init__",
        [](L1Core* self, std::uint64_t capacity_bytes, std::uint64_t first_offset, std::uint64_t align_bytes,
           const std::string& policy, std::uintptr_t slot_table) {
            new (self) L1Core({.capacity_bytes = capacity_bytes,
                               .first_offset = first_offset,
                               .align_bytes = align_bytes,
                               .policy = policy_of(policy),
                               .slot_table = slot_table});
        },
        nb::arg("capacity_bytes"), nb::arg("first_offset"), nb::arg("align_bytes"), nb::arg("policy"),
        nb::arg("slot_table") = 0);
    core.def("close", &L1Core::close, nb::call_guard<nb::gil_scoped_release>());
    core.def("set_committed", &L1Core::set_committed, nb::arg("committed_bytes"),
             nb::call_guard<nb::gil_scoped_release>());
    bind_adoption(m, core);
    bind_reading(core);
    bind_writing(core);
    bind_upkeep(core);
}
