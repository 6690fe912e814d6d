#include "lmcache/seen_chunks.h"

#include "bindings.h"
#include "lmcache/limits.h"

using lmcache::SeenChunks;
using lmcache::SeenCounts;

void bind_seen_chunks(nb::module_& m) {
    nb::class_<SeenCounts>(m, "SeenCounts", "Chunks, estimated where only a part of them is sampled.")
        .def_ro("requested", &SeenCounts::requested)
        .def_ro("seen", &SeenCounts::seen);
    nb::class_<SeenChunks>(m, "SeenChunks",
                           "Which chunks were asked for before: 2 MiB, a sample of them beyond 131,072 chunks. "
                           "Thread-safe.")
        .def(nb::init<>())
        .def(
            "observe",
            [](SeenChunks& self, std::uint32_t scope, const Packed<std::uint8_t, "hashes">& hashes) {
                if (hashes.size() % lmcache::kChunkHashBytes != 0)
                    throw std::invalid_argument("hashes must be 32 bytes each");
                return self.observe(scope, {hashes.data(), hashes.size()});
            },
            nb::arg("scope"), nb::arg("hashes"), ReleaseGil(),
            "A request for these chunks, which are seen from now on. `scope` separates equal hashes of namespaces.")
        .def("rate", &SeenChunks::rate, ReleaseGil(), "The share of chunks that is sampled.");
}
