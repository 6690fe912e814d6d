#include "bindings.h"
#include "lmcache/blake3.h"
#include "lmcache/chunk_hash.h"

void bind_hashing(nb::module_& m) {
    m.def(
        "blake3", [](const Packed<std::byte, "data">& data) { return AsBytes{lmcache::blake3(data)}; }, nb::arg("data"),
        ReleaseGil());
    m.def(
        "hash_chunks",
        [](const Packed<std::uint32_t, "tokens">& tokens, std::size_t chunk_tokens,
           const Packed<std::byte, "parent">& parent, const Packed<std::byte, "extras">& extras) {
            return AsBytes{lmcache::hash_chunks(tokens, chunk_tokens, parent, extras)};
        },
        nb::arg("tokens"), nb::arg("chunk_tokens"), nb::arg("parent"), maybe_empty("extras"), ReleaseGil(),
        "Chunk hashes of every full chunk in `tokens` (u32), 32 bytes a chunk. A tail shorter than a chunk is "
        "ignored.\n\n"
        "digest_i = blake3(tokens of chunk i); hash_i = blake3(hash_{i-1} || digest_i || extra_i), hash_{-1} = "
        "`parent` (32 bytes). `extras` is empty or 32 bytes a full chunk; an all-zero extra is left out of the input.");
    m.def(
        "cbor_numbers",
        [](const Packed<std::uint32_t, "numbers">& numbers) { return AsBytes{lmcache::cbor_numbers(numbers)}; },
        nb::arg("numbers"),
        "CBOR of each number (u32), one after the other, in the shortest form; without the head of an array. Keeps the "
        "GIL: it is called a chunk at a time.");
}
