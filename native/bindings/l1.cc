#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <optional>
#include <span>
#include <vector>

#include "bindings.h"
#include "lmcache/l1_core.h"
#include "lmcache/recovered_frames.h"

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
        nb::arg("namespaces"), nb::arg("hashes"), nb::kw_only(), nb::arg("tails") = nb::bytes("", 0));
    core.def(
        "acquire",
        [](L1Core& self, lmcache::Owner owner, nb::handle namespaces, nb::handle hashes, double deadline, bool is_use,
           nb::handle tails) {
            const Keys keys(namespaces, hashes);
            const auto reading = is_use ? lmcache::Reading::kUse : lmcache::Reading::kCopy;
            const auto tail_chunks = copy_elements<std::uint32_t>(tails, "tails");
            return without_gil([&] {
                return self.acquire(owner, keys.namespaces, keys.hashes.span(), deadline, reading, tail_chunks);
            });
        },
        nb::arg("owner"), nb::arg("namespaces"), nb::arg("hashes"), nb::arg("deadline"), nb::kw_only(),
        nb::arg("is_use") = true, nb::arg("tails") = nb::bytes("", 0));
    core.def(
        "acquire_each",
        [](L1Core& self, lmcache::Owner owner, nb::handle namespaces, nb::handle hashes, double deadline) {
            const Keys keys(namespaces, hashes);
            return without_gil([&] { return self.acquire_each(owner, keys.namespaces, keys.hashes.span(), deadline); });
        },
        nb::arg("owner"), nb::arg("namespaces"), nb::arg("hashes"), nb::arg("deadline"));
    core.def(
        "resident_each",
        [](L1Core& self, nb::handle namespaces, nb::handle hashes) {
            const Keys keys(namespaces, hashes);
            return packed(without_gil([&] { return self.resident_each(keys.namespaces, keys.hashes.span()); }));
        },
        nb::arg("namespaces"), nb::arg("hashes"));
    core.def("release", &L1Core::release, nb::arg("lease"), nb::call_guard<nb::gil_scoped_release>());
    core.def("renew", &L1Core::renew, nb::arg("owner"), nb::arg("deadline"), nb::call_guard<nb::gil_scoped_release>());
}

void bind_writing(nb::class_<L1Core>& core) {
    core.def(
        "reserve",
        [](L1Core& self, lmcache::Owner owner, nb::handle namespaces, const std::string& salt, nb::handle sizes,
           nb::handle hashes, double deadline, nb::handle wanted) {
            const Keys keys(namespaces, hashes);
            const auto sizes_bytes = copy_elements<std::uint64_t>(sizes, "sizes");
            const BytesArgument flags(wanted, "wanted");
            return without_gil([&] {
                return self.reserve(owner, keys.namespaces, salt, sizes_bytes, keys.hashes.span(), deadline,
                                    flags.span());
            });
        },
        nb::arg("owner"), nb::arg("namespaces"), nb::arg("salt"), nb::arg("sizes"), nb::arg("hashes"),
        nb::arg("deadline"), nb::kw_only(), nb::arg("wanted") = nb::bytes("", 0));
    core.def(
        "commit",
        [](L1Core& self, std::uint64_t reservation, nb::handle written, lmcache::Owner lease_owner, double deadline,
           bool temporary) {
            const BytesArgument flags(written, "written");
            return without_gil(
                [&] { return self.commit(reservation, flags.span(), {lease_owner, deadline, temporary}); });
        },
        nb::arg("reservation"), nb::arg("written") = nb::bytes("", 0), nb::kw_only(), nb::arg("lease_owner") = 0,
        nb::arg("deadline") = 0.0, nb::arg("temporary") = false);
    core.def("abort", &L1Core::abort, nb::arg("reservation"), nb::call_guard<nb::gil_scoped_release>());
    core.def(
        "quarantine", [](L1Core& self, std::uint64_t reservation) { return self.quarantine(reservation); },
        nb::arg("reservation"), nb::call_guard<nb::gil_scoped_release>());
}

