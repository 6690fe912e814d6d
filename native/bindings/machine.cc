#include <nanobind/stl/string.h>

#include <system_error>

#include "bindings.h"
#include "lmcache/copy.h"
#include "lmcache/cpu.h"
#include "lmcache/limits.h"
#include "lmcache/prefault.h"

void bind_machine(nb::module_& m) {
    m.attr("NO_SLOT") = lmcache::kNoSlot;
    m.attr("FRAME_HEADER_BYTES") = lmcache::kFrameHeaderBytes;
    m.attr("LARGE_PAGE_BYTES") = lmcache::kLargePageBytes;
    m.def(
        "cpu_features",
        [] {
            const lmcache::CpuFeatures& found = lmcache::cpu_features();
            nb::typed<nb::dict, nb::str, bool> features;
            features["avx2"] = found.avx2;
            features["avx512f"] = found.avx512f;
            features["avx512bw"] = found.avx512bw;
            features["vpclmulqdq"] = found.vpclmulqdq;
            features["sse42"] = found.sse42;
            features["neon"] = found.neon;
            features["arm_crc32"] = found.arm_crc32;
            return features;
        },
        "Keys: avx2, avx512f, avx512bw, vpclmulqdq, sse42, neon, arm_crc32. The paths chosen at run time depend on "
        "them.");
    m.def(
        "copy_path", [] { return lmcache::best_copy_kernels().name; },
        R"(Name of the chosen path: "clmul", "avx512", "avx2", "neon" or "portable".)");
    m.def(
        "prefault",
        [](std::uintptr_t address, std::size_t size_bytes, std::size_t threads, bool large_pages) {
            const int fault = lmcache::prefault(address, size_bytes, threads, large_pages);
            if (fault != 0) throw std::system_error(fault, std::generic_category(), "prefault");
        },
        nb::arg("address"), nb::arg("size_bytes"), nb::arg("threads"), nb::arg("large_pages") = false, ReleaseGil(),
        "Touches every page for writing (MADV_POPULATE_WRITE, else by hand) without changing content. OSError on "
        "failure. `large_pages`: has the kernel make large ones before, where it can (MADV_COLLAPSE). They are charged "
        "to the caller.");
    m.def("take_large_pages", &lmcache::take_large_pages, nb::arg("address"), nb::arg("size_bytes"), nb::arg("threads"),
          ReleaseGil(), "Has the kernel put large pages there, as far as it can; never a signal where it cannot.");
    m.def(
        "buffer_address",
        [](const Packed<std::byte, "buffer">& buffer) { return reinterpret_cast<std::uintptr_t>(buffer.data()); },
        nb::arg("buffer"));
}
