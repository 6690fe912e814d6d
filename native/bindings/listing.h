// The text of a page, for the classes of pages.
#pragma once

#include <nanobind/stl/pair.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "buffers.h"
#include "lmcache/object_listing.h"

inline constexpr const char* kListingDoc =
    "Its objects as JSON, without the GIL: the text and how many they are. `texts`: for each namespace (before, "
    "between, after), which surround hash and size; without a `before` its objects are left out.";

namespace nanobind::detail {

template <>
struct type_caster<lmcache::ListingTexts> {
    NB_TYPE_CASTER(lmcache::ListingTexts, const_name("tuple[bytes, bytes, bytes]"))

    bool from_python(handle source, std::uint8_t, cleanup_list*) noexcept {
        if (!PyTuple_Check(source.ptr()) || PyTuple_GET_SIZE(source.ptr()) != 3) return false;
        std::string* const parts[] = {&value.before, &value.between, &value.after};
        for (Py_ssize_t i = 0; i < 3; ++i) {
            PyObject* const part = PyTuple_GET_ITEM(source.ptr(), i);
            if (!PyBytes_Check(part)) return false;
            parts[i]->assign(PyBytes_AS_STRING(part), static_cast<std::size_t>(PyBytes_GET_SIZE(part)));
        }
        return true;
    }
};

}  // namespace nanobind::detail

inline std::pair<AsBytes<std::string>, std::size_t> listing(const std::vector<std::uint32_t>& positions,
                                                            const std::vector<std::uint8_t>& hashes,
                                                            const std::vector<std::uint64_t>& sizes_bytes,
                                                            const std::vector<lmcache::ListingTexts>& texts) {
    lmcache::ObjectListing listed;
    {
        const nb::gil_scoped_release released;
        listed = lmcache::list_as_text(positions, hashes, sizes_bytes, texts);
    }
    return {AsBytes<std::string>{std::move(listed.text)}, listed.objects};
}
