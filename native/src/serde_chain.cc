#include "lmcache/serde_chain.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "lmcache/rounding.h"

namespace lmcache {
namespace {

constexpr std::uint32_t kParametersVersion = 1;
constexpr std::uint32_t kUnchanged = 1;  // flag of a stage

// Little-endian, as everything in a frame.
struct Prologue {
    std::uint32_t version;
    std::uint32_t stages;
    std::uint64_t payload_bytes;  // decoded
    std::uint8_t payload_checksum[kChecksumBytes];
};
static_assert(sizeof(Prologue) == 32);

struct StageRecord {
    std::uint64_t encoded_bytes;  // what the stage made of what came before it
    std::uint32_t flags;
    std::uint32_t parameter_bytes;  // that follow
};
static_assert(sizeof(StageRecord) == 16);

// What a header says of one stage.
struct StageView {
    std::size_t source_bytes, encoded_bytes;
    bool is_unchanged;
    std::span<const std::byte> earlier, parameters;
};

template <typename T>
void append(std::vector<std::byte>& bytes, const T& value) {
    const auto* const begin = reinterpret_cast<const std::byte*>(&value);
    bytes.insert(bytes.end(), begin, begin + sizeof value);
}

// The memory between two stages, kept by each thread: at most a payload each.
struct Scratch {
    std::vector<std::byte> halves[2];
    // Not the one that the last stage has written to, of which there were `writes`.
    std::span<std::byte> half(std::size_t writes, std::size_t size) {
        std::vector<std::byte>& half = halves[writes % 2];
        if (half.size() < size) half = std::vector<std::byte>(size);
        return {half.data(), size};
    }
};
thread_local Scratch scratch;

// What an encoder decodes to see what a lossy stage left of a payload, by each thread.
struct Trial {
    Scratch between;
    std::vector<std::byte> outcome;
};
thread_local Trial trial;

SerdeObject object_of(const FrameHeader& served, std::span<const std::byte, kChunkHashBytes> chunk_hash,
                      std::span<const std::byte> earlier) {
    return {{reinterpret_cast<const std::byte*>(served.name_space), served.namespace_bytes},
            std::span<const std::byte, kDigestBytes>(reinterpret_cast<const std::byte*>(served.namespace_digest),
                                                     kDigestBytes),
            chunk_hash,
            earlier};
}

std::span<const std::byte, kDigestBytes> digest_of(const FrameHeader& header) {
    return std::span<const std::byte, kDigestBytes>(reinterpret_cast<const std::byte*>(header.namespace_digest),
                                                    kDigestBytes);
}

bool has_checksum(std::span<const std::byte> payload, const std::uint8_t (&expected)[kChecksumBytes]) {
    return std::memcmp(payload_checksum(payload).data(), expected, kChecksumBytes) == 0;
}

using Stages = std::span<const std::shared_ptr<const SerdeStage>>;

// Serde parameters of a header whose checksum holds. The spans of `views` are those of the header. `expected` is the
// checksum of what is decoded.
SerdeFault parse(const FrameHeader& header, Stages stages, std::size_t lossy_end, std::size_t payload_capacity,
                 Prologue& prologue, std::vector<StageView>& views, PayloadChecksum& expected) {
    const std::span<const std::byte> bytes(reinterpret_cast<const std::byte*>(header.serde_params),
                                           header.serde_params_bytes);
    if (bytes.size() < sizeof prologue) return SerdeFault::kCorrupt;
    std::memcpy(&prologue, bytes.data(), sizeof prologue);
    if (prologue.version != kParametersVersion || prologue.stages != stages.size()) return SerdeFault::kUnreadable;
    if (prologue.payload_bytes == 0 || prologue.payload_bytes > payload_capacity) return SerdeFault::kCorrupt;
    std::memcpy(expected.data(), prologue.payload_checksum, kChecksumBytes);
    std::size_t at = sizeof prologue;
    std::size_t size = prologue.payload_bytes;
    for (const auto& stage : stages) {
        StageRecord record;
        if (bytes.size() - at < sizeof record) return SerdeFault::kCorrupt;
        const std::span<const std::byte> earlier = bytes.first(at);
        std::memcpy(&record, bytes.data() + at, sizeof record);
        at += sizeof record;
        const bool is_unchanged = (record.flags & kUnchanged) != 0;
        if (is_unchanged && !stage->may_leave_source()) return SerdeFault::kCorrupt;
        if (record.flags > kUnchanged || record.parameter_bytes > bytes.size() - at) return SerdeFault::kCorrupt;
        if (is_unchanged ? record.encoded_bytes != size : record.encoded_bytes > stage->max_encoded_bytes(size))
            return SerdeFault::kCorrupt;
        std::size_t own_bytes = record.parameter_bytes;
        if (views.size() + 1 == lossy_end) {
            if (own_bytes < kChecksumBytes) return SerdeFault::kCorrupt;
            own_bytes -= kChecksumBytes;
            std::memcpy(expected.data(), bytes.data() + at + own_bytes, kChecksumBytes);
        }
        views.push_back({size, record.encoded_bytes, is_unchanged, earlier, bytes.subspan(at, own_bytes)});
        at += record.parameter_bytes;
        size = record.encoded_bytes;
    }
    return at == bytes.size() && size == header.payload_bytes ? SerdeFault::kNone : SerdeFault::kCorrupt;
}

// Decodes `current` through the stages of `views`, the last one first.
SerdeFault undo(Stages stages, std::span<const StageView> views, std::span<const std::byte> current,
                std::span<std::byte> payload, const FrameHeader& served,
                std::span<const std::byte, kChunkHashBytes> chunk_hash, Scratch& between) {
    const auto is_changed = [](const StageView& view) { return !view.is_unchanged; };
    const std::size_t first = std::ranges::find_if(views, is_changed) - views.begin();  // its outcome is the payload
    std::size_t writes = 0;
    for (std::size_t i = views.size(); i-- > 0;) {
        const StageView& view = views[i];
        if (view.is_unchanged) continue;
        const std::span<std::byte> target = i == first ? payload : between.half(writes++, view.source_bytes);
        const SerdeFault fault =
            stages[i]->decode(current, target, object_of(served, chunk_hash, view.earlier), view.parameters);
        if (fault != SerdeFault::kNone) return fault;
        current = target;
    }
    if (first == views.size()) std::memcpy(payload.data(), current.data(), payload.size());
    return SerdeFault::kNone;
}

// Completes the frame of a payload of that size.
SerdeResult seal(std::span<std::byte> destination, FrameHeader stored,
                 std::span<const std::byte, kChunkHashBytes> chunk_hash, std::size_t payload_bytes,
                 std::span<const std::byte> parameters) {
    const std::uint64_t end = kFrameHeaderBytes + payload_bytes;
    const std::uint64_t frame_bytes = round_up<std::uint64_t>(end, kFrameAlignBytes);
    if (frame_bytes > destination.size()) return {SerdeFault::kFailed};
    std::memset(destination.data() + end, 0, frame_bytes - end);  // nobody's previous bytes go to a tier
    stored.payload_bytes = payload_bytes;
    stored.serde_params_bytes = static_cast<std::uint32_t>(parameters.size());
    std::memcpy(stored.serde_params, parameters.data(), parameters.size());
    frame_seal(destination.data(), stored, chunk_hash);
    return {SerdeFault::kNone, frame_bytes};
}

}  // namespace

const char* serde_fault_name(SerdeFault fault) {
    switch (fault) {
        case SerdeFault::kNone:
            return "";
        case SerdeFault::kCorrupt:
            return "corrupt";
        case SerdeFault::kUnreadable:
            return "unreadable";
        case SerdeFault::kFailed:
            return "failed";
    }
    return "";
}

SerdeChain::SerdeChain(std::string name, std::vector<std::shared_ptr<const SerdeStage>> stages)
    : name_(std::move(name)), stages_(std::move(stages)) {
    if (name_.empty() || name_.size() > kMaxSerdeNameBytes)
        throw std::invalid_argument("the name of a serde must have 1 to 32 bytes");
    if (stages_.empty() || stages_.size() > kMaxSerdeStages)
        throw std::invalid_argument("a serde must have 1 to 8 stages");
    for (std::size_t i = 0; i < stages_.size(); ++i) {
        if (stages_[i]->is_lossy()) lossy_end_ = i + 1;
    }
}

std::uint64_t SerdeChain::max_frame_bytes(std::uint64_t served_frame_bytes) const {
    std::size_t size = served_frame_bytes - std::min<std::uint64_t>(served_frame_bytes, kFrameHeaderBytes);
    std::size_t largest = size;
    for (const auto& stage : stages_) largest = std::max(largest, size = stage->max_encoded_bytes(size));
    return round_up<std::uint64_t>(kFrameHeaderBytes + largest, kFrameAlignBytes);
}

SerdeResult SerdeChain::encode(std::span<const std::byte> source, std::span<std::byte> destination,
                               const SerdeTemplates& templates,
                               std::span<const std::byte, kChunkHashBytes> chunk_hash) const {
    if (source.size() < kFrameHeaderBytes || destination.size() < kFrameHeaderBytes) return {SerdeFault::kFailed};
    FrameHeader served;
    std::memcpy(&served, source.data(), sizeof served);
    const auto digest = digest_of(templates.served);
    if (frame_check_header(served, source.size() - kFrameHeaderBytes, digest, chunk_hash) != FrameFault::kNone ||
        served.serde[0] != 0 || served.payload_bytes == 0)
        return {SerdeFault::kCorrupt};
    std::span<const std::byte> current = source.subspan(kFrameHeaderBytes, served.payload_bytes);
    if (lossy_end_ != 0 && !has_checksum(current, served.payload_checksum)) return {SerdeFault::kCorrupt};
    const std::span<std::byte> payload = destination.subspan(kFrameHeaderBytes);
    Prologue prologue{kParametersVersion, static_cast<std::uint32_t>(stages_.size()), served.payload_bytes, {}};
    std::memcpy(prologue.payload_checksum, served.payload_checksum, kChecksumBytes);
    std::vector<std::byte> parameters, own;
    parameters.reserve(kMaxSerdeParamsBytes);  // never more: views of it stay
    std::vector<StageView> views;
    std::size_t writes = 0;
    append(parameters, prologue);
    for (std::size_t i = 0; i < stages_.size(); ++i) {
        const std::size_t limit = stages_[i]->max_encoded_bytes(current.size());
        const bool is_last = i + 1 == stages_.size();
        if (is_last && limit > payload.size()) return {SerdeFault::kFailed};
        const std::span<std::byte> target = is_last ? payload.first(limit) : scratch.half(writes, limit);
        const std::size_t source_bytes = current.size();
        own.clear();
        const auto written = stages_[i]->encode(current, target, object_of(served, chunk_hash, parameters), own);
        if (written.value_or(0) > limit) return {SerdeFault::kFailed};
        if (!written && !stages_[i]->may_leave_source()) return {SerdeFault::kFailed};
        if (!written) own.clear();
        if (written) {
            current = target.first(*written);
            ++writes;
        }
        if (i < lossy_end_) views.push_back({source_bytes, current.size(), !written, parameters, own});
        if (i + 1 == lossy_end_) {
            trial.outcome.resize(served.payload_bytes);
            if (undo(stages_, views, current, trial.outcome, served, chunk_hash, trial.between) != SerdeFault::kNone)
                return {SerdeFault::kFailed};
            append(own, payload_checksum(trial.outcome));
        }
        if (parameters.size() + sizeof(StageRecord) + own.size() > kMaxSerdeParamsBytes) return {SerdeFault::kFailed};
        append(parameters,
               StageRecord{current.size(), written ? 0 : kUnchanged, static_cast<std::uint32_t>(own.size())});
        parameters.insert(parameters.end(), own.begin(), own.end());
        if (i < lossy_end_) views.back().parameters = std::span(parameters).last(own.size());  // `own` changes
    }
    if (current.size() > payload.size()) return {SerdeFault::kFailed};
    if (current.data() != payload.data()) std::memcpy(payload.data(), current.data(), current.size());
    return seal(destination, templates.stored, chunk_hash, current.size(), parameters);
}

SerdeResult SerdeChain::decode(std::span<const std::byte> source, std::span<std::byte> destination,
                               const SerdeTemplates& templates,
                               std::span<const std::byte, kChunkHashBytes> chunk_hash) const {
    if (destination.size() < kFrameHeaderBytes) return {SerdeFault::kFailed};
    frame_invalidate(destination.data());
    if (frame_verify(source.data(), source.size(), digest_of(templates.stored), chunk_hash) != FrameFault::kNone)
        return {SerdeFault::kCorrupt};
    FrameHeader stored;
    std::memcpy(&stored, source.data(), sizeof stored);
    if (std::memcmp(stored.serde, templates.stored.serde, sizeof stored.serde) != 0) return {SerdeFault::kUnreadable};
    Prologue prologue;
    std::vector<StageView> views;
    PayloadChecksum expected;
    const SerdeFault refused =
        parse(stored, stages_, lossy_end_, destination.size() - kFrameHeaderBytes, prologue, views, expected);
    if (refused != SerdeFault::kNone) return {refused};
    const std::span<std::byte> payload = destination.subspan(kFrameHeaderBytes, prologue.payload_bytes);
    const SerdeFault fault = undo(stages_, views, source.subspan(kFrameHeaderBytes, stored.payload_bytes), payload,
                                  templates.served, chunk_hash, scratch);
    if (fault != SerdeFault::kNone) return {fault};
    const PayloadChecksum found = payload_checksum(payload);
    if (found != expected) return {SerdeFault::kCorrupt};
    FrameHeader served = templates.served;
    served.payload_bytes = prologue.payload_bytes;
    frame_publish(destination.data(), served, chunk_hash, found);
    return {SerdeFault::kNone, kFrameHeaderBytes + prologue.payload_bytes};
}

}  // namespace lmcache
