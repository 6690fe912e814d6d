#include "lmcache/zstd_stage.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>

#include "lmcache/exponent_stage.h"
#include "lmcache/rounding.h"
#include "lmcache/shared_library.h"

namespace lmcache {
namespace {

constexpr std::size_t kBlockElements = 65536;  // with exponents of half a zstd block
constexpr int kMaxLevel = 19;
constexpr std::uint32_t kFrameMagic = 0xFD2FB528;  // RFC 8878, 3.1.1

// Parameters of ZSTD_CCtx_setParameter.
constexpr int kLevelParameter = 100, kHashLog = 102, kMinMatch = 105, kLiteralMode = 1002;
// Level 0 here: exponents in the order of memory hardly repeat, so that matches cost more than they save. A hasty
// search for long ones, and entropy coding of all the rest, which such levels would leave out.
constexpr int kHastyLevel = -50, kSmallHashLog = 10, kLongMatch = 7, kLiteralsCompressed = 1;

// The functions of libzstd's stable interface that are used here, by the signatures of its manual.
struct Zstd {
    void* (*create_cctx)() = nullptr;
    std::size_t (*free_cctx)(void*) = nullptr;
    std::size_t (*set_parameter)(void*, int, int) = nullptr;
    std::size_t (*compress)(void*, void*, std::size_t, const void*, std::size_t) = nullptr;
    void* (*create_dctx)() = nullptr;
    std::size_t (*free_dctx)(void*) = nullptr;
    std::size_t (*decompress)(void*, void*, std::size_t, const void*, std::size_t) = nullptr;
    std::size_t (*frame_bytes)(const void*, std::size_t) = nullptr;
    unsigned (*is_error)(std::size_t) = nullptr;
    std::string refusal;
};

const Zstd& zstd() {
    static const Zstd loaded = [] {
        const SharedLibrary library({"libzstd.so.1"});
        Zstd found;
        found.refusal = library.refusal();
        if (!library.is_open()) return found;
        const auto need = [&](auto& function, const char* name) {
            if (!library.find(function, name) && found.refusal.empty())
                found.refusal = std::string("libzstd.so.1 lacks ") + name;
        };
        need(found.create_cctx, "ZSTD_createCCtx");
        need(found.free_cctx, "ZSTD_freeCCtx");
        need(found.set_parameter, "ZSTD_CCtx_setParameter");
        need(found.compress, "ZSTD_compress2");
        need(found.create_dctx, "ZSTD_createDCtx");
        need(found.free_dctx, "ZSTD_freeDCtx");
        need(found.decompress, "ZSTD_decompressDCtx");
        need(found.frame_bytes, "ZSTD_findFrameCompressedSize");
        need(found.is_error, "ZSTD_isError");
        return found;
    }();
    return loaded;
}

// The contexts of one thread.
struct Contexts {
    Contexts() : compression(zstd().create_cctx()), decompression(zstd().create_dctx()), exponents(kBlockElements) {
        if (compression == nullptr || decompression == nullptr) throw std::bad_alloc();
    }
    Contexts(const Contexts&) = delete;
    Contexts& operator=(const Contexts&) = delete;
    ~Contexts() {
        zstd().free_cctx(compression);
        zstd().free_dctx(decompression);
    }
    void set_level(int wanted) {
        if (level == wanted) return;
        if (wanted != 0) {
            set(kLevelParameter, wanted);
        } else if (set(kLevelParameter, kHastyLevel) && set(kHashLog, kSmallHashLog) && set(kMinMatch, kLongMatch)) {
            // An experimental parameter: a library without it compresses as it does by itself.
            if (!set(kLiteralMode, kLiteralsCompressed)) set(kLevelParameter, 1);
        }
        level = wanted;
    }

    void* const compression;
    void* const decompression;
    int level = -1;  // of `compression`
    std::vector<std::uint8_t> exponents;

private:
    bool set(int parameter, int value) {
        return zstd().is_error(zstd().set_parameter(compression, parameter, value)) == 0;
    }
};

Contexts& contexts() {
    thread_local Contexts own;
    return own;
}

double entropy_bits(const ExponentSample& sample) {
    double bits = 0;
    for (const std::uint32_t count : sample.counts) {
        if (count != 0) bits -= count * std::log2(static_cast<double>(count) / sample.total);
    }
    return bits / std::max(sample.total, 1U);
}

// What a library takes besides, frames behind frames and those of versions before 1.0 among them, nobody wrote here,
// and the decoders of old formats see nothing hostile.
bool is_one_frame(const std::uint8_t* bytes, std::size_t size) {
    std::uint32_t magic;
    if (size < sizeof magic) return false;
    std::memcpy(&magic, bytes, sizeof magic);
    return magic == kFrameMagic && zstd().frame_bytes(bytes, size) == size;
}

// The payload begins with a word of 32 bits for each block: the bytes of its compressed exponents, 0 where they are as
// they were. A block is its signs and mantissas, then its exponents. Then what fills no group.
class ZstdStage final : public SerdeStage {
public:
    ZstdStage(int level, double smallest_saving) : level_(level), smallest_saving_(smallest_saving) {}

