#include "lmcache/blake3.h"

#include <cstring>
#include <vector>

#define LMCACHE_ISA
#include "blake3_compress.h"
#include "blake3_paths.h"
#include "lmcache/cpu.h"

namespace lmcache {
namespace {

constexpr std::size_t kMaxLanes = 16;

const Blake3Kernel* kernel_with(std::size_t lanes) {
    switch (lanes) {
        case 1:
            return &kBlake3Lanes1;
        case 4:
            return &kBlake3Lanes4;
#if defined(__x86_64__)
        case 8:
            return cpu_features().avx2 ? &kBlake3Lanes8 : nullptr;
        case 16:
            return cpu_features().avx512f ? &kBlake3Lanes16 : nullptr;
#endif
        default:
            return nullptr;
    }
}

const Blake3Kernel& widest_kernel() {
    static const Blake3Kernel* const widest = [] {
        for (const std::size_t lanes : {16, 8}) {
            if (const Blake3Kernel* kernel = kernel_with(lanes)) return kernel;
        }
        return kernel_with(4);
    }();
    return *widest;
}

// `count` inputs one behind the other, each of at most one BLAKE3 chunk, by the widest kernels that they fill.
void hash_inputs(const Blake3Kernel& widest, const std::byte* inputs, std::size_t input_bytes, std::size_t count,
                 bool counter_step, std::uint32_t flags, std::uint32_t first_flags, std::uint32_t last_flags,
                 std::byte* out) {
    std::size_t done = 0;
    for (std::size_t lanes = widest.lanes; done < count; lanes = lanes > 4 ? lanes / 2 : 1) {
        const Blake3Kernel& kernel = lanes == widest.lanes ? widest : *kernel_with(lanes);
        for (; count - done >= kernel.lanes; done += kernel.lanes) {
            const std::byte* at[kMaxLanes];
            for (std::size_t lane = 0; lane < kernel.lanes; ++lane) at[lane] = inputs + (done + lane) * input_bytes;
            kernel.hash({at, input_bytes, counter_step ? done : 0, counter_step, flags, first_flags, last_flags},
                        out + done * kBlake3Bytes);
        }
    }
}

// An input longer than one chunk. Chaining values of all chunks, then of parents, level by level; an odd one at the end
// of a level moves up as it is, which builds the tree of the standard (each left subtree complete).
Blake3Digest hash_tree(std::span<const std::byte> input) {
    const Blake3Kernel& widest = widest_kernel();
    const std::size_t full = input.size() / kBlake3ChunkBytes;
    const std::size_t rest = input.size() % kBlake3ChunkBytes;
    std::size_t nodes = full + (rest != 0 ? 1 : 0);
    std::vector<std::byte> values(nodes * kBlake3Bytes);
    hash_inputs(widest, input.data(), kBlake3ChunkBytes, full, true, 0, kChunkStart, kChunkEnd, values.data());
    if (rest != 0) {
        const std::byte* const last = input.data() + full * kBlake3ChunkBytes;
        kBlake3Lanes1.hash({&last, rest, full, false, 0, kChunkStart, kChunkEnd}, values.data() + full * kBlake3Bytes);
    }
    std::vector<std::byte> above((nodes + 1) / 2 * kBlake3Bytes);
    while (nodes > 1) {
        const std::size_t pairs = nodes / 2;
        const std::uint32_t flags = nodes == 2 ? kParent | kRoot : kParent;
        hash_inputs(widest, values.data(), 2 * kBlake3Bytes, pairs, false, flags, 0, 0, above.data());
        if (nodes % 2 != 0) {
            std::memcpy(above.data() + pairs * kBlake3Bytes, values.data() + (nodes - 1) * kBlake3Bytes, kBlake3Bytes);
        }
        nodes = pairs + nodes % 2;
        values.swap(above);
    }
    Blake3Digest digest;
    std::memcpy(digest.data(), values.data(), kBlake3Bytes);
    return digest;
}

void hash_many(const Blake3Kernel& widest, const std::byte* inputs, std::size_t input_bytes, std::size_t count,
               std::byte* digests) {
    if (input_bytes <= kBlake3ChunkBytes) {
        hash_inputs(widest, inputs, input_bytes, count, false, 0, kChunkStart, kChunkEnd | kRoot, digests);
        return;
    }
    for (std::size_t i = 0; i < count; ++i) {
        const Blake3Digest digest = hash_tree({inputs + i * input_bytes, input_bytes});
        std::memcpy(digests + i * kBlake3Bytes, digest.data(), kBlake3Bytes);
    }
}

}  // namespace

Blake3Digest blake3(std::span<const std::byte> input) {
    if (input.size() > kBlake3ChunkBytes) return hash_tree(input);
    Blake3Digest digest;
    hash_many(kBlake3Lanes1, input.data(), input.size(), 1, reinterpret_cast<std::byte*>(digest.data()));
    return digest;
}

void blake3_many(const std::byte* inputs, std::size_t input_bytes, std::size_t count, std::byte* digests) {
    hash_many(widest_kernel(), inputs, input_bytes, count, digests);
}

bool blake3_many_by(std::size_t lanes, const std::byte* inputs, std::size_t input_bytes, std::size_t count,
                    std::byte* digests) {
    const Blake3Kernel* const kernel = kernel_with(lanes);
    if (kernel == nullptr) return false;
    hash_many(*kernel, inputs, input_bytes, count, digests);
    return true;
}

}  // namespace lmcache