void bind_upkeep(nb::class_<L1Core>& core) {
    core.def("expire", &L1Core::expire, nb::arg("now"), nb::call_guard<nb::gil_scoped_release>());
    core.def("drop_owner", &L1Core::drop_owner, nb::arg("owner"), nb::call_guard<nb::gil_scoped_release>());
    core.def("evict", &L1Core::evict, nb::arg("target_bytes"), nb::call_guard<nb::gil_scoped_release>());
    core.def(
        "set_limit",
        [](L1Core& self, const std::string& salt, std::uint64_t limit_bytes) {
            without_gil([&] { self.set_limit(salt, limit_bytes); });
        },
        nb::arg("salt"), nb::arg("limit_bytes"));
    core.def("enforce_limits", &L1Core::enforce_limits, nb::kw_only(), nb::arg("spare_new") = false,
             nb::call_guard<nb::gil_scoped_release>());
    core.def(
        "remove",
        [](L1Core& self, nb::handle namespaces, nb::handle hashes) {
            const Keys keys(namespaces, hashes);
            return without_gil([&] { return self.remove(keys.namespaces, keys.hashes.span()); });
        },
        nb::arg("namespaces"), nb::arg("hashes"));
    core.def("clear", &L1Core::clear, nb::call_guard<nb::gil_scoped_release>());
    core.def("list_objects", &L1Core::list_objects, nb::arg("start"), nb::arg("count"),
             nb::call_guard<nb::gil_scoped_release>());
    core.def("stats", [](L1Core& self) { return to_dict(without_gil([&] { return self.stats(); })); });
    core.def("set_age_sample_rate", &L1Core::set_age_sample_rate, nb::arg("rate"),
             nb::call_guard<nb::gil_scoped_release>());
    core.def("take_ages", &L1Core::take_ages, nb::call_guard<nb::gil_scoped_release>());
    core.def("take_overuses", &L1Core::take_overuses, nb::call_guard<nb::gil_scoped_release>());
    core.def(
        "usage_of",
        [](L1Core& self, const std::string& salt) { return without_gil([&] { return self.usage_of(salt); }); },
        nb::arg("salt"));
    core.def("salt_usage", &L1Core::salt_usage, nb::call_guard<nb::gil_scoped_release>());
    core.def("check", &L1Core::check, nb::call_guard<nb::gil_scoped_release>());
}

void bind_recovery(nb::module_& m, nb::class_<L1Core>& core) {
    m.def(
        "recover_frames",
        [](std::uintptr_t slot_table, std::uintptr_t arena, std::uint64_t committed_bytes, std::uint64_t align_bytes,
           std::size_t threads) {
            if (align_bytes == 0) throw std::invalid_argument("align_bytes must be more than 0");
            return without_gil([&] {
                return lmcache::recover_frames(
                    lmcache::SlotTable(slot_table), reinterpret_cast<const std::byte*>(arena),
                    static_cast<std::uint32_t>(committed_bytes / align_bytes), align_bytes, threads);
            });
        },
        nb::arg("slot_table"), nb::arg("arena"), nb::arg("committed_bytes"), nb::arg("align_bytes"),
        nb::arg("threads"));
    core.def(
        "recover",
        [](L1Core& self, const lmcache::RecoveredFrames& found, const std::vector<std::optional<std::string>>& salts,
           nb::handle live_owners) {
            const auto owners = copy_elements<lmcache::Owner>(live_owners, "live_owners");
            return without_gil([&] { return self.recover(found, salts, owners); });
        },
        nb::arg("found"), nb::arg("salts"), nb::arg("live_owners"));
}

}  // namespace

void bind_l1(nb::module_& m) {
    m.attr("NO_SLOT") = lmcache::kNoSlot;
    m.def(
        "usable_prefix",
        [](nb::handle present, nb::handle tails) {
            const BytesArgument flags(present, "present");
            const auto tail_chunks = copy_elements<std::uint32_t>(tails, "tails");
            const std::size_t width = tail_chunks.size();
            if (width == 0 || flags.span().size() % width != 0)
                throw std::invalid_argument("present must hold one byte for each chunk and each of tails");
            return lmcache::usable_prefix(
                flags.span().size() / width, tail_chunks,
                [&](std::size_t chunk, std::size_t position) { return flags.span()[chunk * width + position] != 0; });
        },
        nb::arg("present"), nb::arg("tails"));
    nb::class_<L1Core> core(m, "L1Core");
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
        nb::arg("slot_table") = 0);
    core.def("close", &L1Core::close, nb::call_guard<nb::gil_scoped_release>());
    core.def("set_committed", &L1Core::set_committed, nb::arg("committed_bytes"),
             nb::call_guard<nb::gil_scoped_release>());
    bind_recovery(m, core);
    bind_reading(core);
    bind_writing(core);
    bind_upkeep(core);
}
