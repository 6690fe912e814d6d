#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#include "lmcache/transfer_loop.h"

namespace nb = nanobind;

void bind_machine(nb::module_& m);
void bind_hashing(nb::module_& m);
void bind_frame(nb::module_& m);
void bind_paged_copy(nb::module_& m);
void bind_cuda(nb::module_& m);
void bind_l1(nb::module_& m);
void bind_l1_results(nb::module_& m);
void bind_ledger(nb::module_& m);
void bind_file_io(nb::module_& m);
void bind_folder_scan(nb::module_& m);
void bind_mapped_copy(nb::module_& m);
void bind_raw_block(nb::module_& m);
void bind_raw_index(nb::module_& m);
void bind_resp(nb::module_& m);
void bind_serde(nb::module_& m);

// A contiguous Python buffer seen as elements of T, held for the length of a call. Throws std::invalid_argument
// (ValueError) that names the argument when it is not a buffer or its size is not a multiple of the element.
template <typename T>
class PackedView {
public:
    PackedView(nb::handle object, const char* name, bool writable = false) {
        if (PyObject_GetBuffer(object.ptr(), &view_, writable ? PyBUF_CONTIG : PyBUF_CONTIG_RO) != 0) {
            PyErr_Clear();
            throw std::invalid_argument(std::string(name) + " must be a contiguous bytes-like object");
        }
        if (static_cast<std::size_t>(view_.len) % sizeof(T) != 0) {
            PyBuffer_Release(&view_);
            throw std::invalid_argument(std::string(name) + " must hold a whole number of " +
                                        std::to_string(sizeof(T)) + "-byte elements");
        }
    }
    PackedView(const PackedView&) = delete;
    PackedView& operator=(const PackedView&) = delete;
    ~PackedView() { PyBuffer_Release(&view_); }

    const T* data() const { return static_cast<const T*>(view_.buf); }
    std::size_t size() const { return static_cast<std::size_t>(view_.len) / sizeof(T); }

private:
    Py_buffer view_{};
};

// Addresses and sizes in bytes of a list of contiguous Python buffers, which the caller keeps.
struct Ranges {
    explicit Ranges(const nb::list& buffers) {
        addresses.reserve(buffers.size());
        sizes.reserve(buffers.size());
        for (const nb::handle buffer : buffers) {
            const PackedView<std::byte> view(buffer, "a buffer");
            addresses.push_back(reinterpret_cast<std::uint64_t>(view.data()));
            sizes.push_back(view.size());
        }
    }

    std::vector<std::uint64_t> addresses, sizes;
};

template <typename T>
nb::bytes packed(const std::vector<T>& values) {
    return nb::bytes(values.data(), values.size() * sizeof(T));
}

// The elements of a packed buffer, copied.
inline std::vector<std::uint64_t> numbers(nb::handle buffer, const char* name) {
    const PackedView<std::uint64_t> view(buffer, name);
    return {view.data(), view.data() + view.size()};
}

// A memoryview of numbers.
template <typename T>
nb::object typed(const std::vector<T>& values) {
    constexpr bool kSigned = std::is_signed_v<T>;
    constexpr const char* kFormat = sizeof(T) == 8 ? (kSigned ? "q" : "Q") : (kSigned ? "i" : "I");
    static_assert(sizeof(T) == 8 || sizeof(T) == 4);
    return nb::steal(PyMemoryView_FromObject(packed(values).ptr())).attr("cast")(kFormat);
}

inline nb::tuple completion(std::uint64_t job, const lmcache::IoResults& results) {
    return nb::make_tuple(job, typed(results.values), typed(results.errors));
}
inline nb::tuple completion(std::uint64_t job, const std::vector<std::uint8_t>& results) {
    return nb::make_tuple(job, packed(results));
}

// What a reader of completions needs: event_fd, drain and close of a class with a JobQueue. drain gives a list of
// (job, results ...).
template <typename Source>
void bind_completions(nb::class_<Source>& source) {
    source.def("event_fd", &Source::event_fd)
        .def("drain",
             [](Source& self) {
                 std::vector<typename Source::Completion> completions;
                 {
                     nb::gil_scoped_release released;
                     completions = self.drain();
                 }
                 nb::list jobs;
                 for (const auto& [job, results] : completions) jobs.append(completion(job, results));
                 return jobs;
             })
        .def("close", &Source::close, nb::call_guard<nb::gil_scoped_release>());
}