    std::size_t max_encoded_bytes(std::size_t source_bytes) const override {
        return source_bytes + blocks_of(elements_of(source_bytes)) * sizeof(std::uint32_t);
    }

    std::optional<std::size_t> encode(std::span<const std::byte> source, std::span<std::byte> destination,
                                      const SerdeObject&, std::vector<std::byte>&) const override {
        const std::size_t elements = elements_of(source.size());
        const double limit_bits = 8.0 - 16.0 * smallest_saving_;
        if (elements == 0 || entropy_bits(sample_exponents(source, kernels_)) > limit_bits) return std::nullopt;
        Contexts& own = contexts();
        own.set_level(level_);
        std::size_t end = blocks_of(elements) * sizeof(std::uint32_t);
        for (std::size_t block = 0; block < blocks_of(elements); ++block) {
            const std::size_t count = std::min(kBlockElements, elements - block * kBlockElements);
            auto* const rest = reinterpret_cast<std::uint8_t*>(destination.data() + end);
            kernels_.split(source.data() + 2 * block * kBlockElements, count / kGroupElements, rest,
                           own.exponents.data());
            end += count;
            // Less room than the exponents take: what would not shrink is refused by the library.
            const std::size_t written =
                zstd().compress(own.compression, destination.data() + end, count - 1, own.exponents.data(), count);
            const bool is_plain = zstd().is_error(written) != 0;
            if (is_plain) std::memcpy(destination.data() + end, own.exponents.data(), count);
            end += is_plain ? count : written;
            const auto word = static_cast<std::uint32_t>(is_plain ? 0 : written);
            std::memcpy(destination.data() + block * sizeof word, &word, sizeof word);
        }
        const std::size_t tail_bytes = source.size() - 2 * elements;
        std::memcpy(destination.data() + end, source.data() + 2 * elements, tail_bytes);
        end += tail_bytes;
        return end < source.size() ? std::optional(end) : std::nullopt;
    }

    SerdeFault decode(std::span<const std::byte> source, std::span<std::byte> destination, const SerdeObject&,
                      std::span<const std::byte>) const override {
        const std::size_t elements = elements_of(destination.size());
        const std::size_t tail_bytes = destination.size() - 2 * elements;
        std::size_t at = blocks_of(elements) * sizeof(std::uint32_t);
        if (source.size() < at + tail_bytes) return SerdeFault::kCorrupt;
        const std::size_t end = source.size() - tail_bytes;
        Contexts& own = contexts();
        for (std::size_t block = 0; block < blocks_of(elements); ++block) {
            const std::size_t count = std::min(kBlockElements, elements - block * kBlockElements);
            std::uint32_t word;
            std::memcpy(&word, source.data() + block * sizeof word, sizeof word);
            const std::size_t exponent_bytes = word == 0 ? count : word;
            if (count > end - at || exponent_bytes > end - at - count) return SerdeFault::kCorrupt;
            const auto* const rest = reinterpret_cast<const std::uint8_t*>(source.data() + at);
            const std::uint8_t* exponents = rest + count;
            if (word != 0) {
                if (!is_one_frame(exponents, word) ||
                    zstd().decompress(own.decompression, own.exponents.data(), count, exponents, word) != count)
                    return SerdeFault::kCorrupt;
                exponents = own.exponents.data();
            }
            kernels_.merge(rest, exponents, count / kGroupElements, destination.data() + 2 * block * kBlockElements);
            at += count + exponent_bytes;
        }
        if (at != end) return SerdeFault::kCorrupt;
        std::memcpy(destination.data() + 2 * elements, source.data() + end, tail_bytes);
        return SerdeFault::kNone;
    }

private:
    static std::size_t elements_of(std::size_t payload_bytes) {
        return payload_bytes / 2 / kGroupElements * kGroupElements;
    }
    static std::size_t blocks_of(std::size_t elements) { return div_ceil(elements, kBlockElements); }

    const int level_;
    const double smallest_saving_;
    const ExponentKernels& kernels_ = best_exponent_kernels();
};

}  // namespace

std::string zstd_refusal() { return zstd().refusal; }

std::shared_ptr<const SerdeStage> make_zstd_stage(int level, double smallest_saving) {
    if (!zstd().refusal.empty()) throw std::runtime_error(zstd().refusal);
    if (level < 0 || level > kMaxLevel) throw std::invalid_argument("level must be between 0 and 19");
    if (!(smallest_saving >= 0 && smallest_saving < 1))
        throw std::invalid_argument("smallest_saving must be at least 0 and below 1");
    return std::make_shared<ZstdStage>(level, smallest_saving);
}

}  // namespace lmcache
