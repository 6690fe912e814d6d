// Packed buffers as arguments and results. A binding says in the signature of its function what it takes and gives, and
// nanobind converts: arguments before the GIL is released, results when it is held again.
#pragma once

#include <nanobind/nanobind.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

namespace nb = nanobind;

// A string as a template parameter.
template <std::size_t kSize>
struct Text {
    constexpr Text(const char (&text)[kSize]) { std::copy_n(text, kSize, value); }
    char value[kSize];
};

enum class Access : bool { kRead, kWrite };

// A contiguous Python buffer seen as elements of T, held for the length of a call. It is copied where it is a slice
// that is not aligned to its elements. std::invalid_argument (ValueError) names the argument that is no such buffer, or
// whose size does not fit.
template <typename T, Text kName, Access kAccess = Access::kRead>
class Packed {
    static_assert(kAccess == Access::kRead || alignof(T) == 1, "what is written to is never a copy");

public:
    Packed() = default;
    Packed(const Packed&) = delete;
    Packed& operator=(const Packed&) = delete;
    ~Packed() { PyBuffer_Release(&view_); }

    void hold(nb::handle object) {
        if (PyObject_GetBuffer(object.ptr(), &view_, kAccess == Access::kWrite ? PyBUF_CONTIG : PyBUF_CONTIG_RO) != 0) {
            PyErr_Clear();
            refuse(kAccess == Access::kWrite ? "must be a writable contiguous bytes-like object"
                                             : "must be a contiguous bytes-like object");
        }
        const auto size_bytes = static_cast<std::size_t>(view_.len);
        if (size_bytes % sizeof(T) != 0)
            refuse("must hold a whole number of " + std::to_string(sizeof(T)) + "-byte elements");
        elements_ = {static_cast<T*>(view_.buf), size_bytes / sizeof(T)};
        if (reinterpret_cast<std::uintptr_t>(view_.buf) % alignof(T) == 0) return;
        copy_.resize(elements_.size());
        std::memcpy(copy_.data(), view_.buf, size_bytes);
        elements_ = copy_;
    }

    const T* data() const { return elements_.data(); }
    std::size_t size() const { return elements_.size(); }
    const T& operator[](std::size_t i) const { return elements_[i]; }

    template <std::size_t kExtent>
    operator std::span<const T, kExtent>() const {
        if (kExtent != std::dynamic_extent && size() != kExtent)
            refuse("must be " + std::to_string(kExtent * sizeof(T)) + " bytes");
        return std::span<const T, kExtent>(data(), size());
    }
    operator std::span<T>() const
        requires(kAccess == Access::kWrite)
    {
        return elements_;
    }
    operator std::vector<T>() const { return {elements_.begin(), elements_.end()}; }

private:
    [[noreturn]] static void refuse(const std::string& rule) {
        throw std::invalid_argument(std::string(kName.value) + " " + rule);
    }

    Py_buffer view_{};
    std::span<T> elements_;
    std::vector<T> copy_;
};

// Addresses and sizes in bytes of a list of contiguous Python buffers, which the caller keeps.
struct Ranges {
    std::vector<std::uint64_t> addresses, sizes;
};

// A Python object as it is, with the type that it must have.
template <Text kType>
struct Annotated {
    nb::handle object;
};

// Elements that Python gets as bytes, or as a memoryview of numbers. Elements may be a view of what outlives the call.
template <typename Elements>
struct AsBytes {
    Elements elements;
};
template <typename Elements>
struct AsNumbers {
    Elements elements;
};
template <typename Elements>
AsBytes(Elements) -> AsBytes<Elements>;
template <typename Elements>
AsNumbers(Elements) -> AsNumbers<Elements>;

// Getters of a member that holds elements.
template <typename Class, typename Elements>
auto as_bytes(Elements Class::* member) {
    return
        [member](const Class& self) { return AsBytes{std::span<const typename Elements::value_type>(self.*member)}; };
}
template <typename Class, typename Elements>
auto as_numbers(Elements Class::* member) {
    return
        [member](const Class& self) { return AsNumbers{std::span<const typename Elements::value_type>(self.*member)}; };
}

namespace nanobind::detail {

template <typename T, Text kName, Access kAccess>
struct type_caster<Packed<T, kName, kAccess>> {
    using Argument = Packed<T, kName, kAccess>;
    NB_TYPE_CASTER(Argument, const_name("typing_extensions.Buffer"))
    bool from_python(handle object, std::uint8_t, cleanup_list*) {
        value.hold(object);
        return true;
    }
};

template <>
struct type_caster<Ranges> {
    NB_TYPE_CASTER(Ranges, const_name("list[memoryview]"))
    bool from_python(handle object, std::uint8_t, cleanup_list*) {
        if (!isinstance<list>(object)) return false;
        for (const handle buffer : borrow<list>(object)) {
            Packed<std::byte, "a buffer"> view;
            view.hold(buffer);
            value.addresses.push_back(reinterpret_cast<std::uint64_t>(view.data()));
            value.sizes.push_back(view.size());
        }
        return true;
    }
};

template <Text kType>
struct type_caster<Annotated<kType>> {
    NB_TYPE_CASTER(Annotated<kType>, const_name(kType.value))
    bool from_python(handle object, std::uint8_t, cleanup_list*) noexcept {
        value.object = object;
        return true;
    }
};

template <typename Elements>
bytes packed(const Elements& elements) {
    return bytes(elements.data(), elements.size() * sizeof(*elements.data()));
}

template <typename Elements>
struct type_caster<AsBytes<Elements>> {
    NB_TYPE_CASTER(AsBytes<Elements>, const_name("bytes"))
    static handle from_cpp(const AsBytes<Elements>& result, rv_policy, cleanup_list*) {
        return packed(result.elements).release();
    }
};

template <typename Elements>
struct type_caster<AsNumbers<Elements>> {
    NB_TYPE_CASTER(AsNumbers<Elements>, const_name("memoryview"))
    static handle from_cpp(const AsNumbers<Elements>& result, rv_policy, cleanup_list*) {
        using T = typename Elements::value_type;
        static_assert(sizeof(T) == 8 || sizeof(T) == 4);
        constexpr const char* kFormat =
            sizeof(T) == 8 ? (std::is_signed_v<T> ? "q" : "Q") : (std::is_signed_v<T> ? "i" : "I");
        return steal(PyMemoryView_FromObject(packed(result.elements).ptr())).attr("cast")(kFormat).release();
    }
};

}  // namespace nanobind::detail
