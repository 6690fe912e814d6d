#include <span>
#include <vector>

#include "bindings.h"
#include "lmcache/blake3.h"
#include "lmcache/chunk_hash.h"

void bind_hashing(nb::module_& m) {
    m.def(
        "blake3",
        [](nb::object data) {
            const PackedView<std::byte> input(data, "data");
            lmcache::Blake3Digest digest;
            {
                nb::gil_scoped_release release;
                digest = lmcache::blake3({input.data(), input.size()});
            }
            return nb::bytes(digest.data(), digest.size());
        },
        nb::arg("data"));
    m.def(
        "hash_chunks",
        [](nb::object tokens, std::size_t chunk_tokens, nb::bytes parent, nb::object extras) {
            const PackedView<std::uint32_t> token_view(tokens, "tokens");
            const PackedView<std::byte> extra_view(extras, "extras");
            std::vector<std::byte> hashes;
            {
                nb::gil_scoped_release release;
                hashes = lmcache::hash_chunks({token_view.data(), token_view.size()}, chunk_tokens,
                                              {reinterpret_cast<const std::byte*>(parent.data()), parent.size()},
                                              {extra_view.data(), extra_view.size()});
            }
            return nb::bytes(hashes.data(), hashes.size());
        },
        nb::arg("tokens"), nb::arg("chunk_tokens"), nb::arg("parent"), nb::arg("extras") = nb::bytes("", 0));
    m.def(
        "cbor_numbers",
        [](nb::object numbers) {
            const PackedView<std::uint32_t> view(numbers, "numbers");
            const std::vector<std::byte> encoded = lmcache::cbor_numbers({view.data(), view.size()});
            return nb::bytes(encoded.data(), encoded.size());
        },
        nb::arg("numbers"));
}
